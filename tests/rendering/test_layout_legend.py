"""The line that explains the less common keywords of the layouts of a table."""

from __future__ import annotations

import pytest

from fivefold.rendering.layout_legend import explain_layouts


@pytest.mark.parametrize(
    ("layouts", "line"),
    [
        (["dp8 zero3 mbs1", "dp4 tp2 ac=full", "dp8 ac=selective", "dp2 pp4 v2 interleaved"], ""),
        (["dp64 zero3/32", "dp64 zero3/32 mbs2"], "zero3/32: sharded in groups of 32 ranks"),
        (["dp8 ac=norm+act"], "ac=norm+act: recomputes norms and activation functions"),
        (["dp8 ac=norm+qkv+act"], "ac=norm+qkv+act: recomputes norms, QKV projections and activation functions"),
        (["dp8 ac=up"], "ac=up: recomputes up-projections of latent attention"),
        (["dp8 ac=full/2"], "ac=full/2: recomputes one layer in 2"),
        (["dp2 pp4 ac=full@1"], "@1: only on pipeline ranks below 1"),
        (["dp2 pp4 stages=7-8x2-7"], "stages=: layers of each pipeline stage; 8x14: 14 stages of 8"),
        (
            ["dp8 zero2 (--set reduce=step)", "dp8 zero3"],
            "--set reduce=step: gradients are reduced once per step, not after every micro-batch",
        ),
        (["dp4 cp2 order=tp-dp-cp-pp"], "order=tp-dp-cp-pp: mesh axes, the nearest ranks first"),
        (
            ["dp8 zero2/4", "dp8 ac=act"],
            "zero2/4: sharded in groups of 4 ranks · ac=act: recomputes activation functions",
        ),
    ],
)
def test_a_keyword_is_explained_once(layouts: list[str], line: str) -> None:
    assert explain_layouts(layouts) == line
