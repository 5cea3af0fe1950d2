"""The record of each pipeline schedule says what its generated tables do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import FrozenInstanceError, replace
from itertools import pairwise
from pathlib import Path

import pytest

from fivefold.errors import UserError
from fivefold.job import Job
from fivefold.layout.schedule import PIPELINE_SCHEDULES, PipelineSchedule, schedule
from fivefold.layout.schedule.pipeline_schedule import SCHEDULES
from fivefold.layout.schedule.table import Table
from fivefold.layout.spec import Layout
from fivefold.machine.catalog import resolve
from fivefold.model.catalog import build_model
from fivefold.planner.counts.counts import Counts
from fivefold.planner.search.shapes import PAIRED, SPLIT
from fivefold.planner.time.profiled import Profiled
from tests.layout.live import count_live

EVERY = pytest.mark.parametrize("record", PIPELINE_SCHEDULES.values(), ids=lambda record: record.name)


def tables(record: PipelineSchedule) -> Iterator[Table]:
    """Yield tables of two to six ranks with few and with many micro-batches."""
    for pp in (2, 3, 4, 6):
        for micro_batches in (*range(1, 2 * pp + 1), 3 * pp, 4 * pp + 2):
            for v in (2, 3) if record.stages_per_rank is None else (record.stages_per_rank,):
                try:
                    yield schedule(record.name, pp=pp, v=v, micro_batches=micro_batches)
                except UserError:
                    assert record.pairs_passes  # no other schedule is limited


def kinds(table: Table) -> set[str]:
    return {action.kind for row in table.rows for action in row}


@EVERY
def test_a_split_backward_is_one_whose_tables_have_weight_passes(record: PipelineSchedule) -> None:
    results = [kinds(table) for table in tables(record)]
    assert len(results) >= 5
    assert {"W" in result for result in results} == {record.splits_backward}
    assert any("FB" in result for result in results) == record.pairs_passes


@EVERY
def test_stages_are_on_the_ranks_of_the_schedule_record(record: PipelineSchedule) -> None:
    for table in tables(record):
        v = table.stages // table.pp
        held = tuple(record.stages_of_rank(rank, pp=table.pp, v=v) for rank in range(table.pp))
        assert table.rank_stages == held
        paths = set(table.paths)
        assert (len(paths) > 1) == (record.enters_both_ends and table.micro_batches > 1)
        assert record.joins_ends == any({0, table.stages - 1} <= set(stages) for stages in held)
        assert record.is_v_shaped == any(a == b for path in paths for a, b in pairwise(path))


def count_forwards_before_backward(table: Table, rank: int) -> tuple[int, ...]:
    """Count the forwards of each stage of a rank until its first backward ends."""
    actions, held = table.rows[rank], table.rank_stages[rank]
    first = next(place for place, action in enumerate(actions) if action.kind in ("B", "BW", "FB"))
    passed = [action.stage for action in actions[: first + 1] if action.kind in ("F", "FB")]
    return tuple(passed.count(stage) for stage in held)


@EVERY
def test_live_stages_are_those_of_the_tables(record: PipelineSchedule) -> None:
    for table in tables(record):
        for rank in range(table.pp):
            count = record.live_stages(table.micro_batches, pp=table.pp, v=table.stages // table.pp, rank=rank)
            if not record.pairs_passes:
                assert count == count_forwards_before_backward(table, rank)
            least = dict(zip(table.rank_stages[rank], count, strict=True))
            assert any(all(passed[stage] >= least[stage] for stage in least) for passed, _ in count_live(table, rank))


def test_every_schedule_has_a_record_that_cannot_be_changed() -> None:
    assert tuple(PIPELINE_SCHEDULES) == SCHEDULES
    split = {name for name, splits in zip(SCHEDULES, SPLIT | PAIRED, strict=True) if splits}
    assert split == {name for name, record in PIPELINE_SCHEDULES.items() if record.splits_backward}
    with pytest.raises(FrozenInstanceError):
        PIPELINE_SCHEDULES["zb1p"].splits_backward = False  # type: ignore[misc]
    assert not replace(PIPELINE_SCHEDULES["zb1p"], splits_backward=False).splits_backward


@EVERY
def test_the_key_of_a_measured_unit_says_whether_the_backward_is_split(record: PipelineSchedule) -> None:
    """DualPipe shared the key of schedules that do not split."""
    counts = Counts(build_model("llama3-8b"), Job(sequence=4096, global_batch=16))
    profiled = Profiled(counts, resolve("h100:2", local=Path("/nowhere")))
    layout = Layout(pp=2, schedule=record.name, v=record.stages_per_rank or 2)
    run = counts.list_stage_groups(layout)[0][-1]
    assert profiled.make_unit_key(layout, run).endswith(" split") == record.splits_backward
