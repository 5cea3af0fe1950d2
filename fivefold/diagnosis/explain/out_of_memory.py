"""Explain "out of memory" in a log: what was requested, who holds the rest, at which line, and why it did not fit.

    capacity = tensors + reserved but unused + the rest of this process + other processes + free

Texts of PyTorch 1.0 to 2.x on CUDA, ROCm, XPU, MPS and the CPU: c10/cuda/CUDACachingAllocator.cpp and its siblings. If
a log has several ranks, each is read by its own prefix (``[rank3]:``).
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from fivefold.diagnosis.explain.frames import Frame, find_phase, find_user_line, parse_traceback
from fivefold.results.explanation import Explanation, HeldMemory
from fivefold.units import GIB, KIB, MIB, show_bytes

MAX_UNUSED_SHARE = 0.05  # share of a device that is reserved and in no tensor below which tensors fill it, too
MAX_FREE_SHARE = 0.01  # share of a device in no tensor below which it is full, and not fragmented
UNITS = {"bytes": 1, "B": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": 2**40, "KB": 10**3, "MB": 10**6, "GB": 10**9}
SIZE = r"([0-9]{1,18}(?:\.[0-9]{1,6})?) ?(bytes|B|[KMGT]iB|[KMG]B)\b"
OUT_OF_MEMORY = re.compile(
    r"out of memory\b.*tried to allocate|out of memory on device|CUDA(?: driver)? error: out of memory"
    r"|DefaultCPUAllocator: |Cuda failure.*out of memory|Failed to CUDA calloc"
    r"|CUBLAS_STATUS_ALLOC_FAILED|oom[_-]kill event|Out of memory: Kill(?:ed)? process", re.IGNORECASE
)  # fmt: skip
PREFIX = re.compile(r"^\s*(?:\[(?:default|rank)?\s?(\d{1,6})\]:?|(\d{1,6}):)\s?(?=.)")
ANSI = re.compile(r"\x1b\[[0-9;]*m")
COLUMNS = {  # the figures of a message, each as a pattern with one size
    "wanted": rf"tried to allocate {SIZE}",
    "capacity": rf"(?:{SIZE} total capacity|total capac?i?ty of {SIZE}|max allowed: {SIZE})",
    "allocated": rf"(?:{SIZE} already allocated|{SIZE} is allocated by PyTorch|MPS allocated: {SIZE})",
    "reserved": rf"{SIZE} reserved in total",
    "unused": rf"(?:{SIZE} is reserved by PyTorch but unallocated|{SIZE} cached\))",
    "private": rf"{SIZE} allocated in private pools",
    "free": rf"(?:of which {SIZE} is free|{SIZE} free[;)])",
    "allowed": rf"{SIZE} allowed",
    "process": rf"this process has {SIZE} memory in use",
    "others": rf"other allocations: {SIZE}",
}
COMPILED = {name: re.compile(pattern, re.IGNORECASE) for name, pattern in COLUMNS.items()}
WRAPPED_REST = re.compile(  # rest of a message that a terminal or a person wrapped
    r"total capac|already allocated|reserved in total|reserved by PyTorch|allocated by PyTorch|of which|memory in use"
)
MAX_CONTINUED = 6  # lines
ENGINES = re.compile(r"(^|/)(vllm|sglang)/")  # inference engines with memory of their own next to PyTorch's
OTHER_PROCESS = re.compile(rf"Process (\d{{1,9}}) has {SIZE} memory in use")
CPU = re.compile(r"allocate (\d{1,18}) bytes")
HOST = re.compile(r"oom[_-]kill event|Kill(?:ed)? process", re.IGNORECASE)  # by Slurm, by the kernel
DEVICE = re.compile(r"\b(GPU|XPU|MIG|NPU) ?(\d{1,4})")
MIN_CONTEXT_BYTES = 64 * MIB  # least memory of a context next to the pools of its process
SMALLER_TENSOR_ADVICE = (
    "use a smaller micro-batch, shorter sequences, or kernels that do not hold all scores or logits at once"
)
LOSS = re.compile(r"cross_?entropy|logits|ForCausalLMLoss|loss_utils|nll_loss|log_softmax", re.IGNORECASE)
LOSS_FRAMES = 4  # innermost frames, of which one may be of the loss
PHASES = {
    "update": "the optimizer's step",
    "backward": "the backward",
    "forward": "the forward",
    "gather": "a gather of weights",
    "made": "the making or moving of the model",
    "": "",
}


class OutOfMemoryMessage(NamedTuple):
    """A message: its sizes by name, device, rank ("" if the log has none), and the traceback above it."""

    sizes: dict[str, int]
    device: str
    rank: str
    stack: tuple[Frame, ...]

    def get(self, name: str) -> int | None:
        """Return the bytes of a name, or None if the message does not state them."""
        return self.sizes.get(name)


class Cause(NamedTuple):
    """A reason why memory ran out, and the change that helps; "" if none follows from it."""

    reason: str  # ends in punctuation if a change follows
    change: str = ""


def explain(text: str, *, files: tuple[str, ...]) -> Explanation | None:
    """Explain what ran out of memory, by the first message of each rank; None if nothing did."""
    messages = _find_messages(text)
    if not messages:
        return None
    first_by_rank: dict[str, OutOfMemoryMessage] = {}
    for message in messages:
        first_by_rank.setdefault(message.rank, message)
    chosen = next(iter(first_by_rank.values()))
    causes = _list_causes(chosen)
    findings = [f"{cause.reason}{cause.change}" for cause in causes]
    if len(first_by_rank) > 1:
        ranks = ", ".join(sorted(filter(None, first_by_rank), key=int))
        unnamed = " and a process whose lines name no rank" if "" in first_by_rank else ""
        first = f"rank {chosen.rank}" if chosen.rank else "that process"
        findings.append(
            f"{len(first_by_rank)} ranks ran out of memory ({ranks}{unnamed}); this is of {first}, the first"
        )
    return Explanation(
        kind="out of memory",
        files=files,
        verdict=_describe_message(chosen),
        findings=tuple(findings),
        change=next((cause.change for cause in causes if cause.change), ""),
        memory=_sum_memory(chosen),
    )


def _find_messages(text: str) -> list[OutOfMemoryMessage]:
    """Return all messages in order, with the traceback of the same rank above each."""
    stacks: dict[str, list[str]] = defaultdict(list)
    messages = []
    lines = ANSI.sub("", text).splitlines()
    for number, raw_line in enumerate(lines):
        match = PREFIX.match(raw_line)
        rank = (match[1] or match[2]) if match else ""
        line = raw_line[match.end() :] if match else raw_line
        if "Traceback (most recent call last)" in line:
            stacks[rank] = []
        elif OUT_OF_MEMORY.search(line):
            rest = _join_continuation(lines[number + 1 : number + 1 + MAX_CONTINUED]) if "allocate" in line else ""
            messages.append(_parse_message(line + rest, rank, stacks.pop(rank, [])))
        else:
            stacks[rank].append(line)
    return messages


def _join_continuation(lines: Sequence[str]) -> str:
    """Return the following lines that belong to a wrapped message, with the prefix of their rank removed."""
    rest = ""
    for raw_line in lines:
        match = PREFIX.match(raw_line)
        line = raw_line[match.end() :] if match else raw_line
        if OUT_OF_MEMORY.search(line) or not WRAPPED_REST.search(line):
            break
        rest += f" {line.strip()}"
    return rest


def _parse_message(line: str, rank: str, above: Sequence[str]) -> OutOfMemoryMessage:
    """Read the sizes, the device and the traceback of one out-of-memory message."""
    sizes = {
        name: size for name, pattern in COMPILED.items() if (size := _parse_size(pattern.search(line))) is not None
    }
    if match := CPU.search(line):
        sizes["wanted"] = int(match[1])
    processes = [(pid, UNITS[unit] * float(number)) for pid, number, unit in OTHER_PROCESS.findall(line)]
    if processes and "process" not in sizes:
        own_process = _find_own_process(processes, sizes)
        if own_process is not None:
            sizes["process"] = round(own_process[1])
            processes.remove(own_process)
    if processes:
        sizes["others"] = round(sum(size for _, size in processes))
        sizes["largest other"] = round(max(size for _, size in processes))
    device_match = DEVICE.search(line)
    device = (
        "the CPU"
        if CPU.search(line) or HOST.search(line)
        else f"{device_match[1]} {device_match[2]}"
        if device_match
        else "the GPU"
    )
    return OutOfMemoryMessage(sizes, device, rank, parse_traceback(above))


def _find_own_process(processes: Sequence[tuple[str, float]], sizes: Mapping[str, int]) -> tuple[str, float] | None:
    """Return which of the listed processes is this one, seen under another number (in a container); None if none is.

    It is the smallest that can hold what PyTorch has here, if PyTorch has most of it, or if all processes and this one
    would be more than the device has.
    """
    own_bytes = sizes.get("allocated", 0) + sizes.get("unused", 0)
    candidates = [process for process in processes if process[1] + MIN_CONTEXT_BYTES >= own_bytes > 0]
    largest_process = min(candidates, key=lambda process: process[1], default=None)
    used_bytes = sizes.get("capacity", 0) - sizes.get("free", 0)
    is_double = sum(size for _, size in processes) + own_bytes > used_bytes + MIN_CONTEXT_BYTES
    return (
        largest_process if largest_process is not None and (own_bytes > 0.5 * largest_process[1] or is_double) else None
    )


def _parse_size(match: re.Match[str] | None) -> int | None:
    if match is None:
        return None
    number, unit = (group for group in match.groups() if group is not None)
    bytes_by_unit = {name.lower(): size for name, size in UNITS.items()}
    return round(float(number) * bytes_by_unit[unit.lower()])


def _count_unused(message: OutOfMemoryMessage) -> int | None:
    """Return the bytes that PyTorch has reserved, but that no tensor uses."""
    if "unused" in message.sizes:
        return message.sizes["unused"]
    allocated, reserved = message.get("allocated"), message.get("reserved")
    return max(0, reserved - allocated) if allocated is not None and reserved is not None else None


def _sum_memory(message: OutOfMemoryMessage) -> HeldMemory:
    """Break the device's memory down into tensors, reserved memory, other processes and the rest."""
    allocated = message.get("allocated") or 0
    unused = _count_unused(message)
    free_bytes = message.get("free")
    parts = Counter({"tensors": allocated, "reserved, but in no tensor": unused or 0, "other processes": 0})
    parts["other processes"] = message.get("others") or 0
    pytorch_bytes = allocated + (unused or 0)
    if "process" in message.sizes and message.sizes["process"] <= (message.get("capacity") or message.sizes["process"]):
        parts["the rest of this process"] = max(0, message.sizes["process"] - pytorch_bytes)
    elif (
        (capacity := message.get("capacity")) is not None and free_bytes is not None and "allowed" not in message.sizes
    ):
        parts["all else: contexts, NCCL, other processes"] = max(
            0, capacity - free_bytes - pytorch_bytes - parts["other processes"]
        )
    parts["free"] = free_bytes or 0
    return HeldMemory(
        device=message.device,
        parts={name: size for name, size in parts.items() if size},
        held_bytes=allocated,
        reserved_bytes=allocated + unused if unused is not None else None,
        capacity_bytes=message.get("capacity"),
        free_bytes=free_bytes,
        requested_bytes=message.get("wanted"),
    )


def _describe_message(message: OutOfMemoryMessage) -> str:
    """Return the sentence that says who ran out of memory, where, and how much was requested."""
    requested, line_of_code = message.get("wanted"), find_user_line(message.stack)
    where = f"rank {message.rank}, {message.device}" if message.rank else message.device
    phase_text = PHASES[find_phase(message.stack)] if message.stack else ""
    line = f"{where} ran out of memory"
    line += f" in {phase_text}" if phase_text else ""
    line += f", at {line_of_code}" if line_of_code else ""
    if requested is None:
        return f"{line}; the message has no figures"
    allocated, capacity = message.get("allocated"), message.get("capacity")
    if allocated is None or capacity is None:
        return f"{line}: {show_bytes(requested)} were asked for"
    return (
        f"{line}: {show_bytes(requested)} were asked for, "
        f"and tensors hold {show_bytes(allocated)} of {show_bytes(capacity)}"
    )


def _find_cause_without_figures(message: OutOfMemoryMessage) -> Cause:
    """Return the reason why the host, an inference engine or the driver had no memory left."""
    if message.device == "the CPU":
        return Cause("the host's memory ran out, not a GPU's: ", "fewer workers of the data loader, or offload less")
    if any(ENGINES.search(frame.file) for frame in message.stack):
        return Cause(
            "an inference engine asks for memory of its own, next to what PyTorch keeps: ",
            "lower its share (gpu_memory_utilization, mem_fraction_static), and call torch.cuda.empty_cache() "
            "before it wakes up",
        )
    return Cause(
        "the driver had nothing left: other processes, or NCCL's buffers next to a full allocator; ",
        "look at nvidia-smi, and leave PyTorch less by torch.cuda.set_per_process_memory_fraction",
    )


def _list_other_processes(message: OutOfMemoryMessage, requested: int) -> Iterator[Cause]:
    """Yield the other processes of the device if they hold what was asked for, and that one may be of the same job."""
    held_bytes = message.get("others") or 0
    if held_bytes < requested:
        return
    yield Cause(f"other processes hold {show_bytes(held_bytes)} of this device: ", "end them, or use another")
    own_bytes, largest = message.get("process") or 0, message.get("largest other") or 0
    if 0.75 * own_bytes < largest < 1.25 * own_bytes:
        yield Cause(
            "one of them is about as large as this one: if it is of the same job, two processes use one device; ",
            "start one process per GPU, call torch.cuda.set_device(LOCAL_RANK), and load files with map_location",
        )


def _list_causes(message: OutOfMemoryMessage) -> list[Cause]:
    """Return the reasons why it did not fit, the most likely cause first."""
    requested = message.get("wanted")
    if message.device == "the CPU" or requested is None:
        return [_find_cause_without_figures(message)]
    unused = _count_unused(message) or 0
    free_bytes, capacity = message.get("free"), message.get("capacity")
    if capacity is not None and requested > capacity:
        reason = f"{show_bytes(requested)} at once is more than the device has: no setting of the allocator helps; "
        return [Cause(reason, SMALLER_TENSOR_ADVICE)]
    causes = []
    is_full = capacity is not None and unused + (free_bytes or 0) < MAX_FREE_SHARE * capacity
    if unused + (free_bytes or 0) >= requested > (free_bytes or 0) and not is_full:
        pieces = f"{show_bytes(unused)} are reserved and in no tensor, in pieces too small for {show_bytes(requested)}"
        causes.append(Cause(f"fragmentation: {pieces}; ", "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"))
    causes += _list_other_processes(message, requested)
    other_bytes = _sum_memory(message).parts.get("the rest of this process", 0)
    if other_bytes > 4 * GIB:
        causes.append(
            Cause(
                f"{show_bytes(other_bytes)} of this process are in no tensor of PyTorch's: NCCL's buffers, "
                "graphs, or libraries with memory of their own"
            )
        )
    if (allowed := message.get("allowed")) is not None:
        causes.append(Cause(f"the process may take {show_bytes(allowed)} only: ", "set_per_process_memory_fraction"))
    if free_bytes is not None and free_bytes >= requested and not causes:
        causes.append(
            Cause(
                f"the driver says {show_bytes(free_bytes)} are free, which is enough: a limit of the system "
                "(WSL, MIG, a container), or another process that has left since"
            )
        )
    if not causes and (capacity is None or "allocated" not in message.sizes):
        return [Cause("the message does not say what is in use; give the complete message, or a memory snapshot")]
    is_fragmented_only = len(causes) == 1 and causes[0].reason.startswith("fragmentation")
    if not causes or (is_fragmented_only and capacity is not None and unused < MAX_UNUSED_SHARE * capacity):
        missing, allocated = show_bytes(requested - (free_bytes or 0)), show_bytes(message.get("allocated") or 0)
        reason = f"tensors fill it: {missing} more are needed, and {allocated} are in use; "
        causes.append(Cause(f"{reason}--against MODEL MACHINE LAYOUT says what should be there, and what would fit"))
    if any(LOSS.search(f"{frame.file} {frame.function}") for frame in message.stack[:LOSS_FRAMES]):
        reason = (
            "it is in the loss: logits take micro-batch · sequence · vocabulary · 4 bytes in fp32, for the forward, "
            "the softmax and the gradient each; "
        )
        advice = "a loss that is fused or computed in chunks (Liger, cut cross-entropy), or a smaller micro-batch"
        causes.insert(0, Cause(reason, advice))
    return causes
