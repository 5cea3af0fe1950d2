"""Published models: each entry of ``CATALOG`` holds the keys of a ``config.json``, which its family's mapping reads.

A source of the form ``owner/model`` is the Hugging Face repository with that ``config.json``.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from fivefold.model.huggingface.decoder import expand_names


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
    "kimi-k2-thinking": Version("kimi-k2.5"),  # sizes: apxml.com/models/kimi-k2-thinking; else recalled
    "kimi-k2.6": Version("kimi-k2.5"),
    "kimi-k2.7-code": Version("kimi-k2.5"),
    "minimax-m2.1": Version("minimax-m2"),  # recalled: as M2 before and M2.5 after it
    "minimax-m2.5": Version("minimax-m2"),
    "minimax-m2.7": Version("minimax-m2"),
    "minimax-m1-80k": Version("minimax-text-01"),  # "the exact same architecture", vllm-project/vllm#19677
    "minimax-m1-40k": Version("minimax-text-01"),  # config.json of MiniMaxAI/MiniMax-M1-40k, refs/pr/1
    "qwen3.6-27b": Version("qwen3.5-27b"),
    "qwen3.6-35b-a3b": Version("qwen3.5-35b-a3b"),
    "qwen1.5-moe-a2.7b": Version("qwen1.5-moe-14b-a2.7b"),
    "glm-5": Version("glm5-744b-a40b"),
    "glm-5.1": Version("glm5-744b-a40b"),
    "codegemma-7b": Version("gemma-7b"),  # Lightning-AI/litgpt@2685705:litgpt/config.py
    "jamba-mini-1.5": Version("jamba-v0.1"),  # recalled, as is the next
    "ai21-jamba-1.5-mini": Version("jamba-v0.1"),
    "deepseek-r1-distill-llama-8b": Version("llama3.1-8b"),
    "deepseek-r1-distill-llama-70b": Version("llama3.3-70b"),
    "deepseek-r1-distill-qwen-1.5b": Version("qwen2.5-math-1.5b"),
    "deepseek-r1-distill-qwen-7b": Version("qwen2.5-math-7b"),
    "deepseek-r1-distill-qwen-14b": Version("qwen2.5-14b"),
    "deepseek-r1-distill-qwen-32b": Version("qwen2.5-32b"),
    "vicuna-7b-v1.5": Version("llama2-7b"),
    "vicuna-13b-v1.5": Version("llama2-13b"),
    "zephyr-7b-beta": Version("mistral-7b"),
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
    # The number of parameters in keras-team/keras-hub@961f8f7:keras_hub/src/models/mistral3/mistral3_presets.py
    "mistral-small-3.2-24b-instruct-2506": Version("mistral-small-3.1-24b"),
    "mistral-large-instruct-2411": Version("mistral-large-123b"),
    "mixtral-8x7b-instruct-v0.1": Version("mixtral-8x7b"),
    "glm-4.6": Version("glm4.5", 202_752),
    "glm-4.7": Version("glm4.5", 202_752),  # THUDM/slime:docs/en/examples/glm4.7-355B-A32B.md
    "glm-4.7-flash": Version("glm4-lite-30b-a4b"),  # THUDM/slime:scripts/models/glm4.7-30B-A3B.sh
    "qwen3-coder-next": Version("qwen3-next-80b-a3b"),  # docker/model-runner:ai/qwen3-coder-next-vllm.md
    # with a module of multi-token prediction, which the catalog's leaves out
    "nemotron-3.5-lightning-30b-a3b": Version("nemotron3-nano-30b-a3b", 1_048_576),
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
        return self.source if is_repository(self.source) else None


def is_repository(text: str) -> bool:
    """Tell whether ``text`` is written as a Hugging Face repository, ``owner/model``."""
    return re.fullmatch(r"[\w.-]{1,96}/[\w.-]{1,96}", text) is not None and not text.startswith(".")


def _list_models(columns: str, rows: dict[str, tuple[Any, ...]], **shared: Any) -> dict[str, CatalogEntry]:
    """Return the entries of a table of models; ``shared``: the keys that are equal in all of its rows.

    A row holds the model's source and a value for each of ``columns``, which are keys or ``SHORT_NAMES`` of keys; None
    is the default of its family. A dict of the model's other keys may follow, and then a text that says where else they
    are written.
    """
    names = columns.split()
    entries = {}
    for name, (source, *values) in rows.items():
        also = values.pop() if isinstance(values[-1], str) else ""
        other = values.pop() if isinstance(values[-1], dict) else {}
        cells = {key: value for key, value in zip(names, values, strict=True) if value is not None}
        entries[name] = CatalogEntry(source, expand_names(**(shared | cells)) | other, also)
    return entries


def _make_yarn(factor: float, *, mscale: float, beta_fast: float = 32.0) -> dict[str, Any]:
    lengths = {"type": "yarn", "factor": factor, "original_max_position_embeddings": 4096}
    return lengths | {"beta_fast": beta_fast, "beta_slow": 1.0, "mscale": mscale, "mscale_all_dim": mscale}


def _make_llama3_scaling(factor: float) -> dict[str, Any]:
    """Return the rope scaling since Llama 3.1: low frequencies divided by ``factor``, for 131 072 positions."""
    scaling = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return scaling | {"original_max_position_embeddings": 8192}


def _add_siglip(entry: CatalogEntry) -> CatalogEntry:
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
    config = {"model_type": "gemma3", "mm_tokens_per_image": 256, "text_config": entry.config, "vision_config": tower}
    return entry._replace(config=config)


def _add_qwen3_tower(source: str, text: CatalogEntry, **tower: Any) -> CatalogEntry:
    """Return a Qwen3-VL around a Qwen3; ``tower``: what is not the default of transformers' Qwen3VLVisionConfig."""
    kind = text.config["model_type"].replace("qwen3", "qwen3_vl")
    config = {
        "model_type": kind,
        "tie_word_embeddings": text.config.get("tie_word_embeddings", False),
        "text_config": text.config
        | {"model_type": f"{kind}_text", "rope_theta": 5e6, "max_position_embeddings": 262_144},
        "vision_config": {"model_type": kind, "out_hidden_size": text.config["hidden_size"]} | tower,
    }
    return CatalogEntry(source, config)


def _extend_qwen3(source: str, entry: CatalogEntry, rope_theta: float) -> CatalogEntry:
    """Return a Qwen3 of July 2025, which reads 262 144 tokens.

    The bases of the rotary angles are those of the published configs as others quote them: 4B in
    akougkas/warpio-cli, 30B in UbiquitousLearning/mllm#619, 235B in radixark/miles#327.
    """
    return CatalogEntry(source, entry.config | {"max_position_embeddings": 262_144, "rope_theta": rope_theta})


def _list_defaults() -> dict[str, CatalogEntry]:
    """Return the models whose keys are the defaults of their configuration class in transformers."""
    entries = {}
    for line in _DEFAULTS.strip().splitlines():
        name, model_type, folder, config_class = line.split()
        source = f"{config_class}, transformers 5.23:models/{folder}/configuration_{folder}.py"
        entries[name] = CatalogEntry(source, {"model_type": model_type})
    scout = entries["llama4-scout"]  # the class has 131,072 positions, and the config.json of the base model has more
    entries["llama4-scout"] = scout._replace(config=scout.config | {"max_position_embeddings": 262_144})
    glm5 = entries["glm5-744b-a40b"]  # the class has a base of the rotary angles of 1e4, and the config.json 1e6
    entries["glm5-744b-a40b"] = glm5._replace(config=glm5.config | {"rope_theta": 1e6}, also=_CONFIGS)
    layers = {"index_topk_freq": 4, "index_skip_topk_offset": 3}  # most attend to keys that an earlier one chose
    longer = {"rope_theta": 8e6, "max_position_embeddings": 1_048_576}
    entries["glm5.2-744b-a40b"] = CatalogEntry("zai-org/GLM-5.2", glm5.config | layers | longer, _CONFIGS)
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
    gemma3n-e4b gemma3n_text gemma3n Gemma3nTextConfig
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
    longcat-flash-560b-a27b longcat_flash longcat_flash LongcatFlashConfig
    minicpm3-4b minicpm3 minicpm3 MiniCPM3Config
    mellum2-12b-a2.5b mellum mellum MellumConfig
    minimax-m2 minimax_m2 minimax_m2 MiniMaxM2Config
    ministral3-8b ministral3 ministral3 Ministral3Config
    mistral-small-4 mistral4 mistral4 Mistral4Config
    opt-125m opt opt OPTConfig
    qwen1.5-moe-14b-a2.7b qwen2_moe qwen2_moe Qwen2MoeConfig
    smollm3-3b smollm3 smollm3 SmolLM3Config
    stablelm-3b stablelm stablelm StableLmConfig
    solar-open-100b solar_open solar_open SolarOpenConfig
    youtu-2b youtu youtu YoutuConfig
    laguna-xs-33b-a3b laguna laguna LagunaConfig
    lfm3-1.7b lfm3 lfm3 Lfm3Config
    mimo-v2-flash-309b-a15b mimo_v2_flash mimo_v2_flash MiMoV2FlashConfig
"""

_TIED = {"tie_word_embeddings": True}
_LLAMA3 = {"model_type": "llama", "kv_heads": 8, "vocab": 128_256, "rms_norm_eps": 1e-5, "rope_theta": 5e5}
_QWEN3 = {"vocab": 151_936, "positions": 40_960, "head_dim": 128, "rope_theta": 1e6}
_QWEN3_MOE = {"num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True}
_QWEN35_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}}
_LATENT_EXPERTS = {"head_dim": 128, "n_routed_experts": 512, "num_experts_per_tok": 22, "routed_scaling_factor": 5.0}
_GRANITE4 = {
    "layer_types": ["attention" if layer in (5, 15, 25, 35) else "mamba" for layer in range(40)],
    "position_embedding_type": "nope",
    "mamba_d_state": 128,
    "mamba_d_head": 64,
    "mamba_n_groups": 1,
    "embedding_multiplier": 12.0,
    "attention_multiplier": 1 / 128,
    "residual_multiplier": 0.22,
}
_GEMMA4_LARGE = {"hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "use_bidirectional_attention": "vision"}
_SMOLLM = {"rope_theta": 1e4, "rms_norm_eps": 1e-5, **_TIED}
_GEMMA3 = {"sliding_window": 1024, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}

_GEMMA = "google-deepmind/gemma@7691fd4:gemma/gm/nn/_gemma.py"
_SLIME = "THUDM/slime@624b824:scripts/models"
_VIME = "vllm-project/vime@b332ffc:scripts/models"
_COPIED = "citsjtu2020/LLM-Prof@8434c8d:sglang/Model_Config.md, a copy"
_QWEN25 = "Qwen2.5 report, arXiv:2412.15115, table 1"
_CONFIGS = "ai-dynamo/aiconfigurator@095f58a:aic-core/src/aiconfigurator_core/model_configs, a copy"
_MAXTEXT = "AI-Hypercomputer/maxtext@e591f30:src/maxtext/checkpoint_conversion/utils/hf_model_configs.py, a copy"
_NEMO = "NVIDIA/NeMo@8cfedd7:nemo/collections/llm/gpt/model"
_MODELOPT = "examples/post_training/modelopt/conf/nvidia"
_LITGPT = "Lightning-AI/litgpt@2685705:litgpt/config.py"
_MLC = "mlc-ai/mlc-llm@79d603f:python/mlc_llm/model/model_preset.py, a copy"
_BRIDGE = "NVIDIA-NeMo/Megatron-Bridge@067f987:docs/models/glm/glm45.md"

CATALOG: dict[str, CatalogEntry] = {
    **_list_models("layers width heads kv_heads ffn positions", {
        "nano": ("Fivefold's tests: bytes through Llama blocks", 2, 64, 4, 2, 176, 512),
        "tiny": ("Fivefold's demo: bytes through Llama blocks", 6, 256, 8, 4, 768, 2048),
    }, model_type="llama", vocab=256, rms_norm_eps=1e-5),
    **_list_models("layers width heads kv_heads ffn", {
        "llama2-7b": ("meta-llama/Llama-2-7b-hf", 32, 4096, 32, 32, 11_008),
        "llama2-13b": ("meta-llama/Llama-2-13b-hf", 40, 5120, 40, 40, 13_824),
        "llama2-70b": ("meta-llama/Llama-2-70b-hf", 80, 8192, 64, 8, 28_672),
    }, model_type="llama", vocab=32_000, positions=4096, rms_norm_eps=1e-5),
    **_list_models("layers width heads kv_heads ffn vocab", {
        "codellama-7b": ("codellama/CodeLlama-7b-hf", 32, 4096, 32, 32, 11_008, 32_016),
        "codellama-13b": ("codellama/CodeLlama-13b-hf", 40, 5120, 40, 40, 13_824, 32_016),
        "codellama-34b": ("codellama/CodeLlama-34b-hf", 48, 8192, 64, 8, 22_016, 32_000),
    }, model_type="llama", positions=16_384, rope_theta=1e6, rms_norm_eps=1e-5),
    **_list_models("layers width heads ffn", {
        "llama3-8b": ("meta-llama/Meta-Llama-3-8B", 32, 4096, 32, 14_336),
        "llama3-70b": ("meta-llama/Meta-Llama-3-70B", 80, 8192, 64, 28_672),
    }, **_LLAMA3, positions=8192),
    **_list_models("layers width heads ffn", {
        "llama3.1-8b": ("meta-llama/Llama-3.1-8B", 32, 4096, 32, 14_336),
        "llama3.1-70b": ("meta-llama/Llama-3.1-70B", 80, 8192, 64, 28_672),
        "llama3.3-70b": ("meta-llama/Llama-3.3-70B-Instruct", 80, 8192, 64, 28_672),
        "llama3-405b": ("meta-llama/Llama-3.1-405B", 126, 16_384, 128, 53_248),  # Llama 3.0 has no 405B
    }, **_LLAMA3, positions=131_072, rope_scaling=_make_llama3_scaling(8.0)),
    **_list_models("layers width heads ffn", {
        "llama3.2-1b": ("meta-llama/Llama-3.2-1B", 16, 2048, 32, 8192),
        "llama3.2-3b": ("meta-llama/Llama-3.2-3B", 28, 3072, 24, 8192),
    }, **_LLAMA3, positions=131_072, rope_scaling=_make_llama3_scaling(32.0), **_TIED),
    **_list_models("model_type layers width heads ffn vocab positions", {
        "mistral-7b": ("mistralai/Mistral-7B-v0.1", "mistral", 32, 4096, 32, 14_336, 32_000, 32_768,
                       {"rms_norm_eps": 1e-5}),
        "mixtral-8x7b": ("mistralai/Mixtral-8x7B-v0.1", "mixtral", 32, 4096, 32, 14_336, 32_000, 32_768,
                         {"router_aux_loss_coef": 0.02}),
        "mistral-small-24b": (
            "mistralai/Mistral-Small-24B-Base-2501", "mistral", 40, 5120, 32, 32_768, 131_072, 32_768,
            {"head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 1e8, "sliding_window": None},
            "config.json of estrogen/Mistral-Small-24b-Sertraline-0304-eval-template@d89dfd8, a finetune",
        ),
    }),
    **_list_models("layers width heads kv_heads ffn vocab", {
        "qwen2-7b": ("Qwen/Qwen2-7B", 28, 3584, 28, 4, 18_944, 152_064),
        "qwen2.5-0.5b": ("Qwen/Qwen2.5-0.5B", 24, 896, 14, 2, 4864, 151_936,
                         {"max_position_embeddings": 32_768, **_TIED}, f"{_VIME}/qwen2.5-0.5B.sh; {_QWEN25}"),
        "qwen2.5-1.5b": ("Qwen/Qwen2.5-1.5B", 28, 1536, 12, 2, 8960, 151_936,
                         _TIED, f"{_VIME}/qwen2.5-1.5B.sh; {_QWEN25}"),
        "qwen2.5-3b": ("Qwen/Qwen2.5-3B", 36, 2048, 16, 2, 11_008, 151_936,
                       {"max_position_embeddings": 32_768, **_TIED}, _COPIED),
        "qwen2.5-7b": ("Qwen/Qwen2.5-7B", 28, 3584, 28, 4, 18_944, 152_064, _QWEN25),
        "qwen2.5-14b": ("Qwen/Qwen2.5-14B", 48, 5120, 40, 8, 13_824, 152_064, {"rms_norm_eps": 1e-5}, _COPIED),
        "qwen2.5-32b": ("Qwen/Qwen2.5-32B", 64, 5120, 40, 8, 27_648, 152_064, {"rms_norm_eps": 1e-5}, _COPIED),
        "qwen2.5-72b": ("Qwen/Qwen2.5-72B", 80, 8192, 64, 8, 29_568, 152_064, {"rms_norm_eps": 1e-5}, _QWEN25),
    }, model_type="qwen2", positions=131_072, rope_theta=1e6),
    **_list_models("layers width heads ffn", {
        "qwen3-0.6b": ("Qwen/Qwen3-0.6B", 28, 1024, 16, 3072, _TIED),
        "qwen3-1.7b": ("Qwen/Qwen3-1.7B", 28, 2048, 16, 6144, _TIED),
        "qwen3-4b": ("Qwen/Qwen3-4B", 36, 2560, 32, 9728, _TIED),
        "qwen3-8b": ("Qwen/Qwen3-8B", 36, 4096, 32, 12_288),
        "qwen3-14b": ("Qwen/Qwen3-14B", 40, 5120, 40, 17_408),
        "qwen3-32b": ("Qwen/Qwen3-32B", 64, 5120, 64, 25_600),
    }, model_type="qwen3", kv_heads=8, **_QWEN3),
    **_list_models("layers width heads ffn moe_intermediate_size", {
        "qwen3-30b-a3b": ("Qwen/Qwen3-30B-A3B", 48, 2048, 32, 6144, 768),
        "qwen3-235b-a22b": ("Qwen/Qwen3-235B-A22B", 94, 4096, 64, 12_288, 1536),
        "qwen3-coder-480b-a35b": (
            "Qwen/Qwen3-Coder-480B-A35B-Instruct", 62, 6144, 96, 8192, 2560,
            {"num_experts": 160, "num_key_value_heads": 8, "rope_theta": 1e7, "max_position_embeddings": 262_144,
             "router_aux_loss_coef": 0.0},
            _CONFIGS,
        ),
    }, model_type="qwen3_moe", kv_heads=4, **_QWEN3, **_QWEN3_MOE),
    "qwen2.5-vl-7b": CatalogEntry("Qwen/Qwen2.5-VL-7B-Instruct", {
        "model_type": "qwen2_5_vl", "tie_word_embeddings": False,
        "text_config": {
            "model_type": "qwen2_5_vl_text", "num_hidden_layers": 28, "hidden_size": 3584, "num_attention_heads": 28,
            "num_key_value_heads": 4, "intermediate_size": 18_944, "vocab_size": 152_064,
            "max_position_embeddings": 128_000, "rope_theta": 1e6,
        },
        "vision_config": {"model_type": "qwen2_5_vl", "hidden_size": 1280, "out_hidden_size": 3584},
    }),
    **_list_models("layers width heads kv_heads ffn vocab positions", {
        "gemma2-9b": ("google/gemma-2-9b", 42, 3584, 16, 8, 14_336, 256_000, 8192),
    }, model_type="gemma2"),
    **_list_models("layers width ffn", {
        "gemma3-270m": ("google/gemma-3-270m", 18, 640, 2048,
                        f"{_GEMMA}, and config.json of Codingstark/gemma3-270m-leetcode, a finetune"),
        "gemma3-1b": ("google/gemma-3-1b-pt", 26, 1152, 6912,
                      f"{_GEMMA}, and config.json of mlx-community/gemma-3-1b-pt-6bit, a copy"),
    }, model_type="gemma3_text", heads=4, kv_heads=1, head_dim=256, vocab=262_144, positions=32_768,
       sliding_window=512),
    **{name: _add_siglip(entry) for name, entry in _list_models("layers width heads kv_heads head_dim ffn", {
        "gemma3-4b": ("google/gemma-3-4b-pt", 34, 2560, 8, None, None, 10_240),
        "gemma3-12b": ("google/gemma-3-12b-pt", 48, 3840, 16, 8, 256, 15_360,
                       f"{_GEMMA}, and config.json of OpenPipe/gemma-3-12b-it-text-only"),
        "gemma3-27b": (
            "google/gemma-3-27b-pt", 62, 5376, 32, 16, 128, 21_504, {"query_pre_attn_scalar": 168},
            f"{_GEMMA}, and Lightning-AI/litgpt@2685705:litgpt/config.py; "
            "the vocabulary of Gemma3TextConfig, transformers 5.23:models/gemma3/configuration_gemma3.py",
        ),
    }, model_type="gemma3_text", vocab=262_208, positions=131_072, **_GEMMA3).items()},
    **_list_models("layers width heads ffn vocab positions", {
        "phi3-mini": ("microsoft/Phi-3-mini-4k-instruct", 32, 3072, 32, 8192, 32_064, 4096, {"sliding_window": 2047}),
    }, model_type="phi3"),
    **_list_models("layers width heads kv_heads ffn", {
        "olmo2-1b": ("allenai/OLMo-2-0425-1B", 16, 2048, 16, None, 8192,
                     "allenai/OLMo@59a53e3:configs/official-0425/OLMo2-1B-stage1.yaml"),
        "olmo2-7b": ("allenai/OLMo-2-1124-7B", 32, 4096, 32, None, 11_008),
        "olmo2-13b": ("allenai/OLMo-2-1124-13B", 40, 5120, 40, None, 13_824),
        "olmo2-32b": ("allenai/OLMo-2-0325-32B", 64, 5120, 40, 8, 27_648),
    }, model_type="olmo2", vocab=100_352, positions=4096, rope_theta=5e5, rms_norm_eps=1e-6),
    **_list_models("model_type layers width heads ffn vocab positions", {
        "gpt2": ("openai-community/gpt2", "gpt2", 12, 768, 12, 3072, 50_257, 1024),
        "gpt3-175b": (
            "Brown et al. 2020, arXiv:2005.14165, table 2.1; the vocabulary padded to 51200 and dropout 0.1 as NVIDIA "
            "trains it (dgxc-benchmarking v24.11.1, nemo_megatron/README_175b.md)",
            "gpt2", 96, 12_288, 96, 49_152, 51_200, 2048,
        ),
        "gpt-neox-20b": ("EleutherAI/gpt-neox-20b", "gpt_neox", 44, 6144, 64, 24_576, 50_432, 2048,
                         {"hidden_act": "gelu_fast"}),
    }),
    **_list_models("layers width heads ffn", {
        "nemotron4-15b": ("Parmar et al. 2024, arXiv:2402.16819, table 1", 32, 6144, 48, 24_576),
        "nemotron4-340b": ("Nemotron-4 340B report, arXiv:2406.11704, table 1", 96, 18_432, 96, 73_728),
    }, model_type="nemotron", kv_heads=8, vocab=256_000, positions=4096),
    **_list_models("layers width heads ffn moe_intermediate_size", {
        "deepseek-v2-lite": ("deepseek-ai/DeepSeek-V2-Lite", 27, 2048, 16, 10_944, 1408, {"q_lora_rank": None}),
        "deepseek-v2": (
            "deepseek-ai/DeepSeek-V2", 60, 5120, 128, 12_288, 1536,
            {"n_routed_experts": 160, "topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3,
             "routed_scaling_factor": 16.0},
        ),
    }, model_type="deepseek_v2", vocab=102_400, positions=163_840, num_experts_per_tok=6, first_k_dense_replace=1,
       rope_scaling=_make_yarn(40.0, mscale=0.707)),
    **_list_models("layers width heads ffn num_nextn_predict_layers", {
        "deepseek-v3": ("deepseek-ai/DeepSeek-V3", 61, 7168, 128, 18_432, 0),  # without multi-token prediction
        "deepseek-v3-mtp": ("deepseek-ai/DeepSeek-V3", 61, 7168, 128, 18_432, 1),
    }, model_type="deepseek_v3", vocab=129_280, positions=163_840, rope_scaling=_make_yarn(40.0, mscale=1.0)),
    "deepseek-v4-pro": CatalogEntry(
        "sizes of DeepSeek-V4-Pro (arXiv:2606.19348), as listed at glennklockwood.com/garden/DeepSeek-V4-Pro",
        {
            "model_type": "deepseek_v4", "num_hidden_layers": 61, "hidden_size": 7168, "num_attention_heads": 128,
            "q_lora_rank": 1536, "o_groups": 16, "n_routed_experts": 384, "moe_intermediate_size": 3072,
            "routed_scaling_factor": 2.5, "index_topk": 1024,
            "rope_parameters": {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 65_536},
        },
    ),
    **_list_models("layers width heads kv_heads ffn vocab positions", {
        "kimi-k2": ("moonshotai/Kimi-K2-Instruct", 61, 7168, 64, 64, 18_432, 163_840, 131_072),
    }, model_type="kimi_k2", n_routed_experts=384, first_k_dense_replace=1, aux_loss_alpha=0.001,
       num_nextn_predict_layers=0, n_group=1, topk_group=1, routed_scaling_factor=2.827, rope_theta=5e4,
       rope_scaling=_make_yarn(32.0, mscale=1.0, beta_fast=1.0)),
    **_list_models("layers width heads kv_heads ffn vocab positions", {
        "kimi-k2.5": ("moonshotai/Kimi-K2.5", 61, 7168, 64, 64, 18_432, 163_840, 262_144, _CONFIGS),  # its text_config
    }, model_type="kimi_k2", n_routed_experts=384, first_k_dense_replace=1, aux_loss_alpha=0.001,
       num_nextn_predict_layers=0, n_group=1, topk_group=1, routed_scaling_factor=2.827, rope_theta=5e4,
       rms_norm_eps=1e-5, rope_scaling=_make_yarn(64.0, mscale=1.0)),
    **_list_models("layers width heads kv_heads ffn vocab positions", {
        "moonlight-16b-a3b": (
            "moonshotai/Moonlight-16B-A3B", 27, 2048, 16, 16, 11_264, 163_840, 8192,
            f"{_SLIME}/moonlight.sh; its 8192 positions in its model card",
        ),
    }, model_type="deepseek_v3", q_lora_rank=None, moe_intermediate_size=1408, n_routed_experts=64, n_shared_experts=2,
       num_experts_per_tok=6, first_k_dense_replace=1, num_nextn_predict_layers=0, n_group=1, topk_group=1,
       routed_scaling_factor=2.446, rope_theta=5e4, rms_norm_eps=1e-5),
    **_list_models("layers width heads kv_heads ffn vocab positions", {
        "qwen3-next-80b-a3b": ("Qwen/Qwen3-Next-80B-A3B-Instruct", 48, 2048, 16, 2, 5120, 151_936, 262_144),
    }, model_type="qwen3_next", rope_theta=1e7),
    **_list_models("layers width heads positions num_experts num_experts_per_tok moe_intermediate_size", {
        "qwen3.5-35b-a3b": (
            "Qwen/Qwen3.5-35B-A3B", 40, 2048, 16, 262_144, 256, 8, 512,  # its text_config
            {"shared_expert_intermediate_size": 512, **_QWEN35_ROPE}, _CONFIGS,
        ),
        "qwen3.5-122b-a10b": (
            "Qwen/Qwen3.5-122B-A10B", 48, 3072, 32, 262_144, 256, 8, 1024,
            {"shared_expert_intermediate_size": 1024, "linear_num_value_heads": 64, **_QWEN35_ROPE}, _CONFIGS,
        ),
        "qwen3.5-397b-a17b": (
            "Qwen/Qwen3.5-397B-A17B",  # its text_config
            60, 4096, 32, 262_144, 512, 10, 1024,
            {"shared_expert_intermediate_size": 1024, "linear_num_value_heads": 64, **_QWEN35_ROPE},
            "THUDM/slime@aa84536:scripts/models/qwen3.5-397B-A17B.sh; 64 value heads, with which 17 billion parameters "
            "are active as its name says (15 with the 32 of the class); the longest sequence of docs of "
            "xorbitsai/inference",
        ),
    }, model_type="qwen3_5_moe_text", kv_heads=2, head_dim=256, vocab=248_320),
    **_list_models("layers width heads kv_heads ffn linear_num_value_heads", {  # their text_config
        "qwen3.5-0.8b": ("Qwen/Qwen3.5-0.8B", 24, 1024, 8, 2, 3584, 16,
                         _TIED, f"{_SLIME}/qwen3.5-0.8B.sh; 16 value heads, with which it has its 752.39 million "
                         "parameters in llama.cpp"),
        "qwen3.5-4b": ("Qwen/Qwen3.5-4B", 32, 2560, 16, 4, 9216, 32, _TIED, f"{_SLIME}/qwen3.5-4B.sh"),
        "qwen3.5-9b": ("Qwen/Qwen3.5-9B", 32, 4096, 16, 4, 12_288, 32, f"{_SLIME}/qwen3.5-9B.sh"),
        "qwen3.5-27b": ("Qwen/Qwen3.5-27B", 64, 5120, 24, 4, 17_408, 48, _CONFIGS),
    }, model_type="qwen3_5_text", head_dim=256, vocab=248_320, positions=262_144, **_QWEN35_ROPE),
    **_list_models("layers width heads kv_heads ffn vocab positions", {
        "nemotron3-nano-30b-a3b": (
            "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", 52, 2688, 32, 2, 1856, 131_072, 262_144,
            {"hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", "head_dim": 128,
             "mamba_num_heads": 64, "n_routed_experts": 128, "num_experts_per_tok": 6, "moe_intermediate_size": 1856,
             "moe_shared_expert_intermediate_size": 3712, "routed_scaling_factor": 2.5},
            "basetenlabs/kingkong@2a53581:torchtitan/experiments/nemotron3/__init__.py, which quotes it",
        ),
        "nemotron3-super-120b-a12b": (
            "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16", 88, 4096, 32, 2, 2688, 131_072, 262_144,
            _LATENT_EXPERTS | {
                "hybrid_override_pattern": "MEMEMEM*" + "EMEMEMEM*" * 2 + "EMEMEMEMEM*" * 4 + "EMEMEMEM*EMEMEMEME",
                "mamba_num_heads": 128, "moe_intermediate_size": 2688, "moe_latent_size": 1024,
                "moe_shared_expert_intermediate_size": 5376,
            },
            f"NVIDIA/Megatron-LM@0ad941e:{_MODELOPT}/NVIDIA-Nemotron-3-Super-120B-A12B-BF16.sh",
        ),
        "nemotron3-ultra-550b-a55b": (
            "nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16", 108, 8192, 64, 2, 5120, 131_072, 262_144,
            _LATENT_EXPERTS | {
                "hybrid_override_pattern": "MEMEMEM*" + "EMEMEM*EMEMEMEM*EMEMEMEM*" * 3 + "EMEMEM*EMEMEMEM*EMEMEMEME",
                "mamba_num_heads": 256, "moe_intermediate_size": 5120, "moe_latent_size": 2048,
                "moe_shared_expert_intermediate_size": 10_240,
            },
            f"NVIDIA/Megatron-LM@0732182:{_MODELOPT}/NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16.sh",
        ),
    }, model_type="nemotron_h"),
    **_list_models("layers width heads ffn mamba_num_heads mamba_head_dim ssm_state_size positions", {
        "nemotron-nano-9b-v2": (
            "nvidia/NVIDIA-Nemotron-Nano-9B-v2", 56, 4480, 40, 15_680, 128, 80, 128, 131_072,
            {"hybrid_override_pattern": "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-"}, f"{_NEMO}/ssm.py",
        ),
        "nemotron-nano-12b-v2": (
            "nvidia/NVIDIA-Nemotron-Nano-12B-v2", 62, 5120, 40, 20_480, 128, 80, 128, 131_072,
            {"hybrid_override_pattern": "M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M-"},
            f"{_NEMO}/ssm.py",
        ),
        "nemotron-h-8b": (
            "nvidia/Nemotron-H-8B-Base-8K", 52, 4096, 32, 21_504, 128, 64, 128, 8192,
            {"hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"}, f"{_NEMO}/ssm.py",
        ),
        "nemotron-h-56b": (
            "nvidia/Nemotron-H-56B-Base-8K", 118, 8192, 64, 32_768, 256, 64, 256, 8192,
            {"hybrid_override_pattern": "M-M-M-M*" + "-M-M-M-M-M*" * 9 + "-M-M-M-M-M-"}, _CONFIGS,
        ),
    }, model_type="nemotron_h", kv_heads=8, head_dim=128, n_groups=8, vocab=131_072),
    **_list_models("width heads kv_heads num_local_experts num_experts_per_tok ffn shared_intermediate_size", {
        "granite4.0-h-tiny": (
            "ibm-granite/granite-4.0-h-tiny", 1536, 12, 4, 64, 6, 512, 1024,
            {"mamba_n_heads": 48, "logits_scaling": 6.0},
            "DocDBrown/IBMGranite4Tiny@60d949f:README.md, a copy of its model card; the layers of attention in ollama"
            "/ollama#12982, the multipliers as recalled",
        ),
        "granite4.0-h-small": (
            "ibm-granite/granite-4.0-h-small", 4096, 32, 8, 72, 10, 768, 1536,
            {"mamba_n_heads": 128, "logits_scaling": 16.0},
            "DocDBrown/IBMGranite4Tiny@60d949f:README.md, a copy of its model card; the layers of attention in ollama"
            "/ollama#12982, the multipliers those of Granite 4's 8B, which is as wide, in foundation-model-stack"
            "/foundation-model-stack@062adf6:fms/models/granite_moe_hybrid.py",
        ),
    }, model_type="granitemoehybrid", layers=40, vocab=100_352, positions=131_072, **_GRANITE4, **_TIED),
    **_list_models("layers width heads kv_heads ffn sliding_window positions", {
        "gemma4-e2b": (
            "google/gemma-4-E2B", 35, 1536, 8, 1, 6144, 512, 131_072,  # the text models of the repositories
            {"num_kv_shared_layers": 20, "use_double_wide_mlp": True,
             "layer_types": [*["sliding_attention"] * 4, "full_attention"] * 7}, _MAXTEXT,
        ),
        "gemma4-e4b": (
            "google/gemma-4-E4B", 42, 2560, 8, 2, 10_240, 512, 131_072,
            {"num_kv_shared_layers": 18, "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 7}, _MAXTEXT,
        ),
        "gemma4-26b-a4b": (
            "google/gemma-4-26B-A4B", 30, 2816, 16, 8, 2112, 1024, 262_144,
            {"num_global_key_value_heads": 2, "enable_moe_block": True, "num_experts": 128, "top_k_experts": 8,
             "moe_intermediate_size": 704, **_GEMMA4_LARGE}, _CONFIGS,
        ),
        "gemma4-31b": (
            "google/gemma-4-31B", 60, 5376, 32, 16, 21_504, 1024, 262_144,
            {"num_global_key_value_heads": 4, **_GEMMA4_LARGE}, _CONFIGS,
        ),
    }, model_type="gemma4_text", vocab=262_144, final_logit_softcapping=30.0),
    **_list_models("layers width ffn heads vocab", {
        "recurrentgemma-2b": ("google/recurrentgemma-2b", 26, 2560, 15_360, 10, 256_000,
                              "google-deepmind/recurrentgemma@2efa84d:recurrentgemma/common.py"),
        "recurrentgemma-9b": (
            "google/recurrentgemma-9b", 38, 4096, 24_576, 16, 256_000, {"lru_width": 4096},
            "google-deepmind/recurrentgemma@2efa84d:recurrentgemma/common.py; the key holds the gate and the MLP",
        ),
    }, model_type="recurrent_gemma", kv_heads=1),
    **_list_models("layers width heads kv_heads ffn rope_theta", {
        "starcoder2-3b": ("bigcode/starcoder2-3b", 30, 3072, 24, 2, 12_288, 999_999.4420358813,
                          f"{_NEMO}/starcoder2.py"),
        "starcoder2-7b": ("bigcode/starcoder2-7b", 32, 4608, 36, 4, 18_432, 1e6, f"{_NEMO}/starcoder2.py, and {_MLC}"),
        "starcoder2-15b": ("bigcode/starcoder2-15b", 40, 6144, 48, 4, 24_576, 1e5, {"tie_word_embeddings": False},
                           f"{_NEMO}/starcoder2.py"),
    }, model_type="starcoder2", vocab=49_152, positions=16_384, sliding_window=4096),
    **_list_models("n_layer n_embd n_head n_inner vocab n_positions", {
        "starcoder-15b": ("bigcode/starcoder", 40, 6144, 48, 24_576, 49_152, 8192,
                          f"{_NEMO}/starcoder.py, and RahulSChand/gpu_poor@ad2fc0e:public/all_configs.json"),
    }, model_type="gpt_bigcode"),
    **_list_models("n_layer n_embd n_head n_inner", {
        "cerebras-gpt-6.7b": ("cerebras/Cerebras-GPT-6.7B", 32, 4096, 32, 16_384,
                              "RahulSChand/gpu_poor@ad2fc0e:public/all_configs.json; its positions in its model card"),
        "cerebras-gpt-13b": ("cerebras/Cerebras-GPT-13B", 40, 5120, 40, 20_480,
                             "RahulSChand/gpu_poor@ad2fc0e:public/all_configs.json; its positions in its model card"),
    }, model_type="gpt2", vocab=50_257, n_positions=2048),
    **_list_models("layers width vocab", {
        "mamba2-2.7b": ("state-spaces/mamba2-2.7b", 64, 2560, 50_288,
                        {"num_heads": 80, "head_dim": 64, "n_groups": 1, "state_size": 128}, f"{_NEMO}/ssm.py"),
    }, model_type="mamba2", **_TIED),
    **_list_models("layers width heads ffn vocab", {
        "nanochat-d20": ("karpathy/nanochat@92d63d4:scripts/base_train.py with --depth=20, as transformers reads it",
                         20, 1280, 10, 5120, 65_536),
        "nanochat-d32": ("karpathy/nanochat@92d63d4:scripts/base_train.py with --depth=32, as transformers reads it",
                         32, 2048, 16, 8192, 65_536),
    }, model_type="nanochat", positions=2048),
    **_list_models("layers width heads kv_heads ffn vocab positions", {
        "codellama-70b": ("codellama/CodeLlama-70b-hf", 80, 8192, 64, 8, 28_672, 32_016, 16_384,
                          {"rms_norm_eps": 1e-5, "rope_theta": 1e6}, _LITGPT),
        "smollm-135m": ("HuggingFaceTB/SmolLM-135M", 30, 576, 9, 3, 1536, 49_152, 2048, _SMOLLM, _MLC),
        "smollm-360m": ("HuggingFaceTB/SmolLM-360M", 32, 960, 15, 5, 2560, 49_152, 2048, _SMOLLM, _MLC),
        "smollm-1.7b": ("HuggingFaceTB/SmolLM-1.7B", 24, 2048, 32, 32, 8192, 49_152, 2048, _SMOLLM, _MLC),
        "internlm2-7b": (
            "keys of a Llama, whose layers InternLM2 has; its sizes in mlc-ai/mlc-llm@79d603f:python/mlc_llm/model"
            "/model_preset.py, a copy of internlm/internlm2-7b's",
            32, 4096, 32, 8, 14_336, 92_544, 32_768, {"rms_norm_eps": 1e-5, "rope_theta": 1e6},
        ),
        "internlm2-20b": (
            "keys of a Llama, whose layers InternLM2 has; its sizes in microsoft/vidur@7d47513:vidur/config"
            "/model_config.py",
            48, 6144, 48, 8, 16_384, 92_544, 32_768, {"rms_norm_eps": 1e-5, "rope_theta": 1e6},
        ),
    }, model_type="llama"),
    **_list_models("layers width heads ffn positions", {
        "falcon3-1b": ("tiiuae/Falcon3-1B-Base", 18, 2048, 8, 8192, 4096, _LITGPT),
        "falcon3-3b": ("tiiuae/Falcon3-3B-Base", 22, 3072, 12, 9216, 32_768, _LITGPT),
        "falcon3-7b": ("tiiuae/Falcon3-7B-Base", 28, 3072, 12, 23_040, 32_768, _LITGPT),
        "falcon3-10b": ("tiiuae/Falcon3-10B-Base", 40, 3072, 12, 23_040, 32_768, _LITGPT),
    }, model_type="llama", kv_heads=4, head_dim=256, vocab=131_072, rope_theta=1_000_042.0, rms_norm_eps=1e-6),
    **_list_models("layers width heads kv_heads ffn vocab positions", {
        "phi4-mini": ("microsoft/Phi-4-mini-instruct", 32, 3072, 24, 8, 8192, 200_064, 131_072,
                      {"partial_rotary_factor": 0.75, "sliding_window": 262_144, **_TIED}, _LITGPT),
    }, model_type="phi3"),
    "mistral-small-3.1-24b": CatalogEntry(
        "mistralai/Mistral-Small-3.1-24B-Base-2503", {
            "model_type": "mistral3", "tie_word_embeddings": False,
            "text_config": {
                "model_type": "mistral", "num_hidden_layers": 40, "hidden_size": 5120, "num_attention_heads": 32,
                "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 32_768, "vocab_size": 131_072,
                "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5, "rope_theta": 1e9, "sliding_window": None,
            },
            "vision_config": {
                "model_type": "pixtral", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
                "num_attention_heads": 16, "patch_size": 14, "image_size": 1540, "head_dim": 64, "hidden_act": "gelu",
            },
        },
        "Mistral3Config, transformers 5.23:models/mistral3/configuration_mistral3.py",
    ),
    **_list_models("width heads ffn", {
        "lfm2-350m": ("LiquidAI/LFM2-350M", 1024, 16, 6656,
                      "Models/350M/config.json of Thorge-AI/lfm2-web-runtime-weights, a copy"),
        "lfm2-700m": ("LiquidAI/LFM2-700M", 1536, 24, 10_240),  # read at refs/pr/8
        "lfm2-1.2b": ("LiquidAI/LFM2-1.2B", 2048, 32, 12_288),
    }, model_type="lfm2", layers=16, kv_heads=8, vocab=65_536, positions=128_000,
       full_attn_idxs=[2, 5, 8, 10, 12, 14]),
    **_list_models("layers width heads ffn vocab positions", {
        "lfm2-8b-a1b": (
            "LiquidAI/LFM2-8B-A1B", 24, 2048, 32, 7168, 65_536, 128_000,
            {"layer_types": ["full_attention" if n in (2, 6, 10, 14, 18, 21) else "conv" for n in range(24)]},
        ),
    }, model_type="lfm2_moe"),
    **_list_models("layers num_local_experts", {
        "gpt-oss-20b": ("openai/gpt-oss-20b", 24, 32),
        "gpt-oss-120b": ("openai/gpt-oss-120b", 36, 128),
    }, model_type="gpt_oss", width=2880, heads=64, ffn=2880, vocab=201_088, positions=131_072,
       router_aux_loss_coef=0.9),
    # GLM-4.5 is without its layer of multi-token prediction.
    **_list_models("layers width ffn moe_intermediate_size n_routed_experts first_k_dense_replace", {
        "glm4.5-air": ("zai-org/GLM-4.5-Air", 46, 4096, 10_944, 1408, 128, 1,
                       f"{_SLIME}/glm4.5-106B-A12B.sh, and {_BRIDGE}"),
        "glm4.5": ("zai-org/GLM-4.5", 92, 5120, 12_288, 1536, 160, 3,
                   {"use_qk_norm": True, "routed_scaling_factor": 2.5},
                   f"{_SLIME}/glm4.5-355B-A32B.sh, and {_BRIDGE}"),
    }, model_type="glm4_moe", heads=96, kv_heads=8, head_dim=128, vocab=151_552, positions=131_072,
       num_experts_per_tok=8, n_shared_experts=1, num_nextn_predict_layers=0, attention_bias=True, rope_theta=1e6),
    **_list_models("model_type layers width heads kv_heads ffn vocab positions", {
        "seed-oss-36b": (
            "ByteDance-Seed/Seed-OSS-36B-Base", "seed_oss", 64, 5120, 80, 8, 27_648, 155_136, 524_288,
            {"head_dim": 128, "rope_theta": 1e7},
            "ByteDance-Seed/seed-oss@98e12be:README.md; the feed-forward, the vocabulary and dropout "
            "of SeedOssConfig, transformers 5.23:models/seed_oss/configuration_seed_oss.py",
        ),
        "dots1": (
            "rednote-hilab/dots.llm1.base",  # read at refs/pr/4
            "dots1", 62, 4096, 32, 32, 10_944, 152_064, 32_768,
            {"moe_intermediate_size": 1408, "n_routed_experts": 128, "num_experts_per_tok": 6, "n_shared_experts": 2,
             "first_k_dense_replace": 1, "routed_scaling_factor": 2.5, "rope_theta": 1e7, "rms_norm_eps": 1e-5,
             "norm_topk_prob": True},
        ),
    }),
}  # fmt: skip

# Models with the sizes of others, which differ from them by their positions or a vision tower.
CATALOG |= {
    "qwen3-4b-2507": _extend_qwen3("Qwen/Qwen3-4B-Instruct-2507", CATALOG["qwen3-4b"], 5e6),
    "qwen3-30b-a3b-2507": _extend_qwen3("Qwen/Qwen3-30B-A3B-Instruct-2507", CATALOG["qwen3-30b-a3b"], 1e7),
    "qwen3-235b-a22b-2507": _extend_qwen3("Qwen/Qwen3-235B-A22B-Instruct-2507", CATALOG["qwen3-235b-a22b"], 5e6),
    "qwen3-vl-4b": _add_qwen3_tower(
        "Qwen/Qwen3-VL-4B-Instruct",
        CATALOG["qwen3-4b"],
        depth=24,
        hidden_size=1024,
        intermediate_size=4096,
        deepstack_visual_indexes=[5, 11, 17],
    ),
    "qwen3-vl-8b": _add_qwen3_tower("Qwen/Qwen3-VL-8B-Instruct", CATALOG["qwen3-8b"]),
    "qwen3-vl-32b": _add_qwen3_tower("Qwen/Qwen3-VL-32B-Instruct", CATALOG["qwen3-32b"]),
    "qwen3-vl-30b-a3b": _add_qwen3_tower("Qwen/Qwen3-VL-30B-A3B-Instruct", CATALOG["qwen3-30b-a3b"]),
    "qwen3-vl-235b-a22b": _add_qwen3_tower("Qwen/Qwen3-VL-235B-A22B-Instruct", CATALOG["qwen3-235b-a22b"]),
}

# Keys recalled from the repositories where no copy of them is named, and held against numbers of parameters
# (tests/model).
CATALOG |= {
    **_list_models("layers width heads kv_heads ffn vocab positions", {
        "llama-7b": ("huggyllama/llama-7b", 32, 4096, 32, 32, 11_008, 32_000, 2048),
        "llama-13b": ("huggyllama/llama-13b", 40, 5120, 40, 40, 13_824, 32_000, 2048),
        "llama-30b": ("huggyllama/llama-30b", 60, 6656, 52, 52, 17_920, 32_000, 2048),
        "llama-65b": ("huggyllama/llama-65b", 80, 8192, 64, 64, 22_016, 32_000, 2048),
        "tinyllama-1.1b": ("TinyLlama/TinyLlama-1.1B-Chat-v1.0", 22, 2048, 32, 4, 5632, 32_000, 2048,
                           {"rms_norm_eps": 1e-5}),
        "yi-6b": ("01-ai/Yi-6B", 32, 4096, 32, 4, 11_008, 64_000, 4096, {"rope_theta": 5e6}),
        "yi-1.5-9b": ("01-ai/Yi-1.5-9B", 48, 4096, 32, 4, 11_008, 64_000, 4096, {"rope_theta": 5e6}),
        "yi-34b": ("01-ai/Yi-34B", 60, 7168, 56, 8, 20_480, 64_000, 4096, {"rope_theta": 5e6}),
        "deepseek-llm-7b": ("deepseek-ai/deepseek-llm-7b-base", 30, 4096, 32, 32, 11_008, 102_400, 4096),
        "deepseek-llm-67b": ("deepseek-ai/deepseek-llm-67b-base", 95, 8192, 64, 8, 22_016, 102_400, 4096),
        "deepseek-coder-6.7b": ("deepseek-ai/deepseek-coder-6.7b-base", 32, 4096, 32, 32, 11_008, 32_256, 16_384,
                                {"rope_theta": 1e5, "rope_scaling": {"type": "linear", "factor": 4.0}}),
        "smollm2-135m": ("HuggingFaceTB/SmolLM2-135M", 30, 576, 9, 3, 1536, 49_152, 8192,
                         {"rope_theta": 1e5, **_TIED}),
        "smollm2-360m": ("HuggingFaceTB/SmolLM2-360M", 32, 960, 15, 5, 2560, 49_152, 8192,
                         {"rope_theta": 1e5, **_TIED}),
        "smollm2-1.7b": ("HuggingFaceTB/SmolLM2-1.7B", 24, 2048, 32, 32, 8192, 49_152, 8192,
                         {"rope_theta": 1.3e5, **_TIED}),
    }, model_type="llama"),
    **_list_models("layers width heads ffn vocab positions", {
        "mistral-7b-v0.3": ("mistralai/Mistral-7B-v0.3", 32, 4096, 32, 14_336, 32_768, 32_768),
        "mistral-nemo-12b": ("mistralai/Mistral-Nemo-Base-2407", 40, 5120, 32, 14_336, 131_072, 131_072,
                             {"head_dim": 128}),
        "mistral-large-123b": ("mistralai/Mistral-Large-Instruct-2407", 88, 12_288, 96, 28_672, 32_768, 131_072),
    }, model_type="mistral", kv_heads=8, rope_theta=1e6, rms_norm_eps=1e-5, sliding_window=None),
    **_list_models("model_type layers width heads kv_heads ffn vocab positions", {
        "llama4-maverick": (
            "meta-llama/Llama-4-Maverick-17B-128E", "llama4_text", 48, 5120, 40, 8, 8192, 202_048, 1_048_576,
            {"head_dim": 128, "intermediate_size_mlp": 16_384, "num_local_experts": 128, "num_experts_per_tok": 1,
             "interleave_moe_layer_step": 2, "use_qk_norm": False, "rope_theta": 5e5},
        ),
        "mixtral-8x22b": (
            "mistralai/Mixtral-8x22B-v0.1", "mixtral", 56, 6144, 48, 8, 16_384, 32_000, 65_536,
            {"num_local_experts": 8, "num_experts_per_tok": 2, "rope_theta": 1e6, "rms_norm_eps": 1e-5},
        ),
        "gemma-2b": ("google/gemma-2b", "gemma", 18, 2048, 8, 1, 16_384, 256_000, 8192, {"head_dim": 256}),
        "gemma-7b": ("google/gemma-7b", "gemma", 28, 3072, 16, 16, 24_576, 256_000, 8192, {"head_dim": 256}),
        "gemma2-2b": ("google/gemma-2-2b", "gemma2", 26, 2304, 8, 4, 9216, 256_000, 8192, {"head_dim": 256}),
        "gemma2-27b": ("google/gemma-2-27b", "gemma2", 46, 4608, 32, 16, 36_864, 256_000, 8192,
                       {"head_dim": 128, "query_pre_attn_scalar": 144}),
        "phi2": ("microsoft/phi-2", "phi", 32, 2560, 32, 32, 10_240, 51_200, 2048, {"partial_rotary_factor": 0.4}),
        "phi4": ("microsoft/phi-4", "phi3", 40, 5120, 40, 10, 17_920, 100_352, 16_384, {"rope_theta": 2.5e5}),
        "olmo3-7b": ("allenai/Olmo-3-1025-7B", "olmo3", 32, 4096, 32, 32, 11_008, 100_278, 65_536,
                     {"rope_theta": 5e5, "sliding_window": 4096}),
        "olmo3-32b": ("allenai/Olmo-3-1125-32B", "olmo3", 64, 5120, 40, 8, 27_648, 100_278, 65_536,
                      {"rope_theta": 5e5, "sliding_window": 4096}),
        "olmoe-1b-7b": ("allenai/OLMoE-1B-7B-0924", "olmoe", 16, 2048, 16, 16, 1024, 50_304, 4096,
                        {"num_experts": 64, "num_experts_per_tok": 8}),
        "granite3.3-8b": (
            "ibm-granite/granite-3.3-8b-base", "granite", 40, 4096, 32, 8, 12_800, 49_152, 131_072,
            {"embedding_multiplier": 12.0, "attention_multiplier": 1 / 128, "residual_multiplier": 0.22,
             "logits_scaling": 16.0, "rope_theta": 1e7, **_TIED},
        ),
        "apertus-8b": ("swiss-ai/Apertus-8B-2509", "apertus", 32, 4096, 32, 8, 21_504, 131_072, 65_536,
                       {"hidden_act": "xielu", "rope_theta": 1.2e7}),
        "apertus-70b": ("swiss-ai/Apertus-70B-2509", "apertus", 80, 8192, 64, 8, 43_008, 131_072, 65_536,
                        {"hidden_act": "xielu", "rope_theta": 1.2e7}),
        "command-r-35b": ("CohereLabs/c4ai-command-r-v01", "cohere", 40, 8192, 64, 64, 22_528, 256_000, 131_072,
                          {"rope_theta": 8e6, "logit_scale": 0.0625}),
        "command-r-plus-104b": ("CohereLabs/c4ai-command-r-plus", "cohere", 64, 12_288, 96, 8, 33_792, 256_000, 131_072,
                                {"rope_theta": 7.5e7, "logit_scale": 0.8333333333333334, "use_qk_norm": True},
                                "config.json of alpindale/c4ai-command-r-plus-GPTQ@05c658a, a copy; its positions are "
                                "model_max_length"),
        "aya-expanse-8b": ("CohereLabs/aya-expanse-8b", "cohere", 32, 4096, 32, 8, 14_336, 256_000, 8192,
                           {"rope_theta": 1e4, "logit_scale": 0.125},
                           "config.json of kevinbazira/aya-expanse-8b-awq-4bit@20ee9db, a copy"),
        "aya-expanse-32b": ("CohereLabs/aya-expanse-32b", "cohere", 40, 8192, 64, 8, 24_576, 256_000, 8192,
                            {"rope_theta": 4e6, "logit_scale": 0.0625},
                            "config.json of minyichen/aya-expanse-32b-Dynamic-fp8@e07228d, a copy"),
        "chatglm3-6b": (
            "keys of GLM-4, whose layers ChatGLM3 has; its sizes in NVIDIA/NeMo@8cfedd7:nemo/collections/llm/gpt/model"
            "/chatglm.py and huggingface/candle@2a13b0f:candle-transformers/src/models/chatglm.rs",
            "glm", 28, 4096, 32, 2, 13_696, 65_024, 8192, {"head_dim": 128, "attention_bias": True,
                                                          "rms_norm_eps": 1e-5},
        ),
        "exaone4-32b": (
            "LGAI-EXAONE/EXAONE-4.0-32B", "exaone4", 64, 5120, 40, 8, 27_392, 102_400, 131_072,
            {"sliding_window": 4096, "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 16,
             "rope_theta": 1e6, "rope_scaling": _make_llama3_scaling(16.0)},
            "NVIDIA/TensorRT-LLM@0acdecb:tests/unittest/_torch/modeling/test_modeling_exaone4.py, a copy whose "
            "comments have the 64 layers and the window",
        ),
        "jamba-1.5-large": ("ai21labs/AI21-Jamba-1.5-Large", "jamba", 72, 8192, 64, 8, 24_576, 65_536, 262_144,
                            "emergentmind.com/topics/jamba-1-5, a summary of arXiv:2408.12570; the intermediate_size "
                            "as recalled"),
        "qwen2-57b-a14b": (
            "Qwen/Qwen2-57B-A14B", "qwen2_moe", 28, 3584, 28, 4, 18_944, 151_936, 131_072,
            {"num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 2560, "rope_theta": 1e6,
             "shared_expert_intermediate_size": 20_480},
            "NVIDIA/TensorRT-LLM@cb4c622:tests/unittest/_torch/modeling/test_modeling_qwen_moe.py, a copy",
        ),
        "solar-10.7b": ("upstage/SOLAR-10.7B-v1.0", "llama", 48, 4096, 32, 8, 14_336, 32_000, 4096,
                        {"rms_norm_eps": 1e-5},
                        "config.json of martyn/solar-megamerge-dare-10.7b-v1@b171151, a merge of its finetunes"),
        "deepseek-coder-33b": ("deepseek-ai/deepseek-coder-33b-base", "llama", 62, 7168, 56, 8, 19_200, 32_256, 16_384,
                               {"rope_theta": 1e5, "rope_scaling": {"type": "linear", "factor": 4.0}},
                               "config.json of codefuse-ai/CodeFuse-DeepSeek-33B-4bits@eaa10ca, a finetune"),
        "codestral-22b": ("mistralai/Codestral-22B-v0.1", "mistral", 56, 6144, 48, 8, 16_384, 32_768, 32_768,
                          {"rope_theta": 1e6, "rms_norm_eps": 1e-5, "sliding_window": None},
                          "config.json of TechxGenus/Codestral-22B-v0.1-AWQ@a45d426, a copy"),
        "command-a-111b": ("CohereLabs/c4ai-command-a-03-2025", "cohere2", 64, 12_288, 96, 8, 36_864, 256_000, 131_072,
                           {"rope_theta": 5e4, "logit_scale": 0.25, "sliding_window": 4096}),
        "glm4-9b": ("zai-org/GLM-4-9B-0414", "glm4", 40, 4096, 32, 2, 13_696, 151_552, 32_768,
                    {"head_dim": 128, "attention_bias": True}),
        "glm4-32b": ("zai-org/GLM-4-32B-0414", "glm4", 61, 6144, 48, 2, 23_040, 151_552, 32_768, {"head_dim": 128}),
        "hunyuan-a13b": ("tencent/Hunyuan-A13B-Instruct", "hunyuan_v1_moe", 32, 4096, 32, 8, 3072, 128_167, 32_768,
                         {"head_dim": 128, "num_experts": 64, "moe_topk": 8, **_TIED}),
        "minimax-text-01": (
            "MiniMaxAI/MiniMax-Text-01", "minimax", 80, 6144, 64, 8, 9216, 200_064, 10_240_000,
            {"head_dim": 128, "rotary_dim": 64, "num_local_experts": 32, "num_experts_per_tok": 2, "rope_theta": 1e7,
             "layer_types": [*["linear_attention"] * 7, "full_attention"] * 10},
        ),
        "qwen2.5-math-1.5b": ("Qwen/Qwen2.5-Math-1.5B", "qwen2", 28, 1536, 12, 2, 8960, 151_936, 131_072,
                              {"rope_theta": 1e4}),
        "qwen2.5-math-7b": ("Qwen/Qwen2.5-Math-7B", "qwen2", 28, 3584, 28, 4, 18_944, 152_064, 131_072,
                            {"rope_theta": 1e4}),
        "qwen3-coder-30b-a3b": (
            "Qwen/Qwen3-Coder-30B-A3B-Instruct", "qwen3_moe", 48, 2048, 32, 4, 5472, 151_936, 262_144,
            {"head_dim": 128, "rope_theta": 1e7, "moe_intermediate_size": 768, **_QWEN3_MOE},
        ),
    }),
    **_list_models("model_type layers width heads ffn vocab positions", {
        "gpt2-medium": ("openai-community/gpt2-medium", "gpt2", 24, 1024, 16, 4096, 50_257, 1024),
        "gpt2-large": ("openai-community/gpt2-large", "gpt2", 36, 1280, 20, 5120, 50_257, 1024),
        "gpt2-xl": ("openai-community/gpt2-xl", "gpt2", 48, 1600, 25, 6400, 50_257, 1024),
        "pythia-1.4b": ("EleutherAI/pythia-1.4b", "gpt_neox", 24, 2048, 16, 8192, 50_304, 2048),
        "pythia-6.9b": ("EleutherAI/pythia-6.9b", "gpt_neox", 32, 4096, 32, 16_384, 50_432, 2048),
        "pythia-12b": ("EleutherAI/pythia-12b", "gpt_neox", 36, 5120, 40, 20_480, 50_688, 2048),
    }),
    **_list_models("n_layer n_embd n_head rotary_dim vocab_size n_positions", {
        "gpt-j-6b": ("EleutherAI/gpt-j-6b", 28, 4096, 16, 64, 50_400, 2048),
    }, model_type="gptj"),
    **_list_models("layers width vocab", {
        "mamba-2.8b": ("state-spaces/mamba-2.8b-hf", 64, 2560, 50_280,
                       "config.json of ArthurZ/mamba-2.8b@bd9be39, a copy"),
    }, model_type="mamba"),
    **_list_models("n_layer hidden_size n_head", {
        "bloom-7b1": ("bigscience/bloom-7b1", 30, 4096, 32),
        "bloom-176b": ("bigscience/bloom", 70, 14_336, 112),
    }, model_type="bloom", vocab=250_880),
    **_list_models("layers width heads num_kv_heads new_decoder_architecture", {
        "falcon-7b": ("tiiuae/falcon-7b", 32, 4544, 71, None, False),
        "falcon-40b": ("tiiuae/falcon-40b", 60, 8192, 128, 8, True),
        "falcon-180b": ("tiiuae/falcon-180B", 80, 14_848, 232, 8, True),
    }, model_type="falcon", vocab=65_024, multi_query=True, parallel_attn=True, alibi=False, bias=False),
    **_list_models("n_layers d_model n_heads max_seq_len", {
        "mpt-7b": ("mosaicml/mpt-7b", 32, 4096, 32, 2048),
        "mpt-30b": ("mosaicml/mpt-30b", 48, 7168, 64, 8192),
    }, model_type="mpt", vocab=50_432, expansion_ratio=4, no_bias=True, attn_config={"alibi": True}),
    **_list_models("layers width word_embed_proj_dim heads ffn_dim", {
        "opt-1.3b": ("facebook/opt-1.3b", 24, 2048, 2048, 32, 8192),
        "opt-6.7b": ("facebook/opt-6.7b", 32, 4096, 4096, 32, 16_384),
        "opt-13b": ("facebook/opt-13b", 40, 5120, 5120, 40, 20_480),
        "opt-30b": ("facebook/opt-30b", 48, 7168, 7168, 56, 28_672),
        "opt-66b": ("facebook/opt-66b", 64, 9216, 9216, 72, 36_864),
        "opt-175b": ("Zhang et al. 2022, arXiv:2205.01068, table 1", 96, 12_288, 12_288, 96, 49_152),
    }, model_type="opt"),
    "dbrx-132b": CatalogEntry("databricks/dbrx-base", {
        "model_type": "dbrx", "d_model": 6144, "n_heads": 48, "n_layers": 40, "max_seq_len": 32_768,
        "vocab_size": 100_352, "rope_theta": 5e5,  # transformers 5 does not read that of attn_config
        "attn_config": {"clip_qkv": 8, "kv_n_heads": 8, "rope_theta": 5e5},
        "ffn_config": {"ffn_hidden_size": 10_752, "moe_num_experts": 16, "moe_top_k": 4},
    }),
    **_list_defaults(),
}  # fmt: skip
