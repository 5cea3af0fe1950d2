"""Random models under random layouts against one process, resumable: done cases are lines of FOLDER/drawn-SEED.jsonl.

    python -m tests.agree.parity.drawn --count 300 --seed 0

Every loss and gradient to 1e-5, every message as planned, none hangs. Where a gradient alone is farther off, one
process is asked how far its own larger micro-batches take it: up to twice as far is rounding. Farther off, ranks and
one process run again in fp64, where only an error of a layout stays. Such cases are printed. A change of the trainer
makes done cases stale: ``--fresh`` forgets them. Exits 1 unless every case is equal.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from fivefold.layout.spec import Layout
from fivefold.rendering.progress import show_progress
from tests.agree.drawn import Drawn, draw_cases
from tests.agree.matrix import Line
from tests.agree.parity.cases import text, use_one_process
from tests.agree.parity.compare import TOLERANCE, Verdict, judge, reference
from tests.agree.parity.matrix import describe_line, is_sound
from tests.agree.parity.rank import Told, train_rank
from tests.endure.stop_signals import end_at_stop_signal
from tests.processes import Broken, run_forked

STEPS = 3  # the messages of the third are counted
SECONDS = 600.0  # until a case counts as hung
FP64_TOLERANCE = 1e-6  # gradients are compared in fp32, whose rounding is 6e-8
CHUNK_ROWS = 13  # of a chunked loss, lest all rows be one chunk


def run(case: Drawn, *, seconds: float = SECONDS) -> Verdict:
    """Train a case in forked processes and compare it with one process, whose loss is computed from full logits."""
    torch.set_num_threads(1)
    text()  # once, and not in every process
    like = reference(case.model, case.job, STEPS, seconds=seconds)
    ranks = run_forked(
        case.layout.world, train_rank, case.model, case.layout, case.job, _use_small_chunks, STEPS, seconds=seconds
    )
    (verdict,) = run_forked(1, _judge, case, ranks, like, seconds=seconds)
    return verdict._replace(said=tuple(line for line in verdict.said if not _depends_on_routing(line, case)))


def control(case: Drawn) -> Verdict:
    """One process that takes the same batch in larger micro-batches: how far rounding alone goes in this model."""
    sizes = range(2, case.job.global_batch + 1)
    larger = Layout(mbs=next((size for size in sizes if case.job.global_batch % size == 0), 1))
    return run(case._replace(layout=larger, job=case.job.replace(pairs=False)))


def run_in_fp64(case: Drawn, *, seconds: float = SECONDS) -> Verdict:
    """Do as ``run`` with all tensors in fp64."""
    torch.set_num_threads(1)
    layout, plain = use_one_process(case.job)
    (like,) = run_forked(1, train_rank, case.model, layout, plain, _use_fp64, STEPS, seconds=seconds)
    ranks = run_forked(
        case.layout.world,
        train_rank,
        case.model,
        case.layout,
        case.job,
        _use_fp64_and_small_chunks,
        STEPS,
        seconds=seconds,
    )
    (verdict,) = run_forked(1, _judge, case, ranks, like, seconds=seconds)
    return verdict


def _use_fp64() -> None:
    """Let this process, which is one of its own, compute in fp64 what it computes in fp32."""
    from fivefold.trainer.model.precision import COMPUTE

    torch.set_default_dtype(torch.float64)
    for name, dtype in COMPUTE.items():
        COMPUTE[name] = torch.float64 if dtype == torch.float32 else dtype
    torch.float32 = torch.float64
    torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign]


def _use_fp64_and_small_chunks() -> None:
    _use_small_chunks()
    _use_fp64()


def _use_small_chunks() -> None:
    """Of a process of its own: of engine and planner."""
    import fivefold.planner.counts.operations.layer
    import fivefold.trainer.model.chunked_loss

    fivefold.trainer.model.chunked_loss.LOSS_CHUNK_ROWS = fivefold.planner.counts.operations.layer.LOSS_CHUNK_ROWS = (
        CHUNK_ROWS
    )


def _judge(case: Drawn, ranks: list[Told], like: Told) -> Verdict:
    _use_small_chunks()
    return judge(case, ranks, like=like)


def _depends_on_routing(line: str, case: Drawn) -> bool:
    """Whether how much is said depends on the routing: as etp pads to the fullest, and as not all choices compute."""
    moe = case.model.moe
    drops = moe is not None and (moe.capacity is not None or moe.identity_experts > 0)
    return line.startswith("etp ") or (line.startswith("ep ") and drops)


def main() -> int:
    """Run what is not yet done, print what failed and the sum."""
    parser = argparse.ArgumentParser(description="random models under random layouts against one process")
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("runs/parity"), help="where done cases are kept")
    parser.add_argument("--fresh", action="store_true", help="run all cases again")
    parser.add_argument("--again", action="store_true", help="run those again that failed")
    options = parser.parse_args()
    finished: Path = options.folder / f"drawn-{options.seed}.jsonl"
    finished.parent.mkdir(parents=True, exist_ok=True)
    if options.fresh:
        finished.unlink(missing_ok=True)
    lines = map(json.loads, finished.read_text().splitlines()) if finished.exists() else ()
    done: dict[str, Line] = {line["case"]: line for line in lines}
    cases = list(itertools.islice(draw_cases(options.seed, first=options.first), options.count))
    with show_progress("drawn") as report, finished.open("a") as log, end_at_stop_signal():
        for number, case in enumerate(cases):
            if str(case) in done and not (options.again and not is_sound(done[str(case)])):
                continue
            report(str(case.layout), number, len(cases))
            line = done[str(case)] = _line(case)
            log.write(json.dumps(line) + "\n")
            log.flush()
            if not is_sound(line):
                print(describe_line(line), file=sys.stderr, flush=True)
    return _sum([done[str(case)] for case in cases if str(case) in done])


def _line(case: Drawn) -> Line:
    begin = time.perf_counter()
    line: dict[str, Any] = {"case": str(case), "world": case.layout.world}
    try:
        verdict = run(case)
        line |= verdict._asdict() | {"equal": verdict.is_equal}
        if not verdict.is_equal and max(verdict.loss_error, verdict.norm_error) <= TOLERANCE:
            line["control"] = control(case).gradient_error
            line["equal"] = verdict.gradient_error <= 2 * line["control"]
            if not line["equal"]:
                line["fp64"] = run_in_fp64(case).gradient_error
                line["equal"] = line["fp64"] <= FP64_TOLERANCE
    except Broken as error:
        line |= {"broken": str(error)[-2000:]}
    return line | {"seconds": round(time.perf_counter() - begin, 2)}


def _sum(lines: list[Line]) -> int:
    """Printed; 1 unless all are equal."""
    good = [line for line in lines if is_sound(line)]
    rounded = [line for line in good if "control" in line]
    for key in ("loss_error", "norm_error", "gradient_error"):
        worst = max((line[key] for line in good if line not in rounded), default=0.0)
        print(f"worst {key.replace('_', ' ')} {worst:.1e}")
    for line in rounded:
        in_fp64 = f", in fp64 {line['fp64']:.1e}" if "fp64" in line else ""
        print(
            f"{line['weight']}: {line['gradient_error']:.1e}, within one process {line['control']:.1e}{in_fp64}; "
            f"{line['case']}"
        )
    ranks = Counter(line["world"] for line in lines)
    worlds = ", ".join(f"{ranks[number]} on {number}" for number in sorted(ranks))
    print(f"{len(good)} of {len(lines)} equal one process ({worlds} ranks)")
    return 0 if len(good) == len(lines) else 1


if __name__ == "__main__":
    sys.exit(main())
