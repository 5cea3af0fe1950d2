"""Forward and backward under FB change at waits for messages: alone, over a slow network, and in the trainer."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.errors import UserError
from fivefold.layout.schedule import schedule
from fivefold.layout.schedule.csv_file import read_table
from fivefold.layout.spec import Layout
from fivefold.trainer.build import build
from fivefold.trainer.engine import Engine
from fivefold.trainer.measure.meter import Meter
from fivefold.trainer.model.linear import Linear, WgradStore, fused_linears, mark_recomputation
from fivefold.trainer.parallel.collectives import all_reduce
from fivefold.trainer.parallel.interleave import Interleaver
from fivefold.trainer.parallel.mesh import AxisGroup, create_ranks
from fivefold.trainer.parallel.pipeline import Pipeline, check_pairs
from tests import processes
from tests.agree.parity.cases import Case, ShortCase, rows
from tests.agree.parity.compare import judge
from tests.agree.parity.rank import train_rank
from tests.selection import mark_share

ROWS, D = 6, 16


def work(
    interleaver: Interleaver, name: str, parts: int, said: list[str], *, fails: bool = False
) -> Callable[[], None]:
    def run() -> None:
        for part in range(parts):
            said.append(f"{name}{part}")
            if part < parts - 1:
                interleaver.yield_turn()
        if fails:
            raise ValueError(f"{name} fails")

    return run


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (3, 3, "a0 b0 a1 b1 a2 b2"),
        (2, 4, "a0 b0 a1 b1 b2 b3"),
        (4, 2, "a0 b0 a1 b1 a2 a3"),
        (1, 1, "a0 b0"),
    ],
)
def test_paired_micro_batches_alternate_at_each_wait(first: int, second: int, expected: str) -> None:
    interleaver = Interleaver()
    for _ in range(2):
        said = list[str]()
        interleaver.run_both(work(interleaver, "a", first, said), work(interleaver, "b", second, said))
        assert said == expected.split()
        interleaver.yield_turn()  # outside: nothing


@pytest.mark.parametrize(
    ("failing", "parts", "expected"),
    [
        ("a", (2, 3), "a0 b0 a1"),
        ("a", (3, 1), "a0 b0 a1 a2"),
        ("b", (2, 3), "a0 b0 a1 b1 b2"),
        ("b", (4, 2), "a0 b0 a1 b1"),
        ("ab", (2, 2), "a0 b0 a1"),
    ],
)
def test_a_failing_micro_batch_ends_its_pair(failing: str, parts: tuple[int, int], expected: str) -> None:
    interleaver, said, before = Interleaver(), list[str](), threading.active_count()
    a, b = (work(interleaver, name, n, said, fails=name in failing) for name, n in zip("ab", parts, strict=True))
    for _ in range(2):  # and the next two are not stopped
        with pytest.raises(ValueError, match=f"{failing[0]} fails"):
            interleaver.run_both(a, b)
        assert said == expected.split()
        interleaver.yield_turn()
        said.clear()
    assert threading.active_count() == before


def test_an_error_in_a_paired_backward_is_raised() -> None:
    """Where the backward waits, and where it computes."""

    class Waits(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, fails: bool) -> Tensor:
            ctx.fails = fails
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
            interleaver.yield_turn()
            if ctx.fails:
                raise ValueError("backward fails")
            said.append("backward")
            return gradients[0], None

    def forward() -> None:
        said.append("forward")
        interleaver.yield_turn()
        raise KeyError("forward fails")

    interleaver, said = Interleaver(), list[str]()
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(KeyError):
        interleaver.run_both(forward, Waits.apply(x, False).sum().backward)  # type: ignore[no-untyped-call]
    with pytest.raises(ValueError, match="backward fails"):
        interleaver.run_both(interleaver.yield_turn, Waits.apply(x, True).sum().backward)  # type: ignore[no-untyped-call]
    assert said == ["forward"]


def test_ctrl_c_ends_both_paired_micro_batches() -> None:
    """It comes to the first, which waits for its turn while the second computes."""
    interleaver, said = Interleaver(), list[str]()

    def second() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.2)
        said.append("second computes")
        interleaver.yield_turn()
        said.append("second goes on")

    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt):
        interleaver.run_both(interleaver.yield_turn, second)
    signal.signal(signal.SIGINT, former)
    assert said == ["second computes"]


def test_work_of_the_second_micro_batch_is_counted() -> None:
    x = torch.ones(8, 8)
    with Meter([x], axis=lambda _: "") as meter:
        Interleaver().run_both(lambda: None, lambda: (x @ x, None)[1])
    assert meter.flops == 2 * 8**3


def test_messages_of_recomputation_are_reported_once() -> None:
    """The backward computes again while the forward does not."""
    interleaver, model = Interleaver(), Linear(2, 2, bias=False)
    entered = []

    def forward() -> None:
        interleaver.yield_turn()
        entered.append(fused_linears(x, model)[0].grad_fn.entered)

    def backward() -> None:
        assert torch.is_grad_enabled()
        with mark_recomputation():
            interleaver.yield_turn()
            entered.append(fused_linears(x, model)[0].grad_fn.entered)

    x = torch.ones(1, 2, requires_grad=True)
    interleaver.run_both(forward, backward)
    assert entered == [False, True]


def test_weights_of_one_stage_are_not_used_by_both(tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_text("F0.0,F0.1+BW0.0,BW0.1\n")
    mine = read_table(tmp_path / "mine.csv")
    with pytest.raises(UserError, match=r"mine runs F0\.1\+BW0\.0, a forward and a backward of the same stage 0"):
        check_pairs(mine)
    with pytest.raises(UserError, match="1f1b does not run a forward together with a backward; try dualpipe"):
        check_pairs(schedule("1f1b", pp=2, v=1, micro_batches=2))


# ---- a slow network


class Spoken(torch.autograd.Function):
    """tanh(x W / 2), summed over two ranks that hold half of it each, forward; the gradient likewise."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, half: Tensor, talk: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.save_for_backward(x, half)
        ctx.talk = talk
        return talk(x @ half)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        x, half = ctx.saved_tensors
        return ctx.talk(gradients[0] @ half.t()), x.t() @ gradients[0], None


def speak(delay_seconds: float) -> tuple[float, float]:
    """In a child of pp2 tp2: seconds of a step apart, and with pairs; the gradients are the same."""
    results, gradients = [], []
    table = schedule("dualpipev", pp=2, v=2, micro_batches=6)
    for pairs in (False, True):
        among = create_ranks(Layout.parse("pp2 tp2 v2 dualpipev"), kv_heads=4, device=torch.device("cpu"), pairs=pairs)
        generator = torch.Generator().manual_seed(among["pp"].rank)
        held = {
            stage: (torch.randn(D, D, generator=generator) / 4).requires_grad_()
            for stage in table.rank_stages[among["pp"].rank]
        }

        def talk(x: Tensor, axis: AxisGroup = among["tp"]) -> Tensor:
            begin, pending = time.monotonic(), all_reduce(x / 2, axis)
            x = pending.wait()
            time.sleep(max(0.0, begin + delay_seconds - time.monotonic()))
            return x

        def stage(number: int, entry: Tensor | None, _: int, held: dict[int, Tensor] = held) -> Tensor:
            x = torch.ones(ROWS, D) if entry is None else entry
            for _ in range(3):
                x = torch.tanh(Spoken.apply(x, held[number], talk))  # type: ignore[no-untyped-call]
            return x.square().mean() if number == 3 else x

        pipeline = Pipeline(
            table,
            ranks=among,
            wgrad_store=WgradStore(),
            shape=(ROWS, D),
            dtype=torch.float32,
            stages={number: partial(stage, number) for number in held},
        )
        dist.barrier()
        begin = time.monotonic()
        pipeline.step()
        results.append(time.monotonic() - begin)
        gradients.append([held[number].grad for number in sorted(held)])
    for apart, paired in zip(*gradients, strict=True):
        assert torch.equal(apart, paired)
    return results[0], results[1]


def test_paired_micro_batches_overlap_slow_messages(forked: Callable[..., Any]) -> None:
    """A rank has 7 FB of 3 + 3 messages, of which 3 are seen, and 5 F and 5 BW of 3: 51 delays instead of 72."""
    for apart, paired in forked(4, speak, 0.02):
        assert paired < 0.85 * apart


# ---- the trainer


def record_messages(case: Case, pairs: bool) -> tuple[int, list[tuple[str, str]]]:
    """In a child: rank of the pipeline, and axis and collective of all that it says in a step."""
    job = case.job.replace(pairs=pairs)
    model = case.model.replace(layers=4)  # one of each stage
    built = build(model=model, layout=case.layout, job=job, device=torch.device("cpu"))
    engine = Engine(built, model=model, layout=case.layout, job=job)
    said = list[tuple[str, str]]()

    class Order(Meter):
        def _count_message(self, func: Any, args: Any) -> None:
            before = Counter(self._messages)
            super()._count_message(func, args)
            said.extend(self._messages - before)

    with Order([], axis=built.ranks.axis):
        engine.step(rows(job, case.layout, step=0, dp_rank=built.ranks["dp"].rank))
    return built.ranks["pp"].rank, said


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    mark_share(
        3,
        [
            ShortCase("moe", "dp2 pp2 ep2 dualpipe zero2"),
            Case("moe", "dp2 pp2 ep2 dualpipev zero2"),
            Case("moe", "tp2 pp2 dualpipe ac=selective"),
        ],
    ),
    ids=str,
)
def test_ranks_of_a_stage_communicate_in_one_order(case: Case) -> None:
    paired, apart = (processes.run_forked(4, record_messages, case, pairs) for pairs in (True, False))
    for rank in range(2):
        one, other = (said for place, said in paired if place == rank)
        before, _ = (said for place, said in apart if place == rank)
        assert one == other
        assert Counter(one) == Counter(before)
        assert rank == 0 or one != before  # stage 0 has no experts


@pytest.mark.parametrize(
    "case",
    mark_share(
        6,
        [
            ShortCase("dense", "pp2 dualpipe ac=full"),
            Case("tied", "tp2 pp2 dualpipev ac=qkv+core"),
            Case("biased", "cp2 pp2 dualpipe"),
            Case("moe-free", "tp2 pp2 ep2 dualpipe ac=moe"),
            Case("moe", "dp2 pp2 ep2 dualpipev zero3 ac=full"),
        ],
    ),
    ids=str,
)
def test_training_with_paired_micro_batches_equals_one_process(case: Case) -> None:
    """Losses, gradients and messages; and the work of the full step is metered, in both threads."""
    job = case.job.replace(pairs=True)
    paired = processes.run_forked(case.layout.world, train_rank, case.model, case.layout, job)
    verdict = judge(case, paired)
    assert verdict.is_equal, verdict
    assert verdict.said == ()
    apart = processes.run_forked(case.layout.world, train_rank, case.model, case.layout, case.job)
    assert [(one.traffic, one.flops, one.forwards, one.cores) for one in paired] == [
        (one.traffic, one.flops, one.forwards, one.cores) for one in apart
    ]
