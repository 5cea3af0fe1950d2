"""Model, layout and job -> nanotron's YAML, of 0.4, or of its main branch if 0.4 has no such key."""

from __future__ import annotations

from typing import Any

from fivefold.errors import UserError
from fivefold.interop.format import ConfigPlan, WrittenConfig
from fivefold.interop.keys import write_values
from fivefold.interop.nanotron.keys import FACTORY, MAIN, MODEL, MODEL_FIELDS, OPTIMIZER, TABLE, VERSION, F, R
from fivefold.interop.render import render_yaml
from fivefold.job import get_recipe
from fivefold.model.huggingface.write import to_config


def emit(plan: ConfigPlan) -> WrittenConfig:
    """Return the YAML of a plan; raise ``UserError`` for what nanotron cannot run."""
    model, layout, job = plan.model, plan.layout, plan.job
    if model.moe is not None or layout.ep > 1:
        raise UserError(f"model {model.name!r}: experts are not written for nanotron; use a dense model")
    config = to_config(model)
    if config["model_type"] not in ("llama", "qwen2"):
        raise UserError(
            f"model {model.name!r}: nanotron has Llama and Qwen2, not {config['model_type']}; use one of these"
        )
    if layout.ac not in ("none", "full"):
        raise UserError(f"ac={layout.ac}: nanotron recomputes complete layers only; use ac=full or ac=none")
    dtypes = {"bf16": ("bfloat16", True), "bf16-full": ("bfloat16", False), "fp32": ("float32", False)}
    if job.precision.name not in dtypes or job.precision != get_recipe(job.precision.name):
        raise UserError(f"precision {job.precision.name}: nanotron has {', '.join(dtypes)}; use one of them")
    if job.optimizer.kind != "adamw":
        raise UserError(
            f"optimizer {job.optimizer.kind} cannot be written for nanotron, which has adamw only; use adamw"
        )
    dtype, sums_in_fp32 = dtypes[job.precision.name]
    rate = job.learning_rate
    decay_steps = (rate.decay_steps or job.steps // 5) if rate.kind == "wsd" else job.steps - rate.warmup_steps
    values = write_values(TABLE, {"model": model, "layout": layout, "job": job}) | {
        **{f"{MODEL}{name}": config.get(name) for name in MODEL_FIELDS if not isinstance(config.get(name), dict)},
        "model.dtype": dtype,
        "parallelism.tp_mode": "REDUCE_SCATTER" if layout.sp else "ALL_REDUCE",
        "parallelism.recompute_layer": layout.ac == "full",
        "general.seed": job.seed,
        "tokens.batch_accumulation_per_replica": layout.micro_batches(job),
        f"{OPTIMIZER}accumulate_grad_in_fp32": sums_in_fp32,
        f"{F}name": "adamW",
        f"{F}adam_beta1": job.optimizer.betas[0],
        f"{F}adam_beta2": job.optimizer.betas[1],
        f"{F}torch_adam_is_fused": True,
        f"{R}lr_decay_style": "cosine" if rate.kind == "cosine" else "linear",
        f"{R}lr_decay_steps": max(1, decay_steps),
        f"{R}lr_decay_starting_step": job.steps - decay_steps if rate.kind == "wsd" else None,
        f"{R}min_decay_lr": float(f"{rate.peak * (1.0 if rate.kind == 'constant' else rate.floor):.12g}"),
    }
    return _build_file(plan, values, family=str(config["model_type"]))


def _build_file(plan: ConfigPlan, values: dict[str, Any], *, family: str) -> WrittenConfig:
    """Return the file, for 0.4 unless it needs a key of the main branch."""
    defaults = {key: TABLE[key].default for key in MAIN} | {
        f"{MODEL}rope_theta": 10_000.0,
        f"{MODEL}attention_bias": False,
    }
    needs_main_branch = family == "qwen2" or any(values[key] not in (None, defaults[key]) for key in MAIN)
    if not needs_main_branch:
        values = {
            key.replace(F, OPTIMIZER) if key.startswith(F) else key: value
            for key, value in values.items()
            if key not in MAIN
        }
        values.pop(f"{OPTIMIZER}name", None)
    table = {**TABLE, **{f"{OPTIMIZER}{name}": TABLE[f"{F}{name}"] for name in FACTORY}}
    version = "nanotron's main branch" if needs_main_branch else f"nanotron {VERSION}"
    nodes, gpus_per_node = plan.hosts
    extra = {
        f"{MODEL}is_{family}_config": (True, "its family"),
        "model.init_method.std": (0.02, "of random weights"),
        "general.project": ("fivefold", ""),
        "general.run": (plan.model.name, ""),
        "tokenizer.tokenizer_name_or_path": ("gpt2", "the tokenizer: put yours"),
        "checkpoints.checkpoints_path": ("checkpoints", ""),
        "checkpoints.checkpoint_interval": (1000, "steps"),
        f"{R}lr_warmup_style": ("linear", ""),
        "data.dataset.hf_dataset_or_datasets": ("stas/openwebtext-10k", "what is read: put yours"),
        "data.dataset.hf_dataset_splits": ("train", ""),
        "data.dataset.text_column_name": ("text", ""),
        "data.seed": (plan.job.seed, ""),
        "data.num_loading_workers": (1, ""),
    }
    about = (
        f"{version}: {plan.model.name}, {plan.layout}",
        f"Start: CUDA_DEVICE_MAX_CONNECTIONS=1 torchrun --nnodes {nodes} --nproc_per_node {gpus_per_node} run_train.py "
        "--config-file nanotron.yaml",
    )
    text = render_yaml(values, table, about=about, extra=extra)
    return WrittenConfig(
        {"nanotron.yaml": text},
        (f"is for {version}: {VERSION} does not have keys that it needs",) if needs_main_branch else (),
    )
