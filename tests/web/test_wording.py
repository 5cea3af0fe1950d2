"""Messages on the page name its controls and pages; those of ``/api`` name options and commands of the terminal."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from starlette.testclient import TestClient

pytest.importorskip("fastapi", reason="the page needs the extra web")

from fivefold.web.wording import LABELS, use_page_words

TEMPLATES = Path(__file__).parents[2] / "fivefold" / "web" / "templates"


@pytest.mark.parametrize(
    ("message", "worded"),
    [
        (
            "raise --gbs, or use --set offload=optimizer",
            "raise “sequences per step”, or use offload=optimizer",
        ),
        ("use more GPUs (`fivefold ask gpus`), or see `fivefold search`", "use more GPUs (“Ask: Fewest GPUs with "
         "enough memory”), or see Search"),
        ("in use; --against MODEL MACHINE LAYOUT says", "in use; “compare with the prediction of this layout” says"),
        ("read its config with --from FILE", "read its config in a terminal with fivefold predict --from FILE"),
        ("the model: name it before --from, or with `read` and `write` by --model NAME",
         "the model: name it as “catalog name or file”"),
        ("not in the catalog: name its config.json, or a model of the catalog, before --from, or with `read` and "
         "`write` by --model NAME", "not in the catalog: name its config.json, or a model of the catalog, as “catalog "
         "name or file”"),
        ("add max_length=4096 after the file (in quotes with --from); `predict` and `write` take --seq too",
         "give “tokens per sequence”"),
        ("8 ranks are not a multiple of tp·cp·pp=16; try --gpus NAME:16",
         "8 ranks are not a multiple of tp·cp·pp=16; give 16 GPUs as “chip:GPUs”"),
        ("no limit of the run; add --deadline 30d or --budget 50k, or both", "no limit of the run; add “the run takes "
         "at most” 30d or “the run costs at most, in dollars” 50k, or both"),
        ("set --overlap-grad-reduce and --seq-length 4096", "set --overlap-grad-reduce and --seq-length 4096"),
    ],
)  # fmt: skip
def test_options_and_commands_become_controls_and_pages(message: str, worded: str) -> None:
    assert use_page_words(message) == worded


def test_every_label_is_on_a_page() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in TEMPLATES.glob("*.html"))
    assert [label for label in LABELS.values() if label not in text] == []


def test_errors_name_controls_on_the_page_and_options_in_the_api(client: TestClient) -> None:
    asked = {"model": "tiny", "machine": "h100:2", "layout": "dp2", "price": "x"}
    page = client.get("/compare", params={**asked, "layout": ["dp2", "tp2"]}).text
    data = client.get("/api/compare", params={**asked, "layout": ["dp2", "tp2"]}).json()["detail"]
    assert data.startswith("--price 'x'")
    assert re.search(r"“dollars per GPU and hour” &#39;x&#39;", page)
    assert "--price" not in re.sub(r"data-(copy|tip)=\"[^\"]*\"", "", page)


def test_the_error_of_a_missing_page_contains_its_address(client: TestClient) -> None:
    answer = client.get("/nothing")
    assert answer.status_code == 404
    assert "there is no page /nothing" in answer.text
