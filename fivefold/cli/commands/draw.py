"""``fivefold draw``: one picture as one file, as SVG, PNG, PDF or HTML."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fivefold.cli.options import parse_integers, print_line
from fivefold.cli.request_options import accept_request
from fivefold.errors import UserError
from fivefold.requests.commands import DrawOptions, Picture
from fivefold.requests.machines import load_machine

if TYPE_CHECKING:
    from fivefold.job import Job
    from fivefold.machine.spec import Machine

OF_STEPS = ("pipeline", "memory", "memory-parts", "roofline")
SIZES = tuple(2**power for power in range(12, 35))  # buffer sizes in bytes


@accept_request(DrawOptions)
def draw(request: DrawOptions, job: Job) -> None:
    """Draw a step's pipeline, memory or roofline, a machine, collectives, attention masks or number formats."""
    from fivefold.job import Job as Default
    from fivefold.rendering import charts

    picture, words = request.picture, request.words
    if picture not in OF_STEPS and job != Default():
        raise UserError(f"{picture} does not depend on a job; drop the job options")
    path = request.out or Path(f"{picture}.svg")
    chart = (
        _draw_step(picture, words, job)
        if picture in OF_STEPS
        else _draw_without_step(picture, words, request.collective)
    )
    charts.save(chart, path)
    print_line(f"drew {path}")


def _draw_step(picture: Picture, words: Sequence[str], job: Job) -> Any:
    """Draw the picture of one step, whose model, machine and layout are the words of the command."""
    from fivefold.cli.pictures import draw_step_charts
    from fivefold.layout.spec import Layout
    from fivefold.model.catalog import resolve
    from fivefold.planner.predict import get_planner
    from fivefold.rendering.charts import draw_memory_bars
    from fivefold.rendering.figures import roofline

    if len(words) != 3:
        raise UserError(
            f"draw {picture} needs MODEL MACHINE LAYOUT; write for example "
            f"fivefold draw {picture} llama3-8b h100:8 'dp8 zero3 mbs1'"
        )
    model = resolve(words[0])
    machine = load_machine(words[1])
    layout = Layout.parse(words[2], machine=machine)
    plans = get_planner(model, machine, job)
    step = plans.step(layout)
    if picture == "memory-parts":
        return draw_memory_bars(step, subtitle=f"{step.model} on {step.machine}, {step.layout}")
    if picture == "roofline":
        return roofline.draw_chart(step, chip=machine.chip, dtype=job.precision.compute)
    return draw_step_charts(plans, layout, step)[picture]


def _draw_without_step(picture: Picture, words: Sequence[str], collective: str) -> Any:
    """Draw a picture of number formats, collectives, masks or a machine, for which no step is predicted."""
    from fivefold.rendering.figures import collectives, formats, masks
    from fivefold.rendering.figures.machine import draw_bandwidth, draw_topology

    if picture == "formats":
        return formats.draw_chart(words)
    if len(words) > 1 or (not words and picture in ("topology", "bandwidth")):
        usage = "MACHINE, such as h100:16" if picture in ("topology", "bandwidth") else "RANKS, such as 4"
        raise UserError(f"draw {picture} takes one {usage}")
    if picture in ("collectives", "masks"):
        ranks = parse_integers(words[0], option=picture, of="ranks", such="4")[0] if words else 4
        return collectives.draw_chart(ranks) if picture == "collectives" else masks.draw_chart(ranks)
    machine = load_machine(words[0])
    if picture == "topology":
        return draw_topology(machine)
    return draw_bandwidth(_compute_bandwidth_curves(machine, collective), machine=machine, collective=collective)


def _compute_bandwidth_curves(machine: Machine, collective: str) -> dict[int, list[tuple[int, float]]]:
    """Return the bytes that a rank sends per second, by ranks and buffer size, with the planner's cost model."""
    from fivefold.layout.mesh import RankGroup
    from fivefold.planner.time.network import Network
    from fivefold.rendering.figures.machine import list_rank_counts
    from fivefold.step import count_sent_bytes

    if machine.ranks < 2:
        raise UserError(f"{machine.name} has one rank, which sends nothing; use more of them, as in h100:16")
    network = Network(machine)
    return {
        ranks: [
            (size, count_sent_bytes(collective, payload=size, ranks=ranks) / seconds)
            for size in SIZES
            for seconds in (network.seconds(collective, size, RankGroup(ranks, 1)),)
        ]
        for ranks in list_rank_counts(machine)
    }
