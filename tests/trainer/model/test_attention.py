"""Attention on rows against a reference written out head by head in fp64; what it keeps; rotary tables by positions."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fivefold.errors import UserError
from fivefold.job import Job, get_recipe
from fivefold.model.latent_attention import MLA
from fivefold.model.rope import RopeScaling
from fivefold.model.spec import Model
from fivefold.model.weights import list_block_weights
from fivefold.planner.counts.operations.attention import list_attention
from fivefold.planner.counts.operations.local_shapes import Local, LocalDegrees
from fivefold.trainer.model.attention import GroupedAttention, LatentAttention
from fivefold.trainer.model.rotary import RowInputs, list_tables, rotary_tables

B, T = 2, 13
GROUPED = Model(name="grouped", layers=1, width=24, heads=6, kv_heads=2, head_dim=8, ffn=8, vocab=8, rope_theta=50.0)
LATENT = GROUPED.replace(
    name="latent", kv_heads=6, mla=MLA(q_rank=10, kv_rank=12, nope_dim=6, rope_dim=4, v_dim=5, norm_epsilon=1e-3)
)
assert LATENT.mla is not None
DIRECT = LATENT.replace(name="direct", attention_scale=0.7, mla=LATENT.mla.replace(q_rank=None))
MODELS = [
    GROUPED,
    GROUPED.replace(name="by head", qk_norm="head", qkv_bias=True, out_bias=True),
    GROUPED.replace(name="full, in part", qk_norm="full", rope_fraction=0.5, attention_scale=0.2),
    GROUPED.replace(name="layer norms", qk_norm="head", norm="layernorm"),
    GROUPED.replace(name="a weight for each head", qk_norm="heads", norm="layernorm"),
    LATENT,
    LATENT.replace(name="biased", qkv_bias=True, out_bias=True),
    DIRECT,
]
named = pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)


def tables(model: Model, positions: Tensor) -> tuple[Tensor, Tensor]:
    return rotary_tables(model, positions=positions, dtype=torch.float32, device=torch.device("cpu"))


def build_attention(model: Model) -> nn.Module:
    module = LatentAttention(model) if model.mla else GroupedAttention(model)
    generator = torch.Generator().manual_seed(7)
    for weight in module.parameters():
        weight.data = torch.randn(weight.shape, generator=generator) * 0.4
    return module


def rows(model: Model) -> Tensor:
    return torch.randn(B * T, model.width, generator=torch.Generator().manual_seed(1))


def normalize(x: Tensor, w: dict[str, Tensor], name: str, epsilon: float) -> Tensor:
    if f"{name}.bias" in w:  # LayerNorm
        x = x - x.mean(-1, keepdim=True)
    return x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt() * w[f"{name}.weight"] + w.get(f"{name}.bias", 0.0)


def rotate(x: Tensor, position: int, theta: float) -> Tensor:
    """One head of one token: the pair (i, i + half) turns by position · theta^(−2i/dim)."""
    half = x.shape[-1] // 2
    angle = torch.tensor([position * theta ** (-2 * i / x.shape[-1]) for i in range(half)], dtype=x.dtype)
    low, high = x[..., :half], x[..., half:]
    return torch.cat((low * angle.cos() - high * angle.sin(), low * angle.sin() + high * angle.cos()), -1)


def compute_grouped_heads(model: Model, w: dict[str, Tensor], x: Tensor, position: int) -> tuple[Tensor, ...]:
    q, k, v = (x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0) for name in "qkv")
    if model.qk_norm == "full":
        q, k = normalize(q, w, "q_norm", model.norm_epsilon), normalize(k, w, "k_norm", model.norm_epsilon)
    q, k, v = q.view(model.heads, -1), k.view(model.kv_heads, -1), v.view(model.kv_heads, -1)
    if model.qk_norm in ("head", "heads"):
        q, k = normalize(q, w, "q_norm", model.norm_epsilon), normalize(k, w, "k_norm", model.norm_epsilon)
    cut = int(model.head_dim * model.rope_fraction)
    q, k = (torch.cat((rotate(h[:, :cut], position, model.rope_theta), h[:, cut:]), -1) for h in (q, k))
    group = model.heads // model.kv_heads
    return q, k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)


def latent_heads(model: Model, w: dict[str, Tensor], x: Tensor, position: int) -> tuple[Tensor, ...]:
    mla = model.mla
    assert mla is not None
    if mla.q_rank is None:
        q = x @ w["q.weight"].T
    else:
        q = x @ w["q_down.weight"].T + w.get("q_down.bias", 0.0)
        q = normalize(q, w, "q_norm", mla.norm_epsilon) @ w["q_up.weight"].T
    q = q.view(model.heads, mla.nope_dim + mla.rope_dim)
    q = torch.cat((q[:, : mla.nope_dim], rotate(q[:, mla.nope_dim :], position, model.rope_theta)), -1)
    down = x @ w["kv_down.weight"].T + w.get("kv_down.bias", 0.0)
    kv = (normalize(down[: mla.kv_rank], w, "kv_norm", mla.norm_epsilon) @ w["kv_up.weight"].T).view(model.heads, -1)
    key = rotate(down[mla.kv_rank :], position, model.rope_theta)
    k = torch.stack([torch.cat((head[: mla.nope_dim], key)) for head in kv])
    return q, k, kv[:, mla.nope_dim :]


def reference(model: Model, w: dict[str, Tensor], x: Tensor) -> Tensor:
    """Token by token, query by query, in the dtype of ``x``."""
    heads = latent_heads if model.mla else compute_grouped_heads
    outs = []
    for sequence in x.view(B, T, -1):
        made = [heads(model, w, token, position) for position, token in enumerate(sequence)]
        for t in range(T):
            q, k, v = made[t][0], torch.stack([m[1] for m in made[: t + 1]]), torch.stack([m[2] for m in made[: t + 1]])
            scale = model.attention_scale or 1 / math.sqrt(q.shape[-1])
            share = (torch.einsum("nh,snh->ns", q, k) * scale).softmax(-1)
            outs.append(torch.einsum("ns,snh->nh", share, v).flatten())
    return torch.stack(outs) @ w["out.weight"].T + w.get("out.bias", 0.0)


@named
def test_attention_outputs_and_gradients_equal_the_reference(model: Model) -> None:
    module, x = build_attention(model), rows(model).requires_grad_()
    upstream = torch.linspace(-1, 1, B * T * model.width).view(B * T, model.width)
    out = module(x, RowInputs(T, tables(model, torch.arange(T))))
    out.backward(upstream)
    w = {name: weight.detach().double().requires_grad_() for name, weight in module.named_parameters()}
    wide = x.detach().double().requires_grad_()
    expected = reference(model, w, wide)
    expected.backward(upstream.double())
    result = {"out": out, "x": x.grad} | {name: weight.grad for name, weight in module.named_parameters()}
    wanted: dict[str, Any] = {"out": expected, "x": wide.grad} | {name: weight.grad for name, weight in w.items()}
    assert result.keys() == wanted.keys()
    for name, theirs in wanted.items():
        assert (result[name] - theirs).norm() <= 2e-6 * theirs.norm(), name


@named
def test_attention_weights_are_those_of_the_list_of_weights(model: Model) -> None:
    ours = {f"attention.{name}": tuple(weight.shape) for name, weight in build_attention(model).named_parameters()}
    listed = {
        weight.name: weight.shape for weight in list_block_weights(model, 0) if weight.name.startswith("attention.")
    }
    assert ours == listed


@named
def test_saved_bytes_equal_the_planner(model: Model) -> None:
    module, x = build_attention(model), rows(model).requires_grad_()
    cos, sin = tables(model, torch.arange(T))
    apart = {tensor.untyped_storage().data_ptr() for tensor in (cos, sin, *module.parameters())}
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in apart:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        out = module(x, RowInputs(T, (cos, sin)))  # holds the graph, so that no storage is used twice
    job = Job(sequence=T, global_batch=B, precision=get_recipe("fp32"), attention="blocks")
    ops = list_attention(Local(model, job, LocalDegrees(sequences=B)), "x", layer=0)
    sizes = {"x": x.nbytes} | {name: size for op in ops for name, size in op.writes.items()}
    assert sum(kept.values()) == sum(sizes[name] for name in {name for op in ops for name in op.keeps})
    assert out.shape == x.shape


def test_the_shared_rotary_key_of_latent_attention_goes_through_its_hook() -> None:
    module, x = build_attention(LATENT), rows(LATENT)
    turn = RowInputs(T, tables(LATENT, torch.arange(T)))
    plain, seen = module(x, turn), []

    def share(key: Tensor) -> Tensor:
        seen.append(key.shape)
        return key.flip(0).flip(0) * 2

    module.share = share  # type: ignore[assignment]
    doubled = module(x, turn)
    module.kv_down.weight.data[12:] *= 2  # type: ignore[union-attr, operator, index]
    module.share = lambda key: key  # type: ignore[assignment]
    assert seen == [(B * T, 4)]
    torch.testing.assert_close(doubled, module(x, turn))
    assert not torch.allclose(doubled, plain)


def test_rotary_tables_follow_the_given_positions() -> None:
    positions = torch.tensor([0, 1, 2, 9, 10, 11])  # rank 0 of two in a ring: chunks 0 and 3
    whole, zigzag = tables(GROUPED, torch.arange(12)), tables(GROUPED, positions)
    for all_of_it, part in zip(whole, zigzag, strict=True):
        assert part.shape == (6, 1, 8)
        torch.testing.assert_close(part, all_of_it[positions], rtol=0, atol=0)


def test_llama3_rope_scaling_slows_only_low_frequencies() -> None:
    # Llama 3.1: theta 500000, 128 dims, factor 8 of 8192 tokens; pair 0 turns once in 2π tokens, the last in 2.56e6
    scaling = RopeScaling(kind="llama3", factor=8.0, original_positions=8192)
    plain = GROUPED.replace(head_dim=128, rope_theta=5e5)
    one = torch.tensor([1])
    slow, fast = (tables(model, one)[1][0, 0, 64:].asin() for model in (plain.replace(rope_scaling=scaling), plain))
    # wavelengths up to 8192/4 stay: pairs 0 to 28; from 8192/1 on they are eight times as long: from pair 35
    ratio = fast[1:] / slow[1:]
    torch.testing.assert_close(ratio[:28], torch.ones(28))
    torch.testing.assert_close(ratio[34:], torch.full((29,), 8.0))
    assert bool((ratio[28:34] > 1).all())
    assert bool((ratio[28:34] < 8).all())


@pytest.mark.parametrize(
    ("scaling", "line"),
    [
        (RopeScaling(kind="dynamic", factor=2.0), "'dynamic' needs original_positions"),
        (RopeScaling(kind="yarn", factor=2.0, original_positions=64), "'yarn' needs attention_factor"),
        (RopeScaling(kind="llama3", factor=2.0), "'llama3' needs original_positions"),
    ],
)
def test_unsupported_rope_scalings_are_rejected(scaling: RopeScaling, line: str) -> None:
    with pytest.raises(UserError, match=line):
        tables(GROUPED.replace(rope_scaling=scaling), torch.arange(4))


def test_layers_that_slide_have_a_base_of_their_own_and_some_do_not_rotate() -> None:
    """Sliding layers are as if all had their base, without scaling; still ones as if there were no positions."""
    scaling = RopeScaling(kind="linear", factor=4.0)
    model = GROUPED.replace(
        layers=3,
        window=T,
        window_pattern=(True, False, False),
        rope_pattern=(True, True, False),
        rope_theta_sliding=7.0,
        rope_scaling=scaling,
    )
    mixed = RowInputs(T, list_tables(model, positions=torch.arange(T), dtype=torch.float32, device=torch.device("cpu")))
    x, plain = rows(model), {"window": None, "window_pattern": (), "rope_pattern": (), "rope_theta_sliding": None}
    alone = (GROUPED.replace(rope_theta=7.0), model.replace(**plain), None)
    for layer, like in enumerate(alone):
        module = GroupedAttention(model, layer=layer)
        module.load_state_dict(build_attention(model).state_dict())
        own = tables(like, torch.arange(T)) if like else tables(GROUPED, torch.zeros(T))
        torch.testing.assert_close(module(x, mixed), build_attention(GROUPED)(x, RowInputs(T, own)))


def test_rotary_angles_of_far_positions_are_exact() -> None:
    """257 is no bf16, 4097 no 12-bit number; in fp32 their angles would be off by 1e-3 at 131071."""
    far = [0, 1, 257, 4097, 100_003, 131_071]
    cos, sin = tables(GROUPED, torch.tensor(far))
    for place, position in enumerate(far):
        angles = [position * GROUPED.rope_theta ** (-2 * pair / GROUPED.head_dim) for pair in range(4)]
        assert cos[place, 0].tolist() == pytest.approx([math.cos(angle) for angle in angles] * 2, abs=1e-7)
        expected = [-math.sin(angle) for angle in angles] + [math.sin(angle) for angle in angles]
        assert sin[place, 0].tolist() == pytest.approx(expected, abs=1e-7)
