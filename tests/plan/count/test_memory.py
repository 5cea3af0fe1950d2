"""States against the formulas of ZeRO, and the walk through a step against what must hold of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.job import Job, recipe
from fivefold.layout.spec import Layout
from fivefold.model.spec import Model
from fivefold.plan.count.counts import Counts
from fivefold.plan.count.memory import RankMemory, memory
from fivefold.plan.count.ops import elementwise, matmul
from fivefold.plan.count.recompute import Unit
from fivefold.plan.count.tape import play
from fivefold.plan.count.traffic import messages, per_step

# 7.5e9 parameters, as in table 1 of ZeRO; every dim is divisible by 1024, so that nothing is padded.
ZERO_TABLE = Model(
    name="7.5B", layers=37, width=4096, heads=32, kv_heads=32, head_dim=128, ffn=10240, vocab=32768
)  # fmt: skip
JOB = Job(sequence=16, global_batch=1024, precision=recipe("bf16-grad16"))


def only_rank(model: Model, *, layout: Layout, job: Job) -> RankMemory:
    return memory(Counts(model, job.replace(overlap=())), layout)[0]


def states_bytes(rank: RankMemory) -> int:
    return rank.parameters_bytes + rank.gradients_bytes + rank.optimizer_bytes


@pytest.mark.parametrize("shards", [1, 4, 16, 64, 256, 1024])
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_states_are_those_of_zero_table_1(zero: int, shards: int) -> None:
    """2 + 2 + 12 bytes: w + g + o/S, w + (g + o)/S, (w + g + o)/S; moments alone have a step count per weight."""
    P, S = ZERO_TABLE.parameters, shards
    stage = only_rank(ZERO_TABLE, layout=Layout(dp=shards, zero=zero), job=JOB)
    expected = {1: 2 * P + 2 * P + 12 * P / S, 2: 2 * P + 14 * P / S, 3: 16 * P / S}[zero]
    if S > 1 and zero == 3:
        expected -= 2 * P / S  # the 16-bit weights exist only while they are gathered: the master is the shard
    assert states_bytes(stage) == pytest.approx(expected, rel=1e-4)


def test_zero_0_keeps_everything_whole() -> None:
    P = ZERO_TABLE.parameters
    for name, per_parameter in (("fp32", 16), ("bf16", 18), ("bf16-grad16", 16), ("bf16-pure", 12)):
        job = JOB.replace(precision=recipe(name))
        stage = only_rank(ZERO_TABLE, layout=Layout(dp=8, zero=0), job=job)
        assert states_bytes(stage) == pytest.approx(per_parameter * P, rel=1e-6)


def test_more_sharding_of_states_never_takes_more_memory() -> None:
    job = Job(sequence=2048, global_batch=64)
    peaks = [only_rank(ZERO_TABLE, layout=Layout(dp=8, zero=zero, mbs=8), job=job).peak_bytes for zero in range(4)]
    assert peaks == sorted(peaks, reverse=True)


@given(mbs=st.sampled_from([1, 2, 4]), sequence=st.integers(16, 512), zero=st.integers(0, 3))
def test_peak_grows_with_batch_and_sequence(mbs: int, sequence: int, zero: int) -> None:
    model = Model(name="m", layers=3, width=64, heads=2, kv_heads=1, head_dim=32, ffn=128, vocab=300)

    def peak(mbs: int, sequence: int) -> int:
        job = Job(sequence=sequence, global_batch=4 * mbs)  # two micro-batches, however large
        return only_rank(model, layout=Layout(dp=2, zero=zero, mbs=mbs), job=job).peak_bytes

    assert peak(mbs, sequence) < peak(2 * mbs, sequence)
    assert peak(mbs, sequence) < peak(mbs, sequence + 1)


def test_the_tape_by_hand() -> None:
    """h = x·a keeps x, y = x + h keeps nothing."""
    first = matmul("first", "x", "h", rows=2, into=4, outof=4, width=4)
    ops = [first, elementwise("sum", "add", ("x", "h"), "y", size=32)]
    profile = play(Unit(tuple(ops)), entry="x", entry_bytes=32, width=4, sums_bytes=1000)
    assert profile.kept_bytes == 32  # x alone: h dies in the sum
    assert profile.forward_peak_bytes == 32 + 32 + 32
    # Gradient of y (also of h and, in part, of x) 32, x 32; then a's gradient 64 and the product into x 32; then x and
    # the product of y's gradient are summed into a third buffer; last the sums are born while a's gradient lives.
    assert profile.backward_peak_bytes == 32 + 1000 + 64
    assert (
        play(Unit(tuple(ops)), entry="x", entry_bytes=32, width=4, sums_bytes=0).backward_peak_bytes
        == 32 + 32 + 32 + 64
    )


def test_bytes_per_step_are_those_of_the_formulas() -> None:
    P, n = ZERO_TABLE.parameters, 8
    job = Job(sequence=16, global_batch=64, precision=recipe("bf16-grad16"))

    def sent(text: str) -> dict[str, int]:
        found = per_step(ZERO_TABLE, layout=Layout.parse(text), job=job)
        return {row.collective: row.bytes for row in found}

    assert sent("dp8 zero0 mbs8") == {"all_reduce": 2 * (n - 1) * 2 * P // n + 2 * (n - 1) * 12 // n}
    for zero in (1, 2):
        both = sent(f"dp8 zero{zero} mbs8")
        assert both["all_gather"] == both["reduce_scatter"] == (n - 1) * 2 * P // n
    whole = sent("dp8 zero3 mbs8")
    ends = ZERO_TABLE.vocab * ZERO_TABLE.width * 2 + ZERO_TABLE.width  # embedding, head and its norm: gathered once
    assert whole["all_gather"] == (n - 1) * 2 * (2 * P - ends) // n
    assert whole["reduce_scatter"] == (n - 1) * 2 * P // n


def test_gathers_of_zero_3_come_with_every_micro_batch() -> None:
    job = Job(sequence=16, global_batch=64)
    found = messages(Counts(ZERO_TABLE, job), Layout.parse("dp8 zero3 mbs2"))
    counts = dict.fromkeys((message.collective for message in found), 0)
    for message in found:
        counts[message.collective] += message.times
    assert counts == {"all_reduce": 1, "all_gather": 4 * (2 * 37 + 2), "reduce_scatter": 39}
