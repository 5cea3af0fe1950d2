"""Files that a sweep file or a run file names are next to it, or else where the command runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from fivefold.job import Job
from fivefold.machine.catalog import resolve as resolve_machine
from fivefold.machine.toml import emit, write
from fivefold.model import catalog
from fivefold.requests.cases import list_cases
from fivefold.requests.machines import load_machine
from fivefold.sweeps.spec import Sweep, list_settings
from fivefold.trainer.run import Run

SWEEP = 'models = ["mine.toml", "nano"]\nmachines = ["gpu.toml:4", "h100"]\nlayouts = ["dp*"]\nranks = [2]\n'
RUN = 'model = "mine.toml"\nmachine = "gpu.toml:2"\nlayout = "dp2"\nschedule = "own.csv"\n[data]\ncorpus = "text"\n'


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files, which is not where the command runs; a model of the catalog's name is there too."""
    folder, elsewhere = tmp_path / "study", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir()
    model = catalog.build_model("tiny").replace(name="mine", layers=3)
    for name in ("mine.toml", "nano"):
        (folder / name).write_text(emit(model.model_dump(mode="json", exclude_none=True, exclude_defaults=True)))
    write(resolve_machine("h100:8", local=tmp_path), folder / "gpu.toml")
    (folder / "sweep.toml").write_text(SWEEP)
    (folder / "run.toml").write_text(RUN)
    (folder / "text").mkdir()
    monkeypatch.chdir(elsewhere)
    return folder


def test_paths_in_a_sweep_file_are_relative_to_it(folder: Path) -> None:
    result = list(list_settings(Sweep.load(folder / "sweep.toml"), local=folder / "none"))
    assert [item.model.layers for item in result] == [
        3,
        3,
        catalog.build_model("nano").layers,
        catalog.build_model("nano").layers,
    ]
    assert {item.ranks for item in result} == {2}


def test_paths_in_a_run_file_are_relative_to_it_or_to_the_working_folder(folder: Path) -> None:
    run = Run.load(folder / "run.toml")
    assert catalog.resolve(run.model).layers == 3
    assert resolve_machine(run.machine, local=folder / "none").ranks == 2
    assert run.data.corpus == str(folder / "text")
    assert (run.data.tokenizer, run.folder) == ("bytes", Path("runs/mine"))
    assert run.schedule == Path("own.csv")  # there is none next to the file
    (case,) = list_cases([str(folder / "run.toml")], Job(), stacks="", precisions="", machine=load_machine, stated=())
    assert (case.model.layers, case.machine.ranks) == (3, 2)


def test_a_file_in_the_working_folder_is_found_too(folder: Path) -> None:
    (folder / "mine.toml").rename("mine.toml")
    assert catalog.resolve(Run.load(folder / "run.toml").model).layers == 3


def test_a_corpus_in_the_working_folder_comes_before_the_data_of_the_run(folder: Path) -> None:
    Path("text").mkdir()
    assert Run.load(folder / "run.toml").data.corpus == "text"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("[job]", "tiny"),
        ('model = "llama3.2-1b"', "llama3.2-1b"),
        ('model = "meta-llama/Llama-3.1-8B"', "Llama-3.1-8B"),
        ('model = "mine.toml"', "mine"),
        ('model = "config.json"', "study"),  # next to the run file
        ('model = "nano"\nfolder = "runs/tiny"', "tiny"),
    ],
)
def test_the_folder_of_a_run_is_named_after_its_model(folder: Path, text: str, name: str) -> None:
    (folder / "config.json").write_text("{}")
    (folder / "run.toml").write_text(text)
    run = Run.load(folder / "run.toml")
    assert run.folder == Path("runs") / name
    assert run.replace(machine="h100:2").folder == run.folder
