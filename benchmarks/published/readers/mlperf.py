"""MLPerf Training v4.0 to v5.1: seconds of a step that submitters logged, on 4 to 5,120 GPUs of NVIDIA and AMD.

mlcommons/training_results_v4.0 to v5.1: Llama 2 70B with LoRA, GPT-3 175B, Llama 3.1 405B and 8B. ``step_s`` is the
median of the logged ``train_step_time`` (or of the seconds between evaluations) over three runs; layout and precision
are those that the run's log prints, and where it prints none, of the submitter's configuration of that number of nodes,
if one fits the logged batch. ``bucket_size``: its BUCKET_SIZE; without one, NeMo's callback sets 128 Mi elements
(pretrain.py, MegatronCommOverlapCallback). Implementations: NVIDIA's NeMo
(llama31_405b/implementations/eos-dfw_n64_ngc25.01_nemo/pretrain.py@0fdc28f: grad_reduce_in_fp32 off, embedding and head
count as layers of the pipeline) and AMD's on the same software; LoRA of rank 16 on linear_qkv and linear_proj, with
a2a_experimental and without gradient_accumulation_fusion
(llama2_70b_lora/implementations/nyx_n1_ngc25.04_nemo/train.py@0fdc28f), on full sequences of 8,192 tokens; its base is
kept in fp8 (fp8_params). On Blackwell it runs in NeMo 2, which does not overlap the gradients of the factors and
exchanges heads under cp (conf/megatron_gpt_peft_tuning_config.yaml there: overlap_grad_reduce, cp_comm_type), and
without cp keeps the input of SwiGLU in fp8 (FP8_ACT of its config_*_cp1.sh); on Hopper in NeMo 1, which overlaps them
since v4.1 (its logs: DistributedDataParallelConfig); AMD's submissions and those of v4.0 use fused_adam, which does
not. ``max_memory_gb`` is PyTorch's largest allocation, in GiB
(stable_diffusion/implementations/nyx_n1_ngc25.04_nemo/callbacks.py@0fdc28f). fp8 has delayed scaling: LoRA and AMD's
runs name no other (fp8_amax_history_len alone), Llama 3.1 405B of v5.0 has it (llama31_405b/implementations/
tyche_ngpu256_ngc25.04_nemo/conf/custom.yaml@0fdc28f: fp8_recipe), and before 2025 Transformer Engine had no other.
NVIDIA's Llama 3.1 of v5.1 has current scaling (FP8_RECIPE of llama31_8b/implementations/nemo/config_common.sh and of
llama31_405b/implementations/theia_ngpu512_ngc25.09_nemo, @4da2d1c), where Cisco's config_common.sh sets none. Read
after all constants were set, so all rows are held out.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.published.case import Case, Excluded
from benchmarks.published.cells import Row, degree, find_model, number, schedule, use_16bit_gradients
from benchmarks.published.convert import case_of, cluster, delay_scales, layout_of_row, read
from fivefold.adapter import Adapter
from fivefold.job import Recipe
from fivefold.layout.names import Axis
from fivefold.stack.catalog import build_stack
from fivefold.stack.spec import Stack
from fivefold.units import GIB

SOURCE = "mlperf"
NO_LAYOUT = "the log prints no layout, and no configuration of the system, or several, fit what it prints"
WEIGHTS_IN_FP8 = "weights are kept in fp8 alone (fp8_params), and a recipe keeps those of 16 bits too"
BRIDGED = "H200 NVL: pairs and fours of cards with bridges, which our catalog has no node of"
LORA = Adapter(rank=16, alpha=32, dropout=0.1, targets=("q_proj", "k_proj", "v_proj", "o_proj"))


def _is_adapter(row: Row) -> bool:
    return row["benchmark"] == "llama2_70b_lora"


def _is_nemo_2(row: Row) -> bool:
    return row["hardware"].startswith(("B", "GB"))


def _rule(row: Row) -> str:
    if not row["tp"]:
        return NO_LAYOUT
    return BRIDGED if row["hardware"] == "H200 NVL" else ""


def _stack(row: Row) -> Stack:
    """Return NeMo with the overlaps and CUDA graphs of a row."""
    overlap: tuple[Axis, ...] = ("dp", "cp", "pp", "tp") if row["tp_comm_overlap"] == "y" else ("dp", "cp", "pp")
    if _is_adapter(row) and (_is_nemo_2(row) or row["release"] == "v4.0" or row["hardware"].startswith("MI")):
        overlap = tuple(axis for axis in overlap if axis != "dp")
    graphs = "full" if row["cuda_graphs"] == "y" else "none"
    stack, bucket_size = build_stack("nemo"), int(number(row, "bucket_size"))
    # Megatron's tp-cp-pp-dp is read as tp-pp-cp-dp: the replicas of these runs fill a segment of a rack, in any order.
    return stack.replace(
        overlap=overlap,
        cuda_graphs=graphs,
        fp8_attention=row["fp8_attention"] == "y",
        runs=stack.runs.replace(orders=True),
        ddp_bucket_size=(bucket_size, 0) if bucket_size else stack.ddp_bucket_size,
    )


def _has_current_scaling(row: Row) -> bool:
    is_nvidias = not row["hardware"].startswith("MI") and row["submitter"] != "Cisco"
    return is_nvidias and row["release"] == "v5.1" and row["benchmark"].startswith("llama31")


def _recipe(row: Row) -> Recipe:
    name = row["precision"]
    if name == "fp8" and _is_adapter(row):
        name = "fp8-param"
    elif name == "fp8" and row["fp8_param_gather"] == "y":
        name = "fp8-wire"
    recipe = use_16bit_gradients(name)
    return recipe if _has_current_scaling(row) else delay_scales(recipe)


def _case(row: Row) -> Case:
    """Return the case of a row, with the stages of its submission."""
    model = find_model(row["model"])
    tp, pp = degree(row, "tp"), degree(row, "pp")
    stages: tuple[int, ...] = ()
    if row["benchmark"] == "llama31_405b":
        count = pp * schedule(row).v
        inner = (model.layers + 2) // count
        stages = (inner - 1, *[inner] * (count - 2), inner - 1)
    layout = layout_of_row(row, zero=1, sp=row["sp"] == "y" or tp == 1, stages=stages)
    if row["tp_pp_dp"] == "y" and pp > 1:
        layout = layout.replace(order=("tp", "pp", "cp", "dp"))
    if _is_adapter(row) and _is_nemo_2(row) and layout.cp > 1:
        layout = layout.replace(cp_kind="ulysses")
    case = case_of(
        SOURCE,
        row,
        stack=_stack(row),
        model=model,
        machine=cluster(row),
        layout=layout,
        recipe=_recipe(row),
        seconds=number(row, "step_s"),
    )._replace(held_out=True)
    is_adapter = _is_adapter(row)
    if row["max_memory_gb"] and row["fp8_param_gather"] == "y" and not is_adapter:
        case = case._replace(left_out=(("peak", WEIGHTS_IN_FP8),))
    elif row["max_memory_gb"]:
        case = case._replace(memory_bytes=number(row, "max_memory_gb") * GIB)
    if not is_adapter:
        return case
    stack = case.job.stack.replace(merged_adapters="all_to_all", wgrad_accumulation="separate")
    if _is_nemo_2(row) and layout.cp == 1:
        stack = stack.replace(low_precision_saved=("activation",))
    return case._replace(job=case.job.replace(adapter=LORA, stack=stack))


def cases() -> Iterator[Case | Excluded]:
    """Yield one case, or one exclusion, per measured row."""
    return read(SOURCE, rule=_rule, case=_case)
