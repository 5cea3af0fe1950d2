"""The rule by which rows of recipes select their files, on two small repositories."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.endure.recipe_sources import FACTORY, Source, _list_factory, copy_recipes
from tests.endure.recipes import list_recipes

TRAINING = "do_train: true\nfinetuning_type: lora\n"


def commit(clone: Path, files: dict[str, str]) -> str:
    """The hash of a commit of a repository with ``files``."""

    def git(*words: str) -> str:
        names = ("-c", "user.name=x", "-c", "user.email=x@x.x", "-c", "commit.gpgsign=false")
        done = subprocess.run(("git", "-C", str(clone), *names, *words), check=True, capture_output=True, text=True)
        return done.stdout.strip()

    if not clone.exists():
        clone.mkdir()
        git("init", "-q")
    for name, text in files.items():
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        (clone / name).write_text(text)
    git("add", "-A")
    git("commit", "-q", "-m", "files")
    return git("rev-parse", "HEAD")


def test_configs_of_training_are_selected_that_their_origin_never_had(tmp_path: Path) -> None:
    commit(tmp_path / "hiyouga+LLaMA-Factory", {"examples/a.yaml": TRAINING})
    commit(tmp_path / "hiyouga+LLaMA-Factory", {"examples/a.yaml": TRAINING + "# newer"})
    files = {
        "examples/a.yaml": TRAINING,  # a copy of an old one
        "examples/mine.yaml": TRAINING + "lora_rank: 4\n",
        "logs/again.yaml": TRAINING + "lora_rank: 4\n",
        "examples/merge.yaml": "finetuning_type: lora\n",
        "examples/ds.json": "{}",
        "data/large.json": " " * 2**18,
    }
    source = _list_factory("someone/fork", commit(tmp_path / "someone+fork", files))
    recipes = copy_recipes(source, tmp_path, tmp_path / "copied")
    named = {str(path.relative_to(tmp_path / "copied")) for path in recipes}
    assert named == {"examples/mine.yaml", "logs/again.yaml"}
    assert len(list(list_recipes(recipes, set()))) == 1
    assert (tmp_path / "copied/examples/ds.json").is_file()  # which a recipe may name
    assert not (tmp_path / "copied/data/large.json").exists()


def test_scripts_are_selected_by_the_command_that_they_run(tmp_path: Path) -> None:
    files = {"a.sh": "NPROC_PER_NODE=2 \\\nswift sft --model x\n", "b.sh": "swift infer --model x\n"}
    commit_hash = commit(tmp_path / "someone+scripts", files)
    source = Source("someone/scripts", commit_hash, paths=r"\.sh$", pattern=r"^swift (sft|pt)\b")
    recipes = copy_recipes(source, tmp_path, tmp_path / "copied")
    assert [path.name for path in recipes] == ["a.sh"]


def test_a_missing_clone_is_named_with_the_command_that_makes_it(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=f"git clone https://github.com/{FACTORY}"):
        copy_recipes(Source(FACTORY, "x"), tmp_path, tmp_path / "copied")
