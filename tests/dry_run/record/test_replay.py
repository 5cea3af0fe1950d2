"""Blocks that replay a recording compared with blocks that run: event for event the same."""

from __future__ import annotations

from typing import Any

import pytest

from fivefold.dry_run.fake.world import list_representatives
from fivefold.dry_run.rank_tapes import run_rank
from fivefold.dry_run.record.recording import NotReplayable, cut_recording
from fivefold.dry_run.record.tape import ALLOC, FREE, KERNEL, START, Tape
from fivefold.job import Job, get_recipe
from fivefold.layout.spec import Layout
from fivefold.model.experts import MoE
from fivefold.model.latent_attention import MLA
from fivefold.model.spec import Model
from tests.dry_run.record.tape_events import list_events
from tests.selection import mark_share

pytestmark = pytest.mark.slow

DENSE = Model(name="dense", layers=5, width=64, heads=4, kv_heads=2, head_dim=16, ffn=96, vocab=301)
MODELS = {
    "dense": DENSE,
    "tied": DENSE.replace(tied_embeddings=True, qkv_bias=True),
    "moe": DENSE.replace(
        moe=MoE(experts=4, topk=2, ffn=32, shared_experts=1, shared_ffn=32, dense_layers=1, balance="free",
                score="sigmoid"),
        kv_heads=4, mla=MLA(q_rank=32, kv_rank=16, nope_dim=16, rope_dim=8, v_dim=16),
    ),
}  # fmt: skip
CASES = [
    ("dense", "dp2 zero3", True),
    ("dense", "dp2 zero2 mbs2 ac=full", False),
    ("dense", "dp2 zero3 ac=full/2", True),
    ("dense", "tp2 nosp ac=norm+act", True),
    ("dense", "pp2 tp2 cp2", True),
    ("dense", "tp2 cp2 cp=ulysses ac=selective", True),
    ("dense", "pp2 v2 interleaved dp2 zero3", True),
    ("dense", "pp2 zb1p dp2 zero2", True),
    ("tied", "pp2 zbv tp2", True),
    ("tied", "dp2 zero3", True),
    ("moe", "dp2 ep2 zbv pp2 zero1", True),
    ("moe", "dp2 tp2 ep2 etp2 zero1 ac=selective", True),
    ("moe", "dp2 tp2 ep4 zero3 ac=full", True),
    ("moe", "pp2 dualpipe", True),
]


def job_for(layout: Layout) -> Job:
    micro_batches = 4 if layout.pp > 1 else 2
    return Job(sequence=64, global_batch=layout.dp * layout.mbs * micro_batches, precision=get_recipe("bf16"))


@pytest.mark.parametrize(
    ("name", "text", "streams"), mark_share(16, [pytest.param(*case, id=f"{case[0]} {case[1]}") for case in CASES])
)
def test_replayed_blocks_equal_executed_ones(
    name: str, text: str, streams: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout, model = Layout.parse(text), MODELS[name]
    job = job_for(layout)
    recorded = []

    def cut_and_record(*arguments: Any, **options: Any) -> Any:
        recorded.append(cut_recording(*arguments, **options))
        return recorded[-1]

    monkeypatch.setattr("fivefold.dry_run.record.replay.cut_recording", cut_and_record)
    for rank in list_representatives(layout):
        recorded.clear()
        replayed = run_rank(model=model, layout=layout, job=job, rank=rank, streams=streams)
        assert recorded, "nothing was replayed"
        ran = run_rank(model=model, layout=layout, job=job, rank=rank, streams=streams, replay=False)
        assert list_events(replayed.first) == list_events(ran.first)
        assert list_events(replayed.steady) == list_events(ran.steady)


def test_a_block_that_frees_earlier_tensors_is_executed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise NotReplayable

    layout, model = Layout.parse("dp2 zero3"), DENSE.replace(layers=3)
    ran = run_rank(model=model, layout=layout, job=job_for(layout), rank=0, streams=True, replay=False)
    monkeypatch.setattr("fivefold.dry_run.record.replay.cut_recording", refuse)
    fallen_back = run_rank(model=model, layout=layout, job=job_for(layout), rank=0, streams=True)
    assert list_events(fallen_back.steady) == list_events(ran.steady)


def test_other_ranks_of_a_stage_equal_its_first_or_use_less_memory() -> None:
    layout = Layout.parse("dp2 pp2 zero2")
    job = job_for(layout)
    tapes = {
        rank: run_rank(model=DENSE.replace(layers=3), layout=layout, job=job, rank=rank, streams=True).steady
        for rank in range(layout.world)
    }
    for first in list_representatives(layout):
        for rank in range(first, first + layout.world // layout.pp):
            mine, its = _counts(tapes[rank]), _counts(tapes[first])
            assert mine[1:] == its[1:]
            assert mine[0] <= its[0]


def _counts(tape: Tape) -> tuple[int, int, list[tuple[str, str, int, int]]]:
    """Most bytes that live, FLOPs, and what is sent."""
    live, most, sizes, sent = 0, 0, dict[int, int](), list[tuple[str, str, int, int]]()
    for kind, first, second, _ in tape:
        if kind == ALLOC:
            sizes[first] = second
            live += second
        elif kind == FREE:
            live -= sizes[first]
        elif kind == START:
            message = tape.messages[second]
            sent.append((message.axis, message.collective, message.payload, message.numel))
        most = max(most, live)
    return most, sum(tape.kernels[first].flops for kind, first, *_ in tape if kind == KERNEL), sent
