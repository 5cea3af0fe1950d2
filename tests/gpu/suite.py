"""Run the tests that need a GPU and print their results as a Markdown table. ``--small``: one quick file.

Long comparisons (marked slow) are parts of their own in ``tests/gpu/run.py``.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

FILES = (
    "tests/gpu",
    "tests/trainer/model/test_flash_attention.py",
    "tests/trainer/float8",
    "tests/dry_run/memory/test_snapshot.py",
)
QUICK = ("tests/gpu/test_generate.py", "tests/gpu/test_float8.py")
ENDS = ("passed", "failed", "skipped")


def count_outcomes(xml: str) -> dict[str, dict[str, int]]:
    """From pytest's JUnit report: by file, how many tests ended how; errors count as failed."""
    result: dict[str, dict[str, int]] = {}
    for case in ElementTree.fromstring(xml).iter("testcase"):
        tags = {child.tag for child in case}
        ended = "failed" if tags & {"failure", "error"} else "skipped" if "skipped" in tags else "passed"
        counts = result.setdefault(case.get("classname", "").replace(".", "/") + ".py", dict.fromkeys(ENDS, 0))
        counts[ended] += 1
    return result


def markdown(found: dict[str, dict[str, int]]) -> str:
    """The table, with its sums."""
    lines = ["| tests | passed | failed | skipped |", "|---|---|---|---|"]
    sums = {end: sum(counts[end] for counts in found.values()) for end in ENDS}
    for name, counts in [*sorted(found.items()), ("all", sums)]:
        lines.append(f"| {name} | {' | '.join(str(counts[end]) for end in ENDS)} |")
    return "\n".join(lines)


def main() -> int:
    """Run pytest; its exit code."""
    files = QUICK if "--small" in sys.argv[1:] else FILES
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", *files, "-m", "not slow", f"--junitxml={report}"]
        code = subprocess.run(command, stdout=sys.stderr, check=False).returncode
        if report.exists():
            print(markdown(count_outcomes(report.read_text())))
    return code


if __name__ == "__main__":
    sys.exit(main())
