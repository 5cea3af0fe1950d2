"""TrainingArguments, accelerate's YAML and DeepSpeed's JSON -> model, layout and job.

ranks = dp·cp·tp; global batch = per_device_train_batch_size · gradient_accumulation_steps · dp
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, get_args

from fivefold.errors import UserError
from fivefold.interop.equivalence import divide_rates
from fivefold.interop.format import (
    LENGTH_MISSING,
    NO_MODEL,
    RANKS_MISSING,
    Document,
    Overrides,
    ParsedConfig,
    build_reading,
    compute_replicas,
    resolve_world,
)
from fivefold.interop.huggingface.adapters import (
    add_expert_adapters,
    drop_autocast_modules,
    follow_weights,
    mark_out_projections,
    read_adapter,
    select_patterns,
)
from fivefold.interop.huggingface.data import read_data, read_preferences
from fivefold.interop.huggingface.dialects import DIALECTS
from fivefold.interop.huggingface.freeze import read_freeze
from fivefold.interop.huggingface.keys import (
    ALL_ELEMENTS,
    DERIVED_FROM_WIDTH,
    FSDP,
    PARALLEL,
    PREFIX,
    STAGE_3,
)
from fivefold.interop.huggingface.parse import find_file_above, find_strategy
from fivefold.interop.keys import Values, is_number, to_list
from fivefold.job import Recipe, get_recipe
from fivefold.layout.names import Offloaded
from fivefold.model import catalog
from fivefold.model.spec import Model
from fivefold.results.reading import DataReading, Reading
from fivefold.spelling import join_names

ATTENTION = {
    "sdpa": "flash2",
    "flash_attention_2": "flash2",
    "flash_attention_3": "flash",
    "eager": "unfused",
    "flex_attention": "flash2",
    # kernels that transformers downloads from kernels-community/ of the Hub
    "flash-attn2": "flash2",
    "flash-attn3": "flash",
    "vllm-flash-attn3": "flash",
}

PLUGINS = ("LigerPlugin", "CutCrossEntropyPlugin", "SwanLabPlugin")  # of Axolotl; the last one logs

OPTIMIZERS = {
    "adamw_torch": "adamw", "adamw_torch_fused": "adamw", "adamw_hf": "adamw", "adamw": "adamw", "adam": "adamw",
    "adamw_apex_fused": "adamw", "adamw_anyprecision": "adamw", "adamw_torch_xla": "adamw", "adamw_8bit": "adamw8bit",
    "adamw_bnb_8bit": "adamw8bit", "paged_adamw_8bit": "adamw8bit", "adamw_torch_8bit": "adamw8bit",
    "adamw_torch_4bit": "adamw4bit", "adafactor": "adafactor", "sgd": "sgd",
    "muon": "muon", "adamw_bnb_8bit_paged": "adamw8bit", "paged_adamw_32bit": "adamw", "paged_adamw": "adamw",
}  # fmt: skip

PYTORCH_ADAMW = ("adamw_torch", "adamw_torch_fused", "adamw_torch_xla", "adamw_hf", "adamw", "adam")

MAX_SIZE = 2**48
LARGE_BUCKET = 100_000_000  # elements: latency is below 1 % of such a message
BUCKETS = {"reduce_bucket_size": "reduce_bucket", "sub_group_size": "update_group_size"}


def to_job(config: ParsedConfig, overrides: Overrides) -> Reading:
    """Return model, layout and job."""
    document, values = config.document, config.values
    kind = find_strategy(values.given)
    check_strategy(values)
    ranks = resolve_world(document, overrides, stated=document.ranks or _find_mesh_ranks(values, kind, overrides))
    preferences = read_preferences(values)
    model, missing = _read_model(values, document, config.model)
    if values["max_length"] is None and overrides.sequence is not None:
        values.given["max_length"] = overrides.sequence
    if values["max_length"] is None:
        missing += (LENGTH_MISSING.format("max_length"),)
    if model is None or ranks is None or values["max_length"] is None:
        missing += () if ranks else (RANKS_MISSING,)
        reading = build_reading(config, {}, model=model, ranks=None, missing=missing)
        return _name_as_written(_leave_out_others(reading, values, kind))
    values.given |= {key: DERIVED_FROM_WIDTH[key](model.width) for key in config.unset}
    fields = values.fields()
    fields |= _read_degrees(values, kind, ranks, overrides.ranks_per_node)
    fields |= _read_batch(values, fields, kind) | read_optimizer(values, kind) | _read_stack(values, kind)
    fields["job.offload"] = _read_offload(values, kind, fields)
    if preferences:  # batches are of pairs, each of two sequences
        fields |= {key: 2 * fields[key] for key in ("layout.mbs", "job.global_batch")}
    fields |= _read_fsdp_units(values, model) if kind == "fsdp" else {}
    fields |= read_bucket_sizes(values) if kind == "deepspeed" else {}
    fields |= (adapter := read_adapter(values))
    follow_weights(values, adapter, model)
    select_patterns(adapter, model)
    add_expert_adapters(values, adapter, model)
    mark_out_projections(values, adapter, model)
    fields |= {} if adapter else read_freeze(values, model)
    # TRL's DPOTrainer, which Axolotl extends, and LLaMA-Factory's switch all dropout off; in TRL a key keeps it on
    if preferences and adapter and values["disable_dropout"] is not False:
        fields["job.adapter"] = adapter["job.adapter"] | {"dropout": 0.0}
    if kind == "ddp" and not adapter:
        check_loaded_type(values)
    if values.software == "ms-swift":
        fields |= _read_swift(values, model, kind, cp=fields["layout.cp"])
    fields.setdefault("job.sequence", values.to_int("max_length"))
    fields["job.precision"] = _read_precision(values, kind)
    if fields["job.precision"].autocasts:
        drop_autocast_modules(values, fields)
    # TRL's best-fit packing keeps samples separate (trl/trainer/sft_trainer.py); LLaMA-Factory's does only with neat
    keeps_separate = values["packing"] and values["packing_strategy"] in ("bfd", "binpack", "sequential")
    keeps_separate = keeps_separate and "stage" not in values.table
    fields["job.documents"] = "separate" if values["padding_free"] or keeps_separate else "joined"
    if values.given.get("pad_to_sequence_len") is False:
        values.approximate("pad_to_sequence_len", "a batch is as long as its longest sample; counted as sequence_len")
    offload = _read_activation_offload(values)
    fields["layout.ac"] = "full" if _recomputes(values, offload, is_adapted=bool(adapter)) else "none"
    if offload:
        offloaded = {*fields["job.offload"], "activations"}
        fields["job.offload"] = tuple(word for word in get_args(Offloaded) if word in offloaded)
    data = read_data(values, document, ranks_pairs=bool(preferences))
    fields |= preferences or _read_objective(data, fields, model)
    reading = build_reading(config, fields, model=model, ranks=ranks, missing=missing).replace(data=data)
    return _name_as_written(_leave_out_others(reading, values, kind))


def _read_swift(values: Values, model: Model, kind: str, *, cp: int) -> dict[str, Any]:
    """Return what ms-swift does otherwise: the length of packed samples, and how a sequence is cut.

    It is cut by Ulysses as far as the key heads go, and by a ring of such groups beyond (swift/sequence_parallel).
    """
    fields = dict[str, Any]()
    if values["packing_length"] is not None and values["packing"]:
        fields["job.sequence"] = values.to_int("packing_length")
    key = "sequence_parallel_degree"
    if cp > 1 and (kind == "fsdp" or math.gcd(model.kv_heads, cp) < cp):
        fields["layout.cp_kind"] = "ring"
        values.approximate(key, f"Ulysses among {math.gcd(model.kv_heads, cp)} ranks; counted as a ring of all")
    elif cp > 1:
        fields["layout.cp_kind"] = "ulysses"
    if cp == 1 and values["use_logits_to_keep"] is None and values["loss_scale"] != "all":
        means = "on, as in ms-swift: the head runs only over what is trained; counted over full sequences"
        values.approximate("use_logits_to_keep", means)
    return fields


def _name_as_written(reading: Reading) -> Reading:
    """Return the reading with the names that Axolotl and LLaMA-Factory have for keys of TrainingArguments."""
    dialect = next((dialect for dialect in DIALECTS if dialect.name == reading.software), None)
    if dialect is None:
        return reading
    lists = {
        name: tuple(key.replace(key=dialect.find_name(key.key)) for key in getattr(reading, name))
        for name in ("understood", "defaulted", "not_understood", "approximated", "harmless")
    }
    return reading.replace(**lists)


def _read_activation_offload(values: Values) -> str:
    """Return how kept activations go to host memory: ``streams``, ``legacy`` or ``hidden_states``; empty if they stay.

    ``gradient_checkpointing: offload`` is Axolotl's old name for it.
    """
    key = "activation_offloading"
    mode = values[key]
    if "offload" in str(values["gradient_checkpointing"]):
        key, mode = "gradient_checkpointing", "disk" if values["gradient_checkpointing"] == "offload_disk" else True
    if mode in (None, False):
        return ""
    if mode == "legacy":
        values.approximate(key, "copies to the host that wait for one another; counted as overlapped")
    elif mode not in (True, "hidden_states"):
        values.mark_not_modelled(key, "kept activations on disk; counted in the GPU's memory")
        return ""
    return "streams" if mode is True else str(mode)


def _recomputes(values: Values, offload: str, *, is_adapted: bool) -> bool:
    """Return whether blocks are recomputed.

    Axolotl offloads the activations of adapters without recomputation, but for the mode ``hidden_states``
    (loaders/model.py: ``_apply_activation_checkpointing``); TRL leaves it to ``gradient_checkpointing``.
    """
    checkpointing_values = [
        values["gradient_checkpointing"],
        values["activation_checkpointing"],
        values["fsdp_config.activation_checkpointing"],
        values[f"{FSDP}activation_checkpointing"],
    ]
    if offload in ("streams", "legacy") and is_adapted and values.software == "axolotl":
        return False
    return any(value not in (None, False, "none") for value in checkpointing_values)


def _leave_out_others(reading: Reading, values: Values, kind: str) -> Reading:
    """Return the reading without defaults of keys that this strategy does not read, or that DeepSpeed's replace."""
    others: tuple[str, ...] = ("deepspeed.", "accelerate.deepspeed_config.")
    if kind == "deepspeed":
        is_json_given = any(name.startswith("deepspeed.") for name in values.given)
        others = ("accelerate." if is_json_given else "deepspeed.", FSDP, "fsdp_config.")
    set_by_deepspeed = {
        key.means.partition(":")[0]
        for key in reading.understood
        if key.key.startswith("deepspeed.") and key.value not in ("auto", "None")
    }
    return reading.replace(
        defaulted=tuple(
            key
            for key in reading.defaulted
            if not key.key.startswith(others) and key.means.partition(":")[0] not in set_by_deepspeed
        )
    )


def _read_objective(data: DataReading | None, fields: dict[str, Any], model: Model) -> dict[str, Any]:
    """Return the objective of supervised data, if the model can be trained so; samples one by one are separate."""
    is_supervised = data is not None and data.fields.get("format", "text") != "text"
    if data is None or not is_supervised or model.mtp is not None or model.non_attention_mixers:
        return {}
    is_single = data.fields.get("packing") == "none"
    return {"job.objective": "sft", "job.documents": "separate" if is_single else fields["job.documents"]}


KNOWN_STRATEGIES = ("", "NO", "FSDP", "DEEPSPEED", "MULTI_GPU")

LIGER_KERNELS = ("rope", "rms_norm", "layer_norm", "swiglu", "glu_activation", "cross_entropy", "rms_norm_gated")


# Those that decide what norms, activations and rotary embeddings keep
LIGER_FUSED = ("liger_rope", "liger_rms_norm", "liger_layer_norm", "liger_swiglu", "liger_glu_activation")


def _fuses_kernels(values: Values) -> bool:
    """Return whether Liger's kernels of norms and gated activations are on, with its loss or without."""
    gates = values.given.get("liger_glu_activation") or values.given.get("liger_swiglu")
    return bool(values["use_liger_kernel"] or (gates and values.given.get("liger_rms_norm")))


def check_strategy(values: Values) -> None:
    """Mark a strategy that is read as another one, and kernels of Liger that are counted together."""
    if str(values["accelerate.distributed_type"]).upper() not in KNOWN_STRATEGIES:
        values.mark_not_modelled("accelerate.distributed_type", "is neither FSDP, DeepSpeed nor DDP")
    for name in (*OFFLOAD_OPTIMIZER, *OFFLOAD_PARAM):
        if values[name] == "nvme":
            what = "weights" if name in OFFLOAD_PARAM else "states"
            values.mark_not_modelled(name, f"{what} on disk: counted in host memory")
    key = f"{PREFIX}allgather_bucket_size"
    if is_number(size := values.given.get(key)) and LARGE_BUCKET <= size != values.table[key].default:
        values.approximate(key, "gathers of 200 MB and more, which take as long per byte as those of the default")
    for name in (f"liger_{kernel}" for kernel in LIGER_KERNELS):
        if values.is_set(name) and (values["use_liger_kernel"] or (name in LIGER_FUSED and _fuses_kernels(values))):
            if values[name]:
                values.approximate(name, "is one of Liger's kernels, which are counted all together")
            else:
                values.mark_not_modelled(name, "is off among Liger's kernels, which are counted all together")


def check_loaded_type(values: Values) -> None:
    """Mark weights that are loaded in 16 bits and stay so: DDP trains them in that type."""
    for name in ("torch_dtype", "dtype") if values.software != "ms-swift" else ():
        if str(values[name]).removeprefix("torch.") in ("bfloat16", "float16"):
            values.mark_not_modelled(
                name, "under DDP weights, gradients and moments are then in 16 bits: counted in fp32"
            )


def _read_model(values: Values, document: Document, overrides: Model | None) -> tuple[Model | None, tuple[str, ...]]:
    """Return the user's model, a folder's, or the catalog's model of that repository."""
    if overrides:
        return overrides, ()
    model_name = values["model_name_or_path"]
    if (config_name := values.given.get("base_model_config")) not in (None, "", model_name):  # Axolotl's
        values.mark_not_modelled("base_model_config", f"the config of {config_name}; what is counted is {model_name}")
    if model_name is None:
        return None, (NO_MODEL,)
    if file := find_file_above(f"{model_name}/config.json", document):
        return catalog.resolve(str(file.parent)), ()
    if published := catalog.find_published(str(model_name)):
        return published, ()
    similar = f" (similar: {join_names(close, 'and')})" if (close := catalog.list_similar(str(model_name))) else ""
    advice = (
        "name its config.json, or a model of the catalog, before --from, or with `read` and `write` by --model NAME"
    )
    return None, (f"the model {model_name!r}, which is not in the catalog{similar}: {advice}",)


def _read_degrees(values: Values, kind: str, ranks: int, per_node: int) -> dict[str, Any]:
    """Return dp, cp, tp, and the sharding of weights and states."""
    tp = values[f"{PARALLEL}tp_size"]
    cp, ulysses = _read_context_degrees(values)
    if cp > 1 and ulysses > 1:
        raise UserError(f"{values.origin}: cp_size={cp} and sp_size={ulysses}; accelerate takes one of them")
    cp = max(cp, ulysses)
    if kind == "deepspeed":
        tp = max(tp, values["deepspeed.tensor_parallel.autotp_size"] or 1)
        cp = max(cp, values["deepspeed.sequence_parallel_size"] or 1)
        if cp > 1 and values["sequence_parallel_degree"] and values.software == "axolotl":
            values.approximate("sequence_parallel_degree", "a ring of Axolotl's own; counted as DeepSpeed's Ulysses")
    dp = compute_replicas(ranks, tp * cp, of="tp·cp", origin=values.origin)
    assert dp is not None
    fields: dict[str, Any] = {"layout.dp": dp, "layout.tp": tp, "layout.cp": cp}
    if tp > 1:  # rows are all-reduced: transformers' tp_plan of a model, DeepSpeed's AutoTP
        fields["layout.sp"] = False
        if kind != "deepspeed":
            values.approximate(
                f"{PARALLEL}tp_size", "cuts neither the embedding nor, in the loss, the logits; counted as cut"
            )
    if ulysses > 1 or (cp > 1 and kind == "deepspeed"):
        fields["layout.cp_kind"] = "ulysses"
    if kind == "deepspeed":
        shard_size = values["deepspeed.zero_optimization.mics_shard_size"]
        if values.is_set("deepspeed.zero_optimization.mics_shard_size"):
            values.approximate(
                "deepspeed.zero_optimization.mics_shard_size", "was removed in 0.19.8; read as a shard group"
            )
        zero_stage = _read_zero_stage(values)
        shard_fields = (
            {"layout.shard_group": shard_size}
            if zero_stage and isinstance(shard_size, int) and 0 < shard_size < dp * cp
            else {}
        )
        return fields | {"layout.zero": zero_stage} | shard_fields
    is_alone = dp * cp == 1 and values[f"{FSDP}offload_params"] is not True
    if kind == "ddp" or is_alone:
        return fields | {"layout.zero": 0}
    _check_shards(values, dp)
    return fields | _read_fsdp(values, dp * cp, per_node)


def _read_context_degrees(values: Values) -> tuple[int, int]:
    """Return the sizes of a ring and of Ulysses."""
    ring = values.optional("sequence_parallel_degree") or values[f"{PARALLEL}cp_size"]
    return ring, values.to_int(f"{PARALLEL}sp_size")


def _find_mesh_ranks(values: Values, kind: str, overrides: Overrides) -> int | None:
    """Return the ranks of accelerate's mesh where a layout is searched, if its sizes leave none open."""
    if not overrides.searches or kind != "fsdp" or values.given.get("expert_parallel_size"):
        return None
    copies, shards, tp = (values.to_int(f"{PARALLEL}{name}_size") for name in ("dp_replicate", "dp_shard", "tp"))
    return copies * shards * tp * max(_read_context_degrees(values)) if shards > 1 else None


def _check_shards(values: Values, dp: int) -> None:
    """Raise ``UserError`` if replicas and shards do not multiply to dp; 1, which accelerate writes, leaves it open."""
    copies, shards = (values.to_int(f"{PARALLEL}{name}_size") for name in ("dp_replicate", "dp_shard"))
    experts = values.given.get("expert_parallel_size") or 1  # of Axolotl, whose ranks are those of dp
    if shards > 1 and copies * shards not in (dp, dp // experts if isinstance(experts, int) else dp):
        raise UserError(
            f"{values.origin}: dp_replicate_size·dp_shard_size={copies}·{shards}={copies * shards}, but dp={dp}; make "
            "both equal"
        )


def _read_zero_stage(values: Values) -> int:
    key = "accelerate.deepspeed_config.zero_stage"
    if values.is_set(key):
        return values.to_int(key, least=0)
    if any(name.startswith("deepspeed.") for name in values.given):
        return values.to_int("deepspeed.zero_optimization.stage", least=0)
    return values.to_int(key, least=0)


def _read_fsdp(values: Values, replicas: int, per_node: int) -> dict[str, Any]:
    """Return ZeRO-3, resharded after the forward or the backward, with a shard group if there are replicas."""
    fsdp_value = values["fsdp"]
    version = values[f"{FSDP}version"] if not values["fsdp"] else values["fsdp_config.version"]
    policy = values[f"{FSDP}reshard_after_forward"] if not fsdp_value else values["fsdp_config.reshard_after_forward"]
    strategy = str(values[f"{FSDP}sharding_strategy"]).upper()
    if fsdp_value:
        strategy_words = [str(word) for word in fsdp_value] if isinstance(fsdp_value, list) else str(fsdp_value).split()
        strategy = strategy_words[0].upper()
        if "offload" in strategy_words:
            values.mark_not_modelled("fsdp", "weights, gradients and optimizer in host memory: not counted")
    elif version == 1 and isinstance(policy, str) and values.is_set(f"{FSDP}reshard_after_forward"):
        strategy = policy.upper()
    names = {"1": "FULL_SHARD", "2": "SHARD_GRAD_OP", "3": "NO_SHARD", "4": "HYBRID_SHARD", "5": "HYBRID_SHARD_ZERO2"}
    strategy = names.get(strategy, strategy)
    if version == 1:
        has_strategy = fsdp_value or values.is_set(f"{FSDP}sharding_strategy")
        if isinstance(values.given.get(key := f"{FSDP}reshard_after_forward"), bool) and not has_strategy:
            values.mark_not_modelled(key, "accelerate fails with FSDP1's true or false; set fsdp_version: 2")
        if strategy == "NO_SHARD":
            return {"layout.zero": 0}
        doubted_keys = [f"{FSDP}version"] if not fsdp_value else ["fsdp"]
        values.approximate(doubted_keys[0], "FSDP1 flattens the weights of a unit; counted as FSDP2")
        keeps_gathered = strategy in ("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2")
    else:
        keeps_gathered = policy is False or str(policy).lower() == "false"
    fields: dict[str, Any] = {"layout.zero": 3}
    replica_count = values[f"{PARALLEL}dp_replicate_size"]
    if replica_count > 1:
        if replicas % replica_count:
            raise UserError(f"{values.origin}: dp_replicate_size={replica_count} does not divide dp·cp={replicas}")
        fields["layout.shard_group"] = replicas // replica_count
    elif strategy.startswith("HYBRID") and replicas > per_node and replicas % per_node == 0:
        fields["layout.shard_group"] = per_node
    return fields | ({"job.stack.reshard": "backward"} if keeps_gathered else {})


WRAPPED_CLASSES = (
    f"{FSDP}transformer_layer_cls_to_wrap",
    f"{FSDP}transformer_cls_names_to_wrap",
    "fsdp_config.transformer_layer_cls_to_wrap",
    "fsdp_transformer_layer_cls_to_wrap",
)
BLOCK_SUFFIXES = ("Layer", "Block")  # of the classes of transformers that are one block of a decoder


def _read_fsdp_units(values: Values, model: Model) -> dict[str, Any]:
    """Return whether the root unit stays gathered; blocks are the other units.

    It does under FSDP1, and under FSDP2 if embedding and head share one weight (accelerate/utils/fsdp_utils.py,
    fsdp2_prepare_model).
    """
    fsdp_value, policy = values["fsdp"], f"{FSDP}auto_wrap_policy"
    version = values["fsdp_config.version"] if fsdp_value else values[f"{FSDP}version"]
    if values.is_set(policy) and str(values[policy]).upper() not in ("TRANSFORMER_BASED_WRAP", "TRANSFORMER_AUTO_WRAP"):
        values.mark_not_modelled(policy, "units of another size; counted as blocks")
    for key in WRAPPED_CLASSES:
        classes = values.given.get(key)
        names = [str(name).strip() for name in (classes.split(",") if isinstance(classes, str) else to_list(classes))]
        others = [name for name in names if name and not name.endswith(BLOCK_SUFFIXES)]
        if others:
            values.mark_not_modelled(key, f"{join_names(others, 'and')} are units too; only blocks are counted")
    stays_gathered = version == 1 or model.tied_embeddings
    return {"job.stack.backward_all_gather": "root"} if stays_gathered else {}


def _read_batch(values: Values, fields: dict[str, Any], kind: str) -> dict[str, Any]:
    """Return ``layout.mbs`` and ``job.global_batch`` (sequences); raise ``UserError`` if two files differ."""
    dp = fields["layout.dp"]
    mbs = _read_agreeing_integer(values, "per_device_train_batch_size", "deepspeed.train_micro_batch_size_per_gpu")
    deepspeed_key = "deepspeed.gradient_accumulation_steps"
    accelerate_key = "accelerate.deepspeed_config.gradient_accumulation_steps"
    accumulated = _read_agreeing_integer(
        values,
        "gradient_accumulation_steps",
        deepspeed_key if values.is_set(deepspeed_key) or not values.is_set(accelerate_key) else accelerate_key,
    )
    global_batch = values["deepspeed.train_batch_size"]
    if global_batch is not None and kind == "deepspeed":
        if not values.is_set("gradient_accumulation_steps") and values["deepspeed.gradient_accumulation_steps"] is None:
            accumulated = max(1, global_batch // (mbs * dp))
        if global_batch != mbs * accumulated * dp:
            raise UserError(
                f"{values.origin}: train_batch_size={global_batch} is not micro-batch·accumulation·dp="
                f'{mbs}·{accumulated}·{dp}={mbs * accumulated * dp}; set DeepSpeed\'s to "auto"'
            )
    batch_fields = {"layout.mbs": mbs, "job.global_batch": mbs * accumulated * dp}
    return batch_fields | ({"job.steps": steps} if (steps := _read_steps(values)) else {})


def _read_steps(values: Values) -> int | None:
    """Return the steps of the run, or None if epochs give them."""
    steps = values.number("max_steps")
    if steps is None or steps <= 0:
        return None
    if steps != int(steps):
        raise UserError(f"{values.origin}: max_steps must be a whole number, not {steps:g}")
    return int(steps)


def _read_agreeing_integer(values: Values, key: str, other_key: str) -> int:
    """Return the number that the trainer's key and DeepSpeed's key set; raise ``UserError`` if they differ."""
    if values[other_key] is None or not values.is_set(other_key):
        return values.to_int(key)
    if values.is_set(key) and values[key] != values[other_key]:
        raise UserError(
            f'{values.origin}: {key}={values[key]}, but {other_key}={values[other_key]}; set DeepSpeed\'s to "auto"'
        )
    return values.to_int(other_key)


def _read_stack(values: Values, kind: str) -> dict[str, Any]:
    """Return the kernels, the overlap and the reductions of the strategy."""
    implementation = str(values["attn_implementation"]).rpartition("/")[2]
    if implementation not in ATTENTION:
        values.mark_not_modelled("attn_implementation", "is not known here; counted as flash_attention_2")
    compiled = bool(values["torch_compile"]) or str(values["accelerate.dynamo_config.dynamo_backend"]).upper() not in (
        "NO",
        "NONE",
    )
    liger = bool(values["use_liger_kernel"])
    plugins = [str(plugin) for plugin in to_list(values["plugins"])]
    chunks_loss = (
        liger
        or bool(values["cut_cross_entropy"])
        or any(plugin.endswith("CutCrossEntropyPlugin") for plugin in plugins)
    )
    unknown_plugins = [plugin for plugin in plugins if not plugin.endswith(PLUGINS)]
    if unknown_plugins:
        values.mark_not_modelled("plugins", f"{', '.join(unknown_plugins)}: not known here, not counted")
    fields: dict[str, Any] = {
        "job.stack.name": "deepspeed" if kind == "deepspeed" else "fsdp2",
        "job.stack.attention": ATTENTION.get(implementation, "flash2"),
        "job.stack.compile": compiled,
        "job.stack.kernels": "fused" if compiled or _fuses_kernels(values) else "plain",
        "job.stack.loss": "chunked" if chunks_loss else "plain",
    }
    if kind == "ddp":  # torch.nn.parallel.DistributedDataParallel, which reduces after the last micro-batch
        fields |= {
            "job.stack.name": "ddp",
        }
    if kind == "fsdp":  # Trainer runs all but the last micro-batch under no_sync
        fields |= {"job.stack.reduce": "step", "job.stack.reduce_in_fp32": False}
    if kind == "deepspeed":
        stage = _read_zero_stage(values)
        overlap = values["deepspeed.zero_optimization.overlap_comm"]
        overlaps = stage == 3 if overlap is None else bool(overlap)
        reduces_in_fp32 = values["deepspeed.data_types.grad_accum_dtype"] == "fp32"
        fields |= {"job.stack.overlap": ("dp",) if overlaps else (), "job.stack.reduce_in_fp32": reduces_in_fp32}
    return fields


def _read_precision(values: Values, kind: str) -> Recipe:
    """Return the recipe: the bytes that a rank holds for a parameter."""
    trainer_sets = values["bf16"] is True or values["fp16"] is True  # Trainer's setting overrides accelerate's
    mixed_precision = "no" if trainer_sets else str(values["accelerate.mixed_precision"])
    bf16 = values["bf16"] is True or mixed_precision == "bf16" or values["deepspeed.bf16.enabled"] is True
    fp16 = values["fp16"] is True or mixed_precision == "fp16" or values["deepspeed.fp16.enabled"] is True
    if values.software == "axolotl" and bf16 and fp16 and not values.is_set("bf16"):  # bf16 is its default
        values.approximate("fp16", "bf16 is on without bf16: false, and goes before fp16; counted as bf16")
        fp16 = False
    if bf16 and fp16:
        raise UserError(f"{values.origin}: bf16 and fp16 are both enabled; keep one")
    if mixed_precision == "fp8":
        values.mark_not_modelled("accelerate.mixed_precision", "fp8 depends on its library; read as bf16")
        bf16 = True
    if kind == "deepspeed":
        _check_agreeing_precision(values)
    if (values["pure_bf16"] and kind != "deepspeed") or (
        bf16 and _keeps_loaded_type(values, kind)
    ):  # DeepSpeed keeps fp32 master weights in any case
        # moments of PyTorch's AdamW have the dtype of the weights, those of bitsandbytes' and Apex's are in fp32
        return get_recipe("bf16-full" if values["optim"] in PYTORCH_ADAMW else "bf16-pure")
    bf16 = bf16 or bool(values["pure_bf16"])
    if not (bf16 or fp16):
        return get_recipe("tf32" if values["tf32"] else "fp32")
    if kind == "ddp":
        return get_recipe("bf16-autocast" if bf16 else "fp16-autocast")
    if kind == "deepspeed" and values["deepspeed.data_types.grad_accum_dtype"] == "fp32":
        return get_recipe("bf16") if bf16 else get_recipe("fp16").replace(name="fp16-grad32", accumulated_bytes=4)
    if bf16:
        return get_recipe("bf16").with_reduce_dtype(in_fp32=False)
    return get_recipe("fp16")


def _keeps_loaded_type(values: Values, kind: str) -> bool:
    """Return whether all weights are trained in the type in which they are loaded.

    ms-swift loads those that it trains in full in the type of the model's config (swift/model/register.py); FSDP and
    DeepSpeed then make masters in fp32, DDP does not.
    """
    return values.software == "ms-swift" and kind == "ddp" and values["tuner_type"] == "full"


def _check_agreeing_precision(values: Values) -> None:
    """Raise ``UserError`` if DeepSpeed's config turns off what the trainer turns on, with which transformers ends.

    LLaMA-Factory's fp8, which is not modelled, turns DeepSpeed's bf16 off.
    """
    for name in ("bf16", "fp16") if not values.given.get("fp8") else ():
        key = f"deepspeed.{name}.enabled"
        if values[name] is True and values.is_set(key) and values[key] is False:
            raise UserError(f'{values.origin}: {name}=true, but {key}=false; set DeepSpeed\'s to "auto"')


def read_optimizer(values: Values, kind: str) -> dict[str, Any]:
    """Return the optimizer and the learning rate's schedule as fields of a job."""
    ds = "deepspeed.optimizer."
    deepspeed_sets = kind == "deepspeed" and values[f"{ds}type"] is not None
    optimizer_name = str(values[f"{ds}type"] if deepspeed_sets else values["optim"]).lower().rpartition(".")[2]
    if optimizer_name not in OPTIMIZERS:
        values.mark_not_modelled(
            f"{ds}type" if deepspeed_sets else "optim", "is not among the optimizers here; read as adamw"
        )
    if optimizer_name.startswith("paged_"):
        values.approximate("optim", "moves its states to the host where memory ends; counted on the device")
    betas = (values["adam_beta1"], values["adam_beta2"])
    fields: dict[str, Any] = {"job.optimizer.kind": OPTIMIZERS.get(optimizer_name, "adamw")}
    if deepspeed_sets:
        betas = values.pair(f"{ds}params.betas") or betas
        field_paths = {
            "lr": "job.learning_rate.peak",
            "eps": "job.optimizer.epsilon",
            "weight_decay": "job.optimizer.weight_decay",
        }
        fields |= {
            path: values[f"{ds}params.{name}"]
            for name, path in field_paths.items()
            if values[f"{ds}params.{name}"] is not None
        }
    clip = values["deepspeed.gradient_clipping"] if kind == "deepspeed" else None
    if clip is None and kind == "deepspeed":
        clip = values["accelerate.deepspeed_config.gradient_clipping"]
    fields |= {"job.optimizer.clip": clip} if isinstance(clip, float | int) else {}
    return fields | {"job.optimizer.betas": betas, **read_rate(values)}


OFFLOAD_OPTIMIZER = (
    f"{PREFIX}offload_optimizer.device",
    "accelerate.deepspeed_config.offload_optimizer_device",
    f"{PREFIX}cpu_offload",
)
OFFLOAD_PARAM = (
    f"{PREFIX}offload_param.device",
    "accelerate.deepspeed_config.offload_param_device",
    f"{PREFIX}cpu_offload_param",
)


def _has_offload(values: Values, keys: Iterable[str]) -> bool:
    """Tell whether one of ``keys`` names another memory than the device's."""
    return any(values[key] not in ("none", None, False) for key in keys)


def _read_offload(values: Values, kind: str, fields: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what is kept in host memory; ``fields``: those of the layout.

    Disks are read as host memory, and marked (``check_strategy``).
    """
    if values[f"{FSDP}offload_params"] is True:
        if kind == "fsdp":
            return ("parameters",)
        values.mark_not_modelled(f"{FSDP}offload_params", "weights in host memory without FSDP: not counted")
    if kind != "deepspeed":
        return ()
    offloaded = ("optimizer",) if _has_offload(values, OFFLOAD_OPTIMIZER) else ()
    for key in OFFLOAD_PARAM:
        if not _has_offload(values, (key,)):
            continue
        if fields["layout.zero"] < 3 and values[key] != "nvme":
            values.approximate(key, "has no effect below stage 3 of ZeRO")
        elif fields["layout.zero"] == 3:
            return (*offloaded, "parameters")
    return offloaded


SCHEDULES = {
    "linear", "cosine", "cosine_with_min_lr", "cosine_warmup_with_min_lr", "constant", "constant_with_warmup",
    "warmup_stable_decay",
}  # fmt: skip


def _read_warmup(values: Values, steps: int) -> int:
    """Return the steps of the warm-up; a number below 1, or ``warmup_ratio``, is a share of all (training_args.py).

    Axolotl rounds its share down, warms up for 3 % of the steps if nothing is said, at most 100, and makes 1 step two
    (core/builders/base.py, _configure_warmup_and_logging).
    """
    warmup = values.number("warmup_steps") if values.given.get("warmup_steps") is not None else None
    share = values.number("warmup_ratio")
    if (warmup or 0) < 0 or (share or 0) < 0:
        raise UserError(f"{values.origin}: a warm-up of {warmup or share:g}; it must be 0 or more")
    if values.software == "axolotl" and warmup and share:  # utils/schemas/validation.py
        raise UserError(f"{values.origin}: warmup_steps and warmup_ratio are both set; keep one")
    if values.software != "axolotl":
        warmup = warmup or share or 0
        return min(int(warmup) if warmup >= 1 else math.ceil(steps * warmup), steps)
    if warmup is None:
        warmup = min(int(0.03 * steps), 100) if share is None else int(share * steps)
    return min(2 if warmup == 1 else int(warmup) if warmup > 1 else math.ceil(steps * warmup), steps)


def read_rate(values: Values) -> dict[str, Any]:
    """Return the learning rate's schedule.

    A decay lasts from the end of the warm-up to the end of the run, unless its steps are given.
    """
    steps = _read_steps(values) or 1000
    warmup = _read_warmup(values, steps)
    scheduler_type = str(values["lr_scheduler_type"])
    prefix = "lr_scheduler_kwargs."
    floor = values.number(f"{prefix}min_lr_rate") or values.number(f"{prefix}min_lr_ratio") or 0.0
    if (min_rate := values.number(f"{prefix}min_lr")) and values["learning_rate"]:
        floor = divide_rates(min_rate, values["learning_rate"])
    if values.is_set("cosine_min_lr_ratio") and scheduler_type == "cosine":  # Axolotl's
        floor = values.number("cosine_min_lr_ratio") or 0.0
    if scheduler_type.startswith("constant"):
        schedule: dict[str, Any] = {"kind": "constant", "floor": 1.0}
    elif scheduler_type.startswith("cosine"):
        schedule = {"kind": "cosine", "floor": floor}
    else:
        decay = values.optional(f"{prefix}num_decay_steps") or max(1, steps - warmup)
        schedule = {"kind": "wsd", "floor": floor, "decay_steps": decay}
    if scheduler_type not in SCHEDULES:
        shape = "a cosine" if schedule["kind"] == "cosine" else "a linear decay"
        values.approximate("lr_scheduler_type", f"another schedule of the learning rate; read as {shape}")
    schedule["warmup_steps"] = warmup
    return {f"job.learning_rate.{name}": value for name, value in schedule.items()}


def read_bucket_sizes(values: Values) -> dict[str, Any]:
    """Return the sizes of ZeRO's buckets and prefetches as fields of the stack by path."""
    fields = dict[str, Any]()
    for name, ours in {**BUCKETS, **STAGE_3}.items():
        value = values[PREFIX + name]
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_SIZE:
            raise UserError(
                f"{values.origin}: {name} is {value!r}; it must be a number of elements from 0 to {MAX_SIZE}"
            )
        fields[f"job.stack.{ours}"] = int(value)
    group_size = fields["job.stack.update_group_size"]  # 0: every weight by itself
    return fields | {"job.stack.update_group_size": 0 if group_size >= ALL_ELEMENTS else max(1, group_size)}
