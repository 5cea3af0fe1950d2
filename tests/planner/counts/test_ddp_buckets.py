"""Messages and peaks of DeepSpeed as two of its processes (0.19.8, on CPUs, fp32) were seen to have them.

The loop is ``tests/third_party/loops.py``'s; ``make interop`` runs it again.
"""

from __future__ import annotations

from collections import Counter

import pytest

from fivefold.errors import UserError
from fivefold.job import Job, get_recipe
from fivefold.layout.spec import Layout
from fivefold.model.spec import Model
from fivefold.planner.counts.counts import Counts
from fivefold.planner.counts.ddp_buckets import divide_into_buckets
from fivefold.planner.counts.memory.peak import count_rank_memory
from fivefold.planner.counts.parameter_prefetch import simulate_prefetch
from fivefold.planner.counts.traffic import list_messages
from fivefold.stack.catalog import build_stack

MODEL = Model(name="small", layers=4, width=128, heads=4, kv_heads=2, head_dim=32, ffn=352, vocab=1024)
WHOLE = 1_000_576  # elements
NORMS, BLOCKS = {128: 9}, {16384: 8, 8192: 8, 45056: 12, 131072: 2}
LEAST_PREFETCH = {"param_persistence_threshold": 0, "prefetch_bucket_size": 0, "max_reuse_distance": 0}


def job(micro_batches: int = 1, **facts: object) -> Job:
    stack = build_stack("deepspeed").replace(loss="low_precision", reduce_bucket=300_000, **facts)
    return Job(stack=stack, sequence=128, global_batch=4 * micro_batches, precision="fp32")


def count_sent(text: str, asked: Job) -> Counter[tuple[str, int]]:
    """Count how often each collective of each size is sent over dp."""
    result: Counter[tuple[str, int]] = Counter()
    for message in list_messages(Counts(MODEL, asked), Layout.parse(text)):
        if message.axis == "dp":
            result[message.collective, message.payload // 4] += message.times
    return result


def count_all(collective: str, *sizes: int, times: int = 1) -> Counter[tuple[str, int]]:
    return Counter({(collective, size): times for size in sizes})


def test_full_buckets_are_all_reduced_and_one_gather_updates_all_weights() -> None:
    updated = count_all("all_gather", WHOLE)
    forward, backward = (270592, 279040, 274688, 176256), (299264, 291200, 279040, 131072)
    assert count_sent("dp2 zero0 mbs2", job()) == count_all("all_reduce", WHOLE)
    assert count_sent("dp2 zero1 mbs2", job(2)) == updated + count_all("all_reduce", *forward)
    assert count_sent("dp2 zero2 mbs2", job(2)) == updated + count_all("all_reduce", *backward, times=2)


def test_zero3_gathers_parameters_as_its_prefetch_limits_say() -> None:
    reduced = count_all("reduce_scatter", 299264, 291200, 279040, 131072)
    # small weights stay, and are gathered one by one after the update; the others ahead, at once
    usual = Counter({("all_gather", size): times for size, times in (NORMS | BLOCKS).items() if size < 100_000})
    assert count_sent("dp2 zero3 mbs2", job()) == reduced + usual + count_all("all_gather", 2 * 131072)
    assert count_sent("dp2 zero3 mbs2", job(param_persistence_threshold=0)) == reduced + count_all("all_gather", WHOLE)
    item = Counter({("all_gather", size): 2 * times for size, times in (NORMS | BLOCKS).items()})
    assert count_sent("dp2 zero3 mbs2", job(**LEAST_PREFETCH)) == reduced + item


def test_gathered_weights_follow_from_the_prefetch_limits() -> None:
    counts = Counts(MODEL, job(param_persistence_threshold=0))
    result = simulate_prefetch(counts, Layout.parse("dp2 zero3 mbs2"), chunk=0)
    assert result is not None
    block = 184_576
    assert result.forward == (WHOLE,) * 6  # all is ahead, and near
    assert result.backward == (*(131072 + block * layers for layers in range(5)), WHOLE)  # freed as it is used
    few = simulate_prefetch(Counts(MODEL, job(**LEAST_PREFETCH)), Layout.parse("dp2 zero3 mbs2"), chunk=0)
    assert few is not None
    assert few.forward == (131072, 45056, 45056, 45056, 45056, 131072) == few.backward  # the largest weight of each
    assert simulate_prefetch(Counts(MODEL, job()), Layout.parse("dp2 zero2"), chunk=0) is None


@pytest.mark.parametrize(
    ("text", "asked", "measured"),
    [
        ("dp2 zero0 mbs2", job(overlap=()), 27138728),
        ("dp2 zero1 mbs2", job(2, overlap=()), 30339736),
        ("dp2 zero2 mbs2", job(2, overlap=()), 27138840),
        ("dp2 zero3 mbs2", job(), 30339740),
        ("dp2 zero3 mbs2", job(2, **LEAST_PREFETCH), 26861724),
    ],
)  # fmt: skip
def test_peak_memory_equals_the_measured_peak(text: str, asked: Job, measured: int) -> None:
    (rank,) = count_rank_memory(Counts(MODEL, asked), Layout.parse(text))
    assert rank.peak_bytes == pytest.approx(measured, rel=0.001)


@pytest.mark.parametrize(
    ("precision", "dtype", "width"),
    [
        ("fp32", "backward", 4),
        ("bf16-grad16", "backward", 2),
        ("bf16", "summed", 4),
        ("bf16", "backward", 2),  # accumulated in fp32
        ("bf16-grad16", "fp32", 4),
    ],
)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_gradients_travel_in_the_dtype_of_their_reduction(precision: str, dtype: str, width: int, zero: int) -> None:
    asked = job(reduce_dtype=dtype).replace(precision=get_recipe(precision))
    messages = list_messages(Counts(MODEL, asked), Layout.parse(f"dp2 zero{zero} mbs2"))
    reduced = [message for message in messages if message.axis == "dp" and message.collective != "all_gather"]
    assert sum(message.payload * message.times for message in reduced) == width * WHOLE


def test_a_bucket_that_is_cast_for_its_message_has_a_copy() -> None:
    """DeepSpeed's allreduce_bucket: flattened, then in fp32. Buckets have 16 bits, whatever gradients accumulate in."""

    def count_peak(precision: str, dtype: str) -> int:
        short = job(2, overlap=(), flat_copies=(), reduce_dtype=dtype).replace(
            sequence=8, precision=get_recipe(precision)
        )
        (rank,) = count_rank_memory(Counts(MODEL, short), Layout.parse("dp2 zero2 mbs2"))
        return rank.peak_bytes

    assert count_peak("bf16-grad16", "fp32") - count_peak("bf16-grad16", "backward") == 4 * 300_000
    assert count_peak("bf16", "summed") - count_peak("bf16", "backward") == 2 * 2 * 300_000


def test_a_gradient_that_does_not_fit_begins_a_bucket() -> None:
    assert list(divide_into_buckets([3, 4, 5, 20, 1], most=10)) == [7, 5, 20, 1]
    assert list(divide_into_buckets([], most=10)) == []


def test_only_buckets_are_cast_for_their_message() -> None:
    with pytest.raises(UserError, match="reduce_dtype='fp32' casts buckets of gradients; set reduce_bucket, or use"):
        Job.read({"stack": "deepspeed", "reduce_dtype": "fp32", "reduce_bucket": 0}, origin="test")
