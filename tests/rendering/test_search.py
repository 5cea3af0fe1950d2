"""The page and the chart of a search."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from fivefold.errors import UserError
from fivefold.rendering import search
from fivefold.rendering.answers import list_sections
from fivefold.rendering.interval import show_change_range, show_range
from fivefold.rendering.point_charts import draw_front_file
from fivefold.rendering.sections import render_sections
from fivefold.results.search_result import Batch, Change, NearMiss, Point, Ranked, Reason, SearchResult, Walk
from fivefold.step import Step

POINTS = (
    Point(layout="dp2 zero1 mbs4", precision="bf16", world=2, memory_bytes=60 * 2**30, step_seconds=1.0),
    Point(layout="dp2 zero3 mbs1", precision="bf16", world=2, memory_bytes=30 * 2**30, step_seconds=1.5),
)
REASON = Reason(cause="memory", layouts=1234, nearest="dp2 zero0 mbs8", line="needs 91.00 GiB or more of 79.60 GiB")
MISS = NearMiss(
    layout="dp2 zero3 mbs1", needs_bytes=98 * 2**30, has_bytes=80 * 2**30, cause="head", fixes=("adamw8bit: 70 GiB",)
)


@pytest.fixture
def search_result(small: Step) -> SearchResult:
    best = (Ranked(step=small, gpu_hours=0.00456, dollars=1.25),)
    return SearchResult(by="time", best=best, front=POINTS, reasons=(REASON,), tried=2000, evaluated=7, seconds=0.5)


def empty_result(found: SearchResult) -> SearchResult:
    return found.model_copy(update={"best": (), "front": (), "misses": (MISS,)})


def print_page(page: object, width: int = 140) -> str:
    console = Console(width=width, record=True, file=StringIO())
    console.print(page)
    return console.export_text()


def test_gpu_hours_of_a_step_have_no_exponent() -> None:
    hours = (0, 7.82e-06, 0.00123, 0.4567, 12.34, 999.6, 12345.6)
    assert [*map(search.format_gpu_hours, hours)] == ["0", "< 0.001", "0.00123", "0.457", "12.3", "1,000", "12,346"]


def test_printed_ends_of_an_interval_differ() -> None:
    assert show_change_range(0.021, 0.074) == "+2% to +7%"
    assert show_change_range(0.0213, 0.0218) == "+2.1% to +2.2%"
    assert show_change_range(-0.003, 0.002) == "-0.3% to +0.2%"
    assert show_change_range(0.02, 0.02) == "+2%"
    assert show_range("6.40 s", "7.45 s") == "6.40–7.45 s"
    assert show_range("6.40 s", "6.40 s") == "6.40 s"
    assert show_range("109.50 s", "2 min 54 s") == "109.50 s–2 min 54 s"
    assert show_range("2 min 05 s", "2 min 54 s") == "2 min 05 s–2 min 54 s"


def test_the_page_has_the_best_the_front_and_the_losers(search_result: SearchResult) -> None:
    text = print_page(search.render_page(search_result))
    for said in (
        "2,000 layouts in 500.0 ms: 7 evaluated, the others excluded by bounds",
        search_result.best[0].step.layout,
        "0.00456",
        "1.25",
        "1,234",
        "needs 91.00 GiB",
    ):
        assert said in text
    assert text.index("dp2 zero1 mbs4") < text.index("dp2 zero3 mbs1")
    assert "0.0043" in print_page(
        search.render_page(search_result.replace(best=(search_result.best[0].replace(dollars=0.00431),)))
    )


def test_a_layout_with_another_reduction_frequency_is_marked(search_result: SearchResult) -> None:
    """Where that makes a difference."""
    first = search_result.best[0]
    cut = first.replace(step=first.step.replace(layout="dp8 zero2 mbs1"))
    best = (first.replace(reduce="step"), cut, cut.replace(reduce="step"))
    text = print_page(search.render_page(search_result.replace(best=best)))
    assert text.count("(--set reduce=step)") == 1


def test_the_page_of_a_search_without_a_fit_proposes_what_would_fit(search_result: SearchResult) -> None:
    text = print_page(search.render_page(empty_result(search_result)))
    assert "none fits" in text
    assert "needs 98.00 GiB of 80.00 GiB: head" in text
    assert "would fit with adamw8bit: 70 GiB" in text


def test_no_number_is_cut_on_a_narrow_terminal(search_result: SearchResult) -> None:
    text = print_page(search.render_page(search_result), width=40)
    assert "0.00456" in text
    assert "1,234" in text


def test_changes_and_batches_are_rows() -> None:
    change = Change(
        change="fp8", layout="dp2", fits=True, memory_bytes=2**30, step_seconds=0.5, faster=1.25, saved_bytes=-(2**30)
    )
    text = print_page(render_sections(list_sections("changes", [change])))
    assert "+25.0%" in text
    assert "+1.00 GiB" in text
    batch = Batch(global_batch=1024, layout="dp8", tokens=2**22, micro_batches=4, steps=10)
    assert "4.19 M" in print_page(render_sections(list_sections("batch", [batch])))


def test_nearly_equal_layouts_are_counted_and_keep_their_place(search_result: SearchResult) -> None:
    texts = ("dp2 zero1 mbs4", "dp2 zero1 mbs4 ac=norm+act", "dp2 zero1 mbs4 ac=mlp", "dp2 zero1 mbs4 ac=full")
    layouts = (
        *texts,
        "dp2 zero1 mbs4 ac=full/2",
        "dp1 pp2 v2 zero0 interleaved mbs4",
        "dp1 pp2 v4 zero0 interleaved mbs4",
    )
    best = [
        ranked.model_copy(update={"step": ranked.step.model_copy(update={"layout": text})})
        for text in layouts
        for ranked in search_result.best[:1]
    ]
    assert [place for place, _ in search.select_rows(best)] == [1, 2, 3, 4, 6]  # 3: as there would be four rows
    assert [place for place, _ in search.select_rows(best, best[6])] == [1, 2, 4, 6, 7]  # the proposed one
    assert [place for place, _ in search.select_rows([*best[:3], *best[1:3] * 3])] == [1, 2, 3, 4, 5]
    assert [place for place, _ in search.select_rows(best[4:])] == [1, 2, 3]
    assert [place for place, _ in search.select_rows([*best, *best])] == [1, 2, 3, 4, 6]
    text = " ".join(print_page(search.render_page(search_result.replace(best=tuple(best)))).split())
    assert "not shown: 2 of these 7 layouts" in text
    assert "v4" not in text
    assert "not shown" not in print_page(search.render_page(search_result))


def test_the_front_shows_points_that_save_memory(search_result: SearchResult) -> None:
    figures = ((100, 1.0), (97, 1.1), (90, 1.2), (80, 1.2), (79, 1.3), (60, 1.4))
    front = [
        search_result.front[0].replace(memory_bytes=size * 2**30, step_seconds=seconds) for size, seconds in figures
    ]
    text = print_page(search.render_page(search_result.replace(front=tuple(front))))
    shown = [f"{size}.00 GiB" in text.partition("Pareto")[2] for size, _ in figures]
    assert shown == [True, False, False, True, False, True]
    assert "--json has all 6" in text


def test_the_picture_draws_the_front_and_says_its_price(search_result: SearchResult) -> None:
    file = draw_front_file(search_result, subtitle="tiny on h100:2")
    assert file.title == "50% less memory costs 50% more time"
    assert file.chart.count("<circle") == 2
    assert all(f">{point.layout}</text>" in file.to_svg() for point in search_result.front)
    with pytest.raises(UserError, match="no front to draw"):
        draw_front_file(empty_result(search_result))


def make_change(words: str, *, faster: float, fits: bool = True) -> Change:
    return Change(
        change=words,
        layout=f"dp2 {words}",
        fits=fits,
        memory_bytes=2**30,
        step_seconds=1 / faster,
        faster=faster,
        saved_bytes=-(2**20),
    )


def test_a_walk_lists_what_helps_most_and_what_would_if_it_fitted() -> None:
    now = make_change("", faster=1.0)
    gains = [make_change(f"mbs{n}", faster=1 + n / 100) for n in (9, 8, 7)]
    large = [make_change(f"tp{n}", faster=n, fits=False) for n in (0.5, 2, 4)]
    result = Walk(start=now, changes=(*gains, *large), path=(gains[0], gains[1]))
    text = print_page(search.walk(result, top=2))
    rows = [line.split()[0] for line in text.splitlines() if line.startswith(("mbs", "tp"))]
    assert rows == ["mbs9", "mbs8", "tp4", "tp2", "mbs9", "mbs8"]
    assert "result: dp2 mbs8, 8.0% faster" in text
    assert "no single change helps" in print_page(search.walk(result.replace(path=()), top=2))
