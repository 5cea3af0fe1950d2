"""Runs event loops while the browser of other tests keeps one running in the main thread."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def run_in_thread(run: Callable[..., T], *arguments: object) -> T:
    """Return ``run(*arguments)``, such as ``asyncio.run(task)``, of a thread that has no event loop yet."""
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(run, *arguments).result()
