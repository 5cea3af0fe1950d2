"""``fivefold models``, ``machines`` and ``stacks`` list the full catalogs, or the entries that contain a word."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

import fivefold as ff
from fivefold.cli import app
from fivefold.errors import UserError
from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.layout.validity import refuse
from fivefold.machine.catalog import list_names as machine_names
from fivefold.model.catalog import build_model
from fivefold.model.catalog import list_names as model_names
from fivefold.rendering.catalogs import STACKS as COLUMNS
from fivefold.stack.catalog import STACKS


def run(*words: str) -> str:
    ended = CliRunner().invoke(app, words, env={"COLUMNS": "80", "TERM": "dumb"}, catch_exceptions=False)
    return ended.output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "known"), [("models", model_names()), ("machines", machine_names()), ("stacks", list(STACKS))]
)
def test_a_catalog_is_listed_in_full(command: str, known: list[str]) -> None:
    assert [entry["name"] for entry in json.loads(run(command, "--json"))] == known
    assert [entry.name for entry in getattr(ff, command)()] == known
    lines = run(command).splitlines()
    assert [name for name in known if not any(line.split()[:1] == [name] for line in lines)] == [], "a row each"
    assert max(map(len, lines)) <= 100
    with pytest.raises(UserError, match=rf"ff\.{command}\(\) lists all {len(known)}"):
        getattr(ff, command)("zzz")


def test_a_word_selects_by_any_text_of_an_entry() -> None:
    assert [model.name for model in ff.models("QWEN3-30")] == ["qwen3-30b-a3b", "qwen3-30b-a3b-2507"]
    assert {machine.name for machine in ff.machines("nvlink 5")} == {"b200", "gb200", "b300", "gb300"}
    assert {stack.name for stack in ff.stacks("zbv")} >= {"fivefold", "zero-bubble", "torchtitan"}
    mixtures = {model.name for model in ff.models("moe")}
    assert mixtures == {model.name for model in ff.models() if model.experts}
    assert "axolotl" in next(stack for stack in ff.stacks() if stack.name == "ddp").configs
    assert len(ff.machines("mi").to_frame("arrow")) == len(ff.machines("mi"))


def test_machines_are_found_by_their_memory_as_it_is_sold() -> None:
    for words, known in {
        ("24", "24gb", "24 GB"): {"rtx3090", "rtx4090", "l4", "a10", "a10g", "a30"},
        ("80", "80GB"): {"a100", "a100-pcie", "a800", "h100", "h100-pcie", "h800"},
        ("141gb",): {"h200"},
        ("16gb",): {"t4", "v100-16"},
        ("192",): {"b200", "gb200", "mi300x"},
    }.items():
        for word in words:
            assert {machine.name for machine in ff.machines(word)} == known, word
    assert {"h100", "a100", "v100"} <= {machine.name for machine in ff.machines("100")}
    assert [machine.name for machine in ff.machines("4090")] == ["rtx4090"]
    with pytest.raises(UserError, match="no machine contains '7gb'"):
        ff.machines("7gb")


@pytest.mark.slow
def test_figures_are_those_of_the_records() -> None:
    model, listed = build_model("qwen3-30b-a3b"), ff.models("qwen3-30b")[0]
    assert (listed.parameters, listed.active_parameters) == (model.parameters, model.active_parameters)
    assert (listed.experts, listed.experts_per_token) == (128, 8)
    row = next(line for line in run("models").splitlines() if line.startswith("qwen3-30b"))
    assert row.split()[1:5] == ["30.53", "B", "3.35", "B"]
    row = next(line for line in run("machines").splitlines() if line.startswith("h100 "))
    assert " ".join(row.split()) == "h100 79.2 GiB 3.35 TB/s 989 TFLOP/s 8 GPUs 450 GB/s 50 GB/s"


@pytest.mark.parametrize("name", STACKS)
def test_a_stack_runs_what_is_listed_and_nothing_else(name: str) -> None:
    (listed,) = [entry for entry in ff.stacks() if entry.name == name]
    model, job = build_model("nano").replace(layers=4), Job(sequence=64, global_batch=16, stack=name)
    schedule = listed.schedules[0] if listed.schedules else "1f1b"
    zero = f"zero{max(listed.zero)}"

    def is_supported(layout: str) -> bool:
        try:
            refuse(Layout.parse(f"{layout} mbs1"), model=model, job=job)
        except UserError:
            return False
        return True

    for axis, layout in {"dp": f"dp2 {zero}", "tp": "tp2", "cp": "cp2", "pp": f"pp2 {schedule}"}.items():
        kinds = ("", " cp=ulysses") if axis == "cp" else ("",)
        stages = {"", f" {zero}"}
        assert any(is_supported(layout + kind + stage) for kind in kinds for stage in stages) == (
            axis in listed.axes
        ), axis
    assert [stage for stage in range(4) if is_supported(f"dp2 zero{stage}")] == list(listed.zero)


def test_features_of_a_stack_that_were_not_looked_up_are_not_listed_as_supported() -> None:
    stacks = ff.stacks()
    assert all(stack.examined for stack in stacks)
    row = next(line for line in run("stacks").splitlines() if line.startswith("torchtune"))
    assert row.split() == ["torchtune", "dp", "tp", "3", "torchtune"]
    unknown = next(stack for stack in stacks if stack.name == "torchtune").replace(examined=False)
    cells = {column.heading: column.value(unknown) for column in COLUMNS}
    assert [cells[heading] for heading in ("parallelism", "ZeRO", "pipeline schedules")] == ["?", "?", "?"]


@pytest.mark.parametrize(("command", "word"), [("models", "qwen3"), ("machines", "h100")])
def test_python_prints_a_catalog_as_the_command_does(command: str, word: str) -> None:
    rows = getattr(ff, command)(word)
    lines = str(rows).splitlines()
    assert [line.split()[0] for line in lines[2 : 2 + len(rows)]] == [row.name for row in rows]
    assert ("parameters" if command == "models" else "memory") in lines[0]
