"""``fivefold ratios``: the degree at which each axis becomes communication-bound. Does not import torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fivefold.cli.options import show, show_question
from fivefold.cli.request_options import accept_request
from fivefold.requests.commands import RatiosOptions

if TYPE_CHECKING:
    from fivefold.job import Job
    from fivefold.layout.spec import Layout
    from fivefold.machine.spec import Machine
    from fivefold.model.spec import Model


@accept_request(RatiosOptions)
def ratios(
    request: RatiosOptions, model: Model, machine: Machine, layout: Layout, job: Job, stated: frozenset[str]
) -> None:
    """Find the largest degree of each axis at which its messages take no longer than the compute that overlaps them.

    It compares the FLOPs per byte sent of each axis (dp, tp, cp, ep) with those of the machine.
    """
    from fivefold.planner.ratios import compute_ratios as run
    from fivefold.rendering import ratios as page

    result = run(model, machine=machine, layout=layout, job=job)
    if not request.as_json:
        show_question(model, machine, job, stated=stated)
    show(result.model_dump_json(indent=2) if request.as_json else page.render_page(result))
    if request.degrees and not request.as_json:
        show(page.render_degrees(result))
