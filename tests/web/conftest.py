"""A server of the page in this process, over a folder with a file that may be read, next to one that may not; the same
as a process of its own, and a browser that opens its pages.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the page needs the extra web")

from starlette.testclient import TestClient

from fivefold.web.app import create
from tests.web.browser import CHROMIUM, Server, slow_down

SECRET = "a-secret-outside-of-the-folder"
OWN = "layers = 4\nwidth = 256\nheads = 8\nkv_heads = 2\nhead_dim = 32\nffn = 512\nvocab = 1000\n"


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder; a link in it leads out."""
    root = tmp_path_factory.mktemp("web")
    (root / "outside.toml").write_text(f'name = "{SECRET}"\n{OWN}')
    inside = root / "inside"
    inside.mkdir()
    (inside / "own.toml").write_text(OWN)
    (inside / "link.toml").symlink_to(root / "outside.toml")
    return inside


@pytest.fixture(scope="session")
def client(folder: Path) -> Iterator[TestClient]:
    """A client of the server."""
    app = create(folder, local=folder / "no-local.toml")
    with TestClient(app, base_url="http://127.0.0.1:8765", raise_server_exceptions=False) as result:
        yield result


@pytest.fixture(scope="session")
def server(folder: Path) -> Iterator[Server]:
    process = subprocess.Popen(
        [sys.executable, "-m", "fivefold", "web", str(folder), "--port", "0", "--no-browser"],
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "XDG_CACHE_HOME": str(folder / "cache")},
    )
    assert process.stderr is not None
    line = process.stderr.readline()
    yield Server(line.split("/ shows")[0], process.pid)
    process.terminate()
    process.wait(timeout=30)
    process.stderr.close()


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="the pages are driven by playwright")
    playwright.expect.set_options(timeout=60_000)  # a busy machine is slow, not wrong
    with playwright.sync_playwright() as engine:
        launch = engine.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--process-per-site"])
        yield launch
        launch.close()


@pytest.fixture(scope="session")
def context(browser: Any, server: Server) -> Iterator[Any]:
    """A profile of the browser for all tests: one for each, with processes of its own, takes half again as much CPU.

    A page stays open, so that the process that draws the pages of the server stays too.
    """
    result = browser.new_context(viewport={"width": 1280, "height": 900}, base_url=server.address)
    result.set_default_timeout(60_000)
    result.new_page().goto("/static/page.css")
    yield result
    result.close()


@pytest.fixture
def said_by_browser() -> list[str]:
    """Collect what a page says on the console, and asks of another host."""
    return []


@pytest.fixture
def page(context: Any, server: Server, request: pytest.FixtureRequest, said_by_browser: list[str]) -> Iterator[Any]:
    """A fresh page, and nothing stored or permitted by those before; at its end nothing may have been said on the
    console, and nothing asked of another host.
    """
    result = context.new_page()
    if throttle := request.config.getoption("--throttle"):
        slow_down(result, throttle=throttle)
    said = said_by_browser
    result.on("console", lambda message: said.append(message.text) if message.type in ("error", "warning") else None)
    result.on("pageerror", lambda error: said.append(str(error)))
    result.on("request", lambda asked: None if asked.url.startswith(server.address) else said.append(asked.url))
    yield result
    result.close()
    session = context.new_cdp_session(context.pages[0])
    session.send("Storage.clearDataForOrigin", {"origin": server.address, "storageTypes": "all"})
    session.detach()
    context.clear_permissions()
    assert said == []
