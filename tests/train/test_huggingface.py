"""The decoder against reference classes of transformers with the same random weights: logits, loss, every gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from fivefold.model.catalog import CATALOG, named
from fivefold.model.huggingface import from_config
from fivefold.model.spec import Model
from fivefold.train.attention import frequencies, rotary_tables
from fivefold.train.transformer import Transformer

B, T = 3, 40
PLAIN = {
    "vocab_size": 131, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS = PLAIN | {"num_experts_per_tok": 2, "moe_intermediate_size": 24, "num_hidden_layers": 3}
LATENT = EXPERTS | {
    "num_key_value_heads": 6, "kv_lora_rank": 20, "q_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
    "v_head_dim": 6, "head_dim": 4, "n_routed_experts": 8, "n_shared_experts": 2, "first_k_dense_replace": 1,
}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e3, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 48}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e3, "factor": 4.0, "original_max_position_embeddings": 16}
LINEAR = {"rope_type": "linear", "rope_theta": 1e3, "factor": 3.0}

CASES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **PLAIN},
    "llama, tied and biased": {
        "model_type": "llama", **PLAIN, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True
    },
    "llama of 3.1": {"model_type": "llama", **PLAIN, "rope_parameters": LLAMA3},
    "qwen2, linear": {"model_type": "qwen2", **PLAIN, "rope_parameters": LINEAR},
    "qwen3, yarn": {"model_type": "qwen3", **PLAIN, "rope_parameters": YARN},
    "mixtral": {"model_type": "mixtral", **EXPERTS, "num_local_experts": 4, "sliding_window": None},
    "qwen3-moe": {
        "model_type": "qwen3_moe", **EXPERTS, "num_experts": 8, "norm_topk_prob": True, "mlp_only_layers": [0]
    },
    "qwen3-moe, not rescaled": {"model_type": "qwen3_moe", **EXPERTS, "num_experts": 8, "norm_topk_prob": False},
    "deepseek-v2": {"model_type": "deepseek_v2", **LATENT, "q_lora_rank": None, "topk_method": "greedy"},
    "deepseek-v3": {
        "model_type": "deepseek_v3", **LATENT, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5,
        "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5},
    },
}  # fmt: skip

NAMES = (
    ("embed.tokens", "model.embed_tokens"), ("head.norm", "model.norm"), ("head.out", "lm_head"),
    ("blocks.", "model.layers."), ("norm1", "input_layernorm"), ("norm2", "post_attention_layernorm"),
    ("attention.q_down", "self_attn.q_a_proj"), ("attention.q_up", "self_attn.q_b_proj"),
    ("attention.kv_down", "self_attn.kv_a_proj_with_mqa"), ("attention.kv_norm", "self_attn.kv_a_layernorm"),
    ("attention.kv_up", "self_attn.kv_b_proj"), ("attention.q_norm", "self_attn.q_norm"),
    ("attention.k_norm", "self_attn.k_norm"), ("attention.q.", "self_attn.q_proj."),
    ("attention.k.", "self_attn.k_proj."), ("attention.v.", "self_attn.v_proj."),
    ("attention.out", "self_attn.o_proj"), ("moe.router", "mlp.gate"), ("moe.shared", "mlp.shared_experts"),
    ("moe.experts.down", "mlp.experts.down_proj"), ("moe.experts", "mlp.experts"), ("gate.", "gate_proj."),
    ("up.", "up_proj."), ("down.", "down_proj."),
)  # fmt: skip


def theirs_as_ours(name: str, tensors: dict[str, Tensor], model: Model) -> Tensor:
    """Of their weights or gradients the one that is ``name`` with us."""
    wanted = name
    if model.mla is not None:
        wanted = wanted.replace("attention.q_norm", "self_attn.q_a_layernorm")
    router, inner = "moe.router" in name, name.rpartition(".")[2]
    for ours, theirs in NAMES[: -3 if router else None]:
        wanted = wanted.replace(ours, theirs)
    if "moe.experts" in name and inner in ("gate", "up"):
        both = tensors[wanted.removesuffix(inner) + "gate_up_proj"]
        return both.chunk(2, dim=1)[inner == "up"]
    found = tensors[wanted]
    if model.mla is not None and name.endswith(("attention.q.weight", "q_up.weight")):
        return halves(found.unflatten(0, (model.heads, -1)), model.mla.rope_dim).flatten(0, 1)
    if model.mla is not None and "kv_down" in name:
        return halves(found[None], model.mla.rope_dim)[0]
    return found


def halves(heads: Tensor, rope_dim: int) -> Tensor:
    """Rotary pairs lie side by side in their last rows of each head, and half a rotary dim apart in ours."""
    still, turned = heads[:, :-rope_dim], heads[:, -rope_dim:]
    return torch.cat((still, turned[:, 0::2], turned[:, 1::2]), dim=1)


def pair(case: dict[str, Any]) -> tuple[Transformer, torch.nn.Module]:
    """Ours with their weights, all drawn wide enough that every part matters."""
    keys = {key: value for key, value in case.items() if key != "model_type"}
    config = AutoConfig.for_model(case["model_type"], **keys, attn_implementation="eager")
    theirs: torch.nn.Module = AutoModelForCausalLM.from_config(config).eval()  # type: ignore[no-untyped-call]
    model = from_config(config.to_dict(), name="reference")
    if model.moe is not None:  # nor does the reference add it, unless it also hands out the router's logits
        model = model.replace(moe=model.moe.replace(aux_coefficient=0.0))
    ours = Transformer(model)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in theirs.named_parameters():
            spread = torch.randn(weight.shape, generator=generator)
            weight.copy_(1 + 0.3 * spread if "norm" in name else spread * weight.shape[-1] ** -0.5)
        tensors = dict(theirs.named_parameters())
        for name, weight in ours.named_parameters():
            weight.copy_(theirs_as_ours(name, tensors, model))
        for name, bias in theirs.named_buffers():
            if name.endswith("e_score_correction_bias"):
                bias.copy_(0.2 * torch.randn(bias.shape, generator=generator))
                ours.get_buffer(f"blocks.{name.split('.')[2]}.moe.bias").copy_(bias)
    return ours, theirs


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_logits_loss_and_gradients_are_the_references(case: dict[str, Any]) -> None:
    ours, theirs = pair(case)
    tokens = torch.randint(0, 131, (B, T), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-5, atol=1e-5)
    loss = ours(tokens[:, :-1], tokens[:, 1:], scale=1 / (B * (T - 1)))
    expected = theirs(tokens, labels=tokens).loss
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    loss.backward()
    expected.backward()
    gradients = {name: weight.grad for name, weight in theirs.named_parameters()}
    for name, weight in ours.named_parameters():
        wanted = theirs_as_ours(name, gradients, ours.model)
        assert weight.grad is not None, name
        assert (weight.grad - wanted).norm() <= 1e-5 * wanted.norm(), name


@pytest.mark.parametrize("name", ["llama3-405b", "llama3.2-1b", "deepseek-v2", "deepseek-v3", "kimi-k2", "gpt-oss-20b"])
def test_scaled_frequencies_are_the_references(name: str) -> None:
    model, values = named(name), CATALOG[name].config
    keys = {key: value for key, value in values.items() if key != "model_type"}
    kind = values["model_type"]
    config = AutoConfig.for_model("deepseek_v3" if kind == "kimi_k2" else kind, **keys)
    theirs, factor = ROPE_INIT_FUNCTIONS[config.rope_parameters["rope_type"]](config, torch.device("cpu"))
    torch.testing.assert_close(torch.tensor(frequencies(model)), theirs, rtol=2e-6, atol=0)
    cos, _ = rotary_tables(model, positions=torch.tensor([0]), dtype=torch.float64, device=torch.device("cpu"))
    assert cos.unique().tolist() == pytest.approx([factor])
