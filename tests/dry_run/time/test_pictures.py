from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from fivefold.dry_run import dryrun
from fivefold.dry_run.time.pictures import CHART_INTERVALS, list_action_spans, thin_levels
from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.machine.catalog import resolve
from fivefold.model.catalog import build_model
from tests.selection import mark_share

TINY = build_model("tiny").replace(layers=4, width=64, heads=4, kv_heads=2, head_dim=16, ffn=96, vocab=256)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", mark_share(4, ["dp2 zero3", "pp2 tp2 zb1p", "pp2 v2 dualpipev", "dp2 pp2 v2 interleaved zero1"])
)
def test_pipeline_and_memory_pictures_show_the_whole_step(layout: str) -> None:
    result = dryrun(
        model=TINY,
        machine=resolve("h100:4", local=Path()),
        layout=Layout.parse(layout),
        job=Job(sequence=64, global_batch=8),
    )
    assert result.simulation is not None
    assert result.table is not None
    for rank, row in zip(result.ranks, result.table.rows, strict=True):
        tape = result.steady_tapes[rank]
        drawn = list_action_spans(result.simulation, tape, row)
        assert [span.name for span in drawn] == [*map(str, row), "update"]
        assert all(0 <= one.start <= one.end <= two.start + 1e-12 for one, two in pairwise(drawn))
        assert drawn[-1].end <= result.simulation.step_seconds
        assert all(0 <= span.messages <= span.end - span.start for span in drawn)
        lives = thin_levels(result.simulation, tape)
        share = next(rank_summary for rank_summary in result.rank_summaries if rank_summary.rank == rank)
        assert max(level.live_bytes for level in lives) == share.steady.peak_bytes
        assert len(lives) <= 3 * (CHART_INTERVALS + 1)
        assert all(one.seconds <= two.seconds for one, two in pairwise(lives))
