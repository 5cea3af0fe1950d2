"""SVG elements as escaped text: ``element("rect", x=1, class_="F")`` → ``<rect x="1" class="F"/>``."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Iterable
from html import escape

from fivefold.rendering.elements import Raw, escape_text

IMAGE_WIDTH = 760  # pixels
_TIP = re.compile(r'<(\w+)( [^<>]*?) data-tip="([^"]*)"/>')


def build_element(tag: str, *inside: str, **attributes: object) -> Raw:
    """Return an element; attributes that are None are left out, ``class_`` is class, and ``_`` in a name is ``-``."""
    attribute_text = "".join(
        f' {name.rstrip("_").replace("_", "-") if name != "viewBox" else name}="{_number(value)}"'
        for name, value in attributes.items()
        if value is not None
    )
    content = "".join(map(escape_text, inside))
    return Raw(f"<{tag}{attribute_text}>{content}</{tag}>" if content else f"<{tag}{attribute_text}/>")


def join_elements(parts: Iterable[Raw]) -> Raw:
    """Return several elements as one piece of SVG."""
    return Raw("".join(parts))


def draw_legend(items: Iterable[tuple[str, str]]) -> Raw:
    """Return the legend of colours: (class, name) of each."""
    keys = (
        build_element(
            "li",
            build_element(
                "svg",
                build_element("rect", width=12, height=12, rx=3, class_=f"k-{look}"),
                class_="swatch",
                width=12,
                height=12,
                aria_hidden="true",
            ),
            name,
        )
        for look, name in items
    )
    return build_element("ul", join_elements(keys), class_="legend")


def add_titles(picture: Raw) -> Raw:
    """Return the picture with its tips as titles, which a browser shows itself: for files in which no script runs."""
    return Raw(_TIP.sub(r"<\1\2><title>\3</title></\1>", picture))


def embed_image(picture: Raw, *, height: int, label: str) -> Raw:
    """Return the picture as an image of the page, for pages that remove elements of SVG.

    It has its own background, and is dark if its page is (``color-scheme``).
    """
    from fivefold.rendering.drawing.style import read_css

    background = build_element("rect", width="100%", height="100%", class_="ground")
    inside = build_element("svg", picture, x=62, y=14, width=IMAGE_WIDTH - 76, height=height, overflow="visible")
    rules = ":root { color-scheme: light dark; font-family: sans-serif; } .ground { fill: var(--card); }"
    style = Raw(f"<style>{rules}\n{read_css()}</style>")
    svg_file = build_element(
        "svg", style, background, inside, xmlns="http://www.w3.org/2000/svg", width=IMAGE_WIDTH, height=height + 60
    )
    data = b64encode(svg_file.encode()).decode()
    return build_element("img", src=f"data:image/svg+xml;base64,{data}", width=IMAGE_WIDTH, alt=label)


def format_percent(share: float) -> str:
    """Return a share as a length: ``0.25`` → ``"25%"``."""
    return f"{100 * share:.5g}%"


def _number(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else escape(str(value))
