"""Files that a reader drops on a page, for pages that read them: kept in a temporary folder until the server ends.

The server runs on the reader's own computer, so that no file leaves it.
"""

from __future__ import annotations

import errno
import re
import shutil
from collections.abc import AsyncIterator
from html import escape
from itertools import count
from pathlib import Path
from tempfile import mkdtemp

from fivefold.errors import UserError

MAX_FILE_BYTES = 2**31  # largest file that may be dropped
MAX_KEPT_BYTES = 2**32  # when the files are larger in total, the oldest are removed
PREFIX = "dropped:"  # of a dropped file's name in a question
_NAME = re.compile(rf"{PREFIX}(\d{{1,9}})/([\w.+-]{{1,100}})", re.ASCII)


class DroppedFiles:
    """Dropped files, each in a folder of its own number.

    ``folder``: that of another process, whose files are read only; by default a temporary one, made for the first file.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self._numbers, self._kept = count(1), list[Path]()

    async def receive(self, name: str, body: AsyncIterator[bytes]) -> str:
        """Write a file and return its name for questions; raises ``UserError`` if it is too large for limit or disk."""
        if self.folder is None:
            self.folder = Path(mkdtemp(prefix="fivefold-dropped-"))
        place = self.folder / str(next(self._numbers))
        place.mkdir()
        path = place / (re.sub(r"[^\w.+-]", "_", name, flags=re.ASCII)[-100:] or "file")
        size = 0
        try:
            with path.open("wb") as file:
                async for chunk in body:
                    size += len(chunk)
                    if size > MAX_FILE_BYTES:
                        raise UserError(
                            f"{name!r} has more than {MAX_FILE_BYTES:,} bytes; read it with `fivefold trace` or "
                            "`fivefold explain` on the command line"
                        )
                    file.write(chunk)
        except BaseException as error:
            shutil.rmtree(place, ignore_errors=True)
            if isinstance(error, OSError) and error.errno == errno.ENOSPC:
                raise UserError(
                    f"{name!r}: the disk is full after {size:,} bytes; free space in {self.folder}"
                ) from None
            raise
        self._kept.append(path)
        self._remove_oldest()
        return f"{PREFIX}{place.name}/{path.name}"

    def path(self, text: str) -> Path:
        """Return the file of a name that ``receive`` returned; raises ``UserError`` if it is no longer stored."""
        match = _NAME.fullmatch(text)
        path = self.folder / match[1] / match[2] if match and self.folder else None
        if path is None or not path.is_file():
            raise UserError(f"{text!r} is no longer stored; upload the file again")
        return path

    def strip_folder(self, text: str) -> str:
        """Return a text, which may be HTML, with the plain names of dropped files."""
        return text if self.folder is None else re.sub(rf"{re.escape(escape(str(self.folder)))}/\d+/", "", text)

    def close(self) -> None:
        """Remove all files."""
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _remove_oldest(self) -> None:
        while sum(path.stat().st_size for path in self._kept) > MAX_KEPT_BYTES:
            shutil.rmtree(self._kept.pop(0).parent, ignore_errors=True)
