"""Read the events of a trace one by one, from JSON or gzip of any size, holding a few MiB at a time.

{"schemaVersion": 1, …, "traceEvents": [{"ph": "X", "cat": "kernel", …}, …], …}     or only the list

A truncated file yields the events before the cut; invalid JSON within the list is skipped. Both are counted.
"""

from __future__ import annotations

import codecs
import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from fivefold.bounded_file import open_stream
from fivefold.errors import UserError

CHUNK_BYTES = 1 << 20  # bytes that are read at once
MAX_VALUE_CHARACTERS = 16 << 20  # characters of one value
GOES_ON = ("", ".", "e", "E")  # characters after a number that may not be complete
CUT_ERROR_CHARACTERS = 64  # an error this close to the end of the text that was read may only mean that more is to come
BLANK = re.compile(r"[\s,]*")
EVENT = re.compile(r'\{\s*"(?:(?:ph|cat|ts)"\s*:|name"\s*:\s*"[^"\\]*"\s*,)')  # an object of args holds only a name


class MalformedJson(ValueError):
    """An error: the text at the position of the stream is no JSON value, or is cut off."""


class JsonStream:
    """A trace file: ``events`` yields its events, ``metadata`` collects the other keys, and counters say what was lost.

    ``report`` is called with the bytes read so far, once a chunk.
    """

    def __init__(self, path: Path, *, report: Callable[[int], object] = lambda _: None) -> None:
        self.path, self._report = path, report
        self.metadata: dict[str, Any] = {}
        self.broken = 0  # values within the list that are invalid JSON
        self.cut = ""  # the reason why the end is missing
        self._decoded = json.JSONDecoder(strict=False).raw_decode
        self._text, self._at, self._ended = "", 0, False
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
        self._opened = ExitStack()
        try:
            self._source = self._opened.enter_context(open_stream(path))
            zipped = self._source.peek(2)[:2] == b"\x1f\x8b"
        except OSError as error:
            self._opened.close()
            raise UserError(f"{path}: {(error.strerror or 'cannot be read').lower()}") from None
        except ValueError as error:  # a file name with a null byte
            raise UserError(f"{str(path)!r} is not a file name: {error}") from None
        self._file: Any = gzip.GzipFile(fileobj=self._source) if zipped else self._source

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: type[BaseException] | None, _error: object, _trace: TracebackType | None) -> None:
        self._opened.close()

    @property
    def bytes_read(self) -> int:
        """Return the bytes of the file that have been read (compressed ones if it is gzip); 0 for a pipe."""
        return self._source.raw.tell() if self._source.seekable() else 0

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield every event; raises ``UserError`` if the file is empty or holds no list of events."""
        opening = self._peek()
        if not opening:
            raise UserError(f"{self.path} is empty{f' ({self.cut})' if self.cut else ''}; use another trace")
        if opening == "[":
            yield from self._items()
            return
        has_events = False
        try:
            for key in self._keys():
                if key == "traceEvents" and self._peek() == "[":
                    has_events = True
                    yield from self._items()
                else:
                    self.metadata[key] = self._value()
        except MalformedJson:
            self.cut = self.cut or "from some point on it is not valid JSON"
        if not has_events:
            raise UserError(f"{self.path} is not a PyTorch profiler trace: it has no traceEvents{self._describe_cut()}")

    def _describe_cut(self) -> str:
        return f"; {self.cut}" if self.cut else ""

    def _keys(self) -> Iterator[str]:
        """Yield the keys of the outermost object; the caller reads the value after each key."""
        if self._peek() != "{":
            raise UserError(
                f"{self.path} is not a PyTorch profiler trace, as it is not JSON; write one with torch.profiler's "
                "export_chrome_trace"
            )
        self._at += 1
        while self._peek() not in ("}", ""):
            key = self._value()
            if self._peek() != ":":
                raise MalformedJson
            self._at += 1
            yield str(key)
        if not self._peek():
            self.cut = self.cut or "the file ends before its end"

    def _items(self) -> Iterator[dict[str, Any]]:
        """Yield the objects of the list that begins here."""
        self._at += 1
        decoded, blank = self._decoded, BLANK.match
        while True:
            blank_match = blank(self._text, self._at)
            assert blank_match, "nothing is blank too"
            try:
                item, end = decoded(self._text, blank_match.end())  # usually all of the item has been read
                if not isinstance(item, dict):
                    raise ValueError  # a number may go on
                self._at = end
            except (ValueError, RecursionError):
                opening = self._peek()
                if opening in ("]", ""):
                    break
                try:
                    item = self._value()
                except MalformedJson:
                    if not self._skip():
                        break
                    continue
            if isinstance(item, dict):
                yield item
        if self._peek() == "]":
            self._at += 1
        else:
            self.cut = self.cut or "the file ends within the events"

    def _skip(self) -> bool:
        """Go to the next event after invalid JSON; return False if there is none.

        A last event that is cut off does not count as broken.
        """
        self._at += 1
        while not (match := EVENT.search(self._text, self._at)):
            self._at = max(self._at, len(self._text) - CUT_ERROR_CHARACTERS)
            if not self._fill():
                self._at = len(self._text)
                return False
        self._at = match.start()
        self.broken += 1
        return True

    def _peek(self) -> str:
        """Return the next character that is neither blank nor a comma, without consuming it; "" at the end."""
        while True:
            match = BLANK.match(self._text, self._at)
            self._at = match.end() if match else self._at
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._fill():
                return ""

    def _value(self) -> Any:
        """Return the value that begins here; raises ``MalformedJson`` if it is invalid or does not end."""
        while True:
            self._peek()
            try:
                value, end = self._decoded(self._text, self._at)
            except json.JSONDecodeError as error:
                error_position = len(self._text) if error.msg.startswith("Unterminated") else error.pos
            except (ValueError, RecursionError):
                raise MalformedJson from None
            else:
                if self._text[end : end + 1] not in GOES_ON or not self._fill():  # a number may go on
                    self._at = end
                    return value
                continue
            value_length = len(self._text) - self._at
            if (
                error_position < len(self._text) - CUT_ERROR_CHARACTERS
                or value_length > MAX_VALUE_CHARACTERS
                or not self._fill()
            ):
                raise MalformedJson

    def _fill(self) -> bool:
        """Read the next chunk; return whether there was more."""
        more = ""
        while not more and not self._ended:
            data = b"".join(self._pieces())
            self._ended = not data
            more = self._decode(data, final=not data)
            self._report(self.bytes_read)
        if more:
            self._text, self._at = self._text[self._at :] + more, 0
        return bool(more)

    def _pieces(self) -> Iterator[bytes]:
        """Yield a chunk's bytes as they come, so that the readable part of a truncated gzip file is not lost."""
        size = 0
        try:
            while size < CHUNK_BYTES and (piece := self._file.read1(CHUNK_BYTES)):
                size += len(piece)
                yield piece
        except EOFError:
            self.cut = "the gzip file is cut short"
        except (OSError, zlib.error) as error:
            self.cut = f"the file is damaged: {error}"
