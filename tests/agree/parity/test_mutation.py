"""A wrong parallelism is found: each collective, left out by itself, makes the parity fail.

Left out means: within one method the message is not sent, and what should have come is made of what is here, in the
right shape. So nothing but the comparison can see it.
"""

from __future__ import annotations

import functools
import importlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from fivefold.trainer.parallel.collectives import Pending
from fivefold.trainer.parallel.mesh import AxisGroup
from tests.agree.parity.cases import Case
from tests.agree.parity.compare import judge, reference
from tests.agree.parity.rank import train_rank
from tests.processes import run_forked
from tests.selection import mark_share

FOUND = 1e-3  # a hundred times what parity allows
STEPS = 2  # weights are gathered anew in the second


class Mutation(NamedTuple):
    """``collective`` is not sent where ``place`` (module:function or module:Class.method) asks for it."""

    name: str
    case: Case
    place: str
    collective: str
    axis: str = ""  # only over this one; empty: over any
    call: int | None = None  # only at this one of the calls in ``place``; None: at all


TP, NOSP, MLA, RING = Case("dense", "tp2"), Case("dense", "tp2 nosp"), Case("mla", "tp2"), Case("dense", "cp2")
ULYSSES, EP, ETP = Case("dense", "cp2 cp=ulysses"), Case("moe", "dp2 ep2"), Case("moe", "tp2 etp2")
MUTATIONS = [
    Mutation("column gathers its input", TP, "tensor:ColumnParallel.enter", "all_gather"),
    Mutation("column gathers it again", TP, "tensor:ColumnParallel.begin_reenter", "all_gather"),
    Mutation("column sums dx by rows", TP, "tensor:ColumnParallel.begin_enter_backward", "reduce_scatter"),
    Mutation("column sums dx", NOSP, "tensor:ColumnParallel.begin_enter_backward", "all_reduce"),
    Mutation("row sums by rows", TP, "tensor:RowParallel.leave", "reduce_scatter"),
    Mutation("row sums", NOSP, "tensor:RowParallel.leave", "all_reduce"),
    Mutation("row gathers dy", TP, "tensor:RowParallel.leave_backward", "all_gather"),
    Mutation("embedding sums by rows", TP, "tensor:_Lookup.forward", "reduce_scatter"),
    Mutation("embedding sums", NOSP, "tensor:_Lookup.forward", "all_reduce"),
    Mutation("embedding gathers dx", TP, "tensor:_Lookup.backward", "all_gather"),
    Mutation("loss: logits of the targets", TP, "tensor:VocabParallel.nats", "all_reduce", call=0),
    Mutation("loss: maxima", TP, "tensor:_logsumexp_over_ranks", "all_reduce", call=0),
    Mutation("loss: sums", TP, "tensor:_logsumexp_over_ranks", "all_reduce", call=1),
    Mutation("rotary key is gathered", MLA, "tensor:_GatherRows.forward", "all_gather"),
    Mutation("its gradient is summed by rows", MLA, "tensor:_GatherRows.backward", "reduce_scatter"),
    Mutation("its gradient is summed", Case("latent", "tp2 nosp"), "tensor:_GatherRows.backward", "all_reduce"),
    Mutation("ring: keys go round", RING, "context:_Ring.forward", "exchange"),
    Mutation("ring: and again in the backward", RING, "context:_Ring.backward", "exchange", call=0),
    Mutation("ring: their gradients follow", RING, "context:_Ring.backward", "exchange", call=1),
    Mutation("ulysses: heads for tokens", ULYSSES, "context:_to_tokens", "all_to_all"),
    Mutation("ulysses: tokens for heads", ULYSSES, "context:_to_heads", "all_to_all"),
    Mutation("ulysses: there", ULYSSES, "context:_AllToAll.forward", "all_to_all"),
    Mutation("ulysses: and back", ULYSSES, "context:_AllToAll.backward", "all_to_all"),
    Mutation("rows go to their experts", EP, "expert:_Dispatch.forward", "all_to_all", call=0),
    Mutation("so do their weights", EP, "expert:_Dispatch.forward", "all_to_all", call=1),
    Mutation("rows come home", EP, "expert:_Return.forward", "all_to_all"),
    Mutation("gradients go to the experts", EP, "expert:_Return.backward", "all_to_all"),
    Mutation("gradients come home", EP, "expert:_Arrive.backward", "all_to_all", call=0),
    Mutation("those of the weights too", EP, "expert:_Arrive.backward", "all_to_all", call=1),
    Mutation("parts of an expert get all rows", ETP, "expert:_Arrive.forward", "all_gather"),
    Mutation("parts of an expert add up", ETP, "expert:_Return.forward", "reduce_scatter"),
    Mutation("parts of an expert get all gradients", ETP, "expert:_Return.backward", "all_gather"),
    Mutation("gradients of the parts add up", ETP, "expert:_Arrive.backward", "reduce_scatter", call=0),
    Mutation(
        "balance is of all rows over tp", Case("moe", "tp2"), "expert:ShardedSequences.total", "all_reduce", axis="tp"
    ),
    Mutation(
        "balance is of all rows over cp", Case("moe", "cp2"), "expert:ShardedSequences.total", "all_reduce", axis="cp"
    ),
    Mutation("load of experts is of all ranks", Case("moe-free", "dp2"), "expert:balance", "all_reduce"),
    Mutation("activations go on", Case("dense", "pp2"), "pipeline:Pipeline._forward", "isend"),
    Mutation("gradients go back", Case("dense", "pp2"), "pipeline:Pipeline._backward", "isend"),
    Mutation("zero1 gathers weights", Case("dense", "dp2 zero1"), "zero:ZeroUnit.begin", "all_gather"),
    Mutation("zero3 gathers weights", Case("dense", "dp2 zero3"), "zero:ZeroUnit.begin", "all_gather"),
    Mutation("zero reduces gradients", Case("dense", "dp2 zero2"), "gradients:Gradients._reduce", "reduce_scatter"),
    Mutation(
        "replicas add up", Case("dense", "dp2 zero0"), "gradients:Gradients._reduce", "all_reduce", axis="replica"
    ),
    Mutation(
        "expert replicas add up",
        Case("moe", "dp2 zero0"),
        "gradients:Gradients._reduce",
        "all_reduce",
        axis="expert_replica",
    ),
    Mutation("norms add up over tp", TP, "gradients:Gradients._sum", "all_reduce", axis="tp"),
    Mutation("copies of kv heads add up", Case("few-kv", "tp4"), "gradients:Gradients._sum", "all_reduce", axis="kv"),
    Mutation("two ends of a tied table", Case("tied", "pp2"), "gradients:Gradients._sum", "all_reduce", axis="pp_tie"),
    Mutation(
        "two copies of a stage", Case("dense", "pp2 dualpipe"), "gradients:Gradients._sum", "all_reduce", axis="twin"
    ),
    Mutation("norm and loss of the step", TP, "optimizer:sum_over_ranks", "all_reduce"),
]


def stand_in(collective: str, x: Tensor, axis: AxisGroup, *, received: Sequence[int] | None = None) -> Tensor:
    """What would come if every rank had what this one has, or nothing were added."""
    if collective == "all_gather":
        return torch.cat([x] * axis.size)
    if collective == "reduce_scatter":
        return x.chunk(axis.size)[axis.rank].clone()
    if collective == "all_to_all":
        rows = x.shape[0] if received is None else sum(received)
        return torch.cat((x[:rows], x.new_zeros(max(0, rows - x.shape[0]), *x.shape[1:])))
    return x


def silence(mutation: Mutation, sent: Callable[..., Any], calls: Iterator[int]) -> Callable[..., Any]:
    """``sent``, which is the collective, without the messages that the mutation leaves out."""

    def collective(x: Tensor, axis: AxisGroup, **options: Any) -> Any:
        if mutation.call not in (None, next(calls)) or mutation.axis not in ("", axis.name) or axis.size == 1:
            return sent(x, axis, **options)
        made = stand_in(mutation.collective, x, axis, received=options.get("received"))
        out = options.get("out")
        return Pending(made if out is None else out.copy_(made.view_as(out)))

    def exchange(sends: Any, receives: Any, axis: AxisGroup) -> Any:
        if mutation.call not in (None, next(calls)):
            return sent(sends, receives, axis)
        for (mine, _), (coming, _) in zip(sends, receives, strict=True):
            coming.copy_(mine)
        return []

    def isend(x: Tensor, *to: Any, **options: Any) -> Any:
        return sent(x.zero_(), *to, **options)  # a message must come, but nothing is in it

    others: dict[str, Callable[..., Any]] = {"exchange": exchange, "isend": isend}
    return others.get(mutation.collective, collective)


def leave_out(mutation: Mutation) -> None:
    """Sabotage of this process: within ``place`` the name ``collective`` means what does not speak."""
    module_name, _, path = mutation.place.partition(":")
    package = "fivefold.trainer.optimizers" if module_name == "optimizer" else "fivefold.trainer.parallel"
    module = importlib.import_module(f"{package}.{module_name}")
    *outer, last = path.split(".")
    owner: Any = functools.reduce(getattr, outer, module)
    speaks: Any = torch.distributed if mutation.collective == "isend" else module
    sent, function = getattr(speaks, mutation.collective), getattr(owner, last)

    @functools.wraps(function)
    def call_silenced(*args: Any, **options: Any) -> Any:
        setattr(speaks, mutation.collective, silence(mutation, sent, itertools.count()))
        try:
            return function(*args, **options)
        finally:
            setattr(speaks, mutation.collective, sent)

    setattr(
        owner, last, staticmethod(call_silenced) if isinstance(vars(owner).get(last), staticmethod) else call_silenced
    )


@pytest.mark.long  # a test of a test
@pytest.mark.parametrize("mutation", mark_share(25, MUTATIONS), ids=lambda mutation: mutation.name)
def test_an_omitted_collective_is_detected(mutation: Mutation) -> None:
    case = mutation.case
    told = run_forked(
        case.layout.world, train_rank, case.model, case.layout, case.job, partial(leave_out, mutation), STEPS
    )
    verdict = judge(case, told, like=reference(case.model, case.job, STEPS))
    assert max(verdict.loss_error, verdict.norm_error, verdict.gradient_error) > FOUND
