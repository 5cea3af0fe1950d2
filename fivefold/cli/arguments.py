"""Model, machine and layout as arguments, or of a config by ``--from``: ``takes_nouns`` gives them to a command.

A command names what it takes among its parameters (model, machine, layout, job) and is called with the records.
"""

from __future__ import annotations

import functools
import inspect
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from fivefold.cli import completion
from fivefold.cli.job_options import OPTIONS
from fivefold.cli.options import say, show
from fivefold.record import Mistake
from fivefold.requests.configs import add_notes, build_request, describe_notes, load_config
from fivefold.requests.job import load_job
from fivefold.requests.machines import load_machine

if TYPE_CHECKING:
    from fivefold.machine.spec import Machine
    from fivefold.results.reading import ConfigNotes

MODEL = "Catalog name, or path to a config.json, .toml or .json."
MACHINE = "NAME[:GPUS] such as h100:8 or 'l40s:16 nic=100Gbit/node', a .toml file, or local."
LAYOUT = "Such as 'dp16 tp8 pp4 v2 zero1 mbs1 ac=selective'."
ARGUMENTS: dict[str, Any] = {
    "model": Annotated[str | None, typer.Argument(help=MODEL, autocompletion=completion.models)],
    "machine": Annotated[str | None, typer.Argument(help=MACHINE, autocompletion=completion.machines)],
    "layout": Annotated[str | None, typer.Argument(help=LAYOUT, autocompletion=completion.layouts)],
}
IGNORE = Annotated[
    list[str] | None,
    typer.Option(
        "--ignore",
        metavar="KEY[,KEY]",
        help="With --from: leave these keys out, though they may change memory, FLOPs, messages or time.",
    ),
]
FROM: dict[str, Any] = {
    "from_file": Annotated[
        Path | None, typer.Option("--from", help="Model, layout and job of a config of any software, instead of words.")
    ],
    "gpus": Annotated[str | None, typer.Option("--gpus", help="With --from: the machine, such as h100:64.")],
    "ignore": IGNORE,
}


def takes_nouns(command: Callable[..., None]) -> Callable[..., None]:
    """The command with arguments, job options and ``--from`` in the place of the records that it takes."""
    own = inspect.signature(command).parameters
    nouns = [name for name in ARGUMENTS if name in own]
    named = {name: text for name, text in command.__annotations__.items() if name not in (*nouns, "job", "return")}
    hints = get_type_hints(SimpleNamespace(__annotations__=named), command.__globals__, include_extras=True)
    kinds: dict[str, Any] = {name: ARGUMENTS[name] for name in nouns} | OPTIONS | FROM
    only = inspect.Parameter.KEYWORD_ONLY
    parameters = [inspect.Parameter(name, only, default=None, annotation=kind) for name, kind in kinds.items()]
    parameters += [own[name].replace(annotation=hints[name], kind=only) for name in named]

    @functools.wraps(command)
    def with_nouns(**values: Any) -> None:
        words = {name: values.pop(name) for name in nouns}
        options = {name: values.pop(name) for name in OPTIONS}
        file, gpus, ignore = values.pop("from_file"), values.pop("gpus"), values.pop("ignore")
        if ignore and not file:
            raise Mistake(f"--ignore {' '.join(ignore)} goes with --from FILE: it names keys of a config")
        found = _of_file(file, gpus, words, options, ignore) if file else _of_words(words, gpus, options)
        with shows_notes(found.pop("notes", None), json=bool(values.get("json"))):
            command(**{name: found[name] for name in (*nouns, "job")}, **values)

    face: Any = with_nouns  # what typer reads of a function
    del face.__wrapped__
    face.__signature__ = inspect.Signature(parameters)
    face.__annotations__ = {each.name: each.annotation for each in parameters}
    return with_nouns


def _of_words(words: dict[str, str | None], gpus: str | None, options: dict[str, Any]) -> dict[str, Any]:
    """The records that the arguments name."""
    from fivefold.layout.spec import Layout
    from fivefold.model.catalog import resolve

    if lacking := [name for name, word in words.items() if word is None]:
        raise Mistake(f"Missing argument {lacking[0]!r}; or take all of a config, by --from FILE --gpus h100:64")
    if gpus:
        raise Mistake(f"--gpus {gpus} goes with --from FILE; name the machine after the model")
    job = load_job(**options)
    found: dict[str, Any] = {"job": job}
    if (text := words.get("layout")) is not None:
        found["layout"] = Layout.parse(text)
    return found | {"model": resolve(words["model"] or ""), "machine": load_machine(words["machine"] or "")}


def _of_file(
    file: Path, gpus: str | None, words: dict[str, str | None], options: dict[str, Any], ignore: list[str] | None
) -> dict[str, Any]:
    """The records that a config says, on the machine of ``--gpus``, with job options over its job."""
    if said := [word for word in words.values() if word is not None]:
        raise Mistake(
            f"--from {file} says model and layout: leave out {' '.join(map(repr, said))}; the machine is --gpus"
        )
    if gpus is None:
        raise Mistake(f"--from {file}: on what machine? say --gpus h100:64")
    config = load_config([str(file)], build_request(gpus), ignore=ignore or ())
    return {
        "model": config.model, "layout": config.layout, "machine": machine_of(gpus, config.layout.world),
        "job": load_job(**options, base=config.job.model_dump()), "notes": config.notes,
    }  # fmt: skip


@contextmanager
def shows_notes(notes: ConfigNotes | list[ConfigNotes] | None, *, json: bool) -> Iterator[None]:
    """Say on stderr which keys of a config are not counted, and add them to the JSON that a command prints."""
    for config in notes if isinstance(notes, list) else [notes] if notes else []:
        for line in describe_notes(config):
            say(f"fivefold: {line}")
    if not notes or not json:
        yield
        return
    printed = io.StringIO()
    try:
        with redirect_stdout(printed):
            yield
    finally:
        if text := printed.getvalue().strip():
            show(add_notes(text, notes))


def machine_of(gpus: str, world: int) -> Machine:
    """The machine that ``--gpus`` names; of as many ranks as the config is for unless it says them."""
    from fivefold.machine.catalog import spell_machine

    gpus = spell_machine(gpus)
    return load_machine(gpus if ":" in gpus or gpus.endswith(".toml") else f"{gpus}:{world}")
