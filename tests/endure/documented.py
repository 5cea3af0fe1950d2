"""Every command of docs/ that names nothing of the reader's own is run, one after another.

    python -m tests.endure.documented

Commands that train, measure or serve are run by their own tests; those on files of the reader's are only parsed
(tests/docs). Those of the tutorials and the README are run by tests/docs/test_tutorials.py.
Exits 1 if one fails; prints what was run, what was not and why, and the slowest.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

from typer.testing import CliRunner

from fivefold.cli import app
from tests.docs.test_site import PAGES, ROOT, lines
from tests.docs.tutorials import PAGES as TUTORIALS
from tests.endure.stop_signals import end_at_stop_signal

ELSEWHERE = {
    "train",
    "calibrate",
    "web",
    "generate",
    "show",
    "import",
    "export",
    "numerics",
}  # train, or serve, or need it
FILES = (".toml", ".yaml", ".yml", ".sh", ".slurm", ".py", ".json", ".jsonl", ".pickle", ".txt", ".gz", ".parquet")
READERS = ("TRACES", "TRACES/", "RUN.toml", "torchrun", "accelerate")  # what stands for files of theirs
MADE = ("-o", "--out", "--output", "--write", "--charts", "--chart")  # of a file that the command makes


def find_local_input(words: list[str]) -> str:
    """What of the reader's own a command names, or why it is run elsewhere; empty if it can be run here."""
    if words[0] in ELSEWHERE:
        return "trains, measures or serves"
    if "--measure" in words or "--slurm" in words:
        return "trains"
    for before, word in zip(["", *words], words, strict=False):
        file, given = word.partition(":")[0] if ".py:" in word else word, before not in MADE
        if "…" in word or word in READERS or word.startswith("/") or (word.startswith("runs/") and given):
            return f"{word} is the reader's"
        if Path(file).suffix in FILES and given and not (ROOT / file).exists():
            return f"{word} is the reader's"
    return ""


def main() -> int:
    """Exit code 1 if a command fails."""
    result = {
        tuple(words[words.index("fivefold") + 1 :]): page
        for page in PAGES
        if page not in TUTORIALS
        for words in lines(page)
        if "fivefold" in words and words[words.index("fivefold") + 1 :]
    }
    took, left, failed = list[tuple[float, str]](), list[str](), 0
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        shutil.copytree(ROOT / "examples", Path(folder) / "examples")
        (Path(folder) / "docs/pictures").mkdir(parents=True)
        os.chdir(folder)
        with end_at_stop_signal():
            for words, page in result.items():
                line = f"{page.relative_to(ROOT)}: fivefold {' '.join(words)}"
                if why := find_local_input(list(words)):
                    left.append(f"{line}: {why}")
                    continue
                begin = time.perf_counter()
                ended = CliRunner().invoke(app, list(words))
                took.append((time.perf_counter() - begin, line))
                if ended.exit_code:
                    failed += 1
                    print(line, ended.exception, ended.output[-2000:], sep="\n", flush=True)
    print(*left, sep="\n")
    print(f"{len(took)} commands run, {failed} failed; {len(left)} are run elsewhere or on files of the reader's")
    print(*(f"{seconds:6.1f} s  {line}" for seconds, line in sorted(took)[:-6:-1]), sep="\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
