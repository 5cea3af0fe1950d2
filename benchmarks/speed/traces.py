"""`fivefold trace` against HolisticTraceAnalysis on the same traces: idle, compute, non-compute, overlap, in percent.

Drawn GPU traces (tests/profiling/traces/kineto.py), and traces that torch.profiler records here, of two processes on
CPU, as Kineto would write them had they run on a GPU: HTA reads nothing else. Exits with 1 where two figures
differ by 0.1.

    python benchmarks/speed/traces.py [--seeds 40] [--freeze]      (--freeze: what HTA found, for make test)
    python benchmarks/speed/traces.py --huge 1                     (a file of 1 GiB: seconds and memory of the command)
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
FROZEN = ROOT / "tests" / "profiling" / "traces" / "hta.json"
FROZEN_SEEDS = 12
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
MAX_DIFFERENCE_PERCENT = 0.1  # percentage points, and percent of a time

os.environ["HTA_DISABLE_NS_ROUNDING"] = "1"  # HTA rounds to µs, of which the drawn kernels take a few


class TraceSummary(NamedTuple):
    """The trace of one rank from its first to its last kernel: times in µs, overlap in percent of the communication."""

    idle: float
    compute: float
    other: float
    total: float
    overlap: float


def summarize_with_hta(folder: Path) -> dict[int, TraceSummary]:
    """Return the summary of HolisticTraceAnalysis for each rank."""
    from hta.configs.config import logger
    from hta.trace_analysis import TraceAnalysis

    logger.setLevel("ERROR")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        analysis = TraceAnalysis(trace_dir=str(folder), include_last_profiler_step=True)
        times = analysis.get_temporal_breakdown(visualize=False).set_index("rank")
        overlaps = analysis.get_comm_comp_overlap(visualize=False).set_index("rank")
    columns = ["idle_time(us)", "compute_time(us)", "non_compute_time(us)", "kernel_time(us)"]
    return {
        int(rank): TraceSummary(
            *(float(times.loc[rank, name]) for name in columns), float(overlaps.iloc[:, 0].loc[rank])
        )
        for rank in times.index
    }


def summarize_with_fivefold(folder: Path) -> dict[int, TraceSummary]:
    """Return the summary of `fivefold trace`."""
    from fivefold.profiling.traces import read

    return {
        breakdown.rank: TraceSummary(
            breakdown.idle_seconds * 1e6,
            breakdown.compute_seconds * 1e6,
            (breakdown.exposed_seconds + breakdown.memcpy_alone_seconds) * 1e6,
            breakdown.window_seconds * 1e6,
            100 * (breakdown.overlap or 0.0),
        )
        for breakdown in read([folder]).report.total
    }


def max_difference(left: TraceSummary, right: TraceSummary) -> float:
    """Return the largest difference, in percent of the total, of a time and of the overlap."""
    times = [abs(a - b) / right.total * 100 for a, b in zip(left[:4], right[:4], strict=True)]
    return max(*times, abs(left.overlap - right.overlap) if right.overlap == right.overlap else 0.0)


def write_random_traces(seed: int, folder: Path) -> None:
    """Write the traces of a drawn job."""
    from tests.profiling.traces.kineto import Shape, draw, write

    shape = Shape(ranks=2 + seed % 3, steps=2 + seed % 4, operations=20 + seed % 40)
    write(draw(seed, shape), folder, zipped=seed % 2 == 1)


def main() -> None:
    """Compare, print a line each, and exit with 1 if they disagree."""
    options = argparse.ArgumentParser()
    options.add_argument("--seeds", type=int, default=40)
    options.add_argument("--freeze", action="store_true")
    options.add_argument("--huge", type=float, metavar="GIB")
    chosen = options.parse_args()
    if chosen.huge:
        time_large_file(chosen.huge)
        return
    frozen, worst = {}, 0.0
    for seed in range(chosen.seeds):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            write_random_traces(seed, folder)
            worst = max(worst, compare(f"drawn, seed {seed}", folder, frozen if seed < FROZEN_SEEDS else None, seed))
    worst = max(worst, *compare_recorded())
    print(f"largest difference: {worst:.4f} %")
    if chosen.freeze:
        FROZEN.write_text(json.dumps(frozen, indent=1) + "\n", encoding="utf-8")
    sys.exit(1 if worst > MAX_DIFFERENCE_PERCENT else 0)


def time_large_file(gib: float) -> None:
    """Print what reading one file of ``gib`` GiB takes, gzipped and not: a job of one rank, its steps over and over."""
    from tests.profiling.traces.kineto import Shape, draw, events, text

    job = draw(1, Shape(ranks=1, steps=4, operations=5000, longest=20_000))
    lasting = (max(kernel.end for kernel in job.kernels[0]) - job.steps[0][0][0] + 1_000_000) / 1000
    rows, mark = events(job, 0), '"traceEvents": [\n'
    head, _, tail = text([], rank=0).partition(mark)
    with tempfile.TemporaryDirectory() as name:
        plain, zipped = Path(name) / "rank0.json", Path(name) / "rank0.json.gz"
        number = 0
        with plain.open("w", encoding="utf-8") as file:
            file.write(head + mark)
            while file.tell() < gib * 2**30:
                for event in rows:
                    args = {**event.get("args", {})}
                    if "correlation" in args:
                        args["correlation"] += number * 10**6
                    step = event["name"].partition("ProfilerStep#")[2]
                    named = f"ProfilerStep#{int(step) + 4 * number}" if step else event["name"]
                    shifted = {**event, "ts": round(event["ts"] + number * lasting, 3), "name": named, "args": args}
                    file.write(json.dumps(shifted) + ",\n")
                number += 1
            file.write(json.dumps(rows[0] | {"name": "end", "cat": "end"}) + tail.strip("\n"))
        with plain.open("rb") as source, gzip.open(zipped, "wb", compresslevel=1) as target:
            shutil.copyfileobj(source, target)
        print(f"{len(rows) * number:,} events, {4 * number} steps")
        for path in (plain, zipped):
            command = [sys.executable, "-m", "fivefold", "trace", str(path), "--json"]
            begun = time.perf_counter()
            answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, env=ENVIRONMENT)
            took = time.perf_counter() - begun
            held = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20  # the largest so far
            answer_json = json.loads(answer.stdout)
            assert (len(answer_json["steps"]), answer_json["remarks"]) == (4 * number, [])
            print(f"{path.name:15s} {path.stat().st_size / 2**30:5.2f} GiB   {took:4.0f} s   {held:.2f} GiB resident")


def compare(
    name: str,
    folder: Path,
    frozen: dict[int, dict[int, TraceSummary]] | None = None,
    seed: int = 0,
    *,
    mine_from: Path | None = None,
) -> float:
    """Print a line for a folder of traces; the largest difference over its ranks, in percent."""
    begun = time.perf_counter()
    own_summary = summarize_with_fivefold(mine_from or folder)
    took = time.perf_counter() - begun
    begun = time.perf_counter()
    hta = summarize_with_hta(folder)
    longer = (time.perf_counter() - begun) / took
    assert own_summary.keys() == hta.keys()
    if frozen is not None:
        frozen[seed] = hta
    worst = max(max_difference(own_summary[rank], hta[rank]) for rank in own_summary)
    print(
        f"{name:40s} {len(own_summary)} ranks   largest difference {worst:.4f} %   HTA takes {longer:.0f} times as long"
    )
    return worst


def compare_recorded() -> list[float]:
    """Compare on traces of real runs on CPU, of a plain DDP loop and of our own engine."""
    from tests.profiling.traces.recorded import convert_to_gpu, ddp_traces, engine_traces

    worst = []
    for name, record in (("torch DDP", ddp_traces), ("engine, dp2 zero2", engine_traces)):
        with tempfile.TemporaryDirectory() as here, tempfile.TemporaryDirectory() as there:
            for path in record(Path(here)):
                (Path(there) / path.name).write_text(convert_to_gpu(path), encoding="utf-8")
            worst.append(compare(f"torch.profiler, {name}", Path(there), mine_from=Path(here)))
    return worst


if __name__ == "__main__":
    main()
