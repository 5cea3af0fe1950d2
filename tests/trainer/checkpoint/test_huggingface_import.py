"""The decoder with the weights of a folder that transformers wrote: logits, loss and gradients are its own."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from fivefold.errors import UserError
from fivefold.job import Job, get_recipe
from fivefold.layout.spec import Layout
from fivefold.model.catalog import build_model
from fivefold.model.huggingface.read import from_config
from fivefold.model.huggingface.tensors import TensorPart, list_tensors
from fivefold.model.published import CATALOG
from fivefold.model.weights import list_router_tensors, list_weights
from fivefold.trainer.build import build
from fivefold.trainer.checkpoint.full_weights import gather_full_weights
from fivefold.trainer.checkpoint.huggingface_export import _assemble
from fivefold.trainer.checkpoint.huggingface_import import HuggingFaceFolder, start
from fivefold.trainer.model.rotary import compute_frequencies, rotary_tables
from fivefold.trainer.model.transformer import Transformer
from tests.model.mutations import FAMILIES
from tests.selection import mark_share

B, T = 3, 40
PLAIN = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
EXPERTS = PLAIN | {"num_experts_per_tok": 2, "moe_intermediate_size": 24, "num_hidden_layers": 3}
ALIKE = {key: value for key, value in EXPERTS.items() if key != "moe_intermediate_size"} | {"num_local_experts": 4}
LATENT = EXPERTS | {
    "num_key_value_heads": 6,
    "kv_lora_rank": 20,
    "q_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "head_dim": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e3,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 48,
}
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
    "gpt-oss": {"model_type": "gpt_oss", **ALIKE, "sliding_window": 7},
    "granite-moe": {
        "model_type": "granitemoe", **ALIKE, "embedding_multiplier": 6.0, "attention_multiplier": 0.2,
        "residual_multiplier": 0.4, "logits_scaling": 3.0, "tie_word_embeddings": True,
    },
    "llama4": {
        "model_type": "llama4_text", **ALIKE, "intermediate_size_mlp": 56, "interleave_moe_layer_step": 2,
        "no_rope_layer_interval": 2, "attention_chunk_size": 8, "floor_scale": 7, "attn_scale": 0.5,
        "rope_parameters": LLAMA3,
    },
    "qwen3-next": {
        "model_type": "qwen3_next", **EXPERTS, "num_experts": 8, "shared_expert_intermediate_size": 16,
        "full_attention_interval": 3, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 6, "linear_value_head_dim": 5, "partial_rotary_factor": 0.5,
        "rms_norm_eps": 0.1,  # a norm of few dims enlarges the rounding of small outputs of the scan, theirs too
    },
    "lfm2": {"model_type": "lfm2", **PLAIN, "full_attn_idxs": [1], "conv_bias": True, "pad_token_id": None},
    "lfm2-moe": {
        "model_type": "lfm2_moe", **EXPERTS, "num_experts": 8, "num_dense_layers": 1,
        "layer_types": ["conv", "conv", "full_attention"], "pad_token_id": None,
    },
    "minimax-m2": {"model_type": "minimax_m2", **ALIKE, "rotary_dim": 4},
    "glm4-moe": {
        "model_type": "glm4_moe", **EXPERTS, "n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1,
        "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5, "use_qk_norm": True, "attention_bias": True,
        "num_mtp_layers": 0,
    },
    "deepseek-v2": {"model_type": "deepseek_v2", **LATENT, "q_lora_rank": None, "topk_method": "greedy"},
    "deepseek-v3": {
        "model_type": "deepseek_v3", **LATENT, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5,
        "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5},
    },
    "deepseek-v3, biased, in halves": {
        "model_type": "deepseek_v3", **LATENT, "n_group": 1, "topk_group": 1, "attention_bias": True,
        "rope_interleave": False,
    },
}  # fmt: skip


def reference(case: dict[str, Any]) -> torch.nn.Module:
    """Their model, all of it drawn wide enough that every part matters."""
    keys = {key: value for key, value in case.items() if key != "model_type"}
    config = AutoConfig.for_model(case["model_type"], **keys, attn_implementation="eager")
    theirs: torch.nn.Module = AutoModelForCausalLM.from_config(config).eval()  # type: ignore[no-untyped-call]
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in theirs.named_parameters():
            spread = torch.randn(weight.shape, generator=generator)
            plus_one = case["model_type"] == "qwen3_next" and "linear_attn" not in name  # factors minus one
            weight.copy_((not plus_one) + 0.3 * spread if "norm" in name else spread * weight.shape[-1] ** -0.5)
        for name, bias in theirs.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                bias.copy_(0.2 * torch.randn(bias.shape, generator=generator))
    return theirs


def read_full(folder: HuggingFaceFolder) -> dict[str, Tensor]:
    """Every weight, box by box, and the biases by which experts are chosen."""
    result = {}
    for weight in list_weights(folder.model):
        boxes = [((0,) * len(weight.shape), weight.shape)]
        if len(weight.shape) == 3:
            boxes = [((expert, 0, 0), (1, *weight.shape[1:])) for expert in range(weight.shape[0])]
        result[weight.name] = torch.cat([folder.read(weight.name, offsets=at, sizes=size) for at, size in boxes])
    for name in folder.parts.keys() - result.keys():
        part = folder.parts[name][0]
        sizes = part.shape if name.endswith(".moe.table") else (part.numel,)
        result[name] = folder.read(name, offsets=(0,) * len(sizes), sizes=sizes)
    return result


def decoder(folder: HuggingFaceFolder) -> Transformer:
    """Ours with the weights of ``folder``."""
    model = folder.model
    if model.moe is not None:  # nor does the reference add it, unless it also hands out the router's logits
        model = model.replace(moe=model.moe.replace(aux_coefficient=0.0))
    ours = Transformer(model)
    missing, unexpected = ours.load_state_dict(read_full(folder), strict=False)
    assert (unexpected, [name for name in missing if not name.endswith(".moe.bias")]) == ([], [])
    return ours


def convert_gradient(part: TensorPart, tensors: dict[str, Tensor]) -> Tensor:
    """Of their gradients, which lie as in memory, the one of our weight."""
    result = tensors[part.name].index_select(part.dim, torch.tensor(part.order()))
    if part.ones:
        return result.squeeze(part.ones)
    return result.mT if part.transposed else result


STACKED = [name for name, case in CASES.items() if "num_experts_per_tok" in case]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "stacked"),
    [*((CASES[name], False) for name in CASES), *((CASES[name], True) for name in STACKED)],
    ids=[*CASES, *(f"{name}, stacked" for name in STACKED)],
)
def test_logits_loss_and_gradients_of_imported_weights_are_those_of_transformers(
    case: dict[str, Any], stacked: bool, tmp_path: Path
) -> None:
    theirs = reference(case)
    theirs.save_pretrained(tmp_path, max_shard_size="60KB", save_original_format=not stacked)  # type: ignore[operator]
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    folder = HuggingFaceFolder.open(tmp_path)
    assert folder.ignored == ()
    ours = decoder(folder)
    tokens = torch.randint(0, 131, (B, T), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-5, atol=1e-5)
    loss = ours(tokens[:, :-1], tokens[:, 1:], scale=1 / (B * (T - 1)))
    expected = theirs(tokens, labels=tokens).loss
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    loss.backward()
    expected.backward()
    gradients: dict[str, Tensor] = {name: weight.grad for name, weight in theirs.named_parameters()}  # type: ignore
    interleaved = case.get("rope_interleave", True)
    result = {p.ours: p for p in list_tensors(ours.model, family=folder.family, stacked=True, interleaved=interleaved)}
    for name, weight in ours.named_parameters():
        wanted = convert_gradient(result[name], gradients)
        assert weight.grad is not None, name
        # the gradients of a_log and dt_bias are sums over all tokens, which cancel: their last digits are rounding
        tolerance = 5e-5 if name.endswith((".a_log", ".dt_bias")) else 1e-5
        assert (weight.grad - wanted).norm() <= tolerance * wanted.norm(), name


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt-oss", "minimax-m2", "glm4-moe", "mixtral", "deepseek-v3"])
def test_four_training_steps_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    theirs = reference(CASES[name])
    theirs.save_pretrained(tmp_path)  # type: ignore[operator]
    ours = decoder(HuggingFaceFolder.open(tmp_path))
    tokens = torch.randint(0, 131, (4, B, T), generator=torch.Generator().manual_seed(5))
    mine, other = (torch.optim.AdamW(item.parameters(), lr=1e-3, eps=1e-5) for item in (ours, theirs))
    for batch in tokens:
        loss = ours(batch[:, :-1], batch[:, 1:], scale=1 / (B * (T - 1)))
        expected = theirs(batch, labels=batch).loss
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
        loss.backward()
        expected.backward()
        for optimizer in (mine, other):
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("name", ["llama3-405b", "llama3.2-1b", "deepseek-v2", "deepseek-v3", "kimi-k2", "gpt-oss-20b"])
def test_scaled_rotary_frequencies_are_those_of_transformers(name: str) -> None:
    model, values = build_model(name), CATALOG[name].config
    keys = {key: value for key, value in values.items() if key != "model_type"}
    kind = values["model_type"]
    config = AutoConfig.for_model("deepseek_v3" if kind == "kimi_k2" else kind, **keys)
    theirs, factor = ROPE_INIT_FUNCTIONS[config.rope_parameters["rope_type"]](config, torch.device("cpu"))
    torch.testing.assert_close(torch.tensor(compute_frequencies(model)), theirs, rtol=2e-6, atol=0)
    cos, _ = rotary_tables(model, positions=torch.tensor([0]), dtype=torch.float64, device=torch.device("cpu"))
    assert cos.unique().tolist() == pytest.approx([factor])


def test_interleaved_and_transposed_experts_are_imported(tmp_path: Path) -> None:
    """gpt-oss: gate and up in one tensor [E, D, 2F], column by column; read in full, by boxes, and joined again."""
    keys = {key: value for key, value in EXPERTS.items() if key != "moe_intermediate_size"}
    theirs = reference({"model_type": "gpt_oss", **keys, "num_local_experts": 4, "sliding_window": 8})
    theirs.save_pretrained(tmp_path)  # type: ignore[operator]
    folder = HuggingFaceFolder.open(tmp_path)
    assert folder.ignored == ()
    inside, first = theirs.get_submodule("model.layers.1.mlp.experts"), "blocks.1.moe.experts."
    both, biases = inside.get_parameter("gate_up_proj"), inside.get_parameter("gate_up_proj_bias")
    wanted = {
        "gate": both[..., ::2].mT,
        "up": both[..., 1::2].mT,
        "down": inside.get_parameter("down_proj").mT,
        "gate_bias": biases[:, ::2],
        "up_bias": biases[:, 1::2],
    }
    result = read_full(folder)
    for name, tensor in wanted.items():
        assert torch.equal(result[first + name], tensor), name
    box = folder.read(f"{first}up", offsets=(2, 5, 7), sizes=(1, 11, 13))
    assert torch.equal(box, wanted["up"][2:3, 5:16, 7:20])
    for name, tensor in theirs.state_dict().items():
        fused = [part for several in folder.parts.values() for part in several if part.name == name]
        assert torch.equal(_assemble(fused, [result[part.ours] for part in fused]), tensor), name


LONGROPE = {"rope_type": "longrope", "short_factor": [1.0, 1.5] * 24, "long_factor": [float(n) for n in range(1, 49)]}


@pytest.mark.parametrize("length", [100, 128, 129, 300])
@pytest.mark.parametrize(
    ("family", "scaling"),
    [("llama", {"rope_type": "dynamic", "factor": 3.0}),
     ("phi3", LONGROPE | {"original_max_position_embeddings": 128, "factor": 4.0})],
    ids=["dynamic", "longrope"],
)  # fmt: skip
def test_rotary_frequencies_that_depend_on_the_length_are_those_of_transformers(
    family: str, scaling: dict[str, Any], length: int
) -> None:
    """Which computes them for the longest position that it has seen."""
    sizes = {"hidden_size": 96, "num_attention_heads": 1, "num_key_value_heads": 1, "num_hidden_layers": 1}
    keys = sizes | {"max_position_embeddings": 128, "intermediate_size": 8, "vocab_size": 8, "rope_scaling": scaling}
    model = from_config({"model_type": family, **keys}, name="x")
    config = AutoConfig.for_model(family, **{**keys, "rope_scaling": dict(scaling)})
    theirs, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, torch.device("cpu"), seq_len=length)
    torch.testing.assert_close(torch.tensor(compute_frequencies(model, length=length)), theirs, rtol=2e-6, atol=0)
    part = torch.tensor([0, length - 1])  # of a sequence that several ranks share
    cos, _ = rotary_tables(model, positions=part, length=length, dtype=torch.float64, device=torch.device("cpu"))
    assert cos[0].unique().tolist() == pytest.approx([factor])
    torch.testing.assert_close(cos[1, 0, :48], (theirs.double() * (length - 1)).cos() * factor, rtol=0, atol=1e-4)


# Each rank its rows


def start_run(path: Path, layout: Layout) -> dict[str, Tensor]:
    model = HuggingFaceFolder.open(path).model
    job = Job(sequence=32, global_batch=4, precision=get_recipe("fp32"))
    built = build(model=model, layout=layout, job=job, device=torch.device("cpu"))
    start(path, built=built, model=model)
    return gather_full_weights(built, model=model)


@pytest.mark.parametrize(
    ("case", "layout", "stacked"),
    mark_share(
        4,
        [
            ("mixtral", "dp2 tp2 ep2 zero1 mbs1", True),
            ("llama, tied and biased", "dp2 pp2 zero3 mbs1", False),
            ("deepseek-v3", "tp2 pp2 ep2 mbs1", False),
            ("deepseek-v3", "dp2 tp2 ep2 etp2 zero3 mbs1", False),
        ],
    ),
)
def test_every_rank_reads_only_its_own_rows(
    forked: Callable[..., list[Any]], tmp_path: Path, case: str, layout: str, stacked: bool
) -> None:
    reference(CASES[case]).save_pretrained(tmp_path / "model", save_original_format=not stacked)  # type: ignore
    result = forked(4, start_run, tmp_path / "model", Layout.parse(layout))[0]
    folder = HuggingFaceFolder.open(tmp_path / "model")
    wanted = read_full(folder)
    assert {name for name in result if name not in wanted} <= {*list_router_tensors(folder.model)}
    for name, tensor in wanted.items():
        assert torch.equal(result[name], tensor), name


# What is refused


def change(path: Path, **config: Any) -> None:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))


def edit(path: Path, **tensors: Tensor | None) -> None:
    """Give a single file some tensors (``__`` for a dot), or take them away."""
    with safe_open(path / "model.safetensors", "pt") as file:
        values = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    values |= {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    save_file({name: value for name, value in values.items() if value is not None}, path / "model.safetensors")


def cut(path: Path) -> None:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


REFUSALS: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (
        lambda p: edit(p, model__norm__weight=None),
        "1 of the 21 tensors that its config.json implies are missing, such as model.norm.weight; it holds 20",
    ),
    "misshapen": (
        lambda p: edit(p, lm_head__weight=torch.zeros(131, 47)),
        "lm_head.weight has shape [131, 47], but its config.json implies [131, 48]",
    ),
    "strange": (
        lambda p: edit(p, model__layers__1__self_attn__q_norm__weight=torch.zeros(8)),
        "holds 1 tensors that the model of its config.json does not have, such as model.layers.1.self_attn.q_norm",
    ),
    "scaled": (
        lambda p: edit(p, lm_head__weight=torch.zeros(131, 48).to(torch.float8_e4m3fn)),
        "lm_head.weight is stored as F8_E4M3; convert it to bf16 first",
    ),
    "quantized": (lambda p: change(p, quantization_config={"quant_method": "fp8"}), "its weights are quantized (fp8)"),
    "cut": (cut, "model.safetensors is damaged or incomplete"),
    "gone": (lambda p: (p / "model.safetensors").unlink(), "is missing, and there is no model.safetensors.index.json"),
    "elsewhere": (
        lambda p: (p / "model.safetensors.index.json").write_text('{"weight_map": {"a": "b", "c": "d"}}'),
        "b is missing, and model.safetensors.index.json names it",
    ),
    "family": (
        lambda p: change(p, architectures=["RwkvForCausalLM"]),
        "architectures says RwkvForCausalLM, but model_type 'llama' is another's, and transformers follows model_type",
    ),
    "other": (lambda p: change(p, rms_norm_eps=1e-3), "holds another model, with norm_epsilon=0.001 instead of 1e-06"),
}


@pytest.mark.parametrize(("harm", "message"), REFUSALS.values(), ids=REFUSALS)
def test_an_invalid_folder_is_a_one_line_error(harm: Callable[[Path], object], message: str, tmp_path: Path) -> None:
    reference(CASES["llama"]).save_pretrained(tmp_path)  # type: ignore[operator]
    model = HuggingFaceFolder.open(tmp_path).model
    harm(tmp_path)
    with pytest.raises(UserError, match=re.escape(message)) as caught:
        HuggingFaceFolder.open(tmp_path, model=model)
    assert str(tmp_path.name) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unneeded_tensors_are_not_imported(tmp_path: Path) -> None:
    reference(CASES["llama, tied and biased"]).save_pretrained(tmp_path)  # type: ignore[operator]
    spare = {
        "lm_head.weight": (131, 48),
        "model.layers.2.eh_proj.weight": (48, 96),
        "model.layers.0.self_attn.rotary_emb.inv_freq": (4,),
    }
    tensors = {name.replace(".", "__"): torch.zeros(shape) for name, shape in spare.items()}
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        edit(tmp_path, **tensors | {"lm_head__weight": file.get_tensor("model.embed_tokens.weight")})
    assert set(HuggingFaceFolder.open(tmp_path).ignored) == set(spare)


@pytest.mark.parametrize("depth", [1, 0])
def test_modules_of_multi_token_prediction_of_nemotron_are_read_by_their_own_numbers(
    depth: int, tmp_path: Path
) -> None:
    """A folder whose config has none leaves their tensors unused."""
    config = {"model_type": "nemotron_h", **FAMILIES["nemotron_h"], "num_nextn_predict_layers": 1}
    parts = {part.name: part for part in list_tensors(from_config(config, name="x"), family="nemotron_h")}
    stored = {name: torch.rand(part.shape) for name, part in parts.items()}
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config["num_nextn_predict_layers"] = depth
    (tmp_path / "config.json").write_text(json.dumps(config))
    folder = HuggingFaceFolder.open(tmp_path)
    assert folder.model.mtp_depth == depth
    full = read_full(folder)
    of_modules = {part.ours: name for name, part in parts.items() if name.startswith("mtp.") and part.expert is None}
    assert len(of_modules) == 16
    for ours, name in of_modules.items():
        assert (ours in full) == bool(depth)
        assert not depth or torch.equal(full[ours], stored[name])
