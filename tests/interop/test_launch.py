"""Our run file and what starts it elsewhere: a Kubeflow Trainer job, a SkyPilot task."""

from __future__ import annotations

import tomllib
from itertools import islice
from pathlib import Path

import pytest
import yaml

from fivefold.adapter import Adapter
from fivefold.errors import UserError
from fivefold.interop.format import ConfigPlan
from fivefold.interop.launch.run_file import build_files
from fivefold.interop.read import read
from fivefold.interop.registry import find_stack_format
from fivefold.interop.write import write
from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.model.catalog import build_model, list_names, resolve
from fivefold.stack.catalog import build_stack
from fivefold.trainer.run import Run
from tests.agree.drawn import draw_cases
from tests.interop.draws import Range, plans
from tests.selection import mark_share

DRAWN_MODELS = 30
PLAN = ConfigPlan(
    build_model("llama3-8b"),
    Layout.parse("dp4 tp2 pp2 zero1 mbs1 ac=selective"),
    Job(sequence=8192, global_batch=128, precision="fp8", loss="chunked"),
    machine="h100",
)


def test_a_written_run_file_is_read_by_train(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(write(PLAN, to="fivefold").files["run.toml"])
    run = Run.load(tmp_path / "run.toml")
    assert (run.model, run.machine, run.layout, run.job) == ("llama3-8b", "h100:16", str(PLAN.layout), PLAN.job)


@pytest.mark.parametrize("seed", range(3))
def test_random_plans_are_read_back_from_run_files(seed: int, tmp_path: Path) -> None:
    for plan in plans("fivefold", count=8, seed=seed, among=Range(models=("llama3-8b", "tiny"))):
        files = write(plan._replace(machine="h100:8"), to="fivefold").files
        (tmp_path / "run.toml").write_text(files["run.toml"])
        back = read([str(tmp_path / "run.toml")])
        assert (back.layout, back.job, back.model) == (plan.layout, plan.job, plan.model)


def test_a_custom_model_is_written_next_to_the_run_file(tmp_path: Path) -> None:
    plan = PLAN._replace(model=PLAN.model.replace(name="mine", layers=8))
    for name, text in write(plan, to="fivefold").files.items():
        (tmp_path / name).write_text(text)
    assert read([str(tmp_path / "run.toml")]).model == plan.model


@pytest.mark.parametrize("first", mark_share(8, range(8)))
def test_every_model_is_read_back_from_its_file(tmp_path: Path, first: int) -> None:
    """Every eighth of the catalog; drawn ones have any features together."""
    drawn = (case.model for case in islice(draw_cases(5 + first), DRAWN_MODELS))
    for model in (*map(build_model, list_names()[first::8]), *drawn):
        own = model.replace(name="mine", source=model.source or "drawn")
        (tmp_path / "model.toml").write_text(build_files(PLAN._replace(model=own))["model.toml"])
        assert resolve(str(tmp_path / "model.toml")) == own, model.name


def test_a_run_file_without_a_machine_is_an_error() -> None:
    with pytest.raises(UserError, match="a run file needs a machine"):
        write(PLAN._replace(machine=""), to="kubernetes")


def test_a_kubernetes_job_ends_at_a_user_error_and_restarts_after_a_failure() -> None:
    volume, config, runtime, job = yaml.safe_load_all(write(PLAN, to="kubernetes").files["trainjob.yaml"])
    assert [item["kind"] for item in (volume, config, runtime, job)] == [
        "PersistentVolumeClaim",
        "ConfigMap",
        "TrainingRuntime",
        "TrainJob",
    ]
    assert tomllib.loads(config["data"]["run.toml"])["layout"] == str(PLAN.layout)
    assert (job["spec"]["trainer"]["numNodes"], job["spec"]["trainer"]["numProcPerNode"]) == (2, 8)
    jobset = runtime["spec"]["template"]["spec"]
    inner = jobset["replicatedJobs"][0]["template"]["spec"]
    assert inner["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"] == [2]
    assert jobset["failurePolicy"]["maxRestarts"] == Run().faults.max_restarts
    pod = inner["template"]["spec"]
    assert {mount["name"] for mount in pod["containers"][0]["volumeMounts"]} == {
        item["name"] for item in pod["volumes"]
    }
    folder = tomllib.loads(config["data"]["run.toml"])["folder"]
    assert any(f"/work/{folder}".startswith(mount["mountPath"]) for mount in pod["containers"][0]["volumeMounts"])


def test_skypilot_starts_as_many_ranks_as_the_layout_has() -> None:
    files = write(PLAN, to="skypilot").files
    task = yaml.safe_load(files["task.yaml"])
    assert task["num_nodes"] * int(task["resources"]["accelerators"].rpartition(":")[2]) == PLAN.layout.world
    assert "run.toml" in task["run"]
    assert "run.toml" in files


def test_the_config_format_of_a_stack_is_found() -> None:
    jobs = {name: Job(stack=build_stack(name)) for name in ("torchtitan", "megatron-core", "fsdp2", "internevo")}
    formats = [find_stack_format(jobs[name]) for name in ("torchtitan", "megatron-core", "fsdp2")]
    assert formats == ["torchtitan", "megatron", "accelerate"]
    assert find_stack_format(jobs["fsdp2"].replace(adapter=Adapter())) == "trl"
    with pytest.raises(UserError, match="no config is written for stack internevo"):
        find_stack_format(jobs["internevo"])
