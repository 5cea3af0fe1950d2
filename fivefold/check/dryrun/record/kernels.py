"""What a GPU would do for an operation of torch: a matmul, attention, or bytes moved.

Elementwise operations that one call of a function runs in a row count as one kernel, as it is on GPUs where they are
fused: it reads what was there before and writes what is left.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor

from fivefold.check.dryrun.record.tape import Site
from fivefold.train.measure.meter import ATTENTION_BACKWARD, ATTENTION_FORWARD, MATMULS, tensors
from fivefold.train.measure.meter import GROUPED as GROUPED_FLOAT8

aten = torch.ops.aten
GROUPED = (aten._grouped_mm.default,)
NO_WORK = frozenset({
    "empty", "new_empty", "lift_fresh", "_unsafe_view", "empty_like", "_local_scalar_dense", "set_", "detach_",
})  # fmt: skip
FILLS = frozenset({"copy_", "zero_", "fill_", "_foreach_copy_", "_foreach_zero_"})  # what they write they do not read


def kind_of(func: Any, args: Any, out: Any) -> tuple[str, tuple[int, ...]]:
    """What a price wants to know of an operation."""
    if func in MATMULS:
        inner = int(args[MATMULS[func]].shape[-1])
        *batch, rows, columns = out.shape
        return "matmul", (rows, columns, inner, batch[0] if batch else 1)
    if func in GROUPED:
        left, right = args[0], args[1]
        if right.dim() == 3:  # rows by the matrix of their group
            return "matmul", (-(-left.shape[0] // right.shape[0]), right.shape[2], left.shape[1], right.shape[0])
        groups = out.shape[0]
        return "matmul", (left.shape[0], right.shape[1], -(-left.shape[1] // groups), groups)
    if func in GROUPED_FLOAT8:
        (rows, inner), right = args[0].shape, args[2].shape
        if GROUPED_FLOAT8[func]:  # [n, K] by [E, N, K]
            return "matmul", (-(-rows // right[0]), right[1], inner, right[0])
        return "matmul", (rows, right[0], -(-inner // out.shape[0]), out.shape[0])  # [M, n] by [N, n]
    if func in ATTENTION_FORWARD:
        q, k = args[0], args[1]
        return "attention", (q.shape[0] * q.shape[1], q.shape[2], k.shape[2], q.shape[3])
    if func in ATTENTION_BACKWARD:
        q, k = args[1], args[2]
        return "attention_backward", (q.shape[0] * q.shape[1], q.shape[2], k.shape[2], q.shape[3])
    return "moving", ()


class Fused:
    """Elementwise operations of one call of a function, or of one round of its loop.

    The frame is not held: it would keep alive what it holds.
    """

    def __init__(self, code: CodeType, site: Site, dtype: str) -> None:
        self.code, self.last = code, -1
        self.site, self.dtype, self.operations = site, dtype, 0
        self._before: dict[int, dict[Part, int]] = {}  # bytes that were there, by storage and part
        self._made: dict[int, dict[Part, int]] = {}

    def goes_on(self, frame: FrameType) -> bool:
        """Whether it may be the same call: a new one begins further up."""
        return frame.f_code is self.code and frame.f_lasti > self.last

    def add(self, func: Any, args: Any, made: list[Tensor], *, ids: dict[int, int]) -> None:
        """One of them."""
        self.operations += 1
        written = [*made, *_written(func, args)]
        fills = func._opname in FILLS or func._overloadname == "out"
        unread = {id(tensor) for tensor in written} if fills else frozenset()
        for tensor in tensors(args):
            key, part = _part(tensor, ids)
            if id(tensor) not in unread and key not in self._made:
                self._before.setdefault(key, {})[part] = tensor.nbytes
        for tensor in written:
            key, part = _part(tensor, ids)
            self._made.setdefault(key, {})[part] = tensor.nbytes

    def moved(self, living: Mapping[int, tuple[int, Site]]) -> int:
        """Bytes read that were there, and bytes written that are left; of one storage no more than it has."""

        def total(parts: dict[int, dict[Part, int]], kept: bool) -> int:
            sizes = [(sum(found.values()), living.get(key)) for key, found in parts.items()]
            return sum(min(size, known[0]) if known else 0 if kept else size for size, known in sizes)

        return total(self._before, False) + total(self._made, True)


Part = tuple[int, torch.Size]  # of a storage: where it begins, and its size


def _part(tensor: Tensor, ids: Mapping[int, int]) -> tuple[int, Part]:
    return ids.get(tensor.untyped_storage()._cdata, -1), (int(tensor.storage_offset()), tensor.size())


def _written(func: Any, args: Any) -> Iterator[Tensor]:
    """What an operation changes in place."""
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from tensors(value)


def by_group(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """What a grouped matmul makes, in any dtype: torch knows it of fake tensors in bf16 alone."""
    groups = () if right.dim() == 3 else (ends.shape[0],)
    return left.new_empty(*groups, left.shape[0], right.shape[-1])
