"""Models of equal cost, such as those that differ in how positions are scaled, and equivalent learning rates."""

from __future__ import annotations

from math import isclose

from fivefold.adapter import Adapter
from fivefold.model.spec import Model
from fivefold.model.weights import list_targets
from fivefold.update import LearningRate


def fit_free_fields(model: Model, read_model: Model) -> Model:
    """Copy from ``read_model`` what costs nothing: the scaling of positions and the balancing of experts."""
    model = model.replace(rope_scaling=read_model.rope_scaling)
    if isclose(_get_attention_scale(model), _get_attention_scale(read_model), rel_tol=1e-9):
        model = model.replace(attention_scale=read_model.attention_scale)
    if model.moe is None or read_model.moe is None:
        return model
    moe = model.moe.replace(balance=read_model.moe.balance, aux_coefficient=read_model.moe.aux_coefficient)
    if moe.shared_width == read_model.moe.shared_width:  # several experts cost as much as one of their width
        moe = moe.replace(shared_experts=read_model.moe.shared_experts, shared_ffn=read_model.moe.shared_ffn)
    return model.replace(moe=moe)


def _get_attention_scale(model: Model) -> float:
    dims = model.mla.nope_dim + model.mla.rope_dim if model.mla else model.head_dim
    return model.attention_scale or float(dims**-0.5)


def resolve_rate(rate: LearningRate, *, steps: int) -> LearningRate:
    """Return the schedule with implied values filled in: the steps of a decay, and the floor of a constant rate."""
    if rate.kind == "constant":
        return rate.replace(floor=1.0, decay_steps=None)
    if rate.kind == "wsd":
        return rate.replace(decay_steps=rate.decay_steps or max(1, steps // 5))
    return rate.replace(decay_steps=None)


def resolve_adapter(adapter: Adapter | None, model: Model) -> Adapter | None:
    """Return the adapter with the names of its layers in ``model``, and with its alpha: by default twice the rank."""
    if adapter is None:
        return None
    return adapter.replace(alpha=adapter.scale_numerator, targets=list_targets(model, adapter) or adapter.targets)


def divide_rates(min_rate: float, peak: float) -> float:
    """Return the floor of a schedule as a share of its peak, rounded so that no error of the division remains."""
    return min(1.0, float(f"{min_rate / peak:.12g}"))
