"""The supported model families of Hugging Face: one module for each family, or for close relatives.

The families of a module are all ``Family`` records that it has a name for, so that no module imports one by name. It
lists as ``WRAPPERS`` the multimodal models that hold one of them. Every module of this folder is read. It is imported
when a name of its source is asked for, so that a command that reads one model does not import them all.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from importlib import import_module
from importlib.abc import InspectLoader
from importlib.util import find_spec
from pkgutil import iter_modules
from types import ModuleType
from typing import Generic, TypeVar

from fivefold.model.huggingface.family import Family, Wrapper

R = TypeVar("R", Family, Wrapper)


def import_modules(name: str | None = None) -> Iterator[ModuleType]:
    """Import the modules of this folder in the order of their names; ``name``: only those whose source contains it."""
    for module, words in _read_module_words().items():
        if name is None or name in words:
            yield import_module(f"{__name__}.{module}")


@cache
def _read_module_words() -> dict[str, frozenset[str]]:
    """Map each module to the words of its source: a model type and a class are one word each."""
    words = {}
    for name in _list_module_names():
        spec = find_spec(f"{__name__}.{name}")
        assert spec is not None
        assert isinstance(spec.loader, InspectLoader)
        source = spec.loader.get_source(spec.name) or ""
        words[name] = frozenset(re.findall(r"[\w-]+", source))
    return words


@cache
def _list_module_names() -> tuple[str, ...]:
    return tuple(module.name for module in iter_modules(__path__))


def list_families(modules: list[ModuleType]) -> Iterator[Family]:
    """Yield the families of all ``modules``."""
    for module in modules:
        yield from (record for record in vars(module).values() if isinstance(record, Family))


def list_wrappers(modules: list[ModuleType]) -> Iterator[Wrapper]:
    """Yield the multimodal models of all ``modules``."""
    for module in modules:
        yield from getattr(module, "WRAPPERS", ())


class Registry(Mapping[str, R], Generic[R]):
    """The records of all modules by ``model_type``.

    To look one up imports the module of that name, if there is none the modules that contain the name; a list, all.
    """

    def __init__(self, list_records: Callable[[list[ModuleType]], Iterator[R]]) -> None:
        self._list_records: Callable[[list[ModuleType]], Iterator[R]] = list_records
        self._named: dict[str | None, tuple[R, ...]] = {}
        self._records: dict[str, R] = {}

    def __getitem__(self, model_type: str) -> R:
        if model_type not in self._records and model_type in _list_module_names():
            self._add(self._list_records([import_module(f"{__name__}.{model_type}")]))
        if model_type not in self._records:
            self._add(self.list_named(model_type))
        return self._records[model_type]

    def _add(self, records: Iterable[R]) -> None:
        self._records |= {record.model_type: record for record in records}

    def __iter__(self) -> Iterator[str]:
        return (record.model_type for record in self.list_named(None))

    def __len__(self) -> int:
        return len(self.list_named(None))

    def list_named(self, name: str | None) -> tuple[R, ...]:
        """Return the records of the modules whose source contains ``name``, a model type or a class; None: all."""
        if name not in self._named:
            self._named[name] = tuple(self._list_records(list(import_modules(name))))
        return self._named[name]


FAMILIES: Registry[Family] = Registry(list_families)
WRAPPERS: Registry[Wrapper] = Registry(list_wrappers)
