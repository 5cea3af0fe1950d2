"""torchtitan's keys -> model, layout and job: the readers that both versions share, and a Python config of 0.3.

world = dp_replicate · dp_shard · cp · tp · pp; FSDP shards over dp_shard · cp (parallel_dims.py) pipeline_parallel.py:
first and last stage hold fewer layers, because embedding and head count as layers
"""

from __future__ import annotations

from math import prod
from typing import Any

from fivefold.errors import UserError
from fivefold.interop.format import (
    RANKS_MISSING,
    Overrides,
    ParsedConfig,
    build_reading,
    compute_replicas,
    resolve_world,
)
from fivefold.interop.keys import Values, to_list
from fivefold.interop.torchtitan.keys import LOOPED, SCHEDULES
from fivefold.interop.torchtitan.parse import CallValue
from fivefold.job import Recipe, get_recipe
from fivefold.layout.spec import Layout
from fivefold.layout.stages import list_stage_layers
from fivefold.model.spec import Model
from fivefold.results.reading import Reading

AUTOCAST = get_recipe("bf16-autocast")  # under DDP the only 16-bit copies are those that autocast makes for each matmul

FULL_BF16 = get_recipe("bf16-full")

BY_OPERATION = "norm+rope+act"  # selective recomputation by operation, which keeps every second matmul

P = "parallelism."


def to_job(config: ParsedConfig, overrides: Overrides) -> Reading:
    """Return model, layout and job of a Python config."""
    values, model = config.values, config.model
    ranks = resolve_ranks(config, overrides)
    fields = values.fields()
    fields |= {"job.documents": "separate", **read_job(values)}
    is_async_tp = values["compile.enable_async_tensor_parallel"] or values["model_spec.tp_gemm_backend"] != "default"
    fields["job.stack.overlap"] = ("dp", "tp") if is_async_tp else ("dp",)
    fields["job.stack.cuda_graphs"] = "none" if values["training.disable_cuda_graphs"] else "full"
    fields["job.stack.dispatcher"] = (
        "all_to_all" if values["model_spec.moe_comm_backend"] in ("standard", None) else "fused"
    )
    fields["layout.ac"] = _read_recomputation(values)
    fields["layout.sp"] = fields.get("layout.sp", False) or fields["layout.tp"] == 1
    if ranks is not None and model is not None:
        fields |= read_layout(values, model, pp=fields["layout.pp"], ranks=ranks)
        fields["job.precision"] = _read_precision(values)
        has_unsharded_experts = model.moe is not None and fields["layout.ep"] == 1
        fields["layout.etp"] = fields["layout.tp"] if has_unsharded_experts else 1
    missing = () if ranks else (RANKS_MISSING,)
    return build_reading(config, fields, model=model, ranks=ranks if model else None, missing=missing)


def _read_recomputation(values: Values) -> str:
    """Return the recomputation for ``ac=``; modes without an equivalent are approximated and reported."""
    mode = values["activation_checkpoint"]
    if mode is None or mode == "None":
        return "none"
    if mode == "FullAC":
        return "full"
    if mode == "SelectiveAC":
        values.approximate(
            "activation_checkpoint", f"keeps every second matmul; read as ac={BY_OPERATION}, which keeps all of them"
        )
        return BY_OPERATION
    values.mark_not_modelled("activation_checkpoint", "what the compiler then keeps is not known; read as ac=none")
    return "none"


def _read_precision(values: Values) -> Recipe:
    """Return the precision recipe of torchtitan's data types and converters."""
    base_recipe = find_16_bit_dtype(values, sharded=True)  # fully_shard is always applied, over one rank too
    converters = [
        converter for converter in to_list(values["model_spec.converters"]) if isinstance(converter, CallValue)
    ]
    converter_options = {converter.name: converter.named for converter in converters}
    key = "model_spec.converters"
    if base_recipe == FULL_BF16 and converters:
        values.mark_not_modelled("training.dtype", "fp8 matmuls over weights held in bf16; counted as held in fp32")
    for name in converter_options:
        if name not in (
            "Float8LinearConverter",
            "MXFP8LinearConverter",
            "NVFP4LinearConverter",
            "Float8GroupedExpertsConverter",
        ):
            values.mark_not_modelled(key, f"{name} is not counted")
    for name, recipe_name in (("MXFP8LinearConverter", "mxfp8"), ("NVFP4LinearConverter", "nvfp4")):
        if name in converter_options:
            if not converter_options[name].get("fqns"):
                values.mark_not_modelled(key, "the output projection is converted too; counted in 16 bits")
            return get_recipe(recipe_name)
    if "Float8LinearConverter" not in converter_options:
        return base_recipe
    if "lm_head" not in str(converter_options["Float8LinearConverter"].get("filter_fqns", [])):
        values.mark_not_modelled(key, "the output projection is in fp8 too; counted in 16 bits")
    scaling_recipe = converter_options["Float8LinearConverter"].get("recipe_name", "rowwise")
    return get_recipe("fp8-rowwise-gw" if scaling_recipe == "rowwise_with_gw_hp" else "fp8-rowwise")


def read_job(values: Values) -> dict[str, Any]:
    """Return the fields of the job that both versions write with the same keys."""
    seed = {"job.stack.name": "torchtitan", "job.seed": values["debug.seed"] or 0}
    return seed | read_compile(values) | read_learning_rate(values)


def resolve_ranks(config: ParsedConfig, overrides: Overrides) -> int | None:
    """Return the number of ranks; where a layout is searched, that of degrees which leave none open."""
    stated, shards = config.document.ranks, config.values.to_int(f"{P}data_parallel_shard_degree", least=None)
    if overrides.searches and stated is None and shards != -1:
        axes = ("data_parallel_replicate", "context_parallel", "tensor_parallel", "pipeline_parallel")
        stated = shards * prod(config.values.to_int(f"{P}{axis}_degree") for axis in axes)
    return resolve_world(config.document, overrides, stated=stated)


def read_layout(values: Values, model: Model, *, pp: int, ranks: int) -> dict[str, Any]:
    """Return degrees, batch and pipeline; raise ``UserError`` if they do not fit to one another."""
    degrees = read_degrees(values, ranks)
    return degrees | read_batch(values, dp=degrees["layout.dp"], pp=pp) | read_pipeline(values, model, pp=pp)


def read_degrees(values: Values, ranks: int) -> dict[str, Any]:
    """Return dp, ZeRO stage and shard group; raise ``UserError`` if the degrees do not multiply to the ranks."""
    cp, tp, pp = (values.to_int(f"{P}{axis}_parallel_degree") for axis in ("context", "tensor", "pipeline"))
    copies = values.to_int(f"{P}data_parallel_replicate_degree")
    shards = values.to_int(f"{P}data_parallel_shard_degree", least=None)
    shard_count = compute_replicas(ranks, copies * cp * tp * pp, of="dp_replicate·cp·tp·pp", origin=values.origin)
    assert shard_count is not None
    if shards not in (-1, shard_count):
        world = copies * shards * cp * tp * pp
        raise UserError(
            f"{values.origin}: dp_replicate·dp_shard·cp·tp·pp={copies}·{shards}·{cp}·{tp}·{pp}={world}, but there are "
            f"{ranks} ranks; use --gpus NAME:{world}, or data_parallel_shard_degree = {shard_count} or -1"
        )
    fields: dict[str, Any] = {"layout.dp": copies * shard_count}
    if shard_count * cp == 1:
        return fields | {"layout.zero": 0}
    reshard_policy = values[f"{P}fsdp_reshard_after_forward"]
    if reshard_policy not in ("default", "always", "never"):
        raise UserError(
            f"{values.origin}: fsdp_reshard_after_forward is {reshard_policy!r}; it is default, always or never"
        )
    keeps_gathered = reshard_policy == "never" or (reshard_policy == "default" and pp > 1)
    # Pipeline stages defer reduction and resharding to their last backward: gathered once a step.
    fields["layout.zero"] = 2 if keeps_gathered and pp > 1 else 3
    if keeps_gathered and pp == 1:
        fields["job.stack.reshard"] = "backward"
    return fields | ({"layout.shard_group": shard_count * cp} if copies > 1 else {})


def read_batch(values: Values, *, dp: int, pp: int) -> dict[str, Any]:
    """Return micro-batch and global batch."""
    local_batch = values.to_int("training.local_batch_size")
    global_batch = values.to_int("training.global_batch_size", least=None)
    global_batch = local_batch * dp if global_batch < 0 else global_batch
    if global_batch == 0 or global_batch % (local_batch * dp):
        raise UserError(
            f"{values.origin}: global_batch_size={global_batch} is not a multiple of local_batch_size·dp="
            f"{local_batch}·{dp}; try {-(-global_batch // (local_batch * dp) or 1) * local_batch * dp}"
        )
    mbs = local_batch
    if pp > 1:
        mbs = values.to_int(f"{P}pipeline_parallel_microbatch_size")
        if local_batch % mbs:
            raise UserError(
                f"{values.origin}: local_batch_size={local_batch} is not a multiple of the micro-batch size {mbs}; "
                "change one"
            )
        if global_batch > local_batch * dp:
            passes = global_batch // (local_batch * dp)
            values.mark_not_modelled(
                "training.global_batch_size", f"the pipeline is filled and drained {passes} times a step; read as once"
            )
    return {"layout.mbs": mbs, "job.global_batch": global_batch}


def distribute_layers(layers: int, stages: int, *, first: int, last: int) -> tuple[int, ...]:
    """Return the layers of each stage if embedding and head count as ``first`` and ``last`` layers."""
    base_layers, remainder = divmod(layers + first + last, stages)
    sizes = [base_layers + (stage < remainder) for stage in range(stages)]
    sizes[0] -= first
    sizes[-1] -= last
    return tuple(sizes)


def read_pipeline(values: Values, model: Model, *, pp: int) -> dict[str, Any]:
    """Return schedule, virtual stages and layers of each stage."""
    if pp == 1:
        return {}
    schedule_name = str(values[f"{P}pipeline_parallel_schedule"])
    name = next((known for known in (*SCHEDULES, *LOOPED) if known.lower() == schedule_name.lower()), schedule_name)
    is_looped = name in LOOPED
    if name not in SCHEDULES:
        values.mark_not_modelled(
            f"{P}pipeline_parallel_schedule", "is not among the schedules here; read as Interleaved1F1B or 1F1B"
        )
        name = "Interleaved1F1B" if is_looped else "1F1B"
    first = values.to_int(f"{P}pipeline_parallel_first_stage_less_layers", least=0)
    last = values.to_int(f"{P}pipeline_parallel_last_stage_less_layers", least=0)
    stage_modules = values[f"{P}module_fqns_per_model_part"]
    layers_per_stage = values.optional(f"{P}pipeline_parallel_layers_per_stage")
    if stage_modules and not (
        isinstance(stage_modules, list) and all(isinstance(stage, list) for stage in stage_modules)
    ):
        raise UserError(f"{values.origin}: module_fqns_per_model_part must be a list of lists of module names")
    if stage_modules:
        sizes = tuple(sum(str(name).startswith("layers.") for name in stage) for stage in stage_modules)
    else:
        stages = -(-(model.layers + first + last) // layers_per_stage) if layers_per_stage else pp * (1 + is_looped)
        sizes = distribute_layers(model.layers, stages, first=first, last=last)
    if len(sizes) % pp or min(sizes) < 0 or 0 in sizes[1:-1]:
        raise UserError(
            f"{values.origin}: {len(sizes)} stages of {min(sizes)} to {max(sizes)} layers do not spread over pp={pp}; "
            "each rank must have the same number of stages, and each stage between the first and the last a layer"
        )
    v = len(sizes) // pp
    if (v > 1) != is_looped:
        alternative = "1F1B" if is_looped else "Interleaved1F1B"
        raise UserError(f"{values.origin}: {name} does not run {v} stages per rank; use {alternative}")
    fields: dict[str, Any] = {"layout.schedule": SCHEDULES[name], "layout.v": v}
    even_layout = Layout.read({"pp": pp, "v": v, "schedule": SCHEDULES[name]}, origin=values.origin)
    even_sizes = tuple(map(len, list_stage_layers(model, even_layout)))
    return fields if sizes == even_sizes else fields | {"layout.stages": sizes}


def find_16_bit_dtype(values: Values, *, sharded: bool) -> Recipe:
    """Return the recipe before converters to fp8."""
    dtype = values["training.dtype"]
    gathered_dtype = values["training.mixed_precision_param"]
    if dtype == "bfloat16":
        if gathered_dtype == "float32":
            values.mark_not_modelled(
                "training.mixed_precision_param", "weights held in bf16 are gathered in fp32; counted in bf16"
            )
        return FULL_BF16
    if gathered_dtype == "float32":
        return get_recipe("fp32")
    if sharded:
        return get_recipe("bf16")
    if all(values[f"{P}{axis}_parallel_degree"] == 1 for axis in ("tensor", "pipeline", "context")):
        return AUTOCAST
    values.mark_not_modelled(
        "training.mixed_precision_param", "with tp or pp it takes effect only under FSDP; read as fp32"
    )
    return get_recipe("fp32")


def read_learning_rate(values: Values) -> dict[str, Any]:
    """Return the learning rate's schedule: warm-up, stable, decay."""
    ratio = values.number("lr_scheduler.decay_ratio")
    steps = values["training.steps"]
    warmup = min(values["lr_scheduler.warmup_steps"], steps)
    fields: dict[str, Any] = {"job.learning_rate.warmup_steps": warmup}
    if ratio is not None and ratio < 0:
        raise UserError(f"{values.origin}: lr_scheduler.decay_ratio is {ratio:g}; it must be 0 or more")
    # a decay that is longer than the steps after the warm-up lasts as long as they (components/lr_scheduler.py)
    decay_steps = steps - warmup if ratio is None else min(round(steps * ratio), steps - warmup)
    if values["lr_scheduler.min_lr_factor"] == 1.0 or decay_steps == 0:
        return fields | {"job.learning_rate.kind": "constant", "job.learning_rate.floor": 1.0}
    kind = values["lr_scheduler.decay_type"]
    if kind == "cosine" and decay_steps == steps - warmup:
        return fields | {"job.learning_rate.kind": "cosine"}
    if kind != "linear":
        values.approximate("lr_scheduler.decay_type", f"a {kind} decay of {decay_steps} steps; read as a linear one")
    return fields | {"job.learning_rate.kind": "wsd", "job.learning_rate.decay_steps": decay_steps}


def read_compile(values: Values) -> dict[str, Any]:
    """Return whether blocks and the loss are compiled; compiled blocks have fused norms, activations and RoPE."""
    components = to_list(values["compile.components"])
    loss = {"job.stack.compile_loss": "loss" in components}
    if values["compile.enable"] and "model" in components:
        return {"job.stack.compile": True, "job.stack.kernels": "fused"} | loss
    return {"job.stack.compile": False, "job.stack.kernels": "plain"} | loss
