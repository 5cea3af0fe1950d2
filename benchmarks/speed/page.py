"""Measure how long the server takes to redraw the Plan page: milliseconds of one core per changed layout keyword.

python benchmarks/speed/page.py
"""

from __future__ import annotations

import re
import statistics
import time
from html import unescape
from pathlib import Path

from starlette.testclient import TestClient

from fivefold.web.app import create

QUESTIONS = {
    "Llama 3 8B, 8 H100": "/plan?seq=8192&gbs=64",
    "Llama 3 70B, 512 H100": "/plan?model=llama3-70b&machine=h100:512&layout=dp16 tp8 pp4 v2 zero1&seq=8192&gbs=2048",
    "GPT-3 175B, 96 A100": "/plan?model=gpt3-175b&machine=a100:96&layout=tp8 pp12&gbs=96&seq=2048",
    "DeepSeek-V3, 2048 H800": "/plan?model=deepseek-v3&machine=h800:2048&layout=dp128 pp16 ep64 dualpipe&gbs=15360",
}  # fmt: skip


def main() -> None:
    """Follow every choice of the first page of each question, and print the median and the slowest."""
    with TestClient(create(Path(), local=Path("none")), base_url="http://127.0.0.1:8765") as client:
        for name, first in QUESTIONS.items():
            text = client.get(first).text
            links = re.findall(r'<a href="([^"]*layout=[^"]*)" data-key="(?!gpus)', text)
            seconds = []
            for link in links:
                begin = time.process_time()
                client.get(unescape(link))
                seconds.append(1e3 * (time.process_time() - begin))
            middle, slowest = statistics.median(seconds), max(seconds)
            soon = sum(value < 150 for value in seconds) / len(seconds)
            words = unescape(links[seconds.index(slowest)]).rpartition("layout=")[2].replace("%20", " ")
            print(f"{name:24} {len(links):3} changes: median {middle:4.0f} ms, {soon:4.0%} within 150 ms")
            print(f"{'':24} slowest {slowest:4.0f} ms: {words}")


if __name__ == "__main__":
    main()
