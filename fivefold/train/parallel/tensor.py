"""Tensor parallelism: a column layer is cut by its outputs, a row layer by its inputs, the vocabulary by its words.

    column   sp: all_gather x · backward again, beside dx, then reduce_scatter dx, beside dW     else: all_reduce dx
    row      sp: reduce_scatter y · backward all_gather dy                                       else: all_reduce y
    share    rows that all heads need: sp: all_gather · backward reduce_scatter                  else: all_reduce dx
    embed    as a row layer · head  as a column layer, and 3 all_reduces of one fp32 per row in the loss

Under sp the stream between row outputs and column inputs is cut over tp by rows. arXiv:1909.08053, arXiv:2205.05198
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.model.spec import Model
from fivefold.train.model.kernels import row_chunks
from fivefold.train.model.linear import Around, Linear, Wait
from fivefold.train.parallel.collectives import all_gather, all_reduce, reduce_scatter
from fivefold.train.parallel.mesh import Axis


class _Over(Around):
    """A linear layer cut over ``axis``; ``sp``: the stream outside it is cut by rows."""

    def __init__(self, axis: Axis, *, sp: bool) -> None:
        self.axis, self.sp = axis, sp

    def summed(self, x: Tensor) -> Wait:
        """Start the sum over ranks: this rank's rows of it, or all; ``x`` may be overwritten."""
        return (reduce_scatter if self.sp else all_reduce)(x, self.axis).wait

    def gathered(self, x: Tensor) -> Wait:
        """Start to collect the rows of all ranks, where they are cut."""
        return all_gather(x, self.axis).wait if self.sp else lambda: x


class Column(_Over):
    """Each rank has some of the outputs, of all rows."""

    def enter(self, x: Tensor) -> Tensor:
        """Own rows → all rows."""
        return self.gathered(x)()

    def begin_again(self, x: Tensor) -> Wait:
        """The same, to travel beside dx = g W."""
        return self.gathered(x)

    def begin_entered_gradient(self, gradient: Tensor) -> Wait:
        """The sum over the ranks' outputs, to travel beside dW = gᵀ x."""
        return self.summed(gradient)


class Row(_Over):
    """Each rank has some of the inputs: the products are summed."""

    partial = True

    def leave(self, y: Tensor) -> Tensor:
        """Partial sums of all rows → own rows."""
        return self.summed(y)()

    def left_gradient(self, gradient: Tensor) -> Tensor:
        """Own rows → all rows."""
        return self.gathered(gradient)()


class Share:
    """Rows that the heads of every rank need: ``share(x)`` is all rows, and its gradient the sum over the ranks."""

    def __init__(self, axis: Axis, *, sp: bool) -> None:
        self.over = _Over(axis, sp=sp)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, x: Tensor) -> Tensor:
        """Own rows → all rows; without sp they are all here."""
        whole: Tensor = _Share.apply(x, self.over)  # type: ignore[no-untyped-call]
        return whole


class _Share(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, over: _Over) -> Tensor:
        ctx.over = over
        return over.gathered(x)() if over.sp else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        over: _Over = ctx.over
        return over.summed(gradient if over.sp else gradient.clone())(), None


class Vocabulary:
    """Words cut over ``axis``: of a table and of logits each rank has equally many rows, padding at the end."""

    def __init__(self, axis: Axis, *, sp: bool, words: int) -> None:
        self.over, self.words = _Over(axis, sp=sp), words

    def own(self, ids: Tensor, *, held: int) -> tuple[Tensor, Tensor]:
        """Where among the ``held`` words of this rank the ids are, and which of them are other ranks'."""
        here = ids - self.over.axis.rank * held
        return here, (here < 0) | (here >= held)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def lookup(self, ids_R: Tensor, weight: Tensor) -> Tensor:
        """Ids of all rows → own rows of the stream. The gradient of ``weight`` goes through autograd."""
        x_RD: Tensor = _Lookup.apply(ids_R, weight, self)  # type: ignore[no-untyped-call]
        return x_RD

    def nats(self, logits: Tensor, targets: Tensor, times: Tensor | float | None) -> Tensor:
        """``kernels.nats`` of the logits of all ranks, the same on each; they are never together. Two passes."""
        axis, held = self.over.axis, logits.shape[1]
        logits[:, max(0, self.words - axis.rank * held) :] = -torch.inf  # padding: no word has these logits
        here, foreign = self.own(targets, held=held)
        here, own = here.masked_fill_(foreign, 0)[:, None], ~foreign[:, None]
        target = logits.gather(1, here).float().masked_fill_(~own, 0)
        meeting = all_reduce(target, axis)  # beside the first pass
        lse = torch.cat([_log_sum_exp(logits[rows]) for rows in row_chunks(logits)])
        lse = _over_ranks(lse, axis)
        if times is not None:
            for rows in row_chunks(logits):
                share = torch.sub(logits[rows], lse[rows]).exp_()  # fp32, as lse is
                share.scatter_add_(1, here[rows], -own[rows].float())
                logits[rows] = share.mul_(times)
                del share  # before the next is made
        return (lse - meeting.wait()).sum()


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, vocabulary: Vocabulary) -> Tensor:
        ctx.vocabulary, ctx.held = vocabulary, weight.shape[0]
        ctx.save_for_backward(ids)
        here, foreign = vocabulary.own(ids, held=ctx.held)
        found = F.embedding(here.masked_fill_(foreign, 0), weight).masked_fill_(foreign[:, None], 0)
        return vocabulary.over.summed(found)()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, None]:
        (ids,) = ctx.saved_tensors
        coming = ctx.vocabulary.over.gathered(gradient)
        here, foreign = ctx.vocabulary.own(ids, held=ctx.held)
        here.masked_fill_(foreign, -1)  # which embedding's backward is told to pass over
        return None, torch.ops.aten.embedding_dense_backward(coming(), here, ctx.held, -1, False), None


def _log_sum_exp(part: Tensor) -> Tensor:
    """Of each row, in fp32: [rows, 1]. A rank with padding alone has a finite top, and −∞ comes out, not NaN."""
    top = part.amax(1, keepdim=True).float().clamp_(min=torch.finfo(torch.float32).min)
    return torch.sub(part, top).exp_().sum(1, keepdim=True).log_().add_(top)


def _over_ranks(lse: Tensor, axis: Axis) -> Tensor:
    """log Σ over ranks of exp(lse), relative to the largest, so that nothing overflows."""
    top = all_reduce(lse.clone(), axis, op=dist.ReduceOp.MAX).wait()
    return all_reduce(lse.sub_(top).exp_(), axis).wait().log_().add_(top)


# what is cut how, by the end of its name (model/weights.py); q_down and kv_down work on the rank's own rows
PLAN: dict[str, type[Column] | type[Row]] = {
    "attention.q": Column, "attention.k": Column, "attention.v": Column, "attention.out": Row,
    "attention.q_up": Column, "attention.kv_up": Column,
    "mlp.gate": Column, "mlp.up": Column, "mlp.down": Row,
    "moe.shared.gate": Column, "moe.shared.up": Column, "moe.shared.down": Row,
    "head.out": Column,
}  # fmt: skip


def attach(module: nn.Module, axis: Axis, *, sp: bool) -> None:
    """Set the seams of a ``Transformer`` for weights cut over ``axis`` as ``layout/sharding.py`` says."""
    vocabulary = Vocabulary(axis, sp=sp, words=cast(Model, module.model).vocab)
    for name, part in module.named_modules():
        for ending, style in PLAN.items():
            if name.endswith(ending) and isinstance(part, Linear):
                part.around = style(axis, sp=sp)
        if hasattr(part, "share"):
            part.share = Share(axis, sp=sp)
        if hasattr(part, "lookup"):
            part.lookup = vocabulary.lookup
        if hasattr(part, "loss"):
            part.loss = vocabulary.nats
