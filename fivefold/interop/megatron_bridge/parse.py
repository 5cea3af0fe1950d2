"""Parse configs that Megatron-Bridge (``run_config.yaml``) and NeMo 2 save into values of Megatron's arguments.

Both use the field names of Megatron-Core, in sections with a ``_target_``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from fivefold.interop.format import Document, Overrides, ParsedConfig
from fivefold.interop.keys import Table, Values, to_list
from fivefold.interop.megatron.keys import MODEL
from fivefold.interop.megatron.parse import normalize_names
from fivefold.interop.megatron_bridge import nemo
from fivefold.interop.megatron_bridge.keys import (
    BRIDGE,
    BRIDGE_AND_CORE_KEYS,
    CALLBACKS_WITHOUT_EFFECT,
    DDP_OVERLAPS,
    MODEL_KEYS,
    NAMES,
    NEGATED_KEYS,
    NEMO,
    OVERLAP_BUCKET_SIZE,
    OVERLAP_CALLBACK,
    PRECISION_RECIPE,
    QUANTIZED,
    RECIPE,
    SECTIONS,
    replace_defaults,
)
from fivefold.model import catalog
from fivefold.model.multi_token_prediction import MTP
from fivefold.model.published import CATALOG
from fivefold.model.spec import Model
from fivefold.results.reading import ParsedKey

MODEL_NAME_WITH_SIZE = re.compile(
    r"(Llama3|Llama31|Llama32|Llama2|Qwen3|Qwen2|Mixtral|Mistral|Gemma2)(?:Model|MoE)?(?:Provider|Config)(\d[\dxA]*B\w*)"
)

FAMILIES = {"Llama31": "llama3.1", "Llama32": "llama3.2"}

# Activation functions with a gate and without, each with the option of Megatron that selects it, if it needs one.
GATED_FUNCTIONS = {"silu": None, "swish": None}
UNGATED_FUNCTIONS = {
    "gelu": None,
    "fast_gelu": "openai_gelu",
    "openai_gelu": "openai_gelu",
    "squared_relu": "squared_relu",
}


STATE_TYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "uint8": "fp8"}  # PyTorch's names


def is_bridge(document: Document) -> bool:
    """Return whether a YAML is a saved ConfigContainer, an override of one, or a saved NeMo 2 recipe."""
    if document.kind not in ("yaml", "json"):
        return False
    target = str(document.values.get("_target_", ""))
    values = _rename_sections(document.values)
    sections = values.keys() & {"model", "train", "ddp", "optimizer", "trainer", "optim", "data", "dataset"}
    model = values.get("model")
    is_override = isinstance(model, dict) and "_component_" not in model and len(sections) >= 3  # torchtune's key
    return target.startswith(("megatron.bridge", "nemo.")) or is_override


def _rename_sections(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sections by their names of 0.3.1, which are older names without ``_config``."""
    return {str(key).removesuffix("_config"): value for key, value in values.items()}


def parse(document: Document, overrides: Overrides) -> ParsedConfig:
    """Return the values of a saved config, or of overrides of a recipe, as Megatron's arguments."""
    sections = _rename_sections(document.values)
    target = str(document.values.get("_target_", ""))
    is_nemo = "trainer" in sections or target.startswith("nemo")
    gathered: dict[str, Any] = {}
    targets: list[str] = []
    tokenizer = sections.get("tokenizer")
    if isinstance(tokenizer, dict):
        gathered |= {key: tokenizer.get(key) for key in ("tokenizer_model", "tokenizer_type", "vocab_size")}
    overlap: dict[str, Any] = {}
    for section in SECTIONS:
        _gather(sections.get(section), overlap if section == "comm_overlap" else gathered, targets, section)
    table, classes = BRIDGE_AND_CORE_KEYS, None
    if is_nemo:
        table, classes = nemo.NEMO_KEYS, _gather_nemo(sections, gathered)
    other_callbacks = _gather_callbacks(gathered)
    if isinstance(sections.get("comm_overlap"), dict):
        gathered |= read_overlap(overlap, gathered if target or is_nemo else RECIPE | gathered)
    given = _build_arguments(gathered) | {name: "…" for name in sections if name not in (*SECTIONS, "_target_")}
    has_sizes = "num_layers" in given and not is_nemo
    model = overrides.model or (_find_published(given, gathered) if has_sizes else _find_by_size(targets))
    if classes is not None:
        table, given, model = _apply_class(classes, table, gathered, given, model)
    if model and not overrides.model:
        given = {key: value for key, value in given.items() if key not in MODEL_KEYS}
    trainer = sections.get("trainer")
    if (
        isinstance(trainer, dict)
        and isinstance(trainer.get("devices"), int)
        and isinstance(trainer.get("num_nodes"), int)
    ):
        document = document._replace(ranks=trainer["devices"] * trainer["num_nodes"])
    software, version = ("nemo", NEMO) if is_nemo else ("megatron-bridge", BRIDGE)
    if "q_lora_rank" in gathered and gathered["q_lora_rank"] is None:  # queries are not compressed, as in V2-Lite
        table = replace_defaults(table, {"q_lora_rank": None})
    if not (target or is_nemo):
        reason = f"the recipe's own values are not in this file; assumed: those of most {BRIDGE} recipes"
        document = document._replace(assumed=(*document.assumed, ParsedKey(key="(recipe)", value="", means=reason)))
        table = replace_defaults(table, RECIPE)
    fields = {"job.stack.expandable_segments": bool(given.pop("expandable_segments", False))}
    values = Values(table, given, origin=document.origin, software=software, version=version)
    if is_nemo and nemo.has_lightning_precision(sections):
        values.mark_not_modelled("precision", "weights in fp32 under autocast: give the plugin MegatronMixedPrecision")
    if is_nemo and classes is None:
        _mark_unknown_class(nemo.find_config_class(sections), values, model if overrides.model is None else None)
    if other_callbacks:
        values.mark_not_modelled("callbacks", f"{', '.join(other_callbacks)}: not known here, not counted")
    return ParsedConfig(document, values, model=model, stack=software, fields=fields)


def _gather(value: Any, arguments: dict[str, Any], targets: list[str], name: str) -> None:
    """Collect fields by name from any section; functions and types by the name of their target."""
    if isinstance(value, str) and name == "mixed_precision":
        arguments |= _expand_precision(value)
    elif isinstance(value, str) and name == "plugins":
        arguments["precision"] = value
    elif value is not None and not isinstance(value, dict):  # the name of a recipe, or an adapter's
        arguments[name] = value
    if not isinstance(value, dict):
        return
    target = str(value.get("_target_", ""))
    targets.append(target)
    if name == "peft":
        arguments["peft"] = target.rpartition(".")[2] or "set"
        return
    for key, element in value.items():
        if isinstance(element, dict) and (
            "_partial_" in element or set(element) <= {"_target_", "_call_", "_args_", "_name_"}
        ):
            targets.append(str(element.get("_target_", "")))
            arguments[key] = targets[-1].removeprefix("torch.")
        elif isinstance(element, dict):
            _gather(element, arguments, targets, key)
        elif key not in ("_target_", "_call_", "_partial_") and (element is not None or key not in arguments):
            arguments[key] = element


def _expand_precision(name: str) -> dict[str, Any]:
    """Return the fields that the name of a recipe of Megatron-Bridge stands for; the name itself if it is unknown."""
    match = PRECISION_RECIPE.fullmatch(name.replace("-", "_"))
    if not match or (match["quantized"] or "") not in QUANTIZED:
        return {"mixed_precision": name}
    is_bf16 = match["held"] == "bf16"
    fields = {"bf16": is_bf16, "fp16": not is_bf16, "grad_reduce_in_fp32": is_bf16}
    return fields | QUANTIZED[match["quantized"] or ""] | ({"fp8_recipe": "blockwise"} if match["nano"] else {})


def _gather_nemo(sections: Mapping[str, Any], gathered: dict[str, Any]) -> dict[str, Any] | None:
    """Add what classes of NeMo's trainer stand for; return the defaults of the model's class, None if it is unknown.

    The length of a batch is that of the data; the model's is that of its positions.
    """
    data = sections.get("data")
    positions = gathered.pop("seq_length", None)
    gathered |= {} if positions is None else {"max_position_embeddings": positions}
    gathered |= {key: value for key, value in nemo.read_data_defaults(sections).items() if gathered.get(key) is None}
    length = data.get("seq_length") if isinstance(data, dict) else None
    gathered["seq_length"] = next((value for value in (length, gathered.get("seq_length"), positions) if value), None)
    gathered |= nemo.read_trainer(sections)
    gathered |= {argument: gathered.pop(name) for name, argument in nemo.NAMES.items() if name in gathered}
    if gathered.get("max_steps") == -1:  # no limit
        gathered["max_steps"] = None
    return nemo.find_class_fields(nemo.find_config_class(sections))


def _apply_class(
    classes: dict[str, Any], table: Table, gathered: dict[str, Any], given: dict[str, Any], model: Model | None
) -> tuple[Table, dict[str, Any], Model | None]:
    """Return table, arguments and model with the defaults of a class of NeMo's model configs.

    The catalog's model that the class is named after is taken unless the config changes one of its fields.
    """
    own = {key: value for key, value in classes.items() if value is not None or key == "q_lora_rank"}
    defaults = _build_arguments(own) | ({"q_lora_rank": None} if own.get("q_lora_rank", 0) is None else {})
    set_fields = {key: value for key, value in gathered.items() if value is not None}
    merged = {**given, **_build_arguments(own | set_fields)}
    arguments = {key: value for key, value in merged.items() if key in given or defaults.get(key) != value}
    unmodelled = {key: value for key, value in defaults.items() if key in table and table[key].kind == "foreign"}
    sizes = [key for key in arguments if key in MODEL and key not in (*unmodelled, "max_position_embeddings")]
    is_changed = any(arguments[key] != defaults.get(key, MODEL[key].default) for key in sizes)
    if model and is_changed and "vocab_size" not in {**defaults, **arguments}:
        defaults["vocab_size"] = model.vocab
    if model and model.window and not is_changed:
        unmodelled = {key: value for key, value in unmodelled.items() if key not in MODEL_KEYS}
    if model and not is_changed:
        return replace_defaults(table, defaults), {**unmodelled, **arguments}, model
    return replace_defaults(table, defaults), {**unmodelled, **arguments}, None


def _mark_unknown_class(name: str, values: Values, model: Model | None) -> None:
    """Mark keys of a model whose class has defaults that are not known here."""
    reason = f"changes {name}, whose other fields are not in this file"
    keys = MODEL.keys() - {"max_position_embeddings"} if model else {"num_layers", "hidden_size"}
    for key in values.given:
        if name and key in keys:
            values.mark_not_modelled(key, reason)


def read_overlap(section: Mapping[str, Any], gathered: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of ``CommOverlapConfig``, or of NeMo's callback, with what it sets if a field is not given.

    It overrides the fields of the model and, with the distributed optimizer alone, those of DDP
    (megatron/bridge/training/comm_overlap.py, setup).
    """
    is_interleaved = (gathered.get("virtual_pipeline_model_parallel_size") or 1) > 1
    fields: dict[str, Any] = {"tp_comm_overlap": False, "overlap_moe_expert_parallel_comm": False}
    fields["overlap_p2p_comm"] = is_interleaved and (gathered.get("pipeline_model_parallel_size") or 1) > 1
    fields |= dict.fromkeys(DDP_OVERLAPS, True)
    if gathered.get("use_distributed_optimizer"):
        fields["bucket_size"] = OVERLAP_BUCKET_SIZE
    fields |= {key: value for key, value in section.items() if not key.startswith("_") and value is not None}
    if not gathered.get("use_distributed_optimizer"):
        fields |= {key: bool(gathered.get(key)) for key in DDP_OVERLAPS}
    return fields


def _gather_callbacks(arguments: dict[str, Any]) -> list[str]:
    """Collect the fields of NeMo's callback of overlaps; return the names of callbacks that may change the cost."""
    others: list[str] = []
    for callback in to_list(arguments.get("callbacks")):
        name = str(callback.get("_target_", "") if isinstance(callback, dict) else callback).rpartition(".")[2]
        if name == OVERLAP_CALLBACK:
            arguments |= read_overlap(callback if isinstance(callback, dict) else {}, arguments)
        elif name not in CALLBACKS_WITHOUT_EFFECT:
            others.append(name or "a callback")
    return others


def _build_arguments(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of Megatron Bridge's config under the names of Megatron-LM's arguments."""
    given: dict[str, Any] = {}
    for key, value in settings.items():
        if value is None:
            continue
        if key in NEGATED_KEYS and isinstance(value, bool):
            given[NEGATED_KEYS[key]] = not value
        elif key == "activation_func":
            function = str(value).rpartition(".")[2]
            is_gated = settings.get("gated_linear_unit")
            functions = (GATED_FUNCTIONS if is_gated is not False else {}) | (
                UNGATED_FUNCTIONS if is_gated is not True else {}
            )
            if function not in functions:
                given[key] = value
            elif option := functions[function]:
                given[option] = True
        elif key == "transformer_layer_spec" and str(value).startswith("megatron."):
            given[key] = False
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
            given[name] = STATE_TYPES.get(str(given[name]), given[name])
    return {key: value for key, value in normalize_names(given).items() if value is not None}


def _find_published(given: dict[str, Any], settings: Mapping[str, Any]) -> Model | None:
    """Return the catalog's model that ``hf_model_id`` names, if its sizes are the given ones.

    The catalog's model has its windows and sinks too.
    """
    model_id = str(settings.get("hf_model_id", "")).lower()
    for key, entry in CATALOG.items():
        if model_id and (entry.repository or "").lower() == model_id:
            model = catalog.build_model(key)
            sizes = (model.layers, model.width, model.moe.experts if model.moe else None)
            if sizes == (given["num_layers"], given.get("hidden_size"), given.get("num_experts")):
                depth = given.get("mtp_num_layers")
                return model.replace(mtp=MTP(depth=depth) if depth else None)
    return None


def _find_by_size(targets: list[str]) -> Model | None:
    """Return the catalog's model that a class is named after, such as ``Llama3Config8B``."""
    for target in targets:
        if match := MODEL_NAME_WITH_SIZE.search(target.rpartition(".")[2]):
            family = FAMILIES.get(match[1], match[1].lower())
            name = f"{family}-{match[2].lower().replace('_', '-')}"
            if model := catalog.find_published(name):
                return model
    return None
