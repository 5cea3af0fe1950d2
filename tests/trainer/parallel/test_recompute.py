"""Recomputation gives the same gradients and runs no more than it must, and its backward peaks as planned."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fivefold.job import Job, get_recipe
from fivefold.layout.recomputation import RECOMPUTABLE, list_groups
from fivefold.layout.spec import Layout
from fivefold.layout.stages import list_recomputed_layers
from fivefold.model.experts import MoE
from fivefold.model.latent_attention import MLA
from fivefold.model.spec import Model
from fivefold.planner.counts.counts import Counts
from fivefold.planner.counts.operations.layer import get_kind
from fivefold.planner.counts.operations.local_shapes import LocalDegrees
from fivefold.trainer.measure.meter import Meter
from fivefold.trainer.model.block import Block
from fivefold.trainer.model.linear import WgradStore
from fivefold.trainer.model.rotary import RowInputs, rotary_tables
from fivefold.trainer.parallel import recompute
from fivefold.trainer.parallel.recomputed import OperationInput
from tests.selection import mark_share

SEQUENCES, TOKENS = 2, 16
DENSE = Model(name="dense", layers=2, width=32, heads=4, kv_heads=2, head_dim=8, ffn=48, vocab=61)
NORMED = DENSE.replace(name="normed", qk_norm="head")
LATENT = DENSE.replace(name="latent", kv_heads=4, mla=MLA(q_rank=12, kv_rank=10, nope_dim=6, rope_dim=4, v_dim=8))
ROUTED = DENSE.replace(name="routed", moe=MoE(experts=4, topk=2, ffn=20, shared_experts=1))
MODELS = {model.name: model for model in (DENSE, NORMED, LATENT, ROUTED)}
EVERYTHING = "+".join(RECOMPUTABLE)
SETS = (
    "selective",
    "full",
    *RECOMPUTABLE,
    "norm+act",
    "norm+rope+act",
    "qkv+norm",
    "qkv+core",
    "core+out",
    "mlp+norm",
    "core+rope+up",
    "norm+mlp+moe+shared",
    EVERYTHING,
)


class Stack(nn.Module):
    """Blocks one after another, with equal weights whatever is recomputed."""

    wgrad_store: Any

    def __init__(self, model: Model, ac: str, *, layers: int = 1, compiled: recompute.Compile | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(model, layer=layer) for layer in range(layers))
        self.wgrad_store = WgradStore()
        generator = torch.Generator().manual_seed(0)
        for weight in self.parameters():
            torch.nn.init.normal_(weight, 0, 0.2, generator=generator)
        for module in self.modules():
            if hasattr(module, "wgrad_store"):
                module.wgrad_store = self.wgrad_store
            if hasattr(module, "dispatcher"):
                module.scale = 0.1  # type: ignore[assignment]
        positions, device = torch.arange(TOKENS), torch.device("cpu")
        self.tables = rotary_tables(model, positions=positions, dtype=torch.float32, device=device)
        again = list_recomputed_layers(model.replace(layers=layers), Layout(ac=ac))
        recompute.attach(
            zip(self.blocks, again, strict=True), groups=Layout(ac=ac).recomputed_operations, compiled=compiled
        )

    def forward(self, x_RD: Tensor) -> Tensor:
        for block in self.blocks:
            x_RD = block(x_RD, RowInputs(TOKENS, self.tables))
        return x_RD

    def gradients(self) -> dict[str, Tensor]:
        return {name: weight.grad for name, weight in self.named_parameters() if weight.grad is not None}


def micro_batch(index: int, width: int = 32) -> Tensor:
    generator = torch.Generator().manual_seed(index + 1)
    return torch.randn(SEQUENCES * TOKENS, width, generator=generator).requires_grad_()


def train(model: Model, ac: str, *, order: tuple[int, ...] = (0,), **more: Any) -> dict[str, Tensor]:
    """Gradients after forwards in a row and backwards in ``order``; of the inputs too."""
    stack, entries = Stack(model, ac, **more), [micro_batch(index) for index in range(len(order))]
    losses = [stack(entry).square().mean() for entry in entries]
    for index in order:
        losses[index].backward()
    return stack.gradients() | {
        f"x{index}": entry.grad for index, entry in enumerate(entries) if entry.grad is not None
    }


def difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest over all tensors, relative to the largest element."""
    assert found.keys() == expected.keys()
    return max(((found[name] - e).abs().max() / e.abs().max()).item() for name, e in expected.items())


@pytest.fixture(scope="module")
def train_plain() -> Callable[[Model], dict[str, Tensor]]:
    known: dict[str, dict[str, Tensor]] = {}

    def gradients(model: Model) -> dict[str, Tensor]:
        if model.name not in known:
            known[model.name] = train(model, "none", order=(0, 1, 2), layers=2)
        return known[model.name]

    return gradients


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    chosen=st.sets(st.sampled_from(RECOMPUTABLE), min_size=1),
    name=st.sampled_from(sorted(MODELS)),
    order=st.permutations(range(3)),
)
def test_recomputing_any_set_of_operations_in_any_order_keeps_the_gradients(
    chosen: set[str], name: str, order: list[int], train_plain: Any
) -> None:
    result = train(MODELS[name], "+".join(sorted(chosen)), order=tuple(order), layers=2)
    assert difference(result, train_plain(MODELS[name])) < 1e-6


def measure_backward_peak(model: Model, ac: str) -> int:
    """Return the peak of the backward of one block, whose weight gradients are freed as they are made."""
    stack, entry = Stack(model, ac), micro_batch(0)
    for weight in stack.parameters():
        weight.collect = lambda gradient: None  # type: ignore[attr-defined]
    with Meter([*stack.parameters(), *stack.buffers(), *stack.tables, entry], axis=str) as meter:
        loss = stack(entry).sum()  # whose gradient has no bytes
        meter.peak_bytes = meter.live_bytes
        loss.backward()
    return meter.peak_bytes - meter.base_bytes + entry.nbytes


@pytest.mark.parametrize("model", [DENSE, NORMED], ids=lambda model: model.name)
@pytest.mark.parametrize("ac", ["none", *SETS])
def test_the_backward_peak_under_recomputation_equals_the_planner(model: Model, ac: str) -> None:
    """What is made again lives no longer than its readers. Here a loss and its gradient take the output's place."""
    job = Job(
        sequence=TOKENS, global_batch=SEQUENCES, precision=get_recipe("fp32"), early_stop=True, attention="blocks"
    )
    part = LocalDegrees(sequences=SEQUENCES, recomputed=Layout(ac=ac).recomputed_operations)
    planned = Counts(model, job).profile(part, get_kind(model, 0)).backward_peak_bytes
    stream = SEQUENCES * TOKENS * model.width * 4
    assert measure_backward_peak(model, ac) == planned - stream + 2 * 4


@pytest.mark.parametrize("ac", ["none", "full", "core+act", EVERYTHING])
@pytest.mark.parametrize("backward", [True, False])
def test_recomputation_frees_everything_without_the_garbage_collector(ac: str, backward: bool) -> None:
    stack, entry = Stack(DENSE, ac, layers=2), micro_batch(0)
    for weight in stack.parameters():
        weight.collect = lambda gradient: None  # type: ignore[attr-defined]
    for norm in [block.get_submodule(name) for block in stack.blocks for name in ("norm1", "norm2")]:
        norm.requires_grad_(False)  # whose gradients go through autograd, and stay

    def measure_leaked_bytes() -> int:
        with Meter([*stack.parameters(), *stack.tables, entry], axis=str) as meter:
            loss = stack(entry).sum()
            if backward:
                loss.backward()
            del loss
            entry.grad = None
        return meter.live_bytes - meter.base_bytes

    measure_leaked_bytes()  # what torch imports at first leaves cycles
    gc.disable()
    try:
        assert measure_leaked_bytes() == 0
    finally:
        gc.enable()


# What runs


def count_operations(stack: Stack) -> Counter[str]:
    """How often each operation has run."""
    runs: Counter[str] = Counter()

    def call_counted(name: str, function: Any, *inputs: Any) -> Any:
        runs[name] += 1
        return function(*inputs)

    def run_counted(run: Any, name: str, function: Any, *inputs: Any) -> Any:
        return run(name, partial(call_counted, name, function), *inputs)

    for module in stack.modules():
        if hasattr(module, "run"):
            module.run = partial(run_counted, module.run)  # type: ignore[assignment]
    return runs


@pytest.mark.parametrize(
    ("ac", "twice"),
    [
        ("none", ""),
        ("selective", "attention.core"),
        (
            "full",
            "norm1 attention.qkv rope.q rope.k attention.core attention.out attention.add norm2 mlp.gate_up mlp.act",
        ),
        ("norm+act", "norm1 norm2 mlp.act"),
        ("mlp", "mlp.gate_up mlp.act"),  # nothing is read of what mlp.down makes
        ("qkv", ""),  # its values are kept by the core, and queries and keys are not kept
        ("qkv+rope", "attention.qkv rope.q rope.k"),
        ("core+out", "attention.core"),
    ],
)
def test_operations_run_a_second_time_only_if_their_result_is_read(ac: str, twice: str) -> None:
    stack = Stack(DENSE, ac)
    runs = count_operations(stack)
    stack(micro_batch(0)).sum().backward()
    assert {name for name, times in runs.items() if times > 1} == set(twice.split())
    assert max(runs.values()) <= 2


def test_only_every_kth_layer_is_recomputed() -> None:
    stack = Stack(DENSE, "full/2", layers=3)
    runs = count_operations(stack)
    stack(micro_batch(0)).sum().backward()
    assert runs["attention.core"] == 2 + 1 + 2


@pytest.mark.parametrize("ac", ["full", EVERYTHING])
def test_deferred_weight_gradients_need_no_third_forward(ac: str, train_plain: Any) -> None:
    """A zero-bubble schedule: B now, W later. torch's own pipelining runs such a block three times."""
    stack, entries = Stack(DENSE, ac, layers=2), [micro_batch(index) for index in range(3)]
    runs = count_operations(stack)
    stack.wgrad_store.deferring = True
    losses = [stack(entry).square().mean() for entry in entries]
    assert set(runs.values()) == {2 * 3}  # two layers, three micro-batches, once each
    works = []
    for loss in losses:
        loss.backward()
        works += stack.wgrad_store.take()
    after_b = dict(runs)
    for work in works:
        work()
    assert after_b == dict(runs)
    assert (runs["attention.core"], runs["mlp.down"]) == (2 * 2 * 3, 2 * 3)
    expected = train_plain(DENSE)
    assert difference(stack.gradients(), {name: expected[name] for name in stack.gradients()}) < 1e-6


def test_a_forward_without_gradients_computes_the_same_under_recomputation() -> None:
    stack = Stack(DENSE, "core+act")
    with torch.no_grad():
        assert torch.equal(stack(micro_batch(0)), Stack(DENSE, "none")(micro_batch(0)))


# Combined with other features


class Gathered:
    """A unit under ZeRO-3: its weights are there while its forward runs, and again from its backward on."""

    def __init__(self, block: nn.Module) -> None:
        self.weights = {weight: weight.detach().clone() for weight in block.parameters()}
        self.gathers = 0
        block.register_forward_pre_hook(lambda *_: self.gather())
        block.register_forward_hook(self.free_and_regather)

    def gather(self) -> None:
        self.gathers += 1
        for weight, value in self.weights.items():
            weight.untyped_storage().resize_(value.untyped_storage().nbytes())
            weight.data.copy_(value)

    def free_and_regather(self, _module: nn.Module, _inputs: Any, output: Tensor) -> None:
        for weight in self.weights:
            weight.untyped_storage().resize_(0)
        output.register_hook(lambda _: self.gather())


@pytest.mark.parametrize("ac", ["none", "full", "norm+act", EVERYTHING])
def test_hooks_that_gather_weights_run_once_in_forward_and_backward(ac: str) -> None:
    expected, stack = Stack(DENSE, "none", layers=2), Stack(DENSE, ac, layers=2)
    units = [Gathered(block) for block in stack.blocks]
    for item in (expected, stack):
        item(micro_batch(0)).square().mean().backward()
    assert [unit.gathers for unit in units] == [2, 2]
    assert difference(stack.gradients(), expected.gradients()) < 1e-6


@pytest.mark.long  # tests of linear layers train compiled blocks
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch warns itself when it traces
@pytest.mark.parametrize(("ac", "backend"), mark_share(2, [("norm+core+act", "aot_eager"), ("full/2", "inductor")]))
def test_recomputation_in_compiled_blocks_keeps_the_gradients(ac: str, backend: str, train_plain: Any) -> None:
    torch._dynamo.reset()
    compiled = partial(torch.compile, backend=backend)
    result = train(DENSE, ac, order=(1, 2, 0), layers=2, compiled=compiled)
    assert difference(result, train_plain(DENSE)) < 1e-6 * (
        10 if backend == "inductor" else 1
    )  # fused, rounded less often


# What is wrong is found


@pytest.mark.parametrize("ac", ["full", "norm", "core+rope", "mlp"])
def test_recomputation_from_wrong_inputs_changes_the_gradients(
    ac: str, monkeypatch: pytest.MonkeyPatch, train_plain: Any
) -> None:
    right = OperationInput.open
    monkeypatch.setattr(
        OperationInput, "open", lambda self: (right(self).detach() * 1.01).requires_grad_(self.requires_grad)
    )
    assert difference(train(DENSE, ac, order=(0, 1, 2), layers=2), train_plain(DENSE)) > 1e-4


@pytest.mark.parametrize("ac", ["full", "norm"])
def test_an_input_changed_in_place_is_rejected(ac: str) -> None:
    entry = micro_batch(0) * 1.0
    loss = Stack(DENSE, ac)(entry).sum()
    with torch.no_grad():
        entry.add_(1)
    with pytest.raises(RuntimeError, match=r"\[32, 32\] kept for the backward was changed in place"):
        loss.backward()


def names(model: Model) -> Iterator[str]:
    stack = Stack(model, "none")
    runs = count_operations(stack)
    stack(micro_batch(0))
    yield from runs


@pytest.mark.parametrize("model", MODELS.values(), ids=lambda model: model.name)
def test_recomputation_groups_are_those_of_the_planner(model: Model) -> None:
    ops = (
        Counts(model, Job(sequence=TOKENS, attention="blocks")).unit(LocalDegrees(sequences=1), get_kind(model, 0)).ops
    )
    planned = {op.name for op in ops}
    own = {  # several of the planner's in one
        "attention.qkv": "attention.q",
        "attention.down": "attention.kv_down",
        "mlp.gate_up": "mlp.gate",
        "moe.experts.gate_up": "moe.experts.gate",
        "moe.shared.gate_up": "moe.shared.gate",
        "moe.send": "moe.dispatch",
        "moe.arrive": "moe.dispatch",
        "moe.return": "moe.combine",
    }
    for name in names(model):
        planned_name = own.get(name, name)
        assert planned_name in planned
        assert list_groups(name) == list_groups(planned_name), name
