"""Frozen parts of a model: what is trained, stored, computed and sent, against sums written out here."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from fivefold.freeze import parse_part
from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.layout.validity import list_reasons
from fivefold.machine.catalog import resolve
from fivefold.model.catalog import build_model
from fivefold.model.weights import count, resolve_freeze
from fivefold.planner.counts.counts import Counts
from fivefold.planner.counts.flops import work
from fivefold.planner.counts.memory.peak import RankMemory, count_rank_memory
from fivefold.planner.counts.operations.local_shapes import LocalDegrees
from fivefold.planner.counts.traffic import sum_traffic
from fivefold.planner.questions.fine_tune import list_fine_tunes
from fivefold.planner.run_estimate import count_checkpoint_bytes
from fivefold.requests.job import load_job

LLAMA = build_model("llama3-8b")
SMALL = LLAMA.replace(layers=4, width=256, heads=4, kv_heads=2, head_dim=64, ffn=640, vocab=1024)
BLOCK = 2 * 256 * 256 + 2 * 128 * 256 + 3 * 640 * 256 + 2 * 256  # q, out; k, v; gate, up, down; norms
TABLE, TOKENS = 1024 * 256, 512
LAST_TWO = ("embed_tokens", "layers[:-2]", "norm", "lm_head")


def job(*parts: str, **changed: object) -> Job:
    return Job.read({"sequence": TOKENS, "global_batch": 8, "freeze": list(parts), **changed}, origin="test")


def rank_memory(layout: str, chosen: Job) -> RankMemory:
    assert list(list_reasons(Layout.parse(layout), model=SMALL, job=chosen, machine=None)) == []
    (rank,) = count_rank_memory(Counts(SMALL, chosen), Layout.parse(layout))
    return rank


@pytest.mark.parametrize(
    ("parts", "trained"),
    [
        (LAST_TWO, 2 * BLOCK),
        (("layers.mlp",), 2 * TABLE + 256 + 4 * (BLOCK - 3 * 640 * 256)),
        (("layers[1].attention", "layers[2:].q_proj"), 4 * BLOCK + 2 * TABLE + 256 - (BLOCK - 2 * 256 - 3 * 640 * 256)
         - 2 * 256 * 256),
        (("embed_tokens", "layers[-1]", "layers[0].norms"), 3 * BLOCK - 512 + TABLE + 256),
    ],
)  # fmt: skip
def test_memory_counts_gradients_and_moments_of_trained_parameters_only(parts: tuple[str, ...], trained: int) -> None:
    """Sixteen bits of every weight; gradient sums, masters and moments in fp32 of trained ones; a step count each."""
    chosen = job(*parts)
    rank, plan = rank_memory("dp1 ac=full", chosen), work(SMALL, layout=Layout.parse("dp1"), job=chosen)
    assert (plan.trainable_parameters, plan.parameters) == (trained, count(SMALL))
    assert rank.parameters_bytes == 2 * count(SMALL) + 4 * trained
    assert rank.gradients_bytes == 4 * trained
    assert 8 * trained <= rank.optimizer_bytes <= 8 * trained + 4 * (4 * 9 + 3)
    assert count_checkpoint_bytes(SMALL, chosen) == 2 * (count(SMALL) - trained) + 4 * trained + rank.optimizer_bytes
    counts = Counts(SMALL, chosen)
    units = ("embed", *counts.kinds, "head")
    assert sum(op.parameters for name in units for op in counts.unit(LocalDegrees(1), name).ops) == trained


def test_nothing_below_the_lowest_trained_layer_has_a_backward() -> None:
    """The two lowest blocks run forward alone, and the head has no dW."""
    matrices, attention = BLOCK - 512, 2 * 2 * 4 * 64 * TOKENS * TOKENS
    forward = 2 * TOKENS * matrices + attention
    head = 2 * 2 * TOKENS * TABLE
    step = work(SMALL, layout=Layout.parse("dp1"), job=job(*LAST_TWO))
    assert step.model_flops_non_causal == step.hardware_flops == 8 * (2 * forward + 2 * 3 * forward + head)
    recomputed = work(SMALL, layout=Layout.parse("dp1 ac=full"), job=job(*LAST_TWO, early_stop=False))
    assert recomputed.hardware_flops == step.hardware_flops + 8 * 2 * forward
    frozen, full = (rank_memory("dp1", job(*parts)) for parts in (LAST_TWO, ()))
    counts = Counts(SMALL, job())
    block, rest = (counts.profile(LocalDegrees(1), name).kept_bytes for name in (counts.kinds[0], "head"))
    assert full.activations_bytes - frozen.activations_bytes >= 2 * block > rest


def test_frozen_layers_are_gathered_once_and_never_reduced() -> None:
    """ZeRO-3: both ways for the two trained blocks, forward alone for the others; two blocks are reduced."""
    chosen = job(*LAST_TWO)
    sent = {
        (item.axis, item.collective): (item.calls, item.bytes)
        for item in sum_traffic(Counts(SMALL, chosen), Layout.parse("dp4 zero3 mbs1"))
    }
    micro_batches = 2
    assert sent["dp", "all_gather"] == (
        micro_batches * (1 + 2 + 2 * 2 + 1),
        micro_batches * 2 * (2 * TABLE + 256 + (2 + 2 * 2) * BLOCK) * 3 // 4,
    )
    assert sent["dp", "reduce_scatter"] == (2 * micro_batches, micro_batches * 4 * 2 * BLOCK * 3 // 4)


def test_frozen_layers_are_given_as_python_slices() -> None:
    frozen = resolve_freeze(SMALL, ("layers[1:-1].mlp", "layers[-1]", "lm_head"))
    assert [sorted(modules) for modules in frozen.blocks] == [[], ["mlp"], ["mlp"], ["all"]]
    assert (frozen.ends, frozen.first_backward, frozen.trains_embedding) == ({"lm_head"}, 0, True)
    assert resolve_freeze(SMALL, LAST_TWO).first_backward == 2
    assert parse_part("layers[2]").layers == slice(2, 3)
    assert load_job(None, settings=["freeze=embed_tokens,layers[:-2]"]).freeze == ("embed_tokens", "layers[:-2]")
    with pytest.raises(ValidationError, match="is not a part of a model; use embed_tokens"):
        Job(freeze=("layers.norm",))
    with pytest.raises(ValidationError, match="freeze is not supported with an adapter"):
        Job(freeze=("norm",), adapter="lora:8")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("layout", "parts", "changed", "words"),
    [
        ("pp2", LAST_TWO, {"stack": "torchtitan"}, "1 stages that have no backward and the stack torchtitan; train"),
        ("pp2 zb1p", ("norm",), {}, "freeze is not modelled with zb1p"),
        ("dp1", ("norm",), {"precision": "fp8"}, "precision fp8; use bf16"),
    ],
)
def test_unmodelled_frozen_parts_are_one_line_errors(
    layout: str, parts: tuple[str, ...], changed: dict[str, object], words: str
) -> None:
    lines = list(list_reasons(Layout.parse(layout), model=SMALL, job=job(*parts, **changed), machine=None))
    assert len(lines) == 1, lines
    assert words in lines[0]


@pytest.mark.slow
def test_finetune_compares_freezing_with_full_training_and_adapters() -> None:
    machine = resolve("h100:1", local=Path("/nowhere"))
    chosen = job("embed_tokens", "layers[:-2]", "norm", "lm_head", sequence=2048)
    answers = {answer.method: answer for answer in list_fine_tunes(model=LLAMA, machine=machine, job=chosen)}
    assert list(answers) == ["full", "freeze", "lora:16", "qlora:16"]
    assert not answers["full"].micro_batch
    assert answers["freeze"].micro_batch > answers["lora:16"].micro_batch
