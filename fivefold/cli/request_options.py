"""Gives a command the arguments and options of its request schema, and calls it with the request and its records.

A command names the records that it takes besides the request (model, machine, layout, job) among its parameters.

    @takes_request(SearchOptions)
    def search(request: SearchOptions, model: Model, machine: Machine, job: Job) -> None:
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from fivefold.cli.arguments import add_fields, print_notes, read_config, read_words, resolve_words
from fivefold.cli.first_calibration import calibrate_if_needed
from fivefold.cli.options import show
from fivefold.cli.parameters import RECORDS, build_request, make_parameters
from fivefold.cli.user_settings import DEFAULT_STACK, apply_prices, apply_settings, assumes_stack
from fivefold.errors import UserError
from fivefold.layout.batch import find_most_ranks
from fivefold.layout.stored_base import keep_stored_base
from fivefold.requests.batch import choose_batch
from fivefold.requests.commands import (
    CalibrationOption,
    ConfigOptions,
    JobRequest,
    MachineRequest,
    PlanRequest,
    SearchRequest,
)
from fivefold.requests.configs import list_fields
from fivefold.requests.job import get_job_words, list_stated, load_job
from fivefold.requests.machines import load_machine
from fivefold.requests.schema import Request

Asked = TypeVar("Asked", bound=Request)


def accept_request(schema: type[Asked]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the arguments and options of ``schema``; it is called with the request and with records."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        record_names = tuple(
            name
            for name in (*RECORDS, "job", "stated", "batch_reason")
            if name in inspect.signature(command).parameters
        )

        @functools.wraps(command)
        def call_with_request(**values: Any) -> None:
            request, settings = apply_settings(build_request(schema, values))
            may_calibrate = isinstance(request, CalibrationOption) and not request.no_calibrate
            records = calibrate_if_needed(partial(read_records, request, record_names), allowed=may_calibrate)
            machines = [records["machine"]] if "machine" in records else []
            request, settings = apply_prices(request, machines, settings)
            prints_json = getattr(request, "as_json", False)
            notes = records.pop("notes", None)
            print_notes(notes)
            with add_fields(list_fields(notes) | settings.list_fields() if prints_json else {}):
                command(request, **records)
            if not (prints_json or settings.is_empty):
                show(settings.describe())
            if not prints_json and assumes_stack(request, machines):
                from rich.text import Text

                show(Text(f"\n{DEFAULT_STACK}", style="dim", overflow="fold"))

        parameters = list(make_parameters(schema))
        typer_function: Any = call_with_request  # typer reads the signature and annotations of a function
        del typer_function.__wrapped__
        typer_function.__doc__ = _join_lines(command.__doc__ or "")
        typer_function.__signature__ = inspect.Signature(parameters)
        typer_function.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return call_with_request

    return decorate


def _join_lines(docstring: str) -> str:
    """Return a docstring with each paragraph in one line, so that its help wraps at the width of the terminal.

    A bracket gets a backslash, because rich, which prints the help, would take ``[mcp]`` for markup.
    """
    text = "\n\n".join(" ".join(paragraph.split()) for paragraph in inspect.cleandoc(docstring).split("\n\n"))
    return re.sub(r"\[(?=[a-z/])", r"\\[", text)


def read_records(request: Request, wanted: tuple[str, ...]) -> dict[str, Any]:
    """Return the records that a command takes: from a config by ``--from``, or from the arguments and options."""
    words = {name: getattr(request, name) for name in RECORDS if name in type(request).model_fields}
    if not isinstance(request, ConfigOptions):
        records = resolve_words({name: words[name] for name in wanted if name in words})
        if isinstance(request, JobRequest):
            words = get_job_words(request)
            records |= {"job": load_job(**words), "stated": list_stated(**words)}
            if records.get("model") is not None:
                records["job"] = keep_stored_base(records["job"], records["model"])
        return _select(_fill_batch(request, records), wanted)
    if request.ignore and request.from_file is None:
        raise UserError(
            f"--ignore {' '.join(request.ignore)} is valid with --from FILE only: it names keys of a config"
        )
    options = get_job_words(request)
    if request.from_file is not None:
        searches = request.searches_layout
        records = read_config(request.from_file, request.gpus, words, options, request.ignore, searches=searches)
    else:
        required = [name for name in words if type(request).model_fields[name].is_required()]
        records = _fill_batch(request, read_words(words, request.gpus, options, required=required))
    return _select(records, wanted)


def _select(records: dict[str, Any], wanted: tuple[str, ...]) -> dict[str, Any]:
    """Return the records that a command takes, and the notes on a config."""
    return {name: records[name] for name in (*wanted, "notes") if name in records}


def _fill_batch(request: Request, records: dict[str, Any]) -> dict[str, Any]:
    """Return the records with a global batch, and its reason, unless the request names one or asks for one."""
    machine, layout = records.get("machine"), records.get("layout")
    if machine is None or "job" not in records or isinstance(request, PlanRequest):
        return records
    others = map(load_machine, request.machines if isinstance(request, SearchRequest) else ())
    counts = (one_machine.ranks for one_machine in (machine, *others))
    ranks = find_most_ranks(counts, request.tried_gpu_counts if isinstance(request, MachineRequest) else None)
    layouts = [] if layout is None else [layout]
    job, reason = choose_batch(
        records["model"],
        records["job"],
        run_tokens=request.run_tokens if isinstance(request, MachineRequest) else None,
        ranks=ranks,
        stated=records["stated"],
        layouts=layouts,
    )
    return records | {"job": job, "batch_reason": reason}
