"""Mamba (arXiv:2312.00752) on rows [R, D], in groups of chunks.

    x, z = h W        x ← silu(conv(x))        dt, B, C = x W_s        y = scan(x, dt W_t, B, C)        out(y · silu(z))

The core, from the convolution to the gate, saves its input, dt, B and C, and the scan's output, and computes the
convolution, the steps and the states again. ``MambaInnerFn`` of
state-spaces/mamba@e9594ce:mamba_ssm/ops/selective_scan_interface.py saves the same, and one state for each of its
chunks of 2,048 tokens. The scan (``chunks.py``) is in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.model.mixers.chunk_groups import GPU_TEMPORARY_BYTES
from fivefold.model.mixers.mamba import CHUNK_TOKENS, Mamba
from fivefold.model.spec import Model
from fivefold.trainer.model.linear import Linear
from fivefold.trainer.model.mixers.chunks import accumulate, scan_backward, scan_forward
from fivefold.trainer.model.mixers.convolution import Conv, convolve_silu_backward, convolve_silu_rows, get_sum_dtype
from fivefold.trainer.model.mixers.gated_delta_net import Factor
from fivefold.trainer.model.mixers.heads import ALL_HEADS, HeadShare, MixerHooks
from fivefold.trainer.model.operation import Run, call_directly, exclude_from_graphs
from fivefold.trainer.model.rotary import RowInputs

SumOverRanks = Callable[[Tensor], Tensor]


class Matrix(nn.Module):
    """The weight [out, in] of a projection within the core, and a bias [out]."""

    def __init__(self, out_features: int, in_features: int, *, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None


class MambaMixer(nn.Module):
    """The token mixer of a layer that is a Mamba."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        shape = model.mamba
        assert shape is not None
        self.run: Run = call_directly
        self.hooks: MixerHooks | None = None
        self.temporary_bytes = GPU_TEMPORARY_BYTES
        self.shape, self.epsilon = shape, shape.norm_epsilon or model.norm_epsilon
        self.sums_over_ranks: list[SumOverRanks] = []  # under tp and cp
        self.project = Linear(model.width, 2 * shape.inner, bias=shape.bias)
        self.conv = Conv(shape.inner, taps=shape.taps, bias=shape.conv_bias)
        self.select = Matrix(sum(shape.selected_widths), shape.inner, bias=False)
        norms = [Factor(size) if shape.norms == "weighted" else None for size in shape.selected_widths]
        self.dt_norm, self.b_norm, self.c_norm = norms
        self.step = Matrix(shape.inner, shape.rank, bias=True)
        self.a_log = nn.Parameter(torch.empty(shape.inner, shape.state))
        self.d = nn.Parameter(torch.empty(shape.inner))
        self.out = Linear(shape.inner, model.width, bias=shape.bias)

    def forward(self, h_RD: Tensor, rows: RowInputs) -> Tensor:
        """Mix the tokens of each sequence: [R, D] → [R, D]."""
        xz = self.run("mixer.project", self.project, h_RD)
        tokens, share = rows.tokens, ALL_HEADS
        if self.hooks is not None:
            tokens, share = tokens * self.hooks.share.ranks, self.hooks.share
            parts = [share.ranks * self.shape.inner] * 2
            (xz,) = self.run("mixer.enter", partial(self.hooks.enter, parts=parts), rows.tokens, xz)
        filters = [None if tensor is None else share.take(tensor)[0] for tensor in (self.conv.weight, self.conv.bias)]
        (select,) = share.take(self.select.weight, dim=1)
        vectors = self.step.weight, self.step.bias, self.a_log, self.d
        factors = [*filters, select, *(share.take(cast(Tensor, vector))[0] for vector in vectors)]
        norms = [None if norm is None else norm.weight for norm in (self.dt_norm, self.b_norm, self.c_norm)]
        settings = self.shape, tokens, self.epsilon, self.sums_over_ranks, share, self.temporary_bytes
        y = self.run("mixer.core", core, xz, *factors, *norms, *settings)
        del xz
        if self.hooks is not None:
            y = self.run("mixer.leave", self.hooks.leave, rows.tokens, y)
        return self.run("mixer.out", self.out, y)


@exclude_from_graphs
def core(
    xz: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    select: Tensor,
    step: Tensor,
    step_bias: Tensor,
    a_log: Tensor,
    d: Tensor,
    dt_norm: Tensor | None,
    b_norm: Tensor | None,
    c_norm: Tensor | None,
    shape: Mamba,
    tokens: int,
    epsilon: float,
    sums_over_ranks: Sequence[SumOverRanks] = (),
    share: HeadShare = ALL_HEADS,
    temporary_bytes: int = GPU_TEMPORARY_BYTES,
) -> Tensor:
    """Return the gated outputs [R, I] of ``xz`` [R, 2I]; ``weight`` and ``bias`` are those of the convolution.

    ``sums_over_ranks``: sum what is selected from the channels of all ranks, and its gradient. ``share``: this rank's
    share of the channels that all ranks of cp have.
    """
    norms = dt_norm, b_norm, c_norm
    factors = select, step, step_bias, a_log, d, *norms
    settings = shape, tokens, epsilon, sums_over_ranks, share, temporary_bytes
    return _MambaCore.apply(xz, weight, bias, *factors, *settings)


class _MambaCore(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, xz: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
        select, step, step_bias, a_log, d, *norms, shape, tokens, epsilon, sums_over_ranks, share, limit = rest
        x, z = xz.chunk(2, dim=1)
        x = convolve_silu_rows(x, weight, bias, tokens=tokens)
        selected = x @ select.t()
        for sum_over_ranks in sums_over_ranks:
            selected = sum_over_ranks(selected)
        dt, b, c = _norm_parts(selected, norms, shape, epsilon)
        inputs, factors = (x, dt @ step.t(), b, c), (step_bias, a_log, d)
        del dt, x
        groups = shape.split_tokens(tokens, sequences=len(xz) // tokens, temporary_bytes=limit)
        o = scan_forward(compute_chunks, inputs, factors, columns=shape.inner, groups=groups)
        del inputs, b, c
        ctx.save_for_backward(xz, weight, bias, select, step, step_bias, a_log, d, *norms, selected, o)
        ctx.settings = shape, tokens, groups, epsilon, sums_over_ranks, share
        return F.silu(z.to(get_sum_dtype(z.dtype))).mul_(o).to(o.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        xz, weight, bias, select, step, step_bias, a_log, d, *norms, selected, o = ctx.saved_tensors
        shape, tokens, groups, epsilon, sums_over_ranks, share = ctx.settings
        x, z = xz.chunk(2, dim=1)
        xz_grad = torch.empty_like(xz)
        x_grad, z_grad = xz_grad.chunk(2, dim=1)
        z_wide = z.to(get_sum_dtype(z.dtype))
        o_grad = F.silu(z_wide).mul_(grad).to(o.dtype)
        z_grad.copy_(torch.ops.aten.silu_backward(grad.to(z_wide.dtype) * o, z_wide))
        del z_wide
        convolved = convolve_silu_rows(x, weight, bias, tokens=tokens)
        leaves = [selected.detach().requires_grad_(), *(norm for norm in norms if norm is not None)]
        with torch.enable_grad():
            parts = _norm_parts(leaves[0], norms, shape, epsilon)
        dt, b, c = (part.detach() for part in parts)
        inputs = (convolved, dt @ step.t(), b, c)
        factors = (step_bias, a_log, d)
        grads = [torch.empty_like(part) for part in inputs]
        factor_grads = scan_backward(compute_chunks, inputs, factors, o_grad, grads=grads, groups=groups)
        del inputs, o_grad
        convolved_grad, step_grad, b_grad, c_grad = grads
        step_weight_grad = step_grad.t() @ dt
        selected_grads: tuple[Tensor, ...] = (step_grad @ step, b_grad, c_grad)
        if sums_over_ranks:
            summed = torch.cat(selected_grads, dim=1)
            for sum_over_ranks in sums_over_ranks:
                summed = sum_over_ranks(summed)
            selected_grads = summed.split(shape.selected_widths, dim=1)
            del summed
        part_grads = torch.autograd.grad(parts, leaves, selected_grads)
        del selected_grads
        selected_grad, norm_grads = part_grads[0], iter(part_grads[1:])
        select_grad = selected_grad.t() @ convolved
        convolved_grad.addmm_(selected_grad, select)
        del convolved, step_grad, grads
        conv_grads = convolve_silu_backward(convolved_grad, x, weight, bias, tokens=tokens)
        x_grad.copy_(conv_grads[0])
        # all ranks of cp have the full gradient of the norms, and these are summed over them
        normed = (None if norm is None else next(norm_grads).div_(share.ranks) for norm in norms)
        return xz_grad, *conv_grads[1:], select_grad, step_weight_grad, *factor_grads, *normed, *[None] * 6


def _norm_parts(selected: Tensor, norms: Sequence[Tensor | None], shape: Mamba, epsilon: float) -> list[Tensor]:
    """Return dt, B and C, each normed if the geometry says so."""
    parts = selected.split(shape.selected_widths, dim=1)
    if shape.norms == "none":
        return [part.contiguous() for part in parts]
    normed = []
    for part, weight in zip(parts, norms, strict=True):
        x = part.to(get_sum_dtype(part.dtype))
        x = x * (x.square().mean(-1, keepdim=True) + epsilon).rsqrt()
        normed.append((x if weight is None else x * weight).to(part.dtype))
    return normed


def compute_chunks(
    inputs: Sequence[Tensor], state: Tensor | None, *, is_last: bool = False, only_state: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Return the outputs [B, T, I] of a group, and the state [B, I, N] after it; see ``chunks.GroupFunction``.

    ``inputs``: x and the projected steps [B, T, I], B and C [B, T, N]; the steps' bias, ``a_log`` and ``d``.
    """
    x, step, b, c, step_bias, a_log, d = inputs
    dtype = get_sum_dtype(x.dtype)
    x, step = x.to(dtype), F.softplus(step.to(dtype) + step_bias.to(dtype))
    decay = (step[..., None] * -a_log.to(dtype).exp()).exp()  # [B, T, I, N]
    states = (step * x)[..., None] * b.to(dtype)[:, :, None]
    states = accumulate(states, decay, state, size=CHUNK_TOKENS)
    out = x if only_state else (states * c.to(dtype)[:, :, None]).sum(-1) + x * d.to(dtype)
    return out, None if is_last else states[:, -1].clone()  # a view would keep the states of all tokens
