"""Memory from a tape: worked by hand on a small one, and on a large one in time."""

from __future__ import annotations

import time
from collections import Counter

import numpy as np
import pytest

from fivefold.dry_run.memory.breakdown import LiveStorage, list_largest, list_levels, list_live_groups, sum_stage_memory
from fivefold.dry_run.record.tape import ALLOC, FREE, KERNEL, SCOPE, START, WAIT, CodeSite, Scope, Tape, TapeMessage

FORWARD, BACKWARD, UPDATE = Scope("forward", 1, 0), Scope("backward", 1, 0), Scope("update")
MM = CodeSite("blocks.2.mlp.down", "model/linear.py:7 fused_linears", "aten::mm")
LOGITS = CodeSite("head.out", "model/linear.py:7 fused_linears", "aten::mm")


def make_site(category: str) -> CodeSite:
    return CodeSite("", "train/zero.py:1 f", "aten::empty", category)


def hop(*, receives: bool) -> TapeMessage:
    return TapeMessage("pp", "pp_down", (0, 1), "p2p", "bfloat16", 4, 8, 0, receives, 0)


def step() -> Tape:
    """Parameters 1000, moments 2000, inputs 40; an entry of 64 that comes from a neighbour and is kept; logits 500."""
    tape = Tape()
    site = tape.site
    tape.add(SCOPE, tape.scope(Scope("start")))
    for key, (size, category) in enumerate([(1000, "parameters"), (2000, "optimizer"), (40, "inputs")]):
        tape.add(ALLOC, key, size, site(make_site(category)))
    tape.add(KERNEL, 0)
    tape.add(ALLOC, 9, 64, site(make_site("pipeline")))
    tape.add(START, 0, tape.message(hop(receives=True)), 9)
    tape.add(SCOPE, tape.scope(FORWARD))
    tape.add(WAIT, 0)
    tape.add(ALLOC, 3, 300, site(MM))  # kept
    tape.add(ALLOC, 4, 70, site(MM))  # scratch
    tape.add(FREE, 4)
    tape.add(ALLOC, 5, 500, site(LOGITS))
    tape.add(SCOPE, tape.scope(BACKWARD))
    tape.add(ALLOC, 6, 400, site(make_site("gradients")))
    tape.add(ALLOC, 7, 90, site(make_site("gathers")))
    tape.add(ALLOC, 8, 64, site(MM))  # goes back to the neighbour, after the step's last action
    for key in (5, 3, 9, 7):
        tape.add(FREE, key)
    tape.add(START, 1, tape.message(hop(receives=False)), 8)
    tape.add(SCOPE, tape.scope(UPDATE))
    tape.add(ALLOC, 10, 33, site(make_site("widened")))
    tape.add(FREE, 8)
    tape.add(FREE, 10)
    return tape


def test_peak_of_a_small_tape_worked_by_hand() -> None:
    tape = step()
    result = list_levels(tape)
    top = max(result, key=lambda level: level.live_bytes)
    assert top.live_bytes == 3040 + 64 + 300 + 500 + 400 + 90 + 64
    assert top[1:7] == (3040, 400, 64 + 300, 90, 500, 64)
    assert top.cause == "backward of micro-batch 0, stage 1, blocks.2.mlp.down mm (model/linear.py:7 fused_linears)"
    assert tape.events[4 * int(top.seconds) : 4 * int(top.seconds) + 2].tolist() == [ALLOC, 8]
    before = next(level for level in result if level.live_bytes == 3104)  # the buffer of what has not come yet
    assert (before.activations_bytes, before.temporary_bytes) == (0, 64)
    assert result[0].live_bytes == 3040  # not what the tape lists before it begins
    assert result[-1][1:7] == (3040, 400, 0, 0, 0, 0)


def test_memory_of_a_stage_is_broken_down_by_category() -> None:
    memory = sum_stage_memory(step(), 1)
    assert (memory.stage, memory.parameters_bytes, memory.optimizer_bytes, memory.gradients_bytes) == (
        1,
        1000,
        2000,
        400,
    )
    assert memory.activations_bytes == 64 + 300 + 500  # at the end of the forward, logits among them
    assert memory.peak_bytes == 4458
    assert memory.temporary_bytes == 4458 - 3400 - 864
    assert memory.peak_cause.startswith("backward of micro-batch 0, stage 1, blocks.2.mlp.down")


def test_the_largest_tensors_live_at_the_peak_are_listed() -> None:
    tape = step()
    result = list_largest(tape, 4)
    assert [(one.bytes, one.category) for one in result] == [
        (2000, "optimizer"),
        (1000, "parameters"),
        (500, "logits"),
        (400, "gradients"),
    ]
    assert result[2] == LiveStorage(500, "logits", LOGITS, FORWARD)
    assert sum(one.bytes for one in list_largest(tape, 100)) == sum_stage_memory(tape, 0).peak_bytes


def test_seconds_of_each_event_may_be_given() -> None:
    tape = step()
    clock = np.arange(len(tape)) / 4
    plain, timed = list_levels(tape), list_levels(tape, clock)
    assert [level.seconds / 4 for level in plain] == [level.seconds for level in timed]
    assert [level[1:] for level in plain] == [level[1:] for level in timed]


@pytest.mark.long  # a speed
@pytest.mark.slow
def test_a_million_events_take_seconds_and_keep_the_peak() -> None:
    tape = Tape()
    tape.add(SCOPE, tape.scope(Scope("start")))
    tape.add(ALLOC, 0, 7, tape.site(make_site("parameters")))
    tape.add(SCOPE, tape.scope(FORWARD))
    place = tape.site(MM)
    sizes = np.random.default_rng(1).integers(1, 10**6, 500_000)
    for key, size in enumerate(sizes.tolist(), start=1):
        tape.add(ALLOC, key, size, place)
        tape.add(FREE, key)
    begin = time.perf_counter()
    result, memory = list_levels(tape), sum_stage_memory(tape, 0)
    assert time.perf_counter() - begin < 10  # about 1 s on a core of its own
    assert len(result) <= 20_002
    assert memory.peak_bytes == max(level.live_bytes for level in result) == 7 + sizes.max()


def tape() -> Tape:
    result = Tape()
    sites = [CodeSite(f"blocks.{n}.mlp", "linear.py:7 f", "aten::mm") for n in range(3)]
    sites += [CodeSite("embed", "embed.py:3 g", "aten::embedding")]
    result.add(SCOPE, result.scope(Scope("start")))
    result.add(SCOPE, result.scope(Scope("forward", 0, 0)))
    for key in range(12):
        result.add(ALLOC, key, 100 + key, result.site(sites[key % 4]))
        if key % 3 == 2:
            result.add(FREE, key - 1)
    result.add(SCOPE, result.scope(Scope("backward", 0, 0)))
    for key in (0, 3, 6):
        result.add(FREE, key)
    return result


def test_live_bytes_are_allocated_minus_freed() -> None:
    """Against a replay, event by event; blocks of one kind are one group."""
    made = tape()
    result = list_live_groups(made, range(len(made)), n=99)
    live: dict[int, tuple[int, str, str]] = {}
    for at, (kind, storage, size, site) in enumerate(made):
        if kind == ALLOC:
            module = made.sites[site].module
            live[storage] = size, "blocks.*.mlp" if module.startswith("blocks") else module, made.sites[site].line
        elif kind == FREE:
            del live[storage]
        expected = Counter[tuple[str, str]]()
        for size, module, line in live.values():
            expected[module, line] += size
        told = Counter[tuple[str, str]]()
        for item in result[at]:
            told[item.module, item.line] += item.bytes
        assert told == expected
        assert sum(entry.number for entry in result[at]) == len(live)
    for level in list_levels(made):
        assert sum(entry.bytes for entry in result[int(level.seconds)]) == level.live_bytes


def test_the_largest_groups_of_live_bytes_come_first() -> None:
    made = tape()
    (result,) = list_live_groups(made, [len(made) - 4], n=1)
    assert len(result) == 1
    (every,) = list_live_groups(made, [len(made) - 4], n=9)
    assert result[0] == max(every, key=lambda item: item.bytes)
