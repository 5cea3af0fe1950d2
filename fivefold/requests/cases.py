"""Builds the cases of a comparison from text: a model, machines and layouts, or run files."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from fivefold.errors import UserError
from fivefold.layout.batch import fill_batch, find_most_ranks
from fivefold.layout.stored_base import keep_stored_base
from fivefold.requests.answers import find_fastest
from fivefold.requests.machines import check_is_model
from fivefold.requests.offers import apply_prices
from fivefold.step import FITS_RISK

if TYPE_CHECKING:
    from fivefold.job import Job
    from fivefold.machine.spec import Machine
    from fivefold.planner.compare import ComparedCase

FILES = (".toml", ".json")


def list_cases(
    words: Sequence[str],
    job: Job,
    *,
    stacks: Sequence[str],
    precisions: Sequence[str],
    machine: Callable[[str], Machine],
    stated: Collection[str],
    risk: float = FITS_RISK,
) -> list[ComparedCase]:
    """Return the cases of a comparison: run files, or every combination of the given names.

    ``machine``: resolves a machine's name. ``stated``: the fields of the job that the question gives. ``risk``: the
    highest probability of running out of memory at which a run file's ``layout = "auto"`` is chosen.
    """
    return _list_file_cases(words, job, bool(stacks or precisions), machine, risk) or _list_combinations(
        words, job, stacks, precisions, machine, stated
    )


def price_cases(compared_cases: Sequence[ComparedCase], prices: str | float | Sequence[str]) -> list[ComparedCase]:
    """Return the cases on machines with the prices of ``--price``."""
    machines = apply_prices([case.machine for case in compared_cases], prices)
    return [case._replace(machine=machine) for case, machine in zip(compared_cases, machines, strict=True)]


def _list_combinations(
    words: Sequence[str],
    job: Job,
    stacks: Sequence[str],
    precisions: Sequence[str],
    resolve_machine: Callable[[str], Machine],
    stated: Collection[str],
) -> list[ComparedCase]:
    """Return every combination of the models, machines, layouts, stacks and precisions."""
    from fivefold.layout.spec import Layout
    from fivefold.machine.catalog import is_named
    from fivefold.model.catalog import find_published, resolve
    from fivefold.planner.compare import ComparedCase

    if not words:
        raise UserError(
            "nothing to compare; give a model, machines and layouts, or run files, or --from FILE --gpus h100:64"
        )
    check_is_model(words[0])
    names = [word for word in words[1:] if is_named(word)]
    more_models = [word for word in words[1:] if word not in names and find_published(word) is not None]
    texts = [word for word in words[1:] if word not in (*names, *more_models)]
    if not names or not texts:
        missing = "machine" if not names else "layout"
        example = "fivefold compare llama3-8b h100:8 'dp8 zero1' 'dp4 tp2 zero1'"
        best = f"; for the best layout of each machine: fivefold search {words[0]} {' '.join(names)}"
        raise UserError(f"compare needs a {missing}; write for example: {example}{best if len(names) > 1 else ''}")
    models = [resolve(name) for name in (words[0], *more_models)]
    machines = [resolve_machine(name) for name in names]
    layouts = [(machine, Layout.parse(text, machine=machine)) for machine, text in product(machines, texts)]
    most_ranks = find_most_ranks(machine.ranks for machine in machines)
    job = fill_batch(job, ranks=most_ranks, stated=stated, layouts=[layout for _, layout in layouts])
    return [
        ComparedCase(model, machine, layout, job_variant)
        for model in models
        for job_variant, (machine, layout) in product(
            list_jobs(keep_stored_base(job, model), stacks, precisions), layouts
        )
    ]


def list_jobs(job: Job, stacks: Sequence[str], precisions: Sequence[str]) -> list[Job]:
    """Return the job for every software of one list and every precision of the other."""
    from fivefold.planner.compare import with_precision, with_stack

    jobs = [with_stack(job, stack) for stack in stacks] or [job]
    return [with_precision(variant, name) for variant in jobs for name in precisions] or jobs


def _list_file_cases(
    words: Sequence[str], job: Job, has_other_options: bool, resolve_machine: Callable[[str], Machine], risk: float
) -> list[ComparedCase]:
    """Return the cases of run files, if all words are such files; ``layout = "auto"`` is the fastest that fits."""
    from fivefold.job import Job
    from fivefold.layout.spec import Layout
    from fivefold.model.catalog import resolve
    from fivefold.planner.compare import ComparedCase
    from fivefold.trainer.run import Run

    if not words or not all(Path(word).suffix in FILES for word in words):
        return []
    if job != Job() or has_other_options:
        raise UserError("a run file has its own job; drop the job options, or compare a model, machines and layouts")
    run_cases = []
    for run in (Run.load(Path(word)) for word in words):
        model, machine = resolve(run.model), resolve_machine(run.machine)
        layout = (
            find_fastest(model, machine, run.job, risk=risk)
            if run.layout == "auto"
            else Layout.parse(run.layout, machine=machine)
        )
        run_cases.append(ComparedCase(model, machine, layout, run.job))
    return run_cases
