"""SVG elements as escaped text: ``element("rect", x=1, class_="F")`` → ``<rect x="1" class="F"/>``."""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import escape

from fivefold.show.elements import Raw, words

_TIP = re.compile(r'<(\w+)( [^<>]*?) data-tip="([^"]*)"/>')


def element(tag: str, *inside: str, **attributes: object) -> Raw:
    """An element; attributes that are None are left out, ``class_`` is class, and ``_`` within a name is ``-``."""
    said = "".join(
        f' {name.rstrip("_").replace("_", "-") if name != "viewBox" else name}="{_number(value)}"'
        for name, value in attributes.items()
        if value is not None
    )
    content = "".join(map(words, inside))
    return Raw(f"<{tag}{said}>{content}</{tag}>" if content else f"<{tag}{said}/>")


def joined(parts: Iterable[Raw]) -> Raw:
    """Elements one after another."""
    return Raw("".join(parts))


def legend(items: Iterable[tuple[str, str]]) -> Raw:
    """What the colours mean: (class, name) of each."""
    keys = (
        element("li", element("svg", element("rect", width=12, height=12, rx=3, class_=f"k-{look}"), class_="swatch",
                              width=12, height=12, aria_hidden="true"), name)
        for look, name in items
    )  # fmt: skip
    return element("ul", joined(keys), class_="legend")


def titled(picture: Raw) -> Raw:
    """The picture with its tips as titles, which a browser shows by itself: for files in which no script runs."""
    return Raw(_TIP.sub(r"<\1\2><title>\3</title></\1>", picture))


def percent(share: float) -> str:
    """A share as a length: ``0.25`` → ``"25%"``."""
    return f"{100 * share:.5g}%"


def _number(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else escape(str(value))
