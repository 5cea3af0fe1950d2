"""``fivefold plan``: from a model, a machine and tokens to a run file, step by step. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from fivefold.asked.across import priced
from fivefold.asked.search import ALIKE
from fivefold.asked.words import tokens_of
from fivefold.cli.across import Assume, Prices
from fivefold.cli.nouns import takes_nouns
from fivefold.cli.options import AsJson, say, show
from fivefold.cli.search import found_layouts
from fivefold.record import Mistake

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fivefold.formats.format import Plan
    from fivefold.job import Job
    from fivefold.layout.playbook import Playbook
    from fivefold.layout.search_result import Proposal
    from fivefold.machine.spec import Machine
    from fivefold.model.spec import Model

Batch = Literal["advised", "job"]
OTHERS = ("torchtitan", "megatron-core")  # stacks for which a plan of ours is told too


@takes_nouns
def plan(
    model: Model,
    machine: Machine,
    job: Job,
    tokens: Annotated[float, typer.Option(parser=tokens_of, metavar="TOKENS", help="Of the whole run: 2T.")] = 1e12,
    batch: Annotated[
        Batch, typer.Option(help="The batch: by the literature (unless --gbs), or the job's.")
    ] = "advised",
    where: Annotated[str, typer.Option(help="Of the search: only such layouts, as 'tp<=8 cp=1'.")] = "",
    price: Prices = None,
    assume: Assume = None,
    write: Annotated[Path | None, typer.Option(help="Write the run file, which `train` takes.")] = None,
    json: AsJson = False,
) -> None:
    """The playbook's procedure: the batch, make it fit, reach the batch, make it fast; ends in a run file."""
    from fivefold.show import playbook as page

    if write and not write.parent.is_dir():
        raise Mistake(f"--write {write}: there is no folder {write.parent}")
    (priced_machine,) = priced([machine], price or [])
    found = playbook(
        model, priced_machine, job, tokens=tokens, batch=batch, where=where, assume=assume or [], write=write
    )  # fmt: skip
    show(found.model_dump_json(indent=2) if json else page.page(found))
    if write:
        write.write_text(found.run_file, encoding="utf-8")
        say(f"wrote {write}")
        write_model(model, found, write)


def playbook(
    model: Model, machine: Machine, job: Job, *, tokens: float, batch: Batch = "advised", where: str = "",
    assume: Sequence[str] = (), write: Path | None = None,
) -> Playbook:  # fmt: skip
    """The whole plan; ``write``: the name of its run file."""
    from fivefold.formats.format import Plan
    from fivefold.formats.launch import run_file
    from fivefold.job import Job as Default
    from fivefold.layout.playbook import Playbook as Record
    from fivefold.layout.spec import Layout
    from fivefold.layout.where import Where
    from fivefold.machine.site import assumed
    from fivefold.plan.playbook import stages
    from fivefold.plan.run_file import for_run, told
    from fivefold.plan.search.neighbours import walk
    from fivefold.plan.whole_run import checked, whole_run

    site, only, usual = assumed(assume), Where.parse(where), Default()
    said = batch == "job" or job.global_batch != usual.global_batch
    steps, job, proposal = stages(
        model, machine, job, tokens=checked(tokens), said=said,
        walk=lambda planner, layout: walk(planner, layout, where=only),
        propose=lambda chosen: _proposal(model, machine, chosen, where=only),
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
    from fivefold.formats.launch import run_file

    return planned.model.name if len(run_file.files(planned)) == 1 else str(file.parent / "model.toml")


def write_model(model: Model, found: Playbook, file: Path) -> None:
    """The model beside the run file, if it is not of the catalog."""
    from fivefold.formats.format import Plan
    from fivefold.formats.launch import run_file
    from fivefold.job import Job
    from fivefold.layout.spec import Layout

    files = run_file.files(Plan(model, Layout.parse(found.step.layout), Job(), machine=f"{found.machine}:1"))
    if "model.toml" in files:
        (file.parent / "model.toml").write_text(files["model.toml"], encoding="utf-8")
        say(f"wrote {file.parent / 'model.toml'}")


def _proposal(model: Model, machine: Machine, job: Job, *, where: object) -> Proposal:
    found = found_layouts(model, machine, job, also=(), by="time", top=1, within=ALIKE, where=where)
    if found.proposal is None:
        raise Mistake(found.tightest or f"no layout of {model.name} fits on {machine.ranks} {machine.name}")
    return found.proposal


def _typed(model: Model, machine: Machine, job: Job, *, layout: str, file: Path) -> dict[str, tuple[str, ...]]:
    """What to type, by software: of the job's own, or without one of ours and of those that ``write`` writes."""
    from fivefold.formats.format import Plan
    from fivefold.formats.read import FORMATS
    from fivefold.formats.write import write
    from fivefold.layout.spec import Layout

    ours = job.stack.name == "fivefold"
    found: dict[str, tuple[str, ...]] = {"fivefold": (f"fivefold train {file}",)} if ours else {}
    writers = {form.stack: form.name for form in reversed(FORMATS) if form.write}  # of several, the first
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
