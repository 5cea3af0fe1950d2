"""The procedure, step by step: each step takes what it says it takes, and its run file is the job and trains."""

from __future__ import annotations

import re
import tomllib
from math import ceil, log, sqrt
from pathlib import Path
from typing import Any

import pytest
import torch

from fivefold.adapter import Adapter
from fivefold.errors import UserError
from fivefold.interop.format import ConfigPlan
from fivefold.interop.launch import run_file
from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.layout.validity import is_legal
from fivefold.machine.catalog import resolve
from fivefold.machine.datacenter import Site
from fivefold.model.catalog import build_model
from fivefold.planner.batch import TEAMS, advise_tokens, apply_scaling_laws, find_nearby_advice
from fivefold.planner.playbook import fit_stage, list_candidates, plan_batch_stage, plan_micro_batch_stage
from fivefold.planner.predict import Planner, predict
from fivefold.planner.run_estimate import predict_full_run
from fivefold.planner.run_file import plan_run_job, write_run_file
from fivefold.requests.playbook import build_playbook
from fivefold.requests.words import parse_tokens
from fivefold.trainer.build import build
from fivefold.trainer.engine import Engine
from fivefold.trainer.run import Run
from fivefold.trainer.supported import check_supported
from fivefold.units import GIB, show_bytes, show_seconds

NODE = resolve("h100:8", local=Path("/nowhere"))
LLAMA, JOB = build_model("llama3-8b"), Job(sequence=8192, global_batch=64)


def test_laws_are_those_of_their_papers() -> None:
    """DeepSeek LLM 67B on 2 T tokens: 0.2920·C^0.3271; Step Law for 100 G tokens: 0.58·D^0.571."""
    deepseek, step = apply_scaling_laws(LLAMA, 2e12)
    active = LLAMA.active_parameters - LLAMA.vocab * LLAMA.width
    assert deepseek.tokens == pytest.approx(0.2920 * (6 * active * 2e12) ** 0.3271)
    assert 8e6 < deepseek.tokens < 11e6  # between the 4.7 and 18.9 M of DeepSeek LLM 7B and 67B, with their Table 2
    assert step.tokens == pytest.approx(0.58 * (2e12) ** 0.571)
    assert advise_tokens(LLAMA, 2e12) == pytest.approx(sqrt(deepseek.tokens * step.tokens))


def test_published_batches_are_quoted_for_runs_of_similar_length() -> None:
    who = [item.who for item in find_nearby_advice(4e6, model=LLAMA, tokens=2e12)]
    assert {"Llama 1 65B", "Llama 2 70B", "OLMo 2 7B"} <= set(who)
    assert "DeepSeek-V3" not in who
    assert [item.who for item in find_nearby_advice(60e6, model=LLAMA, tokens=14e12)] == ["DeepSeek-V3"]
    for tokens, counts in ((0.076e12, True), (0.074e12, False), (1.19e12, True), (1.21e12, False)):  # of 0.3e12
        nearby = [item.who for item in find_nearby_advice(3.2e6, model=LLAMA, tokens=tokens)]
        assert ("GPT-3 175B" in nearby) is counts
    assert len({team.source for team in TEAMS}) >= 6


def test_the_advised_batch_is_a_power_of_two_between_the_laws_unless_the_job_states_one() -> None:
    stage, job = plan_batch_stage(LLAMA, JOB, tokens=2e12, is_given=False)
    assert job.global_batch & (job.global_batch - 1) == 0
    ratio = job.tokens_per_step / advise_tokens(LLAMA, 2e12)
    assert 1 / sqrt(2) <= ratio <= sqrt(2)
    assert [item.layout for item in stage.tried if item.chosen] == [f"gbs {job.global_batch}"]
    stage, job = plan_batch_stage(LLAMA, JOB, tokens=2e12, is_given=True)
    assert job.global_batch == 64
    assert "as the job says" in stage.reason


@pytest.mark.parametrize("is_given", [False, True])
def test_the_laws_of_the_batch_are_not_meant_for_adapters(is_given: bool) -> None:
    tuned = JOB.replace(adapter=Adapter(rank=16))
    stage, _ = plan_batch_stage(LLAMA, tuned, tokens=1e9, is_given=is_given)
    assert ("laws and runs are of pretraining" in stage.reason) != is_given


@pytest.mark.parametrize("memory", [90, 45, 30])
def test_plan_takes_its_first_candidate_layout_that_fits(memory: int) -> None:
    machine = resolve(f"h100:8 memory={memory}GiB", local=Path("/nowhere"))
    planner = Planner(model=LLAMA, machine=machine, job=JOB)
    stage, chosen = fit_stage(planner, world=8)
    for _, layout in list_candidates(planner, 8):
        legal = is_legal(layout, model=LLAMA, job=JOB, machine=machine)
        if legal and planner.fits(layout):
            assert layout == chosen
            break
    assert [item.layout for item in stage.tried if item.chosen] == [str(chosen)]
    assert all(not item.fits for item in stage.tried[: [item.chosen for item in stage.tried].index(True)])
    assert f"fits in {show_bytes(machine.chip.memory_bytes)} with at most 5 % risk of running out: " in stage.reason


def test_missing_memory_is_the_shown_peak_above_the_capacity_or_a_risk() -> None:
    """It is relative neither to the largest peak with 5 % risk nor to memory with the driver, which no row shows."""
    planner = Planner(model=LLAMA, machine=NODE, job=JOB)
    stage, _ = fit_stage(planner, world=8)
    rows = [item for item in stage.tried if not item.fits and item.peak_bytes is not None]
    assert rows
    for row in rows:
        assert row.peak_bytes is not None
        assert row.why.endswith(planner.describe_miss(Layout.parse(row.layout)))
        if size := re.search(r"exceeds the memory by ([0-9.]+) GiB$", row.why):
            excess = row.peak_bytes - planner.machine.chip.memory_bytes
            assert float(size[1]) == pytest.approx(excess / GIB, abs=0.006)


def test_a_model_that_fits_no_layout_is_an_error_with_the_closest_layout() -> None:
    planner = Planner(model=build_model("llama3-405b"), machine=NODE, job=JOB)
    with pytest.raises(UserError, match=r"none of the \d+ layouts that plan tries fits .*: the nearest, .* needs"):
        fit_stage(planner, world=8)


@pytest.mark.parametrize(("name", "advice"), [("qwen3-1.7b", ", or --set offload=optimizer"), ("qwen3-4b", "")])
def test_offloading_is_advised_where_a_layout_then_fits(name: str, advice: str) -> None:
    card = resolve("rtx4090", local=Path("/nowhere"))
    planner = Planner(model=build_model(name), machine=card, job=Job(sequence=4096, global_batch=8))
    more = r"use more GPUs \(`fivefold ask gpus`\)"
    with pytest.raises(UserError, match=f"of rtx4090: the nearest, dp1 zero0 mbs1 ac=full, .*; {more}{advice}$"):
        fit_stage(planner, world=1)


def test_every_candidate_layout_uses_all_ranks_with_at_most_as_many_replicas_as_sequences() -> None:
    for name, world, batch in (
        ("llama3-70b", 512, 64),
        ("deepseek-v3", 2048, 256),
        ("mixtral-8x7b", 4, 8),
        ("nano", 3, 4),
    ):
        planner = Planner(model=build_model(name), machine=NODE, job=JOB.replace(global_batch=batch))
        rungs = [layout for _, layout in list_candidates(planner, world)]
        assert len(rungs) == len(set(rungs)) >= 4
        planner = Planner(model=build_model(name), machine=NODE.replace(ranks=world), job=planner.job)
        legal = [
            rung for rung in rungs if is_legal(rung, model=planner.model, job=planner.job, machine=planner.machine)
        ]
        assert legal or name == "nano"  # three ranks share no batch of four
        assert all(layout.world == world and (layout.dp <= batch or layout.dp % 2) for layout in rungs)


def test_the_micro_batch_is_the_fastest_that_fits() -> None:
    planner = Planner(model=LLAMA, machine=NODE, job=JOB)
    layout = Layout.parse("dp8 zero3 mbs1 ac=full")
    stage, best = plan_micro_batch_stage(planner, layout)
    estimates = {mbs: planner.estimate(layout.replace(mbs=mbs)) for mbs in (1, 2, 4, 8)}
    fits = {
        mbs: estimate.step_time.seconds
        for mbs, estimate in estimates.items()
        if planner.fits(estimate.layout, estimate.ranks)
    }
    assert best.mbs == min(fits, key=lambda mbs: fits[mbs])
    assert f"dp8 times mbs{best.mbs} times {64 // 8 // best.mbs} micro-batch" in stage.reason


JOBS: list[dict[str, Any]] = [
    {},
    {"precision": "fp8", "stack": "megatron-core", "loss": "chunked", "offload": ["optimizer"]},
    {"stack": "torchtitan", "compile": True, "precision": "bf16", "seed": 7},
    {"optimizer": {"kind": "muon", "groups": [{"of": "head", "rate": 0.1}]}, "documents": "separate"},
    {"ramp": {"first": 8, "step": 8, "every": 100}, "learning_rate": {"kind": "wsd", "peak": 1e-3}},
    {"precision": {"name": "own", "compute": "bf16", "weights_bytes": 2, "gradients_bytes": 2}, "overlap": ["dp"]},
]


@pytest.mark.parametrize("fields", JOBS, ids=lambda fields: " ".join(fields) or "default")
def test_a_run_file_is_read_back_as_the_job(fields: dict[str, Any]) -> None:
    job = plan_run_job(Job.read({"sequence": 256, "global_batch": 64, **fields}, origin="test"), tokens=1e9)
    assert job.steps == ceil(1e9 / (256 * 64))
    step = predict(model=build_model("nano"), machine=NODE, layout=Layout.parse("dp8 zero1"), job=JOB)
    run = predict_full_run(step=step, model=build_model("nano"), machine=NODE, job=job, tokens=1e9, site=Site())
    plan = ConfigPlan(build_model("nano"), Layout.parse(step.layout), job, 8, "h100:8")
    content = write_run_file(run_file.format_run_file(plan, model="nano"), job, run=run, command="plan")
    duration = next(line for line in content.splitlines() if " on 8 GPUs, " in line)
    assert duration.startswith(f"# {show_seconds(run.seconds)} on 8 GPUs, ")  # less than two days
    read = Run.read(tomllib.loads(content), origin="test")
    assert read.job == job
    assert (read.model, read.machine, read.layout, str(read.folder)) == ("nano", "h100:8", step.layout, "runs/nano")
    assert 1 <= read.checkpoints.every_steps <= job.steps


def test_numbers_of_tokens_are_read_from_numbers_or_text() -> None:
    assert [parse_tokens(item) for item in ("2T", "1e12", "15.6T", "300B", "7")] == [2e12, 1e12, 15.6e12, 300e9, 7]
    with pytest.raises(ValueError, match="such as 2e12 or 2T"):
        parse_tokens("2X")


def run_one_step(path: Path) -> tuple[float, float]:
    """Loss and gradient norm of the first step of a run file."""
    run = Run.load(path)
    model, layout = build_model(run.model), Layout.parse(run.layout)
    check_supported(layout, run.job, model=model)
    built = build(model=model, layout=layout, job=run.job, device=torch.device("cpu"))
    shape = (layout.micro_batches(run.job), layout.mbs, run.job.sequence + 1)
    tokens = torch.randint(model.vocab, shape, generator=torch.Generator().manual_seed(1))
    done = Engine(built, model=model, layout=layout, job=run.job).step(tokens)
    return done.loss, done.norm


@pytest.mark.long  # the test above reads the file back, and others train run files
def test_a_run_file_written_by_plan_trains(tmp_path: Path, forked) -> None:
    one = resolve("h100:1", local=Path("/nowhere"))
    result = build_playbook(build_model("nano"), one, Job(sequence=64), tokens=6000, where="order=default ac=none")
    assert [stage.title for stage in result.stages] == ["The batch", "Make it fit", "Reach the batch", "Make it fast"]
    assert result.step.layout == next(item.layout for item in result.stages[-1].tried if item.chosen)
    assert result.commands["fivefold"] == ("fivefold train run.toml   # on a host of 1 h100",)
    assert result.commands["torchtitan"][0] == "fivefold write run.toml --to torchtitan -o torchtitan"
    file = tmp_path / "run.toml"
    file.write_text(result.run_file)
    ((loss, norm),) = forked(1, run_one_step, file)
    assert loss == pytest.approx(log(build_model("nano").vocab), rel=0.2)  # of weights that have learned nothing
    assert 0 < norm < 100
