"""What commands have written comes back as what it was; what a notebook shows stands for itself."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import fivefold as ff
from fivefold import display
from fivefold.display import Rows
from fivefold.profiling.closed_loop import write_steps
from fivefold.results.run_folder import RunFolder
from fivefold.results.sweep_row import SweepRow
from fivefold.step import Step
from fivefold.sweeps import rows_file
from fivefold.units import show_seconds
from tests.api.standalone import check_standalone


@pytest.fixture(scope="module")
def step() -> Step:
    return ff.predict("llama3-8b", "h100:8", "dp2 tp2 pp2 zero1 mbs1", seq=2048, gbs=16)


@pytest.fixture
def run(step: Step, tmp_path: Path) -> Path:
    """A folder as ``train`` leaves it; the run takes a tenth longer than it was predicted to."""
    time = step.time
    parts = {"attention.core backward": time.step_seconds * 1.1}
    slower = time.replace(step_seconds=time.step_seconds * 1.1, compute_seconds=time.compute_seconds * 1.1, parts=parts)
    measured = step.replace(kind="measured", time=slower, findings=("straggler: rank <1>",))
    write_steps(tmp_path / "step.json", step, measured)
    (tmp_path / "log.jsonl").write_text('{"step": 1, "loss": 5.5}\n{"step": 2, "loss": 5.0}\n')
    return tmp_path


@pytest.mark.slow
def test_notebook_output_of_records_is_self_contained_html(step: Step, run: Path) -> None:
    search = ff.search("nano", "h100:2", gbs=8)
    rows = ff.sweep({"models": ["nano"], "machines": ["h100:2"], "layouts": ["dp2", "best 3"]})
    for what in (step, ff.load(run), search, rows, ff.ask("changes", "nano", "h100:2", "dp2", gbs=8)):
        text = what._repr_html_()
        check_standalone(text)
        assert len(repr(what)) < 250


def test_a_step_in_a_notebook_shows_its_figures(step: Step) -> None:
    text = step._repr_html_()
    for figure in ("step time", "stage 1", "exposed tp communication", f"{step.mfu.causal:.1%}", "dp2 tp2 pp2 zero1"):
        assert figure in text


def test_notebook_output_is_readable_without_its_stylesheet(step: Step) -> None:
    """Jupyter and code hosts take sheets and SVG out of notebooks that others have executed."""
    text = re.sub(r"<style>.*?</style>", "", step._repr_html_(), flags=re.DOTALL)
    assert show_seconds(step.time.step_seconds) in re.sub(r"<[^>]+>", "", text)
    assert "display:inline-block;height:22px;width:" in text  # the bars
    rows = ff.sweep({"models": ["nano"], "machines": ["h100:2"], "layouts": ["dp2 mbs{1,2,4}"]})
    search = ff.search("nano", "h100:2", gbs=8, front=4)
    for what, points in ((rows, sum(row.status == "fits" for row in rows)), (search, len(search.front))):
        text = what._repr_html_()
        assert "<svg" not in text
        (picture,) = re.findall(r'<img src="data:image/svg\+xml;base64,([^"]+)"', text)
        drawn = ElementTree.fromstring(base64.b64decode(picture))
        assert len(drawn.findall(".//{*}circle")) == points > 1


def test_a_saved_run_is_loaded_unchanged(run: Path, step: Step) -> None:
    result = ff.load(run)
    assert isinstance(result, RunFolder)
    assert result == ff.load(run / "step.json")
    assert (result.predicted, result.measured.kind, result.dry_run) == (step, "measured", None)
    assert "predicted -9.1%" in repr(result)
    assert [line["loss"] for line in result.log] == [5.5, 5.0]
    text = result._repr_html_()
    assert "Predicted next to measured" in text
    assert "exact" in text
    assert result.to_frame("arrow").column("loss").to_pylist() == [5.5, 5.0]


@pytest.mark.slow
def test_printed_json_is_loaded_unchanged(step: Step, tmp_path: Path) -> None:
    search = ff.search("nano", "h100:2", gbs=8)
    plan = ff.plan("nano", "h100:2", tokens=1e9, seq=128, gbs=8, batch="job")
    walk, offers = (
        ff.walk("nano", "h100:2", "dp2", gbs=8),
        ff.compare_machines("nano", ["h100:2", "a100:2"], tokens=1e9, gbs=8),
    )
    for name, what in (("step", step), ("search", search), ("plan", plan), ("walk", walk), ("offers", offers)):
        check_standalone(what._repr_html_())
        assert len(repr(what)) < 250
        assert what.to_frame("arrow").num_rows >= 1
        (tmp_path / f"{name}s.json").write_text(what.model_dump_json())
        assert ff.load(tmp_path / f"{name}s.json") == what
    dryrun = {"predicted": None, "dry_run": step.model_dump(mode="json"), "findings": []}
    (tmp_path / "dryrun.json").write_text(json.dumps(dryrun))
    assert ff.load(str(tmp_path / "dryrun.json")) == step


@pytest.mark.parametrize("suffix", rows_file.SUFFIXES)
def test_saved_sweep_rows_are_loaded_unchanged(suffix: str, tmp_path: Path) -> None:
    rows = ff.sweep(
        {"models": ["nano"], "machines": ["h100:2"], "layouts": ["dp2", "dp2 mbs3"]}, out=tmp_path / f"r{suffix}"
    )
    assert ff.load(tmp_path / f"r{suffix}") == rows
    assert {row.status for row in rows} == {"fits", "invalid"}


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("a.json", "{", "not valid JSON"),
        ("a.json", "{}", "is not a step, comparison, search, plan or sweep"),
        ("a.json", '{"kind": "predicted"}', "missing: model, machine"),
        ("a.jsonl", "[1]\n", "line 1 holds a list, not a table of keys"),
        ("a.csv", "a,b\n1,2\n", "row 1: "),
        ("a.parquet", "no", "cannot be read as Parquet"),
        ("a.json", "[1]", "is not a step"),
    ],
)
def test_a_file_of_another_kind_is_a_one_line_error(tmp_path: Path, name: str, text: str, line: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ff.UserError, match=re.escape(line)):
        ff.load(tmp_path / name)
    with pytest.raises(ff.UserError, match=r"has no step\.json"):
        ff.load(tmp_path)


def test_records_convert_to_data_frames(step: Step, monkeypatch: pytest.MonkeyPatch) -> None:
    frame = step.to_frame("arrow")
    assert frame.column("time.step_seconds").to_pylist() == [step.time.step_seconds]
    assert "memory.stages" not in frame.column_names

    class Pandas:
        DataFrame = dict

    real = display.import_module

    def hide_packages(*missing: str) -> Callable[[str], Any]:
        def fake(name: str) -> Any:
            if name in missing:
                raise ImportError(name)
            return Pandas if name == "pandas" else real(name)

        return fake

    monkeypatch.setattr(display, "import_module", hide_packages())
    assert step.to_frame()["model"] == ["llama3-8b"]
    assert step.to_frame("arrow").num_rows == 1
    monkeypatch.setattr(display, "import_module", hide_packages("pandas", "pyarrow"))
    with pytest.raises(ff.UserError, match=r"to_frame needs pandas: pip install 'fivefold\[pandas\]', or use to_frame"):
        Rows[SweepRow]().to_frame()
    with pytest.raises(ff.UserError, match=r"to_frame needs pyarrow: pip install pyarrow"):
        step.to_frame("arrow")
