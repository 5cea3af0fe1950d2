"""The speed benchmarks run by hand, and need packages that tests do not have: their imports of one another hold."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SCRIPTS = {path.stem: path for path in (Path(__file__).parents[2] / "benchmarks" / "speed").glob("*.py")}


@pytest.mark.parametrize("script", sorted(SCRIPTS))
def test_a_script_imports_names_that_the_others_define(script: str) -> None:
    """A rename that leaves out a benchmark fails here, not weeks later in ``make bench``."""
    imports = [node for node in ast.walk(ast.parse(SCRIPTS[script].read_text())) if isinstance(node, ast.ImportFrom)]
    for node in (node for node in imports if node.module in SCRIPTS):
        defined = _list_names(SCRIPTS[str(node.module)])
        assert [alias.name for alias in node.names if alias.name not in defined] == []


def _list_names(script: Path) -> set[str]:
    """Return the names that a script defines or imports at its top level."""
    names = set[str]()
    for statement in ast.parse(script.read_text()).body:
        if isinstance(statement, ast.FunctionDef | ast.ClassDef):
            names.add(statement.name)
        elif isinstance(statement, ast.ImportFrom | ast.Import):
            names |= {alias.asname or alias.name for alias in statement.names}
        elif isinstance(statement, ast.Assign | ast.AnnAssign):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names
