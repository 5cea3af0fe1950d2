"""Mamba-2 (arXiv:2405.21060) on rows [R, D], in groups of chunks.

    z, x, B, C, dt = h W        x, B, C ← silu(conv(·))        o = scan(x, B, C, dt)        out(norm(o · silu(z)))

The core, from the convolution to the gate, saves its input, the scan's output and the norm's statistics, as
``MambaSplitConv1dScanCombinedFn`` of state-spaces/mamba@e9594ce:mamba_ssm/ops/triton/ssd_combined.py does, and computes
the convolution and the states again. The scan (``chunks.py``) is in fp32. Same formulas as transformers 5.23,
``mamba2_chunk_scan``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.model.factors import Multipliers
from fivefold.model.mixers.chunk_groups import GPU_TEMPORARY_BYTES
from fivefold.model.mixers.mamba2 import Mamba2
from fivefold.model.spec import Model
from fivefold.trainer.model.linear import Linear
from fivefold.trainer.model.lora import project
from fivefold.trainer.model.mixers import fused_scans
from fivefold.trainer.model.mixers.chunks import GroupFunction, decay_pairs, hand_on_states, scan_backward, scan_forward
from fivefold.trainer.model.mixers.convolution import Conv, convolve_silu_backward, convolve_silu_rows, get_sum_dtype
from fivefold.trainer.model.mixers.gated_delta_net import Factor
from fivefold.trainer.model.mixers.heads import ALL_HEADS, HeadShare, MixerHooks
from fivefold.trainer.model.operation import Run, call_directly, exclude_from_graphs
from fivefold.trainer.model.rotary import RowInputs


class Mamba2Mixer(nn.Module):
    """The token mixer of a layer that is a Mamba-2."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        shape = model.mamba2
        assert shape is not None
        self.run: Run = call_directly
        self.hooks: MixerHooks | None = None
        self.fuses_scan = False
        self.temporary_bytes = GPU_TEMPORARY_BYTES
        self.shape, self.epsilon = shape, model.norm_epsilon
        self.factors = (model.multipliers or Multipliers()).mixer_parts
        self.project = Linear(model.width, shape.projected_width, bias=shape.bias)
        self.conv = Conv(shape.conv_width, taps=shape.taps, bias=shape.conv_bias)
        self.a_log, self.dt_bias, self.d = (nn.Parameter(torch.empty(shape.heads)) for _ in range(3))
        self.norm = None if shape.norm == "none" else Factor(shape.inner_width)
        self.out = Linear(shape.inner_width, model.width, bias=shape.bias)

    def forward(self, h_RD: Tensor, rows: RowInputs) -> Tensor:
        """Mix the tokens of each sequence: [R, D] → [R, D]."""
        (projected,) = project(self.run, "mixer.project", h_RD, self.project, keys_B=rows.keys)
        tokens, share = rows.tokens, ALL_HEADS if self.hooks is None else self.hooks.share
        parts = [share.ranks * width for width in self.shape.projected_parts]
        if set(self.factors) - {1.0}:
            projected = self.run("mixer.project.scale", scale_parts, projected, parts, self.factors)
        if self.hooks is not None:
            tokens *= share.ranks
            (projected,) = self.run("mixer.enter", partial(self.hooks.enter, parts=parts), rows.tokens, projected)
        vectors = self.a_log, self.dt_bias, self.d, None if self.norm is None else self.norm.weight
        factors = [None if vector is None else share.take(vector)[0] for vector in vectors]
        settings = self.shape, tokens, self.epsilon, share, self.fuses_scan, self.temporary_bytes
        y = self.run("mixer.core", core, projected, self.conv.weight, self.conv.bias, *factors, *settings)
        del projected
        if self.hooks is not None:
            y = self.run("mixer.leave", self.hooks.leave, rows.tokens, y)
        (out_RD,) = project(self.run, "mixer.out", y, self.out, keys_B=rows.keys)
        return out_RD


@exclude_from_graphs
def scale_parts(projected: Tensor, parts: Sequence[int], factors: Sequence[float]) -> Tensor:
    """Return ``projected`` [R, ·] with a factor on the columns of each of ``parts``, which are so wide."""
    return _ScaleParts.apply(projected, parts, factors)


class _ScaleParts(torch.autograd.Function):
    """Saves no tensor: the gradient of each part is multiplied by the factor of the part."""

    @staticmethod
    def forward(ctx: Any, projected: Tensor, parts: Sequence[int], factors: Sequence[float]) -> Tensor:
        ctx.settings = parts, factors
        return _multiply_parts(projected, parts, factors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _multiply_parts(grad, *ctx.settings), None, None


def _multiply_parts(rows: Tensor, parts: Sequence[int], factors: Sequence[float]) -> Tensor:
    out = torch.empty_like(rows)
    for part, into, factor in zip(rows.split(parts, dim=1), out.split(parts, dim=1), factors, strict=True):
        torch.mul(part, factor, out=into)
    return out


@exclude_from_graphs
def core(
    projected: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    a_log: Tensor,
    dt_bias: Tensor,
    d: Tensor,
    norm: Tensor | None,
    shape: Mamba2,
    tokens: int,
    epsilon: float,
    share: HeadShare = ALL_HEADS,
    fused: bool = False,
    temporary_bytes: int = GPU_TEMPORARY_BYTES,
) -> Tensor:
    """Return the gated outputs [R, heads · head dim] of ``projected``: z, x, B, C and dt [R, ·].

    ``weight``, ``bias``: those of the convolution; ``share``: the heads' share of them; ``norm``: weight of the norm.
    """
    factors, settings = (a_log, dt_bias, d, norm), (shape, tokens, epsilon, share, fused, temporary_bytes)
    return _Mamba2Core.apply(projected, weight, bias, *factors, *settings)


class _Mamba2Core(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        projected: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        a_log: Tensor,
        dt_bias: Tensor,
        d: Tensor,
        norm: Tensor | None,
        shape: Mamba2,
        tokens: int,
        epsilon: float,
        share: HeadShare,
        fused: bool,
        temporary_bytes: int,
    ) -> Tensor:
        z, xbc, dt = _split(projected, shape)
        xbc = convolve_silu_rows(xbc, *_take_filters(weight, bias, shape, share), tokens=tokens)
        factors = a_log, dt_bias, d
        compute: GroupFunction = partial(compute_chunks, shape=shape)
        sequences = len(projected) // tokens
        groups = shape.split_tokens(tokens, sequences=sequences, temporary_bytes=temporary_bytes)
        if fused:
            compute = fused_scans.make_group_function(partial(fused_scans.scan_mamba2, shape=shape))
            groups = [tokens]
        o = scan_forward(compute, (xbc, dt), factors, columns=shape.inner_width, groups=groups)
        del xbc
        y, rstd = gate(o, z, norm, shape, epsilon=epsilon)
        ctx.save_for_backward(projected, weight, bias, a_log, dt_bias, d, norm, o, rstd)
        ctx.settings = shape, tokens, groups, share, compute
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        projected, weight, bias, a_log, dt_bias, d, norm, o, rstd = ctx.saved_tensors
        shape, tokens, groups, share, compute = ctx.settings
        z, xbc, dt = _split(projected, shape)
        projected_grad = torch.empty_like(projected)
        z_grad, xbc_grad, dt_grad = _split(projected_grad, shape)
        o_grad, norm_grad = gate_backward(grad, o, z, norm, rstd, shape, z_grad=z_grad)
        filters = _take_filters(weight, bias, shape, share)
        convolved = convolve_silu_rows(xbc, *filters, tokens=tokens)
        factors, grads = (a_log, dt_bias, d), (xbc_grad, dt_grad)
        factor_grads = scan_backward(compute, (convolved, dt), factors, o_grad, grads=grads, groups=groups)
        del convolved, o_grad
        x_grad, *filter_grads = convolve_silu_backward(xbc_grad, xbc, *filters, tokens=tokens)
        xbc_grad.copy_(x_grad)
        conv_grads = [
            grad if grad is None or share.ranks == 1 else share.place(grad.split(shape.convolved_parts))
            for grad in filter_grads
        ]
        return projected_grad, *conv_grads, *factor_grads, norm_grad, *[None] * 6


def _take_filters(weight: Tensor, bias: Tensor | None, shape: Mamba2, share: HeadShare) -> tuple[Tensor, Tensor | None]:
    """Return filters and bias of the convolution of ``shape``, of which the full ones have ``share.ranks`` times."""
    if share.ranks == 1:
        return weight, bias
    parts = [share.ranks * width for width in shape.convolved_parts]
    taken = [None if tensor is None else torch.cat(share.take(tensor, parts)) for tensor in (weight, bias)]
    assert taken[0] is not None
    return taken[0], taken[1]


def _split(projected: Tensor, shape: Mamba2) -> tuple[Tensor, ...]:
    """Return views of z, of x, B and C together, and of dt."""
    return projected.split((shape.inner_width, shape.conv_width, shape.heads), dim=1)


def gate(o: Tensor, z: Tensor, weight: Tensor | None, shape: Mamba2, *, epsilon: float) -> tuple[Tensor, Tensor | None]:
    """Return the gated and normed output [R, I], and the norm's statistics, 1/√ of the mean square of each group."""
    gating = F.silu(z.to(get_sum_dtype(z.dtype)))
    if weight is None:
        return gating.mul_(o).to(o.dtype), None
    normed = o.to(gating.dtype) if shape.norm == "before_gate" else gating.mul_(o)
    groups = normed.unflatten(1, (shape.groups, -1))
    rstd = groups.square().mean(-1, keepdim=True).add_(epsilon).rsqrt_()
    y = (groups * rstd).flatten(1).mul_(weight)
    return (y.mul_(gating) if shape.norm == "before_gate" else y).to(o.dtype), rstd


def gate_backward(
    grad: Tensor, o: Tensor, z: Tensor, weight: Tensor | None, rstd: Tensor | None, shape: Mamba2, *, z_grad: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Write the gradient of ``z`` of ``gate`` into ``z_grad``, and return those of ``o`` and of the weight."""
    z, grad_wide, weight_grad = z.to(get_sum_dtype(z.dtype)), grad.to(get_sum_dtype(z.dtype)), None
    is_first = shape.norm == "before_gate"
    if weight is None or rstd is None:
        gated, inner = o, grad_wide
    elif is_first:
        normal = (o.unflatten(1, (shape.groups, -1)) * rstd).flatten(1)
        weighted = grad_wide * F.silu(z)
        weight_grad = (weighted * normal).sum(0).to(weight.dtype)
        inner = _norm_backward(weighted.mul_(weight), normal, rstd)
        z_grad.copy_(torch.ops.aten.silu_backward(grad_wide * weight * normal, z))
        return inner.to(o.dtype), weight_grad
    else:
        normal = ((F.silu(z) * o).unflatten(1, (shape.groups, -1)) * rstd).flatten(1)
        weight_grad = (grad_wide * normal).sum(0).to(weight.dtype)
        gated, inner = o, _norm_backward(grad_wide * weight, normal, rstd)
    z_grad.copy_(torch.ops.aten.silu_backward(inner * gated, z))
    return F.silu(z).mul_(inner).to(o.dtype), weight_grad


def _norm_backward(grad: Tensor, normal: Tensor, rstd: Tensor) -> Tensor:
    """Return the gradient of x [R, I] from that of x · rstd, whose value is ``normal``; ``rstd`` [R, groups, 1]."""
    grad, normal = (x.unflatten(1, (rstd.shape[1], -1)) for x in (grad, normal))
    return torch.addcmul(grad, normal, (grad * normal).mean(-1, keepdim=True), value=-1).mul_(rstd).flatten(1)


def compute_chunks(
    inputs: Sequence[Tensor], state: Tensor | None, *, shape: Mamba2, is_last: bool = False, only_state: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Return the outputs [B, tokens, heads · head dim] of a group, and the state after it (``GroupFunction``).

    ``inputs``: x, B and C together [B, tokens, ·], dt [B, tokens, heads]; ``a_log``, ``dt_bias`` and ``d`` [heads]. The
    state is [B, groups, state, heads of a group · head dim].
    """
    xbc, dt, a_log, dt_bias, d = inputs
    dtype = get_sum_dtype(xbc.dtype)
    heads = (shape.groups, shape.heads // shape.groups)
    # without pairs of tokens, all tokens are one chunk
    size = xbc.shape[1] if only_state else min(shape.chunk, xbc.shape[1])
    chunked = xbc.to(dtype).unflatten(1, (-1, size))
    x, b, c = chunked.split((shape.inner_width, *[shape.groups * shape.state] * 2), dim=-1)
    b, c = (part.unflatten(-1, (shape.groups, -1)).transpose(2, 3) for part in (b, c))
    x = x.unflatten(-1, (*heads, -1)).permute(0, 1, 3, 4, 2, 5)  # [B, chunks, groups, heads of a group, T, head dim]
    step = F.softplus(dt.to(dtype) + dt_bias.to(dtype)).clamp(shape.min_step, shape.max_step)
    decay, step = (
        part.unflatten(1, (-1, size)).transpose(2, 3).unflatten(2, heads)
        for part in (step * -a_log.to(dtype).exp(), step)
    )
    decay = decay.cumsum(-1)  # its log, from the start of the chunk
    driven = x * step[..., None]
    last = decay[..., -1:]
    before, after = None, None
    if not is_last or len(chunked[0]) > 1:
        added = b.mT @ (driven * (last - decay).exp()[..., None]).transpose(3, 4).flatten(4)
        before, after = hand_on_states(added, last[..., 0], state, is_last=is_last)
        del added
    elif state is not None:
        before = state[:, None]
    if only_state:
        return xbc, after
    out = ((c @ b.mT).tril()[:, :, :, None] * decay_pairs(decay)) @ driven
    out = torch.addcmul(out, x, d.to(dtype).view(*heads, 1, 1))
    if before is not None:
        read = (c @ before).unflatten(-1, (heads[1], -1)).transpose(3, 4)
        out = torch.addcmul(out, read, decay.exp()[..., None])
    return out.permute(0, 1, 4, 2, 3, 5).flatten(3).flatten(1, 2), after
