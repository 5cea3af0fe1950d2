"""Expert parallelism: expert weights [E, F, D] are sharded over ep by expert (dim E) and over etp by dim F.

    rows ─ all_to_all over ep ─ all_gather over etp → experts → reduce_scatter over etp ─ all_to_all back
The backward mirrors it. Routing weights travel with the rows. The row counts are exchanged first by an all_to_all of
[E] int64 (etp: also an all_gather), the only messages that the host waits for. Expert e is on ep rank e // (E / ep).
``dispatches = "fp8"``: rows travel to the experts, forward and backward, in tiled fp8, quantized as for grouped GEMMs.
The balance loss needs an all_reduce over tp (sp) and cp of the counts per sequence, in the backward (capacity: in the
forward).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.trainer.model.float8.cast import E4M3, Cast, widen
from fivefold.trainer.model.float8.matmul import Caster
from fivefold.trainer.model.linear import Work
from fivefold.trainer.model.moe import Moe, TokenDispatcher
from fivefold.trainer.model.operation import exclude_from_graphs
from fivefold.trainer.model.router import ExpertRouting
from fivefold.trainer.model.routing import Sequences
from fivefold.trainer.parallel.collectives import Pending, all_gather, all_reduce, all_to_all, reduce_scatter
from fivefold.trainer.parallel.mesh import AxisGroup, Ranks


def attach(
    module: nn.Module,
    ranks: Ranks,
    *,
    sp: bool,
    sequence: int | None = None,
    zigzag: bool = True,
    fp8_cast: Caster | None = None,
) -> None:
    """Set the sequences of every routing of experts in ``module``, and the dispatcher of those of an MLP.

    ``sp``: rows of the stream are sharded over tp; ``sequence``: tokens of a full sequence; ``zigzag``: cp cuts a
    sequence into zig-zag chunks, else contiguous ones; ``fp8_cast``: casts rows that are dispatched in fp8.
    """
    ep, etp, tp, cp = (ranks[name] for name in ("ep", "etp", "tp", "cp"))
    unsharded = cp.size == 1 and (not sp or tp.size == 1)
    for layer in (submodule for submodule in module.modules() if isinstance(submodule, ExpertRouting)):
        if layer.load.is_meta:
            layer.load = torch.zeros_like(layer.load, device=ranks.device)
        layer.sequences = (
            Sequences(sequence) if unsharded else ShardedSequences(sequence, tp if sp else None, cp, zigzag=zigzag)
        )
        if not isinstance(layer, Moe):
            continue
        if layer.bias.is_meta:
            layer.bias = torch.zeros_like(layer.bias, device=ranks.device)
        layer.experts.adds_bias = etp.rank == 0
        layer.experts.copies = 1 if sp else tp.size  # without sp every rank of tp dispatches the same rows
        if ep.size > 1 or etp.size > 1:
            layer.dispatcher = dispatcher = AllToAllDispatcher(ep, etp, fp8_cast=fp8_cast)
            layer.experts.backward_overlap_work = dispatcher.backward_overlap_work


def balance(module: nn.Module, *axes: AxisGroup) -> Tensor:
    """Return the load (rows per expert) [layers, E] of every ``Moe``, summed over ``axes``; call it once per step.

    Resets loads and updates routing biases. ``axes``: the axes whose ranks hold different tokens; one all_reduce each.
    """
    layers = [submodule for submodule in module.modules() if isinstance(submodule, Moe)]
    total = torch.stack([layer.load for layer in layers])
    for axis in axes:
        total = all_reduce(total, axis).wait()
    for layer, load in zip(layers, total, strict=True):
        if layer.moe.balance == "free" and layer.router.weight.requires_grad:
            layer.update_bias(load)
        layer.load.zero_()
    return total


class DispatchPlan:
    """Row counts and order of one micro-batch's dispatch in one layer; starts the all_to_all of ``counts`` [E]."""

    def __init__(
        self,
        counts: Tensor,
        ep: AxisGroup,
        etp: AxisGroup,
        *,
        backward_overlap_work: list[Work],
        fp8_cast: Caster | None,
    ) -> None:
        self.ep, self.etp, self.backward_overlap_work, self.fp8_cast = ep, etp, backward_overlap_work, fp8_cast
        self._counts, self._received_counts = counts, all_to_all(counts, ep)
        self.forth: tuple[Pending, ...] = ()
        self.back: tuple[Pending, ...] = ()
        self._counts_read = False

    def wait_counts(self, copies: int) -> None:
        """Wait for the counts and derive the rows sent and received per rank and the order by expert."""
        if self._counts_read:
            return
        gathered_counts = all_gather(self._received_counts.wait(), self.etp).wait()
        table = gathered_counts.view(
            self.etp.size, self.ep.size, -1
        )  # rows by etp rank, source ep rank and local expert
        numbers = self.read(torch.cat((self._counts.view(self.ep.size, -1).sum(1), table.sum(2).flatten())), copies)
        self.sent = numbers[: self.ep.size]
        received_by_etp = [
            numbers[start : start + self.ep.size] for start in range(self.ep.size, len(numbers), self.ep.size)
        ]
        self.received = received_by_etp[self.etp.rank]
        self.arrived = sum(self.received)
        self.padded_rows_per_rank = max(sum(column) for column in received_by_etp)
        self.offsets = table.sum((0, 1)).cumsum(0, dtype=torch.int32)
        self.order = _sort_by_expert(
            table, [sum(column) for column in received_by_etp], padded_rows_per_rank=self.padded_rows_per_rank
        )
        self._counts_read = True
        del self._counts, self._received_counts

    def read(self, numbers: Tensor, copies: int) -> list[int]:
        """Copy to the host the rows sent per ep rank, then received by etp and source rank. Dry runs use ``copies``."""
        return numbers.tolist()


def _sort_by_expert(table: Tensor, columns: list[int], *, padded_rows_per_rank: int) -> Tensor | None:
    """Return indices that sort received rows by expert, each etp rank's rows padded to ``padded_rows_per_rank``.

    None: already sorted.
    """
    total_rows = sum(columns)
    if len(columns) == 1 and table.shape[2] == 1:
        return None
    experts = torch.arange(table.shape[2], device=table.device).repeat(table.shape[0] * table.shape[1])
    order = experts.repeat_interleave(table.flatten(), output_size=total_rows).argsort(stable=True)
    if len(columns) == 1:
        return order
    starts = [padded_rows_per_rank * column - sum(columns[:column]) for column in range(len(columns))]
    shift = torch.tensor(starts, device=table.device).repeat_interleave(table.sum((1, 2)), output_size=total_rows)
    return order + shift[order]


def _start_dispatch(x: Tensor, plan: DispatchPlan) -> tuple[Pending, ...]:
    """Start the all_to_all over ep of rows [n, D] (fp8 if fp8_cast) or routing weights [n], sorted by expert."""
    parts: tuple[Tensor, ...] = (x,)
    if plan.fp8_cast is not None and x.dim() > 1:
        cast = plan.fp8_cast(x)
        parts = (cast.data.view(torch.uint8), cast.scale)
    return tuple(all_to_all(part, plan.ep, sent=plan.sent, received=plan.received) for part in parts)


def _finish_dispatch(arrived: list[Tensor], plan: DispatchPlan, dtype: torch.dtype) -> list[Tensor]:
    """All-gather the received rows over etp, sort them by expert, and dequantize rows to ``dtype``."""
    if plan.etp.size > 1:
        padding = [(0, 0) * (x.dim() - 1) + (0, plan.padded_rows_per_rank - plan.arrived) for x in arrived]
        pending = [all_gather(F.pad(x, pad), plan.etp) for x, pad in zip(arrived, padding, strict=True)]
        arrived = [gather.wait() for gather in pending]
    if plan.order is not None:
        arrived = [x.index_select(0, plan.order) for x in arrived]
    if plan.fp8_cast is not None:
        data, scale, *rest = arrived
        arrived = [widen(Cast(data.view(E4M3), scale), dtype), *rest]
    return arrived


def _start_combine(rows_and_weights: list[Tensor], plan: DispatchPlan) -> tuple[Pending, ...]:
    """Undo the sort, reduce_scatter over etp (partial sums over F), and start the all_to_all over ep."""
    rows, order = plan.padded_rows_per_rank * plan.etp.size, plan.order
    received_order = (
        rows_and_weights
        if order is None
        else [x.new_zeros(rows, *x.shape[1:]).index_copy_(0, order, x) for x in rows_and_weights]
    )
    if plan.etp.size > 1:
        pending = [reduce_scatter(x, plan.etp) for x in received_order]
        received_order = [reduction.wait()[: plan.arrived] for reduction in pending]
    return tuple(all_to_all(x, plan.ep, sent=plan.received, received=plan.sent) for x in received_order)


class AllToAllDispatcher(TokenDispatcher):
    """Token dispatcher for experts sharded over ep and etp; ``fp8_cast`` casts rows that travel in fp8."""

    def __init__(self, ep: AxisGroup, etp: AxisGroup, *, fp8_cast: Caster | None = None) -> None:
        self.ep, self.etp, self.fp8_cast = ep, etp, fp8_cast
        self.backward_overlap_work: list[Work] = []  # work that the backward runs while the rows' gradients travel

    def plan(self, counts: Tensor) -> DispatchPlan:
        """Start the all_to_all of the row counts per expert, [E] int64."""
        return DispatchPlan(
            counts, self.ep, self.etp, backward_overlap_work=self.backward_overlap_work, fp8_cast=self.fp8_cast
        )

    @exclude_from_graphs
    def send(self, rows: Tensor, share: Tensor, plan: DispatchPlan) -> tuple[Tensor, Tensor]:
        """Start the dispatch; return two empty tensors that only link ``arrive`` to it in the autograd graph."""
        rows, share = _Dispatch.apply(rows, share, plan)
        return rows, share

    @exclude_from_graphs
    def arrive(self, rows: Tensor, share: Tensor, plan: DispatchPlan) -> tuple[Tensor, Tensor]:
        """Wait for the dispatch; return rows [n', D] and routing weights [n'] for the local experts, from all ranks."""
        rows, share = _Arrive.apply(rows, share, plan)
        return rows, share

    def offsets(self, plan: DispatchPlan) -> Tensor:
        """Return the end of each local expert's rows: cumulative counts, int32 [local experts]."""
        return plan.offsets

    @exclude_from_graphs
    def combine(self, rows: Tensor, plan: DispatchPlan) -> Tensor:
        """Send expert outputs back to the ranks of their tokens: [n', D] → [n, D]."""
        return _Return.apply(rows, plan)


class _Dispatch(torch.autograd.Function):
    """Start the forward's all_to_all and wait for the backward's.

    ``_Arrive`` does the reverse, so that both overlap. Each backward frees the plan, which would otherwise last as long
    as the graph.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, share: Tensor, plan: DispatchPlan) -> tuple[Tensor, Tensor]:
        ctx.plan = plan
        plan.wait_counts(rows.shape[0])
        plan.forth = (*_start_dispatch(rows, plan), *_start_dispatch(share, plan))
        return rows.new_empty(0), share.new_empty(0)

    @staticmethod
    def backward(ctx: Any, _rows: Tensor, _share: Tensor) -> tuple[Tensor, Tensor, None]:
        plan, ctx.plan = ctx.plan, None
        rows, share = (transfer.wait() for transfer in plan.back)
        return rows, share, None


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, _share: Tensor, plan: DispatchPlan) -> tuple[Tensor, ...]:
        ctx.plan = plan
        pending, plan.forth = plan.forth, ()
        return tuple(_finish_dispatch([transfer.wait() for transfer in pending], plan, rows.dtype))

    @staticmethod
    def backward(ctx: Any, rows: Tensor, share: Tensor) -> tuple[Tensor, Tensor, None]:
        plan, ctx.plan = ctx.plan, None
        plan.back = _start_combine([rows, share], plan)
        while plan.backward_overlap_work:
            plan.backward_overlap_work.pop(0)()
        return rows.new_empty(0), share.new_empty(0), None


class _Return(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, plan: DispatchPlan) -> Tensor:
        ctx.plan = plan
        return _start_combine([rows], plan)[0].wait()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        plan, ctx.plan = ctx.plan, None
        (rows,) = _finish_dispatch(
            [transfer.wait() for transfer in _start_dispatch(gradient, plan)], plan, gradient.dtype
        )
        return rows, None


class ShardedSequences(Sequences):
    """Sequences sharded over ranks: over cp by chunks of each sequence, over tp (sp) by contiguous rows of them all."""

    def __init__(self, tokens: int | None, tp: AxisGroup | None, cp: AxisGroup, *, zigzag: bool) -> None:
        super().__init__(tokens)
        self.cp = cp
        self.tp = AxisGroup("tp", 0, (0,), None) if tp is None else tp
        self.chunks = 2 if zigzag and cp.size > 1 else 1  # chunks of each sequence on this rank
        self.parts = self.tp.size * cp.size * self.chunks

    def number(self, rows: int) -> int:
        """Return the number of sequences in the micro-batch, given this rank's rows."""
        return super().number(rows * self.tp.size * self.cp.size)

    def piece(self, rows: int, device: torch.device) -> Tensor:
        """Return the index of each local row's part, int64 [R]: sequence · parts + part.

        A part is one (cp chunk, tp rank).
        """
        row = torch.arange(rows, device=device) + self.tp.rank * rows
        local_tokens = rows * self.tp.size // self.number(rows)  # tokens of each sequence
        chunk_index = row % local_tokens // (local_tokens // self.chunks)
        last_chunk = self.cp.size * self.chunks - 1
        chunk = torch.where(chunk_index == 0, self.cp.rank, last_chunk - self.cp.rank)
        return row // local_tokens * self.parts + chunk * self.tp.size + self.tp.rank

    def total(self, counts: Tensor) -> Tensor:
        """Sum ``counts`` over tp and cp: two all_reduces."""
        return all_reduce(all_reduce(counts, self.tp).wait(), self.cp).wait()
