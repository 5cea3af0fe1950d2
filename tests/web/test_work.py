from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from fivefold.web.app import create
from fivefold.web.work import Busy, WorkQueue

SEARCH = "/api/search?model=llama3-405b&machine=h100:4096&gbs=2048&seq=8192"


def run_in_thread(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine in a thread: Playwright's loop may be running in this one."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, coroutine).result()


def client(work: WorkQueue) -> TestClient:
    return TestClient(create(Path(), local=Path("none"), work=work), base_url="http://127.0.0.1:8765")


@pytest.mark.slow
def test_the_number_of_concurrent_searches_is_limited() -> None:
    with client(WorkQueue(at_once=0)) as asking:
        answer = asking.get(SEARCH)
        assert answer.status_code == 429
        assert answer.json()["detail"].startswith("as many searches and dry runs are running as are allowed at once")
        assert "as many searches" in asking.get(SEARCH.replace("/api/search", "/search/events")).text


@pytest.mark.slow
def test_a_search_that_takes_too_long_is_ended() -> None:
    work = WorkQueue(long_limit_seconds=1.5)
    with client(work) as asking:
        begin = time.perf_counter()
        answer = asking.get(SEARCH)
        assert answer.status_code == 422
        assert "was stopped; narrow the search" in answer.json()["detail"]
        assert time.perf_counter() - begin < 30
    assert work.free_slots == 2


@pytest.mark.slow
def test_a_dead_worker_process_is_reported() -> None:
    with client(WorkQueue(python=("false",))) as asking:
        assert "ended without an answer" in asking.get(SEARCH).json()["detail"]


def test_an_answer_ends_the_work_even_if_its_process_does_not_end() -> None:
    """Its output stays open until the limit, which is no second ending."""
    line = json.dumps({"mistake": "x"})
    answers = f"import time; print({line!r}, flush=True); time.sleep(600)"
    with client(WorkQueue(python=(sys.executable, "-c", answers), long_limit_seconds=60)) as asking:
        text = asking.get(SEARCH.replace("/api/search", "/search/events")).text
    assert text == 'event: mistake\ndata: "x"\n\n'


def test_short_answers_are_computed_one_after_another() -> None:
    running: list[int] = []

    def action() -> int:
        running.append(1)
        assert len(running) == 1
        time.sleep(0.02)
        running.pop()
        return 1

    async def run_several() -> list[int]:
        work = WorkQueue()
        return list(await asyncio.gather(*(work.run_soon(action) for _ in range(8))))

    assert run_in_thread(run_several()) == [1] * 8


def test_a_slow_short_answer_is_reported() -> None:
    async def run_two() -> None:
        work = WorkQueue(short_limit_seconds=0.1)
        first = asyncio.create_task(work.run_soon(lambda: time.sleep(0.15)))
        await asyncio.sleep(0.02)
        with pytest.raises(Busy, match="try again"):
            await work.run_soon(lambda: None)
        await first

    run_in_thread(run_two())
