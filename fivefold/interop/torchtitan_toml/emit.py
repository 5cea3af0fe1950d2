"""Model, layout and job -> a TOML file of torchtitan 0.2; ``UserError`` for what it cannot run."""

from __future__ import annotations

from typing import Any

from fivefold.errors import UserError
from fivefold.interop.format import ConfigPlan, WrittenConfig
from fivefold.interop.keys import write_values
from fivefold.interop.render import render_toml
from fivefold.interop.torchtitan.emit import emit_recomputation, emit_shared
from fivefold.interop.torchtitan.flavors import find_flavor, make_unknown_error
from fivefold.interop.torchtitan_toml.keys import TOML, VERSION
from fivefold.interop.torchtitan_toml.to_job import P
from fivefold.job import get_recipe


def emit(plan: ConfigPlan) -> WrittenConfig:
    """Return the TOML file of a plan; raise ``UserError`` for a model that is no flavor, or for an unsupported job."""
    model, layout, job = plan.model, plan.layout, plan.job
    flavor = find_flavor(model)
    if flavor is None:
        raise make_unknown_error(model)
    mode, selection = emit_recomputation(layout.ac, intervals=True)
    values = write_values(TOML, {"job": job, "layout": layout, "model": model}) | emit_shared(
        plan, head="output", casts=layout.zero > 0
    )
    values |= {
        "model.name": flavor[0],
        "model.flavor": flavor[1],
        "activation_checkpoint.mode": mode,
        "activation_checkpoint.selective_ac_option": selection,
        "optimizer.name": "AdamW",
        "optimizer.beta1": job.optimizer.betas[0],
        "optimizer.beta2": job.optimizer.betas[1],
        f"{P}enable_async_tensor_parallel": layout.tp > 1 and "tp" in job.stack.overlap,
        **_emit_converters(plan),
    }
    if model.moe and layout.ep > 1:
        if layout.etp not in (1, layout.tp):
            raise UserError(f"layout {str(layout)!r}: torchtitan has etp1 or etp{layout.tp} (tp) only; use one of them")
        values[f"{P}expert_tensor_parallel_degree"] = layout.etp
    nodes, per_node = plan.hosts
    launch_line = (
        f"torchrun --nnodes {nodes} --nproc_per_node {per_node} -m torchtitan.train --job.config_file torchtitan.toml"
    )
    about = (f"torchtitan {VERSION}: {model.name}, {layout}", f"Start: {launch_line}")
    extra = {
        "job.dump_folder": ("./outputs", "logs and checkpoints"),
        "model.hf_assets_path": ("./assets/hf/tokenizer", "the tokenizer's folder: put yours"),
        "training.dataset": ("c4", "what is read: put yours"),
    }
    return WrittenConfig({"torchtitan.toml": render_toml(values, TOML, about=about, extra=extra)})


def _emit_converters(plan: ConfigPlan) -> dict[str, Any]:
    """Return torchtitan's keys of the fp8 and mxfp8 converters."""
    precision_recipe = plan.job.precision
    if not precision_recipe.is_low_precision:
        return {}
    if plan.model.moe:
        raise UserError(f"precision {precision_recipe.name}: experts in fp8 are not written for torchtitan; use bf16")
    if precision_recipe == get_recipe("mxfp8"):
        return {"model.converters": ["mx"], "quantize.linear.mx.filter_fqns": ["output"]}
    names = {
        "fp8": "tensorwise",
        "fp8-wire": "tensorwise",
        "fp8-rowwise": "rowwise",
        "fp8-rowwise-gw": "rowwise_with_gw_hp",
    }
    if precision_recipe.name not in names or precision_recipe != get_recipe(precision_recipe.name):
        raise UserError(
            f"precision {precision_recipe.name}: torchtitan has {', '.join(names)} and mxfp8; use one of them"
        )
    return {
        "model.converters": ["float8"],
        "quantize.linear.float8.recipe_name": names[precision_recipe.name],
        "quantize.linear.float8.filter_fqns": ["output"],
        "quantize.linear.float8.enable_fsdp_float8_all_gather": precision_recipe.name == "fp8-wire",
    }
