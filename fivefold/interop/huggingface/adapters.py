"""PEFT adapters and quantized bases of bitsandbytes, by the keys of TRL, Axolotl, LLaMA-Factory and ms-swift.

Sources: trl/trainer/model_config.py; axolotl 0.19.0 axolotl/utils/schemas/peft.py and loaders/adapter.py; llamafactory
0.9.5 llamafactory/hparams/finetuning_args.py, model_args.py and model/adapter.py; ms-swift 4.6.0
swift/arguments/tuner_args.py, base_args/quant_args.py and pipelines/train/tuner.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from fivefold.adapter import (
    ALL_LINEAR,
    EMBEDDING,
    END_TARGETS,
    EXPERT_TARGETS,
    LINEAR_TARGETS,
    MIXER_TARGETS,
    SAVED,
    TARGETS,
    Adapter,
    expand_targets,
)
from fivefold.base_format import FOUR_BIT_BASES, KEPT_IN_TRAINING
from fivefold.errors import UserError
from fivefold.interop.keys import Table, Values, approximate_keys, part, to_list
from fivefold.model.huggingface.peft import (
    EXPERT_LAYERS,
    NAMED_AS_MLPS,
    NAMED_W1,
    WITHOUT_OUT_PROJ,
    compile_pattern,
    find_key,
)
from fivefold.model.huggingface.read import find_text_model
from fivefold.model.huggingface.write import to_config
from fivefold.model.published import CATALOG
from fivefold.model.spec import Model
from fivefold.model.weights import list_targets

ADAPTER = "job.adapter"
BASE = "job.adapter.base"


class AdapterKeys(NamedTuple):
    """The names and defaults of a trainer's adapter keys; ``switch``: the key that turns adapters on."""

    switch: str
    on: tuple[Any, ...]
    off: tuple[Any, ...]
    rank: tuple[str, int]
    alpha: tuple[str, float | None]  # None: twice the rank
    dropout: tuple[str, float]
    targets: str
    every: tuple[str, ...]  # values of ``targets`` that mean all linear layers
    rank_stabilized: str
    magnitudes: str  # the key of DoRA
    four: tuple[str, Any]  # the key of a base in 4 bits, and its value
    eight: tuple[str, Any]  # the same in 8 bits
    four_type: str  # the key of its format, nf4 by default
    nested: tuple[str, bool]  # double quantization
    saved: str  # the key of modules that are trained in full
    others: tuple[str, ...]  # keys of variants that are not modelled, if they are on
    resumed: str = ""  # the key of an adapter's folder, whose factors are trained further
    ranks: str = ""  # the key of ranks by pattern
    alphas: str = ""  # the key of alphas by pattern
    parameters: str = ""  # the key of adapted parameters, which are those of stacked experts
    lists_linears: bool = False  # gives peft the names of the linear layers, and does so where no targets are given
    pattern: str = ""  # the key of a pattern of targets, which goes before ``targets``


TRL = AdapterKeys(
    "use_peft",
    (True,),
    (False, None),
    ("lora_r", 16),
    ("lora_alpha", 32),
    ("lora_dropout", 0.05),
    "lora_target_modules",
    ("all-linear",),
    "use_rslora",
    "use_dora",
    ("load_in_4bit", True),
    ("load_in_8bit", True),
    "bnb_4bit_quant_type",
    ("use_bnb_nested_quant", False),
    "lora_modules_to_save",
    (),
    parameters="lora_target_parameters",
)
AXOLOTL = AdapterKeys(
    "adapter",
    ("lora", "qlora"),
    (None, ""),
    ("lora_r", 8),
    ("lora_alpha", None),
    ("lora_dropout", 0.0),
    "lora_target_modules",
    ("all-linear",),
    "peft_use_rslora",
    "peft_use_dora",
    ("load_in_4bit", True),
    ("load_in_8bit", True),
    "bnb_config_kwargs.bnb_4bit_quant_type",
    ("bnb_config_kwargs.bnb_4bit_use_double_quant", True),
    "lora_modules_to_save",
    ("peft_layer_replication", "peft_layers_to_transform", "peft_trainable_token_indices"),
    resumed="lora_model_dir",
    ranks="lora_rank_pattern",
    alphas="lora_alpha_pattern",
    parameters="lora_target_parameters",
)
LLAMAFACTORY = AdapterKeys(
    "finetuning_type",
    ("lora",),
    ("full", "freeze"),
    ("lora_rank", 8),
    ("lora_alpha", None),
    ("lora_dropout", 0.0),
    "lora_target",
    ("all",),
    "use_rslora",
    "use_dora",
    ("quantization_bit", 4),
    ("quantization_bit", 8),
    "quantization_type",
    ("double_quantization", True),
    "additional_target",
    (),
    resumed="adapter_name_or_path",
    lists_linears=True,
)
SWIFT = AdapterKeys(
    "tuner_type",
    ("lora",),
    ("full",),
    ("lora_rank", 8),
    ("lora_alpha", 32),
    ("lora_dropout", 0.05),
    "target_modules",
    ("all-linear",),
    "use_rslora",
    "use_dora",
    ("quant_bits", 4),
    ("quant_bits", 8),
    "bnb_4bit_quant_type",
    ("bnb_4bit_use_double_quant", True),
    "modules_to_save",
    (),
    resumed="adapters",
    parameters="target_parameters",
    lists_linears=True,
    pattern="target_regex",
)
ADAPTER_KEYS_OF = {"axolotl": AXOLOTL, "llamafactory": LLAMAFACTORY, "ms-swift": SWIFT}


FUSED_KERNELS = ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "lora_embedding_kernel")  # Axolotl's
FUSED_MEANING = "fused kernels of adapters, which keep fewer activations; counted as peft's layers"
LOADED_AS = "model_quantization_config"  # of Axolotl: the class by which transformers loads the weights


def _build_table(names: AdapterKeys) -> Table:
    """Return the keys of a trainer's adapters that are read."""
    keys = {
        names.switch: part(ADAPTER, names.off[0]),
        names.rank[0]: part("job.adapter.rank", None),
        names.alpha[0]: part("job.adapter.alpha", None),
        names.dropout[0]: part("job.adapter.dropout", None),
        names.targets: part("job.adapter.targets", None),
        names.rank_stabilized: part("job.adapter.rank_stabilized", None),
        names.magnitudes: part("job.adapter.kind", None),
        names.four[0]: part(BASE, None),
        names.eight[0]: part(BASE, None),
        names.four_type: part(BASE, None),
        names.nested[0]: part("job.adapter.double_quantization", None),
        names.saved: part("job.adapter.modules_to_save", None),
        **({names.resumed: part(ADAPTER, None)} if names.resumed else {}),
        **({f"{names.ranks}.*": part("job.adapter.rank_pattern", None)} if names.ranks else {}),
        **({f"{names.alphas}.*": part("job.adapter.alpha_pattern", None)} if names.alphas else {}),
        **({names.parameters: part("job.adapter.targets", None)} if names.parameters else {}),
        **({names.pattern: part("job.adapter.targets", None)} if names.pattern else {}),
    }
    if names is AXOLOTL:
        keys |= {"lora_target_linear": part("job.adapter.targets", None)}
        keys |= approximate_keys(FUSED_MEANING, *FUSED_KERNELS, default=False)
        keys |= {LOADED_AS: part(BASE, None), f"{LOADED_AS}_kwargs.*": part(BASE, None)}
    return keys


TABLES: dict[str, Table] = {
    "trl": _build_table(TRL),
    "axolotl": _build_table(AXOLOTL),
    "llamafactory": _build_table(LLAMAFACTORY),
    "ms-swift": _build_table(SWIFT),
}


def read_adapter(values: Values) -> dict[str, Any]:
    """Return the adapter of a config as a field of a job, or no field if it has none.

    Keys that are not modelled are marked as approximated.
    """
    names = ADAPTER_KEYS_OF.get(values.software, TRL)
    for key in TABLES["trl"].keys() - TABLES.get(values.software, TABLES["trl"]).keys():
        if values.given.get(key) not in (None, False):
            values.mark_not_modelled(key, f"no key of {values.software}, but of TRL's adapters")
    switch = values[names.switch]
    on = switch in names.on
    if not on and switch not in names.off:
        values.mark_not_modelled(names.switch, "a method other than LoRA or full fine-tuning; counted as the latter")
    base = _read_base(values, names, on=on)
    if switch == "qlora" and base not in FOUR_BIT_BASES:
        values.mark_not_modelled(names.switch, f"qlora without {names.four[0]}: true; counted as lora")
    if names is AXOLOTL and on:
        _add_default_kernels(values)
    is_resumed = bool(names.resumed and values[names.resumed])
    if not on:
        if is_resumed:
            values.mark_not_modelled(names.resumed, "an adapter without a method that trains one")
        return {}
    if is_resumed:
        values.approximate(names.resumed, "trained further; its rank and layers are taken from the config, not from it")
    for key, value in values.given.items():
        is_variant = any(key == name or key.startswith(f"{name}.") for name in names.others)
        if is_variant and value not in (None, False, "", [], {}):
            values.mark_not_modelled(key, "a variant of adapters that is not modelled")
    rank = values.optional(names.rank[0]) or names.rank[1]
    alpha = values.number(names.alpha[0])
    dropout = values.number(names.dropout[0])
    nested = names.nested[1] if values[names.nested[0]] is None else values[names.nested[0]]
    targets = (*_resolve_targets(values, names), *_read_parameters(values, names))
    return {
        "job.adapter": {
            "kind": "dora" if values[names.magnitudes] is True else "lora",
            "rank": rank,
            "alpha": names.alpha[1] if alpha is None else alpha,
            "dropout": names.dropout[1] if dropout is None else dropout,
            "targets": targets,
            "rank_stabilized": values[names.rank_stabilized] is True,
            "base": base,
            "double_quantization": base not in FOUR_BIT_BASES or bool(nested),
            "modules_to_save": _read_saved_modules(values, names),
            "rank_pattern": _read_pattern(values, names.ranks, targets),
            "alpha_pattern": _read_pattern(values, names.alphas, targets),
        }
    }


def _add_default_kernels(values: Values) -> None:
    """Mark the fused kernels that Axolotl turns on where the config says nothing of them.

    Source: axolotl 0.19.0 utils/schemas/config.py, ``check_auto_enable_lora_kernels``.
    """
    is_8bit_lora = values[AXOLOTL.switch] == "lora" and values[AXOLOTL.eight[0]] is True
    is_fsdp = values.given.get("accelerate.distributed_type") == "FSDP"
    is_fsdp1 = is_fsdp and values["accelerate.fsdp_config.fsdp_version"] != 2
    is_off = is_8bit_lora or is_fsdp1 or values.given.get("rl") or values.given.get("trust_remote_code") is True
    if not is_off and all(values.given.get(name) is None for name in FUSED_KERNELS):
        values.given[FUSED_KERNELS[0]] = True
        values.approximate(FUSED_KERNELS[0], f"on, as Axolotl does where no lora_*_kernel is set: {FUSED_MEANING}")


def _read_pattern(values: Values, name: str, targets: tuple[str, ...]) -> dict[str, Any]:
    """Return what the patterns under a key give to targets; doubt those that match none, or only some blocks'.

    PEFT applies the first pattern that a module's name matches (``find_key``).
    """
    given = {key: value for key, value in values.given.items() if name and key.startswith(f"{name}.")}
    patterns = {key.removeprefix(f"{name}."): key for key in given}
    by_target: dict[str, Any] = {}
    matched = set[str]()
    for target in expand_targets(targets):
        keys = {find_key(patterns, name) for name in _list_modules(target, blocks="model")}
        matched |= {patterns[key] for key in keys if key is not None}
        if len(keys) > 1:
            for key in filter(None, keys):
                values.mark_not_modelled(patterns[key], "layers of some blocks; counted as the others")
        elif (only := keys.pop()) is not None:
            by_target[target] = given[patterns[only]]
    for unmatched in sorted(given.keys() - matched):
        values.mark_not_modelled(unmatched, "a pattern that is not read, or matches no layer with an adapter")
    return by_target


def _list_modules(target: str, *, blocks: str) -> list[str]:
    """Return the names of the modules of a target, one of each block; ``blocks``: the module that has the blocks."""
    if target in END_TARGETS:
        return [f"{blocks}.{target}" if target == EMBEDDING else target]
    parents = MIXER_TARGETS.get(target)
    if parents is None:
        parents = ("mlp",) if target in EXPERT_TARGETS or TARGETS[target][0].startswith("mlp") else ("self_attn",)
    return [f"{blocks}.layers.{layer}.{parent}.{target}" for parent in parents for layer in range(PATTERN_LAYERS)]


def select_patterns(fields: dict[str, Any], model: Model) -> None:
    """Leave out ranks and alphas of layers that the model does not have."""
    if not fields:
        return
    adapter = fields["job.adapter"]
    plain = Adapter.read(adapter | {"rank_pattern": (), "alpha_pattern": ()}, origin="")
    targets = list_targets(model, plain)
    for name in ("rank_pattern", "alpha_pattern"):
        adapter[name] = {target: value for target, value in adapter[name].items() if target in targets}


def _read_saved_modules(values: Values, names: AdapterKeys) -> tuple[str, ...]:
    """Return the modules that are trained in full next to the adapter; doubt others than the embedding and the head."""
    words = [word.strip() for text in to_list(values[names.saved]) for word in str(text).split(",") if word.strip()]
    unsupported = [word for word in words if word not in SAVED]
    if unsupported:
        what = f"{', '.join(unsupported)}: not supported; only {', '.join(SAVED)} may be trained in full"
        values.mark_not_modelled(names.saved, what)
    return tuple(word for word in words if word in SAVED)


def drop_autocast_modules(values: Values, fields: dict[str, Any]) -> None:
    """Leave out modules that LLaMA-Factory trains in fp32 under autocast, which are not modelled, and mark their key.

    Under TRL and Axolotl they have the dtype in which the base is loaded (llamafactory 0.9.5 model/adapter.py casts
    trained weights to fp32).
    """
    adapter = fields.get("job.adapter", {})
    if adapter.get("modules_to_save") and values.software == "llamafactory":
        values.mark_not_modelled(LLAMAFACTORY.saved, "trained in fp32 under autocast; counted as frozen")
        adapter["modules_to_save"] = ()


def _read_parameters(values: Values, names: AdapterKeys) -> tuple[str, ...]:
    """Return the parameters of routed experts with adapters; doubt others, and those of only some blocks.

    PEFT adapts the parameters whose names end with a word: ``mlp.experts.down_proj``, or ``7.mlp.experts.down_proj``.
    """
    if not names.parameters:
        return ()
    words = [str(word) for word in to_list(values[names.parameters])]
    by_word = {
        word: [target for target in EXPERT_TARGETS if f".{target}".endswith(f".{word}") or word.endswith(f".{target}")]
        for word in words
    }
    if unknown := [word for word, targets in by_word.items() if not targets]:
        what = f"{', '.join(unknown)}: not supported; only {', '.join(EXPERT_TARGETS)} are counted"
        values.mark_not_modelled(names.parameters, what)
    elif numbered := [word for word in words if any(part.isdigit() for part in word.split("."))]:
        values.mark_not_modelled(names.parameters, f"{', '.join(numbered)}: experts of some blocks; counted in all")
    return tuple(dict.fromkeys(target for targets in by_word.values() for target in targets))


def add_expert_adapters(values: Values, fields: dict[str, Any], model: Model) -> None:
    """Replace targets by which peft adapts the routed experts of a mixture; approximate those that are frozen here.

    peft turns ``all-linear``, and the names of an MLP's layers, into adapters of stacked experts in most families, with
    twice the rank for gate and up; dense MLPs and shared experts then have none. Axolotl's ``lora_target_linear``,
    LLaMA-Factory's ``all`` and ms-swift's ``all-linear`` give it the names of the linear layers that they find, which
    are those of an MLP if the model has dense MLPs or shared experts.
    """
    if model.moe is None or not fields:
        return
    names = ADAPTER_KEYS_OF.get(values.software, TRL)
    adapter = Adapter.read(fields["job.adapter"], origin="")
    adapts_all = adapter.targets[0] == ALL_LINEAR
    if not adapts_all and set(adapter.targets).isdisjoint(EXPERT_LAYERS):
        _drop_dropout(values, names, fields, adapter)
        return
    lists_linears = names is AXOLOTL and values.given.get("lora_target_linear") is True
    key = "lora_target_linear" if lists_linears else names.targets if values.is_set(names.targets) else names.switch
    has_mlps = not set(list_targets(model, adapter)).isdisjoint(EXPERT_LAYERS)
    family = find_family(model)
    if adapts_all and not (lists_linears or names.lists_linears):
        reaches_experts = family in NAMED_AS_MLPS | NAMED_W1
    else:
        reaches_experts = family in NAMED_AS_MLPS and (has_mlps or not adapts_all)
    if reaches_experts:
        _replace_by_experts(values, fields["job.adapter"], adapter, model, key=key)
        routers = "; adapters of routers are not counted" if adapts_all else ""
        values.approximate(
            key,
            f"with transformers 5, of which peft adapts the routed experts of {family} as parameters, gate and up with "
            f"twice the rank, and no dense MLPs or shared experts{routers}",
        )
        adapter = Adapter.read(fields["job.adapter"], origin="")
    elif adapts_all:
        values.approximate(
            key,
            "linear layers of attention, MLPs and shared experts; routers, gates of shared experts, and experts that "
            "transformers 4 keeps as linear layers count as frozen",
        )
    _drop_dropout(values, names, fields, adapter)


def mark_out_projections(values: Values, fields: dict[str, Any], model: Model) -> None:
    """Mark targets with which peft stops: ``out_proj`` of Mambas whose fused kernels read its weight themselves."""
    if not fields or not model.non_attention_mixers or (family := find_family(model)) not in WITHOUT_OUT_PROJ:
        return
    targets = list_targets(model, Adapter.read(fields["job.adapter"], origin=""))
    if "out_proj" in targets:
        names = ADAPTER_KEYS_OF.get(values.software, TRL)
        key = next((key for key in ("lora_target_linear", names.targets) if values.given.get(key)), names.switch)
        others = ", ".join(target for target in targets if target != "out_proj")
        values.mark_not_modelled(key, f"peft (0.21) stops for out_proj of {family}; counted with it. Name {others}")


def _replace_by_experts(values: Values, fields: dict[str, Any], adapter: Adapter, model: Model, *, key: str) -> None:
    """Replace layers of MLPs among the fields of an adapter by the experts' parameters of which they are names."""
    named = [target for target in EXPERT_LAYERS if target in expand_targets(adapter.targets)]
    if len([target for target in named if target != "down_proj"]) == 1:
        values.mark_not_modelled(key, "peft stops: gate_proj and up_proj are one parameter of the experts; name both")
    joint, down = EXPERT_TARGETS
    others = [target for target in list_targets(model, adapter) if target not in EXPERT_LAYERS]
    added = [joint] * ("gate_proj" in named or "up_proj" in named) + [down] * ("down_proj" in named)
    fields["targets"] = tuple(dict.fromkeys((*others, *added)))
    doubled = {"rank_pattern": 2 * adapter.rank, "alpha_pattern": 2 * adapter.scale_numerator}
    for pattern, value in doubled.items():
        given = {target: value for target, value in fields[pattern].items() if target not in EXPERT_LAYERS}
        fields[pattern] = given | ({joint: value} if joint in added else {})


def _drop_dropout(values: Values, names: AdapterKeys, fields: dict[str, Any], adapter: Adapter) -> None:
    """Leave out dropout where experts have adapters, with which peft stops, and mark its key."""
    if adapter.adapts_experts and adapter.dropout:
        key = names.dropout[0] if values.is_set(names.dropout[0]) else names.switch
        what = f"a dropout of {adapter.dropout:g}, with which peft (0.21) stops for parameters of experts; counted as 0"
        values.mark_not_modelled(key, what)
        fields["job.adapter"]["dropout"] = 0.0


def _list_frozen_expert_targets(adapter: Adapter, model: Model) -> tuple[str, ...]:
    """Return the names of the adapter's layers in a mixture, by which peft leaves routed experts frozen."""
    targets = tuple(target for target in list_targets(model, adapter) if target not in EXPERT_TARGETS)
    family = find_family(model)
    if family in NAMED_AS_MLPS and (as_experts := [target for target in targets if target in EXPERT_LAYERS]):
        raise UserError(
            f"adapter.targets={','.join(adapter.targets)}: with {', '.join(as_experts)} PEFT also adapts the routed "
            f"experts of {family}; use targets of attention, such as q_proj,v_proj, and {','.join(EXPERT_TARGETS)} "
            "if experts are to have adapters"
        )
    return targets


def find_family(model: Model) -> str | None:
    """Return the Hugging Face family of a catalog model, else the first with its computation; None if none has."""
    try:
        if model.name in CATALOG:
            return find_text_model(CATALOG[model.name].config, name=model.name).family.model_type
        return str(to_config(model)["model_type"])
    except UserError:
        return None


def write_adapter(adapter: Adapter | None, software: str, model: Model) -> dict[str, Any]:
    """Return the keys of a trainer for an adapter; the inverse of ``read_adapter``.

    Raises ``UserError`` for targets by which peft would adapt the routed experts of ``model``.
    """
    names = ADAPTER_KEYS_OF.get(software, TRL)
    if adapter is None:
        return {names.switch: "full"} if names is LLAMAFACTORY else {}
    is_quantized = adapter.base in FOUR_BIT_BASES
    alpha = adapter.scale_numerator
    if alpha != int(alpha):
        raise UserError(f"adapter.alpha={alpha:g}: {names.alpha[0]} is a whole number; use {max(1, round(alpha))}")
    values: dict[str, Any] = {
        names.switch: "qlora" if is_quantized and names is AXOLOTL else names.on[0],
        names.rank[0]: adapter.rank,
        names.alpha[0]: int(alpha),
        names.dropout[0]: adapter.dropout,
        **_write_targets(adapter, software, model),
    }
    if saved := adapter.modules_to_save:
        values[names.saved] = ",".join(saved) if names is LLAMAFACTORY else list(saved)
    for name, pattern, field in (
        (names.ranks, adapter.ranks, "rank_pattern"),
        (names.alphas, adapter.alphas, "alpha_pattern"),
    ):
        if pattern and not name:
            raise UserError(f"adapter.{field}={','.join(getattr(adapter, field))}: {software} has no key; leave it out")
        if fractions := [alpha for alpha in pattern.values() if alpha != int(alpha)]:
            raise UserError(f"adapter.{field}: {name} has whole numbers; use {round(fractions[0])}")
        if pattern:
            values[name] = {target: int(value) for target, value in pattern.items()}
    if adapter.rank_stabilized:
        values[names.rank_stabilized] = True
    if adapter.has_magnitudes:
        values[names.magnitudes] = True
    if adapter.base == "fp8" and names is AXOLOTL:
        values[LOADED_AS] = "FineGrainedFP8Config"
    elif adapter.base in ("fp8", "mxfp4"):
        raise UserError(
            f"adapter.base={adapter.base}: {software} reads this format only from the checkpoint; use base=nf4 or int8"
        )
    if adapter.base == "int8":
        values[names.eight[0]] = names.eight[1]
    if is_quantized:
        values |= {names.four[0]: names.four[1], names.nested[0]: adapter.double_quantization}
        values |= {names.four_type: adapter.base} if adapter.base == "fp4" else {}
    return values


def _write_targets(adapter: Adapter, software: str, model: Model) -> dict[str, Any]:
    """Return the keys of the layers and of the parameters of experts that have adapters."""
    names, values = ADAPTER_KEYS_OF.get(software, TRL), dict[str, Any]()
    targets = adapter.targets if model.moe is None else _list_frozen_expert_targets(adapter, model)
    if parameters := [target for target in EXPERT_TARGETS if target in adapter.targets]:
        if not names.parameters:
            raise UserError(
                f"adapter.targets={','.join(parameters)}: {software} has no key for parameters of experts; use "
                "targets of attention, or axolotl"
            )
        values[names.parameters] = [f"mlp.{target}" for target in parameters]
    if targets[0] == ALL_LINEAR and names is AXOLOTL:
        values["lora_target_linear"] = True
        targets = targets[1:]
    elif targets[0] == ALL_LINEAR and len(targets) > 1:
        targets = list_targets(model, adapter)
    if targets == (ALL_LINEAR,):
        values[names.targets] = names.every[0]
    elif targets:
        values[names.targets] = ",".join(targets) if names is LLAMAFACTORY else list(targets)
    return values


def _read_base(values: Values, names: AdapterKeys, *, on: bool) -> str | None:
    """Return how the base is stored, or None; doubt few bits without an adapter, and other numbers of bits."""
    by_key = {name: values[name] for name, _ in (names.four, names.eight) if values[name] not in (None, False)}
    if names is SWIFT and by_key and values.given.get("quant_method") is None:
        values.mark_not_modelled(names.four[0], "has no effect without quant_method: bnb; counted in 16 bits")
        return None
    for key, value in by_key.items():
        is_four = (key, value) == names.four
        is_eight = (key, value) == names.eight
        if on and (is_four or is_eight) and len(by_key) == 1:
            return _read_four_bit_type(values, names) if is_four else "int8"
        bits = "4 bits" if is_four else "8 bits" if is_eight else "few bits"
        values.mark_not_modelled(key, f"weights in {bits}{'' if on else ' without an adapter'}: not counted")
    return _read_loaded_base(values, on=on) if names is AXOLOTL else None


def _read_four_bit_type(values: Values, names: AdapterKeys) -> str:
    """Return the format of a base in 4 bits; doubt one that bitsandbytes does not have."""
    given = values[names.four_type]
    if given not in (None, *FOUR_BIT_BASES):
        values.mark_not_modelled(names.four_type, f"{given}: none of nf4 and fp4; counted as nf4")
        return "nf4"
    return given or "nf4"


def _read_loaded_base(values: Values, *, on: bool) -> str | None:
    """Return the base as Axolotl lets transformers load it; None if it is dequantized, as it is for full weights."""
    loaded_as = values[LOADED_AS]
    if loaded_as is None or values.given.get(f"{LOADED_AS}_kwargs.dequantize") is True:
        return None
    if loaded_as == "FineGrainedFP8Config" and on:
        return "fp8"
    why = "without an adapter" if loaded_as == "FineGrainedFP8Config" else "which transformers does not train over"
    values.mark_not_modelled(LOADED_AS, f"weights in few bits, {why}: counted in 16 bits, as with dequantize: true")
    return None


def follow_weights(values: Values, fields: dict[str, Any], model: Model) -> None:
    """Take the base of an adapter from a repository whose weights are quantized, as transformers keeps them.

    Marks the model's key where these weights are counted in 16 bits.
    """
    quantization = model.quantization
    adapter = fields.get("job.adapter")
    is_dequantized = values.given.get(f"{LOADED_AS}_kwargs.dequantize") is True
    if not quantization or is_dequantized:
        return
    if adapter and adapter["base"] in (None, quantization) and quantization in KEPT_IN_TRAINING:
        adapter |= {"base": quantization, "double_quantization": model.double_quantization}
        return
    why = "which is not modelled here" if adapter else "over which transformers trains adapters alone"
    counted = adapter["base"] if adapter and adapter["base"] else "16 bits"
    what = f"its weights are quantized ({quantization}), {why}; counted in {counted}"
    values.mark_not_modelled("model_name_or_path", what)


# where the blocks of a language model are, by the names of its modules in transformers
BLOCKS = ("model", "model.language_model", "language_model.model", "model.text_model")
PATTERN_LAYERS = 48


def _match_targets(values: Values, pattern: str, *, key: str) -> tuple[str, ...]:
    """Return the layers whose modules a pattern matches in full, as peft applies it; doubt one of only some blocks.

    A pattern that may take long is doubted too.
    """
    matcher = compile_pattern(pattern)
    if matcher is None:
        values.mark_not_modelled(key, f"{pattern}: a pattern that is not read; counted as all linear layers")
        return (ALL_LINEAR,)
    for blocks in BLOCKS:
        modules = {target: _list_modules(target, blocks=blocks) for target in (*LINEAR_TARGETS, *END_TARGETS)}
        matches = {target: [bool(matcher.fullmatch(name)) for name in names] for target, names in modules.items()}
        if matched := tuple(target for target, of_blocks in matches.items() if any(of_blocks)):
            if not all(all(matches[target]) for target in matched):
                values.mark_not_modelled(key, f"{pattern}: layers of some blocks; counted in all")
            return matched
    values.mark_not_modelled(
        key, f"{pattern}: matches none of {', '.join(LINEAR_TARGETS)} in a block; counted as all linear layers"
    )
    return (ALL_LINEAR,)


def _strip_attention(target: str) -> str:
    """Return ``q_proj`` of ``self_attn.q_proj``, as peft compares the last names of modules; other names unchanged."""
    *parents, name = target.split(".")
    is_attention = parents == ["self_attn"] and TARGETS.get(name, ("",))[0].startswith("attention.")
    return name if is_attention else target


def _resolve_targets(values: Values, names: AdapterKeys) -> tuple[str, ...]:
    """Return the layers with adapters; other names than those of Llama's linear layers are doubted."""
    given = values[names.targets]
    if values.given.get("lora_target_linear") is True and names is AXOLOTL:  # which adds them to the other targets
        return (ALL_LINEAR, *(word for word in to_list(given) if word in END_TARGETS))
    if names.pattern and values[names.pattern]:
        return _match_targets(values, str(values[names.pattern]), key=names.pattern)
    if isinstance(given, str) and set(given) & set("\\.*+[(|"):
        return _match_targets(values, given, key=names.targets)
    words = [word.strip() for text in to_list(given) for word in str(text).split(",") if word.strip()]
    if not words:
        if names.lists_linears:
            return (ALL_LINEAR,)
        values.approximate(names.switch, "no target modules: peft's own for the model, counted as q_proj and v_proj")
        return ("q_proj", "v_proj")
    if any(word in names.every for word in words):
        return (ALL_LINEAR,)
    words = [_strip_attention(word) for word in words]
    supported = (*LINEAR_TARGETS, *END_TARGETS)
    known = tuple(word for word in words if word in supported)
    if len(known) < len(words):
        unsupported_targets = ", ".join(word for word in words if word not in supported)
        values.mark_not_modelled(
            names.targets, f"{unsupported_targets}: not supported; only {', '.join(supported)} are counted"
        )
    return known or (ALL_LINEAR,)
