"""Classifies unexpected errors as transient, if they may pass when the same command runs again. Does not import torch.

    transient: a connection, the network, a timeout, a lost peer, the accelerator        repeats: any other exception

Every step is deterministic, so an exception of Python code (a shape, a name, a value) comes again at the same place.
A killed or hung process raises no exception; the launcher and the watchdog start those runs again by themselves.
"""

from __future__ import annotations

import errno
import re

TRANSIENT_ERRNO = frozenset(
    {
        errno.EAGAIN,
        errno.EINTR,
        errno.EIO,
        errno.ENETDOWN,
        errno.ENETUNREACH,
        errno.ENETRESET,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.ESTALE,
        errno.EREMOTEIO,
    }
)
# Names of torch's classes, so that torch need not be imported: errors of process groups and stores, and of the device.
TRANSIENT_TORCH = frozenset({"DistError", "AcceleratorError"})
# gloo's errors, and some of NCCL's, are plain RuntimeErrors.
TRANSIENT_TEXT = re.compile(
    r"gloo/|ncclRemoteError|ncclSystemError|ncclInternalError|[Cc]onnection (closed|reset|refused|lost)"
    r"|[Tt]imed out|Socket Timeout|uncorrectable (ECC|NVLink) error"
)
# An assertion in a kernel, such as an index out of range, has the class of a device's error, but repeats.
DETERMINISTIC_TEXT = re.compile(r"device-side assert|invalid argument|no kernel image")


def is_transient(error: BaseException) -> bool:
    """Return whether ``error``, or an error that it was raised from, may not occur in another attempt."""
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return _is_transient(error) or (cause is not None and is_transient(cause))


def _is_transient(error: BaseException) -> bool:
    if isinstance(error, (ConnectionError, TimeoutError)):
        return True
    if isinstance(error, OSError):
        return error.errno in TRANSIENT_ERRNO
    if not isinstance(error, RuntimeError) or DETERMINISTIC_TEXT.search(str(error)):
        return False
    names = {kind.__name__ for kind in type(error).__mro__ if kind.__module__.startswith("torch")}
    return bool(names & TRANSIENT_TORCH or TRANSIENT_TEXT.search(str(error)))
