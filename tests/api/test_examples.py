"""Every public function documents itself in numpydoc form, and its example runs."""

from __future__ import annotations

import doctest
import inspect
import re
from pathlib import Path

import pytest

import fivefold as ff
from fivefold.api.documentation import document_parameters, split_sections
from fivefold.machine.spec import Chip, Link, Machine
from fivefold.machine.toml import write
from fivefold.requests.commands import PredictRequest

LOCAL = Machine(
    name="here",
    ranks=2,
    ranks_per_node=2,
    backend="gloo",
    chip=Chip(name="core", peak_flops={"fp32": 1e11}, memory_bytes=2**32, memory_bandwidth=1e10, source="test"),
    links=(Link(name="loopback", span=2, bandwidth=1e9, latency_seconds=1e-4, source="test"),),
)
ROOT = Path(__file__).parents[2]
FUNCTIONS = sorted(name for name in ff.__all__ if inspect.isfunction(getattr(ff, name)) and name != "plan")
TORCH = {"dryrun", "watch"}
PROCESSES = {"train"}


class NumberChecker(doctest.OutputChecker):
    """Compare words exactly, and decimal numbers within 10 %: constants of the cost model are refitted now and then."""

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        decimals = re.compile(r"\d+\.\d+")
        wanted, actual = ([float(x) for x in decimals.findall(text)] for text in (want, got))
        if len(wanted) != len(actual) or any(abs(x - y) > 0.1 * x for x, y in zip(wanted, actual, strict=True)):
            return False
        return super().check_output(decimals.sub("#", want), decimals.sub("#", got), optionflags)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_public_function_has_sections_and_an_example(name: str) -> None:
    summary, sections = split_sections(inspect.getdoc(getattr(ff, name)) or "")
    assert summary
    assert {"Parameters", "Returns", "Examples"} <= sections.keys()
    documents = {
        word.lstrip("*")
        for line in re.findall(r"^(\S[^:\n]*)", sections["Parameters"], flags=re.MULTILINE)
        for word in line.replace(",", " ").split()
    }
    assert set(inspect.signature(getattr(ff, name)).parameters) <= documents
    assert f"ff.{name}(" in sections["Examples"]


def run_example(name: str) -> doctest.TestResults:
    """Run the example of a public function in the current folder."""
    test = doctest.DocTestParser().get_doctest(getattr(ff, name).__doc__, {"ff": ff}, name, None, None)
    assert test.examples
    return doctest.DocTestRunner(NumberChecker(), verbose=False).run(test)


@pytest.mark.parametrize(
    "name",
    [
        *[name for name in FUNCTIONS if name not in TORCH | PROCESSES],
        *[pytest.param(name, marks=pytest.mark.slow) for name in sorted(TORCH)],
        *[pytest.param(name, marks=pytest.mark.long) for name in sorted(PROCESSES)],
    ],
)
def test_the_example_of_a_public_function_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # a calibrated machine for "local"
    write(LOCAL, tmp_path / "fivefold" / "local.toml")
    results = run_example(name)
    assert results.failed == 0, capsys.readouterr().out
    assert results.attempted > 0


def test_an_example_with_a_wrong_output_fails(capsys: pytest.CaptureFixture[str]) -> None:
    test = doctest.DocTestParser().get_doctest(">>> 2.0 * 3\n7.0\n>>> 'a'\n'b'\n>>> 1.01\n1.0\n", {}, "x", None, None)
    assert doctest.DocTestRunner(NumberChecker(), verbose=False).run(test).failed == 2


def test_an_entry_in_the_docstring_replaces_the_help_text() -> None:
    @document_parameters(PredictRequest)
    def run(model: str, other: int = 3) -> None:
        """Run.

        Parameters
        ----------
        other
            Another
            number.
        """

    assert split_sections(run.__doc__ or "")[1] == {
        "Parameters": "model : str\n    Catalog name, its Hugging Face repository, or path to a config.json, "
        ".toml or .json.\n"
        "other : int, default 3\n    Another number."
    }
