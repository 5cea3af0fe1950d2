"""The config of a trainer that is pasted on the page Plan, read as by ``fivefold read``: it fills in the question."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import AfterValidator, Field

from fivefold.errors import UserError
from fivefold.interop.format import LENGTH_MISSING, NO_MODEL, RANKS_MISSING, Overrides
from fivefold.interop.read import read_pasted
from fivefold.machine import catalog as machines
from fivefold.model import catalog as models
from fivefold.model.spec import Model
from fivefold.requests.commands import JobRequest
from fivefold.requests.job import list_job_options
from fivefold.results.reading import Reading
from fivefold.web.folder import ServedFolder
from fivefold.web.question import CONFIG, JobQuestion, PredictQuestion


def _check_size(text: str) -> str:
    """Return the text; raise a ``ValueError`` if it is too large for the address that a redirect of the page names."""
    if (size := len(text.encode("utf-8", "replace"))) > CONFIG:
        raise ValueError(f"must have {CONFIG:,} bytes or fewer, not {size:,}; keep the config of one run")
    return text


RunConfig = Annotated[
    str,
    AfterValidator(_check_size),
    Field(description="The text of a trainer's config, script or launch line, which fills in the question."),
]
FILLED = ("model", "config", "machine", "layout", *JobQuestion.shape, *JobRequest.model_fields, *JobQuestion.job_keys)
CONTROLS = {key: name for name, key in JobQuestion.job_keys.items()}  # of the page, by field of the job


class ReadConfig(NamedTuple):
    """A config as it was read, and the question that it fills in.

    ``given``: what the question gives, as the config does not state it; ``changed``: fields that the question has
    otherwise.
    """

    reading: Reading
    filled: PredictQuestion
    given: tuple[str, ...]
    changed: tuple[str, ...]


def read_run_config(query: PredictQuestion, text: str, *, folder: ServedFolder, local: Path) -> ReadConfig:
    """Read the config ``text``; model, ranks and length that it leaves open are those of the question.

    Raises ``UserError`` in one line if it is of no known software, does not state a step even so, or states what the
    fields of the page cannot express.
    """
    reading, given = _read(query, text, folder=folder, local=local)
    assert reading.model is not None
    assert reading.job is not None
    filled = query.replace(**_list_fields(query, reading, folder))
    resolved = filled.resolve(folder=folder, local=local)
    job = resolved.job.replace(precision=resolved.job.precision.replace(name=reading.job.precision.name))
    differing = [name for name in type(job).model_fields if getattr(job, name) != getattr(reading.job, name)]
    differing += ["model"] if resolved.model.replace(source=reading.model.source) != reading.model else []
    differing += ["layout"] if filled.parse_layout(resolved.machine) != reading.layout else []
    if differing:
        raise UserError(
            f"{reading.origin}: the page has no controls for its {', '.join(differing)}; read it by `fivefold predict "
            "--from FILE`"
        )
    changed = [name for name in FILLED if getattr(query, name) != getattr(filled, name)]
    return ReadConfig(reading, filled, given, tuple(changed))


def _read(query: PredictQuestion, text: str, *, folder: ServedFolder, local: Path) -> tuple[Reading, tuple[str, ...]]:
    """Return the reading of a config with a model, a layout and a job, and what of them the question gives."""
    machine = machines.resolve(query.machine, local=local, find=folder.path)
    asked, given = Overrides(ranks_per_node=machine.ranks_per_node), list[str]()

    def read(**facts: Any) -> Reading:
        nonlocal asked
        asked = asked._replace(**facts)
        return read_pasted(text, asked, folder=folder.root, find=folder.path)

    reading = read()
    names_model = query.config or query.model != type(query).model_fields["model"].default
    if NO_MODEL in reading.missing or (reading.model is None and names_model):
        reading = read(model=query.resolve_model(folder))
        given.append("model")
    if query.seq and any(line.startswith(LENGTH_MISSING.partition(":")[0]) for line in reading.missing):
        reading = read(sequence=query.seq)
        given.append("tokens per sequence")
    if RANKS_MISSING in reading.missing:
        reading = read(ranks=machine.ranks)
        given.append("number of GPUs")
    if reading.layout is None or reading.job is None:
        raise UserError(f"{reading.origin}: does not say {'; '.join(reading.missing)}")
    return reading, tuple(given)


def _list_fields(query: PredictQuestion, reading: Reading, folder: ServedFolder) -> dict[str, Any]:
    """Return the fields of the question that a config fills in: what it states, and defaults for what it leaves out."""
    model, layout, job = reading.model, reading.layout, reading.job
    assert model is not None
    assert layout is not None
    assert job is not None
    name = _find_name(model, folder)
    fields = {name: type(query).model_fields[name].default for name in FILLED}
    fields |= {
        "model": name or model.name,
        "config": "" if name else json.dumps(model.dump_changes()),
        "machine": machines.replace_ranks(query.machine, layout.world),
        "layout": str(layout),
        "stack": job.stack.name,  # a setting of the user does not replace it
    }
    for option, value in list_job_options(job):
        key, _, text = value.partition("=") if option == "--set" else (option.removeprefix("--"), "", value)
        key = CONTROLS.get(key, key)
        if key in FILLED:
            fields[key] = text == "true" if isinstance(fields[key], bool) else text
        else:
            fields["set"] += (value,)
    return fields


def _find_name(model: Model, folder: ServedFolder) -> str | None:
    """Return the name by which the page finds the model; None if there is none, as of a path outside of its folder."""
    with suppress(UserError):
        if name := models.find_name(model):
            folder.path(name)
            return name
    return None
