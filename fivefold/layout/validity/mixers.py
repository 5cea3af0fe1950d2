"""Token mixers other than attention, and what else cannot be sharded by every axis."""

from __future__ import annotations

from collections.abc import Iterator

from fivefold.layout.names import Axis
from fivefold.layout.spec import Layout, find_divisor_below
from fivefold.layout.validity.fixes import suggest_degrees
from fivefold.layout.validity.sharding import is_divisible_by_tp, list_unsharded_mixers
from fivefold.model.spec import Model


def check_mixers(layout: Layout, model: Model, *, sequence: int) -> Iterator[str]:
    """Yield the reasons why the token mixers other than attention cannot be sharded."""
    tp, kinds = layout.tp, model.non_attention_mixers
    for kind, units in list_unsharded_mixers(model, tp):
        if units is None:
            yield f"tp={tp} would shard the channels of {kind}, which is not supported; use tp1"
        else:
            fix = suggest_degrees("tp", tp, lambda n: is_divisible_by_tp(model, n), most=units.number)
            yield f"the {units.number} {units.name} of {kind} are not divisible by tp={tp}; {fix}"
    if layout.cp == 1:
        return
    for kind in kinds:
        geometry = getattr(model, kind)
        units = geometry.get_sharded_units(model.width)
        if geometry.context_parallel == "none":
            yield f"cp={layout.cp} would shard the tokens of {kind}, which is not supported; use cp1"
        elif layout.uses_ring:
            yield f"cp={layout.cp} as a ring would cut the chain of states of {kind}; use cp=ulysses"
        elif geometry.context_parallel == "halo":
            if (tokens := sequence // layout.cp) < geometry.taps - 1:
                yield (
                    f"{tokens} tokens of a sequence on each rank of cp={layout.cp} are fewer than the "
                    f"{geometry.taps - 1} before a token that {kind} reads; lower cp, or use longer sequences"
                )
        elif units.number // tp % layout.cp:
            number = units.number // tp
            fix = f"cp{find_divisor_below(number, layout.cp)}"
            yield f"{number} {units.name} of {kind} on each rank of tp are not divisible by cp={layout.cp}; try {fix}"


def list_unsharded(model: Model) -> list[tuple[str, tuple[Axis, ...]]]:
    """List what a model has that is counted only on one rank of some axes, with these axes."""
    features: tuple[tuple[bool, str, tuple[Axis, ...]], ...] = (
        (model.attention_experts, "experts of attention", ("tp", "cp")),
        (model.differential, "differential attention", ("tp", "cp")),
        (model.dynamic_mask is not None, "masks from values", ("tp", "cp")),
        (model.per_layer_inputs is not None, "inputs of each layer", ("tp", "pp")),  # each layer reads its part
        (any(model.gate_sparsity), "sparse gates", ("tp",)),  # chosen by all gates of a token
    )
    return [(feature, axes) for is_present, feature, axes in features if is_present]


def explain_unsharded(layout: Layout, model: Model) -> Iterator[str]:
    """Yield the reasons why what is counted only on one rank cannot be sharded."""
    for feature, axes in list_unsharded(model):
        if any(getattr(layout, axis) > 1 for axis in axes):
            degrees = " and ".join(f"{axis}={getattr(layout, axis)}" for axis in axes)
            verb = "are" if len(axes) > 1 else "is"
            fix = " and ".join(f"{axis}1" for axis in axes)
            yield f"{degrees} {verb} not counted with {feature} of {model.name}; use {fix}"


def check_indexer(layout: Layout, model: Model) -> Iterator[str]:
    """Yield the reasons why attention to keys that an indexer chooses cannot be sharded."""
    if model.mla is not None and model.mla.indexer is not None and layout.cp > 1:
        yield (
            f"cp={layout.cp} would shard the keys that the indexer of {model.name} selects, which is not supported; "
            "use cp1"
        )


def check_shared_keys(layout: Layout, model: Model) -> Iterator[str]:
    """Yield why Ulysses cannot exchange keys that layers share where only some of these layers are recomputed."""
    exchanges_keys = layout.cp > 1 and layout.context_parallelism.exchanges_heads
    if model.shared_kv_layers and exchanges_keys and layout.recompute_every > 1:
        yield (
            f"ac={layout.ac} is not counted with cp=ulysses and keys that layers share of {model.name}; "
            "use ac=full or cp=ring"
        )
