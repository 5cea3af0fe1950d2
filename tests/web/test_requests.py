from __future__ import annotations

import random

import pytest
from starlette.testclient import TestClient

from tests.web.requests import draw, find_fault, routes


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_no_request_breaks_the_server(client: TestClient, seed: int) -> None:
    """The long form, 10,000 of them, is ``python -m tests.endure.requests``."""
    chance, known = random.Random(seed), routes(client)
    for _ in range(75):
        request = draw(chance, chance.choice(known))
        try:
            answer = client.request(**request)
        except (UnicodeError, ValueError):  # the client itself does not send it
            continue
        assert not find_fault(answer), (find_fault(answer), request)
