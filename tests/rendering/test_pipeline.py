from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.machine.catalog import resolve
from fivefold.model.catalog import named
from fivefold.planner.predict import planner
from fivefold.planner.time.spans import spans
from fivefold.record import Mistake
from fivefold.rendering import pipeline
from fivefold.rendering.compare import to_text
from fivefold.rendering.pipeline import finding
from fivefold.results.spans import Span
from fivefold.step import Step, Time
from fivefold.units import show_seconds

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
        console.print(pipeline.Picture(ROWS, drawn="2 micro-batches"))
    return captured.get()


def test_a_row_per_rank_to_scale() -> None:
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
def test_any_width(width: int) -> None:
    assert max(map(len, text(width).splitlines())) <= width


def test_what_is_narrower_than_a_column_is_not_lost() -> None:
    row = [Span("F", f"F0.{i}", float(i), i + 0.3, 0.0, (), 0, i) for i in range(100)]
    picture = to_text(pipeline.Picture([row]), width=33).splitlines()[0]
    assert set(picture.removeprefix("rank 0 │").removesuffix("│")) == {"·"}


def values(chart: Any) -> list[list[str]]:
    layers = chart.to_dict()["layer"]
    return list(csv.reader(layers[1]["data"]["values"].splitlines()))


def test_the_chart_has_a_rectangle_per_block(large: Step) -> None:
    pytest.importorskip("altair")
    chart = pipeline.chart(ROWS, step=large, drawn="2 micro-batches")
    rows = values(chart)
    assert len(rows) == 1 + 6 + 4  # compute and messages of two forwards, two; one, a pair and a reduction
    assert rows[0][:4] == ["kind", "start", "end", "text"]
    assert rows[1][:4] == ["forward", "0.0", "1.5", "0"]
    assert [row[5] for row in rows if row[:3] in (["forward", "4.0", "8.0"], ["backward", "4.0", "8.0"])] == [
        "1.0",
        "1.44",
    ]
    assert [row[3] for row in rows[1:] if row[-1] == "1"] == ["0", "1", "0", "0", "1", "0"]  # the numbers that it shows
    spec = chart.to_dict()
    assert spec["title"]["text"] == ["On the slowest rank compute fills 62% of the 3.40 s, tp messages take 17.6%"]
    assert spec["title"]["subtitle"][1] == "2 micro-batches · paler: a rank's later stages"


def test_lanes_lie_one_above_the_other(large: Step) -> None:
    pytest.importorskip("altair")
    update = Span("update", "update", 8.0, 10.0, 0.5, ("world",))
    measured = ((*ROWS[0][:3], update, Span("data", "data", 10.0, 10.5)),)
    chart = pipeline.lanes({"predicted": ROWS[:1], "rehearsed": ROWS[:1], "measured": measured}, step=large)
    rows = values(chart)
    assert len(rows) == 1 + 6 + 6 + 8
    found = [(row[0], float(row[1]), float(row[2])) for row in rows[1:] if float(row[4]) >= 1.5]
    assert found[-3:] == [("update", 8.0, 9.5), ("messages, exposed", 9.5, 10.0), ("data", 10.0, 10.5)]
    spec = str(chart.to_dict())
    assert "['predicted 0', 'rehearsed 0', 'measured 0'][datum.value]" in spec


def test_nothing_to_draw(large: Step) -> None:
    pytest.importorskip("altair")
    with pytest.raises(Mistake, match="nothing to draw"):
        pipeline.chart([], step=large)


def test_the_finding_names_the_largest_loss() -> None:
    time = Time(step_seconds=2.0, compute_seconds=1.5, bubble_seconds=0.3, exposed_seconds={"tp": 0.2})
    assert pipeline.finding(time) == "On the slowest rank compute fills 75% of the 2.00 s, the bubble takes 15.0%"
    assert pipeline.finding(Time(step_seconds=1.0, compute_seconds=1.0)).endswith("100% of the 1.00 s")


def test_the_finding_knows_the_host_and_the_data() -> None:
    time = Time(step_seconds=1.0, compute_seconds=0.6, host_seconds=0.3, data_seconds=0.1)
    assert pipeline.finding(time).endswith("of the 1.00 s, the host takes 30.0%")


def test_the_remark_says_what_is_left_out() -> None:
    assert pipeline.remark(8, 8) == "8 micro-batches"
    assert pipeline.remark(1, 1) == "1 micro-batch"
    assert pipeline.remark(8, 64).startswith("drawn with 8 of 64 micro-batches; those left out repeat")


def test_the_title_says_when_a_shorter_step_is_drawn() -> None:
    machine = resolve("h100:4", local=Path("/nowhere"))
    using, layout = planner(named("tiny"), machine, Job(global_batch=64)), Layout.parse("pp4 mbs1")
    time, whole, short = using.step(layout).time, spans(using, layout), spans(using, layout, limit=8)
    assert finding(time, whole) == finding(time)
    end = max(row[-1].end for row in short)
    idle = 1 - sum(span.end - span.start for row in short for span in row) / (4 * end)
    assert idle > 2 * time.bubble_seconds / time.step_seconds
    said = f".\nDrawn are fewer micro-batches: {show_seconds(end)}, of which ranks idle {idle:.0%}"
    assert finding(time, short) == finding(time) + said
    drawn = pipeline.chart(short, step=using.step(layout)).to_dict()
    assert drawn["title"]["text"] == finding(time, short).splitlines()
