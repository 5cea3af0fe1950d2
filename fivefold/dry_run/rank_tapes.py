"""Runs one rank's training step on fake tensors, in a fake process group, and records it on tapes.

It builds the same as ``train`` (modules, parallelisms, optimizer, schedule) and calls ``Engine.step`` twice: the first
step, in which the optimizer creates its moments, and the steady step, which represents every later one.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from fivefold.dry_run.fake.world import enter_fake_rank, index_groups, route_evenly, use_gpu_attention
from fivefold.dry_run.record.recorder import TapeRecorder
from fivefold.dry_run.record.repetition import ActionLog, NotRepeatable, insert_copies, shorten_row
from fivefold.dry_run.record.replay import replay_equal_blocks
from fivefold.dry_run.record.tape import Scope, Tape
from fivefold.job import Job
from fivefold.layout.mesh import group
from fivefold.layout.schedule import schedule
from fivefold.layout.schedule.action import Action
from fivefold.layout.schedule.table import Table
from fivefold.layout.spec import Layout
from fivefold.layout.stages import list_stage_layers
from fivefold.model.spec import Model
from fivefold.trainer.build import Built, build, build_module
from fivefold.trainer.engine import Engine
from fivefold.trainer.parallel.host_memory import use_host_memory

# memory category of the storages that these engine functions allocate; others are classified by lifetime (breakdown.py)
CATEGORIES = {
    "Gradients._get_sums": "gradients", "Gradients._reduce": "gradients", "Gradients._set_grads": "widened",
    "ZeroUnit.begin": "gathers", "ZeroUnit._pack_rows": "gathers", "ZeroUnit.gather": "gathers",
    "Payload.pack": "gathers", "resize": "gathers",
    "Pipeline._receive": "pipeline",
}  # fmt: skip
PHASES = {"F": "forward", "B": "backward", "BW": "backward", "W": "weights", "FB": "pair"}

# files whose lines are never reported as a site: the line of their caller is reported
SKIPPED_FILES = (str(Path(__file__).parents[1] / "trainer" / "parallel" / "collectives.py"),)


class RankTapes(NamedTuple):
    """The tapes of one rank: its first step, and the steady step that represents every later one."""

    rank: int
    first: Tape
    steady: Tape
    parameters: float  # parameters of this rank; one that n ranks replicate counts 1/n on each
    weights: Mapping[str, int] = {}  # parameters of each full weight of which this rank holds a part


def run_rank(
    *,
    model: Model,
    layout: Layout,
    job: Job,
    rank: int,
    streams: bool,
    table: Table | None = None,
    replay: bool = True,
    repeats: bool = True,
) -> RankTapes:
    """Run two steps of ``rank`` under the simplifications of ``describe_assumptions``.

    ``streams``: messages overlap with compute, as on GPUs. ``replay``: run one block of each kind and replay its
    recording for the others. ``repeats``: run few of the equal micro-batches and copy their events.
    """
    record = partial(
        _record_rank, model=model, layout=layout, job=job, rank=rank, streams=streams, table=table, replay=replay
    )
    if repeats:
        with suppress(NotRepeatable):
            return record(repeats=True)
    return record(repeats=False)


def _record_rank(
    *,
    model: Model,
    layout: Layout,
    job: Job,
    rank: int,
    streams: bool,
    table: Table | None,
    replay: bool,
    repeats: bool,
) -> RankTapes:
    """Do as ``run_rank``; raise ``NotRepeatable`` if ``repeats`` but micro-batches that should be equal differ."""
    if model.moe and model.moe.capacity is not None:
        model = model.replace(moe=model.moe.replace(capacity=None))
    stack = job.stack.with_device_kernels(gpu=streams)
    kernels = "eager" if stack.is_compiled else stack.kernels
    job = job.replace(stack=stack.replace(compile=False, kernels=kernels), documents="joined")
    recorder = TapeRecorder(rank=rank, categories=CATEGORIES, skipped_files=SKIPPED_FILES)
    if table is None:
        table = schedule(layout.schedule, pp=layout.pp, v=layout.v, micro_batches=layout.micro_batches(job))
    stage_layers = list_stage_layers(model, layout)
    rank_stages = table.rank_stages[group(layout, "pp").place(rank)]
    # a router has counters on the device in every layer, those of other ranks too
    layers = None if model.moe else {layer for stage in rank_stages for layer in stage_layers[stage]}
    # outside of the modes, under which each of its weights would take far longer
    module = build_module(model, job, layers=layers)
    with enter_fake_rank(layout, rank=rank), recorder:
        recorder.silent = True
        device = torch.device("cpu")
        built = build(
            model=model,
            layout=layout,
            job=job,
            device=device,
            table=table,
            streams=streams,
            module=module,
            draw_weights=False,
        )
        route_evenly(built.module)
        if streams:
            use_gpu_attention(built.module)
        recorder.groups = index_groups(built.ranks)
        if replay and not job.stack.pairs:  # with pairs, two micro-batches interleave within a block
            replay_equal_blocks(built, model=model, layout=layout, job=job, recorder=recorder)
        first, steady = record_steps(built, recorder, model=model, layout=layout, job=job, repeats=repeats)
        weights = (shard.local_weight.weight for shard in built.base_shards)
        return RankTapes(rank, first, steady, built.parameters, {weight.name: weight.numel for weight in weights})


def record_steps(
    built: Built, recorder: TapeRecorder, *, model: Model, layout: Layout, job: Job, repeats: bool = False
) -> list[Tape]:
    """Record the first and the steady step; ``recorder`` has followed the build without writing events.

    ``repeats``: as for ``run_rank``; raises ``NotRepeatable``.
    """
    engine = Engine(built, model=model, layout=layout, job=job)
    engine.hold_reference()
    pipeline = engine.pipeline
    interleaves = built.ranks.interleaver is not None  # events of two micro-batches then alternate
    repetition = shorten_row(pipeline.row) if repeats and not interleaves else None
    if repetition is not None:
        pipeline.row = repetition.row
        n_run, n_full = repetition.run_share
        for unit in built.units:
            unit.gradients.repeat(n_run, before=n_full)
    log = ActionLog(pipeline.row)
    log_pass_end = pipeline.on_pass

    def on_action(action: Action) -> None:
        log.log_action_begin(len(recorder.tape))
        recorder.enter_scope(Scope(PHASES[action.kind], action.stage, action.micro_batch))

    def on_pass() -> None:
        assert log_pass_end is not None
        log_pass_end()
        log.log_pass_end(len(recorder.tape))

    pipeline.on_action, pipeline.on_pass = on_action, on_pass
    recorder.silent = False
    tapes = []
    with recorder.call_sites.install_hooks(built.module):
        for _ in range(2):
            log.begin_step()
            tapes.append(_record_step(engine, recorder))
            if repetition is not None:
                insert_copies(tapes[-1], log, repetition, recorder=recorder)
    return tapes


def describe_assumptions(model: Model, job: Job) -> tuple[str, ...]:
    """Describe the differences between a dry run and the real run."""
    remarks = []
    if job.stack.is_compiled:
        remarks.append("the dry run executes blocks uncompiled")
    if job.documents == "separate":
        remarks.append("the dry run treats packed documents as one; with separate documents, attention is less work")
    if model.moe:
        dropped = ", and drops none" if model.moe.capacity is not None else ""
        remarks.append(f"every expert gets as many rows as any other{dropped}")
    return tuple(remarks)


def _record_step(engine: Engine, recorder: TapeRecorder) -> Tape:
    """Record one step on a new tape, which begins with an ALLOC of every live storage."""
    layout, job, built = engine.layout, engine.job, engine.built
    recorder.silent = True
    shape = layout.micro_batches(job), layout.mbs, job.row_tokens(engine.mtp_depth)
    engine.tokens = torch.zeros(shape, dtype=torch.long)
    recorder.silent = False
    inputs = [engine.tokens, engine.loads, engine.keys, engine.reference_log_probs]
    recorder.set_category([*inputs, *built.buffers(), *built.module.tables], "inputs")
    recorder.set_category(built.gather_scales(), "fp8 scales")
    recorder.set_category(built.weights(), "parameters")
    with use_host_memory():
        recorder.set_category(built.host_tensors(), "optimizer")
    recorder.set_category(built.moments(), "optimizer")  # of those on the device
    recorder.finish_tape()
    engine.meter = recorder
    engine.step(engine.tokens)
    tape = recorder.finish_tape()
    engine.zero_grad()
    return tape
