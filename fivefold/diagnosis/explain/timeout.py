"""Explain lines of NCCL's watchdog in a log: which collective each rank waited for, and which rank is behind.

A rank that waits for an earlier collective than the others is behind; a rank without a line has ended or is missing.
Text of PyTorch 2.x: c10d's ProcessGroupNCCL.cpp, ``WorkNCCL(SeqNum=…, OpType=…, NumelIn=…, …, Timeout(ms)=…)``.
"""

from __future__ import annotations

import re

from fivefold.results.explanation import Explanation, RankAt

LINE = re.compile(
    r"\[Rank (\d{1,6})\].{0,200}?Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=(\d{1,18}), "
    r"OpType=(\w{1,64})(?:, NumelIn=(\d{1,18}))?[^)\n]{0,200}Timeout\(ms\)=(\d{1,18})",
    re.IGNORECASE,
)
NEXT = (
    "flight recorders tell which rank never came: TORCH_NCCL_TRACE_BUFFER_SIZE=2000 TORCH_NCCL_DUMP_ON_TIMEOUT=1, "
    "then fivefold explain /tmp/nccl_trace_rank_*"
)


def explain(text: str, *, files: tuple[str, ...]) -> Explanation | None:
    """Explain who waited for what, by the first line of each rank; None if the log has no timeout."""
    first_by_rank: dict[int, tuple[int, str, int]] = {}
    for rank, sequence, operation, numel, milliseconds in LINE.findall(text):
        collective = f"{operation.lower().strip('_')} {sequence}" + (f" of {int(numel):,} numbers" if numel else "")
        first_by_rank.setdefault(int(rank), (int(sequence), collective, int(milliseconds)))
    if not first_by_rank:
        return None
    last_rank = min(first_by_rank, key=lambda rank: (first_by_rank[rank][0], rank))
    least_sequence, collective, waited = first_by_rank[last_rank]
    verdict = f"rank {last_rank} waited {waited / 1000:g} s for {collective}, and not all of its group came"
    ahead_count = sum(sequence > least_sequence for sequence, _, _ in first_by_rank.values())
    findings = (
        [f"{ahead_count} of {len(first_by_rank)} ranks wait for a later one, if theirs is the same group"]
        if ahead_count
        else []
    )
    ranks = tuple(RankAt(rank=str(rank), state=first_by_rank[rank][1]) for rank in sorted(first_by_rank))
    return Explanation(kind="timeout", files=files, verdict=verdict, findings=(*findings, NEXT), ranks=ranks)
