"""Suggest a global batch size in tokens from the literature: scaling laws and the batches of published runs.

    DeepSeek LLM   0.2920·C^0.3271 with C = 6·P·D       Step Law   0.58·D^0.571

P is the number of parameters outside the embedding that a token uses, and D the number of tokens of the run. Each law
was fitted to its own data and optimizer, so the laws differ by factors, as do the published runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import log2, sqrt
from typing import NamedTuple

from fivefold.model.spec import Model


class BatchAdvice(NamedTuple):
    """A batch of ``tokens`` and who recommends or used it; ``run``: tokens of that team's full run."""

    who: str
    tokens: float
    source: str
    run: float | None = None


MAX_SEQUENCES = 2**14  # per step that are advised

# Tokens per step of published runs (the last, if the batch grew), and the tokens of the run.
TEAMS = (
    BatchAdvice("GPT-3 175B", 3.2e6, "arXiv:2005.14165 table 2.1", 0.3e12),
    BatchAdvice("Llama 1 65B", 4e6, "arXiv:2302.13971 table 2", 1.4e12),
    BatchAdvice("Llama 2 70B", 4e6, "arXiv:2307.09288 table 1", 2e12),
    BatchAdvice("OLMo 2 7B", 1024 * 4096, "arXiv:2501.00656 table 3", 4e12),
    BatchAdvice("OLMo 2 13B", 2048 * 4096, "arXiv:2501.00656 table 3", 5e12),
    BatchAdvice("Nemotron-4 340B", 2304 * 4096, "arXiv:2406.11704 §2.1", 9e12),
    BatchAdvice("Llama 3 405B", 16e6, "arXiv:2407.21783 §3.4.1", 15.6e12),
    BatchAdvice("DeepSeek-V3", 15_360 * 4096, "arXiv:2412.19437 §4.2", 14.8e12),
)


def apply_scaling_laws(model: Model, tokens: float) -> list[BatchAdvice]:
    """Return the batch size that each scaling law gives for a run of ``tokens``."""
    compute = 6 * max(1, model.active_parameters - model.vocab * model.width) * tokens
    return [
        BatchAdvice("DeepSeek LLM's law", 0.2920 * compute**0.3271, "arXiv:2401.02954 §3.1"),
        BatchAdvice("Step Law", 0.58 * tokens**0.571, "arXiv:2503.04715"),
    ]


def advise_tokens(model: Model, tokens: float) -> float:
    """Return the advised tokens per step: the geometric mean of the scaling laws."""
    first, second = apply_scaling_laws(model, tokens)
    return sqrt(first.tokens * second.tokens)


def advise_sequences(model: Model, *, sequence: int, tokens: float) -> int:
    """Return the advised sequences of ``sequence`` tokens per step: the power of two closest to ``advise_tokens``."""
    wanted = advise_tokens(model, tokens) / sequence
    return min(MAX_SEQUENCES, 1 << round(log2(max(1.0, wanted))))


def find_nearby_advice(size: float, *, model: Model, tokens: float) -> Iterator[BatchAdvice]:
    """Yield laws and published runs whose batch is closer to ``size`` than to its half or its double.

    Published runs count if their length is within a factor of 4 of ``tokens``.
    """
    for law in (*apply_scaling_laws(model, tokens), *TEAMS):
        is_similar_run = law.run is None or abs(log2(law.run / tokens)) <= 2
        if is_similar_run and abs(log2(law.tokens / size)) < 0.5:
            yield law
