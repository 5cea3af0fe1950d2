"""torchtitan 0.2's TOML files, read and written."""

from __future__ import annotations

from typing import Any

from fivefold.interop.format import RANKS_MISSING, Asked, Document, Plan, Written, reading, world
from fivefold.interop.keys import Table, Values, flat, listed, written
from fivefold.interop.render import toml_file
from fivefold.interop.torchtitan.emit import recomputed, shared
from fivefold.interop.torchtitan.flavors import flavor_of, flavored, unknown
from fivefold.interop.torchtitan.keys import TOML
from fivefold.interop.torchtitan.read import batch, compiled, degrees, pipeline, rate, sixteen_bits
from fivefold.job import Recipe, recipe
from fivefold.model.spec import Model
from fivefold.record import Mistake
from fivefold.results.reading import Reading

VERSION = "0.2.2"
FLOAT8 = {None: "fp8", "tensorwise": "fp8", "rowwise": "fp8-rowwise", "rowwise_with_gw_hp": "fp8-rowwise-gw"}
TABLES = {"training", "parallelism", "activation_checkpoint", "lr_scheduler", "model", "job", "optimizer"}
OLD = {  # names of before 0.1, and what they became
    "training.batch_size": "training.local_batch_size",
    "training.compile": "compile.enable",
    "float8.recipe_name": "quantize.linear.float8.recipe_name",
    "float8.enable_fsdp_float8_all_gather": "quantize.linear.float8.enable_fsdp_float8_all_gather",
    "float8.filter_fqns": "quantize.linear.float8.filter_fqns",
    "float8.moe_fqns": "quantize.grouped_mm.float8.fqns",
    "float8.emulate": "quantize.linear.float8.emulate",
    "float8.precompute_float8_dynamic_scale_for_fsdp": (
        "quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp"
    ),
}
BY_OPERATION = "norm+rope+act"


def recognises(document: Document) -> bool:
    """Whether a TOML file has torchtitan's tables."""
    tables = {key for key, value in document.values.items() if isinstance(value, dict)}
    if document.kind != "toml" or "model" not in tables:
        return False
    return "flavor" in document.values["model"] or len(tables & TABLES) >= 3


def read(document: Document, asked: Asked, *, table: Table = TOML) -> Reading:
    """A TOML file in our nouns."""
    origin = document.origin
    given = {OLD.get(key, key): value for key, value in flat(document.values, origin=origin).items()}
    for key in [key for key in given if key == "model.converters" or key.endswith("fqns")]:
        if isinstance(names := given[key], str):
            given[key] = [name.strip() for name in names.split(",") if name.strip()]
    values = Values(table, given, origin=origin, software=f"torchtitan {VERSION}")
    ranks = world(document, asked)
    model = asked.model or flavored(str(values["model.name"]), str(values["model.flavor"]))
    fields = values.fields()
    fields |= {"job.stack.name": "torchtitan", **compiled(values), **rate(values), **_optimizer(values)}
    fields["job.stack.overlap"] = ("dp", "tp") if values[f"{P}enable_async_tensor_parallel"] else ("dp",)
    fields["job.seed"] = values["debug.seed"] or 0
    fields["job.documents"] = "apart" if "flex" in str(values["model.flavor"]) else "joined"
    fields["layout.ac"] = _recomputed(values)
    if ranks is not None:
        pp = fields["layout.pp"]
        fields |= degrees(values, ranks)
        fields |= batch(values, dp=fields["layout.dp"], pp=pp) | pipeline(values, model, pp=pp)
        fields["job.precision"] = _precision(values, model, sharded=fields["layout.zero"] > 0)
        fields["layout.etp"] = _experts(values, model)
        paired = values[f"{P}pipeline_parallel_expert_parallel_overlap"] and fields["layout.ep"] > 1
        fields["job.stack.pairs"] = bool(paired and fields.get("layout.schedule") == "dualpipev")
    missing = () if ranks else (RANKS_MISSING,)
    return reading(
        ("torchtitan", VERSION), values, fields, document=document, model=model, ranks=ranks, missing=missing
    )


P = "parallelism."


def _experts(values: Values, model: Model) -> int:
    """etp; without expert parallelism, experts are cut as the MLP is."""
    if model.moe is None:
        return 1
    if values[f"{P}expert_parallel_degree"] == 1:
        return values.whole(f"{P}tensor_parallel_degree")
    return values.whole(f"{P}expert_tensor_parallel_degree")


def _recomputed(values: Values) -> str:
    mode, option = values["activation_checkpoint.mode"], str(values["activation_checkpoint.selective_ac_option"])
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
    values.doubt("activation_checkpoint.mode", "what the compiler then keeps is not known; read as ac=none")
    return "none"


def _optimizer(values: Values) -> dict[str, Any]:
    kind = str(values["optimizer.name"])
    if kind not in ("AdamW", "Adam"):
        values.doubt("optimizer.name", "is not among the optimizers here; read as AdamW")
    return {
        "job.optimizer.kind": "adamw",
        "job.optimizer.betas": (values["optimizer.beta1"], values["optimizer.beta2"]),
    }


def _precision(values: Values, model: Model, *, sharded: bool) -> Recipe:
    plain = sixteen_bits(values, sharded=sharded)
    converters = [str(name).rpartition(".")[2] for name in listed(values["model.converters"])]
    linear = "quantize.linear."
    if "float8" in converters:
        said = values[f"{linear}float8.recipe_name"]
        if not isinstance(said, str | None) or said not in FLOAT8:
            raise Mistake(
                f"{values.origin}: {linear}float8.recipe_name is {said!r}; it is {' or '.join(filter(None, FLOAT8))}"
            )
        name = FLOAT8[said]
        if name == "fp8" and values[f"{linear}float8.enable_fsdp_float8_all_gather"] and sharded:
            name = "fp8-wire"
        kind = "float8"
    elif "mx" in converters:
        name, kind = "mxfp8", "mx"
    else:
        return plain
    if not any("output" in str(part) for part in values[f"{linear}{kind}.filter_fqns"]):
        values.doubt(f"{linear}{kind}.filter_fqns", "the output projection is in fp8 too; counted in 16 bits")
    if model.moe and not values[f"quantize.grouped_mm.{kind}.fqns"]:
        values.doubt(f"quantize.grouped_mm.{kind}.fqns", "experts stay in 16 bits; counted in fp8")
    if not sharded:
        values.doubt("model.converters", "fp8 over fp32 weights; read as fp8-te")
        return recipe("fp8-te")
    return recipe(name)


def write(plan: Plan) -> Written:
    """The TOML file of a plan; ``Mistake`` for a model that is no flavor, or what torchtitan cannot run."""
    model, layout, job = plan.model, plan.layout, plan.job
    found = flavor_of(model)
    if found is None:
        raise unknown(model)
    mode, every = recomputed(layout.ac, groups=True)
    values = written(TOML, {"job": job, "layout": layout, "model": model}) | shared(
        plan, head="output", casts=layout.zero > 0
    )
    values |= {
        "model.name": found[0],
        "model.flavor": found[1],
        "activation_checkpoint.mode": "selective" if every > 1 else mode,
        "activation_checkpoint.selective_ac_option": str(every) if every > 1 else None,
        "optimizer.name": "AdamW",
        "optimizer.beta1": job.optimizer.betas[0],
        "optimizer.beta2": job.optimizer.betas[1],
        f"{P}enable_async_tensor_parallel": layout.tp > 1 and "tp" in job.stack.overlap,
        **_converters(plan),
    }
    if model.moe and layout.ep == 1 and layout.etp != layout.tp:
        raise Mistake(
            f"layout {str(layout)!r}: without ep, torchtitan cuts experts over tp; take etp{layout.tp} or ep2"
        )
    if model.moe and layout.ep > 1:
        if layout.etp not in (1, layout.tp):
            raise Mistake(f"layout {str(layout)!r}: torchtitan has etp1 or etp{layout.tp} (tp) alone; take one of them")
        values[f"{P}expert_tensor_parallel_degree"] = layout.etp
    nodes, per_node = plan.hosts
    start = (
        f"torchrun --nnodes {nodes} --nproc_per_node {per_node} -m torchtitan.train --job.config_file torchtitan.toml"
    )
    about = (f"torchtitan {VERSION}: {model.name}, {layout}", f"Start: {start}")
    extra = {
        "job.dump_folder": ("./outputs", "logs and checkpoints"),
        "model.hf_assets_path": ("./assets/hf/tokenizer", "the tokenizer's folder: put yours"),
        "training.dataset": ("c4", "what is read: put yours"),
    }
    return Written({"torchtitan.toml": toml_file(values, TOML, about=about, extra=extra)})


def _converters(plan: Plan) -> dict[str, Any]:
    asked = plan.job.precision
    if not asked.narrow:
        return {}
    if plan.model.moe:
        raise Mistake(f"precision {asked.name}: experts in fp8 are not written for torchtitan; take bf16")
    if asked == recipe("mxfp8"):
        return {"model.converters": ["mx"], "quantize.linear.mx.filter_fqns": ["output"]}
    names = {
        "fp8": "tensorwise",
        "fp8-wire": "tensorwise",
        "fp8-rowwise": "rowwise",
        "fp8-rowwise-gw": "rowwise_with_gw_hp",
    }
    if asked.name not in names or asked != recipe(asked.name):
        raise Mistake(f"precision {asked.name}: torchtitan has {', '.join(names)} and mxfp8; take one of them")
    return {
        "model.converters": ["float8"],
        "quantize.linear.float8.recipe_name": names[asked.name],
        "quantize.linear.float8.filter_fqns": ["output"],
        "quantize.linear.float8.enable_fsdp_float8_all_gather": asked.name == "fp8-wire",
    }
