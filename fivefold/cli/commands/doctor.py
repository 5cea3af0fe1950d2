"""``fivefold doctor``: what a training step of any module in a Python file needs, without a GPU.

If no recomputation meets the budget, the exit code is 3.
"""

from __future__ import annotations

from pathlib import Path

from fivefold.cli.options import show
from fivefold.cli.request_options import accept_request
from fivefold.requests.commands import DoctorOptions
from fivefold.requests.words import parse_bytes

DOES_NOT_FIT = 3  # exit code


@accept_request(DoctorOptions)
def doctor(request: DoctorOptions) -> None:
    """Analyze a training step of any PyTorch module: peak memory, FLOPs, what to recompute; or a memory snapshot.

    Exit code 3: the budget is not enough.
    """
    file, json = request.file, request.as_json
    budget_bytes = parse_bytes(request.budget) if request.budget is not None else None
    if _is_snapshot(file):
        _print_snapshot(file, budget_bytes, json=json)
        return
    from fivefold.diagnosis.doctor import examine
    from fivefold.diagnosis.doctor.file import load
    from fivefold.rendering import doctor as page
    from fivefold.rendering.progress import show_progress

    with show_progress("doctor") as progress:
        script = load(file)
        diagnosis = examine(
            script.model,
            script.loss,
            make_optimizer=script.optimizer,
            step=script.step,
            budget_bytes=budget_bytes,
            fsdp=request.fsdp,
            tp=request.tp,
            plan=script.plan,
            file=script.name,
            report=lambda what: progress(what, 0, 1),
        )
    show(diagnosis.model_dump_json(indent=2) if json else page.render_page(diagnosis))
    if diagnosis.advice is not None and not diagnosis.advice.fits:
        raise SystemExit(DOES_NOT_FIT)


def _is_snapshot(path: Path) -> bool:
    """Tell whether a file is a pickle rather than Python source."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(1) == b"\x80"


def _print_snapshot(path: Path, budget_bytes: int | None, *, json: bool) -> None:
    """Print what a memory snapshot holds; exits with 3 if it is over the budget."""
    from fivefold.diagnosis.explain import explain
    from fivefold.rendering.explanation import render_page

    explanations = explain([path])
    show(explanations[0].model_dump_json(indent=2) if json else render_page(explanations))
    memory = explanations[0].memory
    if budget_bytes is not None and memory is not None and memory.needed_bytes > budget_bytes:
        raise SystemExit(DOES_NOT_FIT)
