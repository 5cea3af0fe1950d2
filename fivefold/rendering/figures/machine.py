"""A machine as pictures: its nodes, chips and links, and the bandwidth of a collective over them by size and ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil, sqrt
from typing import NamedTuple

from fivefold.machine.spec import Machine
from fivefold.rendering.charts import Chart, _finish, _import_altair
from fivefold.rendering.palette import BLUE, LIGHT_INK, ORANGE, PALE_INK, RULE, SERIES, build_heading
from fivefold.units import show_bytes, show_flops, show_rate

MAX_DRAWN_NODES = 4  # maximum number of nodes drawn


class LabelledBox(NamedTuple):
    """A frame or a chip: its corners, and a text in it."""

    x: float
    x2: float
    y: float
    y2: float
    middle: float  # of the text
    text_y: float
    text: str


def draw_topology(machine: Machine) -> Chart:
    """Draw nodes as frames, chips in them, the network below; with the bandwidth of each tier."""
    alt = _import_altair()
    per_node, nodes = min(machine.ranks, machine.ranks_per_node), machine.nodes
    drawn_nodes = min(nodes, MAX_DRAWN_NODES)
    columns = ceil(sqrt(per_node * 1.6))
    rows = ceil(per_node / columns)
    frames, chips = [], []
    for node in range(drawn_nodes):
        left, right = node * (columns + 1.0), node * (columns + 1.0) + columns
        middle = left + columns / 2 - 0.1
        frames.append(LabelledBox(left - 0.35, right + 0.15, -0.75, rows + 0.15, middle, -0.45, f"node {node}"))
        for index in range(per_node):
            x, y = left + index % columns, index // columns
            chips.append(LabelledBox(x, x + 0.8, y, y + 0.7, x + 0.4, y + 0.38, str(node * per_node + index)))
    total_columns = drawn_nodes * (columns + 1.0)
    lines = [{"x": frame.middle, "y": rows + 0.15, "y2": rows + 0.75} for frame in frames] if nodes > 1 else []
    across = alt.Scale(domain=[-0.5, total_columns], nice=False)
    down = alt.Scale(domain=[rows + 1.9, -0.9], nice=False)
    x_axis, y_axis = alt.X("x:Q", axis=None, scale=across), alt.Y("y:Q", axis=None, scale=down)
    corners = {"x": x_axis, "x2": "x2:Q", "y": y_axis, "y2": "y2:Q"}
    frame, chip = (alt.Chart(alt.Data(values=[box._asdict() for box in boxes])) for boxes in (frames, chips))
    text_encoding = {"x": alt.X("middle:Q", axis=None), "y": alt.Y("text_y:Q", axis=None), "text": "text:N"}
    picture = frame.mark_rect(fill=RULE, stroke=PALE_INK).encode(**corners) + frame.mark_text(color=PALE_INK).encode(
        **text_encoding
    )
    picture += chip.mark_rect(fill=BLUE, cornerRadius=3).encode(**corners)
    picture += chip.mark_text(color=LIGHT_INK, fontSize=10).encode(**text_encoding)
    if lines:
        wire = alt.Chart(alt.Data(values=lines)).mark_rule(strokeWidth=2, color=ORANGE)
        network = alt.Chart(
            alt.Data(values=[{"x": -0.35, "x2": total_columns - 0.85, "y": rows + 0.75, "y2": rows + 1.2}])
        )
        picture += wire.encode(x=alt.X("x:Q", axis=None), y=alt.Y("y:Q", axis=None), y2="y2:Q") + network.mark_rect(
            fill=ORANGE, cornerRadius=3
        ).encode(**corners)
    if nodes > drawn_nodes:
        note = {"middle": -0.35, "text_y": rows + 1.62, "text": f"{nodes - drawn_nodes} more nodes are not drawn"}
        note_chart = alt.Chart(alt.Data(values=[note])).mark_text(align="left", color=PALE_INK, fontSize=11)
        picture += note_chart.encode(**text_encoding)
    finished = _finish(picture, title=_spread(machine), subtitle="", height=round((rows + 2.8) * 34))
    return finished.properties(
        title=build_heading(_spread(machine)) | {"subtitle": list_tiers(machine)},
        width=max(420, round(total_columns * 34)),
    )


def list_tiers(machine: Machine) -> list[str]:
    """Return a line for each tier, nearest first."""
    chip = machine.chip
    lines = [
        f"each {chip.name}: {show_bytes(chip.memory_bytes)} at {show_rate(chip.memory_bandwidth)}, "
        f"{show_flops(max(chip.peak_flops.values()))}FLOP/s at most"
    ]
    for link in machine.links:
        reduced = ", sums in the switch" if link.reduction_bandwidth else ""
        lines.append(f"{link.name}: up to {link.span:,} ranks, {show_rate(link.bandwidth)} each way a rank{reduced}")
    return lines


def _spread(machine: Machine) -> str:
    inner_link, outer_link = machine.links[0], machine.links[-1]
    ranks = f"{machine.ranks:,} × {machine.chip.name}"
    if inner_link == outer_link or machine.nodes == 1:
        return f"{ranks} in one node, joined by {inner_link.name}"
    slower = f"{inner_link.bandwidth / outer_link.bandwidth:.0f} times slower"
    return f"{ranks} in {machine.nodes:,} nodes: {outer_link.name} is {slower} than {inner_link.name}"


def draw_bandwidth(curves: Mapping[int, Sequence[tuple[int, float]]], *, machine: Machine, collective: str) -> Chart:
    """Draw bytes sent per second by one rank over the size of the buffer.

    ``curves``: one curve for each number of ranks.
    """
    alt = _import_altair()
    values = [
        {"ranks": f"{ranks:,} ranks", "size": size, "rate": rate / 1e9}
        for ranks, curve in curves.items()
        for size, rate in curve
    ]
    names = [f"{ranks:,} ranks" for ranks in curves]
    sizes = [
        2**power
        for power in range(10, 41, 4)
        if any(2**power == size for curve in curves.values() for size, _ in curve)
    ]
    label = "datum.value < 1048576 ? datum.value/1024 + ' KiB' : datum.value < 1073741824 ? "
    label += "datum.value/1048576 + ' MiB' : datum.value/1073741824 + ' GiB'"
    x = alt.X(
        "size:Q",
        title="size of the buffer",
        axis=alt.Axis(values=sizes, labelExpr=label, grid=False),
        scale=alt.Scale(type="log", base=2, nice=False),
    )
    y = alt.Y("rate:Q", title="sent by one rank, GB/s", scale=alt.Scale(zero=True))
    colour = alt.Color(
        "ranks:N",
        sort=names,
        scale=alt.Scale(domain=names, range=list(SERIES[: len(names)])),
        legend=alt.Legend(orient="right", title=None),
    )
    lines = alt.Chart(alt.Data(values=values)).mark_line(strokeWidth=2).encode(x=x, y=y, color=colour)
    return _finish(
        lines,
        title=_reach(curves, collective),
        height=340,
        subtitle=f"{machine.name}, {machine.ranks_per_node} ranks a node; priced, not measured",
    )


def _reach(curves: Mapping[int, Sequence[tuple[int, float]]], collective: str) -> str:
    best: dict[int, float] = {ranks: max(rate for _, rate in curve) for ranks, curve in curves.items()}
    fastest = max(best, key=lambda ranks: best[ranks])
    largest = max(best)  # numbers of ranks
    if fastest == largest:
        return f"{collective} reaches {best[fastest] / 1e9:.0f} GB/s over {fastest:,} ranks, more than over fewer"
    rate = f"{collective} reaches {best[fastest] / 1e9:.0f} GB/s over {fastest:,} ranks"
    return f"{rate}, {best[largest] / 1e9:.0f} over {largest:,}"


def list_rank_counts(machine: Machine) -> list[int]:
    """Return the numbers of ranks that are drawn: powers of two, and all."""
    return sorted(
        {
            *(2**power for power in range(1, machine.ranks.bit_length()) if 2**power <= machine.ranks),
            *([machine.ranks] if machine.ranks > 1 else []),
        }
    )[-9:]
