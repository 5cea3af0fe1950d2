"""A forked ``python -m fivefold`` is to its caller what a new interpreter is."""

from __future__ import annotations

import mmap
import os
import platform
import random
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.forked_python import DEFAULT_TORCH_SEED, HUGE_PAGE, _join_pages, find_module, true_interpreters
from tests.selection import mark_share

PREDICT = [sys.executable, "-m", "fivefold", "predict", "nano", "h100:8", "dp8"]


def run(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*PREDICT, *words], capture_output=True, text=True, check=False, **options)


@pytest.mark.parametrize(
    "words",
    mark_share(3, [pytest.param(("--json",)), pytest.param(("--gbs", "many")), pytest.param(("--set", "stepz=3"))]),
)
def test_forked_python_prints_and_exits_like_an_interpreter(words: tuple[str, ...], tmp_path: Path) -> None:
    forked = run(*words, cwd=tmp_path)
    with true_interpreters():
        true = run(*words, cwd=tmp_path)
    assert (forked.returncode, forked.stdout, forked.stderr) == (true.returncode, true.stdout, true.stderr)


def test_only_the_package_itself_is_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_module([sys.executable, "-P", "-m", "fivefold.web.worker", "search"]) == [
        "fivefold.web.worker",
        "search",
    ]
    assert find_module([sys.executable, "-c", "import torch"]) is None
    assert find_module([sys.executable, "-m", "torch.distributed.run", "-m", "fivefold"]) is None
    assert find_module("python -m fivefold") is None
    monkeypatch.setattr(sys, "executable", "another")
    assert find_module(["another", "-m", "fivefold"]) is None


@pytest.fixture
def probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replace the module ``fivefold.__main__`` by one that prints what it finds, and then waits for its input."""
    path = tmp_path / "probe.py"
    path.write_text(
        "import os, random, signal, sys, torch\n"
        "open_files = [os.readlink(f'/proc/self/fd/{name}') for name in os.listdir('/proc/self/fd')"
        " if int(name) > 2 and os.path.exists(f'/proc/self/fd/{name}')]\n"
        "print(torch.initial_seed(), torch.get_default_dtype(), os.environ.get('PROBE'), os.getcwd(),\n"
        "      os.getsid(0) == os.getpid(), signal.getsignal(signal.SIGTERM) == signal.SIG_DFL,\n"
        "      all(name == os.devnull or name.startswith('/proc') for name in open_files), random.random(),\n"
        "      flush=True)\n"
        "sys.exit(int(sys.stdin.read()))\n"
    )
    monkeypatch.setattr("runpy.run_module", lambda *_, **__: exec(compile(path.read_text(), path, "exec"), {}))
    return tmp_path


def test_a_forked_python_starts_with_the_state_of_a_new_process(probe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seeds, dtypes, variables, descriptors and handlers are those of a new process; the parent's stay as they are."""
    monkeypatch.setenv("PROBE", "parent")
    former = signal.signal(signal.SIGTERM, lambda *_: None)
    torch.manual_seed(5)
    torch.set_default_dtype(torch.float64)
    random.seed(7)
    drawn = random.random()
    random.seed(7)
    try:
        with (
            (probe / "open.txt").open("w"),
            subprocess.Popen(
                PREDICT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=probe,
                env=os.environ | {"PROBE": "child"},
                start_new_session=True,
            ) as child,
        ):
            assert child.stdin
            assert child.stdout
            assert child.poll() is None
            seed, dtype, variable, folder, leads, default, closed, number = child.stdout.readline().split()
            child.stdin.write("3")
            child.stdin.close()
            assert child.wait(timeout=60) == 3
    finally:
        torch.set_default_dtype(torch.float32)
        signal.signal(signal.SIGTERM, former)
    assert (seed, dtype) == (str(DEFAULT_TORCH_SEED), "torch.float32")
    assert (variable, folder, leads, default, closed) == ("child", str(probe), "True", "True", "True")
    assert float(number) != drawn
    assert (torch.initial_seed(), random.random()) == (5, drawn)


def test_a_signal_ends_a_forked_python(probe: Path) -> None:
    with subprocess.Popen(PREDICT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=probe) as child:
        assert child.stdout
        child.stdout.readline()
        child.send_signal(signal.SIGTERM)
        assert child.wait(timeout=60) == -signal.SIGTERM


@pytest.mark.slow
@pytest.mark.skipif(tuple(map(int, platform.release().split(".")[:2])) < (6, 1), reason="Linux 6.1 joins pages")
def test_pages_are_joined_before_a_fork() -> None:
    def read_huge() -> int:
        return int(re.findall(r"AnonHugePages: +(\d+) kB", Path("/proc/self/smaps_rollup").read_text())[0])

    with mmap.mmap(-1, 8 * HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as written:
        for page in range(0, len(written), mmap.PAGESIZE):
            written[page] = 1
        _join_pages()
        joined = read_huge()
    assert joined - read_huge() >= 7 * HUGE_PAGE // 1024
