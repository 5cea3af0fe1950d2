"""Observation of a rank's messages while a step is traced: when each is posted, waited for and done.

Every axis of a rank holds the same ``CommObserver``. Its ``post`` is None except in a traced step; then nothing is
observed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class CommEvent(Protocol):
    """One observed message; its methods are called in this order."""

    def on_launched(self) -> None:
        """Record that the call that starts the message has returned."""

    def on_wait_begin(self, completed: bool) -> None:
        """Record that this rank begins to wait for the message; ``completed``: it had already ended."""

    def on_wait_end(self) -> None:
        """Record that the wait is over."""


class MessageCallback(Protocol):
    """A callback that is called just before a message starts."""

    def __call__(
        self,
        axis: str,
        ranks: tuple[int, ...],
        collective: str,
        payload: int,
        *,
        to: tuple[int, ...] = (),
        source: tuple[int, ...] = (),
    ) -> CommEvent:
        """Return the observer of a message.

        ``axis``, ``ranks``: name and ranks of its process group; ``payload``: bytes of the full tensor. For
        point-to-point messages that start together, ``to`` and ``source`` are the global ranks that this rank sends to
        and receives from.
        """


class CommObserver:
    """Holder of the callback; shared by all axes of a rank."""

    def __init__(self) -> None:
        self.post: Callable[..., CommEvent] | MessageCallback | None = None
