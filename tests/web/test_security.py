from __future__ import annotations

import asyncio
import base64
import hashlib
import re

import pytest
from starlette.testclient import TestClient
from starlette.types import Message, Receive, Scope, Send

from fivefold.web.guard import BODY_BYTES, Guard
from tests.event_loop import run_in_thread
from tests.web.conftest import SECRET


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({}, 200),
        ({"host": "localhost:8765"}, 200),
        ({"host": "[::1]:8765"}, 200),
        ({"host": "rebound.example:8765"}, 403),
        ({"host": "127.0.0.1.example"}, 403),
        ({"host": "127.0.0.1:8765@evil"}, 403),
        ({"host": "127.0.0.1:99999999"}, 403),
        ({"origin": "http://127.0.0.1:8765"}, 200),
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "http://127.0.0.1:9999"}, 403),  # another server of this computer
        ({"origin": "https://127.0.0.1:8765"}, 403),
        ({"origin": "http://localhost:8765"}, 403),
        ({"host": "localhost:9000", "origin": "http://localhost:9000"}, 200),  # forwarded, as by ssh -L
        ({"host": "evil.example", "origin": "http://evil.example"}, 403),
        ({"host": "user@127.0.0.1:8765"}, 403),
        ({"host": "127.0.0.1:8765/x"}, 403),
        ({"host": ""}, 403),
        ({"origin": "null"}, 403),
        ({"sec-fetch-site": "same-origin", "sec-fetch-mode": "cors"}, 200),
        ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}, 403),
        ({"sec-fetch-site": "same-site", "sec-fetch-mode": "cors"}, 403),
        ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}, 200),  # a user shared a link
    ],
)
def test_requests_from_other_sites_are_rejected(client: TestClient, headers: dict[str, str], code: int) -> None:
    answer = client.get("/api/catalog", headers=headers)
    assert answer.status_code == code
    assert "default-src 'none'" in answer.headers["content-security-policy"]


@pytest.mark.parametrize("path", ["/plan", "/api/catalog", "/static/page.js", "/nothing"])
def test_every_answer_has_the_policy(client: TestClient, path: str) -> None:
    headers = client.get(path).headers
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "http" not in policy
    assert headers["x-content-type-options"] == "nosniff"


COMPARE = "/compare?layout=dp8+zero3&layout=dp4+tp2&gbs=64"


@pytest.mark.parametrize("path", ["/plan?seq=8192&gbs=64", "/plan?layout=nonsense", "/search", COMPARE])
def test_no_page_needs_inline_script_or_another_style_than_its_sheet(client: TestClient, path: str) -> None:
    answer = client.get(path)
    sheet = re.search(r"<style>(.*?)</style>", answer.text, re.DOTALL)
    assert sheet is not None
    digest = base64.b64encode(hashlib.sha256(sheet[1].encode()).digest()).decode()
    assert f"style-src 'sha256-{digest}';" in answer.headers["content-security-policy"]
    text = answer.text.replace(sheet[0], "")
    assert "<style>" not in client.get(path, headers={"sec-fetch-dest": "empty", "sec-fetch-mode": "cors"}).text
    assert not re.search(r"<script(?![^>]*src=)|<style|\sstyle=|\son[a-z]+=|javascript:", text)
    assert set(re.findall(r"https?://[^\"'<\s]+", text)) <= {"http://www.w3.org/2000/svg"}


@pytest.mark.parametrize(
    "name",
    [
        "../outside.toml",
        "link.toml",
        "/etc/passwd",
        "./../outside.toml",
        "..",
        "a/../../outside.toml",
        "\x00",
        "~/x.toml",
    ],
)
@pytest.mark.parametrize("field", ["model", "machine"])
def test_files_outside_the_served_folder_are_not_read(client: TestClient, name: str, field: str) -> None:
    for path in ("/api/predict", "/plan"):
        answer = client.get(path, params={field: name})
        assert answer.status_code == (200 if path == "/plan" else 422)
        assert SECRET not in answer.text
        assert "root:" not in answer.text


@pytest.mark.parametrize(
    "path", ["/static/../app.py", "/static/%2e%2e/app.py", "/static/..%2fapp.py", "/static//etc/passwd"]
)
def test_only_static_files_are_served(client: TestClient, path: str) -> None:
    assert client.get(path).status_code == 404


def test_a_body_has_a_limit(client: TestClient) -> None:
    assert client.post("/api/predict", content=b"x" * (BODY_BYTES + 1)).status_code == 413
    assert client.post("/api/predict", headers={"content-length": "-1"}).status_code == 413

    def endless() -> object:
        for _ in range(BODY_BYTES // 1000):
            yield b"x" * 2000

    assert client.post("/api/predict", content=endless()).status_code in (400, 413, 422)


def test_a_body_of_unknown_length_ends_at_the_limit() -> None:
    """Pieces of 300,000 bytes without a content-length: the application gets three, then the connection is closed."""
    got: list[str] = []

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        while len(got) < 10 and got[-1:] != ["http.disconnect"]:
            got.append((await receive())["type"])

    async def piece() -> Message:
        return {"type": "http.request", "body": bytes(300_000), "more_body": True}

    async def ignore(message: Message) -> None:
        pass

    scope = {"type": "http", "headers": [(b"host", b"127.0.0.1:8765")]}
    run_in_thread(asyncio.run, Guard(application)(scope, piece, ignore))
    assert got == ["http.request"] * (BODY_BYTES // 300_000) + ["http.disconnect"]


def test_user_input_is_escaped(client: TestClient) -> None:
    text = client.get("/plan", params={"model": '"><script>alert(1)</script>', "layout": "<img src=x>"}).text
    assert "<script>alert" not in text
    assert "<img src=x" not in text
