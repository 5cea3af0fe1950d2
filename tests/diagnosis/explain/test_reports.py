"""Ten public reports of large trainers, by their figures: what ``explain`` says of each. docs/how-to/explain.md has it.

The messages are PyTorch's own, filled with the figures of the report.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from fivefold.diagnosis.explain import explain

OLD_MESSAGE = (
    "RuntimeError: CUDA out of memory. Tried to allocate {} (GPU 0; {} total capacity; {} already allocated; {} free; "
    "{} reserved in total by PyTorch)"
)
MESSAGE = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {}. GPU {} has a total capacity of {} of which {} "
    "is free.{} Including non-PyTorch memory, this process has {} memory in use. Of the allocated memory {} is "
    "allocated by PyTorch, and {} is reserved by PyTorch but unallocated."
)
OTHER_PROCESS = " Process 1990324 has 3.23 GiB memory in use."


def wait(rank: int, sequence: int, operation: str, *sizes: int, seconds: int = 600) -> str:
    numel = "".join(f", {name}={size}" for name, size in zip(("NumelIn", "NumelOut"), sizes, strict=False))
    work = f"WorkNCCL(SeqNum={sequence}, OpType={operation}{numel}, Timeout(ms)={seconds}000)"
    return (
        f"[rank{rank}]:[E ProcessGroupNCCL.cpp:607] [Rank {rank}] Watchdog caught collective operation timeout: {work} "
        f"ran for {seconds}060 milliseconds before timing out."
    )


# report: lines of its log, and what must be in the verdict or the first finding
REPORTS: dict[str, tuple[list[str], str]] = {
    "NVIDIA/Megatron-LM#92": (
        [
            "Traceback (most recent call last):",
            '  File "/work/megatron/model/gpt_model.py", line 60, in post_language_model_processing',
            "    loss = mpu.vocab_parallel_cross_entropy(output.float(), labels)",
            OLD_MESSAGE.format("9.33 GiB", "10.76 GiB", "5.17 GiB", "4.48 GiB", "5.28 GiB"),
        ],
        "tensors fill it: 4.85 GiB more are needed",
    ),
    "THUDM/slime#1951": (
        [
            MESSAGE.format(
                "29.39 GiB", 0, "139.81 GiB", "19.41 GiB", OTHER_PROCESS, "117.07 GiB", "92.06 GiB", "20.79 GiB"
            )
        ],
        "fragmentation: 20.79 GiB",
    ),
    "axolotl-ai-cloud/axolotl#998": (
        [MESSAGE.format("20.00 MiB", 1, "24.00 GiB", "0 bytes", "", "17179869184.00 GiB", "23.01 GiB", "121.23 MiB")],
        "tensors fill it: 20.00 MiB more are needed",
    ),
    "hiyouga/LlamaFactory#7396": (
        [wait(rank, 1580, "ALLREDUCE", 466119168, 466119168) for rank in (0, 4, 3, 2)],
        "the log has no line of rank 1, which may not have come",
    ),
    "huggingface/accelerate#3250": (
        [
            wait(0, 122, "_REDUCE_SCATTER_BASE", 106343680, 53171840),
            wait(1, 126, "_ALLGATHER_BASE", 378702080, 757404160),
        ],
        "1 of 2 ranks wait for a later one, and for another operation",
    ),
    "pytorch/pytorch#143536": (
        [
            wait(1, 2109, "_ALLGATHER_BASE", 262711296, 525422592, seconds=1800),
            wait(0, 2109, "_ALLGATHER_BASE", 40960, 81920, seconds=1800),
        ],
        "ranks call different collectives: rank 0 waited for allgather_base 2109 of 40,960 numbers, rank 1 for "
        "allgather_base 2109 of 262,711,296 numbers",
    ),
    "verl-project/verl#1158": (
        [wait(rank, 4486, "ALLTOALL", 46684160, 46684160) for rank in (7, 3, 6)],
        "the log has no line of ranks 0, 1, 2, 4 and 5",
    ),
    "huggingface/accelerate#2375": (
        [wait(rank, 167, "ALLREDUCE", 1, 1) for rank in (5, 4, 1, 6, 7, 3)],
        "the log has no line of ranks 0 and 2",
    ),
    "pytorch/pytorch#118369": (
        [wait(0, 96117, "ALLREDUCE", seconds=1800), wait(7, 64088, "ALLREDUCE", seconds=1800)],
        "rank 7 waited 1800 s for allreduce 64088, which did not finish",
    ),
    "shikras/shikra#41": (
        [wait(0, 2778, "_ALLGATHER_BASE", seconds=1800)],
        "rank 0 waited 1800 s for allgather_base 2778, which did not finish",
    ),
}


@pytest.mark.parametrize("report", REPORTS)
def test_a_public_report_is_explained(report: str, tmp_path: Path) -> None:
    log, expected = REPORTS[report]
    path = tmp_path / "log.txt"
    path.write_text("\n".join(log) + "\n")
    (found,) = explain([path])
    assert expected in (found.verdict if expected in found.verdict else found.findings[0])
    if found.memory is not None:
        assert sum(found.memory.parts.values()) < 2**40  # no nonsense of the driver


def test_ranks_in_one_collective_are_not_reported_missing(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    path.write_text("\n".join(wait(rank, 5, "ALLREDUCE", 8) for rank in range(4)))
    (found,) = explain([path])
    assert "all ranks from 0 to 3 wait in it" in found.findings[0]
    assert "this log cannot tell which" in found.findings[0]


def test_the_documentation_lists_them() -> None:
    page = (Path(__file__).parents[3] / "docs/how-to/explain.md").read_text(encoding="utf-8")
    assert [report for report in REPORTS if report not in page] == []
