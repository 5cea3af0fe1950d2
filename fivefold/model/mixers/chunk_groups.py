"""The groups of consecutive chunks of a sequence that the trainer's scans compute at once.

A group has as many chunks as keep its largest temporary within a limit (``scan_temporary_bytes`` of a stack). Of scans
that hand states on within a group by a matmul of its chunks' decays it has at most as many as a chunk has tokens, so
that this matmul takes no more FLOPs than reading and updating the states.
"""

from __future__ import annotations

# A GPU reads and writes 256 MiB in 80 to 200 µs, in which the host launches 20 kernels or more. Most temporaries of a
# group are several times smaller, so that smaller groups are bound by the host: Nemotron 3 Nano on 64 H100 is planned
# at 14.1, 9.5 and 8.0 s with 64, 128 and 256 MiB (8,192 tokens x 512, dp64 ep8 zero1). A backward holds about ten.
GPU_TEMPORARY_BYTES = 2**28
# A CPU calls a kernel in a few µs, and reads temporaries faster that its cache holds: forward and backward of a Mamba
# scan of 512 channels and 2,048 tokens take 0.72, 0.68, 0.48 and 0.55 s with 256, 64, 16 and 4 MiB (a cache of 32 MiB).
CPU_TEMPORARY_BYTES = 2**24


def count_chunks_of_group(chunk_bytes: int, temporary_bytes: int, max_chunks: int | None = None) -> int:
    """Return the chunks of a group.

    ``chunk_bytes``: bytes of a chunk's largest temporary tensor, in fp32; ``temporary_bytes``: limit for those of a
    group.
    """
    chunks = max(1, temporary_bytes // chunk_bytes)
    return chunks if max_chunks is None else min(max_chunks, chunks)


def split_into_groups(tokens: int, size: int, chunks: int = 1) -> list[int]:
    """Return the tokens of each group of a sequence of ``tokens``; a group has ``chunks`` chunks of ``size`` tokens.

    All chunks of a group are equally long: a rest that is shorter than a chunk is a group of its own.
    """
    full, rest = divmod(tokens, size)  # chunks
    groups = [min(chunks, full - first) * size for first in range(0, full, chunks)]
    return [*groups, rest] if rest else groups
