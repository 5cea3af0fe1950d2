"""The doctor: count memory and FLOPs of a training step of any ``nn.Module``, without a GPU.

examine(make_model, loss) → two steps on fake tensors, recorded on the dry run's tape → Diagnosis
with a budget             → which modules to recompute, verified by examining the step again with them wrapped

file · steps · watch   a user's file; its two steps; their recorder
sharded                   the cost of FSDP2, tensor parallelism, recomputation
memory · advice · user_errors   live bytes over time; what to recompute; an error in one line that names the user's line
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from fivefold.diagnosis.doctor import memory
from fivefold.diagnosis.doctor.advice import advise, list_candidates
from fivefold.diagnosis.doctor.sharded import Plan, check_ranks, measure_costs
from fivefold.diagnosis.doctor.steps import ExaminedSteps, Step, UserCode, make_plain_step, recompute, run_steps
from fivefold.diagnosis.doctor.user_errors import convert_user_exceptions
from fivefold.errors import UserError
from fivefold.results.diagnosis import Advice, Diagnosis

__all__ = ["Advice", "Diagnosis", "examine", "recompute"]


def examine(
    make_model: Callable[[], nn.Module],
    loss: Callable[[nn.Module], Tensor] | None = None,
    *,
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
    step: Step | None = None,
    budget_bytes: int | None = None,
    fsdp: int | None = None,
    tp: int | None = None,
    plan: Callable[[nn.Module], Plan] | None = None,
    file: str | None = None,
    report: Callable[[str], None] | None = None,
) -> Diagnosis:
    """Examine two training steps of ``make_model()``.

    ``loss`` makes its own inputs; ``step`` replaces the full step. ``budget_bytes``: peak memory to reach by
    recomputation. ``fsdp``, ``tp``: number of ranks over which FSDP2, or tensor parallelism by ``plan(model)``, is
    priced. ``file``: path of the user's code, whose lines are named in a ``UserError``. ``report`` is called with a
    line of progress.
    """
    if step is None and loss is None:
        raise UserError("the file defines neither loss(model) nor step(model, optimizer); write one of them")
    if budget_bytes is not None and budget_bytes <= 0:
        raise UserError(f"a budget of {budget_bytes} bytes is too small; write for example 24GiB")
    check_ranks([("--fsdp", fsdp), ("--tp", tp)])
    user = UserCode(make_model, make_optimizer or _make_adamw, step or make_plain_step(loss))  # type: ignore[arg-type]
    on_progress = report or (lambda _: None)
    follow = list_candidates if budget_bytes is not None else None
    on_progress("examining two steps")
    with convert_user_exceptions(file):
        steps = run_steps(user, follow=follow)
    advice = None
    if budget_bytes is not None:
        advice = advise(
            steps, budget_bytes=budget_bytes, examine=partial(_examine_recomputed, user, file=file, tell=on_progress)
        )
    diagnosis = _build_diagnosis(steps, advice)
    if fsdp is None and tp is None:
        return diagnosis
    return diagnosis.replace(costs=measure_costs(user, fsdp=fsdp, tp=tp, plan=plan, file=file, report=on_progress))


def _examine_recomputed(
    user: UserCode, modules: tuple[str, ...], *, file: str | None, tell: Callable[[str], None]
) -> ExaminedSteps:
    tell(f"recomputing {len(modules)} modules")
    with convert_user_exceptions(file):
        return run_steps(user, recompute_in=modules)


def _make_adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


def _build_diagnosis(seen: ExaminedSteps, advice: Advice | None) -> Diagnosis:
    """Return the diagnosis of the two examined steps."""
    parts = memory.list_module_costs(seen.model, seen.steady)
    full_model = parts[0]
    parameters = list(seen.model.parameters())
    return Diagnosis(
        model=type(seen.model).__name__,
        optimizer=type(seen.optimizer).__name__,
        parameters=full_model.parameters,
        trainable=sum(p.numel() for p in parameters if p.requires_grad),
        parameters_bytes=_count_peak_bytes(seen, "parameters"),
        gradients_bytes=_count_peak_bytes(seen, "gradients"),
        optimizer_bytes=_count_peak_bytes(seen, "optimizer"),
        kept_bytes=full_model.kept_bytes,
        first=memory.describe_peak(seen.first),
        steady=memory.describe_peak(seen.steady),
        forward_flops=full_model.forward_flops,
        backward_flops=full_model.backward_flops,
        recomputed_flops=full_model.recomputed_flops,
        parts=parts,
        remarks=seen.remarks,
        advice=advice,
    )


def _count_peak_bytes(seen: ExaminedSteps, category: str) -> int:
    """Return the most bytes of a category that are live at the same time in the steady step."""
    return memory.find_most(seen.steady, category)
