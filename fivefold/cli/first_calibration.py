"""Calibrate this computer when a command asks for the machine ``local`` before ``fivefold calibrate`` has run."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import TypeVar

from fivefold.cli.errors import find_launcher
from fivefold.cli.options import print_line
from fivefold.requests.machines import find_local_machine_file

Value = TypeVar("Value")


def calibrate_if_needed(read: Callable[[], Value], *, allowed: bool) -> Value:
    """Return what ``read`` returns; if it asks for this computer's calibration and there is none, measure it first.

    Not in a rank that a launcher has started, nor without torch: the error then says what to do.
    """
    from fivefold.machine.catalog import UncalibratedError

    try:
        return read()
    except UncalibratedError:
        if not allowed or find_launcher() is not None or find_spec("torch") is None:
            raise
    measure()
    return read()


def measure() -> None:
    """Measure fewer points of this computer than ``fivefold calibrate`` does, and write its machine file."""
    from fivefold.calibration import calibrate
    from fivefold.machine.toml import write
    from fivefold.rendering.progress import show_progress

    print_line("this computer is not calibrated yet: measuring it for about 30 s; `fivefold calibrate` measures more")
    with show_progress("calibrating") as progress:
        machine = calibrate(quick=True, progress=progress)
    write(machine, find_local_machine_file())
    print_line(f"wrote {find_local_machine_file()}")
