"""Classifies torch operations as GPU kernels: matmul, attention, or memory-bound ("moving", counted in bytes).

Consecutive elementwise operations of one function call count as one kernel, since a GPU would run them fused: it
reads the bytes that existed before and writes the bytes that outlive it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor

from fivefold.dry_run.record.tape import CodeSite
from fivefold.planner.time.roofline import ALIGNED, find_alignment
from fivefold.trainer.measure.meter import (
    ATTENTION_BACKWARD,
    ATTENTION_FORWARD,
    CAST_MATMULS,
    CHOOSE_COMPRESSED,
    CHOOSE_KEYS,
    COMPRESSED_BACKWARD,
    COMPRESSED_FORWARD,
    GROUPED_INNER,
    GROUPED_MATMULS,
    MATMULS,
    SPARSE_BACKWARD,
    SPARSE_FORWARD,
    find_window,
    list_tensors,
)
from fivefold.trainer.measure.meter import GROUPED as GROUPED_FLOAT8

aten = torch.ops.aten
OPERATIONS_WITHOUT_KERNEL = frozenset(
    {"empty", "new_empty", "lift_fresh", "_unsafe_view", "empty_like", "_local_scalar_dense", "set_", "detach_"}
)
WRITE_ONLY_OPERATIONS = frozenset(
    {"copy_", "zero_", "fill_", "_foreach_copy_", "_foreach_zero_"}
)  # write their target, do not read it


def classify_kernel(func: Any, args: Any, out: Any) -> tuple[str, tuple[int, ...]]:
    """Return kind and shape of an operation's kernel, as in ``tape.Kernel``; for grouped matmuls, of the mean group."""
    if func in MATMULS:
        inner = int(args[MATMULS[func]].shape[-1])
        *batch, rows, columns = out.shape
        return "matmul", (rows, columns, inner, batch[0] if batch else 1)
    if func is torch.ops.aten.linalg_solve_triangular.default:  # n² FLOPs per column: half of a product's
        *leading, rows, columns = out.shape
        return "matmul", (rows, columns, -(-rows // 2), prod(leading))
    if isinstance(out, tuple) and (func in CAST_MATMULS or func in GROUPED_FLOAT8):
        out = out[0]  # a cast
    if func in CAST_MATMULS:
        return "matmul", (*out.shape, args[CAST_MATMULS[func]], 1)
    if func in GROUPED_MATMULS:
        left, right = args[0], args[1]
        if right.dim() == 3:  # [n, K] by [E, K, N]: rows times the matrix of their group
            return "matmul", (-(-left.shape[0] // right.shape[0]), right.shape[2], left.shape[1], right.shape[0])
        groups = out.shape[0]
        return "matmul", (left.shape[0], right.shape[1], -(-left.shape[1] // groups), groups)
    if func in GROUPED_FLOAT8:
        rows = args[0].shape[0]
        right = args[3].shape
        inner = args[GROUPED_INNER]
        if GROUPED_FLOAT8[func]:  # [n, K] by [E, N, K]
            return "matmul", (-(-rows // right[0]), right[1], inner, right[0])
        return "matmul", (rows, right[0], -(-inner // out.shape[0]), out.shape[0])  # [M, n] by [N, n]
    if func in ATTENTION_FORWARD or func in ATTENTION_BACKWARD:
        q, k = args[:2] if func in ATTENTION_FORWARD else args[1:3]
        window = find_window(func, args)
        kind = "attention" if window is None else "attention_window"
        keys = k.shape[2] if window is None else min(window.keys, k.shape[2])
        suffix = "_backward" if func in ATTENTION_BACKWARD else ""
        return kind + suffix, (q.shape[0] * q.shape[1], q.shape[2], keys, q.shape[3])
    if func is CHOOSE_KEYS:
        (rows, heads, dim), tokens = args[0].shape, args[4]
        return "attention", (max(1, rows * heads // tokens), tokens, tokens, dim)
    if func is CHOOSE_COMPRESSED:
        (rows, heads, dim), tokens, rate = args[0].shape, args[3], args[4]
        return "attention", (max(1, rows * heads // tokens), tokens, tokens // rate, dim)
    if func in (COMPRESSED_FORWARD, COMPRESSED_BACKWARD):
        is_backward = func is COMPRESSED_BACKWARD
        q, chosen, *settings = (args[1], args[4], *args[7:10]) if is_backward else (args[0], *args[3:7])
        tokens, window, rate = settings
        rows, heads, dim = q.shape
        kind = "attention_window_backward" if is_backward else "attention_window"
        keys = tokens // rate if rate and chosen is None else 0 if chosen is None else chosen.shape[1]
        return kind, (rows // tokens * heads, tokens, min(window, tokens) + keys, dim)
    if func in (SPARSE_FORWARD, SPARSE_BACKWARD):
        is_backward = func is SPARSE_BACKWARD
        q, chosen, tokens = (args[1], args[3], args[6]) if is_backward else (args[0], args[2], args[3])
        rows, heads, dim = q.shape
        kind = "attention_window_backward" if is_backward else "attention_window"
        return kind, (rows // tokens * heads, tokens, chosen.shape[1], dim)
    return "moving", ()


def find_matmul_alignment(func: Any, args: Any, outputs: list[Tensor]) -> int:
    """Return the elements that all rows of a matmul's operands and result begin at a multiple of, at most ``ALIGNED``.

    Matmuls in fp8 and fp4, which exist for aligned rows only, are aligned.
    """
    if func not in MATMULS and func not in GROUPED_MATMULS:
        return ALIGNED
    matrices = [tensor for tensor in (*list_tensors(args), *outputs) if tensor.dim() > 1]
    return find_alignment(
        *(
            stride
            for matrix in matrices
            for size, stride in zip(matrix.shape, matrix.stride(), strict=True)
            if size > 1 and stride > 1
        )
    )


class FusedKernel:
    """A fused kernel: the elementwise operations of one function call, or of one iteration of its loop.

    It keeps the code object, not the frame: a frame would keep the call's tensors alive.
    """

    def __init__(self, code: CodeType, site: CodeSite, dtype: str) -> None:
        self.code, self.last_instruction = code, -1
        self.site, self.dtype, self.operations, self.unfused_bytes = site, dtype, 0, 0
        self._read: dict[int, dict[StorageRange, int]] = {}  # bytes by storage, and range within it
        self._wrote: dict[int, dict[StorageRange, int]] = {}

    def can_continue(self, frame: FrameType) -> bool:
        """Return whether ``frame`` may be the same call: a new call or iteration is at an earlier instruction."""
        return frame.f_code is self.code and frame.f_lasti > self.last_instruction

    def add(self, func: Any, args: Any, outputs: list[Tensor], *, ids: dict[int, int]) -> None:
        """Add one operation. ``outputs``: its new tensors; ``ids``: storage ids by address."""
        self.operations += 1
        # an operation in place returns a tensor that it has written
        written_tensors = list({id(tensor): tensor for tensor in (*outputs, *_list_written(func, args))}.values())
        is_write_only = func._opname in WRITE_ONLY_OPERATIONS
        unread_ids = {id(tensor) for tensor in written_tensors} if is_write_only else frozenset()
        for tensor in list_tensors(args):
            storage_id, storage_range = _find_storage_range(tensor, ids)
            if id(tensor) in unread_ids:
                continue
            self.unfused_bytes += tensor.nbytes
            if storage_id not in self._wrote:
                self._read.setdefault(storage_id, {})[storage_range] = tensor.nbytes
        for tensor in written_tensors:
            self.unfused_bytes += tensor.nbytes
            storage_id, storage_range = _find_storage_range(tensor, ids)
            self._wrote.setdefault(storage_id, {})[storage_range] = tensor.nbytes

    def count_moved_bytes(self, live_storages: Mapping[int, tuple[int, CodeSite]]) -> int:
        """Return bytes read from older storages plus bytes written to ``live_storages``, at most the size of each."""

        def total(ranges_of_storage: dict[int, dict[StorageRange, int]], kept: bool) -> int:
            sizes = [
                (sum(bytes_of_range.values()), live_storages.get(storage_id))
                for storage_id, bytes_of_range in ranges_of_storage.items()
            ]
            return sum(min(size, storage[0]) if storage else 0 if kept else size for size, storage in sizes)

        return total(self._read, False) + total(self._wrote, True)


StorageRange = tuple[int, torch.Size]  # a range of a storage: offset in elements, and the tensor's shape


def _find_storage_range(tensor: Tensor, ids: Mapping[int, int]) -> tuple[int, StorageRange]:
    return ids.get(tensor.untyped_storage()._cdata, -1), (int(tensor.storage_offset()), tensor.size())


def _list_written(func: Any, args: Any) -> Iterator[Tensor]:
    """Yield the arguments that an operation writes in place, by its schema."""
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from list_tensors(value)


def allocate_grouped(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """Return an empty result of a grouped matmul, in any dtype: torch's fake implementation takes bf16 only."""
    groups = () if right.dim() == 3 else (ends.shape[0],)
    return left.new_empty(*groups, left.shape[0], right.shape[-1])
