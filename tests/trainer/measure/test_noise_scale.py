"""The gradient noise scale against gradients of single sequences, one by one, and against what was drawn."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from fivefold.errors import UserError
from fivefold.job import Job, get_recipe
from fivefold.layout.spec import Layout
from fivefold.model.spec import Model
from fivefold.trainer.build import build
from fivefold.trainer.engine import Engine
from fivefold.trainer.logs.step_line import step_line
from fivefold.trainer.measure.noise_scale import DECAY, GradientNoise, NoiseScale, estimate_noise
from fivefold.trainer.run import Run
from tests.selection import mark_share

MODEL = Model(name="small", layers=2, width=24, heads=4, kv_heads=2, head_dim=6, ffn=50, vocab=83)
SEQUENCES, LENGTH = 8, 16
TOKENS = torch.randint(MODEL.vocab, (SEQUENCES, LENGTH + 1), generator=torch.Generator().manual_seed(3))


def compute_sequence_gradients() -> list[Tensor]:
    """The gradient of each sequence's own mean loss, as one vector, without parallelism."""
    job = Job(sequence=LENGTH, global_batch=1, precision=get_recipe("fp32"))
    results = []
    for sequence in TOKENS:
        built = build(model=MODEL, layout=Layout(), job=job, device=torch.device("cpu"))
        Engine(built, model=MODEL, layout=Layout(), job=job).backward(sequence.view(1, 1, -1))
        results.append(torch.cat([s.weight.grad.reshape(-1) for s in built.shards if s.weight.grad is not None]))
    return results


def measure_noise(text: str) -> tuple[GradientNoise | None, float, list[int]]:
    """What the trainer measures of the same sequences under a layout; and of a plain step its norm."""
    layout = Layout.parse(text)
    job = Job(sequence=LENGTH, global_batch=SEQUENCES, precision=get_recipe("fp32"))
    built = build(model=MODEL, layout=layout, job=job, device=torch.device("cpu"))
    engine = Engine(built, model=MODEL, layout=layout, job=job)
    engine.noise = NoiseScale.from_built(built, layout)
    times, rank = layout.micro_batches(job), built.ranks["dp"].rank
    mine = [
        TOKENS[(at * layout.dp + rank) * layout.mbs : (at * layout.dp + rank + 1) * layout.mbs] for at in range(times)
    ]
    done = engine.step(torch.stack(mine))
    return done.noise, done.norm, [len(unit.gradients.shards) for unit in built.units]


def parts(layout: Layout) -> list[list[int]]:
    """The sequences whose gradients a rank sums before it reduces them."""
    times = SEQUENCES // (layout.dp * layout.mbs)
    item = [
        [(at * layout.dp + rank) * layout.mbs + n for n in range(layout.mbs)]
        for rank in range(layout.dp)
        for at in range(times)
    ]
    if layout.zero >= 2:  # after every micro-batch
        return item
    return [[n for part in item[rank * times : (rank + 1) * times] for n in part] for rank in range(layout.dp)]


@pytest.mark.parametrize(
    "text",
    mark_share(
        3,
        ["dp2 zero0 mbs1", "dp2 zero1 mbs2", "dp2 zero2 mbs2", "dp2 zero3 mbs1", "dp2 pp2 zero1 mbs1", "dp2 tp2 nosp"],
    ),
)
def test_noise_scale_equals_that_of_per_sequence_gradients(forked, text: str) -> None:
    layout = Layout.parse(text)
    (single,) = forked(1, compute_sequence_gradients)
    mean = torch.stack(single).mean(0)
    small = [torch.stack([single[n] for n in part]).mean(0).square().sum() for part in parts(layout)]
    square, variance = estimate_noise(
        small=float(torch.stack(small).mean()),
        full=float(mean.square().sum()),
        batches=len(small),
        sequences=SEQUENCES,
    )
    ranks = forked(layout.world, measure_noise, text)
    for result, norm, _ in ranks:
        assert result is not None
        assert norm == pytest.approx(float(mean.norm()), rel=1e-5)
        assert result.square == pytest.approx(square, rel=1e-3)  # a difference of much larger numbers
        assert result.variance == pytest.approx(variance, rel=1e-3)
        assert result.scale == pytest.approx(variance / square, rel=1e-3) or square <= 0


def test_under_sequence_parallelism_weights_of_partial_gradients_are_left_out(forked) -> None:
    (single,) = forked(1, compute_sequence_gradients)
    full = float(torch.stack(single).mean(0).square().sum())
    result = forked(4, measure_noise, "dp2 tp2 mbs1")[0][0]
    assert result is not None
    assert 0 < result.square + result.variance / SEQUENCES < full  # |g_B|² is their sum in the mean


def test_estimates_of_the_gradient_noise_scale_are_unbiased() -> None:
    """Of gradients drawn around a known mean with a known covariance."""
    drawn, size, batch, batches = torch.Generator().manual_seed(5), 50, 32, 8
    mean, deviation = torch.linspace(0.1, 0.5, size), torch.linspace(0.5, 2.0, size)
    results = []
    for _ in range(400):
        sequences = mean + deviation * torch.randn(batch, size, generator=drawn)
        small = sequences.view(batches, -1, size).mean(1).square().sum(1).mean()
        results.append(
            estimate_noise(
                small=float(small), full=float(sequences.mean(0).square().sum()), batches=batches, sequences=batch
            )
        )
    squares, variances = torch.tensor(results).mean(0)
    assert float(squares) == pytest.approx(float(mean.square().sum()), rel=0.03)
    assert float(variances) == pytest.approx(float(deviation.square().sum()), rel=0.03)


def test_the_noise_scale_is_a_ratio_of_means_over_steps() -> None:
    scale = NoiseScale([], replicas=2, device=torch.device("cpu"))
    scale.units = [type("Unit", (), {"reductions_per_step": 1})()]  # type: ignore[list-item]
    sums = [[torch.tensor(0.8), torch.tensor(1.2)], [torch.tensor(1.1), torch.tensor(1.5)]]
    (first, second) = (scale.take(item, sequences=8, scale=1.0) for item in sums)
    assert first is not None
    assert second is not None
    expected = (DECAY * first.variance + second.variance) / (DECAY * first.square + second.square)
    assert second.scale == pytest.approx(expected)
    assert scale.take([], sequences=8, scale=1.0) is None


def test_a_step_without_the_noise_scale_sends_no_extra_messages(forked) -> None:
    """Nothing is sent but the norm, and the sums are not observed."""
    assert forked(2, run_unwatched) == [(3, True)] * 2


def run_unwatched() -> tuple[int, bool]:
    from fivefold.trainer.optimizers import optimizer

    layout, job = Layout.parse("dp2 zero2 mbs1"), Job(sequence=LENGTH, global_batch=4, precision=get_recipe("fp32"))
    built = build(model=MODEL, layout=layout, job=job, device=torch.device("cpu"))
    engine = Engine(built, model=MODEL, layout=layout, job=job)
    sent: list[int] = []
    plain = optimizer.all_reduce

    def record_message(tensor: Tensor, axis: object) -> object:
        sent.append(tensor.numel())
        return plain(tensor, axis)  # type: ignore[arg-type]

    optimizer.all_reduce = record_message  # type: ignore[assignment]
    done = engine.step(TOKENS[:4].view(2, 2, LENGTH + 1)[:, :1])
    return sent[-1], done.noise is None and all(unit.gradients.squares is None for unit in built.units)


def test_the_log_states_the_noise_scale_in_tokens() -> None:
    job = Job(sequence=16, global_batch=8)
    noise = GradientNoise(0.5, 3.0, 6.0)
    done = type("Done", (), {"loss": 1.0, "norm": 2.0, "further": (), "noise": noise, "rewards": None})()
    line = step_line(1, done, job=job, samples=8, batch=8, rate=1e-3, seconds=1.0, ideal_seconds=0.1)
    assert (line["noise_scale"], line["gradient_square"], line["gradient_variance"]) == (96.0, 0.5, 48.0)


def test_the_noise_scale_rejects_layouts_whose_ranks_see_no_part_of_the_batch(tmp_path: Path) -> None:
    run = Run(noise_scale=True)
    for text, line in (("dp1 tp2", "with dp1 every gradient"), ("dp2 cp2", "under cp2 no rank has")):
        with pytest.raises(UserError, match=line):
            run.check_noise(Layout.parse(text))
        Run().check_noise(Layout.parse(text))
    run.check_noise(Layout.parse("dp2 pp2"))
