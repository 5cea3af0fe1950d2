from __future__ import annotations

import gc
import socket
from functools import partial
from pathlib import Path

import pytest
from starlette.testclient import TestClient
from typer.testing import CliRunner

from fivefold.cli import app as cli
from fivefold.errors import UserError
from fivefold.web import serve
from fivefold.web.app import COLLECTED, create


def test_a_request_during_the_start_of_the_server_waits() -> None:
    """The address is printed, and the browser opened, before the server has started."""
    with serve._listen(0) as listening, socket.create_connection(listening.getsockname(), timeout=5):
        assert listening.getsockname()[0] == "127.0.0.1"


def test_a_port_in_use_is_a_one_line_error(tmp_path: Path) -> None:
    with serve._listen(0) as listening:
        words = ["web", str(tmp_path), "--port", str(listening.getsockname()[1]), "--no-browser"]
        with pytest.raises(UserError, match=r"port \d+ is taken; name another with --port"):
            CliRunner().invoke(cli, words, catch_exceptions=False)


def test_a_missing_folder_is_a_one_line_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nothing is not a folder"):
        CliRunner().invoke(cli, ["web", str(tmp_path / "nothing")], catch_exceptions=False)


@pytest.mark.parametrize(("frozen", "expected"), [(0, ["collect", "freeze", "unfreeze"]), (1, [])])
def test_garbage_is_collected_seldom_while_pages_are_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, frozen: int, expected: list[str]
) -> None:
    """Where a process has exempted objects from collection itself, the page leaves them as they are."""
    before, calls = gc.get_threshold(), list[str]()
    monkeypatch.setattr(gc, "get_freeze_count", lambda: frozen)
    for name in ("collect", "freeze", "unfreeze"):
        monkeypatch.setattr(gc, name, partial(calls.append, name))
    with TestClient(create(tmp_path, local=Path("none"))):
        assert gc.get_threshold()[0] == COLLECTED
        assert calls == expected[:2]
    assert gc.get_threshold() == before
    assert calls == expected
