"""A fresh machine says what it does not test, and CI gets the browser where it can."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.skipped import find_remedy, summarize_skips

ROOT = Path(__file__).parents[1]


def test_each_reason_of_a_skipped_test_says_what_to_install() -> None:
    assert find_remedy("Skipped: could not import 'vl_convert': No module named 'vl_convert'") == (
        "pip install 'fivefold[show]'"
    )
    assert find_remedy("Skipped: could not import 'torch': No module named 'torch'") == "pip install 'fivefold[train]'"
    assert find_remedy("Skipped: could not import 'deepspeed'") == "make interop"
    skips = [
        ("a.py", "Skipped: no Chromium here"),
        ("a.py", "Skipped: no Chromium here"),
        ("b.py", "Skipped: needs a GPU"),
    ]
    first, second = summarize_skips(skips)
    assert first == "2 tests: no Chromium here → apt-get install chromium (as root; .ci/run does it)"
    assert second.startswith("1 test: needs a GPU → make gpu")


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
@pytest.mark.parametrize(("user", "has", "installs"), [("0", False, True), ("0", True, False), ("1000", False, False)])
def test_ci_installs_the_browser_where_it_is_missing(tmp_path: Path, user: str, has: bool, installs: bool) -> None:
    for name, does in {
        "id": f"echo {user}",
        "apt-get": "echo apt-get $@",
        "make": "echo make $@",
        "nice": 'shift 2; exec "$@"',
        **({"chromium": ""} if has else {}),
    }.items():
        (tmp_path / name).write_text(f"#!{shutil.which('sh')}\n{does}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "dirname").symlink_to(shutil.which("dirname") or "")
    ran = subprocess.run(
        [shutil.which("bash") or "", str(ROOT / ".ci" / "run")],
        env={**os.environ, "PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    lines = ran.stdout.splitlines()
    assert ("apt-get install -y -qq --no-install-recommends chromium" in lines) == installs
    assert sorted(lines[-2:]) == ["make lint", "make test"]  # lint runs while tests wait
    assert ("no Chromium" in ran.stderr) == (user != "0" and not has)
