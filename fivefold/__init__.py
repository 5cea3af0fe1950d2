"""Fivefold plans, rehearses, trains and proves the training step of a large language model.

fivefold.predict("llama3-8b", "h100:8", "dp8 zero3 mbs1", sequence=8192, global_batch=64)
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fivefold.step import Step

__version__ = "0.1.0"
LOCAL = Path("~/.cache/fivefold/local.toml")  # what ``local`` means, unless the command line is told otherwise


def predict(model: str, machine: str, layout: str, **job: Any) -> Step:
    """The predicted step, by names as on the command line; ``job`` holds fields of ``Job``."""
    from fivefold.job import Job
    from fivefold.layout.spec import Layout
    from fivefold.machine.catalog import resolve as find_machine
    from fivefold.model.catalog import resolve as find_model
    from fivefold.plan.predict import predict as run

    return run(
        model=find_model(model),
        machine=find_machine(machine, local=LOCAL.expanduser()),
        layout=Layout.parse(layout),
        job=Job.read(job, origin="job"),
    )
