"""Build a job from keyword arguments: those of the command line, and any other field of ``Job`` and its stack.

``ff.predict(…, seq=8192, gbs=64, precision="fp8", optimizer={"kind": "muon"}, loss="chunked")``
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fivefold.record import UserError
from fivefold.requests.job import FIELDS
from fivefold.requests.words import parse_length

if TYPE_CHECKING:
    from fivefold.job import Job


def _read_length(text: str) -> int | float:
    """Return the tokens of a sequence length such as ``8k``; raises ``UserError`` for other text."""
    try:
        return parse_length(text)
    except ValueError as error:
        raise UserError(f"seq={text!r} {error}") from None


def build_job(words: Mapping[str, Any]) -> Job:
    """Build the job of keyword arguments; raises ``UserError`` for an unknown field, or a field that is given twice."""
    from pathlib import Path

    from fivefold.job import Job
    from fivefold.record import read_file

    fields = {name: value for name, value in words.items() if value is not None and name != "job"}
    for short, name in FIELDS.items():
        if short in fields and name in fields:
            raise UserError(f"{short}= and {name}= both set {name}; keep one")
    if isinstance(fields.get("seq"), str):
        fields["seq"] = _read_length(fields["seq"])
    fields = {FIELDS.get(name, name): value for name, value in fields.items()}
    base = words.get("job")
    if isinstance(base, Job):
        return Job.read(base.model_dump() | fields, origin="job") if fields else base
    if isinstance(base, Mapping):
        return Job.read({**base, **fields}, origin="job")
    if base is None:
        return Job.read(fields, origin="job")
    return Job.read(read_file(Path(base)) | fields, origin=str(base))
