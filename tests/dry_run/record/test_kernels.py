"""Bytes that the operations of a fused kernel read and write one after another."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fivefold.dry_run.rank_tapes import CATEGORIES, SKIPPED_FILES
from fivefold.dry_run.record.recorder import TapeRecorder

SIZE = 4 * 64  # bytes of x and of y


@pytest.mark.parametrize(
    ("run", "size"),
    [
        (lambda x, y: x.add(y), 3 * SIZE),
        (lambda x, y: x.add_(y), 3 * SIZE),
        (lambda x, _: x.neg_(), 2 * SIZE),
        (lambda x, y: x.copy_(y), 2 * SIZE),
        (lambda x, _: x.zero_(), SIZE),
        (lambda x, y: torch._foreach_add_([x], [y]), 3 * SIZE),
        (lambda x, y: torch.mul(x, y, out=x), 3 * SIZE),
    ],
)
def test_what_an_operation_in_place_writes_is_counted_once(run: Callable[[Tensor, Tensor], object], size: int) -> None:
    recorder = TapeRecorder(rank=0, categories=CATEGORIES, skipped_files=SKIPPED_FILES)
    with FakeTensorMode():
        x, y = torch.ones(64), torch.ones(64)
        with recorder:
            run(x, y)
            recorder.append_events(np.zeros((0, 4), np.int64), live_bytes=0)  # ends the kernel
    assert [kernel.unfused_bytes for kernel in recorder.tape.kernels] == [size]
