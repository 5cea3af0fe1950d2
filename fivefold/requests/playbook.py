"""A model, a machine and tokens become a run file, step by step."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fivefold.record import Mistake
from fivefold.requests.commands import ALIKE, Batch
from fivefold.requests.search import found_layouts
from fivefold.step import FITS_RISK

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fivefold.interop.format import Plan
    from fivefold.job import Job
    from fivefold.machine.spec import Machine
    from fivefold.model.spec import Model
    from fivefold.results.playbook import Playbook
    from fivefold.results.search_result import Proposal

OTHERS = ("torchtitan", "megatron-core")  # stacks for which a plan of ours is told too


def playbook(
    model: Model, machine: Machine, job: Job, *, tokens: float, batch: Batch = "advised", where: str = "",
    assume: Sequence[str] = (), write: Path | None = None, risk: float = FITS_RISK,
) -> Playbook:  # fmt: skip
    """The whole plan; ``write``: the name of its run file."""
    from fivefold.interop.format import Plan
    from fivefold.interop.launch import run_file
    from fivefold.job import Job as Default
    from fivefold.layout.spec import Layout
    from fivefold.layout.where import Where
    from fivefold.machine.datacenter import assumed
    from fivefold.planner.playbook import stages
    from fivefold.planner.run_file import for_run, told
    from fivefold.planner.search.neighbours import walk
    from fivefold.planner.whole_run import checked, whole_run
    from fivefold.results.playbook import Playbook as Record

    site, only, usual = assumed(assume), Where.parse(where), Default()
    said = batch == "job" or job.global_batch != usual.global_batch
    steps, job, proposal = stages(
        model, machine, job, tokens=checked(tokens), said=said, risk=risk,
        walk=lambda planner, layout: walk(planner, layout, where=only),
        propose=lambda chosen: _proposal(model, machine, chosen, where=only, risk=risk),
    )  # fmt: skip
    step = proposal.choice.step
    job = for_run(job, tokens=tokens)
    run = whole_run(step=step, model=model, machine=machine, job=job, tokens=tokens, site=site)
    chip, *words = machine.name.split()
    named, file = " ".join([f"{chip}:{machine.ranks}", *words]), write or Path("run.toml")
    planned = Plan(model, Layout.parse(step.layout), job, machine.ranks_per_node, named)
    content = told(
        run_file.text(planned, model=model_word(planned, file)), job, run=run,
        command=f"fivefold plan {model.name} {named!r} --tokens {tokens:g}",
    )  # fmt: skip
    return Record(
        model=model.name, machine=machine.name, ranks=machine.ranks, tokens=tokens, stages=tuple(steps), step=step,
        run=run, run_file=content, typed=_typed(model, machine, job, layout=step.layout, file=file),
    )  # fmt: skip


def model_word(planned: Plan, file: Path) -> str:
    """What the run file calls the model: its name in the catalog, or the file beside it."""
    from fivefold.interop.launch import run_file

    return planned.model.name if len(run_file.files(planned)) == 1 else str(file.parent / "model.toml")


def _proposal(model: Model, machine: Machine, job: Job, *, where: object, risk: float) -> Proposal:
    found = found_layouts(model, machine, job, also=(), by="time", top=1, within=ALIKE, where=where, risk=risk)
    if found.proposal is None:
        raise Mistake(found.tightest or f"no layout of {model.name} fits on {machine.ranks} {machine.name}")
    return found.proposal


def _start_lines(file: Path, machine: Machine, *, world: int) -> tuple[str, ...]:
    """Return the commands that start the run on its machine, with the hosts on which each is typed."""
    from fivefold.machine.launch import divide_over_hosts, start_commands

    hosts, each = divide_over_hosts(world, machine.ranks_per_node)
    first, *others = start_commands(file, world=world, machine=machine)
    if machine.backend != "nccl" and hosts == 1:
        return (first,)
    where = f"on each of {hosts} hosts" if hosts > 1 else "on a host"
    later = (f"{other}   # or as a Slurm job" for other in others)
    return (f"{first}   # {where} of {each} {machine.chip.name}", *later)


def _typed(model: Model, machine: Machine, job: Job, *, layout: str, file: Path) -> dict[str, tuple[str, ...]]:
    """What to type, by software: of the job's own, or without one of ours and of those that ``write`` writes."""
    from fivefold.interop.format import Plan
    from fivefold.interop.registry import FORMATS
    from fivefold.interop.write import write
    from fivefold.layout.spec import Layout

    ours = job.stack.name == "fivefold"
    world = Layout.parse(layout).world
    found: dict[str, tuple[str, ...]] = {"fivefold": _start_lines(file, machine, world=world)} if ours else {}
    writers = {form.stack: form.name for form in reversed(FORMATS) if form.emit}  # of several, the first
    for software in OTHERS if ours else (job.stack.name,):
        if (form := writers.get(software)) is None:
            continue
        lines: tuple[str, ...]
        try:
            written = write(Plan(model, Layout.parse(layout), job, machine.ranks_per_node), to=form)
            lines = (f"fivefold write {file} --to {form} -o {form}", *(f"note: {each}" for each in written.remarks))
        except Mistake as mistake:
            lines = (f"cannot run it so: {mistake}", f"for what it can: fivefold plan … --stack {software}")
        found[software] = lines
    if not found:
        found[job.stack.name] = (f"set the layout by hand: {layout}; its words: docs/notation.md",)
    return found
