"""The memory-bound kernels that ``calibrate`` times, each made from a one-dimensional tensor.

Bytes moved are counted as in ``planner/counts/operations/op.py``, so that measured bandwidths agree with the bytes that
the planner counts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fivefold.trainer.model.kernels.eager import EAGER, Kernels
from fivefold.trainer.model.kernels.fused.kernels import TRITON
from fivefold.trainer.model.kernels.fused.launch import explain_unavailability
from fivefold.trainer.model.kernels.loss import cross_entropy as cross_entropy_of

WIDTH = 256  # elements of a row; the bandwidth of the kernels hardly depends on it


class KernelWork(NamedTuple):
    """A function to time, and the bytes that it reads and writes."""

    run: Callable[[], object]
    moved_bytes: int


def copy(x: Tensor) -> KernelWork:
    """Return the kernel that reads x and writes a copy into an existing tensor."""
    target = torch.empty_like(x)
    return KernelWork(lambda: target.copy_(x), 2 * x.nbytes)


def add(x: Tensor) -> KernelWork:
    """Return the kernel that reads x and y and writes their sum to a new tensor, as a residual connection does."""
    y = torch.ones_like(x)
    return KernelWork(lambda: x + y, 3 * x.nbytes)


def run_adamw(x: Tensor) -> KernelWork:
    """Return fused AdamW, which reads parameter, gradient and two moments, and writes all but the gradient."""
    parameter = torch.nn.Parameter(x)
    parameter.grad = torch.ones_like(x)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    return KernelWork(optimizer.step, 7 * x.nbytes)


def choose_kernels(x: Tensor) -> Kernels:
    """Return the kernels that a job uses by default on the device of ``x``."""
    return TRITON if x.is_cuda and not explain_unavailability() else EAGER


def run_rms_norm(x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Run RMS norm over rows of ``WIDTH`` elements; return the output and the differentiable inputs."""
    rows = x.view(-1, WIDTH).requires_grad_()
    weight = torch.ones(WIDTH, dtype=x.dtype, device=x.device)
    return choose_kernels(x).rms_norm(rows, weight.requires_grad_(), epsilon=1e-5), (rows, weight)


def run_rope(x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Run rotary embedding over 64 positions of 4 heads of dim 32; return the output and the differentiable inputs."""
    heads = x.view(-1, 64, 4, 32).requires_grad_()
    table = torch.ones(64, 1, 32, dtype=x.dtype, device=x.device)
    return choose_kernels(x).rotate_first(heads, table, table), (heads,)


def run_swiglu(x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Run SwiGLU on a gate and an up tensor of the size of x; return the output and the differentiable inputs."""
    gate, up = x.requires_grad_(), torch.ones_like(x).requires_grad_()
    return choose_kernels(x).activate_gated(gate, up, "silu"), (gate, up)


def run_cross_entropy(x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Run cross entropy over a vocabulary of ``WIDTH``; return the output and the differentiable inputs."""
    logits = x.view(-1, WIDTH).requires_grad_()
    targets = torch.zeros(logits.shape[0], dtype=torch.int64, device=x.device)
    kernels = choose_kernels(x)
    return cross_entropy_of(logits, targets, scale=1.0, loss=kernels.nats, rescale=kernels.rescale), (logits,)


def _forward(make: Callable[[Tensor], tuple[Tensor, tuple[Tensor, ...]]], times: int) -> Callable[[Tensor], KernelWork]:
    return lambda x: KernelWork(lambda: make(x.detach()), times * x.nbytes)


def _backward(
    make: Callable[[Tensor], tuple[Tensor, tuple[Tensor, ...]]], times: int
) -> Callable[[Tensor], KernelWork]:
    """Return work that runs the backward of what ``make`` computes; it moves ``times`` the bytes of its input."""

    def work(x: Tensor) -> KernelWork:
        # Cross entropy writes its gradient over its logits; the hooks keep autograd from raising in a second run.
        with torch.autograd.graph.saved_tensors_hooks(Tensor.detach, lambda saved: saved):
            out, inputs = make(x.detach())
        grad = torch.ones_like(out)
        return KernelWork(lambda: torch.autograd.grad(out, inputs, grad, retain_graph=True), times * x.nbytes)

    return work


KERNELS: dict[str, Callable[[Tensor], KernelWork]] = {
    "copy": copy,
    "add": add,
    "adamw": run_adamw,
    "rms_norm": _forward(run_rms_norm, 2),
    "rms_norm_backward": _backward(run_rms_norm, 3),
    "rope": _forward(run_rope, 2),
    "rope_backward": _backward(run_rope, 2),
    "swiglu": _forward(run_swiglu, 3),
    "swiglu_backward": _backward(run_swiglu, 5),
    "cross_entropy": _forward(run_cross_entropy, 1),
    "cross_entropy_backward": _backward(run_cross_entropy, 2),
}
