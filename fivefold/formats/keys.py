"""Tables of a software's keys: what each means in our nouns and its default. Reading and writing both go by them.

field    the field of a noun, perhaps in other words           part     says a field together with other keys
foreign  changes what a step costs, and no noun has a field    idle     changes neither memory, work, traffic nor time
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

from fivefold.record import Mistake
from fivefold.stack.reading import Said


class Key(NamedTuple):
    """A key: ``means`` a field such as ``layout.tp``, or in words; ``words``: their value to ours."""

    kind: Literal["field", "part", "foreign", "idle"]
    means: str = ""
    default: Any = None
    words: Mapping[Any, Any] | None = None


Table = Mapping[str, Key]


def field(means: str, default: Any, words: Mapping[Any, Any] | None = None) -> Key:
    """A key that is the field ``means`` of a noun."""
    return Key("field", means, default, words)


def part(means: str, default: Any) -> Key:
    """A key that says ``means`` together with others."""
    return Key("part", means, default)


def foreign(means: str, default: Any) -> Key:
    """A key that, other than by ``default``, does what nothing here counts."""
    return Key("foreign", means, default)


def idle(*names: str) -> dict[str, Key]:
    """Keys without effect on memory, work, traffic and time; ``group.*``: all of a group."""
    return dict.fromkeys(names, Key("idle"))


def flat(values: Mapping[str, Any], *, origin: str, within: str = "", depth: int = 0) -> dict[str, Any]:
    """Nested tables as one, keys joined by dots."""
    found: dict[str, Any] = {}
    if depth > 16:
        raise Mistake(f"{origin}: tables within tables, more than 16 deep at {within!r}")
    for key, value in values.items():
        name = f"{within}.{key}" if within else str(key)
        if isinstance(value, Mapping) and value:
            found |= flat(value, origin=origin, within=name, depth=depth + 1)
        else:
            found[name] = value
    return found


class Values:
    """What a config gives for the keys of a table, over the table's defaults; what was doubted while it was read."""

    def __init__(self, table: Table, given: Mapping[str, Any], *, origin: str, software: str) -> None:
        self.table, self.origin, self.software = table, origin, software
        self.given = {key: self._typed(key, value) for key, value in given.items()}
        for name, value in self.given.items():
            self._check(name, value)
        self.doubts: dict[str, str] = {}

    def __getitem__(self, key: str) -> Any:
        return self.given.get(key, self.table[key].default)

    def says(self, key: str) -> bool:
        """Whether the config gives the key."""
        return key in self.given

    def doubt(self, key: str, why: str) -> None:
        """List the key as not understood."""
        self.doubts[key] = why

    def whole(self, key: str, *, least: int | None = 1) -> int:
        """The value as a whole number; ``Mistake`` if it is none, or below ``least``."""
        value = self[key]
        if isinstance(value, bool) or not isinstance(value, int) or (least is not None and value < least):
            bound = "" if least is None else f" of {least} or more"
            raise Mistake(f"{self.origin}: {key} must be a whole number{bound}, not {value!r}")
        return value

    def fields(self) -> dict[str, Any]:
        """The fields of nouns that single keys say, by path."""
        found = {}
        for name, key in self.table.items():
            if key.kind != "field" or (value := self[name]) is None:
                continue
            if key.words is not None:
                if (word := value if isinstance(value, str | int) else str(value)) not in key.words:
                    self.doubt(name, f"{value!r} is neither counted nor run; read as {key.default!r}")
                    word = key.default
                value = key.words[word]
            found[key.means] = value
        return found

    def _key(self, name: str) -> Key | None:
        if name in self.table:
            return self.table[name]
        parts = name.split(".")
        groups = (".".join(parts[:end]) + ".*" for end in range(len(parts) - 1, 0, -1))
        return next((self.table[group] for group in groups if group in self.table), None)

    def _typed(self, name: str, value: Any) -> Any:
        """``value`` as a number or truth if the default is one and a file or command line has it as text."""
        key = self._key(name)
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
        """Refuse what is no number for a key whose default is one."""
        key = self._key(name)
        usual = key.default if key else None
        wanted = isinstance(usual, int | float) and not isinstance(usual, bool)
        if wanted and value is not None and not isinstance(value, int | float):
            raise Mistake(f"{self.origin}: {name} must be a number, not {shown(value)!r}")

    def understood(self) -> tuple[Said, ...]:
        """What the config gives, and a noun now has."""
        return tuple(
            Said(key=name, value=shown(value), means=key.means)
            for name, value in self.given.items()
            if (key := self._key(name)) and key.kind in ("field", "part") and name not in self.doubts
        )

    def defaulted(self) -> tuple[Said, ...]:
        """What the config leaves to a default."""
        return tuple(
            Said(key=name, value=shown(key.default), means=key.means)
            for name, key in self.table.items()
            if key.kind in ("field", "part") and key.default is not None and name not in (*self.given, *self.doubts)
        )

    def not_understood(self) -> tuple[Said, ...]:
        """What may change what a step costs, and no noun says."""
        return tuple(self._strange())

    def _strange(self) -> Iterator[Said]:
        for name, value in self.given.items():
            key = self._key(name)
            if key is None:
                yield Said(key=name, value=shown(value), means=f"is no key that is known of {self.software}")
            elif key.kind == "foreign" and value not in (key.default, None) and name not in self.doubts:
                yield Said(key=name, value=shown(value), means=key.means)
        for name, why in self.doubts.items():
            yield Said(key=name, value=shown(self[name] if name in self.table else self.given.get(name)), means=why)


SHOWN = 80  # characters of a value


def shown(value: Any) -> str:
    """A value as a line shows it."""
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 1]}…"


def nested(fields: Mapping[str, Any], noun: str) -> dict[str, Any]:
    """The fields of one noun, ``noun.a.b`` as ``{"a": {"b": …}}``."""
    found: dict[str, Any] = {}
    for path, value in fields.items():
        first, *rest = path.split(".")
        if first != noun:
            continue
        within = found
        for name in rest[:-1]:
            within = within.setdefault(name, {})
        within[rest[-1]] = value
    return found


def written(table: Table, nouns: Mapping[str, Any]) -> dict[str, Any]:
    """The values of the keys that are fields, of ``nouns`` by name; the inverse of ``Values.fields``."""
    found = {}
    for name, key in table.items():
        if key.kind != "field":
            continue
        first, *rest = key.means.split(".")
        value = nouns[first]
        for attribute in rest:
            value = getattr(value, attribute, None)
        if key.words is not None:
            value = next((theirs for theirs, ours in key.words.items() if ours == value), None)
        found[name] = value
    return found
