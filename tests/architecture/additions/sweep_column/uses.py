"""A column of a sweep is in its rows, and is printed on a terminal, in HTML and on the page."""

from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console
from starlette.testclient import TestClient

import fivefold
from fivefold.display import Rows
from fivefold.layout.spec import Layout
from fivefold.rendering.sweep import table
from fivefold.results.sweep_row import SweepRow, list_layout_columns, list_step_columns
from fivefold.sweeps.rows_file import write
from fivefold.web.app import create

step = fivefold.predict("nano", "h100:2", "dp2 zero1 mbs1", seq=256, gbs=4)
fields = {"model": "nano", "machine": "h100", "ranks": 2, "sequence": 256, "batch": 4, "precision": "bf16"}
fields |= {
    "stack": "fivefold",
    "status": "fits",
    **list_layout_columns(Layout.parse("dp2 zero1 mbs1")),
    **list_step_columns(step),
}
row = SweepRow.model_validate(fields)
console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
console.print(table.render_page([row]))
with TemporaryDirectory() as name:
    write([row], Path(name) / "rows.jsonl")
    with TestClient(create(Path(name), local=Path("none")), base_url="http://127.0.0.1:1") as client:
        page = client.get("/sweep", params={"file": "rows.jsonl"}).text
assert row.messages == len(step.traffic)
for text in (console.export_text(), Rows([row])._repr_html_(), page):
    assert "collectives" in text
    assert f"{row.messages} kinds" in text
