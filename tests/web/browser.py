"""What the tests of the pages share: the system's own Chromium, and what every page must be."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
NEEDS_CHROMIUM = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium")
AXE = Path(__file__).with_name("axe.min.js")  # axe-core 4.14.1, MPL-2.0, by Deque
PLAN = "/plan?model=llama3-8b&machine=h100:8&layout=dp8+zero3+mbs1&seq=8192&gbs=64"
COMPARE = "/compare?layout=dp8+zero3&layout=dp4+tp2&gbs=64"


class Server(NamedTuple):
    """A running ``fivefold web``: where it says that it serves, and its process."""

    address: str
    process: int


def list_violations(page: Any) -> list[str]:
    """Return the accessibility violations that axe finds; it runs outside of the page's script policy."""
    if not page.evaluate("'axe' in window"):
        page.evaluate(AXE.read_text(encoding="utf-8"))
    # The page keeps axe, and what passes is not sent out of the browser.
    violations = page.evaluate("axe.run({resultTypes: ['violations']}).then((result) => result.violations)")
    return [
        f"{item['id']}: {item['help']}: {[node['html'][:90] for node in item['nodes'][:3]]}"
        for item in violations
        if item["impact"] in ("serious", "critical")
    ]


def is_within_window(page: Any) -> bool:
    """Whether nothing has to be scrolled sideways."""
    return bool(page.evaluate("document.documentElement.scrollWidth <= innerWidth + 1"))


def is_whole(page: Any, name: str) -> bool:
    """Whether all of a table is seen without scrolling it sideways."""
    table = page.get_by_role("region", name=name, exact=True)
    return bool(table.evaluate("each => each.scrollWidth <= each.clientWidth + 1"))


def read_tip(page: Any, element: Any) -> str:
    """Point at an element until its tooltip is shown, and return its text.

    The first movement may come before the window has scrolled to the element, which hides the tooltip.
    """
    deadline = time.monotonic() + 60
    while True:
        element.hover()
        page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        if page.locator("#tip").is_visible():
            return str(page.locator("#tip").inner_text())
        assert time.monotonic() < deadline, "no tooltip is shown"
        page.mouse.move(0, 0)


def slow_down(page: Any, *, throttle: float) -> None:
    """Make the processor of a page slower and its answers late, so that a test that does not wait for them fails."""
    session = page.context.new_cdp_session(page)
    session.send("Emulation.setCPUThrottlingRate", {"rate": throttle})
    conditions = {"offline": False, "latency": 300, "downloadThroughput": -1, "uploadThroughput": -1}
    session.send("Network.enable")
    session.send("Network.emulateNetworkConditions", conditions)
