"""ZeRO-3 of DeepSpeed until 2021 equals its simulated hooks: gather what is missing, use it, free what is far."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.published.listed_weights import (
    LIST_PART_SECONDS,
    ListedUnits,
    list_messages,
    list_staying,
    step_seconds,
)
from benchmarks.published.readers.gpt import gpt
from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.machine.catalog import resolve
from fivefold.planner.counts.counts import Counts
from fivefold.planner.counts.memory.peak import count_rank_memory
from fivefold.planner.counts.message import RepeatedMessage
from fivefold.planner.time.units import Units
from fivefold.stack.catalog import build_stack

MODEL = gpt(layers=3, width=64, heads=4, vocab=512, positions=64)
QKV, OUT, UP, DOWN = 3 * 64 * 64, 64 * 64, 4 * 64 * 64, 4 * 64 * 64


def job(reuse: int = 40_000, **facts: object) -> Job:
    stack = build_stack("megatron-deepspeed").replace(
        param_persistence_threshold=1000, max_reuse_distance=reuse, **facts
    )
    return Job(stack=stack, sequence=64, global_batch=16, precision="bf16-grad16")


def simulate(reuse: int, *, full: bool) -> Counter[int]:
    """Count by size how often weights are gathered, over all blocks of a micro-batch, in DeepSpeed's hooks."""
    block = [QKV, OUT, UP, DOWN]
    uses = [(layer, at) for layer in range(3) for at in range(4)] + [(-1, 0)]  # the head between
    for layer in reversed(range(3)):
        uses += [(layer, at) for at in range(4)] if full else []
        uses += [(layer, at) for at in reversed(range(4))]
    size = {(layer, at): block[at] for layer in range(3) for at in range(4)} | {(-1, 0): 512 * 64}
    here, gathered = set[tuple[int, int]](), Counter[int]()
    for step, use in enumerate(uses):
        if use not in here:
            gathered[size[use]] += use[0] >= 0
            here.add(use)
        following = uses[step + 1 :]
        between = following[: following.index(use)] if use in following else None
        if between is None or sum(size[item] for item in between) >= reuse:
            here.discard(use)
    return gathered


def sent_messages(counts: Counts, layout: Layout) -> Iterator[RepeatedMessage]:
    """Yield the gathers and reductions of all units."""
    for run, times in counts.stage_work(layout)[0]:
        for message in list_messages(counts, layout, run.name):
            yield message._replace(times=message.times * times)


@pytest.mark.parametrize(("ac", "reuse"), [("full", 40_000), ("full", 0), ("none", 0)])
def test_weights_that_prefetch_hooks_miss_are_gathered_one_by_one(ac: str, reuse: int) -> None:
    layout = Layout.parse(f"dp8 zero3 mbs1 ac={ac}")
    sent = Counter[int]()
    for message in sent_messages(Counts(MODEL, job(reuse)), layout):
        if message.collective == "all_gather" and message.payload // 2 in (QKV, OUT, UP, DOWN):
            sent[message.payload // 2] += message.times
    sent[OUT] -= 2  # the table of positions is as large, and gathered in the forwards
    expected = simulate(reuse, full=ac == "full")
    assert sent == Counter({size: 2 * times for size, times in expected.items()})  # two micro-batches


def test_gradients_of_all_weights_are_reduced_one_by_one_and_small_weights_stay() -> None:
    counts, layout = Counts(MODEL, job()), Layout.parse("dp8 zero3 mbs1 ac=full")
    reduced = sum(
        sent_message.times
        for sent_message in sent_messages(counts, layout)
        if sent_message.collective == "reduce_scatter"
    )
    matrices, vectors = 3 * 4 + 2, 3 * 8 + 2  # with the tables, of which the head reads one; norms and biases
    assert reduced == 2 * (matrices + vectors)
    ((message, parts),) = list_staying(counts, layout)
    assert (message.times, parts) == (1, 8 * vectors)


def test_host_time_grows_with_the_number_of_weights() -> None:
    """Of so small weights nothing else counts: each gather and reduction, and every part that is copied out."""
    machine, layout = resolve("a100:512", local=Path("none")), Layout.parse("dp512 zero3 mbs1 ac=full")
    counts = Counts(MODEL, job().replace(global_batch=512))
    listed, usual = (
        step_seconds(kind(counts, machine), layout, count_rank_memory(counts, layout)) for kind in (ListedUnits, Units)
    )
    gathers = sum(simulate(40_000, full=True).values()) + 2
    assert listed >= 512 * LIST_PART_SECONDS * (gathers + 14 + 26 + 26)
    assert usual < listed / 5
