"""Layout and job -> torchtitan's keys, the inverse of ``read.py``; ``Mistake`` for what it cannot run."""

from __future__ import annotations

from typing import Any

from fivefold.interop.format import Plan
from fivefold.interop.torchtitan.keys import SCHEDULES
from fivefold.interop.torchtitan.read import AUTOCAST, FULL_BF16, P, even
from fivefold.layout.stages import stage_layers
from fivefold.record import Mistake
from fivefold.update import LearningRate


def shared(plan: Plan, *, head: str, casts: bool) -> dict[str, Any]:
    """The values of the keys that both versions have.

    ``head``: the name of the output projection; ``casts``: whether fully_shard is applied, and so a copy in 16 bits.
    """
    layout, job = plan.layout, plan.job
    copies, shards = sharding(plan)
    pp = layout.pp > 1
    found = {
        "training.local_batch_size": job.global_batch // layout.dp if pp else layout.mbs,
        "training.global_batch_size": job.global_batch,
        **precision(plan, sharded=casts),
        f"{P}data_parallel_replicate_degree": copies,
        f"{P}data_parallel_shard_degree": shards,
        f"{P}fsdp_reshard_after_forward": "never" if layout.zero == 2 or job.stack.reshard == "backward" else "always",
        f"{P}pipeline_parallel_schedule": next(k for k, ours in SCHEDULES.items() if ours == layout.schedule),
        f"{P}pipeline_parallel_microbatch_size": layout.mbs if pp else 1,
        f"{P}pipeline_parallel_first_stage_less_layers": 1,
        f"{P}pipeline_parallel_last_stage_less_layers": 1,
        f"{P}module_fqns_per_model_part": stages(plan, head=head) if pp else None,
        "compile.enable": job.stack.compile,
        "compile.components": ["model", *(["loss"] if job.stack.compile_loss else [])],
        "debug.seed": job.seed,
        **rate(job.learning_rate, steps=job.steps),
    }
    return {key: value for key, value in found.items() if value is not None}


def sharding(plan: Plan) -> tuple[int, int]:
    """dp_replicate and dp_shard."""
    layout, replicas = plan.layout, plan.layout.dp * plan.layout.cp
    if layout.zero == 0 and layout.cp > 1:
        raise Mistake(f"layout {str(layout)!r}: torchtitan shards over cp too; take zero3")
    if layout.zero in (2, 3) and replicas == 1:
        raise Mistake(f"layout {str(layout)!r}: torchtitan shards nothing over one replica; take zero0")
    if layout.zero == 2 and layout.pp == 1:
        raise Mistake(
            f"layout {str(layout)!r}: torchtitan gathers weights for every micro-batch, unless a pipeline defers it; "
            "take zero3, with --set reshard=backward for one gather of each"
        )
    if layout.zero == 3 and layout.pp > 1 and plan.job.stack.reshard == "backward":
        raise Mistake(
            f"layout {str(layout)!r}: with a pipeline torchtitan keeps gathered weights as zero2 does; take zero2"
        )
    if layout.zero == 0:
        return layout.dp, 1
    if layout.shards % layout.cp:
        raise Mistake(
            f"layout {str(layout)!r}: torchtitan's shard groups hold whole sequences; "
            f"take zero{layout.zero}/{layout.cp * max(1, layout.shards // layout.cp)}"
        )
    if layout.shard_group == replicas:
        raise Mistake(f"layout {str(layout)!r}: its shard group is all of dp·cp; write zero{layout.zero}")
    return replicas // layout.shards, layout.shards // layout.cp


def stages(plan: Plan, *, head: str) -> list[list[str]] | None:
    """What each stage holds, unless it is as torchtitan spreads it by itself."""
    layout, layers = plan.layout, plan.model.layers
    spread = stage_layers(layers, layout)
    sizes = tuple(map(len, spread))
    usual = layout.pp * (1 if layout.schedule in ("1f1b", "gpipe") else 2)
    if len(sizes) == usual and layers + 2 >= usual and sizes == even(layers, usual, first=1, last=1):
        return None
    parts = [[f"layers.{layer}" for layer in each] for each in spread]
    parts[0].insert(0, "tok_embeddings")
    parts[-1] += ["norm", head]
    return parts


def precision(plan: Plan, *, sharded: bool) -> dict[str, Any]:
    """The types of weights and of what is gathered."""
    asked = plan.job.precision
    half = {"training.dtype": "float32", "training.mixed_precision_param": "bfloat16"}
    if asked == FULL_BF16:
        return {"training.dtype": "bfloat16", "training.mixed_precision_param": "bfloat16"}
    if asked.name == "fp32":
        return {"training.dtype": "float32", "training.mixed_precision_param": "float32"}
    if asked == AUTOCAST and plan.layout.world == plan.layout.dp and not sharded:
        return half
    if asked.name != AUTOCAST.name and sharded:
        return half
    other = "precision fp32" if sharded else f"zero3, precision fp32, or {AUTOCAST.name!r} as read from torchtitan"
    raise Mistake(
        f"precision {asked.name} with zero{plan.layout.zero}: torchtitan keeps fp32 weights and casts for each matmul "
        f"unless they are sharded; take {other}"
    )


def rate(schedule: LearningRate, *, steps: int) -> dict[str, Any]:
    """The learning rate's schedule."""
    if schedule.kind == "constant":
        return {"lr_scheduler.min_lr_factor": 1.0}
    if schedule.kind == "cosine":
        return {"lr_scheduler.decay_type": "cosine"}
    decay = schedule.decay_steps or max(1, steps // 5)
    return {"lr_scheduler.decay_type": "linear", "lr_scheduler.decay_ratio": decay / steps}


def recomputed(ac: str, *, groups: bool) -> tuple[str, int]:
    """``none`` or ``full``, and of which layers; ``groups``: whether each n-th layer can be recomputed."""
    if ac == "none" or ac == "full":
        return ac, 1
    if ac.startswith("full/") and groups:
        return "full", int(ac[5:])
    nearest = "ac=full/2, or ac=full" if groups else "ac=full"
    raise Mistake(f"ac={ac}: torchtitan recomputes no such groups of operations; take {nearest}, or ac=none")
