"""Distinct groups of chunks are those of the sequence, one by one."""

from __future__ import annotations

import time
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.planner.counts.operations.chunks import list_distinct_groups
from fivefold.planner.counts.operations.mixers import gated_delta_net


@given(st.lists(st.sampled_from([1, 7, 64, 256]), max_size=12))
def test_distinct_chunk_groups_with_repeats_equal_all_groups_one_by_one(groups: list[int]) -> None:
    distinct = Counter[tuple[int, bool, bool]]()
    for group in list_distinct_groups(groups, 64):
        assert group.size == min(64, group.tokens)
        distinct[group.tokens, group.has_state, group.updates] += group.repeats
    each = [(tokens, index > 0, index + 1 < len(groups)) for index, tokens in enumerate(groups)]
    assert distinct == Counter(each)


@pytest.mark.parametrize("chunks", [300_000])
def test_a_sequence_of_millions_of_tokens_is_counted_at_once(chunks: int) -> None:
    """``ask sequence`` of a model with linear attention took 22 s, a third of them in a loop over chunks."""
    short, twice = (gated_delta_net.scan_flops([64] * n, key_dim=128, value_dim=128) for n in (1000, 2000))
    begin = time.process_time()
    long = gated_delta_net.scan_flops([64] * chunks, key_dim=128, value_dim=128)
    assert time.process_time() - begin < 0.1
    per_chunk = [(after - before) // 1000 for before, after in zip(short, twice, strict=True)]
    assert long == tuple(before + (chunks - 1000) * one for before, one in zip(short, per_chunk, strict=True))
