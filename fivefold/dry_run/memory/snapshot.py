"""Writes tapes as a CUDA memory snapshot, which https://pytorch.org/memory_viz opens as if a GPU had run the steps.

    tapes → blocks in segments (``caching_allocator.py``) → {"segments": at the end, "device_traces": events}, pickled

The format is that of ``torch.cuda.memory._snapshot()``. Two limits of the viewer (pytorch/pytorch@0006736:
torch/utils/viz/MemoryViz.js): it reads pickles up to protocol 4, and it fails if there are categories but none of
them is "unknown".
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fivefold.atomic_file import replace_file
from fivefold.dry_run.memory.breakdown import classify_storages
from fivefold.dry_run.memory.caching_allocator import Allocator, AllocatorBlock
from fivefold.dry_run.memory.reserved import list_changes, list_initial_allocations
from fivefold.dry_run.record.tape import CodeSite, Tape

PROTOCOL = 4
UNKNOWN = "unknown"  # the viewer's name for no category, used for temporary storages
Frames = list[dict[str, Any]]


def write_snapshot(tapes: Sequence[Tape], path: Path, *, expandable: bool, capacity_bytes: int | None = None) -> None:
    """Write the snapshot of one rank's ``tapes`` to ``path``, atomically; raise ``RunFailure`` if that fails."""
    contents = build_snapshot(tapes, expandable=expandable, capacity_bytes=capacity_bytes)
    with replace_file(path, contents="the snapshot") as temporary, temporary.open("wb") as file:
        pickle.dump(contents, file, protocol=PROTOCOL)


def build_snapshot(tapes: Sequence[Tape], *, expandable: bool, capacity_bytes: int | None = None) -> dict[str, Any]:
    """Build the snapshot, in the format of ``torch.cuda.memory._snapshot()``; beyond capacity it ends with "oom"."""
    trace = _Trace()
    allocator = Allocator(expandable=expandable, capacity_bytes=capacity_bytes, on_segment=trace.add)
    blocks: dict[int, tuple[AllocatorBlock, int, CodeSite]] = {}
    frames: dict[CodeSite, Frames] = {}
    # a later tape may know the category of a storage: the optimizer's moments are created in the first step
    category_of_storage = {
        storage: tape.sites[site].category for tape in tapes for storage, site in list_initial_allocations(tape)
    }
    birth_categories_of_tapes = [classify_storages(tape) for tape in tapes]
    for tape_index, event, storage, size, number in list_changes(tapes):
        if not size:
            block, size, site = blocks.pop(storage)
            for action in ("free_requested", "free_completed"):
                trace.add(action, block.address, size, frames=frames[site])
            allocator.free(block)
            continue
        site = tapes[tape_index].sites[number]
        trace.frames = frames.setdefault(site, _list_frames(site))  # also for the segments that the allocation needs
        new_block = allocator.allocate(size)
        if new_block is None:
            trace.add_out_of_memory(size, (capacity_bytes or 0) - allocator.reserved_bytes)
            break
        category = (
            site.category
            or category_of_storage.get(storage)
            or birth_categories_of_tapes[tape_index].get(event)
            or UNKNOWN
        )
        trace.add("alloc", new_block.address, size, category=category)
        blocks[storage] = new_block, size, site
    used = {block.address: (size, frames[site]) for block, size, site in blocks.values()}
    segments = [_dump_segment(segment_blocks, used, expandable=expandable) for segment_blocks in allocator.segments()]
    return {
        "segments": segments,
        "device_traces": [trace.entries],
        "allocator_settings": {"expandable_segments": expandable},
        "external_annotations": [],
    }


class _Trace:
    """A list of the viewer's trace entries, in order; ``time_us`` is an entry's number."""

    def __init__(self) -> None:
        self.entries: list[dict[str, Any]] = []
        self.frames: Frames = []

    def add(
        self, action: str, address: int, size: int, *, frames: Frames | None = None, category: str | None = None
    ) -> None:
        """Append an entry.

        ``action``: what the allocator did, as PyTorch's snapshots name it (alloc, free_completed, segment_map, …);
        ``size`` in bytes; ``frames``: the stack, by default ``self.frames``; ``category``: what the memory holds, such
        as PARAMETER.
        """
        entry = {"action": action, "addr": address, "size": size, "stream": 0, "time_us": len(self.entries)}
        entry["frames"] = self.frames if frames is None else frames
        if category is not None:
            entry["category"] = category
        self.entries.append(entry)

    def add_out_of_memory(self, size: int, free_bytes: int) -> None:
        """Append the "oom" entry, the last one. ``size``: bytes wanted; ``free_bytes``: bytes not reserved."""
        entry = {"action": "oom", "device_free": free_bytes, "size": size, "stream": 0, "time_us": len(self.entries)}
        self.entries.append(entry | {"frames": self.frames})


def _dump_segment(
    segment_blocks: list[AllocatorBlock], used: dict[int, tuple[int, Frames]], *, expandable: bool
) -> dict[str, Any]:
    """Return a segment as PyTorch's memory snapshots have it, with its blocks and their frames."""
    blocks: list[dict[str, Any]] = []
    for block in segment_blocks:
        requested, frames = used.get(block.address, (0, []))
        blocks.append(
            {
                "address": block.address,
                "size": block.size,
                "requested_size": requested,
                "state": "active_allocated" if block.address in used else "inactive",
                "frames": frames,
            }
        )
    allocated = sum(block["size"] for block in blocks if block["state"] == "active_allocated")
    return {
        "device": 0,
        "address": segment_blocks[0].address,
        "total_size": sum(block.size for block in segment_blocks),
        "allocated_size": allocated,
        "active_size": allocated,
        "requested_size": sum(block["requested_size"] for block in blocks),
        "stream": 0,
        "segment_type": "small" if segment_blocks[0].pool.small else "large",
        "segment_pool_id": (0, 0),
        "is_expandable": expandable,
        "frames": [],
        "blocks": blocks,
    }


def _list_frames(site: CodeSite) -> Frames:
    """Return the stack frames of a site, innermost first: operation, line, module."""
    frames: Frames = []
    if site.operation:
        frames.append({"filename": "torch", "line": 0, "name": site.operation})
    if site.line:
        location, _, function = site.line.partition(" ")
        file, _, line = location.rpartition(":")
        frames.append({"filename": file, "line": int(line), "name": function})
    if site.module or not frames:
        frames.append({"filename": "module", "line": 0, "name": site.module or site.category or UNKNOWN})
    return frames
