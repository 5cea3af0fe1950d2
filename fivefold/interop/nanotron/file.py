"""nanotron's YAML, read and written: the layout of 0.4, or that of its main branch where 0.4 lacks a key."""

from __future__ import annotations

import re
from typing import Any

from fivefold.interop.equivalence import divide_rates
from fivefold.interop.format import Asked, Document, Plan, Written, reading, world
from fivefold.interop.keys import Values, flat, written
from fivefold.interop.nanotron.keys import FACTORY, MAIN, MODEL, OF_MODEL, OPTIMIZER, TABLE, F, R
from fivefold.interop.render import yaml_file
from fivefold.job import Recipe, recipe
from fivefold.model.huggingface.export import to_config
from fivefold.model.huggingface.families import from_config
from fivefold.model.spec import Model
from fivefold.record import Mistake
from fivefold.results.reading import Reading

VERSION = "0.4"
TABLES = {"parallelism", "tokens", "optimizer", "model", "general"}
SIZES = ("parallelism.dp", "parallelism.tp", "parallelism.pp")
FAMILIES = ("llama", "qwen2")
NUMBERS = ("hidden_size", "intermediate_size", "num_attention_heads")
NEEDED = ("tokens.sequence_length", "tokens.micro_batch_size", "tokens.batch_accumulation_per_replica")


def recognises(document: Document) -> bool:
    """Whether a YAML has nanotron's tables."""
    if document.kind != "yaml" or "parallelism" not in document.values:
        return False
    model = document.values.get("model")
    named = isinstance(model, dict) and "model_config" in model
    return named or len(document.values.keys() & TABLES) >= 4


def read(document: Document, asked: Asked) -> Reading:
    """A YAML in our nouns."""
    origin = document.origin
    given = {_now(key): value for key, value in flat(document.values, origin=origin).items()}
    values = Values(TABLE, given, origin=origin, software=f"nanotron {VERSION}")
    model, unknown = (asked.model, ()) if asked.model else _model(document)
    missing = (*unknown, *(key for key in (*SIZES, *NEEDED) if values[key] is None))
    if missing or model is None:
        return reading(("nanotron", VERSION), values, {}, document=document, model=model, ranks=None, missing=missing)
    fields = values.fields()
    dp, tp, pp = (values.whole(key) for key in SIZES)
    cp = values.whole("parallelism.context_parallel_size")
    asked_for = world(document, asked)
    if asked_for not in (None, dp * tp * pp * cp):
        raise Mistake(f"{origin}: dp·cp·tp·pp={dp}·{cp}·{tp}·{pp}={dp * cp * tp * pp}, but there are {asked_for} ranks")
    mbs = values.whole("tokens.micro_batch_size")
    fields |= {
        "job.stack.name": "nanotron",
        "job.global_batch": dp * mbs * values.whole("tokens.batch_accumulation_per_replica"),
        "layout.sp": tp == 1 or str(values["parallelism.tp_mode"]).upper() == "REDUCE_SCATTER",
        "layout.ac": _recomputed(values), "job.precision": _precision(values), "job.seed": values["general.seed"] or 0,
        "job.optimizer.betas": (values[f"{F}adam_beta1"], values[f"{F}adam_beta2"]), **_rate(values),
        "job.optimizer.kind": "sgd" if str(values[f"{F}name"]).lower() == "sgd" else "adamw",
    }  # fmt: skip
    if pp == 1:
        fields["layout.schedule"] = "1f1b"
    if dp * cp == 1:
        fields["layout.zero"] = 0
    return reading(("nanotron", VERSION), values, fields, document=document, model=model, ranks=dp * tp * pp * cp)


def _now(key: str) -> str:
    """A key of 0.4 as the main branch has it."""
    name = key.removeprefix(OPTIMIZER)
    return f"{F}{name}" if key.startswith(OPTIMIZER) and name in FACTORY else key


def _model(document: Document) -> tuple[Model | None, tuple[str, ...]]:
    """A Llama or Qwen2 of the config's numbers, which are those of a Hugging Face config; or what is missing."""
    config = document.values["model"].get("model_config") if isinstance(document.values.get("model"), dict) else None
    if not isinstance(config, dict) or not {"num_hidden_layers", "vocab_size"} <= config.keys():
        return None, ("the model: say --model NAME",)
    family = next((name for name in FAMILIES if config.get(f"is_{name}_config")), "")
    other = next((key for key, value in config.items() if re.fullmatch(r"is_\w+_config", key) and value is True), "")
    if other and not family:
        return None, (f"the model, which by {other} is neither Llama nor Qwen2: say --model NAME",)
    if config.get("moe_config"):
        return None, ("the model, whose moe_config is not read: say --model NAME",)
    if lacking := [name for name in NUMBERS if config.get(name) is None]:
        return None, (f"the model: its model_config has no {', '.join(lacking)}; or say --model NAME",)
    said = {name: config[name] for name in OF_MODEL if config.get(name) is not None}
    said.setdefault("rms_norm_eps", 1e-6)
    layers, width = said["num_hidden_layers"], said["hidden_size"]
    name = f"nanotron-{layers}x{width}"
    return from_config({"model_type": family or "llama", **said}, name=name, source=document.origin), ()


def _recomputed(values: Values) -> str:
    granularity = str(values["parallelism.recompute_granularity"]).upper()
    if values["parallelism.recompute_layer"] or granularity == "FULL":
        return "full"
    return "selective" if granularity == "SELECTIVE" else "none"


def _precision(values: Values) -> Recipe:
    if values["model.dtype"] in ("float32", "double"):
        return recipe("fp32")
    if values["model.dtype"] not in ("bfloat16", "float16"):
        raise Mistake(f"{values.origin}: model.dtype is {values['model.dtype']!r}; it is bfloat16, float16 or float32")
    base = recipe("bf16" if values["model.dtype"] == "bfloat16" else "fp16")
    if values[f"{OPTIMIZER}accumulate_grad_in_fp32"]:
        return base if base.accumulated_bytes else base.replace(name="fp16-grad32", accumulated_bytes=4)
    return recipe("bf16-pure") if base.compute == "bf16" else base.replace(name="fp16-pure", master_bytes=0)


def _rate(values: Values) -> dict[str, Any]:
    peak, least = values[f"{R}learning_rate"], values[f"{R}min_decay_lr"]
    style, decay = values[f"{R}lr_decay_style"], values[f"{R}lr_decay_steps"]
    floor = divide_rates(least, peak) if isinstance(least, float) and isinstance(peak, float) and peak > 0 else 0.0
    kind = "cosine" if style == "cosine" else "wsd" if style == "linear" and decay and floor < 1 else "constant"
    more = {"job.learning_rate.decay_steps": decay} if kind == "wsd" else {}
    return {"job.learning_rate.floor": floor, "job.learning_rate.kind": kind, **more}


def write(plan: Plan) -> Written:
    """The YAML of a plan; ``Mistake`` for what nanotron cannot run."""
    model, layout, job = plan.model, plan.layout, plan.job
    if model.moe is not None or layout.ep > 1:
        raise Mistake(f"model {model.name!r}: experts are not written for nanotron; take a dense model")
    config = to_config(model)
    if config["model_type"] not in ("llama", "qwen2"):
        raise Mistake(
            f"model {model.name!r}: nanotron has Llama and Qwen2, not {config['model_type']}; take one of these"
        )
    if layout.ac not in ("none", "full"):
        raise Mistake(f"ac={layout.ac}: nanotron recomputes whole layers; take ac=full or ac=none")
    narrow = {"bf16": ("bfloat16", True), "bf16-pure": ("bfloat16", False), "fp32": ("float32", False)}
    if job.precision.name not in narrow or job.precision != recipe(job.precision.name):
        raise Mistake(f"precision {job.precision.name}: nanotron has {', '.join(narrow)}; take one of them")
    if job.optimizer.kind != "adamw":
        raise Mistake(f"optimizer {job.optimizer.kind}: is written for nanotron as adamw alone; take that")
    dtype, sums = narrow[job.precision.name]
    rate = job.learning_rate
    decay = (rate.decay_steps or job.steps // 5) if rate.kind == "wsd" else job.steps - rate.warmup_steps
    values = written(TABLE, {"model": model, "layout": layout, "job": job}) | {
        **{f"{MODEL}{name}": config.get(name) for name in OF_MODEL if not isinstance(config.get(name), dict)},
        "model.dtype": dtype, "parallelism.tp_mode": "REDUCE_SCATTER" if layout.sp else "ALL_REDUCE",
        "parallelism.recompute_layer": layout.ac == "full", "general.seed": job.seed,
        "tokens.batch_accumulation_per_replica": layout.micro_batches(job), f"{OPTIMIZER}accumulate_grad_in_fp32": sums,
        f"{F}name": "adamW", f"{F}adam_beta1": job.optimizer.betas[0], f"{F}adam_beta2": job.optimizer.betas[1],
        f"{F}torch_adam_is_fused": True, f"{R}lr_decay_style": "cosine" if rate.kind == "cosine" else "linear",
        f"{R}lr_decay_steps": max(1, decay),
        f"{R}lr_decay_starting_step": job.steps - decay if rate.kind == "wsd" else None,
        f"{R}min_decay_lr": float(f"{rate.peak * (1.0 if rate.kind == 'constant' else rate.floor):.12g}"),
    }  # fmt: skip
    return _file(plan, values, family=str(config["model_type"]))


def _file(plan: Plan, values: dict[str, Any], *, family: str) -> Written:
    """The file, as 0.4 has it unless a key is the main branch's."""
    usual = {key: TABLE[key].default for key in MAIN} | {
        f"{MODEL}rope_theta": 10_000.0,
        f"{MODEL}attention_bias": False,
    }
    main = family == "qwen2" or any(values[key] not in (None, usual[key]) for key in MAIN)
    if not main:
        values = {
            key.replace(F, OPTIMIZER) if key.startswith(F) else key: value
            for key, value in values.items()
            if key not in MAIN
        }
        values.pop(f"{OPTIMIZER}name", None)
    table = {**TABLE, **{f"{OPTIMIZER}{name}": TABLE[f"{F}{name}"] for name in FACTORY}}
    version = "nanotron's main branch" if main else f"nanotron {VERSION}"
    nodes, each = plan.hosts
    extra = {
        f"{MODEL}is_{family}_config": (True, "its family"), "model.init_method.std": (0.02, "of random weights"),
        "general.project": ("fivefold", ""), "general.run": (plan.model.name, ""),
        "tokenizer.tokenizer_name_or_path": ("gpt2", "the tokenizer: put yours"),
        "checkpoints.checkpoints_path": ("checkpoints", ""), "checkpoints.checkpoint_interval": (1000, "steps"),
        f"{R}lr_warmup_style": ("linear", ""),
        "data.dataset.hf_dataset_or_datasets": ("stas/openwebtext-10k", "what is read: put yours"),
        "data.dataset.hf_dataset_splits": ("train", ""), "data.dataset.text_column_name": ("text", ""),
        "data.seed": (plan.job.seed, ""), "data.num_loading_workers": (1, ""),
    }  # fmt: skip
    about = (
        f"{version}: {plan.model.name}, {plan.layout}",
        f"Start: CUDA_DEVICE_MAX_CONNECTIONS=1 torchrun --nnodes {nodes} --nproc_per_node {each} run_train.py "
        "--config-file nanotron.yaml",
    )
    text = yaml_file(values, table, about=about, extra=extra)
    return Written({"nanotron.yaml": text}, (f"is for {version}: {VERSION} lacks keys that it needs",) if main else ())
