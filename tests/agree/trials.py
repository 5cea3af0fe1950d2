"""What trials add to the search: the regret of its pick with and without ``--measure``, on the jobs of ``time.py``.

    python -m tests.agree.trials --groups 8 --folder runs/agree-time \\
        --markdown docs/explanation/measurements/015-trials.md

Of each job, four layouts were predicted (``time.py`` has stored how, in FOLDER). The two that are predicted best are
tried as ``search --measure 2`` tries them, and the faster is picked; then all that could be the best are trained in
turns, and judge the pick. Every job is a line of FOLDER/trials.jsonl; called again, it goes on.
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import NamedTuple

from fivefold.machine.toml import read
from fivefold.sweeps.finalists import TRIALS_PER_LAYOUT
from fivefold.sweeps.trial import STEPS, try_layout
from fivefold.text_files import read_lines
from tests.agree.time import Answer, Case, cases, options, select_calmest

TRIED = 2
JUDGED_STEPS, JUDGED_ROUNDS = 16, 3
HOPELESS = 1.25  # a layout that was measured so much slower than the best is not trained again


class Judged(NamedTuple):
    """A job: regret of the layout predicted best, and of the one that its trial took to be the best; relative."""

    group: int
    model: str
    job: str
    best: str
    predicted: str
    tried: str
    regret_predicted: float
    regret_tried: float
    noise: float  # of the best one's rounds: (slowest - fastest) / fastest


def seconds(case: Case, folder: Path, *, steps: int) -> float:
    """Of a step, in a trial."""
    ended = try_layout(
        model=case.model, machine=read(folder / "machine2.toml"), layout=case.layout, job=case.job, steps=steps
    )
    if ended.measured is None:
        raise RuntimeError(f"{case.model.name} {case.layout}: {ended.why}")
    return ended.measured.time.step_seconds


def judge(group: list[Case], predicted: dict[str, Answer], folder: Path) -> Judged:
    """Try the two predicted best, then train all that could be the best, in turns."""
    ranked = sorted(group, key=lambda case: predicted[str(case.layout)].predicted)
    took = {str(case.layout): list[float]() for case in ranked[:TRIED]}
    for _ in range(TRIALS_PER_LAYOUT):
        for case in ranked[:TRIED]:
            took[str(case.layout)].append(seconds(case, folder, steps=STEPS))
    picked = min(took, key=lambda layout: min(took[layout]))
    fastest = min(item.measured for item in predicted.values())
    rounds = {
        str(case.layout): list[float]()
        for case in ranked
        if case in ranked[:TRIED] or predicted[str(case.layout)].measured < HOPELESS * fastest
    }
    for _ in range(JUDGED_ROUNDS):
        for case in ranked:
            if str(case.layout) in rounds:
                rounds[str(case.layout)].append(seconds(case, folder, steps=JUDGED_STEPS))
    true = {layout: min(item) for layout, item in rounds.items()}
    best = min(true, key=lambda layout: true[layout])
    first, answer = str(ranked[0].layout), predicted[str(ranked[0].layout)]
    return Judged(
        group[0].group,
        answer.model,
        answer.job,
        best,
        first,
        picked,
        true[first] / true[best] - 1,
        true[picked] / true[best] - 1,
        max(rounds[best]) / min(rounds[best]) - 1,
    )


def lines_of(known: list[Judged]) -> list[str]:
    """Summary and table, in Markdown."""
    if not known:
        return ["no job was judged yet"]
    plain, tried, beyond = zip(
        *((item.regret_predicted, item.regret_tried, max(0.0, item.regret_tried - item.noise)) for item in known),
        strict=True,
    )
    return [
        f"{len(known)} jobs of four layouts: regret of the layout predicted best {statistics.fmean(plain):.1%} in the "
        f"mean, {max(plain):.1%} at most; of the pick of {TRIED} trials {statistics.fmean(tried):.1%}, "
        f"{max(tried):.1%} at most, beyond the noise {max(beyond):.1%}",
        "",
        "| model | job | best | predicted best | picked by trials | regret, predicted | regret, trials | noise |",
        "|" + "---|" * 8,
        *(
            f"| {item.model} | {item.job} | {item.best} | {item.predicted} | {item.tried} | "
            f"{item.regret_predicted:.1%} | {item.regret_tried:.1%} | {item.noise:.1%} |"
            for item in known
        ),
    ]


def main() -> None:
    """See the module."""
    given = options(__doc__, groups=8).parse_args()
    answers = select_calmest(Answer(**line) for line in read_lines(given.folder / "cases2.jsonl"))
    path = given.folder / "trials.jsonl"
    known = [Judged(**line) for line in read_lines(path)] if path.exists() else []
    end = time.monotonic() + 60 * given.minutes
    drawn = list(cases(seed=given.seed, groups=given.groups, each=given.each, world=2))
    for number in range(given.groups):
        group = [case for case in drawn if case.group == number]
        predicted = {answer.layout: answer for answer in answers if answer.group == number}
        if number in {item.group for item in known} or len(predicted) < len(group):
            continue
        if time.monotonic() > end:
            break
        known.append(judge(group, predicted, given.folder))
        with path.open("a") as file:
            file.write(json.dumps(known[-1]._asdict()) + "\n")
    text = "\n".join(lines_of(known))
    print(text)
    if given.markdown:
        given.markdown.write_text(text + "\n")


if __name__ == "__main__":
    main()
