"""Pipeline parallelism: plays this rank's row of any schedule table.

Sharded: the layers, by stages. Issued per micro-batch and boundary between ranks: one send of the stream's rows
[rows, D] onward and one of their gradient back, both beside compute; none where the two stages lie on one rank.

Each stage ends in a scalar, the loss or an ``_Exit`` through which the gradient comes in: a stage's output lives only
until it has been taken, since its graph is enough for the backward. Zero-bubble tables put dW off in ``WgradStore``
until W.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.layout.schedule.action import Action, Part, named
from fivefold.layout.schedule.p2p import P2PStep, links, p2p_steps, receiver
from fivefold.layout.schedule.table import Table, check
from fivefold.record import Mistake
from fivefold.train.model.linear import WgradStore, Work
from fivefold.train.parallel.mesh import Axis, Ranks

Stage = Callable[[Tensor | None, int], Tensor]  # entry rows (None: the first stage), micro-batch → rows, or the loss


class Pipeline:
    """This rank's part of the pipeline. ``on_action`` is told of each action just before it runs, ``on_pass`` that a
    forward, a backward or a W has ended.

    ``stages`` are those that the table gives this rank; ``shape`` and ``dtype`` are of the rows that travel. Under FB
    forward and backward alternate by ``ranks.interleaver``; where there is none, one follows the other. A ``Mistake``
    where the table is illegal or has no turns to take, a ``ValueError`` where it is not for these ranks and stages.
    """

    def __init__(
        self,
        table: Table,
        *,
        ranks: Ranks,
        wgrad_store: WgradStore,
        stages: Mapping[int, Stage],
        shape: tuple[int, int],
        dtype: torch.dtype,
    ) -> None:
        check(table)
        self.table, self.ranks, self.wgrad_store, self.stages = table, ranks, wgrad_store, stages
        self.shape, self.dtype, self.rank = shape, dtype, ranks["pp"].rank
        self.last, self.interleaver = table.stages - 1, ranks.interleaver
        if table.pp != ranks["pp"].size:
            raise ValueError(f"{table.name} has rows for {table.pp} ranks, but pp={ranks['pp'].size}")
        if set(table.rank_stages[self.rank]) - set(stages):
            raise ValueError(f"rank {self.rank} plays stages {table.rank_stages[self.rank]}, but has {tuple(stages)}")
        if self.interleaver is not None:
            check_pairs(table)
        self.row = p2p_steps(table, rank=self.rank)
        self.on_action: Callable[[Action], None] | None = None
        self.on_pass: Callable[[], None] | None = None
        self._loss = torch.zeros(())
        self._receiving: dict[Part, tuple[Tensor, dist.Work]] = {}
        self._sending: dict[Part, tuple[Tensor, dist.Work]] = {}
        self._here: dict[Part, Tensor] = {}  # from a stage of this rank to the next one
        self._open: dict[tuple[int, int], tuple[Tensor | None, Tensor, list[Tensor]]] = {}
        self._works: dict[tuple[int, int], list[Work]] = {}
        self._meet()

    def step(self) -> Tensor:
        """All micro-batches forward and backward; the sum of the losses that arose on this rank."""
        return self._play(self.row)

    @torch.no_grad()
    def evaluate(self, micro_batches: int) -> Tensor:
        """The sum of this rank's losses of so many micro-batches, forward only, in the order of the table."""
        total = torch.zeros((), device=self.ranks.device)
        for first in range(0, micro_batches, self.table.micro_batches):
            forward = _forward_only(self.table, micro_batches=micro_batches - first)
            total += self._play(p2p_steps(forward, rank=self.rank), first=first)
        return total

    def _play(self, row: Sequence[P2PStep], *, first: int = 0) -> Tensor:
        """``first``: the micro-batch that the row calls 0."""
        self._loss = torch.zeros((), device=self.ranks.device)
        for action, post_receives, wait_sends in row:
            for part in post_receives:
                self._receive(part)
            for part in wait_sends:
                self._sending.pop(part)[1].wait()
            if self.on_action is not None:
                self.on_action(action)
            self._act(action, first=first)
        while self._sending:
            self._sending.popitem()[1][1].wait()
        return self._loss

    def _act(self, action: Action, *, first: int) -> None:
        kind, stage, i, backward_stage, backward_i = action
        if kind == "F":
            self._forward(stage, i, first=first)
        elif kind == "FB":
            forward = partial(self._forward, stage, i, first=first)
            backward = partial(self._backward, backward_stage, backward_i)
            if self.interleaver is None:
                forward()
                backward()
            else:
                self.interleaver.run_both(forward, backward)
        elif kind == "W":
            works = self._works.pop((stage, i))[::-1]
            with torch.no_grad():
                while works:
                    works.pop()()  # each lets go of what it kept
            self._passed()
        else:
            self._backward(stage, i, split=kind == "B")

    def _forward(self, stage: int, i: int, *, first: int) -> None:
        entry = self._arrived(("F", stage - 1, i)) if stage else None
        if entry is not None and torch.is_grad_enabled():
            entry.requires_grad_()
        output = self.stages[stage](entry, first + i)
        inbox: list[Tensor] = []
        if stage < self.last:
            self._hand(("F", stage, i), output.detach())
            output = exit_of(output, inbox)
        if torch.is_grad_enabled():
            self._open[stage, i] = entry, output, inbox
        elif stage == self.last:
            self._loss += output
        del entry, output
        self._passed()

    def _backward(self, stage: int, i: int, *, split: bool = False) -> None:
        entry, end, inbox = self._open.pop((stage, i))
        if stage < self.last:
            inbox.append(self._arrived(("B", stage + 1, i)))
        self.wgrad_store.deferring = split
        run_backward(end)
        self.wgrad_store.deferring = False
        if stage == self.last:
            self._loss += end.detach()  # not before: a chunked loss is computed in its backward
        if split:
            self._works[stage, i] = self.wgrad_store.take()
        if entry is not None:
            assert entry.grad is not None, f"stage {stage} does not depend on what enters it"
            self._hand(("B", stage, i), entry.grad)
        del entry, end
        self._passed()

    def _passed(self) -> None:
        if self.on_pass is not None:
            self.on_pass()

    def messages(self) -> list[Tensor]:
        """What is on its way to or from other ranks."""
        return [rows for rows, _ in (*self._receiving.values(), *self._sending.values())]

    # Messages

    def _meet(self) -> None:
        """One byte over each link in turn: NCCL's first message between two ranks holds both up until they meet, which
        in the middle of a schedule could be for ever.
        """
        byte = torch.zeros(1, dtype=torch.uint8, device=self.ranks.device)
        for kind, source, target in links(self.table):
            if self.rank in (source, target):
                axis = self._axis((kind, 0, 0), source=source, target=target)
                send = self.rank == source
                call, other = (dist.isend, target) if send else (dist.irecv, source)
                work = call(byte, axis.ranks[other], group=axis.group)
                assert work is not None
                work.wait()

    def _axis(self, part: Part, *, source: int, target: int) -> Axis:
        """Onward or back, down or up: each has a group of its own, so that no message queues behind another kind."""
        kind, way = ("onward" if part[0] == "F" else "back"), ("down" if source < target else "up")
        return self.ranks[f"pp_{kind}_{way}"]

    def _hand(self, part: Part, rows: Tensor) -> None:
        """To the stage that waits for ``part``, here or on another rank."""
        if rows.shape != self.shape or rows.dtype != self.dtype:
            have, want = f"{tuple(rows.shape)} {rows.dtype}", f"{self.shape} {self.dtype}"
            raise ValueError(f"{named(part)} made rows of {have}, but {want} travel")
        target = receiver(part, path=self.table.paths[part[2]])
        if target is None:
            self._here[part] = rows
            return
        axis, rows = self._axis(part, source=self.rank, target=target), rows.contiguous()
        work = dist.isend(rows, axis.ranks[target], group=axis.group)
        assert work is not None
        self._sending[part] = rows, work

    def _receive(self, part: Part) -> None:
        """Have a buffer filled while other things run."""
        source = self.table.paths[part[2]][part[1]]
        axis = self._axis(part, source=source, target=self.rank)
        rows = torch.empty(self.shape, dtype=self.dtype, device=self.ranks.device)
        work = dist.irecv(rows, axis.ranks[source], group=axis.group)
        assert work is not None
        self._receiving[part] = rows, work

    def _arrived(self, part: Part) -> Tensor:
        if part in self._here:
            return self._here.pop(part)
        rows, work = self._receiving.pop(part)
        if self.interleaver is not None:
            self.interleaver.yield_turn()
        work.wait()
        return rows


def exit_of(rows: Tensor, inbox: list[Tensor]) -> Tensor:
    """A scalar whose backward is that of ``rows``, whose gradient will then be in ``inbox``."""
    found: Tensor = _Exit.apply(rows, inbox)  # type: ignore[no-untyped-call]
    return found


def run_backward(end: Tensor, gradient: Tensor | None = None) -> None:
    """The backward of a stage, from its scalar."""
    end.backward(gradient)


class _Exit(torch.autograd.Function):
    """The end of a stage as a scalar: its backward takes the gradient out of ``inbox``, so that none but autograd
    holds it and it dies where it is used up.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, inbox: list[Tensor]) -> Tensor:
        ctx.inbox = inbox
        return rows.new_empty(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, None]:
        return ctx.inbox.pop(), None


def check_pairs(table: Table) -> None:
    """A ``Mistake`` where no two micro-batches are computed beside one another, or two on the same weights."""
    found = [action for row in table.rows for action in row if action.kind == "FB"]
    if not found:
        raise Mistake(f"pairs: {table.name} has no forward beside a backward; try dualpipe or dualpipev")
    for action in found:  # each of the two gathers the weights of its stage, and lets them go
        if action.stage == action.backward_stage:
            raise Mistake(f"pairs: {table.name} has {action}, both on stage {action.stage}; pair it with another stage")


def _forward_only(table: Table, *, micro_batches: int) -> Table:
    """The forwards of the first ``micro_batches``."""
    rows = tuple(
        tuple(Action("F", action.stage, action.micro_batch) for action in row
              if action.kind in ("F", "FB") and action.micro_batch < micro_batches)
        for row in table.rows
    )  # fmt: skip
    return Table(table.name, rows, table.paths[:micro_batches])
