from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console

from fivefold.errors import UserError
from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.machine.catalog import resolve
from fivefold.model.catalog import build_model
from fivefold.planner.predict import get_planner
from fivefold.planner.time.spans import build_spans
from fivefold.rendering import pipeline
from fivefold.rendering.drawing import pipeline as drawing
from fivefold.rendering.pipeline import describe_step
from fivefold.results.spans import Span
from fivefold.step import Step, Time
from fivefold.units import show_seconds
from tests.printed import to_text

ROWS = (
    (
        Span("F", "F0.0", 0.0, 2.0, 0.5, ("tp",), 0, 0),
        Span("F", "F0.1", 2.0, 4.0, 0.5, ("tp",), 0, 1),
        Span("BW", "BW0.0", 6.0, 9.0, 0.0, (), 0, 0),
        Span("update", "update", 9.0, 10.0),
    ),
    (
        Span("F", "F1.0", 2.0, 4.0, 0.0, (), 1, 0),
        Span("FB", "F3.1+BW1.0", 4.0, 8.0, 0.0, (), 3, 1, 1, 0),
        Span("reduce", "reduce gradients", 8.0, 9.0, 1.0, ("dp",)),
    ),
)


def text(width: int = 80, *, colours: bool = False) -> str:
    console = Console(width=width, force_terminal=colours, color_system="truecolor" if colours else None)
    with console.capture() as captured:
        console.print(pipeline.PipelinePicture(ROWS, drawn="2 micro-batches"))
    return captured.get()


def test_the_pipeline_picture_has_a_row_per_rank_to_scale() -> None:
    lines = text(89).splitlines()  # 80 columns between the rules: 8 per second
    assert lines[0] == "rank 0 │0███████████!!!!1███████████!!!!" + " " * 16 + "0" + "▓" * 23 + "#" * 8 + "│"
    assert (
        lines[1] == "rank 1 │" + " " * 16 + "0" + "█" * 15 + "1" + "█" * 15 + "0" + "▓" * 15 + "=" * 8 + " " * 8 + "│"
    )
    assert lines[2].split() == ["0", "10.00", "s"]
    assert "██ forward" in lines[3]
    assert lines[-1] == "2 micro-batches"


def test_colours_take_the_place_of_letters() -> None:
    assert "▓" not in text(colours=True)
    assert "\x1b[1;38;2;255;255;255;48;2;11;107;181m0" in text(colours=True)  # on the blue of a forward


@pytest.mark.parametrize("width", [1, 9, 20, 40, 200])
def test_the_pipeline_picture_is_printed_at_any_width(width: int) -> None:
    assert max(map(len, text(width).splitlines())) <= width


def test_action_narrower_than_a_column_is_drawn() -> None:
    row = [Span("F", f"F0.{i}", float(i), i + 0.3, 0.0, (), 0, i) for i in range(100)]
    picture = to_text(pipeline.PipelinePicture([row]), width=33).splitlines()[0]
    assert set(picture.removeprefix("rank 0 │").removesuffix("│")) == {"·"}


def find_rectangles(svg: str) -> list[tuple[str, float, float]]:
    """Return (class, begin, width) of each block, in thousandths of the width."""
    matches = re.findall(r'<rect x="([\d.]+)" width="([\d.]+)" y="[\d.]+" height="[\d.]+" class="(k-[^"]+)"', svg)
    return [(look, float(x), float(width)) for x, width, look in matches]


def test_the_pipeline_svg_has_a_rectangle_per_pass(large: Step) -> None:
    file = drawing.draw_file(ROWS, step=large, drawn="2 micro-batches")
    rectangles = find_rectangles(file.to_svg())
    last = max(row[-1].end for row in ROWS)
    assert len(rectangles) == 6 + 4  # compute and messages of two forwards, two; one, a pair and a reduction
    assert rectangles[0] == ("k-F", 0.0, pytest.approx(1000 * 1.5 / last, abs=0.01))
    assert [look for look, x, width in rectangles if x == pytest.approx(1000 * 4 / last, abs=0.01)] == [
        "k-F paler",
        "k-BW",
    ]
    assert file.title == "On the slowest rank compute fills 62% of the 3.40 s, tp communication takes 17.6%"
    assert file.lines[1] == "2 micro-batches · paler: a rank's later stages"
    assert {name for _, name in file.looks} >= {"forward", "backward", "exposed communication"}


def test_a_saved_svg_uses_no_css_variables(large: Step) -> None:
    svg = drawing.draw_file(ROWS, step=large).to_svg()
    ElementTree.fromstring(svg)
    assert all(word not in svg for word in ("var(", "light-dark", "calc("))
    assert "rank 0" in svg
    page = drawing.draw_file(ROWS, step=large).to_html()
    assert "light-dark" in page
    assert "<title>F0.0" in page  # what the mouse tells


def test_merged_lines_of_a_long_pipeline_paint_what_each_rank_runs() -> None:
    machine, layout = resolve("a100:16", local=Path("/nowhere")), Layout.parse("pp16 mbs1")
    rows = build_spans(get_planner(build_model("gpt3-175b"), machine, Job(global_batch=48)), layout)
    assert sum(map(len, rows)) > drawing.MAX_TOOLTIP_SPANS
    painted = [[""] * 10_001 for _ in rows]  # tenths of a thousandth of the width
    picture = drawing.draw_pipeline(rows, label="")
    for y, moves, kind in re.findall(r'<path d="M0 ([\d.]+)([^"]+)" class="line s-(\w+)"', picture):
        row, end = painted[int(float(y) * len(rows) / 1000)], 0
        for gap, width in re.findall(r"m(\d+) 0h(\d+)", moves):
            assert int(width) >= drawing.MIN_TENTHS
            start, end = end + int(gap), end + int(gap) + int(width)
            row[start:end] = [kind] * (end - start)
    tenths = 10_000 / max(row[-1].end for row in rows)
    for row, colours in zip(rows, painted, strict=True):
        for before, after in pairwise(row):  # in the middle of each action and gap
            start, end = (round(seconds * tenths) for seconds in (before.start, before.end - before.messages))
            if before.kind in ("F", "BW"):
                assert set(colours[start + 7 : end - 7]) <= {before.kind}
            assert set(colours[round(before.end * tenths) + 7 : round(after.start * tenths) - 7]) <= {""}


def test_lanes_of_the_pipeline_svg_are_stacked(large: Step) -> None:
    update = Span("update", "update", 8.0, 10.0, 0.5, ("world",))
    measured = ((*ROWS[0][:3], update, Span("data", "data", 10.0, 10.5)),)
    file = drawing.draw_lanes({"predicted": ROWS[:1], "dry_run": ROWS[:1], "measured": measured}, step=large)
    rectangles = find_rectangles(file.to_svg())
    assert len(rectangles) == 6 + 6 + 8
    results = [(look, round(x * 10.5 / 1000, 2), round((x + width) * 10.5 / 1000, 2)) for look, x, width in rectangles]
    assert results[-3:] == [("k-update", 8.0, 9.5), ("k-messages", 9.5, 10.0), ("k-data", 10.0, 10.5)]
    assert all(f">{name} 0</text>" in file.chart for name in ("predicted", "dry run", "measured"))


def test_a_pipeline_picture_without_spans_is_an_error(large: Step) -> None:
    with pytest.raises(UserError, match="nothing to draw"):
        drawing.draw_file([], step=large)


def test_the_finding_names_the_largest_loss() -> None:
    time = Time(step_seconds=2.0, compute_seconds=1.5, bubble_seconds=0.3, exposed_seconds={"tp": 0.2})
    assert pipeline.describe_step(time) == "On the slowest rank compute fills 75% of the 2.00 s, the bubble takes 15.0%"
    assert pipeline.describe_step(Time(step_seconds=1.0, compute_seconds=1.0)).endswith("100% of the 1.00 s")


def test_the_finding_names_the_share_of_the_host() -> None:
    time = Time(step_seconds=1.0, compute_seconds=0.6, host_seconds=0.3, data_seconds=0.1)
    assert pipeline.describe_step(time).endswith("of the 1.00 s, the host takes 30.0%")


def test_the_remark_of_a_pipeline_picture_says_what_is_left_out() -> None:
    assert pipeline.describe_window(8, 8) == "8 micro-batches"
    assert pipeline.describe_window(1, 1) == "1 micro-batch"
    assert pipeline.describe_window(8, 64).startswith("drawn with 8 of 64 micro-batches; those left out repeat")


def test_the_title_of_a_pipeline_picture_says_if_a_shorter_step_is_drawn() -> None:
    machine = resolve("h100:4", local=Path("/nowhere"))
    using, layout = get_planner(build_model("tiny"), machine, Job(global_batch=64)), Layout.parse("pp4 mbs1")
    time, whole, short = using.step(layout).time, build_spans(using, layout), build_spans(using, layout, limit=8)
    assert describe_step(time, whole) == describe_step(time)
    end = max(row[-1].end for row in short)
    idle = 1 - sum(span.end - span.start for row in short for span in row) / (4 * end)
    assert idle > 2 * time.bubble_seconds / time.step_seconds
    said = f".\nFewer micro-batches are drawn: {show_seconds(end)}, of which ranks idle {idle:.0%}"
    assert describe_step(time, short) == describe_step(time) + said
    assert drawing.draw_file(short, step=using.step(layout)).title == describe_step(time, short)
