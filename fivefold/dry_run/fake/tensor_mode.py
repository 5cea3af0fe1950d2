"""A fake tensor mode that runs views, copies and allocations directly, in a tenth of the time of its parent class.

``FakeTensorMode`` keys each operation by all its arguments, to look up its result in a cache. For the operations of
which a step outside of its blocks consists, that takes far longer than to run them on the meta device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

aten = torch.ops.aten
META, CPU = torch.device("meta"), torch.device("cpu")
# Operations that allocate one tensor, of a size, or of that of their first argument.
OF_SIZE = frozenset({aten.empty.memory_format, aten.empty_strided.default, aten.zeros.default, aten.ones.default})
LIKE = frozenset(
    {
        aten.empty_like.default,
        aten.zeros_like.default,
        aten.ones_like.default,
        aten.new_empty.default,
        aten.new_empty_strided.default,
        aten.new_zeros.default,
    }
)
VIEWS = frozenset(
    {
        aten.detach.default,
        aten.expand.default,
        aten.select.int,
        aten.slice.Tensor,
        aten.split.Tensor,
        aten.split_with_sizes.default,
        aten.t.default,
        aten.transpose.int,
        aten.unbind.int,
        aten.unsqueeze.default,
        aten.view.default,
        aten.view.dtype,
    }
)
# Operations that write to tensors: one that they return, or lists.
WRITES = frozenset({aten.copy_.default, aten.zero_.default})
WRITES_LISTS = frozenset({aten._foreach_copy_.default, aten.split_with_sizes_copy.out})


class DirectFakeTensorMode(FakeTensorMode):
    """A ``FakeTensorMode`` on the CPU with the same results."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Tell torch that no dispatch needs protection from the compiler, which a dry run does not use."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation on the meta device if it is a view, a copy or an allocation, else as the parent does."""
        kwargs = kwargs or {}
        if func in OF_SIZE:
            if kwargs.get("device", CPU) in (None, CPU):
                return self._make_fake(self._run_on_meta(func, args, {**kwargs, "device": META}))
        elif func in LIKE:
            if self._owns(args[0]) and kwargs.get("device") in (None, CPU):
                return self._make_fake(self._run_on_meta(func, args, {**kwargs, "device": META}))
        elif func in WRITES:
            if all(map(self._owns, args[:2])):
                self._run_on_meta(func, args, kwargs)
                return args[0]
        elif func in WRITES_LISTS:
            target = kwargs["out"] if "out" in kwargs else args[0]
            read = args[1] if target is args[0] else args[:1]
            if all(map(self._owns, (*target, *read))):
                return self._run_on_meta(func, args, kwargs)
        elif func in VIEWS and self._owns(args[0]):
            views = self._run_on_meta(func, args, kwargs)
            return self._make_fake(views) if isinstance(views, Tensor) else [self._make_fake(view) for view in views]
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _owns(self, value: object) -> bool:
        return isinstance(value, FakeTensor) and value.fake_device == CPU and value.constant is None

    def _run_on_meta(self, func: Any, args: Any, kwargs: Any) -> Any:
        with in_kernel_invocation_manager(self):
            return func(*args, **kwargs)

    def _make_fake(self, tensor: Tensor) -> FakeTensor:
        return FakeTensor(self, tensor, CPU)
