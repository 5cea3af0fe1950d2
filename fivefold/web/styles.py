"""The style sheet of all pages. It is in the page itself, so that the browser paints without a second request.

The content security policy allows it by its hash, and no other.
"""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

from fivefold.record import read_text
from fivefold.rendering.drawing.style import read_css

STYLES = read_css() + read_text(Path(__file__).parent / "static" / "page.css", kind="a style sheet")
STYLES_HASH = f"sha256-{base64.b64encode(hashlib.sha256(STYLES.encode()).digest()).decode()}"
