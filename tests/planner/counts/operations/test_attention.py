"""Latent attention in kernels that know one head dim: what they compute and hold besides."""

from __future__ import annotations

from itertools import pairwise

import pytest

from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.model.latent_attention import MLA
from fivefold.model.spec import Model
from fivefold.planner.counts.counts import Counts
from fivefold.planner.counts.flops import work
from fivefold.planner.counts.operations.layer import Kind
from fivefold.planner.counts.operations.local_shapes import get_local_degrees

LATENT = Model(
    name="latent",
    layers=3,
    width=128,
    heads=8,
    kv_heads=8,
    head_dim=24,
    ffn=320,
    vocab=1000,
    mla=MLA(q_rank=48, kv_rank=32, nope_dim=16, rope_dim=8, v_dim=16),
)
JOB = Job(sequence=64, global_batch=2)
PADDED = 3 * 2 * LATENT.heads * (24 - 16) * 64**2 * 2 * LATENT.layers  # forward and backward: v as wide as q and k


def test_kernels_by_blocks_compute_on_padded_values() -> None:
    flash, blocks = (work(LATENT, layout=Layout(), job=JOB.replace(attention=kind)) for kind in ("flash", "blocks"))
    assert blocks.hardware_flops - flash.hardware_flops == PADDED
    assert blocks.model_flops_non_causal == flash.model_flops_non_causal
    assert blocks.model_flops_causal == flash.model_flops_causal


@pytest.mark.parametrize("cp", [2, 4])
def test_only_fivefolds_ring_attention_pads_the_heads_of_latent_attention(cp: int) -> None:
    layout = Layout(cp=cp)
    ours, others = (
        work(LATENT, layout=layout, job=JOB.replace(linears=kind)) for kind in ("fused_backward", "separate")
    )
    assert ours.hardware_flops - others.hardware_flops == PADDED * (cp + 1) // (2 * cp)


def test_a_transposed_output_is_kept_twice() -> None:
    """nanotron: by attention, and as the projection's copy, which one sequence does not need."""
    model = LATENT.replace(mla=None)
    for layout, copies in ((Layout(mbs=2), 1), (Layout(), 0)):
        plain, transposed = (
            Counts(model, JOB.replace(transposes_attention=transposes)).unit(
                get_local_degrees(layout), Kind(False, False)
            )
            for transposes in (False, True)
        )
        kept, kept_twice = (
            sum(size for op in unit.ops for name, size in op.writes.items() if name in ("o", "o.t"))
            for unit in (plain, transposed)
        )
        assert kept_twice == kept * (1 + copies)
        assert sum("o.t" in op.keeps for op in transposed.ops) == copies
        assert sum("o" in op.keeps for op in transposed.ops) == 2 - copies


def test_queries_rotated_in_place_keep_keys_and_values_too() -> None:
    """nanotron: q, k and v leave the projection in one tensor; with fewer heads of keys, each in its own."""
    for kv_heads, copies in ((LATENT.heads, 1), (LATENT.heads // 2, 0)):
        model = LATENT.replace(mla=None, kv_heads=kv_heads)
        job = JOB.replace(linears="separate", merged_projections=True)
        fused, in_place = (
            Counts(model, job.replace(rope=kind)).profile(get_local_degrees(Layout()), Kind(False, False))
            for kind in ("fused", "in_place")
        )
        one = job.sequence * model.heads * model.head_dim * 2
        assert in_place.kept_bytes - fused.kept_bytes == copies * 2 * one
        assert in_place.backward_peak_bytes - fused.backward_peak_bytes == copies * 2 * one


def test_padding_is_held_and_not_kept() -> None:
    """Forward v and the output; backward these two, the gradient of the output and what comes of v."""
    item = 64 * LATENT.heads * 24 * 2
    flash, blocks = (
        Counts(LATENT, JOB.replace(attention=kind)).unit(get_local_degrees(Layout()), Kind(False, False)).ops
        for kind in ("flash", "blocks")
    )
    pairs = list(zip(flash, blocks, strict=True))
    assert [set(one.keeps) - {"seeds"} for one, _ in pairs] == [set(other.keeps) for _, other in pairs]
    (more,) = (
        (other.forward_scratch, other.backward_scratch)
        for one, other in pairs
        if one.backward_scratch != other.backward_scratch
    )
    assert more == (2 * item, 4 * item)


def test_latent_attention_saves_values_as_a_view_of_the_up_projection() -> None:
    unit = Counts(LATENT, JOB).unit(get_local_degrees(Layout()), Kind(False, False))
    sizes = {name: size for op in unit.ops for name, size in op.writes.items()}
    core = next(op for op in unit.ops if op.name == "attention.core")
    assert sizes["v"] == sizes["k"] == 0
    assert sizes["kv"] == 64 * LATENT.heads * (16 + 16) * 2
    assert {"kv", "qr", "kr", "o", "lse", "seeds"} == {name for name in core.keeps if sizes[name]}


def test_a_longer_ring_needs_more_buffers() -> None:
    """Keys and values on their way, over those of this rank."""
    plain = LATENT.replace(mla=None, head_dim=16)
    held = []
    for cp in (2, 3, 4):
        unit = Counts(plain, JOB.replace(sequence=48 * cp)).unit(get_local_degrees(Layout(cp=cp)), Kind(False, False))
        held.append(next(op.backward_scratch for op in unit.ops if op.name == "attention.core"))
    own = 48 * plain.kv_heads * 2 * 16 * 2
    assert all(before < after <= before + 2 * own for before, after in pairwise(held))
