"""What a run of the tests has skipped, grouped by its reason, with what to do so that it runs."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
MODULES = {"vl_convert": "vl-convert-python", "transformers": "transformers"}  # modules named unlike their package
REMEDIES = (
    ("Chromium", "apt-get install chromium (as root; .ci/run does it)"),
    ("playwright", "pip install 'fivefold[dev]'"),
    ("extra web", "pip install 'fivefold[web]'"),
    ("GPU", "make gpu, on a machine with an NVIDIA GPU"),
    ("make interop", "make interop"),
    ("nanotron|skypilot", "make interop"),
    ("'torchtune'", "an environment as tests/third_party/test_torchtune.py says"),
    ("no git", "run the tests in a clone of the repository"),
    ("no bash", "install bash"),
)


def find_remedy(reason: str) -> str:
    """Return what to install or to run for a reason; "" if the reason itself says all that is known."""
    for pattern, remedy in REMEDIES:
        if re.search(pattern, reason):
            return remedy
    if missing := re.search(r"could not import '(\w+)", reason):
        package = MODULES.get(missing[1], missing[1])
        for extra, needs in PROJECT["optional-dependencies"].items():
            if any(re.match(rf"{package}\b", need) for need in needs):
                return f"pip install 'fivefold[{extra}]'"
        return "make interop"
    return ""


def summarize_skips(skips: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Yield a line for each reason, given the file and the reason of each skipped test, the most frequent first."""
    counts = Counter((reason.removeprefix("Skipped: "), find_remedy(reason)) for _, reason in skips)
    for (reason, remedy), count in counts.most_common():
        tests = "1 test" if count == 1 else f"{count} tests"
        yield f"{tests}: {reason}" + (f" → {remedy}" if remedy else "")
