from __future__ import annotations

import random
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from fivefold.web.app import create
from fivefold.web.pages.stream import FAILED, format_event
from fivefold.web.work import WorkQueue
from tests.selection import mark_share
from tests.web.conftest import OWN, SECRET
from tests.web.requests import STREAMS, draw, find_fault, find_fault_of_stream, list_routes


@pytest.mark.slow
@pytest.mark.parametrize("seed", mark_share(2, range(4)))
def test_no_request_breaks_the_server(client: TestClient, seed: int) -> None:
    """The long form, 10,000 of them, is ``python -m tests.endure.requests``."""
    chance, (known, _) = random.Random(seed), list_routes(client)
    for _ in range(75):
        request = draw(chance, chance.choice(known))
        try:
            answer = client.request(**request)
        except (UnicodeError, ValueError):  # the client itself does not send it
            continue
        assert not find_fault(answer), (find_fault(answer), request)


@pytest.mark.slow
@pytest.mark.parametrize("path", mark_share(3, [*STREAMS]))
def test_no_stream_breaks_the_server(tmp_path: Path, path: str) -> None:
    """A question of each that needs a process, which may take two seconds."""
    folder = tmp_path / "inside"
    folder.mkdir()
    (tmp_path / "outside.toml").write_text(f'name = "{SECRET}"\n{OWN}')
    (folder / "own.toml").write_text(OWN)
    (folder / "link.toml").symlink_to(tmp_path / "outside.toml")
    app = create(folder, local=folder / "no-local.toml", work=WorkQueue(long_limit_seconds=2))
    with TestClient(app, base_url="http://127.0.0.1:8765", raise_server_exceptions=False) as client:
        request = draw(random.Random(path), ("GET", path, [*STREAMS[path]]))
        answer = client.request(**request)
        assert not find_fault(answer), (find_fault(answer), request)
    assert {file.name for file in tmp_path.iterdir()} == {"inside", "outside.toml"}


def test_the_check_of_a_stream_sees_what_it_may_not_say() -> None:
    assert find_fault_of_stream(format_event("progress", [1, 2, ""])) != ""
    assert find_fault_of_stream("") != ""
    assert find_fault_of_stream(format_event("mistake", FAILED)) != ""
    assert find_fault_of_stream(format_event("found", "<td>nan</td>")) != ""
    assert find_fault_of_stream(format_event("found", "<td>1</td>") + format_event("progress", [1, 1, ""])) != ""
    assert find_fault_of_stream(format_event("progress", [1, 2, ""]) + format_event("found", "<td>1</td>")) == ""
