"""Lines of NCCL's watchdog: who is behind, and what a log without them is."""

from __future__ import annotations

from pathlib import Path

from fivefold.diagnosis.explain import explain as explain_files
from fivefold.diagnosis.explain.timeout import explain

LINE = (
    "[rank{0}]:[E1120 10:21:33.1 ProcessGroupNCCL.cpp:616] [Rank {0}] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum={1}, OpType={2}, NumelIn=7340032, NumelOut=58720256, Timeout(ms)=600000) ran for 600012 "
    "milliseconds before timing out.\n"
)


def test_the_explanation_names_the_lagging_rank(tmp_path: Path) -> None:
    ranks = [(5, 1790, "ALLREDUCE"), (2, 1789, "_ALLGATHER_BASE"), (5, 1791, "ALLREDUCE"), (7, 1790, "ALLREDUCE")]
    path = tmp_path / "log.txt"
    path.write_text("".join(LINE.format(*rank) for rank in ranks))
    (result,) = explain_files([path])
    assert result.verdict == ("rank 2 waited 600 s for allgather_base 1789 of 7,340,032 elements, which did not finish")
    assert (
        result.findings[0]
        == "2 of 3 ranks wait for a later collective, rank 5 for allreduce 1790 of 7,340,032 elements: if it is of the "
        "same process group, they have left allgather_base 1789 without rank 2"
    )
    assert [(rank.rank, rank.state.split()[1]) for rank in result.ranks] == [
        ("2", "1789"),
        ("5", "1790"),
        ("7", "1790"),
    ]


def test_a_log_without_timeout_messages_gives_no_explanation() -> None:
    assert explain("[Rank 5] Watchdog started\n", files=("log",)) is None
