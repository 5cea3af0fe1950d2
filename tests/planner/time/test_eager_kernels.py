"""The passes over memory of ``kernels = "eager"`` against the trainer's own functions, operation by operation."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from benchmarks.published.readers.qwen3_layouts import STACK as QWEN3
from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.machine.catalog import resolve
from fivefold.model.catalog import build_model
from fivefold.model.norms import NORMS
from fivefold.planner.counts.counts import Counts
from fivefold.planner.counts.operations.local_shapes import get_local_degrees
from fivefold.planner.counts.operations.op import NormKind, norm
from fivefold.planner.time.compute import Prices
from fivefold.planner.time.eager_kernels import EAGER as PASSES
from fivefold.planner.time.eager_kernels import PLAIN, ROPE_APART
from fivefold.stack.catalog import build_stack
from fivefold.trainer.measure.meter import list_tensors
from fivefold.trainer.model.kernels.eager import EAGER
from fivefold.trainer.model.kernels.loss import cross_entropy

NO_WORK = (
    "view", "_unsafe_view", "expand", "slice", "select", "unsqueeze", "detach", "split", "alias", "zeros",
    "lift_fresh", "fill_",
)  # fmt: skip
NEAR = 0.03  # numbers of a row, weights and tables are left out of the table
SOFTMAX = {2: 8, 4: 0}  # bytes an element by which the CPU widens the logits first; a GPU's softmax reads them narrow
PICKED = 8  # of a scatter, and the width of a gather: both touch one element of a row
FUSED = {"norm": (2, 3), "rope": (2, 2), "activation": (3, 5), "experts": (3, 5), "loss": (2, 2)}  # tensors moved
R, D = 64, 2048


def count_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor, of which an expanded dimension is read once."""
    sizes = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return prod(sizes) * tensor.element_size()


class EagerKernelCost(TorchDispatchMode):
    """Bytes that operations read and write, each for itself, and their number."""

    def __init__(self) -> None:
        super().__init__()
        self.moved = self.kernels = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func._opname not in NO_WORK:
            reads = list(list_tensors(args))[func._opname == "copy_" :]
            self.moved += sum(map(count_bytes, (*reads, *list_tensors(out))))
            self.kernels += 1
        return out


def rows(dtype: torch.dtype) -> Tensor:
    return torch.ones(R, D, dtype=dtype).requires_grad_()


def inputs(kind: str, dtype: torch.dtype) -> list[Tensor]:
    if kind == "rope":
        return [torch.ones(1, R, D // 64, 64, dtype=dtype).requires_grad_()]
    more = {"norm": torch.ones(D, dtype=dtype), "loss": None}.get(kind, torch.ones(R, D, dtype=dtype))
    results = [rows(dtype), *([] if more is None else [more.requires_grad_()])]
    return [*results, torch.ones(R).requires_grad_()] if kind == "experts" else results


TARGETS = torch.zeros(R, dtype=torch.long)
WORK: dict[str, Callable[..., Tensor]] = {
    "norm": lambda x, weight: EAGER.rms_norm(x, weight, epsilon=1e-5),
    "rope": lambda x: EAGER.rotate_first(x, x[0, :, :1].detach(), x[0, :, :1].detach()),
    "activation": lambda gate, up: EAGER.activate_gated(gate, up, "silu"),
    "experts": EAGER.weighted_swiglu,
    "loss": lambda x: cross_entropy(x * 1, TARGETS, scale=1.0),  # it overwrites its logits, so they may be no leaf
}


@pytest.mark.parametrize(("kind", "width"), PASSES)
def test_passes_are_those_of_the_operations(kind: str, width: int) -> None:
    dtype = torch.bfloat16 if width == 2 else torch.float32
    given = inputs(kind, dtype)
    with EagerKernelCost() as forward:
        out = WORK[kind](*given)
    upstream = torch.ones_like(out)
    with EagerKernelCost() as backward:
        torch.autograd.grad(out, given, upstream)
    moved, kernels, numel, told = forward.moved, forward.kernels, R * D, PASSES[kind, width]
    if kind == "loss":  # without the products by 1 and by the scale, and with the kernels of a GPU
        moved -= (2 * width + SOFTMAX[width] + PICKED + width) * numel
        kernels -= 2 + (width == 2)
        backward.moved -= 2 * width * numel
        backward.kernels -= 1
    first, second = (number * numel * width for number in FUSED[kind])
    assert moved == pytest.approx(told.forward * first, rel=NEAR)
    assert backward.moved == pytest.approx(told.backward * second, rel=NEAR)
    assert (kernels, backward.kernels) == (told.kernels, told.backward_kernels)


NORM = LlamaRMSNorm(D)
TABLES = {dtype: torch.ones(1, R, 64, dtype=dtype) for dtype in (torch.bfloat16, torch.float32)}


def normalize_as_transformers(x: Tensor, weight: Tensor) -> Tensor:
    return torch.func.functional_call(NORM, {"weight": weight}, (x,))  # type: ignore[no-any-return]


def activate_halves(merged: Tensor) -> Tensor:
    """As Megatron's MLP without bias_activation_fusion (megatron/core/transformer/mlp.py, glu) and nanotron's."""
    gate, up = torch.chunk(merged, 2, dim=-1)
    return torch.nn.functional.silu(gate) * up


PLAIN_WORK: dict[str, Callable[..., Any]] = {
    "norm": normalize_as_transformers,
    "rope": lambda q, k: apply_rotary_pos_emb(q, k, TABLES[q.dtype], TABLES[q.dtype]),
    "activation": lambda gate, up: torch.nn.functional.silu(gate) * up,
    "halves": activate_halves,
}


@pytest.mark.parametrize(("kind", "width"), PLAIN)
def test_plain_passes_are_those_of_transformers_under_autograd(kind: str, width: int) -> None:
    dtype = torch.bfloat16 if width == 2 else torch.float32
    if kind == "norm":
        given = [rows(dtype), torch.nn.Parameter(torch.ones(D, dtype=dtype))]
    elif kind == "rope":  # both counts are of queries and keys
        given = [torch.ones(1, D // 64, R, 64, dtype=dtype).requires_grad_() for _ in range(2)]
    elif kind == "halves":
        given = [torch.ones(R, 2 * D, dtype=dtype).requires_grad_()]
    else:
        given = [rows(dtype), rows(dtype)]
    with EagerKernelCost() as forward:
        out = PLAIN_WORK[kind](*given)
    outs = out if isinstance(out, tuple) else (out,)
    upstream = [torch.ones_like(tensor) for tensor in outs]
    with EagerKernelCost() as backward:
        torch.autograd.grad(outs, given, upstream)
    told, tensors = PLAIN[kind, width], len(outs)
    first, second = (number * tensors * R * D * width for number in FUSED[kind.replace("halves", "activation")])
    assert forward.moved == pytest.approx(told.forward * first, rel=0.05)
    assert backward.moved == pytest.approx(told.backward * second, rel=0.05)
    assert (forward.kernels, backward.kernels) == (tensors * told.kernels, tensors * told.backward_kernels)


def test_a_gate_apart_takes_at_least_as_long_as_its_bytes_on_h100() -> None:
    """Qwen3 8B under tp2 in Megatron-Bridge, 4,096 tokens: two kernels forward take 157 us, four backward 314.

    BastiaanGroot/ML-Infrastructure-Engineer@52ad575:training/profiles/q8b-baseline-cuda_gpu_kern_sum.txt: medians of
    kernels that run once a layer. Those that read half of a row reach half of the bandwidth, which is not counted.
    """
    stack = build_stack("megatron-bridge")
    seconds = {}
    for kernels in ("fused", "norms"):
        job = Job(stack=stack.replace(kernels=kernels), sequence=4096, global_batch=8)
        counts, local = Counts(build_model("qwen3-8b"), job), get_local_degrees(Layout.parse("dp4 tp2 mbs1 nosp"))
        op = next(op for op in counts.unit(local, counts.kinds[0]).ops if op.name == "mlp.act")
        seconds[kernels] = Prices(resolve("h100:8", local=Path()), ranks=8, job=job).operation(op)
    for way, measured in (("forward", 157e-6), ("backward", 314e-6)):
        fused, apart = (getattr(seconds[kernels], way) for kernels in ("fused", "norms"))
        assert fused < 0.5 * measured < apart < measured
    assert (seconds["norms"].kernels, seconds["norms"].backward_kernels) == (2, 4)


def test_a_layer_launches_the_kernels_of_an_nsight_summary() -> None:
    """Qwen3 8B under tp2 in Megatron-Bridge: 53 kernels run once a layer, in addition to four all-reduces.

    BastiaanGroot/ML-Infrastructure-Engineer@52ad575:training/profiles/q8b-baseline-cuda_gpu_kern_sum.txt: instances by
    those of attention's forward, 46,080. Of two sums of the residual's gradients the bytes alone are counted.
    """
    job = Job(stack=QWEN3, sequence=4096, global_batch=8)
    counts, local = Counts(build_model("qwen3-8b"), job), get_local_degrees(Layout.parse("dp4 tp2 mbs1 nosp"))
    prices = Prices(resolve("h100:8", local=Path()), ranks=8, job=job)
    times = [prices.operation(op) for op in counts.unit(local, counts.kinds[0]).ops]
    assert sum(time.kernels + time.backward_kernels for time in times) + sum(QWEN3.extra_kernels) == 53 - 2


@pytest.mark.parametrize(("width", "milliseconds"), [(4096, (0.2799, 0.7404)), (8192, (0.519, 1.3516))])
def test_a_plain_norm_takes_about_as_long_as_measured(width: int, milliseconds: tuple[float, float]) -> None:
    """LlamaRMSNorm of 2,048 tokens on an A100 (Liger-Kernel@ead96b6:benchmark/data/all_benchmark_data.csv)."""
    prices = Prices(resolve("a100:1", local=Path()), ranks=1, job=Job(linears="separate", kernels="plain"))
    kind = NormKind(norm=NORMS["rmsnorm"], bias=False, plain=True, fused=False)
    seconds = prices.operation(norm("norm1", "x", "y", rows=2048, dim=width, width=2, kind=kind))
    for predicted, measured in zip((seconds.forward, seconds.backward), milliseconds, strict=True):
        assert 0.65 < predicted * 1e3 / measured < 1.0


@pytest.mark.parametrize(("vocab", "milliseconds"), [(32_768, 5.3168), (65_536, 10.6151), (131_072, 20.7264)])
def test_a_plain_loss_takes_about_as_long_as_measured(vocab: int, milliseconds: float) -> None:
    """CrossEntropyLoss of 16,384 tokens in fp32 on an A100 (Liger-Kernel@ead96b6, as above): 36 GB at 1.73 TB/s.

    Forward and backward take 15.486, 30.778 and 60.438 ms there, three passes of which add to the last gradient.
    """
    job = Job(precision="fp32", stack=build_stack("fsdp2"), sequence=16_384, global_batch=1)
    prices = Prices(resolve("a100:1", local=Path()), ranks=1, job=job)
    counts = Counts(build_model("llama3-8b").replace(vocab=vocab), job)
    loss = next(op for op in counts.unit(get_local_degrees(Layout.parse("dp1 mbs1")), "head").ops if op.kind == "loss")
    seconds = prices.operation(loss)
    assert 0.9 < seconds.forward * 1e3 / milliseconds < 1.0
    both = {32_768: 15.486, 65_536: 30.778, 131_072: 60.438}[vocab]
    accumulated = 3 * 4 * 16_384 * vocab / (0.85 * 2.039e12)
    assert 0.9 < (seconds.forward + seconds.backward + accumulated) * 1e3 / both < 1.02


def rotate_heads(heads: Tensor, angles: Tensor, *, nope: int) -> Tensor:
    """Heads of latent attention as Megatron rotates them without apply_rope_fusion (_apply_rotary_pos_emb_bshd)."""
    still, turned = torch.split(heads, [nope, angles.shape[-1]], dim=-1)
    turned = torch.cat((turned[..., 0::2], turned[..., 1::2]), dim=-1)
    cos, sin = ((function(angles) * 1.0).to(heads.dtype) for function in (torch.cos, torch.sin))
    first, second = torch.chunk(turned, 2, dim=-1)
    turned = turned * cos + torch.cat((-second, first), dim=-1) * sin
    return torch.cat((still, torch.cat((turned, turned[..., :0]), dim=-1)), dim=-1)


def test_latent_attention_is_rotated_in_as_many_passes_as_megatrons() -> None:
    heads, angles = torch.ones(R, 1, 16, 128 + 64, dtype=torch.bfloat16).requires_grad_(), torch.ones(R, 1, 1, 64)
    with EagerKernelCost() as forward:
        out = rotate_heads(heads, angles, nope=128)
    upstream = torch.ones_like(out)
    with EagerKernelCost() as backward:
        torch.autograd.grad(out, heads, upstream)
    fused = 2 * heads.nbytes
    assert (forward.kernels, backward.kernels) == (ROPE_APART.kernels, ROPE_APART.backward_kernels)
    assert forward.moved == pytest.approx(ROPE_APART.forward * fused, rel=NEAR)
    assert backward.moved == pytest.approx(ROPE_APART.backward * fused, rel=NEAR)
