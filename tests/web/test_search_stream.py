"""A search tells which layouts fit while it runs; the page shows the best of them, and draws all at the end."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the page needs the extra web")

from starlette.testclient import TestClient

from fivefold.layout.spec import Layout
from fivefold.web import worker
from fivefold.web.folder import ServedFolder
from fivefold.web.pages.search import FOUND, Fit, draw_choices, render_best, render_result
from fivefold.web.pages.search import SearchPage as Page
from fivefold.web.site import WebServer

ASKED: dict[str, Any] = {"model": "nano", "machine": "h100:4", "gbs": 16, "where": "cp=1 ac=none order=default mbs<=2"}


@pytest.fixture(scope="module")
def streamed_search(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Fit], Any]:
    """The layouts that a search sent as they were evaluated, and its result."""
    folder = tmp_path_factory.mktemp("search")
    progress = worker.ProgressReporter()
    sent: list[Fit] = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(worker, "write_event", lambda **event: sent.extend(Fit(*fit) for fit in event.get("finds", ())))
        request = {"question": ASKED | {"front": 4}, "root": str(folder), "local": "none"}
        result = worker.search(request, progress)
        progress.send_finds()
    return sorted(sent), FOUND.validate_python(json.loads(json.dumps(result)))


@pytest.mark.slow
def test_every_layout_that_fits_is_sent_once(streamed_search: tuple[list[Fit], Any]) -> None:
    fits, result = streamed_search
    assert len({(fit.layout, fit.precision, fit.reduce) for fit in fits}) == len(fits) > 4
    known = {(fit.layout, fit.reduce): fit for fit in fits}
    for ranked in result.best:
        fit = known[ranked.step.layout, ranked.reduce]
        assert (fit.seconds, fit.peak_bytes) == (ranked.step.time.step_seconds, ranked.step.memory.peak_bytes)
    assert min(fit.seconds for fit in fits) == result.best[0].step.time.step_seconds


def test_the_search_page_draws_the_best_layouts_first_and_then_all(
    streamed_search: tuple[list[Fit], Any], tmp_path: Path
) -> None:
    fits, result = streamed_search
    page = Page(**ASKED)
    sketch = render_best(page, fits)
    assert f"of {len(fits)} layouts that fit" in sketch
    assert [fit.layout in sketch for fit in fits[:3]] == [True] * 3
    site = WebServer(tmp_path, local=tmp_path / "none.toml")
    assert isinstance(site.folder, ServedFolder)
    text = render_result(site, page, result, fits)
    assert f"all {len(fits)} evaluated layouts that fit" in text
    assert text.count('class="dot') >= len({(fit.layout, fit.reduce == "step") for fit in fits})
    assert "The best layout is" not in text
    assert text.count("90 % interval") > 1, "the proposal's time and memory have their uncertainty"
    assert "The best layout is within 1.4 % of the best" in render_result(site, page, result.replace(gap=0.0131), fits)
    few = render_result(site, page, result, fits * 100)
    assert "the best 400 of" in few


def test_lines_of_the_parallel_coordinates_cross_each_axis_at_their_choice(
    streamed_search: tuple[list[Fit], Any],
) -> None:
    fits, _ = streamed_search
    drawn = draw_choices(Page(**ASKED), fits)
    names = re.findall(r'y="100%" dy="18"[^>]*>([^<]+)<', drawn)
    assert {"pp", "dp", "zero"} <= set(names)
    assert "cp" not in names  # all layouts have the same
    assert [name for name in names if name.startswith(("memory", "time"))] == names[-2:]
    lines = re.findall(r'<path d="M([^"]+)"[^>]*data-tip="([^"\n]+)', drawn)
    assert len(lines) == len(fits)
    heights = {text: [float(point.split()[1]) for point in path.split("L")] for path, text in lines}
    axis = names.index("pp")
    degrees = sorted({Layout.parse(text).pp for text in heights})
    for text, height in heights.items():
        place = degrees.index(Layout.parse(text).pp) / (len(degrees) - 1)
        assert height[axis] == pytest.approx(1000 * (1 - place), abs=0.1)
    times = [float(path.split()[-1]) for path, _ in lines]  # the fastest is drawn last, and lowest
    assert times == sorted(times)


def test_few_layouts_have_no_lines(streamed_search: tuple[list[Fit], Any]) -> None:
    fits, _ = streamed_search
    assert draw_choices(Page(**ASKED), fits[:1]) == ""
    assert draw_choices(Page(**ASKED), []) == ""


def test_a_run_is_searched_on_the_page_with_its_defaults(client: TestClient) -> None:
    run = {"model": "nano", "machine": "h100:1", "machines": "a100:1", "tokens": "1e9", "gbs": 8, "where": "ac=none"}
    text = client.get("/search/events", params=run).text
    assert "the run on each machine" in text
    assert "`fivefold" not in text  # a page names pages
    assert "“layouts to show”: valid for a search of one machine" in _read_mistake(client, run | {"top": 5})


def _read_mistake(client: TestClient, params: dict[str, Any]) -> str:
    event = client.get("/search/events", params=params).text.split("event: mistake\ndata: ")[1]
    return str(json.loads(event))
