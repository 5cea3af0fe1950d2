"""The commands read and write: configs of other software in our nouns, and our layouts as their configs. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fivefold.cli.options import say, show
from fivefold.cli.request_options import takes_request
from fivefold.record import Mistake
from fivefold.requests.commands import ReadOptions, WriteOptions
from fivefold.requests.configs import build_request, describe_defaults, describe_notes, load_config
from fivefold.requests.machines import load_machine

if TYPE_CHECKING:
    from fivefold.interop.format import Plan, Written
    from fivefold.job import Job
    from fivefold.machine.spec import Machine
    from fivefold.model.spec import Model


@takes_request(ReadOptions)
def read(request: ReadOptions) -> None:
    """A config of Megatron, torchtitan, DeepSpeed, … as model, layout and job; each key understood, or named."""
    from fivefold.interop.read import read as run
    from fivefold.rendering import reading

    found = run(request.words, build_request(request.gpus, request.model, request.vocab))
    show(found.model_dump_json(indent=2) if request.as_json else reading.page(found))


@takes_request(WriteOptions)
def write(request: WriteOptions, job: Job) -> None:
    """The config with which another software runs a layout; refused by name where it cannot."""
    from fivefold.interop.write import write as run

    plan = _plan(request, job)
    put(run(plan, to=request.to), request.output)
    say_defaults(request.what, plan)


def say_defaults(what: str, plan: Plan) -> None:
    """Say which values of a written config are defaults: of Fivefold for a layout, of the software for a config."""
    if not Path(what).exists() and (line := describe_defaults(plan.job)):
        say(f"fivefold: {line}")


def put(written: Written, output: Path | None) -> None:
    """Files to a file or folder, or to stdout; remarks to stderr."""
    for remark in written.remarks:
        say(f"fivefold: {remark}")
    if output is None:
        for name, text in written.files.items():
            show(f"# {name}\n{text}" if len(written.files) > 1 else text.rstrip("\n"))
        return
    several = len(written.files) > 1 or output.is_dir()
    if several and output.exists() and not output.is_dir():
        raise Mistake(f"-o {output}: {len(written.files)} files do not fit into a file; name a folder")
    (output if several else output.parent).mkdir(parents=True, exist_ok=True)
    for name, text in written.files.items():
        path = output / name if several else output
        path.write_text(text, encoding="utf-8")
        suffix = Path(name).suffix
        say(f"wrote {path}" + (f", which its software reads as a {suffix} file" if path.suffix != suffix else ""))


def _plan(request: WriteOptions, job: Job) -> Plan:
    """Model, layout and job of a layout's text with --model, of our run file, or of another software's config."""
    from fivefold.interop.format import Plan
    from fivefold.layout.spec import Layout
    from fivefold.model.catalog import resolve

    what, model, gpus = request.what, request.model, request.gpus
    nodes = load_machine(gpus).ranks_per_node if gpus else 8
    if not Path(what).suffix and not Path(what).exists():
        if model is None:
            raise Mistake(f"layout {what!r} is of what model? say --model NAME")
        return Plan(resolve(model), Layout.parse(what), job, nodes, gpus or "")
    config = load_config([what], build_request(gpus, model), ignore=request.ignore)
    for line in describe_notes(config.notes):
        say(f"fivefold: {line}")
    return Plan(config.model, config.layout, config.job, nodes, gpus or _machine_of(Path(what)))


def _machine_of(path: Path) -> str:
    """The machine of a run file; empty for other configs."""
    from fivefold.record import read_file

    said = read_file(path).get("machine") if path.suffix == ".toml" and path.is_file() else None
    return said if isinstance(said, str) else ""


def refuse_untold(model: Model, machine: Machine, job: Job) -> None:
    """Raise a ``Mistake`` if the config of the job's stack has no words for the model or the job, by any layout."""
    from fivefold.interop.format import Plan
    from fivefold.interop.registry import find_stack_format
    from fivefold.interop.write import write as run
    from fivefold.layout.spec import Layout

    plain = Layout(dp=2, zero=job.stack.runs.zero_told(1)[-1])
    small = job.replace(global_batch=2, ramp=None)
    run(Plan(model, plain, small, machine.ranks_per_node, f"{machine.name}:2"), to=find_stack_format(job.stack.name))


def write_best(layouts: Sequence[str], *, model: Model, machine: Machine, job: Job, path: Path) -> None:
    """Write the first of ``layouts`` that the job's stack can be told, and say why not the first of all."""
    from fivefold.interop.format import Plan
    from fivefold.interop.registry import find_stack_format
    from fivefold.interop.write import write as run
    from fivefold.layout.spec import Layout

    to, why = find_stack_format(job.stack.name), ""
    for text in dict.fromkeys(layouts):
        plan = Plan(model, Layout.parse(text), job, machine.ranks_per_node, f"{machine.name}:{machine.ranks}")
        try:
            written = run(plan, to=to)
        except Mistake as refusal:
            why = why or str(refusal)
            continue
        say(f"fivefold: {text} as {to}" + (f"; not the first of the ranking: {why}" if why else ""))
        put(written, path)
        if line := describe_defaults(job):
            say(f"fivefold: {line}")
        return
    raise Mistake(f"--write {path}: {why or 'no layout was found'}; narrow the search by --where 'ac=none,full zero=3'")
