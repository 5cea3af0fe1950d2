"""The page of traces says what the report says, at any width."""

from __future__ import annotations

import pytest

from fivefold.rendering.trace_report import (
    MAX_NAME_CHARACTERS,
    PathPiece,
    _coarsen,
    describe_ranks,
    render_page,
    shorten_name,
)
from fivefold.results.trace_report import Arrivals, Breakdown, KernelLine, MessageLine, PathPart, TraceReport
from tests.printed import to_text

FIRST = Breakdown(
    rank=0, step="ProfilerStep#3", start_seconds=0.0, window_seconds=0.1, compute_seconds=0.06,
    communication_seconds=0.05, exposed_seconds=0.02, memcpy_seconds=0.01, memcpy_alone_seconds=0.005,
    idle_seconds=0.015, idle_host_seconds=0.01, idle_waiting_seconds=0.005, optimizer_seconds=0.003,
)  # fmt: skip
SECOND = FIRST.replace(step="ProfilerStep#4", window_seconds=0.3, compute_seconds=0.26)
REPORT = TraceReport(
    device="GPU", world=16, ranks=(0,), files=("a.json",), steps=("ProfilerStep#3", "ProfilerStep#4"), total=(FIRST,),
    breakdown=(FIRST, SECOND), categories=(KernelLine(category="GEMM", calls=3, seconds=0.05, longest_seconds=0.03),),
    kernels=(KernelLine(category="GEMM", name="void nvjet[bold]", calls=3, seconds=0.05, longest_seconds=0.03),),
    messages=(
        MessageLine(group="3", axis="dp", ranks=8, collective="all_reduce", calls=2, bytes=2**30, seconds=0.05,
                    waiting_seconds=0.01, algorithm_bandwidth=25e9, bus_bandwidth=43e9, link="400G",
                    link_bandwidth=50e9),
        MessageLine(group="unknown", collective="barrier", calls=1, seconds=0.001),
    ),
    path_seconds=0.2, path=(PathPart(rank=0, activity="compute", seconds=0.15),),
    path_names=(
        PathPart(rank=0, activity="compute", name="nvjet", seconds=0.15),
        PathPart(rank=0, activity="host", seconds=0.05),
    ),
    arrivals=(Arrivals(rank=0, last=3, matched=4, others_waited_seconds=0.02),),
    remarks=("a.json: the file ends within the events; read up to there, 12 events",),
)  # fmt: skip


def test_the_trace_page_has_means_over_the_steps() -> None:
    text = to_text(render_page(REPORT), width=160)
    assert "traced  1 of 16 ranks on GPUs" in text
    assert "200.0 ms per step  ·  Compute fills 80% of a step" in text
    assert "the file ends within the events" in text
    (row,) = [line for line in text.splitlines() if "200.0 ms" in line and "60%" in line]
    # step, compute, in optimizer, exposed, in waits (unknown), overlapped, copies alone, host, queued
    shares = ["0", "200.0 ms", "80.0%", "1.5%", "10.0%", "–", "60% of 50.0 ms", "2.5%", "5.0%", "2.5%"]
    assert row.split() == " ".join(shares).split()


def test_the_trace_page_lists_messages_kernels_and_critical_path() -> None:
    text = to_text(render_page(REPORT), width=160)
    assert "nvjet[bold]" in text
    message = next(line for line in text.splitlines() if "all_reduce" in line).split()
    assert message[:6] == ["dp", "8", "all_reduce", "2", "1.00", "GiB"]
    assert message[-7:] == ["25", "GB/s", "43", "GB/s", "0.86", "×", "400G"]
    assert "rank 0 is last to arrive at 3 of its 4 messages; the others wait 20.0 ms for it in all" in text
    assert "75.0%" in text


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_the_trace_page_is_printed_at_any_width(width: int) -> None:
    lines = to_text(render_page(REPORT), width=width).splitlines()
    assert max(map(len, lines)) <= width
    assert any("43 GB/s" in line for line in lines)


def test_the_finding_of_a_trace_names_the_largest_part_besides_compute() -> None:
    assert describe_ranks([FIRST]) == "Compute fills 60% of a step, exposed communication 20%"


def test_a_path_of_many_pieces_is_drawn_by_what_takes_most() -> None:
    """10,000 pieces, of which the host takes a tenth; then one long wait on another rank."""
    times = [(place * 1e-5, (place + 1) * 1e-5) for place in range(10_000)]
    path = [PathPiece(0, "host" if place % 10 == 0 else "compute", *item) for place, item in enumerate(times)]
    path.append(PathPiece(1, "waiting", 0.1, 0.2))
    assert _coarsen(path) == [PathPiece(0, "compute", 0.0, 0.1), PathPiece(1, "waiting", 0.1, 0.2)]
    few = [PathPiece(0, "compute", 0.0, 1.0), PathPiece(0, "host", 1.0, 4.0)]
    assert _coarsen(few) == few


def test_long_names_keep_both_ends() -> None:
    name = "void " + "".join(chr(97 + place % 26) for place in range(300))
    assert len(shorten_name(name)) == MAX_NAME_CHARACTERS
    assert shorten_name(name).startswith("abcdef")
    assert shorten_name(name).endswith(name[-5:])
    assert shorten_name("void gemm") == "gemm"
