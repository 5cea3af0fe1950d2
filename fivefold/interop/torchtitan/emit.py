"""Model, layout and job -> a Python config of torchtitan 0.3; ``UserError`` for what torchtitan cannot run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from fivefold.errors import UserError
from fivefold.interop.format import ConfigPlan, WrittenConfig
from fivefold.interop.keys import Table, write_values
from fivefold.interop.render import append_comment
from fivefold.interop.torchtitan.flavors import build_llama, find_flavor
from fivefold.interop.torchtitan.keys import PYTHON, SCHEDULES, SIZES, VERSION
from fivefold.interop.torchtitan.to_job import AUTOCAST, BY_OPERATION, FULL_BF16, P, distribute_layers
from fivefold.job import get_recipe
from fivefold.layout.stages import list_stage_layers
from fivefold.model.spec import Model
from fivefold.update import LearningRate

CLASSES = {
    "training": "TrainingConfig",
    "parallelism": "ParallelismConfig",
    "lr_scheduler": "LRSchedulersContainer.Config",
    "compile": "CompileConfig",
    "debug": "DebugConfig",
}

IMPORTS = """from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.config import CompileConfig, DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.models.{family} import model_registry
from torchtitan.trainer import Trainer"""

CUSTOM = """from dataclasses import replace

from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.llama3 import (
    _EMBEDDING_INIT, _NORM_INIT, Llama3Model, _build_llama3_layers, _output_linear_init,
)
"""


def emit(plan: ConfigPlan) -> WrittenConfig:
    """Return the Python config of a plan; raise ``UserError`` for what it cannot express or torchtitan cannot run."""
    model, layout, job = plan.model, plan.layout, plan.job
    mode, _ = emit_recomputation(layout.ac, intervals=False)
    values = write_values(PYTHON, {"job": job, "layout": layout, "model": model}) | emit_shared(
        plan, head="lm_head", casts=True
    )
    if model.moe and layout.ep > 1 and layout.etp > 1:
        raise UserError(f"layout {str(layout)!r}: torchtitan 0.3 does not support etp with ep; use etp1")
    uses_graphs = job.stack.cuda_graphs == "full" and layout.pp == 1 and layout.ep == 1
    values |= {
        "training.disable_cuda_graphs": not uses_graphs,
        "activation_checkpoint": {"none": None, "full": "FullAC", "selective": "SelectiveAC"}[mode],
        "compile.enable_async_tensor_parallel": layout.tp > 1 and "tp" in job.stack.overlap and job.stack.compile,
        "model_spec.converters": _emit_converters(plan),
    }
    if model.mtp is not None:
        raise UserError(
            f"model {model.name!r}: multi-token prediction is not written for torchtitan; use a model without"
        )
    flavor = find_flavor(model)
    sizes = None if flavor else _emit_sizes(model)
    nodes, per_node = plan.hosts
    launch_line = (
        f"torchrun --nnodes {nodes} --nproc_per_node {per_node} -m torchtitan.train "
        "--module torchtitan_config --config config"
    )
    text = emit_python_file(
        values,
        PYTHON,
        model=model,
        flavor=flavor or ("llama3", "8B"),
        sizes=sizes,
        about=(f"torchtitan {VERSION}: {model.name}, {layout}.", f"Start: {launch_line}"),
    )
    return WrittenConfig({"torchtitan_config.py": text})


def _emit_converters(plan: ConfigPlan) -> str | None:
    """Return the call of a float8 converter, as source text."""
    precision_recipe = plan.job.precision
    if not precision_recipe.is_low_precision:
        return None
    if plan.model.moe:
        raise UserError(f"precision {precision_recipe.name}: experts in fp8 are not written for torchtitan; use bf16")
    names = {"fp8-rowwise": "rowwise", "fp8-rowwise-gw": "rowwise_with_gw_hp"}
    if precision_recipe.name not in names or precision_recipe != get_recipe(precision_recipe.name):
        raise UserError(f"precision {precision_recipe.name}: torchtitan 0.3 has {' and '.join(names)}; use one of them")
    return (
        f'Float8LinearConverter.Config(recipe_name="{names[precision_recipe.name]}", filter_fqns=["lm_head"], '
        f"model_compile_enabled={plan.job.stack.compile})"
    )


def _emit_sizes(model: Model) -> dict[str, Any]:
    """Return the sizes of a Llama of any size; raise ``UserError`` if the model has another architecture."""
    from fivefold.model.huggingface.write import find_difference

    if model.position != "rope" or model.head_dim * model.heads != model.width:
        raise UserError(
            f"model {model.name!r}: torchtitan's Llama has rotary positions and heads of width/heads="
            f"{model.width}/{model.heads}; use one of its flavors"
        )
    numbers = (model.layers, model.width, model.heads, model.kv_heads, model.ffn, model.vocab, model.tied_embeddings)
    llama_spec = build_llama(model.name, numbers)
    difference_text = find_difference(
        llama_spec,
        model.replace(
            rope_scaling=llama_spec.rope_scaling, rope_theta=llama_spec.rope_theta, norm_epsilon=llama_spec.norm_epsilon
        ),
    )
    if difference_text:
        raise UserError(f"model {model.name!r}: torchtitan's Llama has {difference_text}; use one of its flavors")
    return {field: getattr(model, field) for field in SIZES.values()}


def emit_shared(plan: ConfigPlan, *, head: str, casts: bool) -> dict[str, Any]:
    """Return the values of the keys that torchtitan 0.2 (TOML) and its later configs in Python have in common.

    ``head``: the name of the output projection; ``casts``: whether fully_shard is applied, which casts to 16 bits.
    """
    layout, job = plan.layout, plan.job
    copies, shards = emit_sharding(plan)
    pp = layout.pp > 1
    values = {
        "training.local_batch_size": job.global_batch // layout.dp if pp else layout.mbs,
        "training.global_batch_size": job.global_batch,
        **emit_precision(plan, sharded=casts),
        f"{P}data_parallel_replicate_degree": copies,
        f"{P}data_parallel_shard_degree": shards,
        f"{P}fsdp_reshard_after_forward": "never" if layout.zero == 2 or job.stack.reshard == "backward" else "always",
        f"{P}pipeline_parallel_schedule": next(k for k, ours in SCHEDULES.items() if ours == layout.schedule),
        f"{P}pipeline_parallel_microbatch_size": layout.mbs if pp else 1,
        f"{P}pipeline_parallel_first_stage_less_layers": 1,
        f"{P}pipeline_parallel_last_stage_less_layers": 1,
        f"{P}module_fqns_per_model_part": emit_stages(plan, head=head) if pp else None,
        "compile.enable": job.stack.compile,
        "compile.components": ["model", *(["loss"] if job.stack.compile_loss else [])],
        "debug.seed": job.seed,
        **emit_learning_rate(job.learning_rate, steps=job.steps),
    }
    if plan.model.moe and layout.ep == 1 and layout.etp != layout.tp:
        raise UserError(
            f"layout {str(layout)!r}: without ep, torchtitan shards experts over tp; use etp{layout.tp} or ep2"
        )
    return {key: value for key, value in values.items() if value is not None}


def emit_sharding(plan: ConfigPlan) -> tuple[int, int]:
    """Return dp_replicate and dp_shard."""
    layout, replicas = plan.layout, plan.layout.dp * plan.layout.cp
    if layout.zero == 0 and layout.cp > 1:
        raise UserError(f"layout {str(layout)!r}: torchtitan shards over cp too; use zero3")
    if layout.zero in (2, 3) and replicas == 1:
        raise UserError(f"layout {str(layout)!r}: torchtitan shards nothing over one replica; use zero0")
    if layout.zero == 2 and layout.pp == 1:
        raise UserError(
            f"layout {str(layout)!r}: torchtitan has no zero2 without a pipeline; the nearest is zero3 with "
            "--set reshard=backward, which gathers weights once per micro-batch"
        )
    if layout.zero == 3 and layout.pp > 1 and plan.job.stack.reshard == "backward":
        raise UserError(
            f"layout {str(layout)!r}: with a pipeline torchtitan keeps gathered weights as zero2 does; use zero2"
        )
    if layout.zero == 0:
        return layout.dp, 1
    if layout.shards % layout.cp:
        raise UserError(
            f"layout {str(layout)!r}: torchtitan shards over dp_shard · cp ranks; {layout.shards} is not a multiple of "
            f"cp={layout.cp}; use zero{layout.zero}/{layout.cp * max(1, layout.shards // layout.cp)}"
        )
    if layout.shard_group == replicas:
        raise UserError(f"layout {str(layout)!r}: its shard group is all of dp·cp; write zero{layout.zero}")
    return replicas // layout.shards, layout.shards // layout.cp


def emit_stages(plan: ConfigPlan, *, head: str) -> list[list[str]] | None:
    """Return the modules of each stage, or None if torchtitan's default division gives the same."""
    layout, layers = plan.layout, plan.model.layers
    stage_indices = list_stage_layers(plan.model, layout)
    sizes = tuple(map(len, stage_indices))
    usual_stages = layout.pp * (1 if layout.pipeline.stages_per_rank == 1 else 2)
    if (
        len(sizes) == usual_stages
        and layers + 2 >= usual_stages
        and sizes == distribute_layers(layers, usual_stages, first=1, last=1)
    ):
        return None
    stage_modules = [[f"layers.{layer}" for layer in stage] for stage in stage_indices]
    stage_modules[0].insert(0, "tok_embeddings")
    stage_modules[-1] += ["norm", head]
    return stage_modules


def emit_precision(plan: ConfigPlan, *, sharded: bool) -> dict[str, Any]:
    """Return the types of weights and of gathered weights."""
    wanted = plan.job.precision
    half_types = {"training.dtype": "float32", "training.mixed_precision_param": "bfloat16"}
    if wanted == FULL_BF16:
        return {"training.dtype": "bfloat16", "training.mixed_precision_param": "bfloat16"}
    if wanted.name == "fp32":
        return {"training.dtype": "float32", "training.mixed_precision_param": "float32"}
    if wanted == AUTOCAST and plan.layout.world == plan.layout.dp and not sharded:
        return half_types
    if wanted.name != AUTOCAST.name and sharded:
        return half_types
    alternatives = (
        "precision fp32" if sharded else f"zero3, precision fp32, or {AUTOCAST.name!r} as read from torchtitan"
    )
    raise UserError(
        f"precision {wanted.name} with zero{plan.layout.zero}: torchtitan keeps fp32 weights and casts for each matmul "
        f"unless they are sharded; use {alternatives}"
    )


def emit_learning_rate(schedule: LearningRate, *, steps: int) -> dict[str, Any]:
    """Return the learning rate's schedule."""
    if schedule.kind == "constant":
        return {"lr_scheduler.min_lr_factor": 1.0}
    if schedule.kind == "cosine":
        return {"lr_scheduler.decay_type": "cosine"}
    decay = schedule.decay_steps or max(1, steps // 5)
    return {"lr_scheduler.decay_type": "linear", "lr_scheduler.decay_ratio": decay / steps}


def emit_recomputation(ac: str, *, intervals: bool) -> tuple[str, str | None]:
    """Return ``none``, ``full`` or ``selective``; and its option: ``op``, or that every n-th layer is.

    ``intervals``: whether recomputing every n-th layer is supported.
    """
    if ac == "none" or ac == "full":
        return ac, None
    if ac == BY_OPERATION:
        return "selective", "op"
    if ac.startswith("full/") and intervals:
        return "selective", ac[5:]
    nearest = f"ac={BY_OPERATION} (its selective recomputation), {'ac=full/2, ' if intervals else ''}ac=full or ac=none"
    raise UserError(f"ac={ac}: torchtitan recomputes no such groups of operations; use {nearest}")


def emit_python_file(
    values: Mapping[str, Any],
    table: Table,
    *,
    model: Model,
    flavor: tuple[str, str],
    sizes: Mapping[str, Any] | None,
    about: Sequence[str],
) -> str:
    """Return the text of the file; ``sizes``: sizes of a Llama that is not a flavor."""
    spec = _emit_spec(values, flavor)
    loss = "CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(model_spec))"
    if values["loss"] == "ChunkedLossWrapper":
        loss = f"ChunkedLossWrapper.Config(loss_fn={loss})"
    adam = {name: values[f"optimizer.{name}"] for name in ("lr", "betas", "eps", "weight_decay")}
    ac = f"{values['activation_checkpoint']}.Config()" if values["activation_checkpoint"] else "None"
    lines = [
        '"""' + about[0],
        "",
        *about[1:],
        '"""',
        "",
        *(CUSTOM.splitlines() if sizes else []),
        *(["from torchtitan.components.quantization import Float8LinearConverter"] if "Float8" in spec else []),
        *IMPORTS.format(family=flavor[0]).splitlines(),
        "",
        "",
        "def config() -> Trainer.Config:",
        f"    model_spec = {_emit_custom_model(spec, sizes) if sizes else spec}",
        "    return Trainer.Config(",
        "        model_spec=model_spec,",
        '        hf_assets_path="./assets/hf/tokenizer",  # the tokenizer\'s folder: put yours',
        '        dataloader=HuggingFaceTextDataLoader.Config(dataset="c4"),  # what is read: put yours',
        f"        loss={loss},",
        f"        optimizer=default_adamw({', '.join(f'{name}={value!r}' for name, value in adam.items())}),",
        f"        activation_checkpoint={ac},  # layout.ac",
    ]
    for group, kind in CLASSES.items():
        lines.append(f"        {group}={kind}(")
        for key, value in values.items():
            if key.startswith(f"{group}.") and value is not None:
                lines.append(append_comment(f"            {key.partition('.')[2]}={value!r},", table[key].means))
        lines.append("        ),")
    return "\n".join([*lines, "    )"]) + "\n"


def _emit_spec(values: Mapping[str, Any], flavor: tuple[str, str]) -> str:
    backend = values["model_spec.attn_backend"] or "flex"
    converters = f", converters=[{values['model_spec.converters']}]" if values["model_spec.converters"] else ""
    return f"model_registry({json.dumps(flavor[1])}, attn_backend={json.dumps(backend)}{converters})"


def _emit_custom_model(spec: str, sizes: Mapping[str, Any]) -> str:
    """Return the spec of the 8B with a Llama of other sizes in it."""
    width, vocab, heads = sizes["width"], sizes["vocab"], sizes["heads"]
    backend = spec.partition("attn_backend=")[2].partition(",")[0].rstrip(")")
    return f"""replace(
        {spec},
        model=Llama3Model.Config(
            dim={width},
            vocab_size={vocab},
            enable_weight_tying={sizes["tied_embeddings"]},
            tok_embeddings=Embedding.Config(
                num_embeddings={vocab}, embedding_dim={width}, param_init=_EMBEDDING_INIT
            ),
            norm=RMSNorm.Config(normalized_shape={width}, param_init=_NORM_INIT),
            lm_head=Linear.Config(in_features={width}, out_features={vocab}, param_init=_output_linear_init({width})),
            layers=_build_llama3_layers(
                n_layers={sizes["layers"]},
                dim={width},
                n_heads={heads},
                n_kv_heads={sizes["kv_heads"]},
                hidden_dim={sizes["ffn"]},
                rope=ComplexRoPE.Config(
                    dim={width // heads}, max_seq_len=131072, theta={sizes["rope_theta"]!r}, scaling="llama"
                ),
                attn_backend={backend},
            ),
        ),
    )"""
