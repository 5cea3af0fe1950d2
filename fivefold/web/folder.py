"""The folder that the page was started for: paths of requests lead to files below it only."""

from __future__ import annotations

from pathlib import Path

from fivefold.errors import UserError

FILE_BYTES = 2**26  # largest file that a request may name


class ServedFolder:
    """A folder whose files a request may read."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()

    def path(self, text: str, *, limit: int = FILE_BYTES) -> Path:
        """Return the file or folder that ``text`` names, after all links; raises ``UserError`` if it is not allowed.

        It must be below the root, a regular file or folder, and have at most ``limit`` bytes.
        """
        try:
            path = (self.root / text).resolve()
            is_inside = path.is_relative_to(self.root)
            size = path.stat().st_size if is_inside and path.is_file() else 0
            is_special_file = is_inside and path.exists() and not (path.is_file() or path.is_dir())
        except (OSError, ValueError, RuntimeError):
            raise UserError(f"{text!r} is not a path that can be read") from None
        if not is_inside:
            raise UserError(f"{text!r} is outside of the folder that the page was started for; name a file below it")
        if is_special_file:
            raise UserError(f"{text!r} is neither a file nor a folder; the page reads neither pipes nor devices")
        if size > limit:
            raise UserError(f"{text!r} has {size:,} bytes; the page reads files of up to {limit:,}")
        return path

    def name(self, path: Path) -> str:
        """Return the path as a request writes it."""
        return path.relative_to(self.root).as_posix()

    def strip_root(self, line: str) -> str:
        """Return a message without the folder's own path."""
        return line.replace(f"{self.root}/", "")
