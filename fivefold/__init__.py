"""Fivefold plans, rehearses, trains and proves the training step of a large language model.

fivefold.predict("llama3-70b", "h100:512", "dp16 tp8 pp4 v2 zero1 mbs1", seq=8192, gbs=2048)
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fivefold.step import Step

__version__ = "0.1.0"
LOCAL = Path("~/.cache/fivefold/local.toml")  # what ``local`` means, unless the command line is told otherwise


def predict(
    model: str, machine: str, layout: str, *, seq: int | None = None, gbs: int | None = None, **job: Any
) -> Step:  # fmt: skip
    """The predicted step, by names as on the command line: ``seq`` tokens per sequence, ``gbs`` sequences per step;
    ``job`` holds other fields of ``Job``, such as ``precision="fp8"``.
    """
    from fivefold.job import Job
    from fivefold.layout.spec import Layout
    from fivefold.machine.catalog import resolve as find_machine
    from fivefold.model.catalog import resolve as find_model
    from fivefold.plan.predict import predict as run

    job |= {name: value for name, value in (("sequence", seq), ("global_batch", gbs)) if value is not None}
    return run(
        model=find_model(model),
        machine=find_machine(machine, local=LOCAL.expanduser()),
        layout=Layout.parse(layout),
        job=Job.read(job, origin="job"),
    )
