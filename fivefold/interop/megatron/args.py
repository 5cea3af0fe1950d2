"""Megatron's arguments as a script, a launch line or a YAML, read; and a script with them, written."""

from __future__ import annotations

import shlex
from typing import Any

from fivefold.interop.format import RANKS_MISSING, Asked, Document, Plan, Written, reading, replicas, world
from fivefold.interop.keys import Table, Values, part, written
from fivefold.interop.megatron import emit
from fivefold.interop.megatron.bridge_keys import MORE
from fivefold.interop.megatron.flags import named
from fivefold.interop.megatron.keys import JOB, LAYOUT, MODEL, STACK, TABLE
from fivefold.interop.megatron.model import model as model_of
from fivefold.interop.megatron.read import batch, degrees, pipeline, precision, rate, recomputed, stack
from fivefold.interop.render import commented
from fivefold.interop.shell.launch import keys
from fivefold.record import Mistake
from fivefold.results.reading import Reading

VERSION = "core_v0.16.1"
SEGMENTS = ("PYTORCH_CUDA_ALLOC_CONF",)  # variables of the environment that are read
YAML_ACTIVATIONS: dict[str, dict[str, Any]] = {  # megatron/training/yaml_arguments.py
    "swiglu": {"swiglu": True}, "squaredrelu": {"squared_relu": True}, "gelu": {},
}  # fmt: skip
SIGNS = ("tensor-model-parallel-size", "num-layers", "micro-batch-size", "num-attention-heads", "hidden-size")


def recognises(document: Document) -> bool:
    """Whether the words, or a YAML's keys, are Megatron's arguments."""
    return sum(sign in _plain(document) for sign in SIGNS) >= 2


def _plain(document: Document) -> set[str]:
    if document.kind == "words":
        return {key.replace("_", "-") for key in keys(document.words)}
    if document.kind not in ("yaml", "json"):
        return set()
    return {name.lstrip("-").replace("_", "-") for name in _flat(document.values)}


def _flat(values: Any) -> dict[str, Any]:
    """All keys of a YAML, whatever group they are in; its lists are values."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict) and value:
            found |= _flat(value)
        else:
            found[str(key)] = value
    return found


def read(document: Document, asked: Asked) -> Reading:
    """Arguments in our nouns."""
    given = keys(document.words) if document.kind == "words" else _flat(document.values)
    environment = document.values if document.kind == "words" else given
    segments = "expandable_segments:True" in str(environment.get(SEGMENTS[0], ""))
    arguments = {name: value for name, value in given.items() if not name.isupper()}
    if document.kind != "words":
        arguments |= {f"env.{name}": value for name, value in given.items() if name.isupper() and name not in SEGMENTS}
    table = TABLE if document.kind == "words" else {**MORE, **TABLE}  # a YAML may have Megatron-Core's names
    origin, found = document.origin, named(arguments)
    if document.kind != "words" and found.get("activation_func") in YAML_ACTIVATIONS:
        table = {**table, "activation_func": part("model.mlp and model.activation", None)}
        found |= YAML_ACTIVATIONS[str(found["activation_func"])]
    for name, value in found.items():
        costs = name in TABLE and TABLE[name].kind != "idle"
        if costs and name != "tokenizer_model" and str(value).startswith("$"):
            flag, variable = f"{origin}: --{name.replace('_', '-')}", str(value).strip("${}")
            if str(value).startswith("$("):
                raise Mistake(f"{flag} is what a command prints, {value}…, which is not run; write its value there")
            raise Mistake(f"{flag} is {value}, which is not set; add {variable}=VALUE to the file")
    given_named = {**found, **({"expandable_segments": True} if segments else {})}
    return read_named(given_named, document, asked, table=table, form=("megatron", VERSION, "megatron-core"))


def read_named(
    given: dict[str, Any], document: Document, asked: Asked, *, table: Table, form: tuple[str, str, str]
) -> Reading:
    """Arguments by their names; ``form``: the software, its version and its stack."""
    software, version, stack_name = form
    origin, segments = document.origin, bool(given.pop("expandable_segments", False))
    values = Values(table, given, origin=origin, software=f"{software} {version}")
    check_same(values)
    model, missing = model_of(values, asked)
    ranks = world(document, asked)
    if model is None:
        return reading((software, version), values, {}, document=document, model=None, ranks=None, missing=missing)
    fields = {path: value for path, value in values.fields().items() if not path.startswith("model.")}
    fields |= {**stack(values, model), **rate(values), "job.precision": precision(values)}
    fields["job.stack.name"] = "megatron-deepspeed" if values["deepspeed"] else stack_name
    fields["job.documents"] = "apart" if values["reset_attention_mask"] else "joined"
    fields["job.offload"] = ("optimizer",) if values["optimizer_cpu_offload"] else ()
    fields["job.stack.expandable_segments"] = segments
    fields["job.optimizer.betas"] = (values["adam_beta1"], values["adam_beta2"])
    if lacking := [name for name in ("seq_length", "micro_batch_size") if values[name] is None]:
        missing += (*(f"--{name.replace('_', '-')}" for name in lacking), *(() if ranks else (RANKS_MISSING,)))
        return reading((software, version), values, {}, document=document, model=model, ranks=None, missing=missing)
    if ranks is not None:
        tp, cp, pp = (values.whole(f"{axis}_parallel_size") for axis in ("tensor_model", "context", "pipeline_model"))
        dp = replicas(ranks, tp * cp * pp, of="tp·cp·pp", origin=origin)
        assert dp is not None
        fields |= degrees(values, model, dp=dp) | batch(values, dp=dp) | pipeline(values, model, pp=pp)
        fields["layout.ac"] = recomputed(values, model, fields)
    missing += () if ranks else (RANKS_MISSING,)
    return reading((software, version), values, fields, document=document, model=model, ranks=ranks, missing=missing)


def check_same(values: Values) -> None:
    """Mark arguments that say again what another says, where they say it otherwise."""
    for again, name in {"encoder_num_layers": "num_layers", "encoder_seq_length": "seq_length"}.items():
        if values[again] not in (None, values[name]):
            values.doubt(again, f"is not {name}={values[name]}, which is counted")
    learned = values["position_embedding_type"] == "learned_absolute"
    if values["no_position_embedding"] and learned and not values["use_rotary_position_embeddings"]:
        values.doubt("no_position_embedding", "no positions: write --position-embedding-type none")


def arguments(plan: Plan, *, full: bool = False) -> dict[str, Any]:
    """The arguments of a plan, by name; unless ``full``, without those that are as Megatron has them by default."""
    found = written(TABLE, {"model": plan.model, "layout": plan.layout, "job": plan.job}) | emit.values(plan)
    if full:
        return {name: value for name, value in found.items() if value is not None}
    kept = {name: value for name, value in found.items() if value is not None and value is not False}
    return {name: value for name, value in kept.items() if name not in TABLE or value != TABLE[name].default}


def write(plan: Plan) -> Written:
    """A script that starts Megatron-LM's pretrain_gpt.py."""
    found = arguments(plan)
    nodes, per_node = plan.hosts
    groups: dict[str, Table] = {"MODEL": MODEL, "LAYOUT": LAYOUT, "JOB": JOB, "STACK": STACK}
    lines = [
        "#!/bin/bash",
        f"# Megatron-LM {VERSION}: {plan.model.name}, {plan.layout}",
        "# On every node, with MASTER_ADDR and NODE_RANK set; put your data and tokenizer at the end.",
        *(
            ["export CUDA_DEVICE_MAX_CONNECTIONS=1  # messages are launched in the order of the host"]
            if plan.layout.tp > 1
            else []
        ),
    ]
    for group, table in groups.items():
        lines += ["", f"{group}=("]
        lines += [
            commented(f"    {_flag(name, value)}", table[name].means) for name, value in found.items() if name in table
        ]
        lines += [")"]
    extra = [f"    {_flag(name, value)}" for name, value in found.items() if name not in TABLE]
    lines += [
        "DATA=(", *extra, commented("    --mock-data", "what is read: --data-path yours"),
        commented("    --use-mcore-models", "Megatron-Core"), ")", "",
        f"torchrun --nnodes {nodes} --nproc_per_node {per_node} "
        '--node_rank "${NODE_RANK:-0}" --master_addr "${MASTER_ADDR:-localhost}" --master_port 29500 \\',
        '    pretrain_gpt.py "${MODEL[@]}" "${LAYOUT[@]}" "${JOB[@]}" "${STACK[@]}" "${DATA[@]}"',
    ]  # fmt: skip
    return Written({"megatron.sh": "\n".join(lines) + "\n"})


def _flag(name: str, value: Any) -> str:
    flag = f"--{name.replace('_', '-')}"
    if value is True:
        return flag
    words = value if isinstance(value, list | tuple) else [value]
    return f"{flag} {' '.join(shlex.quote(str(word)) for word in words)}"
