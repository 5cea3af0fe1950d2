"""``fivefold calibrate``: measures this computer, the hosts of a torchrun job, or the work of one run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from fivefold.cli.options import parse_integers, print_line, show
from fivefold.cli.request_options import accept_request
from fivefold.errors import UserError
from fivefold.requests.commands import CalibrateOptions
from fivefold.requests.machines import find_local_machine_file

if TYPE_CHECKING:
    from fivefold.job import Job
    from fivefold.machine.spec import Machine
    from fivefold.trainer.process import Process

MAX_MEASURED_LAYOUTS = 4  # largest number of layouts to measure while looking for the fastest


@accept_request(CalibrateOptions)
def calibrate(request: CalibrateOptions, job: Job) -> None:
    """Measure this computer: matmul, attention, memory, collectives. The result is the machine 'local'.

    Under torchrun on several hosts, it measures the links between them too.
    With --for, it also measures the layers and messages of one run, in the
    trainer's own step. Predictions then use these where they apply, and the
    general measurements elsewhere.
    """
    from fivefold.machine.toml import read, write
    from fivefold.rendering import table
    from fivefold.trainer.process import Process

    path = request.out or find_local_machine_file()
    process = Process.from_environment(os.environ)
    run_or_model, layout = request.run, request.layout
    counts = parse_integers(request.processes, option="--processes", of="process counts", such="1,2")
    if run_or_model is None and layout is not None:
        raise UserError(f"calibrate {layout!r}: measuring a layout needs a model; add --for MODEL")
    machine_file = next(
        (
            candidate
            for candidate in (path, find_local_machine_file())
            if run_or_model is not None and candidate.exists()
        ),
        None,
    )
    machine = read(machine_file) if machine_file is not None else _measure(counts, process, quick=request.quick)
    if machine is None:
        return
    if run_or_model is not None:
        machine = _measure_units(machine, run_or_model, layout=layout, job=job)
    write(machine, path)
    print_line(f"wrote {path}")
    if machine.calibration is not None and (warning := machine.calibration.describe_disturbance()):
        print_line(warning)
    show(machine.model_dump_json(indent=2) if request.as_json else table.describe_machine(machine))


def _measure(counts: tuple[int, ...], process: Process, *, quick: bool) -> Machine | None:
    """Measure this computer, or the hosts of a torchrun job, where all hosts but the first get None."""
    from fivefold.calibration import calibrate as run
    from fivefold.rendering.progress import show_progress

    if process.has_several_hosts:
        from fivefold.calibration.hosts import calibrate_hosts
        from fivefold.cli.hosts import choose_interface

        choose_interface(os.environ)
        return calibrate_hosts(process, quick=quick)
    with show_progress("calibrating") as progress:
        return run(ranks=counts, quick=quick, progress=progress)


def _measure_units(machine: Machine, of: str, *, layout: str | None, job: Job) -> Machine:
    """Return ``machine`` with the measured units of a run file, or of a model with a layout (``auto``: the fastest)."""
    from fivefold.calibration import count_cores
    from fivefold.calibration.profile import is_profiled, profile_layout
    from fivefold.layout.spec import Layout
    from fivefold.layout.validity import refuse
    from fivefold.model.catalog import resolve
    from fivefold.rendering.progress import show_progress
    from fivefold.requests.answers import find_fastest
    from fivefold.trainer.run import Run
    from fivefold.trainer.supported import check_supported

    if machine.calibration is None:
        raise UserError(f"{machine.name} has no calibration to add to; run `fivefold calibrate` first")
    name = layout
    if layout is None:
        settings = Run.load(Path(of))
        of, job, name = settings.model, settings.job, settings.layout
    model = resolve(of)
    for _ in range(MAX_MEASURED_LAYOUTS):  # what was measured may make another layout the fastest
        chosen = (
            find_fastest(model, machine, job) if name in (None, "auto") else Layout.parse(str(name), machine=machine)
        )
        refuse(chosen, model=model, job=job)
        check_supported(chosen, job, model=model)
        if name == "auto" and is_profiled(machine, model=model, layout=chosen, job=job):
            break
        print_line(f"measuring the units of {chosen}")
        with show_progress("measuring") as progress:
            machine = profile_layout(
                model=model, layout=chosen, job=job, machine=machine, cores=count_cores(), progress=progress
            )
        if name != "auto":
            break
    return machine
