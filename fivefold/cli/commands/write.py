"""``fivefold write``: the config with which another software runs a layout. Does not import torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from fivefold.cli.options import print_line
from fivefold.cli.request_options import accept_request
from fivefold.cli.written_configs import write_config
from fivefold.errors import UserError
from fivefold.requests.commands import WriteOptions
from fivefold.requests.configs import build_request, describe_defaults, describe_notes, load_config
from fivefold.requests.job import get_job_words, load_job
from fivefold.requests.machines import load_machine
from fivefold.requests.settings import load_settings

if TYPE_CHECKING:
    from fivefold.interop.format import ConfigPlan
    from fivefold.job import Job


@accept_request(WriteOptions)
def write(request: WriteOptions, job: Job) -> None:
    """Write a config for Megatron, torchtitan, DeepSpeed, …; it lists what that software cannot do."""
    from fivefold.interop.registry import find_stack_format
    from fivefold.interop.write import write as run

    if request.to is None:
        request = request.model_copy(update={"stack": request.stack or _find_own_stack()})
        job = load_job(**get_job_words(request))
    plan = _plan(request, job)
    write_config(run(plan, to=request.to or find_stack_format(plan.job)), request.output)
    print_defaults(request.what, plan)


def _find_own_stack() -> str:
    """Return the software of the user's settings."""
    if stack := load_settings().stack:
        return stack
    raise UserError(
        "name a format, such as --to torchtitan, or set your software: fivefold config set stack torchtitan"
    )


def print_defaults(what: str, plan: ConfigPlan) -> None:
    """Print which values of a written config are defaults of Fivefold; nothing for another software's config."""
    run_file = _read_run_file(Path(what))
    if run_file is None and Path(what).exists():
        return
    job = (run_file or {}).get("job")
    if line := describe_defaults(plan.job, stated=job if isinstance(job, dict) else ()):
        print_line(f"note: {line}")


def _plan(request: WriteOptions, job: Job) -> ConfigPlan:
    """Return model, layout and job from a layout's text with --model, our run file, or another software's config."""
    from fivefold.interop.format import ConfigPlan
    from fivefold.layout.spec import Layout
    from fivefold.model.catalog import resolve

    what, model, gpus = request.what, request.model, request.gpus
    loaded_machine = load_machine(gpus) if gpus else None
    nodes = loaded_machine.ranks_per_node if loaded_machine else 8
    if not Path(what).suffix and not Path(what).exists():
        if model is None:
            raise UserError(f"layout {what!r} needs a model; add --model NAME")
        return ConfigPlan(resolve(model), Layout.parse(what, machine=loaded_machine), job, nodes, gpus or "")
    config = load_config([what], build_request(gpus, model, sequence=request.seq), ignore=request.ignore)
    for line in describe_notes(config.notes):
        print_line(f"note: {line}")
    machine = gpus or _read_machine(Path(what))
    config_job = load_job(**get_job_words(request), base=config.job.model_dump())
    return ConfigPlan(config.model, config.layout, config_job, nodes, machine, config.data)


def _read_machine(path: Path) -> str:
    """Return the machine of a run file; empty for other configs."""
    machine_name = (_read_run_file(path) or {}).get("machine")
    return machine_name if isinstance(machine_name, str) else ""


def _read_run_file(path: Path) -> dict[str, Any] | None:
    """Return the fields of a run file of ours; None for other configs, and for the text of a layout."""
    from fivefold.text_files import read_file

    fields = read_file(path) if path.suffix == ".toml" and path.is_file() else {}
    return fields if isinstance(fields.get("model"), str) else None
