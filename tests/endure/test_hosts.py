"""Two hosts of ``make endure``, undisturbed; skipped where namespaces are not permitted."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_two_hosts_end_in_the_bits_of_one(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.endure.hosts", "--quick", "--folder", str(tmp_path / "hosts")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.stdout.startswith("skipped: "):
        pytest.skip(done.stdout.strip())
    assert (done.returncode, done.stdout) == (0, "two hosts: the same bits as one host\n"), done.stderr
