"""Fake world for one rank: torch's "fake" process group of any size, and fake tensors without storage.

    with fake_rank(layout, rank=3): …build, Engine.step…      collectives return at once, tensors have only shapes

Results that would depend on values are even: all experts get the same number of rows.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache, cached_property, partial
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.testing._internal.distributed.fake_pg import FakeStore

from fivefold.dry_run.fake.collectives import TapeGroup
from fivefold.job import Job
from fivefold.layout.mesh import group
from fivefold.layout.spec import Layout
from fivefold.model.spec import Model
from fivefold.planner.counts.operations.attention.windows import get_window
from fivefold.trainer.model.attention import GroupedAttention, LatentAttention
from fivefold.trainer.model.experts import GroupedLinear
from fivefold.trainer.model.flash_attention import Flash
from fivefold.trainer.model.moe import Moe
from fivefold.trainer.parallel.expert import AllToAllDispatcher, DispatchPlan
from fivefold.trainer.parallel.mesh import Ranks

aten = torch.ops.aten
META, CPU = torch.device("meta"), torch.device("cpu")
VIEWS = frozenset(
    {
        aten._unsafe_view.default,
        aten.alias.default,
        aten.as_strided.default,
        aten.detach.default,
        aten.expand.default,
        aten.permute.default,
        aten.select.int,
        aten.slice.Tensor,
        aten.split.Tensor,
        aten.split_with_sizes.default,
        aten.squeeze.dim,
        aten.t.default,
        aten.transpose.int,
        aten.unbind.int,
        aten.unsqueeze.default,
        aten.view.default,
        aten.view.dtype,
    }
)
# Tags of operations whose results depend on more than the shapes and types of their arguments.
UNKEYED_TAGS = frozenset(
    {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view, torch.Tag.view_copy}
)


@contextmanager
def enter_fake_rank(layout: Layout, *, rank: int) -> Iterator[None]:
    """Make this process ``rank`` of the layout's world, with fake tensors on the CPU."""
    if dist.is_initialized():
        raise RuntimeError(
            "a dry run creates its own process group, but this process has one already; destroy it first"
        )
    previous_hook = sys.excepthook  # init_process_group wraps it, and destroy_process_group does not restore it
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world)
    try:
        with DirectFakeTensorMode(allow_non_fake_inputs=True):
            yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = previous_hook


def list_representatives(layout: Layout, *, by_cp: bool = False) -> tuple[int, ...]:
    """Return the first rank of each pipeline rank. Among the ranks with the same stages its shards are the largest.

    ``by_cp``: return one for each pipeline and context rank, which is needed if ``has_uneven_cp_work``.
    """
    pp, cp = group(layout, "pp"), group(layout, "cp")
    cp_ranks = range(cp.ranks if by_cp else 1)
    return tuple(sorted(stage * pp.stride + cp_rank * cp.stride for stage in range(pp.ranks) for cp_rank in cp_ranks))


def has_uneven_cp_work(model: Model, *, layout: Layout, job: Job) -> bool:
    """Return whether the ranks of a ring do unequal work: under a window the first chunks see fewer keys."""
    windows = {get_window(model, job, layer=layer) for layer in range(model.layers)}
    return layout.uses_ring and (windows != {None} or model.dropout_rates.attention > 0)


def count_represented_ranks(dry_run_ranks: Sequence[int], *, layout: Layout) -> Counter[int]:
    """Count the ranks that each simulated rank represents: itself, those of its pp and cp rank, or of its pp rank."""
    pp, cp = group(layout, "pp"), group(layout, "cp")
    representative: dict[tuple[int, ...], int] = {}
    for rank in dry_run_ranks:
        for key in ((rank,), (-1, pp.place(rank), cp.place(rank)), (-1, pp.place(rank))):
            representative.setdefault(key, rank)
    ranks_and_keys = ((rank, (-1, pp.place(rank), cp.place(rank))) for rank in range(layout.world))
    return Counter(
        representative[next(key for key in ((rank,), pp_and_cp_key, pp_and_cp_key[:2]) if key in representative)]
        for rank, pp_and_cp_key in ranks_and_keys
    )


def route_evenly(module: nn.Module) -> None:
    """Modify every MoE layer of ``module`` to route the same number of rows to each expert."""
    for layer in module.modules():
        if isinstance(layer, GroupedLinear):
            layer.ends = compute_even_ends
        if not isinstance(layer, Moe):
            continue
        layer.count_copies = partial(count_even_copies, per_row=layer.moe.computed_per_token)
        if isinstance(layer.dispatcher, AllToAllDispatcher):
            layer.dispatcher = dispatcher = EvenDispatcher(
                layer.dispatcher.ep, layer.dispatcher.etp, fp8_cast=layer.dispatcher.fp8_cast
            )
            layer.experts.backward_overlap_work = dispatcher.backward_overlap_work


def count_even_copies(computed: Tensor, *, per_row: int) -> int:
    """Return how many choices of all rows experts compute, without reading ``computed``."""
    return len(computed) * per_row


def compute_even_ends(offsets: Tensor, rows: int) -> list[int]:
    """Return the end row of each expert, without reading ``offsets``."""
    return [rows * (expert + 1) // len(offsets) for expert in range(len(offsets))]


class EvenDispatcher(AllToAllDispatcher):
    """An all-to-all dispatcher whose plans assume even row counts."""

    def plan(self, counts: Tensor) -> DispatchPlan:
        """Start the exchange of counts, as the real dispatcher does."""
        return EvenDispatchPlan(
            counts, self.ep, self.etp, backward_overlap_work=self.backward_overlap_work, fp8_cast=self.fp8_cast
        )


class EvenDispatchPlan(DispatchPlan):
    """A dispatch plan with rows spread over ranks as evenly as possible, the same on all ranks."""

    def read(self, numbers: Tensor, copies: int) -> list[int]:
        """Return the rows to send to each rank, then those to receive, without reading ``numbers``."""
        shares = [copies // self.ep.size + (peer < copies % self.ep.size) for peer in range(self.ep.size)]
        return [*shares, *[shares[self.ep.rank]] * (self.ep.size * self.etp.size)]


def use_gpu_attention(module: nn.Module) -> None:
    """Replace the flash core by the GPU's kernel, which needs no padding, where dims of k and v differ.

    Attention with sinks keeps its core, which needs the log-sum-exp of a kernel that pads, on GPUs too.
    """
    for layer in (
        submodule for submodule in module.modules() if isinstance(submodule, GroupedAttention | LatentAttention)
    ):
        differs = isinstance(layer, LatentAttention) or layer.shape.head_dim != layer.shape.value_dim
        if differs and isinstance(layer.core, Flash) and layer.sinks is None:
            layer.core = GpuFlash(layer.rule)


class GpuFlash(Flash):
    """Memory-efficient attention, which ``scaled_dot_product_attention`` uses on GPUs if dims of k and v differ."""

    def __call__(
        self,
        q_BTNH: Tensor,
        k_BTKH: Tensor,
        v_BTKH: Tensor,
        documents_BT: Tensor | None = None,
        sinks_N: Tensor | None = None,
        keys_B: Tensor | None = None,
    ) -> Tensor:
        """Return the attention output [B, T, N, H of v], by the operator of the GPU's kernel.

        On fake tensors it allocates what that kernel would, and computes nothing. ``documents_BT``: the document of
        each token; ``sinks_N``: a learned logit of each head; ``keys_B``: each sequence's key of dropout.
        """
        # that kernel has no groups of query heads, and no window that is shorter than the sequence
        rule = self.rule.apply_dropout(q_BTNH.shape[1], training=keys_B is not None)
        if q_BTNH.shape[2] != k_BTKH.shape[2] or not rule.is_plain:
            return super().__call__(q_BTNH, k_BTKH, v_BTKH, documents_BT, sinks_N, keys_B)
        heads = (x.transpose(1, 2) for x in (q_BTNH, k_BTKH, v_BTKH))
        outputs = torch.ops.aten._scaled_dot_product_efficient_attention(
            *heads, None, True, 0.0, True, scale=self.rule.scale
        )
        out_BNTH: Tensor = outputs[0]
        return out_BNTH.transpose(1, 2)


def index_groups(ranks: Ranks) -> Callable[[str], TapeGroup]:
    """Return a function from the name of a process group of ``ranks`` to its ``TapeGroup``."""
    members: dict[str, tuple[int, ...]] = {}
    members |= {group.group_name: axis.ranks for axis in ranks.axes.values() for group in axis.groups}
    return lambda name: TapeGroup(ranks.axis(name), members[name])


class NewTensor(NamedTuple):
    """A result of an operation that is a tensor with a storage of its own."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


# A result of an operation: a new tensor, the number of the argument that it is, ``None``, or several of them.
Result = NewTensor | int | None | tuple["Result", ...] | list["Result"]


class Unkeyed(Exception):
    """The result of an operation does not follow from a key alone."""


@cache
def is_keyed(func: Any) -> bool:
    """Return whether the results of an operation follow from the shapes, strides and types of its arguments."""
    return isinstance(func, OpOverload) and not func.is_view and not UNKEYED_TAGS.intersection(func.tags)


class DirectFakeTensorMode(FakeTensorMode):
    """A ``FakeTensorMode`` on the CPU that runs views directly, and remembers the results of other operations.

    Its parent class has a cache too, but keys each operation by fifteen properties of each argument. That and its way
    past the cache for operations of other packages take five times as long.
    """

    results: ClassVar[dict[tuple[object, ...], Result]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Tell torch that no dispatch needs protection from the compiler, which a dry run does not use."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a view on the meta device, make a known result anew, else do as the parent does."""
        kwargs = kwargs or {}
        if func in VIEWS and self._owns(args[0]):
            with in_kernel_invocation_manager(self):
                views = func(*args, **kwargs)
            return self._make_fake(views) if isinstance(views, Tensor) else [self._make_fake(view) for view in views]
        if not is_keyed(func):
            return super().__torch_dispatch__(func, types, args, kwargs)
        tensors: list[Tensor] = []
        key: list[object] = [func]
        try:
            self._extend_key(key, (*args, *kwargs, *kwargs.values()), tensors)
        except Unkeyed:
            return super().__torch_dispatch__(func, types, args, kwargs)
        frozen = tuple(key)
        if frozen in self.results:
            return self._make(self.results[frozen], tensors)
        out = super().__torch_dispatch__(func, types, args, kwargs)
        with suppress(Unkeyed):
            self.results[frozen] = self._describe(out, tensors)
        return out

    def _owns(self, value: object) -> bool:
        return isinstance(value, FakeTensor) and value.fake_device == CPU and value.constant is None

    def _extend_key(self, key: list[object], values: Iterable[object], tensors: list[Tensor]) -> None:
        """Append what results depend on of ``values`` to ``key``, and their tensors to ``tensors``."""
        for value in values:
            if isinstance(value, Tensor):
                if not self._owns(value):
                    raise Unkeyed
                tensors.append(value)
                key += (value.shape, value.stride(), value.dtype)
            elif isinstance(value, list | tuple):
                key.append(len(value))
                self._extend_key(key, value, tensors)
            elif isinstance(value, torch.device) and value != CPU:
                raise Unkeyed
            else:
                key += (type(value), value)  # 1 == 1.0, but their products with integers differ

    def _describe(self, out: object, tensors: list[Tensor]) -> Result:
        """Return what is to be remembered of a result; raise ``Unkeyed`` if it shares the storage of an argument."""
        if isinstance(out, list | tuple):
            parts = [self._describe(part, tensors) for part in out]
            return parts if isinstance(out, list) else tuple(parts)
        if out is None:
            return None
        for number, tensor in enumerate(tensors):
            if tensor is out:
                return number
        if not isinstance(out, FakeTensor) or not self._owns(out):
            raise Unkeyed
        storage = out.untyped_storage()
        if any(tensor.untyped_storage()._cdata == storage._cdata for tensor in tensors):
            raise Unkeyed
        described = NewTensor(out.shape, out.stride(), out.dtype)
        if storage.nbytes() != self._make(described, []).untyped_storage().nbytes():
            raise Unkeyed
        return described

    def _make(self, result: Result, tensors: list[Tensor]) -> Any:
        """Return the tensors of a result: new ones, or arguments."""
        if isinstance(result, NewTensor):
            return self._make_fake(torch.empty_strided(result.shape, result.stride, dtype=result.dtype, device=META))
        if isinstance(result, int):
            return tensors[result]
        if result is None:
            return None
        parts = [self._make(part, tensors) for part in result]
        return parts if isinstance(result, list) else tuple(parts)

    def _make_fake(self, tensor: Tensor) -> FakeTensor:
        """Return a fake tensor as torch makes it, whose constructor takes as long as most operations."""
        fake: FakeTensor = Tensor._make_subclass(
            FakeTensor, tensor, False, dispatch_device=True, device_for_backend_keys=CPU
        )
        vars(fake).update(self._attributes)
        return fake

    @cached_property
    def _attributes(self) -> dict[str, object]:
        return vars(FakeTensor(self, torch.empty(0, device=META), CPU))
