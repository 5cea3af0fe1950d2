"""Random models under random layouts, rehearsed on every rank: all messages meet, and no ranks wait for one another.

python -m tests.agree.rehearsal.drawn --count 300 --seed 0
"""

from __future__ import annotations

import argparse
import itertools
import sys

from fivefold.check.dryrun.match import findings
from fivefold.check.dryrun.rehearse import rehearse_rank
from fivefold.show.progress import bar
from tests.agree.drawn import Drawn, drawn


def unmet(case: Drawn) -> list[str]:
    """What is wrong with the messages of all ranks; odd numbers on GPUs, even ones on processes of one stream."""
    streams = bool(case.number % 2)
    job = case.job if streams else case.job.replace(overlap=())
    tapes = [
        rehearse_rank(model=case.model, layout=case.layout, job=job, rank=rank, streams=streams)
        for rank in range(case.layout.world)
    ]
    steps = ([each.first for each in tapes], [each.steady for each in tapes])
    return [line for step in steps for line in findings(step, streams=streams)]


def main() -> int:
    """One line per case that does not meet; 1 if there is one."""
    parser = argparse.ArgumentParser(description="random models under random layouts, rehearsed on every rank")
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    wrong = 0
    with bar("rehearsed") as report:
        for case in itertools.islice(drawn(options.seed), options.first, options.first + options.count):
            report(str(case.layout), case.number - options.first, options.count)
            found = unmet(case)
            wrong += bool(found)
            if found:
                print("\n  ".join((str(case), *found)), flush=True)
    print(f"{options.count - wrong} of {options.count} meet")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
