"""Rows of published figures with changed cells, read and predicted.

    python -m tests.endure.rows [--rounds N] [--seed S]

The long form of tests/benchmarks/published/test_rows.py: one to four cells of every row are changed, each case is
predicted and scored. Ends with 1 where a row is lost or anything but a ``UserError`` of one line is raised.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import traceback
from pathlib import Path

from benchmarks.published import SOURCES, case, run
from tests.benchmarks.published.test_rows import mutate, put
from tests.endure.stop_signals import end_at_stop_signal


def main() -> int:
    """Prints a line per round, and what went wrong."""
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--rounds", type=int, default=20)
    asked.add_argument("--seed", type=int, default=0)
    options, real, wrong = asked.parse_args(), case.DATA, 0
    with end_at_stop_signal():
        for count in range(options.rounds):
            scored = excluded = 0
            for source in SOURCES:
                case.DATA = real
                changed = mutate(
                    source, random.Random(f"{options.seed} {count} {source}"), cells_of_a_row=1 + count % 4
                )
                with tempfile.TemporaryDirectory() as folder:
                    case.DATA = Path(folder)
                    put(case.DATA, source, changed)
                    try:
                        report = run((source,))
                    except Exception:
                        wrong += 1
                        print(f"round {count}, {source}:\n{traceback.format_exc()}")
                        continue
                ends = {score.row.partition(" ")[0] for score in (*report.scores, *report.excluded)}
                if lost := {row["row_id"] for row in changed} - ends:
                    wrong += 1
                    print(f"round {count}, {source}: lost {sorted(lost)}")
                scored, excluded = scored + len(report.scores), excluded + len(report.excluded)
            print(
                f"round {count + 1} of {options.rounds}: {scored} scores, {excluded} exclusions, {wrong} wrong",
                flush=True,
            )
    case.DATA = real
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
