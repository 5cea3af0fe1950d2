"""Keys of third-party configs that a reading calls understood: each changes the answer, of one config at least.

    python -m tests.endure.keys --configs 100 --seeds 11 12

A key without effect in its software's own list is harmless, and one with an effect that is not modelled is an error
(``tests/endure/formats.py`` holds both). What remains is a key that is said to be understood and then changes nothing.
Of every such key, values that are not its default are tried in the configs of ``CONFIGS`` until the answer changes, or
names the key. Then configs are drawn with keys that are known to act there, several at once: each must still act when
it is the only one that is taken away, or be named. Prints what does not hold, and exits 1 if anything does not.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from fivefold.errors import UserError
from fivefold.interop.keys import Key, Table, Values, flatten
from fivefold.interop.registry import FORMATS
from fivefold.rendering.progress import show_progress
from fivefold.results.reading import Reading
from tests.endure.stop_signals import end_at_stop_signal
from tests.interop.drawn_keys import SOFTWARE, list_software_keys, list_translated_names, read_with
from tests.interop.known_configs import CONFIGS, OVERRIDDEN, SWITCHES, VALUES, WITHOUT_EFFECT

TABLES: dict[str, Table] = {name: table for form in FORMATS for name, table in form.keys.items()}


class Acting(NamedTuple):
    """A key with a value that changes the answer of a config, which ``CONFIGS`` has under a number."""

    config: int
    key: str
    value: Any


def describe_answer(reading: Reading) -> dict[str, object]:
    """Return all of a reading that an answer is computed from, or shows, by the name of the field."""
    answer: dict[str, object] = {"ranks": reading.ranks, "missing": reading.missing}
    for name in ("model", "layout", "job"):
        record = getattr(reading, name)
        answer |= flatten({name: record.model_dump() if record else None}, origin=name)
    if reading.data:
        answer |= flatten({"data": reading.data.fields}, origin="data") | dict.fromkeys(reading.data.remarks, True)
    return answer | {item.key: item.means for item in (*reading.not_understood, *reading.approximated)}


def is_named(reading: Reading, key: str) -> bool:
    """Return whether the answer names the key: as an error, or as what is read as its nearest setting."""
    named = {item.key for item in (*reading.not_understood, *reading.approximated)}
    return bool(named & list_translated_names(key))


def find_entry(name: str, key: str) -> Key | None:
    """Return what a software's table has of a key, under one of its names."""
    values = Values(TABLES[name], {}, origin="", software=name)
    names = (key, *sorted(list_translated_names(key)))
    return next((entry for entry in map(values.find_key, names) if entry), None)


def list_values(key: str, entry: Key) -> list[Any]:
    """Return values of a key that are not its default, likely ones first."""
    default, last = entry.default, key.rpartition(".")[2]
    values: list[Any] = [value for value in entry.words or () if value != default]
    if isinstance(default, bool) or default is None:
        values += [True, False][: 2 if default is not None else 1]
    if not isinstance(default, bool | str | list):
        values += [(default or 1) * 2, (default or 1) * 4, 2, 4, 8, 0.5, 0.125]
    others = [value for value in values if value != default or isinstance(value, bool) is not isinstance(default, bool)]
    return [*VALUES.get(key, ()), *VALUES.get(last, ()), *others]


def find_acting(name: str, key: str, entry: Key, folder: Path, bases: list[Reading]) -> Iterator[Acting]:
    """Yield for each config a value of a key with which the answer changes; None if the value is an error.

    The key is read as understood with one value at least, or nothing is yielded but ``Acting(-1, key, None)``.
    """
    values, is_understood = list_values(key, entry), False
    for number, (config, base) in enumerate(zip(CONFIGS[name], bases, strict=True)):
        for value in values:
            try:
                reading = read_with(name, {**config, key: value}, folder)
            except UserError as error:
                if key.rpartition(".")[2] in str(error):
                    yield Acting(number, key, None)
                continue
            if is_named(reading, key) or describe_answer(reading) != describe_answer(base):
                yield Acting(number, key, value)
                values = [value]  # it is enough for the configs that follow
                break
            names = list_translated_names(key)
            is_understood |= any(item.key in names for item in {*reading.understood} - {*base.understood})
    if not is_understood:
        yield Acting(-1, key, None)


def find_silent(name: str, folder: Path) -> tuple[list[str], list[Acting]]:
    """Return the keys that are understood and never act, and the others with configs and values that show them."""
    bases = [read_with(name, config, folder) for config in CONFIGS[name]]
    silent, acting = list[str](), list[Acting]()
    for key in list_software_keys(name):
        entry = find_entry(name, key)
        if entry is None or entry.kind not in ("field", "part") or key in WITHOUT_EFFECT.get(name, {}):
            continue
        found = list(find_acting(name, key, entry, folder, bases))
        acting += [item for item in found if item.config >= 0]
        silent += [] if found else [f"{name}: {key} ({entry.means}) is called understood and never acts"]
    return silent, acting


class Drawn(NamedTuple):
    """A config of ``CONFIGS`` with keys that are added to it."""

    software: str
    config: int
    keys: Mapping[str, Any]

    def read(self, folder: Path, others: Mapping[str, Any] = MappingProxyType({})) -> Reading | None:
        """Return the reading with the keys, and with other values of some; None if it is an error."""
        try:
            return read_with(self.software, {**CONFIGS[self.software][self.config], **self.keys, **others}, folder)
        except UserError:
            return None

    def drop(self, *keys: str) -> Drawn:
        """Return the config without some of the keys."""
        return self._replace(keys={key: value for key, value in self.keys.items() if key not in keys})


def is_overridden(key: str, others: Iterable[str]) -> bool:
    """Return whether the software reads one of other keys, or their section, and then not the key."""
    names = [name for other in others for name in other.rsplit(".", 1)]
    return any(pair in OVERRIDDEN for pair in product((key, key.rpartition(".")[2]), names))


def is_ignored(drawn: Drawn, key: str, full: Reading, folder: Path) -> bool:
    """Return whether the answer to a config is the same without one of its keys, and none of four reasons holds.

    The software then reads another key (``OVERRIDDEN``); the answer names the key; other keys say the same (without the
    others, the key sets what the answer has, but for what they set); another value changes the answer.
    """
    if is_overridden(key, drawn.keys):
        return False
    answer, without = describe_answer(full), drawn.drop(key).read(folder)
    if is_named(full, key) or without is None or describe_answer(without) != answer:
        return False
    others = [other for other in drawn.keys if other != key]
    for dropped in (*((other,) for other in others), others):
        alone, neither = drawn.drop(*dropped).read(folder), drawn.drop(*dropped, key).read(folder)
        if alone is None or neither is None:
            continue
        set_by_others = {name for name, _ in answer.items() ^ describe_answer(alone).items()}
        effects = describe_answer(alone).items() - describe_answer(neither).items()
        if effects & answer.items() and not {name for name, _ in effects - answer.items()} - set_by_others:
            return False
    entry = find_entry(drawn.software, key)
    readings = (drawn.read(folder, {key: value}) for value in (list_values(key, entry) if entry else ()))
    return not any(reading is None or describe_answer(reading) != answer for reading in readings)


def find_masked(name: str, acting: list[Acting], folder: Path, *, count: int, seed: int) -> Iterator[str]:
    """Yield what does not act in configs with several keys of which each acts alone."""
    some, read = random.Random(f"{name} {seed}"), 0
    for number in range(count):
        config = some.randrange(len(CONFIGS[name]))
        choice = [
            item
            for item in acting
            if item.config == config and item.value is not None and item.key not in {*SWITCHES, *CONFIGS[name][config]}
        ]
        values = {item.key: item.value for item in some.sample(choice, min(len(choice), some.randint(2, 4)))}
        drawn = Drawn(name, config, values)
        full = drawn.read(folder)
        if full is None or full.missing:
            continue
        read += 1
        for key in values:
            if is_ignored(drawn, key, full, folder):
                yield f"{name}, seed {seed}, config {number}, {values} over {config}: {key} is silently ignored"
    print(f"{name}, seed {seed}: {read} of {count} drawn configs were read")


def main() -> int:
    """All software, one after another."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    options.add_argument("--configs", type=int, default=100)
    options.add_argument("--seeds", type=int, nargs="*", default=[0])
    options.add_argument("--software", nargs="*", default=list(SOFTWARE))
    asked = options.parse_args()
    wrong: list[str] = []
    with show_progress("keys") as progress, tempfile.TemporaryDirectory() as folder, end_at_stop_signal():
        for number, name in enumerate(asked.software):
            progress(name, number, len(asked.software))
            silent, acting = find_silent(name, Path(folder))
            print(f"{name}: {len({item.key for item in acting})} keys are understood and act")
            wrong += silent
            for seed in asked.seeds:
                wrong += find_masked(name, acting, Path(folder), count=asked.configs, seed=seed)
    for line in wrong:
        print(line)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
