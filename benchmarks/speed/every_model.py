"""Measure the CPU seconds of a command for every catalog model on small and on large machines.

python benchmarks/speed/every_model.py [--question search] [--models A,B] [--ranks 8,64] [--chips h100,b200]

One command at a time, each in a process of its own; the slowest come first. An answer that nothing fits counts too.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
from functools import partial
from typing import NamedTuple

from rich.console import Console

from fivefold.model.catalog import build_model, list_names
from fivefold.rendering.grid import Grid

QUESTIONS = ("search", "plan", "model", "micro-batch", "sequence")
RANKS = (8, 64, 512, 2048, 16384)
CHIPS = ("h100", "b200")
TARGET = 15.0  # processor seconds


class CommandTime(NamedTuple):
    """The CPU seconds of one command, and how it ended."""

    seconds: float
    command: str
    ended: str


def ask(question: str, model: str, machine: str, *, limit: int) -> CommandTime:
    """Run one command and return what it took; it is stopped after ``limit`` processor seconds."""
    ranks = int(machine.partition(":")[2])
    sequence = min(4096, build_model(model).positions)
    verb = [question] if question in ("search", "plan") else ["ask", question]
    words = [*verb, model, machine, "--seq", str(sequence), "--gbs", str(max(512, ranks))]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-m", "fivefold", *words],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        preexec_fn=partial(resource.setrlimit, resource.RLIMIT_CPU, (limit, limit)),
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    ended = {0: "answered", 2: (done.stderr.strip().splitlines() or [""])[-1][:60]}.get(done.returncode, "stopped")
    return CommandTime(seconds, " ".join(words), ended)


def main() -> None:
    """Ask a question of every model, number of ranks and chip, and print the processor seconds of each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--question", choices=QUESTIONS, default="search")
    parser.add_argument("--models", default=",".join(list_names()))
    parser.add_argument("--ranks", default=",".join(map(str, RANKS)))
    parser.add_argument("--chips", default=",".join(CHIPS))
    parser.add_argument("--limit", type=int, default=60, help="processor seconds after which a command is stopped")
    options = parser.parse_args()
    answers = []
    for ranks in options.ranks.split(","):
        for model in options.models.split(","):
            for chip in options.chips.split(","):
                answers.append(ask(options.question, model, f"{chip}:{ranks}", limit=options.limit))
                print(f"{answers[-1].seconds:6.1f} s  {answers[-1].command}  {answers[-1].ended}", flush=True)
    rows = [(answer.command, f"{answer.seconds:.1f} s", answer.ended) for answer in sorted(answers, reverse=True)]
    late = sum(answer.seconds > TARGET for answer in answers)
    Console(width=160).print(Grid(("command", "processor", "ended"), tuple(rows), words=("command", "ended")))
    print(f"{len(answers)} commands, {late} over {TARGET:g} s")


if __name__ == "__main__":
    main()
