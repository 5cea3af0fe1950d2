"""torchtune's keys -> model, layout and job.

A recipe of one device trains on one GPU. The others shard over dp = ranks / tp by FSDP2; global batch = batch_size
· gradient_accumulation_steps · dp, of DPO in pairs. With ``dtype: bf16`` weights, gradients and PyTorch's moments are
in bf16, without a master copy.
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any

from fivefold.errors import UserError
from fivefold.interop.format import (
    LENGTH_MISSING,
    NAME_MODEL,
    NO_MODEL,
    RANKS_MISSING,
    Document,
    Overrides,
    ParsedConfig,
    build_reading,
    compute_replicas,
    resolve_world,
)
from fivefold.interop.keys import Values, to_list
from fivefold.interop.torchtune.builders import BUILDERS, MAIN_BRANCH_NAMES, METHODS, build_model, find_model_name
from fivefold.interop.torchtune.keys import ADAPTER_ARGUMENTS
from fivefold.interop.torchtune.parse import RECIPES, TuneRecipe
from fivefold.job import Recipe, get_recipe
from fivefold.model.spec import Model
from fivefold.results.reading import Reading
from fivefold.spelling import join_names

ATTENTION_TARGETS = {"q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "output_proj": "o_proj"}
MLP_TARGETS = ("gate_proj", "up_proj", "down_proj")
SEPARATE_UNITS = {"tok_embeddings", "output"}
RANK, ALPHA = 8, 16  # defaults of all builders of adapters

# kind of update, and bytes of the moments of a weight in 16 bits
OPTIMIZERS: dict[str, tuple[str, tuple[int, int] | None]] = {
    "torch.optim.AdamW": ("adamw", (2, 2)),
    "torch.optim.Adam": ("adamw", (2, 2)),
    "torch.optim.SGD": ("sgd", None),
    "bitsandbytes.optim.AdamW": ("adamw", (4, 4)),
    "bitsandbytes.optim.PagedAdamW": ("adamw", (4, 4)),
    "bitsandbytes.optim.AdamW8bit": ("adamw8bit", None),
    "bitsandbytes.optim.PagedAdamW8bit": ("adamw8bit", None),
    "torchao.optim.AdamW8bit": ("adamw8bit", None),
    "torchao.prototype.low_bit_optim.AdamW8bit": ("adamw8bit", None),
    "torchao.optim.AdamW4bit": ("adamw4bit", None),
    "torchao.prototype.low_bit_optim.AdamW4bit": ("adamw4bit", None),
}

TENSOR_PARALLEL_PLAN = "torchtune.models.llama3.base_llama_tp_plan"
COSINE = "get_cosine_schedule_with_warmup"
CHUNKED_LOSSES = ("CEWithChunkedOutputLoss", "LinearCrossEntropyLoss")


def to_job(config: ParsedConfig, overrides: Overrides) -> Reading:
    """Return model, layout and job."""
    document, values = config.document, config.values
    recipe = RECIPES[str(values["recipe"])]
    model, missing = _read_model(values, config.model)
    ranks = _resolve_ranks(values, recipe, document, overrides)
    if values["tokenizer.max_seq_len"] is None and overrides.sequence is not None:
        values.given["tokenizer.max_seq_len"] = overrides.sequence
    if values["tokenizer.max_seq_len"] is None:
        missing += (LENGTH_MISSING.format("tokenizer.max_seq_len"),)
    if values["batch_size"] is None:
        missing += ("batch_size",)
    if model is None or ranks is None or missing:
        missing += () if ranks else (RANKS_MISSING,)
        return build_reading(config, {}, model=model, ranks=None, missing=missing)
    fields = values.fields() | {"job.stack.name": "torchtune", "job.sequence": values.to_int("tokenizer.max_seq_len")}
    fields |= _read_layout(values, recipe, ranks) | _read_steps(values)
    fields |= _read_objective(values, fields, recipe) | _read_adapter(values, recipe)
    fields |= _read_optimizer(values, recipe, fields.get("job.steps"))
    fields |= _read_stack(values, model, recipe) | _read_offload(values)
    if values["seed"] is not None:
        fields["job.seed"] = values.to_int("seed", least=0)
    return build_reading(config, fields, model=model, ranks=ranks)


def _read_model(values: Values, override: Model | None) -> tuple[Model | None, tuple[str, ...]]:
    """Return the model that the user or the builder names, or what is missing."""
    if override is not None:
        return override, ()
    component = values["model._component_"]
    if not isinstance(component, str):
        return None, (NO_MODEL,)
    if model := build_model(component):
        return model, ()
    if "vision" in component or ".llama4." in component:
        return None, (f"the model {find_model_name(component)!r}, of images and text, which is not read: {NAME_MODEL}",)
    close = get_close_matches(find_model_name(component), (*BUILDERS, *MAIN_BRANCH_NAMES), n=3)
    similar = f" (similar: {join_names(close, 'and')})" if close else ""
    return None, (f"the model: torchtune's builder {component!r} is not known{similar}: {NAME_MODEL}",)


def _resolve_ranks(values: Values, recipe: TuneRecipe, document: Document, overrides: Overrides) -> int | None:
    """Return the number of ranks; raise ``UserError`` for several under a recipe of one device."""
    ranks = resolve_world(document, overrides)
    if recipe.is_distributed:
        return ranks
    if ranks not in (None, 1) and not overrides.searches:
        raise UserError(
            f"{values.origin}: the recipe {recipe} trains on one GPU, not on {ranks}; use one, or add "
            f"recipe={recipe.name.replace('single_device', 'distributed')} after the file"
        )
    return 1


def _read_layout(values: Values, recipe: TuneRecipe, ranks: int) -> dict[str, Any]:
    """Return the degrees, the sharding, the batch and the recomputation."""
    tp = values.to_int("tensor_parallel_dim")
    if tp > 1 and not recipe.reads_tensor_parallel:
        values.mark_not_modelled("tensor_parallel_dim", f"is not read by {recipe}")
        tp = 1
    dp = compute_replicas(ranks, tp, of="tp", origin=values.origin)
    assert dp is not None
    fields: dict[str, Any] = {"layout.dp": dp, "layout.tp": tp, "layout.zero": 3 if dp > 1 else 0}
    if tp > 1:
        _check_tensor_parallel_plan(values)
        fields["layout.sp"] = False
    elif values["tensor_parallel_plan._component_"] not in (None, TENSOR_PARALLEL_PLAN):
        values.approximate("tensor_parallel_plan._component_", "without tensor parallelism, which has no effect")
    mbs = values.to_int("batch_size") * (2 if recipe.has_pairs else 1)
    accumulated = values.to_int("gradient_accumulation_steps")
    return fields | {
        "layout.mbs": mbs,
        "job.global_batch": mbs * accumulated * dp,
        "layout.ac": _read_recomputation(values, recipe),
    }


def _check_tensor_parallel_plan(values: Values) -> None:
    """Name what of tensor parallelism is counted otherwise."""
    plan = values["tensor_parallel_plan._component_"]
    if plan is None:
        raise UserError(
            f"{values.origin}: tensor_parallel_dim without tensor_parallel_plan, with which torchtune fails"
        )
    if plan != TENSOR_PARALLEL_PLAN:
        values.mark_not_modelled("tensor_parallel_plan._component_", "another plan; counted as base_llama_tp_plan")
    values.approximate("tensor_parallel_dim", "gathers the logits before the loss; counted as cut by vocabulary")


def _read_recomputation(values: Values, recipe: TuneRecipe) -> str:
    """Return which blocks are recomputed; ``ac_mode`` acts in one recipe, and there without the other key."""
    enabled, mode, option = (values[key] for key in ("enable_activation_checkpointing", "ac_mode", "ac_option"))
    if mode in (None, "none") or not recipe.reads_tensor_parallel:
        if mode not in (None, "none"):
            values.approximate("ac_mode", f"is not read by {recipe}")
        return "full" if enabled is True and (mode is None or not recipe.reads_tensor_parallel) else "none"
    if enabled is True:
        values.approximate("enable_activation_checkpointing", "next to ac_mode nothing is recomputed")
        return "none"
    if mode == "full":
        return "full"
    if mode == "selective" and isinstance(option, int) and not isinstance(option, bool) and option > 0:
        return f"full/{option}" if option > 1 else "full"
    key = "ac_option" if mode == "selective" else "ac_mode"
    values.mark_not_modelled(key, f"{option or mode}: operations that are kept by name; counted as without")
    return "none"


def _read_steps(values: Values) -> dict[str, Any]:
    steps = values.optional("max_steps_per_epoch")
    epochs = values.to_int("epochs")
    if steps is None:
        if epochs > 1:
            values.approximate("epochs", "the steps of an epoch follow from the data; counted as one run")
        return {}
    return {"job.steps": steps * epochs}


def _read_objective(values: Values, fields: dict[str, Any], recipe: TuneRecipe) -> dict[str, Any]:
    """Return the objective: of samples, of text, or of pairs."""
    name = str(values["loss._component_"]).rpartition(".")[2]
    if recipe.has_pairs:
        if name not in ("DPOLoss", "None"):
            values.mark_not_modelled("loss._component_", "another loss of pairs; counted as DPO's, with a reference")
        beta = values.number("loss.beta")
        return {"job.objective": "dpo", **({} if beta is None else {"job.dpo_beta": beta})}
    if values["loss.beta"] is not None:
        values.mark_not_modelled("loss.beta", f"is not a setting of a loss of {recipe}")
    if not values["dataset.packed"]:
        values.approximate(
            "dataset.packed", "samples are padded to the longest of a micro-batch; counted as of max_seq_len each"
        )
    datasets = values["dataset"] if isinstance(values["dataset"], list) else [values["dataset._component_"]]
    is_text = all("text_completion" in str(dataset) or "wikitext" in str(dataset) for dataset in datasets)
    return {"job.objective": "pretrain" if is_text else "sft", "job.documents": "separate"}


def _read_adapter(values: Values, recipe: TuneRecipe) -> dict[str, Any]:
    """Return the adapter of a recipe of adapters; mark arguments that the builder of all weights has not."""
    builder = str(values["model._component_"]).rpartition(".")[2]
    if not recipe.trains_adapters:
        for key in ADAPTER_ARGUMENTS:
            if values.is_set(key):
                values.mark_not_modelled(key, f"adapters, which {recipe} does not train")
        if builder.startswith(METHODS):
            values.mark_not_modelled("model._component_", f"adapters, which {recipe} does not train")
        return {}
    modules = [str(module) for module in to_list(values["model.lora_attn_modules"])]
    unknown = [module for module in modules if module not in ATTENTION_TARGETS]
    if unknown:
        values.mark_not_modelled("model.lora_attn_modules", f"{', '.join(unknown)}: no layer of attention here")
    targets = tuple(ATTENTION_TARGETS[module] for module in modules if module in ATTENTION_TARGETS)
    targets += MLP_TARGETS if values["model.apply_lora_to_mlp"] is True else ()
    if not targets:
        raise UserError(f"{values.origin}: {recipe} without model.lora_attn_modules; name layers, such as [q_proj]")
    quantized = builder.startswith("qlora_") or values["model.quantize_base"] is True
    alpha, dropout = values.number("model.lora_alpha"), values.number("model.lora_dropout")
    return {
        "job.adapter": {
            "kind": "dora" if values["model.use_dora"] is True else "lora",
            "rank": values.optional("model.lora_rank") or RANK,
            "alpha": ALPHA if alpha is None else alpha,
            "dropout": dropout or 0.0,
            "targets": targets,
            "base": "nf4" if quantized else None,
        }
    }


def _read_optimizer(values: Values, recipe: TuneRecipe, steps: int | None) -> dict[str, Any]:
    """Return the optimizer, the precision of its states, clipping and the schedule of the learning rate."""
    name = str(values["optimizer._component_"])
    if name not in OPTIMIZERS:
        values.mark_not_modelled("optimizer._component_", "is not among the optimizers here; read as torch.optim.AdamW")
    kind, moments_bytes = OPTIMIZERS.get(name, ("adamw", (2, 2)))
    if "Paged" in name:
        values.approximate(
            "optimizer._component_", "moves its states to the host where memory ends; counted on the device"
        )
    clip = values["clip_grad_norm"]
    if clip is not None and recipe.has_pairs:
        values.approximate("clip_grad_norm", f"is not read by {recipe}")
        clip = None
    elif str(clip) == "inf":
        values.approximate("clip_grad_norm", "the norm is logged and nothing is clipped; counted as clipping")
        clip = 1.0
    elif clip is not None:
        clip = values.number("clip_grad_norm")
    fields = {
        "job.optimizer.kind": kind,
        "job.optimizer.betas": values.pair("optimizer.betas") or (0.9, 0.999),
        "job.optimizer.clip": clip or 0.0,
        "job.precision": _read_precision(values, moments_bytes),
    }
    return fields | _read_rate(values, steps)


def _read_precision(values: Values, moments_bytes: tuple[int, int] | None) -> Recipe:
    """Return the recipe: all in one dtype, without a master copy; moments may be wider."""
    if values["dtype"] == "fp32":
        return get_recipe("fp32")
    if values["dtype"] != "bf16":
        raise UserError(f"{values.origin}: dtype is {values['dtype']!r}; torchtune's recipes train in bf16 or fp32")
    return get_recipe("bf16-full" if moments_bytes == (2, 2) else "bf16-pure")


def _read_rate(values: Values, steps: int | None) -> dict[str, Any]:
    """Return the schedule of the learning rate: a cosine to zero after a warm-up, or constant."""
    scheduler = values["lr_scheduler._component_"]
    warmup = values.to_int("lr_scheduler.num_warmup_steps", least=0)
    if scheduler is None:
        if warmup:
            values.approximate("lr_scheduler.num_warmup_steps", "of no scheduler")
        return {"job.learning_rate.kind": "constant", "job.learning_rate.floor": 1.0}
    if not str(scheduler).endswith(COSINE):
        values.approximate("lr_scheduler._component_", "another schedule of the learning rate; read as a cosine")
    cycles = values.number("lr_scheduler.num_cycles")
    if cycles not in (0, 0.5):
        values.approximate("lr_scheduler.num_cycles", "a cosine with other cycles; read as half of one")
    return {
        "job.learning_rate.kind": "cosine" if cycles else "constant",
        "job.learning_rate.floor": 0.0 if cycles else 1.0,
        "job.learning_rate.warmup_steps": min(warmup, steps or 1000),
    }


def _read_stack(values: Values, model: Model, recipe: TuneRecipe) -> dict[str, Any]:
    """Return kernels, loss and units.

    A loss in chunks keeps all logits in 16 bits and their probabilities in fp32, until torch.compile fuses each chunk.
    """
    compiled = values["compile"] is True
    name = str(values["loss._component_"]).rpartition(".")[2]
    loss = "low_precision" if recipe.has_pairs else "plain"  # pairs: log_softmax in the dtype of the logits
    if not recipe.has_pairs and name in CHUNKED_LOSSES:
        loss = "fused" if compiled else "upcast"
    elif not recipe.has_pairs and name not in ("None", "CrossEntropyLoss"):
        values.mark_not_modelled("loss._component_", "another loss; counted as PyTorch's cross entropy")
    fields: dict[str, Any] = {
        "job.stack.compile": compiled,
        "job.stack.kernels": "fused" if compiled else "plain",
        "job.stack.loss": loss,
    }
    if recipe.is_distributed:
        fields |= _read_units(values, model)
    return fields


def _read_units(values: Values, model: Model) -> dict[str, Any]:
    """Return which units FSDP2 gathers again; embedding and head belong to the root unless they are named."""
    names = {str(name).rpartition(".")[2] for name in to_list(values["custom_sharded_layers"])}
    if others := names - SEPARATE_UNITS:
        values.mark_not_modelled(
            "custom_sharded_layers", f"{', '.join(sorted(others))} are units; only blocks are counted"
        )
    wanted = {"tok_embeddings"} if model.tied_embeddings else SEPARATE_UNITS
    fields: dict[str, Any] = {}
    if not wanted <= names:
        if names & SEPARATE_UNITS:
            values.approximate("custom_sharded_layers", "one of embedding and head as a unit; counted with the root")
        fields["job.stack.backward_all_gather"] = "root"
    if values["fsdp_reshard_after_forward"] is False:
        fields["job.stack.reshard"] = "backward"
    return fields


def _read_offload(values: Values) -> dict[str, Any]:
    """Return what is kept in host memory."""
    offloads_activations = values["enable_activation_offloading"] is True
    if offloads_activations and values["enable_activation_checkpointing"] is not True:
        raise UserError(
            f"{values.origin}: enable_activation_offloading without enable_activation_checkpointing is an "
            "error in torchtune; turn both on"
        )
    offloaded: tuple[str, ...] = ("activations",) if offloads_activations else ()
    if values["fsdp_cpu_offload"] is True:
        if RECIPES[str(values["recipe"])].is_distributed:
            offloaded += ("parameters",)
        else:
            values.approximate("fsdp_cpu_offload", f"is not read by {values['recipe']}")
    return {"job.offload": offloaded}
