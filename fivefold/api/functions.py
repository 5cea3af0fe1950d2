"""The commands as functions, with the arguments and defaults of the command line; each returns records.

Models, machines and layouts are given by name, as on the command line, or as records; a model also as a config of
transformers or its ``to_dict()``. A ``UserError`` (a ``ValueError``) carries the line that the command would print.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack, cast, overload

from fivefold.api.documentation import document_parameters, use_python_words
from fivefold.api.job_fields import build_job, list_stated
from fivefold.api.job_words import JobWords
from fivefold.errors import UserError, warn
from fivefold.layout.batch import choose_gpu_counts, find_most_ranks
from fivefold.requests.commands import (
    AskOptions,
    CompareOptions,
    DryrunOptions,
    MachinesOptions,
    ModelsOptions,
    PlanOptions,
    PredictRequest,
    SearchOptions,
    SearchRequest,
    StacksOptions,
    SweepOptions,
    TraceOptions,
)
from fivefold.requests.extras import requires_extra
from fivefold.step import FITS_RISK

if TYPE_CHECKING:
    from fivefold.display import Rows
    from fivefold.dry_run import DryRun
    from fivefold.layout.spec import Layout
    from fivefold.machine.spec import Machine
    from fivefold.model.spec import Model
    from fivefold.requests.commands import Batch, Question
    from fivefold.results.catalog import CatalogMachine, CatalogModel, CatalogStack
    from fivefold.results.comparison import Comparison
    from fivefold.results.playbook import Playbook
    from fivefold.results.run_estimate import Offers, RunEstimate
    from fivefold.results.search_result import Aim, By, Change, Goal, Lengths, QuestionAnswer, SearchResult, Walk
    from fivefold.results.search_result import Batch as BatchSize
    from fivefold.results.sweep_row import SweepRow
    from fivefold.results.trace_report import Traced
    from fivefold.step import Step
    from fivefold.sweeps.journal import Journal

__all__ = [
    "ask",
    "compare",
    "compare_machines",
    "dryrun",
    "plan",
    "playbook",
    "predict",
    "search",
    "sweep",
    "trace",
    "walk",
]
__all__ += ["machines", "models", "stacks"]  # the catalogs

Where = str | PathLike[str]


@document_parameters(PredictRequest)
def predict(
    model: str | Model | Mapping[str, Any], machine: str | Machine, layout: str | Layout, **job: Unpack[JobWords]
) -> Step:
    """Estimate memory, FLOPs, communication and time of one training step, without a GPU.

    Returns
    -------
    Step
        The predicted step: ``memory`` in bytes per rank, ``time`` in seconds, FLOPs, messages and operations.

    Raises
    ------
    UserError
        If a name is unknown, or if the model, the machine or the job does not support the layout.

    Examples
    --------
    >>> step = ff.predict("llama3-8b", "h100:8", "dp8 zero3 mbs1", seq=8192, gbs=64)
    >>> step.memory.fits
    True
    >>> round(step.time.step_seconds, 1)
    6.7
    """
    from fivefold.planner.predict import predict as run

    resolved_machine = _resolve_machine(machine)
    resolved_layout = _resolve_layout(layout, resolved_machine)
    resolved_model = _resolve_model(model)
    step = run(
        model=resolved_model,
        machine=resolved_machine,
        layout=resolved_layout,
        job=build_job(job, model=resolved_model, ranks=resolved_machine.ranks, layouts=[resolved_layout]),
    )
    _warn(step.remarks)
    return step


@document_parameters(SearchOptions)
@requires_extra
def search(
    model: str | Model,
    machine: str | Machine,
    *,
    by: Aim = "time",
    top: int = 10,
    also: Sequence[str] = (),
    where: str = "",
    memory: str | None = None,
    within: float | None = None,
    exact: bool = False,
    front: int = 1,
    measure: int = 0,
    two: bool = False,
    risk: float = FITS_RISK,
    **job: Unpack[JobWords],
) -> SearchResult:
    """Find the best of all valid layouts that fit, and explain the choice.

    ``search --keep`` is ``walk``, and a search over several machines is ``compare_machines``.

    Returns
    -------
    SearchResult
        ``best``: the best layouts, the first one first. ``proposal``: the simplest layout that is about as good.

    Raises
    ------
    UserError
        If no layout is legal.

    Examples
    --------
    >>> result = ff.search("qwen3-0.6b", "h100:8", seq=4096, gbs=64, where="tp=1 pp=1 cp=1 ac=none order=default")
    >>> result.best[0].step.layout
    'dp8 zero1 mbs8'
    >>> result.proposal.layout
    'dp8 zero0 mbs8'
    """
    from fivefold.requests.fields import MAX_SHOWN_LAYOUTS
    from fivefold.requests.search import build_request, limit_memory, search_with_progress

    for name, number in (("top", top), ("front", front)):
        if not 1 <= number <= MAX_SHOWN_LAYOUTS:
            raise UserError(f"{name}={number} must be 1 to {MAX_SHOWN_LAYOUTS}")
    limited_machine = limit_memory(_resolve_machine(machine), memory)
    resolved_model = _resolve_model(model)
    request = build_request(
        by=by, top=top, also=tuple(also), where=where, within=within, exact=exact, front=front, two=two, risk=risk
    )
    resolved_job = build_job(job, model=resolved_model, ranks=limited_machine.ranks)
    return search_with_progress(request, resolved_model, limited_machine, resolved_job, measure=measure)


@document_parameters(PlanOptions)
def playbook(
    model: str | Model,
    machine: str | Machine,
    *,
    tokens: float | str = 1e12,
    batch: Batch = "advised",
    where: str = "",
    price: str | float | Sequence[str] = (),
    assume: str | Sequence[str] = (),
    risk: float = FITS_RISK,
    **job: Unpack[JobWords],
) -> Playbook:
    """Plan a run step by step, from tokens to a layout.

    Parameters
    ----------
    batch
        ``"advised"``: choose the global batch by scaling laws. ``"job"``: use that of the job.

    Returns
    -------
    Playbook
        The steps with what was tried in each. ``run_file`` is the TOML that ``train`` takes.

    Examples
    --------
    >>> plan = ff.playbook("qwen3-0.6b", "h100:8", tokens=1e10, where="tp=1 pp=1 cp=1 ac=none order=default")
    >>> [stage.title for stage in plan.stages]
    ['The batch', 'Make it fit', 'Reach the batch', 'Make it fast']
    """
    from fivefold.job import Job
    from fivefold.requests.offers import apply_prices
    from fivefold.requests.playbook import build_playbook as run

    (priced_one,) = apply_prices([_resolve_machine(machine)], price)
    resolved_model = _resolve_model(model)
    return run(
        resolved_model,
        priced_one,
        build_job(job, model=resolved_model),
        tokens=_read_tokens(tokens),
        batch=batch,
        where=where,
        assume=assume,
        risk=risk,
        stated=list_stated({name: value for name, value in job.items() if not isinstance(value, Job)}),
    )


plan = playbook  # the command's name


@document_parameters(SearchRequest)
def compare_machines(
    model: str | Model,
    machines: Sequence[str | Machine],
    *,
    by: Goal = "time",
    tokens: float | str | None = None,
    price: str | float | Sequence[str] = (),
    deadline: str | None = None,
    gpu_counts: str | None = None,
    assume: str | Sequence[str] = (),
    where: str = "",
    within: float | None = None,
    risk: float = FITS_RISK,
    **job: Unpack[JobWords],
) -> Offers:
    """Compare one run of ``tokens`` on several machines, as ``search`` with ``--gpu-counts`` or ``--deadline`` does.

    Returns
    -------
    Offers
        One offer per machine and number of ranks, the best first.

    Examples
    --------
    >>> offers = ff.compare_machines(
    ...     "qwen3-0.6b",
    ...     ["h100:8", "a100:8"],
    ...     tokens=1e10,
    ...     by="cost",
    ...     price=["h100=2.2/h", "a100=1.3/h"],
    ...     seq=4096,
    ...     gbs=64,
    ...     where="tp=1 pp=1 cp=1 ac=none order=default",
    ... )
    >>> [offer.machine for offer in offers.offers]
    ['h100', 'a100']
    """
    from fivefold.requests.batch import choose_batch
    from fivefold.requests.commands import DEFAULT_TOKENS
    from fivefold.requests.offers import list_offers
    from fivefold.requests.search import build_request

    gpu_counts = choose_gpu_counts(gpu_counts, deadline, machines)
    resolved_model = _resolve_model(model)
    resolved_machines = [_resolve_machine(name) for name in machines]
    resolved_job, _ = choose_batch(
        resolved_model,
        build_job(job, model=resolved_model),
        run_tokens=DEFAULT_TOKENS if tokens is None else _read_tokens(tokens),
        ranks=find_most_ranks((one_machine.ranks for one_machine in resolved_machines), gpu_counts),
        stated=list_stated(job),
    )
    request = build_request(
        by=by,
        machines=tuple(machines),
        tokens=_read_tokens(tokens),
        price=price,
        deadline=deadline,
        gpu_counts=gpu_counts,
        assume=assume,
        where=where,
        within=within,
        risk=risk,
    )
    return list_offers(request, resolved_model, resolved_machines, resolved_job)


@document_parameters(SearchRequest)
def walk(
    model: str | Model,
    machine: str | Machine,
    layout: str | Layout,
    *,
    by: By = "time",
    where: str = "",
    memory: str | None = None,
    risk: float = FITS_RISK,
    **job: Unpack[JobWords],
) -> Walk:
    """Try one change at a time from ``layout``: ``search --keep``.

    Parameters
    ----------
    layout
        Layout to start from, such as 'dp8 zero3 mbs1'.

    Returns
    -------
    Walk
        ``changes``: every single change of the layout, the best first. ``path``: the best change, and the best after
        it, until no change helps.

    Examples
    --------
    >>> changes = ff.walk("llama3-8b", "h100:8", "dp8 zero3 mbs1", seq=4096, gbs=64).changes
    >>> changes[0].change, changes[0].fits
    ('mbs2', True)
    """
    from fivefold.layout.where import Where as Constraint
    from fivefold.planner.predict import get_planner
    from fivefold.planner.search.neighbours import walk as run
    from fivefold.requests.search import limit_memory

    limited_machine = limit_memory(_resolve_machine(machine), memory)
    resolved_layout = _resolve_layout(layout, limited_machine)
    resolved_model = _resolve_model(model)
    resolved_job = build_job(job, model=resolved_model, ranks=limited_machine.ranks, layouts=[resolved_layout])
    return run(
        get_planner(resolved_model, limited_machine, resolved_job, risk),
        resolved_layout,
        by=by,
        where=Constraint.parse(where),
    )


@document_parameters(AskOptions)
def ask(
    question: Question | Literal["time", "cost"],
    model: str | Model,
    machine: str | Machine,
    layout: str | Layout | None = None,
    *,
    tokens: float | str = 1e12,
    price: str | float | Sequence[str] = (),
    assume: str | Sequence[str] = (),
    deadline: str | None = None,
    budget: float | str | None = None,
    noise: str | None = None,
    risk: float = FITS_RISK,
    **job: Unpack[JobWords],
) -> Rows[QuestionAnswer] | Rows[BatchSize] | Rows[Change] | Rows[RunEstimate] | Rows[Lengths]:
    """Answer a question: "micro-batch", "sequence", "gpus", "model", "batch", "run", "tokens", "changes" or "finetune".

    "time" and "cost" are "run". Without a layout, the answer is for the fastest layout that fits.

    Returns
    -------
    Rows
        Answers with their numbers: an ``QuestionAnswer``, whose ``line`` is text, or several records of another
        question.

    Raises
    ------
    UserError
        If nothing fits, or if the question does not apply to the model.

    Examples
    --------
    >>> ff.ask("micro-batch", "llama3-8b", "h100:8", "dp8 zero3", seq=4096, gbs=64)[0].line
    '2 sequences at a time'
    """
    from fivefold.display import Rows
    from fivefold.machine.catalog import is_counted
    from fivefold.machine.datacenter import apply_assumptions
    from fivefold.requests.answers import RunLimits, find_answers, read_noise_scale, refuse_unused
    from fivefold.requests.batch import choose_batch
    from fivefold.requests.commands import parse_question
    from fivefold.requests.offers import apply_prices

    question = cast("Question", parse_question(question))
    tokens = _read_tokens(tokens)
    assume = (assume,) if isinstance(assume, str) else tuple(assume)
    refuse_unused(question, tokens=tokens, assume=assume, deadline=deadline, budget=budget, noise=noise)
    (priced_machine,) = apply_prices([_resolve_machine(machine)], price)
    chosen = None if layout is None else _resolve_layout(layout, priced_machine)
    resolved_model = _resolve_model(model)
    resolved_job, _ = choose_batch(
        resolved_model,
        build_job(job, model=resolved_model),
        run_tokens=tokens if question == "run" else None,
        ranks=priced_machine.ranks,
        stated=list_stated(job),
        layouts=[] if chosen is None else [chosen],
    )
    replies = find_answers(
        question,
        resolved_model,
        priced_machine,
        chosen,
        job=resolved_job,
        tokens=tokens,
        site=apply_assumptions(assume),
        limits=RunLimits.parse(deadline, budget),
        noise=read_noise_scale(noise),
        risk=risk,
        counted=not isinstance(machine, str) or is_counted(machine),
        stated=list_stated(job),
    )
    _warn(replies[0].remarks if replies else ())
    return Rows(replies)


@document_parameters(CompareOptions)
def compare(
    *what: str | Sequence[str],
    stacks: str | Sequence[str] = (),
    precisions: str | Sequence[str] = (),
    risk: float = FITS_RISK,
    price: str | float | Sequence[str] = (),
    **job: Unpack[JobWords],
) -> Comparison:
    """Compare predicted steps side by side: a model with every layout on every machine, or run files.

    Parameters
    ----------
    *what
        Models, machines and layouts in this order, or run files; machines and layouts may be lists.

    Returns
    -------
    Comparison
        ``variants``: one predicted step per case, or the reason why the case is not possible.

    Examples
    --------
    >>> comparison = ff.compare("llama3-8b", "h100:8", "dp8 zero3", "dp4 tp2 zero1", seq=4096, gbs=64)
    >>> [variant.step.layout for variant in comparison.variants]
    ['dp8 zero3 mbs1', 'dp4 tp2 zero1 mbs1']
    """
    from fivefold.planner.compare import compare as run
    from fivefold.requests.cases import list_cases, price_cases

    selected_cases = list_cases(
        [word for words in what for word in ([words] if isinstance(words, str) else words)],
        build_job(job),
        stacks=_resolve_names(stacks, option="stacks="),
        precisions=_resolve_names(precisions, option="precisions="),
        machine=_resolve_machine,
        stated=list_stated(job),
        risk=risk,
    )
    comparison = run(price_cases(selected_cases, price), risk=risk)
    _warn([line for variant in comparison.variants if variant.step is not None for line in variant.step.remarks])
    return comparison


@document_parameters(DryrunOptions)
@requires_extra
def dryrun(
    model: str | Model,
    machine: str | Machine,
    layout: str | Layout,
    *,
    schedule: Where | None = None,
    every_rank: bool = False,
    every_layer: bool = False,
    ranks: Sequence[int] = (),
    **job: Unpack[JobWords],
) -> DryRun:
    """Dry-run a step: execute the real training code, for any number of ranks, on one CPU (extra ``train``).

    Returns
    -------
    DryRun
        ``step``: memory, FLOPs and messages of the executed code; None if the job would raise or hang. ``findings``:
        everything that would go wrong.

    Examples
    --------
    >>> result = ff.dryrun("nano", "h100:2", "dp2 zero3 mbs1", seq=64, gbs=4)
    >>> result.step.layout, result.findings
    ('dp2 zero3 mbs1', ())
    """
    from fivefold.layout.remarks import list_remarks
    from fivefold.layout.validity import refuse
    from fivefold.trainer.run import Run

    resolved_model = _resolve_model(model)
    resolved_machine = _resolve_machine(machine)
    resolved_layout = _resolve_layout(layout, resolved_machine)
    resolved_job = build_job(job, model=resolved_model, ranks=resolved_machine.ranks, layouts=[resolved_layout])
    refuse(resolved_layout, model=resolved_model, job=resolved_job, machine=resolved_machine)
    table = Run(schedule=None if schedule is None else Path(schedule), job=resolved_job).table(resolved_layout)
    from fivefold.dry_run import dryrun as run

    dry_run = run(
        model=resolved_model,
        machine=resolved_machine,
        layout=resolved_layout,
        job=resolved_job,
        table=table,
        every_rank=every_rank,
        replay=not every_layer,
        ranks=tuple(ranks),
    )
    _warn(list_remarks(resolved_model, resolved_machine, resolved_job, resolved_layout))
    return dry_run


@document_parameters(SweepOptions)
@requires_extra
def sweep(
    what: Where | Mapping[str, Any],
    *,
    out: Where | None = None,
    measure: bool = False,
    steps: int = 8,
    timeout: float = 300.0,
    risk: float = FITS_RISK,
) -> Rows[SweepRow]:
    """Predict every combination of models, machines, ranks, layouts and jobs, one row each.

    Parameters
    ----------
    what
        A sweep file, or its tables as a mapping.
    out
        File of the rows: .parquet, .csv or .jsonl. For a sweep file the default is ``runs/sweeps/NAME.jsonl``.
    measure
        Also run each row that fits, in separate processes.

    Returns
    -------
    Rows
        One row per combination, with its prediction or the reason why it is not possible.

    Examples
    --------
    >>> rows = ff.sweep({"models": ["nano"], "machines": ["h100"], "ranks": [1, 2], "layouts": ["dp*"]})
    >>> [row.layout for row in rows]
    ['dp1 zero0 mbs1', 'dp2 zero0 mbs1']
    """
    from fivefold.display import Rows
    from fivefold.requests.machines import find_local_machine_file
    from fivefold.requests.sweep import choose_default_path, plan_trials
    from fivefold.sweeps import rows_file
    from fivefold.sweeps.spec import Sweep
    from fivefold.sweeps.sweep import SweepPlan, run

    spec = Sweep.from_values(dict(what), origin="sweep") if isinstance(what, Mapping) else Sweep.load(Path(what))
    plan = SweepPlan.from_sweep(spec, local=find_local_machine_file())
    path = Path(out) if out is not None else None if isinstance(what, Mapping) else choose_default_path(Path(what))
    if path is not None:
        rows_file.check(path)
    with _open_journal(path) as journal:
        todo = plan_trials(journal.path.with_suffix(""), steps=steps, timeout=timeout) if measure else None
        rows = run(plan, journal, trials=todo, report=lambda *_: None, risk=risk)
        if path is not None:
            rows_file.write(rows, path)
        journal.drop("predicted")
    return Rows(rows)


@contextmanager
def _open_journal(path: Path | None) -> Iterator[Journal]:
    """Open the journal next to the file of rows; without such a file, a temporary one."""
    from tempfile import TemporaryDirectory

    from fivefold.sweeps.journal import open_journal

    if path is not None:
        with open_journal(path.with_name(f"{path.name}.journal")) as journal:
            yield journal
        return
    with TemporaryDirectory() as folder, open_journal(Path(folder) / "rows.jsonl.journal") as journal:
        yield journal


@document_parameters(TraceOptions)
@requires_extra
def trace(
    files: Where | Sequence[Where],
    *,
    step: int | None = None,
    top: int = 10,
    machine: str | Machine | None = None,
    against: tuple[str, str, str] | None = None,
    **job: Unpack[JobWords],
) -> Traced:
    """Break down the time of a real run, from PyTorch profiler traces of one or many ranks, of any trainer.

    Parameters
    ----------
    against
        Model, machine and layout: their predicted step is compared with the traces. Other keyword arguments are the
        fields of its job, such as ``gbs=64``.

    Returns
    -------
    Traced
        Seconds per step by cause (compute, communication, idle), the slowest kernels, the differences of ranks, and
        advice: the largest loss that can be avoided, its evidence, the change, and what it is expected to give.

    Examples
    --------
    >>> ff.trace("examples/traces").ranks
    (0, 1)
    """
    from fivefold.profiling.trace_advice import advise
    from fivefold.profiling.traces import read
    from fivefold.profiling.traces.prediction import compare_with_prediction, find_axes
    from fivefold.results.trace_report import Traced

    rated_machine = None if machine is None else _resolve_machine(machine)
    predicted, axes = None, None
    if against is not None:
        model = _resolve_model(against[0])
        predicted_machine = _resolve_machine(against[1])
        layout = _resolve_layout(against[2], predicted_machine)
        predicted = predict(model, predicted_machine, layout, **job)
        rated_machine, axes = rated_machine or predicted_machine, find_axes(layout)
    elif job:
        raise UserError("job fields apply to a prediction only; add against=(MODEL, MACHINE, LAYOUT)")
    names = [files] if isinstance(files, str | PathLike) else list(files)
    result = read([Path(name) for name in names], step=step, top=top, machine=rated_machine, axes=axes)
    rows = compare_with_prediction(predicted, result.report, messages=result.lowest) if predicted else []
    advice = advise(result.report, predicted)
    return Traced(**dict(result.report), against=tuple(rows), predicted=predicted, advice=advice)


@document_parameters(ModelsOptions)
def models(word: str | None = None) -> Rows[CatalogModel]:
    """List the models of the catalog, or those that contain a word: names for ``model``.

    Returns
    -------
    Rows
        One row per model; ``to_frame()`` makes a table of them.

    Examples
    --------
    >>> [model.name for model in ff.models("llama2")]
    ['llama2-7b', 'llama2-13b', 'llama2-70b']
    """
    from fivefold.display import Rows
    from fivefold.requests.catalogs import list_models

    return Rows(list_models(word))


@document_parameters(MachinesOptions)
def machines(word: str | None = None) -> Rows[CatalogMachine]:
    """List the machines of the catalog, or those that contain a word: names for ``machine``.

    Returns
    -------
    Rows
        One row per machine; ``to_frame()`` makes a table of them.

    Examples
    --------
    >>> [machine.name for machine in ff.machines("NVLink 5")]
    ['b200', 'gb200', 'b300', 'gb300']
    """
    from fivefold.display import Rows
    from fivefold.requests.catalogs import list_machines

    return Rows(list_machines(word))


@document_parameters(StacksOptions)
def stacks(word: str | None = None) -> Rows[CatalogStack]:
    """List the training software that predictions support, or those that contain a word: names for ``stack``.

    Returns
    -------
    Rows
        One row per stack: its parallel axes, ZeRO stages and schedules, and the configurations that are read.

    Examples
    --------
    >>> ff.stacks("megatron-lm")[0].schedules
    ('1f1b', 'interleaved')
    """
    from fivefold.display import Rows
    from fivefold.requests.catalogs import list_stacks

    return Rows(list_stacks(word))


def _warn(remarks: Sequence[str]) -> None:
    """Warn about what is legal but perhaps not intended, one warning per line."""
    for line in dict.fromkeys(remarks):
        warn(use_python_words(line))


@overload
def _read_tokens(tokens: float | str) -> float: ...
@overload
def _read_tokens(tokens: None) -> None: ...
def _read_tokens(tokens: float | str | None) -> float | None:
    """Return a number of tokens that may be text such as ``2T``."""
    from fivefold.requests.words import parse_tokens

    try:
        return None if tokens is None else parse_tokens(tokens)
    except ValueError as error:
        raise UserError(f"tokens={tokens!r} {error}") from None


def _resolve_names(given: str | Sequence[str], *, option: str) -> Sequence[str]:
    from fivefold.requests.words import split_list

    return split_list(given, option=option) if isinstance(given, str) else given


def _resolve_model(what: object) -> Model:
    """Return a model by its name or path, as a record, or from a config of transformers or its ``to_dict()``."""
    from fivefold.model.catalog import from_values, resolve
    from fivefold.model.spec import Model

    if isinstance(what, Model):
        return what
    if isinstance(what, str | PathLike):
        return resolve(fspath(what))
    values = what.to_dict() if hasattr(what, "to_dict") else what
    if not isinstance(values, Mapping):
        raise UserError(
            f"model is a {type(what).__name__}; give a name, a path, a Model, or the config of a model of transformers"
        )
    return from_values(dict(values), name=str(values.get("model_type", "model")), source="config")


def _resolve_machine(what: str | Machine) -> Machine:
    from fivefold.requests.machines import load_machine

    return load_machine(fspath(what)) if isinstance(what, str | PathLike) else what


def _resolve_layout(what: str | Layout, machine: Machine) -> Layout:
    from fivefold.layout.spec import Layout

    return Layout.parse(what, machine=machine) if isinstance(what, str) else what
