"""2D tensor parallelism."""

from __future__ import annotations

from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.model.spec import Model
from fivefold.optimizers.cost import find_cost


def explain_unsupported_2d(layout: Layout, *, model: Model, job: Job) -> str | None:
    """Return why 2D tensor parallelism of this layout is not supported, in one line; None if it is, or tp is 1D."""
    if layout.tp_inner == 1:
        return None
    outer = layout.tp // layout.tp_inner
    inner = layout.tp_inner
    flat = layout.replace(tp_inner=1)
    for is_present, feature in (
        (job.images > 0, "images"),
        (model.moe is not None, "experts"),
        (bool(model.non_attention_mixers), "token mixers other than attention"),
        (model.mla is not None, "latent attention"),
        (model.output_gate, "output gates of attention"),
        (model.head_transform is not None, "a matrix before the head"),
        (model.hyper_connections is not None, "hyper-connections"),
        (model.sliding is not None, "sliding layers of another geometry"),
        (not layout.sp, "nosp"),
        (model.qk_norm == "full", "norms over all heads"),
        (model.sub_norm, "norms before the last matrices of attention and MLP"),
        (model.qk_norm == "heads", "norms of heads by weights of their own"),
        (not job.stack.kernel_facts.two_dimensional_tp, f"the stack {job.stack.name}"),
        (job.stack.loss_facts.chunked, "a loss in chunks"),
        (job.freezes_text, "adapters" if job.adapter else "freeze"),
        (job.objective == "dpo", "objective=dpo"),
        (not find_cost(job.optimizer.kind).counts_2d_tp, f"optimizer {job.optimizer.kind}"),
    ):
        if is_present:
            return f"2D tensor parallelism is not supported with {feature}; try {str(flat)!r}"
    if model.width % inner:
        return f"width={model.width} is not divisible by the inner {inner} of tp{outer}x{inner}; try {str(flat)!r}"
    if model.kv_heads % layout.tp and model.kv_heads != outer:
        return (
            f"kv_heads={model.kv_heads} are neither a multiple of tp={layout.tp} nor {outer}, its outer degree; try "
            + (f"tp{model.kv_heads}x{layout.tp // model.kv_heads}" if layout.tp % model.kv_heads == 0 else str(flat))
        )
    return None
