"""Megatron-Bridge's recompute studies and model cards: milliseconds and peak allocated memory.

NVIDIA-NeMo/Megatron-Bridge@067f987: skills/nemo-mbridge-perf-*/SKILL.md, examples/model_verification_cards. Its "GB"
are 1e9 bytes. Moonlight's recipe (src/megatron/bridge/recipes/moonlight/moonlight_16b.py@08de997) reduces gradients
and keeps both moments in 16 bits, hides no expert or tensor messages, has no fused rotary embedding; the rest is as in
``megatron_bridge_perf``. What a table calls SFT of Qwen3-30B-A3B is mock pretraining without CUDA graphs
(nemo-mbridge-perf-expert-parallel-overlap/SKILL.md@58241a1), and unfused permutation, for which we have no price.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.published.case import Case, Excluded
from benchmarks.published.cells import (
    NO_STAGES,
    RECOMPUTED,
    Row,
    apply_printed_shape,
    chip,
    degree,
    find_model,
    integer,
    number,
    number_format,
    precision,
    read_recomputation,
    read_required_integer,
    use_16bit_gradients,
)
from benchmarks.published.convert import (
    ADAPTERS,
    PACKED,
    case_of,
    cluster,
    layout_of_row,
    read,
)
from benchmarks.published.readers.megatron_bridge_perf import (
    NEMOTRON,
    UNKNOWN_RECOMPUTE,
    precision_of,
    read_recipe_recomputation,
    stack_of,
)
from fivefold.job import Recipe
from fivefold.layout.spec import Layout
from fivefold.model.catalog import resolve
from fivefold.model.spec import Model
from fivefold.stack.catalog import build_stack
from fivefold.stack.spec import Stack
from fivefold.units import GIB

SOURCE = "megatron_bridge_memory"
NOT_TUNED = "a functional run of a model card, whose recomputation and precision are not stated"
NO_SETUP = "the study prints neither GPUs nor batch"
NO_GRAPHS = "which parts of a layer its CUDA graphs hold is not printed"

# moonshotai/Moonlight-16B-A3B config.json, where it differs from DeepSeek-V2-Lite.
MOONLIGHT = {"name": "moonlight-16b-a3b", "ffn": 11_264, "vocab": 163_840, "positions": 8192}
# Whether one micro-batch runs concurrently with another.
PAIRS = {
    "alltoall, no EP overlap": False,
    "alltoall, EP overlap": True,
    "alltoall, EP overlap + delayed wgrad": True,
}
MODULES = RECOMPUTED | {
    "selective: [] (none)": "none",
    "selective: core_attn": "selective",
    "selective: core_attn + expandable_segments": "selective",
    "selective: mlp": "mlp",
    "selective: moe_act": "act",
    "selective: moe": "moe+shared",
    "selective: moe, layernorm": "moe+shared+norm",
    "selective: mla_up_proj, mlp": "up+rope+mlp",
}


def _rule(row: Row) -> str:
    """Return why a row is left out; empty if it is not."""
    name, table = row["model"], row["table"]
    if table.startswith("model card"):
        return _card_rule(name, row)
    if "LoRA" in name:
        return ADAPTERS
    if name == "not named":
        return NO_SETUP
    return ""


def _card_rule(name: str, row: Row) -> str:
    """Return why a row of a model card is left out; empty if it is not."""
    if not row["table"].endswith("pretrain_performance"):
        return NOT_TUNED
    if name == "deepseek_v3":
        return UNKNOWN_RECOMPUTE
    find_model(name)
    if not row["gbs"]:
        return NO_SETUP
    return NO_STAGES if degree(row, "pp") > 1 and not integer(row, "vp") else ""


def _case(row: Row) -> Case:
    """Return the case of a row, by the recipe of its model."""
    name = row["model"]
    if name.startswith("Moonlight"):
        return _moonlight(row)
    if name.startswith("Llama3-70B"):
        return _llama(row)
    model = apply_printed_shape(find_model(name.removesuffix(" SFT")), row)
    on = chip(row["hardware"])
    silent = read_recipe_recomputation(model, chip=on, precision=number_format(row["precision"]))
    layout = layout_of_row(row, zero=1, ac=read_recomputation(row, silent=silent, words=MODULES))
    sequence = integer(row, "seq") or 4096  # the length of all its performance recipes
    stack = stack_of(model, layout, precision=row["precision"], chip=on)
    if row["technique"] in PAIRS:
        pairs = PAIRS[row["technique"]]
        overlap = (*build_stack("megatron-core").overlap, *(("ep",) if pairs else ()))
        stack = stack.replace(cuda_graphs="none", dispatcher="all_to_all", pairs=pairs, overlap=overlap)
    recipe = use_16bit_gradients(precision_of(row["precision"], chip=on))
    made = _make_case(row, model=model, layout=layout, stack=stack, recipe=recipe, sequence=sequence)
    if model.name != NEMOTRON:
        return made
    return made._replace(step_seconds=None, left_out=(("time", NO_GRAPHS),), held_out=True)  # as megatron_bridge_perf


def _moonlight(row: Row) -> Case:
    """Return the case of a row of Moonlight, trained with gradients and moments in 16 bits."""
    model = resolve("deepseek-v2-lite").replace(**MOONLIGHT, source="moonshotai/Moonlight-16B-A3B config.json")
    layout = layout_of_row(row, zero=1, ac=read_recomputation(row, words=MODULES))
    narrow = precision(row["precision"], sums="narrow")
    half = narrow.replace(name=f"{number_format(row['precision'])}-states16", moments_bytes=(2, 2))
    stack = build_stack("megatron-bridge").replace(overlap=("dp", "cp", "pp"), rope="unfused")
    made = _make_case(
        row, model=model, layout=layout, stack=stack, recipe=half, sequence=read_required_integer(row, "seq")
    )
    return made._replace(rivals="moonlight recomputation")


def _llama(row: Row) -> Case:
    """Return the case of a row of Llama 3 70B, fine-tuned on packed samples."""
    # Packed samples shorten attention and so the time, but no tensor that is kept.
    model = apply_printed_shape(resolve("llama3-70b"), row)
    layout = layout_of_row(row, zero=1, ac=read_recomputation(row, words=MODULES))
    sequence, on = read_required_integer(row, "seq"), chip(row["hardware"])
    stack = stack_of(model, layout, precision=row["precision"], chip=on)
    recipe = use_16bit_gradients(precision_of(row["precision"], chip=on))
    made = _make_case(row, model=model, layout=layout, stack=stack, recipe=recipe, sequence=sequence)
    left_out = (("time", PACKED),) if made.step_seconds else ()
    return made._replace(step_seconds=None, left_out=left_out, rivals="llama3-70b fine-tuning")


def _make_case(row: Row, *, model: Model, layout: Layout, stack: Stack, recipe: Recipe, sequence: int) -> Case:
    """Return the case of a row with its measured memory and, if it states one, its time."""
    allocated = number(row, "peak_allocated_gib") * GIB or number(row, "peak_allocated_gb") * 1e9
    milliseconds = number(row, "iteration_ms")
    return case_of(
        SOURCE,
        row,
        stack=stack,
        model=model,
        machine=cluster(row),
        layout=layout,
        recipe=recipe,
        sequence=sequence,
        seconds=milliseconds / 1e3 if milliseconds else None,
        memory_bytes=allocated or number(row, "peak_gb") * 1e9,
    )


def cases() -> Iterator[Case | Excluded]:
    """Yield one case, or one exclusion, per measured row."""
    return read(SOURCE, rule=_rule, case=_case)
