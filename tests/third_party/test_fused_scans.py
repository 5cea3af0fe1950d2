"""Scans by the kernels of flash-linear-attention equal PyTorch's operations, in Triton's interpreter.

Triton reads the variable that switches its interpreter on when it is imported, so that the kernels run in a process of
their own. The interpreter counts loops with integers of Python, which have no ``to``: the sources are changed there.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fivefold.planner.counts.operations.launches import FUSED_LAUNCHES
from fivefold.stack.spec import FUSED_SCANS

pytest.importorskip("fla", reason="flash-linear-attention is not installed")

CASTS = 10  # that 16-bit inputs need and fp32 ones do not, forward and backward
TOLERANCE = 2e-5  # of the largest number: sums in fp32 in another order
SUM_TOLERANCE = 5e-6  # of the magnitudes of terms that cancel; draws of other seeds differ by up to 7e-6


@pytest.mark.parametrize("mixer", ["gated_delta_net", "kimi_delta", "kimi_delta_bounded", "lightning", "mamba2"])
def test_a_fused_scan_equals_the_operations_in_outputs_and_gradients(mixer: str, tmp_path: Path) -> None:
    source = Path(__file__).with_name("fused_scans.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "TRITON_CACHE_DIR": str(tmp_path)}
    run = subprocess.run(
        [sys.executable, source, mixer, str(tmp_path)], capture_output=True, text=True, env=environment, check=False
    )
    assert run.returncode == 0, run.stderr[-2000:]
    kernels, *lines = run.stdout.splitlines()
    assert len(lines) > 1, "outputs and at least one gradient"
    for line in lines:
        error, *mistakes = map(float, line.split())
        tolerance = SUM_TOLERANCE if mistakes else TOLERANCE
        assert error < tolerance < min(mistakes, default=1.0)
    if mixer in FUSED_SCANS:
        for planned, counted in zip(FUSED_LAUNCHES[mixer], map(int, kernels.split()), strict=True):
            assert 0 <= planned - counted <= CASTS
