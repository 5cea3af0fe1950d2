"""Long work as server-sent events: ``progress`` (done, total), then ``found`` (HTML) or ``mistake`` (a line).

The work lives as long as the stream: who closes the page, or stops, ends it. The last results are kept for a while.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from typing import Any

from fivefold.record import Mistake
from fivefold.web.question import About
from fivefold.web.site import Site
from fivefold.web.work import Busy

KEPT = 16  # results


async def streamed(
    site: Site, verb: str, asked: About, draw: Callable[[Any], str], kept: OrderedDict[str, str]
) -> AsyncIterator[str]:  # fmt: skip
    """The events of ``verb``, whose result ``draw`` turns into HTML."""
    key = asked.model_dump_json()
    if key in kept:
        yield event("found", kept[key])
        return
    ended = False
    try:
        async for each in site.events(verb, asked):
            ended = "progress" not in each
            if "result" in each:
                kept[key] = draw(each["result"])
                while len(kept) > KEPT:
                    kept.popitem(last=False)
                yield event("found", kept[key])
            elif "mistake" in each:
                yield event("mistake", site.folder.plain(each["mistake"]))
            else:
                yield event("progress", each["progress"])
    except (Busy, Mistake) as error:
        ended = True
        yield event("mistake", str(error))
    if not ended:
        yield event("mistake", "ended without an answer; it needed more memory than there is")


def event(name: str, data: Any) -> str:
    """One server-sent event."""
    return f"event: {name}\ndata: {json.dumps(data)}\n\n"
