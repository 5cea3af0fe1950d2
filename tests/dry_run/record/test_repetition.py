"""Micro-batches whose events are copied, against the same micro-batches run: event for event the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from torch import Tensor

from fivefold.dry_run.fake.world import list_representatives
from fivefold.dry_run.rank_tapes import run_rank
from fivefold.dry_run.record import repetition
from fivefold.dry_run.record.repetition import NotRepeatable, insert_copies, shorten_row
from fivefold.dry_run.record.tape import ALLOC, Tape
from fivefold.job import Job, get_recipe
from fivefold.layout.schedule import schedule
from fivefold.layout.schedule.p2p import P2PStep, list_p2p_steps
from fivefold.layout.spec import Layout
from fivefold.model.spec import Model
from fivefold.trainer.engine import Engine
from tests.dry_run.record.tape_events import list_events
from tests.dry_run.record.test_replay import MODELS
from tests.selection import mark_share

LAYOUTS = ["pp1", "pp4", "pp16", "pp4 v2 interleaved", "pp4 zb1p", "pp8 zb2p", "pp4 zbv", "pp4 dualpipe",
           "pp16 dualpipe", "pp4 dualpipev"]  # fmt: skip


@pytest.mark.parametrize("text", LAYOUTS)
@pytest.mark.parametrize("micro_batches", [64, 120])
def test_a_schedule_row_shortened_to_one_period_equals_the_full_row(text: str, micro_batches: int) -> None:
    layout = Layout.parse(text)
    table = schedule(layout.schedule, pp=layout.pp, v=layout.v, micro_batches=micro_batches)
    for rank in (0, layout.pp // 2, layout.pp - 1):
        row = list_p2p_steps(table, rank=rank)
        short = shorten_row(row)
        assert short is not None
        period = short.row[short.cut - short.period : short.cut]
        copies = [_later(step, copy * short.shift) for copy in range(1, short.copies + 1) for step in period]
        rest = [_later(step, short.copies * short.shift) for step in short.row[short.cut :]]
        assert (*short.row[: short.cut], *copies, *rest) == row
        run, full = short.run_share
        assert run < full


def _later(step: P2PStep, shift: int) -> P2PStep:
    kind, stage, micro_batch, backward_stage, backward = step.action
    action = step.action._replace(
        micro_batch=micro_batch + shift, backward_micro_batch=backward + (shift if kind == "FB" else 0)
    )
    assert (action.kind, action.stage, action.backward_stage) == (kind, stage, backward_stage)
    return P2PStep(action, *(tuple((k, s, i + shift) for k, s, i in messages) for messages in step[1:]))


def test_a_schedule_row_without_a_period_is_not_shortened() -> None:
    table = schedule("gpipe", pp=4, v=1, micro_batches=32)
    assert shorten_row(list_p2p_steps(table, rank=0)) is None
    short_row = list_p2p_steps(schedule("1f1b", pp=1, v=1, micro_batches=4), rank=0)
    assert shorten_row(short_row) is None


CASES = [
    ("dense", "dp2 zero3", 9),
    ("dense", "dp2 zero2 mbs2 ac=full", 7),
    ("dense", "tp2 cp2 cp=ulysses ac=selective", 6),
    ("dense", "pp4 dp2 zero2", 12),
    ("tied", "pp2 v2 interleaved", 24),
    ("tied", "pp2 zbv tp2", 16),
    ("moe", "pp2 zb2p", 14),
    ("moe", "pp4 zb1p dp2 ep2", 16),
    ("moe", "pp4 dualpipe dp2 ep2 zero1", 32),
    ("moe", "pp4 dualpipev ac=full", 26),
    ("moe", "dp2 tp2 ep2 etp2 zero1 ac=selective", 8),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "text", "micro_batches"),
    mark_share(6, [pytest.param(*case, id=f"{case[0]} {case[1]}") for case in CASES]),
)
def test_copied_micro_batches_equal_executed_ones(
    name: str, text: str, micro_batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout, model = Layout.parse(text), resize(MODELS[name], Layout.parse(text))
    job = Job(sequence=64, global_batch=layout.dp * layout.mbs * micro_batches, precision=get_recipe("bf16"))
    copied: list[Tape] = []

    def repeat_and_record(tape: Tape, *arguments: Any, **options: Any) -> None:
        insert_copies(tape, *arguments, **options)
        copied.append(tape)

    monkeypatch.setattr("fivefold.dry_run.rank_tapes.insert_copies", repeat_and_record)
    for rank in list_representatives(layout)[:2]:
        copied.clear()
        short = run_rank(model=model, layout=layout, job=job, rank=rank, streams=True)
        assert copied == [short.first, short.steady], "nothing was copied"
        full = run_rank(model=model, layout=layout, job=job, rank=rank, streams=True, repeats=False)
        assert list_events(short.first) == list_events(full.first)
        assert list_events(short.steady) == list_events(full.steady)
        assert not _new_storages(short.first) & _new_storages(short.steady)


def resize(model: Model, layout: Layout) -> Model:
    return model.replace(layers=2 * layout.pp * layout.v)


def _new_storages(tape: Tape) -> set[int]:
    """Return the storages that a step allocates, without those that it starts with."""
    scopes = iter(tape)
    next(scopes)
    events = list(scopes)
    first = next(number for number, event in enumerate(events) if event[0] != ALLOC)
    return {storage for kind, storage, *_ in events[first:] if kind == ALLOC}


@pytest.mark.long  # in the next test one differs by an operation
@pytest.mark.slow
def test_micro_batches_that_differ_are_all_executed(monkeypatch: pytest.MonkeyPatch) -> None:
    layout, model = Layout.parse("dp2 zero3"), MODELS["dense"].replace(layers=2)
    job = Job(sequence=64, global_batch=12, precision=get_recipe("bf16"))
    full = run_rank(model=model, layout=layout, job=job, rank=0, streams=True, repeats=False)
    described = repetition._Template.describe
    monkeypatch.setattr(
        repetition._Template,
        "describe",
        lambda template, events, *, periods: [*described(template, events, periods=periods), periods],
    )
    fallen_back = run_rank(model=model, layout=layout, job=job, rank=0, streams=True)
    assert list_events(fallen_back.steady) == list_events(full.steady)


@pytest.mark.slow
def test_a_micro_batch_with_another_operation_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The third micro-batch multiplies once more than the second, so that no period may be copied."""
    layout, model = Layout.parse("dp2 zero3"), MODELS["dense"].replace(layers=2)
    job = Job(sequence=64, global_batch=12, precision=get_recipe("bf16"))
    run_stage = Engine._run_stage

    def multiply_once_more(engine: Engine, stage: int, entry: Tensor | None, micro_batch: int) -> Tensor:
        if micro_batch == 2:
            _ = engine.built.shards[0].weight * 2
        return run_stage(engine, stage, entry, micro_batch)

    monkeypatch.setattr(Engine, "_run_stage", multiply_once_more)
    short, full = (
        run_rank(model=model, layout=layout, job=job, rank=0, streams=True, repeats=repeats)
        for repeats in (True, False)
    )
    assert list_events(short.steady) == list_events(full.steady)
    assert list_events(short.first) == list_events(full.first)


def test_a_copy_that_frees_twice_or_leaks_is_rejected() -> None:
    allocated, freed = [0, 7, 512, 0], [1, 7, 0, 0]
    ran = np.array([allocated, freed])
    repetition._check_storages(ran, ran)
    for wrong in ([allocated], [allocated, freed, freed], [freed, allocated], [allocated, allocated, freed], [freed]):
        with pytest.raises(NotRepeatable):
            repetition._check_storages(ran, np.array(wrong))
