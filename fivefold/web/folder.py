"""The folder that the page was started for: paths of requests lead to files below it, and nowhere else."""

from __future__ import annotations

from pathlib import Path

from fivefold.record import Mistake

FILE_BYTES = 2**26  # of a file that a request may name


class Folder:
    """A folder whose files a request may read."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()

    def path(self, text: str) -> Path:
        """The file or folder that ``text`` names, after all links; a ``Mistake`` if it is outside or too large."""
        try:
            found = (self.root / text).resolve()
            inside = found.is_relative_to(self.root)
            size = found.stat().st_size if inside and found.is_file() else 0
            strange = inside and found.exists() and not (found.is_file() or found.is_dir())
        except (OSError, ValueError, RuntimeError):
            raise Mistake(f"{text!r} is not a path that can be read") from None
        if not inside:
            raise Mistake(f"{text!r} is outside of the folder that the page was started for; name a file below it")
        if strange:
            raise Mistake(f"{text!r} is neither a file nor a folder; a page does not wait for a pipe or a device")
        if size > FILE_BYTES:
            raise Mistake(f"{text!r} has {size:,} bytes; the page reads files of up to {FILE_BYTES:,}")
        return found

    def name(self, path: Path) -> str:
        """The path as a request writes it."""
        return path.relative_to(self.root).as_posix()

    def plain(self, line: str) -> str:
        """A message without the folder's own place."""
        return line.replace(f"{self.root}/", "")
