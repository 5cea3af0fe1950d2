"""Build a job from keyword arguments: those of the command line, and any other field of ``Job`` and its stack.

``ff.predict(…, seq=8192, gbs=64, precision="fp8", optimizer={"kind": "muon"}, loss="chunked")``
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from fivefold.errors import UserError
from fivefold.layout.batch import fill_batch
from fivefold.layout.stored_base import keep_stored_base
from fivefold.requests.job import FIELDS
from fivefold.requests.words import parse_length

if TYPE_CHECKING:
    from fivefold.job import Job
    from fivefold.layout.spec import Layout
    from fivefold.model.spec import Model


def _read_length(text: str) -> int | float:
    """Return the tokens of a sequence length such as ``8k``; raises ``UserError`` for other text."""
    try:
        return parse_length(text)
    except ValueError as error:
        raise UserError(f"seq={text!r} {error}") from None


def build_job(
    words: Mapping[str, Any], *, model: Model | None = None, ranks: int | None = None, layouts: Iterable[Layout] = ()
) -> Job:
    """Build the job of keyword arguments; raises ``UserError`` for an unknown field, or a field that is given twice.

    Given ``ranks`` and ``layouts``, ``fill_batch`` chooses a global batch that the words do not name. Given ``model``,
    an adapter has the base that its repository stores, if the words name none.
    """
    from fivefold.job import Job

    values, origin = _read_values(words)
    job = Job.read(values, origin=origin) if isinstance(values, dict) else values
    if model is not None:
        job = keep_stored_base(job, model)
    return job if ranks is None else fill_batch(job, ranks=ranks, stated=list_stated(words), layouts=layouts)


def list_stated(words: Mapping[str, Any]) -> frozenset[str]:
    """Return the fields of a job that keyword arguments give; a ``Job`` gives all."""
    values, _ = _read_values(words)
    return frozenset(values if isinstance(values, dict) else type(values).model_fields)


def _read_values(words: Mapping[str, Any]) -> tuple[dict[str, Any] | Job, str]:
    """Return the fields of the job that keyword arguments give, or a ``Job`` that they do not change; and an origin."""
    from pathlib import Path

    from fivefold.job import Job
    from fivefold.text_files import read_file

    fields = {name: value for name, value in words.items() if value is not None and name != "job"}
    for short, name in FIELDS.items():
        if short in fields and name in fields:
            raise UserError(f"{short}= and {name}= both set {name}; keep one")
    if isinstance(fields.get("seq"), str):
        fields["seq"] = _read_length(fields["seq"])
    fields = {FIELDS.get(name, name): value for name, value in fields.items()}
    base = words.get("job")
    if isinstance(base, Job):
        return (base.model_dump() | fields if fields else base), "job"
    if base is None or isinstance(base, Mapping):
        return {**(base or {}), **fields}, "job"
    return read_file(Path(base)) | fields, str(base)
