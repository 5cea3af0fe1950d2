"""A dict that forgets all when it has grown too large: what is forgotten is computed again."""

from __future__ import annotations

from typing import TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")
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
