"""The planned temporaries and FLOPs of scans are those of the trainer's operations, to the byte."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fivefold.model.mixers.gated_delta_net import GatedDeltaNet
from fivefold.model.mixers.kimi_delta import KimiDelta
from fivefold.model.mixers.lightning import Lightning
from fivefold.model.mixers.mamba2 import Mamba2
from fivefold.planner.counts.operations.mixers import gated_delta_net as planned_gated_delta_net
from fivefold.planner.counts.operations.mixers import kimi_delta as planned_kimi_delta
from fivefold.planner.counts.operations.mixers import lightning as planned_lightning
from fivefold.planner.counts.operations.mixers import mamba2 as planned_mamba2
from fivefold.trainer.model.mixers import gated_delta_net, kimi_delta, lightning, mamba2
from fivefold.trainer.model.mixers.chunks import GroupFunction, scan_backward, scan_forward
from tests.selection import mark_share

KIMI = KimiDelta(heads=3, dim=20)
GATED = GatedDeltaNet(key_heads=2, value_heads=4, key_dim=12, value_dim=20)
LIGHTNING = Lightning(heads=4, dim=12, chunk=16)
MAMBA2 = Mamba2(heads=4, head_dim=12, state=10, groups=2, chunk=16)


class Scan(NamedTuple):
    """A scan as the trainer runs it and as it is planned."""

    run: GroupFunction
    columns: tuple[int, ...]
    factors: tuple[int, ...]
    out_columns: int
    chunk: int
    planned: Any
    net: Any


SCANS = {
    "kimi_delta": Scan(
        partial(kimi_delta.compute_chunks, shape=KIMI), (60, 60, 60, 60, 3), (3, 60), 60, 64, planned_kimi_delta, KIMI
    ),
    "bounded kimi_delta": Scan(
        partial(kimi_delta.compute_chunks, shape=KIMI.replace(lower_bound=-5.0)),
        *((60, 60, 60, 60, 3), (3, 60), 60, 64, planned_kimi_delta, KIMI.replace(lower_bound=-5.0)),
    ),
    "gated_delta_net": Scan(
        partial(gated_delta_net.compute_chunks, shape=GATED),
        *((24, 24, 80, 4, 4), (4, 4), 80, 64, planned_gated_delta_net, GATED),
    ),
    "lightning": Scan(
        partial(lightning.compute_chunks, rates=(0.1, 0.2, 0.3, 0.4), size=16),
        *((144,), (), 48, 16, planned_lightning, LIGHTNING),
    ),
    "mamba2": Scan(partial(mamba2.compute_chunks, shape=MAMBA2), (88, 4), (4, 4, 4), 48, 16, planned_mamba2, MAMBA2),
}


class StorageMeter(TorchDispatchMode):
    """Counts the bytes of storages that operations make and that live at once."""

    def __init__(self, known: Sequence[Tensor]) -> None:
        super().__init__()
        self.sizes = {tensor.untyped_storage()._cdata: 0 for tensor in known}
        self.live = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, Tensor) and (storage := tensor.untyped_storage())._cdata not in self.sizes:
                self.sizes[storage._cdata] = storage.nbytes()
                self.live += storage.nbytes()
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self.free, storage._cdata)
        return out

    def free(self, key: int) -> None:
        """Count a storage no longer."""
        self.live -= self.sizes.pop(key)


def measure(scan: Scan, *, sequences: int, groups: list[int], dtype: torch.dtype) -> tuple[int, int]:
    """Return the bytes that the trainer's scan allocates next to its inputs, outputs and gradients."""
    tokens, generator = sequences * sum(groups), torch.Generator().manual_seed(0)
    rows = [torch.randn(tokens, columns, generator=generator).to(dtype) for columns in scan.columns]
    factors = [torch.randn(number, generator=generator).to(dtype) for number in scan.factors]
    out_grad = torch.randn(tokens, scan.out_columns, generator=generator).to(dtype)
    grads = [torch.zeros_like(row) for row in rows]
    known = (*rows, *factors, out_grad, *grads)
    with StorageMeter(known) as forward, torch.no_grad():
        scan_forward(scan.run, rows, factors, columns=scan.out_columns, groups=groups)
    with StorageMeter(known) as backward, torch.no_grad():
        scan_backward(scan.run, rows, factors, out_grad, grads=grads, groups=groups)
    factor_grads = 4 * sum(scan.factors)  # the sums over all groups
    return forward.peak - out_grad.nbytes, backward.peak - factor_grads


@pytest.mark.parametrize(
    ("sequences", "dtype"),
    mark_share(4, [(3, torch.bfloat16), (1, torch.bfloat16), (1, torch.float32), (3, torch.float32)]),
)
@pytest.mark.parametrize("name", SCANS)
def test_temporaries_of_scans_are_planned_to_the_byte(name: str, sequences: int, dtype: torch.dtype) -> None:
    scan = SCANS[name]
    for sixteenths in ([7], [48], [16, 16, 5], [32, 32, 8]):
        groups = [tokens * scan.chunk // 16 - (tokens % 16 > 0) for tokens in sixteenths]
        planned = scan.planned.count_scan_scratch(scan.net, sequences, groups, width=dtype.itemsize)
        assert planned == measure(scan, sequences=sequences, groups=groups, dtype=dtype), groups
