"""A server of the page in this process, over a folder with a file that may be read, beside one that may not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the page needs the extra web")

from starlette.testclient import TestClient

from fivefold.web.app import create

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
    with TestClient(app, base_url="http://127.0.0.1:8765", raise_server_exceptions=False) as found:
        yield found
