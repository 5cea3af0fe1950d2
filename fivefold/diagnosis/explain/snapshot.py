"""Explain PyTorch's memory snapshot: what was live at the peak, or when memory ran out, by category and line of code.

    state at the end − what the trace has done = state at its beginning → replayed → the moment of most memory

The trace is a ring buffer: its beginning may be missing, but not its end. A block is live until its free is completed.
Format: torch.cuda.memory._dump_snapshot (torch/csrc/cuda/memory_snapshot.cpp); 1.x wrote only the segments.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from fivefold.diagnosis.explain.frames import (
    Frame,
    find_operation,
    find_phase,
    find_user_line,
    parse_frames,
    parse_size,
)
from fivefold.errors import UserError
from fivefold.results.explanation import Explanation, HeldLine, HeldMemory
from fivefold.units import show_bytes

NOT_KNOWN = "not known"
GIVEN_CATEGORIES = {  # names that snapshots of other writers use
    "parameter": "parameters",
    "gradient": "gradients",
    "optimizer_state": "optimizer",
    "activation": "activations",
    "input": "inputs",
    "autograd_detail": "temporary",
    "unknown": "",
    "pipeline": "temporary",
    "widened": "temporary",
}
PASSES = ("forward", "backward", "update")
FREE_ACTIONS = ("free_completed", "free")  # "free" of the first versions


class Device(NamedTuple):
    """One GPU of a snapshot."""

    number: int
    segments: list[dict[str, Any]]
    trace: list[dict[str, Any]]

    @property
    def reserved_bytes(self) -> int:
        """Return the bytes of its segments when the snapshot was written."""
        return sum(parse_size(segment.get("total_size")) for segment in self.segments)


def is_snapshot(data: object) -> bool:
    """Return whether ``data`` looks like a memory snapshot, of any version."""
    if isinstance(data, dict):
        return "segments" in data
    return (
        isinstance(data, list)
        and bool(data)
        and all(isinstance(segment, dict) and "blocks" in segment for segment in data)
    )


def explain(data: Any, *, files: tuple[str, ...], top: int) -> Explanation:
    """Explain what the GPU with the highest peak of a snapshot held, by category and its ``top`` lines."""
    devices = _list_devices(data, origin=files[0])
    peaks = [(device, *_find_peak(device)) for device in devices]
    device, lives, peak_event = max(peaks, key=lambda peak: sum(_find_live_blocks(peak[1], peak[2]).values()))
    sizes = _find_live_blocks(lives, peak_event)
    category_by_block = classify_blocks(lives)
    parts: Counter[str] = Counter()
    for number, size in sizes.items():
        parts[category_by_block[number]] += size
    shortage = next((entry for entry in reversed(device.trace) if entry.get("action") == "oom"), None)
    memory = HeldMemory(
        device=f"GPU {device.number}",
        parts=dict(parts.most_common()),
        held_bytes=sum(sizes.values()),
        lines=tuple(_sum_by_line(lives, sizes, category_by_block))[:top],
        reserved_bytes=device.reserved_bytes or None,
        requested_bytes=parse_size(shortage.get("size")) if shortage else None,
        free_bytes=parse_size(shortage.get("device_free")) if shortage else None,
    )
    findings = tuple(_list_findings(device, memory, devices=devices))
    return Explanation(
        kind="memory snapshot",
        files=files,
        verdict=_describe_device(device, lives, peak_event, memory),
        findings=findings,
        memory=memory,
    )


def _list_devices(data: Any, *, origin: str) -> list[Device]:
    """Return the GPUs that have allocated anything."""
    segments, traces = (data.get("segments"), data.get("device_traces")) if isinstance(data, dict) else (data, [])
    if not isinstance(segments, list) or not isinstance(traces or [], list):
        raise UserError(
            f"{origin}: a snapshot whose segments are not a list; write it with torch.cuda.memory._dump_snapshot"
        )
    by_device: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for segment in (item for item in segments if isinstance(item, dict)):
        number = segment.get("device", 0)
        by_device[number if isinstance(number, int) else 0].append(segment)
    count = max([len(traces or []), *(number + 1 for number in by_device)])
    devices = []
    for number in range(count):
        trace = traces[number] if traces and number < len(traces) else []
        entries = [entry for entry in trace if isinstance(entry, dict)] if isinstance(trace, list) else []
        devices.append(Device(number, by_device[number], entries))
    used_devices = [device for device in devices if device.trace or any(_list_live_blocks(device))]
    if not used_devices:
        raise UserError(
            f"{origin}: a snapshot of a process that has allocated nothing on any GPU; take it while memory is "
            "allocated"
        )
    return used_devices


def _list_live_blocks(device: Device) -> Iterator[Life]:
    """Yield the blocks that were live when the snapshot was written."""
    for segment in device.segments:
        next_address = parse_size(segment.get("address"))
        for block in segment.get("blocks") or ():
            address = parse_size(block.get("address")) or next_address
            next_address = address + parse_size(block.get("size"))
            if str(block.get("state", "")).startswith("active"):
                stack = block.get("frames") or next((h.get("frames") for h in block.get("history") or ()), None)
                size = parse_size(block.get("requested_size")) or parse_size(block.get("size"))
                yield Life(-1, None, address, size, parse_frames(stack), "")


def _find_peak(device: Device) -> tuple[list[Life], int]:
    """Return all blocks with their allocations and frees, and the event at which most memory was held.

    If memory ran out, that event is returned instead.
    """
    lives: list[Life] = []
    index_by_address: dict[int, int] = {}  # address → index in ``lives``
    stacks: dict[int, tuple[Frame, ...]] = {}
    for event, entry in enumerate(device.trace):
        action, address = entry.get("action"), parse_size(entry.get("addr"))
        if action == "alloc":
            index_by_address[address] = len(lives)
            lives.append(
                Life(
                    event,
                    None,
                    address,
                    parse_size(entry.get("size")),
                    _parse_stack(entry, stacks),
                    str(entry.get("category") or ""),
                )
            )
        elif action in FREE_ACTIONS:
            if address in index_by_address:
                number = index_by_address.pop(address)
                lives[number] = lives[number]._replace(death=event)
            else:  # it was allocated before the trace begins
                lives.append(Life(-1, event, address, parse_size(entry.get("size")), _parse_stack(entry, stacks), ""))
    lives += [block for block in _list_live_blocks(device) if block.address not in index_by_address]
    change = [0] * (len(device.trace) + 2)
    for life in lives:
        change[life.birth + 1] += life.bytes
        if life.death is not None:
            change[life.death + 1] -= life.bytes
    held_bytes, most_bytes, peak, shortage = 0, -1, -1, None
    for event, step in enumerate(change[:-1], start=-1):
        held_bytes += step
        if held_bytes > most_bytes:
            most_bytes, peak = held_bytes, event
        if 0 <= event < len(device.trace) and device.trace[event].get("action") == "oom":
            shortage = event
    return lives, peak if shortage is None else shortage


def _parse_stack(entry: dict[str, Any], known: dict[int, tuple[Frame, ...]]) -> tuple[Frame, ...]:
    """Return the frames of an entry; a list of frames that many entries share is parsed once."""
    raw = entry.get("frames")
    if id(raw) not in known:
        known[id(raw)] = parse_frames(raw)
    return known[id(raw)]


def _find_live_blocks(lives: Sequence[Life], place: int) -> dict[int, int]:
    """Return the bytes of the blocks that are held after an event, by their index in ``lives``."""
    return {
        number: life.bytes
        for number, life in enumerate(lives)
        if life.birth <= place and (life.death is None or life.death > place)
    }


def _sum_by_line(lives: Sequence[Life], sizes: dict[int, int], named: Sequence[str]) -> Iterator[HeldLine]:
    """Yield the memory that is held by category and line, the largest first."""
    groups: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for number, size in sizes.items():
        stack = lives[number].stack
        groups[named[number], find_user_line(stack), find_operation(stack)].append(size)
    for (category, line, torch_operation), block_sizes in sorted(groups.items(), key=lambda item: -sum(item[1])):
        yield HeldLine(
            category=category, bytes=sum(block_sizes), blocks=len(block_sizes), line=line, operation=torch_operation
        )


def _describe_device(device: Device, lives: Sequence[Life], place: int, memory: HeldMemory) -> str:
    """Return a sentence on the memory that a device held, and where in the user's code."""
    held_text, name = show_bytes(memory.held_bytes), memory.device
    if memory.requested_bytes is not None:
        line = find_user_line(parse_frames(device.trace[place].get("frames")))
        return (
            f"{name} ran out of memory{f', at {line}' if line else ''}: "
            f"{show_bytes(memory.requested_bytes)} were asked for, and tensors hold {held_text}"
        )
    if not device.trace:
        return f"{name} held {held_text} when the snapshot was written; it has no history, so its peak is not known"
    allocated_at_peak = [life for life in lives if life.birth == place]
    line = find_user_line(allocated_at_peak[0].stack) if allocated_at_peak else ""
    return f"{name} held {held_text} at the peak{f', reached at {line}' if line else ''}"


def _list_findings(device: Device, memory: HeldMemory, *, devices: Iterable[Device]) -> Iterator[str]:
    """Yield what is missing in a snapshot, memory that is reserved in pieces, and other devices."""
    requested = memory.requested_bytes
    if not device.trace:
        yield "no history: call torch.cuda.memory._record_memory_history() before the model is made, and dump again"
    elif not any(line.line for line in memory.lines):
        yield "no stacks: _record_memory_history(stacks='all', context='all') records which line made each block"
    idle = [
        parse_size(block.get("size"))
        for segment in device.segments
        for block in segment.get("blocks") or ()
        if block.get("state") == "inactive"
    ]
    if requested is not None and sum(idle) >= requested > max(idle, default=0):
        yield (
            f"fragmentation: {show_bytes(sum(idle))} are reserved and in no tensor, the largest piece "
            f"{show_bytes(max(idle))}; PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
        )
    elif sum(idle) > 0.2 * device.reserved_bytes:
        yield f"{show_bytes(sum(idle))} of {show_bytes(device.reserved_bytes)} reserved were in no tensor at the end"
    other_devices = [f"GPU {other.number}" for other in devices if other is not device]
    if other_devices:
        yield f"also in it, and less full: {', '.join(other_devices)}"
    if memory.parts.get("not known", 0) > 0.1 * memory.held_bytes:
        yield "what is not known was allocated before the history begins, or by lines that say no phase of a step"


class Life(NamedTuple):
    """A block: the events that allocated it (-1: before the trace) and freed it (None: not in the trace)."""

    birth: int
    death: int | None
    address: int
    bytes: int
    stack: tuple[Frame, ...]
    category: str  # as the snapshot states it, often ""


class _Phases:
    """The phase of each allocation of the trace, and the end of the run of equal phases around it."""

    def __init__(self, lives: Sequence[Life]) -> None:
        phase_by_stack: dict[tuple[Frame, ...], str] = {}
        self.of = [phase_by_stack.setdefault(life.stack, find_phase(life.stack)) for life in lives]
        order = sorted(
            (index for index, life in enumerate(lives) if life.birth >= 0), key=lambda index: lives[index].birth
        )
        self.next: dict[int, int | None] = {}  # by birth: the first allocation of another pass
        self.last: dict[int, int] = {}  # by birth: the last allocation of the same run
        next_of_phase: dict[str, int] = {}
        last_of_phase: dict[str, int] = {}
        for number in reversed(order):
            phase_here, birth = self.of[number], lives[number].birth
            other_events = [event for name, event in next_of_phase.items() if name != phase_here]
            self.next[birth] = min(other_events, default=None)
            if phase_here in PASSES:
                if self.next[birth] is not None and last_of_phase.get(phase_here, birth) > (self.next[birth] or 0):
                    last_of_phase.pop(phase_here, None)
                next_of_phase[phase_here] = birth
            self.last[birth] = last_of_phase.setdefault(phase_here, birth)


def classify_blocks(lives: Sequence[Life]) -> list[str]:
    """Return the category of each block."""
    given_categories = [GIVEN_CATEGORIES.get(life.category, life.category) for life in lives]
    if any(given_categories):
        return [
            name or (NOT_KNOWN if life.birth < 0 else "temporary")
            for name, life in zip(given_categories, lives, strict=True)
        ]
    if not any(life.stack for life in lives):
        return [NOT_KNOWN] * len(lives)
    phases = _Phases(lives)
    lives_and_phases = zip(lives, phases.of, strict=True)
    weights = frozenset(
        life.bytes for life, phase_name in lives_and_phases if phase_name == "made" and life.death is None
    )
    return [_classify_block(life, phases.of[number], phases, weights) for number, life in enumerate(lives)]


def _classify_block(life: Life, made_in: str, phases: _Phases, weights: frozenset[int]) -> str:
    """Return the category of one block, which a snapshot may name itself. ``weights``: sizes of the parameters.

    made in a forward, freed in a later phase → activations · in a backward, outlives it → gradients
    in an update, outlives it → optimizer · by a module that is made or moved, never freed → parameters
    else temporary
    """
    if made_in == "gather":
        return "gathers"
    if life.birth < 0:
        if not life.stack:
            return NOT_KNOWN
        category_by_phase = {
            "update": "optimizer",
            "backward": "gradients",
            "made": "parameters",
            "forward": "activations",
        }
        return category_by_phase.get(made_in, NOT_KNOWN)
    death, next_pass = life.death, phases.next[life.birth]
    outlives = next_pass is not None and (death is None or death > next_pass)
    if made_in == "forward":
        return "activations" if outlives or death is None else "temporary"
    if made_in == "backward":
        if death is None and not outlives:  # the trace ends within this backward
            return "gradients" if life.bytes in weights else "temporary"
        return "gradients" if outlives or (death or 0) > phases.last[life.birth] else "temporary"
    if made_in == "update":
        return "optimizer" if death is None or outlives else "temporary"
    if made_in == "made":
        return "parameters" if death is None or outlives else "temporary"
    return NOT_KNOWN if death is None else "inputs" if outlives else "temporary"
