from __future__ import annotations

import gc
import socket
from pathlib import Path

import pytest
from starlette.testclient import TestClient
from typer.testing import CliRunner

from fivefold.cli import app as cli
from fivefold.record import UserError
from fivefold.web import serve
from fivefold.web.app import COLLECTED, create


def test_an_early_request_waits() -> None:
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


@pytest.mark.slow
def test_garbage_is_collected_seldom_while_pages_are_served(tmp_path: Path) -> None:
    before = gc.get_threshold(), gc.get_freeze_count()
    with TestClient(create(tmp_path, local=Path("none"))):
        assert gc.get_threshold()[0] == COLLECTED
        assert gc.get_freeze_count() > before[1]
    assert gc.get_threshold() == before[0]
