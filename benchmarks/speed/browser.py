"""Measure the Plan page as a user sees it, in headless Chromium: the first paint, and changes from click to frame.

python benchmarks/speed/browser.py --changes 20
"""

from __future__ import annotations

import argparse
import random
import statistics
import subprocess
import sys
import tempfile
from typing import Any

from page import QUESTIONS
from playwright.sync_api import Browser, Page, sync_playwright

CHROMIUM = "/usr/bin/chromium"
VISITS = 4
PAUSE = 500  # milliseconds between a visit and its click, in which the pictures near the window are drawn

PAINT = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
CHOICES = "#controls .options a:not([aria-current])"
CHANGE = f"""async (index) => {{
  const link = document.querySelectorAll('{CHOICES}')[index], before = location.href, begin = performance.now();
  const frame = () => new Promise(requestAnimationFrame);
  link.click();
  while (document.body.classList.contains('busy') || location.href === before) await frame();
  const swapped = performance.now();
  await frame();
  await new Promise((done) => setTimeout(done, 0)); // after the paint of the frame
  const answer = performance.getEntriesByType('resource').findLast((entry) => entry.name.includes('/plan?'));
  return [performance.now() - begin, answer.responseStart - answer.requestStart, swapped - answer.responseEnd];
}}"""


def main() -> None:
    """Visit each page, then follow random choices of it, each from the page as it was first."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--changes", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "fivefold", "web", folder, "--port", "0", "--no-browser"]
        server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert server.stderr is not None
        address = server.stderr.readline().split("/ shows")[0]
        try:
            with sync_playwright() as playwright:
                browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
                for name, url in QUESTIONS.items():
                    measure(name, address + url, browser, changes=options.changes, seed=options.seed)
        finally:
            server.terminate()
            server.wait()


def measure(name: str, url: str, browser: Browser, *, changes: int, seed: int) -> None:
    """Print the first paints of a page, and how long its changes take: all, the server, the browser's exchange."""
    paints = []
    for _ in range(VISITS):
        page = open_page(browser, url)
        paints.append(page.evaluate(PAINT))
        page.context.close()
    chance, page, times = random.Random(seed), open_page(browser, url), []
    for _ in range(changes):
        page.goto(url)
        page.wait_for_timeout(PAUSE)
        times.append(page.evaluate(CHANGE, chance.randrange(page.locator(CHOICES).count())))
    page.context.close()
    total, server, exchange = (sorted(values) for values in zip(*times, strict=True))
    middle, high = statistics.median(total), total[int(0.95 * changes) - 1]
    parts = f"server {statistics.median(server):.0f}, exchange {statistics.median(exchange):.0f}"
    print(f"{name:24} first paint {', '.join(f'{paint:.0f}' for paint in paints)} ms")
    print(f"{'':24} {changes} changes: median {middle:.0f} ms, 95 % {high:.0f} ms; {parts}", flush=True)


def open_page(browser: Browser, url: str) -> Page:
    """Open a page in a browser without cache or storage."""
    context: Any = browser.new_context(viewport={"width": 1280, "height": 900})
    page: Page = context.new_page()
    page.goto(url)
    page.wait_for_timeout(PAUSE)
    return page


if __name__ == "__main__":
    main()
