"""Who is told of a rank's messages while a step is traced: when each is posted, waited for and done.

Every axis of a rank holds the same ``Listener``; while its ``post`` is None, so always but in a traced step, nobody is
told.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Heard(Protocol):
    """One message that is listened to; its methods are called in this order."""

    def posted(self) -> None:
        """The call that starts it has returned."""

    def waits(self, completed: bool) -> None:
        """This rank begins to wait for it; ``completed``: it had ended before."""

    def done(self) -> None:
        """The wait is over."""


class Call(Protocol):
    """Told that a message is about to be started."""

    def __call__(
        self, axis: str, ranks: tuple[int, ...], collective: str, payload: int,
        *, to: tuple[int, ...] = (), source: tuple[int, ...] = (),
    ) -> Heard:  # fmt: skip
        """``axis``, ``ranks``: of its process group; ``payload``: bytes of the full tensor. Of point-to-point messages
        that start together, ``to`` and ``source`` name the ranks of the world that this one sends to and receives from.
        """


class Listener:
    """Holds whom to tell; shared by all axes of a rank."""

    def __init__(self) -> None:
        self.post: Callable[..., Heard] | Call | None = None
