"""The pages Trace and Explain: files are dropped or named; what is shown is what the commands print; nothing leaks."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the page needs the extra web")

from starlette.testclient import TestClient

from fivefold.web import dropped
from fivefold.web.app import create
from fivefold.web.files import list_files
from fivefold.web.folder import ServedFolder
from fivefold.web.question import FilesQuestion
from tests.cli.commands import run
from tests.web.browser import NEEDS_CHROMIUM, is_within_window, list_violations
from tests.web.conftest import SECRET

pytestmark = pytest.mark.slow  # the server reads files in a process of its own
EXAMPLES = Path(__file__).parents[2] / "examples"
TRACES = ("traces/rank0.json.gz", "traces/rank1.json.gz")


@pytest.fixture
def examples() -> Iterator[TestClient]:
    """A client of a server of the examples."""
    app = create(EXAMPLES, local=EXAMPLES / "no-local.toml")
    with TestClient(app, base_url="http://127.0.0.1:8765") as client:
        yield client


def drop(client: TestClient, file: str) -> str:
    """Drop a file of the examples on the page, and return its name there."""
    answer = client.post("/files", params={"name": Path(file).name}, content=(EXAMPLES / file).read_bytes())
    assert answer.status_code == 200, answer.text
    return str(answer.json()["file"])


def read(client: TestClient, page: str, **asked: Any) -> tuple[str, str]:
    """Return name and data of the last event of a page's answer."""
    events = client.get(f"/{page}/events", params=asked).text.strip().split("\n\n")
    name, data = events[-1].split("\n")
    return name.removeprefix("event: "), json.loads(data.removeprefix("data: "))


def list_cells(html: str) -> set[str]:
    """Return the texts of the cells of all tables."""
    return {unescape(re.sub("<.*?>", "", cell)) for cell in re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", html)}


def test_dropped_traces_show_what_the_command_prints(
    examples: TestClient, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name, html = read(examples, "trace", files=[drop(examples, file) for file in TRACES])
    assert name == "found"
    monkeypatch.setenv("COLUMNS", "200")
    assert run(monkeypatch, "trace", *(str(EXAMPLES / file) for file in TRACES)) == 0
    printed = capsys.readouterr().out
    advice = re.split(r"Advice</h2>\s*<p[^>]*>", html)[1].split("</p>")[0]
    assert printed.split("Advice")[1].split() == unescape(advice).split()
    missing = [cell for cell in list_cells(html) if cell and cell not in printed]
    assert missing == []
    assert html.count('<svg class="bar"') == 2


def test_traces_below_the_folder_are_compared_with_a_prediction(examples: TestClient) -> None:
    asked = {"model": "nano", "machine": "h100:2", "layout": "dp2 mbs1", "seq": 512, "against": 1}
    name, html = read(examples, "trace", files="traces", **asked)
    assert name == "found"
    assert "Compared with the prediction" in html
    assert "dp2 zero0 mbs1" in html


def test_folders_within_a_named_folder_are_no_files(tmp_path: Path) -> None:
    (tmp_path / "traces" / "older").mkdir(parents=True)
    (tmp_path / "traces" / "rank0.json").touch()
    question, folder = FilesQuestion(files=("traces",)), ServedFolder(tmp_path)
    files = list_files(question, folder=folder, dropped=dropped.DroppedFiles(tmp_path))
    assert [path.name for path in files] == ["rank0.json"]


def test_an_explanation_gives_cause_and_change_without_folders(examples: TestClient) -> None:
    asked = {"model": "llama3-8b", "machine": "h100:8", "layout": "dp8 zero3 mbs1", "against": 1}
    files = [drop(examples, "out-of-memory.log"), "hang"]
    name, html = read(examples, "explain", files=files, **asked)
    assert name == "found"
    for told in ("ran out of memory in the backward", "rank 1 did not come to collective 6", "least change that fits"):
        assert told in html
    assert "out of memory  out-of-memory.log" in html
    assert str(EXAMPLES) not in html
    assert "fivefold-dropped" not in html


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ((), "no file is given"),
        (("dropped:7/rank0.json",), "upload the file again"),
        (("dropped:../demo.toml",), "upload the file again"),
        (("../README.md",), "outside of the folder"),
        (("/etc/passwd",), "outside of the folder"),
        (("demo.sh",), "is no"),
    ],
)
def test_a_file_that_cannot_be_read_is_a_one_line_error(
    examples: TestClient, files: tuple[str, ...], said: str
) -> None:
    name, line = read(examples, "trace", files=files)
    assert name == "mistake"
    assert said in line
    assert "\n" not in line


def test_a_link_out_of_a_named_folder_is_not_followed(client: TestClient) -> None:
    for page in ("trace", "explain"):
        name, line = read(client, page, files=".")
        assert name == "mistake"
        assert "outside of the folder" in line
        assert SECRET not in line


def test_large_files_are_rejected_and_the_oldest_removed(examples: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dropped, "MAX_FILE_BYTES", 100)
    answer = examples.post("/files", params={"name": "a.log"}, content=iter([b"x" * 60, b"x" * 60]))
    assert answer.status_code == 422
    assert "on the command line" in answer.json()["detail"]
    monkeypatch.setattr(dropped, "MAX_KEPT_BYTES", 150)
    first, second = (
        examples.post("/files", params={"name": name}, content=b"loss" * 20).json()["file"] for name in ("a", "../b c")
    )
    assert second.endswith("/.._b_c")
    assert "upload the file again" in read(examples, "explain", files=first)[1]
    assert "upload the file again" not in read(examples, "explain", files=second)[1]


def test_another_site_cannot_drop_files(examples: TestClient) -> None:
    answer = examples.post("/files", params={"name": "a"}, content=b"x", headers={"origin": "http://evil.example"})
    assert answer.status_code == 403


@pytest.mark.long  # the server rejects it too
@NEEDS_CHROMIUM
def test_a_file_that_is_too_large_is_not_copied(page: Any) -> None:
    playwright = pytest.importorskip("playwright.sync_api")
    page.goto("/trace")
    assert "up to 2.00 GiB" in page.locator("[data-drop]").inner_text()
    sent: list[str] = []
    page.on("request", lambda request: sent.append(request.url) if request.method == "POST" else None)
    page.evaluate(
        """() => {
            const data = new DataTransfer();
            data.items.add(new File(["x".repeat(3e6)], "long.json"));
            const area = document.querySelector("[data-drop]");
            area.dataset.largest = 2e6;
            area.dispatchEvent(new DragEvent("drop", {dataTransfer: data}));
        }"""
    )
    playwright.expect(page.locator("#answer .mistake")).to_contain_text(
        "long.json has 3 MB, and this page reads up to 2"
    )
    assert sent == []


@NEEDS_CHROMIUM
@pytest.mark.slow
def test_files_are_chosen_read_and_kept_in_the_address(page: Any) -> None:
    playwright = pytest.importorskip("playwright.sync_api")
    page.goto("/trace")
    page.set_input_files("input[type=file]", [str(EXAMPLES / file) for file in TRACES])
    playwright.expect(page.get_by_role("heading", name="Advice")).to_be_visible()
    assert list_violations(page) == []
    page.set_viewport_size({"width": 390, "height": 800})
    assert is_within_window(page)
    page.goto("/explain")
    page.go_back()
    playwright.expect(page.get_by_role("heading", name="Advice")).to_be_visible()
    page.evaluate(
        """() => {
            const data = new DataTransfer();
            data.items.add(new File(["no trace at all"], "note.json"));
            document.querySelector("[data-drop]").dispatchEvent(new DragEvent("drop", {dataTransfer: data}));
        }"""
    )
    playwright.expect(page.locator("#answer .mistake")).to_contain_text("note.json")
