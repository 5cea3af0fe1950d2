"""Triton's kernels in its interpreter against the eager ones: values, gradients, saved tensors, odd sizes, bf16.

The interpreter cuts fp32 to bf16 where a GPU rounds, so bf16 results may differ by a unit in the last place (2^-8).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from torch import Tensor

from fivefold.trainer.model.kernels.activations import FUNCTIONS
from fivefold.trainer.model.kernels.eager import EAGER, Kernels
from fivefold.trainer.model.kernels.fused.kernels import TritonKernels
from fivefold.trainer.model.kernels.loss import cross_entropy
from fivefold.trainer.model.logits import PLAIN, LogitTransform
from tests.selection import mark_share

pytest.importorskip("triton", reason="Triton is made for Linux on x86-64")
TRITON = TritonKernels()
FP32, BF16 = torch.float32, torch.bfloat16
ULPS = {FP32: 4e-6, BF16: 2**-6}

Call = Callable[[Kernels, Sequence[Tensor]], Tensor]


def draw_inputs(*shape: int, seed: int = 0, dtype: torch.dtype = FP32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def run(call: Call, kernels: Kernels, inputs: Sequence[Tensor]) -> tuple[Tensor, tuple[Tensor, ...], list[int]]:
    """Result, gradients of the inputs that have a dtype of numbers, and the bytes that were saved between."""
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if not (tensor.is_leaf and tensor.dim() == 1):  # weights live anyway
            saved[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = call(kernels, leaves)
    upstream = draw_inputs(*out.shape, seed=7, dtype=out.dtype) if out.dim() else torch.tensor(0.5)
    return out.detach(), torch.autograd.grad(out, leaves, upstream), sorted(saved.values())


def check_same(call: Call, inputs: Sequence[Tensor], *, tolerance: float | None = None) -> None:
    theirs, ours = run(call, EAGER, inputs), run(call, TRITON, inputs)
    bound = ULPS[inputs[0].dtype] if tolerance is None else tolerance
    for result, wanted in zip((ours[0], *ours[1]), (theirs[0], *theirs[1]), strict=True):
        assert (result.dtype, result.shape) == (wanted.dtype, wanted.shape)
        scale = max(1.0, float(wanted.abs().max())) if wanted.numel() else 1.0
        torch.testing.assert_close(result.float(), wanted.float(), rtol=bound, atol=bound * scale)
    assert ours[2] == theirs[2]


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("shape", [(3, 7, 48), (300, 65), (1, 1), (5, 4099)])
def test_rms_norm_equals_the_eager_kernel(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    inputs = draw_inputs(*shape, dtype=dtype), draw_inputs(shape[-1], seed=1, dtype=dtype)
    check_same(lambda kernels, x: kernels.rms_norm(x[0], x[1], epsilon=1e-5), inputs)
    check_same(lambda kernels, x: kernels.rms_norm(x[0], None, epsilon=1e-5), inputs[:1])


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_layer_norm_equals_the_eager_kernel(dtype: torch.dtype) -> None:
    x, weight, bias = (draw_inputs(*shape, seed=n, dtype=dtype) for n, shape in enumerate([(3, 11, 65), (65,), (65,)]))
    check_same(lambda kernels, x: kernels.layer_norm(x[0], x[1], x[2], epsilon=1e-5), (x + 2, weight, bias))
    check_same(lambda kernels, x: kernels.layer_norm(x[0], x[1], None, epsilon=1e-5, plus_one=True), (x + 2, weight))
    check_same(lambda kernels, x: kernels.rms_norm(x[0], x[1], epsilon=1e-5, plus_one=True), (x, weight))


def test_norms_accept_strided_rows() -> None:
    """The latents of latent attention are slices of wider rows."""
    weight = draw_inputs(40, seed=1)
    check_same(
        lambda kernels, x: kernels.rms_norm(x[0].split((40, 8), -1)[0], weight, epsilon=1e-5), (draw_inputs(9, 48),)
    )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize(("heads", "dim", "turned"), mark_share(3, [(5, 12, 6), (3, 8, 8), (1, 6, 2)]))
def test_rotary_embedding_equals_the_eager_kernel(heads: int, dim: int, turned: int, dtype: torch.dtype) -> None:
    angles = draw_inputs(7, 1, turned // 2, seed=3)
    cos, sin = torch.cat((angles.cos(),) * 2, -1).to(dtype), torch.cat((-angles.sin(), angles.sin()), -1).to(dtype)
    x, key = draw_inputs(2, 7, heads, dim, dtype=dtype), draw_inputs(2, 7, 1, turned, dtype=dtype)
    turned_about = draw_inputs(2, heads, 7, dim, dtype=dtype)
    check_same(lambda kernels, x: kernels.rotate_first(x[0], cos, sin), (x,))
    check_same(lambda kernels, x: kernels.rotate_last(x[0].transpose(1, 2), cos, sin), (turned_about,))
    check_same(lambda kernels, x: kernels.append_rotated(x[0], x[1], cos, sin), (x, key))


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("shape", [(6, 33), (2, 4100), (0, 4)])
def test_gated_activations_equal_the_eager_kernels(shape: tuple[int, int], dtype: torch.dtype) -> None:
    gate, up = draw_inputs(*shape, dtype=dtype), draw_inputs(*shape, seed=1, dtype=dtype)
    share = draw_inputs(shape[0], seed=2).abs()
    check_same(lambda kernels, x: kernels.activate_gated(x[0], x[1], "silu"), (gate, up))
    check_same(lambda kernels, x: kernels.weighted_swiglu(x[0], x[1], x[2]), (gate, up, share))
    check_same(lambda kernels, x: kernels.input_weighted_swiglu(x[0], x[1], x[2]), (gate, up, share))
    check_same(lambda kernels, x: kernels.weighted_clamped_swiglu(x[0], x[1], x[2]), (gate * 6, up * 6, share))


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_activations_equal_the_eager_kernels(name: str, dtype: torch.dtype) -> None:
    gate, up = draw_inputs(5, 67, dtype=dtype) * 2, draw_inputs(5, 67, seed=1, dtype=dtype)
    check_same(lambda kernels, x: kernels.activate(x[0], name), (gate,))
    check_same(lambda kernels, x: kernels.activate_gated(x[0], x[1], name), (gate, up))


@pytest.mark.parametrize("shape", [PLAIN, LogitTransform(scale=0.5), LogitTransform(cap=5.0)])
@pytest.mark.parametrize("dtype", mark_share(2, [BF16, FP32]))
@pytest.mark.parametrize(("vocab", "skips"), mark_share(2, [(4099, True), (4099, False), (7, False)]))
def test_cross_entropy_equals_the_eager_kernel(
    vocab: int, dtype: torch.dtype, shape: LogitTransform, skips: bool
) -> None:
    logits, targets, words = draw_inputs(9, vocab, dtype=dtype) * 3, torch.arange(9) % 5, vocab - 2

    def call(kernels: Kernels, x: Sequence[Tensor]) -> Tensor:
        loss = partial(kernels.nats, vocab=words, transform=shape, skips_negative_targets=skips)
        chosen = targets.masked_fill(targets == 2, -100) if skips else targets
        return cross_entropy(x[0] * 1, chosen, scale=0.25, loss=loss, rescale=kernels.rescale)

    check_same(call, (logits,))
    torch.testing.assert_close(TRITON.nats(logits.clone(), targets, None), EAGER.nats(logits.clone(), targets, None))


def test_cross_entropy_of_a_vocabulary_shard_equals_the_eager_kernel() -> None:
    """Ranks of a sharded vocabulary: one has a row's target, the others not; one may have nothing but padding."""
    logits, padding = draw_inputs(6, 11), torch.full((6, 11), -torch.inf)
    for part in (logits, padding):
        torch.testing.assert_close(TRITON.log_sum_exp(part), EAGER.log_sum_exp(part))
    lse, target = draw_inputs(6, 1, seed=2) + 4, torch.arange(6)[:, None]
    own, times = torch.tensor([[1], [0], [1], [0], [0], [1]]).bool(), torch.tensor(0.5)
    for part in (logits, padding):
        ours, theirs = part.clone(), part.clone()
        TRITON.logits_to_gradient(ours, lse, target, own, times)
        EAGER.logits_to_gradient(theirs, lse, target, own, times)
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_gathering_rows_for_experts_and_adding_them_back_equals_pytorch(dtype: torch.dtype) -> None:
    """Rows with two, one, no copy: as where experts have no room for more."""
    x, tokens = draw_inputs(4, 37, dtype=dtype), torch.tensor([2, 0, 0, 3])
    places, starts = torch.tensor([1, 2, 0, 3]), torch.tensor([0, 2, 2, 3])
    torch.testing.assert_close(TRITON.gather_rows(x, tokens), x[tokens])
    wanted = torch.zeros(4, 37).index_add_(0, tokens, x[tokens].float())
    torch.testing.assert_close(TRITON.sum_copies(x[tokens], places, starts).float(), wanted, rtol=2**-7, atol=0)
    torch.testing.assert_close(EAGER.sum_copies(x[tokens], places, starts).float(), wanted, rtol=2**-7, atol=0)
