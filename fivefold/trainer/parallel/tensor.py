"""Tensor parallelism: column-parallel linears shard outputs, row-parallel ones inputs, the embedding its vocabulary.

    column   sp: all_gather x or its cast · backward x, overlapped with dx, reduce_scatter dx, overlapped with dW
             else: all_reduce dx
    row      sp: reduce_scatter y · backward all_gather dy                                       else: all_reduce y
    gather   rows that all heads need: sp: all_gather · backward reduce_scatter                  else: all_reduce dx
    embed    as a row layer · head  as a column layer, and 3 all_reduces of one fp32 per row in the loss

Under sp the stream between row and column linears is sharded over tp by rows. arXiv:1909.08053, arXiv:2205.05198
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.model.mixers.geometry import MixerGeometry
from fivefold.model.spec import Model
from fivefold.trainer.model.indexer import LightningIndexer
from fivefold.trainer.model.kernels.eager import EAGER, Kernels
from fivefold.trainer.model.kernels.loss import skip_rows
from fivefold.trainer.model.kernels.norms import RankSums
from fivefold.trainer.model.linear import Linear, LinearGemms, LinearHooks, Wait
from fivefold.trainer.model.logits import PLAIN, LogitTransform
from fivefold.trainer.model.norm import RmsNorm
from fivefold.trainer.model.operation import exclude_from_graphs
from fivefold.trainer.model.sparse_mixer import ExpertNoise
from fivefold.trainer.parallel.collectives import all_gather, all_reduce, reduce_scatter, sum_rows
from fivefold.trainer.parallel.mesh import AxisGroup


class _TensorParallelHooks(LinearHooks):
    """Hooks of a linear sharded over ``axis``; ``sp``: the stream outside it is sharded by rows."""

    def __init__(self, axis: AxisGroup, *, sp: bool) -> None:
        self.axis, self.sp = axis, sp

    def start_sum(self, x: Tensor) -> Wait:
        """Start the sum over ranks: reduce_scatter with sp, else all_reduce in place (``x`` is overwritten)."""
        return (reduce_scatter if self.sp else all_reduce)(x, self.axis).wait

    def start_gather(self, x: Tensor) -> Wait:
        """Start the all_gather of rows with sp; without it return ``x``."""
        return all_gather(x, self.axis).wait if self.sp else lambda: x


class ColumnParallel(_TensorParallelHooks):
    """Column-parallel linear: each rank computes some outputs, for all rows."""

    def rows(self, number: int) -> int:
        """Return the number of rows inside the linear: with sp, those of all ranks."""
        return number * self.axis.size if self.sp else number

    def enter(self, x: Tensor) -> Tensor:
        """All-gather the input: local rows → all rows (with sp)."""
        return self.start_gather(x)()

    def operand(self, x: Tensor, gemms: LinearGemms) -> Any:
        """All-gather the input (with sp), in its cast form if the GEMM casts it."""
        if not (self.sp and gemms.travels):
            return gemms.operand(self.enter(x))
        return gemms.shared_operand(x, agree=self._agree, gather=self._gather)

    def _agree(self, largest: Tensor) -> Tensor:
        return all_reduce(largest, self.axis, op=dist.ReduceOp.MAX).wait()

    def _gather(self, parts: Sequence[Tensor]) -> list[Tensor]:
        gathers = [all_gather(part, self.axis) for part in parts]
        return [gather.wait() for gather in gathers]

    def begin_reenter(self, x: Tensor) -> Wait:
        """Start the all_gather of the input again in the backward, concurrent with dx = g W."""
        return self.start_gather(x)

    def begin_enter_backward(self, gradient: Tensor) -> Wait:
        """Start the sum of dx over ranks, concurrent with dW = gᵀ x."""
        return self.start_sum(gradient)


class RowParallel(_TensorParallelHooks):
    """Row-parallel linear: each rank has some inputs; the products are summed over ranks."""

    partial = True

    def columns(self, number: int) -> range:
        """Return this rank's columns of the input."""
        return range(self.axis.rank * number, (self.axis.rank + 1) * number)

    def rows(self, number: int) -> int:
        """Return the number of rows outside the linear: with sp, this rank's."""
        return number // self.axis.size if self.sp else number

    def leave(self, y: Tensor) -> Tensor:
        """Sum the output over ranks: partial sums of all rows → local rows (with sp)."""
        return self.start_sum(y)()

    def leave_backward(self, gradient: Tensor) -> Tensor:
        """All-gather dy: local rows → all rows (with sp)."""
        return self.start_gather(gradient)()

    def sum_over_columns(self, squares: Tensor) -> Tensor:
        """All-reduce the sums over this rank's columns of the weight."""
        return all_reduce(squares, self.axis).wait()


class GatherRows:
    """All-gathers rows that the heads of every rank need; the gradient is summed over ranks."""

    def __init__(self, axis: AxisGroup, *, sp: bool) -> None:
        self.hooks = _TensorParallelHooks(axis, sp=sp)

    @exclude_from_graphs
    def __call__(self, x: Tensor) -> Tensor:
        """All-gather local rows to all rows; without sp return ``x``."""
        return _GatherRows.apply(x, self.hooks)


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, hooks: _TensorParallelHooks) -> Tensor:
        ctx.hooks = hooks
        return hooks.start_gather(x)() if hooks.sp else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        hooks: _TensorParallelHooks = ctx.hooks
        return hooks.start_sum(gradient if hooks.sp else gradient.clone())(), None


class RowsOfRanks:
    """The rows of this rank among those of all ranks (sp), without a gradient."""

    def __init__(self, axis: AxisGroup) -> None:
        self.axis, self.rank = axis, axis.rank

    @exclude_from_graphs
    def gather(self, rows: Tensor) -> Tensor:
        """All-gather local rows to all rows."""
        return all_gather(rows, self.axis).wait()


class VocabParallel:
    """Vocabulary sharded over ``axis``: every rank has equally many entries of embedding and logits, padding last."""

    def __init__(
        self,
        axis: AxisGroup,
        *,
        sp: bool,
        vocab: int,
        transform: LogitTransform = PLAIN,
        kernels: Kernels = EAGER,
        skips_negative_targets: bool = False,
    ) -> None:
        self.hooks, self.vocab, self.transform = _TensorParallelHooks(axis, sp=sp), vocab, transform
        self.kernels, self.skips_negative_targets = kernels, skips_negative_targets

    def to_local(self, ids: Tensor, *, held: int) -> tuple[Tensor, Tensor]:
        """Return the indices of ``ids`` among this rank's ``held`` entries, and a mask of the ids of other ranks."""
        local_ids = ids - self.hooks.axis.rank * held
        return local_ids, (local_ids < 0) | (local_ids >= held)

    @exclude_from_graphs
    def lookup(self, ids_R: Tensor, weight: Tensor) -> Tensor:
        """Embed ids of all rows → local rows [R, D] of the stream. The gradient of ``weight`` goes through autograd."""
        return _Lookup.apply(ids_R, weight, self)

    def nats(self, logits: Tensor, targets: Tensor, gradient_scale: Tensor | float | None) -> Tensor:
        """Compute ``nats`` over the sharded vocabulary, in two passes without gathering logits; equal on all ranks."""
        axis, held = self.hooks.axis, logits.shape[1]
        self.transform.shape_(logits, padding=slice(max(0, self.vocab - axis.rank * held), None))
        local_targets, foreign = self.to_local(targets, held=held)  # a negative target is on no rank
        local_targets = local_targets.masked_fill_(foreign, 0)[:, None]
        is_local = ~foreign[:, None]
        target = logits.gather(1, local_targets).float().masked_fill_(~is_local, 0)
        target_reduction = all_reduce(target, axis)  # overlaps with the first pass
        lse = _logsumexp_over_ranks(self.kernels.log_sum_exp(logits), axis)
        counted = skip_rows(targets, lse)[1] if self.skips_negative_targets else None
        if gradient_scale is not None:
            self.kernels.logits_to_gradient(
                logits, lse, local_targets, is_local, gradient_scale, transform=self.transform
            )
        losses = lse - target_reduction.wait()
        return (losses if counted is None else losses.masked_fill_(~counted, 0)).sum()


class NormSums(RankSums):
    """Sums of squares for a norm over all heads; ranks that hold copies of a key head each add their share."""

    def __init__(self, axis: AxisGroup, *, width: int, holders: int) -> None:
        self.axis, self.width, self.holders = axis, width, holders

    @exclude_from_graphs
    def __call__(self, rows: Tensor) -> Tensor:
        """All-reduce ``rows`` [R, 1]."""
        summed = all_reduce(rows, self.axis).wait()
        return summed if self.holders == 1 else summed.div_(self.holders)


def _local_rows(axis: AxisGroup, rows: Tensor) -> Tensor:
    """Return this rank's chunk of ``rows``, equally many per rank (sp)."""
    return rows.chunk(axis.size)[axis.rank]


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, vocabulary: VocabParallel) -> Tensor:
        ctx.vocabulary, ctx.held = vocabulary, weight.shape[0]
        ctx.save_for_backward(ids)
        local_ids, foreign = vocabulary.to_local(ids, held=ctx.held)
        embedded = F.embedding(local_ids.masked_fill_(foreign, 0), weight).masked_fill_(foreign[:, None], 0)
        return vocabulary.hooks.start_sum(embedded)()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, None]:
        (ids,) = ctx.saved_tensors
        wait_gradient = ctx.vocabulary.hooks.start_gather(gradient)
        local_ids, foreign = ctx.vocabulary.to_local(ids, held=ctx.held)
        local_ids.masked_fill_(foreign, -1)  # the padding index, which the embedding's backward skips
        return None, torch.ops.aten.embedding_dense_backward(wait_gradient(), local_ids, ctx.held, -1, False), None


def _logsumexp_over_ranks(lse: Tensor, axis: AxisGroup) -> Tensor:
    """Return log Σ over ranks of exp(lse), computed relative to the largest, so that nothing overflows."""
    top = all_reduce(lse.clone(), axis, op=dist.ReduceOp.MAX).wait()
    return all_reduce(lse.sub_(top).exp_(), axis).wait().log_().add_(top)


# projections of the stream in mixers; the replicated ones down to a low rank read all rows too
MIXER_COLUMNS = ("q", "k", "v", "z", "b", "a", "x", "y", "project", "decay", "gate", "decay_down", "gate_down")
# parallel style by the end of a weight's name (model/weights.py)
PLAN: dict[str, type[ColumnParallel] | type[RowParallel]] = {
    "attention.q": ColumnParallel, "attention.k": ColumnParallel, "attention.v": ColumnParallel,
    "attention.gate": ColumnParallel, "attention.out": RowParallel,
    "attention.q_up": ColumnParallel, "attention.kv_up": ColumnParallel,
    "mlp.gate": ColumnParallel, "mlp.up": ColumnParallel, "mlp.down": RowParallel,
    "moe.shared.gate": ColumnParallel, "moe.shared.up": ColumnParallel, "moe.shared.down": RowParallel,
    **{f"mixer.{name}": ColumnParallel for name in MIXER_COLUMNS},
    "mixer.out": RowParallel,
    "head.out": ColumnParallel,
}  # fmt: skip
LOCAL_ROWS = ("attention.q_down", "attention.kv_down")  # replicated; under sequence parallelism on a rank's rows


HEAD_NORMS = ("attention.q_norm", "attention.k_norm")
SUB_NORMS = ("attention.out_norm", "mlp.norm")  # of the inputs of row-parallel layers
HEADS_NORM = "mixer.norm"  # of all heads of lightning attention; other mixers norm the heads or groups of a rank


def attach(module: nn.Module, axis: AxisGroup, *, sp: bool) -> None:
    """Set the hooks of a ``Transformer`` for weights sharded over ``axis`` as ``layout/sharding.py`` says."""
    model = cast(Model, module.model)
    kernels = cast(Kernels, module.get_submodule("head").kernels)
    vocabulary = VocabParallel(
        axis,
        sp=sp,
        vocab=model.vocab,
        transform=LogitTransform.from_model(model),
        kernels=kernels,
        skips_negative_targets=cast(bool, module.get_submodule("head").skips_negative_targets),
    )
    for name, submodule in module.named_modules():
        for ending, style in PLAN.items():
            if name.endswith(ending) and isinstance(submodule, Linear):
                submodule.hooks = style(axis, sp=sp)
        if sp and name.endswith(LOCAL_ROWS) and isinstance(submodule, Linear) and submodule.lora_dropout is not None:
            submodule.lora_dropout.row_part = (axis.rank, axis.size)
        if sp and isinstance(submodule, ExpertNoise):
            submodule.row_part = (axis.rank, axis.size)
        if isinstance(shape := getattr(submodule, "shape", None), MixerGeometry):
            submodule.shape = shape.shard(axis.size)
        if hasattr(submodule, "decay_rates"):
            held = len(submodule.decay_rates) // axis.size
            submodule.decay_rates = submodule.decay_rates[axis.rank * held :][:held]
        if hasattr(submodule, "sums_over_ranks"):
            submodule.sums_over_ranks.append(partial(sum_rows, axis))
        if hasattr(submodule, "core"):
            submodule.core.heads = submodule.core.heads._replace(part=axis.rank)
        if model.qk_norm == "full" and name.endswith(HEAD_NORMS):
            heads = model.heads if name.endswith("q_norm") else model.kv_heads
            holders = max(1, axis.size // heads)
            submodule.sums = NormSums(axis, width=heads * model.head_dim, holders=holders)
        is_heads_norm = name.endswith(HEADS_NORM) and isinstance(submodule, RmsNorm)
        if is_heads_norm or (model.sub_norm and name.endswith(SUB_NORMS)):
            submodule.sums = NormSums(axis, width=cast(nn.Parameter, submodule.weight).shape[0], holders=1)
        if hasattr(submodule, "share"):
            submodule.share = GatherRows(axis, sp=sp)
        if sp and isinstance(submodule, LightningIndexer):
            submodule.row_share = RowsOfRanks(axis)
        if hasattr(submodule, "lookup"):
            submodule.lookup = vocabulary.lookup
        if hasattr(submodule, "own_rows") and sp:
            submodule.own_rows = partial(_local_rows, axis)
        if hasattr(submodule, "loss"):
            submodule.loss = vocabulary.nats
