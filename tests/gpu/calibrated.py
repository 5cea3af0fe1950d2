"""Runs ``fivefold calibrate`` on one GPU and prints the machine that came of it as a markdown table.

python -m tests.gpu.calibrated --out runs/gpu/machine.toml [--small]        --small: --quick, whatever is here
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from fivefold.machine.spec import Machine
from fivefold.machine.toml import read


def markdown(machine: Machine) -> str:
    """Peaks reached, the memory, and how many points stand behind them."""
    chip, points = machine.chip, machine.calibration
    assert points is not None
    rows = [(f"best product, {dtype}", f"{flops / 1e12:.1f} TFLOP/s") for dtype, flops in chip.peak_flops.items()]
    rows += [
        ("largest copy", f"{chip.memory_bandwidth / 1e9:.0f} GB/s"),
        ("memory", f"{chip.memory_bytes / 2**30:.2f} GiB"),
        ("matmuls measured", str(len(points.matmuls))),
        ("attentions measured", str(len(points.attentions))),
        ("kernels measured", str(len(points.kernels))),
    ]
    return "\n".join([f"| {chip.name} | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)])


def main() -> int:
    """Calibrate; print the table."""
    parser = argparse.ArgumentParser(description="calibrate one GPU")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    command = [sys.executable, "-m", "fivefold", "calibrate", "--processes", "1", "--out", str(options.out)]
    code = subprocess.run(
        [*command, *(["--quick"] if options.small else [])], stdout=sys.stderr, check=False
    ).returncode
    if code == 0:
        print(markdown(read(options.out)))
    return code


if __name__ == "__main__":
    sys.exit(main())
