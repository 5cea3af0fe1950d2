"""Measures one training step in a ``TorchDispatchMode``, below autograd: live bytes, FLOPs, messages.

torch has no memory statistics on CPU, so every storage is counted from the operation that allocates it until it is
freed. A matmul of (m, k) x (k, n) is 2·m·k·n FLOPs; attention counts all T x S scores, backward twice forward. Compiled
functions run eagerly meanwhile: under a mode the compiler would skip them, and ever after.
"""

from __future__ import annotations

import resource
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode

import fivefold.trainer.model.float8.grouped
import fivefold.trainer.model.mixers.compressed_core
import fivefold.trainer.model.sliding_window_attention
import fivefold.trainer.model.sparse_attention
import fivefold.trainer.model.tf32  # noqa: F401  likewise
from fivefold.model.mixers.compressed_attention import count_pairs
from fivefold.step import Traffic, count_sent_bytes
from fivefold.trainer.model.attention_mask import count_visible_pairs
from fivefold.trainer.parallel.host_memory import is_host_memory, use_host_memory

aten, c10d = torch.ops.aten, torch.ops.c10d

# operation → index of the argument that is the left matrix
MATMULS = {
    aten.mm.default: 0,
    aten.mm.out: 0,
    aten.bmm.default: 0,
    aten.bmm.out: 0,
    aten.baddbmm_.default: 1,
    aten.baddbmm.out: 1,
    aten.addmm.default: 1,
    aten.addmm_.default: 1,
    aten.addmm.out: 1,
    aten.baddbmm.default: 1,
    torch.ops.fivefold.tf32_mm.default: 0,
}
# product of casts → index of the argument that is the size of the dim summed over
CAST_MATMULS = {torch.ops.fivefold.scaled_mm.default: 6, torch.ops.fivefold.scaled_mm_cast.default: 6}
# grouped GEMM → True: rows of each group by the group's matrix; False: sums over each group's rows (wgrad)
GROUPED = {
    torch.ops.fivefold.scaled_by_group.default: True,
    torch.ops.fivefold.scaled_sums.default: False,
    torch.ops.fivefold.scaled_sums_cast.default: False,
}
GROUPED_INNER = 7  # index of their argument that is the size of the dim summed over
GROUPED_MATMULS = (aten._grouped_mm.default, torch.ops.fivefold.mm_by_group.default)
# our sliding-window attention → index of the first argument after tensors: scale, offset, window, softcap
BANDS = {torch.ops.fivefold.band_attention.default: 3, torch.ops.fivefold.band_attention_backward.default: 6}
ATTENTION_FORWARD = (
    torch.ops.fivefold.band_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
)
ATTENTION_BACKWARD = (
    torch.ops.fivefold.band_attention_backward.default,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    aten._scaled_dot_product_flash_attention_backward.default,
    aten._scaled_dot_product_efficient_attention_backward.default,
    aten._scaled_dot_product_cudnn_attention_backward.default,
)
CHOOSE_KEYS = torch.ops.fivefold.choose_keys.default
CHOOSE_COMPRESSED = torch.ops.fivefold.choose_compressed_keys.default
COMPRESSED_FORWARD = torch.ops.fivefold.compressed_attention.default
COMPRESSED_BACKWARD = torch.ops.fivefold.compressed_attention_backward.default
SPARSE_FORWARD = torch.ops.fivefold.sparse_attention.default
SPARSE_BACKWARD = torch.ops.fivefold.sparse_attention_backward.default
# operation → (collective, index of the argument that is the full, unsharded tensor)
COLLECTIVES = {
    c10d.allreduce_.default: ("all_reduce", 0),
    c10d._allgather_base_.default: ("all_gather", 0),
    c10d._reduce_scatter_base_.default: ("reduce_scatter", 1),
    c10d.alltoall_base_.default: ("all_to_all", 1),
    c10d.broadcast_.default: ("broadcast", 0),
    c10d.send.default: ("p2p", 0),
}


class StepObserver(Protocol):
    """The interface by which the trainer observes a step: it sets ``phase`` and reads the bytes that are alive."""

    phase: str
    live_bytes: int


class Meter(TorchDispatchMode):
    """A meter that counts while it is entered, bytes on the device and in host memory separately.

    ``living``: tensors on the device that were allocated before; ``on_host``: those in host memory; ``axis``: group
    name → axis.
    """

    def __init__(self, living: Iterable[Tensor], *, axis: Callable[[str], str], on_host: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._axis, self._uncompiled = axis, ExitStack()
        self._sizes: dict[int, int] = {}
        self._on_host: set[int] = set()
        self.live_bytes = self.peak_bytes = self.flops = self.host_live_bytes = self.host_peak_bytes = 0
        self.peak_cause = self.phase = ""
        self._messages: Counter[tuple[str, str]] = Counter()
        self._sent: Counter[tuple[str, str]] = Counter()
        for tensor in living:
            self._track_storage(tensor)
        with use_host_memory():
            for tensor in on_host:
                self._track_storage(tensor)
        self.base_bytes = self.peak_bytes = self.live_bytes

    def __enter__(self) -> Any:
        """Start counting."""
        if "torch._dynamo" in sys.modules:
            self._uncompiled.enter_context(torch.compiler.set_stance("force_eager"))
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        """Stop counting."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._uncompiled.close()

    @property
    def traffic(self) -> tuple[Traffic, ...]:
        """Return messages and bytes that this rank sent, by axis and collective."""
        return tuple(
            Traffic(axis=axis, collective=collective, calls=count, bytes=self._sent[axis, collective])
            for (axis, collective), count in sorted(self._messages.items())
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, then count it."""
        out = func(*args, **(kwargs or {}))
        if func in COLLECTIVES:
            self._count_message(func, args)
        elif func is torch.ops.inductor.resize_storage_bytes_.default:
            self._resize(args[0])
        else:
            self.flops += count_operation_flops(func, args, out)
            # a view allocates nothing, except the result of torch.tensor; gloo's ``wait`` takes views of its buffers
            if not func.is_view or func is aten.lift_fresh.default:
                for tensor in list_tensors(out):
                    self._track_storage(tensor)
        if self.live_bytes > self.peak_bytes:
            self.peak_bytes = self.live_bytes
            self.peak_cause = f"{self.phase} {func.name().split('::')[-1]}".strip()
        return out

    def _track_storage(self, tensor: Tensor) -> None:
        """Count the storage of ``tensor`` if it is new, until it is freed."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._sizes:
            self._track_result(storage)

    def _track_result(self, storage: torch.UntypedStorage) -> None:
        self._sizes[storage._cdata] = storage.nbytes()
        if is_host_memory():
            self._on_host.add(storage._cdata)
            self.host_live_bytes += storage.nbytes()
            self.host_peak_bytes = max(self.host_peak_bytes, self.host_live_bytes)
        else:
            self.live_bytes += storage.nbytes()
        weakref.finalize(storage, self._remove_storage, storage._cdata)

    def _remove_storage(self, key: int) -> None:
        size = self._sizes.pop(key)
        if key in self._on_host:
            self._on_host.remove(key)
            self.host_live_bytes -= size
        else:
            self.live_bytes -= size

    def _resize(self, tensor: Tensor) -> None:
        """Count a storage that was resized in place, as ZeRO does to free gathered weights."""
        storage = tensor.untyped_storage()
        self.live_bytes += storage.nbytes() - self._sizes.get(storage._cdata, 0)
        self._sizes[storage._cdata] = storage.nbytes()

    def _count_message(self, func: Any, args: Any) -> None:
        """Count a c10d operation: one message, and the bytes that this rank sends in it."""
        collective, full = COLLECTIVES[func]
        group = find_group(args)
        payload = sum(tensor.nbytes for tensor in list_tensors(args[full]))
        key = self._axis(group.group_name), collective
        self._messages[key] += 1
        self._sent[key] += count_sent_bytes(collective, payload=payload, ranks=group.size())


def read_resident_bytes() -> int:
    """Return the peak bytes so far: reserved by torch's allocator on a GPU; resident set of the process on CPU."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_reserved()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def find_group(args: Any) -> Any:
    """Return the process group among the arguments of a c10d operation."""
    return next(ProcessGroup.unbox(a) for a in args if isinstance(a, torch.ScriptObject) and is_group(a))


def is_group(value: Any) -> bool:
    """Return whether a ``torch.ScriptObject`` is a process group."""
    return bool(value._type().name() == "ProcessGroup")


def list_tensors(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors of ``tree``: an argument or a result of an operation, or sequences of them."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, list | tuple):
        for part in tree:
            yield from list_tensors(part)


def count_operation_flops(func: Any, args: Any, out: Any) -> int:
    """Count the FLOPs of one operation; 0 for all but GEMMs, triangular solves and attention."""
    if isinstance(out, tuple) and (func in CAST_MATMULS or func in GROUPED):
        out = out[0]  # a cast
    if func in MATMULS:
        return 2 * int(out.numel()) * int(args[MATMULS[func]].shape[-1])
    if func is torch.ops.aten.linalg_solve_triangular.default:  # of a triangle [n, n]: n² per column
        return int(args[0].shape[-1]) * int(out.numel())
    if func in CAST_MATMULS:
        return 2 * int(out.numel()) * int(args[CAST_MATMULS[func]])
    if func in GROUPED_MATMULS:  # of both kinds, as in GROUPED
        left, right = args[0], args[1]
        return 2 * int(left.numel()) * int(right.shape[-1])
    if func in GROUPED:
        numel = int(out.numel()) if GROUPED[func] else int(out[0].numel())
        return 2 * numel * int(args[GROUPED_INNER])
    if func is CHOOSE_KEYS:  # scores of all keys of a sequence, and their weighted sum
        (rows, heads, dim), tokens = args[0].shape, int(args[4])
        return 2 * int(rows * heads) * tokens * (int(dim) + 1)
    if func is CHOOSE_COMPRESSED:
        (rows, heads, dim), tokens, rate = args[0].shape, int(args[3]), int(args[4])
        return 2 * int(rows * heads) * (tokens // rate) * (int(dim) + 1)
    if func is COMPRESSED_FORWARD:
        return _count_compressed_flops(args[0], *args[2:7])
    if func is COMPRESSED_BACKWARD:
        return 2 * _count_compressed_flops(args[1], *args[3:5], *args[7:10])
    if func is SPARSE_FORWARD:
        return _count_sparse_flops(args[0], args[2], tokens=int(args[3]), value_dim=int(args[4]))
    if func is SPARSE_BACKWARD:
        return 2 * _count_sparse_flops(args[1], args[3], tokens=int(args[6]), value_dim=int(args[4].shape[-1]))
    if func in ATTENTION_FORWARD:
        return _count_attention_flops(*args[:3], window=find_window(func, args))
    if func in ATTENTION_BACKWARD:
        return 2 * _count_attention_flops(*args[1:4], window=find_window(func, args))
    return 0


class AttentionWindow(NamedTuple):
    """The window of a block of attention: its offset, and the number of keys that a query sees."""

    offset: int
    keys: int


def find_window(func: Any, args: Any) -> AttentionWindow | None:
    """Return the window of an attention kernel; None if it has none."""
    if func not in BANDS:
        return None
    first = BANDS[func]
    offset, keys = args[first + 1 : first + 3]
    return AttentionWindow(offset, keys) if keys else None


def _count_sparse_flops(q: Tensor, chosen: Tensor, *, tokens: int, value_dim: int) -> int:
    """Count forward FLOPs of q [R, N, H] on the chosen keys [R, K], of which early tokens of a sequence have fewer."""
    (rows, heads, dim), most = q.shape, int(chosen.shape[1])
    pairs = int(rows) // tokens * (most * (most + 1) // 2 + (tokens - most) * most)
    return 2 * int(heads) * pairs * (int(dim) + value_dim)


def _count_compressed_flops(
    q: Tensor, compressed: Tensor | None, chosen: Tensor | None, tokens: int, window: int, rate: int
) -> int:
    """Count forward FLOPs of q [R, N, H] on the keys of a window and on complete compressed keys, or chosen ones."""
    rows, heads, dim = q.shape
    most = None if chosen is None else int(chosen.shape[1])
    pairs = count_pairs(tokens, window=window, rate=None if compressed is None else rate, most=most)
    return 4 * int(rows) // tokens * int(heads) * pairs * int(dim)


def _count_attention_flops(q: Tensor, k: Tensor, v: Tensor, *, window: AttentionWindow | None) -> int:
    """Count forward FLOPs of q [B, N, T, H] on k [B, K, S, H] and v [B, K, S, H of v].

    All pairs count, masked or not, but under a window only the visible pairs.
    """
    queries, keys = int(q.shape[2]), int(k.shape[2])
    pairs = queries * keys
    if window is not None:
        pairs = count_visible_pairs(queries, keys, offset=window.offset, window=window.keys)
    return 2 * q.shape[0] * q.shape[1] * pairs * (q.shape[3] + v.shape[3])
