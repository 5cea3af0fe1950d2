"""A matrix of cases, resumable: finished cases are lines of FOLDER/cases.jsonl and are not run again."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from fivefold.rendering.progress import show_progress

Line = dict[str, Any]
Case = TypeVar("Case")


def make_parser(description: str, *, folder: str) -> argparse.ArgumentParser:
    """Return the options that all matrices have; ``folder``: the default place of finished cases."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--markdown", type=Path, help="write the table there")
    parser.add_argument("--folder", type=Path, default=Path(folder), help="where finished cases are kept")
    parser.add_argument("--fresh", action="store_true", help="run all cases again")
    parser.add_argument("--again", action="store_true", help="run those again that failed")
    parser.add_argument("--only", nargs="*", default=[], help="words that a case must have")
    return parser


def run_cases(
    cases: Iterable[Case],
    options: argparse.Namespace,
    *,
    title: str,
    run: Callable[[Sequence[Case]], Iterable[Line]],
    is_sound: Callable[[Line], bool],
    describe: Callable[[Line], str],
) -> list[Line]:
    """Return a line for each case that ``options`` select, after ``run`` of those that are not done.

    A line that is not sound is described on stderr.
    """
    finished: Path = options.folder / "cases.jsonl"
    finished.parent.mkdir(parents=True, exist_ok=True)
    if options.fresh:
        finished.unlink(missing_ok=True)
    log = finished.read_text().splitlines() if finished.exists() else []
    done = {line["case"]: line for line in map(json.loads, log)}
    selected = [case for case in cases if all(word in str(case) for word in options.only)]
    stale = {name for name, line in done.items() if options.again and not is_sound(line)}
    wanted = [case for case in selected if str(case) not in done or str(case) in stale]
    with show_progress(title) as report, finished.open("a") as file:
        for number, line in enumerate(run(wanted), start=1):
            report(line["case"], number, len(wanted))
            done[line["case"]] = line
            file.write(json.dumps(line) + "\n")
            file.flush()
            if not is_sound(line):
                print(describe(line), file=sys.stderr)
    return [done[str(case)] for case in selected]
