"""Any job with any model, machine and layout that is legal with it, thousands of them; and a search for some.

    python -m tests.endure.plans --count 5000 --searches 50 --first 0

Prints the seeds of what does not hold, with what was drawn, and exits 1 if there are any.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable

from fivefold.rendering.progress import show_progress
from tests.endure.stop_signals import end_at_stop_signal
from tests.planner.checks import (
    check_engine,
    check_pictures,
    check_questions,
    check_search,
    check_single_shard,
    check_step,
)
from tests.planner.draws import Case, case

MAX_RANKS, MAX_LAYERS = 16, 8  # of a search, which would take minutes on more
SLOW_SECONDS = 60.0  # for one answer

EVERY: tuple[Callable[[Case], None], ...] = (check_step, check_single_shard, check_pictures, check_engine)


def failure(check: Callable[[Case], None], drawn: Case) -> str:
    """In one line what did not hold; empty if all did."""
    begin = time.process_time()
    try:
        check(drawn)
    except Exception as error:  # whatever a user would have seen
        place = traceback.extract_tb(error.__traceback__)[-1]
        return f"{check.__name__}: {type(error).__name__} {error} ({place.filename}:{place.lineno} {place.line})"
    took = time.process_time() - begin
    return f"{check.__name__}: took {took:.0f} s" if took > SLOW_SECONDS else ""


def checks_of(drawn: Case, number: int, *, questions: int, searches: int) -> tuple[Callable[[Case], None], ...]:
    """Every tenth is asked questions about, and the first small ones are searched."""
    asked = (check_questions,) if number < questions * 10 and number % 10 == 0 else ()
    small = drawn.machine.ranks <= MAX_RANKS and drawn.model.layers <= MAX_LAYERS
    return (*EVERY, *asked, *((check_search,) if searches and small else ()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=5000, help="how many steps are predicted")
    parser.add_argument("--questions", type=int, default=500, help="about how many questions are asked")
    parser.add_argument("--searches", type=int, default=50, help="for how many a search is made")
    chosen = parser.parse_args()
    done, broken, left = 0, 0, chosen.searches
    with show_progress("planning") as progress, end_at_stop_signal():
        for number in range(chosen.count):
            drawn = case(chosen.first + number)
            result = checks_of(drawn, number, questions=chosen.questions, searches=left)
            left -= check_search in result
            for line in filter(None, (failure(check, drawn) for check in result)):
                broken += 1
                print(f"seed {chosen.first + number}: {line}")
                print(f"    {drawn.model.name}, {drawn.machine.name}, {drawn.layout}")
            done += 1
            progress("cases", done, chosen.count)
    print(f"{done} cases, {broken} broken")
    sys.exit(broken > 0)


if __name__ == "__main__":
    main()
