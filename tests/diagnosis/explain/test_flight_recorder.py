"""Flight recorders of two real processes, and of drawn jobs written by hand, compared with torch's own analysis."""

from __future__ import annotations

import argparse
import copy
import json
import pickle
import random
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from fivefold.diagnosis.explain import explain as explain_files  # noqa: E402
from fivefold.diagnosis.explain.flight_recorder import explain  # noqa: E402
from fivefold.errors import UserError  # noqa: E402

GROUPS = {"0": ("default_pg", (0, 1, 2, 3)), "1": ("dp", (0, 2)), "2": ("dp", (1, 3)), "3": ("tp", (0, 1))}
OPERATIONS = ("all_reduce", "_all_gather_base", "_reduce_scatter_base", "broadcast")


@pytest.mark.long  # a real dump is stored in examples/hang, and read there
def test_a_hang_of_two_real_processes_is_explained(tmp_path: Path) -> None:
    script = Path(__file__).with_name("hanging_rank.py")  # a fork would have what this process has recorded before
    subprocess.run([sys.executable, script, tmp_path], check=True, timeout=120)  # it forks the second rank
    (result,) = explain_files([tmp_path / "trace_0", tmp_path / "trace_1"])
    assert result.verdict.startswith("rank 1 did not come to collective 2, all_reduce [4, 3] float, of default_pg, ")
    assert re.search(r"in which rank 0 (waits|waited until the time limit), at ", result.verdict)
    assert "hanging_rank.py:" in result.verdict
    assert result.verdict.endswith(" rank_of_a_hang")
    assert [at.rank for at in result.ranks] == ["0", "1"]
    assert result.ranks[1].state.endswith(" collective 1, all_reduce [4, 3] float, of default_pg")
    (bare,) = explain_files(sorted(tmp_path.glob("*.json")))  # the JSON has no stacks
    assert bare.verdict.startswith("rank 1 did not come to collective 2, all_reduce")
    with pytest.raises(UserError, match="rank 1 has a second dump"):
        explain_files([tmp_path / "trace_1", tmp_path / "dump_rank1.json"])


def dump(calls: list[tuple[str, int, str, int, bool]], rank: int) -> dict[str, Any]:
    """A dump in the recorder's format; calls: group, number, operation, size, whether it has ended."""
    entries = [
        {
            "record_id": at,
            "pg_id": int(group),
            "process_group": [group, GROUPS[group][0]],
            "collective_seq_id": number,
            "p2p_seq_id": 0,
            "op_id": number,
            "profiling_name": f"nccl:{name}",
            "time_created_ns": 1000 * at + rank,
            "input_sizes": [[size]],
            "input_dtypes": ["BFloat16"],
            "output_sizes": [[_output_size(name, size, group)]],
            "output_dtypes": ["BFloat16"],
            "state": "completed" if done else "started",
            "retired": done,
            "is_p2p": False,
            "frames": [{"name": "step", "filename": "/job/train.py", "line": at + 1}],
        }
        for at, (group, number, name, size, done) in enumerate(calls)
    ]
    config = {
        name: {"name": name, "desc": desc, "ranks": str(list(ranks))}
        for name, (desc, ranks) in GROUPS.items()
        if rank in ranks
    }
    return {"version": "2.10", "pg_config": config, "entries": entries}


def _output_size(name: str, size: int, group: str) -> int:
    ranks = len(GROUPS[group][1])
    return {"_all_gather_base": size * ranks, "_reduce_scatter_base": size // ranks}.get(name, size)


def simulate(programs: dict[int, list[tuple[str, str, int]]]) -> dict[int, dict[str, Any]]:
    """Run the ranks' programs by hand: a collective ends once all of its group have made the same call."""
    places, numbers = dict.fromkeys(programs, 0), {(r, g): 0 for r in programs for g in GROUPS}
    calls: dict[int, list[tuple[str, int, str, int, bool]]] = {rank: [] for rank in programs}
    for rank, program in programs.items():
        if program:
            _call(rank, program[0], calls, numbers)
    moved = True
    while moved:
        moved = False
        for group, (_, ranks) in GROUPS.items():
            at = [programs[r][places[r]] if places[r] < len(programs[r]) else None for r in ranks]
            if at[0] is None or at[0][0] != group or any(item != at[0] for item in at):
                continue
            moved = True
            for rank in ranks:
                calls[rank][-1] = (*calls[rank][-1][:4], True)
                places[rank] += 1
                if places[rank] < len(programs[rank]):
                    _call(rank, programs[rank][places[rank]], calls, numbers)
    return {rank: dump(of, rank) for rank, of in calls.items()}


def _call(rank: int, step: tuple[str, str, int], calls: Any, numbers: Any) -> None:
    group, name, size = step
    numbers[rank, group] += 1
    calls[rank].append((group, numbers[rank, group], name, size, False))


def programs(draw: random.Random) -> dict[int, list[tuple[str, str, int]]]:
    result: dict[int, list[tuple[str, str, int]]] = {rank: [] for rank in range(4)}
    for _ in range(draw.randint(3, 12)):
        group = draw.choice(list(GROUPS))
        step = (group, draw.choice(OPERATIONS), 8 * draw.randint(1, 9))
        for rank in GROUPS[group][1]:
            result[rank].append(step)
    return result


@pytest.mark.parametrize("seed", range(60))
def test_drawn_jobs_in_which_one_rank_stops(seed: int) -> None:
    """A rank leaves its program: whoever waits, it is the one that is named."""
    draw = random.Random(seed)
    job = programs(draw)
    rank = draw.choice([r for r, of in job.items() if of])
    place = draw.randrange(len(job[rank]))
    group = job[rank][place][0]
    number = sum(step[0] == group for step in job[rank][: place + 1])
    broken = job | {rank: job[rank][:place]}
    result = explain(simulate(broken), files=("x",))
    assert result.verdict.startswith(f"rank {rank} did not come to collective "), result.verdict
    assert f"rank {rank} waits meanwhile" not in " ".join(result.findings)
    if all(step[0] == group for step in job[rank][place:]):
        assert f"collective {number}, " in result.verdict
    whole = explain(simulate(job), files=("x",))
    assert "has ended on every rank" in whole.verdict


@pytest.mark.parametrize("seed", range(60))
def test_drawn_jobs_in_which_one_rank_calls_another_collective(seed: int) -> None:
    draw = random.Random(seed)
    job = programs(draw)
    rank = draw.choice([r for r, of in job.items() if of])
    place = draw.randrange(len(job[rank]))
    group, name, size = job[rank][place]
    other = draw.choice([operation for operation in OPERATIONS if operation != name])
    job[rank][place] = (group, other, size) if seed % 2 else (group, name, size + 8)
    number = sum(step[0] == group for step in job[rank][: place + 1])
    result = explain(simulate(job), files=("x",))
    assert result.verdict.startswith(f"collective {number} of {GROUPS[group][0]} ")
    assert f"rank {rank} calls {job[rank][place][1]}" in result.verdict
    assert f"at train.py:{place + 1}" in result.verdict.replace("/job/", "")


@pytest.mark.parametrize("seed", range(20))
def test_torchs_own_analysis_finds_the_same_rank(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one group, so that it needs no order between groups; it looks at the first collective that does not match."""
    builder = pytest.importorskip("torch.distributed.flight_recorder.components.builder")
    draw = random.Random(seed)
    steps = [("0", draw.choice(OPERATIONS), 8 * draw.randint(1, 9)) for _ in range(draw.randint(2, 9))]
    job = {rank: list(steps) for rank in range(4)}
    rank, place = draw.randrange(4), draw.randrange(len(steps))
    del job[rank][place:]
    dumps = simulate(job)
    details = {str(r): {"rank": r, "host_name": "x", **copy.deepcopy(item)} for r, item in dumps.items()}
    for detail in details.values():
        detail["pg_config"] = {"0": detail["pg_config"]["0"]}
        for entry in detail["entries"]:
            entry["process_group"] = tuple(entry["process_group"])
    options = argparse.Namespace(verbose=False, just_print_entries=False, allow_incomplete_ranks=False, mismatch_cap=10)
    collectives = builder.build_db(details, options, "2.10").collectives
    missing = [collective for collective in collectives if collective.missing_ranks]
    ours = explain(dumps, files=("x",)).verdict
    assert missing[0].missing_ranks == {rank}
    assert ours.startswith(f"rank {rank} did not come to collective {missing[0].collective_seq_id}, ")


def test_groups_in_unequal_order_are_a_deadlock_cycle() -> None:
    job = {0: [("1", "all_reduce", 8), ("0", "all_reduce", 8)], 2: [("0", "all_reduce", 8), ("1", "all_reduce", 8)]}
    result = explain(simulate({1: [("0", "all_reduce", 8)], 3: [("0", "all_reduce", 8)], **job}), files=("x",))
    assert any("in a different order" in line for line in result.findings)


def test_a_collective_that_all_ranks_joined_but_that_did_not_end() -> None:
    calls = [("0", 1, "all_reduce", 8, True), ("0", 2, "all_reduce", 8, False)]
    dumps = {rank: dump(calls, rank) for rank in range(3)}
    result = explain(dumps, files=("x",))
    assert result.verdict.startswith("all 3 ranks came to collective 2")
    assert "no dump of rank 3: it may have ended, or never written one" in result.findings


def test_collective_that_ended_on_some_ranks_only() -> None:
    """A late report is no cause where another collective was not come to."""
    calls = [("0", 1, "all_reduce", 8, True), ("0", 2, "all_reduce", 8, False)]
    late = [("0", 1, "all_reduce", 8, False)]
    dumps = {0: dump(calls, 0), 1: dump(late, 1), 2: dump(calls, 2), 3: dump(calls, 3)}
    assert explain(dumps, files=("x",)).verdict.startswith("rank 1 did not come to collective 2")
    alone = explain({rank: dump(late if rank == 1 else calls[:1], rank) for rank in range(4)}, files=("x",))
    assert "it has ended on the others but not on rank 1: look at that rank's GPU and links" in alone.findings


def test_dumps_of_different_length_are_compared_in_their_common_range() -> None:
    steps = [("0", number, "all_reduce", 8 * number, number < 9) for number in range(1, 10)]
    dumps = {0: dump(steps, 0), 1: dump(steps[6:], 1), 2: dump(steps[2:8], 2), 3: dump(steps, 3)}
    assert explain(dumps, files=("x",)).verdict.startswith("rank 2 did not come to collective 9")


@pytest.mark.parametrize(
    "data", [{"entries": 3, "version": "2"}, {"entries": [], "pg_config": 3}, {"entries": [3, {}], "version": 1}]
)
def test_malformed_dumps_give_no_traceback(tmp_path: Path, data: Any) -> None:
    path = tmp_path / "trace_0"
    for text in (pickle.dumps(data), json.dumps(data).encode()):
        path.write_bytes(text)
        with suppress(UserError):
            explain_files([path])
