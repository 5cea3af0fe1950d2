"""The line below a table of layouts that explains the keywords in it that frameworks do not have by these names.

zero3/32: sharded in groups of 32 ranks · ac=norm+act: recomputes norms and activation functions
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from fivefold.layout.names import DEFAULT_ORDER
from fivefold.layout.recomputation import GROUPS, RECOMPUTABLE
from fivefold.layout.spec import Layout
from fivefold.spelling import join_names

REDUCES = {
    "step": "gradients are reduced once per step, not after every micro-batch",
    "unpipelined": "with a pipeline, gradients are reduced once per step",
}


def explain_layouts(layouts: Iterable[str]) -> str:
    """Return what the less common keywords of ``layouts`` mean, in one line; empty if there is none.

    A layout may be followed by how often gradients are reduced: ``dp8 zero2 (--set reduce=step)``.
    """
    meanings = dict[str, str]()
    for layout in layouts:
        keywords, _, setting = layout.partition(" (")  # (--set reduce=step)
        meanings |= _explain(Layout.parse(keywords))
        meanings |= {setting.rstrip(")"): REDUCES[setting.rstrip(")").partition("reduce=")[2]]} if setting else {}
    return " · ".join(f"{word}: {text}" for word, text in meanings.items())


def _explain(layout: Layout) -> Iterator[tuple[str, str]]:
    """Yield the less common keywords of one layout, each with its meaning; equal kinds have one keyword."""
    if layout.zero and layout.shard_group:
        yield f"zero{layout.zero}/{layout.shard_group}", f"sharded in groups of {layout.shard_group} ranks"
    if layout.stages:
        yield "stages=", "layers of each pipeline stage; 8x14: 14 stages of 8"
    operations = sorted(layout.recomputed_operations, key=RECOMPUTABLE.index) if _recomputes_groups(layout) else []
    if operations:
        names = join_names([GROUPS[name].description for name in operations], "and")
        yield f"ac={layout.recomputation}", f"recomputes {names}"
    if layout.recompute_every > 1:
        yield f"ac={layout.recomputation}", f"recomputes one layer in {layout.recompute_every}"
    if "@" in layout.ac:
        yield f"@{layout.recompute_ranks}", f"only on pipeline ranks below {layout.recompute_ranks}"
    if layout.order != DEFAULT_ORDER:
        yield f"order={'-'.join(layout.order)}", "mesh axes, the nearest ranks first"


def _recomputes_groups(layout: Layout) -> bool:
    """Tell whether the layout recomputes groups of operations by their names."""
    return bool(layout.recomputed_operations <= GROUPS.keys()) and layout.recomputation != "selective"
