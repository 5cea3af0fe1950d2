"""What the scripts of this folder share: cases that are run one after another, each in a process of its own.

``--seconds``: begin no case after so long, and exit with ``LATER`` if any is left. ``--small``: small cases, on CPU.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fivefold.text_files import read_lines

LATER = 75  # exit code: cases are left, and the same command goes on with them


def parse_options(description: str, **more: Any) -> argparse.Namespace:
    """The options of a script; ``more``: options of its own with their defaults."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("words", nargs="*", help="only cases whose line holds all of these")
    parser.add_argument("--rows", type=Path, help="a JSON-lines file of finished cases, read and added to")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no case after so many seconds")
    parser.add_argument("--small", action="store_true", help="small cases on CPU, to see that all of this runs")
    parser.add_argument("--measure", type=int, help=argparse.SUPPRESS)  # a case's place: run it in this process
    for name, default in more.items():
        parser.add_argument(f"--{name}", default=default)
    return parser.parse_args()


def is_gpu_missing(*, small: bool = False) -> bool:
    """Whether there is none, which is said, and one is needed."""
    if small or torch.cuda.is_available():
        return False
    print("there is no GPU here", file=sys.stderr)
    return True


def run_apart(
    module: str, place: int, *, env: Mapping[str, str] | None = None, small: bool = False, more: Sequence[str] = ()
) -> Any:
    """What ``module --measure place`` (and ``more`` words) prints last, as JSON, run in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", module, "--measure", str(place), *more, *(["--small"] if small else [])],
        cwd=Path(__file__).parents[2],
        env=env,
        stdout=subprocess.PIPE,
        text=True,
        timeout=600,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def rows_of(
    cases: Sequence[Any],
    options: argparse.Namespace,
    *,
    row: Callable[..., Any],
    compare: Callable[[Any], Any],
    tell: Callable[[Any], str],
) -> list[Any]:
    """Of all cases that are asked for, finished ones as they are known; one that cannot be compared is left out."""
    rows = {line["case"]: row(**line) for line in (read_lines(options.rows) if options.rows else [])}
    asked = [case for case in cases if all(word in str(case) for word in options.words)]
    start, options.left = time.perf_counter(), 0
    for number, case in enumerate(asked, 1):
        if str(case) in rows:
            continue
        begin = time.perf_counter()
        if begin - start > options.seconds:
            options.left += 1
            continue
        result = compare(case)
        if result is None:
            continue
        rows[str(case)] = result
        print(f"{number}/{len(asked)} {case}: {tell(result)}, {time.perf_counter() - begin:.0f} s", file=sys.stderr)
        if options.rows:
            options.rows.parent.mkdir(parents=True, exist_ok=True)
            with options.rows.open("a") as file:
                file.write(json.dumps(result._asdict()) + "\n")
    if options.left:
        print(f"{options.left} of {len(asked)} cases are left; the same command goes on with them", file=sys.stderr)
    return list(rows.values())
