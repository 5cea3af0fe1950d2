"""TrainingArguments, accelerate's YAML and DeepSpeed's JSON -> model, layout and job.

ranks = dp·cp·tp; global batch = per_device_train_batch_size · gradient_accumulation_steps · dp
"""

from __future__ import annotations

from typing import Any

from fivefold.interop.equivalence import divide_rates
from fivefold.interop.format import RANKS_MISSING, Asked, Document, ParsedConfig, build_reading, replicas, world
from fivefold.interop.huggingface.keys import FSDP, OF_WIDTH, PARALLEL, PREFIX, STAGE_3
from fivefold.interop.huggingface.parse import beside, find_strategy
from fivefold.interop.keys import Values, listed
from fivefold.job import Recipe, recipe
from fivefold.model import catalog
from fivefold.model.spec import Model
from fivefold.record import Mistake
from fivefold.results.reading import Reading

ATTENTION = {
    "sdpa": "flash2", "flash_attention_2": "flash2", "flash_attention_3": "flash", "eager": "unfused",
    "flex_attention": "flash2",
}  # fmt: skip

PLUGINS = ("LigerPlugin", "CutCrossEntropyPlugin")  # of Axolotl

OPTIMIZERS = {
    "adamw_torch": "adamw", "adamw_torch_fused": "adamw", "adamw_hf": "adamw", "adamw": "adamw", "adam": "adamw",
    "adamw_apex_fused": "adamw", "adamw_anyprecision": "adamw", "adamw_torch_xla": "adamw", "adamw_8bit": "adamw8bit",
    "adamw_bnb_8bit": "adamw8bit", "paged_adamw_8bit": "adamw8bit", "adamw_torch_8bit": "adamw8bit",
    "adafactor": "adafactor", "sgd": "sgd",
    "muon": "muon", "adamw_bnb_8bit_paged": "adamw8bit",
}  # fmt: skip

MOST = 2**48


def to_job(config: ParsedConfig, asked: Asked) -> Reading:
    """Return model, layout and job."""
    document, values = config.document, config.values
    kind = find_strategy(values.given)
    check_strategy(values)
    ranks = world(document, asked)
    if "stage" in values.table and values["stage"] not in ("sft", "pt"):
        values.doubt("stage", "another objective than the next token; counted as it")
    model, missing = _model(values, document, config.model)
    if values["max_length"] is None:
        missing += ("the length of a sequence: add max_length=4096 to the file",)
    if model is None or ranks is None or values["max_length"] is None:
        missing += () if ranks else (RANKS_MISSING,)
        return build_reading(config, {}, model=model, ranks=None, missing=missing)
    values.given |= {key: OF_WIDTH[key](model.width) for key in config.unset}
    fields = values.fields()
    fields |= _degrees(values, kind, ranks, asked.ranks_per_node)
    fields |= _batch(values, fields, kind) | read_optimizer(values, kind) | _stack(values, kind)
    fields |= _units(values, model) if kind == "fsdp" else {}
    fields |= sizes(values) if kind == "deepspeed" else {}
    if kind == "ddp":
        check_loaded_type(values)
    fields["job.sequence"] = values.whole("max_length")
    fields["job.precision"] = _precision(values, kind)
    fields["job.documents"] = "apart" if values["padding_free"] else "joined"
    on = [
        values["gradient_checkpointing"],
        values["activation_checkpointing"],
        values["fsdp_config.activation_checkpointing"],
        values[f"{FSDP}activation_checkpointing"],
    ]
    if "offload" in str(values["gradient_checkpointing"]):
        values.doubt("gradient_checkpointing", "kept inputs of blocks in host memory, or on disk")
    fields["layout.ac"] = "full" if any(each not in (None, False, "none") for each in on) else "none"
    return build_reading(config, fields, model=model, ranks=ranks, missing=missing)


KNOWN_STRATEGIES = ("", "NO", "FSDP", "DEEPSPEED", "MULTI_GPU")

LIGER_KERNELS = ("rope", "rms_norm", "layer_norm", "swiglu", "glu_activation", "cross_entropy", "rms_norm_gated")


def check_strategy(values: Values) -> None:
    """Mark a strategy that is read as another, and kernels of Liger that are counted all together."""
    if str(values["accelerate.distributed_type"]).upper() not in KNOWN_STRATEGIES:
        values.doubt("accelerate.distributed_type", "is neither FSDP, DeepSpeed nor DDP")
    for key in ("optimizer", "param"):
        name = f"deepspeed.zero_optimization.offload_{key}.device"
        if values[name] == "nvme":
            values.doubt(name, "states on disk: counted in host memory")
    if values["accelerate.deepspeed_config.offload_optimizer_device"] == "nvme":
        values.doubt("accelerate.deepspeed_config.offload_optimizer_device", "states on disk")
    for name in (f"liger_{kernel}" for kernel in LIGER_KERNELS):
        if values["use_liger_kernel"] and values.says(name):
            if values[name]:
                values.approximate(name, "is one of Liger's kernels, which are counted all together")
            else:
                values.doubt(name, "is off among Liger's kernels, which are counted all together")


def check_loaded_type(values: Values) -> None:
    """Mark weights that are loaded in 16 bits where nothing makes them fp32 again: DDP trains them so."""
    for name in ("torch_dtype", "dtype"):
        if str(values[name]).removeprefix("torch.") in ("bfloat16", "float16"):
            values.doubt(name, "under DDP weights, gradients and moments are then in 16 bits: counted in fp32")


def _model(values: Values, document: Document, asked: Model | None) -> tuple[Model | None, tuple[str, ...]]:
    """The user's model, a folder's, or the catalog's of that repository."""
    if asked:
        return asked, ()
    said = values["model_name_or_path"]
    if said is None:
        return None, ("the model: say --model NAME",)
    if file := beside(f"{said}/config.json", document):
        return catalog.resolve(str(file.parent)), ()
    name = str(said).rstrip("/").rpartition("/")[2].lower()
    for key, entry in catalog.CATALOG.items():
        if key == name or name in _names(entry.source):
            return catalog.named(key), ()
    return None, (f"the model {said!r}, which is not of the catalog: say --model NAME, or its config.json",)


def _names(source: str) -> set[str]:
    """Names of a repository: with its version, as an instruction-tuned or base model."""
    base = source.lower().rpartition("/")[2].removesuffix("-hf").removesuffix("-base").removesuffix("-instruct")
    ends = ("", "-hf", "-base", "-instruct", "-chat", "-it", "-pt", "-chat-hf", "-instruct-2507", "-thinking-2507")
    later = base.replace("llama-3-", "llama-3.1-").replace("qwen2-7b", "qwen2.5-7b")  # the same sizes
    return {name + end for name in (base, later, later.removeprefix("meta-")) for end in ends}


def _degrees(values: Values, kind: str, ranks: int, per_node: int) -> dict[str, Any]:
    """dp, and how weights and states are sharded."""
    tp, cp = values[f"{PARALLEL}tp_size"], values.optional("sequence_parallel_degree") or values[f"{PARALLEL}cp_size"]
    ulysses = values.whole(f"{PARALLEL}sp_size")
    if cp > 1 and ulysses > 1:
        raise Mistake(f"{values.origin}: cp_size={cp} and sp_size={ulysses}; accelerate takes one of them")
    cp = max(cp, ulysses)
    if kind == "deepspeed":
        tp = max(tp, values["deepspeed.tensor_parallel.autotp_size"] or 1)
        cp = max(cp, values["deepspeed.sequence_parallel_size"] or 1)
        if cp > 1 and values["sequence_parallel_degree"]:
            values.approximate("sequence_parallel_degree", "a ring of Axolotl's own; counted as DeepSpeed's Ulysses")
    dp = replicas(ranks, tp * cp, of="tp·cp", origin=values.origin)
    assert dp is not None
    found: dict[str, Any] = {"layout.dp": dp, "layout.tp": tp, "layout.cp": cp}
    if tp > 1:  # rows are all-reduced: transformers' tp_plan of a model, DeepSpeed's AutoTP
        found["layout.sp"] = False
        if kind != "deepspeed":
            values.approximate(
                f"{PARALLEL}tp_size", "cuts neither the embedding nor, in the loss, the logits; counted as cut"
            )
    if ulysses > 1 or (cp > 1 and kind == "deepspeed"):
        found["layout.cp_kind"] = "ulysses"
    if kind == "deepspeed":
        shard = values["deepspeed.zero_optimization.mics_shard_size"]
        if values.says("deepspeed.zero_optimization.mics_shard_size"):
            values.approximate(
                "deepspeed.zero_optimization.mics_shard_size", "was removed in 0.19.8; read as a shard group"
            )
        stage = _zero_stage(values)
        group = {"layout.shard_group": shard} if stage and isinstance(shard, int) and 0 < shard < dp * cp else {}
        return found | {"layout.zero": stage if dp * cp > 1 or stage == 0 else 0} | group
    if kind == "ddp" or dp * cp == 1:
        return found | {"layout.zero": 0}
    return found | _fsdp(values, dp * cp, per_node)


def _zero_stage(values: Values) -> int:
    key = "accelerate.deepspeed_config.zero_stage"
    if values.says(key):
        return values.whole(key, least=0)
    if any(name.startswith("deepspeed.") for name in values.given):
        return values.whole("deepspeed.zero_optimization.stage", least=0)
    return values.whole(key, least=0)


def _fsdp(values: Values, replicas: int, per_node: int) -> dict[str, Any]:
    """ZeRO-3, freed after the forward or kept to the backward; in groups where replicas are said."""
    said, version = values["fsdp"], values[f"{FSDP}version"] if not values["fsdp"] else values["fsdp_config.version"]
    policy = values[f"{FSDP}reshard_after_forward"] if not said else values["fsdp_config.reshard_after_forward"]
    strategy = str(values[f"{FSDP}sharding_strategy"]).upper()
    if said:
        words = [str(word) for word in said] if isinstance(said, list) else str(said).split()
        strategy = words[0].upper()
        if "offload" in words:
            values.doubt("fsdp", "weights, gradients and optimizer in host memory: not counted")
    elif version == 1 and isinstance(policy, str) and values.says(f"{FSDP}reshard_after_forward"):
        strategy = policy.upper()
    names = {"1": "FULL_SHARD", "2": "SHARD_GRAD_OP", "3": "NO_SHARD", "4": "HYBRID_SHARD", "5": "HYBRID_SHARD_ZERO2"}
    strategy = names.get(strategy, strategy)
    if version == 1:
        if strategy == "NO_SHARD":
            return {"layout.zero": 0}
        keys = [f"{FSDP}version"] if not said else ["fsdp"]
        values.approximate(keys[0], "FSDP1 flattens the weights of a unit; counted as FSDP2")
        keeps = strategy in ("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2")
    else:
        keeps = policy is False or str(policy).lower() == "false"
    found: dict[str, Any] = {"layout.zero": 3}
    copies = values[f"{PARALLEL}dp_replicate_size"]
    if copies > 1:
        if replicas % copies:
            raise Mistake(f"{values.origin}: dp_replicate_size={copies} does not divide {replicas} ranks")
        found["layout.shard_group"] = replicas // copies
    elif strategy.startswith("HYBRID") and replicas > per_node and replicas % per_node == 0:
        found["layout.shard_group"] = per_node
    return found | ({"job.stack.reshard": "backward"} if keeps else {})


def _units(values: Values, model: Model) -> dict[str, Any]:
    """What FSDP gathers at once: blocks, and the rest as a unit that stays gathered under FSDP1, and under FSDP2 if
    embedding and head are one weight (accelerate/utils/fsdp_utils.py, fsdp2_prepare_model).
    """
    said, policy = values["fsdp"], f"{FSDP}auto_wrap_policy"
    version = values["fsdp_config.version"] if said else values[f"{FSDP}version"]
    if values.says(policy) and str(values[policy]).upper() not in ("TRANSFORMER_BASED_WRAP", "TRANSFORMER_AUTO_WRAP"):
        values.doubt(policy, "units of another size; counted as blocks")
    joined = version == 1 or model.tied_embeddings
    return {"job.stack.gathers_again": "root"} if joined else {}


def _batch(values: Values, fields: dict[str, Any], kind: str) -> dict[str, Any]:
    """Micro-batch and global batch; ``Mistake`` if two files say two numbers."""
    dp = fields["layout.dp"]
    micro = _one(values, "per_device_train_batch_size", "deepspeed.train_micro_batch_size_per_gpu")
    inner = "deepspeed.gradient_accumulation_steps"
    other = "accelerate.deepspeed_config.gradient_accumulation_steps"
    many = _one(values, "gradient_accumulation_steps", inner if values.says(inner) or not values.says(other) else other)
    whole = values["deepspeed.train_batch_size"]
    if whole is not None and kind == "deepspeed":
        if not values.says("gradient_accumulation_steps") and values["deepspeed.gradient_accumulation_steps"] is None:
            many = max(1, whole // (micro * dp))
        if whole != micro * many * dp:
            raise Mistake(
                f"{values.origin}: train_batch_size={whole} is not micro-batch·accumulation·dp={micro}·{many}·{dp}="
                f'{micro * many * dp}; let DeepSpeed\'s be "auto"'
            )
    steps = values["max_steps"]
    found = {"layout.mbs": micro, "job.global_batch": micro * many * dp}
    return found | ({"job.steps": steps} if isinstance(steps, int) and steps > 0 else {})


def _one(values: Values, ours: str, theirs: str) -> int:
    """The number that the trainer's key and DeepSpeed's say."""
    if values[theirs] is None or not values.says(theirs):
        return values.whole(ours)
    if values.says(ours) and values[ours] != values[theirs]:
        raise Mistake(
            f'{values.origin}: {ours}={values[ours]}, but {theirs}={values[theirs]}; let DeepSpeed\'s be "auto"'
        )
    return values.whole(theirs)


def _stack(values: Values, kind: str) -> dict[str, Any]:
    """Kernels, and what the strategy does."""
    said = str(values["attn_implementation"]).rpartition("/")[2]
    if said not in ATTENTION:
        values.doubt("attn_implementation", "is not known here; counted as flash_attention_2")
    compiled = bool(values["torch_compile"]) or str(values["accelerate.dynamo_config.dynamo_backend"]).upper() not in (
        "NO",
        "NONE",
    )
    liger = bool(values["use_liger_kernel"])
    plugins = [str(each) for each in listed(values["plugins"])]
    never = (
        liger or bool(values["cut_cross_entropy"]) or any(each.endswith("CutCrossEntropyPlugin") for each in plugins)
    )
    strange = [each for each in plugins if not each.endswith(PLUGINS)]
    if strange:
        values.doubt("plugins", f"{', '.join(strange)}: not known here, not counted")
    found: dict[str, Any] = {
        "job.stack.name": "deepspeed" if kind == "deepspeed" else "fsdp2",
        "job.stack.attention": ATTENTION.get(said, "flash2"), "job.stack.compile": compiled,
        "job.stack.kernels": "fused" if compiled or liger else "plain",
        "job.stack.loss": "chunked" if never else "plain",
    }  # fmt: skip
    if kind == "ddp":  # torch.nn.parallel.DistributedDataParallel, which reduces after the last micro-batch
        found |= {
            "job.stack.name": "ddp",
        }  # fmt: skip
    if kind == "fsdp":  # Trainer runs all but the last micro-batch under no_sync
        found |= {"job.stack.reduce": "step", "job.stack.reduce_in_fp32": False}
    if kind == "deepspeed":
        stage, overlap = _zero_stage(values), values["deepspeed.zero_optimization.overlap_comm"]
        hides = stage == 3 if overlap is None else bool(overlap)
        wide = values["deepspeed.data_types.grad_accum_dtype"] == "fp32"
        found |= {"job.stack.overlap": ("dp",) if hides else (), "job.stack.reduce_in_fp32": wide}
    return found


def _precision(values: Values, kind: str) -> Recipe:
    """What a rank holds of a parameter."""
    own = values["bf16"] is True or values["fp16"] is True  # Trainer's word goes over accelerate's
    mixed = "no" if own else str(values["accelerate.mixed_precision"])
    half = values["bf16"] is True or mixed == "bf16" or values["deepspeed.bf16.enabled"] is True
    fp16 = values["fp16"] is True or mixed == "fp16" or values["deepspeed.fp16.enabled"] is True
    if values["fp16"] is True and values["bf16"] is True and not values.says("bf16"):  # Axolotl's default
        values.approximate("fp16", "bf16 is on without bf16: false, and goes before fp16; counted as bf16")
        fp16 = False
    if half and fp16:
        raise Mistake(f"{values.origin}: bf16 and fp16 are both on; keep one")
    if mixed == "fp8":
        values.doubt("accelerate.mixed_precision", "fp8 depends on its library; read as bf16")
        half = True
    if values["pure_bf16"] and kind != "deepspeed":  # which keeps fp32 masters of any weights
        return recipe("bf16-pure")
    half = half or bool(values["pure_bf16"])
    if not (half or fp16):
        return recipe("tf32" if values["tf32"] else "fp32")
    if kind == "ddp":
        return recipe("bf16-autocast" if half else "fp16-autocast")
    if kind == "deepspeed" and values["deepspeed.data_types.grad_accum_dtype"] == "fp32":
        return recipe("bf16") if half else recipe("fp16").replace(name="fp16-grad32", accumulated_bytes=4)
    if half:
        return recipe("bf16").reduced(in_fp32=False)
    return recipe("fp16")


def read_optimizer(values: Values, kind: str) -> dict[str, Any]:
    """Return the optimizer, its offload and the learning rate's schedule as fields of a job."""
    ds = "deepspeed.optimizer."
    own = kind == "deepspeed" and values[f"{ds}type"] is not None
    said = str(values[f"{ds}type"] if own else values["optim"]).lower().rpartition(".")[2]
    if said not in OPTIMIZERS:
        values.doubt(f"{ds}type" if own else "optim", "is not among the optimizers here; read as adamw")
    betas = (values["adam_beta1"], values["adam_beta2"])
    found: dict[str, Any] = {"job.optimizer.kind": OPTIMIZERS.get(said, "adamw")}
    if own:
        betas = tuple(values[f"{ds}params.betas"] or betas)
        named = {
            "lr": "job.learning_rate.peak",
            "eps": "job.optimizer.epsilon",
            "weight_decay": "job.optimizer.weight_decay",
        }
        found |= {
            path: values[f"{ds}params.{name}"]
            for name, path in named.items()
            if values[f"{ds}params.{name}"] is not None
        }
    clip = values["deepspeed.gradient_clipping"] if kind == "deepspeed" else None
    if clip is None and kind == "deepspeed":
        clip = values["accelerate.deepspeed_config.gradient_clipping"]
    found |= {"job.optimizer.clip": clip} if isinstance(clip, float | int) else {}
    offload = (values["deepspeed.zero_optimization.offload_optimizer.device"] not in ("none", None)
               or values["accelerate.deepspeed_config.offload_optimizer_device"] not in ("none", None)
               or bool(values["deepspeed.zero_optimization.cpu_offload"]))  # fmt: skip
    return found | {
        "job.optimizer.betas": betas,
        "job.offload": ("optimizer",) if kind == "deepspeed" and offload else (),
        **read_rate(values),
    }


def read_rate(values: Values) -> dict[str, Any]:
    """The learning rate's schedule; a decay to the end of the run, from where the warm-up ends, unless it says when."""
    warmup = values["warmup_steps"] if isinstance(values["warmup_steps"], int) else 0
    steps = values["max_steps"] if isinstance(values["max_steps"], int) and values["max_steps"] > 0 else 1000
    said, more = str(values["lr_scheduler_type"]), "lr_scheduler_kwargs."
    floor = values.number(f"{more}min_lr_rate") or values.number(f"{more}min_lr_ratio") or 0.0
    if (least := values.number(f"{more}min_lr")) and values["learning_rate"]:
        floor = divide_rates(least, values["learning_rate"])
    if said.startswith("constant"):
        kind: dict[str, Any] = {"kind": "constant", "floor": 1.0}
    elif said.startswith("cosine"):
        kind = {"kind": "cosine", "floor": floor}
    else:
        decay = values.optional(f"{more}num_decay_steps") or max(1, steps - warmup)
        kind = {"kind": "wsd", "floor": floor, "decay_steps": decay}
    kind["warmup_steps"] = min(warmup, steps)
    return {f"job.learning_rate.{name}": value for name, value in kind.items()}


def sizes(values: Values) -> dict[str, Any]:
    """Fields of the stack by path."""
    found = dict[str, Any]()
    for name, ours in {"reduce_bucket_size": "reduce_bucket", **STAGE_3}.items():
        value = values[PREFIX + name]
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MOST:
            raise Mistake(f"{values.origin}: {name} is {value!r}; it is a number of elements, from 0 to {MOST}")
        found[f"job.stack.{ours}"] = int(value)
    return found
