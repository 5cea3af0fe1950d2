"""Count what becomes of folders of recipes: predicted, predicted with another model, named in one line, or an error.

    python -m tests.endure.recipes FOLDER... [--gpus h100:8] [--model llama3-8b] [--ext yaml,yml,json] [--verbose]
                                             [--add tokenizer.max_seq_len=2048]

Each file is read and predicted without ``--ignore``; if only its model is not known, once more with ``--model``. Files
that equal an earlier one are left out. With ``--ext py``, the launch commands in the head of each script are the
recipes, and files that they name are looked for in the folder. ``--add`` gives words after each file, as
``NAME=VALUE``; ``--gpus h100`` leaves the number of ranks to the file. Exits 1 if a recipe ends in anything but an
answer or an error of one line.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import re
import shlex
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import fivefold
from fivefold.errors import UserError
from fivefold.rendering.progress import show_progress
from fivefold.requests.configs import build_request, load_config
from tests.endure.stop_signals import end_at_stop_signal

KINDS = ("predicted", "predicted with --model", "named", "error of Fivefold")


def list_recipes(paths: Iterable[Path], seen: set[str]) -> Iterator[list[str]]:
    """Yield files, and the commands of scripts, as words; no copies of earlier ones, which are ``seen``."""
    for path in sorted(paths):
        content = path.read_text(encoding="utf-8", errors="replace")
        commands = list_commands(content) if path.suffix == ".py" else [[str(path.resolve())]]
        for words in commands:
            if (key := content if path.suffix != ".py" else " ".join(words)) not in seen:
                seen.add(key)
                yield words


def list_commands(text: str) -> Iterator[list[str]]:
    """Yield the launch commands in the text of a script; their lines end in a backslash but for the last."""
    for match in re.finditer(r"^(?:accelerate launch|python |torchrun |trl )(?:.*\\\n)*.*$", text, re.MULTILINE):
        try:
            yield shlex.split(match[0].replace("\\\n", " "))
        except ValueError:
            continue


def predict_recipe(words: list[str], *, gpus: str, model: str | None) -> None:
    """Predict a recipe; raise ``UserError`` for what is not read."""
    loaded = load_config(words, build_request(gpus, model))
    fivefold.predict(loaded.model, gpus, loaded.layout, job=loaded.job)


def judge(words: list[str], *, gpus: str, model: str) -> tuple[str, str]:
    """Return what became of a file, one of ``KINDS``, and the line that says why."""
    lines = list[str]()
    for kind, other in ((KINDS[0], None), (KINDS[1], model)):
        try:
            predict_recipe(words, gpus=gpus, model=other)
        except UserError as error:
            lines.append(str(error))
            if "\n" in lines[-1]:
                return KINDS[3], f"several lines: {lines[-1]}"
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            return KINDS[3], f"{type(error).__name__} {error} ({place.filename}:{place.lineno})".replace("\n", " ")
        else:
            return kind, ""
        if "the model" not in lines[-1]:
            break
    return KINDS[2], lines[-1]


class Tally:
    """What became of recipes, and the lines that say why."""

    def __init__(self, *, gpus: str, model: str, added: Sequence[str] = (), verbose: bool = False) -> None:
        self.gpus, self.model, self.added, self.verbose = gpus, model, added, verbose
        self.counts, self.reasons = collections.Counter[str](), collections.Counter[str]()
        self.seen = set[str]()

    def add_folder(self, folder: Path, paths: Iterable[Path]) -> None:
        """Count the recipes among ``paths`` of a folder, in which the files that they name are looked for."""
        recipes = list(list_recipes(paths, self.seen))
        with show_progress(folder.name) as progress, contextlib.chdir(folder):
            for number, recipe in enumerate(recipes):
                progress(recipe[-1], number, len(recipes))
                words = [*recipe, *self.added]
                kind, line = judge(words, gpus=self.gpus, model=self.model)
                self.counts[kind] += 1
                self.reasons[shorten_line(line)] += bool(line)
                if self.verbose or kind == KINDS[3]:
                    print(f"{' '.join(words)}: {kind}: {line}")

    def print_counts(self, name: str, *, reasons: int = 12) -> None:
        """Print how many recipes became what, and the most frequent reasons."""
        print(f"{name}: {self.counts.total()} recipes: " + ", ".join(f"{self.counts[kind]} {kind}" for kind in KINDS))
        print(*(f"  {count}: {line}" for line, count in self.reasons.most_common(reasons) if line), sep="\n")


def shorten_line(line: str) -> str:
    """Return a line without paths and numbers, so that equal reasons are counted together."""
    return re.sub(r"\d+", "N", re.sub(r"\S*/\S*", "…", line))[:110]


def print_tallies(tallies: Mapping[object, Tally]) -> int:
    """Print every tally with its name; return 1 if a recipe ended in an error of Fivefold."""
    for name, tally in tallies.items():
        tally.print_counts(str(name))
    return int(any(tally.counts[KINDS[3]] for tally in tallies.values()))


def main() -> int:
    """Count every folder."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    options.add_argument("folders", nargs="+", type=Path)
    options.add_argument("--gpus", default="h100:8")
    options.add_argument("--model", default="llama3-8b")
    options.add_argument("--ext", default="yaml,yml,json")
    options.add_argument("--add", nargs="*", default=[])
    options.add_argument("--verbose", action="store_true")
    asked = options.parse_args()
    suffixes, tallies = asked.ext.split(","), dict[Path, Tally]()
    with end_at_stop_signal():
        for folder in asked.folders:
            tallies[folder] = Tally(gpus=asked.gpus, model=asked.model, added=asked.add, verbose=asked.verbose)
            files = (path for path in folder.rglob("*") if path.is_file())
            tallies[folder].add_folder(folder, [path for path in files if path.suffix.lstrip(".") in suffixes])
    return print_tallies(tallies)


if __name__ == "__main__":
    sys.exit(main())
