"""The nearest legal values, and lines for features that do not go together."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from fivefold.job import Job
from fivefold.layout.spec import Layout, list_divisors


def list_present(what: str, *features: tuple[object, str, str]) -> Iterator[str]:
    """Yield that ``what`` does not go together with each feature that is present, and what to use instead."""
    return (f"{what} {feature}; use {fix}" for is_present, feature, fix in features if is_present)


def suggest_more_micro_batches(layout: Layout, job: Job, legal: Callable[[int], bool], *, gbs: int) -> str:
    """Return fixes for too few micro-batches: a larger batch, or smaller micro-batches whose number is ``legal``."""
    sequences = job.global_batch // layout.dp
    smaller = [f"mbs{n}" for n in list_divisors(sequences)[::-1] if n < layout.mbs and legal(sequences // n)][:1]
    return f"try {' or '.join([f'gbs {gbs}', *smaller])}"


def suggest_degrees(axis: str, degree: int, legal: Callable[[int], bool], *, most: int) -> str:
    """Return the fix "try …" with the nearest legal degrees below and above."""
    below = next(n for n in range(min(degree, most), 0, -1) if n == 1 or legal(n))
    above = next((n for n in range(degree + 1, most + 1) if legal(n)), None)
    return f"try {' or '.join(f'{axis}{n}' for n in (below, above) if n is not None)}"
