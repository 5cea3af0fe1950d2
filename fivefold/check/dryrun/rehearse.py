"""One rank's step, rehearsed: the modules, parallelisms, optimizer and schedule that ``train`` builds, on tensors that
hold nothing in a world that is not there.

    build → Engine.step, twice        the first step, in which the optimizer makes its moments, and the steady one
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch

from fivefold.check.dryrun.fake.world import even_experts, fake_rank, gpu_attention, groups_of
from fivefold.check.dryrun.record.recorder import Recorder
from fivefold.check.dryrun.record.replay import play_like_blocks
from fivefold.check.dryrun.record.tape import Scope, Tape
from fivefold.job import Job
from fivefold.layout.schedule.action import Action
from fivefold.layout.schedule.table import Table
from fivefold.layout.spec import Layout
from fivefold.model.spec import Model
from fivefold.train.build import Built, build
from fivefold.train.engine import Engine

# of what the engine's functions make, what it is; all else is known by how long it lives
CATEGORIES = {
    "ZeroUnit._add": "gradients", "ZeroUnit._reduce": "gradients", "ZeroUnit._set_grads": "widened",
    "ZeroUnit.begin": "gathers", "ZeroUnit._narrowed": "gathers", "ZeroUnit.gather": "gathers",
    "Payload.pack": "gathers", "resize": "gathers",
    "Pipeline._receive": "pipeline",
}  # fmt: skip
PHASES = {"F": "forward", "B": "backward", "BW": "backward", "W": "weights", "FB": "pair"}


# files through which one looks for who asks for what they do
THROUGH = (str(Path(__file__).parents[2] / "train" / "parallel" / "collectives.py"),)


class RankTapes(NamedTuple):
    """What one rank does in its first step and in every later one, and what it owns."""

    rank: int
    first: Tape
    steady: Tape
    parameters: float  # this rank's share of the model: what n ranks hold counts 1/n on each


def rehearse_rank(
    *, model: Model, layout: Layout, job: Job, rank: int, streams: bool, table: Table | None = None, replay: bool = True
) -> RankTapes:
    """Two steps of ``rank``, as ``assumed``. ``streams``: messages travel beside compute, as on GPUs. ``replay``: of
    like blocks one runs, and the others play what it did.
    """
    if model.moe and model.moe.capacity is not None:
        model = model.replace(moe=model.moe.replace(capacity=None))
    job = job.replace(compile=False, documents="joined")
    recorder = Recorder(rank=rank, categories=CATEGORIES, through=THROUGH)
    with fake_rank(layout, rank=rank), recorder:
        recorder.silent = True
        device = torch.device("cpu")
        built = build(model=model, layout=layout, job=job, device=device, table=table, streams=streams)
        even_experts(built.module)
        if streams:
            gpu_attention(built.module)
        recorder.groups = groups_of(built.ranks)
        if replay and not job.stack.pairs:  # whose blocks run two at a time
            play_like_blocks(built, model=model, layout=layout, recorder=recorder)
        first, steady = two_steps(built, recorder, model=model, layout=layout, job=job)
        return RankTapes(rank, first, steady, parameters=built.parameters)


def two_steps(built: Built, recorder: Recorder, *, model: Model, layout: Layout, job: Job) -> list[Tape]:
    """The first and a steady one, written by a ``recorder`` that has watched the build in silence."""
    engine = Engine(built, model=model, layout=layout, job=job)
    engine.pipeline.on_action = lambda action: recorder.enter_scope(_scope(action))
    recorder.silent = False
    with recorder.places.watching(built.module):
        return [_step(engine, recorder) for _ in range(2)]


def assumed(model: Model, job: Job) -> tuple[str, ...]:
    """Where a rehearsal is not what will run, in words."""
    remarks = []
    if job.stack.compile:
        remarks.append("blocks are rehearsed uncompiled")
    if job.documents == "apart":
        remarks.append("packed documents are rehearsed as one: apart, attention is less work")
    if model.moe:
        dropped = ", and drops none" if model.moe.capacity is not None else ""
        remarks.append(f"every expert gets as many rows as any other{dropped}")
    return tuple(remarks)


def _step(engine: Engine, recorder: Recorder) -> Tape:
    """One step on a tape that begins with what lives."""
    layout, job, built = engine.layout, engine.job, engine.built
    recorder.silent = True
    engine.tokens = torch.zeros(layout.micro_batches(job), layout.mbs, job.sequence + 1, dtype=torch.long)
    recorder.silent = False
    recorder.name([engine.tokens, engine.loads, *built.module.buffers(), *built.module.tables], "inputs")
    recorder.name(built.weights(), "parameters")
    recorder.name(built.moments(), "optimizer")
    recorder.cut()
    engine.meter = recorder
    engine.step(engine.tokens)
    tape = recorder.cut()
    engine.zero_grad()
    return tape


def _scope(action: Action) -> Scope:
    return Scope(PHASES[action.kind], action.stage, action.micro_batch)
