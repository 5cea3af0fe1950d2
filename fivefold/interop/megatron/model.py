"""Megatron's arguments <-> a model."""

from __future__ import annotations

import re
from typing import Any

from fivefold.interop.format import Asked
from fivefold.interop.keys import Values
from fivefold.model import catalog
from fivefold.model.shape import MLA, MTP, MoE
from fivefold.model.spec import Model
from fivefold.record import Mistake

TOKENIZERS = {"GPT2BPETokenizer": 50_257, "BertWordPieceLowerCase": 30_522, "Llama2Tokenizer": 32_000}
SIZES = ("num_layers", "hidden_size", "num_attention_heads")


def vocabulary(values: Values, asked: Asked) -> int | None:
    """Of the arguments, of what the user says, or of a tokenizer that is known."""
    said = values["vocab_size"] or asked.vocab or values["padded_vocab_size"] or values["pad_vocab_size_to"]
    if said:
        return int(said) if isinstance(said, int) else None
    tokenizer = str(values["tokenizer_model"] or "").rstrip("/")
    if tokenizer:
        name = tokenizer.rpartition("/")[2].lower()
        for key, entry in catalog.CATALOG.items():
            if name and entry.source.lower().endswith("/" + name):
                return catalog.named(key).vocab
    return TOKENIZERS.get(str(values["tokenizer_type"]))


def model(values: Values, asked: Asked) -> tuple[Model | None, tuple[str, ...]]:
    """The model, or what is missing."""
    if asked.model:
        _compared(values, asked.model)
        return asked.model, ()
    if lacking := [name for name in SIZES if values[name] is None]:
        return None, (
            f"the model: {', '.join('--' + name.replace('_', '-') for name in lacking)}; or say --model NAME",
        )
    vocab = vocabulary(values, asked)
    if vocab is None:
        return None, ("the vocabulary, which its tokenizer has: say --vocab 128256",)
    layers, width, heads = (values.whole(name) for name in SIZES)
    fields = {path.partition(".")[2]: value for path, value in values.fields().items() if path.startswith("model.")}
    groups = values.whole("num_query_groups") if values["group_query_attention"] else heads
    gated = bool(values["swiglu"])
    ffn = values["ffn_hidden_size"] or (int(4 * width * 2 / 3) // 64 * 64 if gated else 4 * width)
    biased = not values["disable_bias_linear"]
    if values["use_rotary_position_embeddings"]:
        fields["position"] = "rope"
    if fields.get("attention_dropout") == fields.get("dropout"):
        fields.pop("attention_dropout", None)
    if values["multi_latent_attention"] and fields.pop("qk_norm", "none") == "none":
        values.approximate(
            "qk_layernorm", "is not set: Megatron then leaves out the norms of the latents, counted here"
        )
    fields |= {
        "name": f"megatron-{layers}x{width}", "vocab": vocab, "ffn": ffn, "kv_heads": groups,
        "head_dim": values["kv_channels"] or width // heads,
        "mlp": "gated" if gated else "plain",
        "activation": "silu" if gated else "relu2" if values["squared_relu"] else "gelu_tanh" if values["openai_gelu"]
        else "gelu",
        "qkv_bias": biased or bool(values["add_qkv_bias"]), "out_bias": biased, "mlp_bias": biased,
        "mla": _latent(values), "moe": _experts(values, ffn, layers), "mtp": _further(values),
    }  # fmt: skip
    fields["positions"] = fields.get("positions") or values["seq_length"] or 4096
    return Model.read(fields, origin=values.origin), ()


def _compared(values: Values, model: Model) -> None:
    """Name the sizes that are said otherwise than ``model`` has them."""
    sizes = {
        "num_layers": model.layers, "hidden_size": model.width, "num_attention_heads": model.heads,
        "num_experts": model.moe.experts if model.moe else None,
    }  # fmt: skip
    for name, size in sizes.items():
        if values.says(name) and values[name] != size:
            values.approximate(
                name, f"is {size} in {model.name}, which was taken; a config.json of your own says other sizes"
            )


def _latent(values: Values) -> MLA | None:
    if not values["multi_latent_attention"]:
        return None
    names = {
        "kv_rank": "kv_lora_rank",
        "nope_dim": "qk_head_dim",
        "rope_dim": "qk_pos_emb_head_dim",
        "v_dim": "v_head_dim",
    }
    sizes: dict[str, Any] = {field: values[name] for field, name in names.items()}
    return MLA.read(sizes | {"q_rank": values["q_lora_rank"]}, origin=values.origin)


def _further(values: Values) -> MTP | None:
    depth = values.optional("mtp_num_layers")
    return MTP(depth=depth, coefficient=values["mtp_loss_scaling_factor"]) if depth else None


def _experts(values: Values, ffn: int, layers: int) -> MoE | None:
    experts = values["num_experts"]
    if not experts:
        return None
    score, kind = values["moe_router_score_function"], values["moe_router_load_balancing_type"]
    shared = values["moe_shared_expert_intermediate_size"]
    fields: dict[str, Any] = {
        "experts": experts, "topk": values["moe_router_topk"], "ffn": values["moe_ffn_hidden_size"] or ffn,
        "shared_experts": 1 if shared else 0, "shared_ffn": shared or None,
        "dense_layers": dense_layers(values["moe_layer_freq"], layers, origin=values.origin), "score": score,
        "balance": "free" if values["moe_router_enable_expert_bias"] else "none" if kind == "none" else "aux",
        "aux_coefficient": values["moe_aux_loss_coeff"], "capacity": values["moe_expert_capacity_factor"],
        "normalized": score == "sigmoid" or not values["moe_router_pre_softmax"],
        "scaling": values["moe_router_topk_scaling_factor"] or 1.0,
        "groups": values["moe_router_num_groups"] or 1, "topk_groups": values["moe_router_group_topk"] or 1,
    }  # fmt: skip
    return MoE.read(fields, origin=values.origin)


PATTERN = re.compile(r"\(?\s*(?:\[0\]\s*\*\s*(\d+)\s*\+\s*)?\[1\]\s*\*\s*(\d+)\s*\)?")


def dense_layers(said: Any, layers: int, *, origin: str) -> int:
    """How many layers at the start have no experts, of ``1`` or ``([0]*3+[1]*58)``."""
    text = str(said)
    if text == "1":
        return 0
    flags = None
    if found := PATTERN.fullmatch(text):
        flags = [0] * int(found[1] or 0) + [1] * int(found[2])
    elif isinstance(said, list) or re.fullmatch(r"\[[01, ]*\]", text):
        flags = [int(digit) for digit in re.findall(r"[01]", text)]
    if flags is None or len(flags) != layers or flags != sorted(flags):
        raise Mistake(
            f"{origin}: moe_layer_freq {text!r}: only dense layers first and then experts are counted, all {layers}"
        )
    return flags.count(0)


def arguments(model: Model) -> dict[str, Any]:
    """A model as arguments; what Megatron cannot say is left out, and found when it is read back."""
    gated, grouped = model.mlp == "gated", model.kv_heads != model.heads and model.mla is None
    biased = model.mlp_bias
    found: dict[str, Any] = {
        "ffn_hidden_size": model.ffn, "kv_channels": model.head_dim, "group_query_attention": grouped,
        "num_query_groups": model.kv_heads if grouped else None, "swiglu": gated,
        "squared_relu": model.activation == "relu2", "openai_gelu": model.activation.startswith("gelu_"),
        "disable_bias_linear": not biased,
        "add_qkv_bias": model.qkv_bias and not biased, "vocab_size": model.vocab,
        "attention_dropout": model.dropout_rates.attention, "tokenizer_type": "NullTokenizer",
    }  # fmt: skip
    if mla := model.mla:
        found |= {
            "multi_latent_attention": True, "qk_layernorm": True,
            "q_lora_rank": mla.q_rank, "kv_lora_rank": mla.kv_rank,
            "qk_head_dim": mla.nope_dim, "qk_pos_emb_head_dim": mla.rope_dim, "v_head_dim": mla.v_dim,
        }  # fmt: skip
    if mtp := model.mtp:
        found |= {"mtp_num_layers": mtp.depth, "mtp_loss_scaling_factor": mtp.coefficient}
    return found | (_of_experts(model.moe, model.layers) if model.moe else {})


def _of_experts(moe: MoE, layers: int) -> dict[str, Any]:
    dense, shared = moe.dense_layers, moe.shared_experts * (moe.shared_ffn or moe.ffn)
    free = moe.balance == "free"
    return {
        "num_experts": moe.experts, "moe_ffn_hidden_size": moe.ffn, "moe_router_topk": moe.topk,
        "moe_layer_freq": f"([0]*{dense}+[1]*{layers - dense})" if dense else None,
        "moe_shared_expert_intermediate_size": shared or None, "moe_router_score_function": moe.score,
        "moe_router_pre_softmax": moe.score == "softmax" and not moe.normalized,
        "moe_router_num_groups": moe.groups if moe.groups > 1 else None,
        "moe_router_group_topk": moe.topk_groups if moe.groups > 1 else None,
        "moe_router_topk_scaling_factor": moe.scaling if moe.scaling != 1 else None,
        "moe_router_enable_expert_bias": free,
        "moe_router_load_balancing_type": "aux_loss" if moe.balance == "aux" else "none",
        "moe_aux_loss_coeff": moe.aux_coefficient if moe.balance == "aux" else None,
        "moe_expert_capacity_factor": moe.capacity, "moe_grouped_gemm": True,
    }  # fmt: skip
