"""The style sheet and the scripts of all pages.

The style sheet is in the page itself, so that the browser paints without a second request. The content security policy
allows it by its hash, and no other. The scripts are modules, which a page names so that they load at the same time.
"""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

from fivefold.rendering.drawing.style import read_css
from fivefold.text_files import read_text

_FOLDER = Path(__file__).parent / "static"
STYLES = read_css() + read_text(_FOLDER / "page.css", kind="a style sheet")
STYLES_HASH = f"sha256-{base64.b64encode(hashlib.sha256(STYLES.encode()).digest()).decode()}"
MODULES = tuple(sorted(path.name for path in _FOLDER.glob("*.js")))
