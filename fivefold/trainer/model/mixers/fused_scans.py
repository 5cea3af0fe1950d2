"""Scans by the Triton kernels of flash-linear-attention (github.com/fla-org/flash-linear-attention).

Each function scans complete sequences, with the inputs of the functions that compute chunks with PyTorch's operations.
So a scan keeps only its inputs, and its backward runs the kernels' forward again. Mamba-2 and lightning attention are
gated linear attention with one decay per head (``simple_gla``). ``tests/third_party/test_fused_scans.py`` compares them
with PyTorch's operations.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.model.mixers.gated_delta_net import GatedDeltaNet
from fivefold.model.mixers.kimi_delta import KimiDelta
from fivefold.model.mixers.mamba2 import Mamba2
from fivefold.trainer.model.mixers.chunks import GroupFunction
from fivefold.trainer.model.mixers.convolution import get_sum_dtype
from fivefold.trainer.model.mixers.delta_rule import compute_beta, compute_decay

PACKAGE = "flash-linear-attention"


def explain_unavailability() -> str:
    """Return the reason why the kernels cannot run in this process; empty if they can."""
    if importlib.util.find_spec("fla") is None:
        return f"the package {PACKAGE} is not installed"
    return "" if torch.cuda.is_available() else "they are compiled for GPUs, and here is none"


def attach(module: nn.Module) -> None:
    """Let the scans of every submodule of ``module`` that has ``fuses_scan`` run these kernels."""
    for submodule in module.modules():
        if hasattr(submodule, "fuses_scan"):
            submodule.fuses_scan = True  # type: ignore[assignment]


def make_group_function(scan: Callable[[Sequence[Tensor]], Tensor]) -> GroupFunction:
    """Return ``scan`` of complete sequences as the function of their only group, which has and leaves no state."""

    def compute(
        inputs: Sequence[Tensor], state: Tensor | None, *, is_last: bool = False, only_state: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        return scan(inputs), None

    return compute


def scan_gated_delta_net(inputs: Sequence[Tensor], *, shape: GatedDeltaNet) -> Tensor:
    """Compute complete sequences of a Gated DeltaNet."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    q, k, v, b, a, a_log, dt_bias = inputs
    dtype = get_sum_dtype(v.dtype)
    q, k = (x.unflatten(-1, (shape.key_heads, -1)) for x in (q, k))
    v = v.unflatten(-1, (shape.value_heads, -1))
    beta = compute_beta(b.to(dtype), negative_eigenvalues=shape.negative_eigenvalues)
    decay = compute_decay(a.to(dtype), a_log, dt_bias)
    out: Tensor = chunk_gated_delta_rule(q, k, v, decay, beta, use_qk_l2norm_in_kernel=True)[0]
    return out.flatten(2)


def scan_kimi_delta(inputs: Sequence[Tensor], *, shape: KimiDelta) -> Tensor:
    """Compute complete sequences of Kimi delta attention."""
    from fla.ops.kda import chunk_kda

    q, k, v, f, b, a_log, dt_bias = inputs
    dtype = get_sum_dtype(v.dtype)
    q, k, v, f = (x.unflatten(-1, (shape.heads, -1)) for x in (q, k, v, f))
    a_log, dt_bias = a_log[:, None], dt_bias.view(shape.heads, -1)
    decay = compute_decay(f.to(dtype), a_log, dt_bias, lower_bound=shape.lower_bound)
    out: Tensor = chunk_kda(q, k, v, decay, compute_beta(b.to(dtype)), use_qk_l2norm_in_kernel=True)[0]
    return out.flatten(2)


def scan_lightning(inputs: Sequence[Tensor], *, rates: Sequence[float]) -> Tensor:
    """Compute complete sequences of lightning attention."""
    from fla.ops.simple_gla import chunk_simple_gla

    (qkv,) = inputs
    q, k, v = (x.contiguous() for x in qkv.unflatten(-1, (len(rates), 3, -1)).unbind(-2))
    decay = -torch.tensor(rates, dtype=get_sum_dtype(qkv.dtype), device=qkv.device)
    out: Tensor = chunk_simple_gla(q, k, v, g_gamma=decay, scale=1.0)[0]
    return out.flatten(2)


def scan_mamba2(inputs: Sequence[Tensor], *, shape: Mamba2) -> Tensor:
    """Compute complete sequences of Mamba-2."""
    from fla.ops.simple_gla import chunk_simple_gla

    xbc, dt, a_log, dt_bias, d = inputs
    dtype = get_sum_dtype(xbc.dtype)
    x, b, c = xbc.split((shape.inner_width, *[shape.groups * shape.state] * 2), dim=-1)
    x = x.unflatten(-1, (shape.heads, -1))
    repeats = shape.heads // shape.groups
    b, c = (part.unflatten(-1, (shape.groups, -1)).repeat_interleave(repeats, dim=2) for part in (b, c))
    step = F.softplus(dt.to(dtype) + dt_bias.to(dtype)).clamp(shape.min_step, shape.max_step)
    driven = (x * step[..., None]).to(x.dtype)
    out: Tensor = chunk_simple_gla(c, b, driven, g=step * -a_log.to(dtype).exp(), scale=1.0)[0]
    return torch.addcmul(out, x, d.to(x.dtype)[:, None]).flatten(2)
