"""A file or a launch line of any known software -> model, layout, job and stack, as far as it says them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fivefold.formats.files import document
from fivefold.formats.format import Asked, Document, Format
from fivefold.formats.torchtitan import python, toml
from fivefold.layout.legal import reasons
from fivefold.record import Mistake, nearest
from fivefold.stack.reading import Reading

FORMATS = (
    Format("torchtitan", python.VERSION, "torchtitan", python.recognises, python.read, python.write),
    Format("torchtitan-0.2", toml.VERSION, "torchtitan", toml.recognises, toml.read, toml.write),
)


def read(words: Sequence[str], asked: Asked = Asked()) -> Reading:  # noqa: B008 (a frozen record)
    """What ``words`` say, a file (``FILE.py:FUNCTION`` one of its configs) or a launch line.

    Raises ``Mistake`` if they are of no known software, or contradict themselves.
    """
    found = _document(words)
    form = next((each for each in FORMATS if each.recognises(found)), None)
    if form is None:
        known = ", ".join(dict.fromkeys(each.name for each in FORMATS))
        raise Mistake(f"{found.origin}: is no config that is known; of {known}, it has none's keys")
    result = form.read(found, asked)
    if result.model is None or result.layout is None or result.job is None:
        return result
    refused = tuple(reasons(result.layout, model=result.model, job=result.job, machine=None))
    return result.replace(refused=refused)


def named(name: str) -> Format:
    """The format that ``--to`` names."""
    for form in FORMATS:
        if form.name == name and form.write:
            return form
    raise nearest(name, [each.name for each in FORMATS if each.write], kind="format")


def _document(words: Sequence[str]) -> Document:
    if not words:
        raise Mistake("nothing to read; name a file, or give a launch line after --")
    path, _, function = words[0].partition(".py:")
    if function and len(words) == 1:
        found = document(Path(f"{path}.py"))
        return found._replace(values={"function": function})
    return document(Path(words[0]))
