"""``fivefold ask``: questions about a model, a machine and a layout. Does not import torch."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fivefold.cli.options import print_line, show, show_question
from fivefold.cli.request_options import accept_request
from fivefold.errors import UserError
from fivefold.requests.answers import (
    USED_BY,
    RunLimits,
    find_answers,
    list_open_fields,
    read_noise_scale,
    refuse_unused,
)
from fivefold.requests.commands import AskOptions
from fivefold.requests.offers import apply_prices

if TYPE_CHECKING:
    from fivefold.job import Job
    from fivefold.layout.spec import Layout
    from fivefold.machine.spec import Machine
    from fivefold.model.spec import Model


@accept_request(AskOptions)
def ask(
    request: AskOptions,
    model: Model,
    machine: Machine,
    layout: Layout | None,
    job: Job,
    stated: frozenset[str],
    batch_reason: str = "",
) -> None:
    """Answer one question: what fits, which batch size, how long a run takes, or which single change gains most.

    QUESTION is micro-batch (the largest that fits), sequence (the longest that fits), gpus
    (the fewest that have the memory), model (the largest with the proportions of MODEL),
    batch (reasonable batch sizes), run (time and cost of a full run), tokens (of the longest
    run within --deadline or --budget), changes (what each single change of the layout gains)
    or finetune (whether full fine-tuning, LoRA or QLoRA fits). Micro-batch, sequence, run,
    tokens and changes are answered for LAYOUT, or else for the fastest that fits. For the
    fewest GPUs that finish a run in time, use `fivefold search --deadline`.
    """
    from fivefold.machine.catalog import is_counted
    from fivefold.machine.datacenter import apply_assumptions
    from fivefold.rendering import lengths, run_estimate
    from fivefold.rendering.answers import list_sections
    from fivefold.rendering.progress import show_progress
    from fivefold.rendering.sections import render_sections

    question = request.question
    chart = request.chart
    counted = is_counted(request.gpus or request.machine)
    refuse_unused(question, **{name: getattr(request, name) for name in USED_BY})
    (priced_machine,) = apply_prices([machine], request.price)
    if chart and question not in PICTURES:
        raise UserError(f"--chart {chart}: {question!r} has no picture; pictures exist for {', '.join(PICTURES)}")
    with show_progress("asking") as report:
        replies = find_answers(
            question,
            model,
            priced_machine,
            layout,
            job=job,
            tokens=request.tokens,
            site=apply_assumptions(request.assume),
            limits=RunLimits.parse(request.deadline, request.budget),
            noise=read_noise_scale(request.noise),
            risk=request.risk,
            counted=counted,
            stated=stated,
            report=report,
        )
    if request.as_json:
        show(json_module.dumps([reply.model_dump(mode="json") for reply in replies], indent=2))
    else:
        remarks = replies[0].remarks if replies else ()
        show_question(
            model,
            priced_machine,
            job,
            remarks=remarks,
            open_fields=list_open_fields(question, counted=counted, stated=stated),
            stated=stated,
            batch_reason=batch_reason,
        )
        sections = list_sections(question, replies)
        if sections[0].title and not remarks:  # remarks end in a blank line
            show("")
        show(render_sections(sections))
    if chart:
        save_chart((lengths if question == "sequence" else run_estimate).draw_chart(replies[0]), chart)


PICTURES = ("run", "tokens", "sequence")  # questions whose answer has a picture


def save_chart(chart: Any, path: Path) -> None:
    """Save the chart of an answer."""
    from fivefold.rendering.charts import save

    save(chart, path)
    print_line(f"drew {path}")
