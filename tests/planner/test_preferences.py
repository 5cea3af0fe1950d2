"""Preference optimization (DPO) as it is planned: what the reference adds, and that every command counts pairs."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from fivefold.adapter import Adapter
from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.machine import catalog
from fivefold.model.spec import Model
from fivefold.planner.counts.traffic import list_messages
from fivefold.planner.playbook import list_candidates
from fivefold.planner.predict import Planner, predict
from fivefold.planner.questions.fine_tune import list_fine_tunes
from fivefold.planner.questions.micro_batch import find_largest_micro_batch
from fivefold.planner.search import search
from fivefold.planner.time.memory_over_time import list_levels
from fivefold.planner.time.spans import build_spans

MODEL = Model(name="m", layers=4, width=256, heads=4, kv_heads=2, head_dim=64, ffn=512, vocab=1024)
MACHINE = catalog.resolve("h100:4", local=Path("machine.toml"))
DPO = Job(objective="dpo", sequence=512, global_batch=32)
SFT = DPO.replace(objective="sft", documents="joined")


@pytest.mark.parametrize(("text", "shards"), [("dp4 zero0 mbs2", 1), ("dp4 zero2 mbs2", 1), ("dp4 zero3 mbs2", 4)])
def test_the_reference_is_a_copy_of_the_weights_and_a_forward(text: str, shards: int) -> None:
    layout = Layout.parse(text)
    dpo, sft = (predict(model=MODEL, machine=MACHINE, layout=layout, job=job) for job in (DPO, SFT))
    (ours,), (plain,) = dpo.memory.stages, sft.memory.stages
    assert ours.parameters_bytes - plain.parameters_bytes == 2 * MODEL.parameters // shards
    assert (3 * dpo.work.hardware_flops, 3 * dpo.work.model_flops_non_causal) == (
        4 * sft.work.hardware_flops,
        4 * sft.work.model_flops_non_causal,
    )
    assert dpo.time is not None
    assert sft.time is not None
    assert sft.time.step_seconds < dpo.time.step_seconds < 1.5 * sft.time.step_seconds
    assert sum(dpo.time.parts.values()) == pytest.approx(dpo.time.step_seconds)


def test_adapters_need_no_copy_and_do_not_run_in_the_reference() -> None:
    layout, adapter = Layout.parse("dp4 zero3 mbs2"), Adapter(rank=8)
    dpo, sft, full = (
        predict(model=MODEL, machine=MACHINE, layout=layout, job=job)
        for job in (DPO.replace(adapter=adapter), SFT.replace(adapter=adapter), SFT)
    )
    assert dpo.memory.stages[0].parameters_bytes == sft.memory.stages[0].parameters_bytes
    assert 3 * (dpo.work.hardware_flops - sft.work.hardware_flops) == full.work.hardware_flops


@pytest.mark.slow
def test_every_command_keeps_pairs_together() -> None:
    best = search(model=MODEL, machine=MACHINE, job=DPO).best
    assert {Layout.parse(entry.step.layout).mbs % 2 for entry in best} == {0}
    planner = Planner(model=MODEL, machine=MACHINE, job=DPO)
    assert {layout.mbs for _, layout in list_candidates(planner, 4)} == {2}
    assert {row.micro_batch % 2 for row in list_fine_tunes(model=MODEL, machine=MACHINE, job=DPO)} == {0}
    assert find_largest_micro_batch(model=MODEL, machine=MACHINE, job=DPO, layout=Layout.parse("dp4 mbs2")).value == 8


@pytest.mark.parametrize("text", ["pp4 zero0 mbs2 gpipe", "pp4 zero0 mbs2", "pp2 v2 dp2 zero1 mbs2 interleaved"])
def test_the_reference_fills_the_pipeline_once_and_leaves_no_bubble(text: str) -> None:
    """A rank that has run the reference's last micro-batch begins the policy's first while later ranks go on."""
    layout = Layout.parse(text)
    dpo, sft = (Planner(model=MODEL, machine=MACHINE, job=job) for job in (DPO, SFT))
    rows, plain = (build_spans(planner, layout) for planner in (dpo, sft))
    seconds, plain_seconds = (max(row[-1].end for row in ranks) for ranks in (rows, plain))
    for row in rows:
        reference = [span for span in row if span.name.startswith("reference ")]
        assert row[: len(reference)] == tuple(reference)
        assert len(reference) == layout.v * layout.micro_batches(DPO)
    busiest = max(sum(span.seconds for span in row if span.name.startswith("reference ")) for row in rows)
    assert seconds == pytest.approx(dpo.estimate(layout).step_time.seconds)
    assert plain_seconds + 0.9 * busiest < seconds < plain_seconds + 1.1 * busiest
    levels = list_levels(dpo, layout, rank=0)
    assert levels[0].activations_bytes == 0
    stages = tuple(range(layout.pp * layout.v))
    sent, plain_sent = (
        sum(message.times for message in list_messages(planner.counts, layout, chunks=stages) if message.axis == "pp")
        for planner in (dpo, sft)
    )
    assert 2 * sent == 3 * plain_sent


def test_a_sum_of_rewards_over_the_ranks_that_share_sequences_is_the_only_further_message_of_the_policy() -> None:
    layout = Layout.parse("cp4 zero0 mbs2 ac=none")
    counts = [Planner(model=MODEL, machine=MACHINE, job=job).counts for job in (DPO, SFT)]
    dpo, sft = (Counter({(m.collective, m.payload): m.times for m in list_messages(each, layout)}) for each in counts)
    micro_batches = layout.micro_batches(DPO)
    assert dpo["all_reduce", 4 * 2] == micro_batches
    assert sft["all_reduce", 4 * 2] == 0


def test_rewards_are_summed_over_ranks_under_autocast_too() -> None:
    job = DPO.replace(stack="fsdp2", precision="bf16-autocast")
    counts = Planner(model=MODEL, machine=MACHINE, job=Job.model_validate(dict(job))).counts
    messages = list_messages(counts, Layout.parse("dp2 cp2 zero3 mbs2 ac=full"))
    assert sum(message.times for message in messages if (message.axis, message.payload) == ("cp", 4 * 2)) == 8


def test_the_reference_model_of_dpo_runs_before_the_policy() -> None:
    planner = Planner(model=MODEL, machine=MACHINE, job=DPO)
    (row,) = build_spans(planner, Layout.parse("dp4 zero0 mbs2"))
    names = [span.name for span in row]
    assert names[:5] == ["reference F0.0", "reference F0.1", "reference F0.2", "reference F0.3", "F0.0"]
    layout = Layout.parse("dp4 zero0 mbs2")
    assert row[-1].end == pytest.approx(planner.estimate(layout).step_time.seconds)
