"""Show the answers to ``ask``: tables, or the sections of a training run and of context lengths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fivefold.rendering import lengths, run_estimate
from fivefold.rendering.grid import Column, make_grid
from fivefold.rendering.search import ANSWERS, BATCH_LAYOUTS, BATCHES, CHANGES, FINE_TUNES, describe_fine_tunes
from fivefold.rendering.sections import AnswerSection
from fivefold.results.search_result import Change

COLUMNS: dict[str, tuple[Column[Any], ...]] = {"finetune": FINE_TUNES}


def list_sections(question: str, replies: Sequence[Any]) -> list[AnswerSection]:
    """Return the answers to ``question`` as sections."""
    if question in ("run", "tokens"):
        return run_estimate.list_sections(replies[0], is_longest=question == "tokens")
    if question == "sequence":
        return lengths.list_sections(replies[0])
    if question == "batch":
        remark = "micro-batches: of each pipeline; powers of two around what is recommended"
        if any(reply.recommended for reply in replies):
            remark += "; → nearest to the scaling laws, or to the measured noise scale"
            return [
                AnswerSection((make_grid(BATCHES, replies),), "Global batches, each with its fastest layout", remark)
            ]
        table = make_grid(BATCHES, replies).drop_columns(BATCH_LAYOUTS)
        return [AnswerSection((table,), f"Global batches of {replies[0].layout}", remark)]
    if question == "changes":
        return list_change_sections(replies)
    table = make_grid(COLUMNS.get(question, ANSWERS), replies)
    if question == "finetune":
        return [AnswerSection((table,), "Methods", describe_fine_tunes(replies))]
    return [AnswerSection((table,))]


def list_change_sections(changes: Sequence[Change]) -> list[AnswerSection]:
    """Return the single changes, and the pairs that help only together if there are any."""
    singles = [change for change in changes if not change.together]
    pairs = [change for change in changes if change.together]
    sections = [AnswerSection((make_grid(CHANGES, singles),))]
    if pairs:
        sections.append(AnswerSection((make_grid(CHANGES, pairs),), "Two changes together", "neither helps alone"))
    return sections
