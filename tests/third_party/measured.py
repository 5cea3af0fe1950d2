"""Measure third-party stacks on two gloo processes by ``watch``, and compare them with predictions.

python -m tests.third_party.measured [--only DDP] [--markdown docs/explanation/measurements/014-interop.md]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

import fivefold as ff
from fivefold.job import RECIPES, Job, Recipe
from fivefold.layout.spec import Layout
from fivefold.machine.spec import Chip, Link, Machine
from fivefold.model.spec import Model
from fivefold.planner.predict import predict
from fivefold.stack.catalog import build_stack
from fivefold.step import Step
from fivefold.units import show_bytes
from tests.third_party import adapters, engines, loops

MACHINE = Machine(
    name="here", ranks=4, ranks_per_node=4, backend="gloo",
    chip=Chip(name="core", peak_flops={"fp32": 1e11}, memory_bytes=2**34, memory_bandwidth=1e10, source="test"),
    links=(Link(name="loopback", span=4, bandwidth=1e9, latency_seconds=1e-4, source="test"),),
)  # fmt: skip
STEPS = 3  # metered; times are not compared here
BEGIN, END = "<!-- table: python -m tests.third_party.measured --markdown writes it -->\n", "<!-- end -->"


class Case(NamedTuple):
    """A loop, and the layout and stack by which it is predicted."""

    loop: Callable[[], loops.Loop]
    stack: str
    layout: str
    mbs: int
    micro_batches: int
    changed: dict[str, object] = {}  # facts of this loop that are choices in that stack
    precision: str | Recipe = "fp32"
    norm: int = 0  # bytes of all-reduces of the stack's own, as little counted as the trainer's
    norm_messages: int = 1  # their number
    open: float = 0.0  # that a peak is known to be off, for a reason that the page states
    work: bool = True  # whether FLOPs are; if not likewise
    # parameters are views of other tensors, or but shards once a step has ended, or what is updated are others
    flat: bool = False
    adapter: dict[str, object] | None = None
    freeze: tuple[str, ...] = ()
    model: Model = loops.SHAPE
    joined: int = 0  # trained weights that this loop has as one tensor with another, whose step count is not there
    offload: tuple[str, ...] = ()


def frozen(layout: str, micro_batches: int, *parts: str, weights: tuple[str, ...], **how: bool) -> Case:
    """A loop with frozen parts, whose ``weights`` begin so; ``how``: as ``loops.ddp`` takes it."""
    precision = "bf16-autocast" if how.get("half") else "fp32"
    loop = partial(loops.ddp, frozen=weights, **how)
    return Case(loop, "ddp", layout, 2, micro_batches, precision=precision, freeze=parts)


LAST_TWO = ("embed_tokens", "layers[:-2]", "norm", "lm_head")  # all but the last two layers, as LLaMA-Factory's default
LOWER_WEIGHTS = ("embed", "blocks.0", "blocks.1", "norm", "head")
MLP_WEIGHTS = tuple(f"blocks.{layer}.mlp" for layer in range(loops.SHAPE.layers))
SOME = ("layers[1].attention", "layers[2:].q_proj", "layers[2:].norms", "lm_head")
SOME_WEIGHTS = (
    "blocks.1.attention",
    *(f"blocks.{layer}.{name}" for layer in (2, 3) for name in ("attention.q", "norm1", "norm2")),
    "head",
)
CASES = {
    "DDP": Case(loops.ddp, "ddp", "dp2 zero0", 2, 1),
    "DDP, 2 micro-batches": Case(loops.ddp, "ddp", "dp2 zero0", 2, 2),
    "DDP, autocast": Case(lambda: loops.ddp(half=True), "ddp", "dp2 zero0", 2, 1, precision="bf16-autocast"),
    "DDP, autocast, 2 micro-batches": Case(
        lambda: loops.ddp(half=True), "ddp", "dp2 zero0", 2, 2, precision="bf16-autocast"
    ),
    "DDP, autocast, recomputed": Case(
        lambda: loops.ddp(half=True, recompute=True), "ddp", "dp2 zero0 ac=full", 2, 1, precision="bf16-autocast"
    ),
    "DDP, frozen layers": frozen("dp2 zero0", 2, *LAST_TWO, weights=LOWER_WEIGHTS),
    "DDP, frozen layers, autocast": frozen("dp2 zero0", 2, *LAST_TWO, weights=LOWER_WEIGHTS, half=True),
    "DDP, frozen layers, autocast, recomputed": frozen(
        "dp2 zero0 ac=full", 1, *LAST_TWO, weights=LOWER_WEIGHTS, half=True, recompute=True
    ),
    "DDP, frozen MLPs, autocast": frozen("dp2 zero0", 1, "layers.mlp", weights=MLP_WEIGHTS, half=True),
    "DDP, frozen embedding and MLPs, autocast": frozen(
        "dp2 zero0", 1, "layers.mlp", "embed_tokens", weights=("embed", *MLP_WEIGHTS), half=True
    ),
    "DDP, frozen modules, autocast, recomputed": frozen(
        "dp2 zero0 ac=full", 2, *SOME, weights=SOME_WEIGHTS, half=True, recompute=True
    ),
    "FSDP2, reshard": Case(lambda: loops.fsdp2(reshard=True), "fsdp2", "dp2 zero3", 2, 1),
    "FSDP2, reshard, 2 micro-batches": Case(lambda: loops.fsdp2(reshard=True), "fsdp2", "dp2 zero3", 2, 2),
    "FSDP2, gathered, as zero2": Case(lambda: loops.fsdp2(reshard=False), "fsdp2", "dp2 zero2", 2, 2),
    "FSDP2, gathered": Case(lambda: loops.fsdp2(reshard=False), "fsdp2", "dp2 zero3", 2, 1, {"reshard": "backward"}),
    "TP, DTensor": Case(loops.tensor_parallel, "torchtitan", "tp2", 2, 1),
    "TP, DTensor, 2 micro-batches": Case(loops.tensor_parallel, "torchtitan", "tp2", 2, 2),
    "TP, DTensor, autocast": Case(
        lambda: loops.tensor_parallel(half=True), "torchtitan", "tp2", 2, 1, precision="bf16-autocast"
    ),
    "PP, GPipe": Case(lambda: loops.pipeline(schedule="GPipe", micro_batches=4), "torchtitan", "pp2 gpipe", 2, 4),
    "PP, 1F1B": Case(lambda: loops.pipeline(schedule="1F1B", micro_batches=4), "torchtitan", "pp2 1f1b", 2, 4),
    "PP, interleaved": Case(
        lambda: loops.pipeline(schedule="Interleaved1F1B", micro_batches=4, v=2),
        "torchtitan",
        "pp2 v2 interleaved",
        2,
        4,
    ),
    "PP, zero-bubble V": Case(
        lambda: loops.pipeline(schedule="ZBVZeroBubble", micro_batches=4, v=2),
        "torchtitan",
        "pp2 v2 zbv",
        2,
        4,
    ),
    "FSDP2, bf16": Case(lambda: loops.fsdp2(half=True), "fsdp2", "dp2 zero3", 2, 1, precision="bf16"),
    "FSDP2, bf16, 2 micro-batches": Case(lambda: loops.fsdp2(half=True), "fsdp2", "dp2 zero3", 2, 2, precision="bf16"),
    "FSDP2, bf16, reduced in bf16": Case(
        lambda: loops.fsdp2(half=True, reduced="bfloat16"), "fsdp2", "dp2 zero3", 2, 1, precision="bf16-grad16"
    ),
    "FSDP2, bf16, reduced in bf16, 2 micro-batches": Case(
        lambda: loops.fsdp2(half=True, reduced="bfloat16"), "fsdp2", "dp2 zero3", 2, 2, precision="bf16-grad16"
    ),
    "FSDP2, recomputed": Case(
        lambda: loops.fsdp2(recompute=1),
        "fsdp2",
        "dp2 zero3 ac=full",
        2,
        1,
    ),
    "FSDP2, every second block recomputed": Case(
        lambda: loops.fsdp2(recompute=2), "fsdp2", "dp2 zero3 ac=full/2", 2, 1
    ),
    "FSDP2, recomputed by operation": Case(
        lambda: loops.fsdp2(recompute=1, by_operation=True),
        "fsdp2",
        "dp2 zero3 ac=norm+rope+act",
        2,
        1,
        open=0.055,
        work=False,
    ),
    "FSDP2 with TP": Case(lambda: loops.tensor_parallel(dp=2), "torchtitan", "dp2 tp2 zero3", 2, 1),
    "FSDP2 with TP, 2 micro-batches": Case(lambda: loops.tensor_parallel(dp=2), "torchtitan", "dp2 tp2 zero3", 2, 2),
    "FSDP2 with TP, autocast": Case(
        lambda: loops.tensor_parallel(dp=2, half=True), "torchtitan", "dp2 tp2 zero3", 2, 1, precision="bf16-autocast"
    ),
    "FSDP2 with PP": Case(
        lambda: loops.pipeline(schedule="1F1B", micro_batches=4, dp=2),
        "torchtitan",
        "dp2 pp2 1f1b zero2",
        2,
        4,
        flat=True,
    ),
}


def deepspeed(
    zero: int,
    micro_batches: int = 1,
    *,
    ranks: int = 2,
    adapts: bool = False,
    quantized: bool = False,
    recompute: bool = False,
    targets: tuple[str, ...] = (),
    half: bool = False,
    offload: tuple[str, ...] = (),
    **facts: int,
) -> Case:
    """``adapts``, ``quantized``: with PEFT's adapters, over a base in nf4; ``facts``: limits of ZeRO-3.

    ``targets``: layers with an adapter, if not all. ``half``: in bf16. ``offload``: what is in host memory.
    """
    keys: dict[str, int] = {KEYS[name]: value for name, value in facts.items()}
    keys |= {"adapts": adapts, "quantized": quantized, "recompute": recompute}
    how = {"half": half, "offload": offload}
    loop = partial(engines.deepspeed, zero=zero, micro_batches=micro_batches, targets=targets, **how, **keys)
    changed = {"loss": "low_precision", "reduce_bucket": engines.BUCKET, **facts}
    changed |= {} if zero == 3 else {"overlap": ()}  # overlap_comm is on by itself under stage 3
    norm = 8 if zero == 3 and "optimizer" not in offload else 4
    checks = half and 0 < zero < 3  # a byte, whether a gradient is infinite
    adapter: dict[str, object] | None = {"rank": adapters.RANK} if adapts else None
    if adapter:
        adapter |= ({"base": "nf4"} if quantized else {}) | ({"targets": targets} if targets else {})
    layout = f"dp{ranks} zero{zero}{' ac=full' if recompute else ''}"
    case = Case(loop, "deepspeed", layout, 2, micro_batches, changed, flat=zero > 0, adapter=adapter)
    if ranks > 1:
        case = case._replace(norm=norm + checks, norm_messages=1 + checks)
    return case._replace(work=not quantized, precision="bf16-grad16" if half else "fp32", offload=offload)


KEYS = {
    "prefetch_bucket_size": "stage3_prefetch_bucket_size",
    "param_persistence_threshold": "stage3_param_persistence_threshold",
    "max_reuse_distance": "stage3_max_reuse_distance",
    "max_live_parameters": "stage3_max_live_parameters",
    "update_group_size": "sub_group_size",
}
USED = 4 * 39  # which parameters were used: Trainer has DistributedDataParallel find those that were not
if importlib.util.find_spec("deepspeed") is not None:  # by ``make interop``, as accelerate is
    CASES["Trainer, DDP"] = Case(engines.trainer, "ddp", "dp2 zero0", 2, 1, {"loss": "plain"}, norm=USED)
    CASES["Trainer, DDP, 2 micro-batches"] = Case(
        engines.trainer, "ddp", "dp2 zero0", 2, 2, {"loss": "plain"}, norm=USED
    )
    CASES["Trainer, DDP, bf16=True"] = Case(
        partial(engines.trainer, half=True),
        "ddp",
        "dp2 zero0",
        2,
        1,
        {"loss": "plain"},
        "bf16-autocast",
        norm=USED,
    )
    CASES["accelerate, FSDP2"] = Case(partial(engines.accelerate, pretrained=True), "fsdp2", "dp2 zero3", 2, 1)
    CASES["accelerate, FSDP2, no pretrained model"] = Case(
        partial(engines.accelerate, pretrained=False), "fsdp2", "dp2 zero3", 2, 1, {"backward_all_gather": "root"}
    )
    CASES |= {f"DeepSpeed, ZeRO-{zero}": deepspeed(zero) for zero in (0, 1, 2, 3)}
    CASES |= {f"DeepSpeed, ZeRO-{zero}, 2 micro-batches": deepspeed(zero, 2) for zero in (1, 2)}
    CASES["DeepSpeed, ZeRO-3, bf16"] = deepspeed(3, half=True)
    BOTH = ("optimizer", "parameters")
    CASES["DeepSpeed, ZeRO-3, offload_optimizer, 2 micro-batches"] = deepspeed(3, 2, offload=("optimizer",))
    CASES["DeepSpeed, ZeRO-3, offload_param and _optimizer"] = deepspeed(3, offload=BOTH)
    CASES["DeepSpeed, ZeRO-3, bf16, offload_param"] = deepspeed(3, half=True, offload=("parameters",))
    CASES["DeepSpeed, ZeRO-3, bf16, offload_param and _optimizer, recomputed, a little ahead, 2 micro-batches"] = (
        deepspeed(
            3,
            2,
            half=True,
            recompute=True,
            offload=BOTH,
            prefetch_bucket_size=100_000,
            param_persistence_threshold=0,
            max_reuse_distance=0,
        )
    )
    OPTIMIZER = ("optimizer",)
    CASES["DeepSpeed, ZeRO-1, offload_optimizer, 2 micro-batches"] = deepspeed(1, 2, offload=OPTIMIZER)
    CASES["DeepSpeed, ZeRO-2, bf16, offload_optimizer, 2 micro-batches"] = deepspeed(2, 2, half=True, offload=OPTIMIZER)
    CASES["DeepSpeed, one rank, ZeRO-1, bf16, offload_optimizer"] = deepspeed(1, ranks=1, half=True, offload=OPTIMIZER)
    CASES["DeepSpeed, one rank, ZeRO-2, bf16, offload_optimizer, 2 micro-batches"] = deepspeed(
        2, 2, ranks=1, half=True, offload=OPTIMIZER
    )
    CASES["DeepSpeed, one rank, ZeRO-3, bf16"] = deepspeed(3, ranks=1, half=True)
    CASES["DeepSpeed, one rank, ZeRO-3, bf16, offload_optimizer, 2 micro-batches"] = deepspeed(
        3, 2, ranks=1, half=True, offload=OPTIMIZER
    )
    CASES["DeepSpeed, one rank, ZeRO-3, bf16, offload_param and _optimizer, 2 micro-batches"] = deepspeed(
        3, 2, ranks=1, half=True, offload=BOTH
    )
    CASES["DeepSpeed, one rank, ZeRO-3, bf16, offload_param, a little ahead"] = deepspeed(
        3,
        ranks=1,
        half=True,
        offload=("parameters",),
        prefetch_bucket_size=100_000,
        param_persistence_threshold=0,
        max_reuse_distance=0,
    )
    IN_GROUPS = deepspeed(3, half=True, update_group_size=100_000)
    CASES["DeepSpeed, ZeRO-3, bf16, in groups"] = IN_GROUPS._replace(norm=4 * 8, norm_messages=4)  # a norm of each
    CASES["DeepSpeed, ZeRO-3, a little ahead"] = deepspeed(
        3, 2, prefetch_bucket_size=100_000, param_persistence_threshold=0, max_reuse_distance=0
    )
    CASES["DeepSpeed, ZeRO-3, weight by weight"] = deepspeed(
        3, prefetch_bucket_size=0, param_persistence_threshold=1000, max_reuse_distance=0
    )
    CASES["DeepSpeed, ZeRO-3, near ones stay"] = deepspeed(
        3, prefetch_bucket_size=50_000, param_persistence_threshold=200, max_reuse_distance=300_000
    )


BF16 = RECIPES["bf16-full"]


def peft(layout: str, micro_batches: int = 1, *, precision: str | Recipe = "fp32", **how: object) -> Case:
    """A loop over a PEFT adapter; ``how``: as ``adapters.loop`` takes it."""
    adapter: dict[str, object] = {"rank": adapters.RANK}
    adapter |= {name: how[name] for name in ("dropout", "targets", "modules_to_save") if name in how}
    adapter |= {"kind": "dora"} if how.get("dora") else {}
    adapter |= {"base": "nf4"} if how.get("quantized") else {}
    loop = partial(adapters.loop, autocast=precision == "bf16-autocast", half=precision == BF16, **how)
    is_counted = not how.get("quantized")
    case = Case(loop, "ddp", layout, 2, micro_batches, precision=precision, adapter=adapter, work=is_counted)
    if not how.get("experts"):
        return case
    of_experts = {"rank": adapters.RANK, "targets": (*how["targets"], *how["experts"])}  # type: ignore[misc]
    return case._replace(adapter=of_experts, model=adapters.MIXTURE, joined=count_joined(how["experts"]))


def count_joined(experts: object) -> int:
    """Return the layers of a mixture in which one factor B of gate and up is counted as two."""
    return loops.SHAPE.layers * (adapters.EXPERTS[0] in tuple(experts))  # type: ignore[arg-type]


if importlib.util.find_spec("peft") is not None:  # by ``make interop``
    CASES["peft LoRA"] = peft("dp1")
    CASES["peft LoRA, recomputed"] = peft("dp1 ac=full", recompute=True)
    CASES["peft LoRA on q and v"] = peft("dp1", targets=("q_proj", "v_proj"))
    CASES["peft LoRA, DDP, 2 micro-batches"] = peft("dp2 zero0", 2)
    CASES["peft LoRA, bf16"] = peft("dp1", precision=BF16)
    CASES["peft LoRA on q, k and v, recomputed"] = peft(
        "dp1 ac=full", recompute=True, targets=("q_proj", "k_proj", "v_proj")
    )
    CASES["peft LoRA on the MLP, DDP"] = peft("dp2 zero0", targets=("gate_proj", "up_proj", "down_proj"))
    CASES["peft DoRA"] = peft("dp1", dora=True)
    CASES["peft DoRA, recomputed"] = peft("dp1 ac=full", recompute=True, dora=True)
    CASES["peft DoRA on q and v, DDP, 2 micro-batches"] = peft("dp2 zero0", 2, targets=("q_proj", "v_proj"), dora=True)
    CASES["peft DoRA, bf16"] = peft("dp1", precision=BF16, dora=True)
    CASES["peft DoRA, autocast"] = peft("dp1", precision="bf16-autocast", dora=True)
    SHARDED = {"rank": adapters.RANK}
    CASES["peft LoRA, FSDP2"] = Case(adapters.build_sharded_loop, "fsdp2", "dp2 zero3", 2, 1, adapter=SHARDED)
    CASES["peft LoRA, FSDP2, recomputed, 2 micro-batches"] = Case(
        partial(adapters.build_sharded_loop, recompute=True), "fsdp2", "dp2 zero3 ac=full", 2, 2, adapter=SHARDED
    )
    CASES["peft LoRA, FSDP2, gathered, as zero2"] = Case(
        partial(adapters.build_sharded_loop, reshard=False), "fsdp2", "dp2 zero2", 2, 2, adapter=SHARDED
    )
    CASES["peft LoRA, embedding and head trained, FSDP2"] = Case(
        partial(adapters.build_sharded_loop, modules_to_save=("embed_tokens", "lm_head")),
        "fsdp2",
        "dp2 zero3",
        2,
        1,
        adapter=SHARDED | {"modules_to_save": ("embed_tokens", "lm_head")},
    )
    if importlib.util.find_spec("deepspeed") is not None:
        CASES |= {f"peft LoRA, DeepSpeed, ZeRO-{zero}": deepspeed(zero, adapts=True) for zero in (1, 2, 3)}
        CASES["peft LoRA, DeepSpeed, ZeRO-3, a little ahead, 2 micro-batches"] = deepspeed(
            3, 2, adapts=True, prefetch_bucket_size=100_000, param_persistence_threshold=0, max_reuse_distance=0
        )
        CASES["peft LoRA, DeepSpeed, ZeRO-3, weight by weight"] = deepspeed(
            3, adapts=True, prefetch_bucket_size=0, param_persistence_threshold=1000, max_reuse_distance=0
        )
        CASES["peft LoRA, DeepSpeed, ZeRO-3, recomputed"] = deepspeed(3, adapts=True, recompute=True)
        CASES["peft LoRA, DeepSpeed, ZeRO-3, weight by weight, recomputed"] = deepspeed(
            3,
            adapts=True,
            recompute=True,
            prefetch_bucket_size=0,
            param_persistence_threshold=1000,
            max_reuse_distance=0,
        )
        CASES["peft LoRA, DeepSpeed, ZeRO-3, a little ahead, recomputed, 2 micro-batches"] = deepspeed(
            3,
            2,
            adapts=True,
            recompute=True,
            prefetch_bucket_size=100_000,
            param_persistence_threshold=0,
            max_reuse_distance=0,
        )
        CASES["peft LoRA on q and v, DeepSpeed, ZeRO-3, recomputed"] = deepspeed(
            3, adapts=True, recompute=True, targets=("q_proj", "v_proj")
        )
        CASES["peft LoRA on q and v, DeepSpeed, ZeRO-3"] = deepspeed(3, adapts=True, targets=("q_proj", "v_proj"))
    CASES["peft LoRA, head trained, bf16"] = peft("dp1", precision=BF16, modules_to_save=("lm_head",))
    CASES["peft LoRA, embedding and head trained, recomputed"] = peft(
        "dp1 ac=full", recompute=True, modules_to_save=("embed_tokens", "lm_head")
    )
    CASES["peft LoRA, embedding trained, DDP, 2 micro-batches"] = peft(
        "dp2 zero0", 2, modules_to_save=("embed_tokens",)
    )
    CASES["peft LoRA, embedding and head trained, autocast, DDP"] = peft(
        "dp2 zero0", precision="bf16-autocast", modules_to_save=("embed_tokens", "lm_head")
    )
    ALL = (*adapters.NAMES, *adapters.ENDS)
    CASES["peft LoRA on embedding, head and blocks"] = peft("dp1", targets=ALL)
    CASES["peft LoRA on embedding, head and blocks, recomputed, DDP"] = peft(
        "dp2 zero0 ac=full", recompute=True, targets=ALL
    )
    CASES["peft LoRA on q and the embedding, bf16, 2 micro-batches"] = peft(
        "dp1", 2, precision=BF16, targets=("q_proj", "embed_tokens")
    )
    CASES["peft LoRA on q and the head with dropout, autocast"] = peft(
        "dp1", precision="bf16-autocast", targets=("q_proj", "lm_head"), dropout=0.1
    )
    CASES["peft LoRA with dropout, bf16"] = peft("dp1", precision=BF16, dropout=0.1)
    CASES["peft LoRA on embedding, head and blocks, FSDP2"] = Case(
        partial(adapters.build_sharded_loop, targets=ALL),
        "fsdp2",
        "dp2 zero3",
        2,
        1,
        adapter=SHARDED | {"targets": ALL},
    )
    ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
    OF_EXPERTS = {"targets": ATTENTION, "experts": adapters.EXPERTS}
    CASES["peft LoRA on attention and experts"] = peft("dp1", **OF_EXPERTS)
    CASES["peft LoRA on attention and experts, recomputed, DDP, 2 micro-batches"] = peft(
        "dp2 zero0 ac=full", 2, recompute=True, **OF_EXPERTS
    )
    CASES["peft LoRA on q and the experts' down projection, bf16"] = peft(
        "dp1", precision=BF16, targets=("q_proj",), experts=("experts.down_proj",)
    )
    CASES["peft LoRA on attention and experts, autocast"] = peft("dp1", precision="bf16-autocast", **OF_EXPERTS)
    if importlib.util.find_spec("bitsandbytes") is not None:
        # PyTorch's count of FLOPs does not see bitsandbytes' product with a quantized weight
        CASES["peft QLoRA"] = peft("dp1", quantized=True)
        CASES["peft QLoRA, DDP, recomputed, 2 micro-batches"] = peft(
            "dp2 zero0 ac=full", 2, recompute=True, quantized=True
        )
        if importlib.util.find_spec("deepspeed") is not None:
            CASES["peft QLoRA, DeepSpeed, ZeRO-2, recomputed, 2 micro-batches"] = deepspeed(
                2, 2, adapts=True, quantized=True, recompute=True
            )
            CASES["peft QLoRA, DeepSpeed, ZeRO-3"] = deepspeed(3, adapts=True, quantized=True)
            CASES["peft QLoRA, DeepSpeed, ZeRO-3, a little ahead, recomputed"] = deepspeed(
                3,
                adapts=True,
                quantized=True,
                recompute=True,
                prefetch_bucket_size=20_000,
                param_persistence_threshold=0,
                max_reuse_distance=0,
            )
        CASES["peft QLoRA, FSDP2"] = Case(
            partial(adapters.build_sharded_loop, quantized=True),
            "fsdp2",
            "dp2 zero3",
            2,
            1,
            adapter=SHARDED | {"base": "nf4"},
            work=False,
        )
        CASES["peft QLoRA, FSDP2, recomputed, 2 micro-batches"] = Case(
            partial(adapters.build_sharded_loop, recompute=True, quantized=True),
            "fsdp2",
            "dp2 zero3 ac=full",
            2,
            2,
            adapter=SHARDED | {"base": "nf4"},
            work=False,
        )
    CASES["peft LoRA, autocast"] = peft("dp1", precision="bf16-autocast")
    CASES["peft LoRA, autocast, recomputed"] = peft("dp1 ac=full", precision="bf16-autocast", recompute=True)


def predict_step(case: Case) -> Step:
    layout = Layout.parse(f"{case.layout} mbs{case.mbs}")
    stack = build_stack(case.stack)
    if case.stack == "torchtitan":  # eager, and cross entropy without its fp32 copy
        stack = stack.replace(compile=False, kernels="plain")
    stack = stack.replace(**case.changed)
    job = Job(
        stack=stack,
        sequence=loops.SEQUENCE,
        global_batch=layout.dp * case.mbs * case.micro_batches,
        precision=case.precision,
        adapter=case.adapter,
        freeze=case.freeze,
        offload=case.offload,
    )
    machine = MACHINE.replace(ranks=layout.world, ranks_per_node=layout.world)
    return predict(model=case.model, machine=machine, layout=layout, job=job)


def measure_case(case: Case) -> Step:
    """Of as many processes as the layout has ranks."""
    world = Layout.parse(case.layout).world
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        children = []
        for rank in range(world):
            child = os.fork()
            if child == 0:
                try:
                    _rank(case, rank, world, folder)
                    os._exit(0)
                finally:
                    os._exit(1)
            children.append(child)
        codes = [os.waitpid(child, 0)[1] for child in children]
        if any(codes):
            raise RuntimeError(f"ranks ended with {codes}")
        return Step.read(json.loads((folder / "step.json").read_text())["measured"], origin="step.json")


def _rank(case: Case, rank: int, world: int, folder: Path) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    store = dist.FileStore(str(folder / "store"), world)
    dist.init_process_group("gloo", rank=rank, world_size=world, store=store)
    micro = loops.batches(case.mbs, case.micro_batches)
    try:
        model, optimizer, step, mesh, stage = case.loop()
        with ff.watch(model, optimizer, mesh=mesh, stage=stage, layout_name=case.layout) as watched:
            for _ in range(STEPS):
                step(micro)
        watched.save(folder)
        if case.offload:
            found, expected = engines.count_host_bytes(model), predict_step(case).memory.host_bytes // world
            assert found == expected, f"{found} bytes in host memory, predicted {expected}"
    except BaseException:
        import traceback

        traceback.print_exc()
        raise
    dist.barrier()


LEAST = 0.03  # that a peak may be off


class Beside(NamedTuple):
    """A case, as predicted and as measured."""

    name: str
    case: Case
    predicted: Step
    measured: Step

    @property
    def errors(self) -> tuple[float, ...]:
        """Predicted over measured peak, less 1, of each stage; here host memory is the device's."""
        stages = zip(self.predicted.memory.stages, self.measured.memory.stages, strict=True)
        host_bytes = (self.predicted.memory.host_bytes or 0) // Layout.parse(self.case.layout).world
        return tuple((mine.peak_bytes + host_bytes) / theirs.peak_bytes - 1 for mine, theirs in stages)

    @property
    def traffic(self) -> tuple[dict[str, tuple[int, int]], dict[str, tuple[int, int]]]:
        """Messages and bytes by axis and collective, predicted (without the trainer's own 12 bytes) and measured."""
        first, second = (
            {
                f"{item.axis} {item.collective}": (item.calls, item.bytes)
                for item in step.traffic
                if item.axis != "world"
            }
            for step in (self.predicted, self.measured)
        )
        if self.case.norm:
            messages, sent = second["dp all_reduce"]
            second["dp all_reduce"] = messages - self.case.norm_messages, sent - self.case.norm
        return first, {name: item for name, item in second.items() if item[1]}  # a group of one rank sends nothing

    @property
    def states(self) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
        """Bytes of parameters and moments by stage, predicted and measured; gradients lie in storages of any size."""
        first, second = (
            [
                (0 if self.case.flat else stage.parameters_bytes, stage.optimizer_bytes - 4 * joined)
                for stage in step.memory.stages
            ]
            for step, joined in ((self.predicted, self.case.joined), (self.measured, 0))
        )
        return ([], []) if "optimizer" in self.case.offload else (first, second)

    @property
    def is_equal(self) -> bool:
        """Counts equal, peaks within ``LEAST``."""
        flops = self.predicted.work.hardware_flops == self.measured.work.hardware_flops or not self.case.work
        counts = flops and self.states[0] == self.states[1] and self.traffic[0] == self.traffic[1]
        return all(abs(error) <= (self.case.open or LEAST) for error in self.errors) and counts


def compare_case(name: str) -> Beside:
    """One case, predicted and measured."""
    case = CASES[name]
    return Beside(name, case, predict_step(case), measure_case(case))


def markdown(rows: list[Beside]) -> str:
    """The table of the page."""
    lines = [
        "| loop | stack | layout | micro-batches | peak predicted | measured | difference | messages | FLOPs, states |",
        "|---|---|---|---:|---:|---:|---:|---|---|",
    ]
    for row in rows:
        changed = "".join(f" `{key}={value}`" for key, value in row.case.changed.items())
        peaks = [
            " / ".join(show_bytes(stage.peak_bytes) for stage in step.memory.stages)
            for step in (row.predicted, row.measured)
        ]
        errors = " / ".join(f"{error:+.2%}" for error in row.errors) + ", open" * (row.case.open > 0)
        mine, theirs = row.traffic
        told = ", ".join(f"{count} {name}" for name, (count, _) in theirs.items())
        same = "equal" if mine == theirs else f"predicted {', '.join(f'{n} {k}' for k, (n, _) in mine.items())}"
        messages = f"{told}: {same}" if told else "none"
        states = "equal" if row.states[0] == row.states[1] else "differ"
        flops = row.predicted.work.hardware_flops == row.measured.work.hardware_flops
        lines.append(
            f"| {row.name} | `{row.case.stack}`{changed} | `{row.case.layout} mbs{row.case.mbs}` | "
            f"{row.case.micro_batches} | {peaks[0]} | {peaks[1]} | {errors} | {messages} | "
            f"{'equal' if flops else 'differ'}, {states} |"
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", help="cases whose names hold this")
    parser.add_argument("--markdown", type=Path, help="write the table between the marks of this page")
    options = parser.parse_args()
    rows = []
    for name in (case for case in CASES if options.only in case):
        rows.append(compare_case(name))
        print(
            f"{name}: peak {', '.join(f'{error:+.2%}' for error in rows[-1].errors)}, "
            f"{'agrees' if rows[-1].is_equal else 'DIFFERS'}",
            file=sys.stderr,
        )
    print(markdown(rows))
    if options.markdown:
        text = options.markdown.read_text(encoding="utf-8")
        before, rest = text.split(BEGIN, 1)
        options.markdown.write_text(before + BEGIN + markdown(rows) + END + rest.split(END, 1)[1], encoding="utf-8")
    return 0 if all(row.is_equal for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
