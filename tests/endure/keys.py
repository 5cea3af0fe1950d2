"""Keys of third-party configs that a reading calls understood: each changes the answer, of one config at least.

    python -m tests.endure.keys --configs 100 --seed 0

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
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fivefold.interop.keys import Key, Table, Values
from fivefold.interop.registry import FORMATS
from fivefold.record import UserError
from fivefold.rendering.progress import show_progress
from fivefold.results.reading import Reading
from tests.interop.drawn_keys import SOFTWARE, list_software_keys, list_translated_names, read_with
from tests.interop.known_configs import CONFIGS, SWITCHES, VALUES, WITHOUT_EFFECT

TABLES: dict[str, Table] = {name: table for form in FORMATS for name, table in form.keys.items()}


class Acting(NamedTuple):
    """A key with a value that changes the answer of a config, which ``CONFIGS`` has under a number."""

    config: int
    key: str
    value: Any


def describe_answer(reading: Reading) -> tuple[object, ...]:
    """Return all of a reading that an answer is computed from, or shows."""
    return reading.model, reading.layout, reading.job, reading.ranks, reading.data, reading.missing


def is_named(reading: Reading, key: str) -> bool:
    """Return whether the answer names the key: as an error, or as what is read as its nearest setting."""
    named = {item.key for item in (*reading.not_understood, *reading.approximated)}
    return bool(named & list_translated_names(key))


def list_values(key: str, entry: Key) -> list[Any]:
    """Return values of a key that are not its default, likely ones first."""
    default, last = entry.default, key.rpartition(".")[2]
    values: list[Any] = [*VALUES.get(key, ()), *VALUES.get(last, ())]
    values += [value for value in entry.words or () if value != default]
    if isinstance(default, bool) or default is None:
        values += [True, False][: 2 if default is not None else 1]
    if not isinstance(default, bool | str | list):
        values += [(default or 1) * 2, (default or 1) * 4, 2, 4, 8, 0.5, 0.125]
    return [value for value in values if value != default or isinstance(value, bool) is not isinstance(default, bool)]


def find_acting(name: str, key: str, entry: Key, folder: Path, bases: list[Reading]) -> Iterator[Acting]:
    """Yield for each config a value of a key with which the answer changes; None if the value is an error."""
    for number, (config, base) in enumerate(zip(CONFIGS[name], bases, strict=True)):
        for value in list_values(key, entry):
            try:
                reading = read_with(name, {**config, key: value}, folder)
            except UserError as error:
                if key.rpartition(".")[2] in str(error):
                    yield Acting(number, key, None)
                continue
            if is_named(reading, key) or describe_answer(reading) != describe_answer(base):
                yield Acting(number, key, value)
                break


def find_silent(name: str, folder: Path) -> tuple[list[str], list[Acting]]:
    """Return the keys that are understood and never act, and the others with configs and values that show them."""
    values = Values(TABLES[name], {}, origin="", software=name)
    bases = [read_with(name, config, folder) for config in CONFIGS[name]]
    silent, acting = list[str](), list[Acting]()
    for key in list_software_keys(name):
        names = (key, *sorted(list_translated_names(key)))
        entry = next((entry for entry in map(values.find_key, names) if entry), None)
        if entry is None or entry.kind not in ("field", "part") or key in WITHOUT_EFFECT.get(name, {}):
            continue
        found = list(find_acting(name, key, entry, folder, bases))
        acting += found
        silent += [] if found else [f"{name}: {key} ({entry.means}) is called understood and never acts"]
    return silent, acting


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
        drawn = {item.key: item.value for item in some.sample(choice, min(len(choice), some.randint(2, 4)))}
        try:
            full = read_with(name, {**CONFIGS[name][config], **drawn}, folder)
        except UserError:
            continue
        if full.missing:
            continue
        read += 1
        for key in drawn:
            if is_named(full, key):
                continue
            rest: Mapping[str, Any] = {other: value for other, value in drawn.items() if other != key}
            try:
                without = read_with(name, {**CONFIGS[name][config], **rest}, folder)
            except UserError:
                continue
            if describe_answer(without) == describe_answer(full):
                yield f"{name}, seed {seed}, config {number}, {drawn} over {config}: {key} is silently ignored"
    print(f"{name}: {read} of {count} drawn configs were read")


def main() -> int:
    """All software, one after another."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    options.add_argument("--configs", type=int, default=100)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--software", nargs="*", default=list(SOFTWARE))
    asked = options.parse_args()
    wrong: list[str] = []
    with show_progress("keys") as progress, tempfile.TemporaryDirectory() as folder:
        for number, name in enumerate(asked.software):
            progress(name, number, len(asked.software))
            silent, acting = find_silent(name, Path(folder))
            print(f"{name}: {len({item.key for item in acting})} keys are understood and act")
            wrong += silent
            wrong += find_masked(name, acting, Path(folder), count=asked.configs, seed=asked.seed)
    print(*wrong, sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
