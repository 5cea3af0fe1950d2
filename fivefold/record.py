"""``Record``, the frozen, validated base of all records: unknown keys and bad values give a one-line message."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Self, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import ErrorDetails

from fivefold.errors import UserError

PLAIN = frozenset({int, float, str, type(None)})  # values of these types cannot contain a boolean


class Record(BaseModel):
    """An immutable record, validated on construction; ``replace`` makes changed copies.

    Its schema is built when it is first validated: most commands use few of the records that they import. Modules with
    many fields do without ``from __future__ import annotations``: pydantic would compile the text of each annotation.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=False, allow_inf_nan=False, protected_namespaces=(), defer_build=True
    )

    @model_validator(mode="before")
    @classmethod
    def _refuse_booleans_for_numbers(cls, values: object) -> object:
        """Replace a boolean given for a number by a word, as pydantic would otherwise read ``layers = true`` as 1."""
        if not isinstance(values, dict):
            return values
        single, several = _list_number_fields(cls)  # fast path for plain values: a search creates many records
        suspects = several if PLAIN.issuperset(map(type, map(values.get, single))) else (*single, *several)
        replaced = {
            key: _replace_booleans(values[key]) for key in suspects if key in values and _has_boolean(values[key])
        }
        return {**values, **replaced} if replaced else values

    def replace(self, **changes: Any) -> Self:
        """Return a validated copy with some fields changed; nested records are not validated again.

        A ``UserError`` names the kind of the record and the field, as changes are often what a user chose.
        """
        kind = type(self)
        values = self.__dict__  # fields and cached properties
        try:
            return kind.model_validate({name: values[name] for name in kind.__pydantic_fields__} | changes)
        except ValidationError as error:
            name = re.sub(r"(?<=[a-z])(?=[A-Z][a-z])", " ", kind.__name__).lower()
            raise UserError(f"{name}: {explain(error, kind)}") from None

    def dump_changes(self) -> dict[str, Any]:
        """Return the fields that differ from the defaults of their records, as values for TOML, which ``read`` reads.

        TOML has no null: the default of a field that may be None is None.
        """
        return self.model_dump(mode="json", exclude_none=True, exclude_defaults=True)

    def __dir__(self) -> list[str]:
        """Return the names of fields, properties and methods that are defined here, without those of pydantic."""
        record_classes = [kind for kind in type(self).__mro__ if issubclass(kind, Record)]
        names = {name for kind in record_classes for name in (*vars(kind), *kind.__annotations__) if name[0] != "_"}
        return sorted(names - type(self).__class_vars__ - {"model_config"})

    if not TYPE_CHECKING:  # type checkers know the fields

        def __getattr__(self, name: str) -> Any:
            """Raise an ``AttributeError`` that says where the attribute is, or which there are."""
            try:
                return super().__getattr__(name)
            except AttributeError:
                if name.startswith("_"):
                    raise
                raise _MissingAttributeError(self, name) from None

    @classmethod
    def read(cls, values: dict[str, Any], *, origin: str, options: Mapping[str, str] | None = None) -> Self:
        """Validate ``values``; a ``UserError`` names ``origin``, the field and the nearest known field.

        ``options``: what the user typed for a field, such as ``--gbs``, which the error then names.
        """
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            line = explain(error, cls, options or {})
            raise UserError(line if line.startswith("--") else f"{origin}: {line}") from None


MAX_ERRORS = 8  # errors listed in one line at most
# Our messages by pydantic's error type; braces are filled from pydantic's context.
WORDS = {
    "missing": "is missing",
    "greater_than": "must be more than {gt}",
    "greater_than_equal": "must be {ge} or more",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be {le} or less",
    "finite_number": "must be a finite number",
    "literal_error": "must be {expected}",
    "string_type": "must be text",
    "too_short": "must have {min_length} or more entries",
    "too_long": "must have {max_length} entries or fewer",
    "path_type": "must be a path",
    **dict.fromkeys(("int_type", "int_parsing", "int_parsing_size", "int_from_float"), "must be a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "must be a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "must be true or false"),
    **dict.fromkeys(("list_type", "tuple_type"), "must be a list"),
    **dict.fromkeys(("model_type", "model_attributes_type", "dict_type"), "must be a table of fields"),
}


def explain(error: ValidationError, record: type[BaseModel], options: Mapping[str, str] | None = None) -> str:
    """Describe all of pydantic's errors in one line; suggest the nearest field for an unknown key.

    ``options``: what the user typed for a field, in place of its name.
    """
    errors = error.errors()
    messages = list(
        dict.fromkeys(_explain(item, record, options or {}) for item in errors if item["type"] != "missing")
    )
    missing = [_format_field_path(item, record) for item in errors if item["type"] == "missing"]
    if len(missing) > 1:
        messages.insert(0, f"missing: {', '.join(missing)}")
    elif missing:
        messages.insert(0, f"{missing[0]} {WORDS['missing']}")
    suffix = f" (and {len(messages) - MAX_ERRORS} more)" if len(messages) > MAX_ERRORS else ""
    return " ".join(f"{'; '.join(messages[:MAX_ERRORS])}{suffix}".splitlines())  # a value may have several lines


def reword(line: str) -> str:
    """Replace pydantic's wording in one of typer's messages by ours."""
    for pattern, replacement in (
        (r"Value error, ", ""),
        (r"Input should be a valid integer(, unable to parse string as an integer)?", "must be a whole number"),
        (
            r"Unable to parse input string as an integer, exceeded maximum size",
            "must be a whole number with fewer digits",
        ),
        (r"Input should be a valid number(, unable to parse string as a number)?", "must be a number"),
        (r"Input should be greater than or equal to (\S+)", r"must be \1 or more"),
        (r"Input should be less than or equal to (\S+)", r"must be \1 or less"),
        (r"Input should be", "must be"),
        (r"Extra inputs are not permitted", "is not a parameter of this page"),
    ):
        line = re.sub(pattern, replacement, line)
    return line


def _format_field_path(error: ErrorDetails, record: type[BaseModel]) -> str:
    """Return the path of the field with an error as a user writes it: without the names of inlined records.

    Entries of lists are counted from 0, as in ``stages[0]``.
    """
    kept = (key for key in error["loc"] if key not in getattr(record, "inlined", ()))
    keys = [key for key in kept if not re.match(r"constrained-|(list|tuple)\[", str(key))]  # types of a union
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys).removeprefix(".")


VERBS = ("is ", "has ", "holds ", "must ", "cannot ")  # a message that begins so has the field as its subject


def _explain(error: ErrorDetails, record: type[BaseModel], options: Mapping[str, str]) -> str:
    """Describe one of pydantic's errors, with its field or what the user typed for it."""
    place = _format_field_path(error, record)
    if error["type"] == "extra_forbidden":
        hint = _describe_unknown(str(error["loc"][-1]), error["loc"], record)
        if place not in options:
            return f"unknown key {place!r}{hint}"
        return f"{options[place]}: no such field{hint or f'; {_list_keys(record)}'}"
    field, _, part = place.partition(".")
    place = options.get(place) or (f"{options[field]}: {part}" if field in options else place)
    words = WORDS.get(error["type"])
    bounds = {key: f"{value:g}" if isinstance(value, float) else value for key, value in error.get("ctx", {}).items()}
    message = words.format(**bounds) if words else error["msg"].removeprefix("Value error, ")
    if error["type"] not in ("value_error", "missing"):
        message += f", not {reprlib.repr(error['input'])}"
    if (
        error["type"] == "model_type"
        and isinstance(error["input"], str)
        and (fields := _list_known_keys(record, (*error["loc"], "")))
    ):
        message += f"; set one of its fields, such as {error['loc'][-1]}.{fields[0]}={error['input']}"
    separator = " " if message.startswith(VERBS) else ": "
    return f"{place}{separator}{message}" if place else message


def _describe_unknown(key: str, place: tuple[int | str, ...], record: type[BaseModel]) -> str:
    """Return the hint after the name of an unknown key: why it is not supported, or the nearest known key."""
    reasons: dict[str, str] = getattr(record, "not_supported", {})
    if reason := next((reason for word, reason in reasons.items() if word in key.lower()), ""):
        return f": {reason}; {_list_keys(record)}"
    close = get_close_matches(key, _list_known_keys(record, place), n=1)
    if not close and len(place) == 1:  # perhaps a field of a nested record
        nested = getattr(record, "spellings", {}) | {name: f"{path}.{name}" for path, name in _list_nested_keys(record)}
        close = [nested[name] for name in get_close_matches(key, nested, n=1)]
    return f"; did you mean {close[0]!r}?" if close else ""


class _MissingAttributeError(AttributeError):
    """An attribute that a record does not have; its message is written when it is read.

    Writing it takes a millisecond, and ``dict(record)`` or ``getattr`` with a default reads none.
    """

    def __str__(self) -> str:
        return _describe_missing_attribute(*self.args)


def _describe_missing_attribute(record: Record, name: str) -> str:
    """Return where an attribute is that a record does not have, or the attributes that it has."""
    places: dict[str, list[str]] = {key: [key] for key in dir(record)}
    for field, key in _list_nested_keys(type(record)):
        if places.get(key) != [key]:
            places.setdefault(key, []).append(f"{field}.{key}")
    close = get_close_matches(name, places, n=1)
    if not close:
        return f"{type(record).__name__} has no {name!r}; it has {', '.join(dir(record))}"
    *others, last = map(repr, places[close[0]])
    return f"{type(record).__name__} has no {name!r}; did you mean {', '.join(others)}{' or ' * bool(others)}{last}?"


def _list_nested_keys(record: type[BaseModel]) -> Iterator[tuple[str, str]]:
    """Yield the fields of the records that are fields of ``record``, each after the name of its record."""
    inlined = getattr(record, "inlined", ())
    for field in record.model_fields:
        for inner in _list_records(record.model_fields[field].annotation) if field not in inlined else ():
            yield from ((field, name) for name in inner.model_fields)


@lru_cache
def _list_number_fields(record: type[BaseModel]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of the fields with one number and of those with several; none of them accepts a boolean."""
    kinds = {}
    for name, field in record.model_fields.items():
        types = list(_list_types(field.annotation))
        if (int in types or float in types) and not (bool in types or Any in types):
            kinds[name] = field.annotation
    single = tuple(name for name, kind in kinds.items() if {kind, *get_args(kind)} <= {int, float, type(None)})
    return single, tuple(name for name in kinds if name not in single)


def _has_boolean(value: object) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_has_boolean, value))
    return value is True or value is False or (isinstance(value, Mapping) and any(map(_has_boolean, value.values())))


def _replace_booleans(value: object) -> object:
    """Replace booleans, also nested ones, by the words ``true`` and ``false``."""
    if isinstance(value, list | tuple):
        return [_replace_booleans(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _replace_booleans(item) for key, item in value.items()}
    return str(value).lower() if isinstance(value, bool) else value


def _list_types(annotation: Any) -> Iterator[Any]:
    """Yield a field's type, and all that it contains."""
    yield annotation
    for part in get_args(annotation):
        yield from _list_types(part)


def holds_list(record: type[BaseModel], path: Sequence[str]) -> bool:
    """Tell whether the field at ``path``, which may be of a nested record, is a list."""
    for name in getattr(record, "inlined", ()):
        within = _list_records(record.model_fields[name].annotation)[0]
        record = within if path[0] in within.model_fields else record
    for name in path[:-1]:
        inner = _list_records(record.model_fields[name].annotation) if name in record.model_fields else []
        if not inner:
            return False
        record = inner[0]
    return path[-1] in record.model_fields and get_origin(record.model_fields[path[-1]].annotation) is tuple


def _list_keys(record: type[BaseModel]) -> str:
    inlined = "".join(
        f", and those of its {name} (docs/reference/configuration.md)" for name in getattr(record, "inlined", ())
    )
    return f"the keys are {', '.join(record.model_fields)}{inlined}"


def _list_known_keys(record: type[BaseModel], place: tuple[int | str, ...]) -> list[str]:
    """Return the field names of the record, perhaps nested, to which the key at ``place`` belongs."""
    for part in place[:-1]:
        if part in record.model_fields:
            inner = _list_records(record.model_fields[str(part)].annotation)
            record = inner[0] if inner else record
    known = list(record.model_fields)
    for name in getattr(record, "inlined", ()):
        known += [key for inner in _list_records(record.model_fields[name].annotation) for key in inner.model_fields]
    return known


def _list_records(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and not get_args(annotation) and issubclass(annotation, BaseModel):
        return [annotation]
    return [record for part in get_args(annotation) for record in _list_records(part)]


def find_first_difference(actual: Record, expected: Record, *, skip: tuple[str, ...] = ()) -> str | None:
    """Return the first field in which two records of one type differ, with both values; None if they are equal."""
    return next(list_differences(actual, expected, skip=skip), None)


def list_differences(actual: Record, expected: Record, *, skip: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield the fields in which two records of one type differ, those of nested records too, with both values."""
    for name in type(actual).model_fields:
        actual_value = getattr(actual, name)
        expected_value = getattr(expected, name)
        if name in skip or actual_value == expected_value:
            continue
        if isinstance(actual_value, Record) and type(actual_value) is type(expected_value):
            yield from (f"{name}.{text}" for text in list_differences(actual_value, expected_value))
        else:
            yield f"{name}={actual_value!r} instead of {expected_value!r}"
