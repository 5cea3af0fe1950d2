"""The state that all routes of one server share: its folder, the local machine file, and the workers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from fivefold.errors import UserError
from fivefold.web.dropped import DroppedFiles
from fivefold.web.folder import ServedFolder
from fivefold.web.question import NO_MISTAKE, JobQuestion, Mistake, ResolvedRequest
from fivefold.web.wording import use_page_words
from fivefold.web.work import WorkQueue

T = TypeVar("T")


class WebServer:
    """One server. ``local``: the machine file that ``local`` stands for."""

    def __init__(self, root: Path, *, local: Path, work: WorkQueue | None = None) -> None:
        self.folder, self.local, self.work = ServedFolder(root), local, work or WorkQueue()
        self.dropped = DroppedFiles()

    def resolve(self, about: JobQuestion) -> ResolvedRequest:
        """Resolve the records that a question names."""
        return about.resolve(folder=self.folder, local=self.local)

    def find_mistake(self, about: JobQuestion, error: UserError | str = "") -> Mistake:
        """Return why a question has no answer, in the words of the page; ``error``: what happened once it was valid."""
        mistake = about.find_mistake(folder=self.folder, local=self.local)
        return mistake._replace(message=self.word_message(mistake.message or error))

    async def check(self, about: JobQuestion, *, runs: bool) -> Mistake:
        """Return the error of a request, if any, before a worker process starts on it; none if ``runs`` is false."""
        return await self.work.run_soon(lambda: self.find_mistake(about)) if runs else NO_MISTAKE

    def word_message(self, message: object) -> str:
        """Return a message in the words of the page, without the path of its folder."""
        return use_page_words(self.folder.strip_root(str(message)))

    async def answer(self, about: JobQuestion, action: Callable[[ResolvedRequest], T]) -> T:
        """Run a short ``action`` on the records of a question."""
        return await self.work.run_soon(lambda: action(self.resolve(about)))

    async def run_long(self, verb: str, about: JobQuestion) -> dict[str, Any]:
        """Return the last event of long work: a ``result`` or a ``mistake``."""
        last: dict[str, Any] = {"mistake": "ended without an answer; it needed more memory or time than there is"}
        async for event in self.events(verb, about):
            if "result" in event or "mistake" in event:
                last = event
        return last

    def events(self, verb: str, about: JobQuestion) -> Any:
        """Return the events of a search or dry run."""
        request = {
            "question": about.model_dump(mode="json"),
            "root": str(self.folder.root),
            "local": str(self.local),
            "dropped": str(self.dropped.folder or ""),
        }
        return self.work.stream(verb, request, cwd=self.folder.root)
