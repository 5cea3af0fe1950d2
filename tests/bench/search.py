"""How fast the search is: layouts per second, time to the best, memory, and estimates per second in a search's stream.

python tests/bench/search.py [--json]        targets on one core stand beside what is measured
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import time
from pathlib import Path

from rich.console import Console

from fivefold.job import Job
from fivefold.machine.catalog import resolve
from fivefold.model.catalog import named
from fivefold.plan.predict import Planner
from fivefold.plan.search import search
from fivefold.plan.search.space import Space
from fivefold.show.grid import Grid

RUNS = {  # model, machine, job, seconds that it may take
    "GPT-3 175B on 64 A100": ("gpt3-175b", "a100:64", Job(sequence=2048, global_batch=512), 5.0),
    "Llama 3 405B on 16,384 H100": ("llama3-405b", "h100:16384", Job(sequence=8192, global_batch=2048), 10.0),
}
STREAM = 2000  # layouts


def stream(*, pipelines: bool) -> float:
    """Estimates per second over random layouts of GPT-3 on 64 A100, the second time round."""
    model, machine, job, _ = RUNS["GPT-3 175B on 64 A100"]
    planner = Planner(model=named(model), machine=resolve(machine, local=Path("/nowhere")), job=job)
    space, some = Space(planner.model, job, world=64, placements=False), random.Random(0)
    partials = [at for at in range(len(space.partials.dp)) if (space.partials.pp[at] > 1) == pipelines]
    candidates = space.shard(
        space.partials, space.expand(space.partials, space.partials.dp.nonzero()[0][some.sample(partials, 400)])
    )
    chosen = some.sample(range(len(candidates.partial)), STREAM)
    layouts = [space.layout(space.partials, candidates, at) for at in chosen]
    for layout in layouts:
        planner.estimate(layout)
    begin = time.perf_counter()
    for layout in layouts:
        planner.estimate(layout)
    return len(layouts) / (time.perf_counter() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--top", type=int, default=1)
    options = parser.parse_args()
    rows = []
    for name, (model, machine, job, target) in RUNS.items():
        found = search(model=named(model), machine=resolve(machine, local=Path("/nowhere")), job=job, top=options.top)
        rows.append((name, f"{found.seconds:.2f} s", f"< {target:g} s"))
        rows.append(("  layouts", f"{found.tried:,}, {found.evaluated:,} evaluated", "> 3,200,000"))
        rows.append(("  layouts per second", f"{found.tried / found.seconds:,.0f}", "> 200,000"))
        rows.append(("  best", f"{found.best[0].step.layout}: {found.best[0].step.time.step_seconds:.2f} s", ""))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    rows.append(("memory so far", f"{peak:,.0f} MiB", "< 1,024 MiB"))
    rows.append(("estimates per second, no pipeline", f"{stream(pipelines=False):,.0f}", "> 5,000"))
    rows.append(("estimates per second, pipelines", f"{stream(pipelines=True):,.0f}", "> 2,000"))
    if options.json:
        print(json.dumps(rows, indent=2))
    else:
        Console(width=120).print(
            Grid(("what", "measured", "target"), tuple(rows), words=("what", "measured", "target"))
        )


if __name__ == "__main__":
    main()
