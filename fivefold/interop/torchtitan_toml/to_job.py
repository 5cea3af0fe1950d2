"""torchtitan 0.2's keys -> model, layout and job."""

from __future__ import annotations

from typing import Any

from fivefold.errors import UserError
from fivefold.interop.format import RANKS_MISSING, Overrides, ParsedConfig, build_reading
from fivefold.interop.keys import Values, to_list
from fivefold.interop.torchtitan.flavors import resolve_flavor
from fivefold.interop.torchtitan.to_job import (
    BY_OPERATION,
    FULL_BF16,
    find_16_bit_dtype,
    read_job,
    read_layout,
    resolve_ranks,
)
from fivefold.job import Recipe, get_recipe
from fivefold.layout.schedule.pipeline_schedule import DEFAULT_SCHEDULE, PIPELINE_SCHEDULES
from fivefold.model.spec import Model
from fivefold.results.reading import Reading

FLOAT8 = {None: "fp8", "tensorwise": "fp8", "rowwise": "fp8-rowwise", "rowwise_with_gw_hp": "fp8-rowwise-gw"}
MXFP8 = ("mxfp8_cublas", "mxfp8_cublas_rceil")  # differ in how scales are rounded

P = "parallelism."


def to_job(config: ParsedConfig, overrides: Overrides) -> Reading:
    """Return model, layout and job of a TOML file."""
    values = config.values
    ranks = resolve_ranks(config, overrides)
    model = config.model or resolve_flavor(str(values["model.name"]), str(values["model.flavor"]))
    fields = values.fields()
    fields |= read_job(values) | _read_optimizer(values)
    fields["job.stack.overlap"] = ("dp", "tp") if values[f"{P}enable_async_tensor_parallel"] else ("dp",)
    fields["job.documents"] = "separate" if "flex" in str(values["model.flavor"]) else "joined"
    fields["layout.ac"] = _read_recomputation(values)
    if ranks is not None:
        fields |= read_layout(values, model, pp=fields["layout.pp"], ranks=ranks)
        fields["job.precision"] = _read_precision(values, model, sharded=fields["layout.zero"] > 0)
        fields["layout.etp"] = _read_experts(values, model)
        overlaps_experts = values[f"{P}pipeline_parallel_expert_parallel_overlap"] and fields["layout.ep"] > 1
        fields["job.stack.pairs"] = bool(
            overlaps_experts and PIPELINE_SCHEDULES[fields.get("layout.schedule", DEFAULT_SCHEDULE)].pairs_passes
        )
    missing = () if ranks else (RANKS_MISSING,)
    return build_reading(config, fields, model=model, ranks=ranks, missing=missing)


def _read_experts(values: Values, model: Model) -> int:
    """Return etp; without expert parallelism, experts are sharded as the MLP is."""
    if model.moe is None:
        return 1
    if values[f"{P}expert_parallel_degree"] == 1:
        return values.to_int(f"{P}tensor_parallel_degree")
    return values.to_int(f"{P}expert_tensor_parallel_degree")


def _read_recomputation(values: Values) -> str:
    """Return the ``ac`` of torchtitan's activation checkpointing."""
    mode = values["activation_checkpoint.mode"]
    option = str(values["activation_checkpoint.selective_ac_option"])
    if mode in ("none", "full"):
        return str(mode)
    if mode == "selective" and option.isdecimal():
        return "full" if int(option) < 2 else f"full/{option}"
    if mode == "selective":
        values.approximate(
            "activation_checkpoint.selective_ac_option",
            f"keeps every second matmul; read as ac={BY_OPERATION}, which keeps all of them",
        )
        return BY_OPERATION
    values.mark_not_modelled("activation_checkpoint.mode", "what the compiler then keeps is not known; read as ac=none")
    return "none"


def _read_optimizer(values: Values) -> dict[str, Any]:
    kind = str(values["optimizer.name"])
    if kind not in ("AdamW", "Adam"):
        values.mark_not_modelled("optimizer.name", "is not among the optimizers here; read as AdamW")
    return {
        "job.optimizer.kind": "adamw",
        "job.optimizer.betas": (values["optimizer.beta1"], values["optimizer.beta2"]),
    }


def _read_precision(values: Values, model: Model, *, sharded: bool) -> Recipe:
    """Return the precision recipe of torchtitan's data types and converters."""
    base_recipe = find_16_bit_dtype(values, sharded=sharded)
    converters = [str(name).rpartition(".")[2] for name in to_list(values["model.converters"])]
    linear = "quantize.linear."
    if "float8" in converters:
        scaling = values[f"{linear}float8.recipe_name"]
        if not isinstance(scaling, str | None) or scaling not in FLOAT8:
            raise UserError(
                f"{values.origin}: {linear}float8.recipe_name is {scaling!r}; it is {' or '.join(filter(None, FLOAT8))}"
            )
        name = FLOAT8[scaling]
        if name == "fp8" and values[f"{linear}float8.enable_fsdp_float8_all_gather"] and sharded:
            name = "fp8-wire"
        kind = "float8"
    elif "mx" in converters:
        name, kind = "mxfp8", "mx"
        if values[f"{linear}mx.recipe_name"] not in MXFP8:
            values.mark_not_modelled(f"{linear}mx.recipe_name", "is not among the recipes here; read as mxfp8_cublas")
    else:
        return base_recipe
    if base_recipe == FULL_BF16:
        values.mark_not_modelled("training.dtype", "fp8 matmuls over weights held in bf16; counted as held in fp32")
    if not any("output" in str(part) for part in values[f"{linear}{kind}.filter_fqns"]):
        values.mark_not_modelled(
            f"{linear}{kind}.filter_fqns", "the output projection is in fp8 too; counted in 16 bits"
        )
    if model.moe and not values[f"quantize.grouped_mm.{kind}.fqns"]:
        values.mark_not_modelled(f"quantize.grouped_mm.{kind}.fqns", "experts stay in 16 bits; counted in fp8")
    if not sharded:
        values.mark_not_modelled("model.converters", "fp8 over fp32 weights; read as fp8-te")
        return get_recipe("fp8-te")
    return get_recipe(name)
