"""Errors and warnings that users see, each of them one line.

``UserError`` is an error of the user (exit code 2), ``RunFailure`` one of the system (exit code 1).
"""

from __future__ import annotations

import sys
import warnings


class UserError(ValueError):
    """An error that the user can correct: one line that says what is wrong, by how much, and what to do."""


class RunFailure(RuntimeError):
    """An error of the system, such as a full disk or a dead worker, in one line."""


class StopSignal(BaseException):
    """Raised by SIGINT and SIGTERM, with the signal's name. A BaseException, so that ``except Exception`` misses it."""


class UsageWarning(UserWarning):
    """A one-line warning about something that is legal, but perhaps not intended."""


def warn(message: str) -> None:
    """Issue a ``UsageWarning`` that points to the line of the caller's code which led to it, not to this package."""
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] == "fivefold":
        frame, level = frame.f_back, level + 1
    warnings.warn(message, UsageWarning, stacklevel=level)
