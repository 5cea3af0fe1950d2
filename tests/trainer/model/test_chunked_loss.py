"""The chunked loss equals torch's own, and that of full logits under every parallelism."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo  # once, before any fork
import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.job import Job, LearningRate, get_recipe
from fivefold.layout.spec import Layout
from fivefold.model.experts import MoE
from fivefold.model.spec import Model
from fivefold.planner.predict import Planner
from fivefold.trainer.build import build
from fivefold.trainer.engine import Engine
from fivefold.trainer.measure.measured_step import list_live_tensors
from fivefold.trainer.measure.meter import Meter
from fivefold.trainer.model.chunked_loss import chunked_loss
from fivefold.trainer.model.kernels.loss import cross_entropy, nats
from fivefold.trainer.model.linear import Linear
from tests.agree.dry_run.cases import machine
from tests.selection import mark_share

Fork = Callable[..., list[Any]]
ROWS, WIDTH, WORDS, CHUNK, SCALE = 50, 16, 90, 16, 0.25
DENSE = Model(name="odd", layers=4, width=24, heads=4, kv_heads=2, head_dim=6, ffn=44, vocab=83, head_bias=True)
TIED = DENSE.replace(name="tied", tied_embeddings=True, head_bias=False)
SPARSE = DENSE.replace(name="sparse", moe=MoE(experts=4, topk=2, ffn=20, dense_layers=1))
JOB = Job(
    sequence=48,
    global_batch=8,
    precision=get_recipe("fp32"),
    steps=9,
    learning_rate=LearningRate(kind="constant", peak=1e-2),
)


@pytest.fixture
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fivefold.trainer.model.chunked_loss.LOSS_CHUNK_ROWS", CHUNK)


def draw_inputs(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def head(dtype: torch.dtype = torch.float32) -> Linear:
    out = Linear(WIDTH, WORDS, bias=True)
    assert out.weight is not None
    assert out.bias is not None
    out.weight, out.bias = (nn.Parameter(draw_inputs(*item.shape).to(dtype)) for item in (out.weight, out.bias))
    return out


TARGETS = torch.arange(ROWS) * 7 % WORDS


# One part in 2^8 of bf16, for each of the four chunks in which dW is rounded
@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-7)])
@pytest.mark.usefixtures("_small_chunks")
def test_chunked_loss_and_gradients_equal_those_of_full_logits(dtype: torch.dtype, error: float) -> None:
    """The upstream gradient is not one, and a gradient is there already."""
    h, out = draw_inputs(ROWS, WIDTH).to(dtype).requires_grad_(), head(dtype)
    exact = [item.detach().double().requires_grad_() for item in (h, *out.parameters())]
    expected = 3 * SCALE * F.cross_entropy(F.linear(*exact), TARGETS, reduction="sum")
    expected.backward()
    for _ in range(2):
        ours = chunked_loss(h, out, TARGETS.view(5, 10), scale=SCALE, loss=nats)
        assert ours.isnan()
        (3 * ours).backward()
    torch.testing.assert_close(3 * ours.double(), expected, rtol=error, atol=0)
    for mine, other in zip((h, *out.parameters()), exact, strict=True):
        assert mine.grad is not None
        assert other.grad is not None
        assert (mine.grad - 2 * other.grad).norm() <= error * 2 * other.grad.norm()


@pytest.mark.usefixtures("_small_chunks")
def test_without_gradients_the_chunked_loss_is_computed_in_the_forward() -> None:
    out = head()
    with torch.no_grad():
        ours = chunked_loss(draw_inputs(ROWS, WIDTH), out, TARGETS, scale=SCALE, loss=nats)
        theirs = cross_entropy(out(draw_inputs(ROWS, WIDTH)), TARGETS, scale=SCALE)
    torch.testing.assert_close(ours, theirs)


def run_steps(model: Model, text: str, loss: str, precision: str, compiled: bool = False) -> list[tuple[float, float]]:
    """Loss and norm of two steps, and held-out loss as the last."""
    layout = Layout.parse(text)
    job = JOB.replace(loss=loss, precision=get_recipe(precision), compile=compiled)
    built = build(model=model, layout=layout, job=job, device=torch.device("cpu"))
    engine, results = Engine(built, model=model, layout=layout, job=job), []
    for number in range(2):
        tokens = torch.randint(0, model.vocab, (8, 49), generator=torch.Generator().manual_seed(number))
        mine = tokens.view(layout.micro_batches(job), layout.dp, layout.mbs, 49)[:, built.ranks["dp"].rank]
        done = engine.step(mine)
        engine.zero_grad()
        results.append((done.loss, done.norm))
    total = engine.evaluate(mine)
    torch.distributed.all_reduce(total)
    return [*results, (total.item(), 0.0)]


@pytest.mark.parametrize(
    ("model", "text"),
    mark_share(10, [
        (DENSE, "tp2 mbs2"), (DENSE, "tp2 mbs2 nosp"), (DENSE, "dp2 zero3 mbs2"), (DENSE, "cp2 mbs2"),
        (DENSE, "pp2 mbs1"), (DENSE, "pp2 zb1p mbs1"), (TIED, "pp2 zb1p mbs1"), (TIED, "dp2 tp2 zero3 mbs1"),
        (SPARSE, "dp2 ep2 zero2 mbs2"), (DENSE, "tp2 pp2 dualpipe mbs1"),
    ]),
    ids=lambda value: value.name if isinstance(value, Model) else value,
)  # fmt: skip
@pytest.mark.usefixtures("_small_chunks")
def test_every_layout_trains_as_with_full_logits(forked: Fork, model: Model, text: str) -> None:
    layout = Layout.parse(text)
    whole, ours = (forked(layout.world, run_steps, model, text, loss, "fp32") for loss in ("fused", "chunked"))
    for mine, other in zip(ours, whole, strict=True):
        for result, expected in zip(mine, other, strict=True):
            assert result == pytest.approx(expected, rel=1e-6)


# Errors of a rounding of a number (fp16: 2^-11, bf16: 2^-8), twice where weights without a master copy are rounded too
@pytest.mark.parametrize(
    ("precision", "error"), mark_share(2, [("fp16", 2**-11), ("bf16", 2**-8), ("bf16-pure", 2**-7)])
)
@pytest.mark.usefixtures("_small_chunks")
def test_chunked_loss_in_low_precision_is_close_to_the_full_loss(forked: Fork, precision: str, error: float) -> None:
    (whole,), (ours,) = (forked(1, run_steps, DENSE, "mbs4", loss, precision) for loss in ("fused", "chunked"))
    for result, expected in zip(ours, whole, strict=True):
        assert result == pytest.approx(expected, rel=error)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # torch warns itself when it traces
def test_a_chunked_loss_works_with_compiled_blocks(forked: Fork, monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.compile  # here without C++, which takes long
    monkeypatch.setattr(torch, "compile", lambda function, options=None: real(function, backend="aot_eager"))
    model = DENSE.replace(layers=2)
    (plain,), (ours,) = (forked(1, run_steps, model, "mbs8", "chunked", "fp32", compiled) for compiled in (False, True))
    for result, expected in zip(ours, plain, strict=True):
        assert result == pytest.approx(expected, rel=1e-5)


def test_only_the_logits_of_one_chunk_are_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also dh and dW, with 2000 words and 8 chunks of 32 rows; full logits are 2 MB, those of a chunk 256 kB."""
    monkeypatch.setattr("fivefold.trainer.model.chunked_loss.LOSS_CHUNK_ROWS", 32)
    monkeypatch.setattr("fivefold.trainer.model.kernels.loss.LOSS_CHUNK_ELEMENTS", 2000)
    h, out, targets = draw_inputs(256, WIDTH).requires_grad_(), Linear(WIDTH, 2000, bias=False), torch.arange(256)
    assert out.weight is not None
    nn.init.zeros_(out.weight)
    with Meter([h, out.weight, targets], axis=str) as meter:
        loss = chunked_loss(h, out, targets, scale=1.0, loss=nats)
        kept = meter.live_bytes - meter.base_bytes
        loss.backward()
    assert kept == 4
    alive = 4 * (32 * 2000 + 256 * WIDTH + 2000 * WIDTH)
    softmax = 4 * 2000
    assert alive + softmax <= meter.peak_bytes - meter.base_bytes <= alive + softmax + 64
    assert meter.flops == 3 * 2 * 256 * 2000 * WIDTH


def measure_peak(model: Model, job: Job) -> int:
    """The fullest moment of the third step."""
    built = build(model=model, layout=Layout(), job=job, device=torch.device("cpu"))
    engine, tokens = Engine(built, model=model, layout=Layout(), job=job), torch.zeros(2, 1, 513, dtype=torch.long)
    for _ in range(2):
        engine.step(tokens)
        engine.zero_grad()
    with Meter([*list_live_tensors(built), tokens], axis=built.ranks.axis) as meter:
        engine.step(tokens)
    return meter.peak_bytes


@pytest.mark.long  # the dry run counts the loss in chunks to the byte
def test_a_large_vocabulary_takes_less_as_predicted(forked: Fork, monkeypatch: pytest.MonkeyPatch) -> None:
    for place in ("fivefold.trainer.model.chunked_loss", "fivefold.planner.counts.operations.layer"):
        monkeypatch.setattr(f"{place}.LOSS_CHUNK_ROWS", 64)
    model = DENSE.replace(name="wordy", vocab=4_000, head_bias=False, width=16, layers=2)
    peaks = []
    for loss in ("fused", "chunked"):
        job = JOB.replace(sequence=512, global_batch=2, loss=loss, precision=get_recipe("bf16"))
        predicted = Planner(model=model, machine=machine("gloo", 1), job=job).estimate(Layout()).peak_bytes
        (result,) = forked(1, measure_peak, model, job)
        assert predicted == pytest.approx(result, rel=0.005)
        peaks.append(result)
    whole, less = peaks
    logits = 2 * 512 * model.vocab
    assert whole - less > 0.75 * logits  # of 512 rows 64 live
