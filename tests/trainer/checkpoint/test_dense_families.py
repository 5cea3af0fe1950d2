"""Families against transformers, most without experts: gradients, two optimizer steps, and files there and back."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fivefold.errors import UserError
from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.model.huggingface.read import from_config
from fivefold.model.huggingface.tensors import list_tensors
from fivefold.model.huggingface.write import find_difference, to_config
from fivefold.trainer.build import build
from fivefold.trainer.checkpoint import checkpoint
from fivefold.trainer.checkpoint.huggingface_export import _assemble, export, find
from fivefold.trainer.checkpoint.huggingface_import import HuggingFaceFolder, start
from tests.model.judged import reference, silence_transformers
from tests.model.mutations import FAMILIES, PLAIN, STILL
from tests.selection import mark_share
from tests.trainer.checkpoint.test_huggingface_import import decoder, edit, read_full

Fork = Callable[..., list[Any]]
STEPS = 2  # the second has moments
OLD = {"new_decoder_architecture": False, "num_kv_heads": None, "bias": False}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", STILL | {"tie_word_embeddings": True}),
    "gpt2, unscaled": ("gpt2", STILL | {"scale_attn_weights": False, "n_inner": 40}),
    "gpt_neox": ("gpt_neox", {}),
    "gpt_neox, one after another": ("gpt_neox", {"use_parallel_residual": False, "rotary_pct": 0.5}),
    "phi3": ("phi3", {"partial_rotary_factor": 0.5, "tie_word_embeddings": True}),
    "nemotron": ("nemotron", {"mlp_bias": True, "attention_bias": True}),
    "olmo2": ("olmo2", {}),
    "granite": ("granite", {"tie_word_embeddings": True}),
    "granite of experts": ("granitemoe", {"tie_word_embeddings": True}),
    "llama4": ("llama4_text", {"attention_bias": True}),
    "llama4, all routed": ("llama4_text", {"interleave_moe_layer_step": 1, "use_qk_norm": False}),
    "starcoder2": ("starcoder2", {"tie_word_embeddings": True}),
    "glm": ("glm", {}),
    "glm4": ("glm4", {"partial_rotary_factor": 1.0}),
    "smollm3": ("smollm3", {"tie_word_embeddings": True}),
    "cohere": ("cohere", {"tie_word_embeddings": True, "attention_bias": True}),
    "cohere of +": ("cohere", {"use_qk_norm": True, "tie_word_embeddings": True}),
    "cohere2": ("cohere2", {"tie_word_embeddings": True}),
    "gemma2": ("gemma2", {"tie_word_embeddings": True}),
    "gemma3": ("gemma3_text", {"rope_scaling": {"rope_type": "linear", "factor": 3.0}}),
    "ministral3": ("ministral3", {"pad_token_id": 0}),
    "hunyuan": ("hunyuan_v1_dense", {"attention_bias": True, "tie_word_embeddings": True}),
    "nanochat": ("nanochat", {"pad_token_id": 0}),
    "olmo, clipped": ("olmo", {"pad_token_id": 0}),
    "xglm": ("xglm", {"pad_token_id": 0, "tie_word_embeddings": True}),
    "ctrl": ("ctrl", {"tie_word_embeddings": True}),
    "gpt_neox of Japanese": ("gpt_neox_japanese", {"tie_word_embeddings": True}),
    "modernbert": ("modernbert-decoder", {"classifier_bias": True, "tie_word_embeddings": True}),
    "bloom": ("bloom", {"n_head": 6, "tie_word_embeddings": True}),
    "mpt": ("mpt", {}),
    "falcon of 40B": ("falcon", {}),
    "falcon of 7B": ("falcon", OLD),
    "falcon, one after another": ("falcon", OLD | {"parallel_attn": False, "multi_query": False, "bias": True}),
}
SHARED_KEYS: dict[str, Any] = {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
# of which gradients alone are compared here
GRADIENTS: dict[str, tuple[str, dict[str, Any]]] = {
    "apertus": ("apertus", {"pad_token_id": 0}),
    "lfm3": ("lfm3", {}),
    "laguna": ("laguna", {"pad_token_id": 0}),
    "mimo": ("mimo_v2_flash", {"pad_token_id": 0}),
    "olmo hybrid": ("olmo_hybrid", {}),
    "kimi linear": ("kimi_linear", {}),
    "latent experts": ("nemotron_h", {"mlp_bias": True}),
    "gpt": ("openai-gpt", {}),
    "ling": ("bailing_hybrid", {"rms_norm_eps": 1e-3}),  # a small one enlarges the rounding of small outputs
    "recurrent gemma": ("recurrent_gemma", {}),
    "minimax": ("minimax", {"mlp_alpha_factor": 1.2}),
    "diffllama": ("diffllama", {"attention_bias": True, "pad_token_id": 0}),
    "phimoe": ("phimoe", {"router_jitter_noise": 0.4, "pad_token_id": 0, "router_aux_loss_coef": 0.0}),
    "doge": ("doge", {"attention_bias": True, "keep_window_size": 9, "pad_token_id": 0}),
    "falcon h1": (
        "falcon_h1",
        {
            "attention_in_multiplier": 0.8,
            "attention_out_multiplier": 1.2,
            "ssm_in_multiplier": 1.1,
            "rms_norm_eps": 1e-2,
        }
        | {"ssm_multipliers": [0.5, 1.0, 1.5, 2.0, 0.8], "mlp_multipliers": [0.7, 1.3], "lm_head_multiplier": 0.5}
        | {"embedding_multiplier": 3.0, "pad_token_id": 0},
    ),
    "deepseek v4": ("deepseek_v4", {}),
    "deepseek v4, all keys": (
        "deepseek_v4",
        {
            "index_topk": 50,
            "num_hash_layers": 2,
            "hc_mult": 2,
            "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
        },
    ),
    "deepseek v3.2": ("deepseek_v32", {"pad_token_id": 0}),  # a query attends to 5 of 24 keys
    "deepseek v3.2, all keys": ("deepseek_v32", {"index_topk": 50, "attention_bias": True, "pad_token_id": 0}),
    "glm 5": ("glm_moe_dsa", {"pad_token_id": 0}),
    "glm 5, yarn": (
        "glm_moe_dsa",
        {
            "num_hidden_layers": 4,
            "indexer_types": ["full", "shared", "full", "full"],
            "mlp_layer_types": ["dense"] + ["sparse"] * 3,
            "pad_token_id": 0,
            "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
            | {"rope_theta": 300.0, "mscale_all_dim": 1.0, "mscale": 1.0},
        },
    ),
    "hy 4": ("hy_v4", {}),
    "hy 4, all keys": ("hy_v4", {"index_topk": 50, "attention_bias": True, "hc_mult": 2, "hc_magnitude": 1.5}),
    "dots 3": ("dots3_note_text", {}),
    "dots 3, all keys": (
        "dots3_note_text",
        {
            "index_topk": 50,
            "rms_norm_eps": 0.1,  # a small one enlarges the rounding of small outputs
            "attention_bias": True,
            "num_hidden_layers": 3,
            "layer_types": ["indexed_attention", "sliding_attention", "indexed_attention"],
            "mlp_layer_types": ["dense", "sparse", "sparse"],
        },
    ),
    "a.x k2": ("axk2", {}),
    "a.x k2, all keys": ("axk2", {"index_topk": 50, "attention_bias": True, "gated_norm_rank": 7}),
    "rwkv": ("rwkv", {"use_cache": False}),  # its states are written in place, which autograd refuses
    "rwkv, tied": (
        "rwkv",
        {"use_cache": False, "intermediate_size": 40, "num_hidden_layers": 3, "tie_word_embeddings": True},
    ),
    "bitnet": ("bitnet", {"pad_token_id": 0}),
    "dbrx": ("dbrx", {}),
    "jetmoe": ("jetmoe", {"tie_word_embeddings": True}),
    "jetmoe, three experts": ("jetmoe", {"num_experts_per_tok": 3, "num_local_experts": 5, "pad_token_id": 0}),
    "gemma4": ("gemma4_text", {"num_hidden_layers": 3, "layer_types": None, "rms_norm_eps": 1e-3}),
    "gemma4 with shared keys": ("gemma4_text", SHARED_KEYS | {"use_double_wide_mlp": True, "rms_norm_eps": 1e-2}),
    "gemma4 without inputs of layers": ("gemma4_text", {"hidden_size_per_layer_input": 0}),
    "gemma4 of experts": (
        "gemma4_text",
        {"enable_moe_block": True, "num_hidden_layers": 3, "layer_types": None, "rms_norm_eps": 1e-2},
    ),
    "gemma3n": (
        "gemma3n_text",
        SHARED_KEYS | {"activation_sparsity_pattern": [0.5, 0.0, 0.9, 0.0], "rms_norm_eps": 1e-3},
    ),
}
# parts of names in memory, and on disk
RENAMED = {
    "axk2": {"layernorm.mlp.fc1.": "layernorm.W_down.", "layernorm.mlp.fc2.": "layernorm.W_up.",
             "self_attn.q_gate_proj.": "self_attn.q_b_proj."},
    "gpt_neox": {"lm_head.weight": "embed_out.weight"},
    "kimi_linear": {"forget_gate.": ""},
    "nemotron_h": {"model.": "backbone."},
    "bailing_hybrid": {"forget_gate.": ""},
    "lfm3": {"self_attn.g_proj": "self_attn.gate_proj"},
    "granitemoe": {"experts.gate_up_proj": "input_linear.weight", "experts.down_proj": "output_linear.weight",
                   "router.weight": "router.layer.weight"},
}  # fmt: skip
STACKED = (
    "axk2",
    "bailing_hybrid",
    "deepseek_v32",
    "deepseek_v4",
    "dots3_note_text",
    "glm_moe_dsa",
    "hy_v4",
    "kimi_linear",
    "laguna",
    "mimo_v2_flash",
    "nemotron_h",
    "phimoe",
    "minimax",
)  # names in memory are those of a folder with stacked experts
# no zeros: where they are padding, transformers drops their gradient
TOKENS = torch.randint(1, PLAIN["vocab_size"], (3, 25), generator=torch.Generator().manual_seed(3))


@pytest.fixture(params=CASES)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, HuggingFaceFolder]:
    """Their model, and the folder that it wrote."""
    kind, changed = (CASES | GRADIENTS)[request.param]
    with silence_transformers():
        theirs = reference(kind, copy.deepcopy(FAMILIES[kind] | changed))
        theirs.save_pretrained(tmp_path)
    return theirs, HuggingFaceFolder.open(tmp_path)


def get_disk_name(name: str, folder: HuggingFaceFolder) -> str:
    for here, there in RENAMED.get(folder.family, {}).items():
        name = name.replace(here, there)
    return name


def compute_loss(theirs: Any) -> Tensor:
    """Of the same tokens as ours: which of the keys of equal scores an indexer takes depends on their number."""
    logits = theirs(TOKENS[:, :-1]).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), TOKENS[:, 1:].flatten())


def losses(module: nn.Module, lost: Any) -> list[float]:
    """Of steps of AdamW on the same tokens; a gradient that is nothing but rounding moves little."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, eps=1e-5, weight_decay=0.0)
    results = []
    for _ in range(STEPS):
        loss = lost()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        results.append(float(loss.detach()))
    return results


@pytest.mark.slow
@pytest.mark.parametrize("pair", [*mark_share(3, CASES), *mark_share(2, GRADIENTS)], indirect=True)
def test_gradients_and_steps_are_those_of_transformers(pair: tuple[Any, HuggingFaceFolder]) -> None:
    theirs, folder = pair
    ours: Any = decoder(folder)
    trained = {name: weight for name, weight in theirs.named_parameters() if weight.requires_grad}
    assert ours.model.parameters == sum(weight.numel() for weight in trained.values())
    scale = 1 / TOKENS[:, 1:].numel()
    ours(TOKENS[:, :-1], TOKENS[:, 1:], scale=scale).backward()
    compute_loss(theirs).backward()
    gradients = {get_disk_name(name, folder): weight.grad for name, weight in trained.items()}
    stacked = folder.family in STACKED
    result = {part.ours: part for part in list_tensors(ours.model, family=folder.family, stacked=stacked)}
    norm = max(float(gradient.norm()) for gradient in gradients.values() if gradient is not None)
    for name, weight in ours.named_parameters():
        part = result[name]
        if gradients[part.name] is None:  # an indexer's, whose choice is not differentiable
            assert weight.grad is None, name
            continue
        wanted = gradients[part.name].index_select(part.dim, torch.tensor(list(part.order())))
        wanted = wanted.unflatten(0, (part.experts, -1)) if part.experts else wanted
        wanted = (wanted.mT if part.transposed else wanted).reshape(weight.shape)
        # up to 1.2e-5 was seen, of a scan's decay, whose sums CPUs add in different orders
        assert (weight.grad - wanted).norm() <= 1.5e-5 * max(float(wanted.norm()), 1e-2 * norm), name
    for module in (ours, theirs):
        module.zero_grad()
    mine = losses(ours, lambda: ours(TOKENS[:, :-1], TOKENS[:, 1:], scale=scale))
    assert mine[-1] < mine[0]
    assert mine == pytest.approx(losses(theirs, lambda: compute_loss(theirs)), rel=1e-5)


def test_exported_files_are_imported_unchanged(pair: tuple[Any, HuggingFaceFolder]) -> None:
    theirs, folder = pair
    result = read_full(folder)
    tensors: dict[str, Tensor] = {get_disk_name(name, folder): tensor for name, tensor in theirs.state_dict().items()}
    if folder.model.tied_embeddings:
        tied = {"lm_head.weight", "embed_out.weight", "decoder.weight"}  # the embedding, by another name
        tensors = {name: tensor for name, tensor in tensors.items() if name not in tied}
    fused: dict[str, list[Any]] = {}
    for several in folder.parts.values():
        fused.setdefault(several[0].name, []).append(several[0])
    assert fused.keys() == tensors.keys()
    for name, there in fused.items():
        assert torch.equal(_assemble(there, [result[part.ours] for part in there]), tensors[name]), name
    assert find_difference(from_config(to_config(folder.model), name="x"), folder.model) is None


def save_imported(checkpoints: Path, source: Path) -> None:
    """Save a checkpoint of no steps with the weights of ``source``."""
    model, layout, job = HuggingFaceFolder.open(source).model, Layout.parse("mbs1"), Job(sequence=32, global_batch=1)
    built = build(model=model, layout=layout, job=job, device=torch.device("cpu"))
    start(source, built=built, model=model)
    progress = checkpoint.RunProgress(step=0, samples=0, tokens=0)
    checkpoint.save(checkpoints, built=built, progress=progress, model=model, layout=layout, job=job)


@pytest.mark.parametrize("pair", mark_share(14, GRADIENTS), indirect=True)
def test_transformers_loads_an_exported_folder(
    pair: tuple[Any, HuggingFaceFolder], forked: Fork, tmp_path: Path
) -> None:
    theirs, folder = pair
    forked(1, save_imported, tmp_path / "checkpoints", tmp_path)
    export(find(tmp_path), tmp_path / "out", dtype="fp32", file_bytes=10**6, report=lambda *_: None)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    padded = config | {"pad_token_id": 0}  # the default lies beyond the few tokens here
    (tmp_path / "out" / "config.json").write_text(json.dumps(padded))
    loaded, loading = type(theirs).from_pretrained(
        tmp_path / "out", attn_implementation="eager", dtype="auto", output_loading_info=True
    )
    missing = set(loading["missing_keys"]) - {name for name, _ in theirs.named_buffers()}  # buffers are constants
    assert not missing, loading
    assert not any(loading[kind] for kind in ("unexpected_keys", "mismatched_keys")), loading
    with torch.no_grad():
        torch.testing.assert_close(loaded(TOKENS).logits, theirs(TOKENS).logits, rtol=1e-5, atol=1e-5)
    assert find_difference(folder.model, HuggingFaceFolder.open(tmp_path / "out").model) is None


def test_the_published_files_of_gpt2_are_read(tmp_path: Path) -> None:
    """Without the head's prefix, and with the masks of old code."""
    with silence_transformers():
        reference("gpt2", FAMILIES["gpt2"] | {"tie_word_embeddings": True}).save_pretrained(tmp_path)
    wanted = read_full(HuggingFaceFolder.open(tmp_path))
    file = tmp_path / "model.safetensors"
    save_file({name.removeprefix("transformer."): tensor for name, tensor in load_file(file).items()}, file)
    edit(tmp_path, h__0__attn__bias=torch.zeros(1, 1, 4, 4))
    folder = HuggingFaceFolder.open(tmp_path)
    assert folder.ignored == ("transformer.h.0.attn.bias",)
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in read_full(folder).items())


@pytest.mark.parametrize("as_in_memory", [False, True])
def test_files_of_deepseek_v4_are_read_as_published_and_as_in_memory(tmp_path: Path, as_in_memory: bool) -> None:
    """DeepSeek's names begin with no ``model.``; those that transformers saves by default do."""
    with silence_transformers():
        theirs = reference("deepseek_v4", copy.deepcopy(FAMILIES["deepseek_v4"]))
        theirs.save_pretrained(tmp_path)
        wanted = read_full(HuggingFaceFolder.open(tmp_path))
        assert torch.equal(wanted["blocks.0.moe.table"], theirs.model.layers[0].mlp.gate.tid2eid)
        if as_in_memory:
            theirs.save_pretrained(tmp_path, save_original_format=False)
    if not as_in_memory:
        file = tmp_path / "model.safetensors"
        published = {"embed_tokens.": "embed.", "hc_head.hc_": "hc_head_"}
        tensors = {}
        for name, tensor in load_file(file).items():
            for here, there in published.items():
                name = name.replace(here, there)
            tensors[name.removeprefix("model.")] = tensor
        assert {"embed.weight", "head.weight", "hc_head_fn", "layers.1.attn.indexer.wq_b.weight"} <= tensors.keys()
        save_file(tensors, file)
    result = read_full(HuggingFaceFolder.open(tmp_path))
    assert result.keys() == wanted.keys()
    assert all(torch.equal(result[name], tensor) for name, tensor in wanted.items())


def test_weights_with_a_layer_factor_other_than_one_are_rejected(tmp_path: Path) -> None:
    with silence_transformers():
        theirs = reference("gemma4_unified_text", copy.deepcopy(FAMILIES["gemma4_unified_text"]))
        theirs.model.layers[1].layer_scalar.fill_(0.5)
        theirs.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"1\.layer_scalar is \[0\.5\], and the trainer supports only \[1\.0\]"):
        HuggingFaceFolder.open(tmp_path)
