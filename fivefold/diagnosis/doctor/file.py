"""Load a user's file for the doctor: a Python file with functions of known names.

model() → Module        loss(model) → Tensor, which makes its own inputs
optimizer(model) → Optimizer        step(model, optimizer): a full step; loss is not needed then
plan(model) → {name of a module: 'colwise' | 'rowwise' | …}, for tensor parallelism
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from fivefold.diagnosis.doctor.user_errors import convert_user_exceptions
from fivefold.errors import UserError
from fivefold.text_files import read_text

NAMES = ("model", "loss", "optimizer", "step", "plan")


class UserFile(NamedTuple):
    """The functions of a user's file; None for those that it does not have."""

    name: str
    model: Callable[..., Any]
    loss: Callable[..., Any] | None
    optimizer: Callable[..., Any] | None
    step: Callable[..., Any] | None
    plan: Callable[..., Any] | None


def load(path: Path) -> UserFile:
    """Execute the file as an import would; raise ``UserError`` if it fails or a required function is missing."""
    source = read_text(path, kind="Python")
    name = str(path)
    if path.suffix not in (".py", ""):
        raise UserError(f"{name} is not Python source; doctor takes the .py file of a module, or a memory snapshot")
    if "\0" in source:
        number = source[: source.index("\0")].count("\n") + 1
        raise UserError(
            f"{name}:{number} has a null byte, so it is not Python source; doctor takes the .py file of a module"
        )
    module = ModuleType(f"doctored_{path.stem}", path.stem)
    module.__file__ = name
    sys.modules[module.__name__] = module  # dataclasses and pickle look up modules there
    sys.path.insert(0, str(path.resolve().parent))
    try:
        with convert_user_exceptions(name):
            exec(compile(source, name, "exec"), module.__dict__)
    except SyntaxError as error:
        line = f":{error.lineno}" if error.lineno else ""
        raise UserError(f"{name}{line}: {error.msg}") from None
    except SystemExit:
        raise UserError(f'{name}: ends the program when it is read; put that under if __name__ == "__main__"') from None
    functions = {key: getattr(module, key, None) for key in NAMES}
    return _build_user_file(
        name, {key: value if callable(value) else None for key, value in functions.items()}, vars(module)
    )


def _build_user_file(name: str, values: dict[str, Any], module_names: dict[str, Any]) -> UserFile:
    """Return the functions of a user's file; a ``UserError`` names the one that is missing."""
    missing = "model" if values["model"] is None else "loss" if values["loss"] is values["step"] is None else ""
    if missing:
        close_names = get_close_matches(missing, [key for key, value in module_names.items() if callable(value)], n=1)
        hint = f"; did you mean {close_names[0]!r} for it?" if close_names else ""
        what = (
            "def model(): … that returns a Module" if missing == "model" else "def loss(model): … that returns a Tensor"
        )
        raise UserError(f"{name} has no function {missing!r}; write {what}{hint}")
    return UserFile(name, **values)
