"""A step that is judged before its update: one that is not wanted leaves nothing behind, on any rank."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fivefold.job import Job, get_recipe
from fivefold.layout.spec import Layout
from fivefold.model.experts import MoE
from fivefold.model.spec import Model
from fivefold.trainer.build import Built, build
from fivefold.trainer.checkpoint import checkpoint
from fivefold.trainer.checkpoint.reshard import BoxTensor
from fivefold.trainer.engine import Engine, StepResult
from fivefold.trainer.optimizers.loss_scaling import MIN_SCALE

MODEL = Model(
    name="mixed",
    layers=2,
    width=24,
    heads=4,
    kv_heads=2,
    head_dim=6,
    ffn=50,
    vocab=83,
    moe=MoE(experts=4, topk=2, ffn=9, balance="free"),
)


def state(built: Built) -> dict[str, Tensor]:
    """All that a checkpoint keeps, as it is now."""
    result = checkpoint.collect_state_dict(built).items()
    return {name: (kept.rows if isinstance(kept, BoxTensor) else kept).detach().clone() for name, kept in result}


def list_changed(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    """What has changed."""
    return [name for name in a if not torch.equal(a[name], b[name])]


class Trained:
    """A run of ``layout``; ``heard``: what its judge was told."""

    def __init__(self, layout: Layout, job: Job) -> None:
        self.built = build(model=MODEL, layout=layout, job=job, device=torch.device("cpu"))
        self.engine = Engine(self.built, model=MODEL, layout=layout, job=job)
        self.shape = (layout.micro_batches(job), layout.mbs, 17)
        self.heard: list[tuple[float, float]] = []

    def step(self, number: int, *, allowed: bool = True) -> StepResult:
        def judge(loss: float, norm: float) -> bool:
            self.heard.append((loss, norm))
            return allowed

        drawn = torch.Generator().manual_seed(10 * number + self.built.ranks["dp"].rank)
        done = self.engine.step(torch.randint(MODEL.vocab, self.shape, generator=drawn), judge=judge)
        self.engine.zero_grad()
        return done


def leave_out(layout: Layout, job: Job) -> tuple[list[str], list[str], list[tuple[float, float]], bool]:
    run, other = Trained(layout, job), Trained(layout, job)
    run.step(1)
    before = state(run.built)
    done = run.step(2, allowed=False)
    after = state(run.built)
    third = run.step(3)
    other.step(1)
    alone = other.step(3)
    told = run.heard[1] == (done.loss, done.norm) and done.skipped and not third.skipped
    return (
        list_changed(before, after),
        list_changed(state(run.built), state(other.built)),
        run.heard,
        told and third == alone,
    )


@pytest.mark.parametrize(
    ("layout", "kind"), [("dp2 ep2 zero2 mbs1", "adamw"), ("pp2 mbs2", "muon"), ("tp2 mbs2", "adafactor")]
)
def test_a_skipped_step_changes_no_weights_and_moments(forked, layout: str, kind: str) -> None:
    job = Job(sequence=16, global_batch=4, precision=get_recipe("fp32"), optimizer={"kind": kind})
    ranks = forked(2, leave_out, Layout.parse(layout), job)
    for left, late, heard, told in ranks:
        assert (left, late, told) == ([], [], True)
        assert heard == ranks[0][2], "the same on all ranks"
        assert len(set(heard)) == 3


def overflow(layout: Layout, job: Job) -> list[tuple[int, bool, float]]:
    """Of two steps that overflow: how often the judge was asked, whether the step was skipped, the scale after it."""
    run, told = Trained(layout, job), []
    scaler = run.built.scaler
    assert scaler is not None
    for number, scale in enumerate((2 * MIN_SCALE, MIN_SCALE)):
        scaler.scale = scale
        with torch.no_grad():
            run.built.shards[-1].weight.fill_(math.inf)
        done = run.step(number)
        told.append((len(run.heard), done.skipped, scaler.scale))
    return told


def test_an_overflow_counts_as_a_bad_step_only_at_the_smallest_loss_scale(forked) -> None:
    job = Job(sequence=16, global_batch=4, precision=get_recipe("fp16"))
    assert forked(1, overflow, Layout.parse("dp1 mbs4"), job) == [[(0, True, MIN_SCALE), (1, True, MIN_SCALE)]]


def train(job: Job) -> list[tuple[float, float]]:
    run = Trained(Layout.parse("mbs4"), job)
    return [(done.loss, done.norm) for done in map(run.step, range(3))]


@pytest.mark.parametrize("loss", ["fused", "chunked"])
def test_padded_vocabulary_entries_do_not_change_the_loss(forked, loss: str) -> None:
    """83 words are 96 with the padding that a job asks for; in the softmax they would make a first loss of ln 96."""
    job = Job(sequence=16, global_batch=4, precision=get_recipe("fp32"), loss=loss)
    (plain,), (padded,) = (forked(1, train, job.replace(vocab_multiple=multiple)) for multiple in (1, 32))
    for result, expected in zip(padded, plain, strict=True):
        assert result == pytest.approx(expected, rel=1e-6)
