"""Tables of a software's keys: the meaning of each in our records and its default. Reading and writing both use them.

field    sets one field of a record, perhaps with other values    part   sets a field together with other keys foreign
changes the cost of a step, and no record has a field for it idle     changes neither memory, work, traffic nor time
near     selects a variant of a kernel or a message that is counted as another one of about the same cost

A key in no table is unknown, and is treated as one that may change the cost of a step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple, TypeGuard

from fivefold.errors import UserError
from fivefold.results.reading import ParsedKey


class Key(NamedTuple):
    """A key of a software. ``means``: a field such as ``layout.tp``, or a phrase; ``words``: its values → ours."""

    kind: Literal["field", "part", "foreign", "near", "idle"]
    means: str = ""
    default: Any = None
    words: Mapping[Any, Any] | None = None

    def is_off(self, value: Any) -> bool:
        """Return whether a value of the key has no effect, as it is the default or another word for it."""
        return is_off((self.words or {}).get(str(value), value), self.default)


Table = Mapping[str, Key]


def field(means: str, default: Any, words: Mapping[Any, Any] | None = None) -> Key:
    """Return a key that sets the field ``means`` of a record."""
    return Key("field", means, default, words)


def part(means: str, default: Any) -> Key:
    """Return a key that sets the field ``means`` together with other keys."""
    return Key("part", means, default)


def unmodelled_key(means: str, default: Any) -> Key:
    """Return a key with an effect that is not modelled, unless its value is ``default``."""
    return Key("foreign", means, default)


def unmodelled_keys(means: str, *names: str, default: Any = None) -> dict[str, Key]:
    """Return keys with effects that are not modelled, unless they have the value ``default`` or are off."""
    return dict.fromkeys(names, unmodelled_key(means, default))


def approximate_keys(means: str, *names: str, default: Any = None) -> dict[str, Key]:
    """Return keys that, with values other than ``default``, are counted as a variant of about the same cost."""
    return dict.fromkeys(names, Key("near", means, default))


def ignored_keys(*names: str) -> dict[str, Key]:
    """Return keys without effect on memory, work, traffic and time.

    A name that ends in ``*``, such as ``group.*`` or ``wandb_*``, stands for all keys with that beginning.
    """
    return dict.fromkeys(names, Key("idle"))


def is_number(value: Any) -> TypeGuard[float]:
    """Return whether a value is a number and no truth value."""
    return isinstance(value, int | float) and not isinstance(value, bool)


OFF = ("", "none", "null", "no", "false")


def is_off(value: Any, default: Any) -> bool:
    """Return whether a value has no effect: it is the default, or empty where the default is off."""
    if value is None or value == default or str(value).lower() == str(default).lower():
        return True
    if default not in (None, False, "", "no", "none"):
        return False
    return value is False or value in ([], {}) or (isinstance(value, str) and value.lower() in OFF)


def flatten(values: Mapping[str, Any], *, origin: str, within: str = "", depth: int = 0) -> dict[str, Any]:
    """Flatten nested tables into one, with keys joined by dots."""
    flattened: dict[str, Any] = {}
    if depth > 16:
        raise UserError(f"{origin}: tables are nested more than 16 deep at {within!r}; flatten them")
    for key, value in values.items():
        name = f"{within}.{key}" if within else str(key)
        if isinstance(value, Mapping) and value:
            flattened |= flatten(value, origin=origin, within=name, depth=depth + 1)
        else:
            flattened[name] = value
    return flattened


class Values:
    """The values of a config for the keys of a table, defaults for the others, and the keys that are not modelled."""

    def __init__(
        self, table: Table, given: Mapping[str, Any], *, origin: str, software: str, version: str = ""
    ) -> None:
        self.table, self.origin, self.software, self.version = table, origin, software, version
        self.given = {key: self._parse_text(key, value) for key, value in given.items()}
        for name, value in self.given.items():
            self._check(name, value)
        self.not_modelled: dict[str, str] = {}  # the reason for each key
        self.approximations: dict[str, str] = {}

    def __getitem__(self, key: str) -> Any:
        """Return the value of the key, or its default if the config does not set it or sets a number to null."""
        value, default = self.given.get(key), self.table[key].default
        return default if value is None and (key not in self.given or is_number(default)) else value

    def is_set(self, key: str) -> bool:
        """Return whether the config sets the key."""
        return key in self.given

    def mark_not_modelled(self, key: str, why: str) -> None:
        """List the key as not modelled: an error, unless ``--ignore`` accepts an answer without it."""
        self.not_modelled[key] = why

    def approximate(self, key: str, why: str) -> None:
        """List the key as read as the nearest setting that is counted."""
        self.approximations[key] = why

    def to_int(self, key: str, *, least: int | None = 1) -> int:
        """Return the value as an integer; raise ``UserError`` if it is not one or is below ``least``."""
        value = self[key]
        if isinstance(value, bool) or not isinstance(value, int) or (least is not None and value < least):
            bound = "" if least is None else f" of {least} or more"
            raise UserError(f"{self.origin}: {key} must be a whole number{bound}, not {value!r}")
        return value

    def optional(self, key: str) -> int | None:
        """Return the value as an integer of 1 or more, or None if it is unset; raise ``UserError`` otherwise."""
        value = self[key]
        if isinstance(value, float) and value.is_integer() and value >= 1:
            return int(value)  # a shell script may write 220e6
        return self.to_int(key) if value else None

    def number(self, key: str) -> float | None:
        """Return the value as a number, or None if it is unset; raise ``UserError`` for anything else."""
        value = self[key]
        if value is None or (is_number(value) and math.isfinite(value)):
            return value
        raise UserError(f"{self.origin}: {key} must be a number, not {shorten_value(value)!r}")

    def pair(self, key: str) -> tuple[float, float] | None:
        """Return the value as two numbers, or None if it is unset; raise ``UserError`` for anything else."""
        value = self[key]
        if value is None:
            return None
        if isinstance(value, list | tuple) and len(value) == 2 and all(map(is_number, value)):
            return value[0], value[1]
        raise UserError(f"{self.origin}: {key} must be two numbers, not {shorten_value(value)!r}")

    def fields(self) -> dict[str, Any]:
        """Return the fields of our records that single keys set, by path."""
        fields = {}
        for name, key in self.table.items():
            if key.kind != "field" or (value := self[name]) is None:
                continue
            if key.words is not None:
                if (word := value if isinstance(value, str | int) else str(value)) not in key.words:
                    self.mark_not_modelled(name, f"{value!r} is neither counted nor run; read as {key.default!r}")
                    word = key.default
                value = key.words[word]
            fields[key.means] = value
        return fields

    def find_key(self, name: str) -> Key | None:
        """Return the table's entry for a key, by its name or by a group such as ``wandb_*``; None if unknown."""
        if name in self.table:
            return self.table[name]
        groups = (name[:end] + "*" for end in range(len(name), 0, -1) if name[end - 1] in "._")
        return next((self.table[group] for group in groups if group in self.table), None)

    def _parse_text(self, name: str, value: Any) -> Any:
        """Return ``value`` as a number or boolean if it is text and the key's default is not text."""
        key = self.find_key(name)
        if not isinstance(value, str) or key is None or isinstance(key.default, str):
            return value
        low = value.strip().lower()
        if low in ("true", "false"):
            return low == "true"
        if low in ("none", "null"):
            return None
        try:
            return int(low) if low.lstrip("+-").isdecimal() and len(low) < 20 else float(low)
        except ValueError:
            return value

    def _check(self, name: str, value: Any) -> None:
        """Raise ``UserError`` for a value that is not a number if the default is one."""
        key = self.find_key(name)
        default = key.default if key else None
        if is_number(default) and value is not None and not isinstance(value, int | float):
            raise UserError(f"{self.origin}: {name} must be a number, not {shorten_value(value)!r}")

    def list_parsed(self) -> tuple[ParsedKey, ...]:
        """Return the keys of the config that our records represent."""
        return tuple(
            ParsedKey(key=name, value=shorten_value(value), means=key.means)
            for name, value in self.given.items()
            if (key := self.find_key(name)) and key.kind in ("field", "part") and not self._is_marked(name)
        )

    def list_defaults(self) -> tuple[ParsedKey, ...]:
        """Return the keys that the config leaves at their defaults."""
        return tuple(
            ParsedKey(key=name, value=shorten_value(key.default), means=key.means)
            for name, key in self.table.items()
            if key.kind in ("field", "part")
            and key.default is not None
            and name not in self.given
            and not self._is_marked(name)
        )

    def list_unparsed(self) -> tuple[ParsedKey, ...]:
        """Return the keys that may change the cost of a step and that no record represents."""
        return tuple(self._iterate_unknown())

    def list_approximated(self) -> tuple[ParsedKey, ...]:
        """Return the keys that are read as the nearest setting that is counted."""
        return (*self._iterate_kind("near"), *self._iterate_marked(self.approximations))

    def list_harmless(self) -> tuple[ParsedKey, ...]:
        """Return the keys of the config that have no effect on the cost of a step."""
        return tuple(self._iterate_harmless())

    def _iterate_harmless(self) -> Iterator[ParsedKey]:
        """Yield keys without effect on a step, empty tables, and features that are not modelled but turned off."""
        for name, value in self.given.items():
            key = self.find_key(name)
            if self._is_marked(name):
                continue
            if key is None:
                if value == {}:
                    yield ParsedKey(key=name, value="", means="an empty table")
            elif key.kind == "idle":
                yield ParsedKey(key=name, value=shorten_value(value), means="no effect on a training step")
            elif key.kind in ("foreign", "near") and key.is_off(value):
                means = "as it is counted" if value else "off, as it is counted"
                yield ParsedKey(key=name, value=shorten_value(value), means=means)

    def _iterate_unknown(self) -> Iterator[ParsedKey]:
        """Yield the keys that no part of the reader knows, and those that are not modelled."""
        for name, value in self.given.items():
            if self.find_key(name) is None and value != {} and not self._is_marked(name):
                yield ParsedKey(
                    key=name, value=shorten_value(value), means=f"is not a known key of {self.software} {self.version}"
                )
        yield from self._iterate_kind("foreign")
        yield from self._iterate_marked(self.not_modelled)

    def _iterate_kind(self, kind: str) -> Iterator[ParsedKey]:
        """Yield the keys of one kind that are not off."""
        for name, value in self.given.items():
            key = self.find_key(name)
            if key and key.kind == kind and not self._is_marked(name) and not key.is_off(value):
                yield ParsedKey(key=name, value=shorten_value(value), means=key.means)

    def _iterate_marked(self, reasons: Mapping[str, str]) -> Iterator[ParsedKey]:
        for name, why in reasons.items():
            yield ParsedKey(
                key=name, value=shorten_value(self[name] if name in self.table else self.given.get(name)), means=why
            )

    def _is_marked(self, name: str) -> bool:
        return name in self.not_modelled or name in self.approximations


def to_list(value: Any) -> list[Any]:
    """Return a value that may be a list, or one of its elements, as a list; an unset value as an empty list."""
    return [] if value in (None, False) else list(value) if isinstance(value, list | tuple) else [value]


MAX_VALUE_CHARACTERS = 80  # maximum characters of a value in a message


def shorten_value(value: Any) -> str:
    """Return a value as text of at most ``MAX_VALUE_CHARACTERS`` characters."""
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= MAX_VALUE_CHARACTERS else f"{text[: MAX_VALUE_CHARACTERS - 1]}…"


def nest(fields: Mapping[str, Any], record_name: str) -> dict[str, Any]:
    """Return the fields of one record, ``record_name.a.b`` as ``{"a": {"b": …}}``."""
    tree: dict[str, Any] = {}
    for path, value in fields.items():
        first, *rest = path.split(".")
        if first != record_name:
            continue
        table = tree
        for name in rest[:-1]:
            table = table.setdefault(name, {})
        table[rest[-1]] = value
    return tree


def write_values(table: Table, records: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of keys of kind ``field``, read from ``records`` by name; the inverse of ``Values.fields``."""
    values = {}
    for name, key in table.items():
        if key.kind != "field":
            continue
        first, *rest = key.means.split(".")
        value = records[first]
        for attribute in rest:
            value = getattr(value, attribute, None)
        if key.words is not None:
            value = next((theirs for theirs, ours in key.words.items() if ours == value), None)
        values[name] = value
    return values
