"""Compare the planned step with the dry-run step: 21 layouts of shortened models, one line each.

    python -m tests.agree.planned_time [NAME ...]

Both use the same prices (``planner/time``), so a difference is a count or a wait that one of them has and the other
has not. No difference may exceed ``BOUND``, or a larger one that is known (``KNOWN``;
docs/explanation/measurements/009-planned-against-dry-run-time.md).
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path
from typing import Any, NamedTuple

from fivefold.dry_run import dryrun
from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.machine.catalog import resolve
from fivefold.model.catalog import build_model
from fivefold.planner.predict import Planner
from fivefold.step import Time

BOUND = 0.15
KNOWN = {
    "small experts": 0.25,  # host and device take equally long: the planner adds what they lose as both fluctuate
    "latent attention": 0.25,
}


class PlannedCase(NamedTuple):
    """A job whose step is planned and dry-run."""

    model: str
    layers: int
    machine: str
    layout: str
    sequence: int
    global_batch: int
    settings: dict[str, Any] = {}


# fmt: off
CASES = {
    "dense zero3": PlannedCase("llama3-8b", 4, "h100:8", "dp8 zero3 mbs1", 8192, 8),
    "dense tp": PlannedCase("llama3-8b", 8, "h100:8", "tp8 mbs1", 8192, 4),
    "dense pp": PlannedCase("llama3-8b", 8, "h100:8", "dp2 pp4 v2 zero1 interleaved mbs1", 4096, 16),
    "dense 3d": PlannedCase("llama3-70b", 8, "h100:64", "dp4 tp8 pp2 zero1 mbs1", 8192, 32),
    "narrow": PlannedCase("llama3.2-1b", 8, "h200:8", "dp8 zero3 mbs1 ac=full", 512, 8),
    "ring": PlannedCase("llama3-8b", 4, "h100:8", "dp1 cp8 zero3 mbs1", 65536, 1),
    "ulysses": PlannedCase("llama3-8b", 4, "h100:8", "dp1 cp8 zero3 mbs1 cp=ulysses", 65536, 1),
    "fp8": PlannedCase("llama3-8b", 4, "h100:8", "dp8 zero1 mbs1", 8192, 16, {"precision": "fp8"}),
    "fp8 tp": PlannedCase("llama3-70b", 4, "h100:8", "tp8 mbs1", 4096, 8, {"precision": "fp8"}),
    "lora": PlannedCase("llama3-8b", 4, "h100:8", "dp8 zero3 mbs1 ac=full", 4096, 16, {"adapter": "lora:16"}),
    "qlora": PlannedCase("llama3-8b", 4, "h100:8", "dp8 mbs1 ac=full", 4096, 16, {"adapter": "qlora:16"}),
    "mixtral zero3": PlannedCase("mixtral-8x7b", 4, "h100:8", "dp8 zero3 mbs1", 4096, 16),
    "mixtral ep": PlannedCase("mixtral-8x7b", 4, "h100:8", "dp8 ep8 zero1 mbs1", 4096, 16),
    "small experts": PlannedCase("qwen3-30b-a3b", 8, "h200:8", "dp8 ep8 zero1 mbs1", 4096, 16),
    "small experts full": PlannedCase("qwen3-30b-a3b", 8, "h200:8", "dp8 ep8 zero1 mbs1 ac=full", 4096, 32),
    "experts zero3": PlannedCase("qwen3-30b-a3b", 8, "h200:8", "dp8 zero3 mbs1 ac=full", 512, 8),
    "latent attention": PlannedCase("deepseek-v2-lite", 6, "h100:8", "dp8 ep8 zero1 mbs1", 4096, 16),
    "mtp": PlannedCase("deepseek-v3-mtp", 8, "h200:32", "dp8 pp4 ep8 zero1 1f1b mbs1", 4096, 64),
    "hybrid": PlannedCase("nemotron3-nano-30b-a3b", 12, "h100:8", "dp8 ep8 zero1 mbs1", 4096, 16),
    "linear attention": PlannedCase("qwen3-next-80b-a3b", 4, "h200:8", "dp8 ep8 zero1 mbs1", 1024, 16),
    "convolution": PlannedCase("lfm2-1.2b", 8, "h100:8", "dp8 mbs2", 4096, 32),
}
# fmt: on


def compare(case: PlannedCase) -> tuple[Time, Time]:
    """Return the planned and the dry-run time of a case."""
    model, machine = build_model(case.model), resolve(case.machine, local=Path())
    model = model.replace(layers=case.layers)
    job = Job(sequence=case.sequence, global_batch=case.global_batch, **case.settings)
    layout = Layout.parse(case.layout)
    ran = dryrun(model=model, machine=machine, layout=layout, job=job)
    assert ran.step is not None, ran
    return Planner(model=model, machine=machine, job=job).step(layout).time, ran.step.time


def describe_parts(time: Time) -> str:
    """Return the parts of a time, in milliseconds."""
    return "  ".join(f"{name} {1e3 * seconds:.1f}" for name, seconds in time.split.items() if seconds > 5e-5)


def main(names: list[str]) -> int:
    """Print a line for each case; return 1 if a difference exceeds its bound."""
    too_far = 0
    for name in names or list(CASES):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_utime
        planned, ran = compare(CASES[name])
        difference = planned.step_seconds / ran.step_seconds - 1
        too_far += abs(difference) > KNOWN.get(name, BOUND)
        seconds = resource.getrusage(resource.RUSAGE_SELF).ru_utime - before
        print(
            f"{name:18} {CASES[name].layout:40} dry run {1e3 * ran.step_seconds:8.1f} ms, planned "
            f"{1e3 * planned.step_seconds:8.1f} ms ({difference:+.1%}), {seconds:.0f} s of CPU",
            flush=True,
        )
        print(f"     planned: {describe_parts(planned)}\n     dry run: {describe_parts(ran)}", flush=True)
    if too_far:
        print(f"{too_far} differences exceed their bounds", file=sys.stderr)
    return int(too_far > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
