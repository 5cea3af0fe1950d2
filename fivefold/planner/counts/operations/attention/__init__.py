"""The operations of self-attention: grouped-query (GQA) or multi-head latent (MLA), flash or unfused.

    grouped   x → q, k, v → (norm) → rope → core → out           tied values: v = k, before its norm and rotation
    latent    x → q_down → norm → q_up;  x → kv_down → norm → kv_up;  rope on a part of each;  core → out

windows       which keys a query sees              core      scores, softmax and values, flash or unfused
differential  differences of pairs of heads        output    gate, norms and projection of the core's output
mask          masks that values make (Doge)        experts   queries and output made by experts (JetMoE)

Heads are sharded over tp. Under cp the core sees all keys: they are passed around a ring, or an all_to_all swaps heads
and tokens (Ulysses). MLA (DeepSeek-V2, arXiv:2405.04434) has query and key heads of nope + rope dims and value heads of
v dims.
"""

from __future__ import annotations

from fivefold.planner.counts.operations.attention.experts import list_experts
from fivefold.planner.counts.operations.attention.grouped import list_grouped
from fivefold.planner.counts.operations.attention.latent import list_latent
from fivefold.planner.counts.operations.local_shapes import Local
from fivefold.planner.counts.operations.op import Op


def list_attention(local: Local, source: str, *, layer: int) -> list[Op]:
    """List the operations ``source`` [stream rows, D] → ``a`` [stream rows, D]."""
    if local.model.attention_experts:
        return list_experts(local, source, layer=layer)
    return (list_latent if local.model.mla else list_grouped)(local, source, layer=layer)
