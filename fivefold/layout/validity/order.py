"""Axes that share a process group are neighbours in the mesh."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import permutations

from fivefold.layout.names import DEFAULT_ORDER, MeshAxis
from fivefold.layout.spec import Layout
from fivefold.model.spec import Model
from fivefold.stack.spec import SupportedLayouts


def are_neighbours(order: Sequence[MeshAxis], *, spread: bool, partly: bool) -> bool:
    """Tell whether axes that share a process group are adjacent in ``order``, which lists axes with more than one rank.

    dp and cp share ZeRO's group. If experts are ``spread`` over tp, tp must be adjacent to both, and it must be the
    nearest axis if experts are sharded ``partly``, over a part of tp.
    """
    state_places = [place for place, axis in enumerate(order) if axis in ("dp", "cp")]
    expert_places = [place for place, axis in enumerate(order) if axis in ("tp", "dp", "cp")] if spread else []
    are_adjacent = all(places[-1] - places[0] < len(places) for places in (state_places, expert_places) if places)
    return are_adjacent and not (partly and order[expert_places[0]] != "tp")


def has_legal_order(layout: Layout, model: Model, order: Sequence[MeshAxis]) -> bool:
    """Tell whether axes of the layout that share messages would be neighbours in ``order``."""
    spread = model.moe is not None and layout.etp < layout.tp
    in_use = [axis for axis in order if getattr(layout, axis) > 1]
    return are_neighbours(in_use, spread=spread, partly=spread and layout.etp > 1)


def check_order(layout: Layout, model: Model, runs: SupportedLayouts) -> Iterator[str]:
    """Yield an error for an order of the mesh in which axes that share messages are not neighbours."""
    if has_legal_order(layout, model, layout.order):
        return
    spread = model.moe is not None and layout.etp < layout.tp
    orders = (order for order in permutations(DEFAULT_ORDER) if runs.supports_order(order))
    nearest_orders = sorted(
        (order for order in orders if has_legal_order(layout, model, order)),
        key=lambda order: sum(a != b for a, b in zip(order, layout.order, strict=True)),
    )
    dp_cp_hint = ", dp next to cp" if layout.dp > 1 < layout.cp else ""
    axes, hint = ("tp, dp and cp", ", tp first" if layout.etp > 1 else dp_cp_hint) if spread else ("dp and cp", "")
    fix = " or ".join(f"order={'-'.join(order)}" for order in nearest_orders[:2])
    yield f"order={'-'.join(layout.order)}: {axes} must be neighbours{hint}; try {fix}"
