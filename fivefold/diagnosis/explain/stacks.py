"""Explain stack dumps of a hang, of one or many ranks: who waits for others, who is elsewhere, and in which line.

Formats: Python's faulthandler (``stacks-rank3.txt`` of the trainer's watchdog) and py-spy's ``dump``. Only the main
thread of each process counts: it waits in a collective; or it waits for data, a checkpoint or a compilation, or runs,
and then the other ranks wait for it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from fivefold.diagnosis.explain.flight_recorder import _format_rank_ranges
from fivefold.diagnosis.explain.frames import Frame, find_user_line
from fivefold.results.explanation import Explanation, RankAt

FAULTHANDLER_THREAD = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-fA-F]+.*\(most recent call first\):")
FAULT_FRAME = re.compile(r'^\s+File "([^"]+)", line (\d{1,9}) in (.+)$')
SPY = re.compile(r"^Thread (?:0x)?[0-9A-Fa-f]+ \((?:idle|active)[^)]*\)(?:: \"([^\"]*)\")?")
SPY_FRAME = re.compile(r"^\s+(\S.*?) \(([^()]+?)(?::(\d{1,9}))?\)$")
PROCESS = re.compile(r"^Process (\d+):")
COLLECTIVES = re.compile(
    r"torch/distributed/(distributed_c10d|_functional_collectives|c10d_logger|nn/functional)\.py$"
    r"|fivefold/trainer/parallel/collectives\.py$|deepspeed/comm/|mpi4py|horovod"
)
COLLECTIVE_WRAPPERS = ("wrapper", "__exit__", "wait", "_fn", "log_wrapper", "reduce_scatter_fn", "all_gather_fn")
ZERO3 = re.compile(r"deepspeed/runtime/zero/(stage3|partition)|distributed/fsdp/|_composable/fsdp/", re.IGNORECASE)
WAITS = (  # what a thread waits for, by a frame's file and function
    ("waits for data", re.compile(
        r"utils/data/(dataloader|_utils)|multiprocessing/(queues|connection)\.py|/prefetch\.py$|datasets/.*iterable|streaming/"
    ), None),
    ("writes or reads a checkpoint", re.compile(
        r"distributed/checkpoint/|torch/serialization\.py|safetensors|/checkpoint(ing)?(/|\.py$)"
    ), None),
    ("compiles", re.compile(r"torch/(_dynamo|_inductor)/|triton/compiler"), re.compile(r"compile|codegen|wait")),
    ("waits for the device", re.compile(r"torch/(cuda|xpu)/"), re.compile(r"synchronize|wait")),
    ("waits for a lock", re.compile(r"threading\.py$"), re.compile(r"wait|acquire|join")),
)  # fmt: skip


class MainThread(NamedTuple):
    """The main thread of a process: what it does, in which line."""

    rank: str
    state: str
    line: str
    collective: str  # name of the collective it waits in, "" if none
    is_sharded: bool = False  # it gathers or reduces the parameters of ZeRO-3 or FSDP


def is_stacks(text: str) -> bool:
    """Return whether a text holds a stack dump."""
    return any(FAULTHANDLER_THREAD.match(line) or SPY.match(line) for line in text.splitlines())


def explain(texts: Mapping[str, str], *, files: tuple[str, ...]) -> Explanation:
    """Explain where each rank of ``texts`` hangs.

    ``texts``: by rank, or by another name of the process.
    """
    mains = []
    for name, text in texts.items():
        processes = list(_parse_processes(text))
        for process, threads in processes:
            label = (
                name
                if len(processes) == 1
                else f"{name}, process {process}"
                if len(texts) > 1
                else f"process {process}"
            )
            mains.append(_find_main_thread(label, threads))
    ranks = tuple(RankAt(rank=main.rank, state=main.state, line=main.line) for main in mains)
    return Explanation(
        kind="stacks", files=files, verdict=_describe_threads(mains), findings=tuple(_list_findings(mains)), ranks=ranks
    )


def _parse_processes(text: str) -> Iterator[tuple[str, list[tuple[str, tuple[Frame, ...]]]]]:
    """Yield the threads of each process: name and frames."""
    process = ""
    threads = list[tuple[str, tuple[Frame, ...]]]()
    stack = list[Frame]()
    name = ""
    inside = False

    def close() -> None:
        if inside:
            threads.append((name, tuple(stack)))

    for line in text.splitlines():
        if started := PROCESS.match(line):
            close()
            if threads:
                yield process, threads
            process, threads, stack, inside = started[1], [], [], False
        elif FAULTHANDLER_THREAD.match(line) or (spied := SPY.match(line)):
            close()
            spied = SPY.match(line)
            stack, inside, name = [], True, (spied[1] or "") if spied else ""
        elif inside and (match := FAULT_FRAME.match(line)):
            stack.append(Frame(match[1], int(match[2]), match[3].strip()))
        elif inside and (match := SPY_FRAME.match(line)):
            stack.append(Frame(match[2], int(match[3] or 0), match[1]))
    close()
    if threads:
        yield process, threads


def _find_main_thread(rank: str, threads: Sequence[tuple[str, tuple[Frame, ...]]]) -> MainThread:
    """Return the main thread: the one of that name, else the last one that a module began."""
    main_stacks = [stack for name, stack in threads if name == "MainThread"]
    module_stacks = [stack for _, stack in threads if stack and stack[-1].function == "<module>"]
    stack = (main_stacks or module_stacks or [threads[-1][1]])[-1]
    collective = next((frame.function for frame in reversed(_find_collective_frames(stack))), "")
    line = find_user_line(stack)
    is_sharded = any(ZERO3.search(frame.file) for frame in stack)
    if collective:
        return MainThread(rank, f"waits in {collective}", line, collective, is_sharded)
    for state, file, function in WAITS:
        if any(
            file.search(frame.file) and (function is None or function.search(frame.function)) for frame in stack[:12]
        ):
            return MainThread(rank, state, line, "", is_sharded)
    backward = any(frame.function in ("_engine_run_backward", "backward") for frame in stack)
    return MainThread(rank, "runs the backward" if backward else "runs", line, "")


def _find_collective_frames(stack: Sequence[Frame]) -> list[Frame]:
    """Return the frames of torch.distributed at the inner end, without wrappers."""
    collective_frames = [frame for frame in stack[:10] if COLLECTIVES.search(frame.file)]
    return [frame for frame in collective_frames if frame.function not in COLLECTIVE_WRAPPERS] or collective_frames


def _describe_threads(mains: Sequence[MainThread]) -> str:
    """Describe which ranks wait, and for which others; of several others, where the first one is."""
    waits = [main for main in mains if main.collective]
    elsewhere = [main for main in mains if not main.collective]
    line_text = f" at {mains[0].line}" if mains and mains[0].line else ""
    if len(mains) == 1:
        return f"{_format_ranks([mains[0].rank])} {mains[0].state}{line_text}"
    if waits and elsewhere:
        first = elsewhere[0]
        where = f" at {first.line}" if first.line else ""
        subject = "it" if len(elsewhere) == 1 else _format_ranks([first.rank])
        return (
            f"{_format_ranks(main.rank for main in elsewhere)} did not come: {subject} {first.state}{where}, while "
            f"{_format_ranks(main.rank for main in waits)} {'waits' if len(waits) == 1 else 'wait'} in "
            f"{waits[0].collective}{f' at {waits[0].line}' if waits[0].line else ''}"
        )
    if waits and len({main.collective for main in waits}) > 1:
        return f"the ranks wait in different collectives: {_describe_places(waits)}"
    if waits and len({main.line for main in waits}) > 1:
        return f"the ranks wait in {waits[0].collective}, called from different lines: {_describe_places(waits)}"
    if waits:
        return (
            f"all {len(waits)} ranks wait in {waits[0].collective}{line_text}: "
            "the calls agree, the messages do not arrive"
        )
    return f"no rank waits in a collective: {_describe_places(mains)}"


def _describe_places(mains: Sequence[MainThread]) -> str:
    by_place: dict[str, list[str]] = defaultdict(list)
    for main in mains:
        by_place[f"{main.state}{f' at {main.line}' if main.line else ''}"].append(main.rank)
    return "; ".join(
        f"{_format_ranks(ranks)} {state_and_line if len(ranks) == 1 else _pluralize(state_and_line)}"
        for state_and_line, ranks in sorted(by_place.items(), key=lambda item: len(item[1]))
    )


def _pluralize(state: str) -> str:
    """Return a state of several ranks: "wait in …" of "waits in …"."""
    verb, space, rest = state.partition(" ")
    return f"{verb.removesuffix('s')}{space}{rest}"


def _list_findings(mains: Sequence[MainThread]) -> Iterator[str]:
    """Yield what the main threads of all ranks suggest: different collectives, sharded parameters, missing dumps."""
    waits = [main for main in mains if main.collective]
    if waits and len({(main.collective, main.line) for main in waits}) > 1 and len(waits) == len(mains):
        yield "a branch that not all ranks take, or another order of collectives; a flight recorder tells which"
    if any(main.is_sharded for main in mains):
        yield (
            "parameters are sharded, so every rank has to run the same modules as often: experts or branches that "
            "some ranks skip (deepspeed.utils.set_z3_leaf_modules), different numbers of batches, generate() without "
            "synced_gpus"
        )
    if len(mains) == 1:
        yield "the stacks of one process do not tell which rank did not come: dump those of every rank"
    if waits and len(waits) == len(mains) > 1 and len({(main.collective, main.line) for main in waits}) == 1:
        yield "look for a rank whose dump is missing, then at the network: NCCL_DEBUG=INFO, and the flight recorder"


def _format_ranks(ranks: object) -> str:
    names = [str(rank) for rank in ranks]  # type: ignore[attr-defined]
    return _format_rank_ranges(map(int, names)) if all(rank.isdecimal() for rank in names) else ", ".join(names)
