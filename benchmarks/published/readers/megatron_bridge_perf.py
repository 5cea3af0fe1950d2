"""Megatron-Bridge release tables 25.09 to 26.08: tokens/s and model TFLOP/s (causal attention) per GPU.

Configurations: NVIDIA-NeMo/Megatron-Bridge scripts/performance/configs, read at 00919dc (llama3), 0013c9a (llama31),
01b2977 (qwen3; 25.09: 4054233), 07eea52 (gpt_oss), 0fa501a, 0132842, 0426418 (deepseek), utils/overrides.py 00538e2:
distributed optimizer, grad_reduce_in_fp32 off, fused cross-entropy, experts in balance, recomputation only as below.
From 26.06 on src/megatron/bridge/perf_recipes at 007282e, qwen/common.py, gpt_oss/common.py and nemotronh (Nemotron 3
Nano: graphs of all but the experts, one fused dispatch, balanced routing, nothing recomputed but on H100). Nemotron 3
Super: scripts/performance/configs/nemotronh at v0.4.2 (26.04) and v0.5.1 (26.06), perf_recipes at 067f987 (26.08).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from benchmarks.published.case import Case, Excluded
from benchmarks.published.cells import (
    Row,
    apply_printed_shape,
    chip,
    degree,
    find_model,
    integer,
    number,
    number_format,
    use_16bit_gradients,
)
from benchmarks.published.convert import (
    ADAPTERS,
    PACKED,
    case_of,
    cluster,
    layout_of_row,
    read,
    seconds_of_flops,
    seconds_of_tokens,
)
from fivefold.errors import UserError
from fivefold.job import Job
from fivefold.layout.names import Axis
from fivefold.layout.spec import Layout
from fivefold.model.catalog import resolve
from fivefold.model.multi_token_prediction import MTP
from fivefold.model.spec import Model
from fivefold.stack.catalog import build_stack
from fivefold.stack.spec import Stack

REGRESSION = "a known regression of that release"
ATTENTION_ALONE = "the cores of attention are recomputed and those of Mamba-2 are not; ours are both or none"
UNKNOWN_RECOMPUTE = "which modules this layout recomputes is not established"
OFFLOADED = "activations of some of the layers are offloaded (cpu_offloading_num_layers); ours are all or none"
OFFLOADED_EXPERTS = "the experts' activations alone are offloaded (min_offloaded_tensor_size); ours are all or none"
MIXED_NVFP4 = "attention, latent projections and the last 14 layers stay in 16 bits (te_quant.cfg): no recipe of ours"

NEMOTRON = "nemotron3-nano-30b-a3b"
NEMOTRON_SUPER = "nemotron3-super-120b-a12b"
MIXTURES = (  # recipes read
    "qwen3-30b-a3b",
    "qwen3-235b-a22b",
    "gpt-oss-120b",
    "deepseek-v3",
    "deepseek-v3-mtp",
    "deepseek-v2-lite",
    NEMOTRON,
    NEMOTRON_SUPER,
)
CHIPS = ("h100", "b200", "b300", "gb200", "gb300")  # of those recipes


def model_of(name: str) -> Model:
    """Return the catalog's model; token dropping is a capacity of one even share per expert, padded."""
    base, _, suffix = name.partition(" (")
    if suffix not in ("", "w/o MTP)", "w/ MTP)", "tokendrop)"):
        raise UserError(f"model {name!r}: what is in parentheses was not read")
    model = find_model(base)
    if model.name == "deepseek-v3" and suffix != "w/o MTP)":
        model = resolve("deepseek-v3-mtp")
    if model.name == NEMOTRON_SUPER:
        return add_nemotron_mtp(model)
    if suffix == "tokendrop)" and model.moe:
        return model.replace(moe=model.moe.replace(capacity=1.0))
    return model


def add_nemotron_mtp(model: Model) -> Model:
    """Return Nemotron 3 Super with the two passes of its module of multi-token prediction, attention and experts.

    Megatron-Bridge runs one module twice (mtp_use_repeated_layer); here they are two, with 4.4 B weights more.
    """
    assert model.moe is not None
    return model.replace(
        mtp=MTP(depth=2),
        mixers=(*model.mixers, "attention", "attention"),
        feed_forwards=(*model.feed_forwards, True, True),
        moe=model.moe.replace(pattern=(*model.moe.pattern, True, True)),
    )


def precision_of(text: str, *, chip: str) -> str:
    """Return the recipe of a printed precision.

    FP8 without a letter is current scaling per tensor. A parenthesised one of 25.09 is sub-channel scaling or, on
    Blackwell, MX.
    """
    if "sub-channel" in text.lower() and chip == "h100":
        return "fp8-tiles"
    return number_format(text)


def read_recipe_recomputation(model: Model, *, chip: str, precision: str, pp: int = 1) -> str:
    """Return what the performance recipes recompute, as recomputation groups of a layout."""
    if model.name == "gpt-oss-120b" and precision == "bf16" and chip in ("gb200", "b200", "h100"):
        return "norm+act"  # ["layernorm", "moe_act"]
    if model.name == NEMOTRON_SUPER:
        return "norm+act" if chip == "b200" else "none"  # ["moe_act", "layernorm"]
    if model.mtp and chip == "gb300":
        return "none"
    if model.mtp and chip == "b200" and pp == 8:
        return "up+rope+mlp"  # ["mla_up_proj", "mlp"]
    return "up+rope" if model.mla else "none"  # ["mla_up_proj"]


class ExpertSettings(NamedTuple):
    """The dispatch and kernels of a run's experts, as fields of a stack."""

    cuda_graphs: Literal["none", "router", "partial", "full"]
    dispatcher: Literal["all_to_all", "fused"] = "all_to_all"
    pairs: bool = False


def experts_of(model: Model, layout: Layout, *, chip: str, precision: str, release: str) -> ExpertSettings:
    """Return ``cuda_graph_impl``, ``moe_flex_dispatcher_backend`` and ``moe_a2a_overlap`` of a recipe.

    Our inference: 25.11 ran as 26.02 (its files at 0fa501a ask for full graphs, which dropless experts do not allow),
    and B200's runs of one sequence had no graphs.
    """
    assert model.moe is not None
    if chip not in CHIPS or not (model.name in MIXTURES or model.name.startswith("moonlight")):
        raise UserError(f"how the recipe of {model.name} on {chip} launches and reaches experts was not read")
    racks, mx = chip.startswith("gb"), precision == "mxfp8"
    if model.name == NEMOTRON:  # ["attn", "mamba", "moe_router", "moe_preprocess"]; HybridEP, from 26.08 on NCCL EP
        return ExpertSettings("partial", "fused")
    if model.name == NEMOTRON_SUPER:
        return ExpertSettings("none" if chip == "b200" else "partial", "fused")
    if model.name == "gpt-oss-120b":
        if mx:  # of B300 the line with the full graph is commented out
            return ExpertSettings("full" if racks else "partial", "fused", pairs=True)
        if chip in ("gb300", "b300"):
            return ExpertSettings("partial", "fused" if (chip, layout.ep) == ("b300", 8) else "all_to_all")
        return ExpertSettings("none", pairs=chip == "gb200")
    if model.moe.capacity is not None:  # 25.09: full graphs of the shapes that dropping makes static
        return ExpertSettings("full" if model.name == "qwen3-30b-a3b" and chip != "h100" else "none")
    if model.mtp and chip == "b200":
        return ExpertSettings("partial", "fused", pairs=True) if layout.pp == 8 else ExpertSettings("none", "fused")
    if racks:
        if mx and release >= "26.06":
            return ExpertSettings("full", "fused", pairs=True)
        return ExpertSettings("router" if mx and model.name == "qwen3-30b-a3b" else "partial", "fused")
    if model.name == "qwen3-235b-a22b":
        return ExpertSettings("none", pairs=chip == "h100")
    if chip == "h100":
        return ExpertSettings("router" if precision == "bf16" else "none", "fused" if layout.ep == 16 else "all_to_all")
    return (
        ExpertSettings("partial", "fused") if layout.mbs > 1 else ExpertSettings("none")
    )  # B200: one sequence until 26.02


def stack_of(model: Model, layout: Layout, *, precision: str, chip: str, release: str = "26.06") -> Stack:
    """Return the stack that the performance scripts set for all runs of a model; ``precision`` as printed."""
    precision = precision_of(precision, chip=chip)
    # Userbuffers serve the dense models except under NVFP4 (llama3_llm_pretrain.py); of the mixtures only H100's
    # Qwen3-235B has tp > 1, without them.
    overlap: tuple[Axis, ...] = ("dp", "cp", "pp")
    if model.moe is None:
        return build_stack("megatron-bridge").replace(overlap=overlap if precision == "nvfp4" else (*overlap, "tp"))
    experts = experts_of(model, layout, chip=chip, precision=precision, release=release)
    overlap += ("ep",) if experts.pairs else ()
    # The fused rotary embedding has no factor of YaRN; until 2025-11-22 it left it out (NVIDIA/Megatron-LM@987395813b:
    # megatron/core/models/common/embeddings/rope_utils.py).
    unfused = model.name == "gpt-oss-120b" and release >= "26.02"
    return build_stack("megatron-bridge").replace(
        overlap=overlap, rope="unfused" if unfused else "fused", **experts._asdict()
    )


def _rule(row: Row) -> str:
    """Return why a row is left out; empty if it is not."""
    name, stages = row["model"], degree(row, "pp") * degree(row, "vp")
    if row["job"] != "Pre-Training Performance":
        return ADAPTERS if row["job"].startswith("LoRA") else PACKED
    if row["trust"] == "low":
        return REGRESSION
    if name == "Nemotron_3_Nano" and row["hardware"] == "DGX-H100":
        return ATTENTION_ALONE  # ["moe", "layernorm", "core_attn", "moe_act"], as of all rows with its ep=8
    if name == "Nemotron_3_Super" and row["precision"] == "NVFP4":
        return MIXED_NVFP4
    if name == "Nemotron_3_Ultra":
        return OFFLOADED_EXPERTS
    if integer(row, "fsdp"):
        return OFFLOADED  # 20 to 40 of 80 layers in every such recipe
    return UNKNOWN_RECOMPUTE if name.startswith("DeepSeek") and not _deepseek_recipe_read(row, stages) else ""


def _deepseek_recipe_read(row: Row, stages: int) -> bool:
    """Return whether deepseek_workload_base_configs.py at 0426418 (without MTP: 0fa501a) has this layout and chip."""
    if stages != 16 or "tokendrop" in row["model"]:
        return False
    alone, late = "w/o MTP" in row["model"], row["release"] >= "26.06"
    return {"DGX-GB200": True, "DGX-GB300": late and not alone, "DGX-B200": not alone}.get(row["hardware"], False)


def _case(row: Row) -> Case:
    """Return the case of a row, with the stages and the recomputation of its recipe."""
    model = apply_printed_shape(model_of(row["model"]), row)
    on = chip(row["hardware"])
    precision = precision_of(row["precision"], chip=on)
    # deepseek_v3.py: four layers on each of 15 stages, the last layer with the loss.
    stages = (*(4,) * 15, 1) if model.name.startswith("deepseek-v3") else ()
    recomputed = read_recipe_recomputation(model, chip=on, precision=precision, pp=degree(row, "pp"))
    layout = layout_of_row(row, zero=1, ac=recomputed, stages=stages)
    where = cluster(row)

    def seconds(job: Job) -> float:
        # From 26.02.01 on token rates are rounded, by up to 3 %; the TFLOP/s are not. GPT-OSS's count has changed, and
        # Nemotron's is 7 % more than ours.
        if model.name in ("gpt-oss-120b", NEMOTRON, NEMOTRON_SUPER):
            return seconds_of_tokens(job, rate=number(row, "tokens_per_s_per_gpu"), ranks=where.ranks)
        rate = number(row, "model_tflops_per_gpu") * 1e12
        return seconds_of_flops(model, job, rate=rate, ranks=where.ranks, count="causal")

    return case_of(
        "megatron_bridge_perf",
        row,
        stack=stack_of(model, layout, precision=row["precision"], chip=on, release=row["release"][:5]),
        model=model,
        machine=where,
        layout=layout,
        recipe=use_16bit_gradients(precision),
        seconds=seconds,
    )._replace(held_out=model.name in (NEMOTRON, NEMOTRON_SUPER))  # read after all constants were set


def cases() -> Iterator[Case | Excluded]:
    """Yield one case, or one exclusion, per measured row."""
    return read("megatron_bridge_perf", rule=_rule, case=_case)
