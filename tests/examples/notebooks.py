"""Executes the notebooks of ``examples/notebooks`` without Jupyter, and writes what came of each cell into the file.

    python -m tests.examples.notebooks            # executes all and writes their outputs (nbformat 4.5)
    python -m tests.examples.notebooks --check    # executes all, and writes nothing

A cell's output is what it prints, then its last expression as text and, where it has one, as HTML or SVG.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "examples" / "notebooks"


def outputs(source: str, names: dict[str, Any]) -> list[dict[str, Any]]:
    """What a cell of code gives, as nbformat has it."""
    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed, value = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, "cell", "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
    results: list[dict[str, Any]] = []
    if printed.getvalue():
        results.append({"output_type": "stream", "name": "stdout", "text": _lines(printed.getvalue())})
    if value is not None:
        results.append({"output_type": "execute_result", "metadata": {}, "data": _show(value), "execution_count": None})
    return results


def _show(value: Any) -> dict[str, list[str]]:
    if type(value).__module__.startswith("altair"):
        import vl_convert

        return {"image/svg+xml": _lines(vl_convert.vegalite_to_svg(value.to_dict())), "text/plain": ["a chart"]}
    data = {"text/plain": _lines(repr(value))}
    if hasattr(value, "_repr_html_"):
        data["text/html"] = _lines(value._repr_html_())
    return data


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def execute(notebook: dict[str, Any]) -> dict[str, Any]:
    """The notebook with the outputs of all its cells, run in order, in a folder of its own."""
    names: dict[str, Any] = {"__name__": "__main__"}
    cells, count, before = [], 0, Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            for cell in notebook["cells"]:
                if cell["cell_type"] == "code":
                    count += 1
                    result = outputs("".join(cell["source"]), names)
                    for item in result:
                        if "execution_count" in item:
                            item["execution_count"] = count
                    cell = cell | {"outputs": result, "execution_count": count}
                cells.append(cell)
        finally:
            os.chdir(before)
    return notebook | {"cells": cells}


def main() -> None:
    for path in sorted(FOLDER.glob("*.ipynb")):
        done = execute(json.loads(path.read_text(encoding="utf-8")))
        if "--check" not in sys.argv:
            path.write_text(json.dumps(done, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        print(path.name)


if __name__ == "__main__":
    main()
