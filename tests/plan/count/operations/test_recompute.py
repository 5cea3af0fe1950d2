"""What runs again."""

from fivefold.job import Job
from fivefold.model.catalog import resolve
from fivefold.plan.count.counts import Counts
from fivefold.plan.count.operations.part import Part


def again(*, early_stop: bool, recomputed: str = "layer") -> list[bool]:
    counts = Counts(resolve("llama3-8b"), Job(early_stop=early_stop))
    ops = counts.unit(Part(sequences=1, recomputed=frozenset({recomputed})), next(iter(counts.example))).ops
    return [op.recomputed for op in ops]


def test_an_early_stop_leaves_out_what_makes_nothing_that_the_backward_reads() -> None:
    whole, stopped = again(early_stop=False), again(early_stop=True)
    assert all(whole)
    assert stopped == [True] * (len(whole) - 2) + [False] * 2  # all but the down-projection and its sum


def test_what_others_keep_still_runs_again() -> None:
    assert again(early_stop=True, recomputed="norm") == again(early_stop=False, recomputed="norm")
