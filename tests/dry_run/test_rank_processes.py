"""Ranks on several cores: the results are those of one process, whatever happens to the workers."""

from __future__ import annotations

import gc
import io
import pickle
from collections import deque
from pathlib import Path
from typing import Any

import pytest

from fivefold.dry_run import rank_processes
from fivefold.dry_run.rank_processes import RankJob, RankWorker, Results, pause_garbage_collection, run_ranks, serve
from fivefold.dry_run.rank_tapes import RankTapes
from fivefold.errors import RunFailure
from fivefold.job import Job
from fivefold.layout.schedule import schedule
from fivefold.layout.spec import Layout
from fivefold.machine.catalog import resolve
from fivefold.model.catalog import build_model
from fivefold.trainer.model import mlp

pytestmark = pytest.mark.slow

RANKS = (0, 1, 2, 3)


def rank_job(**changes: Any) -> RankJob:
    model = build_model("tiny").replace(layers=4, width=64, heads=4, kv_heads=2, head_dim=16, ffn=96, vocab=256)
    layout, machine = Layout.parse("pp4"), resolve("h100:4", local=Path())
    job = Job(sequence=64, global_batch=4)
    job = job.replace(stack=job.stack.with_device_kernels(gpu=True))
    table = schedule(layout.schedule, pp=4, v=1, micro_batches=layout.micro_batches(job))
    kept = frozenset(changes.pop("kept", RANKS))
    return RankJob(model, machine, layout, job, table, streams=True, replay=True, kept_ranks=kept)


def list_contents(tapes: RankTapes) -> list[Any]:
    """Everything on the two tapes, and the rest of the record."""
    contents = [
        (bytes(tape.events), tape.sites, tape.scopes, tape.kernels, tape.messages)
        for tape in (tapes.first, tapes.steady)
    ]
    return [tapes.rank, tapes.parameters, tapes.weights, *contents]


def test_workers_record_the_same_bytes() -> None:
    """One rank runs here and the others in a worker, which starts at once and is waited for."""
    job = rank_job(kept=(0, 1, 2))
    expected = [job.run(rank) for rank in RANKS]
    waiting, results = deque(RANKS), Results()
    worker = RankWorker(pickle.dumps(job), waiting, results)
    worker._thread.join()
    worker.stop()
    assert list(results) == [*reversed(RANKS)]  # from the last one back
    assert not waiting
    for rank, here in enumerate(expected):
        there = results[rank]
        assert isinstance(there, tuple)
        assert isinstance(here, tuple)
        assert there[1] == here[1]
        assert list_contents(there[0]) == list_contents(here[0])
        kernel = there[0].steady.kernels[0] if rank < 3 else None
        assert kernel is None or there[0].steady.kernel(kernel) == 0  # indices are restored


def test_ranks_of_dead_workers_are_run_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_processes.sys, "executable", "/bin/true")  # ends at once
    started = list[int]()
    outcome = run_ranks(rank_job(), RANKS, progress=lambda done, _: started.append(done), worthwhile_seconds=0.0)
    assert [result[0].rank for result in outcome if isinstance(result, tuple)] == [*RANKS]
    assert started == [*RANKS]


def test_the_first_rank_starts_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """It also imports modules: the second shows what the others take."""
    waiting_at_start = list[int]()

    def start_none(_job: RankJob, waiting: deque[int], _results: Results) -> list[RankWorker]:
        waiting_at_start.append(len(waiting))
        return []

    monkeypatch.setattr(rank_processes, "_start_workers", start_none)
    run_ranks(rank_job(), RANKS, worthwhile_seconds=0.0)
    assert waiting_at_start[0] == len(RANKS) - 2


def test_the_first_finding_ends_the_dry_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_self: Any, x: Any, _keys: Any) -> Any:
        raise ValueError("no such shape")

    monkeypatch.setattr(mlp.Mlp, "forward", fail)
    (finding,) = run_ranks(rank_job(), RANKS)
    assert isinstance(finding, str)
    assert "rank 0" in finding
    assert "no such shape" in finding


def test_a_worker_answers_with_the_error_of_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise RunFailure("cannot be dry-run")

    monkeypatch.setattr(rank_processes, "run_rank", fail)
    requests, replies = io.BytesIO(pickle.dumps(rank_job()) + pickle.dumps(3)), io.BytesIO()
    serve(requests, replies)
    replies.seek(0)
    assert pickle.load(replies) == "started"
    error = pickle.load(replies)
    assert isinstance(error, RunFailure)
    with pytest.raises(RunFailure, match="cannot be dry-run"):
        list(rank_processes._select_results([3], {3: error}))


def test_collection_is_paused_and_resumed() -> None:
    assert gc.isenabled()
    with pause_garbage_collection():
        assert not gc.isenabled()
        with pause_garbage_collection():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


def test_collection_is_resumed_after_an_error() -> None:
    with pytest.raises(ValueError, match="failed"), pause_garbage_collection():
        raise ValueError("failed")
    assert gc.isenabled()
