"""Twenty public reports of trainers, by their figures: what ``explain`` says of each.

The first ten are listed in docs/how-to/explain.md; those whose cause was settled in docs/explanation/diagnosis.md.

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
        "1 of 2 ranks wait for a later collective, rank 1 for allgather_base 126 of 378,702,080 elements",
    ),
    "pytorch/pytorch#143536": (
        [
            wait(1, 2109, "_ALLGATHER_BASE", 262711296, 525422592, seconds=1800),
            wait(0, 2109, "_ALLGATHER_BASE", 40960, 81920, seconds=1800),
        ],
        "ranks call different collectives: rank 0 waited for allgather_base 2109 of 40,960 elements, rank 1 for "
        "allgather_base 2109 of 262,711,296 elements",
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


PROCESSES = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {}. GPU 0 has a total capacity of {} of which {} is "
    "free. {} Of the allocated memory {} is allocated by PyTorch, and {} is reserved by PyTorch but unallocated."
)


def list_processes(**sizes: str) -> str:
    return " ".join(f"Process {name[1:]} has {size} memory in use." for name, size in sizes.items())


def spy(*frames: str) -> str:
    return "\n".join(['Thread 33550 (active): "MainThread"', *(f"    {frame}" for frame in frames)])


FULL_DEVICE = OLD_MESSAGE.format("2.00 GiB", "79.15 GiB", "77.13 GiB", "307.31 MiB", "78.21 GiB")
# report: its log, or the stacks of its ranks, and what must be in the verdict and findings
SETTLED: dict[str, tuple[list[str], tuple[str, ...]]] = {
    "huggingface/trl#4237": (
        [
            PROCESSES.format(
                "2.11 GiB",
                "14.74 GiB",
                "1.65 GiB",
                list_processes(p19066="6.79 GiB", p19069="514.00 MiB", p19060="4.93 GiB", p19063="894.00 MiB"),
                "4.50 GiB",
                "2.14 GiB",
            )
        ],
        ("fragmentation: 2.14 GiB", "other processes hold 6.30 GiB"),
    ),
    "Lightricks/LTX-2#57": (
        [
            PROCESSES.format(
                "30.00 MiB",
                "79.10 GiB",
                "15.19 MiB",
                list_processes(p16746="20.84 GiB", p16747="20.33 GiB", p16748="18.94 GiB", p16749="18.94 GiB"),
                "19.60 GiB",
                "225.59 MiB",
            )
        ],
        ("other processes hold 58.72 GiB", "start one process per GPU"),
    ),
    "verl-project/verl#302": (
        [
            "(main_task pid=1748945) Traceback (most recent call last):",
            '(main_task pid=1748945)   File "site-packages/vllm/device_allocator/cumem.py", line 75, in create_and_map',
            "(main_task pid=1748945) RuntimeError: CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:62",
        ],
        ("cumem.py:75 create_and_map", "lower its share (gpu_memory_utilization"),
    ),
    "karpathy/nanoGPT#236": (
        [
            "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB ",
            "GPU 0; 8.00 GiB total capacity; 7.20 GiB already allocated; 0 bytes free; 7.30 GiB reserved in total",
        ],
        ("tensors hold 7.20 GiB of 8.00 GiB", "tensors fill it: 20.00 MiB more are needed"),
    ),
    "YJiangcm/LTE#3": ([f"{FULL_DEVICE}{FULL_DEVICE}"], ("tensors fill it: 1.70 GiB more are needed",)),
    "ragntune/code-llama-finetune#3": (
        [PROCESSES.format("64.00 GiB", "14.75 GiB", "5.48 GiB", "", "8.79 GiB", "351.89 MiB")],
        ("64.00 GiB at once is more than the device has", "smaller micro-batch"),
    ),
    "hiyouga/LlamaFactory#2424": (
        [
            "Running tokenizer on dataset:   9%|# | 280000/2969526 [29:55<4:48:08, 155.57 examples/s]",
            *(wait(rank, 2, "ALLREDUCE", 1, 1, seconds=1800) for rank in (2, 1, 3)),
        ],
        ("no line of rank 0", "'Running tokenizer on dataset': the ranks wait", "raise the timeout"),
    ),
    "CarperAI/trlx#373": (
        [
            "failure was: [Rank 0] Watchdog caught collective operation timeout: ",
            "WorkNCCL(SeqNum=2059, OpType=ALLGATHER, Timeout(ms)=1800000) ran for 1801398 ",
        ],
        ("rank 0 waited 1800 s for allgather 2059", "flight recorders tell which rank never came"),
    ),
    "deepspeedai/DeepSpeed#7461": (
        [
            spy("all_reduce (deepspeed/comm/torch.py:170)", "log_wrapper (deepspeed/comm/comm.py:118)"),
            spy(
                "reduce_scatter_tensor (deepspeed/comm/torch.py:290)",
                "reduce_scatter_fn (deepspeed/comm/comm.py:270)",
                "__avg_scatter_grads (deepspeed/runtime/zero/stage3.py:1380)",
            ),
        ],
        ("rank 0 waits in all_reduce", "rank 1 waits in reduce_scatter_tensor", "set_z3_leaf_modules"),
    ),
    "deepspeedai/DeepSpeed#860": (
        [
            "Thread 0x00007f57caf71740 (most recent call first):\n"
            '  File "/site-packages/torch/cuda/streams.py", line 95 in synchronize\n'
            '  File "/DeepSpeed/deepspeed/runtime/zero/stage3.py", line 406 in fetch_sub_module'
        ],
        ("waits for the device", "generate() without synced_gpus"),
    ),
}


@pytest.mark.parametrize("report", SETTLED)
def test_a_public_report_with_a_known_cause_is_explained(report: str, tmp_path: Path) -> None:
    log, expected = SETTLED[report]
    if log[0].startswith("Thread "):
        for rank, stack in enumerate(log):
            (tmp_path / f"stacks-rank{rank}.txt").write_text(f"{stack}\n", encoding="utf-8")
    else:
        (tmp_path / "log.txt").write_text("\n".join(log) + "\n", encoding="utf-8")
    (found,) = explain([tmp_path])
    text = "\n".join((found.verdict, *found.findings))
    assert [words for words in expected if words not in text] == [], text
    if found.memory is not None and found.memory.capacity_bytes is not None:
        assert sum(found.memory.parts.values()) < 1.01 * found.memory.capacity_bytes  # nothing counts twice


@pytest.mark.parametrize("report", REPORTS)
def test_a_public_report_is_explained(report: str, tmp_path: Path) -> None:
    log, expected = REPORTS[report]
    path = tmp_path / "log.txt"
    path.write_text("\n".join(log) + "\n")
    (found,) = explain([path])
    assert expected in (found.verdict if expected in found.verdict else found.findings[0])
    if found.memory is not None:
        assert sum(found.memory.parts.values()) < 2**40  # no nonsense of the driver


CHANGES = {
    "huggingface/trl#4237": "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
    "Lightricks/LTX-2#57": "end them, or use another",
    "verl-project/verl#302": "lower its share (gpu_memory_utilization, mem_fraction_static)",
    "ragntune/code-llama-finetune#3": "use a smaller micro-batch",
    "YJiangcm/LTE#3": "",  # tensors fill it: --against finds the change
    "CarperAI/trlx#373": "",
}


@pytest.mark.parametrize("report", CHANGES)
def test_the_advised_change_is_a_field_of_the_explanation(report: str, tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    path.write_text("\n".join(SETTLED[report][0]) + "\n", encoding="utf-8")
    (found,) = explain([path])
    assert found.change.startswith(CHANGES[report])
    assert bool(found.change) == bool(CHANGES[report])
    assert any(found.change in finding for finding in found.findings)


def test_ranks_in_one_collective_are_not_reported_missing(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    path.write_text("\n".join(wait(rank, 5, "ALLREDUCE", 8) for rank in range(4)))
    (found,) = explain([path])
    assert "all ranks from 0 to 3 wait in it" in found.findings[0]
    assert "this log cannot tell which" in found.findings[0]


def test_the_documentation_lists_the_public_reports() -> None:
    docs = Path(__file__).parents[3] / "docs"
    for page, reports in {"how-to/explain.md": [*REPORTS], "explanation/diagnosis.md": [*SETTLED]}.items():
        text = (docs / page).read_text(encoding="utf-8")
        assert [report for report in reports if report not in text] == []
