"""The state that all routes of one server share: its folder, the local machine file, and the workers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from fivefold.web.folder import Folder
from fivefold.web.question import About, ResolvedRequest
from fivefold.web.work import Work

T = TypeVar("T")


class Site:
    """One server. ``local``: the machine file that ``local`` stands for."""

    def __init__(self, root: Path, *, local: Path, work: Work | None = None) -> None:
        self.folder, self.local, self.work = Folder(root), local, work or Work()

    def resolve(self, about: About) -> ResolvedRequest:
        """Resolve the records that a question names."""
        return about.resolve(folder=self.folder, local=self.local)

    async def answer(self, about: About, action: Callable[[ResolvedRequest], T]) -> T:
        """Run a short ``action`` on the records of a question."""
        return await self.work.run_soon(lambda: action(self.resolve(about)))

    async def run_long(self, verb: str, about: About) -> dict[str, Any]:
        """Return the last event of long work: a ``result`` or a ``mistake``."""
        last: dict[str, Any] = {"mistake": "ended without an answer; it needed more memory or time than there is"}
        async for event in self.events(verb, about):
            if "result" in event or "mistake" in event:
                last = event
        return last

    def events(self, verb: str, about: About) -> Any:
        """Return the events of a search or dry run."""
        request = {"question": about.model_dump(mode="json"), "root": str(self.folder.root), "local": str(self.local)}
        return self.work.stream(verb, request, cwd=self.folder.root)
