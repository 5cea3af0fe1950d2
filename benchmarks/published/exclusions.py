"""Rows that are not scored, in three kinds, and the share of usable rows that are scored.

    share = rows scored / (rows scored + rows with all facts that we cannot express)

facts   the source does not print what a prediction needs, contradicts itself, or measured nothing
other   work that is out of scope: adapters, encoders, TPUs and their compilers
words   all facts are there, but a layout, stack or catalog has no keyword for one of them
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal, NamedTuple

from benchmarks.published.convert import ADAPTERS
from benchmarks.published.readers import (
    aleph_alpha,
    dgxc_benchmarking,
    finetune_memory,
    kempnerforge,
    lumen,
    megatron_bridge_perf,
    megatron_kwai,
    megatron_moe_zoo,
    misc_throughput,
    mlperf,
    paddlenlp,
    prime_rl,
    torchtitan,
    vocabulary_parallelism,
)
from benchmarks.published.score import Score

Kind = Literal["facts", "other", "words"]

OTHER = (
    ADAPTERS,
    dgxc_benchmarking.XLA,
    finetune_memory.ENCODER,
    misc_throughput.TPU,
)
WORDS = (
    aleph_alpha.SEPARATE_SOFTMAX,
    dgxc_benchmarking.UNKNOWN_MODEL["LLAMA4"],
    finetune_memory.EARLY_UPDATE,
    finetune_memory.FLAT_GRADIENTS,
    kempnerforge.WHOLE_EXPERTS,
    megatron_bridge_perf.ATTENTION_ALONE,
    kempnerforge.SAME_TOKENS,
    lumen.OWN_KERNELS,
    megatron_bridge_perf.OFFLOADED,
    megatron_kwai.OFFLOADED,
    megatron_moe_zoo.FSDP,
    megatron_moe_zoo.OFFLOADED,
    mlperf.BRIDGED,
    paddlenlp.ALIBI,
    prime_rl.OFFLOADED,
    torchtitan.OP_WISE,
    vocabulary_parallelism.SPREAD_HEAD,
)
REFUSED = ("not in our catalog", "no chip of our catalog", "must be 1 or more")  # by the catalogs, and of a layout


class Share(NamedTuple):
    """Rows of a source: scored, and not, by kind."""

    source: str
    scored: int
    facts: int
    other: int
    words: int


def kind_of(rule: str) -> Kind:
    """Return the kind of a rule."""
    if rule in OTHER:
        return "other"
    return "words" if rule in WORDS or any(part in rule for part in REFUSED) else "facts"


def shares(scores: Iterable[Score], excluded: Iterable[tuple[str, str, str]]) -> tuple[Share, ...]:
    """Return the shares by source, in order; ``excluded``: (source, row, rule), and the first rule of a row counts.

    Sources of messages have no rows of a run.
    """
    all_scores = [*scores]
    messages = {score.source for score in all_scores if score.quantity == "message"}
    scored = {(score.source, score.row.partition(" ")[0]): "" for score in all_scores}  # of a row that is several cases
    rules = {(source, row.partition(" ")[0]): rule for source, row, rule in reversed([*excluded])}
    sources = dict.fromkeys(source for source, _ in (*scored, *reversed(rules)) if source not in messages)
    return tuple(_share(source, scored, rules | scored) for source in sources)


def _share(source: str, scored: Iterable[tuple[str, str]], rows: Mapping[tuple[str, str], str]) -> Share:
    kinds = Counter(kind_of(rule) for (name, _), rule in rows.items() if name == source and rule)
    return Share(source, sum(name == source for name, _ in scored), kinds["facts"], kinds["other"], kinds["words"])


def markdown(share_rows: Iterable[Share]) -> Iterator[str]:
    """Yield the lines of a table, with their sums."""
    rows = [*share_rows]
    total = Share("all", *(sum(int(share_row[at]) for share_row in rows) for at in range(1, len(Share._fields))))
    yield f"| {' | '.join(Share._fields)} | share |\n"
    yield "| --- |" + " ---: |" * len(Share._fields) + "\n"
    for row in (*rows, total):
        could = row.scored + row.words
        share = f"{row.scored / could:.0%}" if could else "–"
        yield f"| {' | '.join(map(str, row))} | {share} |\n"
