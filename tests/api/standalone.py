"""Check that an HTML page is complete, and fetches and runs nothing."""

from __future__ import annotations

from html.parser import HTMLParser

VOID = ("br", "meta", "hr", "img")
FETCHING = ("script", "link", "iframe", "img", "object", "embed", "video", "audio")


class Page(HTMLParser):
    """Tags that are open; whatever would be fetched or run."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        within = tag == "img" and dict(attrs).get("src", "").startswith("data:image/svg+xml;base64,")
        self.fetched += [f"{tag} {name}" for name, _ in attrs if name == "href" or name.startswith("on")]
        self.fetched += [tag] if tag in FETCHING and not within else []
        self.fetched += [f"{tag} {name}" for name, _ in attrs if name == "src" and not within]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert tag in VOID or self.open.pop() == tag


def check_standalone(text: str) -> None:
    page = Page(text)
    assert (page.open, page.fetched) == ([], [])
    assert "url(" not in text
    assert "://" not in text
    assert "@import" not in text
