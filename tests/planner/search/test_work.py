"""Searches of one question share its work."""

from __future__ import annotations

from fivefold.planner.search.work import DOUBLING_UNITS, EXACT_UNITS, REFINING_UNITS, WorkBudget


def test_a_search_gets_the_work_that_earlier_searches_left() -> None:
    budget = WorkBudget(1000)
    first = budget.allot(600)
    assert (first.exact_units, budget.remaining_units) == (600, 1000)  # not yet spent
    first.add(700)
    assert budget.remaining_units == 300
    assert budget.allot(600, reserve=100).exact_units == 200
    budget.allot(600).add(400)
    assert budget.remaining_units == 0
    assert budget.allot(600).exact_units == 0


def test_a_search_with_all_its_work_ends_as_one_by_itself() -> None:
    work = WorkBudget().allot()
    assert (work.exact_units, work.doubling_units, work.refining_units) == (EXACT_UNITS, DOUBLING_UNITS, REFINING_UNITS)


def test_a_search_spends_in_proportion_beyond_its_limit() -> None:
    work = WorkBudget().allot(EXACT_UNITS // 5)
    assert (work.doubling_units, work.refining_units) == (DOUBLING_UNITS // 5, REFINING_UNITS // 5)
