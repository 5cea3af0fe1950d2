"""Models that cost the same, however their positions are scaled and their experts balanced."""

from __future__ import annotations

from fivefold.model.shape import MoE
from fivefold.model.spec import Model


def fitted(model: Model, found: Model) -> Model:
    """``model`` with what costs nothing as ``found`` has it: how positions are scaled, how experts are balanced."""
    model = model.replace(rope_scaling=found.rope_scaling)
    if model.moe is None or found.moe is None:
        return model
    moe = model.moe.replace(balance=found.moe.balance, aux_coefficient=found.moe.aux_coefficient)
    if _shared(moe) == _shared(found.moe):  # several shared experts are one that is as wide
        moe = moe.replace(shared_experts=found.moe.shared_experts, shared_ffn=found.moe.shared_ffn)
    return model.replace(moe=moe)


def _shared(moe: MoE) -> int:
    return moe.shared_experts * (moe.shared_ffn or moe.ffn)
