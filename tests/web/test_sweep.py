from __future__ import annotations

import re
from html import unescape
from pathlib import Path

import pytest
from starlette.testclient import TestClient

import fivefold
from fivefold.layout.spec import Layout
from fivefold.results.sweep_row import SweepRow, columns_from_layout, columns_from_step
from fivefold.sweeps.rows_file import write
from fivefold.units import show_seconds
from fivefold.web.app import create
from fivefold.web.pages.sweep import REACH
from tests.selection import mark_share

JOB = {"machine": "h100", "ranks": 8, "sequence": 4096, "batch": 16, "precision": "bf16", "stack": "fivefold"}


def row(model: str, text: str) -> SweepRow:
    """A predicted row, as a sweep writes it."""
    step, layout = fivefold.predict(model, "h100:8", text, gbs=16), Layout.parse(text)
    status = "fits" if step.memory.fits else "memory"
    return SweepRow.model_validate(
        {"model": model, **JOB, "status": status, **columns_from_layout(layout), **columns_from_step(step)}
    )


@pytest.fixture(scope="module")
def rows() -> list[SweepRow]:
    results = [row("llama3-8b", text) for text in ("dp8", "dp4 tp2", "dp2 tp4", "dp4 pp2", "tp2 pp4")]
    invalid = {"status": "invalid", "why": "no", "layout": "dp3", "recomputation": "none"}
    return [*results, SweepRow.model_validate({"model": "llama3-8b", **JOB, **invalid})]


@pytest.mark.slow
@pytest.mark.parametrize("name", mark_share(3, ["rows.csv", "rows.jsonl", "rows.parquet"]))
def test_a_sweep_is_shown_and_leads_to_its_plans(tmp_path: Path, rows: list[SweepRow], name: str) -> None:
    write(rows, tmp_path / name)
    with TestClient(create(tmp_path, local=tmp_path / "none"), base_url="http://127.0.0.1:1") as client:
        assert f"file={name}" in client.get("/sweep").text
        page = client.get("/sweep", params={"file": name}).text
        fitting = [row for row in rows if row.status == "fits"]
        assert f"{len(rows)} rows, {len(fitting)} fit, 1 not possible" in page
        assert "sequence 4096" in page  # what the rows have in common
        best = max(row.mfu_causal or 0 for row in fitting)
        assert 'class="h8"' in page
        assert f"{best:.1%}" in page
        reach = REACH * max(row.peak_bytes or 0 for row in fitting)
        near = [row for row in rows if row.peak_bytes is not None and row.peak_bytes <= reach]
        assert len(near) > len(fitting)
        assert page.count('class="dot"') + page.count('class="dot over"') == len(near) + 2  # and two in the legend
        links = {unescape(link) for link in re.findall(r'<td class="code"><a href="([^"]+)"', page)}
        assert len(links) == len(fitting)
        plans = "".join(client.get(link).text for link in links)
        assert [row.layout for row in fitting if show_seconds(row.step_seconds or 0) not in plans] == []


@pytest.mark.slow
def test_invalid_sweep_is_a_one_line_error(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a,b\n1,2\n")
    (tmp_path / "b.parquet").write_bytes(b"nothing")
    (tmp_path / "c.jsonl").write_text("{")
    with TestClient(create(tmp_path, local=tmp_path / "none"), base_url="http://127.0.0.1:1") as client:
        for name in ("a.csv", "b.parquet", "c.jsonl", "d.csv", "e.txt", "../x.csv", "\x00.csv"):
            answer = client.get("/sweep", params={"file": name})
            assert answer.status_code == 200, name
            assert 'role="alert"' in answer.text or "0 rows" in answer.text, name
