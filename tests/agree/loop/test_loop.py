"""The loop equals that of ``transformers`` with ``torch.optim.AdamW`` on the same shards, step by step."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.agree.loop import reference
from tests.agree.loop.cases import APART, CONSTANT, COSINE, LONG, WSD, Case
from tests.agree.loop.compare import TOLERANCE, distance, folder_of, get_reference_log, train_and_log
from tests.selection import mark_share

CASES = [
    Case("llama", "dp2 zero2 mbs2", WSD, APART),
    Case("llama", "dp2 zero0 mbs1", COSINE),
    Case("mixtral", "dp2 ep2 zero1 mbs2", COSINE),
    Case("llama", "dp2 zero3 mbs2", CONSTANT),
    Case("llama", "dp2 tp2 zero1 mbs2", COSINE),  # where a rank's place among the data ranks is not its number
    Case("llama", "tp2 mbs4", COSINE, APART),
    Case("llama", "cp2 mbs1", WSD, LONG),
    Case("llama", "pp2 mbs2", COSINE),
]
JOINED, SPLIT = CASES[7], CASES[5]


@pytest.mark.parametrize("case", mark_share(8, CASES), ids=str)
def test_the_loss_log_equals_the_reference(case: Case, tmp_path: Path) -> None:
    theirs = get_reference_log(case)
    assert distance(train_and_log(case, folder_of(tmp_path / "run")), theirs) <= TOLERANCE
    assert [line["step"] for line in theirs if "loss" in line] == list(range(1, 13))


def test_a_resumed_run_continues_as_the_reference_does(tmp_path: Path) -> None:
    """A signal after the third step, while the batch is small; the other layout reads on where the first has ended."""
    first, second = (Case("llama", line, COSINE) for line in ("dp2 zero3 mbs1", "tp2 mbs2"))
    folder = folder_of(tmp_path / "run")
    begun = train_and_log(first, folder, stop_after=3)
    assert [line["step"] for line in begun if "loss" in line] == [1, 2, 3, 4]
    ours = train_and_log(second, folder)
    assert ours[: len(begun)] == begun
    assert sum(line["step"] == 4 for line in ours) == 2, "its last step, and the held-out loss with which it goes on"
    theirs = get_reference_log(second)
    assert distance([line for line in ours if line["step"] != 4 or "loss" in line], theirs) <= TOLERANCE


@pytest.mark.long  # of the reference alone
def test_every_case_changes_the_loss() -> None:
    """Gradients are cut in some steps and not in others; documents, experts and the length of a row matter."""
    norms = [line["gradient_norm"] for line in get_reference_log(CASES[1]) if "loss" in line]
    assert max(norms) > 2.7
    assert min(norms) < 1.7
    assert distance(get_reference_log(SPLIT), get_reference_log(JOINED)) > 1e-3


def test_the_reference_imports_nothing_of_the_package() -> None:
    tree = ast.parse(Path(reference.__file__).read_text())
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)} | {
        alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names
    }
    assert [name for name in modules if name and name.startswith(("fivefold", "tests"))] == []
