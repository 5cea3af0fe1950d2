"""Predict a step, train for real, measure the same step, and write both to ``step.json``."""

from __future__ import annotations

import json
import sys
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fivefold.atomic_file import replace_file
from fivefold.errors import RunFailure, UserError
from fivefold.layout.mesh import RankGroup, group
from fivefold.layout.spec import Layout
from fivefold.machine.spec import Machine
from fivefold.model.spec import Model
from fivefold.planner.counts.flops import work
from fivefold.planner.predict import predict
from fivefold.planner.time.network import Network
from fivefold.profiling.attribution import rank_times, split, summarize_rank
from fivefold.profiling.findings import list_findings
from fivefold.results import trace_file
from fivefold.results.run_folder import PREDICTED
from fivefold.results.spans import RankTrace, TracedMessage
from fivefold.step import Memory, StageMemory, Step, Time, Traffic, build_step
from fivefold.trainer.build import build
from fivefold.trainer.generate.sample import sample_run
from fivefold.trainer.logs.run_log import Logs, NoLogs, Report, note
from fivefold.trainer.loop import Loop, Outcome
from fivefold.trainer.measure.measured_step import MeasuredStep
from fivefold.trainer.measure.meter import read_resident_bytes
from fivefold.trainer.process import Process
from fivefold.trainer.run import Run


@dataclass(frozen=True)
class Proof:
    """The result of a run: predicted and measured step, outcome, and sampled text ("" if none).

    ``measured`` is None if the run was too short to measure.
    """

    predicted: Step
    measured: Step | None
    outcome: Outcome
    text: str


def prove(run: Run, *, model: Model, machine: Machine, layout: Layout, process: Process, report: Report) -> Proof:
    """Train ``run`` on this rank; rank 0 writes the prediction as it begins and ``step.json`` at its end.

    Rank 0 passes every log line to ``report``. Raises ``UserError`` if the number of processes is not the layout's.
    """
    predicted = predict(model=model, machine=machine, layout=layout, job=run.job)
    if process.world != layout.world:
        raise UserError(
            f"layout {str(layout)!r} needs {layout.world} processes, but {process.world} were started; start that "
            "many, or name the layout that runs"
        )
    shards = run.shards(model)
    device = process.start()
    torch.manual_seed(run.job.seed + process.rank)  # so that runs with one seed are reproducible
    try:
        streams = device.type == "cuda" or process.has_several_hosts  # messages between hosts overlap with compute
        built = build(model=model, layout=layout, job=run.job, device=device, table=run.table(layout), streams=streams)
        if process.rank == 0:
            with suppress(RunFailure):  # a full disk is reported by the logs; this file is for display only
                write_steps(run.folder / PREDICTED, predicted.replace(operations=()))
        with Logs(run.folder, report=report, run=run) if process.rank == 0 else NoLogs() as logs:
            ideal = predicted.mfu.causal * predicted.time.step_seconds
            loop = Loop(run, model=model, layout=layout, built=built, shards=shards, logs=logs, ideal_seconds=ideal)
            outcome = loop.train()
        if run.trace_steps and outcome.trace.steps:
            write_trace(outcome.trace, run.folder)
        measured = build_measured_step(
            outcome, run=run, model=model, machine=machine, layout=layout, process=process, predicted=predicted
        )
        if process.rank == 0 and measured is not None:
            write_steps(run.folder / "step.json", predicted, measured)
        text = ""
        if run.sample and not outcome.stopped:
            text = sample_run(built, model=model, run=run, tokenizer=shards.tokenizer)
        if text and process.rank == 0:
            note(run.folder, step=outcome.step, text=f"sample {text!r}")
    finally:
        process.end()
    return Proof(predicted, measured, outcome, text)


def write_trace(trace: RankTrace, folder: Path) -> None:
    """Write this rank's trace; if that fails, print why and go on, because the other ranks wait for this one."""
    try:
        trace_file.write(trace, folder)
    except RunFailure as fault:
        print(f"fivefold: {fault}", file=sys.stderr)


def build_measured_step(
    outcome: Outcome,
    *,
    run: Run,
    model: Model,
    machine: Machine,
    layout: Layout,
    process: Process,
    predicted: Step | None = None,
) -> Step | None:
    """Gather the measurements of all ranks into a step record, equal on each rank; None if the run was too short.

    Memory is the highest peak of each stage, time that of the slowest rank. ``predicted`` is used for the findings.
    """
    own_measurement = (outcome.measured, read_resident_bytes(), outcome.step_seconds)
    measurements: list[Any] = [None] * process.world
    dist.all_gather_object(measurements, own_measurement)
    if any(measured is None or seconds is None for measured, _, seconds in measurements):
        return None
    seconds = max(seconds for _, _, seconds in measurements)
    time, finding_lines = _break_down_time(
        outcome, seconds=seconds, machine=machine, process=process, predicted=predicted
    )
    counted = work(model, layout=layout, job=run.job)
    measured_work = counted.replace(
        parameters=round(sum(measured.parameters for measured, _, _ in measurements)),
        hardware_flops=sum(measured.flops for measured, _, _ in measurements),
    )  # the model FLOPs and the active parameters are definitions, which are not measured
    pp = group(layout, "pp")
    stages = tuple(
        merge_stage_memory(
            stage, [rank_measured for rank, (rank_measured, _, _) in enumerate(measurements) if pp.place(rank) == stage]
        )
        for stage in range(pp.ranks)
    )
    reserved = max(reserved for _, reserved, _ in measurements)
    host_bytes = max(measured.host_peak_bytes for measured, _, _ in measurements)
    return build_step(
        "measured",
        model=model,
        machine=machine,
        layout=layout,
        job=run.job,
        memory=Memory(
            peak_bytes=max(stage.peak_bytes for stage in stages),
            reserved_bytes=reserved,
            risk=0.0,
            host_bytes=host_bytes * min(machine.ranks_per_node, layout.world) if host_bytes else None,
            stages=stages,
        ),
        work=measured_work,
        traffic=average_traffic(
            [rank_measured for rank, (rank_measured, _, _) in enumerate(measurements) if pp.place(rank) == 0]
        ),
        time=time,
        findings=tuple(finding_lines),
    )


def _break_down_time(
    outcome: Outcome, *, seconds: float, machine: Machine, process: Process, predicted: Step | None
) -> tuple[Time, list[str]]:
    """Break down ``seconds`` of the step by the traces of all ranks; return it with findings, equal on each rank."""
    summaries: list[Any] | None = [None] * process.world if process.rank == 0 else None
    dist.gather_object(summarize_rank(outcome.trace), summaries)
    time_and_findings: list[Any] = [Time(step_seconds=seconds, compute_seconds=seconds), []]
    if summaries is not None and all(rank_summary.steps for rank_summary in summaries):
        times, network = rank_times(summaries), Network(machine)

        def predict_seconds(message: TracedMessage) -> float:
            ranks = message.ranks
            return network.seconds(message.collective, message.payload, RankGroup(len(ranks), ranks[1] - ranks[0]))

        lines = (
            list_findings(times, predicted=predicted.time, expected=predict_seconds) if predicted is not None else []
        )
        time_and_findings = [split(times, step_seconds=seconds), lines]
    dist.broadcast_object_list(time_and_findings)
    return time_and_findings[0], time_and_findings[1]


def average_traffic(ranks: list[MeasuredStep]) -> tuple[Traffic, ...]:
    """Return the traffic of the first stage, averaged over ``ranks``, because with experts it depends on routing."""
    sent_bytes: Counter[tuple[str, str]] = Counter()
    for measured in ranks:
        for item in measured.traffic:
            sent_bytes[item.axis, item.collective] += item.bytes
    return tuple(
        item.replace(bytes=round(sent_bytes[item.axis, item.collective] / len(ranks))) for item in ranks[0].traffic
    )


def merge_stage_memory(stage: int, ranks: list[MeasuredStep]) -> StageMemory:
    """Return a stage's memory: states of the largest shards among its ``ranks``, the rest of the highest peak."""
    fullest = max(ranks, key=lambda measured: measured.peak_bytes)
    parameters, gradients, moments = (
        max(getattr(measured, f"{kind}_bytes") for measured in ranks)
        for kind in ("parameters", "gradients", "optimizer")
    )
    states = parameters + gradients + moments
    return StageMemory(
        stage=stage,
        parameters_bytes=parameters,
        gradients_bytes=gradients,
        optimizer_bytes=moments,
        activations_bytes=fullest.kept_bytes,
        temporary_bytes=max(0, fullest.peak_bytes - states - fullest.kept_bytes),
        peak_bytes=fullest.peak_bytes,
        peak_cause=fullest.peak_cause,
    )


def write_steps(path: Path, *steps: Step) -> None:
    """Write steps of one run to ``path``, each under its kind; raises ``RunFailure`` if the file cannot be written."""
    records = {step.kind: step.model_dump(mode="json") for step in steps}
    with replace_file(path, contents="the comparison", advice="the run itself is saved") as file:
        file.write_text(json.dumps(records, indent=2) + "\n", encoding="utf-8")
