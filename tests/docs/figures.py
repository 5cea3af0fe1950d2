"""Lists the figures of a page. Tests compare these with what the code says now, so that the words may change."""

from __future__ import annotations

import re

UNIT = r"(?:%|(?:[µm]?s|min|h|[KMGTPE]i?B|[kMGTPE]|B|FLOPs?|tokens/s)\b)"
FIGURE = re.compile(rf"[\w+−<>=-]*\d(?:[\w.,/=@+-]*\w)?(?: ?{UNIT})?")


def list_figures(text: str) -> list[str]:
    """Return every word with a digit, with the unit after it: ``12.5 %``, ``1.50 GiB``, ``dp2``, ``zero3/2``."""
    return FIGURE.findall(text)


def list_code(text: str) -> list[str]:
    """Return what stands between backticks."""
    return re.findall(r"`([^`\n]+)`", text)
