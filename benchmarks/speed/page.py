"""Measure how long the server takes to redraw the Plan page: milliseconds of one core per changed choice.

Choices are the keywords of the layout and the lists of the job. Pictures of many stages are a second request.

python benchmarks/speed/page.py
"""

from __future__ import annotations

import re
import statistics
import time
from html import unescape
from pathlib import Path
from urllib.parse import quote, unquote

from starlette.testclient import TestClient

from fivefold.web.app import create

QUESTIONS = {
    "Llama 3 8B, 8 H100": "/plan?seq=8192&gbs=64",
    "Llama 3 70B, 512 H100": "/plan?model=llama3-70b&machine=h100:512&layout=dp16 tp8 pp4 v2 zero1&seq=8192&gbs=2048",
    "GPT-3 175B, 96 A100": "/plan?model=gpt3-175b&machine=a100:96&layout=tp8 pp12&gbs=96&seq=2048",
    "GPT-3 175B, pp96": "/plan?model=gpt3-175b&machine=a100:96&layout=pp96&gbs=192&seq=2048",
    "DeepSeek-V3, 2048 H800": "/plan?model=deepseek-v3&machine=h800:2048&layout=dp128 pp16 ep64 dualpipe&gbs=15360",
}  # fmt: skip


def main() -> None:
    """Follow every choice of the first page of each question, and print how long the answers take."""
    with TestClient(create(Path(), local=Path("none")), base_url="http://127.0.0.1:8765") as client:
        for name, first in QUESTIONS.items():
            changed = list_changes(first, client.get(first).text)
            seconds, later, sizes = [], [], []
            for url in changed:
                begin = time.process_time()
                text = client.get(url).text
                seconds.append(1e3 * (time.process_time() - begin))
                sizes.append(len(text))
                if pictures := re.search(r'data-later="(/plan/over-time[^"]*)', text):
                    begin = time.process_time()
                    client.get(unescape(pictures[1]))
                    later.append(1e3 * (time.process_time() - begin))
            soon = sum(value < 150 for value in seconds) / len(seconds)
            print(f"{name:24} {len(changed):3} changes: {describe(seconds)}, {soon:4.0%} within 150 ms")
            print(
                f"{'':24} slowest: {unquote(changed[seconds.index(max(seconds))])}; largest page {max(sizes):,} bytes"
            )
            if later:
                print(f"{'':24} {len(later):3} pictures after the figures: {describe(later)}")


def list_changes(first: str, text: str) -> list[str]:
    """Return the URL of every choice of a page: keywords of the layout, then up to three values of each list."""
    links = re.findall(r'<a href="([^"]*layout=[^"]*)" data-key="(?!gpus |stage )', text)
    values = [
        f"{first}&{field}={quote(unescape(value))}"
        for field, options in re.findall(r'<select name="(\w+)"(.*?)</select>', text, re.DOTALL)
        for value in re.findall(r'<option value="([^"]+)">', options)[:3]
    ]
    return [*map(unescape, links), *values]


def describe(milliseconds: list[float]) -> str:
    """Return the median, the 95th percentile and the maximum."""
    ordered = sorted(milliseconds)
    high = ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
    return f"median {statistics.median(ordered):.0f} ms, 95 % {high:.0f} ms, maximum {ordered[-1]:.0f} ms"


if __name__ == "__main__":
    main()
