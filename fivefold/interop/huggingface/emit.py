"""Model, layout and job -> accelerate's YAML or DeepSpeed's JSON, arguments, config.json, train.py.

Configs of Axolotl, LLaMA-Factory and TRL also have the adapter and the data. Their strategy follows from the layout:
DDP without ZeRO, FSDP2 or DeepSpeed with ZeRO-3, DeepSpeed with ZeRO-1 and 2.
"""

from __future__ import annotations

import json
from typing import Any

from fivefold.base_format import BITSANDBYTES_BASES
from fivefold.errors import UserError
from fivefold.interop.equivalence import resolve_rate
from fivefold.interop.format import ConfigPlan, WrittenConfig
from fivefold.interop.huggingface.adapters import write_adapter
from fivefold.interop.huggingface.data import DATASET_INFO, describe_dataset, write_data
from fivefold.interop.huggingface.dialects import AXOLOTL, LLAMAFACTORY, Dialect
from fivefold.interop.huggingface.keys import ACCELERATE, ALL_ELEMENTS, ARGUMENTS, FSDP, PARALLEL, STAGE_3
from fivefold.interop.keys import Table, part, write_values
from fivefold.interop.render import render_yaml
from fivefold.job import Job, get_recipe
from fivefold.model import catalog
from fivefold.model.huggingface.write import find_difference, to_config
from fivefold.model.published import CATALOG
from fivefold.model.spec import Model
from fivefold.stack.spec import Stack

TRAIN = '''"""Trains config.json with arguments.yaml, on random tokens: put your data set in their place."""

import sys
from dataclasses import dataclass

import torch
from transformers import AutoConfig, AutoModelForCausalLM, HfArgumentParser, Trainer, TrainingArguments


@dataclass
class Ours:
    model_name_or_path: str
    max_length: int
    attn_implementation: str = "sdpa"


class RandomTokens(torch.utils.data.Dataset):
    def __init__(self, vocab: int, length: int) -> None:
        self.vocab, self.length = vocab, length

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> dict:
        tokens = torch.randint(self.vocab, (self.length,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


ours, arguments = HfArgumentParser((Ours, TrainingArguments)).parse_yaml_file(sys.argv[1])
config = AutoConfig.from_pretrained(ours.model_name_or_path)
model = AutoModelForCausalLM.from_config(config, attn_implementation=ours.attn_implementation)
Trainer(model=model, args=arguments, train_dataset=RandomTokens(config.vocab_size, ours.max_length)).train()
'''

DEEPSPEED_FILE = "deepspeed.json"
OPTIMIZERS = {
    "adamw": "adamw_torch_fused",
    "adamw8bit": "adamw_bnb_8bit",
    "adamw4bit": "adamw_torch_4bit",
    "adafactor": "adafactor",
    "sgd": "sgd",
}

ATTENTION = {
    "flash2": "sdpa",
    "flash1": "sdpa",
    "flash1_triton": "sdpa",
    "flash": "flash_attention_3",
    "unfused": "eager",
    "blocks": "sdpa",
}


def emit_arguments(plan: ConfigPlan, *, deepspeed: bool) -> dict[str, Any]:
    """Return the TrainingArguments of a plan."""
    layout, job = plan.layout, plan.job
    if layout.ac not in ("none", "full"):
        raise UserError(f"ac={layout.ac}: Trainer recomputes all blocks in full; use ac=full or ac=none")
    if job.optimizer.kind not in OPTIMIZERS:
        raise UserError(f"optimizer {job.optimizer.kind}: Trainer has {', '.join(OPTIMIZERS)}; use one of them")
    compute = job.precision.compute
    return write_values(ARGUMENTS, {"job": job, "layout": layout, "model": plan.model}) | {
        "model_name_or_path": ".",
        "max_length": job.sequence,
        "gradient_accumulation_steps": layout.micro_batches(job),
        "max_steps": job.steps,
        "optim": OPTIMIZERS[job.optimizer.kind],
        "adam_beta1": job.optimizer.betas[0],
        "adam_beta2": job.optimizer.betas[1],
        "warmup_steps": job.learning_rate.warmup_steps,
        **emit_schedule(job),
        "bf16": compute == "bf16",
        "fp16": compute == "fp16",
        "tf32": True if compute == "tf32" else None,
        "gradient_checkpointing": layout.ac == "full",
        "torch_compile": job.stack.compile,
        "use_liger_kernel": job.stack.loss_facts.chunked,
        "attn_implementation": ATTENTION[job.stack.attention],
        "deepspeed": DEEPSPEED_FILE if deepspeed else None,
    }


def emit_schedule(job: Job) -> dict[str, Any]:
    """Return the learning rate's schedule by transformers' names (transformers/optimization.py)."""
    rate = resolve_rate(job.learning_rate, steps=job.steps)
    name = "lr_scheduler_kwargs"
    if rate.kind == "constant":
        return {"lr_scheduler_type": "constant_with_warmup"}
    if rate.kind == "wsd":
        return {
            "lr_scheduler_type": "warmup_stable_decay",
            f"{name}.num_decay_steps": rate.decay_steps,
            f"{name}.min_lr_ratio": rate.floor,
            f"{name}.decay_type": "linear",
        }
    if rate.floor == 0:
        return {"lr_scheduler_type": "cosine"}
    return {"lr_scheduler_type": "cosine_with_min_lr", f"{name}.min_lr_rate": rate.floor}


def describe_schedule(job: Job) -> tuple[str, ...]:
    """Return a remark if transformers' schedule (optimization.py, get_wsd_schedule) does not warm up from 0."""
    rate = job.learning_rate
    if rate.kind != "wsd" or not rate.floor or not rate.warmup_steps:
        return ()
    lowest = f"{rate.floor * rate.peak:g}"
    return (f"transformers' warmup_stable_decay warms up from its minimum, {lowest}, and not from 0 (same cost)",)


def _emit_files(plan: ConfigPlan, launch: str, *, config: str, about: str, deepspeed: bool) -> dict[str, str]:
    """Return the files that all strategies have; the script is first, since ``read`` takes the first one."""
    extra = {"output_dir": ("./outputs", "logs and checkpoints")}
    lines = (f"{about}: {plan.model.name}, {plan.layout}",)
    text = render_yaml(emit_arguments(plan, deepspeed=deepspeed), ARGUMENTS, about=lines, extra=extra)
    script = f'#!/bin/bash\n# {about}: {plan.model.name}, {plan.layout}\n# {config}\ncd "$(dirname "$0")"\n'
    script += f"{launch} train.py arguments.yaml\n"
    model = json.dumps(to_config(plan.model), indent=2) + "\n"
    return {"run.sh": script, "arguments.yaml": text, "config.json": model, "train.py": TRAIN}


def emit_accelerate(plan: ConfigPlan) -> WrittenConfig:
    """Return accelerate's YAML for FSDP2, and the files that belong to it."""
    layout = plan.layout
    _check_no_adapter(plan)
    if layout.zero == 0:
        raise UserError(
            f"layout {str(layout)!r}: an accelerate config is written for FSDP2, which always shards; use zero3"
        )
    launch, config = "accelerate launch --config_file accelerate.yaml", "On every host, each with its machine_rank."
    files = _emit_files(plan, launch, config=config, about="accelerate", deepspeed=False)
    files |= {"accelerate.yaml": _emit_accelerate_file(plan, _emit_fsdp(plan))}
    return WrittenConfig(files, describe_schedule(plan.job))


def _check_no_adapter(plan: ConfigPlan) -> None:
    """Raise ``UserError`` for an adapter or pairs, which the script on random tokens does not train."""
    if plan.job.adapter is not None or plan.job.objective == "dpo":
        raise UserError(
            f"{'adapter' if plan.job.adapter else 'objective=dpo'}: the script for transformers' Trainer trains all "
            "weights on random tokens; use --to trl, axolotl or llamafactory"
        )


def _emit_fsdp(plan: ConfigPlan) -> dict[str, Any]:
    """Return accelerate's keys for FSDP2."""
    layout, job = plan.layout, plan.job
    if layout.zero == 2:
        raise UserError(
            f"layout {str(layout)!r}: FSDP2 has no zero2; the nearest is zero3 with --set reshard=backward, "
            "which gathers weights once per micro-batch"
        )
    half_recipe = get_recipe("bf16").with_reduce_dtype(in_fp32=False)
    if job.precision not in (half_recipe, get_recipe("fp32"), get_recipe("tf32"), get_recipe("fp16")):
        raise UserError(
            f"precision {job.precision.name}: FSDP under accelerate reduces in 16 bits; use {half_recipe.name} or fp32"
        )
    values = {
        "accelerate.distributed_type": "FSDP",
        "accelerate.num_processes": layout.world,
        "accelerate.mixed_precision": {"bf16": "bf16", "fp16": "fp16"}.get(job.precision.compute, "no"),
        f"{FSDP}version": 2,
        f"{FSDP}reshard_after_forward": job.stack.reshard == "forward",
        f"{FSDP}auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        f"{FSDP}offload_params": "parameters" in layout.list_offloaded(job),
        f"{FSDP}activation_checkpointing": False,
    }
    if layout.shard_group or layout.cp > 1 or layout.tp > 1:
        prefix = "accelerate.parallelism_config.parallelism_config_"
        values |= {
            f"{prefix}dp_replicate_size": layout.dp * layout.cp // layout.shards,
            f"{prefix}dp_shard_size": layout.shards // layout.cp,
            **({f"{prefix}cp_size": layout.cp} if layout.cp > 1 else {}),
            **({f"{prefix}tp_size": layout.tp} if layout.tp > 1 else {}),
        }
    return values


def choose_stack(plan: ConfigPlan) -> str:
    """Return the stack with which Axolotl, LLaMA-Factory and TRL run a plan."""
    if plan.job.stack.name == "deepspeed" or plan.layout.zero in (1, 2):
        return "deepspeed"
    return "fsdp2" if plan.layout.zero else "ddp"


def _emit_accelerate_file(plan: ConfigPlan, values: dict[str, Any]) -> str:
    """Return accelerate's YAML."""
    nodes, _ = plan.hosts
    extra = {
        "accelerate.compute_environment": ("LOCAL_MACHINE", ""),
        "accelerate.num_machines": (nodes, "hosts"),
        "accelerate.machine_rank": (0, "of this host"),
        "accelerate.main_training_function": ("main", ""),
        "accelerate.use_cpu": (False, ""),
    }
    if f"{FSDP}version" in values:
        extra[f"{FSDP}state_dict_type"] = ("SHARDED_STATE_DICT", "of checkpoints")
    unprefixed = {key.removeprefix("accelerate."): value for key, value in values.items()}
    table: Table = {key.removeprefix("accelerate."): key_entry for key, key_entry in ACCELERATE.items()}
    unprefixed_extra = {key.removeprefix("accelerate."): value for key, value in extra.items()}
    return render_yaml(unprefixed, table, about=(f"accelerate: {plan.layout}",), extra=unprefixed_extra)


def emit_deepspeed(plan: ConfigPlan) -> WrittenConfig:
    """Return DeepSpeed's JSON, and the files that belong to it."""
    _check_no_adapter(plan)
    text = _emit_deepspeed_file(plan)
    about = "deepspeed.json: see https://www.deepspeed.ai/docs/config-json for each of its keys"
    files = _emit_files(plan, _emit_deepspeed_launch(plan), config=about, about="DeepSpeed", deepspeed=True)
    return WrittenConfig(files | {DEEPSPEED_FILE: text}, describe_schedule(plan.job))


def _emit_deepspeed_launch(plan: ConfigPlan) -> str:
    nodes, gpus_per_node = plan.hosts
    return f"deepspeed --num_nodes {nodes} --num_gpus {gpus_per_node}"


def _emit_deepspeed_file(plan: ConfigPlan) -> str:
    """Return DeepSpeed's JSON."""
    layout, job = plan.layout, plan.job
    if layout.pp > 1 or layout.tp > 1 or layout.ep > 1:
        raise UserError(
            f"layout {str(layout)!r}: a DeepSpeed config for transformers' models has only dp and cp=ulysses; use these"
        )
    recipes = (
        get_recipe("bf16"),
        get_recipe("bf16").with_reduce_dtype(in_fp32=False),
        get_recipe("fp16"),
        get_recipe("fp32"),
    )
    if job.precision not in recipes:
        raise UserError(
            f"precision {job.precision.name}: DeepSpeed has bf16, bf16-grad16, fp16 and fp32; use one of them"
        )
    if "activations" in job.offload:
        raise UserError(f"offload={','.join(job.offload)}: a DeepSpeed config has optimizer and parameters; use these")
    zero: dict[str, Any] = {
        "stage": layout.zero,
        "overlap_comm": "dp" in job.stack.overlap,
        "contiguous_gradients": True,
    }
    zero |= make_bucket_keys(job.stack, zero=layout.zero)
    for offloaded, key in (("optimizer", "offload_optimizer"), ("parameters", "offload_param")):
        if offloaded in job.offload:
            zero[key] = {"device": "cpu", "pin_memory": True}
    config: dict[str, Any] = {
        "train_batch_size": job.global_batch,
        "train_micro_batch_size_per_gpu": layout.mbs,
        "gradient_accumulation_steps": layout.micro_batches(job),
        "gradient_clipping": job.optimizer.clip,
        "bf16": {"enabled": job.precision.compute == "bf16"},
        "fp16": {"enabled": job.precision.compute == "fp16"},
        "zero_optimization": zero,
    }
    if job.precision == get_recipe("bf16"):
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    if layout.cp > 1:
        config["sequence_parallel_size"] = layout.cp
    return json.dumps(config, indent=2) + "\n"


def make_bucket_keys(stack: Stack, *, zero: int) -> dict[str, int]:
    """Return bucket sizes, and for ZeRO-3 prefetch and live limits, under DeepSpeed's keys: in elements, not bytes.

    They are keys of ``zero_optimization``; none for stage 0.
    """
    bucket_sizes = {"reduce_bucket_size": stack.reduce_bucket} if zero and stack.reduce_bucket else {}
    if zero == 3 and stack.zero3_gather == "weights":
        bucket_sizes |= {name: getattr(stack, ours) for name, ours in STAGE_3.items()}
        bucket_sizes["sub_group_size"] = stack.update_group_size or ALL_ELEMENTS
    return bucket_sizes


def find_repository(model: Model) -> str:
    """Return the repository of the model's weights on the hub, or the folder of the config if it has none."""
    entry = CATALOG.get(model.name)
    repository = model.repository or (entry.repository if entry else None)
    published = catalog.find_published(repository) if repository else None
    is_same = published is not None and find_difference(published, model) is None
    return repository if repository and is_same else "."


def _emit_fine_tuning_keys(plan: ConfigPlan, software: str) -> tuple[ConfigPlan, dict[str, Any]]:
    """Return the plan as the software counts samples, and its keys by the names of TrainingArguments."""
    if plan.job.objective == "dpo":  # here a pair is two sequences, there one sample
        layout, job = plan.layout, plan.job
        if layout.mbs % 2:
            raise UserError(
                f"mbs={layout.mbs}: DPO counts a pair as two sequences, so mbs must be even; use mbs={layout.mbs + 1}"
            )
        job = job.replace(global_batch=job.global_batch // 2)
        plan = plan._replace(layout=layout.replace(mbs=layout.mbs // 2), job=job)
    values = emit_arguments(plan, deepspeed=plan.job.stack.name == "deepspeed")
    values |= {"model_name_or_path": find_repository(plan.model)}
    values |= write_adapter(plan.job.adapter, software, plan.model) | write_data(plan.data, plan.job, software)
    is_separate = values.get("padding_free") or (values.get("packing") and values.get("packing_strategy") == "bfd")
    if is_separate and plan.job.stack.attention == "flash2":
        values["attn_implementation"] = "flash_attention_2"  # which takes the ends of documents
    return plan, values


def _emit_fine_tuning_files(plan: ConfigPlan, values: dict[str, Any]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the files of the model and of DeepSpeed, and remarks on them."""
    files = dict[str, str]()
    remarks = describe_schedule(plan.job)
    if values["model_name_or_path"] == ".":
        files["config.json"] = json.dumps(to_config(plan.model), indent=2) + "\n"
        remarks += ("config.json has no weights: put the model's weights and tokenizer next to it",)
    if plan.job.stack.name == "deepspeed":
        files[DEEPSPEED_FILE] = _emit_deepspeed_file(plan)
    return files, remarks


def _write_dialect(dialect: Dialect, values: dict[str, Any], *, about: str, plan: ConfigPlan) -> str:
    """Return the YAML of a dialect."""
    table = {**ARGUMENTS, **ACCELERATE, **dialect.table}
    named = {dialect.find_name(key): value for key, value in values.items()}
    meanings = {dialect.find_name(key): entry for key, entry in table.items()}
    meanings |= {key: part("", None) for key in named.keys() - meanings.keys()}
    lines = (about, f"{plan.model.name}, {plan.layout}")
    return render_yaml(named, meanings, about=lines, extra={"output_dir": ("./outputs", "logs and checkpoints")})


def emit_axolotl(plan: ConfigPlan) -> WrittenConfig:
    """Return Axolotl's YAML, and DeepSpeed's JSON if it needs one."""
    plan, values = _emit_fine_tuning_keys(plan, AXOLOTL.name)
    files, remarks = _emit_fine_tuning_files(plan, values)
    if values.pop("use_liger_kernel"):
        values |= {"plugins": ["axolotl.integrations.liger.LigerPlugin"], "liger_fused_linear_cross_entropy": True}
    if plan.job.stack.name == "fsdp2":
        adapter = plan.job.adapter
        if plan.job.objective == "dpo" and adapter is not None and adapter.base in BITSANDBYTES_BASES:
            raise UserError(
                f"adapter.base={adapter.base}: Axolotl does not train objective=dpo over a quantized base under FSDP2; "
                "use stack deepspeed, or a base in 16 bits"
            )
        for key, value in _emit_fsdp(plan).items():
            if key.startswith(FSDP) and key != f"{FSDP}version":
                values[f"fsdp_config.{key.removeprefix(FSDP)}"] = value
            elif key.startswith(PARALLEL):
                values[key] = value
        values["fsdp_version"] = 2
    text = _write_dialect(AXOLOTL, values, about="axolotl train axolotl.yaml", plan=plan)
    return WrittenConfig({"axolotl.yaml": text} | files, remarks)


def emit_llamafactory(plan: ConfigPlan) -> WrittenConfig:
    """Return LLaMA-Factory's YAML with its dataset_info.json, and the file of the strategy."""
    plan, values = _emit_fine_tuning_keys(plan, LLAMAFACTORY.name)
    files, remarks = _emit_fine_tuning_files(plan, values)
    files[DATASET_INFO] = json.dumps(describe_dataset(plan.data, plan.job), indent=2) + "\n"
    values["attn_implementation"] = {
        theirs: our_kernel
        for (_, our_kernel), (key, theirs) in LLAMAFACTORY.words.items()
        if key == "attn_implementation"
    }[values["attn_implementation"]]
    if not values.pop("gradient_checkpointing"):
        values["disable_gradient_checkpointing"] = True
    if values.pop("padding_free", False):
        values["neat_packing"] = True
    nodes, gpus_per_node = plan.hosts
    run = "FORCE_TORCHRUN=1 llamafactory-cli train train.yaml"
    if nodes > 1:
        run = f"FORCE_TORCHRUN=1 NNODES={nodes} NPROC_PER_NODE={gpus_per_node} NODE_RANK=… MASTER_ADDR=… {run[17:]}"
    if plan.job.stack.name != "fsdp2":
        text = _write_dialect(LLAMAFACTORY, values, about=run, plan=plan)
        return WrittenConfig({"train.yaml": text} | files, remarks)
    text = _write_dialect(LLAMAFACTORY, values, about="run.sh starts it", plan=plan)
    script = _emit_script(plan, "accelerate launch --config_file accelerate.yaml -m llamafactory.launcher train.yaml")
    files |= {"accelerate.yaml": _emit_accelerate_file(plan, _emit_fsdp(plan))}
    return WrittenConfig({"run.sh": script, "train.yaml": text} | files, remarks)


def emit_trl(plan: ConfigPlan) -> WrittenConfig:
    """Return the YAML of TRL's script, and the file of the strategy."""
    plan, values = _emit_fine_tuning_keys(plan, "trl")
    files, remarks = _emit_fine_tuning_files(plan, values)
    is_dpo, adapter = plan.job.objective == "dpo", plan.job.adapter
    script = "trl.scripts.dpo" if is_dpo else "trl.scripts.sft"
    if is_dpo and adapter is not None and adapter.dropout:
        values["disable_dropout"] = False
    if plan.job.stack.name == "deepspeed":
        launch = f"{_emit_deepspeed_launch(plan)} --module {script} --config train.yaml"
    else:
        launch = f"accelerate launch --config_file accelerate.yaml -m {script} --config train.yaml"
        world = plan.layout.world
        replicated: dict[str, Any] = {"accelerate.distributed_type": "MULTI_GPU" if world > 1 else "NO"}
        replicated |= {"accelerate.num_processes": world}
        files["accelerate.yaml"] = _emit_accelerate_file(
            plan, _emit_fsdp(plan) if plan.job.stack.name == "fsdp2" else replicated
        )
    lines = (f"{plan.model.name}, {plan.layout}",)
    text = render_yaml(values, ARGUMENTS, about=lines, extra={"output_dir": ("./outputs", "logs and checkpoints")})
    return WrittenConfig({"run.sh": _emit_script(plan, launch), "train.yaml": text} | files, remarks)


def _emit_script(plan: ConfigPlan, launch: str) -> str:
    return f'#!/bin/bash\n# {plan.model.name}, {plan.layout}\ncd "$(dirname "$0")"\n{launch}\n'
