"""Run the full parity matrix, resumable: finished cases are lines of FOLDER/cases.jsonl and are not run again.

    python -m tests.agree.parity.matrix --markdown docs/explanation/measurements/003-parity.md

A change of the trainer makes finished cases stale: ``--fresh`` forgets them. Exits 1 unless every case is equal.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterable, Sequence
from functools import partial

from tests.agree.matrix import Line, make_parser, run_cases
from tests.agree.parity.cases import DOCUMENTS, STEPS, TOKENS, VOCAB, Case
from tests.agree.parity.compare import TOLERANCE, run
from tests.agree.parity.covering import build_cases, list_cases
from tests.processes import Broken

SHOWN_ERROR = 1.5e-6  # of the rows on the page
COMPILED_SECONDS, SECONDS = 500.0, 150.0  # until a case counts as hung


def main() -> int:
    """Run what is not yet done, print what failed, write the table."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no forked process is left behind
    options = make_parser("every layout of the parity matrix against one process", folder="runs/parity").parse_args()
    lines = run_cases(
        list_cases(),
        options,
        title="parity",
        run=partial(map, compare_case),
        is_sound=is_sound,
        describe=describe_line,
    )
    if options.markdown:
        options.markdown.write_text(markdown(lines))
    bad = [line for line in lines if not is_sound(line)]
    print(f"{len(lines) - len(bad)} of {len(lines)} layouts equal one process")
    return 1 if bad else 0


def compare_case(case: Case) -> Line:
    """One case as a line of the log; a failure is a line too."""
    begin = time.perf_counter()
    line: Line = {
        "case": str(case),
        "model": case.model_name,
        "layout": case.layout_text,
        "compiled": case.compiled,
        "world": case.layout.world,
    }
    try:
        verdict = run(case, steps=STEPS, seconds=COMPILED_SECONDS if case.compiled else SECONDS)
        line |= verdict._asdict() | {"equal": verdict.is_equal}
    except Broken as error:
        line |= {"broken": str(error)[-2000:]}
    return line | {"seconds": round(time.perf_counter() - begin, 2)}


def is_sound(line: Line) -> bool:
    """Whether it equals one process and says what is planned."""
    return "broken" not in line and line["equal"] and not line["said"]


def describe_line(line: Line) -> str:
    """A failed case for the terminal."""
    if "broken" in line:
        return f"{line['case']}\n  {line['broken'].strip()}"
    worst = f"loss {line['loss_error']:.1e}, norm {line['norm_error']:.1e}, gradient {line['gradient_error']:.1e}"
    return "\n  ".join((f"{line['case']}: {worst} of {line['weight']}", *line["said"]))


def markdown(lines: Sequence[Line]) -> str:
    """Return the page for docs/explanation/measurements: all layouts in figures, and a row for each large error."""
    _, impossible = build_cases()
    equal = sum(is_sound(line) for line in lines)
    whole = [line for line in lines if "broken" not in line]
    worst_loss, worst = (max((line[key] for line in whole), default=0.0) for key in ("loss_error", "gradient_error"))
    shown = [
        line for line in lines if not is_sound(line) or max(line["loss_error"], line["gradient_error"]) >= SHOWN_ERROR
    ]
    return "\n".join(
        (
            "# 003 · Parity: every layout against one process",
            "",
            f"`make parity` runs {len(lines)} layouts on {_worlds(lines)} gloo processes. {equal} of them equal one "
            "process and report exactly the counts of the planner.",
            f"Each run has {STEPS} steps of AdamW in fp32, {DOCUMENTS} documents packed into sequences of {TOKENS} "
            f"tokens, a vocabulary of {VOCAB}, and 5 or 9 layers. The largest loss error is {worst_loss:.1e} and the "
            f"largest gradient error {worst:.1e}; the bound is {TOLERANCE:g}.",
            "",
            "- **loss**: the largest |Δ|/|loss| of the steps.",
            "- **gradient**: the largest ‖Δ‖/‖g‖ of any weight in the first and last step, with the Δ of the "
            "worst rank.",
            "- **messages**: number and bytes per axis and collective over all ranks in the third step.",
            "- **forwards**: how often the first norm of a block runs per micro-batch (and its attention).",
            "",
            "The layouts are drawn: a pairwise covering array over degrees and features "
            f"({len(impossible)} pairs are in no layout of 8 ranks), the cross of schedules × recomputation × "
            "compilation, and compilation under the other axes.",
            "",
            f"The table has the {len(shown)} layouts with an error of {SHOWN_ERROR:.1e} or more, or other messages.",
            "The command writes a line for every layout into `cases.jsonl` in its folder.",
            "",
            "| model | layout | ranks | compiled | loss | gradient | worst weight | messages | forwards | s |",
            "|---|---|---|---|---|---|---|---|---|---|",
            *map(_row, shown),
            "",
        )
    )


def _worlds(lines: Iterable[Line]) -> str:
    return ", ".join(map(str, sorted({line["world"] for line in lines})))


def _row(line: Line) -> str:
    layout, compiled = f"`{line['layout']}`", "yes" if line["compiled"] else ""
    start = f"| {line['model']} | {layout} | {line['world']} | {compiled} |"
    if "broken" in line:
        return f"{start} **broken** | | {line['broken'].strip().splitlines()[-1]} | | | {line['seconds']:.1f} |"
    loss, gradient = (
        f"{line[key]:.1e}" if line[key] <= TOLERANCE else f"**{line[key]:.1e}**"
        for key in ("loss_error", "gradient_error")
    )
    said = "equal" if not line["said"] else "**" + "; ".join(line["said"]) + "**"
    runs = f"{line['forwards']:g} ({line['cores']:g})"
    return f"{start} {loss} | {gradient} | {line['weight']} | {said} | {runs} | {line['seconds']:.1f} |"


if __name__ == "__main__":
    sys.exit(main())
