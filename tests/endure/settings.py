"""Every field of a job, its precision and its stack as ``FIELD=VALUE``, with every value that matters.

A choice: each of its words; a truth: both; a number: its limits and what lies beyond them; a list: one, several, all,
none; and of every kind what is no value at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from fivefold.errors import UserError
from fivefold.job import RECIPES, Job
from fivefold.requests.job import load_job
from fivefold.stack.catalog import STACKS
from fivefold.stack.spec import FACTS, Stack

NAMED: dict[str, tuple[str, ...]] = {  # values that no type lists
    "precision": tuple(RECIPES),
    "stack": tuple(STACKS),
    "adapter": ("lora:8", "qlora", "dora:4", "qdora:16"),
    "adapter.targets": ("all-linear", "q_proj,v_proj", "q_proj,experts.gate_up_proj,experts.down_proj"),
    "adapter.rank_pattern": ("q_proj:8", "q_proj:2,down_proj:64", "{q_proj = 4}"),
    "adapter.alpha_pattern": ("o_proj:8", "o_proj:12.5"),
    "freeze": ("embed_tokens", "layers[1:].mlp", "embed_tokens,layers[:-1]", "norm,lm_head", "layers[0].q_proj"),
    "ramp": ("{first = 8, step = 8, every = 2}", "{first = 64, step = 64, samples = 4096}"),
    "optimizer.groups": ('[{of = "head", rate = 0.5}]', '[{of = "embeddings", weight_decay = 0.0}]'),
}
NO_VALUES = ("", " ", "x", "é", "{a=1}", "[1,", "none", "None", "nan")
INTEGERS = (-1, 0, 1, 2, 3, 7, 64, 1.5)
REALS = (-1.0, 0.0, 1e-9, 0.1, 0.5, 1.0, 2.5, 1e6, 1e300)


@cache
def settings() -> tuple[str, ...]:
    """Return every setting, in a fixed order; fields of the stack both by their own name and as ``stack.NAME``."""
    result = dict.fromkeys(f"{path}={value}" for path, value in _list_record_settings(Job, ""))
    result |= dict.fromkeys(
        f"{path}={value}" for path, value in _list_record_settings(Stack, "") if path.split(".")[0] in FACTS
    )
    return tuple(result)


@cache
def list_valid_settings() -> tuple[str, ...]:
    """Return those settings that alone make a job."""
    return tuple(text for text in settings() if _is_sound(text))


def _is_sound(text: str) -> bool:
    try:
        load_job(settings=[text])
    except UserError:
        return False
    return True


def _list_record_settings(record: type[BaseModel], prefix: str) -> Iterator[tuple[str, str]]:
    for name, field in record.model_fields.items():
        path = f"{prefix}{name}"
        for value in (*_values(field), *NO_VALUES, *NAMED.get(path, ())):
            yield path, value
        yield f"{path}.x", "1"
        for inner in _records(field.annotation):
            yield from _list_record_settings(inner, f"{path}.")


def _records(annotation: Any) -> Iterator[type[BaseModel]]:
    for kind in (annotation, *get_args(annotation)):
        if isinstance(kind, type) and not get_args(kind) and issubclass(kind, BaseModel):
            yield kind


def _values(field: FieldInfo) -> list[str]:
    return list(dict.fromkeys(_list_type_values(field.annotation, field.metadata)))


def _list_type_values(kind: Any, limits: list[Any]) -> Iterator[str]:
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        yield from _list_type_values(inner[0], [*limits, *inner[1:]])
    elif origin is Literal:
        yield from map(str, inner)
    elif origin in (Union, UnionType):
        for item in inner:
            yield from _list_type_values(item, limits)
    elif origin is tuple:
        words = [list(dict.fromkeys(_list_type_values(entry, limits))) for entry in inner if entry is not Ellipsis]
        yield from words[0]
        yield ",".join(word[0] for word in words if word)
        yield ",".join(words[0])
        yield ",".join([words[0][0], words[0][0]]) if words[0] else "1,2"
        yield "[" + ",".join(repr(entry) for entry in words[0][:2]) + "]"
    elif kind is bool:
        yield from ("true", "false")
    elif kind in (int, float):
        bounds = [
            bound
            for limit in _flatten(limits)
            for name in ("ge", "gt", "le", "lt")
            if (bound := getattr(limit, name, None)) is not None
        ]
        yield from (str(number) for bound in bounds for number in (bound - 1, bound, bound + 1))
        yield from map(str, INTEGERS if kind is int else REALS)


def _flatten(limits: list[Any]) -> Iterator[Any]:
    """The limits themselves, also those within a ``Field`` of ``Annotated``."""
    for limit in limits:
        yield from limit.metadata if isinstance(limit, FieldInfo) else (limit,)
