"""Plans a run step by step: a model, a machine and tokens become a run file."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from fivefold.errors import UserError
from fivefold.requests.commands import Batch
from fivefold.requests.job import list_job_options
from fivefold.requests.search import build_request, search_with_progress
from fivefold.step import FITS_RISK

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from fivefold.interop.format import ConfigPlan, WrittenConfig
    from fivefold.job import Job
    from fivefold.machine.spec import Machine
    from fivefold.model.spec import Model
    from fivefold.results.playbook import Playbook
    from fivefold.results.search_result import Proposal

OTHER_STACKS = ("torchtitan", "megatron-core")  # stacks for which our plans list the commands too


def build_playbook(
    model: Model,
    machine: Machine,
    job: Job,
    *,
    tokens: float,
    batch: Batch = "advised",
    where: str = "",
    assume: str | Sequence[str] = (),
    write: Path | None = None,
    risk: float = FITS_RISK,
    stated: Collection[str] = (),
) -> Playbook:
    """Return the full plan; ``write``: the name of its run file; ``stated``: fields of the job that the user gave."""
    from fivefold.interop.format import ConfigPlan
    from fivefold.interop.launch import run_file
    from fivefold.job import Job as Default
    from fivefold.layout.spec import Layout
    from fivefold.layout.where import Where
    from fivefold.machine.datacenter import apply_assumptions
    from fivefold.planner.playbook import list_stages
    from fivefold.planner.run_estimate import predict_full_run, validate_tokens
    from fivefold.planner.run_file import plan_run_job, write_run_file
    from fivefold.planner.search.neighbours import walk
    from fivefold.results.playbook import Playbook as Record

    site = apply_assumptions(assume)
    constraints = Where.parse(where)
    default_job, asked_job = Default(), job
    is_batch_given = batch == "job" or "global_batch" in stated or job.global_batch != default_job.global_batch
    steps, job, proposal = list_stages(
        model,
        machine,
        job,
        tokens=validate_tokens(tokens),
        is_given=is_batch_given,
        risk=risk,
        walk=lambda planner, layout: walk(planner, layout, where=constraints),
        propose=lambda chosen: _propose_layout(model, machine, chosen, where=where, risk=risk),
    )
    step = proposal.choice.step
    job = plan_run_job(job, tokens=tokens)
    run = predict_full_run(step=step, model=model, machine=machine, job=job, tokens=tokens, site=site)
    chip, *words = machine.name.split()
    machine_text = " ".join([f"{chip}:{machine.ranks}", *words])
    file = write or Path("run.toml")
    planned = ConfigPlan(model, Layout.parse(step.layout), job, machine.ranks_per_node, machine_text)
    content = write_run_file(
        run_file.format_run_file(planned, model=name_model(planned, file)),
        job,
        run=run,
        command=shlex.join(
            [
                *("fivefold", "plan", model.name, machine_text, "--tokens", f"{tokens:.12g}"),
                *_list_options(asked_job, default_job, is_batch_given=is_batch_given),
                *(["--batch", batch] if batch != "advised" else []),
                *(["--where", where] if where else []),
                *(word for assumption in assume for word in ("--assume", assumption)),
                *(["--risk", f"{risk:g}"] if risk != FITS_RISK else []),
            ]
        ),
    )
    return Record(
        model=model.name,
        machine=machine.name,
        ranks=machine.ranks,
        tokens=tokens,
        stages=tuple(steps),
        step=step,
        run=run,
        run_file=content,
        commands=_list_commands(planned, machine, file=file),
        configs=_list_configs(planned),
    )


def _list_options(job: Job, default_job: Job, *, is_batch_given: bool) -> list[str]:
    """Return the options of the command line that state ``job``, without those that are the default."""
    defaults = [("--seq", str(default_job.sequence)), *(() if is_batch_given else [("--gbs", str(job.global_batch))])]
    return [word for option in list_job_options(job) if option not in defaults for word in option]


def name_model(planned: ConfigPlan, file: Path) -> str:
    """Return the name of the model in the run file: its catalog name, or the file next to it."""
    from fivefold.interop.launch import run_file

    return planned.model.name if len(run_file.build_files(planned)) == 1 else str(file.parent / "model.toml")


def _propose_layout(model: Model, machine: Machine, job: Job, *, where: str, risk: float) -> Proposal:
    request = build_request(top=1, where=where, risk=risk)
    result = search_with_progress(request, model, machine, job)
    if result.proposal is None:
        raise UserError(
            result.binding_constraint or f"no layout of {model.name} fits on {machine.ranks} {machine.name}"
        )
    return result.proposal.replace(remark="; ".join(filter(None, (result.proposal.remark, result.gap_line()))))


def _start_lines(file: Path, machine: Machine, *, world: int) -> tuple[str, ...]:
    """Return the commands that start the run on its machine, with the hosts on which each is typed."""
    from fivefold.machine.launch import divide_over_hosts, start_commands

    hosts, ranks_per_host = divide_over_hosts(world, machine.ranks_per_node)
    first, *other_commands = start_commands(file, world=world, machine=machine)
    if not machine.has_gpus and hosts == 1:
        return (first,)
    hosts_text = f"on each of {hosts} hosts" if hosts > 1 else "on a host"
    other_lines = (f"{command}   # or as a Slurm job" for command in other_commands)
    return (f"{first}   # {hosts_text} of {ranks_per_host} {machine.chip.name}", *other_lines)


def _list_commands(plan: ConfigPlan, machine: Machine, *, file: Path) -> dict[str, tuple[str, ...]]:
    """Return the commands to type, by software: the job's own, or ours and those that ``write`` supports."""
    from fivefold.interop.registry import FORMATS, list_job_formats

    stack_name, layout = plan.job.stack.name, plan.layout
    lines_by_software: dict[str, tuple[str, ...]] = (
        {"fivefold": _start_lines(file, machine, world=layout.world)} if stack_name == "fivefold" else {}
    )
    writers = {form.stack: form.name for form in reversed(FORMATS) if form.emit}  # the first of several wins
    if stack_name in (first := list_job_formats(plan.job)[0]).fine_tuning_stacks:
        writers[stack_name] = first.name
    for software in OTHER_STACKS if stack_name == "fivefold" else (stack_name,):
        if (form := writers.get(software)) is None:
            continue
        lines: tuple[str, ...]
        try:
            written_files = _write(plan, form)
            lines = (
                f"fivefold write {file} --to {form} -o {form}",
                *(f"note: {remark}" for remark in written_files.remarks),
            )
        except UserError as mistake:
            hint = f"to plan for {software}: fivefold plan … --stack {software}"
            if software == stack_name:
                hint = "change that, or let `fivefold search … --write` find a layout that its config can express"
            lines = (f"not possible: {mistake}", hint)
        lines_by_software[software] = lines
    if not lines_by_software:
        lines_by_software[stack_name] = (f"set the layout by hand: {layout}; its words: docs/notation.md",)
    return lines_by_software


def _list_configs(plan: ConfigPlan) -> dict[str, str]:
    """Return the files with which the job's software runs the plan; empty for Fivefold's, and where it cannot."""
    from fivefold.interop.registry import find_stack_format

    if plan.job.stack.is_own_trainer:
        return {}
    try:
        return dict(_write(plan, find_stack_format(plan.job)).files)
    except UserError:
        return {}


def _write(plan: ConfigPlan, form: str) -> WrittenConfig:
    from fivefold.interop.write import write

    return write(plan, to=form)
