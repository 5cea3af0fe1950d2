"""What runs again."""

import pytest

from fivefold.job import Job
from fivefold.model.catalog import resolve
from fivefold.plan.count.counts import Counts
from fivefold.plan.count.operations.part import Part
from fivefold.plan.count.operations.recompute import Unit
from fivefold.stack.catalog import named

MODEL = resolve("llama3-8b")


def block(job: Job, recomputed: str) -> Unit:
    counts = Counts(MODEL, job)
    asked = frozenset(recomputed.split("+")) if recomputed else frozenset[str]()
    return counts.unit(Part(sequences=1, recomputed=asked), next(iter(counts.example)))


def again(*, early_stop: bool, recomputed: str = "layer") -> list[bool]:
    return [op.recomputed for op in block(Job(early_stop=early_stop), recomputed).ops]


def test_an_early_stop_leaves_out_what_makes_nothing_that_the_backward_reads() -> None:
    whole, stopped = again(early_stop=False), again(early_stop=True)
    assert all(whole)
    assert stopped == [True] * (len(whole) - 2) + [False] * 2  # all but the down-projection and its sum


def test_what_others_keep_still_runs_again() -> None:
    assert again(early_stop=True, recomputed="norm") == again(early_stop=False, recomputed="norm")


@pytest.mark.parametrize("recomputed", ["norm", "act", "norm+act"])
def test_casts_of_what_is_recomputed_cheaply_are_made_again_with_it(recomputed: str) -> None:
    """Megatron's set_save_original_input: of the norms' and the activation's outputs nothing stays in fp8 either."""
    job = Job(stack=named("megatron-core"), precision="fp8", sequence=1024)

    def kept(unit: Unit) -> int:
        names = {name for op in unit.ops for name in op.keeps} - unit.dropped
        return sum(size for op in unit.ops for name, size in op.writes.items() if name in names)

    of = {"norm": 2 * 1024 * (MODEL.width + 4) + 2 * 4, "act": 1024 * MODEL.ffn + 4}
    freed = sum(of[each] for each in recomputed.split("+"))
    assert kept(block(job, "")) - kept(block(job, recomputed)) == freed
