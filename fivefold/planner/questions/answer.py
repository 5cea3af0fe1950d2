"""The answer to a question, and the error if nothing fits."""

from __future__ import annotations

from fivefold.layout.spec import Layout
from fivefold.layout.validity import is_legal
from fivefold.planner.counts.memory.host import count_host_bytes
from fivefold.planner.predict import Planner
from fivefold.planner.search.layout_changes import list_offloadings
from fivefold.results.search_result import QuestionAnswer
from fivefold.step import TIGHT_RISK
from fivefold.units import show_bytes, show_risk, show_risk_option


def build_answer(question: str, line: str, value: float, planner: Planner, layout: Layout) -> QuestionAnswer:
    """Return the answer to a question with the peak memory and step time of its layout."""
    estimate = planner.estimate(layout)
    return QuestionAnswer(
        question=question,
        line=line,
        value=value,
        layout=str(layout),
        memory_bytes=estimate.peak_bytes,
        step_seconds=estimate.step_time.seconds,
    )


def describe_shortage(planner: Planner, layout: Layout, *, smallest: str = "") -> str:
    """Return why a layout does not fit, and what does; ``smallest``: words for the least case of the question."""
    risk = planner.out_of_memory_risk(layout)
    shorten = "use more GPUs" if smallest else "shorten the sequence, or use more GPUs"
    mend = shorten if layout.world == 1 else "raise zero, tp or pp"
    recomputed = layout.replace(ac="full")
    is_full_legal = is_legal(recomputed, model=planner.model, job=planner.job, machine=planner.machine)
    if recomputed != layout and is_full_legal and planner.fits(recomputed):
        mend += f", or use ac=full, which needs {show_bytes(planner.peak_bytes(recomputed))}"
    for words, offloaded, job in list_offloadings(layout, planner.job, model=planner.model):
        other = Planner(model=planner.model, machine=planner.machine, job=job, risk=planner.risk)
        is_run = is_legal(offloaded, model=planner.model, job=job, machine=planner.machine)
        if is_run and other.fits(offloaded):
            host = count_host_bytes(other.counts, offloaded, planner.machine)
            mend += f", or add {words}, which takes {show_bytes(host)} of host memory per node"
            break
    if risk <= TIGHT_RISK:
        mend += f", or accept the risk with --risk {show_risk_option(risk)}"
    need, have = show_bytes(planner.peak_bytes(layout)), show_bytes(planner.machine.chip.memory_bytes)
    return (
        f"layout {str(layout)!r} needs at least {need} per GPU, which has {have}{smallest}; "
        f"its risk of running out of memory is {show_risk(risk)}, more than --risk {planner.risk:g}; {mend}"
    )
