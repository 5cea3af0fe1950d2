"""Compare what a changed key does to transformers' model and to ours: the same, or an error that names the key.

reference   builds and runs it on the CPU, weights drawn by their names: parameters, and logits of a short and a
            long text; or fails
ours        the ``Model`` of the same config, neutral where nothing changes logits; or a ``UserError``
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple
from zlib import crc32

import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.initialization import no_init_weights
from transformers.modeling_layers import MtpModel

from fivefold.errors import UserError
from fivefold.model.huggingface.families import FAMILIES as REGISTRY
from fivefold.model.huggingface.keys import UNREAD
from fivefold.model.huggingface.read import from_config
from fivefold.model.huggingface.write import find_difference
from tests.model.mutations import FAMILIES

# whose weights of norms are the factors minus one
PLUS_ONE = ("gemma", "gemma2", "gemma3", "gemma3_text", "vaultgemma", "nemotron", "qwen3_next", "qwen3_5_text")
PLUS_ONE = (*PLUS_ONE, "qwen3_5_moe_text", "recurrent_gemma")
LENGTHS = (12, 48)
MARGIN = 16  # tokens of a text beyond max_position_embeddings, from where on scaled rotary positions depend on length
SAME = 1e-6  # of logits around 1, in proportion of larger ones: what rounding makes of the same formula

# Refused although transformers 5.23 ignores it: (family or "", key). Why:
REFUSED_ALL_THE_SAME = {
    **{("falcon", key): "dropout, which only training sees" for key in ("attention_dropout", "hidden_dropout")},
    **{
        (kind, "router_jitter_noise"): "noise, which only training sees"
        for kind in ("mixtral", "minimax", "minimax_m2")
    },
    **{("mpt", key): "the published code reads it" for key in ("attn_config", "expansion_ratio", "no_bias")},
    ("mpt", "logit_scale"): "the published code reads it",
    **{(kind, "layerdrop"): "layers that training leaves out" for kind in ("opt", "biogpt", "xglm")},
    **{(kind, "activation_dropout"): "dropout, which only training sees" for kind in ("biogpt", "xglm")},
    **{
        (kind, "attention_dropout"): "dropout, which only training sees"
        for kind in (
            *("diffllama", "modernbert-decoder", "deepseek_v32", "deepseek_v4", "glm_moe_dsa", "axk2"),
            *("dots3_note_text", "hy_v4"),
        )
    },
    ("deepseek_v4", "n_shared_experts"): "transformers builds one, whatever the number",
    ("modernbert-decoder", "mlp_dropout"): "dropout, which only training sees",
    ("openai-gpt", "is_causal"): "its mask is a table",
    ("phimoe", "input_jitter_noise"): "noise, which only training sees",
    ("qwen3_moe", "decoder_sparse_step"): "of the small config's two layers it leaves the same one with experts",
    **{
        (kind, "moe_layer_freq"): "the published code reads it"
        for kind in ("deepseek_v2", "deepseek_v3", "deepseek_v32", "axk2", "dots3_note_text")
    },
    **{(kind, "scoring_func"): "the published code reads it" for kind in ("deepseek_v2", "deepseek_v3")},
    ("deepseek_v2", "norm_topk_prob"): "the published code reads it",
    ("deepseek_v2", "rope_interleave"): "it would lie otherwise in the file",
    ("deepseek_v3", "topk_method"): "the published code reads it",
    ("gemma3_text", "attn_logit_softcapping"): "a model that wants it is not one that ignores it",
    **{("", key): "a table that the family does not read" for key in ("rope_scaling", "rope_parameters")},
    ("", "per_layer_config"): "layers that differ",
    **{(kind, "is_causal"): "it has no attention" for kind in ("mamba", "mamba2", "falcon_mamba")},
}


# Read although transformers 5.23 builds no part of the model from it: multi-token prediction, for generation alone.
SAME_FUNCTION = ("gelu_new", "gelu_fast", "gelu_pytorch_tanh")  # which round otherwise
# Factors on a branch that a norm follows: they change the model, and logits by no more than rounding.
NORMED = {("beam", "norm_topk_prob"), ("beam", "routed_scaling_factor")}
FURTHER = ("num_nextn_predict_layers", "num_mtp_layers")


def count_mtp_parameters(theirs: Any) -> int:
    """Count the parameters of the MTP modules that transformers would add to ``theirs``, on meta.

    Of Nemotron-H its config alone tells: two layers, three norms, and the projection of embedding and hidden state.
    """
    if theirs.config.model_type == "nemotron_h":
        config = copy.deepcopy(theirs.config)
        config.layers_block_type = config.mtp_layers_block_type
        with torch.device("meta"):
            layers = type(theirs)(config).model.layers
        width = config.hidden_size
        numel = sum(weight.numel() for weight in layers.parameters()) + 3 * width + 2 * width**2
        return int(config.num_nextn_predict_layers) * numel
    depth = getattr(theirs.config, "num_mtp_layers", 0) or 0
    with torch.device("meta"):
        return sum(weight.numel() for weight in MtpModel(theirs, depth).layers.parameters()) if depth else 0


class Seen(NamedTuple):
    """What the reference makes of a config."""

    shapes: dict[str, tuple[int, ...]]
    logits: tuple[Tensor, ...]

    def is_equal(self, other: Seen) -> bool:
        return self.shapes == other.shapes and all(
            float((mine - theirs).abs().max()) < SAME * max(1.0, float(theirs.abs().max()))
            for mine, theirs in zip(self.logits, other.logits, strict=True)
        )


@contextmanager
def silence_transformers() -> Iterator[None]:
    """Without what transformers says of odd configs."""
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        transformers.logging.set_verbosity(before)


UNLISTED = {"mistral4": "Mistral4ForCausalLM"}  # classes that AutoModelForCausalLM does not know
ROUTING = ("e_score_correction_bias", "expert_bias")  # names of the biases of routers


def build_reference(kind: str, config: dict[str, Any]) -> Any:
    """Their module on the current device, its weights not yet drawn."""
    keys = copy.deepcopy(config)
    if not set(FURTHER) & set(keys) and kind in ("deepseek_v3", "glm4_moe"):
        keys["num_mtp_layers"] = 0  # their class takes a missing key for 1, though the model has none
    theirs = AutoConfig.for_model(kind, **keys, attn_implementation="eager")
    with no_init_weights():  # type: ignore[no-untyped-call]
        if kind in UNLISTED:
            module = getattr(transformers, UNLISTED[kind])._from_config(theirs)
        else:
            module = AutoModelForCausalLM.from_config(theirs)  # type: ignore[no-untyped-call]
    for part in module.modules():
        if identities := getattr(part, "zero_expert_num", 0):  # their weights are in no checkpoint and never read
            part.gate_up_proj = torch.nn.Parameter(part.gate_up_proj[:-identities].detach())
    module.tie_weights()
    return module


def reference(kind: str, config: dict[str, Any]) -> Any:
    """Their module with weights drawn wide enough that every part matters, each by its name."""
    theirs = build_reference(kind, config).eval().float()  # its xIELU is in bf16 in any model
    biases = ((name, bias) for name, bias in theirs.named_buffers() if name.endswith(ROUTING))
    with torch.no_grad():
        for name, weight in (*theirs.named_parameters(), *biases):
            spread = torch.randn(weight.shape, generator=torch.Generator().manual_seed(crc32(name.encode())))
            module = ".".join(name.split(".")[-2:])  # of DBRX, attention lies within a "norm_attn_norm"
            norm = ("norm" in module or "ln_" in module) and not name.endswith("bias")
            weight.copy_((kind not in PLUS_ONE) + 0.3 * spread if norm else spread * max(weight.shape[-1], 1) ** -0.5)
        for name, table in theirs.named_buffers():
            if name.endswith("tid2eid"):  # distinct experts of each token id
                drawn = torch.rand(len(table), config["n_routed_experts"], generator=torch.Generator().manual_seed(1))
                table.copy_(drawn.topk(table.shape[1]).indices)
    return theirs


def texts(vocab: int, lengths: tuple[int, ...] = LENGTHS) -> Iterator[Tensor]:
    for length in lengths:
        yield torch.randint(0, vocab, (2, length), generator=torch.Generator().manual_seed(length))


def choose_lengths(config: dict[str, Any]) -> tuple[int, ...]:
    """Choose the lengths of texts: one is beyond the positions of a config whose rotary positions are scaled by it."""
    tables = [config.get(key) or {} for key in ("rope_scaling", "rope_parameters")]
    is_dynamic = any("dynamic" in (table.get("rope_type"), table.get("type")) for table in tables)
    positions = config.get("max_position_embeddings") or 0
    return (*LENGTHS, positions + MARGIN) if is_dynamic and positions > LENGTHS[-1] - MARGIN else LENGTHS


def run_reference(kind: str, config: dict[str, Any], *, lengths: tuple[int, ...] = LENGTHS) -> Seen | None:
    """None: the reference fails."""
    try:
        theirs = reference(kind, config)
        with torch.no_grad():
            logits = tuple(theirs(text, use_cache=False).logits for text in texts(theirs.config.vocab_size, lengths))
    except Exception:  # whatever it is, there is nothing to hold ours against
        return None
    trained = {name: tuple(weight.shape) for name, weight in theirs.named_parameters() if weight.requires_grad}
    return Seen(trained, logits)


@cache
def base(kind: str, lengths: tuple[int, ...]) -> Seen:
    result = run_reference(kind, FAMILIES[kind], lengths=lengths)
    assert result is not None
    return result


def contradicts_itself(kind: str, config: dict[str, Any]) -> bool:
    """Tell whether two keys of a config that are names of one field have different values."""
    given: dict[str, list[Any]] = {}
    for key, field in REGISTRY[kind].keys.items():
        if key in config and field != UNREAD:
            given.setdefault(field, []).append(config[key])
    return any(value != values[0] for values in given.values() for value in values)


def judge(kind: str, config: dict[str, Any], *, keys: tuple[str, ...]) -> tuple[str, str]:
    """A verdict on the ``keys`` in which ``config`` differs from the family's small one, and what speaks for it.

    "" is right; anything else is a difference that is not reported, or an error without a reason.
    """
    lengths = choose_lengths(config)
    theirs, unchanged = run_reference(kind, config, lengths=lengths), base(kind, lengths)
    try:
        ours = from_config({"model_type": kind, **copy.deepcopy(config)}, name="x")
    except UserError as refusal:
        if "\n" in str(refusal):
            return "more than one line", str(refusal)
        reasons = {REFUSED_ALL_THE_SAME.get((family, key)) for family in ("", kind) for key in keys}
        needless = theirs is not None and theirs.is_equal(unchanged) and reasons == {None}
        needless &= not contradicts_itself(kind, config)
        return ("refused without need" if needless else "", f"refused: {refusal}")
    if theirs is None:
        return "", "the reference fails"
    numel = sum(torch.Size(shape).numel() for shape in theirs.shapes.values())
    if ours.parameters != numel and not set(FURTHER) & set(keys):
        return f"{ours.parameters} parameters instead of {numel}", ""
    result = find_difference(ours, from_config({"model_type": kind, **FAMILIES[kind]}, name="x"))
    changed = not theirs.is_equal(unchanged) or theirs.shapes != unchanged.shapes
    if changed and not result and keys != ("rope_interleave",):  # an order of rows, which is no field of Model
        return "not read, though it changes the reference", ""
    is_rounding = all(config.get(key) in SAME_FUNCTION for key in keys)
    is_rounding |= all((kind, key) in NORMED for key in keys)
    needless = result and not changed and not set(FURTHER) & set(keys) and not is_rounding
    return ("read, though the reference ignores it" if needless else "", result or "ignored")
