"""Reads the lines of NCCL's watchdog in a log: which collective each rank waited for, and who stands behind.

A rank that waits for an earlier collective than the others is behind; one that says nothing has ended, or is not there.
Text of PyTorch 2.x: c10d's ProcessGroupNCCL.cpp, ``WorkNCCL(SeqNum=…, OpType=…, NumelIn=…, …, Timeout(ms)=…)``.
"""

from __future__ import annotations

import re

from fivefold.results.explanation import Explanation, RankAt

LINE = re.compile(
    r"\[Rank (\d{1,6})\].{0,200}?Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=(\d{1,18}), "
    r"OpType=(\w{1,64})(?:, NumelIn=(\d{1,18}))?[^)\n]{0,200}Timeout\(ms\)=(\d{1,18})", re.IGNORECASE
)  # fmt: skip
NEXT = ("flight recorders tell which rank never came: TORCH_NCCL_TRACE_BUFFER_SIZE=2000 TORCH_NCCL_DUMP_ON_TIMEOUT=1, "
        "then fivefold explain /tmp/nccl_trace_rank_*")  # fmt: skip


def explain(text: str, *, files: tuple[str, ...]) -> Explanation | None:
    """Who waited for what, by the first line of each rank; None if nobody's wait has ended."""
    first: dict[int, tuple[int, str, int]] = {}
    for rank, sequence, operation, numel, milliseconds in LINE.findall(text):
        said = f"{operation.lower().strip('_')} {sequence}" + (f" of {int(numel):,} numbers" if numel else "")
        first.setdefault(int(rank), (int(sequence), said, int(milliseconds)))
    if not first:
        return None
    behind = min(first, key=lambda rank: (first[rank][0], rank))
    least, said, waited = first[behind]
    verdict = f"rank {behind} waited {waited / 1000:g} s for {said}, and not all of its group came"
    ahead = sum(sequence > least for sequence, _, _ in first.values())
    findings = [f"{ahead} of {len(first)} ranks wait for a later one, if theirs is the same group"] if ahead else []
    ranks = tuple(RankAt(rank=str(rank), state=first[rank][1]) for rank in sorted(first))
    return Explanation(kind="timeout", files=files, verdict=verdict, findings=(*findings, NEXT), ranks=ranks)
