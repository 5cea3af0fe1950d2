"""Search, plan, compare, report and dry-run every full model of the catalog on small and large machines.

    python -m tests.endure.catalog --models deepseek-v3-mtp kimi-k2

Each command ends within ``LIMIT_SECONDS`` of the processor (``ask model`` within ``MODEL_SECONDS``), with numbers or
with one line, such as that nothing fits. Each line goes into a table as it ends, from which a later start goes on.
"""

from __future__ import annotations

import argparse
import csv
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from fivefold.model.catalog import build_model, list_names
from fivefold.rendering.progress import show_progress
from tests.endure.commands import answer, isolate, judge
from tests.endure.files import folder
from tests.endure.stop_signals import end_at_stop_signal

MACHINES = ("l4:8", "h100:8", "h200:64", "h100:1024", "gb200:16384")
LIMIT_SECONDS, MODEL_SECONDS, STOP_SECONDS = 15.0, 10.0, 240.0  # aims, and when a command is stopped
SLOWEST = 10  # lines that are printed at the end


def commands(model: str, machine: str) -> Iterator[list[str]]:
    """Yield the command lines for a model on a machine."""
    ranks = int(machine.partition(":")[2])
    job = ["--seq", str(min(build_model(model).positions, 4096)), "--gbs", str(max(64, ranks))]
    layout = f"dp{ranks} zero3 mbs1 ac=full"
    yield ["search", model, machine, *job]
    yield ["plan", model, machine, *job, "--batch", "job"]
    yield ["compare", model, machine, layout, layout.replace("full", "none"), *job]
    yield ["report", model, machine, layout, *job]
    yield ["ratios", model, machine, *job]
    yield ["dryrun", model, machine, layout, *job]
    for question in ("gpus", "model"):
        yield ["ask", question, model, machine, *job]
    for question in ("micro-batch", "sequence", "batch", "run", "changes"):
        yield ["ask", question, model, machine, layout, *job]


def max_seconds(words: list[str]) -> float:
    """Return the processor seconds that a command line may take."""
    return MODEL_SECONDS if words[:2] == ["ask", "model"] else LIMIT_SECONDS


def main() -> None:
    """Run them, the largest models first, and print those that end badly or take too long, and the slowest."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    largest_first = sorted(list_names(), key=lambda name: -build_model(name).parameters)
    parser.add_argument("--models", nargs="*", default=largest_first)
    parser.add_argument("--machines", nargs="*", default=MACHINES)
    parser.add_argument("--only", nargs="*", default=[], help="the first word, or two with a hyphen, such as ask-model")
    parser.add_argument(
        "--table", type=Path, default=Path("runs/endure-catalog.csv"), help="what is in it is not rerun"
    )
    asked = parser.parse_args()
    lines = [words for model in asked.models for machine in asked.machines for words in commands(model, machine)]
    lines = [words for words in lines if not asked.only or {words[0], "-".join(words[:2])} & {*asked.only}]
    asked.table.parent.mkdir(parents=True, exist_ok=True)
    with asked.table.open("a+", newline="", encoding="utf-8") as file:
        file.seek(0)
        known = {row[0]: (float(row[1]), row[2]) for row in csv.reader(file)}
        with end_at_stop_signal(), isolate(), show_progress("catalog") as progress:
            for done, words in enumerate(lines):
                progress(" ".join(words), done, len(lines))
                if (text := " ".join(words)) in known:
                    continue
                begin = time.process_time()
                with folder({}):
                    code, _, err, wrong = answer(words, limit=STOP_SECONDS)
                seconds = time.process_time() - begin
                late = f"{seconds:.1f} s, more than {max_seconds(words):.0f}" if seconds > max_seconds(words) else ""
                known[text] = seconds, wrong or judge(code, err) or late
                csv.writer(file).writerow([text, f"{seconds:.2f}", known[text][1]])
                file.flush()
    measured = {text: known[text] for text in map(" ".join, lines) if text in known}
    bad = {text: wrong for text, (_, wrong) in measured.items() if wrong}
    for text, wrong in bad.items():
        print(f"fivefold {text}\n    {wrong}")
    for text, (seconds, _) in sorted(measured.items(), key=lambda entry: -entry[1][0])[:SLOWEST]:
        print(f"{seconds:8.1f} s  {text}")
    print(f"{len(measured)} command lines of {len(asked.models)} models; {len(bad)} ended badly")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
