"""Writes configs of other software as files, for ``write`` and ``search --write``."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from fivefold.atomic_file import replace_file
from fivefold.cli.options import print_line, show
from fivefold.errors import UserError
from fivefold.requests.configs import describe_defaults

if TYPE_CHECKING:
    from fivefold.interop.format import WrittenConfig
    from fivefold.job import Job
    from fivefold.machine.spec import Machine
    from fivefold.model.spec import Model


def write_config(config: WrittenConfig, output: Path | None) -> None:
    """Write the files to a file or folder, or print them to stdout; remarks go to stderr."""
    for remark in config.remarks:
        print_line(f"note: {remark}")
    if output is None:
        for name, text in config.files.items():
            show(f"# {name}\n{text}" if len(config.files) > 1 else text.rstrip("\n"))
        return
    several = len(config.files) > 1 or output.is_dir()
    if several and output.exists() and not output.is_dir():
        raise UserError(f"-o {output}: the config has {len(config.files)} files; name a folder")
    (output if several else output.parent).mkdir(parents=True, exist_ok=True)
    for name, text in config.files.items():
        path = output / name if several else output
        with replace_file(path, contents="the config") as file:
            file.write_text(text, encoding="utf-8")
        suffix = Path(name).suffix
        print_line(
            f"wrote {path}" + (f", which its software reads as a {suffix} file" if path.suffix != suffix else "")
        )


def choose_format(model: Model, machine: Machine, job: Job, path: Path) -> str:
    """Return the format of the job's stack whose config is such a file as ``path``.

    Raises ``UserError`` if none is, or if it cannot express the model or the job with any layout.
    """
    from fivefold.interop.format import ConfigPlan
    from fivefold.interop.registry import list_stack_formats
    from fivefold.interop.write import write as run
    from fivefold.layout.spec import Layout

    sequences = 2 if job.objective == "dpo" else 1  # a pair is two sequences
    simple_layout = Layout(dp=2, zero=job.stack.runs.expressible_zero(1)[-1], mbs=sequences)
    small_job = job.replace(global_batch=2 * sequences, ramp=None)
    plan = ConfigPlan(model, simple_layout, small_job, machine.ranks_per_node, f"{machine.name}:2")
    first, *others = list_stack_formats(job)
    names = list(run(plan, to=first).files)
    if not path.suffix or path.is_dir() or [Path(name).suffix for name in names] == [path.suffix]:
        return first
    for name in others:
        with suppress(UserError):
            if [Path(file).suffix for file in run(plan, to=name).files] == [path.suffix]:
                return name
    if len(names) > 1:
        raise UserError(f"--write {path}: {first} takes {len(names)} files ({', '.join(names)}); name a folder")
    suffix = Path(names[0]).suffix
    raise UserError(
        f"--write {path}: {first} reads a {suffix} file, not {path.suffix}; name {path.with_suffix(suffix)}"
    )


class ExpressibleLayout(NamedTuple):
    """The first layout of a ranking that a software's config can express, and why it is not the first of all."""

    layout: str
    format: str
    written: WrittenConfig
    why: str


def choose_written(
    layouts: Sequence[str], *, model: Model, machine: Machine, job: Job, form: str | None = None
) -> ExpressibleLayout:
    """Return the first of ``layouts`` that the config of the job's software can express; raises ``UserError``.

    ``form``: the format, instead of the software's usual one.
    """
    from fivefold.interop.format import ConfigPlan
    from fivefold.interop.registry import find_stack_format
    from fivefold.interop.write import write as run
    from fivefold.layout.spec import Layout

    format_name, why = form or find_stack_format(job), ""
    for text in dict.fromkeys(layouts):
        plan = ConfigPlan(model, Layout.parse(text), job, machine.ranks_per_node, f"{machine.name}:{machine.ranks}")
        try:
            return ExpressibleLayout(text, format_name, run(plan, to=format_name), why)
        except UserError as refusal:
            why = why or str(refusal)
    raise UserError(why or "no layout was found")


def show_config(layouts: Sequence[str], *, model: Model, machine: Machine, job: Job) -> None:
    """Print the config with which the job's software runs the best layout, or what would have to change."""
    from rich.text import Text

    from fivefold.interop.registry import find_stack_format
    from fivefold.rendering.table import build_heading

    software = form = job.stack.name
    try:
        form = find_stack_format(job)
        choice = choose_written(layouts, model=model, machine=machine, job=job, form=form)
    except UserError as error:
        show(build_heading(f"With {software}"))
        reason = str(error).removeprefix(f"--to {form}: ")
        show(Text(f"no config can be written for {form}: {reason}", overflow="fold"))
        return
    show(build_heading(f"With {software}", f"{choice.layout}; --write PATH writes it"))
    if choice.why:
        show(Text(f"not the first of the ranking: {choice.why}", style="dim", overflow="fold"))
    for remark in choice.written.remarks:
        show(Text(f"note: {remark}", style="dim", overflow="fold"))
    for name, content in choice.written.files.items():
        show(f"# {name}\n{content.rstrip()}")


def write_best(
    layouts: Sequence[str], *, model: Model, machine: Machine, job: Job, path: Path, form: str, stated: Collection[str]
) -> None:
    """Write the first of ``layouts`` that the job's stack can express, and print why it is not the first of all."""
    try:
        choice = choose_written(layouts, model=model, machine=machine, job=job, form=form)
    except UserError as error:
        raise UserError(
            f"--write {path}: {error}; or restrict the search with --where, such as --where 'ac=none,full zero=3'"
        ) from None
    why = f"; not the first of the ranking: {choice.why}" if choice.why else ""
    print_line(f"fivefold: {choice.layout} as {choice.format}{why}")
    write_config(choice.written, path)
    if line := describe_defaults(job, stated=stated):
        print_line(f"note: {line}")
