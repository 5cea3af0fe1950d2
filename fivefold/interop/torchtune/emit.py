"""Model, layout and job -> torchtune's YAML, of one of the recipes that are read."""

from __future__ import annotations

from typing import Any

from fivefold.errors import UserError
from fivefold.interop.format import ConfigPlan, WrittenConfig
from fivefold.interop.keys import write_values
from fivefold.interop.render import render_yaml
from fivefold.interop.torchtune.builders import BUILDERS, build_model, find_package, name_builder
from fivefold.interop.torchtune.keys import TABLE, VERSION
from fivefold.interop.torchtune.parse import TuneRecipe, find_recipe
from fivefold.interop.torchtune.to_job import (
    ATTENTION_TARGETS,
    COSINE,
    MLP_TARGETS,
    SEPARATE_UNITS,
    TENSOR_PARALLEL_PLAN,
)
from fivefold.job import Job
from fivefold.model.huggingface.write import find_difference
from fivefold.model.spec import Model
from fivefold.model.weights import list_targets

# Tokenizers and checkpoints by package
TOKENIZERS = {
    "code_llama2": "llama2.llama2_tokenizer", "gemma": "gemma.gemma_tokenizer", "gemma2": "gemma.gemma_tokenizer",
    "llama2": "llama2.llama2_tokenizer", "llama3": "llama3.llama3_tokenizer", "llama3_1": "llama3.llama3_tokenizer",
    "llama3_2": "llama3.llama3_tokenizer", "llama3_3": "llama3.llama3_tokenizer",
    "mistral": "mistral.mistral_tokenizer", "phi3": "phi3.phi3_mini_tokenizer", "phi4": "phi4.phi4_tokenizer",
    "qwen2": "qwen2.qwen2_tokenizer", "qwen2_5": "qwen2_5.qwen2_5_tokenizer",
}  # fmt: skip
TOKENIZER_FILES = {  # but for a tokenizer.model
    "phi4": {"vocab_path": "vocab.json", "merges_path": "merges.txt"},
    "qwen2": {"path": "vocab.json", "merges_file": "merges.txt"},
    "qwen2_5": {"path": "vocab.json", "merges_file": "merges.txt"},
}
CHECKPOINTS = {
    "code_llama2": "LLAMA2", "gemma": "GEMMA", "gemma2": "GEMMA2", "llama2": "LLAMA2", "llama3": "LLAMA3",
    "llama3_1": "LLAMA3", "llama3_2": "LLAMA3_2", "llama3_3": "LLAMA3", "mistral": "MISTRAL", "phi3": "PHI3_MINI",
    "phi4": "PHI4", "qwen2": "QWEN2", "qwen2_5": "QWEN2",
}  # fmt: skip
DATASETS = {
    "pretrain": "torchtune.datasets.text_completion_dataset",
    "sft": "torchtune.datasets.alpaca_dataset",
    "dpo": "torchtune.datasets.stack_exchange_paired_dataset",
}


def emit(plan: ConfigPlan) -> WrittenConfig:
    """Return the YAML of a plan; raise ``UserError`` for what torchtune cannot run."""
    model, layout, job = plan.model, plan.layout, plan.job
    _check_layout(plan)
    name = _find_builder(model)
    recipe = _find_recipe(plan)
    is_dpo = job.objective == "dpo"
    offloaded = layout.list_offloaded(job)
    values = write_values(TABLE, {"model": model, "layout": layout, "job": job}) | {
        "model._component_": name_builder(name, adapts=job.adapter is not None),
        **_write_adapter(job, model),
        "tokenizer.max_seq_len": job.sequence,
        "dataset._component_": DATASETS[job.objective],
        "dataset.packed": None if is_dpo else True,
        "batch_size": layout.mbs // job.min_micro_batch,
        "gradient_accumulation_steps": layout.micro_batches(job),
        "epochs": 1,
        "max_steps_per_epoch": job.steps,
        "seed": job.seed,
        "dtype": "fp32" if job.precision.weights_bytes == 4 else "bf16",
        "optimizer._component_": _find_optimizer(job),
        "optimizer.betas": list(job.optimizer.betas) if job.optimizer.kind != "sgd" else None,
        "optimizer.eps": job.optimizer.epsilon if job.optimizer.kind != "sgd" else None,
        **_write_rate(job, recipe),
        "loss._component_": (
            "torchtune.rlhf.loss.DPOLoss" if is_dpo else "torchtune.modules.loss.CEWithChunkedOutputLoss"
        ),
        "loss.beta": job.dpo_beta if is_dpo else None,
        "clip_grad_norm": job.optimizer.clip or None,
        "compile": job.stack.compile,
        **_write_recomputation(plan),
        "enable_activation_offloading": "activations" in offloaded,
        "fsdp_cpu_offload": "parameters" in offloaded or None,
    }
    if layout.world > 1:
        stays_gathered = job.stack.backward_all_gather == "root"
        values["custom_sharded_layers"] = None if stays_gathered else sorted(SEPARATE_UNITS, reverse=True)
        values["fsdp_reshard_after_forward"] = False if job.stack.reshard == "backward" else None
    if layout.tp > 1:
        values |= {"tensor_parallel_dim": layout.tp, "tensor_parallel_plan._component_": TENSOR_PARALLEL_PLAN}
    return _build_file(plan, values, recipe=recipe, package=find_package(name))


def _build_file(plan: ConfigPlan, values: dict[str, Any], *, recipe: TuneRecipe, package: str) -> WrittenConfig:
    """Return the file, with the keys that a run needs besides."""
    nodes, per_node = plan.hosts
    command = f"tune run --nnodes {nodes} --nproc_per_node {per_node} {recipe} --config torchtune.yaml"
    if not recipe.is_distributed:
        command = f"tune run {recipe} --config torchtune.yaml"
    extra: dict[str, tuple[Any, str]] = {
        "output_dir": ("out", ""),
        "tokenizer._component_": (f"torchtune.models.{TOKENIZERS[package]}", ""),
        "checkpointer._component_": ("torchtune.training.FullModelHFCheckpointer", ""),
        "checkpointer.checkpoint_dir": ("model", "the model's folder: put yours"),
        "checkpointer.checkpoint_files": (["model.safetensors"], "its files"),
        "checkpointer.recipe_checkpoint": (None, ""),
        "checkpointer.output_dir": ("out", ""),
        "checkpointer.model_type": (CHECKPOINTS[package], ""),
        "resume_from_checkpoint": (False, ""),
        "device": ("cuda", ""),
        "optimizer_in_bwd": (False, ""),
        "shuffle": (True, ""),
        "metric_logger._component_": ("torchtune.training.metric_logging.DiskLogger", ""),
        "metric_logger.log_dir": ("out/logs", ""),
        "log_every_n_steps": (1, ""),
        "log_peak_memory_stats": (True, ""),
    }
    if recipe.has_pairs and not recipe.trains_adapters:
        extra |= {
            key.replace("checkpointer.", "ref_checkpointer."): value
            for key, value in extra.items()
            if key.startswith("checkpointer.")
        }
    for key, file in TOKENIZER_FILES.get(package, {"path": "tokenizer.model"}).items():
        extra[f"tokenizer.{key}"] = (f"model/{file}", "of the model's folder: put yours")
    if plan.job.objective == "pretrain":
        extra["dataset.source"] = ("text", "what is read: put yours")
    if plan.job.optimizer.kind == "adamw" and values["optimizer._component_"].startswith("torch."):
        extra["optimizer.fused"] = (plan.layout.tp == 1, "tensor parallelism has no fused update")
    about = (f"torchtune {VERSION}: {plan.model.name}, {plan.layout}", f"Start: {command}")
    return WrittenConfig({"torchtune.yaml": render_yaml(values, TABLE, about=about, extra=extra)})


def _check_layout(plan: ConfigPlan) -> None:
    """Raise ``UserError`` for a layout that no recipe has."""
    layout = plan.layout
    if layout.tp > 1 and (plan.job.adapter is not None or plan.job.objective == "dpo"):
        raise UserError(f"tp={layout.tp}: torchtune trains adapters and pairs without tensor parallelism; use tp=1")
    if "optimizer" in layout.list_offloaded(plan.job) and "parameters" not in layout.list_offloaded(plan.job):
        raise UserError("offload=optimizer: torchtune keeps all in host memory or nothing; use offload=parameters")


def _find_builder(model: Model) -> str:
    """Return torchtune's name of a model, that of the same name first."""
    spelled = model.name.replace(".", "_").replace("-", "_")
    for name in sorted(BUILDERS, key=lambda builder: builder != spelled):
        built = build_model(name)
        if built is not None and built.layers == model.layers and find_difference(built, model) is None:
            return name
    raise UserError(f"model {model.name!r}: torchtune has no builder of it; use one of {', '.join(BUILDERS)}")


def _find_recipe(plan: ConfigPlan) -> TuneRecipe:
    """Return the recipe of a plan."""
    is_distributed = plan.layout.world > 1
    recipe = find_recipe(
        is_distributed=is_distributed,
        trains_adapters=plan.job.adapter is not None,
        has_pairs=plan.job.objective == "dpo",
    )
    if recipe.is_distributed != is_distributed:
        raise UserError(
            "objective=dpo on one rank: torchtune trains all weights with DPO on several ranks only; use an adapter"
        )
    return recipe


def _find_optimizer(job: Job) -> str:
    """Return the component whose update and states are those of a job; raise ``UserError`` if none is."""
    precision, kind = job.precision, job.optimizer.kind
    sizes = (precision.weights_bytes, precision.gradients_bytes, precision.master_bytes, precision.accumulated_bytes)
    if sizes not in ((2, 2, 0, 0), (4, 4, 0, 0)) or precision.compute not in ("bf16", "fp32"):
        raise UserError(f"precision {precision.name}: torchtune has no master copy; use bf16-pure or fp32")
    if kind in ("adamw8bit", "adamw4bit"):
        return "bitsandbytes.optim.AdamW8bit" if kind == "adamw8bit" else "torchao.optim.AdamW4bit"
    if kind == "sgd":
        return "torch.optim.SGD"
    if kind != "adamw":
        raise UserError(f"optimizer {kind} is not written for torchtune; use adamw, adamw8bit, adamw4bit or sgd")
    keeps_dtype = precision.moments_bytes == (precision.weights_bytes,) * 2
    return "torch.optim.AdamW" if keeps_dtype else "bitsandbytes.optim.AdamW"


def _write_adapter(job: Job, model: Model) -> dict[str, Any]:
    """Return the arguments of a builder of adapters; raise ``UserError`` for what it has no argument for."""
    adapter = job.adapter
    if adapter is None:
        return {}
    targets = list_targets(model, adapter)
    mlp = set(targets) & set(MLP_TARGETS)
    attention = [theirs for theirs, ours in ATTENTION_TARGETS.items() if ours in targets]
    if len(attention) + len(mlp) < len(targets) or len(mlp) not in (0, len(MLP_TARGETS)) or not attention:
        raise UserError(
            f"adapter.targets={','.join(targets)}: torchtune adapts layers of attention, and all or none of the MLP's; "
            "use q_proj,v_proj or all-linear"
        )
    for is_present, field in (
        (adapter.rank_stabilized, "rank_stabilized=true"),
        (bool(adapter.rank_pattern), f"rank_pattern={','.join(adapter.rank_pattern)}"),
        (bool(adapter.alpha_pattern), f"alpha_pattern={','.join(adapter.alpha_pattern)}"),
        (bool(adapter.modules_to_save), f"modules_to_save={','.join(adapter.modules_to_save)}"),
        (adapter.base not in (None, "nf4"), f"base={adapter.base}"),
        (not adapter.double_quantization, "double_quantization=false"),
    ):
        if is_present:
            raise UserError(f"adapter.{field}: torchtune has no argument for it; leave it out")
    return {
        "model.lora_attn_modules": attention,
        "model.apply_lora_to_mlp": bool(mlp),
        "model.lora_rank": adapter.rank,
        "model.lora_alpha": adapter.scale_numerator,
        "model.lora_dropout": adapter.dropout,
        "model.use_dora": True if adapter.has_magnitudes else None,
        "model.quantize_base": True if adapter.base == "nf4" else None,
    }


def _write_rate(job: Job, recipe: TuneRecipe) -> dict[str, Any]:
    """Return the schedule: a cosine, which recipes of adapters need, with no cycles for a constant rate."""
    rate = job.learning_rate
    if rate.kind == "constant" and not rate.warmup_steps and not (recipe.trains_adapters or recipe.has_pairs):
        return {}
    return {
        "lr_scheduler._component_": f"torchtune.training.lr_schedulers.{COSINE}",
        "lr_scheduler.num_warmup_steps": rate.warmup_steps,
        "lr_scheduler.num_cycles": 0.0 if rate.kind == "constant" else 0.5,
    }


def _write_recomputation(plan: ConfigPlan) -> dict[str, Any]:
    """Return the keys of recomputation: of all blocks, or of every n-th in one recipe."""
    ac = plan.layout.ac
    if ac in ("none", "full"):
        return {"enable_activation_checkpointing": ac == "full"}
    every = ac.removeprefix("full/")
    if not every.isdigit() or not _find_recipe(plan).reads_tensor_parallel:
        raise UserError(f"ac={ac}: torchtune recomputes full blocks; use ac=full or ac=none")
    return {"enable_activation_checkpointing": False, "ac_mode": "selective", "ac_option": int(every)}
