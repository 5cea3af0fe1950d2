"""Caches of the counts of one model and job, keyed by values."""

from __future__ import annotations

from typing import Any, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")
Kind = TypeVar("Kind", bound=dict[Any, Any])
REMEMBERED = 1_500  # values in a cache; a search asks for many more degrees than it returns to


class Cache(dict[Key, Value]):
    """A dict that is emptied when it has grown to ``most`` values."""

    def __init__(self, most: int = REMEMBERED) -> None:
        super().__init__()
        self.most = most

    def __setitem__(self, key: Key, value: Value) -> None:
        if len(self) >= self.most:
            self.clear()
        super().__setitem__(key, value)


class Caches:
    """One cache of each class; the module that fills a cache declares its class, with the types of keys and values."""

    def __init__(self) -> None:
        self._by_class: dict[type, object] = {}

    def get_cache(self, kind: type[Kind]) -> Kind:
        """Return the cache of the class ``kind``; it starts empty."""
        cache = self._by_class.get(kind)
        if not isinstance(cache, kind):
            cache = self._by_class[kind] = kind()
        return cache
