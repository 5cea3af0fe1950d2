"""The command: the example that we stand behind, its JSON, its exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from fivefold.cli.commands.doctor import DOES_NOT_FIT, doctor
from fivefold.errors import UserError
from fivefold.requests.words import parse_bytes
from fivefold.results.diagnosis import Diagnosis
from fivefold.units import GIB

EXAMPLE = str(Path(__file__).parents[2] / "examples" / "doctor.py")
SMALL = """
import torch
def model(): return torch.nn.Linear(64, 64)
def loss(model): return model(torch.ones(2, 64)).square().mean()
"""


def run(*words: str) -> tuple[int, str]:
    app = typer.Typer()
    app.command()(doctor)
    result = CliRunner().invoke(app, list(words))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout


@pytest.mark.slow
@pytest.mark.parametrize("budget", [None, pytest.param("7GiB", marks=pytest.mark.long)])
def test_doctor_counts_parameters_states_and_flops_of_the_example(budget: str | None) -> None:
    code, text = run(EXAMPLE, "--json", *(("--budget", budget) if budget else ()))
    diagnosis = Diagnosis.model_validate(json.loads(text))
    assert code == 0
    assert diagnosis.parameters == 50304 * 768 + 1024 * 768 + 12 * (12 * 768**2 + 13 * 768) + 2 * 768
    assert diagnosis.optimizer_bytes == 8 * diagnosis.parameters + 4 * 148
    # 12 layers of 12·D² and the head; attention's scores and values over the full square
    assert diagnosis.forward_flops == 2 * 8192 * (12 * 12 * 768**2 + 50304 * 768) + 12 * 4 * 8 * 1024**2 * 768
    assert diagnosis.peak_bytes > 7 * GIB
    assert (diagnosis.advice is None) == (budget is None)
    assert diagnosis.advice is None or diagnosis.advice.peak_bytes <= 7 * GIB
    assert diagnosis.remarks == ()


def test_a_budget_that_is_too_small_ends_with_the_exit_code_for_it(tmp_path: Path) -> None:
    path = tmp_path / "small.py"
    path.write_text(SMALL)
    code, text = run(str(path), "--budget", "1KiB")
    assert code == DOES_NOT_FIT
    assert "does not fit" in text
    assert run(str(path), "--budget", "1MiB")[0] == 0


@pytest.mark.parametrize(("text", "size"), [("24GiB", 24 * GIB), ("1.5 GiB", 3 * GIB // 2), ("80GB", 80 * 10**9)])
def test_sizes_in_bytes_are_parsed(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["24", "GiB", "-1GiB", "0GiB", "24 gigs"])
def test_an_invalid_size_is_an_error_with_an_example(text: str) -> None:
    with pytest.raises(UserError, match="write for example 24GiB or 500MiB"):
        parse_bytes(text)
