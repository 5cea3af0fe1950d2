"""Catalog of models: each entry holds the keys of the published ``config.json``, which its family's mapping reads.

Models are built on demand, so that importing the catalog is cheap. A source of the form ``owner/model`` is the
Hugging Face repository with that ``config.json``.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from fivefold.model.huggingface.read import describe_remark, from_config
from fivefold.model.spec import CONFIG_SOURCE, Model
from fivefold.record import UsageWarning, UserError, join_names, locate, make_unknown_name_error, read_file

# Endings of repositories whose config.json has the sizes of the model without them, as they are spelled.
TUNED_ENDINGS = ("", "-hf", "-Base", "-Instruct", "-Chat", "-chat", "-it", "-pt", "-chat-hf")
THINKING = ("Qwen3-VL-", "Qwen3-Next-")  # whose -Thinking has the config of -Instruct


class Version(NamedTuple):
    """A repository with the config of a catalog model but for its positions, and these where they differ."""

    model: str
    positions: int | None = None


VERSIONS = {
    "deepseek-v3-0324": Version("deepseek-v3"),
    "deepseek-v3.1": Version("deepseek-v3"),
    "deepseek-r1": Version("deepseek-v3"),
    "deepseek-r1-0528": Version("deepseek-v3"),
    "deepseek-v3.2-exp": Version("deepseek-v3.2"),
    "deepseek-r1-distill-llama-8b": Version("llama3.1-8b"),
    "deepseek-r1-distill-llama-70b": Version("llama3.3-70b"),
    "deepseek-r1-distill-qwen-1.5b": Version("qwen2.5-math-1.5b"),
    "deepseek-r1-distill-qwen-7b": Version("qwen2.5-math-7b"),
    "deepseek-r1-distill-qwen-14b": Version("qwen2.5-14b"),
    "deepseek-r1-distill-qwen-32b": Version("qwen2.5-32b"),
    "llama-3.1-nemotron-70b-instruct": Version("llama3.1-70b"),
    "llama-4-scout-17b-16e": Version("llama4-scout"),
    "llama-4-maverick-17b-128e": Version("llama4-maverick"),
    "qwen2.5-coder-0.5b": Version("qwen2.5-0.5b", 32_768),
    "qwen2.5-coder-1.5b": Version("qwen2.5-1.5b", 32_768),
    "qwen2.5-coder-3b": Version("qwen2.5-3b", 32_768),
    "qwen2.5-coder-7b": Version("qwen2.5-7b", 32_768),
    "qwen2.5-coder-14b": Version("qwen2.5-14b", 32_768),
    "qwen2.5-coder-32b": Version("qwen2.5-32b", 32_768),
    "qwq-32b": Version("qwen2.5-32b", 40_960),
    "mistral-7b-instruct-v0.1": Version("mistral-7b"),
    "mistral-7b-instruct-v0.3": Version("mistral-7b-v0.3"),
    "mistral-nemo-instruct-2407": Version("mistral-nemo-12b"),
    "mistral-large-instruct-2411": Version("mistral-large-123b"),
    "mixtral-8x7b-instruct-v0.1": Version("mixtral-8x7b"),
    "glm-4.6": Version("glm4.5", 202_752),
    "olmo-3-7b": Version("olmo3-7b"),
    "olmo-3-7b-think": Version("olmo3-7b"),
    "olmo-3-32b-think": Version("olmo3-32b"),
    "apertus-8b-instruct-2509": Version("apertus-8b"),
    "apertus-70b-instruct-2509": Version("apertus-70b"),
    "ernie-4.5-21b-a3b": Version("ernie4.5-21b-a3b"),
    "nemotron-4-340b": Version("nemotron4-340b"),
    "hunyuan-a13b-pretrain": Version("hunyuan-a13b"),
}


class CatalogEntry(NamedTuple):
    """A published model: its source, the keys that its ``config.json`` sets, and where else these are written."""

    source: str
    config: dict[str, Any]
    also: str = ""

    @property
    def repository(self) -> str | None:
        """Return the Hugging Face repository of the model, if its source is one."""
        return self.source if _is_repository(self.source) else None


def list_names() -> list[str]:
    """Return the names of the catalog's models, in its order."""
    return list(CATALOG)


@cache
def build_model(name: str) -> Model:
    """Build the catalog model ``name``; a ``UserError`` suggests the nearest names."""
    if name not in CATALOG:
        raise make_unknown_name_error(name, list_names(), kind="model")
    entry = CATALOG[name]
    source = f"{CONFIG_SOURCE} {entry.source}" if entry.repository else entry.source
    source += f"; as written in {entry.also}" if entry.also else ""
    return from_config(entry.config, name=name, source=source)


def resolve(text: str, *, find: Callable[[str], Path] = Path) -> Model:
    """Build the model that ``text`` names: of the catalog, a file, or a Hugging Face repository of a catalog model.

    A repository's name is enough without its owner. ``find`` maps a path in ``text`` to the file. A ``.json`` with
    ``architectures`` or ``model_type`` is a Hugging Face config (a folder: its ``config.json``); any other ``.json`` or
    ``.toml`` holds the fields of ``Model``. Raises ``UserError``; warns (``UsageWarning``) about keys that may change
    the model but that its family does not read.
    """
    if text in CATALOG:
        return build_model(text)
    path = find(text)
    try:
        is_folder, is_file = path.is_dir(), path.is_file()
    except OSError:  # such as a name that is longer than a file's can be
        is_folder = is_file = False
    if text and is_folder:
        path /= "config.json"
    if path.suffix not in (".json", ".toml"):
        if is_file:
            raise UserError(f"{text}: a model file ends in .json or .toml")
        if published := find_published(text):
            return published
        if not _is_repository(text):
            raise make_unknown_name_error(text, list_names(), kind="model")
        similar = f" (similar: {join_names(close, 'and')})" if (close := list_similar(text)) else ""
        raise UserError(
            f"unknown model {text!r}: not a repository of the catalog{similar}, and Fivefold downloads nothing. Save "
            f"its config by `hf download {text} config.json --local-dir DIR` and name DIR/config.json"
        )
    return from_values(read_file(path), name=name_model(path), source=text)


def name_model(path: Path) -> str:
    """Return the name of the model in a file, or of a catalog name or repository: a config.json has its folder's."""
    if path.name == "config.json":
        return path.resolve().parent.name
    return path.stem if path.suffix in (".json", ".toml") else path.name


def find_published(text: str) -> Model | None:
    """Return the model that a catalog name, or the name of a Hugging Face repository with its config, stands for.

    Any owner may hold a copy. Base and instruction-tuned versions have the same sizes; ``Model.repository`` keeps which
    of them was named. Returns None for all other names, however close.
    """
    if text in CATALOG:
        return build_model(text)
    owner, _, tail = text.rstrip("/").rpartition("/")
    name = find_repository(tail)
    if name is None:
        return None
    entry, model = CATALOG[name], build_model(name)
    if version := next((version for version in VERSIONS if tail.lower() in _list_versions(version)), None):
        model = model.replace(name=version, positions=VERSIONS[version].positions or model.positions)
    repository = f"{owner}/{tail}" if owner else _list_spellings(name, entry)[tail.lower()]
    return model if repository.lower() == (entry.repository or "").lower() else model.replace(repository=repository)


def find_repository(text: str) -> str | None:
    """Return the catalog's name of the model with the config of the Hugging Face repository ``text``, or None."""
    tail = text.rstrip("/").rpartition("/")[2].lower()
    return next((name for name, entry in CATALOG.items() if tail in _list_spellings(name, entry)), None)


def list_similar(text: str) -> list[str]:
    """Return the up to three catalog models whose names, or those of their repositories, are nearest to ``text``."""
    word = text.rstrip("/").rpartition("/")[2].lower()
    spellings = {spelling: name for name, entry in CATALOG.items() for spelling in _list_spellings(name, entry)}
    close = get_close_matches(word, spellings, n=12, cutoff=0.6)
    return list(dict.fromkeys(spellings[spelling] for spelling in close))[:3]


def _is_repository(text: str) -> bool:
    """Tell whether ``text`` is written as a Hugging Face repository, ``owner/model``."""
    return re.fullmatch(r"[\w.-]{1,96}/[\w.-]{1,96}", text) is not None and not text.startswith(".")


def _list_versions(version: str) -> list[str]:
    """Return the names of repositories of a version and of what was tuned from it."""
    return [f"{version}{ending.lower()}" for ending in TUNED_ENDINGS]


def _list_spellings(name: str, entry: CatalogEntry) -> dict[str, str]:
    """Return the names, in lower case and without an owner, of repositories with the config of a catalog model.

    Each comes with the repository that it means when no owner is given; an empty one if the catalog names none.
    """
    if name in ("nano", "tiny"):  # Fivefold's own
        return {}
    owner, _, tail = (entry.repository or name).rpartition("/")
    base = re.sub(r"-(hf|base|instruct|pt)$", "", tail, flags=re.IGNORECASE)
    stem = base.lower().removeprefix("meta-")
    stems = {name, stem, re.sub(r"^([a-z]+)-(?=\d)", r"\1", stem)}
    prefixes = ("", "meta-") if stem.startswith("llama-") else ("",)
    spellings: dict[str, str] = {}
    for ending in (*TUNED_ENDINGS, *(["-Thinking"] if base.startswith(THINKING) else [])):
        repository = f"{owner}/{base}{ending}" if owner and ending else entry.repository or ""
        spellings |= {f"{prefix}{stem}{ending.lower()}": repository for prefix in prefixes for stem in stems}
    for kind in ("Base", "Instruct", "Thinking"):  # such as Qwen3-4B-Instruct-2507
        dated = re.sub(r"-(Base|Instruct)-(?=\d)", f"-{kind}-", tail)
        spellings[dated.lower()] = f"{owner}/{dated}" if owner else ""
    for version, (first, _) in VERSIONS.items():
        if first == name:
            spellings |= dict.fromkeys(_list_versions(version), "")
    return spellings | {tail.lower(): entry.repository or ""}


def locate_model(text: str, *, named_in: Path) -> str:
    """Resolve a model named in the file ``named_in``: a catalog name stays, a path is relative to that file."""
    return text if text in CATALOG else locate(text, named_in=named_in)


def from_values(values: dict[str, Any], *, name: str, source: str) -> Model:
    """Build the model of a Hugging Face config, or of our own fields, as ``resolve`` reads them from a file."""
    if "architectures" in values or "model_type" in values:
        model = from_config(values, name=name, source=source)
        if warning := describe_remark(values, name=name):
            warnings.warn(warning, UsageWarning, stacklevel=3)
        return model
    return Model.read({"name": name, "source": source, **values}, origin=source)


def _shape(family: str, *, layers: int, width: int, heads: int, ffn: int, vocab: int, positions: int) -> dict[str, Any]:
    return {
        "model_type": family,
        "num_hidden_layers": layers,
        "hidden_size": width,
        "num_attention_heads": heads,
        "intermediate_size": ffn,
        "vocab_size": vocab,
        "max_position_embeddings": positions,
    }


def _bytes(*, layers: int, width: int, heads: int, kv_heads: int, ffn: int, positions: int) -> dict[str, Any]:
    shape = _shape("llama", layers=layers, width=width, heads=heads, ffn=ffn, vocab=256, positions=positions)
    return shape | {"num_key_value_heads": kv_heads, "rms_norm_eps": 1e-5}


def _llama2(*, layers: int, width: int, heads: int, kv_heads: int, ffn: int) -> dict[str, Any]:
    shape = _shape("llama", layers=layers, width=width, heads=heads, ffn=ffn, vocab=32_000, positions=4096)
    return shape | {"num_key_value_heads": kv_heads, "rms_norm_eps": 1e-5}


def _llama3(*, layers: int, width: int, heads: int, ffn: int) -> dict[str, Any]:
    shape = _shape("llama", layers=layers, width=width, heads=heads, ffn=ffn, vocab=128_256, positions=8192)
    return shape | {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0}


def _llama3_stretch(factor: float) -> dict[str, Any]:
    """Return the rope scaling since Llama 3.1: low frequencies divided by ``factor``, for 131 072 positions."""
    scaling = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return {"max_position_embeddings": 131_072, "rope_scaling": {**scaling, "original_max_position_embeddings": 8192}}


def _shape_with_groups(
    family: str,
    *,
    layers: int,
    width: int,
    heads: int,
    kv_heads: int,
    ffn: int,
    vocab: int,
    positions: int,
    **keys: Any,
) -> dict[str, Any]:
    """Return a model whose attention groups its heads; ``keys``: what else its config sets."""
    shape = _shape(family, layers=layers, width=width, heads=heads, ffn=ffn, vocab=vocab, positions=positions)
    return shape | {"num_key_value_heads": kv_heads} | keys


def _llama(**shape: Any) -> dict[str, Any]:
    return _shape_with_groups("llama", **shape)


def _mistral(**shape: Any) -> dict[str, Any]:
    return _shape_with_groups("mistral", **shape) | {"rope_theta": 1e6, "rms_norm_eps": 1e-5, "sliding_window": None}


def _falcon(*, layers: int, width: int, heads: int, **keys: Any) -> dict[str, Any]:
    shape = {"num_hidden_layers": layers, "hidden_size": width, "num_attention_heads": heads, "vocab_size": 65_024}
    kind = {"model_type": "falcon", "multi_query": True, "parallel_attn": True, "alibi": False, "bias": False}
    return kind | shape | keys


def _mpt(*, layers: int, width: int, heads: int, positions: int) -> dict[str, Any]:
    shape = {"n_layers": layers, "d_model": width, "n_heads": heads, "max_seq_len": positions, "vocab_size": 50_432}
    return {"model_type": "mpt", "expansion_ratio": 4, "no_bias": True, "attn_config": {"alibi": True}} | shape


def _opt(*, layers: int, width: int, heads: int) -> dict[str, Any]:
    shape = {"hidden_size": width, "word_embed_proj_dim": width, "ffn_dim": 4 * width, "num_attention_heads": heads}
    return {"model_type": "opt", "num_hidden_layers": layers} | shape


def _qwen25(*, layers: int, width: int, heads: int, kv_heads: int, ffn: int, vocab: int = 152_064) -> dict[str, Any]:
    shape = _shape("qwen2", layers=layers, width=width, heads=heads, ffn=ffn, vocab=vocab, positions=131_072)
    return shape | {"num_key_value_heads": kv_heads, "rope_theta": 1e6}


def _qwen3(*, family: str = "qwen3", layers: int, width: int, heads: int, ffn: int) -> dict[str, Any]:
    shape = _shape(family, layers=layers, width=width, heads=heads, ffn=ffn, vocab=151_936, positions=40_960)
    return shape | {"num_key_value_heads": 8, "head_dim": 128, "rope_theta": 1e6}


def _qwen3_moe(*, layers: int, width: int, heads: int, ffn: int, expert_ffn: int) -> dict[str, Any]:
    shape = _qwen3(family="qwen3_moe", layers=layers, width=width, heads=heads, ffn=ffn)
    experts = {
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": expert_ffn,
        "norm_topk_prob": True,
    }
    return shape | experts | {"num_key_value_heads": 4}


def _qwen3_2507(config: dict[str, Any], rope_theta: float) -> dict[str, Any]:
    """Return a Qwen3 of July 2025, which reads 262 144 tokens.

    The bases of the rotary angles are those of the published configs as others quote them: 4B in
    akougkas/warpio-cli, 30B in UbiquitousLearning/mllm#619, 235B in radixark/miles#327.
    """
    return config | {"max_position_embeddings": 262_144, "rope_theta": rope_theta}


def _nemotron4(*, layers: int, width: int, heads: int, ffn: int) -> dict[str, Any]:
    shape = _shape("nemotron", layers=layers, width=width, heads=heads, ffn=ffn, vocab=256_000, positions=4096)
    return shape | {"num_key_value_heads": 8}


def _gpt_oss(*, layers: int, experts: int) -> dict[str, Any]:
    shape = _shape("gpt_oss", layers=layers, width=2880, heads=64, ffn=2880, vocab=201_088, positions=131_072)
    return shape | {"num_local_experts": experts, "router_aux_loss_coef": 0.9}


def _yarn(factor: float, *, mscale: float, beta_fast: float = 32.0) -> dict[str, Any]:
    lengths = {"factor": factor, "original_max_position_embeddings": 4096}
    return {
        "rope_scaling": lengths
        | {"type": "yarn", "beta_fast": beta_fast, "beta_slow": 1.0, "mscale": mscale, "mscale_all_dim": mscale}
    }


def _deepseek_v3(*, mtp_depth: int) -> dict[str, Any]:
    shape = _shape("deepseek_v3", layers=61, width=7168, heads=128, ffn=18_432, vocab=129_280, positions=163_840)
    return shape | _yarn(40.0, mscale=1.0) | {"num_nextn_predict_layers": mtp_depth}


def _gemma3(*, layers: int, width: int, heads: int, kv_heads: int, head_dim: int, ffn: int) -> dict[str, Any]:
    """Return the text model of a Gemma 3 that sees images."""
    shape = _shape("gemma3_text", layers=layers, width=width, heads=heads, ffn=ffn, vocab=262_208, positions=131_072)
    scaling = {"sliding_window": 1024, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    return shape | scaling | {"num_key_value_heads": kv_heads, "head_dim": head_dim}


def _with_siglip(text: dict[str, Any]) -> dict[str, Any]:
    """Return a Gemma 3 that reads images of 896 x 896 pixels as 256 tokens."""
    tower = {
        "model_type": "siglip_vision_model",
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "patch_size": 14,
        "image_size": 896,
        "vision_use_head": False,
    }
    return {"model_type": "gemma3", "mm_tokens_per_image": 256, "text_config": text, "vision_config": tower}


def _qwen3_vl(text: dict[str, Any], **tower: Any) -> dict[str, Any]:
    """Return a Qwen3-VL around a Qwen3; ``tower``: what is not the default of transformers' Qwen3VLVisionConfig."""
    text = text | {"model_type": f"{text['model_type'].replace('qwen3', 'qwen3_vl')}_text", "rope_theta": 5e6}
    text = text | {"max_position_embeddings": 262_144}
    kind = text["model_type"].removesuffix("_text")
    tower = {"model_type": kind, "out_hidden_size": text["hidden_size"]} | tower
    tied = text.get("tie_word_embeddings", False)
    return {"model_type": kind, "tie_word_embeddings": tied, "text_config": text, "vision_config": tower}


def _small_gemma3(*, layers: int, width: int, ffn: int) -> dict[str, Any]:
    shape = _shape("gemma3_text", layers=layers, width=width, heads=4, ffn=ffn, vocab=262_144, positions=32_768)
    return shape | {"num_key_value_heads": 1, "head_dim": 256, "sliding_window": 512}


def _glm45(*, layers: int, width: int, ffn: int, expert_ffn: int, experts: int, dense: int) -> dict[str, Any]:
    """Return a GLM-4.5 without its layer of multi-token prediction."""
    shape = _shape("glm4_moe", layers=layers, width=width, heads=96, ffn=ffn, vocab=151_552, positions=131_072)
    moe = {
        "moe_intermediate_size": expert_ffn,
        "n_routed_experts": experts,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": dense,
        "num_nextn_predict_layers": 0,
    }
    return shape | moe | {"num_key_value_heads": 8, "head_dim": 128, "attention_bias": True, "rope_theta": 1e6}


def _lfm2(*, width: int, heads: int, ffn: int) -> dict[str, Any]:
    shape = _shape("lfm2", layers=16, width=width, heads=heads, ffn=ffn, vocab=65_536, positions=128_000)
    return shape | {"num_key_value_heads": 8, "full_attn_idxs": [2, 5, 8, 10, 12, 14]}


def _list_defaults() -> dict[str, CatalogEntry]:
    """Return the models whose keys are the defaults of their configuration class in transformers."""
    entries = {}
    for line in _DEFAULTS.strip().splitlines():
        name, model_type, folder, config_class = line.split()
        source = f"{config_class}, transformers 5.23:models/{folder}/configuration_{folder}.py"
        entries[name] = CatalogEntry(source, {"model_type": model_type})
    scout = entries["llama4-scout"]  # the class has 131,072 positions, and the config.json of the base model has more
    entries["llama4-scout"] = scout._replace(config=scout.config | {"max_position_embeddings": 262_144})
    return entries


# Name, model type, folder and configuration class in transformers, which documents the published model as its own.
_DEFAULTS = """
    a.x-k1-519b axk1 axk1 AXK1Config
    a.x-k2-light-20b axk2 axk2 AXK2Config
    cwm-32b cwm cwm CwmConfig
    deepseek-v3.2 deepseek_v32 deepseek_v32 DeepseekV32Config
    deepseek-v4-flash deepseek_v4 deepseek_v4 DeepseekV4Config
    dots3-note-280b dots3_note_text dots3_note Dots3NoteTextConfig
    ernie4.5-0.3b ernie4_5 ernie4_5 Ernie4_5Config
    ernie4.5-21b-a3b ernie4_5_moe ernie4_5_moe Ernie4_5_MoeConfig
    flint-40b-a3b flint flint FlintConfig
    glm5-744b-a40b glm_moe_dsa glm_moe_dsa GlmMoeDsaConfig
    glm4-lite-30b-a4b glm4_moe_lite glm4_moe_lite Glm4MoeLiteConfig
    granite-swash-2b granite_swa granite_swa GraniteSWAConfig
    helium1-2b helium helium HeliumConfig
    hy3-295b-a21b hy_v3 hy_v3 HYV3Config
    hy4-preview-58b-a5b hy_v4 hy_v4 HYV4Config
    internlm3-8b internlm3 internlm3 InternLM3Config
    iquest-coder-40b iquestcoder iquestcoder IQuestCoderConfig
    jais2-8b jais2 jais2 Jais2Config
    jamba-v0.1 jamba jamba JambaConfig
    kimi-linear-48b-a3b kimi_linear kimi_linear KimiLinearConfig
    kolibri1-78b-a4b kolibri1 kolibri1 Kolibri1Config
    ling3-flash-124b bailing_hybrid bailing_hybrid BailingHybridConfig
    llama4-scout llama4_text llama4 Llama4TextConfig
    mellum2-12b-a2.5b mellum mellum MellumConfig
    minimax-m2 minimax_m2 minimax_m2 MiniMaxM2Config
    ministral3-8b ministral3 ministral3 Ministral3Config
    mistral-small-4 mistral4 mistral4 Mistral4Config
    opt-125m opt opt OPTConfig
    qwen1.5-moe-14b-a2.7b qwen2_moe qwen2_moe Qwen2MoeConfig
    smollm3-3b smollm3 smollm3 SmolLM3Config
    solar-open-100b solar_open solar_open SolarOpenConfig
    youtu-2b youtu youtu YoutuConfig
    laguna-xs-33b-a3b laguna laguna LagunaConfig
    lfm3-1.7b lfm3 lfm3 Lfm3Config
    mimo-v2-flash-309b-a15b mimo_v2_flash mimo_v2_flash MiMoV2FlashConfig
"""

_TIED = {"tie_word_embeddings": True}

_GEMMA = "google-deepmind/gemma@7691fd4:gemma/gm/nn/_gemma.py"
_SLIME = "THUDM/slime@624b824:scripts/models"
_VIME = "vllm-project/vime@b332ffc:scripts/models"
_COPIED = "citsjtu2020/LLM-Prof@8434c8d:sglang/Model_Config.md, a copy"
_QWEN25 = "Qwen2.5 report, arXiv:2412.15115, table 1"
_BRIDGE = "NVIDIA-NeMo/Megatron-Bridge@067f987:docs/models/glm/glm45.md"

CATALOG: dict[str, CatalogEntry] = {
    "nano": CatalogEntry(
        "Fivefold's tests: bytes through Llama blocks",
        _bytes(layers=2, width=64, heads=4, kv_heads=2, ffn=176, positions=512),
    ),
    "tiny": CatalogEntry(
        "Fivefold's demo: bytes through Llama blocks",
        _bytes(layers=6, width=256, heads=8, kv_heads=4, ffn=768, positions=2048),
    ),
    "llama2-7b": CatalogEntry(
        "meta-llama/Llama-2-7b-hf", _llama2(layers=32, width=4096, heads=32, kv_heads=32, ffn=11_008)
    ),
    "llama2-13b": CatalogEntry(
        "meta-llama/Llama-2-13b-hf", _llama2(layers=40, width=5120, heads=40, kv_heads=40, ffn=13_824)
    ),
    "llama2-70b": CatalogEntry(
        "meta-llama/Llama-2-70b-hf", _llama2(layers=80, width=8192, heads=64, kv_heads=8, ffn=28_672)
    ),
    "llama3-8b": CatalogEntry("meta-llama/Meta-Llama-3-8B", _llama3(layers=32, width=4096, heads=32, ffn=14_336)),
    "llama3-70b": CatalogEntry("meta-llama/Meta-Llama-3-70B", _llama3(layers=80, width=8192, heads=64, ffn=28_672)),
    "llama3.1-8b": CatalogEntry(
        "meta-llama/Llama-3.1-8B", _llama3(layers=32, width=4096, heads=32, ffn=14_336) | _llama3_stretch(8.0)
    ),
    "llama3.1-70b": CatalogEntry(
        "meta-llama/Llama-3.1-70B", _llama3(layers=80, width=8192, heads=64, ffn=28_672) | _llama3_stretch(8.0)
    ),
    "llama3.3-70b": CatalogEntry(
        "meta-llama/Llama-3.3-70B-Instruct", _llama3(layers=80, width=8192, heads=64, ffn=28_672) | _llama3_stretch(8.0)
    ),
    "llama3-405b": CatalogEntry(  # Llama 3.0 has no 405B
        "meta-llama/Llama-3.1-405B", _llama3(layers=126, width=16_384, heads=128, ffn=53_248) | _llama3_stretch(8.0)
    ),
    "llama3.2-1b": CatalogEntry(
        "meta-llama/Llama-3.2-1B", _llama3(layers=16, width=2048, heads=32, ffn=8192) | _llama3_stretch(32.0) | _TIED
    ),
    "llama3.2-3b": CatalogEntry(
        "meta-llama/Llama-3.2-3B", _llama3(layers=28, width=3072, heads=24, ffn=8192) | _llama3_stretch(32.0) | _TIED
    ),
    "mistral-7b": CatalogEntry(
        "mistralai/Mistral-7B-v0.1",
        _shape("mistral", layers=32, width=4096, heads=32, ffn=14_336, vocab=32_000, positions=32_768)
        | {"rms_norm_eps": 1e-5},
    ),
    "mixtral-8x7b": CatalogEntry(
        "mistralai/Mixtral-8x7B-v0.1",
        _shape("mixtral", layers=32, width=4096, heads=32, ffn=14_336, vocab=32_000, positions=32_768)
        | {"router_aux_loss_coef": 0.02},
    ),
    "qwen2-7b": CatalogEntry("Qwen/Qwen2-7B", _qwen25(layers=28, width=3584, heads=28, kv_heads=4, ffn=18_944)),
    "qwen2.5-0.5b": CatalogEntry(
        "Qwen/Qwen2.5-0.5B",
        _qwen25(layers=24, width=896, heads=14, kv_heads=2, ffn=4864, vocab=151_936)
        | {"max_position_embeddings": 32_768}
        | _TIED,
        f"{_VIME}/qwen2.5-0.5B.sh; {_QWEN25}",
    ),
    "qwen2.5-1.5b": CatalogEntry(
        "Qwen/Qwen2.5-1.5B",
        _qwen25(layers=28, width=1536, heads=12, kv_heads=2, ffn=8960, vocab=151_936) | _TIED,
        f"{_VIME}/qwen2.5-1.5B.sh; {_QWEN25}",
    ),
    "qwen2.5-3b": CatalogEntry(
        "Qwen/Qwen2.5-3B",
        _qwen25(layers=36, width=2048, heads=16, kv_heads=2, ffn=11_008, vocab=151_936)
        | {"max_position_embeddings": 32_768}
        | _TIED,
        _COPIED,
    ),
    "qwen2.5-7b": CatalogEntry(
        "Qwen/Qwen2.5-7B", _qwen25(layers=28, width=3584, heads=28, kv_heads=4, ffn=18_944), _QWEN25
    ),
    "qwen2.5-14b": CatalogEntry(
        "Qwen/Qwen2.5-14B",
        _qwen25(layers=48, width=5120, heads=40, kv_heads=8, ffn=13_824) | {"rms_norm_eps": 1e-5},
        _COPIED,
    ),
    "qwen2.5-32b": CatalogEntry(
        "Qwen/Qwen2.5-32B",
        _qwen25(layers=64, width=5120, heads=40, kv_heads=8, ffn=27_648) | {"rms_norm_eps": 1e-5},
        _COPIED,
    ),
    "qwen2.5-72b": CatalogEntry(
        "Qwen/Qwen2.5-72B",
        _qwen25(layers=80, width=8192, heads=64, kv_heads=8, ffn=29_568) | {"rms_norm_eps": 1e-5},
        _QWEN25,
    ),
    "qwen3-0.6b": CatalogEntry("Qwen/Qwen3-0.6B", _qwen3(layers=28, width=1024, heads=16, ffn=3072) | _TIED),
    "qwen3-1.7b": CatalogEntry("Qwen/Qwen3-1.7B", _qwen3(layers=28, width=2048, heads=16, ffn=6144) | _TIED),
    "qwen3-4b": CatalogEntry("Qwen/Qwen3-4B", _qwen3(layers=36, width=2560, heads=32, ffn=9728) | _TIED),
    "qwen3-8b": CatalogEntry("Qwen/Qwen3-8B", _qwen3(layers=36, width=4096, heads=32, ffn=12_288)),
    "qwen3-14b": CatalogEntry("Qwen/Qwen3-14B", _qwen3(layers=40, width=5120, heads=40, ffn=17_408)),
    "qwen3-32b": CatalogEntry("Qwen/Qwen3-32B", _qwen3(layers=64, width=5120, heads=64, ffn=25_600)),
    "qwen3-30b-a3b": CatalogEntry(
        "Qwen/Qwen3-30B-A3B", _qwen3_moe(layers=48, width=2048, heads=32, ffn=6144, expert_ffn=768)
    ),
    "qwen3-235b-a22b": CatalogEntry(
        "Qwen/Qwen3-235B-A22B", _qwen3_moe(layers=94, width=4096, heads=64, ffn=12_288, expert_ffn=1536)
    ),
    "qwen3-4b-2507": CatalogEntry(
        "Qwen/Qwen3-4B-Instruct-2507", _qwen3_2507(_qwen3(layers=36, width=2560, heads=32, ffn=9728) | _TIED, 5e6)
    ),
    "qwen3-30b-a3b-2507": CatalogEntry(
        "Qwen/Qwen3-30B-A3B-Instruct-2507",
        _qwen3_2507(_qwen3_moe(layers=48, width=2048, heads=32, ffn=6144, expert_ffn=768), 1e7),
    ),
    "qwen3-235b-a22b-2507": CatalogEntry(
        "Qwen/Qwen3-235B-A22B-Instruct-2507",
        _qwen3_2507(_qwen3_moe(layers=94, width=4096, heads=64, ffn=12_288, expert_ffn=1536), 5e6),
    ),
    "qwen2.5-vl-7b": CatalogEntry(
        "Qwen/Qwen2.5-VL-7B-Instruct",
        {
            "model_type": "qwen2_5_vl",
            "tie_word_embeddings": False,
            "text_config": _shape(
                "qwen2_5_vl_text", layers=28, width=3584, heads=28, ffn=18_944, vocab=152_064, positions=128_000
            )
            | {"num_key_value_heads": 4, "rope_theta": 1e6},
            "vision_config": {"model_type": "qwen2_5_vl", "hidden_size": 1280, "out_hidden_size": 3584},
        },
    ),
    "qwen3-vl-4b": CatalogEntry(
        "Qwen/Qwen3-VL-4B-Instruct",
        _qwen3_vl(
            _qwen3(layers=36, width=2560, heads=32, ffn=9728) | _TIED,
            depth=24,
            hidden_size=1024,
            intermediate_size=4096,
            deepstack_visual_indexes=[5, 11, 17],
        ),
    ),
    "qwen3-vl-8b": CatalogEntry(
        "Qwen/Qwen3-VL-8B-Instruct", _qwen3_vl(_qwen3(layers=36, width=4096, heads=32, ffn=12_288))
    ),
    "qwen3-vl-32b": CatalogEntry(
        "Qwen/Qwen3-VL-32B-Instruct", _qwen3_vl(_qwen3(layers=64, width=5120, heads=64, ffn=25_600))
    ),
    "qwen3-vl-30b-a3b": CatalogEntry(
        "Qwen/Qwen3-VL-30B-A3B-Instruct",
        _qwen3_vl(_qwen3_moe(layers=48, width=2048, heads=32, ffn=6144, expert_ffn=768)),
    ),
    "qwen3-vl-235b-a22b": CatalogEntry(
        "Qwen/Qwen3-VL-235B-A22B-Instruct",
        _qwen3_vl(_qwen3_moe(layers=94, width=4096, heads=64, ffn=12_288, expert_ffn=1536)),
    ),
    "gemma2-9b": CatalogEntry(
        "google/gemma-2-9b",
        _shape("gemma2", layers=42, width=3584, heads=16, ffn=14_336, vocab=256_000, positions=8192)
        | {"num_key_value_heads": 8},
    ),
    "gemma3-4b": CatalogEntry(
        "google/gemma-3-4b-pt",
        _with_siglip(
            _shape("gemma3_text", layers=34, width=2560, heads=8, ffn=10_240, vocab=262_208, positions=131_072)
            | {"sliding_window": 1024, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
        ),
    ),
    "phi3-mini": CatalogEntry(
        "microsoft/Phi-3-mini-4k-instruct",
        _shape("phi3", layers=32, width=3072, heads=32, ffn=8192, vocab=32_064, positions=4096)
        | {"sliding_window": 2047},
    ),
    "olmo2-7b": CatalogEntry(
        "allenai/OLMo-2-1124-7B",
        _shape("olmo2", layers=32, width=4096, heads=32, ffn=11_008, vocab=100_352, positions=4096)
        | {"rope_theta": 500_000.0, "rms_norm_eps": 1e-6},
    ),
    "olmo2-32b": CatalogEntry(
        "allenai/OLMo-2-0325-32B",
        _shape("olmo2", layers=64, width=5120, heads=40, ffn=27_648, vocab=100_352, positions=4096)
        | {"num_key_value_heads": 8, "rope_theta": 500_000.0, "rms_norm_eps": 1e-6},
    ),
    "gpt2": CatalogEntry(
        "openai-community/gpt2",
        _shape("gpt2", layers=12, width=768, heads=12, ffn=3072, vocab=50_257, positions=1024),
    ),
    "gpt3-175b": CatalogEntry(
        "Brown et al. 2020, arXiv:2005.14165, table 2.1; the vocabulary padded to 51200 and dropout 0.1 as NVIDIA "
        "trains it (dgxc-benchmarking v24.11.1, nemo_megatron/README_175b.md)",
        _shape("gpt2", layers=96, width=12_288, heads=96, ffn=49_152, vocab=51_200, positions=2048),
    ),
    "gpt-neox-20b": CatalogEntry(
        "EleutherAI/gpt-neox-20b",
        _shape("gpt_neox", layers=44, width=6144, heads=64, ffn=24_576, vocab=50_432, positions=2048)
        | {"hidden_act": "gelu_fast"},
    ),
    "nemotron4-15b": CatalogEntry(
        "Parmar et al. 2024, arXiv:2402.16819, table 1", _nemotron4(layers=32, width=6144, heads=48, ffn=24_576)
    ),
    "nemotron4-340b": CatalogEntry(
        "Nemotron-4 340B report, arXiv:2406.11704, table 1", _nemotron4(layers=96, width=18_432, heads=96, ffn=73_728)
    ),
    "deepseek-v2-lite": CatalogEntry(
        "deepseek-ai/DeepSeek-V2-Lite",
        _shape("deepseek_v2", layers=27, width=2048, heads=16, ffn=10_944, vocab=102_400, positions=163_840)
        | {"moe_intermediate_size": 1408, "num_experts_per_tok": 6, "first_k_dense_replace": 1, "q_lora_rank": None}
        | _yarn(40.0, mscale=0.707),
    ),
    "deepseek-v2": CatalogEntry(
        "deepseek-ai/DeepSeek-V2",
        _shape("deepseek_v2", layers=60, width=5120, heads=128, ffn=12_288, vocab=102_400, positions=163_840)
        | {"moe_intermediate_size": 1536, "num_experts_per_tok": 6, "first_k_dense_replace": 1, "n_routed_experts": 160}
        | {"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3, "routed_scaling_factor": 16.0}
        | _yarn(40.0, mscale=0.707),
    ),
    "deepseek-v3": CatalogEntry("deepseek-ai/DeepSeek-V3", _deepseek_v3(mtp_depth=0)),  # without multi-token prediction
    "deepseek-v3-mtp": CatalogEntry("deepseek-ai/DeepSeek-V3", _deepseek_v3(mtp_depth=1)),
    "deepseek-v4-pro": CatalogEntry(
        "sizes of DeepSeek-V4-Pro (arXiv:2606.19348), as listed at glennklockwood.com/garden/DeepSeek-V4-Pro",
        {
            "model_type": "deepseek_v4",
            "num_hidden_layers": 61,
            "hidden_size": 7168,
            "num_attention_heads": 128,
            "q_lora_rank": 1536,
            "o_groups": 16,
            "n_routed_experts": 384,
            "moe_intermediate_size": 3072,
            "routed_scaling_factor": 2.5,
            "index_topk": 1024,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 16.0,
                "original_max_position_embeddings": 65_536,
            },
        },
    ),
    "kimi-k2": CatalogEntry(
        "moonshotai/Kimi-K2-Instruct",
        _shape("kimi_k2", layers=61, width=7168, heads=64, ffn=18_432, vocab=163_840, positions=131_072)
        | {"num_key_value_heads": 64, "n_routed_experts": 384, "first_k_dense_replace": 1, "aux_loss_alpha": 0.001}
        | {"num_nextn_predict_layers": 0}
        | {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.827, "rope_theta": 50_000.0}
        | _yarn(32.0, mscale=1.0, beta_fast=1.0),
    ),
    "qwen3-next-80b-a3b": CatalogEntry(
        "Qwen/Qwen3-Next-80B-A3B-Instruct",
        _shape("qwen3_next", layers=48, width=2048, heads=16, ffn=5120, vocab=151_936, positions=262_144)
        | {"num_key_value_heads": 2, "rope_theta": 10_000_000.0},
    ),
    "qwen3.5-35b-a3b": CatalogEntry(
        "defaults of Qwen3_5MoeTextConfig in transformers 5.23, which documents Qwen3.5-35B-A3B by them",
        {
            "model_type": "qwen3_5_moe_text",
            "num_hidden_layers": 40,
            "hidden_size": 2048,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "vocab_size": 248_320,
            "max_position_embeddings": 32_768,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
        },
    ),
    "qwen3.5-397b-a17b": CatalogEntry(
        "Qwen/Qwen3.5-397B-A17B",  # its text_config
        {
            "model_type": "qwen3_5_moe_text",
            "num_hidden_layers": 60,
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "vocab_size": 248_320,
            "max_position_embeddings": 262_144,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "moe_intermediate_size": 1024,
            "shared_expert_intermediate_size": 1024,
            "linear_num_value_heads": 64,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
        },
        "THUDM/slime@aa84536:scripts/models/qwen3.5-397B-A17B.sh; 64 value heads, with which 17 billion parameters are "
        "active as its name says (15 with the 32 of the class); the longest sequence of docs of xorbitsai/inference",
    ),
    "nemotron3-nano-30b-a3b": CatalogEntry(
        "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
        _shape("nemotron_h", layers=52, width=2688, heads=32, ffn=1856, vocab=131_072, positions=262_144)
        | {"hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"}
        | {"num_key_value_heads": 2, "head_dim": 128, "mamba_num_heads": 64, "n_routed_experts": 128}
        | {"num_experts_per_tok": 6, "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712}
        | {"routed_scaling_factor": 2.5},
        "basetenlabs/kingkong@2a53581:torchtitan/experiments/nemotron3/__init__.py, which quotes it",
    ),
    "lfm2-1.2b": CatalogEntry(
        "LiquidAI/LFM2-1.2B",
        _shape("lfm2", layers=16, width=2048, heads=32, ffn=12_288, vocab=65_536, positions=128_000)
        | {"num_key_value_heads": 8, "full_attn_idxs": [2, 5, 8, 10, 12, 14]},
    ),
    "lfm2-8b-a1b": CatalogEntry(
        "LiquidAI/LFM2-8B-A1B",
        _shape("lfm2_moe", layers=24, width=2048, heads=32, ffn=7168, vocab=65_536, positions=128_000)
        | {"layer_types": ["full_attention" if n in (2, 6, 10, 14, 18, 21) else "conv" for n in range(24)]},
    ),
    "gpt-oss-20b": CatalogEntry("openai/gpt-oss-20b", _gpt_oss(layers=24, experts=32)),
    "gpt-oss-120b": CatalogEntry("openai/gpt-oss-120b", _gpt_oss(layers=36, experts=128)),
    "gemma3-270m": CatalogEntry(
        "google/gemma-3-270m",
        _small_gemma3(layers=18, width=640, ffn=2048),
        f"{_GEMMA}, and config.json of Codingstark/gemma3-270m-leetcode, a finetune",
    ),
    "gemma3-1b": CatalogEntry(
        "google/gemma-3-1b-pt",
        _small_gemma3(layers=26, width=1152, ffn=6912),
        f"{_GEMMA}, and config.json of mlx-community/gemma-3-1b-pt-6bit, a copy",
    ),
    "gemma3-12b": CatalogEntry(
        "google/gemma-3-12b-pt",
        _with_siglip(_gemma3(layers=48, width=3840, heads=16, kv_heads=8, head_dim=256, ffn=15_360)),
        f"{_GEMMA}, and config.json of OpenPipe/gemma-3-12b-it-text-only",
    ),
    "gemma3-27b": CatalogEntry(
        "google/gemma-3-27b-pt",
        _with_siglip(
            _gemma3(layers=62, width=5376, heads=32, kv_heads=16, head_dim=128, ffn=21_504)
            | {"query_pre_attn_scalar": 168}
        ),
        f"{_GEMMA}, and Lightning-AI/litgpt@2685705:litgpt/config.py; "
        "the vocabulary of Gemma3TextConfig, transformers 5.23:models/gemma3/configuration_gemma3.py",
    ),
    "olmo2-1b": CatalogEntry(
        "allenai/OLMo-2-0425-1B",
        _shape("olmo2", layers=16, width=2048, heads=16, ffn=8192, vocab=100_352, positions=4096)
        | {"rope_theta": 500_000.0, "rms_norm_eps": 1e-6},
        "allenai/OLMo@59a53e3:configs/official-0425/OLMo2-1B-stage1.yaml",
    ),
    "mistral-small-24b": CatalogEntry(
        "mistralai/Mistral-Small-24B-Base-2501",
        _shape("mistral", layers=40, width=5120, heads=32, ffn=32_768, vocab=131_072, positions=32_768)
        | {"head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 1e8, "sliding_window": None},
        "config.json of estrogen/Mistral-Small-24b-Sertraline-0304-eval-template@d89dfd8, a finetune",
    ),
    "lfm2-350m": CatalogEntry(
        "LiquidAI/LFM2-350M",
        _lfm2(width=1024, heads=16, ffn=6656),
        "Models/350M/config.json of Thorge-AI/lfm2-web-runtime-weights, a copy",
    ),
    "lfm2-700m": CatalogEntry("LiquidAI/LFM2-700M", _lfm2(width=1536, heads=24, ffn=10_240)),  # read at refs/pr/8
    "qwen3-coder-480b-a35b": CatalogEntry(
        "Qwen/Qwen3-Coder-480B-A35B-Instruct",
        _qwen3_moe(layers=62, width=6144, heads=96, ffn=8192, expert_ffn=2560)
        | {"num_experts": 160, "num_key_value_heads": 8, "rope_theta": 1e7, "max_position_embeddings": 262_144}
        | {"router_aux_loss_coef": 0.0},
        "ai-dynamo/aiconfigurator@095f58a:aic-core/src/aiconfigurator_core/model_configs, a copy",
    ),
    "glm4.5-air": CatalogEntry(
        "zai-org/GLM-4.5-Air",
        _glm45(layers=46, width=4096, ffn=10_944, expert_ffn=1408, experts=128, dense=1),
        f"{_SLIME}/glm4.5-106B-A12B.sh, and {_BRIDGE}",
    ),
    "glm4.5": CatalogEntry(
        "zai-org/GLM-4.5",
        _glm45(layers=92, width=5120, ffn=12_288, expert_ffn=1536, experts=160, dense=3)
        | {"use_qk_norm": True, "routed_scaling_factor": 2.5},
        f"{_SLIME}/glm4.5-355B-A32B.sh, and {_BRIDGE}",
    ),
    "seed-oss-36b": CatalogEntry(
        "ByteDance-Seed/Seed-OSS-36B-Base",
        _shape("seed_oss", layers=64, width=5120, heads=80, ffn=27_648, vocab=155_136, positions=524_288)
        | {"num_key_value_heads": 8, "head_dim": 128, "rope_theta": 1e7},
        "ByteDance-Seed/seed-oss@98e12be:README.md; the feed-forward, the vocabulary and dropout "
        "of SeedOssConfig, transformers 5.23:models/seed_oss/configuration_seed_oss.py",
    ),
    "dots1": CatalogEntry(
        "rednote-hilab/dots.llm1.base",  # read at refs/pr/4
        _shape("dots1", layers=62, width=4096, heads=32, ffn=10_944, vocab=152_064, positions=32_768)
        | {"num_key_value_heads": 32, "moe_intermediate_size": 1408, "n_routed_experts": 128}
        | {"num_experts_per_tok": 6, "n_shared_experts": 2, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5}
        | {"rope_theta": 1e7, "rms_norm_eps": 1e-5, "norm_topk_prob": True},
    ),
    # Keys recalled from the repositories, and held against the published numbers of parameters (tests/model).
    "llama-7b": CatalogEntry(
        "huggyllama/llama-7b",
        _llama(layers=32, width=4096, heads=32, kv_heads=32, ffn=11_008, vocab=32_000, positions=2048),
    ),
    "llama-13b": CatalogEntry(
        "huggyllama/llama-13b",
        _llama(layers=40, width=5120, heads=40, kv_heads=40, ffn=13_824, vocab=32_000, positions=2048),
    ),
    "llama-30b": CatalogEntry(
        "huggyllama/llama-30b",
        _llama(layers=60, width=6656, heads=52, kv_heads=52, ffn=17_920, vocab=32_000, positions=2048),
    ),
    "llama-65b": CatalogEntry(
        "huggyllama/llama-65b",
        _llama(layers=80, width=8192, heads=64, kv_heads=64, ffn=22_016, vocab=32_000, positions=2048),
    ),
    "llama4-maverick": CatalogEntry(
        "meta-llama/Llama-4-Maverick-17B-128E",
        _shape_with_groups(
            "llama4_text", layers=48, width=5120, heads=40, kv_heads=8, ffn=8192, vocab=202_048, positions=1_048_576
        )
        | {"head_dim": 128, "intermediate_size_mlp": 16_384, "num_local_experts": 128, "num_experts_per_tok": 1}
        | {"interleave_moe_layer_step": 2, "use_qk_norm": False, "rope_theta": 5e5},
    ),
    "tinyllama-1.1b": CatalogEntry(
        "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
        _llama(layers=22, width=2048, heads=32, kv_heads=4, ffn=5632, vocab=32_000, positions=2048, rms_norm_eps=1e-5),
    ),
    "yi-6b": CatalogEntry(
        "01-ai/Yi-6B",
        _llama(layers=32, width=4096, heads=32, kv_heads=4, ffn=11_008, vocab=64_000, positions=4096, rope_theta=5e6),
    ),
    "yi-1.5-9b": CatalogEntry(
        "01-ai/Yi-1.5-9B",
        _llama(layers=48, width=4096, heads=32, kv_heads=4, ffn=11_008, vocab=64_000, positions=4096, rope_theta=5e6),
    ),
    "yi-34b": CatalogEntry(
        "01-ai/Yi-34B",
        _llama(layers=60, width=7168, heads=56, kv_heads=8, ffn=20_480, vocab=64_000, positions=4096, rope_theta=5e6),
    ),
    "deepseek-llm-7b": CatalogEntry(
        "deepseek-ai/deepseek-llm-7b-base",
        _llama(layers=30, width=4096, heads=32, kv_heads=32, ffn=11_008, vocab=102_400, positions=4096),
    ),
    "deepseek-llm-67b": CatalogEntry(
        "deepseek-ai/deepseek-llm-67b-base",
        _llama(layers=95, width=8192, heads=64, kv_heads=8, ffn=22_016, vocab=102_400, positions=4096),
    ),
    "deepseek-coder-6.7b": CatalogEntry(
        "deepseek-ai/deepseek-coder-6.7b-base",
        _llama(layers=32, width=4096, heads=32, kv_heads=32, ffn=11_008, vocab=32_256, positions=16_384)
        | {"rope_theta": 1e5, "rope_scaling": {"type": "linear", "factor": 4.0}},
    ),
    "smollm2-135m": CatalogEntry(
        "HuggingFaceTB/SmolLM2-135M",
        _llama(layers=30, width=576, heads=9, kv_heads=3, ffn=1536, vocab=49_152, positions=8192, rope_theta=1e5)
        | _TIED,
    ),
    "smollm2-360m": CatalogEntry(
        "HuggingFaceTB/SmolLM2-360M",
        _llama(layers=32, width=960, heads=15, kv_heads=5, ffn=2560, vocab=49_152, positions=8192, rope_theta=1e5)
        | _TIED,
    ),
    "smollm2-1.7b": CatalogEntry(
        "HuggingFaceTB/SmolLM2-1.7B",
        _llama(layers=24, width=2048, heads=32, kv_heads=32, ffn=8192, vocab=49_152, positions=8192, rope_theta=1.3e5)
        | _TIED,
    ),
    "mistral-7b-v0.3": CatalogEntry(
        "mistralai/Mistral-7B-v0.3",
        _mistral(layers=32, width=4096, heads=32, kv_heads=8, ffn=14_336, vocab=32_768, positions=32_768),
    ),
    "mistral-nemo-12b": CatalogEntry(
        "mistralai/Mistral-Nemo-Base-2407",
        _mistral(
            layers=40, width=5120, heads=32, kv_heads=8, ffn=14_336, vocab=131_072, positions=131_072, head_dim=128
        ),
    ),
    "mistral-large-123b": CatalogEntry(
        "mistralai/Mistral-Large-Instruct-2407",
        _mistral(layers=88, width=12_288, heads=96, kv_heads=8, ffn=28_672, vocab=32_768, positions=131_072),
    ),
    "mixtral-8x22b": CatalogEntry(
        "mistralai/Mixtral-8x22B-v0.1",
        _shape_with_groups(
            "mixtral", layers=56, width=6144, heads=48, kv_heads=8, ffn=16_384, vocab=32_000, positions=65_536
        )
        | {"num_local_experts": 8, "num_experts_per_tok": 2, "rope_theta": 1e6, "rms_norm_eps": 1e-5},
    ),
    "gemma-2b": CatalogEntry(
        "google/gemma-2b",
        _shape_with_groups(
            "gemma", layers=18, width=2048, heads=8, kv_heads=1, ffn=16_384, vocab=256_000, positions=8192, head_dim=256
        ),
    ),
    "gemma-7b": CatalogEntry(
        "google/gemma-7b",
        _shape_with_groups(
            "gemma",
            layers=28,
            width=3072,
            heads=16,
            kv_heads=16,
            ffn=24_576,
            vocab=256_000,
            positions=8192,
            head_dim=256,
        ),
    ),
    "gemma2-2b": CatalogEntry(
        "google/gemma-2-2b",
        _shape_with_groups(
            "gemma2", layers=26, width=2304, heads=8, kv_heads=4, ffn=9216, vocab=256_000, positions=8192, head_dim=256
        ),
    ),
    "gemma2-27b": CatalogEntry(
        "google/gemma-2-27b",
        _shape_with_groups(
            "gemma2", layers=46, width=4608, heads=32, kv_heads=16, ffn=36_864, vocab=256_000, positions=8192
        )
        | {"head_dim": 128, "query_pre_attn_scalar": 144},
    ),
    "phi2": CatalogEntry(
        "microsoft/phi-2",
        _shape_with_groups(
            "phi",
            layers=32,
            width=2560,
            heads=32,
            kv_heads=32,
            ffn=10_240,
            vocab=51_200,
            positions=2048,
            partial_rotary_factor=0.4,
        ),
    ),
    "phi4": CatalogEntry(
        "microsoft/phi-4",
        _shape_with_groups(
            "phi3",
            layers=40,
            width=5120,
            heads=40,
            kv_heads=10,
            ffn=17_920,
            vocab=100_352,
            positions=16_384,
            rope_theta=2.5e5,
        ),
    ),
    "gpt2-medium": CatalogEntry(
        "openai-community/gpt2-medium",
        _shape("gpt2", layers=24, width=1024, heads=16, ffn=4096, vocab=50_257, positions=1024),
    ),
    "gpt2-large": CatalogEntry(
        "openai-community/gpt2-large",
        _shape("gpt2", layers=36, width=1280, heads=20, ffn=5120, vocab=50_257, positions=1024),
    ),
    "gpt2-xl": CatalogEntry(
        "openai-community/gpt2-xl",
        _shape("gpt2", layers=48, width=1600, heads=25, ffn=6400, vocab=50_257, positions=1024),
    ),
    "pythia-1.4b": CatalogEntry(
        "EleutherAI/pythia-1.4b",
        _shape("gpt_neox", layers=24, width=2048, heads=16, ffn=8192, vocab=50_304, positions=2048),
    ),
    "pythia-6.9b": CatalogEntry(
        "EleutherAI/pythia-6.9b",
        _shape("gpt_neox", layers=32, width=4096, heads=32, ffn=16_384, vocab=50_432, positions=2048),
    ),
    "pythia-12b": CatalogEntry(
        "EleutherAI/pythia-12b",
        _shape("gpt_neox", layers=36, width=5120, heads=40, ffn=20_480, vocab=50_688, positions=2048),
    ),
    "gpt-j-6b": CatalogEntry(
        "EleutherAI/gpt-j-6b",
        {
            "model_type": "gptj",
            "n_layer": 28,
            "n_embd": 4096,
            "n_head": 16,
            "rotary_dim": 64,
            "vocab_size": 50_400,
            "n_positions": 2048,
        },
    ),
    "bloom-7b1": CatalogEntry(
        "bigscience/bloom-7b1",
        {"model_type": "bloom", "n_layer": 30, "hidden_size": 4096, "n_head": 32, "vocab_size": 250_880},
    ),
    "bloom-176b": CatalogEntry(
        "bigscience/bloom",
        {"model_type": "bloom", "n_layer": 70, "hidden_size": 14_336, "n_head": 112, "vocab_size": 250_880},
    ),
    "falcon-7b": CatalogEntry(
        "tiiuae/falcon-7b", _falcon(layers=32, width=4544, heads=71, new_decoder_architecture=False)
    ),
    "falcon-40b": CatalogEntry(
        "tiiuae/falcon-40b", _falcon(layers=60, width=8192, heads=128, num_kv_heads=8, new_decoder_architecture=True)
    ),
    "falcon-180b": CatalogEntry(
        "tiiuae/falcon-180B", _falcon(layers=80, width=14_848, heads=232, num_kv_heads=8, new_decoder_architecture=True)
    ),
    "mpt-7b": CatalogEntry("mosaicml/mpt-7b", _mpt(layers=32, width=4096, heads=32, positions=2048)),
    "mpt-30b": CatalogEntry("mosaicml/mpt-30b", _mpt(layers=48, width=7168, heads=64, positions=8192)),
    "opt-1.3b": CatalogEntry("facebook/opt-1.3b", _opt(layers=24, width=2048, heads=32)),
    "opt-6.7b": CatalogEntry("facebook/opt-6.7b", _opt(layers=32, width=4096, heads=32)),
    "opt-13b": CatalogEntry("facebook/opt-13b", _opt(layers=40, width=5120, heads=40)),
    "opt-30b": CatalogEntry("facebook/opt-30b", _opt(layers=48, width=7168, heads=56)),
    "opt-66b": CatalogEntry("facebook/opt-66b", _opt(layers=64, width=9216, heads=72)),
    "opt-175b": CatalogEntry("Zhang et al. 2022, arXiv:2205.01068, table 1", _opt(layers=96, width=12_288, heads=96)),
    "olmo3-7b": CatalogEntry(
        "allenai/Olmo-3-1025-7B",
        _shape_with_groups(
            "olmo3", layers=32, width=4096, heads=32, kv_heads=32, ffn=11_008, vocab=100_278, positions=65_536
        )
        | {"rope_theta": 5e5, "sliding_window": 4096},
    ),
    "olmo3-32b": CatalogEntry(
        "allenai/Olmo-3-1125-32B",
        _shape_with_groups(
            "olmo3", layers=64, width=5120, heads=40, kv_heads=8, ffn=27_648, vocab=100_278, positions=65_536
        )
        | {"rope_theta": 5e5, "sliding_window": 4096},
    ),
    "olmoe-1b-7b": CatalogEntry(
        "allenai/OLMoE-1B-7B-0924",
        _shape_with_groups(
            "olmoe", layers=16, width=2048, heads=16, kv_heads=16, ffn=1024, vocab=50_304, positions=4096
        )
        | {"num_experts": 64, "num_experts_per_tok": 8},
    ),
    "granite3.3-8b": CatalogEntry(
        "ibm-granite/granite-3.3-8b-base",
        _shape_with_groups(
            "granite", layers=40, width=4096, heads=32, kv_heads=8, ffn=12_800, vocab=49_152, positions=131_072
        )
        | {"embedding_multiplier": 12.0, "attention_multiplier": 1 / 128, "residual_multiplier": 0.22}
        | {"logits_scaling": 16.0, "rope_theta": 1e7}
        | _TIED,
    ),
    "apertus-8b": CatalogEntry(
        "swiss-ai/Apertus-8B-2509",
        _shape_with_groups(
            "apertus", layers=32, width=4096, heads=32, kv_heads=8, ffn=21_504, vocab=131_072, positions=65_536
        )
        | {"hidden_act": "xielu", "rope_theta": 1.2e7},
    ),
    "apertus-70b": CatalogEntry(
        "swiss-ai/Apertus-70B-2509",
        _shape_with_groups(
            "apertus", layers=80, width=8192, heads=64, kv_heads=8, ffn=43_008, vocab=131_072, positions=65_536
        )
        | {"hidden_act": "xielu", "rope_theta": 1.2e7},
    ),
    "command-r-35b": CatalogEntry(
        "CohereLabs/c4ai-command-r-v01",
        _shape_with_groups(
            "cohere", layers=40, width=8192, heads=64, kv_heads=64, ffn=22_528, vocab=256_000, positions=131_072
        )
        | {"rope_theta": 8e6, "logit_scale": 0.0625},
    ),
    "command-a-111b": CatalogEntry(
        "CohereLabs/c4ai-command-a-03-2025",
        _shape_with_groups(
            "cohere2", layers=64, width=12_288, heads=96, kv_heads=8, ffn=36_864, vocab=256_000, positions=131_072
        )
        | {"rope_theta": 5e4, "logit_scale": 0.25, "sliding_window": 4096},
    ),
    "dbrx-132b": CatalogEntry(
        "databricks/dbrx-base",
        {
            "model_type": "dbrx",
            "d_model": 6144,
            "n_heads": 48,
            "n_layers": 40,
            "max_seq_len": 32_768,
            "vocab_size": 100_352,
            "rope_theta": 5e5,  # transformers 5 does not read that of attn_config
        }
        | {"attn_config": {"clip_qkv": 8, "kv_n_heads": 8, "rope_theta": 5e5}}
        | {"ffn_config": {"ffn_hidden_size": 10_752, "moe_num_experts": 16, "moe_top_k": 4}},
    ),
    "glm4-9b": CatalogEntry(
        "zai-org/GLM-4-9B-0414",
        _shape_with_groups(
            "glm4", layers=40, width=4096, heads=32, kv_heads=2, ffn=13_696, vocab=151_552, positions=32_768
        )
        | {"head_dim": 128, "attention_bias": True},
    ),
    "glm4-32b": CatalogEntry(
        "zai-org/GLM-4-32B-0414",
        _shape_with_groups(
            "glm4",
            layers=61,
            width=6144,
            heads=48,
            kv_heads=2,
            ffn=23_040,
            vocab=151_552,
            positions=32_768,
            head_dim=128,
        ),
    ),
    "hunyuan-a13b": CatalogEntry(
        "tencent/Hunyuan-A13B-Instruct",
        _shape_with_groups(
            "hunyuan_v1_moe", layers=32, width=4096, heads=32, kv_heads=8, ffn=3072, vocab=128_167, positions=32_768
        )
        | {"head_dim": 128, "num_experts": 64, "moe_topk": 8}
        | _TIED,
    ),
    "minimax-text-01": CatalogEntry(
        "MiniMaxAI/MiniMax-Text-01",
        _shape_with_groups(
            "minimax", layers=80, width=6144, heads=64, kv_heads=8, ffn=9216, vocab=200_064, positions=10_240_000
        )
        | {"head_dim": 128, "rotary_dim": 64, "num_local_experts": 32, "num_experts_per_tok": 2, "rope_theta": 1e7}
        | {"layer_types": [*["linear_attention"] * 7, "full_attention"] * 10},
    ),
    "qwen2.5-math-1.5b": CatalogEntry(
        "Qwen/Qwen2.5-Math-1.5B",
        _qwen25(layers=28, width=1536, heads=12, kv_heads=2, ffn=8960, vocab=151_936) | {"rope_theta": 1e4},
    ),
    "qwen2.5-math-7b": CatalogEntry(
        "Qwen/Qwen2.5-Math-7B", _qwen25(layers=28, width=3584, heads=28, kv_heads=4, ffn=18_944) | {"rope_theta": 1e4}
    ),
    "qwen3-coder-30b-a3b": CatalogEntry(
        "Qwen/Qwen3-Coder-30B-A3B-Instruct",
        _qwen3_2507(_qwen3_moe(layers=48, width=2048, heads=32, ffn=5472, expert_ffn=768), 1e7),
    ),
    **_list_defaults(),
}
