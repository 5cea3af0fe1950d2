from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fivefold.dry_run.record.tape import ALLOC, KERNEL, SCOPE, START, WAIT, CodeSite, Kernel, Scope, Tape, TapeMessage
from fivefold.dry_run.time.prices import Pricer
from fivefold.dry_run.time.simulation import SimulatedTapes, simulate
from fivefold.dry_run.time.streams import Costs, Streams
from fivefold.errors import UserError
from fivefold.job import Job
from fivefold.layout.mesh import RankGroup
from fivefold.layout.spec import Layout
from fivefold.machine.catalog import resolve
from fivefold.machine.spec import AttentionPoint, Calibration, KernelPoint, MatmulPoint
from fivefold.model.catalog import build_model
from fivefold.planner.predict import predict
from fivefold.planner.time import roofline
from fivefold.planner.time.compute import find_slowest_chip
from fivefold.planner.time.network import Network
from tests.selection import mark_share

MakeTapes = Callable[..., list[Tape]]
H100 = resolve("h100:16", local=Path())
GLOO = H100.replace(backend="gloo")
SUM = TapeMessage("dp", "d", (0, 1), "all_reduce", "bfloat16", 4, 8, -1, False, 0)
SEND = TapeMessage("pp", "p", (0, 1), "p2p", "bfloat16", 4, 8, 1, False, 0)
RECEIVE = SEND._replace(peer=0, receives=True)
COUNTS = SUM._replace(dtype="int64", axis="ep", group="e")


def tape(rank: int, text: str, message: TapeMessage = SUM) -> Tape:
    """k: a kernel, s and w: start a message and wait for the oldest, u: the update begins."""
    result = Tape(rank)
    result.site(CodeSite("", "own.py:1 run", "aten::mm"))
    result.kernel(Kernel("moving", (), "bfloat16", 0, 8, 1, 0))
    result.message(message)
    result.add(SCOPE, result.scope(Scope("forward", 0, 0)))
    started = waited = 0
    for letter in text:
        if letter == "k":
            result.add(KERNEL, 0)
        elif letter == "s":
            result.add(START, started, 0, -1)
            started += 1
        elif letter == "w":
            result.add(WAIT, waited)
            waited += 1
        else:
            result.add(SCOPE, result.scope(Scope("update")))
    return result


def costs(
    *,
    kernel: float = 1.0,
    message: float = 3.0,
    message_launch_seconds: float = 0.0,
    compute_slowdown: float = 0.0,
    **also: bool,
) -> Costs:
    return Costs(
        [kernel],
        [message_launch_seconds],
        [message],
        [compute_slowdown],
        [also.get("host_waits", False)],
        message_launch_seconds,
        also.get("is_blocking", False),
    )


def simulate_with_costs(
    *tapes: Tape, streams: bool = True, each: list[Costs] | None = None, **also: float | bool
) -> SimulatedTapes:
    engine = Streams(tapes, streams=streams, costs=each or [costs(**also)] * len(tapes))  # type: ignore[arg-type]
    assert engine.run()
    return SimulatedTapes(engine)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("kskkkkw", 5.0),  # all hidden
        ("kskw", 4.0),  # kernel, then the message concurrent with the second
        ("ksswkw", 7.0),  # two on one stream: 1 + 3 + 3
        ("kswksw", 8.0),
    ],
)
def test_messages_overlap_compute(text: str, seconds: float) -> None:
    result = simulate_with_costs(tape(0, text))
    assert result.step_seconds == seconds
    (rank,) = result.ranks
    assert rank.compute == text.count("k")
    assert rank.exposed.get("dp", 0.0) == seconds - text.count("k")
    assert rank.bubble == rank.update == 0


def test_gloo_messages_block_the_waiting_rank() -> None:
    assert simulate_with_costs(tape(0, "kskkkkw"), streams=False).step_seconds == 8.0


def test_a_collective_begins_when_its_last_rank_has_arrived() -> None:
    result = simulate_with_costs(tape(0, "ksw"), tape(1, "kkkkksw"))
    early, late = result.ranks
    assert result.step_seconds == 8.0
    assert (early.compute, early.bubble, early.exposed["dp"]) == (1.0, 4.0, 3.0)
    assert (late.compute, late.bubble, late.exposed["dp"]) == (5.0, 0.0, 3.0)
    assert result.time().compute_seconds == 5.0


def test_pipeline_bubbles_are_simulated_as_waits() -> None:
    result = simulate_with_costs(tape(0, "kks", SEND), tape(1, "swkukk", RECEIVE))
    first, second = result.ranks
    assert result.step_seconds == 8.0  # 2 + 3 + 1 + 2
    assert (first.compute, first.bubble) == (2.0, 6.0)
    assert (second.compute, second.bubble, second.update) == (1.0, 5.0, 2.0)
    assert all(rank.seconds == result.step_seconds for rank in result.ranks)
    late = result.seconds_at(1)
    assert late.tolist() == [0.0, 0.0, 5.0, 6.0, 6.0, 7.0, 8.0]
    spans = [(span.kind, span.start, span.end) for span in result.spans(1) if span.kind in (START, SCOPE)]
    assert spans == [(START, 2.0, 5.0), (SCOPE, 0.0, 6.0), (SCOPE, 6.0, 8.0)]


def test_the_host_runs_ahead_until_it_reads_a_result() -> None:
    kernels = "k" * 10
    assert simulate_with_costs(tape(0, kernels), message_launch_seconds=0.5).step_seconds == 10.5
    assert simulate_with_costs(tape(0, kernels), message_launch_seconds=2.0).step_seconds == 21.0
    assert simulate_with_costs(tape(0, kernels), message_launch_seconds=0.5, is_blocking=True).step_seconds == 15.0
    text = kernels + "sw" + kernels
    assert simulate_with_costs(tape(0, text), message_launch_seconds=0.75).step_seconds == pytest.approx(
        23.75
    )  # the host has run far ahead
    assert simulate_with_costs(
        tape(0, text), message_launch_seconds=0.75, host_waits=True
    ).step_seconds == pytest.approx(24.5)


def test_overlapped_messages_slow_compute() -> None:
    assert simulate_with_costs(tape(0, "kskkkkw"), compute_slowdown=0.1).step_seconds == pytest.approx(5.3)
    assert simulate_with_costs(tape(0, "kskw"), compute_slowdown=0.1).step_seconds == pytest.approx(
        4.1
    )  # a third is hidden


def test_simulating_a_deadlock_is_an_error() -> None:
    with pytest.raises(UserError, match="deadlock of rank"):
        simulate([tape(0, "sw", RECEIVE._replace(peer=1)), tape(1, "sw", RECEIVE)], machine=H100, job=Job(), world=2)


# Prices


def test_kernels_and_messages_take_the_times_of_the_planner() -> None:
    pricer, chip = Pricer(machine=H100, job=Job(), world=16), find_slowest_chip(H100)
    assert pricer.price_kernel(
        Kernel("matmul", (4096, 1024, 512, 2), "bfloat16", 0, 0, 1, 0)
    ) == roofline.estimate_matmul(chip, m=4096, n=1024, k=512, dtype="bf16", batch=2)
    assert pricer.price_kernel(Kernel("moving", (), "float32", 0, 10**9, 1, 0)) == roofline.estimate_memory_bound(
        chip, moved_bytes=10**9
    )
    full = 4 * 8 * 2048 * 2048 * 128
    whole = {"tokens": 2048, "keys": 2048, "head_dim": 128, "dtype": "bf16"}
    causal = Kernel("attention", (8, 2048, 2048, 128), "bfloat16", full, 0, 1, 0)
    assert pricer.price_kernel(causal) == roofline.estimate_attention(chip, flops=full / 2, **whole)  # type: ignore[arg-type]
    back = causal._replace(kind="attention_backward", flops=2 * full)
    assert pricer.price_kernel(back) == roofline.estimate_attention(chip, flops=full / 2, **whole, backward=True)  # type: ignore[arg-type]
    block = causal._replace(shape=(8, 2048, 1024, 128), flops=full // 2)  # of a ring: all is seen
    assert pricer.price_kernel(block) == roofline.estimate_attention(chip, flops=full / 2, **{**whole, "keys": 1024})  # type: ignore[arg-type]
    network = Network(H100)
    gather = TapeMessage("dp", "d", tuple(range(0, 16, 2)), "all_gather", "bfloat16", 2**20, 2**21, -1, False, 0)
    assert pricer.price_message(gather, rank=0) == network.seconds("all_gather", 2**21, RankGroup(8, 2))
    near, far = (SEND._replace(peer=peer, payload=2**24) for peer in (7, 8))
    assert pricer.price_message(near, rank=4) == network.seconds("p2p", 2**24, RankGroup(2, 3))
    assert pricer.price_message(far, rank=7) == network.seconds(
        "p2p", 2**24, RankGroup(2, 8)
    )  # neighbours in two nodes
    assert pricer.price_message(far, rank=7) > pricer.price_message(near, rank=4)


def test_a_calibrated_machine_answers_with_what_it_measured() -> None:
    measured = Calibration(
        date="",
        torch="",
        cores=1,
        matmuls=(MatmulPoint(dtype="bf16", ranks=2, m=64, n=32, k=16, seconds=0.25),),
        attentions=(
            AttentionPoint(
                dtype="bf16",
                ranks=2,
                sequences=1,
                tokens=64,
                heads=4,
                kv_heads=4,
                head_dim=8,
                forward_seconds=0.5,
                backward_seconds=0.75,
            ),
        ),
        kernels=(
            KernelPoint(kernel="copy", dtype="fp32", ranks=2, moved_bytes=1024, seconds=0.125),
            KernelPoint(kernel="swiglu", dtype="bf16", ranks=2, moved_bytes=1024, seconds=2.0),
        ),
    )
    pricer = Pricer(machine=GLOO.replace(calibration=measured), job=Job(), world=2)
    assert pricer.price_kernel(Kernel("matmul", (64, 32, 16, 2), "bfloat16", 0, 0, 1, 0)) == pytest.approx(0.5)
    full = 4 * 4 * 64 * 64 * 8
    forward = Kernel("attention", (4, 64, 64, 8), "bfloat16", full, 0, 1, 0)
    assert pricer.price_kernel(forward) == pytest.approx(0.5)
    assert pricer.price_kernel(forward._replace(kind="attention_backward", flops=2 * full)) == pytest.approx(0.75)
    moving = Kernel("moving", (), "bfloat16", 0, 1024, 3, 0)
    assert pricer.price_kernel(moving) == pytest.approx(0.125)
    assert pricer.price_kernel(moving, line="activations.py:20 _Gated.forward") == pytest.approx(2.0)
    assert pricer.kernel_launch_seconds == 0.0


# Full steps


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp2", "tp2 pp2"])
def test_a_simulated_step_takes_about_as_long_as_the_planner_predicts(layout: str, make_tapes: MakeTapes) -> None:
    """With kernels that do not launch in vain: a model wide enough, of which shapes alone are needed."""
    model, result = build_model("llama3-8b").replace(layers=2), Layout.parse(layout)
    job = Job(sequence=4096, global_batch=4)
    tapes = make_tapes(layout, model, job=job, all_ranks=False)
    step = simulate(tapes, machine=H100, job=job, world=result.world)
    planned = predict(model=model, machine=H100, layout=result, job=job).time
    assert step.step_seconds == pytest.approx(planned.step_seconds, rel=0.15)
    assert step.time().compute_seconds == pytest.approx(planned.compute_seconds, rel=0.2)


@pytest.mark.slow
@pytest.mark.parametrize("layout", mark_share(2, ["tp2 pp2", "pp2 zbv"]))
def test_replicas_are_in_lockstep(layout: str, make_tapes: MakeTapes) -> None:
    every, some = (make_tapes(layout, all_ranks=item) for item in (True, False))
    world = Layout.parse(layout).world
    whole, short = (simulate(tapes, machine=H100, job=Job(), world=world) for tapes in (every, some))
    assert short.step_seconds == pytest.approx(whole.step_seconds, rel=1e-3)  # vocabularies are cut unevenly


@pytest.mark.slow
@pytest.mark.parametrize("machine", [H100, GLOO], ids=["nccl", "gloo"])
def test_the_parts_of_every_rank_add_up_to_the_step_time(machine: object, make_tapes: MakeTapes) -> None:
    step = simulate(make_tapes("tp2 pp2"), machine=machine, job=Job(), world=4)  # type: ignore[arg-type]
    for place, rank in enumerate(step.ranks):
        assert rank.seconds == pytest.approx(step.step_seconds)
        assert min(rank.compute, rank.bubble, rank.update, *rank.exposed.values()) >= 0
        at = step.seconds_at(rank.rank)
        assert len(at) == len(step.tapes[place])
        assert np.all(np.diff(at) >= 0)
    assert step.time().step_seconds == step.step_seconds


@pytest.mark.long  # a speed
@pytest.mark.slow
def test_a_million_events_are_simulated_in_seconds() -> None:
    tapes = [tape(rank, "kkskkw" * 50_000) for rank in (0, 1)]
    for item in tapes:
        for storage in range(200_000):
            item.add(ALLOC, storage, 8, 0)
    begin = time.perf_counter()
    result = simulate_with_costs(*tapes)
    assert time.perf_counter() - begin < 20  # 2 on one core that does nothing else
    assert result.step_seconds == pytest.approx(50_000 * 5)
