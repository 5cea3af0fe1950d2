"""Grouped GEMMs of the experts: rows are sorted by expert, and each group multiplies its expert's weight.

    y[o_e : o_e+1] = x[o_e : o_e+1] W_eᵀ        backward: dx = g W_e of its group · dW_e = gᵀ x of its group

As in ``linear.py``, weight gradients are accumulated one at a time, at once or deferred. A row's routing weight
multiplies the activation before ``down``, so that the output of the experts need not be kept for the backward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.model.spec import Model
from fivefold.trainer.model.float8.cast import Cast
from fivefold.trainer.model.linear import WgradStore, Work, accumulate_grad
from fivefold.trainer.model.operation import exclude_from_graphs
from fivefold.trainer.model.quantized.weight import QuantizedWeight

ALIGNED_BYTES = 16  # grouped_mm supports rows and offsets that are multiples of this number of bytes
Ends = Callable[[Tensor, int], list[int]]


def read_ends(offsets: Tensor, rows: int) -> list[int]:
    """Return ``offsets`` [E], the end of each expert's rows, as a list. Synchronizes host and device."""
    return offsets.tolist()


class GroupedGemms:
    """The three grouped GEMMs (fprop, dgrad, wgrad) in the dtype of their operands; ``model/float8`` has fp8 ones.

    Groups of rows end at ``offsets`` [E], int32. ``operand`` and ``columns`` prepare the input of ``fprop`` and
    ``wgrad``.
    """

    def operand(self, x: Tensor) -> Any:
        """Prepare rows ``x`` [n, in] for ``fprop``: unchanged here."""
        return x

    def fprop(self, operand: Any, weights: Tensor, offsets: Tensor, ends: Ends) -> Tensor:
        """Multiply rows [n, in] by their expert's ``weights`` [E, out, in], transposed → [n, out]."""
        return multiply_by_group(operand, weights.mT, offsets, ends)

    def dgrad(self, gradient: Tensor, weights: Tensor, offsets: Tensor, ends: Ends, total: Tensor | None) -> Tensor:
        """Multiply rows [n, out] by their expert's ``weights`` [E, out, in] → [n, in], added to ``total`` if given."""
        product = multiply_by_group(gradient, weights, offsets, ends)
        return product if total is None else total.add_(product)

    def columns(self, x: Tensor, offsets: Tensor) -> Any:
        """Prepare rows ``x`` [n, in] for ``wgrad``: unchanged here."""
        return x

    def wgrad(self, gradient: Tensor, columns: Any, offsets: Tensor, ends: Ends) -> Tensor | Cast:
        """Multiply [n, out]ᵀ by [n, in] in each group → [E, out, in]."""
        return sum_by_group(gradient, columns, offsets, ends)


class GroupedLinear(nn.Module):
    """Linear layers by group of rows: a weight [E, out, in] for each name in ``sizes``, (out, in) each.

    Parallelisms set ``wgrad_store`` and ``ends`` (reads offsets); ``copies``: number of ranks that send an expert the
    same token, by which weight gradients are divided; ``backward_overlap_work``: a list to which the backward appends
    dW of all layers but ``down``, to run during the all_to_all of the rows' gradients; None: they run at once.
    """

    def __init__(self, sizes: Mapping[str, tuple[int, int]], *, experts: int, bias: bool = False) -> None:
        super().__init__()
        self.wgrad_store, self.ends, self.gemms = WgradStore(), read_ends, GroupedGemms()
        self.copies = 1
        self.backward_overlap_work: list[Work] | None = None
        self.quantized: dict[str, QuantizedWeight] = {}  # the scales of weights that are stored in few bits
        self.names = tuple(sizes)
        for name, (out_features, in_features) in sizes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(experts, out_features, in_features)))
            if bias:
                self.register_parameter(f"{name}_bias", nn.Parameter(torch.empty(experts, out_features)))

    @property
    def is_trained(self) -> bool:
        """Return whether the weights have gradients: they are frozen next to adapters."""
        return self.get_parameter(self.names[-1]).requires_grad

    def dense_weights(self, name: str) -> Tensor:
        """Return the weights ``name`` [E, out, in] as GEMMs read them: dequantized, if they are stored in few bits."""
        stored, weights = self.quantized.get(name), self.get_parameter(name)
        return weights if stored is None else stored.dequantize(weights)

    def multiply(self, x: Tensor, offsets: Tensor, *names: str) -> tuple[Tensor, ...]:
        """Multiply rows [n, in] in order of expert, whose groups end at ``offsets`` [E], by each of the weights."""
        return _grouped_linears(x, offsets, self, names)


class Experts(GroupedLinear):
    """Experts of this rank: ``gate`` unless they are plain, ``up`` [E, F, D], ``down`` [E, D, F].

    D is ``Model.expert_width``. ``adds_bias``: False if another etp rank adds the bias of ``down``.
    """

    def __init__(self, model: Model) -> None:
        moe, width = model.moe, model.expert_width
        assert moe is not None
        entries = ("gate", "up") if model.mlp == "gated" else ("up",)
        sizes = dict.fromkeys(entries, (moe.ffn, width)) | {"down": (width, moe.ffn)}
        super().__init__(sizes, experts=moe.experts, bias=moe.expert_bias)
        self.entries, self.adds_bias = entries, True
        self.lora_scales: dict[str, float] = {}  # of adapters of gate_up and down (``expert_lora.py``)

    def gate_up(self, x: Tensor, offsets: Tensor) -> tuple[Tensor, ...]:
        """Compute gate and up, each [n, F], of rows [n, D] in order of expert, whose groups end at ``offsets`` [E].

        Plain experts have no gate.
        """
        products = self.multiply(x, offsets, *self.entries)
        return tuple(self.apply_bias(y, name, offsets) for y, name in zip(products, self.entries, strict=True))

    def project_down(self, m: Tensor, share: Tensor, offsets: Tensor) -> Tensor:
        """Apply ``down`` to activations [n, F] → [n, D]; they already contain the routing weights ``share`` [n]."""
        (y,) = self.multiply(m, offsets, "down")
        return self.apply_bias(y, "down", offsets, share)

    def apply_bias(self, y: Tensor, name: str, offsets: Tensor, share: Tensor | None = None) -> Tensor:
        """Add to rows y [n, out] the bias of their expert, if there is one, times ``share`` if it is given."""
        bias = getattr(self, f"{name}_bias", None)
        return y if bias is None else _add_bias(y, share, bias, offsets, self)


class _GroupedLinears(torch.autograd.Function):
    """Grouped linear layers ``names`` on rows x [n, in]; the backward accumulates dW itself, so autograd sees none.

    Frozen experts do not save x.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, _weight: Tensor, offsets: Tensor, experts: GroupedLinear, names: tuple[str, ...]
    ) -> tuple[Tensor, ...]:
        ctx.experts, ctx.names = experts, names
        ctx.save_for_backward(*([x] if experts.is_trained else []), offsets)
        gemms, ends = experts.gemms, experts.ends
        operand = gemms.operand(x)
        return tuple(gemms.fprop(operand, experts.dense_weights(name), offsets, ends) for name in names)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        experts: GroupedLinear = ctx.experts
        *rows, offsets = (saved.detach() for saved in ctx.saved_tensors)  # a deferred dW must not hold the graph
        outer = [gradient.contiguous() for gradient in gradients]  # grouped_mm does not support strides of 0
        total: Tensor | None = None
        for name, gradient in zip(ctx.names, outer, strict=True):
            total = experts.gemms.dgrad(gradient, experts.dense_weights(name), offsets, experts.ends, total)
        for name, gradient in zip(ctx.names, outer, strict=True) if rows else ():
            work = partial(
                experts.wgrad_store.run_or_defer, partial(_accumulate_wgrad, experts, name, rows[0], gradient, offsets)
            )
            work() if experts.backward_overlap_work is None or name == "down" else experts.backward_overlap_work.append(
                work
            )
        return total, None, None, None, None


def _accumulate_wgrad(experts: GroupedLinear, name: str, x: Tensor, gradient: Tensor, offsets: Tensor) -> None:
    """Compute dW [E, out, in] of the weight ``name`` and accumulate it."""
    gemms = experts.gemms
    wgrad = gemms.wgrad(gradient, gemms.columns(x, offsets), offsets, experts.ends)
    if experts.copies > 1:
        (wgrad.scale if isinstance(wgrad, Cast) else wgrad).div_(experts.copies)
    accumulate_grad(experts.get_parameter(name), wgrad)


class _AddBias(torch.autograd.Function):
    """Add in place to rows y [n, out] their expert's bias, times the routing weight ``share`` [n] if given."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, share: Tensor | None, bias: Tensor, offsets: Tensor, experts: Experts) -> Tensor:
        ctx.experts, ctx.bias, ctx.adds = experts, bias, share is None or experts.adds_bias
        ctx.save_for_backward(share, offsets)
        ctx.mark_dirty(y)
        if not ctx.adds:
            return y
        added = bias.index_select(0, _expert_of_rows(y, offsets))
        return y.add_(added) if share is None else y.addcmul_(added, share[:, None].to(y.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        share, offsets = ctx.saved_tensors
        bias: Tensor = ctx.bias
        groups = _expert_of_rows(gradient, offsets)
        share_gradient = None
        if share is not None and ctx.needs_input_grad[1]:
            added = bias.index_select(0, groups) if ctx.adds else None
            share_gradient = (
                torch.zeros_like(share) if added is None else added.mul_(gradient).sum(-1, dtype=share.dtype)
            )
            del added
        if bias.requires_grad:
            rows = gradient if share is None else gradient * share[:, None].to(gradient.dtype)
            accumulate_grad(bias, torch.zeros_like(bias).index_add_(0, groups, rows).div_(ctx.experts.copies))
        return gradient, share_gradient, None, None, None


def _expert_of_rows(rows: Tensor, offsets: Tensor) -> Tensor:
    """Return the expert index of each row [n]."""
    return torch.searchsorted(offsets, torch.arange(rows.shape[0], device=rows.device, dtype=offsets.dtype), right=True)


def multiply_by_group(x: Tensor, weights: Tensor, offsets: Tensor, ends: Ends = read_ends) -> Tensor:
    """Multiply rows [n, in] by their group's ``weights`` [E, in, out] → [n, out]; groups end at ``offsets`` [E]."""
    if _needs_fp32(x):
        return mm_by_group(x, weights, offsets)
    if _supports_grouped_mm(x, weights, weights.shape[2]):
        return F.grouped_mm(x, weights, offs=offsets)
    out = x.new_empty(x.shape[0], weights.shape[2])
    for rows, weight in zip(_list_slices(ends(offsets, x.shape[0])), weights, strict=True):
        torch.mm(x[rows], weight, out=out[rows])
    return out


def sum_by_group(gradient: Tensor, x: Tensor, offsets: Tensor, ends: Ends = read_ends) -> Tensor:
    """Multiply ``gradient`` [n, out]ᵀ by ``x`` [n, in] in each group → [E, out, in]; 0 for a group without rows."""
    if _needs_fp32(x):
        return mm_by_group(gradient.t(), x, offsets)
    if _supports_grouped_mm(gradient, x, x.shape[1]):
        return F.grouped_mm(gradient.t(), x, offs=offsets)
    out = x.new_empty(offsets.shape[0], gradient.shape[1], x.shape[1])
    for rows, group_sum in zip(_list_slices(ends(offsets, x.shape[0])), out, strict=True):
        torch.mm(gradient[rows].t(), x[rows], out=group_sum)
    return out


def _needs_fp32(x: Tensor) -> bool:
    """Return whether to multiply in fp32 instead of 16 bits: on a CPU.

    There oneDNN compiles a 16-bit kernel for every new number of rows.
    """
    return x.device.type == "cpu" and x.dtype in (torch.bfloat16, torch.float16)


@torch.library.custom_op("fivefold::mm_by_group", mutates_args=())
def mm_by_group(left: Tensor, right: Tensor, offsets: Tensor) -> Tensor:
    """Compute ``F.grouped_mm``: ``left`` [n, in] by ``right`` [E, in, out] of its group, or [M, n] by [n, N] summed."""
    out: Tensor = _empty_product(left, right, offsets)
    ends = [int(end) for end in offsets]  # no synchronization is needed on a CPU
    for index, rows in enumerate(_list_slices(ends)):
        if right.dim() == 3:
            out[rows] = left[rows].float() @ right[index].float()
        else:
            out[index] = left[:, rows].float() @ right[rows].float()
    return out


@mm_by_group.register_fake
def _empty_product(left: Tensor, right: Tensor, offsets: Tensor) -> Tensor:
    shape = (left.shape[0], right.shape[2]) if right.dim() == 3 else (*offsets.shape, left.shape[0], right.shape[1])
    return left.new_empty(shape)


def _supports_grouped_mm(x: Tensor, other: Tensor, columns: int) -> bool:
    """Return whether ``F.grouped_mm`` supports these operands.

    It supports no fp64, and no row or storage offset that is not a multiple of 16 bytes.
    """
    itemsize = x.element_size()
    sizes = (x.shape[1], columns, x.storage_offset(), other.storage_offset())
    return x.dtype != torch.float64 and x.shape[0] > 0 and all(size * itemsize % ALIGNED_BYTES == 0 for size in sizes)


def _list_slices(ends: list[int]) -> list[slice]:
    return [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]


@exclude_from_graphs
def _grouped_linears(x: Tensor, offsets: Tensor, experts: GroupedLinear, names: tuple[str, ...]) -> tuple[Tensor, ...]:
    weight = experts.get_parameter(names[0])
    return _GroupedLinears.apply(x, weight, offsets, experts, names)


@exclude_from_graphs
def _add_bias(y: Tensor, share: Tensor | None, bias: Tensor, offsets: Tensor, experts: Experts) -> Tensor:
    return _AddBias.apply(y, share, bias, offsets, experts)
