"""Caches of what is counted for one model and job, keyed by values."""

from __future__ import annotations

from typing import Any, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")
Kind = TypeVar("Kind", bound=dict[Any, Any])
REMEMBERED = 1_500  # values of a cache; a search asks for many more parts than it returns to


class Cache(dict[Key, Value]):
    """A dict that forgets all when it has grown to ``most`` values."""

    def __init__(self, most: int = REMEMBERED) -> None:
        super().__init__()
        self.most = most

    def __setitem__(self, key: Key, value: Value) -> None:
        if len(self) >= self.most:
            self.clear()
        super().__setitem__(key, value)


class Caches:
    """One cache of each class, which the module that fills it declares with the types of its keys and values."""

    def __init__(self) -> None:
        self._by_class: dict[type, object] = {}

    def of(self, kind: type[Kind]) -> Kind:
        """Return the cache of the class ``kind``, empty at first."""
        found = self._by_class.get(kind)
        if not isinstance(found, kind):
            found = self._by_class[kind] = kind()
        return found
