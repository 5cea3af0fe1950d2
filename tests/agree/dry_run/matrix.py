"""Compare planner and dry run on every case, resumable: finished ones are lines of FOLDER/cases.jsonl.

    python -m tests.agree.dry_run.matrix --markdown docs/explanation/measurements/005-dry-run.md

A change of planner or engine makes finished cases stale: ``--fresh`` forgets them, ``--again`` those that differ.
Exits 1 unless all counts are equal and peaks are within the bounds.
"""

from __future__ import annotations

import logging
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial

import torch

from tests.agree.dry_run.cases import Case, list_cases
from tests.agree.dry_run.compare import run
from tests.agree.matrix import Line, make_parser, run_cases

MEAN, WORST = 0.005, 0.02  # of the error of peaks
SHOWN_ERROR = 0.005  # of the rows on the page


def main() -> int:
    """Run what is not yet done, print what differs, write the table."""
    parser = make_parser("the planner against the dry run", folder="runs/dry-run")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    with multiprocessing.get_context("spawn").Pool(options.processes, initializer=_use_one_thread) as pool:
        lines = run_cases(
            list_cases(),
            options,
            title="dry run",
            run=partial(pool.imap_unordered, compare_case),
            is_sound=is_sound,
            describe=describe_line,
        )
    if options.markdown:
        options.markdown.write_text(markdown(lines))
    print(summary(lines))
    return 0 if agree(lines) else 1


def _use_one_thread() -> None:
    torch.set_num_threads(1)
    logging.disable(logging.ERROR)


def compare_case(case: Case) -> Line:
    """One case as a line of the log; a failure is a line too."""
    begin = time.perf_counter()
    line: Line = {
        "case": str(case),
        "model": f"{case.name}/{case.layers}".removesuffix("/0"),
        "layout": case.layout_text,
        "job": str(case).split(" · ", 2)[2],
        "world": case.layout.world,
    }
    try:
        verdict = run(case)
        top = max(verdict.stages, key=lambda stage: stage.dry_run)
        line |= {
            "error": verdict.error,
            "worst_stage": verdict.worst_stage,
            "unequal": verdict.unequal,
            "peak": top.dry_run,
            "causes": [top.dry_run_cause, top.planned_cause],
            "stages": [stage[:2] for stage in verdict.stages],
        }
    except Exception as error:  # a case that fails is a row of the table
        line |= {"broken": f"{type(error).__name__}: {error}"[:500]}
    return line | {"seconds": round(time.perf_counter() - begin, 2)}


def is_sound(line: Line) -> bool:
    """Whether all counts are equal and the peak is within the bound of the worst."""
    return "broken" not in line and not line["unequal"] and abs(line["error"]) <= WORST


def agree(lines: Sequence[Line]) -> bool:
    """All of them, and the mean."""
    errors = [abs(line["error"]) for line in lines if "broken" not in line]
    return all(map(is_sound, lines)) and sum(errors) / len(errors) <= MEAN


def describe_line(line: Line) -> str:
    """A case that differs, for the terminal."""
    if "broken" in line:
        return f"{line['case']}: {line['broken']}"
    ours, plan = line["causes"]
    peak = f"peak {line['error']:+.2%}, worst stage {line['worst_stage']:+.2%} ({plan} | {ours})"
    return "\n    ".join((f"{line['case']}: {peak}", *line["unequal"]))


def summary(lines: Sequence[Line]) -> str:
    """Return the first sentence of the page."""
    whole = [line for line in lines if "broken" not in line]
    errors = [abs(line["error"]) for line in whole]
    stages = [abs(here / there - 1) for line in whole for here, there in line["stages"]]
    equal = sum(not line["unequal"] for line in whole)
    broken = f", {len(lines) - len(whole)} cannot be run" if len(whole) < len(lines) else ""
    return (
        f"{equal} of {len(lines)} layouts have equal counts{broken}. Peak memory per rank agrees within "
        f"{_mean(errors):.2%} on average and {max(errors, default=0):.2%} at worst; over all {len(stages)} pipeline "
        f"stages within {_mean(stages):.2%} on average and {max(stages, default=0):.2%} at worst"
    )


def _mean(errors: Sequence[float]) -> float:
    return sum(errors) / max(1, len(errors))


def markdown(lines: Sequence[Line]) -> str:
    """Return the page for docs/explanation/measurements: all layouts in figures, and a row for each large error."""
    shown = [line for line in lines if "broken" in line or line["unequal"] or largest_error(line) >= SHOWN_ERROR]
    kinds = Counter(line["model"].partition("/")[0] for line in lines)
    return "\n".join(
        (
            "# 005 · Dry run: the planner compared with the trainer on fake tensors",
            "",
            f"{summary(lines)}.",
            "",
            f"Computed on {time.strftime('%Y-%m-%d')}.",
            "",
            "The planner predicts each layout. The dry run then executes the steady step of the trainer itself on",
            "fake tensors, on the first rank of every pipeline stage, and counts every storage, kernel and message.",
            "",
            "- **counts** compares the bytes of parameters, gradients and optimizer states, the largest bytes of",
            "  activations, the FLOPs of all ranks, and the messages and bytes by axis and collective.",
            "- **peak** is the peak memory of the fullest stage in GiB, **off** the relative error of its prediction.",
            "- **stage** is the relative error of the stage with the largest error.",
            "",
            "`python -m tests.agree.dry_run.matrix` runs the comparison. It fails if the mean error exceeds "
            f"{MEAN:.1%} or one error exceeds {WORST:.0%}. `llama3-8b/6` is Llama 3 8B with six layers. A job is given",
            "as tokens per sequence x sequences per step · precision · backend.",
            "",
            "Models: " + ", ".join(f"{name} {count}" for name, count in sorted(kinds.items())) + ".",
            "",
            f"The table has the {len(shown)} layouts with an error of {SHOWN_ERROR:.1%} or more, or with other counts.",
            "The command writes a line for every layout into `cases.jsonl` in its folder.",
            "",
            "| model | layout | job | ranks | peak | off | stage | counts | s |",
            "|---|---|---|---|---|---|---|---|---|",
            *map(_row, shown),
            "",
        )
    )


def largest_error(line: Line) -> float:
    """Return the largest relative error of a layout, of the fullest stage or of any."""
    return max(abs(line["error"]), abs(line["worst_stage"]))


def _row(line: Line) -> str:
    start = f"| {line['model']} | `{line['layout']}` | {line['job']} | {line['world']} |"
    if "broken" in line:
        return f"{start} | | | **{line['broken'].splitlines()[0][:120]}** | {line['seconds']:.1f} |"
    off, stage = _mark_large(line["error"]), _mark_large(line["worst_stage"])
    counts = "equal" if not line["unequal"] else "**" + "; ".join(_shorten(line["unequal"])) + "**"
    return f"{start} {line['peak'] / 2**30:.3f} | {off} | {stage} | {counts} | {line['seconds']:.1f} |"


def _shorten(unequal: Iterable[str]) -> list[str]:
    return [item.replace(" dry-run", "").replace(" planned", " planned") for item in unequal]


def _mark_large(error: float) -> str:
    return f"{error:+.2%}" if abs(error) <= WORST else f"**{error:+.2%}**"


if __name__ == "__main__":
    sys.exit(main())
