"""The planted mistakes of ``make endure`` still stand in the code, and their tests are there."""

from __future__ import annotations

from tests.endure.mutations import MUTATIONS, find_stale


def test_the_source_text_and_the_test_of_every_planted_mistake_exist() -> None:
    assert list(find_stale()) == []


def test_a_planted_mistake_changes_the_code() -> None:
    assert [mutation.name for mutation in MUTATIONS if mutation.old == mutation.new] == []
    assert len({(mutation.file, mutation.old) for mutation in MUTATIONS}) == len(MUTATIONS)
