"""Streams long work as server-sent events.

The events are ``begun`` (a name, for work that can be stopped with what it has found so far), ``progress`` (done,
total, doing) and ``sketch`` (HTML of what has been found so far), then ``found`` (HTML), ``stopped`` or ``mistake`` (a
line).
The work lives as long as the stream: closing or stopping the page ends it. The last results are kept for a while.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from typing import Any, Generic, TypeVar

from pydantic import Field
from starlette.responses import StreamingResponse

from fivefold.errors import UserError
from fivefold.record import Record
from fivefold.rendering.elements import build_paragraph
from fivefold.rendering.question import describe_question
from fivefold.web.question import JobQuestion
from fivefold.web.site import WebServer
from fivefold.web.work import Busy

KEPT = 16  # number of results kept
Find = TypeVar("Find")  # what the work finds before its result
FAILED = "the answer could not be shown, which is an error of Fivefold; its traceback is where fivefold web runs"


class Begun(Record):
    """The fields of a page with long work besides its question."""

    run: bool = Field(False, description="Start the work at once.")


class Stream(Generic[Find]):
    """The answers of one long-running command, as pages request them.

    ``read`` turns what the process sends as found before its result into a record. ``keeps``: the last results are
    kept.
    """

    def __init__(
        self, site: WebServer, verb: str, *, read: Callable[[Any], Find] = lambda value: value, keeps: bool = True
    ) -> None:
        self.site, self.verb, self.read, self.keeps = site, verb, read, keeps
        self.kept: OrderedDict[str, str] = OrderedDict()

    def answer(
        self,
        query: JobQuestion,
        draw: Callable[[Any, Sequence[Find]], str],
        sketch: Callable[[Sequence[Find]], str] | None = None,
    ) -> StreamingResponse:
        """Return the events of one question.

        ``draw`` turns its result, with all finds, into HTML; ``sketch`` those that are known so far.
        """
        return StreamingResponse(self._list_events(query, draw, sketch), media_type="text/event-stream")

    def describe(self, query: JobQuestion, *, open_fields: Collection[str] = ()) -> str:
        """Return the question as the first paragraph of an answer, then what is perhaps not intended in it.

        ``open_fields``: those that the answer chooses.
        """
        resolved = self.site.resolve(query)
        line = describe_question(
            resolved.model,
            resolved.machine,
            resolved.job,
            open_fields=open_fields,
            stated=resolved.stated,
            batch_reason=resolved.batch_reason,
        )
        about = build_paragraph(" · ".join(filter(None, (line, resolved.settings))), kind="about")
        remarks = (build_paragraph(self.site.word_message(remark), kind="remark") for remark in resolved.remarks)
        return "".join((about, *remarks))

    async def _list_events(
        self,
        query: JobQuestion,
        draw: Callable[[Any, Sequence[Find]], str],
        sketch: Callable[[Sequence[Find]], str] | None,
    ) -> AsyncIterator[str]:
        """Yield the events of an answer: sketches, progress and the page; an answer that is kept is sent at once."""
        key = query.model_dump_json()
        if key in self.kept:
            yield format_event("found", self.kept[key])
            return
        is_ended, finds = False, list[Find]()
        try:
            async for event_item in self.site.events(self.verb, query):
                ((name, data),) = event_item.items()
                is_ended = name in ("result", "mistake", "stopped")
                if name == "result":
                    text = draw(data, finds)
                    if self.keeps and not (isinstance(data, dict) and data.get("stopped")):
                        self._keep(key, text)
                    yield format_event("found", text)
                elif name == "finds":
                    finds += map(self.read, data)
                    if sketch is not None:
                        yield format_event("sketch", sketch(finds))
                elif name == "mistake":
                    yield format_event("mistake", self.site.word_message(data))
                else:
                    yield format_event(name, data)
        except (Busy, UserError) as error:
            is_ended = True
            yield format_event("mistake", self.site.word_message(error))
        except Exception:
            yield format_event("mistake", FAILED)
            raise  # the server writes the traceback
        if not is_ended:
            yield format_event("mistake", "ended without an answer; it needed more memory than there is")

    def _keep(self, key: str, text: str) -> None:
        self.kept[key] = text
        while len(self.kept) > KEPT:
            self.kept.popitem(last=False)


def format_event(name: str, data: Any) -> str:
    """Return one server-sent event as text."""
    return f"event: {name}\ndata: {json.dumps(data)}\n\n"
