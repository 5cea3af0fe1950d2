"""Read peft's patterns of module names, and list the mixtures whose experts peft adapts as parameters.

A key of ``rank_pattern`` and ``alpha_pattern`` is the end of a module's name, as a regular expression
(src/peft/utils/other.py, ``get_pattern_key``).

transformers 5 stacks the experts of a layer in two parameters, which transformers 4 kept as linear layers of each
expert. A peft config may still name those layers in ``target_modules``. For the families below peft replaces them by
``target_parameters``: ``gate_up_proj`` with twice the rank, and ``down_proj``. Dense MLPs and shared experts have
layers of the same names, which then get no adapters.

Source: huggingface/peft@0.21.2:src/peft/utils/transformers_weight_conversion.py, ``_convert_peft_config_moe``, by
transformers 5.23: ``_MODEL_TO_CONVERSION_PATTERN``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

EXPERT_LAYERS = ("gate_proj", "up_proj", "down_proj")
# whose experts' layers had these names
NAMED_AS_MLPS = frozenset((
    "afmoe", "beam", "cohere2_moe", "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots1", "ernie4_5_moe",
    "exaone_moe", "flex_olmo", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "hunyuan_v1_moe", "longcat_flash", "mellum",
    "olmoe", "qwen3_moe", "qwen3_next", "qwen3_omni_moe_text", "solar_open",
))  # fmt: skip
# whose fused kernels read the weight of out_proj, so that peft stops for an adapter of it (src/peft/tuners/
# tuners_utils.py, ``_check_lora_target_modules_mamba``)
WITHOUT_OUT_PROJ = frozenset(("falcon_h1", "mamba", "mamba2", "falcon_mamba", "nemotron_h"))
NAMED_W1 = frozenset(("minimax", "minimax_m2", "mixtral"))  # w1, w2 and w3


PATTERN_LENGTH, PATTERN_REPEATS = 500, 3


def compile_pattern(pattern: str) -> re.Pattern[str] | None:
    """Compile a pattern; None if it is none, or may take long: of many repetitions, or of repeated groups."""
    is_slow = sum(pattern.count(sign) for sign in "*+{") > PATTERN_REPEATS or re.search(r"\)[*+{]", pattern)
    try:
        return None if is_slow or len(pattern) > PATTERN_LENGTH else re.compile(pattern)
    except re.error:
        return None


def find_key(patterns: Iterable[str], module: str) -> str | None:
    """Return the first of ``patterns`` that is the end of the module's name; None if none is, or is not read."""
    for pattern in patterns:
        if compile_pattern(pattern) is not None and re.match(rf"(.*\.)?({pattern})$", module):
            return pattern
    return None
