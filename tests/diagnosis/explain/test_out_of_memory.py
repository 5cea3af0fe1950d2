"""Messages as people have posted them, of every form that PyTorch has given them."""

from __future__ import annotations

import pytest

from fivefold.diagnosis.explain.out_of_memory import explain
from fivefold.results.explanation import Explanation
from fivefold.units import GIB, MIB

# source: message, then wanted, tensors, reserved, free, capacity in bytes, and a word of the first finding
POSTED = {
    "pytorch/examples#621, 1.2": (
        "RuntimeError: CUDA out of memory. Tried to allocate 26.00 MiB (GPU 0; 1024.00 MiB total capacity; 435.61 MiB "
        "already allocated; 24.17 MiB free; 26.39 MiB cached)",
        26 * MIB, 435.61 * MIB, 462 * MIB, 24.17 * MIB, GIB, "fragmentation",
    ),
    "pytorch/pytorch#35901, 1.4": (
        "CUDA out of memory. Tried to allocate 10.84 GiB (GPU 0; 23.65 GiB total capacity; 1.06 GiB already allocated; "
        "10.26 GiB free; 12.53 GiB reserved in total by PyTorch)",
        10.84 * GIB, 1.06 * GIB, 12.53 * GIB, 10.26 * GIB, 23.65 * GIB, "fragmentation",
    ),
    "microsoft/unilm#137, 1.5": (
        "RuntimeError: CUDA out of memory. Tried to allocate 128.00 MiB (GPU 0; 11.17 GiB total capacity; 10.85 GiB "
        "already allocated; 24.81 MiB free; 10.86 GiB reserved in total by PyTorch)",
        128 * MIB, 10.85 * GIB, 10.86 * GIB, 24.81 * MIB, 11.17 * GIB, "tensors fill it",
    ),
    "carolchenyx/MGFN#35, 2.1": (
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.70 GiB. GPU 0 has a total capacty of "
        "6.00 "
        "GiB of which 0 bytes is free. Of the allocated memory 2.93 GiB is allocated by PyTorch, and 2.30 GiB is "
        "reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting",
        1.7 * GIB, 2.93 * GIB, 5.23 * GIB, 0, 6 * GIB, "fragmentation",
    ),
    "pytorch/pytorch#16417, 2.2": (
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 22.00 MiB. GPU 0 has a total capacity of "
        "23.65 GiB of which 11.06 MiB is free. Including non-PyTorch memory, this process has 23.60 GiB memory in use. "
        "Of the allocated memory 12.90 GiB is allocated by PyTorch, and 1.00 MiB is reserved by "
        "PyTorch but unallocated.",
        22 * MIB, 12.9 * GIB, 12.9 * GIB + MIB, 11.06 * MIB, 23.65 * GIB, "of this process are in no tensor",
    ),
    "levihsu/OOTDiffusion#167": (
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacty of "
        "4.00 "
        "GiB of which 2.80 GiB is free. Of the allocated memory 0 bytes is allocated by PyTorch, and 0 bytes is "
        "reserved "
        "by PyTorch but unallocated.",
        2 * GIB, 0, 0, 2.8 * GIB, 4 * GIB, "which is enough",
    ),
    "wxian3/NeuroLens#2": (
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 55.57 GiB. GPU 0 has a total capacty of "
        "12.00 GiB of which 9.02 GiB is free. Of the allocated memory 984.52 MiB is allocated by PyTorch, and 463.48 "
        "MiB "
        "is reserved by PyTorch but unallocated.",
        55.57 * GIB, 984.52 * MIB, 1448 * MIB, 9.02 * GIB, 12 * GIB, "more than the device has",
    ),
}  # fmt: skip


def read(text: str) -> Explanation:
    result = explain(text, files=("log",))
    assert result is not None
    assert result.memory is not None
    return result


@pytest.mark.parametrize("source", POSTED)
def test_published_reports_are_explained(source: str) -> None:
    message, wanted, held, reserved, free, capacity, word = POSTED[source]
    result = read(message)
    memory = result.memory
    assert memory is not None
    assert (memory.requested_bytes, memory.held_bytes) == (round(wanted), round(held))
    assert memory.reserved_bytes == pytest.approx(reserved, abs=2)
    assert memory.free_bytes == round(free)
    assert memory.capacity_bytes == round(capacity)
    assert word in result.findings[0]
    assert sum(memory.parts.values()) == pytest.approx(capacity, rel=0.01), "who holds what adds up to the device"


def test_the_explanation_names_the_logits_of_the_loss() -> None:
    text = """Traceback (most recent call last):
  File "/app/train.py", line 212, in train_step
    loss = model(input_ids, labels=labels).loss
  File "/site-packages/transformers/loss/loss_utils.py", line 47, in ForCausalLMLoss
    logits = logits.float()
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 7.83 GiB. GPU 0 has a total capacity of 79.19 GiB of \
which 5.21 GiB is free. Including non-PyTorch memory, this process has 73.97 GiB memory in use. Of the allocated \
memory 70.15 GiB is allocated by PyTorch, and 2.02 GiB is reserved by PyTorch but unallocated.
"""
    result = explain(text, files=("log.txt",))
    assert result is not None
    assert result.findings[0].startswith("it is in the loss: logits take")
    assert result.change.startswith("a loss that is fused or computed in chunks")
    in_model = explain(text.replace("loss_utils.py", "linear.py").replace("ForCausalLMLoss", "forward"), files=("x",))
    assert in_model is not None
    assert "logits" not in in_model.findings[0]


def test_a_container_sees_its_own_process_by_another_number() -> None:
    """FoundationVision/GenerateU#10: 14.06 + 0.32 GiB of 14.52 are its own; of a true neighbour they would not be."""
    text = (
        "CUDA out of memory. Tried to allocate 496.00 MiB. GPU 0 has a total capacty of 14.75 GiB of which 235.06 MiB "
        "is "
        "free. Process 20398 has {} memory in use. Of the allocated memory {} is allocated by PyTorch, and 330.42 MiB "
        "is "
        "reserved by PyTorch but unallocated."
    )
    own = read(text.format("14.52 GiB", "14.06 GiB"))
    assert own.memory is not None
    assert "other processes" not in own.memory.parts
    assert "fragmentation" in own.findings[0]  # 330 reserved and 235 free are 565 MiB
    other = read(text.format("12.52 GiB", "1.06 GiB"))
    assert other.memory is not None
    assert other.memory.parts["other processes"] == round(12.52 * GIB)
    assert any("other processes hold 12.52 GiB" in line for line in other.findings)


LOG = """[rank1]: Traceback (most recent call last):
[rank0]: Traceback (most recent call last):
[rank1]:   File "/job/train.py", line 9, in <module>
[rank0]:   File "/job/train.py", line 9, in <module>
[rank1]:   File "/job/train.py", line 5, in step
[rank0]:   File "/job/train.py", line 7, in update
[rank1]:   File "/usr/lib/python3/dist-packages/torch/nn/modules/module.py", line 1532, in _call_impl
[rank1]:     return forward_call(*args, **kwargs)
[rank0]:   File "/usr/lib/python3/dist-packages/torch/optim/adamw.py", line 220, in step
[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of 79.10 GiB
[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB. GPU 0 has a total capacity of 79.10 GiB
"""


def test_each_rank_has_its_own_traceback() -> None:
    result = read(LOG)
    assert result.verdict.startswith(
        "rank 1, GPU 1 ran out of memory in the forward, at /job/train.py:5 step: 2.00 GiB"
    )
    assert "2 ranks ran out of memory (0, 1); this is of rank 1, the first" in result.findings
    mixed = LOG.replace("[rank1]: ", "", 1).replace("[rank1]: torch.Out", "torch.Out")
    assert (
        "2 ranks ran out of memory (0 and a process whose lines name no rank); this is of that process, the first"
        in (read(mixed).findings)
    )
    alone = read("\n".join(line for line in LOG.splitlines() if "[rank0]" in line))
    assert "in the optimizer's step, at /job/train.py:7 update" in alone.verdict


@pytest.mark.parametrize(
    ("text", "device", "word"),
    [
        ("RuntimeError: MPS backend out of memory (MPS allocated: 17.95 GB, other allocations: 384.00 KB, max allowed: "
         "18.13 GB). Tried to allocate 256.00 MB on private pool.", "the GPU", "asked for"),
        ("RuntimeError: [enforce fail at alloc_cpu.cpp:114] data. DefaultCPUAllocator: not enough memory: you tried to "
         "allocate 4294967296 bytes.", "the CPU", "4.00 GiB were asked for"),
        ("RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", "the GPU", "no"),
        ("slurmstepd: error: Detected 1 oom_kill event in StepId=1234.0. Some of the step tasks have been OOM Killed.",
         "the CPU", "no figures"),
        ("[9137.1] Out of memory: Killed process 4711 (python) total-vm:99kB", "the CPU", "no figures"),
        ("RuntimeError: CUDA error: out of memory", "the GPU", "no figures"),
        ("torch.OutOfMemoryError: HIP out of memory. Tried to allocate 3.50 GiB. GPU 5 has a total "
        "capacity of 191.98 GiB"
         " of which 1.20 GiB is free.", "GPU 5", "3.50 GiB were asked for"),
    ],
)  # fmt: skip
def test_messages_of_other_backends_are_read(text: str, device: str, word: str) -> None:
    result = read(text)
    assert result.memory is not None
    assert result.memory.device == device
    assert word in result.verdict


def test_a_log_without_the_error_is_not_explained() -> None:
    assert explain("step 1 loss 2.3\nno memory was harmed\n", files=("log",)) is None
