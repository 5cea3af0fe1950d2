"""The trace of a step against what it must have been: the schedule's table, the planner's operations, the meter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # once, before any fork

from fivefold.job import Job, get_recipe
from fivefold.layout.schedule import schedule
from fivefold.layout.spec import Layout
from fivefold.model.experts import MoE
from fivefold.model.latent_attention import MLA
from fivefold.model.spec import Model
from fivefold.planner.counts.counts import Counts, get_group_degrees
from fivefold.planner.counts.operations.local_shapes import get_local_degrees
from fivefold.profiling.attribution import rank_times, split, summarize_rank
from fivefold.results.spans import RankStep, RankTrace, Span
from fivefold.step import Traffic
from fivefold.trainer.build import build
from fivefold.trainer.data.prepare import prepare
from fivefold.trainer.data.shards import Shards
from fivefold.trainer.faults.spikes import BadLoss
from fivefold.trainer.logs.run_log import NoLogs
from fivefold.trainer.loop import Loop
from fivefold.trainer.model.operation import call_directly
from fivefold.trainer.run import Run
from tests.selection import mark_share

Fork = Callable[..., list[Any]]
DENSE = Model(name="dense", layers=4, width=32, heads=4, kv_heads=2, head_dim=8, ffn=64, vocab=256)
NORMED = DENSE.replace(name="normed", layers=2, qk_norm="head", tied_embeddings=True)
SPARSE = DENSE.replace(
    name="sparse", layers=2, moe=MoE(experts=4, topk=2, ffn=16, balance="free", shared_experts=1, dense_layers=1)
)
LATENT = DENSE.replace(name="latent", layers=2, mla=MLA(q_rank=16, kv_rank=16, nope_dim=8, rope_dim=4, v_dim=8))
# What the trainer does in addition to the planner's operations: copies of data parallelism, and around messages.
BESIDE = {
    "weights.gather", "gradients.sum", "moe.plan", "moe.balance", "attention.enter", "attention.leave", "moe.send",
    "moe.arrive", "moe.return",
}  # fmt: skip
CASES = [
    (DENSE, "mbs2"), (NORMED, "mbs4 ac=qkv+norm"), (DENSE, "dp2 zero3 mbs1"), (DENSE, "dp2 zero0 mbs2"),
    (DENSE, "tp2 mbs2"), (NORMED, "tp2 nosp mbs2"), (DENSE, "pp2 zb1p mbs1 ac=full"),
    (DENSE, "pp2 v2 interleaved mbs1"), (DENSE, "cp2 mbs2"), (DENSE, "cp2 cp=ulysses mbs2"),
    (SPARSE, "dp2 ep2 zero1 mbs1"), (SPARSE, "pp2 zb1p mbs1"), (LATENT, "tp2 mbs2"),
]  # fmt: skip


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    for number in range(20):
        (folder / f"{number}.txt").write_text(f"document {number} says: " + "all work and no play. " * 40)
    return folder


def build_loop(run: Run, model: Model, layout: Layout) -> Loop:
    built = build(model=model, layout=layout, job=run.job, device=torch.device("cpu"))
    shards = Shards.open(run.folder / "data")
    return Loop(run, model=model, layout=layout, built=built, shards=shards, logs=NoLogs(), ideal_seconds=1.0)


def trace_run(run: Run, model: Model, layout: Layout) -> tuple[RankTrace, tuple[Traffic, ...]]:
    outcome = build_loop(run, model, layout).train()
    assert outcome.measured is not None
    return outcome.trace, outcome.measured.traffic


def make_run(folder: Path, corpus: Path, **changes: Any) -> Run:
    job = Job(**{"sequence": 32, "global_batch": 4, "steps": 5, "precision": get_recipe("bf16"), **changes})
    run = Run(folder=folder, job=job, evaluate_sequences=4)
    prepare(str(corpus), directory=run.folder / "data", holdout=0.2)
    return run


@pytest.mark.parametrize(("model", "text"), mark_share(9, CASES), ids=lambda value: getattr(value, "name", value))
def test_a_trace_has_all_actions_messages_and_seconds_of_the_step(
    forked: Fork, corpus: Path, tmp_path: Path, model: Model, text: str
) -> None:
    layout, run = Layout.parse(text), make_run(tmp_path / "run", corpus)
    result = forked(layout.world, trace_run, run, model, layout)
    for trace, traffic in result:
        (step,) = trace.steps
        check_adds_up(step)
        assert list(actions(step)) == list_actions(layout, run.job, trace.stage)
        names = count_planned(model, layout, run.job, trace.stage)
        ways = {way: operations(step, way) for way in ("forward", "backward", "recomputed", "weight")}
        assert ways["forward"] == names["forward"]
        assert ways["backward"] == backwards(names["forward"])
        assert ways["recomputed"] == names["recomputed"]
        assert ways["weight"] == names["weight"]
        metered = {(item.axis, item.collective): (item.calls, item.bytes) for item in traffic}
        sent = sum_sent(step)
        if model.moe:  # how many rows go to which rank differs from step to step
            rows = sent.pop(("ep", "all_to_all"), (0, 0)), metered.pop(("ep", "all_to_all"), (0, 0))
            assert rows[0] == (rows[1][0], pytest.approx(rows[1][1], rel=0.2))
        assert sent == metered
        assert all(m.begun <= m.posted <= m.waits <= m.done for m in step.messages)
    times = rank_times([summarize_rank(trace) for trace, _ in result])
    for one in times:
        spent = sum(item.seconds for item in one.items) + one.bubble + sum(one.messages("exposed").values())
        assert spent == pytest.approx(one.step, rel=1e-9)
    whole = split(times, step_seconds=1.0)
    assert sum(whole.parts.values()) == pytest.approx(1.0, rel=1e-9)
    named = whole.compute_seconds + whole.bubble_seconds + whole.optimizer_seconds + whole.data_seconds
    assert named + whole.host_seconds + sum(whole.exposed_seconds.values()) == pytest.approx(1.0, rel=1e-9)


@pytest.mark.long  # paired micro-batches are metered in parity tests
def test_paired_micro_batches_are_traced_with_every_second_counted_once(
    forked: Fork, corpus: Path, tmp_path: Path
) -> None:
    """In an FB whose halves take turns each half nests for itself, and every second is counted once."""
    layout, run = Layout.parse("pp2 v2 dualpipev mbs1"), make_run(tmp_path / "run", corpus, pairs=True)
    for trace, traffic in forked(2, trace_run, run, DENSE, layout):
        (step,) = trace.steps
        assert actions(step) == list_actions(layout, run.job, trace.stage)
        assert any(span.kind == "FB" for span in step.spans)
        assert sum(span.own for span in step.spans) == pytest.approx(step.seconds, rel=1e-9)
        for span in step.spans[1:]:
            around = step.spans[span.within]
            assert around.start <= span.start <= span.end <= around.end
        assert sum_sent(step) == {(item.axis, item.collective): (item.calls, item.bytes) for item in traffic}
        names = count_planned(DENSE, layout, run.job, trace.stage)
        assert operations(step, "forward") == names["forward"]
        assert operations(step, "backward") == backwards(names["forward"])


@pytest.mark.long  # one operation of a trace
def test_an_input_gathered_in_fp8_is_traced_with_its_cast(forked: Fork, corpus: Path, tmp_path: Path) -> None:
    layout, run = (
        Layout.parse("tp2 mbs2"),
        make_run(tmp_path / "run", corpus, precision=get_recipe("fp8-rowwise"), emulate=True),
    )
    model = DENSE.replace(layers=1)
    for trace, traffic in forked(2, trace_run, run, model, layout):
        (step,) = trace.steps
        check_adds_up(step)
        names = count_planned(model, layout, run.job, trace.stage)
        assert operations(step, "forward") == names["forward"]
        assert operations(step, "weight") == names["weight"]
        assert sum_sent(step) == {(item.axis, item.collective): (item.calls, item.bytes) for item in traffic}


@pytest.mark.long  # tests of linear layers train compiled blocks
@pytest.mark.filterwarnings("ignore")  # torch warns itself when it compiles
def test_a_compiled_block_is_one_operation_but_for_the_gemms_of_its_backward(
    forked: Fork, corpus: Path, tmp_path: Path
) -> None:
    """After the metered step, which ran uncompiled; in fp32, whose weight gradients are made in their sums."""
    run = make_run(tmp_path / "run", corpus, compile=True, precision=get_recipe("fp32"))
    ((trace, _),) = forked(1, trace_compiled, run, DENSE.replace(layers=1), Layout.parse("mbs2"))
    (step,) = trace.steps
    check_adds_up(step)
    gemms = [f"attention.{name}" for name in ("q", "k", "v", "out")] + [
        f"mlp.{name}" for name in ("gate", "up", "down")
    ]
    expected = {
        "forward": [*OUTSIDE, "block"],
        "backward": [*gemms, *OUTSIDE, "block"],
        "weight": [*gemms, "head.out"],
    }
    for way, names in expected.items():
        assert operations(step, way) == Counter(names * 2), "two micro-batches"


def trace_compiled(run: Run, model: Model, layout: Layout) -> tuple[RankTrace, tuple[Traffic, ...]]:
    """As ``trace_run``, without the seconds that a compiler of kernels takes."""
    torch.compile = partial(torch.compile, backend="aot_eager")
    return trace_run(run, model, layout)


OUTSIDE = ("embed.tokens", "head.norm", "head.out", "loss")


def test_a_short_run_traces_its_last_step_and_a_long_one_every_other(
    forked: Fork, corpus: Path, tmp_path: Path
) -> None:
    for steps, wanted, timed in ((3, [], 0), (4, [3], 0), (12, [4, 6, 8], 6)):
        run = make_run(tmp_path / str(steps), corpus, steps=steps)
        assert forked(1, list_traced_steps, run) == [(wanted, timed)]
    run = make_run(tmp_path / "more", corpus, steps=14).replace(trace_steps=5)
    assert forked(1, list_traced_steps, run) == [([4, 6, 8, 10, 12], 6)]


def list_traced_steps(run: Run) -> tuple[list[int], int]:
    """The steps that are traced, and how many are timed; no attribute of the trainer is replaced afterwards."""
    loop = build_loop(run, DENSE.replace(layers=1), Layout.parse("mbs4"))
    before = {name: vars(loop.engine).get(name) for name in ("sum_norm", "update", "_balance")}
    outcome = loop.train()
    assert before == {name: vars(loop.engine).get(name) for name in before}
    assert all(part.run is call_directly for part in loop.built.module.modules() if hasattr(part, "run"))
    assert loop.built.ranks.listener.post is None
    assert outcome.step_seconds == (None if run.job.steps == 3 else pytest.approx(outcome.step_seconds))
    return [step.step for step in outcome.trace.steps], len(loop.seconds)


def test_a_skipped_step_is_not_part_of_the_trace(forked: Fork, corpus: Path, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", corpus, steps=8).replace(faults={"on_spike": "skip"})
    assert forked(1, trace_spoilt, run) == [[4, 6]]


def trace_spoilt(run: Run) -> list[int]:
    """A run whose step 4, the first that is traced, has a loss that is not wanted, and runs again."""
    loop = build_loop(run, DENSE.replace(layers=1), Layout.parse("mbs4"))
    inner = loop.guard.judge

    def judge(loss: float, norm: float) -> BadLoss | None:
        return BadLoss("skip", "planted") if loop.step == 4 and not loop.guard.rollbacks else inner(loss, norm)

    loop.guard.judge = judge  # type: ignore[method-assign]
    return [step.step for step in loop.train().trace.steps]


def check_adds_up(step: RankStep) -> None:
    """Spans lie within those around them, side by side, and what each has to itself adds up to the step."""
    assert step.spans[0].kind == "step"
    assert step.spans[0].within == -1
    inside: dict[int, list[Span]] = {}
    for span in step.spans[1:]:
        inside.setdefault(span.within, []).append(span)
    for index, span in enumerate(step.spans):
        at, covered = span.start, 0.0
        for item in inside.get(index, []):
            assert at <= item.start <= item.end <= span.end, (span, item)
            at, covered = item.end, covered + item.seconds
        assert span.own == pytest.approx(span.seconds - covered, abs=1e-9)
    assert sum(span.own for span in step.spans) == pytest.approx(step.seconds, rel=1e-9)


def actions(step: RankStep) -> list[str]:
    return [span.name for span in step.actions()]


def list_actions(layout: Layout, job: Job, stage: int) -> list[str]:
    table = schedule(layout.schedule, pp=layout.pp, v=layout.v, micro_batches=layout.micro_batches(job))
    return [str(action) for action in table.rows[stage]]


def backwards(names: Counter[str]) -> Counter[str]:
    """Those that have work to do in the backward: a sum hands its gradient on."""
    return Counter({name: number for name, number in names.items() if not name.endswith(".add")})


def operations(step: RankStep, way: str) -> Counter[str]:
    return Counter(s.name for s in step.spans if s.kind == "op" and s.way == way and s.name not in BESIDE)


def count_planned(model: Model, layout: Layout, job: Job, rank: int) -> dict[str, Counter[str]]:
    """The planner's operations of all micro-batches on a pipeline rank: all, recomputed ones, those with a dW apart."""
    counts, micro_batches = Counts(model, job), layout.micro_batches(job)
    result: dict[str, Counter[str]] = {way: Counter() for way in ("forward", "recomputed", "weight")}
    table = schedule(layout.schedule, pp=layout.pp, v=layout.v, micro_batches=micro_batches)
    for stage in table.rank_stages[rank]:
        for run, times in counts.stage_work(layout)[stage]:
            for op in counts.unit(get_group_degrees(get_local_degrees(layout), run), run.name).ops:
                if op.kind == "message":
                    continue
                result["forward"][op.name] += times * micro_batches
                if op.recomputed:
                    result["recomputed"][op.name] += times * micro_batches
                if op.kind == "matmul" and (op.name != "moe.router" or layout.schedule == "zb1p"):
                    result["weight"][op.name] += times * micro_batches
    return result


def sum_sent(step: RankStep) -> dict[tuple[str, str], tuple[int, int]]:
    result: dict[tuple[str, str], tuple[int, int]] = {}
    for message in step.messages:
        if message.number:
            number, size = result.get((message.axis, message.collective), (0, 0))
            result[message.axis, message.collective] = number + message.number, size + message.bytes
    return result
