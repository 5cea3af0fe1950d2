"""The package is light, answers where POSIX-only modules are missing, and completes in three shells."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zlib
from pathlib import Path

import pytest

from tests.forked_python import true_interpreters
from tests.selection import mark_share

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MAX_BYTES = 3 * 10**6  # of the wheel
POSIX_ONLY = ("fcntl", "grp", "pty", "pwd", "resource", "syslog", "termios", "tty")
POSIX_SIGNALS = ("SIGHUP", "SIGKILL", "SIGQUIT", "SIGUSR1", "SIGUSR2", "pthread_sigmask")
ANSWER_WITHOUT_POSIX = f"""
import os, signal, sys
for name in {POSIX_ONLY}:
    sys.modules[name] = None  # importing it is an ImportError, as on Windows
for name in {POSIX_SIGNALS}:
    delattr(signal, name)
for name in ("fork", "geteuid", "getuid", "register_at_fork"):
    delattr(os, name)
from fivefold.cli.command_line import build_app
for words in (
    ["predict", "nano", "h100:2", "dp2", "--gbs", "8"],
    ["search", "nano", "h100:2", "--gbs", "8", "--where", "dp=2 ac=none mbs=1", "--stack", "torchtitan"],
    ["plan", "nano", "h100:2", "--tokens", "1e9", "--where", "dp=2 ac=none order=default"],
    ["compare", "nano", "h100:2", "dp2", "tp2", "--gbs", "8"],
    ["ask", "changes", "nano", "h100:2", "dp2", "--gbs", "8"],
    ["ratios", "nano", "h100:2"],
    ["write", "dp2", "--model", "nano", "--to", "deepspeed"],
    ["models", "llama3"], ["machines"], ["stacks"], ["schema", "predict"], ["config", "list"],
):
    build_app(words[:1])(words, standalone_mode=False)
assert "torch" not in sys.modules
"""


def test_the_base_package_is_small_and_has_five_dependencies() -> None:
    names = [re.split(r"[><=]", dependency)[0] for dependency in PROJECT["dependencies"]]
    assert names == ["numpy", "pydantic", "typer", "rich", "pyyaml"]
    files = [path for path in (ROOT / "fivefold").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert sum(len(zlib.compress(path.read_bytes())) for path in files) < MAX_BYTES


def test_planning_works_without_posix_modules() -> None:
    with true_interpreters():
        ended = subprocess.run(
            [sys.executable, "-c", ANSWER_WITHOUT_POSIX], capture_output=True, text=True, check=False, cwd=ROOT
        )
    assert ended.returncode == 0, ended.stderr


def complete(shell: str, words: str) -> str:
    """Return what the program answers to the script of a shell."""
    environment = {
        "bash": {"COMP_WORDS": words, "COMP_CWORD": str(len(words.split(" ")) - 1)},
        "zsh": {"_TYPER_COMPLETE_ARGS": words},
        "fish": {"_TYPER_COMPLETE_ARGS": words, "_TYPER_COMPLETE_FISH_ACTION": "get-args"},
    }[shell]
    ended = subprocess.run(
        [Path(sys.executable).with_name("fivefold")],
        env={**os.environ, **environment, "_FIVEFOLD_COMPLETE": f"complete_{shell}"},
        capture_output=True,
        text=True,
        check=False,
    )
    return ended.stdout


@pytest.mark.parametrize("shell", mark_share(3, ["bash", "zsh", "fish"]))
def test_shells_complete_names_of_the_catalog(shell: str) -> None:
    assert "llama3-70b" in complete(shell, "fivefold predict llama3-")


SCRIPTS = {
    "bash": "COMPREPLY",
    "zsh": '[ "$funcstack[1]" = "_fivefold" ] && _fivefold_completion',
    "fish": "complete --command fivefold",
}


def call_program(*words: str) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).with_name("fivefold")
    return subprocess.run([program, *words], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("shell", mark_share(3, SCRIPTS))
def test_the_script_of_a_named_shell_is_shown(shell: str) -> None:
    assert SCRIPTS[shell] in call_program("--show-completion", shell).stdout


def test_an_unknown_shell_is_a_one_line_error() -> None:
    ended = call_program("--show-completion", "fsh")
    assert ended.returncode == 2
    assert ended.stderr.strip() == "fivefold: unknown shell 'fsh'; did you mean fish, zsh or pwsh?"


def test_bash_completes_with_the_script_that_is_installed() -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("no bash here")
    program = Path(sys.executable).with_name("fivefold")
    script = (
        f'PATH="{program.parent}:$PATH"; eval "$(fivefold --show-completion bash)"; '
        "COMP_WORDS=(fivefold predict nano h100:8 dp8 --prec); COMP_CWORD=5; COMP_LINE='fivefold predict'; "
        '_fivefold_completion fivefold; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    ended = subprocess.run([bash, "-c", script], capture_output=True, text=True, check=False)
    assert "--precision" in ended.stdout.split(), ended.stderr


def test_zsh_completes_at_the_first_tab(tmp_path: Path) -> None:
    """The script is loaded by the first Tab as a function, which completes too."""
    zsh = shutil.which("zsh")
    if zsh is None:
        pytest.skip("no zsh here")
    (tmp_path / "_fivefold").write_text(call_program("--show-completion", "zsh").stdout)
    program = Path(sys.executable).with_name("fivefold")
    script = (
        f'PATH="{program.parent}:$PATH"; fpath=({tmp_path} $fpath); compdef() {{ }}; _arguments() {{ print -r "$@" }}; '
        "autoload -Uz _fivefold; words=(fivefold predict llama3-); CURRENT=3; _fivefold"
    )
    ended = subprocess.run([zsh, "-fc", script], capture_output=True, text=True, check=False)
    assert "llama3-70b" in ended.stdout, ended.stderr


@pytest.mark.skipif(shutil.which("groff") is None, reason="no groff here")
def test_the_man_page_is_valid() -> None:
    page = ROOT / "docs/reference/fivefold.1"
    ended = subprocess.run(["groff", "-man", "-ww", "-Tutf8", page], capture_output=True, text=True, check=False)
    assert ended.stderr == ""
    assert "fivefold predict" in re.sub(r"\x1b\[[0-9;]*m|.\x08", "", ended.stdout)
