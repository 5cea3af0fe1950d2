"""Runs the ranks of a dry run on several cores: this process from the first on, its workers from the last back.

    parent     rank 0, 1, 2, …        worker     … , 14, 15

Importing PyTorch takes a worker several seconds, so workers start once the second rank has shown that the others take
longer; the first also imports modules and fills caches. A worker reads a ``RankJob`` from its standard input, then
ranks, and writes a result for each: all pickled. It ends when its input does, that is when its parent closes it or
dies. An exception becomes a finding of one line:

    rank 3, forward of micro-batch 0, blocks.2.mlp: aten::mm: a and b must have same reduction dim … (file:line)
"""

from __future__ import annotations

import gc
import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, Any, NamedTuple

import torch
from torch import nn

from fivefold.dry_run import report
from fivefold.dry_run.rank_tapes import RankTapes, run_rank
from fivefold.dry_run.record.call_sites import REPOSITORY_FOLDER, TORCH_FOLDER
from fivefold.dry_run.record.recorder import TapeRecorder
from fivefold.dry_run.record.tape import SCOPE
from fivefold.dry_run.report import RankSummary
from fivefold.errors import RunFailure, UserError
from fivefold.job import Job
from fivefold.layout.schedule.table import Table
from fivefold.layout.spec import Layout
from fivefold.machine.spec import Machine
from fivefold.model.spec import Model

PACKAGE_FOLDER = str(Path(__file__).parent)
# module of the exceptions for values or operations that fake tensors do not support
FAKE_TENSOR_MODULE = "torch._subclasses"
RankResult = tuple[RankTapes, RankSummary] | str  # or a finding, if the job would fail
Results = dict[int, RankResult | BaseException]  # by rank
DRY_RUN_ERRORS = (UserError, RunFailure, MemoryError)  # errors of the dry run itself
NO_RANK = -1
WORTHWHILE_SECONDS = 12.0  # of the processor for the ranks that are left: twice what a worker needs to start
MAX_WORKERS = 7  # each holds half a GiB


@contextmanager
def pause_garbage_collection() -> Iterator[None]:
    """Collect no reference cycles within; usable as a decorator.

    A dry run makes millions of small objects and hardly any cycle, and each full collection walks over all objects of
    PyTorch, which took a quarter of the time. Reference counts free tensors as ever.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class RankJob(NamedTuple):
    """The settings that all ranks of a dry run share; of ``kept_ranks`` all events are kept, of others messages."""

    model: Model
    machine: Machine
    layout: Layout
    job: Job
    table: Table
    streams: bool
    replay: bool
    kept_ranks: frozenset[int]

    @pause_garbage_collection()
    def run(self, rank: int) -> RankResult:
        """Run one rank: its tapes and their summary, or a finding if the job would fail."""
        try:
            with silence_fake_tensor_log():
                tapes = run_rank(
                    model=self.model,
                    layout=self.layout,
                    job=self.job,
                    rank=rank,
                    streams=self.streams,
                    table=self.table,
                    replay=self.replay,
                )
        except DRY_RUN_ERRORS:
            raise
        except Exception as error:
            return describe_failure(error, rank=rank)
        summary = report.summarize_rank(tapes, machine=self.machine, layout=self.layout, job=self.job)
        return tapes if rank in self.kept_ranks else report.keep_messages(tapes), summary


def run_ranks(
    rank_job: RankJob,
    ranks: Sequence[int],
    *,
    progress: Callable[[int, int], None] | None = None,
    worthwhile_seconds: float = WORTHWHILE_SECONDS,
) -> list[RankResult]:
    """Return the results of ``ranks`` in order, up to the first finding.

    ``progress(done, total)`` is called before each rank of this process. Raises what the first failing rank raises.
    ``worthwhile_seconds``: as the constant.
    """
    waiting, results = deque(ranks), Results()
    workers: list[RankWorker] = []
    try:
        while waiting or any(worker.is_alive for worker in workers):
            if not waiting:
                for worker in workers:
                    worker.finish()  # one that dies puts its rank back
                continue
            if progress:
                progress(len(results), len(ranks))
            begin, rank = time.process_time(), waiting.popleft()
            results[rank] = rank_job.run(rank)
            if isinstance(results[rank], str):
                break  # the ranks before it have results
            seconds = time.process_time() - begin
            if not workers and len(results) > 1 and seconds * len(waiting) > worthwhile_seconds:
                workers = _start_workers(rank_job, waiting, results)
    finally:
        for worker in workers:
            worker.stop()
    return list(_select_results(ranks, results))


def _select_results(ranks: Sequence[int], results: Results) -> Iterator[RankResult]:
    for rank in ranks:
        result = results[rank]
        if isinstance(result, BaseException):
            raise result
        yield result
        if isinstance(result, str):
            return


def _start_workers(rank_job: RankJob, waiting: deque[int], results: Results) -> list[RankWorker]:
    """Start a worker for each further core; none if the job cannot be sent to one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        pickled_job = pickle.dumps(rank_job)
    except (pickle.PicklingError, AttributeError, TypeError):  # records of classes that only this process has
        return []
    return [RankWorker(pickled_job, waiting, results) for _ in range(min(cores - 1, MAX_WORKERS, len(waiting) - 1))]


class RankWorker:
    """A process that runs the last of the ``waiting`` ranks, and a thread that fills ``results`` with its replies."""

    def __init__(self, pickled_job: bytes, waiting: deque[int], results: Results) -> None:
        self._waiting, self._results, self._rank = waiting, results, NO_RANK
        start = f"from {__name__} import {run_worker.__name__} as run; run()"
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}; {start}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._thread = threading.Thread(target=self._send_job, args=(pickled_job,), daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Tell whether it may still run a rank."""
        return self._thread.is_alive()

    def finish(self) -> None:
        """Wait for its current rank, if it runs one, when no rank is waiting."""
        if self._rank == NO_RANK:
            self._process.kill()
        self._thread.join()

    def stop(self) -> None:
        """End the process and the thread at once."""
        self._process.kill()
        self._thread.join()
        self._process.communicate()

    def _send_job(self, pickled_job: bytes) -> None:
        """Send the job; once the process has started, send it one waiting rank after another and keep the results."""
        requests, replies = self._process.stdin, self._process.stdout
        assert requests is not None
        assert replies is not None
        try:
            requests.write(pickled_job)
            requests.flush()
            pickle.load(replies)  # it has started: until then the parent takes the ranks
            while self._waiting:
                self._rank = self._waiting.pop()
                _send(requests, self._rank)
                self._results[self._rank] = pickle.load(replies)
                self._rank = NO_RANK
        except (OSError, EOFError, IndexError, pickle.UnpicklingError):  # it was killed, or the last rank is taken
            if self._rank != NO_RANK:
                self._waiting.append(self._rank)


def _send(pipe: IO[bytes], message: Any) -> None:
    pickle.dump(message, pipe, protocol=pickle.HIGHEST_PROTOCOL)
    pipe.flush()


def serve(requests: IO[bytes], replies: IO[bytes]) -> None:
    """Read a ``RankJob``, then run ranks until ``requests`` end."""
    rank_job: RankJob = pickle.load(requests)
    _send(replies, "started")
    while True:
        try:
            rank: int = pickle.load(requests)
        except EOFError:
            return
        try:
            result: Any = rank_job.run(rank)
        except DRY_RUN_ERRORS as error:
            result = error
        _send(replies, result)


def run_worker() -> None:
    """Serve as a worker of the process that started this one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what is printed is no result
    serve(sys.stdin.buffer, replies)


@contextmanager
def silence_fake_tensor_log() -> Iterator[None]:
    """Silence torch's logger of fake tensors, which prints pages about every exception that passes through it."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    level = log.level
    log.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        log.setLevel(level)


def describe_failure(error: Exception, *, rank: int) -> str:
    """Return the finding for ``error``; raises ``RunFailure`` if the dry run itself failed and the job might run."""
    frames = list(_iterate_frames(error.__traceback__))
    reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    frame, line = next(
        (f, n) for f, n in reversed(frames) if not f.f_code.co_filename.startswith((TORCH_FOLDER, PACKAGE_FOLDER))
    )
    site = f"{frame.f_code.co_filename.removeprefix(REPOSITORY_FOLDER)}:{line} {frame.f_code.co_qualname}"
    if type(error).__module__.startswith(FAKE_TENSOR_MODULE) or frames[-1][0].f_code.co_filename.startswith(
        PACKAGE_FOLDER
    ):
        raised_at = traceback.extract_tb(error.__traceback__)[-1]
        raise RunFailure(
            f"rank {rank} cannot be dry-run at {site}: {reason} ({Path(raised_at.filename).name}:{raised_at.lineno})"
        )
    recorder, operation = _find_recorder_and_operation(frames)
    context = [f"rank {rank}", _describe_scope(recorder), _find_running_module(frames, recorder)]
    description = ": ".join(filter(None, (operation, reason)))
    return f"{', '.join(filter(None, context))}: {description}; fix {site}"


def _iterate_frames(trace: TracebackType | None) -> Iterator[tuple[FrameType, int]]:
    while trace is not None:
        yield trace.tb_frame, trace.tb_lineno
        trace = trace.tb_next


def _find_recorder_and_operation(frames: list[tuple[FrameType, int]]) -> tuple[TapeRecorder | None, str]:
    """Find, in the frames of the exception, the recorder (or None) and the torch operation that it ran (or "")."""
    name = TapeRecorder.__torch_dispatch__.__qualname__
    operation = next((str(f.f_locals["func"].name()) for f, _ in reversed(frames) if f.f_code.co_qualname == name), "")
    candidates = (f.f_locals.get("recorder") for f, _ in frames)
    return next((candidate for candidate in candidates if isinstance(candidate, TapeRecorder)), None), operation


def _describe_scope(recorder: TapeRecorder | None) -> str:
    """Return, in words, the scope on the tape when the exception was raised."""
    if recorder is None or recorder.silent:
        return "before the first step"
    return next(
        (str(recorder.tape.scopes[index]) for kind, index, *_ in reversed(list(recorder.tape)) if kind == SCOPE), ""
    )


def _find_running_module(frames: list[tuple[FrameType, int]], recorder: TapeRecorder | None) -> str:
    """Return the path of the innermost module that ran; in a backward, of the module that created the autograd node."""
    paths: dict[int, str] = {}
    innermost = ""
    for frame, _ in frames:
        frame_self: Any = frame.f_locals.get("self")
        if isinstance(frame_self, nn.Module):
            if not paths:
                paths = {id(submodule): path for path, submodule in frame_self.named_modules()}
            innermost = paths.get(id(frame_self), innermost)
        elif isinstance(frame_self, torch.autograd.function.BackwardCFunction) and recorder is not None:
            innermost = recorder.call_sites.find_creating_module(frame_self) or innermost
    return innermost
