"""Our linear layer against torch's, its order of work, and what it keeps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.trainer.model.linear import Linear, LinearHooks, WgradStore, fused_linears, mark_recomputation


def draw_inputs(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def linear(into: int, outof: int, *, bias: bool, dtype: torch.dtype = torch.float32) -> Linear:
    made = Linear(into, outof, bias=bias).to(dtype)
    with torch.no_grad():
        for weight in made.parameters():
            weight.copy_(draw_inputs(*weight.shape))
    return made


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_fused_linears_share_one_input(bias: bool, dtype: torch.dtype, tolerance: float) -> None:
    ours = [linear(16, outof, bias=bias, dtype=dtype) for outof in (8, 12, 4)]
    theirs = [nn.Linear(16, item.matrix.shape[0], bias=bias, dtype=dtype) for item in ours]
    for mine, other in zip(ours, theirs, strict=True):
        other.load_state_dict(mine.state_dict())  # same names, same shapes
    x, y = (draw_inputs(10, 16).to(dtype).requires_grad_() for _ in range(2))
    for _ in range(2):  # gradients add up over micro-batches
        result, expected = fused_linears(x, *ours), [other(y) for other in theirs]
        for mine, other in zip(result, expected, strict=True):
            torch.testing.assert_close(mine, other, rtol=0, atol=0)
        for outs in (result, expected):
            torch.autograd.backward(outs, [draw_inputs(*out.shape).to(dtype) for out in outs])
    pairs = [(x.grad, y.grad)]
    for mine, other in zip(ours, theirs, strict=True):
        pairs += [(a.grad, b.grad) for a, b in zip(mine.parameters(), other.parameters(), strict=True)]
    for mine, other in pairs:
        assert mine is not None
        assert mine.dtype == dtype
        assert (mine - other).norm() <= tolerance * other.norm()


class Recorded(LinearHooks):
    """Twice the rows inside, as over two equal ranks, and a record of what happened when."""

    partial = True

    def __init__(self, did: list[str]) -> None:
        self.did = did

    def enter(self, x: Tensor) -> Tensor:
        self.did.append("enter")
        return torch.cat((x, x))

    def begin_reenter(self, x: Tensor) -> Callable[[], Tensor]:
        self.did.append("begin again")
        return lambda: (self.did.append("wait again"), torch.cat((x, x)))[1]

    def begin_enter_backward(self, gradient: Tensor) -> Callable[[], Tensor]:
        self.did.append("begin gradient")
        return lambda: (self.did.append("wait gradient"), gradient.chunk(2)[0])[1]

    def leave(self, y: Tensor) -> Tensor:
        self.did.append("leave")
        return y.chunk(2)[0].clone()

    def leave_backward(self, gradient: Tensor) -> Tensor:
        self.did.append("left gradient")
        return torch.cat((gradient, gradient))


def record_calls(*, deferring: bool = False) -> tuple[list[str], WgradStore, list[Linear]]:
    did: list[str] = []
    wgrad_store, linears = WgradStore(), [linear(16, outof, bias=True) for outof in (8, 12)]
    for index, item in enumerate(linears):
        item.hooks, item.wgrad_store = Recorded(did), wgrad_store
        item.weight.collect = lambda gradient, index=index: did.append(f"weight {index}")  # type: ignore[union-attr]
        item.bias.collect = lambda gradient, index=index: did.append(f"bias {index}")  # type: ignore[union-attr]
    wgrad_store.deferring = deferring
    return did, wgrad_store, linears


def run(linears: list[Linear]) -> Tensor:
    x = draw_inputs(4, 16).requires_grad_()
    sum(out.sum() for out in fused_linears(x, *linears)).backward()  # type: ignore[union-attr]
    assert x.grad is not None
    return x.grad


WEIGHTS = ["bias 0", "weight 0", "bias 1", "weight 1"]


def test_messages_begin_before_the_matmuls_that_overlap_them() -> None:
    did, _, linears = record_calls()
    run(linears)
    assert did == [
        "enter",
        "leave",
        "leave",
        "begin again",
        "left gradient",
        "left gradient",
        "begin gradient",
        "wait again",
        *WEIGHTS,
        "wait gradient",
    ]
    assert all(weight.grad is None for item in linears for weight in item.parameters())  # collected, not kept twice


def test_deferred_weight_gradients_wait_until_they_are_requested() -> None:
    did, wgrad_store, linears = record_calls(deferring=True)
    run(linears)
    assert did[-3:] == ["left gradient", "begin gradient", "wait gradient"]
    assert "begin again" not in did  # only the rank's own rows are held until then
    did.clear()
    for work in wgrad_store.take():
        work()
    assert did == ["enter", *WEIGHTS]
    assert wgrad_store.take() == []


def test_recomputed_linear_saves_its_input() -> None:
    for deferring in (False, True):
        did, wgrad_store, linears = record_calls(deferring=deferring)
        with mark_recomputation():
            (out,) = fused_linears(draw_inputs(4, 16).requires_grad_(), linears[0])
        out.sum().backward()
        for work in wgrad_store.take():
            work()
        assert did.count("enter") == 1
        assert "begin again" not in did
        assert "weight 0" in did
    did, _, linears = record_calls()
    run(linears)
    assert "begin again" in did  # outside of it as before


def test_deferred_weight_gradients_equal_immediate_ones() -> None:
    results = []
    for deferring in (False, True):
        wgrad_store, linears = WgradStore(), [linear(16, outof, bias=True) for outof in (8, 12)]
        wgrad_store.deferring = deferring
        for item in linears:
            item.wgrad_store = wgrad_store
        gradient = run(linears)
        weights = [weight for entry in linears for weight in entry.parameters()]
        assert all((weight.grad is None) == deferring for weight in weights)
        for work in wgrad_store.take():
            work()
        results.append([gradient, *(weight.grad for weight in weights)])
    for mine, other in zip(*results, strict=True):
        assert torch.equal(mine, other)  # type: ignore[arg-type]


def test_a_bias_is_added_once_after_a_sum_over_ranks() -> None:
    did: list[str] = []
    row = linear(16, 8, bias=True)
    row.hooks = Recorded(did)
    x = draw_inputs(4, 16).requires_grad_()
    out = row(x)
    torch.testing.assert_close(out, F.linear(x, row.matrix, row.bias))
    out.backward(draw_inputs(4, 8))
    assert row.bias is not None
    torch.testing.assert_close(row.bias.grad, draw_inputs(4, 8).sum(0))  # of its own rows


def test_both_uses_of_a_tied_weight_add_to_its_gradient() -> None:
    embedding = nn.Embedding(12, 16)
    tied = Linear.tie(embedding)
    assert not list(tied.parameters())
    embedding.weight = nn.Parameter(draw_inputs(12, 16))  # as ZeRO does, later
    assert tied.matrix is embedding.weight
    delivered: list[str] = []
    embedding.weight.collect = lambda gradient: delivered.append("head")  # type: ignore[attr-defined]
    embedding.weight.register_post_accumulate_grad_hook(lambda weight: delivered.append("embedding"))
    ids = torch.arange(5)
    tied(embedding(ids)).sum().backward()
    assert delivered == ["head", "embedding"]  # autograd's hook runs once, though the head uses the weight too
    del embedding.weight.collect  # type: ignore[attr-defined]
    embedding.weight.grad = None
    tied(embedding(ids)).square().sum().backward()
    whole = draw_inputs(12, 16).requires_grad_()
    F.linear(F.embedding(ids, whole), whole).square().sum().backward()
    torch.testing.assert_close(embedding.weight.grad, whole.grad)


def test_a_forward_without_gradients_saves_nothing() -> None:
    item = linear(16, 8, bias=True)
    with torch.no_grad():
        assert item(draw_inputs(4, 16)).grad_fn is None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo looks at it where it resumes
def test_a_compiled_block_breaks_its_graph_at_a_linear_layer_and_computes_the_same() -> None:
    item = linear(16, 16, bias=True)
    x, y = (draw_inputs(4, 16).requires_grad_() for _ in range(2))

    def block(x: Tensor) -> Tensor:
        return F.silu(item(F.silu(x))) + x

    torch.compile(block, backend="eager")(x).sum().backward()
    weight, item.matrix.grad = item.matrix.grad, None
    block(y).sum().backward()
    torch.testing.assert_close(x.grad, y.grad)
    torch.testing.assert_close(weight, item.matrix.grad)


def test_the_backward_is_called_by_the_weight_alone_where_the_input_has_no_gradient() -> None:
    """By both, autograd would take its time to hand no gradient to each weight of each micro-batch."""
    for asks in (True, False):
        layer, x = linear(4, 3, bias=False), draw_inputs(2, 4).requires_grad_(asks)
        (out,) = fused_linears(x, layer)
        assert out.grad_fn is not None
        leaves = [node.variable for node, _ in out.grad_fn.next_functions if node is not None]
        assert leaves == [x if asks else layer.matrix]
        out.sum().backward()
        assert layer.matrix.grad is not None
        torch.testing.assert_close(layer.matrix.grad, x.detach().sum(0).expand(3, 4))
