"""Our mixture of experts against transformers', against loops, and against formulas; what it keeps and counts."""

from __future__ import annotations

from math import ceil
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from transformers.models.deepseek_v2 import modeling_deepseek_v2 as deepseek_v2
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek_v3
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as deepseek_v4
from transformers.models.gpt_oss import modeling_gpt_oss as gpt_oss
from transformers.models.mixtral import modeling_mixtral as mixtral
from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen3_moe

from fivefold.errors import RunFailure
from fivefold.model.spec import Model
from fivefold.model.weights import list_block_weights
from fivefold.trainer.measure.meter import Meter
from fivefold.trainer.model.experts import Experts, multiply_by_group, sum_by_group
from fivefold.trainer.model.linear import WgradStore
from fivefold.trainer.model.moe import Moe
from fivefold.trainer.model.routing import Sequences, draw_expert_table

D, FFN, E, K, B, T = 16, 24, 8, 3, 2, 12


def model(**moe: Any) -> Model:
    fields = {"experts": E, "topk": K, "ffn": FFN, "balance": "none"} | moe
    return Model(name="m", layers=1, width=D, heads=2, kv_heads=2, head_dim=8, ffn=32, vocab=64, moe=fields)


def draw_inputs(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def build_part(of: Model) -> Moe:
    layer = Moe(of)
    with torch.no_grad():
        for index, weight in enumerate(layer.parameters()):
            weight.copy_(draw_inputs(*weight.shape, seed=index) * 0.4)
    return layer


def rows() -> Tensor:
    return draw_inputs(B * T, D).requires_grad_()


def close(found: Tensor | None, expected: Tensor | None, *, within: float = 1e-5) -> None:
    assert found is not None
    assert expected is not None
    assert (found - expected).norm() <= within * expected.norm()


def test_names_and_shapes_equal_the_list_of_weights() -> None:
    of = model(shared_experts=2, router_bias=True, expert_bias=True)
    expected = {w.name: w.shape for w in list_block_weights(of, 0) if w.name.startswith("moe.")}
    assert {f"moe.{name}": tuple(weight.shape) for name, weight in Moe(of).named_parameters()} == expected


def _mixtral() -> tuple[Model, Any]:
    config = mixtral.MixtralConfig(
        hidden_size=D, intermediate_size=FFN, num_local_experts=E, num_experts_per_tok=K, router_jitter_noise=0.0
    )
    return model(), mixtral.MixtralSparseMoeBlock(config)


def _qwen3() -> tuple[Model, Any]:
    config = qwen3_moe.Qwen3MoeConfig(
        hidden_size=D, moe_intermediate_size=FFN, num_experts=E, num_experts_per_tok=K, norm_topk_prob=False
    )
    return model(normalized=False), qwen3_moe.Qwen3MoeSparseMoeBlock(config)


def _deepseek_v2() -> tuple[Model, Any]:
    config = deepseek_v2.DeepseekV2Config(
        hidden_size=D,
        num_attention_heads=2,
        moe_intermediate_size=FFN,
        n_routed_experts=E,
        num_experts_per_tok=K,
        n_shared_experts=2,
        n_group=4,
        topk_group=2,
        topk_method="group_limited_greedy",
        norm_topk_prob=False,
        routed_scaling_factor=1.7,
    )
    ours = model(shared_experts=2, groups=4, topk_groups=2, normalized=False, scaling=1.7)
    return ours, deepseek_v2.DeepseekV2Moe(config)


def _deepseek_v3() -> tuple[Model, Any]:
    config = deepseek_v3.DeepseekV3Config(
        hidden_size=D,
        num_attention_heads=2,
        moe_intermediate_size=FFN,
        n_routed_experts=E,
        num_experts_per_tok=K,
        n_shared_experts=1,
        n_group=2,
        topk_group=1,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
    )
    ours = model(shared_experts=1, groups=2, topk_groups=1, score="sigmoid", scaling=2.5, balance="free")
    block = deepseek_v3.DeepseekV3MoE(config)
    block.gate.e_score_correction_bias.copy_(draw_inputs(E, seed=5) * 0.5)
    return ours, block


def _deepseek_v4() -> tuple[Model, Any]:
    """Of gates and ups many are beyond the limit, in experts and in the shared one."""
    config = deepseek_v4.DeepseekV4Config(
        hidden_size=D,
        intermediate_size=FFN,
        n_routed_experts=E,
        num_experts_per_tok=K,
        num_hidden_layers=1,
        num_hash_layers=0,
        swiglu_limit=0.7,
        routed_scaling_factor=1.5,
    )
    ours = model(shared_experts=1, score="sqrtsoftplus", scaling=1.5, balance="free", clamp=0.7)
    block = deepseek_v4.DeepseekV4SparseMoeBlock(config, layer_idx=0)
    block.gate.e_score_correction_bias.copy_(draw_inputs(E, seed=5) * 0.5)
    return ours.replace(mlp_clamp=0.7), block


def test_hashed_experts_are_those_that_the_table_of_transformers_names() -> None:
    config = deepseek_v4.DeepseekV4Config(
        vocab_size=131, hidden_size=D, n_routed_experts=E, num_experts_per_tok=K, num_hidden_layers=1, num_hash_layers=1
    )
    of = model(score="sqrtsoftplus", scaling=1.5, balance="free", hashed_layers=1).replace(vocab=131)
    ours, theirs = build_part(of), deepseek_v4.DeepseekV4HashRouter(config)
    ids = torch.arange(B * T).view(B, T) % 7
    with torch.no_grad():
        theirs.weight.copy_(ours.router.weight)
        theirs.tid2eid.copy_(draw_expert_table(131, moe=of.moe, generator=torch.Generator().manual_seed(0)))
        ours.table.copy_(theirs.tid2eid)
        ours.bias.fill_(torch.nan)  # is not read
    x = rows()
    weights, chosen = ours.choose_experts(ours.router(x), None, ids)
    _, expected, indices = theirs(x.view(B, T, D), ids)
    assert torch.equal(chosen, indices)
    close(weights, expected)


@pytest.mark.parametrize("family", [_mixtral, _qwen3, _deepseek_v2, _deepseek_v3, _deepseek_v4])
def test_experts_equal_those_of_transformers(family: Any) -> None:
    of, theirs = family()
    ours = build_part(of)
    if of.moe is not None and of.moe.balance == "free":
        ours.bias.copy_(theirs.gate.e_score_correction_bias)
    with torch.no_grad():
        theirs.gate.weight.copy_(ours.router.weight)
        theirs.experts.gate_up_proj.copy_(torch.cat((ours.experts.gate, ours.experts.up), 1))
        theirs.experts.down_proj.copy_(ours.experts.down)
        for name in ("gate", "up", "down") if ours.shared else ():
            linear = getattr(theirs.shared_experts, f"{name}_proj")
            linear.weight.copy_(getattr(ours.shared, name).weight)
    x, y = rows(), rows()
    result, expected = ours(x), theirs(y.view(B, T, D)).view(B * T, D)
    close(result, expected)
    for out in (result, expected):
        out.backward(draw_inputs(B * T, D, seed=1))
    close(x.grad, y.grad)
    close(ours.router.weight.grad, theirs.gate.weight.grad)
    close(torch.cat((ours.experts.gate.grad, ours.experts.up.grad), 1), theirs.experts.gate_up_proj.grad)
    close(ours.experts.down.grad, theirs.experts.down_proj.grad)
    for name in ("gate", "up", "down") if ours.shared else ():
        linear = getattr(theirs.shared_experts, f"{name}_proj")
        close(getattr(ours.shared, name).weight.grad, linear.weight.grad)


def test_clamped_experts_with_biases_are_those_of_gpt_oss() -> None:
    """Wide enough that some gates and ups are beyond the limit on either side."""
    config = gpt_oss.GptOssConfig(hidden_size=D, intermediate_size=FFN, num_local_experts=E, num_experts_per_tok=K)
    of = model(router_bias=True, expert_bias=True).replace(activation="clamped_swiglu")
    ours, theirs = build_part(of), gpt_oss.GptOssMLP(config)
    w = ours.experts
    pairs = {
        "gate_up_proj": lambda part: torch.stack((part(w.gate), part(w.up)), 2).flatten(1, 2).transpose(1, 2),
        "gate_up_proj_bias": lambda part: torch.stack((part(w.gate_bias), part(w.up_bias)), 2).flatten(1),
        "down_proj": lambda part: part(w.down).transpose(1, 2),
        "down_proj_bias": lambda part: part(w.down_bias),
    }
    with torch.no_grad():
        for weight in (w.gate, w.up, w.gate_bias, w.up_bias):
            weight.mul_(6)
        for name, of_ours in pairs.items():
            getattr(theirs.experts, name).copy_(of_ours(lambda weight: weight))
        for name in ("weight", "bias"):
            getattr(theirs.router, name).copy_(getattr(ours.router, name))
    x, y = rows(), rows()
    gate, up = w.gate_up(x.detach(), torch.tensor([B * T] * E, dtype=torch.int32))
    assert min(int(beyond.sum()) for beyond in (gate > 7, up > 7, up < -7)) > 5
    result, expected = ours(x), theirs(y.view(B, T, D))[0].view(B * T, D)
    close(result, expected)
    for out in (result, expected):
        out.backward(draw_inputs(B * T, D, seed=1))
    close(x.grad, y.grad)
    for name, of_ours in pairs.items():
        close(of_ours(lambda weight: weight.grad), getattr(theirs.experts, name).grad)
    for name in ("weight", "bias"):
        close(getattr(ours.router, name).grad, getattr(theirs.router, name).grad)


def run_by_loops(layer: Moe, x: Tensor) -> tuple[Tensor, Tensor]:
    """Every expert on every row, with biases, in autograd's own hands; a choice beyond the capacity weighs nothing."""
    of, w = layer.moe, layer.experts
    bias = 0 if layer.router.bias is None else layer.router.bias
    scores = (x @ layer.router.weight.t() + bias).softmax(-1)
    top = scores.topk(of.topk, dim=-1)
    weights = top.values / top.values.sum(-1, keepdim=True) * of.scaling
    dense = torch.zeros_like(scores).scatter(1, top.indices, weights)
    if of.capacity is not None:
        most, taken, kept = ceil(of.capacity * T * of.topk / of.experts), torch.zeros(B, E), torch.ones(B * T, E)
        for row, expert in ((row, int(e)) for row, choice in enumerate(top.indices) for e in choice):
            taken[row // T, expert] += 1
            kept[row, expert] = taken[row // T, expert] <= most
        dense = dense * kept
    out = torch.zeros_like(x)
    for e in range(of.experts):
        gate, up = (
            x @ getattr(w, name)[e].t() + getattr(w, f"{name}_bias", torch.zeros(E, 1))[e] for name in ("gate", "up")
        )
        made_here = (F.silu(gate) * up) @ w.down[e].t() + getattr(w, "down_bias", torch.zeros(E, 1))[e]
        out = out + dense[:, e, None] * made_here
    return out, scores


CASES = {
    "plain": {},
    "biases": {"router_bias": True, "expert_bias": True, "scaling": 1.5},
    "capacity": {"capacity": 0.8, "expert_bias": True},
    "tight": {"capacity": 0.1},
}


@pytest.mark.parametrize("case", CASES)
def test_experts_equal_a_loop_over_experts(case: str) -> None:
    ours, theirs = build_part(model(**CASES[case])), build_part(model(**CASES[case]))
    ours.sequences = Sequences(T)
    x, y = rows(), rows()
    result, (expected, _) = ours(x), run_by_loops(theirs, y)
    close(result, expected)
    for out in (result, expected):
        out.backward(draw_inputs(B * T, D, seed=1))
    close(x.grad, y.grad)
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert mine.grad is not None, name
        close(mine.grad, other.grad)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_the_aux_loss_adds_its_gradient_and_nothing_else(score: str) -> None:
    alpha, scale = 0.3, 1 / 100
    layers = [build_part(model(score=score, balance=kind, aux_coefficient=alpha)) for kind in ("none", "aux")]
    inputs, outs = [rows() for _ in layers], []
    for layer, x in zip(layers, inputs, strict=True):
        layer.sequences, layer.scale = Sequences(T), scale
        outs.append(layer(x))
        outs[-1].backward(torch.zeros(B * T, D))  # of the token loss: what is left is the other's
    assert torch.equal(*outs)
    x = rows()
    weight = layers[0].router.weight.detach().requires_grad_()
    scores = (x @ weight.t()).softmax(-1) if score == "softmax" else (x @ weight.t()).sigmoid()
    loss = torch.zeros(())
    for part in scores.view(B, T, E):
        chosen = part.topk(K, dim=-1).indices
        f = torch.stack([(chosen == e).sum() for e in range(E)]) * E / (K * T)
        loss = loss + alpha * (f * (part / part.sum(-1, keepdim=True)).mean(0)).sum() * T * scale
    loss.backward()
    assert weight.grad is not None
    assert weight.grad.norm() > 1e-3
    close(layers[1].router.weight.grad, weight.grad)
    close(inputs[1].grad, x.grad)
    assert not inputs[0].grad.any()


def test_an_aux_loss_without_a_weight_is_rejected() -> None:
    with pytest.raises(RunFailure, match=r"moe\.scale"):
        build_part(model(balance="aux"))(rows()).sum().backward()


def test_the_bias_moves_against_the_load() -> None:
    layer = build_part(model(balance="free", score="sigmoid"))
    for _ in range(2):
        x = rows()
        layer(x)  # a forward alone, as a recomputation's first, counts nothing
        layer(x).sum().backward()
    scores = (x @ layer.router.weight.t()).sigmoid()
    expected = 2 * torch.bincount(scores.topk(K, dim=-1).indices.flatten(), minlength=E)
    assert layer.load.tolist() == expected.tolist()
    layer.update_bias(layer.load, rate=0.5)
    assert layer.bias.tolist() == (0.5 * torch.sign(expected.float().mean() - expected)).tolist()
    busiest = int(expected.argmax())
    layer.load.zero_()
    layer(x).sum().backward()
    assert layer.load[busiest] < expected[busiest] / 2


def test_deferred_weight_gradients_are_stored() -> None:
    now, later = build_part(model(shared_experts=1)), build_part(model(shared_experts=1))
    wait = WgradStore()
    wait.deferring = True
    for module in later.modules():
        if hasattr(module, "wgrad_store"):
            module.wgrad_store = wait
    x, y = rows(), rows()
    for layer, source in ((now, x), (later, y)):
        layer(source).backward(draw_inputs(B * T, D, seed=1))
    assert torch.equal(x.grad, y.grad)  # type: ignore[arg-type]
    assert all(weight.grad is None for weight in later.parameters())
    for work in wait.take():
        work()
    for mine, other in zip(later.parameters(), now.parameters(), strict=True):
        assert torch.equal(mine.grad, other.grad)  # type: ignore[arg-type]


def test_saved_bytes_equal_the_planner() -> None:
    """x, scores, and of the k copies: rows, gate, up, activation; all else is small: indices and weights."""
    kept: dict[int, int] = {}
    layer, x = build_part(model()), rows()
    weights = {weight.untyped_storage().data_ptr() for weight in layer.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        out = layer(x)
    large = sorted(size for size in kept.values() if size > B * T * K * 8)
    copies = B * T * K * 4
    assert large == sorted([B * T * E * 4, B * T * D * 4, copies * D, copies * FFN, copies * FFN, copies * FFN])
    del out


@pytest.mark.parametrize("sizes", [[3, 0, 4], [0, 0, 0], [0, 7, 0]])
@pytest.mark.parametrize(("into", "outof"), [(8, 12), (6, 10)])
def test_grouped_matmuls_are_equal_with_and_without_one_kernel(sizes: list[int], into: int, outof: int) -> None:
    n, offsets = sum(sizes), torch.tensor(sizes).cumsum(0, dtype=torch.int32)
    x, g, w = draw_inputs(n, into), draw_inputs(n, outof), draw_inputs(3, into, outof)
    close(multiply_by_group(x, w, offsets), multiply_by_group(x.double(), w.double(), offsets))
    summed = sum_by_group(g.double(), x.double(), offsets)
    close(sum_by_group(g, x, offsets), summed)
    for expert, size in enumerate(sizes):
        assert bool(summed[expert].any()) == (size > 0)


def test_groups_of_16_bits_are_multiplied_in_fp32_on_a_cpu() -> None:
    """oneDNN would compile a kernel for every new number of rows, which takes ten times as long as the product."""
    x, g, w = draw_inputs(9, 8).bfloat16(), draw_inputs(9, 12).bfloat16(), draw_inputs(3, 8, 12).bfloat16()
    offsets = torch.tensor([2, 2, 9], dtype=torch.int32)
    with Meter([x, g, w], axis=str) as meter:
        result, summed = multiply_by_group(x, w, offsets), sum_by_group(g, x, offsets)
    assert meter.flops == 2 * 2 * 9 * 8 * 12
    assert meter.peak_bytes - meter.base_bytes == result.nbytes + summed.nbytes  # the rest is scratch
    assert torch.equal(result, multiply_by_group(x.double(), w.double(), offsets).bfloat16())
    assert torch.equal(summed, sum_by_group(g.double(), x.double(), offsets).bfloat16())


def test_experts_work_in_bf16_with_a_router_in_fp32() -> None:
    narrow, wide = (
        build_part(model(shared_experts=1)).bfloat16(),
        build_part(model(shared_experts=1)).bfloat16().float(),
    )
    x, y = rows().detach().bfloat16().requires_grad_(), rows().detach().bfloat16().float().requires_grad_()
    result, expected = narrow(x), wide(y)
    assert result.dtype == torch.bfloat16
    assert narrow.router(x).dtype == torch.float32
    assert torch.equal(narrow.router(x), wide.router(y))
    close(result.float(), expected, within=2e-2)
    for out in (result, expected):
        out.backward(draw_inputs(B * T, D, seed=1).to(out.dtype))
    close(x.grad.float(), y.grad, within=2e-2)
    for mine, other in zip(narrow.parameters(), wide.parameters(), strict=True):
        assert mine.grad is not None
        assert mine.grad.dtype == torch.bfloat16
        close(mine.grad.float(), other.grad, within=3e-2)


def test_sharded_experts_give_a_part_of_the_sum() -> None:
    """Shapes are read when it runs: half of each expert gives a part of the sum."""
    whole = build_part(model()).experts
    x, share, offsets = draw_inputs(9, D), draw_inputs(9), torch.tensor([1, 1, 4, 4, 6, 9, 9, 9], dtype=torch.int32)

    def run(experts: Experts) -> Tensor:
        gate, up = experts.gate_up(x, offsets)
        return experts.project_down(F.silu(gate) * up * share[:, None], share, offsets)

    expected, total = run(whole), torch.zeros(9, D)
    for half in range(2):
        part = Experts(model())
        cut = slice(half * FFN // 2, (half + 1) * FFN // 2)
        part.gate, part.up = (torch.nn.Parameter(w[:, cut].contiguous()) for w in (whole.gate, whole.up))
        part.down = torch.nn.Parameter(whole.down[:, :, cut].contiguous())
        total += run(part)
    close(total, expected)
