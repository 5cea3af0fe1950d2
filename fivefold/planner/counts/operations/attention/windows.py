"""Which keys a query sees: sliding windows, chunks and the causal mask."""

from __future__ import annotations

from fivefold.job import Job
from fivefold.model.spec import Model


def count_attended_pairs(model: Model, job: Job, *, layer: int, causal: bool) -> int:
    """Count the query-key pairs of one sequence and head: T² (``causal=False``), or those within mask and window."""
    tokens = job.sequence
    chunk = get_chunk(model, job, layer=layer)
    if chunk is not None:
        n_chunks, rest = divmod(tokens, chunk)
        sizes = (*[chunk] * n_chunks, rest)
        return sum(size * (size + 1) // 2 if causal else size * size for size in sizes)
    if not causal:
        return tokens * tokens
    window = get_window(model, job, layer=layer) or tokens
    return window * (window + 1) // 2 + (tokens - window) * window


def get_window(model: Model, job: Job, *, layer: int) -> int | None:
    """Return a layer's sliding window; None if it has none, or one that is no shorter than the sequence."""
    return _find_shorter_window(model, job, layer=layer) if model.window_kind == "sliding" else None


def get_chunk(model: Model, job: Job, *, layer: int) -> int | None:
    """Return the chunk that a layer attends within; None if it has none, or none shorter than the sequence."""
    return _find_shorter_window(model, job, layer=layer) if model.window_kind == "chunks" else None


def _find_shorter_window(model: Model, job: Job, *, layer: int) -> int | None:
    if not model.has_window(layer) or model.window is None or model.window >= job.sequence:
        return None
    return model.window
