"""The Learn page: one chapter of the guide, with its numbers below it, live, for any step."""

from __future__ import annotations

import re
from functools import cache
from html import unescape
from importlib.resources import files
from itertools import count
from typing import Annotated, NamedTuple

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from latex2mathml.converter import convert
from markdown_it import MarkdownIt
from markdown_it.token import Token

from fivefold.errors import UserError
from fivefold.web.pages.plan import PlanQuestion, View, build_view
from fivefold.web.pages.render import render_page
from fivefold.web.question import Mistake
from fivefold.web.site import WebServer

LEGEND = "notation"  # a page in addition to the chapters
LIVE = {
    "index": ("memory", "pipeline", "time"), "counts": ("operations",), "memory": ("memory",), "traffic": ("traffic",),
    "recomputation": ("memory",), "schedules": ("pipeline",), "roofline": ("operations",), "network": ("traffic",),
    "timeline": ("time", "pipeline"), "ratios": ("time", "traffic"), "published": ("expected",),
}  # fmt: skip


def build_router(site: WebServer) -> APIRouter:
    """Build the routes of the page."""
    pages = APIRouter(include_in_schema=False)

    @pages.get("/learn")
    def redirect_to_index() -> Response:
        return RedirectResponse("/learn/index")

    @pages.get("/learn/{name}")
    async def learn(request: Request, name: str, query: Annotated[PlanQuestion, Query()]) -> HTMLResponse:
        try:
            found_chapter = read_chapter(name)
        except UserError as error:
            return render_page("mistake.html", request, query=query, mistake=Mistake(str(error)), code=404)
        view = await site.work.run_soon(lambda: build_view(site, query)) if found_chapter.live else View()
        return render_page(
            "learn.html",
            request,
            query=query,
            chapter=found_chapter,
            chapters=list_chapters(),
            view=view,
            mistake=view.mistake,
        )

    return pages


"""The parts of a plan that a chapter explains; they are shown below it, live."""


class Chapter(NamedTuple):
    """One chapter. ``name``: as in its URL; ``live``: parts of a plan that it explains."""

    name: str
    title: str
    html: str
    live: tuple[str, ...]


@cache
def list_chapters() -> dict[str, str]:
    """Return names and titles in the order of the index."""
    names = ["index", *dict.fromkeys(re.findall(r"\]\(([\w-]+)\.md\)", _read_text("index"))), LEGEND]
    return {name: _read_text(name).partition("\n")[0].removeprefix("# ") for name in names}


@cache
def read_chapter(name: str) -> Chapter:
    """Return a chapter by name; raises ``UserError`` if there is none."""
    if name not in list_chapters():
        raise UserError(f"the guide has no chapter {name[:60]!r}; it has {', '.join(list_chapters())}")
    text = re.sub(r"^( *)\$\$(.+?)\$\$$", r"\1`$\2$`", _read_text(name), flags=re.MULTILINE)
    reader = MarkdownIt("commonmark", {"html": False}).enable("table")
    tokens = reader.parse(text)
    for token in tokens:
        for child in token.children or ():
            _fix_links(child)
        if token.type == "table_open":
            token.attrSet("class", "rows")
        if token.attrs.pop("style", "") == "text-align:right":  # inline styles are not allowed on the pages
            token.attrSet("class", "n")
    html = reader.renderer.render(tokens, reader.options, {})
    numbers = count(1)
    html = re.sub(r"<code>\$(.+?)\$</code>", lambda match: _render_formula(match[1], next(numbers)), html)
    html = html.replace("<pre>", '<pre tabindex="0">')
    html = re.sub(
        "<table",
        lambda _: f'<div class="scroll" tabindex="0" role="region" aria-label="table {next(numbers)}"><table',
        html,
    )
    return Chapter(name, list_chapters()[name], html.replace("</table>", "</table></div>"), LIVE.get(name, ()))


def _read_text(name: str) -> str:
    package = files("fivefold.web")
    return (package / "notation.md" if name == LEGEND else package / "book" / f"{name}.md").read_text(encoding="utf-8")


def _fix_links(token: Token) -> None:
    """Point links between chapters to their pages, and remove links out of the guide except to the web."""
    if token.type != "link_open":
        return
    target, _, anchor = str(token.attrGet("href")).partition("#")
    name = target.rpartition("/")[2].removesuffix(".md")
    if target.startswith("https://"):
        token.attrSet("rel", "noreferrer")
    elif target.endswith(".md") and name in list_chapters():
        token.attrSet("href", f"/learn/{name}" + (f"#{anchor}" if anchor else ""))
    else:
        del token.attrs["href"]


def _render_formula(text: str, number: int) -> str:
    mathml = convert(unescape(text), display="block")
    return f'<span class="scroll" tabindex="0" role="region" aria-label="formula {number}">{mathml}</span>'
