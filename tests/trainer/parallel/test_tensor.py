"""A small decoder cut over 2 and 4 ranks against plain torch on one: values, gradients, messages, mutations."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.job import get_recipe
from fivefold.step import count_sent_bytes
from fivefold.trainer.measure.meter import Meter
from fivefold.trainer.model.float8.matmul import Float8Gemms
from fivefold.trainer.model.kernels.activations import activate_gated
from fivefold.trainer.model.kernels.eager import EAGER
from fivefold.trainer.model.kernels.loss import cross_entropy, nats
from fivefold.trainer.model.kernels.norms import rms_norm
from fivefold.trainer.model.linear import Linear, WgradStore, fused_linears, mark_recomputation
from fivefold.trainer.parallel import tensor
from fivefold.trainer.parallel.collectives import Pending
from fivefold.trainer.parallel.mesh import AxisGroup

ROWS, WIDTH, FFN, WORDS, HEAD, HEADS = 12, 16, 32, 251, 8, 4
PADDED, CHUNK = 252, 300
SCALE = 1 / ROWS


def draw_inputs(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape) + 1000 * seed)) * 0.3


def ids(shift: int) -> Tensor:
    return (torch.arange(ROWS) * 23 + shift) % WORDS  # all ranks' words, and one of them twice


class Small(nn.Module):
    """x = embed; x += mlp(norm(x)); loss = head(x): the seams and names of the decoder, with nothing else."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.model = SimpleNamespace(vocab=WORDS, qk_norm="none", sub_norm=False, logit_scale=1.0, logit_softcap=None)
        self.embed, self.mlp, self.head = nn.Module(), nn.Module(), nn.Module()
        self.embed.tokens = nn.Embedding(PADDED, WIDTH)
        self.embed.lookup = F.embedding
        self.norm = nn.Parameter(torch.empty(WIDTH))
        self.mlp.gate, self.mlp.up = (Linear(WIDTH, FFN, bias=True) for _ in range(2))
        self.mlp.down = Linear(FFN, WIDTH, bias=True)
        self.head.out = Linear.tie(self.embed.tokens) if tied else Linear(WIDTH, PADDED, bias=False)
        self.head.loss, self.head.kernels = nats, EAGER
        self.head.skips_negative_targets = False

    def forward(self) -> Tensor:
        x = self.embed.lookup(ids(0), self.embed.tokens.weight)
        gate, up = fused_linears(rms_norm(x, self.norm, epsilon=1e-5), self.mlp.gate, self.mlp.up)
        x = x + self.mlp.down(activate_gated(gate, up, "silu"))
        return cross_entropy(self.head.out(x), ids(1), scale=SCALE, loss=self.head.loss)


NAMES = [
    "embed.tokens.weight",
    "norm",
    "mlp.gate.weight",
    "mlp.gate.bias",
    "mlp.up.weight",
    "mlp.up.bias",
    "mlp.down.weight",
    "mlp.down.bias",
    "head.out.weight",
]


def full_weights(*, tied: bool) -> dict[str, Tensor]:
    shapes = [
        (WORDS, WIDTH),
        (WIDTH,),
        (FFN, WIDTH),
        (FFN,),
        (FFN, WIDTH),
        (FFN,),
        (WIDTH, FFN),
        (WIDTH,),
        (WORDS, WIDTH),
    ]
    drawing = {name: draw_inputs(*shape, seed=i) for i, (name, shape) in enumerate(zip(NAMES, shapes, strict=True))}
    if tied:
        del drawing["head.out.weight"]
    return {name: weight.requires_grad_() for name, weight in drawing.items()}


def reference(*, tied: bool) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients in torch's own words."""
    w = full_weights(tied=tied)
    x = F.embedding(ids(0), w["embed.tokens.weight"])
    h = F.rms_norm(x, (WIDTH,), w["norm"], 1e-5)
    gate, up = (F.linear(h, w[f"mlp.{name}.weight"], w[f"mlp.{name}.bias"]) for name in ("gate", "up"))
    x = x + F.linear(F.silu(gate) * up, w["mlp.down.weight"], w["mlp.down.bias"])
    loss = F.cross_entropy(F.linear(x, w["embed.tokens.weight" if tied else "head.out.weight"]), ids(1))
    loss.backward()
    return loss.item(), {name: weight.grad for name, weight in w.items() if weight.grad is not None}


def world() -> AxisGroup:
    size = dist.get_world_size()
    return AxisGroup("tp", dist.get_rank(), tuple(range(size)), dist.group.WORLD)


def take_local_part(name: str, whole: Tensor, axis: AxisGroup) -> Tensor:
    """This rank's part of a weight or a gradient."""
    if name in ("norm", "mlp.down.bias"):
        return whole
    if name == "mlp.down.weight":
        return whole.chunk(axis.size, 1)[axis.rank]
    if len(whole) == WORDS:
        whole = F.pad(whole, (0, 0, 0, PADDED - WORDS))
    return whole.chunk(axis.size)[axis.rank]


def cut(axis: AxisGroup, *, sp: bool, tied: bool = False, dtype: torch.dtype = torch.float32) -> Small:
    module = Small(tied=tied)
    tensor.attach(module, axis, sp=sp)
    for name, weight in full_weights(tied=tied).items():
        owner, _, attribute = name.rpartition(".")
        part = take_local_part(name, weight.detach(), axis).to(dtype).clone()
        setattr(module.get_submodule(owner), attribute, nn.Parameter(part))
    return module


def measure_error(module: Small, gradients: dict[str, Tensor], axis: AxisGroup, *, sp: bool) -> float:
    """The largest relative error of a gradient; what each rank has of its own rows is summed, as ZeRO does."""
    errors = []
    for name, weight in module.named_parameters():
        assert weight.grad is not None, name
        assert weight.grad.dtype == weight.dtype
        grad = weight.grad.float()
        if sp and name in ("norm", "mlp.down.bias"):
            dist.all_reduce(grad)
        expected = take_local_part(name, gradients[name], axis)
        errors.append(((grad - expected).norm() / expected.norm()).item())
    return max(errors)


def compare(dtype: torch.dtype) -> list[tuple[float, float]]:
    """Errors of loss and gradients, with sp and without, tied and not."""
    axis, results = world(), []
    for sp in (True, False):
        for tied in (True, False):
            loss, gradients = reference(tied=tied)
            module = cut(axis, sp=sp, tied=tied, dtype=dtype)
            ours = module()
            ours.backward()
            results.append((abs(ours.item() - loss) / loss, measure_error(module, gradients, axis, sp=sp)))
    return results


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_a_decoder_sharded_over_tp_equals_the_full_one(
    forked, ranks: int, dtype: torch.dtype, tolerance: float
) -> None:
    answers = forked(ranks, compare, dtype)
    assert all(answer[i][0] == answers[0][i][0] for answer in answers for i in range(4))  # one loss on all ranks
    for errors in answers:
        for loss, gradient in errors:
            assert loss <= tolerance
            assert gradient <= tolerance


# Messages: rows of the stream and rows of one fp32 (loss), forward and backward


def messages(sp: bool, again: bool) -> tuple[dict[str, tuple[int, int]], float]:
    axis = world()
    module = cut(axis, sp=sp)
    with Meter([], axis=lambda _group: "tp") as meter:
        if again:
            with mark_recomputation():
                loss = module()
        else:
            loss = module()
        loss.backward()
    spoken = {line.collective: (line.calls, line.bytes) for line in meter.traffic}
    return spoken, measure_error(module, reference(tied=False)[1], axis, sp=sp)


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("sp", [False, True])
def test_messages_and_bytes_equal_the_planner(forked, sp: bool, again: bool) -> None:
    stream, row = ROWS * WIDTH * 4, ROWS * 4
    if sp:
        # gathered: into gate and up, into the head, each again for dW; gradients of down's and the embedding's sums
        expected = {"all_gather": (4 if again else 6, stream), "reduce_scatter": (4, stream)}
    else:
        expected = {"all_reduce": (4, stream)}  # out of embedding and down; gradients of what enters gate·up and head
    sent = {
        name: (count, count * count_sent_bytes(name, payload=size, ranks=2)) for name, (count, size) in expected.items()
    }
    count, size = sent.get("all_reduce", (0, 0))
    sent["all_reduce"] = (count + 3, size + 3 * count_sent_bytes("all_reduce", payload=row, ranks=2))
    for spoken, error in forked(2, messages, sp, again):
        assert spoken == sent
        assert error <= 1e-5


# Deferred weight gradients


def compare_deferred(sp: bool) -> bool:
    axis, results = world(), []
    for deferring in (False, True):
        module, later = cut(axis, sp=sp, tied=True), WgradStore()
        later.deferring = deferring
        for part in module.modules():
            if isinstance(part, Linear):
                part.wgrad_store = later
        module().backward()
        assert (module.mlp.up.weight.grad is None) == deferring
        for work in later.take():
            work()
        results.append([weight.grad for weight in module.parameters()])
    return all(torch.allclose(mine, other, rtol=0, atol=1e-8) for mine, other in zip(*results, strict=True))


@pytest.mark.parametrize("sp", [False, True])
def test_deferred_weight_gradients_equal_immediate_ones(forked, sp: bool) -> None:
    assert forked(2, compare_deferred, sp) == [True, True]


# Mutations: each collective left out in turn is seen


class Mute:
    """Leaves the ``which``-th collective out: what would have come is made of the rank's own."""

    def __init__(self, which: int | None) -> None:
        self.which, self.count, self.kinds = which, 0, Counter[str]()
        for name in ("all_gather", "reduce_scatter", "all_reduce"):
            setattr(tensor, name, self.wrap(name, getattr(tensor, name)))

    def wrap(self, name: str, collective: Any) -> Any:
        def call_or_skip(x: Tensor, axis: AxisGroup, **options: Any) -> Pending:
            self.count += 1
            self.kinds[name] += 1
            if self.count - 1 != self.which:
                return collective(x, axis, **options)
            alone = {"all_gather": lambda: x.repeat(axis.size, 1), "all_reduce": lambda: x}
            return Pending(alone.get(name, lambda: x.chunk(axis.size)[axis.rank].clone())())

        return call_or_skip


def run_mutated(sp: bool) -> tuple[dict[str, int], list[float]]:
    axis, (loss, gradients) = world(), reference(tied=False)
    kept = {name: getattr(tensor, name) for name in ("all_gather", "reduce_scatter", "all_reduce")}
    errors, which = [], None
    while True:
        mute = Mute(which)
        module = cut(axis, sp=sp)
        ours = module()
        ours.backward()
        for name, collective in kept.items():
            setattr(tensor, name, collective)
        error = torch.tensor(max(abs(ours.item() - loss) / loss, measure_error(module, gradients, axis, sp=sp)))
        dist.all_reduce(error, op=dist.ReduceOp.MAX)
        errors.append(error.item())
        which = 0 if which is None else which + 1
        if which == mute.count:
            return dict(mute.kinds), errors


@pytest.mark.parametrize(
    ("sp", "kinds"), [(True, {"all_gather": 6, "reduce_scatter": 4, "all_reduce": 3}), (False, {"all_reduce": 7})]
)
def test_each_omitted_collective_is_detected(forked, sp: bool, kinds: dict[str, int]) -> None:
    for spoken, errors in forked(2, run_mutated, sp):
        assert spoken == kinds
        assert errors[0] <= 1e-5
        assert len(errors) == 1 + sum(kinds.values())
        assert all(not error <= 1e-3 for error in errors[1:]), errors


# The loss alone


def losses(words: int, spread: float) -> list[tuple[float, float, bool, int]]:
    """Per dtype: loss, the gradient's error, whether it lies where the logits lay, how many all_reduces."""
    axis, results = world(), []
    padded = -(-words // axis.size) * axis.size
    held = padded // axis.size
    targets = torch.arange(ROWS) * 23 % words
    for dtype in (torch.float32, torch.bfloat16):
        whole = (draw_inputs(ROWS, words) * spread).to(dtype)
        rounded = whole.double().requires_grad_()
        expected = F.cross_entropy(rounded, targets, reduction="sum") * SCALE
        expected.backward()
        assert rounded.grad is not None
        logits = F.pad(whole, (0, padded - words), value=7.0)[:, axis.rank * held :][:, :held].clone()
        inside = logits.requires_grad_() * 1  # as it comes out of a matmul
        with Meter([inside], axis=lambda _group: "tp") as meter:
            loss = cross_entropy(
                inside, targets, scale=SCALE, loss=tensor.VocabParallel(axis, sp=True, vocab=words).nats
            )
            (gradient,) = torch.autograd.grad(loss, inside)
        (line,) = meter.traffic
        assert line.bytes == 3 * count_sent_bytes("all_reduce", payload=ROWS * 4, ranks=axis.size)
        chunk = max(1, CHUNK // held) * held * 4
        assert meter.peak_bytes - meter.base_bytes <= chunk + 64 * ROWS  # of each row a few numbers
        own_part = F.pad(rounded.grad, (0, padded - words))[:, axis.rank * held :][:, :held]
        error = (gradient - own_part).abs().max().item()
        torch.testing.assert_close(loss.double(), expected.detach(), rtol=1e-6, atol=1e-6)
        results.append((loss.item(), error, inside.data_ptr() == gradient.data_ptr(), line.calls))
    return results


@pytest.mark.parametrize(("ranks", "words", "spread"), [(2, 251, 1.0), (4, 251, 1.0), (4, 5, 1.0), (2, 251, 1e4)])
def test_the_loss_over_a_sharded_vocabulary_equals_one_process(
    forked, ranks: int, words: int, spread: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """5 words over 4 ranks leave one with padding alone."""
    monkeypatch.setattr("fivefold.trainer.model.kernels.loss.LOSS_CHUNK_ELEMENTS", CHUNK)
    answers = forked(ranks, losses, words, spread)
    for answer in answers:
        for (loss, error, in_place, spoken), (first, *_), tolerance in zip(
            answer, answers[0], (1e-7, 5e-4), strict=True
        ):
            assert loss == first
            assert error <= tolerance
            assert in_place
            assert spoken == 3


# Heads: fewer keys' and values' heads than ranks, and rows that every head needs


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    heads = [x.view(ROWS, -1, HEAD).transpose(0, 1)[None] for x in (q, k, v)]
    out = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
    return out[0].transpose(0, 1).flatten(1)


def compare_few_heads(kv_heads: int, sp: bool) -> float:
    axis = world()
    sizes = {"q": HEADS * HEAD, "k": kv_heads * HEAD, "v": kv_heads * HEAD}
    weights = {name: draw_inputs(size, WIDTH).requires_grad_() for name, size in sizes.items()}
    weights["out"] = draw_inputs(WIDTH, HEADS * HEAD).requires_grad_()
    x = draw_inputs(ROWS, WIDTH).requires_grad_()
    whole = attend(*(F.linear(x, weights[name]) for name in "qkv")) @ weights["out"].t()
    whole.backward(draw_inputs(ROWS, WIDTH, seed=1))
    copies = axis.size // kv_heads
    here = dict.fromkeys("kv", axis.rank // copies) | {"q": axis.rank}
    layers = {}
    for name, weight in weights.items():
        parts = weight.chunk(axis.size, 1) if name == "out" else weight.chunk(kv_heads if name in "kv" else axis.size)
        layers[name] = Linear(1, 1, bias=False)
        layers[name].weight = nn.Parameter(parts[here.get(name, axis.rank)].detach().clone())
        layers[name].hooks = (tensor.RowParallel if name == "out" else tensor.ColumnParallel)(axis, sp=sp)
    mine = x.detach().chunk(axis.size)[axis.rank] if sp else x.detach()
    mine = mine.clone().requires_grad_()
    out = layers["out"](attend(*fused_linears(mine, *(layers[name] for name in "qkv"))))
    upstream = draw_inputs(ROWS, WIDTH, seed=1)
    out.backward(upstream.chunk(axis.size)[axis.rank] if sp else upstream)
    rows = slice(axis.rank * len(out), (axis.rank + 1) * len(out)) if sp else slice(None)
    pairs = [(out, whole[rows]), (mine.grad, x.grad[rows])]
    for name in "kv":  # each copy saw one head of queries: the sum over copies is ZeRO's work
        gradients = [torch.empty_like(layers[name].matrix) for _ in axis.ranks]
        dist.all_gather(gradients, layers[name].matrix.grad)
        first = here[name] * copies
        pairs.append((sum(gradients[first : first + copies]), weights[name].grad.chunk(kv_heads)[here[name]]))
    pairs.append((layers["q"].matrix.grad, weights["q"].grad.chunk(axis.size)[axis.rank]))
    pairs.append((layers["out"].matrix.grad, weights["out"].grad.chunk(axis.size, 1)[axis.rank]))
    return max(((result - expected).norm() / expected.norm()).item() for result, expected in pairs)


@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_attention_with_fewer_key_heads_than_ranks_equals_one_process(forked, kv_heads: int, sp: bool) -> None:
    assert max(forked(4, compare_few_heads, kv_heads, sp)) <= 1e-5


def compare_shared(sp: bool) -> float:
    axis = world()
    whole = draw_inputs(ROWS, 2 * HEAD)[:, HEAD:]  # a part of wider rows, as the rotary key is
    rows = slice(axis.rank * (ROWS // axis.size), (axis.rank + 1) * (ROWS // axis.size)) if sp else slice(None)
    x = whole[rows].clone().requires_grad_()
    heads = [draw_inputs(ROWS, HEAD, seed=rank) for rank in axis.ranks]
    out = tensor.GatherRows(axis, sp=sp)(x)
    upstream = heads[axis.rank].clone()
    out.backward(upstream)
    assert torch.equal(out, whole)
    assert torch.equal(upstream, heads[axis.rank])  # others may use it too
    return (x.grad - sum(heads)[rows]).abs().max().item()


@pytest.mark.parametrize("sp", [False, True])
def test_rows_shared_by_all_heads_have_the_gradients_of_one_process(forked, sp: bool) -> None:
    assert max(forked(2, compare_shared, sp)) <= 1e-6


def check_uneven() -> str:
    layer = Linear(WIDTH, WIDTH, bias=False)
    layer.hooks = tensor.RowParallel(world(), sp=True)
    with pytest.raises(ValueError, match="7 rows are not divisible by tp=2") as raised:
        layer(draw_inputs(7, WIDTH))
    return str(raised.value)


def test_rows_that_do_not_divide_are_rejected(forked) -> None:
    forked(2, check_uneven)


def cast_before_the_gather(name: str) -> list[Any]:
    """The operand of all ranks' rows as it is gathered, and as it is cast on one rank; messages and payloads."""
    axis = world()
    gemms = Float8Gemms(get_recipe(name), kernel=False)
    whole = (draw_inputs(24, 320, seed=5) * torch.logspace(-3, 3, 24)[:, None]).bfloat16()
    own = whole.chunk(axis.size)[axis.rank]
    hooks = tensor.ColumnParallel(axis, sp=True)
    said: list[tuple[str, int]] = []

    def post(_name: str, _ranks: object, collective: str, payload: int) -> None:
        said.append((collective, payload))

    axis.listener.post = post
    operand, expected = hooks.operand(own, gemms), gemms.operand(whole)
    assert [part is None for part in operand] == [part is None for part in expected]
    same = [
        a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.float(), b.float())
        for a, b in zip(operand, expected, strict=True)
        if a is not None and b is not None
    ]
    return [all(same), said]


@pytest.mark.parametrize(
    ("name", "sent"),
    [
        ("fp8", [("all_reduce", 4), ("all_gather", 24 * 320)]),
        ("fp8-rowwise", [("all_gather", 24 * 320), ("all_gather", 24 * 4)]),
        ("fp8-rowwise-gw", [("all_gather", 24 * 320), ("all_gather", 24 * 4)]),
        ("fp8-tiles", [("all_gather", 24 * 320), ("all_gather", 24 * 3 * 4)]),
        ("mxfp8", [("all_gather", 24 * 320), ("all_gather", 24 * 10)]),
        ("nvfp4", [("all_reduce", 4), ("all_gather", 24 * 160), ("all_gather", 24 * 20)]),
    ],
)
def test_fp8_casts_gathered_over_tp_are_bitwise_equal(forked, name: str, sent: list[tuple[str, int]]) -> None:
    assert forked(2, cast_before_the_gather, name) == [[True, sent]] * 2
