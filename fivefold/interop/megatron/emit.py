"""Model, layout and job -> Megatron's arguments, in a script; ``UserError`` for what it cannot run."""

from __future__ import annotations

import shlex
from itertools import groupby
from typing import Any

from fivefold.errors import UserError
from fivefold.interop.format import ConfigPlan, WrittenConfig
from fivefold.interop.keys import Table, write_values
from fivefold.interop.megatron.keys import ACTIVATIONS, JOB, LAYOUT, MODEL, STACK, TABLE, VERSION
from fivefold.interop.megatron.to_job import FP8, FUSED_LOSSES, MODULES
from fivefold.interop.render import append_comment
from fivefold.job import Job, Recipe, get_recipe
from fivefold.layout.names import DEFAULT_ORDER
from fivefold.layout.spec import Layout
from fivefold.layout.stages import list_stage_layers
from fivefold.model.experts import MoE
from fivefold.model.spec import Model


def emit(plan: ConfigPlan) -> WrittenConfig:
    """Return a script that starts Megatron-LM's pretrain_gpt.py."""
    values = emit_arguments(plan)
    nodes, per_node = plan.hosts
    groups: dict[str, Table] = {"MODEL": MODEL, "LAYOUT": LAYOUT, "JOB": JOB, "STACK": STACK}
    lines = [
        "#!/bin/bash",
        f"# Megatron-LM {VERSION}: {plan.model.name}, {plan.layout}",
        "# On every node, with MASTER_ADDR and NODE_RANK set; put your data and tokenizer at the end.",
        *(
            ["export CUDA_DEVICE_MAX_CONNECTIONS=1  # messages are launched in the order of the host"]
            if plan.layout.tp > 1
            else []
        ),
    ]
    for group, table in groups.items():
        lines += ["", f"{group}=("]
        lines += [
            append_comment(f"    {_format_flag(name, value)}", table[name].means)
            for name, value in values.items()
            if name in table
        ]
        lines += [")"]
    extra = [f"    {_format_flag(name, value)}" for name, value in values.items() if name not in TABLE]
    lines += [
        "DATA=(",
        *extra,
        append_comment("    --mock-data", "random data; for yours: --data-path PATH"),
        append_comment("    --use-mcore-models", "Megatron-Core"),
        ")",
        "",
        f"torchrun --nnodes {nodes} --nproc_per_node {per_node} "
        '--node_rank "${NODE_RANK:-0}" --master_addr "${MASTER_ADDR:-localhost}" --master_port 29500 \\',
        '    pretrain_gpt.py "${MODEL[@]}" "${LAYOUT[@]}" "${JOB[@]}" "${STACK[@]}" "${DATA[@]}"',
    ]
    return WrittenConfig({"megatron.sh": "\n".join(lines) + "\n"})


def _format_flag(name: str, value: Any) -> str:
    flag = f"--{name.replace('_', '-')}"
    if value is True:
        return flag
    words = value if isinstance(value, list | tuple) else [value]
    return f"{flag} {' '.join(shlex.quote(str(word)) for word in words)}"


def emit_arguments(plan: ConfigPlan, *, full: bool = False) -> dict[str, Any]:
    """Return the arguments of a plan by name; unless ``full``, without those that equal Megatron's default."""
    values = write_values(TABLE, {"model": plan.model, "layout": plan.layout, "job": plan.job}) | convert_job(plan)
    if full:
        return {name: value for name, value in values.items() if value is not None}
    set_values = {name: value for name, value in values.items() if value is not None and value is not False}
    return {name: value for name, value in set_values.items() if name not in TABLE or value != TABLE[name].default}


def convert_job(plan: ConfigPlan) -> dict[str, Any]:
    """Return the values of the arguments that do not correspond to a single field."""
    model, layout, job = plan.model, plan.layout, plan.job
    values = (
        convert_model(model)
        | emit_parallelism(plan)
        | emit_recomputation(layout.ac, experts=model.moe is not None)
        | emit_precision(job.precision)
        | emit_stack(plan)
    )
    values |= {
        "max_position_embeddings": None if model.positions is None else max(model.positions, job.sequence),
        "seed": job.seed or None,  # Megatron refuses seeds below 1; unset it takes 1234
        "global_batch_size": job.global_batch,
        "train_iters": job.steps,
        "adam_beta1": job.optimizer.betas[0],
        "adam_beta2": job.optimizer.betas[1],
        "min_lr": float(f"{job.learning_rate.floor * job.learning_rate.peak:.12g}"),
        "lr_decay_style": {"wsd": "WSD"}.get(job.learning_rate.kind, job.learning_rate.kind),
        "lr_warmup_iters": job.learning_rate.warmup_steps,
        **_emit_decay(job),
    }
    if job.offload not in ((), ("optimizer",)):
        raise UserError(
            f"offload={','.join(job.offload)}: only offload=optimizer can be written for Megatron; use that"
        )
    values["optimizer_cpu_offload"] = bool(job.offload)
    if job.optimizer.kind not in ("adamw", "sgd", "muon"):
        raise UserError(f"optimizer {job.optimizer.kind}: Megatron has adam, sgd and muon; use adamw, sgd or muon")
    if ramp := job.ramp:
        if ramp.samples is None:
            raise UserError("ramp.every: Megatron gives a ramp in samples; set ramp.samples")
        values["rampup_batch_size"] = [ramp.first, ramp.step, ramp.samples]
    return values


def _emit_decay(job: Job) -> dict[str, Any]:
    if job.learning_rate.kind != "wsd":
        return {}
    return {
        "lr_wsd_decay_style": "linear",
        "lr_wsd_decay_iters": job.learning_rate.decay_steps or max(1, job.steps // 5),
    }


def emit_parallelism(plan: ConfigPlan) -> dict[str, Any]:
    """Return the arguments of degrees, ZeRO, stages and the order of the ranks."""
    model, layout = plan.model, plan.layout
    if layout.order not in (DEFAULT_ORDER, ("tp", "cp", "pp", "dp")):
        raise UserError(
            f"layout {str(layout)!r}: Megatron's ranks are in the order tp-cp-dp-pp, or tp-cp-pp-dp; use one of these"
        )
    if layout.zero > 1:
        raise UserError(f"layout {str(layout)!r}: Megatron's distributed optimizer is zero1; use that")
    if model.moe and layout.tp > 1 and not layout.sp:
        raise UserError(f"layout {str(layout)!r}: Megatron needs sequence parallelism with experts and tp; drop nosp")
    return {
        "expert_tensor_parallel_size": layout.etp if model.moe else None,
        "sequence_parallel": layout.tp > 1 and layout.sp,
        "use_distributed_optimizer": layout.zero == 1,
        "num_distributed_optimizer_instances": layout.dp * layout.cp // layout.shard_group
        if layout.shard_group
        else None,
        "use_tp_pp_dp_mapping": layout.order != DEFAULT_ORDER,
        "cp_comm_type": None if layout.cp == 1 else "a2a" if layout.context_parallelism.exchanges_heads else "p2p",
        **(emit_stages(layout, model) if layout.pp > 1 else {}),
    }


def emit_stages(layout: Layout, model: Model) -> dict[str, Any]:
    """Return the arguments of virtual stages, and of the layers of each stage unless they are evenly divided."""
    sizes = [len(stage) for stage in list_stage_layers(model, layout)]
    if len(set(sizes)) == 1:
        return {"num_virtual_stages_per_pipeline_rank": layout.v} if layout.v > 1 else {}
    first, *middle, last = ("t" * size for size in sizes)
    runs = [(stage, len([*equal])) for stage, equal in groupby(middle)]
    text = "".join(f"({stage}|)*{count}" if count > 2 else f"{stage}|" * count for stage, count in runs)
    return {"pipeline_model_parallel_layout": f"E{first}|{text}{last}L"}


def emit_recomputation(ac: str, *, experts: bool) -> dict[str, Any]:
    """Return the arguments of recomputation."""
    if ac == "none":
        return {}
    if ac == "full":
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    names = {ours: theirs for theirs, ours in MODULES.items()}
    groups = ["core"] if ac == "selective" else ac.replace("up+rope", "latent").split("+")
    modules = [names.get("up+rope" if group == "latent" else group) for group in groups]
    if not experts and "moe_act" in modules:
        raise UserError(f"ac={ac}: Megatron recomputes the activation of experts only; use mlp, norm, or selective")
    if None in modules or ac.startswith("full/"):
        known = ", ".join(ours for ours in MODULES.values() if ours != "core")
        raise UserError(f"ac={ac}: Megatron recomputes full, selective, or any of {known}; use one of these")
    return {"recompute_granularity": "selective", "recompute_modules": modules}


def emit_precision(overrides: Recipe) -> dict[str, Any]:
    """Return the arguments of a recipe; raise ``UserError`` for one that Megatron does not have."""
    if overrides == get_recipe("fp32"):
        return {}
    if overrides == get_recipe("fp16"):
        return {"fp16": True}
    reduces_in_bf16 = overrides.name.endswith("-grad16")
    base = overrides.name.removesuffix("-grad16")
    reduced = {"bf16": True, "grad_reduce_in_bf16": reduces_in_bf16}
    recipes: dict[str, dict[str, Any]] = {"bf16": {}, "nvfp4": {"fp4_format": "e2m1"}} | {
        ours: {"fp8_format": "e4m3" if ours in ("fp8-tiles", "mxfp8") else "hybrid", "fp8_recipe": theirs}
        for theirs, ours in FP8.items()
    }
    recipes |= {
        f"{ours}-param": recipes[ours] | {"fp8_param_gather": True} for ours in ("fp8", "fp8-delayed", "fp8-tiles")
    }
    if base not in recipes or overrides != get_recipe(base).with_reduce_dtype(in_fp32=not reduces_in_bf16):
        raise UserError(f"precision {overrides.name}: Megatron has fp32, fp16, {', '.join(recipes)}; use one of them")
    return reduced | recipes[base]


def emit_stack(plan: ConfigPlan) -> dict[str, Any]:
    """Return the arguments that set facts of the stack."""
    stack, moe = plan.job.stack, plan.model.moe is not None
    scopes = {"full": None, "partial": ["attn", "moe_router", "moe_preprocess"], "router": ["moe_router"]}
    graphs = stack.cuda_graphs if stack.cuda_graphs != "none" else None
    bucket_size, bucket_size_per_rank = stack.ddp_bucket_size
    fused_loss = {loss: kernel for kernel, loss in FUSED_LOSSES.items()}.get(stack.loss)
    return {
        "cross_entropy_loss_fusion": fused_loss is not None,
        "cross_entropy_fusion_impl": fused_loss,
        "transformer_impl": "transformer_engine",
        "attention_backend": "unfused" if stack.attention_facts.materializes_scores else None,
        "overlap_grad_reduce": "dp" in stack.overlap,
        "ddp_bucket_size": bucket_size if bucket_size and not bucket_size_per_rank else None,
        "overlap_param_gather": plan.layout.zero == 1
        and stack.param_all_gather == "overlapped"
        and "dp" in stack.overlap,
        "tp_comm_overlap": plan.layout.tp > 1 and plan.layout.sp and "tp" in stack.overlap,
        "no_overlap_p2p_communication": plan.layout.v > 1 and not stack.overlaps_p2p(plan.layout.schedule),
        "overlap_moe_expert_parallel_comm": moe and stack.pairs,
        "moe_token_dispatcher_type": ("flex" if stack.dispatcher == "fused" else "alltoall") if moe else None,
        "moe_enable_deepep": moe and stack.dispatcher == "fused",
        "cuda_graph_impl": "transformer_engine" if graphs else None,
        "cuda_graph_scope": scopes[graphs] if graphs else None,
    }


def convert_model(model: Model) -> dict[str, Any]:
    """Return a model as arguments; what they cannot express is left out, and found when they are read back."""
    gated = model.mlp == "gated"
    grouped = model.kv_heads != model.heads and model.mla is None
    biased = model.mlp_bias
    values: dict[str, Any] = {
        "rotary_base": _to_integer(model.rope_theta),
        "ffn_hidden_size": model.ffn,
        "kv_channels": model.head_dim,
        "group_query_attention": grouped,
        "num_query_groups": model.kv_heads if grouped else None,
        "swiglu": gated,
        **{option: model.activation == name for option, name in ACTIVATIONS.items()},
        "disable_bias_linear": not biased,
        "add_qkv_bias": model.qkv_bias and not biased,
        "vocab_size": model.vocab,
        "attention_dropout": model.dropout_rates.attention,
        "tokenizer_type": "NullTokenizer",
    }
    if mla := model.mla:
        values |= {
            "multi_latent_attention": True,
            "qk_layernorm": True,
            "q_lora_rank": mla.q_rank,
            "kv_lora_rank": mla.kv_rank,
            "qk_head_dim": mla.nope_dim,
            "qk_pos_emb_head_dim": mla.rope_dim,
            "v_head_dim": mla.v_dim,
        }
        if (scaling := model.rope_scaling) and scaling.kind == "yarn":
            values |= {
                "rotary_scaling_factor": scaling.factor,
                "mscale": scaling.mscale or 1.0,
                "mscale_all_dim": scaling.mscale_all_dims or 0.0,
            }
    if mtp := model.mtp:
        values |= {"mtp_num_layers": mtp.depth, "mtp_loss_scaling_factor": mtp.coefficient}
    return values | (_emit_experts(model.moe, model.layers) if model.moe else {})


def _to_integer(theta: float) -> int:
    """Return the base of rotary positions as the whole number that Megatron's argument takes."""
    if theta != int(theta):
        raise UserError(f"rope_theta {theta}: Megatron's --rotary-base is a whole number; use {round(theta)}")
    return int(theta)


def _emit_experts(moe: MoE, layers: int) -> dict[str, Any]:
    """Return Megatron's keys of experts."""
    dense, shared = moe.dense_layers, moe.shared_width
    is_aux_free = moe.balance == "free"
    return {
        "num_experts": moe.experts,
        "moe_ffn_hidden_size": moe.ffn,
        "moe_router_topk": moe.topk,
        "moe_layer_freq": f"([0]*{dense}+[1]*{layers - dense})" if dense else None,
        "moe_shared_expert_intermediate_size": shared or None,
        "moe_latent_size": moe.latent_width,
        "moe_router_score_function": moe.score,
        "moe_router_pre_softmax": moe.score == "softmax" and not moe.normalized,
        "moe_router_num_groups": moe.groups if moe.groups > 1 else None,
        "moe_router_group_topk": moe.topk_groups if moe.groups > 1 else None,
        "moe_router_topk_scaling_factor": moe.scaling if moe.scaling != 1 else None,
        "moe_router_enable_expert_bias": is_aux_free,
        "moe_router_load_balancing_type": "aux_loss" if moe.balance == "aux" else "none",
        "moe_aux_loss_coeff": moe.aux_coefficient if moe.balance == "aux" else None,
        "moe_expert_capacity_factor": moe.capacity,
        "moe_grouped_gemm": True,
    }
