"""SVG elements as escaped text: ``element("rect", x=1, class_="F")`` → ``<rect x="1" class="F"/>``."""

from __future__ import annotations

from collections.abc import Iterable

from markupsafe import Markup, escape


def element(tag: str, *inside: str | Markup, **attributes: object) -> Markup:
    """An element; attributes that are None are left out, ``class_`` is class, and ``_`` within a name is ``-``."""
    said = "".join(
        f' {name.rstrip("_").replace("_", "-") if name != "viewBox" else name}="{_number(value)}"'
        for name, value in attributes.items()
        if value is not None
    )
    content = "".join(map(escape, inside))
    return Markup(f"<{tag}{said}>{content}</{tag}>" if content else f"<{tag}{said}/>")


def joined(parts: Iterable[Markup]) -> Markup:
    """Elements one after another."""
    return Markup("").join(parts)


def percent(share: float) -> str:
    """A share as a length: ``0.25`` → ``"25%"``."""
    return f"{100 * share:.5g}%"


def _number(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(escape(str(value)))
