"""Only errors that another attempt may not meet are retried."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fivefold.errors import RunFailure
from fivefold.trainer.faults.signals import EXIT_RETRY, TIME
from fivefold.trainer.faults.transient import is_transient
from fivefold.trainer.process import RetryableExit, _raise_first_cause

PASSING = (
    ConnectionResetError("peer"), TimeoutError(), OSError(errno.ENETUNREACH, "Network is unreachable"),
    OSError(errno.EIO, "Input/output error"), dist.DistNetworkError("no route"), dist.DistBackendError("NCCL error"),
    dist.DistStoreError("wait timeout"), RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer"),
    torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
)  # fmt: skip
REPEATED = (
    ValueError("8 is not 9"), KeyError("head"), IndexError(), AttributeError(), NotImplementedError(), AssertionError(),
    RuntimeError("mat1 and mat2 shapes cannot be multiplied"), RuntimeError("Tensor on device meta is not on cpu"),
    OSError(errno.ENOSPC, "No space left on device"), FileNotFoundError("corpus"), MemoryError(),
    torch.OutOfMemoryError("CUDA out of memory"), torch.AcceleratorError("CUDA error: device-side assert triggered"),
)  # fmt: skip


@pytest.mark.parametrize("error", PASSING, ids=lambda error: f"{type(error).__name__} {error}")
def test_transient_failure_is_retried(error: Exception) -> None:
    assert is_transient(error)
    wrapped = ValueError("the batch is lost")
    wrapped.__cause__ = error
    assert is_transient(wrapped)


@pytest.mark.parametrize("error", REPEATED, ids=lambda error: f"{type(error).__name__} {error}")
def test_permanent_failure_is_not_retried(error: Exception) -> None:
    assert not is_transient(error)


def test_an_error_that_was_replaced_on_purpose_does_not_count() -> None:
    error = ValueError("no such layer")
    error.__context__ = ConnectionResetError()
    assert is_transient(error)
    error.__suppress_context__ = True  # as by ``raise … from None``
    assert not is_transient(error)


@pytest.mark.parametrize(
    ("raised", "code", "says"),
    [
        ("ConnectionResetError('peer')", EXIT_RETRY, "rank 1: peer (see {}); the same command continues from"),
        ("KeyError('head')", 1, "rank 1: 'head' (see {}); not started again, because every attempt would end in the"),
    ],
)
def test_a_failed_rank_tells_the_launcher_whether_to_restart(tmp_path: Path, raised: str, code: int, says: str) -> None:
    answer = tmp_path / "answer.json"
    program = f"""
from pathlib import Path
from fivefold.cli.errors import run_with_exit_code
from fivefold.trainer.faults.signals import shorten_errors

def train():
    with shorten_errors(Path({str(tmp_path)!r}), rank=1, answer=Path({str(answer)!r})):
        raise {raised}

raise SystemExit(run_with_exit_code(train))
"""
    environment = os.environ | {"FIVEFOLD_LAUNCHER": str(os.getpid()), "TORCHELASTIC_ERROR_FILE": str(answer)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, check=False)
    assert done.returncode == code
    assert says.format(tmp_path / "stderr-rank1.txt") in answer.read_text()


class Failure:
    """A failed process, as torch's elastic library describes it."""

    local_rank, timestamp = 0, 10

    def __init__(self, code: int) -> None:
        self.exitcode, self.message = code, "rank 0: it failed"
        self.error_file_data: dict[str, Any] = {TIME: 9}


@pytest.mark.parametrize(("code", "raised"), [(EXIT_RETRY, RetryableExit), (1, RunFailure)])
def test_the_exit_code_decides_whether_the_launcher_restarts(
    code: int, raised: type[Exception], tmp_path: Path
) -> None:
    with pytest.raises(raised, match="rank 0: it failed"):
        _raise_first_cause([Failure(code)], signal_name="", folder=tmp_path)
