"""The face: commands and options are frozen in ``cli.txt``, and the README names none that is not there.

A wanted change is frozen anew with ``FIVEFOLD_FREEZE=1 pytest tests/architecture/test_cli.py`` and seen in the diff.
"""

from __future__ import annotations

import os
import re
import resource
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import typer

ROOT = Path(__file__).parents[2]
FROZEN = Path(__file__).with_name("cli.txt")
PREDICT = ["predict", "llama3-8b", "h100:8", "dp8 zero3 mbs1", "--gbs", "64", "--seq", "4096"]

pytestmark = pytest.mark.skipif(not (ROOT / "fivefold" / "cli").exists(), reason="there is no CLI yet")


@pytest.fixture(scope="module")
def app() -> Any:
    from fivefold import cli

    return typer.main.get_command(cli.app)


def leaves(command: Any, name: str = "fivefold") -> Iterator[tuple[str, Any]]:
    """Every command that does something, by the words that call it."""
    if not getattr(command, "commands", None):
        yield name, command
    for word, inner in sorted(getattr(command, "commands", {}).items()):
        yield from leaves(inner, f"{name} {word}")


def surface(app: Any) -> Iterator[str]:
    """The face as text: each command with its arguments, then its options with choices and defaults."""
    for name, command in leaves(app):
        arguments = [p for p in command.params if p.param_type_name == "argument"]
        yield " ".join([name, *(f"{p.name.upper()}{'' if p.required else '?'}" for p in arguments)])
        for option in sorted((p for p in command.params if p not in arguments), key=lambda p: str(p.opts)):
            choices = "|".join(map(str, get_args(option.type_descriptor.annotation)))  # of a Literal
            default = "" if option.default is None or callable(option.default) else f"= {option.default}"
            opts = "/".join([*option.opts, *option.secondary_opts])
            yield " ".join(filter(None, ["   ", opts, choices, default])).rstrip()


def test_the_command_line_interface_equals_the_recorded_one(app: Any) -> None:
    now = "\n".join(surface(app)) + "\n"
    if os.environ.get("FIVEFOLD_FREEZE"):
        FROZEN.write_text(now, encoding="utf-8")
    assert now == FROZEN.read_text(encoding="utf-8"), "the CLI changed; if that is wanted, freeze it (see above)"


def readme_commands() -> list[list[str]]:
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8") if readme.exists() else ""
    blocks = re.findall(r"^```sh\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    words = (shlex.split(line.removeprefix("$ "), comments=True) for line in lines)
    return [line for line in words if line and line[0] in ("fivefold", "make")]


@pytest.mark.parametrize("words", readme_commands(), ids=" ".join)
def test_the_readme_names_existing_commands_and_options(words: list[str], app: Any) -> None:
    if words[0] == "make":
        makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
        targets = [word for word in words[1:] if "=" not in word and not word.startswith("-")]
        assert [t for t in targets if not re.search(rf"^{re.escape(t)}\s*:", makefile, flags=re.MULTILINE)] == []
        return
    command, rest = app, words[1:]
    while getattr(command, "commands", None):
        assert rest, f"{' '.join(words)!r} names no command"
        assert rest[0] in command.commands, f"no command {rest[0]!r}"
        command, rest = command.commands[rest[0]], rest[1:]
    known = {"--help"}.union(*([*p.opts, *p.secondary_opts] for p in command.params))
    assert [word for word in rest if word.startswith("--") and word.partition("=")[0] not in known] == []


def predict(code: str = "") -> subprocess.CompletedProcess[str]:
    script = f"from fivefold.cli import entry\nimport atexit, sys\n{code}\nentry()"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-c", script, *PREDICT]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=environment)


def test_predict_answers_cold_within_four_tenths_of_a_second() -> None:
    """On a machine that takes 0.12 s to import its libraries; 3.0 to 3.2 times as long as these was measured.

    The number of modules, which no machine changes, says more precisely when a command has begun to load too much.
    """
    seconds, libraries = [], []
    for _ in range(2):
        start = _children_seconds()
        answer = predict("atexit.register(lambda: print(len(sys.modules), file=sys.stderr))")
        middle = _children_seconds()
        subprocess.run([sys.executable, "-c", "import pydantic, rich.table, typer"], check=True)
        seconds.append(middle - start)
        libraries.append(_children_seconds() - middle)
        assert answer.returncode == 0, answer.stderr
        assert int(answer.stderr.split()[-1]) < 620  # 584 today
    assert min(seconds) < max(0.6, 4.5 * min(libraries))


def _children_seconds() -> float:
    """Of the processor, which a busy machine does not make longer."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_predict_without_a_pipeline_loads_neither_torch_nor_numpy() -> None:
    answer = predict("atexit.register(lambda: print('loaded', *sys.modules))")
    loaded = answer.stdout.split("loaded ")[-1].split()
    assert "fivefold.planner" in loaded
    assert {"torch", "numpy", "altair", "transformers", "tokenizers"}.intersection(loaded) == set()
    assert {f"fivefold.cli.commands.{name}" for name in ("search", "train", "web")}.intersection(loaded) == set()
