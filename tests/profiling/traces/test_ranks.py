"""Over ranks: whose traces belong together, which kernels are one message, who waits for whom, the critical path."""

from __future__ import annotations

import gc
import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.errors import UserError
from fivefold.machine.catalog import resolve
from fivefold.profiling.traces import read
from fivefold.profiling.traces.critical_path import Segment
from fivefold.profiling.traces.recording import TraceEvents
from fivefold.results.trace_report import TraceReport
from tests.profiling.traces import kineto

AHEAD = kineto.Shape(
    ranks=3, steps=1, operations=24, host=3, latency=1, copy_share=0.0, longest=6000
)  # hosts far ahead


H100 = resolve("h100:16", local=Path("none"))


def write(folder: Path, rank: int, events: list[dict[str, Any]], *, world: int = 2, **more: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"rank{rank}.json"
    path.write_text(kineto.text(events, rank=rank, world=world, **more), encoding="utf-8")
    return path


def true_path(job: kineto.DrawnJob) -> dict[tuple[int, str], int] | None:
    """Nanoseconds by rank and kind, by what each kernel is drawn to wait for; None if a launch in the midst decides."""
    begin = min(steps[0][0] for steps in job.steps)
    kernel = max((item for rank in job.kernels for item in rank), key=lambda item: item.end)
    sums: dict[tuple[int, str], int] = defaultdict(int)
    while True:
        end = kernel.end
        if kernel.joined:
            kernel = max(kernel.joined, key=lambda item: item.start)
        activity = "communication" if kernel.kind == "message" else kernel.kind
        ends_on = next(item for item in kernel.joined or [kernel] if item.end == end)
        sums[ends_on.rank, activity] += end - kernel.start
        if kernel.behind is None:
            if kernel is not min(job.kernels[kernel.rank], key=lambda item: item.start):
                return None
            sums[kernel.rank, "host"] += kernel.start - begin
            return dict(sums)
        kernel = kernel.behind


def test_the_critical_path_is_the_longest_chain_of_what_waits(tmp_path_factory: pytest.TempPathFactory) -> None:
    judged = 0
    for seed in range(30):
        job = kineto.draw(seed, AHEAD)
        if (wanted := true_path(job)) is None:
            continue
        judged += 1
        report = read(kineto.write(job, tmp_path_factory.mktemp("drawn"))).report
        result = {part.activity: 0 for part in report.path}
        for part in report.path:
            result[part.activity] += round(part.seconds * 1e9)
        kinds: dict[str, int] = defaultdict(int)
        for (_, activity), total in wanted.items():
            kinds[activity] += total
        assert result == kinds, seed
        compute = {part.rank: round(part.seconds * 1e9) for part in report.path if part.activity == "compute"}
        assert compute == {rank: total for (rank, activity), total in wanted.items() if activity == "compute"}, seed
        assert round(report.path_seconds * 1e9) == sum(wanted.values())
    assert judged > 20


class ComparedKinds(np.ndarray[tuple[int], np.dtype[np.int8]]):
    """A column of kinds of events that counts how often all of them are compared."""

    count = 0

    def __eq__(self, other: object) -> Any:
        ComparedKinds.count += 1
        return super().__eq__(other)


def test_the_gaps_of_a_long_path_do_not_each_look_through_the_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = TraceEvents.__init__

    def count(self: TraceEvents, **columns: Any) -> None:
        original(self, **columns | {"kind": columns["kind"].view(ComparedKinds)})

    monkeypatch.setattr(TraceEvents, "__init__", count)
    counts = []
    for operations in (12, 96):
        ComparedKinds.count = 0
        shape = kineto.Shape(ranks=1, steps=1, operations=operations)
        report = read(kineto.write(kineto.draw(0, shape), tmp_path / str(operations))).report
        assert report.path
        counts.append(ComparedKinds.count)
    assert counts[0] == counts[1]


@settings(max_examples=15)
@given(seed=st.integers(0, 10**6))
def test_the_path_covers_the_step_and_changes_ranks_at_messages(
    seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    traced = read(kineto.write(kineto.draw(seed), tmp_path_factory.mktemp("drawn")))
    path, last = traced.path, [item for item in traced.report.breakdown if item.step == traced.report.steps[-1]]
    for before, after in pairwise(path):
        assert before.end == after.start
        assert before.rank == after.rank or after.activity == "communication"
    begin = min(item.start_seconds for item in last)
    end = max(item.start_seconds + item.window_seconds for item in last)
    assert (path[-1].end - path[0].start) / 1e9 == pytest.approx(end - begin, abs=1e-9)
    assert traced.pieces()[-1].end == pytest.approx(end - begin, abs=1e-9)


def test_only_the_path_of_one_step_is_kept(tmp_path: Path) -> None:
    kept: list[int] = []

    def count(doing: str, _done: int, _total: int) -> None:
        if doing == "critical paths":
            kept.append(sum(isinstance(item, Segment) for item in gc.get_objects()))

    gc.collect()  # paths of other tests
    traced = read(kineto.write(kineto.draw(0, kineto.Shape(steps=8)), tmp_path), progress=count)
    assert len(kept) == 8
    assert max(kept) - kept[0] < 3 * len(traced.path)


def waits_of(job: kineto.DrawnJob) -> dict[int, int]:
    """Nanoseconds that each rank's messages take before the last rank's has begun."""
    waits = dict.fromkeys(range(job.world), 0)
    for rank in job.kernels:
        for item in rank:
            if item.joined:
                waits[item.rank] += max(other.start for other in item.joined) - item.start
    return waits


@pytest.mark.parametrize("seed", range(6))
def test_a_message_waits_for_the_last_to_arrive(seed: int, tmp_path: Path) -> None:
    job = kineto.draw(seed, kineto.Shape(ranks=3))
    report = read(kineto.write(job, tmp_path)).report
    windows = len(report.breakdown)
    waits = waits_of(job)
    result = sum(line.waiting_seconds or 0.0 for line in report.messages) * windows
    assert result == pytest.approx(sum(waits.values()) / 1e9, abs=1e-12)
    late = dict.fromkeys(range(3), 0)
    for item in job.kernels[0]:
        if item.joined:
            late[max(item.joined, key=lambda other: (other.start, other.rank)).rank] += 1
    assert {entry.rank: entry.last for entry in report.arrivals} == late
    assert sum(entry.others_waited_seconds for entry in report.arrivals) == pytest.approx(sum(waits.values()) / 1e9)
    for item in report.breakdown:
        assert item.waiting_seconds is not None
        assert item.waiting_seconds <= item.exposed_seconds + 1e-12


def test_bytes_and_bandwidth_of_a_message_equal_those_by_hand(tmp_path: Path) -> None:
    """By hand: 1 GiB in bf16 over 4 ranks, of which the last begins 5 ms late; 20 ms from there."""
    elements, paths = 1 << 29, []
    for rank in range(4):
        args = {
            "Collective name": "allreduce",
            "In msg nelems": elements,
            "Out msg nelems": elements,
            "Group size": 4,
            "dtype": "BFloat16",
            "Process Group Name": "3",
            "Process Group Description": "mesh_dp",
            "Process Group Ranks": "[0, 2, 4, 6]",
            "stream": 20,
        }
        start = 5_000 if rank == 3 else 0
        event = {
            "ph": "X",
            "cat": "kernel",
            "name": "ncclDevKernel_AllReduce",
            "pid": 0,
            "tid": 20,
            "ts": 7 + start,
            "dur": 25_000 - start,
            "args": args,
        }
        paths.append(write(tmp_path, 2 * rank, [event], world=8))
    report = read(paths, machine=H100).report
    (line,) = report.messages
    assert (line.group, line.ranks, line.collective, line.calls) == ("mesh_dp", 4, "all_reduce", 1)
    assert line.bytes == 2**30
    assert line.seconds == pytest.approx((3 * 25e-3 + 20e-3) / 4)
    assert line.waiting_seconds == pytest.approx(3 * 5e-3 / 4)
    assert line.algorithm_bandwidth == pytest.approx(2**30 / 20e-3)
    assert line.bus_bandwidth == pytest.approx(2**30 / 20e-3 * 2 * 3 / 4)
    assert (line.link, line.link_bandwidth) == ("NVLink 4", 450e9)
    assert "4 of 8 ranks are missing (1, 3, 5, 7), so it is not known who waited for them" in report.remarks
    (across,) = read(paths, machine=H100.replace(ranks=8, ranks_per_node=2)).report.messages
    assert across.link_bandwidth == H100.links[-1].bandwidth  # a NIC each: one rank of the group a node


@pytest.mark.parametrize(
    ("collective", "sent", "received", "payload", "on_the_bus"),
    [
        ("_allgather_base", 100, 400, 400, 300), ("_reduce_scatter_base", 400, 100, 400, 300),
        ("all_to_allv", 400, 390, 400, 300), ("broadcast", 400, 400, 400, 400), ("allreduce", 400, 400, 400, 600),
    ],
)  # fmt: skip
def test_bus_bytes_of_collectives_follow_nccl_tests(
    collective: str, sent: int, received: int, payload: int, on_the_bus: int, tmp_path: Path
) -> None:
    args = {
        "Collective name": collective,
        "In msg nelems": sent,
        "Out msg nelems": received,
        "Group size": 4,
        "dtype": "Byte",
        "Process Group Name": "0",
        "stream": 20,
    }
    event = {"ph": "X", "cat": "kernel", "name": "ncclKernel", "pid": 0, "tid": 20, "ts": 0, "dur": 1e6, "args": args}
    (line,) = read([write(tmp_path, 0, [event], world=4)]).report.messages
    assert line.bytes == line.algorithm_bandwidth == payload
    assert line.bus_bandwidth == on_the_bus
    assert line.waiting_seconds is None


def test_sends_and_receives_are_matched_by_pair_and_order(tmp_path: Path) -> None:
    def message(collective: str, start: int, end: int, **peer: int) -> dict[str, Any]:
        args = {
            "Collective name": collective,
            "In msg nelems": 8,
            "Out msg nelems": 8,
            "Group size": 2,
            "stream": 20,
            "dtype": "Float",
            "Process Group Name": "pp",
            "Process Group Ranks": "[0, 1]",
            **peer,
        }
        return {
            "ph": "X",
            "cat": "kernel",
            "name": "ncclDevKernel_SendRecv",
            "pid": 0,
            "tid": 20,
            "ts": start,
            "dur": end - start,
            "args": args,
        }

    first = write(tmp_path, 0, [message("send", 10, 20, **{"Dst Rank": 1}), message("recv", 40, 60, **{"Src Rank": 1})])
    second = write(tmp_path, 1, [message("recv", 0, 20, **{"Src Rank": 0}), message("send", 50, 60, **{"Dst Rank": 0})])
    report = read([first, second]).report
    waits = {(item.rank): item.waiting_seconds for item in report.breakdown}
    assert waits == {0: pytest.approx(10e-6), 1: pytest.approx(10e-6)}
    assert {line.collective: line.calls for line in report.messages} == {"send": 1, "recv": 1}


def summary(report: TraceReport) -> dict[str, Any]:
    skipped = {"remarks", "files"}
    return {name: value for name, value in report.model_dump().items() if name not in skipped}


def test_clocks_of_hosts_are_set_by_where_messages_end(tmp_path: Path) -> None:
    """The same job, rank 1 on another host whose clock is 3 ms ahead: nothing changes but a remark."""
    job = kineto.draw(4)
    events = [kineto.events(job, rank) for rank in range(2)]
    straight = [write(tmp_path / "one", rank, events[rank], host_name="a") for rank in range(2)]
    ahead = kineto.metadata(1, 2)["baseTimeNanoseconds"] + 3_000_000
    apart = [
        write(tmp_path / "two", 0, events[0], host_name="a"),
        write(tmp_path / "two", 1, events[1], host_name="b", baseTimeNanoseconds=ahead),
    ]
    one, two = read(straight).report, read(apart).report
    assert summary(one) == summary(two)
    (remark,) = two.remarks
    assert remark.startswith("rank 1 is on another host: its clock is moved 3.0 ms earlier")
    assert remark.endswith("(± 0.0 µs)")


def test_messages_missing_on_some_ranks_are_excluded_and_reported(tmp_path: Path) -> None:
    job = kineto.draw(6, kineto.Shape(steps=1, message_share=0.6))
    events = kineto.events(job, 1)
    lost = next(event for event in reversed(events) if event["cat"] == "kernel" and "Collective name" in event["args"])
    kept = [event for event in events if event is not lost]
    report = read([write(tmp_path, 0, kineto.events(job, 0)), write(tmp_path, 1, kept)]).report
    assert "1 messages are not in the traces of all their ranks: not matched" in report.remarks
    (first, _) = report.arrivals
    assert first.matched == sum(bool(item.joined) for item in job.kernels[0]) - 1


def test_steps_that_not_all_ranks_have_are_left_out(tmp_path: Path) -> None:
    job = kineto.draw(1)
    events = [event for event in kineto.events(job, 1) if event["name"] != "ProfilerStep#3"]
    report = read([write(tmp_path, 0, kineto.events(job, 0)), write(tmp_path, 1, events)]).report
    assert report.steps == ("ProfilerStep#4", "ProfilerStep#5")
    assert "steps 3 are not on every rank: left out" in report.remarks


class TestOneJob:
    """Files that do not belong together are refused in one line, those that are no traces left out of a folder."""

    @pytest.fixture
    def events(self) -> list[dict[str, Any]]:
        return kineto.events(kineto.draw(1), 0)

    def check_invalid(self, *paths: Path, said: str, **options: Any) -> None:
        with pytest.raises(UserError) as mistake:
            read(list(paths), **options)
        assert said in str(mistake.value)
        assert "\n" not in str(mistake.value)

    def test_two_traces_of_one_rank_are_an_error(self, events: list[dict[str, Any]], tmp_path: Path) -> None:
        both = write(tmp_path / "a", 0, events), write(tmp_path / "b", 0, events)
        self.check_invalid(*both, said="are both traces of rank 0; give the traces of one job, one per rank")

    def test_traces_of_different_world_sizes_are_an_error(self, events: list[dict[str, Any]], tmp_path: Path) -> None:
        both = write(tmp_path, 0, events, world=2), write(tmp_path, 1, events, world=4)
        self.check_invalid(*both, said="are of two jobs, of 2 and 4 ranks")

    def test_traces_of_gpus_and_of_cpus_together_are_an_error(
        self, events: list[dict[str, Any]], tmp_path: Path
    ) -> None:
        host = [event for event in events if event["cat"] == "cpu_op"]
        self.check_invalid(
            write(tmp_path, 0, events), write(tmp_path, 1, host), said="one ran on GPUs, the other on CPUs"
        )

    def test_traces_of_two_runs_are_an_error(self, events: list[dict[str, Any]], tmp_path: Path) -> None:
        later = kineto.metadata(0, 2)["baseTimeNanoseconds"] + 3_600 * 10**9
        both = write(tmp_path, 0, events), write(tmp_path, 1, events, baseTimeNanoseconds=later)
        self.check_invalid(*both, said="are traces of two runs, 59 min 59 s apart")

    def test_a_missing_step_is_an_error(self, events: list[dict[str, Any]], tmp_path: Path) -> None:
        path = write(tmp_path, 0, events)
        self.check_invalid(path, step=99, said="--step 99: no such ProfilerStep on every rank; they share: 3, 4, 5")
        assert read([path], step=4).report.steps == ("ProfilerStep#4",)

    def test_a_folder_without_traces_is_an_error(self, events: list[dict[str, Any]], tmp_path: Path) -> None:
        self.check_invalid(tmp_path, said="holds no .json or .json.gz")
        (tmp_path / "notes.json").write_text("{}", encoding="utf-8")
        self.check_invalid(
            tmp_path, said="contains no PyTorch profiler trace; left out: notes.json is not a PyTorch profiler trace"
        )
        self.check_invalid(tmp_path / "notes.json", said="has no traceEvents")
        self.check_invalid(tmp_path / "gone.json", said="no such file")
        self.check_invalid(Path("a\0b"), said="is not a file name")
        write(tmp_path, 0, events, world=1)
        report = read([tmp_path]).report
        assert report.ranks == (0,)
        assert [remark.partition(":")[0] for remark in report.remarks] == ["left out"]

    def test_ranks_are_read_from_file_names_or_from_the_order_of_files(
        self, events: list[dict[str, Any]], tmp_path: Path
    ) -> None:
        content = json.dumps({"traceEvents": events})
        paths = [tmp_path / name for name in ("a.json", "b_rank-3.json")]
        for path in paths:
            path.write_text(content, encoding="utf-8")
        report = read(paths).report
        assert report.ranks == (0, 3)
        assert "a.json names no rank: read as rank 0, its place in the list" in report.remarks
