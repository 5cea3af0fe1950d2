"""Explain lines of NCCL's watchdog in a log: which collective each rank waited for, and which rank is behind.

A rank that waits for an earlier collective than the others is behind; a rank without a line has ended or is missing.
Ranks that wait in the same place, but for different operations or sizes, call different collectives. Sizes may differ
from rank to rank in one group only in an all-to-all, so different groups are named as the other possibility.
Text of PyTorch 2.x: c10d's ProcessGroupNCCL.cpp, ``WorkNCCL(SeqNum=…, OpType=…, NumelIn=…, …, Timeout(ms)=…)``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from fivefold.results.explanation import Explanation, RankAt
from fivefold.spelling import join_names

LINE = re.compile(
    r"\[Rank (\d{1,6})\].{0,200}?Watchdog caught collective operation timeout:\s{1,3}WorkNCCL"
    r"\(SeqNum=(\d{1,18}),\s{1,3}OpType=(\w{1,64})(?:,\s{1,3}NumelIn=(\d{1,18}))?[^)\n]{0,200}Timeout\(ms\)=(\d{1,18})",
    re.IGNORECASE,
)
PREPARATION = re.compile(  # progress bars of what one rank does before training while the others wait
    r"((?:Running tokenizer|Tokenizing|Map|Filter|Generating \w{1,32} split|Grouping texts|Packing)[^:|\n]{0,60}?):?"
    r"\s{1,8}\d{1,3}%",
    re.IGNORECASE,
)
NEXT_STEPS = (
    "flight recorders tell which rank never came: TORCH_NCCL_TRACE_BUFFER_SIZE=2000 TORCH_NCCL_DUMP_ON_TIMEOUT=1, "
    "then fivefold explain /tmp/nccl_trace_rank_*"
)
PREPARATION_ADVICE = "prepare it before the run, or raise the timeout (ddp_timeout, init_process_group(timeout=…))"
MAX_NAMED = 8  # ranks that a sentence names


class Wait(NamedTuple):
    """A collective for which a rank waited; ``numel``: elements of its input, "" if the line has none."""

    sequence: int
    operation: str
    numel: str
    seconds: float

    def describe(self) -> str:
        """Return the collective with its sequence number and size."""
        return f"{self.operation} {self.sequence}" + (f" of {int(self.numel):,} elements" if self.numel else "")


def explain(text: str, *, files: tuple[str, ...]) -> Explanation | None:
    """Explain who waited for what, by the first line of each rank; None if the log has no timeout."""
    waits: dict[int, Wait] = {}
    for rank, sequence, operation, numel, milliseconds in LINE.findall(text):
        wait = Wait(int(sequence), operation.lower().strip("_"), numel, int(milliseconds) / 1000)
        waits.setdefault(int(rank), wait)
    if not waits:
        return None
    lagging = min(waits, key=lambda rank: (waits[rank].sequence, rank))
    first = waits[lagging]
    verdict = f"rank {lagging} waited {first.seconds:g} s for {first.describe()}, which did not finish"
    other = _find_other(waits, first)
    if other is not None:
        verdict = (
            f"ranks call different collectives: rank {lagging} waited for {first.describe()}, rank {other} for "
            f"{waits[other].describe()}"
        )
    ranks = tuple(RankAt(rank=str(rank), state=waits[rank].describe()) for rank in sorted(waits))
    preparation = _find_preparation(text)
    prepares = (f"{preparation}; {PREPARATION_ADVICE}",) if preparation else ()
    return Explanation(
        kind="timeout",
        files=files,
        verdict=verdict,
        findings=(*_list_findings(waits, first, is_other=other is not None), *prepares, NEXT_STEPS),
        change=PREPARATION_ADVICE if preparation else "",
        ranks=ranks,
    )


def _find_other(waits: Mapping[int, Wait], first: Wait) -> int | None:
    """Return a rank that waits in the place of ``first`` for another operation or size; None if there is none."""
    for rank in sorted(waits):
        wait = waits[rank]
        is_other_size = wait.numel != first.numel and first.operation != "alltoall"
        if wait.sequence == first.sequence and (wait.operation != first.operation or is_other_size):
            return rank
    return None


def _find_preparation(text: str) -> str:
    """Return what a rank was doing before training when the first timeout came, by its progress bar; "" if nothing."""
    timeout = LINE.search(text)
    bars = PREPARATION.findall(text, 0, timeout.start() + 1) if timeout else []
    if not bars:
        return ""
    return f"the progress bar before it is {bars[-1].strip()!r}: the ranks wait for the one that prepares the data"


def _list_findings(waits: Mapping[int, Wait], first: Wait, *, is_other: bool) -> Iterator[str]:
    """Yield what the lines of all ranks say together."""
    if is_other:
        yield (
            "a branch that not all ranks take, such as saving or logging on one rank, or sizes that depend on a rank's "
            "data; or the two are of different process groups"
        )
    ahead = [rank for rank, wait in waits.items() if wait.sequence > first.sequence]
    if ahead:
        lagging = next(rank for rank, wait in waits.items() if wait is first)
        yield (
            f"{len(ahead)} of {len(waits)} ranks wait for a later collective, rank {ahead[0]} for "
            f"{waits[ahead[0]].describe()}: if it is of the same process group, they have left "
            f"{first.operation} {first.sequence} without rank {lagging}"
        )
    missing = sorted({*range(max(waits))} - {*waits})
    if missing and not is_other and not ahead:
        names = join_names([str(rank) for rank in missing[:MAX_NAMED]], "and")
        names += f" and {len(missing) - MAX_NAMED} more" if len(missing) > MAX_NAMED else ""
        plural = "s" if len(missing) > 1 else ""
        yield f"the log has no line of rank{plural} {names}, which may not have come; look there first"
    if not missing and not is_other and not ahead and len(waits) > 1:
        yield (
            f"all ranks from 0 to {max(waits)} wait in it: a rank above these did not come, or all came and it did not "
            "finish (the network, a GPU, or earlier work on the stream); this log cannot tell which"
        )
