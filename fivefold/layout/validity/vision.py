"""Images of a job and the vision tower of its model."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.layout.validity.fixes import list_present, suggest_degrees
from fivefold.model.spec import Model


def list_vision_mismatches(model: Model, job: Job) -> Iterator[str]:
    """Yield the reasons why the job's images do not fit the model's vision tower."""
    tower = model.vision
    if not job.images:
        return
    if tower is None:
        yield f"images={job.images}: {model.name} has no vision tower that is read; leave images out"
        return
    if tower.patches is None and job.image_tokens is None:
        pixels = tower.patch * tower.patches_per_token**0.5
        yield (
            f"images={job.images}: images of {model.name} may have any size; give image_tokens, one for "
            f"{pixels:.0f} x {pixels:.0f} pixels"
        )
        return
    if tower.patches is not None and job.image_tokens not in (None, tower.count_tokens(None)):
        fixed = tower.count_tokens(None)
        yield (
            f"image_tokens={job.image_tokens}: {model.name} makes {fixed} tokens of every image (or of every "
            f"tile of one); use image_tokens={fixed}, or more images"
        )
    if (tokens := count_image_tokens(model, job)) > job.sequence:
        yield f"images={job.images} have {tokens} tokens, more than the sequence of {job.sequence}; try seq {tokens}"
    yield from list_present(
        f"images={job.images} are not counted with",
        (model.hyper_connections is not None, "hyper-connections", "a model with one residual stream"),
        (model.per_layer_inputs is not None, "per-layer inputs", "a model without them"),
        (job.objective == "dpo", "objective=dpo", "sft"),
        (
            job.precision.gathers == "fp8",
            f"precision {job.precision.name}, which gathers weights in fp8",
            "bf16, or fp8 without it",
        ),
        (
            job.adapter is not None and not job.freeze_projector,
            "an adapter next to a trained projector",
            "freeze_vision_tower and freeze_projector",
        ),
        (
            job.base_format is not None,
            f"a base in {job.adapter.base if job.adapter else ''}",
            "a base in 16 bits",
        ),
    )


def count_image_tokens(model: Model, job: Job) -> int:
    """Return how many tokens of a sequence stand for images; 0 if unknown, as in a job that is not valid."""
    tower = model.vision
    if tower is None or (tower.patches is None and job.image_tokens is None):
        return 0
    return job.images * tower.count_tokens(job.image_tokens)


def check_vision(layout: Layout, *, model: Model, job: Job) -> Iterator[str]:
    """Yield the reasons why the vision tower cannot be sharded."""
    if not can_shard_tower(model, job, layout.tp) and model.vision is not None:
        fix = suggest_degrees("tp", layout.tp, lambda n: can_shard_tower(model, job, n), most=model.vision.heads)
        yield f"tp={layout.tp} does not divide heads={model.vision.heads} and MLPs of the vision tower; {fix}"


def can_shard_tower(model: Model, job: Job, tp: int) -> bool:
    """Tell whether tp divides the heads and MLPs of the vision tower; always, if the job has no images."""
    tower = model.vision
    if not job.images or tower is None:
        return True
    mlps = [layer.ffn for layer in (*tower.projector, *tower.deepstack_projector) if layer.kind.endswith("mlp")]
    return gcd(tower.heads, tower.ffn, *mlps) % tp == 0
