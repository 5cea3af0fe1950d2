"""The longest sequence with which a layout fits."""

from __future__ import annotations

from fivefold.errors import UserError
from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.layout.validity import refuse
from fivefold.layout.validity.vision import count_image_tokens
from fivefold.machine.spec import Machine
from fivefold.model.spec import Model
from fivefold.planner.predict import Planner
from fivefold.planner.questions.answer import build_answer, describe_shortage
from fivefold.planner.questions.bisection import find_largest_by_bytes
from fivefold.results.search_result import QuestionAnswer
from fivefold.step import FITS_RISK
from fivefold.units import ceil_div

MAX_SEQUENCE = 2**24  # tokens of the longest sequence that is tried
FIRST_SEQUENCE = 2**12  # tokens of the first sequence that is tried


def search_longest_sequence(
    *, model: Model, machine: Machine, job: Job, layout: Layout, risk: float = FITS_RISK
) -> QuestionAnswer:
    """Return the longest sequence in tokens with which ``layout`` fits.

    It is at most 2^24, at least the tokens of the job's images, and a multiple that cp and sp can split.
    """
    step = 2 * layout.cp * layout.tp
    fewer = max(0, ceil_div(count_image_tokens(model, job), step) - 1)  # steps that the images do not fit into
    longest = min(MAX_SEQUENCE, model.positions) if model.position == "learned" else MAX_SEQUENCE
    question = "longest sequence"
    refuse(layout, model=model, job=job.replace(sequence=(fewer + 1) * step), machine=machine)

    def get_planner(steps: int) -> Planner:
        return Planner(model=model, machine=machine, job=job.replace(sequence=steps * step), risk=risk)

    more = find_largest_by_bytes(
        lambda more: get_planner(fewer + more).count_spare_bytes(layout),
        limit=longest // step - fewer,
        start=max(1, FIRST_SEQUENCE // step - fewer),
    )
    if more == 0:
        raise UserError(describe_shortage(get_planner(fewer + 1), layout, smallest=", even with the shortest sequence"))
    most = fewer + more
    beyond_text = "" if most * step <= model.positions else f", beyond the model's {model.positions} positions"
    return build_answer(question, f"{most * step:,} tokens{beyond_text}", most * step, get_planner(most), layout)
