"""The direct fake tensor mode returns what torch's own mode returns, and leaves shape errors to be found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensor, FakeTensorMode

from fivefold.dry_run.fake import world
from fivefold.dry_run.fake.world import DirectFakeTensorMode
from fivefold.trainer.model.kernels.fused import norms

aten = torch.ops.aten
Call = Callable[[Tensor, Tensor], Any]  # x [4, 6] in bf16, which is a transposed view, and y [4, 6] in fp32

CALLS: dict[object, Call] = {
    aten.empty.memory_format: lambda x, y: torch.empty(3, 5, dtype=torch.float16),
    aten.empty_strided.default: lambda x, y: torch.empty_strided((3, 5), (1, 3), dtype=torch.uint8),
    aten.zeros.default: lambda x, y: torch.zeros(3, 5, device="cpu"),
    aten.ones.default: lambda x, y: torch.ones(7),
    aten.empty_like.default: lambda x, y: torch.empty_like(x),
    aten.zeros_like.default: lambda x, y: torch.zeros_like(x, dtype=torch.float32),
    aten.ones_like.default: lambda x, y: torch.ones_like(x, device="cpu"),
    aten.new_empty.default: lambda x, y: x.new_empty(2, 2),
    aten.new_empty_strided.default: lambda x, y: x.new_empty_strided((2, 3), (1, 2)),
    aten.new_zeros.default: lambda x, y: x.new_zeros(5, dtype=torch.int64),
    aten.detach.default: lambda x, y: x.detach(),
    aten._unsafe_view.default: lambda x, y: aten._unsafe_view(y, [6, 4]),
    aten.alias.default: lambda x, y: aten.alias(x),
    aten.as_strided.default: lambda x, y: x.as_strided((2, 3), (1, 4), 2),
    aten.permute.default: lambda x, y: x.permute(1, 0),
    aten.squeeze.dim: lambda x, y: y[:1].squeeze(0),
    aten.expand.default: lambda x, y: x[:, :1].expand(4, 9),
    aten.select.int: lambda x, y: x[2],
    aten.slice.Tensor: lambda x, y: x[1:3, ::2],
    aten.split.Tensor: lambda x, y: x.split(3, dim=1),
    aten.split_with_sizes.default: lambda x, y: y.split([1, 5], dim=1),
    aten.t.default: lambda x, y: x.t(),
    aten.transpose.int: lambda x, y: y.view(2, 2, 6).transpose(0, 2),
    aten.unbind.int: lambda x, y: x.unbind(1),
    aten.unsqueeze.default: lambda x, y: x.unsqueeze(1),
    aten.view.default: lambda x, y: y.view(-1)[:20].view(5, 4),
    aten.view.dtype: lambda x, y: y.view(torch.bfloat16),
    aten.add_.Tensor: lambda x, y: x.add_(y),
    aten.mul.Tensor: lambda x, y: x * y,
    aten.mm.default: lambda x, y: y @ y.t(),
    aten.sum.dim_IntList: lambda x, y: x.sum(1, dtype=torch.float32),
    aten.native_layer_norm.default: lambda x, y: torch.native_layer_norm(y, [6], None, None, 1e-5),
    aten.log_sigmoid_forward.default: lambda x, y: aten.log_sigmoid_forward(y),
    torch.ops.fivefold.norm.default: lambda x, y: norms.norm(y, y[0], None, 1e-5, False, False),
    aten.copy_.default: lambda x, y: x.copy_(y),
    aten.zero_.default: lambda x, y: x.zero_(),
    aten._foreach_add_.Scalar: lambda x, y: torch._foreach_add_([x, y], 1),
    aten._foreach_copy_.default: lambda x, y: torch._foreach_copy_([x, y[0]], [y, x[1]]),
    aten._foreach_mul_.Tensor: lambda x, y: torch._foreach_mul_([x, y], y[0, 0]),
    aten._fused_adamw_.default: lambda x, y: torch._fused_adamw_(
        [x],
        [x],
        [x],
        [x],
        [],
        [y[0, 0]],
        lr=1e-3,
        beta1=0.9,
        beta2=0.95,
        weight_decay=0.1,
        eps=1e-8,
        amsgrad=False,
        maximize=False,
    ),
    aten.split_with_sizes_copy.out: lambda x, y: torch.split_with_sizes_copy(
        y, [2, 4], dim=1, out=(y.new_empty(4, 2), y.new_empty(4, 4))
    ),
}


def run(mode: FakeTensorMode, call: Call) -> list[object]:
    """Run ``call`` in ``mode`` and describe its results, and of which input they share the storage."""
    with mode:
        inputs = torch.empty(6, 4, dtype=torch.bfloat16).t(), torch.empty(4, 6)
        result = call(*inputs)
        tensors = result if isinstance(result, Sequence) else [result]
        return [tensor if tensor is None else describe(tensor, inputs) for tensor in tensors]


def describe(tensor: FakeTensor, inputs: Sequence[Tensor]) -> tuple[object, ...]:
    """Describe a fake tensor."""
    assert isinstance(tensor, FakeTensor)
    shared = [tensor.untyped_storage()._cdata == other.untyped_storage()._cdata for other in inputs]
    layout = tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.device
    same = [tensor is other for other in inputs]
    return *layout, tensor.untyped_storage().nbytes(), tensor.requires_grad, shared, same


def test_every_direct_view_has_a_case() -> None:
    assert CALLS.keys() >= world.VIEWS


@pytest.mark.parametrize("func", CALLS, ids=str)
def test_the_second_call_of_an_operation_returns_what_torch_returns(
    func: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DirectFakeTensorMode, "results", {})
    expected = run(FakeTensorMode(), CALLS[func])
    assert run(DirectFakeTensorMode(), CALLS[func]) == expected
    passed_on: list[object] = []
    dispatch = FakeTensorMode.__torch_dispatch__

    def note(self: FakeTensorMode, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        passed_on.append(func)
        return dispatch(self, func, types, args, kwargs or {})

    monkeypatch.setattr(FakeTensorMode, "__torch_dispatch__", note)
    assert run(DirectFakeTensorMode(), CALLS[func]) == expected
    assert func not in passed_on


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (lambda x, y: y.long() * 1, lambda x, y: y.long() * 1.0),
        (lambda x, y: y.sum(0), lambda x, y: y.sum(0, keepdim=True)),
        (lambda x, y: x + x, lambda x, y: y + y),
        (lambda x, y: y.view(6, 4) * 2, lambda x, y: y.view(4, 6).t() * 2),
        (lambda x, y: torch.mm(y, y.t(), out=y.new_empty(4, 4)), lambda x, y: torch.mm(y, y.t())),
        (lambda x, y: y[:, 0].mul_(2), lambda x, y: x[:, 0].mul_(2)),
        (lambda x, y: torch.ones(2), lambda x, y: torch.tensor(2.0)),
    ],
)
def test_a_similar_operation_before_changes_no_result(
    first: Call, second: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DirectFakeTensorMode, "results", {})
    run(DirectFakeTensorMode(), first)
    assert run(DirectFakeTensorMode(), second) == run(FakeTensorMode(), second)


def test_an_operation_whose_shape_depends_on_values_is_left_to_torch() -> None:
    for _ in range(2):
        with pytest.raises(DynamicOutputShapeException):
            run(DirectFakeTensorMode(), lambda x, y: y[y > 0])


@pytest.mark.parametrize(
    "call",
    [
        lambda x, y: x.copy_(y[:3]),
        lambda x, y: y.view(5, 5),
        lambda x, y: x.add_(y[:3]),
        lambda x, y: torch._foreach_copy_([x], [y[:3]]),
        lambda x, y: y.split([1, 2], dim=1),
    ],
)
def test_shapes_that_do_not_fit_are_errors(call: Call) -> None:
    with pytest.raises(RuntimeError):
        run(DirectFakeTensorMode(), call)


def test_other_devices_are_left_to_torch() -> None:
    with DirectFakeTensorMode():
        assert torch.empty(3, device="meta").device.type == "meta"
        assert torch.empty_like(torch.empty(3), device="meta").device.type == "meta"
