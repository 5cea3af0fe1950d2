"""Write a file so that readers never see half of it."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fivefold.errors import RunFailure

NAME_ANOTHER = "name another path"
FREE_SPACE = f"free some space or {NAME_ANOTHER}"
ADVICE = {errno.ENOSPC: FREE_SPACE, errno.EDQUOT: FREE_SPACE}


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk (fsync), so that they survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def replace_file(path: Path, *, contents: str, advice: str = "") -> Iterator[Path]:
    """Yield a temporary path next to ``path`` that replaces it when the block ends.

    After an error or an interruption ``path`` is as it was, and the temporary file is gone. The folder is created.
    A device or a pipe (``/dev/stdout``) cannot be replaced: there the path itself is yielded.

    Parameters
    ----------
    path
        The file to write. The temporary path keeps its suffix, which some writers read the format from.
    contents
        What the file holds, for the error: "the trace".
    advice
        What the user can do, for the end of the error. Default: by the cause.

    Raises
    ------
    RunFailure
        If the file cannot be written (disk full, no permission).
    """
    direct = path.exists() and not path.is_file()
    temporary = path if direct else path.with_name(f".{path.stem}.{os.getpid()}.partial{path.suffix}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        if not direct:
            os.replace(temporary, path)
    except OSError as error:
        advice = advice or ADVICE.get(error.errno or 0, NAME_ANOTHER)
        raise RunFailure(f"{path}: {contents} cannot be written: {error.strerror or error}; {advice}") from None
    finally:
        if not direct:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
