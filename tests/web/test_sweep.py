from __future__ import annotations

import json
import re
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

import fivefold
from fivefold.errors import StopSignal, UserError
from fivefold.layout.spec import Layout
from fivefold.results.sweep_row import SweepRow, list_layout_columns, list_step_columns
from fivefold.sweeps.rows_file import read, write
from fivefold.sweeps.spec import Sweep
from fivefold.units import show_seconds
from fivefold.web import worker
from fivefold.web.app import create
from fivefold.web.pages.sweep import REACH
from tests.selection import mark_share
from tests.web.browser import NEEDS_CHROMIUM, is_within_window, list_violations

JOB = {"machine": "h100", "ranks": 8, "sequence": 4096, "batch": 16, "precision": "bf16", "stack": "fivefold"}


def row(model: str, text: str) -> SweepRow:
    """A predicted row, as a sweep writes it."""
    step, layout = fivefold.predict(model, "h100:8", text, gbs=16), Layout.parse(text)
    status = "fits" if step.memory.fits else "memory"
    return SweepRow.model_validate(
        {"model": model, **JOB, "status": status, **list_layout_columns(layout), **list_step_columns(step)}
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


SMALL = {
    "model": "nano",
    "machine": "h100:2",
    "gbs": 8,
    "layouts": ["dp* tp{1,2} zero{0,1} mbs1"],
    "rows": "rows.jsonl",
}


def start(folder: Path, report: Any = lambda *_: None, **changes: Any) -> Any:
    """Run a sweep as the page's process does."""
    return worker.sweep({"question": SMALL | changes, "root": str(folder), "local": "none"}, report)


def test_a_stopped_sweep_keeps_its_rows_and_goes_on(tmp_path: Path) -> None:
    def stop(done: int, total: int, doing: str = "") -> None:
        assert total == 4
        if done == 2:
            raise StopSignal("SIGINT")

    assert start(tmp_path, stop) == {"file": "rows.jsonl", "rows": 2, "stopped": True}
    assert len(read(tmp_path / "rows.jsonl")) == 2
    reported: list[int] = []
    assert start(tmp_path, lambda done, *_: reported.append(done)) == {
        "file": "rows.jsonl", "rows": 4, "stopped": False,
    }  # fmt: skip
    rows = read(tmp_path / "rows.jsonl")
    assert [row.layout for row in rows] == [
        "dp2 zero0 mbs1", "dp2 zero1 mbs1", "dp1 tp2 zero0 mbs1", "dp1 tp2 zero1 mbs1"
    ]  # fmt: skip
    step = fivefold.predict("nano", "h100:2", "dp2 zero1 mbs1", gbs=8)
    assert rows[1].step_seconds == step.time.step_seconds
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]
    with pytest.raises(UserError, match="already exists"):
        start(tmp_path)


def test_a_sweep_tells_its_rows_as_they_finish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row before the next report; those of a journal too; two texts of one layout are one row."""
    events: list[dict[str, Any]] = []
    monkeypatch.setattr(worker, "write_event", lambda **event: events.append(event))
    monkeypatch.setattr(worker, "EVERY_SECONDS", 0.0)
    layouts = ["dp* tp{1,2} zero{0,1} mbs1", "zero1 dp2 mbs1"]
    start(tmp_path, worker.ProgressReporter(), layouts=layouts)
    told = [SweepRow(**row) for event in events for row in event.get("finds", ())]
    assert told == read(tmp_path / "rows.jsonl")
    assert [next(iter(event)) for event in events] == ["progress", "finds"] * 4 + ["progress"]


def test_the_page_shows_the_best_rows_so_far_with_the_job_of_the_question(client: TestClient, folder: Path) -> None:
    asked = SMALL | {"rows": "streamed.jsonl", "optimizer": "muon"}
    text = client.get("/sweep/events", params=asked).text
    events = re.findall(r"event: (\w+)\ndata: (.*)\n", text)
    names = [name for name, _ in events]
    assert names.index("sketch") < names.index("found") == len(names) - 1
    rows = read(folder / "streamed.jsonl")
    for name in ("sketch", "found"):
        shown = json.loads(events[names.index(name)][1])
        links = re.findall(r'<td class="code"><a href="([^"]+)"', shown)
        assert 0 < len(links) <= len(rows)
        assert all("optimizer=muon" in link for link in links)
    assert "4 of 4 rows fit" in shown
    best = max(rows, key=lambda row: row.mfu_causal or 0.0)
    assert shown.index(f">{best.layout}<") == min(shown.index(f">{row.layout}<") for row in rows)
    assert show_seconds(best.step_seconds or 0.0) in client.get(unescape(links[0])).text


def test_a_sweep_without_a_batch_has_one_sequence_per_gpu(tmp_path: Path) -> None:
    start(tmp_path, gbs=None, machine="h100:16", ranks=["8,16"], layouts=["dp* mbs1"])
    assert [(row.ranks, row.batch, row.status) for row in read(tmp_path / "rows.jsonl")] == [
        (8, 16, "fits"), (16, 16, "fits")
    ]  # fmt: skip
    (tmp_path / "sweep.toml").write_text('models = ["nano"]\nmachines = ["h100:64"]\nlayouts = ["dp*"]\n')
    assert [row.batch for row in fivefold.sweep(tmp_path / "sweep.toml", out=tmp_path / "rows.csv")] == [64]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rows": "../rows.jsonl"}, "outside of the folder"),
        ({"rows": "rows.txt"}, "rows are written as"),
        ({"models": ["../own.toml"]}, "outside of the folder"),
        ({"layouts": ["dp3"]}, "matches none of the numbers of ranks"),
        ({"precisions": ["bf61"]}, "did you mean"),
        ({"layers": 3}, "a sweep takes names of models"),
        ({"stacks": ["torchtitan"], "stack": "ddp"}, "keep one"),
    ],
)
def test_a_sweep_that_cannot_be_is_a_one_line_error(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        start(tmp_path, **changes)
    assert [*tmp_path.iterdir()] == []


def test_the_page_saves_the_sweep_as_the_command_reads_it(client: TestClient, tmp_path: Path) -> None:
    asked = SMALL | {"sequences": ["512, 1024"], "optimizer": "muon", "machines": ["a100:2"]}
    text = client.get("/sweep/file", params=asked).text
    (tmp_path / "sweep.toml").write_text(text, encoding="utf-8")
    sweep = Sweep.load(tmp_path / "sweep.toml")
    assert (sweep.machines, sweep.sequences) == (("h100:2", "a100:2"), (512, 1024))
    assert sweep.job == {"global_batch": 8, "optimizer": {"kind": "muon"}}


def test_another_site_starts_no_sweep(client: TestClient, folder: Path) -> None:
    headers = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
    answer = client.get("/sweep/start", params=SMALL | {"run": "1"}, headers=headers, follow_redirects=False)
    assert answer.is_redirect
    assert "run=" not in answer.headers["location"]
    assert client.get("/sweep/events", params=SMALL, headers=headers).status_code == 422
    assert not (folder / "rows.jsonl").exists()


@pytest.mark.long  # the next test starts one; test_pages.py stops a search
@NEEDS_CHROMIUM
def test_a_running_sweep_shows_rows_and_stop_keeps_them(page: Any, folder: Path) -> None:
    """It has 4,608 rows, of which the first are shown long before the last are predicted."""
    expect = pytest.importorskip("playwright.sync_api").expect
    asked = (
        "model=llama3.2-1b&machine=h100:512&gbs=1024&ranks=64,128,256,512&precisions=bf16,fp8"
        "&layouts=dp*+tp{1,2,4,8}+pp{1,2,4,8}+zero{0,1,2,3}+mbs{1,2,4}&recomputations=none,selective,full"
    )
    page.goto(f"/sweep/start?{asked}&rows=stopped.csv&run=1")
    rows = page.get_by_role("region", name="best rows").locator("tbody tr")
    expect(rows.first).to_be_visible()
    expect(page.locator("#going")).to_be_visible()
    page.get_by_role("button", name="Stop").click()
    expect(page.locator("#answer")).to_contain_text(re.compile(r"Stopped after [\d,]+ rows, which are in stopped.csv"))
    expect(rows.first).to_be_visible()
    kept = re.search(r"Stopped after ([\d,]+) rows", page.locator("#answer").inner_text())
    assert kept is not None
    assert len(read(folder / "stopped.csv")) == int(kept[1].replace(",", ""))
    assert list_violations(page) == []
    page.set_viewport_size({"width": 390, "height": 800})
    assert is_within_window(page)


@NEEDS_CHROMIUM
def test_a_sweep_is_started_on_the_page(page: Any, folder: Path) -> None:
    expect = pytest.importorskip("playwright.sync_api").expect
    page.goto("/sweep")
    page.get_by_role("link", name="Start a sweep").click()
    page.wait_for_url("**/sweep/start*")
    page.locator("input[name=model]").fill("nano")
    page.locator("input[name=machine]").fill("h100:2")
    page.locator("input[name=gbs]").fill("8")
    page.get_by_label("layouts, or the best of a search 1").fill("dp* tp{1,2} mbs1")
    page.get_by_label("file for the rows").fill("started.csv")
    page.get_by_role("button", name="Start").click()
    expect(page.locator("#answer")).to_contain_text("2 rows are in started.csv")
    assert list_violations(page) == []
    page.set_viewport_size({"width": 390, "height": 800})
    assert is_within_window(page)
    page.get_by_role("link", name="Show the rows").click()
    expect(page.locator("#rows tbody tr")).to_have_count(2)
    page.go_back()
    expect(page.get_by_role("alert")).to_contain_text("started.csv already exists")
