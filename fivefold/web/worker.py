"""A process of its own for what takes long: reads a question as JSON from stdin, writes a line of JSON per event.

    {"progress": [done, total]} … {"result": …}        or {"mistake": "one line"}

Its limit of memory keeps an unreasonable question from taking the computer with it.
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Any

from fivefold.layout.search_result import SearchResult
from fivefold.record import Fault, Mistake
from fivefold.web.folder import Folder
from fivefold.web.question import Noun, SearchQuestion

MEMORY_BYTES = 24 * 2**30  # of address space
EVERY_SECONDS = 0.1  # between two reports of progress

Report = Callable[[int, int], None]


def main() -> None:
    """Answer the question on stdin with the verb of the first argument."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    asked = json.load(sys.stdin)
    try:
        say(result=VERBS[sys.argv[1]](asked, Progress()))
    except (Mistake, Fault) as error:
        say(mistake=str(error))
    except MemoryError:
        say(mistake=f"needs more than the {MEMORY_BYTES >> 30} GiB that a question of the page may take; ask for less")


class Progress:
    """Says how far the work is, now and then."""

    def __init__(self) -> None:
        self.last = 0.0

    def __call__(self, done: int, total: int) -> None:
        """``done`` of ``total``."""
        if monotonic() - self.last >= EVERY_SECONDS:
            self.last = monotonic()
            say(progress=[done, total])


def say(**event: Any) -> None:
    """Write one event."""
    print(json.dumps(event), flush=True)


def noun(asked: dict[str, Any], kind: Any) -> tuple[Any, Noun]:
    """The question, and the nouns that it names."""
    question = kind.read(asked["question"], origin="question")
    return question, question.resolve(folder=Folder(Path(asked["root"])), local=Path(asked["local"]))


def search(asked: dict[str, Any], report: Report) -> dict[str, Any]:
    """What ``fivefold search --json`` prints."""
    return _found(asked, report).model_dump(mode="json")


def ranked(asked: dict[str, Any], report: Report) -> dict[str, Any]:
    """The same with the whole ranking of ``--exact``: beside a proposal only the best of it is sure to be found."""
    proposed = _found(asked, report)
    if proposed.proposal is None:
        return proposed.model_dump(mode="json")
    every = _found(asked, report, exact=True, levels=1)
    counts = {"evaluated": proposed.evaluated + every.evaluated, "seconds": proposed.seconds + every.seconds}
    return every.replace(proposal=proposed.proposal, front=proposed.front, **counts).model_dump(mode="json")


def _found(asked: dict[str, Any], report: Report, *, exact: bool = False, levels: int | None = None) -> SearchResult:
    from fivefold.asked.search import ALIKE, limited, others
    from fivefold.job import recipe
    from fivefold.layout.where import Where
    from fivefold.plan.search import search as run

    question, (model, machine, job, _) = noun(asked, SearchQuestion)
    within = ALIKE if question.within is None else question.within
    return run(
        model=model, machine=limited(machine, question.memory or None), job=job, by=question.by, top=question.top,
        levels=question.front if levels is None else levels, within=None if exact or question.exact else within,
        where=Where.parse(question.where), recipes=[recipe(name) for name in question.also],
        reduces=others(job), report=report,
    )  # fmt: skip


def dryrun(asked: dict[str, Any], report: Report) -> dict[str, Any]:
    """What ``fivefold dryrun --json`` prints, as ``data``, and the pictures of it, as ``html``."""
    from fivefold.layout.legal import refuse
    from fivefold.plan.predict import predict
    from fivefold.web.question import Question

    question, (model, machine, job, _) = noun(asked, Question)
    layout = question.chosen()
    refuse(layout, model=model, job=job, machine=machine)  # before torch is loaded
    from fivefold.check.dryrun import dryrun as run
    from fivefold.check.dryrun.report import data
    from fivefold.web.rehearsed import html

    found = run(model=model, machine=machine, layout=layout, job=job, progress=report)
    predicted = None if found.step is None else predict(model=model, machine=machine, layout=layout, job=job)
    return {"data": data(found, predicted), "html": html(found, machine=machine, predicted=predicted)}


VERBS: dict[str, Callable[[dict[str, Any], Report], dict[str, Any]]] = {
    "search": search, "ranked": ranked, "dryrun": dryrun,
}  # fmt: skip

if __name__ == "__main__":
    main()
