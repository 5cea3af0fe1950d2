"""torchtune's model builders -> models.

Sources: torchtune 0.6.1 torchtune/models/*/_model_builders.py, for Qwen3 of pytorch/torchtune@bd2a0fc. torchtune's
Mistral and Phi-3 attend without a window.
"""

from __future__ import annotations

from typing import Any

from fivefold.model import catalog
from fivefold.model.huggingface.read import from_config
from fivefold.model.published import CATALOG
from fivefold.model.spec import Model

# Builders whose sizes are those of a catalog model
CATALOG_NAMES = {
    "llama2_7b": "llama2-7b", "llama2_13b": "llama2-13b", "llama2_70b": "llama2-70b", "llama3_8b": "llama3-8b",
    "llama3_70b": "llama3-70b", "llama3_1_8b": "llama3.1-8b", "llama3_1_70b": "llama3.1-70b",
    "llama3_1_405b": "llama3-405b", "llama3_2_1b": "llama3.2-1b", "llama3_2_3b": "llama3.2-3b",
    "llama3_3_70b": "llama3.3-70b", "qwen2_0_5b": "qwen2.5-0.5b", "qwen2_1_5b": "qwen2.5-1.5b",
    "qwen2_7b": "qwen2-7b", "qwen2_5_0_5b": "qwen2.5-0.5b", "qwen2_5_1_5b": "qwen2.5-1.5b",
    "qwen2_5_3b": "qwen2.5-3b", "qwen2_5_7b": "qwen2.5-7b", "qwen2_5_14b": "qwen2.5-14b",
    "qwen2_5_32b": "qwen2.5-32b", "qwen2_5_72b": "qwen2.5-72b", "gemma2_9b": "gemma2-9b",
}  # fmt: skip

# Those of the main branch, which no release has: read, and not written
MAIN_BRANCH_NAMES = {
    "qwen3_0_6b": "qwen3-0.6b", "qwen3_1_7b": "qwen3-1.7b", "qwen3_4b": "qwen3-4b", "qwen3_8b": "qwen3-8b",
    "qwen3_14b": "qwen3-14b", "qwen3_32b": "qwen3-32b",
}  # fmt: skip


def _build_code_llama(*, layers: int, width: int, heads: int, kv_heads: int, ffn: int) -> dict[str, Any]:
    """Return the ``config.json`` of a Code Llama as torchtune's builder makes it."""
    return {
        "model_type": "llama",
        "num_hidden_layers": layers,
        "hidden_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": ffn,
        "vocab_size": 32_016,
        "max_position_embeddings": 16_384,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
    }


def _build_gemma(
    family: str, *, layers: int, width: int, heads: int, kv_heads: int, ffn: int, head_dim: int = 256
) -> dict[str, Any]:
    """Return the ``config.json`` of a Gemma as torchtune's builder makes it."""
    return {
        "model_type": family,
        "num_hidden_layers": layers,
        "hidden_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": ffn,
        "vocab_size": 256_000,
    }


# The others, as keys of a Hugging Face config.json
CONFIGS: dict[str, dict[str, Any]] = {
    "code_llama2_7b": _build_code_llama(layers=32, width=4096, heads=32, kv_heads=32, ffn=11_008),
    "code_llama2_13b": _build_code_llama(layers=40, width=5120, heads=40, kv_heads=40, ffn=13_824),
    "code_llama2_70b": _build_code_llama(layers=80, width=8192, heads=64, kv_heads=8, ffn=28_672),
    "gemma_2b": _build_gemma("gemma", layers=18, width=2048, heads=8, kv_heads=1, ffn=16_384),
    "gemma_7b": _build_gemma("gemma", layers=28, width=3072, heads=16, kv_heads=16, ffn=24_576),
    "gemma2_2b": _build_gemma("gemma2", layers=26, width=2304, heads=8, kv_heads=4, ffn=9216),
    "gemma2_27b": _build_gemma("gemma2", layers=46, width=4608, heads=32, kv_heads=16, ffn=36_864, head_dim=128),
    "mistral_7b": CATALOG["mistral-7b"].config | {"sliding_window": None},
    "phi3_mini": CATALOG["phi3-mini"].config | {"sliding_window": None},
    "phi4_14b": {
        "model_type": "phi3",
        "num_hidden_layers": 40,
        "hidden_size": 5120,
        "num_attention_heads": 40,
        "num_key_value_heads": 10,
        "intermediate_size": 17_920,
        "vocab_size": 100_352,
        "max_position_embeddings": 16_384,
        "original_max_position_embeddings": 16_384,
        "rope_theta": 250_000.0,
    },
}

BUILDERS = (*CATALOG_NAMES, *CONFIGS)
PACKAGES = tuple(sorted({
    "code_llama2", "gemma", "gemma2", "llama2", "llama3", "llama3_1", "llama3_2", "llama3_3", "mistral", "phi3",
    "phi4", "qwen2", "qwen2_5",
}, key=len, reverse=True))  # fmt: skip
# Builders of Qwen2.5 that torchtune has for tuned models and for others
TUNED = ("1_5b", "7b", "14b", "32b", "72b")
METHODS = ("qlora_", "lora_")  # how the names of builders of adapters begin


def find_model_name(component: str) -> str:
    """Return the model in the name of a builder: ``llama3_8b`` of ``torchtune.models.llama3.qlora_llama3_8b``."""
    name = component.rpartition(".")[2]
    method = next((method for method in METHODS if name.startswith(method)), "")
    return name.removeprefix(method).removesuffix("_instruct").removesuffix("_base")


def find_package(name: str) -> str:
    """Return the package of a model in torchtune: ``llama3_1`` of ``llama3_1_8b``."""
    return next(package for package in PACKAGES if name.startswith(f"{package}_"))


def name_builder(name: str, *, adapts: bool) -> str:
    """Return the component of a model's builder, of all weights or of adapters."""
    package = find_package(name)
    tuned = "_instruct" if package == "qwen2_5" and name.removeprefix("qwen2_5_") in TUNED else ""
    return f"torchtune.models.{package}.{'lora_' if adapts else ''}{name}{tuned}"


def build_model(component: str) -> Model | None:
    """Return the model of a builder, or None if the builder is not known."""
    name = find_model_name(component)
    if known := (CATALOG_NAMES | MAIN_BRANCH_NAMES).get(name):
        return catalog.build_model(known)
    if name in CONFIGS:
        return from_config(CONFIGS[name], name=name.replace("_", "-"), source=f"torchtune's builder {name}")
    return None
