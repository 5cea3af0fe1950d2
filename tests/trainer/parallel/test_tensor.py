"""The loss over a sharded vocabulary and casts before a gather, against one process.

``tests/agree/parity`` compares all other layers.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from fivefold.job import get_recipe
from fivefold.step import count_sent_bytes
from fivefold.trainer.measure.meter import Meter
from fivefold.trainer.model.float8.matmul import Float8Gemms
from fivefold.trainer.model.kernels.loss import cross_entropy
from fivefold.trainer.model.linear import Linear
from fivefold.trainer.parallel import tensor
from fivefold.trainer.parallel.mesh import AxisGroup

ROWS, WIDTH, CHUNK = 12, 16, 300
SCALE = 1 / ROWS


def draw_inputs(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape) + 1000 * seed)) * 0.3


def world() -> AxisGroup:
    size = dist.get_world_size()
    return AxisGroup("tp", dist.get_rank(), tuple(range(size)), dist.group.WORLD)


def losses(words: int, spread: float) -> list[tuple[float, float, bool, int]]:
    """Per dtype: loss, the gradient's error, whether it lies where the logits lay, how many all_reduces."""
    axis, results = world(), []
    padded = -(-words // axis.size) * axis.size
    held = padded // axis.size
    targets = torch.arange(ROWS) * 23 % words
    for dtype in (torch.float32, torch.bfloat16):
        whole = (draw_inputs(ROWS, words) * spread).to(dtype)
        rounded = whole.double().requires_grad_()
        expected = F.cross_entropy(rounded, targets, reduction="sum") * SCALE
        expected.backward()
        assert rounded.grad is not None
        logits = F.pad(whole, (0, padded - words), value=7.0)[:, axis.rank * held :][:, :held].clone()
        inside = logits.requires_grad_() * 1  # as it comes out of a matmul
        with Meter([inside], axis=lambda _group: "tp") as meter:
            loss = cross_entropy(
                inside, targets, scale=SCALE, loss=tensor.VocabParallel(axis, sp=True, vocab=words).nats
            )
            (gradient,) = torch.autograd.grad(loss, inside)
        (line,) = meter.traffic
        assert line.bytes == 3 * count_sent_bytes("all_reduce", payload=ROWS * 4, ranks=axis.size)
        chunk = max(1, CHUNK // held) * held * 4
        assert meter.peak_bytes - meter.base_bytes <= chunk + 64 * ROWS  # of each row a few numbers
        own_part = F.pad(rounded.grad, (0, padded - words))[:, axis.rank * held :][:, :held]
        error = (gradient - own_part).abs().max().item()
        torch.testing.assert_close(loss.double(), expected.detach(), rtol=1e-6, atol=1e-6)
        results.append((loss.item(), error, inside.data_ptr() == gradient.data_ptr(), line.calls))
    return results


@pytest.mark.parametrize(("ranks", "words", "spread"), [(2, 251, 1.0), (4, 251, 1.0), (4, 5, 1.0), (2, 251, 1e4)])
def test_the_loss_over_a_sharded_vocabulary_equals_one_process(
    forked, ranks: int, words: int, spread: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """5 words over 4 ranks leave one with padding alone."""
    monkeypatch.setattr("fivefold.trainer.model.kernels.loss.LOSS_CHUNK_ELEMENTS", CHUNK)
    answers = forked(ranks, losses, words, spread)
    for answer in answers:
        for (loss, error, in_place, spoken), (first, *_), tolerance in zip(
            answer, answers[0], (1e-7, 5e-4), strict=True
        ):
            assert loss == first
            assert error <= tolerance
            assert in_place
            assert spoken == 3


def check_uneven() -> str:
    layer = Linear(WIDTH, WIDTH, bias=False)
    layer.hooks = tensor.RowParallel(world(), sp=True)
    with pytest.raises(ValueError, match="7 rows are not divisible by tp=2") as raised:
        layer(draw_inputs(7, WIDTH))
    return str(raised.value)


def test_rows_that_do_not_divide_are_rejected(forked) -> None:
    forked(2, check_uneven)


def cast_before_the_gather(name: str) -> list[Any]:
    """The operand of all ranks' rows as it is gathered, and as it is cast on one rank; messages and payloads."""
    axis = world()
    gemms = Float8Gemms(get_recipe(name), kernel=False)
    whole = (draw_inputs(24, 320, seed=5) * torch.logspace(-3, 3, 24)[:, None]).bfloat16()
    own = whole.chunk(axis.size)[axis.rank]
    hooks = tensor.ColumnParallel(axis, sp=True)
    said: list[tuple[str, int]] = []

    def post(_name: str, _ranks: object, collective: str, payload: int) -> None:
        said.append((collective, payload))

    axis.listener.post = post
    operand, expected = hooks.operand(own, gemms), gemms.operand(whole)
    assert [part is None for part in operand] == [part is None for part in expected]
    same = [
        a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.float(), b.float())
        for a, b in zip(operand, expected, strict=True)
        if a is not None and b is not None
    ]
    return [all(same), said]


@pytest.mark.parametrize(
    ("name", "sent"),
    [
        ("fp8", [("all_reduce", 4), ("all_gather", 24 * 320)]),
        ("fp8-rowwise", [("all_gather", 24 * 320), ("all_gather", 24 * 4)]),
        ("fp8-rowwise-gw", [("all_gather", 24 * 320), ("all_gather", 24 * 4)]),
        ("fp8-tiles", [("all_gather", 24 * 320), ("all_gather", 24 * 3 * 4)]),
        ("mxfp8", [("all_gather", 24 * 320), ("all_gather", 24 * 10)]),
        ("nvfp4", [("all_reduce", 4), ("all_gather", 24 * 160), ("all_gather", 24 * 20)]),
    ],
)
def test_fp8_casts_gathered_over_tp_are_bitwise_equal(forked, name: str, sent: list[tuple[str, int]]) -> None:
    assert forked(2, cast_before_the_gather, name) == [[True, sent]] * 2
