"""10,000 random requests of the page and its API: no 5xx, no traceback, no file from outside, no empty part of a page.

Of two in a hundred a process computes the answer, for at most ``SECONDS``; its events are checked too.

python -m tests.endure.requests --count 10000 --seed 0 [--slow-share 1]
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from starlette.testclient import TestClient

from fivefold.web.app import create
from fivefold.web.work import WorkQueue
from tests.endure.stop_signals import end_at_stop_signal
from tests.web.conftest import OWN, SECRET
from tests.web.requests import SLOW_SHARE, draw, find_fault, list_routes

SECONDS = 8.0  # limit of a request with a process


def explain(app: FastAPI, request: dict[str, Any]) -> str:
    """Ask again and return the traceback, if there is one."""
    try:
        with TestClient(app, base_url="http://127.0.0.1:8765") as client:
            client.request(**request)
    except Exception:
        return traceback.format_exc(limit=-6)
    return ""


def main() -> int:
    """Exit code 1 if any answer is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--slow-share", type=float, default=SLOW_SHARE, help="share of requests that need a process")
    options = parser.parse_args()
    chance, codes, slowest, bad = random.Random(options.seed), Counter[int](), (0.0, ""), 0
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        (root / "inside").mkdir()
        (root / "outside.toml").write_text(f'name = "{SECRET}"\n{OWN}')
        (root / "inside" / "own.toml").write_text(OWN)
        (root / "inside" / "link.toml").symlink_to(root / "outside.toml")
        app = create(root / "inside", local=root / "none", work=WorkQueue(long_limit_seconds=SECONDS))
        with (
            TestClient(app, base_url="http://127.0.0.1:8765", raise_server_exceptions=False) as client,
            end_at_stop_signal(),
        ):
            short, slow = list_routes(client)
            for _ in range(options.count):
                request = draw(chance, chance.choice(slow if chance.random() < options.slow_share else short))
                begin = time.perf_counter()
                try:
                    answer = client.request(**request)
                except (UnicodeError, ValueError):  # the client itself does not send it
                    codes[0] += 1
                    continue
                slowest = max(slowest, (time.perf_counter() - begin, str(request)))
                codes[answer.status_code] += 1
                if line := find_fault(answer):
                    bad += 1
                    print(line, request, explain(app, request) or answer.text[-1000:], sep="\n", flush=True)
        if {path.name for path in root.iterdir()} != {"inside", "outside.toml"}:
            bad += 1
            print("a request wrote outside of the folder:", *root.iterdir())
    print(f"{codes.total()} requests, {bad} wrong; by status {dict(sorted(codes.items()))}")
    print(f"slowest {slowest[0]:.2f} s: {slowest[1][:400]}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
