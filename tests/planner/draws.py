"""Random models, machines, layouts and jobs, every field of a job among them, each from one seed.

A field of a record that no table here names fails ``tests/planner/test_any_job.py``.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from pydantic import BaseModel, ValidationError

from fivefold.adapter import EXPERT_TARGETS, Adapter, expand_targets
from fivefold.base_format import FOUR_BIT_BASES
from fivefold.errors import UserError
from fivefold.job import RECIPES, Job, Recipe
from fivefold.layout.names import DEFAULT_ORDER
from fivefold.layout.recomputation import RECOMPUTABLE
from fivefold.layout.schedule.pipeline_schedule import PIPELINE_SCHEDULES, SCHEDULES
from fivefold.layout.spec import Layout
from fivefold.layout.validity import list_reasons, refuse
from fivefold.machine import catalog as machines
from fivefold.machine.spec import (
    Calibration,
    CollectivePoint,
    KernelPoint,
    Machine,
    MatmulPoint,
    StepFactor,
    StepOverhead,
)
from fivefold.model import catalog as models
from fivefold.model.experts import MoE
from fivefold.model.latent_attention import MLA
from fivefold.model.multi_token_prediction import MTP
from fivefold.model.spec import Model
from fivefold.model.vision import ProjectorLayer, VisionTower
from fivefold.planner.search.space import list_divisors
from fivefold.stack.catalog import STACKS
from fivefold.stack.spec import Stack, SupportedLayouts
from fivefold.update import Group, LearningRate, Optimizer, Ramp

Draw = Callable[[random.Random], Any]


class Case(NamedTuple):
    model: Model
    machine: Machine
    layout: Layout
    job: Job


def options(record: type[BaseModel], field: str) -> list[Any]:
    """Every literal that the annotation of a field allows, so that a new one is drawn too."""

    def literals(annotation: Any) -> list[Any]:
        result = list(get_args(annotation))
        return (
            result
            if type(annotation) is type(Literal["a"])
            else [literal for one in result for literal in literals(one)]
        )

    annotation = record.model_fields[field].annotation
    return [False, True] if annotation is bool else literals(annotation)


def choose(*values: Any) -> Draw:
    return lambda some: some.choice(values)


def choose_option(record: type[BaseModel], field: str) -> Draw:
    """The default half of the time, else any of its options."""
    choices, usual = options(record, field), record.model_fields[field].default
    return lambda some: usual if some.random() < 0.5 else some.choice(choices)


def subset(record: type[BaseModel], field: str) -> Draw:
    choices, usual = options(record, field), record.model_fields[field].default
    return lambda some: usual if some.random() < 0.5 else tuple(choice for choice in choices if some.random() < 0.5)


def fields(table: dict[str, Draw], some: random.Random) -> dict[str, Any]:
    return {name: draw(some) for name, draw in table.items()}


def recipe(some: random.Random) -> Recipe:
    """One that is known, or known but for some of its fields; half of the time the default."""
    if some.random() < 0.4:
        return RECIPES["bf16"]
    known = some.choice(list(RECIPES.values()))
    if some.random() < 0.6:
        return known
    changed = {name: draw(some) for name, draw in RECIPE.items() if some.random() < 0.2}
    try:
        return known.replace(**changed)
    except UserError:
        return known


RECIPE: dict[str, Draw] = {
    "name": choose("mine"),
    "compute": choose_option(Recipe, "compute"),
    "weights_bytes": choose(1, 2, 4),
    "gradients_bytes": choose(1, 2, 4),
    "master_bytes": choose(0, 2, 4),
    "accumulated_bytes": choose(0, 2, 4),
    "moments_bytes": choose((4, 4), (2, 2), (1, 2), (0, 0), (4, 0)),
    "loss_scaling": choose(False, True),
    "scaling": choose_option(Recipe, "scaling"),
    "wide_gradients": choose(False, True),
    "gathers": choose_option(Recipe, "gathers"),
    "half": choose_option(Recipe, "half"),
    "dispatches": choose_option(Recipe, "dispatches"),
}

GROUP: dict[str, Draw] = {
    "of": choose_option(Group, "of"),
    "rate": choose(0.0, 1.0, 2.5),
    "weight_decay": choose(None, 0.0, 0.3),
}

OPTIMIZER: dict[str, Draw] = {
    "kind": choose_option(Optimizer, "kind"),
    "betas": choose((0.9, 0.95), (0.0, 0.0)),
    "momentum": choose(0.95, 0.0),
    "epsilon": choose(1e-8),
    "weight_decay": choose(0.1, 0.0),
    "groups": lambda some: tuple(
        fields(GROUP | {"of": choose(part)}, some) for part in options(Group, "of") if some.random() < 0.1
    ),
    "clip": choose(1.0, 0.0),
}

RATE: dict[str, Draw] = {
    "kind": choose_option(LearningRate, "kind"),
    "peak": choose(3e-4),
    "floor": choose(0.0, 0.1, 1.0),
    "warmup_steps": choose(0, 1),
    "decay_steps": choose(None, 1),
}

RAMP: dict[str, Draw] = {
    "first": choose(1, 2, 8),
    "step": choose(1, 2, 8),
    "every": choose(1, 3),
    "samples": choose(None),
}


def ramp(some: random.Random) -> dict[str, Any] | None:
    """Steps of one size, or a number of samples; rarely any."""
    result = fields(RAMP, some)
    return None if some.random() < 0.9 else result if some.random() < 0.5 else result | {"every": None, "samples": 100}


ADAPTER: dict[str, Draw] = {
    "kind": choose("lora", "dora"),
    "rank": choose(1, 3, 16),
    "alpha": choose(None, 8.0),
    "dropout": choose(0.0, 0.0, 0.1),
    "targets": choose(
        ("all-linear",),
        ("q_proj", "v_proj"),
        ("down_proj",),
        ("o_proj", "up_proj"),
        ("in_proj", "in_proj_qkv", "in_proj_qkvz", "b_proj", "q_proj"),  # of token mixers
        ("out_proj", "in_proj_b", "down_proj"),
    ),
    "rank_stabilized": choose(False, True),
    "base": choose(None, "int8", "nf4", "fp4", "bf16", "fp32", "fp8", "mxfp4"),
    "modules_to_save": choose((), (), ("embed_tokens",), ("lm_head",), ("embed_tokens", "lm_head")),
    "rank_pattern": choose(()),  # of some of its targets: ``adapter``
    "alpha_pattern": choose(()),
    "double_quantization": lambda some: True,  # of bases in four bits also not: ``adapter``
}


def adapter(some: random.Random) -> dict[str, Any] | None:
    """Of a chance of its own, lest the draws after it change."""
    if some.random() > 0.4:
        return None
    drawn = fields(ADAPTER, some)
    drawn["double_quantization"] = drawn["base"] not in FOUR_BIT_BASES or some.random() < 0.5
    experts = tuple(target for target in EXPERT_TARGETS if some.random() < 0.15)
    drawn["targets"] = (*drawn["targets"], *experts)
    among = expand_targets(drawn["targets"])
    return drawn | {
        "rank_pattern": {some.choice(among): some.choice((1, 5, 64))} if some.random() < 0.4 else {},
        "alpha_pattern": {some.choice(among): some.choice((4, 7.5))} if some.random() < 0.3 else {},
    }


# Frozen parts of a job, mostly none: next to adapters they are an error.
FREEZES: tuple[tuple[str, ...], ...] = (
    *((),) * 12,
    ("embed_tokens",),
    ("embed_tokens", "layers[0]", "norm"),
    ("embed_tokens", "layers[:-1]"),
    ("layers[1:].mlp",),
    ("embed_tokens", "layers[0].attention", "layers[0].q_proj"),
)

JOB: dict[str, Draw] = {
    "sequence": choose(1, 2, 30, 64, 96, 128, 1024, 4096, 6000, 131072),
    "global_batch": choose(1),  # as the layout needs it: ``layout_and_job``
    "precision": recipe,
    "documents": choose_option(Job, "documents"),
    "objective": lambda some: ("sft", "dpo", "pretrain")[some.getstate()[1][1] % 3],  # leaves the draws after it
    "dpo_beta": lambda some: (0.1, 0.5)[some.getstate()[1][2] % 2],
    "emulate": choose_option(Job, "emulate"),
    "imbalance": choose(1.0, 1.0, 1.7, 64.0),
    "offload": subset(Job, "offload"),
    "optimizer": lambda some: fields(OPTIMIZER, some) if some.random() < 0.5 else Optimizer(),
    "learning_rate": lambda some: fields(RATE, some),
    "ramp": ramp,
    "adapter": lambda some: adapter(random.Random(some.getstate()[1][0] + some.getstate()[1][-1])),
    "freeze": lambda some: FREEZES[some.getstate()[1][3] % len(FREEZES)],
    "images": choose(0),  # of a model with a tower: ``with_images``
    "image_tokens": choose(None),
    "freeze_vision_tower": choose(False),
    "freeze_projector": choose(False),
    "steps": choose(1, 1000),
    "seed": choose(0, 7),
}

COLUMN_INPUTS = (("regathered", "regathered"), ("saved", "copied"))
MERGED_ADAPTERS = (*("none",) * 6, "all_gather", "all_to_all")  # an error next to most adapters

STACK: dict[str, Draw] = {
    "attention": choose_option(Stack, "attention"),
    "loss": choose_option(Stack, "loss"),
    "kernels": choose_option(Stack, "kernels"),
    "compile": choose_option(Stack, "compile"),
    "merged_projections": choose_option(Stack, "merged_projections"),
    "merged_adapters": lambda some: MERGED_ADAPTERS[some.getstate()[1][4] % 8],  # leaves the draws after it
    "linears": choose_option(Stack, "linears"),
    "column_inputs": lambda some: COLUMN_INPUTS[some.random() >= 0.5 and some.choice((0, 1))][
        some.getstate()[1][8] % 2
    ],
    "token_permutation": choose_option(Stack, "token_permutation"),
    "fused_scans": choose(False, False, True),
    "scan_temporary_bytes": choose(None, None, 2**20, 2**26),
    "transposes_attention": choose_option(Stack, "transposes_attention"),
    "tp_buffers": choose_option(Stack, "tp_buffers"),
    "wgrad_accumulation": choose_option(Stack, "wgrad_accumulation"),
    "flat_copies": subset(Stack, "flat_copies"),
    "run_ahead": choose_option(Stack, "run_ahead"),
    "low_precision_saved": subset(Stack, "low_precision_saved"),
    "extra_kernels": choose((0, 0), (0, 0), (10, 18)),
    "update_kernels": choose(0, 0, 12),
    "ddp_bucket_size": choose((0, 0), (0, 0), (40_000_000, 1_000_000), (1000, 0)),
    "flat_shards": choose_option(Stack, "flat_shards"),
    "cuda_graphs": choose_option(Stack, "cuda_graphs"),
    "dispatcher": choose_option(Stack, "dispatcher"),
    "pairs": choose_option(Stack, "pairs"),
    "overlap": subset(Stack, "overlap"),
    "p2p_overlap": choose_option(Stack, "p2p_overlap"),
    "reduce": choose_option(Stack, "reduce"),
    "runtime_connect": choose_option(Stack, "runtime_connect"),
    "reshard": choose_option(Stack, "reshard"),
    "backward_all_gather": choose_option(Stack, "backward_all_gather"),
    "comm_buffers": choose_option(Stack, "comm_buffers"),
    "zero2_shards": choose_option(Stack, "zero2_shards"),
    "reduced_gradients": choose_option(Stack, "reduced_gradients"),
    "rope": choose_option(Stack, "rope"),
    "zero3_gather": choose_option(Stack, "zero3_gather"),
    "prefetch_bucket_size": choose(0, 1000, 50_000_000),
    "param_persistence_threshold": choose(0, 100, 100_000),
    "max_reuse_distance": choose(0, 10_000, 1_000_000_000),
    "max_live_parameters": choose(0, 100_000, 1_000_000_000),
    "update_group_size": choose(0, 1, 10_000, 1_000_000_000),
    "reduce_bucket": choose(0, 0, 0, 1, 3000, 500_000_000),
    "replicated_grad_reduce": choose_option(Stack, "replicated_grad_reduce"),
    "stage_outputs": choose_option(Stack, "stage_outputs"),
    "deferred_wgrad": choose_option(Stack, "deferred_wgrad"),
    "recv_buffers": choose_option(Stack, "recv_buffers"),
    "reduce_in_fp32": choose_option(Stack, "reduce_in_fp32"),
    "param_all_gather": choose_option(Stack, "param_all_gather"),
    "async_tp": choose_option(Stack, "async_tp"),
    "launch_blocking": choose_option(Stack, "launch_blocking"),
    "scatter_gather_tensors": choose_option(Stack, "scatter_gather_tensors"),
    "early_stop": choose_option(Stack, "early_stop"),
    "vocab_multiple": choose(1, 1, 128, 7),
    "expandable_segments": choose_option(Stack, "expandable_segments"),
    "compile_loss": lambda some: some.getstate()[1][-1] % 2 == 0,  # leaves the draws after it as they were
    "fp8_attention": lambda some: some.getstate()[1][5] % 4 == 0,  # likewise
    "input_grad_all_reduces": lambda some: ((1, 1), (1, 1), (1, 2), (3, 2))[some.getstate()[1][6] % 4],  # likewise
    "reduce_dtype": lambda some: ("summed", "backward", "fp32")[some.getstate()[1][7] % 3],  # likewise, of buckets
    "second_communicators": lambda some: ("world", "tp", "pp")[: some.getstate()[1][9] % 4],
}
LABELS = ("name", "version", "family", "runs")  # of a stack: what it is called, and what ``refuse`` reads

TABLES: dict[type[BaseModel], dict[str, Draw]] = {
    Job: JOB,
    Stack: STACK,
    Recipe: RECIPE,
    Optimizer: OPTIMIZER,
    Group: GROUP,
    LearningRate: RATE,
    Ramp: RAMP,
    Adapter: ADAPTER,
}


@cache
def build_named_model(name: str) -> Model:
    return models.build_model(name)


def model(some: random.Random) -> Model:
    """One of the catalog with few layers, or one of our own with odd sizes and every choice."""
    if some.random() < 0.5:
        result = build_named_model(some.choice(models.list_names()))
        layers = min(result.layers, some.choice((1, 2, 3, 4, 8)))
        dense = result.moe and {"dense_layers": min(result.moe.dense_layers, some.choice((0, layers)))}
        return result.replace(layers=layers, moe=result.moe and result.moe.replace(**dense or {}))
    kv_heads, layers = some.choice((1, 2, 4)), some.choice((1, 2, 4, 5, 8))
    slides = some.random() < 0.2
    mla = MLA(q_rank=some.choice((None, 24)), kv_rank=16, nope_dim=12, rope_dim=4, v_dim=10)
    moe = MoE(
        experts=some.choice((1, 4, 6, 8)),
        topk=1,
        ffn=some.choice((32, 40)),
        shared_experts=some.choice((0, 0, 1, 2)),
        shared_ffn=some.choice((None, 48)),
        dense_layers=some.choice((0, 1)),
        score=some.choice(options(MoE, "score")),
        balance=some.choice(options(MoE, "balance")),
        capacity=some.choice((None, None, 0.5, 1.25)),
        normalized=some.random() < 0.5,
        router_bias=some.random() < 0.2,
        expert_bias=some.random() < 0.2,
    )
    return Model(
        name="drawn",
        layers=layers,
        width=some.choice((32, 64, 72, 250)),
        heads=kv_heads * some.choice((1, 2, 4)),
        kv_heads=kv_heads,
        head_dim=some.choice((8, 16, 128)),
        ffn=some.choice((64, 96, 160)),
        vocab=some.choice((2, 65, 256, 50257)),
        positions=some.choice((64, 4096)),
        norm=some.choice(options(Model, "norm")),
        block=some.choice(options(Model, "block")),
        mlp=some.choice(options(Model, "mlp")),
        mlp_bias=some.random() < 0.3,
        position=some.choice(options(Model, "position")),
        rope_fraction=some.choice((1.0, 0.5)),
        qkv_bias=some.random() < 0.3,
        out_bias=some.random() < 0.3,
        qk_norm=some.choice(options(Model, "qk_norm")),
        window=some.choice((3, 64)) if slides else None,
        window_pattern=(True, False) if slides else (),
        mla=mla if some.random() < 0.2 else None,
        tied_embeddings=some.random() < 0.4,
        moe=moe.replace(topk=some.choice(list_divisors(moe.experts))) if some.random() < 0.4 else None,
        head_bias=some.random() < 0.2,
        dropout=some.choice((0.0, 0.1)),
        mtp=some.choice((None, None, None, MTP(), MTP(depth=2))),
    )


def machine(some: random.Random, *, ranks: int) -> Machine:
    """Of the catalog, or one that was measured; with ``ranks`` or a few more."""
    name, state = some.choice(machines.list_names()), some.getstate()[1][7]
    if state % 8 == 0:  # a node of a cloud, perhaps of fewer GPUs than usual; leaves the draws after it
        name = list(machines.INSTANCES)[state // 8 % len(machines.INSTANCES)]
    result = machines.resolve(name, local=Path("/nowhere"))
    result = machines.with_ranks(result, ranks if some.random() < 0.8 else ranks + some.choice((1, 8, 1000)))
    if some.random() < 0.2:
        result = result.replace(calibration=calibration(some), backend=some.choice(("gloo", "nccl")))
    return result.replace(dollars_per_rank_hour=some.choice((None, 2.0)))


def calibration(some: random.Random) -> Calibration:
    """Of a slow computer: nothing, or a little of everything but attention."""
    bare = Calibration(date="2026-01-01", torch="2.13.0", cores=2)
    if some.random() < 0.3:
        return bare
    return bare.replace(
        matmuls=tuple(MatmulPoint(dtype="bf16", ranks=1, m=m, n=m, k=m, seconds=m**3 / 5e10) for m in (64, 512)),
        kernels=tuple(
            KernelPoint(kernel="copy", dtype="bf16", ranks=1, moved_bytes=2**power, seconds=2**power / 5e9)
            for power in (16, 24)
        ),
        collectives=tuple(
            CollectivePoint(collective="all_reduce", ranks=2, bytes=2**power, seconds=2**power / 1e9)
            for power in (12, 24)
        ),
        steps=tuple(
            StepFactor(
                kind=kind,
                ranks=1,
                dtype="bf16",
                forward=forward,
                backward=1.2,
                forward_kernel_seconds=2e-5,
                backward_kernel_seconds=3e-5,
            )
            for kind, forward in (("matmul", 1.3), ("experts", 1.5), ("memory", 0.8), ("message", 0.0), ("update", 1.4))
        ),
        overheads=(
            StepOverhead(
                ranks=2,
                host_share=0.1,
                forward_gap_seconds=2e-5,
                backward_gap_seconds=3e-5,
                start_seconds=0.01,
                drift_seconds=0.02,
            ),
        ),
    )


def layout(some: random.Random, model: Model) -> Layout:
    """Any that parses; its degrees lean to what the model takes."""
    pp = some.choice([1, 1, *(n for n in (2, 3, 4, 8) if n <= model.layers)])
    schedule = some.choice((*SCHEDULES, "zbv", "dualpipev")) if pp > 1 else "1f1b"  # of few layers, a V is seldom legal
    v = 2 if PIPELINE_SCHEDULES[schedule].is_v_shaped else 1
    if schedule == "interleaved":
        v = some.choice([2, 2, *(n for n in (3, 4) if n * pp <= model.layers)])
    tp = some.choice([1, 1, *(n for n in (2, 4, 8) if model.heads % n == 0)])
    cp, dp = some.choice((1, 1, 2, 4)), some.choice((1, 2, 3, 4, 8, 64))
    etp = some.choice(list_divisors(tp)) if model.moe else 1
    room = dp * cp * tp // etp
    ep = some.choice([n for n in list_divisors(room) if model.moe.experts % n == 0]) if model.moe else 1
    zero = some.choice((0, 1, 2, 3))
    chunks, order = pp * v, list(DEFAULT_ORDER)
    if some.random() < 0.3:
        some.shuffle(order)
    stages: tuple[int, ...] = ()
    if pp > 1 and some.random() < 0.3 and chunks <= model.layers:
        cuts = sorted(some.sample(range(1, model.layers), chunks - 1))
        stages = tuple(b - a for a, b in zip([0, *cuts], [*cuts, model.layers], strict=True))
    groups = some.sample(RECOMPUTABLE, some.choice((1, 2, 3)))
    ac = some.choice(("none", "none", "selective", "full", "full/2", "norm+act", "+".join(groups)))
    if pp > 1 and schedule != "dualpipe" and ac != "none" and dp in (1, 3):
        ac += f"@{1 + dp % (pp - 1)}"
    return Layout(
        dp=dp,
        tp=tp,
        cp=cp,
        pp=pp,
        ep=ep,
        etp=etp,
        v=v,
        schedule=schedule,
        zero=zero,
        stages=stages,
        shard_group=some.choice([None, *list_divisors(dp * cp)]) if zero else None,
        mbs=some.choice((1, 1, 2, 3)),
        ac=ac,
        order=tuple(order),
        cp_kind=some.choice(("ring", "ulysses")) if cp > 1 else "ring",
        sp=tp == 1 or some.random() < 0.7,
    )


def job(some: random.Random, *, batch: int) -> Job:
    """Every field of it and of its stack drawn, or a named stack with some of them drawn."""
    drawn = fields(JOB | STACK, some) | {"global_batch": batch}
    drawn["freeze"] = () if drawn["adapter"] else drawn["freeze"]
    drawn["fp8_attention"] &= drawn["attention"] == "flash"
    kept = ("sequence", "global_batch", "compile_loss", "fp8_attention", "input_grad_all_reduces", "reduce_dtype")
    if some.random() < 0.4:
        few = {name: drawn[name] for name in drawn if name in kept or some.random() < 0.15}
        stack = some.choice(list(STACKS))
    else:
        usual = some.random()  # among many fields one would hide another: some, most or few stay at their defaults
        few, stack = {name: drawn[name] for name in drawn if name in kept or some.random() > usual}, "fivefold"
    if few["reduce_dtype"] == "fp32" and not few.get("reduce_bucket", STACKS[stack].reduce_bucket):
        few["reduce_dtype"] = "backward"  # what is cast to fp32 for its message is a bucket
    return Job.read({"stack": stack, **few}, origin="")


def case(seed: int) -> Case:
    """A legal one: of a seed the first that nothing refuses."""
    some = random.Random(seed)
    while True:
        try:
            chosen = model(some)
            spread = layout(some, chosen)
            batch = spread.dp * spread.mbs * some.choice((1, 2, spread.pp, 2 * spread.pp, 3 * spread.pp + 1, 40))
            result = Case(chosen, machine(some, ranks=spread.world), spread, job(some, batch=batch))
            if next(
                list_reasons(spread, model=chosen, job=result.job, machine=None), ""
            ):  # the facts under every layout
                result = result._replace(
                    job=result.job.replace(stack=result.job.stack.replace(runs=SupportedLayouts()))
                )
            refuse(spread, model=chosen, job=result.job, machine=result.machine)
        except (UserError, ValidationError):
            continue
        result = with_images(result, random.Random(f"images {seed}"))
        return with_ramp(with_frozen(result, random.Random(f"frozen {seed}")), random.Random(f"ramp {seed}"))


def tower(some: random.Random, *, out: int) -> VisionTower:
    """A small vision tower with every choice, whose tokens are ``out`` wide."""
    heads, merged = some.choice((1, 2, 4, 8)), some.choice((1, 4))
    width, layers = heads * some.choice((8, 16)), some.choice((1, 2, 3))
    norm = ProjectorLayer(kind="norm", norm=some.choice(options(ProjectorLayer, "norm")), bias=True)
    mlp = ProjectorLayer(kind=some.choice(("mlp", "gated_mlp")), ffn=64, size=out, bias=some.random() < 0.5)
    linear = ProjectorLayer(kind="linear", size=out)
    merge = ProjectorLayer(kind=some.choice(("merge", "shuffle", "pool")), size=merged)
    layers_after = (some.choice((norm, ProjectorLayer(kind="activation"))), some.choice((mlp, linear)))
    positions = some.choice((0, 64))
    return VisionTower(
        patch=some.choice((4, 14)),
        frames=some.choice((1, 2)),
        patches=some.choice((None, 16)),
        layers=layers,
        width=width,
        heads=heads,
        ffn=some.choice((64, 80)),
        norm=some.choice(options(VisionTower, "norm")),
        mlp=some.choice(options(VisionTower, "mlp")),
        activation=some.choice(("gelu", "silu", "quick_gelu", "gelu_tanh")),
        mlp_bias=some.random() < 0.5,
        qkv_bias=some.random() < 0.5,
        out_bias=some.random() < 0.5,
        qk_norm=some.random() < 0.2,
        patch_bias=some.random() < 0.5,
        class_token=some.random() < 0.5,
        positions=positions,
        rotary=some.random() < 0.5,
        first_norm=some.random() < 0.5,
        final_norm=some.choice(options(VisionTower, "final_norm")),
        layer_scale=some.random() < 0.3,
        pooling_head=some.random() < 0.2,
        window=some.choice((None, None, 4)),
        full_layers=(0,),
        features=some.choice(((), (), (layers,), (0, layers))),
        projector=(merge, *layers_after),
        newline=some.random() < 0.2,
        deepstack=some.choice(((), (0,))),
        deepstack_projector=(merge, mlp),
    )


def with_images(drawn: Case, some: random.Random) -> Case:
    """Three in ten cases with a vision tower and images, trained or frozen, if they are legal; the others as drawn."""
    chosen = drawn.model.replace(vision=tower(some, out=drawn.model.width))
    images, frozen = some.choice((1, 2, 3)), some.random() < 0.5
    freeze = {"freeze_vision_tower": frozen, "freeze_projector": frozen and some.random() < 0.5}
    if drawn.job.adapter is not None:
        freeze = dict.fromkeys(freeze, True)
    if some.random() > 0.3:
        return drawn
    try:
        job = drawn.job.replace(images=images, image_tokens=None if chosen.vision.patches else 9, **freeze)
        refuse(drawn.layout, model=chosen, job=job, machine=drawn.machine)
    except UserError:
        return drawn
    return drawn._replace(model=chosen, job=job)


# What adapters and frozen parts are seldom modelled with.
EXCLUDED_BY_FROZEN: dict[str, Any] = {
    "precision": RECIPES["bf16"],
    "merged_projections": False,
    "merged_adapters": "none",
    "wgrad_accumulation": "separate",
    "zero3_gather": "units",
}


def with_frozen(drawn: Case, some: random.Random) -> Case:
    """Return three in ten cases with an adapter or frozen parts, the first of a few draws that are legal.

    They are legal next to few jobs: without this, one case in 60 would have either.
    """
    if some.random() > 0.3 or drawn.job.adapter is not None or drawn.job.freeze or drawn.job.images:
        return drawn
    for _ in range(8):
        part = {"adapter": adapter(some)} if some.random() < 0.5 else {"freeze": some.choice(FREEZES)}
        for changed in (part, EXCLUDED_BY_FROZEN | part):
            try:
                chosen = drawn.model if changed is part else drawn.model.replace(mtp=None)
                job = drawn.job.replace(**changed)
                refuse(drawn.layout, model=chosen, job=job, machine=drawn.machine)
            except UserError:
                continue
            if job.freezes_text:
                return drawn._replace(model=chosen, job=job)
    return drawn


def with_ramp(drawn: Case, some: random.Random) -> Case:
    """Return one in ten cases with a ramp from a multiple of dp·mbs to the global batch, if it is legal."""
    size = drawn.layout.dp * drawn.layout.mbs
    first = size * some.randint(1, drawn.job.global_batch // size)
    ramp = Ramp(first=first, step=size, every=some.choice((1, 3)))
    if some.random() > 0.1:
        return drawn
    try:
        job = drawn.job.replace(ramp=ramp)
        refuse(drawn.layout, model=drawn.model, job=job, machine=drawn.machine)
    except UserError:
        return drawn
    return drawn._replace(job=job)
