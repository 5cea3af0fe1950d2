"""``fivefold plan``: from a model, a machine and tokens to a run file, step by step. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fivefold.cli.across import Assume, Prices
from fivefold.cli.arguments import takes_nouns
from fivefold.cli.options import AsJson, say, show
from fivefold.cli.risk import Risk
from fivefold.record import Mistake
from fivefold.requests.across import priced
from fivefold.requests.playbook import Batch, playbook
from fivefold.requests.words import tokens_of
from fivefold.step import FITS_RISK

if TYPE_CHECKING:
    from fivefold.job import Job
    from fivefold.machine.spec import Machine
    from fivefold.model.spec import Model
    from fivefold.results.playbook import Playbook


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
    risk: Risk = FITS_RISK,
    write: Annotated[Path | None, typer.Option(help="Write the run file, which `train` takes.")] = None,
    json: AsJson = False,
) -> None:
    """The playbook's procedure: the batch, make it fit, reach the batch, make it fast; ends in a run file."""
    from fivefold.rendering import playbook as page

    if write and not write.parent.is_dir():
        raise Mistake(f"--write {write}: there is no folder {write.parent}")
    (priced_machine,) = priced([machine], price or [])
    found = playbook(
        model, priced_machine, job, tokens=tokens, batch=batch, where=where, assume=assume or [], write=write,
        risk=risk,
    )  # fmt: skip
    show(found.model_dump_json(indent=2) if json else page.page(found))
    if write:
        write.write_text(found.run_file, encoding="utf-8")
        say(f"wrote {write}")
        write_model(model, found, write)
        for line in found.typed.get("fivefold", ())[:1]:
            say(f"start: {line}")


def write_model(model: Model, found: Playbook, file: Path) -> None:
    """The model beside the run file, if it is not of the catalog."""
    from fivefold.interop.format import Plan
    from fivefold.interop.launch import run_file
    from fivefold.job import Job
    from fivefold.layout.spec import Layout

    files = run_file.files(Plan(model, Layout.parse(found.step.layout), Job(), machine=f"{found.machine}:1"))
    if "model.toml" in files:
        (file.parent / "model.toml").write_text(files["model.toml"], encoding="utf-8")
        say(f"wrote {file.parent / 'model.toml'}")
