"""Each kernel against torch's own autograd."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.activations import ACT2FN

from fivefold.model.spec import Model
from fivefold.trainer.model.kernels import loss
from fivefold.trainer.model.kernels.activations import FUNCTIONS
from fivefold.trainer.model.kernels.eager import EAGER
from fivefold.trainer.model.kernels.loss import cross_entropy, nats
from fivefold.trainer.model.kernels.rotary import rotate
from fivefold.trainer.model.logits import LogitTransform
from fivefold.trainer.model.rotary import rotary_tables


def draw_inputs(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(dtype).requires_grad_()


def check_same(ours: Tensor, theirs: Tensor, inputs: tuple[Tensor, ...], *, tolerance: float) -> None:
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    upstream = torch.linspace(-1, 1, ours.numel()).view(ours.shape).to(ours.dtype)
    expected = torch.autograd.grad(theirs, inputs, upstream, retain_graph=True)
    grad = torch.autograd.grad(ours, inputs, upstream)
    for mine, other in zip(grad, expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=tolerance, atol=tolerance * float(other.abs().max()))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
def test_rms_norm_equals_pytorchs(dtype: torch.dtype, tolerance: float) -> None:
    x, weight = draw_inputs(3, 5, 64, dtype=dtype), draw_inputs(64, dtype=dtype)
    theirs = F.rms_norm(x.float(), (64,), weight.float(), 1e-5).to(dtype)
    check_same(EAGER.rms_norm(x, weight, epsilon=1e-5), theirs, (x, weight), tolerance=tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("plus_one", [False, True])
def test_norms_with_bias_and_with_one_added_equal_pytorchs(
    plus_one: bool, dtype: torch.dtype, tolerance: float
) -> None:
    x, weight, bias = draw_inputs(3, 5, 64, dtype=dtype), draw_inputs(64, dtype=dtype), draw_inputs(1, 64, dtype=dtype)
    factor = weight.float() + plus_one
    wide = (x * 2 + 3).float()  # not centred
    theirs = F.layer_norm(wide, (64,), factor, bias[0].float(), 1e-5).to(dtype)
    bare = F.layer_norm(wide, (64,), factor, None, 1e-5).to(dtype)
    rms = F.rms_norm(wide, (64,), factor, 1e-5).to(dtype)
    of = {"epsilon": 1e-5, "plus_one": plus_one}
    check_same(EAGER.layer_norm(x * 2 + 3, weight, bias[0], **of), theirs, (x, weight, bias), tolerance=4 * tolerance)
    check_same(EAGER.layer_norm(x * 2 + 3, weight, None, **of), bare, (x, weight), tolerance=4 * tolerance)
    check_same(EAGER.rms_norm(x * 2 + 3, weight, **of), rms, (x, weight), tolerance=4 * tolerance)


@pytest.mark.parametrize("name", list(FUNCTIONS))
def test_plain_and_gated_activations_equal_pytorchs(name: str) -> None:
    gate, up = draw_inputs(4, 6, 32), draw_inputs(5, 6, 32)[:4]
    theirs = {
        "silu": F.silu,
        "gelu": F.gelu,
        "gelu_tanh": partial(F.gelu, approximate="tanh"),
        "gelu_new": ACT2FN["gelu_new"],
        "gelu_fast": ACT2FN["gelu_fast"],
        "quick_gelu": ACT2FN["quick_gelu"],
        "relu": F.relu,
        "relu2": lambda x: torch.square(F.relu(x)),
    }[name]
    check_same(EAGER.activate(gate, name), theirs(gate), (gate,), tolerance=1e-6)
    check_same(EAGER.activate_gated(gate, up, name), theirs(gate) * up, (gate, up), tolerance=1e-6)


@pytest.mark.parametrize(("scale", "cap"), [(0.3, None), (1.0, 1.5), (0.7, 2.0)])
def test_scaled_and_capped_logits_have_the_loss_of_pytorch(
    scale: float, cap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss, "LOSS_CHUNK_ELEMENTS", 64 * 90)
    logits, weight, targets = draw_inputs(300, 90), draw_inputs(90, 90), torch.arange(300) % 83
    shaped = (logits @ weight * 0.1) * scale
    shaped = shaped if cap is None else torch.tanh(shaped / cap) * cap
    shape = LogitTransform(scale, cap)
    check_same(shape.apply(logits @ weight * 0.1), shaped, (logits, weight), tolerance=2e-6)
    theirs = F.cross_entropy(shaped[:, :83], targets, reduction="sum") * 0.25
    ours = cross_entropy(logits @ weight * 0.1, targets, scale=0.25, loss=partial(nats, vocab=83, transform=shape))
    check_same(ours, theirs, (logits, weight), tolerance=1e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
def test_swiglu_equals_pytorchs(dtype: torch.dtype, tolerance: float) -> None:
    gate, up = draw_inputs(4, 6, 32, dtype=dtype), draw_inputs(4, 6, 32, dtype=dtype)
    check_same(EAGER.activate_gated(gate, up, "silu"), F.silu(gate) * up, (gate, up), tolerance=tolerance)


def test_rotary_embedding_equals_complex_rotation() -> None:
    model = Model(name="m", layers=1, width=8, heads=1, kv_heads=1, head_dim=8, ffn=8, vocab=8, rope_theta=100.0)
    cos, sin = rotary_tables(model, positions=torch.arange(7), dtype=torch.float32, device=torch.device("cpu"))
    angles = torch.outer(torch.arange(7), 100.0 ** -(torch.arange(0, 8, 2) / 8))[:, None, :]
    x = draw_inputs(2, 7, 3, 8)
    turned = torch.view_as_complex(torch.stack((x[..., :4], x[..., 4:]), -1)) * torch.polar(torch.ones(()), angles)
    theirs = torch.cat((turned.real, turned.imag), -1)
    check_same(rotate(x, cos_TH=cos, sin_TH=sin), theirs, (x,), tolerance=1e-6)


@pytest.mark.parametrize("rows", [1, 50, 300])
def test_padded_vocabulary_entries_get_no_probability(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss, "LOSS_CHUNK_ELEMENTS", 64 * 90)
    logits, weight = draw_inputs(rows, 90), draw_inputs(90, 90)
    targets = torch.arange(rows) % 83
    theirs = F.cross_entropy((logits @ weight)[:, :83], targets, reduction="sum") * 0.25
    ours = cross_entropy(logits @ weight, targets, scale=0.25, loss=partial(nats, vocab=83))
    check_same(ours, theirs, (logits, weight), tolerance=2e-6)


@pytest.mark.parametrize("cap", [None, 1.5])
def test_rows_with_a_negative_target_have_no_loss(cap: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss, "LOSS_CHUNK_ELEMENTS", 64 * 90)
    logits, weight, targets = draw_inputs(300, 90), draw_inputs(90, 90), torch.arange(300) % 83
    targets[::3], targets[1::7] = -100, -101
    shaped = (logits @ weight * 0.1) if cap is None else torch.tanh(logits @ weight * 0.1 / cap) * cap
    ignored = targets.masked_fill(targets < 0, -100)
    theirs = F.cross_entropy(shaped[:, :83], ignored, reduction="sum", ignore_index=-100) * 0.25
    nats_of = partial(nats, vocab=83, transform=LogitTransform(1.0, cap), skips_negative_targets=True)
    ours = cross_entropy(logits @ weight * 0.1, targets, scale=0.25, loss=nats_of)
    check_same(ours, theirs, (logits, weight), tolerance=1e-5)


@pytest.mark.parametrize("rows", [1, 50, 300])
def test_cross_entropy_in_chunks_equals_pytorchs(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss, "LOSS_CHUNK_ELEMENTS", 64 * 90)
    logits, weight = draw_inputs(rows, 90), draw_inputs(90, 90)
    targets = torch.arange(rows) % 90
    theirs = F.cross_entropy(logits @ weight, targets, reduction="sum") * 0.25
    ours = cross_entropy(logits @ weight, targets, scale=0.25)
    check_same(ours, theirs, (logits, weight), tolerance=2e-6)
