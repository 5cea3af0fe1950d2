"""Forward and backward under FB change at waits for messages: alone, and in DualPipe over tensor ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.layout.schedule import schedule
from fivefold.layout.spec import Layout
from fivefold.train.linear import Later
from fivefold.train.metrics import Meter
from fivefold.train.parallel.mesh import ranks
from fivefold.train.parallel.pipeline import Pipeline
from fivefold.train.parallel.turns import Turns

ROWS, D = 6, 16


def work(turns: Turns, name: str, parts: int, said: list[str], *, fails: bool = False) -> Callable[[], None]:
    def run() -> None:
        for part in range(parts):
            said.append(f"{name}{part}")
            if part < parts - 1:
                turns.swap()
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
def test_they_change_at_each_wait_until_one_ends(first: int, second: int, expected: str) -> None:
    turns = Turns()
    for _ in range(2):
        said: list[str] = []
        turns.both(work(turns, "a", first, said), work(turns, "b", second, said))
        assert said == expected.split()
        turns.swap()  # outside: nothing


@pytest.mark.parametrize(("failing", "parts"), [("a", (2, 3)), ("b", (2, 3)), ("b", (3, 2))])
def test_the_other_ends_before_a_failure_is_raised(failing: str, parts: tuple[int, int]) -> None:
    turns, said = Turns(), []  # type: ignore[var-annotated]
    a, b = (work(turns, name, n, said, fails=failing == name) for name, n in zip("ab", parts, strict=True))
    with pytest.raises(ValueError, match=f"{failing} fails"):
        turns.both(a, b)
    assert len(said) == 5


def test_what_the_second_does_is_counted_too() -> None:
    x = torch.ones(8, 8)
    with Meter([x], axis=lambda _: "") as meter:
        Turns().both(lambda: None, lambda: (x @ x, None)[1])
    assert meter.flops == 2 * 8**3


# ---- DualPipeV over tensor ranks


class Spoken(torch.autograd.Function):
    """tanh(x W / 2), summed over two ranks that hold half of it each, forward; the gradient likewise."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, half: Tensor, talk: Callable[[str, Tensor], Tensor]) -> Tensor:
        ctx.save_for_backward(x, half)
        ctx.talk = talk
        return talk("F", x @ half)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        x, half = ctx.saved_tensors
        return ctx.talk("B", gradients[0] @ half.t()), x.t() @ gradients[0], None


def weight(layer: int) -> Tensor:
    return torch.randn(D, D, generator=torch.Generator().manual_seed(layer)) / 4


def sample(i: int) -> Tensor:
    return torch.randn(ROWS, D, generator=torch.Generator().manual_seed(100 + i))


def speak(turns: Turns | None, delay_seconds: float) -> tuple[float, list[Tensor], list[str], float]:
    """In a child of pp2 tp2: loss, gradients of this rank's layers, its messages in order, seconds of the step."""
    among = ranks(Layout.parse("pp2 tp2 v2 dualpipev"), kv_heads=4, device=torch.device("cpu"))
    table, said = schedule("dualpipev", pp=2, v=2, micro_batches=6), []
    held = {stage: weight(stage).requires_grad_() for stage in table.held[among["pp"].rank]}

    def talk(kind: str, x: Tensor) -> Tensor:
        said.append(kind)
        x = x / 2
        begin, message = time.monotonic(), dist.all_reduce(x, group=among["tp"].group, async_op=True)
        if turns is not None:
            turns.swap()
        assert message is not None
        message.wait()
        time.sleep(max(0.0, begin + delay_seconds - time.monotonic()))  # a slow network
        return x

    def stage(number: int, entry: Tensor | None, i: int) -> Tensor:
        x = sample(i) if entry is None else entry
        for _ in range(3):
            x = torch.tanh(Spoken.apply(x, held[number], talk))  # type: ignore[no-untyped-call]
        return x.square().mean() if number == 3 else x

    pipeline = Pipeline(
        table, ranks=among, later=Later(), shape=(ROWS, D), dtype=torch.float32, turns=turns,
        stages={number: lambda entry, i, number=number: stage(number, entry, i) for number in held},
    )  # fmt: skip
    dist.barrier()
    begin = time.monotonic()
    loss = pipeline.step()
    seconds = time.monotonic() - begin
    return loss.item(), [held[number].grad for number in sorted(held)], said, seconds  # type: ignore[misc]


def test_dualpipe_interleaves_its_messages_equally_on_all_ranks(forked: Callable[..., Any]) -> None:
    apart, turned = forked(4, speak, None, 0.0), forked(4, speak, Turns(), 0.0)
    for (loss, gradients, _, _), (other, others, _, _) in zip(apart, turned, strict=True):
        assert other == loss
        assert all(
            torch.equal(a, b) for a, b in zip(gradients, others, strict=True)
        )  # the same sums, in the same order
    x = [sample(i) for i in range(6)]
    held, total = [weight(stage).requires_grad_() for stage in range(4)], 0.0
    for rows in x:
        for matrix in held:
            for _ in range(3):
                rows = torch.tanh(rows @ matrix)
        rows.square().mean().backward()
        total += rows.square().mean().item()
    assert sum(one[0] for one in turned[::2]) == pytest.approx(total, rel=1e-5)
    assert (turned[0][1][0] - held[0].grad).norm() < 1e-5 * held[0].grad.norm()  # type: ignore[union-attr]
    for rank in (0, 2):
        assert turned[rank][2] == turned[rank + 1][2]  # a rank and its partner speak in one order
        assert "FBFBFB" in "".join(turned[rank][2])
        assert "FBFB" not in "".join(apart[rank][2])
