"""``fivefold explain``: why a run failed, from the files it left; it runs nothing from a file and imports no torch."""

from __future__ import annotations

import json as json_module
from typing import TYPE_CHECKING

from fivefold.cli.options import show
from fivefold.cli.request_options import accept_request
from fivefold.errors import UserError
from fivefold.requests.commands import ExplainOptions
from fivefold.requests.machines import load_machine

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fivefold.job import Job
    from fivefold.results.explanation import AgainstPrediction, Explanation


@accept_request(ExplainOptions)
def explain(request: ExplainOptions, job: Job) -> None:
    """Explain why a run failed or hung, from logs, memory snapshots, flight recorder dumps or stack traces.

    With --against, it also finds the smallest change that fits.
    """
    from fivefold.diagnosis.explain import explain as read
    from fivefold.job import Job
    from fivefold.rendering.explanation import render_page

    against = request.against
    if against is None and job != Job():
        raise UserError("job options apply to a prediction only; add --against MODEL MACHINE LAYOUT")
    explanations = read(request.files, top=request.top)
    comparison = _compare_with_prediction(explanations, against, job) if against else None
    if request.as_json:
        data = {
            "explanations": [explanation.model_dump(mode="json") for explanation in explanations],
            "against": comparison.model_dump(mode="json") if comparison else None,
        }
        show(json_module.dumps(data, indent=2))
    else:
        show(render_page(explanations, comparison=comparison))


def _compare_with_prediction(
    explanations: Sequence[Explanation], words: tuple[str, str, str], job: Job
) -> AgainstPrediction:
    """Compare the prediction with the memory of the file that holds most."""
    from fivefold.diagnosis.explain.prediction import compare_largest
    from fivefold.layout.spec import Layout
    from fivefold.model.catalog import resolve

    model = resolve(words[0])
    machine = load_machine(words[1])
    layout = Layout.parse(words[2], machine=machine)
    return compare_largest(explanations, model=model, machine=machine, layout=layout, job=job)
