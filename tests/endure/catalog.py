"""Search, plan, compare, report and dry-run every full model of the catalog on small and large machines.

    python -m tests.endure.catalog --models deepseek-v3-mtp kimi-k2

Each command ends within ``LIMIT_SECONDS`` of this process, with numbers or with one line, such as that nothing fits.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

from fivefold.model.catalog import build_model, names
from tests.endure.commands import alone, answer, judged
from tests.endure.files import folder

MACHINES = ("l4:8", "h100:8", "h200:64", "h100:1024", "gb200:16384")
LIMIT_SECONDS = 15.0


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


def main() -> None:
    """Run them and print those that end badly."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", nargs="*", default=names())
    parser.add_argument("--machines", nargs="*", default=MACHINES)
    asked = parser.parse_args()
    count, bad = 0, 0
    with alone():
        for model in asked.models:
            for words in (words for machine in asked.machines for words in commands(model, machine)):
                with folder({}):
                    code, _, err, wrong = answer(words, limit=LIMIT_SECONDS)
                wrong = wrong or judged(code, err)
                count, bad = count + 1, bad + bool(wrong)
                if wrong:
                    print(f"fivefold {' '.join(words)}\n    {wrong}", flush=True)
    print(f"{count} command lines of {len(asked.models)} models; {bad} ended badly")
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()
