"""The demo over seeds, which draw its weights and the order of its data: held-out loss at the end, largest gradient.

    python benchmarks/speed/demo.py --seeds 1-5 --layout "dp1 mbs8" --set job.learning_rate.peak=2e-3

What is finished in FOLDER is not run again. Wants a calibrated computer, as the demo does.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

from fivefold.machine.toml import emit
from fivefold.text_files import read_lines

DEMO = Path(__file__).parents[2] / "examples" / "demo.toml"


def apply_changes(values: dict[str, Any], changes: list[str]) -> dict[str, Any]:
    """Return ``values`` with each KEY.KEY=VALUE of ``changes``, whose value is TOML."""
    for change in changes:
        place, _, value = change.partition("=")
        *tables, key = place.split(".")
        table = values
        for name in tables:
            table = table.setdefault(name, {})
        table[key] = tomllib.loads(f"value = {value}")["value"]
    return values


def read_finished_log(folder: Path, steps: int) -> list[dict[str, Any]]:
    """Return the lines of a run's log, if it has come to its end; else none."""
    lines = read_lines(folder / "log.jsonl")
    return lines if any(line["step"] == steps and "heldout_loss" in line for line in lines) else []


def main() -> None:
    """Print one line per seed, and the range."""
    parser = argparse.ArgumentParser(description="the demo over seeds")
    parser.add_argument("--seeds", default="1-5")
    parser.add_argument("--layout", default="dp1 mbs8")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of the run file, as TOML")
    parser.add_argument("--folder", type=Path, default=Path("runs/demo-seeds"))
    options = parser.parse_args()
    first, _, last = options.seeds.partition("-")
    ends = []
    print("| seed | held-out loss at step 0 | at the end | largest gradient norm | at step |\n|---|---|---|---|---|")
    for seed in range(int(first), int(last or first) + 1):
        folder = options.folder / f"seed-{seed}"
        own = [f"job.seed={seed}", f'folder="{folder}"', 'sample=""']
        values = apply_changes(tomllib.loads(DEMO.read_text()), [*options.set, *own])
        file = folder.with_suffix(".toml")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(emit(values))
        steps = values["job"]["steps"]
        if not read_finished_log(folder, steps):
            command = [sys.executable, "-m", "fivefold", "train", str(file), "--layout", options.layout]
            subprocess.run(command, check=True, capture_output=True)
        lines = read_finished_log(folder, steps)
        losses = [line["heldout_loss"] for line in lines if "heldout_loss" in line]
        norm, at = max((line["gradient_norm"], line["step"]) for line in lines if "gradient_norm" in line)
        print(f"| {seed} | {losses[0]:.3f} | {losses[-1]:.3f} | {norm:.1f} | {at} |", flush=True)
        ends.append(losses[-1])
    print(f"\n{min(ends):.2f} to {max(ends):.2f} nats per token after {steps} steps")


if __name__ == "__main__":
    main()
