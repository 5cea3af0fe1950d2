"""Resolves the records that arguments name, or a config by ``--from``, and prints notes on the config's keys."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fivefold.cli.options import print_line, show
from fivefold.errors import UserError
from fivefold.layout.stored_base import keep_stored_base
from fivefold.requests.configs import build_request, describe_notes, load_config
from fivefold.requests.job import list_stated, load_job
from fivefold.requests.machines import check_is_model, load_machine

if TYPE_CHECKING:
    from fivefold.machine.spec import Machine
    from fivefold.results.reading import ConfigNotes


def read_words(
    words: dict[str, str | None], gpus: str | None, options: dict[str, Any], *, required: Sequence[str]
) -> dict[str, Any]:
    """Resolve the records that the arguments name, of which those ``required`` must be given."""
    check_is_model(words.get("model"))
    if missing := [name for name in required if words[name] is None]:
        fix = {
            "layout": "add it, such as 'dp8 zero3 mbs1', or let `search` find one",
            "machine": "add it, such as h100:64, or set it for all commands: fivefold config set machine h100:64",
        }.get(missing[0], "add it")
        raise UserError(
            f"Missing argument {missing[0]!r}; {fix}, or read everything from a config with --from FILE --gpus h100:64"
        )
    if gpus:
        raise UserError(f"--gpus {gpus} is valid with --from FILE only; name the machine after the model")
    records = {"job": load_job(**options), "stated": list_stated(**options), **resolve_words(words)}
    if records.get("model") is not None:
        records["job"] = keep_stored_base(records["job"], records["model"])
    return records


def resolve_words(words: dict[str, str | None]) -> dict[str, Any]:
    """Resolve the layout, model and machine that the words name; None where there is no word."""
    from fivefold.layout.spec import Layout
    from fivefold.model.catalog import resolve

    resolvers: dict[str, Callable[[str], Any]] = {"model": resolve, "machine": load_machine}
    records = {
        name: None if words[name] is None else resolvers[name](words[name] or "") for name in resolvers if name in words
    }
    if "layout" in words:
        machine, text = records.get("machine"), words["layout"]
        records["layout"] = None if text is None else Layout.parse(text, machine=machine)
    return records


def read_config(
    file: Path,
    gpus: str | None,
    words: dict[str, str | None],
    options: dict[str, Any],
    ignore: Sequence[str] | None,
    *,
    searches: bool,
) -> dict[str, Any]:
    """Return the records of a config, on the machine of ``--gpus``, with job options overriding its job.

    Of ``words`` only the model may be given: it replaces that of the config, or is the one that the config leaves out.
    ``searches``: a layout is searched, which may be of another number of GPUs than the config.
    """
    if given_words := [word for name, word in words.items() if word is not None and name != "model"]:
        raise UserError(
            f"--from {file} gives the layout: leave out {' '.join(map(repr, given_words))}; name the machine by --gpus"
        )
    if gpus is None:
        raise UserError(f"--from {file} needs a machine: add --gpus h100:64")
    asked = build_request(gpus, words.get("model"), sequence=options.get("seq"))
    config = load_config([str(file)], asked._replace(searches=searches), ignore=ignore or ())
    machine = resolve_machine(gpus, config.layout.world)
    is_other = machine.ranks != config.layout.world
    return {
        "model": config.model,
        "layout": config.layout,
        "machine": machine,
        "job": load_job(**options, base=config.job.model_dump()),
        "notes": config.notes.replace(launched_ranks=config.layout.world if is_other else None),
        "stated": config.stated | list_stated(**options),
    }


def print_notes(notes: Sequence[ConfigNotes] | ConfigNotes | None) -> None:
    """Print notes on a config's keys to stderr."""
    for config in notes if isinstance(notes, Sequence) else [notes] if notes else []:
        for line in describe_notes(config):
            print_line(f"fivefold: {line}")


@contextmanager
def add_fields(fields: Mapping[str, Any]) -> Iterator[None]:
    """Add ``fields`` to the JSON object that a command prints, or to each object of a list; none: leave it as it is."""
    if not fields:
        yield
        return
    printed = io.StringIO()
    try:
        with redirect_stdout(printed):
            yield
    finally:
        if text := printed.getvalue().strip():
            values = json.loads(text)
            answer = [{**value, **fields} for value in values] if isinstance(values, list) else {**values, **fields}
            show(json.dumps(answer, indent=2))


def resolve_machine(gpus: str, world: int) -> Machine:
    """Return the machine that ``--gpus`` names; without a number, it has as many ranks as the config uses."""
    from fivefold.machine.catalog import has_ranks, replace_ranks

    return load_machine(gpus if has_ranks(gpus) else replace_ranks(gpus, world))
