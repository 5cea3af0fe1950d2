"""``fivefold plan``: from a model, a machine and tokens to a run file, step by step. Does not import torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fivefold.atomic_file import replace_file
from fivefold.cli.options import print_line, show
from fivefold.cli.request_options import accept_request
from fivefold.errors import UserError
from fivefold.requests.commands import PlanOptions
from fivefold.requests.offers import apply_prices
from fivefold.requests.playbook import build_playbook

if TYPE_CHECKING:
    from fivefold.job import Job
    from fivefold.machine.spec import Machine
    from fivefold.model.spec import Model
    from fivefold.results.playbook import Playbook


@accept_request(PlanOptions)
def plan(request: PlanOptions, model: Model, machine: Machine, job: Job, stated: frozenset[str]) -> None:
    """Plan a run step by step: choose a batch size, make the model fit, reach that batch size, make the step fast."""
    from fivefold.rendering import playbook as page

    write = request.write
    if write and not write.parent.is_dir():
        raise UserError(f"--write {write}: there is no folder {write.parent}")
    (priced_machine,) = apply_prices([machine], request.price)
    plan_result = build_playbook(
        model,
        priced_machine,
        job,
        tokens=request.tokens,
        batch=request.batch,
        where=request.where,
        assume=request.assume,
        write=write,
        risk=request.risk,
        stated=stated,
    )
    show(plan_result.model_dump_json(indent=2) if request.as_json else page.render_page(plan_result, stated=stated))
    if not request.as_json:
        for name, content in plan_result.configs.items():
            show(f"\n# {name}\n{content.rstrip()}")
    if write:
        with replace_file(write, contents="the run file") as temporary:
            temporary.write_text(plan_result.run_file, encoding="utf-8")
        print_line(f"wrote {write}")
        write_model(model, plan_result, write)
        for name, content in plan_result.configs.items():
            (write.parent / name).write_text(content, encoding="utf-8")
            print_line(f"wrote {write.parent / name}")
        for line in plan_result.commands.get("fivefold", ())[:1]:
            print_line(f"start: {line}")


def write_model(model: Model, book: Playbook, file: Path) -> None:
    """Write the model next to the run file, unless it is in the catalog."""
    from fivefold.interop.format import ConfigPlan
    from fivefold.interop.launch import run_file
    from fivefold.job import Job
    from fivefold.layout.spec import Layout

    files = run_file.build_files(ConfigPlan(model, Layout.parse(book.step.layout), Job(), machine=f"{book.machine}:1"))
    if "model.toml" in files:
        with replace_file(file.parent / "model.toml", contents="the model") as temporary:
            temporary.write_text(files["model.toml"], encoding="utf-8")
        print_line(f"wrote {file.parent / 'model.toml'}")
