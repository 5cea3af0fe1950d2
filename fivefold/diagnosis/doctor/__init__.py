"""The doctor: counts memory and FLOPs of a training step of any ``nn.Module``, without a GPU.

examine(make_model, loss) → two steps on fake tensors, recorded on the dry run's tape → Diagnosis
with a budget             → which modules to recompute, verified by examining the step again with them wrapped

file · rehearse · watch   a user's file; its two steps; their recorder
sharded                   what FSDP2, tensor parallelism, recomputation would cost
memory · advice · user_errors   live bytes over time; what to recompute; an error in one line that names the user's line
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from fivefold.diagnosis.doctor import memory
from fivefold.diagnosis.doctor.advice import advise, candidates
from fivefold.diagnosis.doctor.rehearse import ExaminedSteps, Step, UserCode, plain_step, recompute, rehearse
from fivefold.diagnosis.doctor.sharded import Plan, check_ranks, costs
from fivefold.diagnosis.doctor.user_errors import blaming
from fivefold.record import Mistake
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
    """Examine two training steps of ``make_model()``. ``loss`` makes its own inputs; ``step`` replaces the whole step.

    ``budget_bytes``: peak memory to reach by recomputation. ``fsdp``, ``tp``: over how many ranks FSDP2, or tensor
    parallelism by ``plan(model)``, is to be priced. ``file``: path of the user's code, whose lines are named in a
    ``Mistake``. ``report`` is called with a line of progress.
    """
    if step is None and loss is None:
        raise Mistake("there is neither loss(model) nor step(model, optimizer); write one of them")
    if budget_bytes is not None and budget_bytes <= 0:
        raise Mistake(f"a budget of {budget_bytes} bytes holds nothing; write such as 24GiB")
    check_ranks([("--fsdp", fsdp), ("--tp", tp)])
    user = UserCode(make_model, make_optimizer or _adamw, step or plain_step(loss))  # type: ignore[arg-type]
    tell = report or (lambda _: None)
    follow = candidates if budget_bytes is not None else None
    tell("examining two steps")
    with blaming(file):
        seen = rehearse(user, follow=follow)
    advice = None
    if budget_bytes is not None:
        advice = advise(seen, budget_bytes=budget_bytes, again=partial(_examine_recomputed, user, file=file, tell=tell))
    found = _diagnosis(seen, advice)
    if fsdp is None and tp is None:
        return found
    return found.replace(costs=costs(user, fsdp=fsdp, tp=tp, plan=plan, file=file, report=tell))


def _examine_recomputed(
    user: UserCode, modules: tuple[str, ...], *, file: str | None, tell: Callable[[str], None]
) -> ExaminedSteps:
    tell(f"recomputing {len(modules)} modules")
    with blaming(file):
        return rehearse(user, recompute_in=modules)


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


def _diagnosis(seen: ExaminedSteps, advice: Advice | None) -> Diagnosis:
    parts = memory.parts(seen.model, seen.steady)
    whole = parts[0]
    every = list(seen.model.parameters())
    return Diagnosis(
        model=type(seen.model).__name__, optimizer=type(seen.optimizer).__name__,
        parameters=whole.parameters, trainable=sum(p.numel() for p in every if p.requires_grad),
        parameters_bytes=_bytes(seen, "parameters"), gradients_bytes=_bytes(seen, "gradients"),
        optimizer_bytes=_bytes(seen, "optimizer"), kept_bytes=whole.kept_bytes,
        first=memory.fullest(seen.first), steady=memory.fullest(seen.steady),
        forward_flops=whole.forward_flops, backward_flops=whole.backward_flops,
        recomputed_flops=whole.recomputed_flops, parts=parts, remarks=seen.remarks, advice=advice,
    )  # fmt: skip


def _bytes(seen: ExaminedSteps, category: str) -> int:
    """Return the most bytes of a category that are live at once in the steady step."""
    return memory.most(seen.steady, category)
