"""nanotron's keys -> model, layout and job, of 0.4, or of its main branch if 0.4 has no such key."""

from __future__ import annotations

import re
from typing import Any

from fivefold.errors import UserError
from fivefold.interop.equivalence import divide_rates
from fivefold.interop.format import (
    NAME_MODEL,
    NO_MODEL,
    Document,
    Overrides,
    ParsedConfig,
    build_reading,
    resolve_world,
)
from fivefold.interop.keys import Values
from fivefold.interop.nanotron.keys import MODEL_FIELDS, OPTIMIZER, F, R
from fivefold.job import Recipe, get_recipe
from fivefold.layout.schedule.pipeline_schedule import DEFAULT_SCHEDULE
from fivefold.model.huggingface.read import from_config
from fivefold.model.spec import Model
from fivefold.results.reading import Reading

SIZES = ("parallelism.dp", "parallelism.tp", "parallelism.pp")

TENSOR_MODES = ("ALL_REDUCE", "REDUCE_SCATTER")

FAMILIES = ("llama", "qwen2")

NUMBERS = ("hidden_size", "intermediate_size", "num_attention_heads")

REQUIRED_KEYS = ("tokens.sequence_length", "tokens.micro_batch_size", "tokens.batch_accumulation_per_replica")


def to_job(config: ParsedConfig, overrides: Overrides) -> Reading:
    """Return model, layout and job."""
    document, values = config.document, config.values
    origin = values.origin
    model, unknown = (config.model, ()) if config.model else _read_model(document)
    missing = (*unknown, *(key for key in (*SIZES, *REQUIRED_KEYS) if values[key] is None))
    if missing or model is None:
        return build_reading(config, {}, model=model, ranks=None, missing=missing)
    fields = values.fields()
    dp, tp, pp = (values.to_int(key) for key in SIZES)
    cp = values.to_int("parallelism.context_parallel_size")
    world = dp * cp * tp * pp
    if document.ranks not in (None, world):
        raise UserError(
            f"{origin}: dp·cp·tp·pp={dp}·{cp}·{tp}·{pp}={world}, but its launcher starts {document.ranks} ranks; make "
            "both equal"
        )
    ranks = resolve_world(document, overrides, stated=world, where=f"dp·cp·tp·pp={dp}·{cp}·{tp}·{pp}")
    mbs = values.to_int("tokens.micro_batch_size")
    mode = str(values["parallelism.tp_mode"]).upper()
    if mode not in TENSOR_MODES:
        raise UserError(f"{origin}: tp_mode is {values['parallelism.tp_mode']!r}; it is {' or '.join(TENSOR_MODES)}")
    fields |= {
        "job.stack.name": "nanotron",
        "job.global_batch": dp * mbs * values.to_int("tokens.batch_accumulation_per_replica"),
        "layout.sp": tp == 1 or mode == "REDUCE_SCATTER",
        "layout.ac": _read_recomputation(values),
        "job.precision": _read_precision(values),
        "job.seed": values["general.seed"] or 0,
        "job.optimizer.betas": (values[f"{F}adam_beta1"], values[f"{F}adam_beta2"]),
        **_read_learning_rate(values),
        "job.optimizer.kind": _read_optimizer(values),
    }
    if pp == 1:
        fields["layout.schedule"] = DEFAULT_SCHEDULE
    if dp * cp == 1:
        fields["layout.zero"] = 0
    return build_reading(config, fields, model=model, ranks=ranks)


def _read_model(document: Document) -> tuple[Model | None, tuple[str, ...]]:
    """Return a Llama or Qwen2 from the config's sizes, which have Hugging Face's names; or what is missing."""
    config = document.values["model"].get("model_config") if isinstance(document.values.get("model"), dict) else None
    if not isinstance(config, dict) or not {"num_hidden_layers", "vocab_size"} <= config.keys():
        return None, (NO_MODEL,)
    family = next((name for name in FAMILIES if config.get(f"is_{name}_config")), "")
    other_family = next(
        (key for key, value in config.items() if re.fullmatch(r"is_\w+_config", key) and value is True), ""
    )
    if other_family and not family:
        return None, (f"the model, which by {other_family} is neither Llama nor Qwen2: {NAME_MODEL}",)
    if config.get("moe_config"):
        return None, (f"the model, whose moe_config is not read: {NAME_MODEL}",)
    if missing_sizes := [name for name in ("num_hidden_layers", *NUMBERS) if config.get(name) is None]:
        return None, (f"the model: its model_config has no {', '.join(missing_sizes)}; or add --model NAME",)
    hf_values = {name: config[name] for name in MODEL_FIELDS if config.get(name) is not None}
    hf_values.setdefault("rms_norm_eps", 1e-6)
    layers, width = hf_values["num_hidden_layers"], hf_values["hidden_size"]
    name = f"nanotron-{layers}x{width}"
    return from_config({"model_type": family or "llama", **hf_values}, name=name, source=document.origin), ()


def _read_optimizer(values: Values) -> str:
    """Return the optimizer; one that is not modelled is listed as not understood."""
    kind = {"adamw": "adamw", "sgd": "sgd"}.get(str(values[f"{F}name"]).lower())
    if kind is None:
        values.mark_not_modelled(f"{F}name", "is not among the optimizers here; read as adamw")
    return kind or "adamw"


def _read_recomputation(values: Values) -> str:
    granularity = str(values["parallelism.recompute_granularity"]).upper()
    if values["parallelism.recompute_layer"] or granularity == "FULL":
        return "full"
    return "selective" if granularity == "SELECTIVE" else "none"


def _read_precision(values: Values) -> Recipe:
    """Return the recipe for the config's dtype and its accumulation of gradients."""
    if values["model.dtype"] in ("float32", "double"):
        return get_recipe("fp32")
    if values["model.dtype"] not in ("bfloat16", "float16"):
        raise UserError(
            f"{values.origin}: model.dtype is {values['model.dtype']!r}; it must be bfloat16, float16 or float32"
        )
    in_bf16 = values["model.dtype"] == "bfloat16"
    base = get_recipe("bf16" if in_bf16 else "fp16")
    if values[f"{OPTIMIZER}accumulate_grad_in_fp32"]:
        return base if base.accumulated_bytes else base.replace(name="fp16-grad32", accumulated_bytes=4)
    return get_recipe("bf16-full") if in_bf16 else base.replace(name="fp16-pure", master_bytes=0)


def _read_learning_rate(values: Values) -> dict[str, Any]:
    """Return the fields of the learning-rate schedule: kind, floor and, for a linear decay, its steps."""
    peak, min_rate = values[f"{R}learning_rate"], values[f"{R}min_decay_lr"]
    style, decay = values[f"{R}lr_decay_style"], values[f"{R}lr_decay_steps"]
    floor = (
        divide_rates(min_rate, peak) if isinstance(min_rate, float) and isinstance(peak, float) and peak > 0 else 0.0
    )
    kind = "cosine" if style == "cosine" else "wsd" if style == "linear" and decay and floor < 1 else "constant"
    decay_fields = {"job.learning_rate.decay_steps": decay} if kind == "wsd" else {}
    if kind != "constant":
        _check_end_of_decay(values)
    return {"job.learning_rate.floor": floor, "job.learning_rate.kind": kind, **decay_fields}


def _check_end_of_decay(values: Values) -> None:
    """List a decay that does not end with the run as read as one that does."""
    steps, length = (values.optional(key) for key in ("tokens.train_steps", f"{R}lr_decay_steps"))
    begin = values.optional(f"{R}lr_decay_starting_step") or values.optional(f"{R}lr_warmup_steps") or 0
    if steps and length and begin + length != steps:
        key = next(name for name in ("lr_decay_starting_step", "lr_decay_steps") if values.is_set(f"{R}{name}"))
        values.approximate(f"{R}{key}", f"the decay ends at step {begin + length} of {steps}; run to end with the run")
