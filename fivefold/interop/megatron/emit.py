"""Layout and job -> Megatron's arguments: the inverse of ``read.py``. ``Mistake`` for what it cannot run."""

from __future__ import annotations

from typing import Any

from fivefold.interop.format import Plan
from fivefold.interop.megatron.model import arguments
from fivefold.interop.megatron.read import FP8, MODULES
from fivefold.job import Job, Recipe, recipe
from fivefold.layout.names import DEFAULT_ORDER
from fivefold.layout.spec import Layout
from fivefold.layout.stages import stage_layers
from fivefold.record import Mistake


def values(plan: Plan) -> dict[str, Any]:
    """The values of the arguments that are no field by themselves."""
    model, layout, job = plan.model, plan.layout, plan.job
    found = (
        arguments(model)
        | parallel(plan)
        | recomputed(layout.ac, experts=model.moe is not None)
        | precision(job.precision)
        | of_stack(plan)
    )
    found |= {
        "global_batch_size": job.global_batch, "train_iters": job.steps,
        "adam_beta1": job.optimizer.betas[0], "adam_beta2": job.optimizer.betas[1],
        "min_lr": float(f"{job.learning_rate.floor * job.learning_rate.peak:.12g}"),
        "lr_decay_style": {"wsd": "WSD"}.get(job.learning_rate.kind, job.learning_rate.kind),
        "lr_warmup_iters": job.learning_rate.warmup_steps, **_decay(job),
    }  # fmt: skip
    if job.offload not in ((), ("optimizer",)):
        raise Mistake(f"offload={','.join(job.offload)}: Megatron is written with the optimizer in host memory alone")
    found["optimizer_cpu_offload"] = bool(job.offload)
    if job.optimizer.kind in ("adamw8bit", "adafactor"):
        raise Mistake(f"optimizer {job.optimizer.kind}: Megatron has adam, sgd and muon; take adamw, sgd or muon")
    if ramp := job.ramp:
        if ramp.samples is None:
            raise Mistake("ramp.every: Megatron's ramp is said in samples; take ramp.samples")
        found["rampup_batch_size"] = [ramp.first, ramp.step, ramp.samples]
    return found


def _decay(job: Job) -> dict[str, Any]:
    if job.learning_rate.kind != "wsd":
        return {}
    return {
        "lr_wsd_decay_style": "linear",
        "lr_wsd_decay_iters": job.learning_rate.decay_steps or max(1, job.steps // 5),
    }


def parallel(plan: Plan) -> dict[str, Any]:
    """Degrees, ZeRO, stages and the order of the ranks."""
    model, layout = plan.model, plan.layout
    if layout.order not in (DEFAULT_ORDER, ("tp", "cp", "pp", "dp")):
        raise Mistake(
            f"layout {str(layout)!r}: Megatron's ranks are in the order tp-cp-dp-pp, or tp-cp-pp-dp; take one of these"
        )
    if layout.zero > 1:
        raise Mistake(f"layout {str(layout)!r}: Megatron's distributed optimizer is zero1; take that")
    if model.moe and layout.tp > 1 and not layout.sp:
        raise Mistake(f"layout {str(layout)!r}: Megatron wants sequence parallelism with experts and tp; drop nosp")
    return {
        "expert_tensor_parallel_size": layout.etp if model.moe else None,
        "sequence_parallel": layout.tp > 1 and layout.sp,
        "use_distributed_optimizer": layout.zero == 1,
        "num_distributed_optimizer_instances": layout.dp * layout.cp // layout.shard_group
        if layout.shard_group
        else None,
        "use_tp_pp_dp_mapping": layout.order != DEFAULT_ORDER,
        "cp_comm_type": None if layout.cp == 1 else "a2a" if layout.cp_kind == "ulysses" else "p2p",
        **(stages(layout, model.layers) if layout.pp > 1 else {}),
    }


def stages(layout: Layout, layers: int) -> dict[str, Any]:
    """Virtual stages, and how the layers lie unless they spread evenly."""
    sizes = [len(each) for each in stage_layers(layers, layout)]
    if len(set(sizes)) == 1:
        return {"num_virtual_stages_per_pipeline_rank": layout.v} if layout.v > 1 else {}
    text = "|".join("t" * size for size in sizes)
    return {"pipeline_model_parallel_layout": f"E{text}L"}


def recomputed(ac: str, *, experts: bool) -> dict[str, Any]:
    """What is run again in the backward."""
    if ac == "none":
        return {}
    if ac == "full":
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    names = {ours: theirs for theirs, ours in MODULES.items()}
    groups = ["core"] if ac == "selective" else ac.replace("up+rope", "latent").split("+")
    modules = [names.get("up+rope" if group == "latent" else group) for group in groups]
    if not experts and "moe_act" in modules:
        raise Mistake(f"ac={ac}: Megatron recomputes the activation of experts alone; take mlp, norm, or selective")
    if None in modules or ac.startswith("full/"):
        known = ", ".join(ours for ours in MODULES.values() if ours != "core")
        raise Mistake(f"ac={ac}: Megatron recomputes full, selective, or any of {known}; take one of these")
    return {"recompute_granularity": "selective", "recompute_modules": modules}


def precision(asked: Recipe) -> dict[str, Any]:
    """Arguments of a recipe; ``Mistake`` for one that Megatron has not."""
    if asked == recipe("fp32"):
        return {}
    if asked == recipe("fp16"):
        return {"fp16": True}
    narrow = asked.name.endswith("-grad16")
    base = asked.name.removesuffix("-grad16")
    reduced = {"bf16": True, "grad_reduce_in_bf16": narrow}
    wanted = {"bf16": {}, "nvfp4": {"fp4_format": "e2m1"}} | {
        ours: {"fp8_format": "e4m3" if ours in ("fp8-tiles", "mxfp8") else "hybrid", "fp8_recipe": theirs}
        for theirs, ours in FP8.items()
        if theirs != "delayed"
    }
    if base not in wanted or asked != recipe(base).reduced(in_fp32=not narrow):
        raise Mistake(f"precision {asked.name}: Megatron has fp32, fp16, {', '.join(wanted)}; take one of them")
    return reduced | wanted[base]


def of_stack(plan: Plan) -> dict[str, Any]:
    """What of the stack is said by arguments."""
    stack, moe = plan.job.stack, plan.model.moe is not None
    scopes = {"full": None, "partial": ["attn", "moe_router", "moe_preprocess"], "router": ["moe_router"]}
    graphs = stack.graphs if stack.graphs != "none" else None
    return {
        "transformer_impl": "transformer_engine",
        "attention_backend": "unfused" if stack.attention == "unfused" else None,
        "overlap_grad_reduce": "dp" in stack.overlap,
        "overlap_param_gather": plan.layout.zero == 1 and stack.weights == "ahead" and "dp" in stack.overlap,
        "tp_comm_overlap": plan.layout.tp > 1 and plan.layout.sp and "tp" in stack.overlap,
        "overlap_moe_expert_parallel_comm": moe and stack.pairs,
        "moe_token_dispatcher_type": ("flex" if stack.dispatcher == "fused" else "alltoall") if moe else None,
        "moe_enable_deepep": moe and stack.dispatcher == "fused",
        "cuda_graph_impl": "transformer_engine" if graphs else None,
        "cuda_graph_scope": scopes[graphs] if graphs else None,
    }
