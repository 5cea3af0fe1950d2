"""A column of the operations of a step is printed on a terminal, in HTML and on the page, and is in the JSON."""

from pathlib import Path

from shared import run_command
from starlette.testclient import TestClient

import fivefold
from fivefold.rendering import report
from fivefold.web.app import create

words = {"model": "nano", "machine": "h100:2", "layout": "dp2"}
step = fivefold.predict(**words, seq=256, gbs=4)
first = f"{step.operations[0].flops_per_byte:.2f} FLOP/B"
with TestClient(create(Path(), local=Path("none")), base_url="http://127.0.0.1:1") as client:
    page = client.get("/plan", params={**words, "seq": 256, "gbs": 4}).text
printed = run_command("predict", *words.values(), "--seq", "256", "--gbs", "4", "--operations")
for text in (printed, "".join(report.render_operations(step)), page):
    assert "intensity" in text
    assert first in text
