"""What every reader owes: rows become cases or exclusions, each once, and no case is one that we would refuse."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks.published import SOURCES, reader, readers
from benchmarks.published.case import Case, Excluded, Message, rows
from fivefold.errors import UserError
from fivefold.layout.spec import Layout
from fivefold.layout.validity import refuse

WRITTEN = [source for source in SOURCES if find_spec(f"benchmarks.published.readers.{source}")]


@pytest.mark.slow
@pytest.mark.parametrize("source", WRITTEN)
def test_every_case_is_a_valid_run(source: str) -> None:
    result = list(reader(source)())
    names = {row["row_id"] for row in rows(source)}
    assert {case.source for case in result} == {source}
    assert all(case.row.partition(" ")[0] in names for case in result)
    assert len({case.row for case in result}) == len(result)
    for case in result:
        if isinstance(case, Excluded):
            assert case.rule
        elif isinstance(case, Message):
            assert case.seconds > 0 < case.payload
        else:
            assert case.step_seconds or case.memory_bytes
            assert case.layout.world == case.machine.ranks
            refuse(case.layout, model=case.model, job=case.job, machine=case.machine)
            assert Layout.parse(str(case.layout)) == case.layout


@pytest.mark.parametrize("source", ["korthikanti2022", "megatron2021", "bloom_prequel", "vtrain", "zero_bubble"])
def test_models_have_as_many_parameters_as_their_rows_print(source: str) -> None:
    """To the two or three digits printed; what BLOOM's notes call 20B leaves out 3.6B of embedding."""
    printed = {row["row_id"]: row["params_b"] for row in rows(source) if row["params_b"] != "20"}
    cases = [case for case in reader(source)() if isinstance(case, Case) and printed.get(case.row.partition(" ")[0])]
    assert cases
    for case in cases:
        billions = float(printed[case.row.partition(" ")[0]])
        assert case.model.parameters / 1e9 == pytest.approx(billions, rel=0.025), case.row


def test_an_unknown_source_is_a_user_error() -> None:
    with pytest.raises(UserError, match=r"unknown source 'vtrian'; did you mean vtrain"):
        reader("vtrian")


def test_cases_and_jobs_are_built_in_one_place() -> None:
    """A reader names its stack and says what its runs did otherwise; ``convert.case_of`` does the rest."""
    folder = Path(readers.__file__).parent
    calls = {
        f"{path.stem}: {node.func.id}"
        for path in folder.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("Case", "Job", "Stack")
    }
    assert calls == set()
