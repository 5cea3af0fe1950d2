"""What a record offers in an editor and a notebook: its own names, a chart, files."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from pkgutil import resolve_name

import pytest

import fivefold as ff
from fivefold.api.job_words import JobWords
from fivefold.results.search_result import SearchResult
from fivefold.step import Step

NAMED = re.compile(r'"(fivefold(?:\.\w+)+:\w+)"')


@pytest.fixture(scope="module")
def step() -> Step:
    return ff.predict("nano", "h100:2", "dp2", gbs=8)


@pytest.fixture(scope="module")
def search_result() -> SearchResult:
    return ff.search("nano", "h100:2", gbs=8, where="dp=2 ac=none mbs=1 order=default", front=2)


def test_fields_of_a_record_do_not_clash_with_methods(step: Step) -> None:
    names = set(dir(step))
    assert set(Step.model_fields) | {"to_frame", "plot", "save", "replace"} <= names
    assert not {name for name in names if name.startswith(("model_", "_")) or name in ("dict", "json", "copy")}
    assert {"fits", "peak_bytes"} <= set(dir(step.memory))


def test_help_shows_the_options_of_a_job_with_their_types() -> None:
    parameters = inspect.signature(ff.predict).parameters
    assert parameters["seq"].annotation == "int | None"
    assert parameters["seq"].kind is inspect.Parameter.KEYWORD_ONLY
    assert {"stack", "gbs", "precision", "adapter", "attention"} <= set(parameters)
    assert {"seq", "gbs"} <= set(JobWords.__annotations__)


def test_the_functions_that_records_name_exist() -> None:
    names = {name for file in Path(ff.__file__).parent.rglob("*.py") for name in NAMED.findall(file.read_text())}
    assert len(names) > 10
    for name in names:
        assert callable(resolve_name(name)), name


def test_records_are_saved_as_html_and_json(step: Step, search_result: SearchResult, tmp_path: Path) -> None:
    for record in (step, search_result):
        record.save(tmp_path / "x.html")
        page = (tmp_path / "x.html").read_text()
        assert page.startswith("<!doctype html>")
        assert step.layout in page
        record.save(str(tmp_path / "x.json"))
        assert type(record).model_validate_json((tmp_path / "x.json").read_text()) == record
    assert json.loads((tmp_path / "x.json").read_text())["by"] == "time"
    with pytest.raises(ff.UserError, match=r"saved as \.html, \.json, \.svg, \.png or \.pdf, not \.txt"):
        step.save(tmp_path / "x.txt")
    with pytest.raises(ff.UserError, match="there is no folder"):
        step.save(tmp_path / "none" / "x.json")


@pytest.mark.slow
def test_records_are_drawn_as_charts_and_saved_as_svg_and_png(
    step: Step, search_result: SearchResult, tmp_path: Path
) -> None:
    pytest.importorskip("altair", reason="charts need the extra show")
    comparison = ff.compare("nano", "h100:2", "dp2", "tp2", gbs=8)
    for record in (step, search_result, comparison):
        record.save(tmp_path / "x.svg")
        assert (tmp_path / "x.svg").read_text().startswith("<svg")
        record.save(tmp_path / "x.png")
        assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    assert "<img" in search_result.plot()._repr_html_()
    for record in (step, search_result, comparison):
        record.plot().save(str(tmp_path / "y.svg"))
        assert (tmp_path / "y.svg").read_text().startswith("<svg")
    walk = ff.walk("nano", "h100:2", "dp2", gbs=8)
    with pytest.raises(ff.UserError, match="Walk has no chart"):
        walk.plot()


def test_rows_and_dry_runs_are_saved_as_records_are(tmp_path: Path) -> None:
    rows = ff.ask("changes", "nano", "h100:2", "dp2", gbs=8)
    rows.save(tmp_path / "x.json")
    saved = json.loads((tmp_path / "x.json").read_text())
    assert [type(rows[0]).model_validate(values) for values in saved] == [*rows]
    rows.save(tmp_path / "x.html")
    assert rows[0].change in (tmp_path / "x.html").read_text()
    with pytest.raises(ff.UserError, match="rows have no chart"):
        rows.save(tmp_path / "x.svg")
    dry_run = ff.dryrun("nano", "h100:2", "dp2", gbs=8, seq=64)
    dry_run.save(tmp_path / "y.json")
    assert Step.model_validate_json((tmp_path / "y.json").read_text()) == dry_run.step
    dry_run.save(tmp_path / "y.html")
    assert dry_run.step.layout in (tmp_path / "y.html").read_text()
    assert len(dry_run.to_frame("arrow")) == 1
    with pytest.raises(ff.UserError, match="the dry run has no step: rank 0 waits"):
        dry_run._replace(step=None, findings=("rank 0 waits",)).plot()


def test_completion_offers_the_functions_of_the_package_only() -> None:
    assert {"predict", "search", "ask", "load", "UserError", "__version__"} <= set(dir(ff))
    assert not {"Any", "annotations", "TYPE_CHECKING", "record", "display"} & set(dir(ff))
