"""Configs that Megatron-Bridge (``run_config.yaml``) and NeMo 2 save, read; and one of Bridge, written.

Both are fields by the names of Megatron-Core, in sections with a ``_target_``; here they become Megatron's arguments.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from fivefold.interop.format import Asked, Document, Plan, Written
from fivefold.interop.keys import Table
from fivefold.interop.megatron.args import arguments, read_named
from fivefold.interop.megatron.bridge_keys import (
    DEFAULTS,
    MORE,
    NAMES,
    NOT,
    OF_MODEL,
    PLACES,
    RECIPE,
    SECTIONS,
)
from fivefold.interop.megatron.flags import named
from fivefold.interop.megatron.keys import TABLE
from fivefold.interop.render import commented, literal
from fivefold.model import catalog
from fivefold.model.shape import MTP
from fivefold.model.spec import Model
from fivefold.results.reading import Reading, Said

BRIDGE, NEMO = "0.3.1", "2.x"


def _over(table: Table, defaults: Mapping[str, Any]) -> Table:
    """The table with other defaults."""
    return {name: key._replace(default=defaults.get(name, key.default)) for name, key in table.items()}


BOTH: Table = {**_over(TABLE, DEFAULTS), **MORE}
SIZED = re.compile(
    r"(Llama3|Llama31|Llama32|Llama2|Qwen3|Qwen2|Mixtral|Mistral|Gemma2)(?:Model|MoE)?(?:Provider|Config)(\d[\dxA]*B\w*)"
)
FAMILIES = {"Llama31": "llama3", "Llama32": "llama3.2"}


def recognises(document: Document) -> bool:
    """Whether a YAML is a saved ConfigContainer, an override of one, or a saved NeMo 2 recipe."""
    if document.kind not in ("yaml", "json"):
        return False
    said, values = str(document.values.get("_target_", "")), _sections(document.values)
    sections = values.keys() & {"model", "train", "ddp", "optimizer", "trainer", "optim", "data", "dataset"}
    return said.startswith(("megatron.bridge", "nemo.")) or (
        isinstance(values.get("model"), dict) and len(sections) >= 3
    )


def _sections(values: Mapping[str, Any]) -> dict[str, Any]:
    """Sections by their names of 0.3.1, which were ``model_config`` and the like."""
    return {str(key).removesuffix("_config"): value for key, value in values.items()}


def read(document: Document, asked: Asked) -> Reading:
    """A saved config in our nouns."""
    sections, whole = _sections(document.values), str(document.values.get("_target_", ""))
    nemo = "trainer" in sections or whole.startswith("nemo")
    found: dict[str, Any] = {}
    targets: list[str] = []
    tokenizer = sections.get("tokenizer")
    if isinstance(tokenizer, dict):
        found |= {key: tokenizer.get(key) for key in ("tokenizer_model", "tokenizer_type", "vocab_size")}
    for section in SECTIONS:
        _gather(sections.get(section), found, targets, section)
    given = _arguments(found) | {name: "…" for name in sections if name not in (*SECTIONS, "_target_")}
    model = asked.model or (_published(given, found) if "num_layers" in given else _sized(targets))
    if model and not asked.model:
        given = {key: value for key, value in given.items() if key not in OF_MODEL}
    trainer = sections.get("trainer")
    if (
        isinstance(trainer, dict)
        and isinstance(trainer.get("devices"), int)
        and isinstance(trainer.get("num_nodes"), int)
    ):
        document = document._replace(ranks=trainer["devices"] * trainer["num_nodes"])
    form = ("nemo", NEMO, "nemo") if nemo else ("megatron-bridge", BRIDGE, "megatron-bridge")
    if whole or nemo:
        return read_named(given, document, asked._replace(model=model), table=BOTH, form=form)
    why = f"what the recipe under these overrides says is not in the file; read as most of {BRIDGE}'s have it"
    document = document._replace(assumed=(*document.assumed, Said(key="(recipe)", value="", means=why)))
    return read_named(given, document, asked._replace(model=model), table=_over(BOTH, RECIPE), form=form)


def _gather(value: Any, found: dict[str, Any], targets: list[str], name: str) -> None:
    """Fields by name, whatever section they are in; functions and types by the name of their target."""
    if isinstance(value, str) and name in ("mixed_precision", "plugins"):
        found["precision"] = value
    if not isinstance(value, dict):
        return
    target = str(value.get("_target_", ""))
    targets.append(target)
    if name == "peft":
        found["peft"] = target.rpartition(".")[2] or "set"
        return
    for key, each in value.items():
        if isinstance(each, dict) and ("_partial_" in each or set(each) <= {"_target_", "_call_", "_args_", "_name_"}):
            found[key] = str(each.get("_target_", "")).removeprefix("torch.")
        elif isinstance(each, dict):
            _gather(each, found, targets, key)
        elif key not in ("_target_", "_call_", "_partial_") and (each is not None or key not in found):
            found[key] = each


def _arguments(found: dict[str, Any]) -> dict[str, Any]:
    """Fields as Megatron's arguments."""
    given: dict[str, Any] = {}
    for key, value in found.items():
        if value is None:
            continue
        if key in NOT and isinstance(value, bool):
            given[NOT[key]] = not value
        elif key == "activation_func":
            given["squared_relu"] = "squared_relu" in str(value)
            if not str(value).endswith(ACTIVATIONS):
                given[key] = value
        elif key == "transformer_layer_spec" and str(value).startswith("megatron."):
            given[key] = False
        elif key == "overlap_p2p_comm":
            given["no_overlap_p2p_communication"] = not value
        else:
            given[NAMES.get(key, key)] = value
    if not given.get("optimizer_cpu_offload") and "optimizer_offload_fraction" in given:
        given["optimizer_offload_fraction"] = 1.0
    if "num_query_groups" in given:
        given["group_query_attention"] = True
    if "num_experts" in given and "moe_ffn_hidden_size" not in given:
        given["moe_ffn_hidden_size"] = given.get("ffn_hidden_size")
    if "bf16" in str(given.get("precision")):
        given["bf16"] = True
    for name in ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"):
        if name in given:
            given[name] = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}.get(str(given[name]), "fp32")
    return {key: value for key, value in named(given).items() if value is not None}


ACTIVATIONS = ("silu", "swish", "gelu", "fast_gelu", "squared_relu", "openai_gelu")


def _published(given: dict[str, Any], found: Mapping[str, Any]) -> Model | None:
    """The catalog's model that ``hf_model_id`` names, which has windows and sinks too, if its sizes are those given."""
    said = str(found.get("hf_model_id", "")).lower()
    for key, entry in catalog.CATALOG.items():
        if said and entry.source.lower() == said:
            model = catalog.named(key)
            sizes = (model.layers, model.width, model.moe.experts if model.moe else None)
            if sizes == (given["num_layers"], given.get("hidden_size"), given.get("num_experts")):
                depth = given.get("mtp_num_layers")
                return model.replace(mtp=MTP(depth=depth) if depth else None)
    return None


def _sized(targets: list[str]) -> Model | None:
    """The catalog's model that a class is named after: ``Llama3Config8B``."""
    for target in targets:
        if match := SIZED.search(target.rpartition(".")[2]):
            family = FAMILIES.get(match[1], match[1].lower())
            name = f"{family}-{match[2].lower().replace('_', '-')}"
            if name in catalog.CATALOG:
                return catalog.named(name)
    return None


SKIPPED = (
    "tokenizer_type", "swiglu", "squared_relu", "transformer_impl", "no_overlap_p2p_communication",
    "max_position_embeddings", "no_async_tensor_model_parallel_allreduce", "moe_enable_deepep",
)  # fmt: skip


def write(plan: Plan) -> Written:
    """A ``run_config.yaml`` of Megatron-Bridge."""
    model, given = plan.model, arguments(plan, full=True)
    backward = {theirs: ours for ours, theirs in NAMES.items() if theirs not in ("seq_length", "train_iters")}
    contrary = {theirs: ours for ours, theirs in NOT.items()}
    sections: dict[str, list[str]] = {"model": []}
    grouped = given.pop("group_query_attention", False)
    for name, value in given.items():
        if name in SKIPPED or (name == "num_query_groups" and not grouped):
            continue
        field, said = (contrary[name], not value) if name in contrary else (backward.get(name, name), value)
        section = next((place for place, names in PLACES.items() if field in names), "model")
        means = TABLE[name].means if name in TABLE else ""
        sections.setdefault(section, []).append(commented(f"  {field}: {literal(said)}", means))
    gated, wide = model.mlp == "gated", not (given.get("bf16") or given.get("fp16"))
    functions = {"silu": "torch.nn.functional.silu", "relu2": "megatron.core.activations.squared_relu"}
    kind = functions.get(model.activation, "torch.nn.functional.gelu")
    dtype = "torch.float32" if wide else "torch.float16" if given.get("fp16") else "torch.bfloat16"
    sections["model"] += [f"  gated_linear_unit: {literal(gated)}", *_function("activation_func", kind)]
    sections["model"] += [*_function("params_dtype", dtype), *_function("pipeline_dtype", dtype)]
    sections["model"] += [f"  {name}: true" for name in ("bf16", "fp16") if given.get(name)]
    sections["optimizer"] += _function("params_dtype", dtype)
    sections["ddp"].append(f"  use_distributed_optimizer: {literal(bool(given['use_distributed_optimizer']))}")
    return Written({"run_config.yaml": _file(plan, sections)})


def _function(name: str, target: str) -> list[str]:
    return [f"  {name}:", f"    _target_: {target}", "    _call_: false"]


TARGETS = {
    "train": "megatron.bridge.training.config.TrainingConfig",
    "optimizer": "megatron.bridge.training.config.OptimizerConfig",
    "ddp": "megatron.bridge.training.config.DistributedDataParallelConfig",
    "scheduler": "megatron.bridge.training.config.SchedulerConfig",
    "dist": "megatron.bridge.training.config.DistributedInitConfig",
    "rng": "megatron.bridge.training.config.RNGConfig",
    "dataset": "megatron.bridge.training.config.MockGPTDatasetConfig",
    "tokenizer": "megatron.bridge.training.config.TokenizerConfig",
    "checkpoint": "megatron.bridge.training.config.CheckpointConfig",
    "logger": "megatron.bridge.training.config.LoggerConfig",
}


def _file(plan: Plan, sections: dict[str, list[str]]) -> str:
    """The YAML: a ConfigContainer of its sections."""
    model, job = plan.model, plan.job
    latent = "MLAModelProvider" if model.mla else "GPTModelProvider"
    place = "megatron.bridge.models.mla_provider" if model.mla else "megatron.bridge.models.gpt_provider"
    sections["dataset"] = [
        f"  seq_length: {job.sequence}", f"  random_seed: {job.seed}", "  reset_position_ids: false",
        "  reset_attention_mask: false", "  eod_mask_loss: false", "  dataloader_type: single",
    ]  # fmt: skip
    sections["tokenizer"] = ["  tokenizer_type: NullTokenizer  # put yours", f"  vocab_size: {model.vocab}"]
    sections["checkpoint"] = ["  save: ./checkpoints", "  save_interval: 1000"]
    sections["logger"] = ["  log_interval: 10"]
    nodes, each = plan.hosts
    lines = [
        f"# Megatron-Bridge {BRIDGE}: {model.name}, {plan.layout}",
        f"# Start: torchrun --nnodes {nodes} --nproc_per_node {each} train.py, where train.py calls",
        "#   megatron.bridge.training.pretrain.pretrain(ConfigContainer.from_yaml('run_config.yaml'), forward_step)",
        "_target_: megatron.bridge.training.config.ConfigContainer",
    ]
    for section, rows in sections.items():
        target = f"{place}.{latent}" if section == "model" else TARGETS[section]
        lines += [f"{section}:", f"  _target_: {target}", *rows]
    return "\n".join(lines) + "\n"
