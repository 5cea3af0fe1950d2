"""Compiles what the workers of pytest-xdist will import, a share each, where every worker would compile all of it.

A fresh checkout has no bytecode, and the workers import the same files at the same time. To rewrite the assertions of
400 files takes ten seconds of CPU.
"""

from __future__ import annotations

import compileall
import os
import sys
from pathlib import Path

import pytest
from _pytest.assertion import rewrite
from _pytest.assertion.rewrite import assertstate_key

ROOT = Path(__file__).parents[1]


def compile_share(config: pytest.Config) -> None:
    """Compile each file whose number is this worker's; the others of a worker's peers are then read."""
    if sys.dont_write_bytecode or assertstate_key not in config.stash:
        return
    number = int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw"))
    files = sorted(path for folder in ("fivefold", "benchmarks", "tests") for path in (ROOT / folder).rglob("*.py"))
    for path in files[number :: int(os.environ["PYTEST_XDIST_WORKER_COUNT"])]:
        if path.name.startswith("test_") or path.name == "conftest.py":
            rewrite_assertions(path, config)
        else:
            compileall.compile_file(path, quiet=2)


def rewrite_assertions(path: Path, config: pytest.Config) -> None:
    """Store the bytecode of a test file as pytest does when it imports one."""
    folder = rewrite.get_cache_dir(path)
    stored = folder / f"{path.stem}{rewrite.PYC_TAIL}"
    if rewrite._read_pyc(path, stored) is None and rewrite.try_makedirs(folder):
        source_hash, code = rewrite._rewrite_test(path, config)
        rewrite._write_pyc(config.stash[assertstate_key], code, source_hash, stored)
