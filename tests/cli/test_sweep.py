"""The command sweep: rows, pictures, --dry, and its one-line mistakes; every example of the repository."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fivefold.cli import app
from fivefold.errors import UserError
from fivefold.machine.toml import write
from tests.sweeps.test_trial import MACHINE

ROOT = Path(__file__).parents[2]
SWEEP = """
models = ["nano", "tiny"]
machines = ["h100"]
ranks = [2, 4]
layouts = ["dp* tp{1,2} mbs{1,3}"]
sequences = [64, 128]
batches = [16]
recomputations = ["none", "full"]
"""


@pytest.fixture(autouse=True)
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write(MACHINE, tmp_path / "cache" / "fivefold" / "local.toml")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    Path("small.toml").write_text(SWEEP)
    return tmp_path


def run(*words: str) -> tuple[str, str]:
    result = CliRunner().invoke(app, ["sweep", *words], catch_exceptions=False)
    assert result.exit_code == 0, result.stderr
    return result.stdout, result.stderr


@pytest.mark.slow
def test_a_sweep_prints_rows_and_draws_what_it_varies() -> None:
    page, said = run("small.toml", "--charts", "new/folder")
    assert page.lstrip().startswith("64 rows: 32 fit, 32 invalid")
    assert "global batch 16 is not divisible by dp·mbs=2·3=6" in " ".join(page.split())
    assert "wrote 64 rows to runs/sweeps/small.jsonl" in said
    assert "not drawn: measured, which needs measured rows (--measure)" in said
    drawn = {path.name: path.read_text() for path in Path("new/folder").iterdir()}
    assert sorted(drawn) == ["memory.svg", "mfu.svg", "scaling.svg", "sequence.svg", "throughput.svg"]
    assert list(Path("runs/sweeps").iterdir()) == [Path("runs/sweeps/small.jsonl")]  # no journal is left


@pytest.mark.slow
def test_json_output_has_the_rows_of_the_file() -> None:
    shown, _ = run("small.toml", "--json", "--out", "rows.jsonl")
    rows = json.loads(shown)
    assert rows == [json.loads(line) for line in Path("rows.jsonl").read_text().splitlines()]
    assert len(rows) == 64
    again, _ = run("small.toml", "--json", "--out", "rows.jsonl")
    assert again == shown


def test_the_dry_option_only_counts_rows() -> None:
    assert run("small.toml", "--dry")[0] == "64 rows at most, of 8 settings of model, machine, ranks and job\n"
    assert json.loads(run("small.toml", "--dry", "--json")[0]) == {"rows": 64, "settings": 8}
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["none.toml"], "none.toml: no such file"),
        (["small.toml", "--out", "rows.xlsx"], "rows are written as .parquet, .csv, .jsonl, not .xlsx"),
        (["small.toml", "--charts", "small.toml"], "--charts small.toml is a file; name a folder"),
        (["small.toml", "--measure", "--steps", "3"], "--steps 3 is too few to time one; use 4 or more"),
        (["small.toml", "--measure"], "h100 has GPUs, but this computer has none"),
    ],
)
def test_user_errors_are_one_line_errors(words: list[str], line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = CliRunner().invoke(app, ["sweep", *words])
    assert isinstance(result.exception, UserError)
    assert line in str(result.exception)


@pytest.mark.parametrize("example", sorted((ROOT / "examples" / "sweeps").glob("*.toml")), ids=lambda path: path.stem)
def test_the_example_sweeps_have_the_expected_numbers_of_rows(example: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    rows = json.loads(run(str(example), "--dry", "--json")[0])["rows"]
    assert rows == {"playbook": 4960, "here": 8, "sequence": 480}[example.stem]


def test_the_sweep_file_of_the_docs_page_can_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "docs" / "how-to" / "sweeps.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```toml\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(ROOT)
    file = Path(os.environ["XDG_CACHE_HOME"]) / "page.toml"
    file.write_text(block)
    result = json.loads(run(str(file), "--dry", "--json")[0])
    assert result["settings"] == 2 * 3 * 3 * 2 * 1 * 2
