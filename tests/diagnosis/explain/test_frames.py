"""Which line of a stack is the user's; a folder's other files are passed over."""

from __future__ import annotations

from pathlib import Path

import pytest

from fivefold.diagnosis.explain import explain
from fivefold.diagnosis.explain.frames import Frame, find_user_line
from fivefold.errors import UserError

PACKAGES = "/venv/lib/python3.11/site-packages"


def test_the_blamed_line_is_the_users_code() -> None:
    """torch 2.13 calls ``all_gather_into_tensor`` through ``typing_extensions.deprecated``."""
    stack = [
        Frame(f"{PACKAGES}/torch/distributed/distributed_c10d.py", 4500, "all_gather_into_tensor"),
        Frame(f"{PACKAGES}/typing_extensions.py", 3140, "wrapper"),
        Frame("train.py", 17, "step"),
    ]
    assert find_user_line(stack) == "train.py:17 step"
    assert find_user_line(stack[:2]) == "torch/distributed/distributed_c10d.py:4500 all_gather_into_tensor"


def test_other_files_in_a_folder_are_ignored(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('a script')\n")
    with pytest.raises(UserError, match=r"train\.py: neither a memory snapshot"):
        explain([tmp_path])
    (tmp_path / "stacks-rank0.txt").write_text("")  # of a run that was killed
    (tmp_path / "log.csv").write_text(
        "step,loss\n" + "".join(f"{at},{3 - at / 100}\n" for at in range(40)) + "40,nan\n"
    )
    (result,) = explain([tmp_path])
    assert result.kind == "losses"
    with pytest.raises(UserError, match=r"train\.py: neither"):
        explain([tmp_path / "train.py", tmp_path / "log.csv"])
    with pytest.raises(UserError, match=r"stacks-rank0\.txt is empty"):
        explain([tmp_path / "stacks-rank0.txt", tmp_path / "log.csv"])
