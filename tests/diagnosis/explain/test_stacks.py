"""Stacks of hangs: by Python's own faulthandler, by py-spy as people have posted it, of one rank and of many."""

from __future__ import annotations

import faulthandler
import threading
from pathlib import Path

import pytest

from fivefold.diagnosis.explain import explain as explain_files
from fivefold.diagnosis.explain.stacks import explain, is_stacks

WAITS = """Process 7: python train.py
Python v3.10.12 (/usr/bin/python3.10)

Thread 7 (idle): "MainThread"
    all_reduce (torch/distributed/distributed_c10d.py:1992)
    wrapper (torch/distributed/c10d_logger.py:47)
    sync (job/train.py:{line})
    <module> (job/train.py:90)
Thread 9 (active): "Thread-1"
    wait (threading.py:324)
"""
POSTED = """Thread 42 (idle): "MainThread"
    backward (torch/autograd/__init__.py:266)
    backward (torch/_tensor.py:522)
    backward (deepspeed/runtime/fp16/loss_scaler.py:63)
    training_loop (src/model_back/healing/scripts/fine_tune_accelerate.py:410)
    main (src/model_back/healing/scripts/fine_tune_accelerate.py:583)
    <module> (src/model_back/healing/scripts/fine_tune_accelerate.py:587)
Thread 928 (idle): "Thread-1"
    wait (threading.py:324)
    run (tqdm/_monitor.py:60)
Thread 4076 (idle)
Thread 4079 (active)
    all_gather_into_tensor (torch/distributed/distributed_c10d.py:2709)
"""  # huggingface/accelerate#3104
OTHER = {
    "waits for data": "    _try_get_data (torch/utils/data/dataloader.py:1132)\n",
    "writes or reads a checkpoint": "    _save (torch/serialization.py:850)\n",
    "compiles": "    compile_fx (torch/_inductor/compile_fx.py:99)\n",
    "waits for the device": "    synchronize (torch/cuda/__init__.py:792)\n",
    "runs": "    tokenize (job/data.py:7)\n",
}


def test_a_faulthandler_dump_is_read(tmp_path: Path) -> None:
    """The thread that writes is not the main one, as in a watchdog."""
    path = tmp_path / "stacks-rank0.txt"

    def write() -> None:
        with path.open("w") as file:
            faulthandler.dump_traceback(file, all_threads=True)

    thread = threading.Thread(target=write)
    thread.start()
    thread.join()
    assert is_stacks(path.read_text())
    (result,) = explain_files([path])
    assert result.ranks[0].rank == "0"
    assert result.ranks[0].line.startswith(("tests/diagnosis/explain/test_stacks.py:", "test_stacks.py:"))
    assert result.ranks[0].line.endswith("test_a_faulthandler_dump_is_read")


@pytest.mark.parametrize("state", OTHER)
def test_the_explanation_names_the_rank_that_does_not_wait_for_peers(state: str) -> None:
    there = WAITS.format(line=31).replace("    all_reduce (torch/distributed/distributed_c10d.py:1992)\n", OTHER[state])
    there = there.replace("    wrapper (torch/distributed/c10d_logger.py:47)\n", "")
    result = explain({"0": WAITS.format(line=31), "1": there, "2": WAITS.format(line=31)}, files=("x",))
    where = "job/data.py:7 tokenize" if state == "runs" else "job/train.py:31 sync"
    line = f"rank 1 did not come: it {state} at {where}, while ranks 0, 2 wait in all_reduce at job/train.py:31 sync"
    assert result.verdict == line
    assert [at.state for at in result.ranks] == ["waits in all_reduce", state, "waits in all_reduce"]


def test_ranks_in_different_collectives_or_lines_are_reported() -> None:
    other = WAITS.format(line=31).replace("all_reduce", "barrier")
    result = explain({"0": WAITS.format(line=31), "1": other}, files=("x",))
    assert result.verdict.startswith(
        "the ranks wait in different collectives: rank 0 waits in all_reduce at job/train.py"
    )
    lines = explain({"0": WAITS.format(line=31), "1": WAITS.format(line=32)}, files=("x",))
    assert "called from different lines" in lines.verdict
    same = explain({"0": WAITS.format(line=31), "1": WAITS.format(line=31)}, files=("x",))
    assert same.verdict.startswith("all 2 ranks wait in all_reduce at job/train.py:31 sync")


def test_stacks_of_several_processes_in_one_file_are_told_apart() -> None:
    result = explain(
        {"log": WAITS.format(line=31) + WAITS.format(line=31).replace("Process 7", "Process 8")}, files=("x",)
    )
    assert [at.rank for at in result.ranks] == ["process 7", "process 8"]


def test_published_reports_are_explained() -> None:
    result = explain({"log": POSTED}, files=("x",))
    assert result.ranks[0].state == "runs the backward"
    assert "one process do not tell" in result.findings[0]
