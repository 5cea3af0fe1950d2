"""The recipes of the table of ``docs/how-to/configs/published.md``: which files of which repositories, by a rule.

    python -m tests.endure.recipe_sources CLONES [ROW...] [--list]

CLONES holds a clone of each repository as ``OWNER+NAME`` (``git clone https://github.com/OWNER/NAME OWNER+NAME``), with
its history. Each row's files are copied out of their commit, and counted as ``tests.endure.recipes`` counts folders.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.endure.recipes import Tally, print_tallies
from tests.endure.stop_signals import end_at_stop_signal

YAML = r"\.ya?ml$"
MAX_BYTES = 2**17  # of a file that is copied: configs and scripts, no data
FACTORY = "hiyouga/LLaMA-Factory"


class Source(NamedTuple):
    """Files of a repository at a commit.

    ``paths``: a regular expression that the paths of recipes match; ``also``: of files that recipes name; ``contains``:
    words that a recipe has; ``pattern``: a regular expression that is found in it;
    ``unless_in``: a repository of whose files, of any commit, copies are left out.
    """

    repository: str
    commit: str
    paths: str = rf"^examples/.*{YAML}"
    also: str = r"\.(ya?ml|json|py)$"
    contains: tuple[str, ...] = ()
    pattern: str = ""
    unless_in: str = ""


class Row(NamedTuple):
    """A row of the table: its files, and the options with which they are counted."""

    sources: tuple[Source, ...]
    gpus: str = "h100:8"
    added: tuple[str, ...] = ()


def _list_factory(repository: str, commit: str) -> Source:
    """Return the configs of training that a repository keeps for LLaMA-Factory, without LLaMA-Factory's own."""
    words = ("do_train", "finetuning_type")
    return Source(repository, commit, paths=r"\.(ya?ml|json)$", contains=words, unless_in=FACTORY)


TORCHTUNE = Source("pytorch/torchtune", "a6290a5", paths=rf"^recipes/configs/.*{YAML}")  # release/0.6.1
TRL = "huggingface/trl"
SWIFT = Source(
    "modelscope/ms-swift",
    "3602360",
    paths=r"^examples/.*\.(sh|ya?ml|json)$",
    pattern=r"\bswift (sft|pt|rlhf)\b|^tuner_type:",
)
ROWS = {
    "axolotl": Row((Source("axolotl-ai-cloud/axolotl", "067b021"),)),
    "llama-factory": Row((Source(FACTORY, "ff6d4d1"),)),
    "llama-factory of others": Row(
        (
            _list_factory("jincan333/LLaMA-Factory", "e567f7e"),
            _list_factory("JackLingjie/LLama-Factory", "f257310"),
            _list_factory("pmahdavi/llama-factory-mfsgd", "993f5b9"),
            _list_factory("cheryyunl/LLaMA-Factory", "7a04515"),
            _list_factory("ecfm/LLaMA-Factory", "8be5984"),
        ),
    ),
    "ms-swift": Row((SWIFT,), gpus="h100"),
    "ms-swift with a length": Row((SWIFT,), gpus="h100", added=("max_length=2048",)),
    "trl": Row((Source(TRL, "f2cd577", paths=rf"(accelerate|cli)_configs/.*{YAML}"),)),
    "trl commands": Row((Source(TRL, "f2cd577", paths=r"^(examples|trl)/.*\.py$"),)),
    "torchtune": Row((TORCHTUNE,), gpus="h100"),
    "torchtune with a length": Row((TORCHTUNE,), gpus="h100", added=("tokenizer.max_seq_len=2048",)),
}


def list_blobs(clone: Path, commit: str) -> Iterator[tuple[str, str]]:
    """Yield path and hash of the small files of a commit."""
    listed = _run_git(clone, "ls-tree", "-r", "-l", "-z", commit)
    for line in filter(None, listed.decode(errors="replace").split("\0")):
        facts, _, path = line.partition("\t")
        _, kind, blob, size = facts.split()
        if kind == "blob" and size.isdigit() and int(size) <= MAX_BYTES:
            yield path, blob


def copy_recipes(source: Source, clones: Path, folder: Path) -> list[Path]:
    """Write a source's recipes, and the files that they may name, to ``folder``; return the recipes."""
    clone, recipes = find_clone(clones, source.repository), list[Path]()
    known = _list_known(find_clone(clones, source.unless_in)) if source.unless_in else frozenset[str]()
    for path, blob in list_blobs(clone, source.commit):
        is_recipe = re.search(source.paths, path) is not None and blob not in known
        if not is_recipe and not re.search(source.also, path):
            continue
        content = _run_git(clone, "cat-file", "blob", blob)
        place = folder / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content)
        is_recipe = is_recipe and re.search(source.pattern.encode(), content, re.MULTILINE) is not None
        if is_recipe and all(word.encode() in content for word in source.contains):
            recipes.append(place)
    return recipes


def find_clone(clones: Path, repository: str) -> Path:
    """Return the clone of a repository; exits with the command that makes one."""
    clone = clones / repository.replace("/", "+")
    inner = clone / "repo"  # a clone without a work tree may be in a folder of its own
    if not clone.is_dir():
        sys.exit(f"{clone} is missing; git clone https://github.com/{repository} {clone}")
    return inner if inner.is_dir() else clone


def _list_known(clone: Path) -> frozenset[str]:
    """Return the hashes of all configs that a repository had at the checked-out commit or before."""
    words = ("log", "--raw", "--no-abbrev", "--no-renames", "--format=", "--", "*.yaml", "*.yml", "*.json")
    return frozenset(line.split()[3] for line in _run_git(clone, *words).decode().splitlines() if line)


def _run_git(clone: Path, *words: str) -> bytes:
    return subprocess.run(("git", "-C", str(clone), *words), check=True, capture_output=True).stdout


def main() -> int:
    """Count the rows, and print each as one of the table."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    options.add_argument("clones", type=Path)
    options.add_argument("rows", nargs="*", help="rows of the table; none: all")
    options.add_argument("--model", default="llama3-8b")
    options.add_argument("--list", action="store_true", help="print the paths of the recipes, and count nothing")
    asked = options.parse_args()
    tallies = dict[str, Tally]()
    with end_at_stop_signal():
        for name in asked.rows or ROWS:
            row, listed = ROWS[name], dict[str, list[str]]()
            tally = Tally(gpus=row.gpus, model=asked.model, added=row.added)
            if not asked.list:
                tallies[name] = tally
            for source in row.sources:
                with tempfile.TemporaryDirectory() as temporary:
                    folder = Path(temporary) / source.repository.replace("/", "+")
                    recipes = copy_recipes(source, asked.clones, folder)
                    listed[f"{source.repository}@{source.commit}"] = [str(path.relative_to(folder)) for path in recipes]
                    if not asked.list:
                        tally.add_folder(folder, recipes)
            if asked.list:
                print(json.dumps({name: listed}, indent=1))
    return print_tallies(tallies)


if __name__ == "__main__":
    sys.exit(main())
