"""Pipeline parallelism: runs this rank's row of any schedule table. Layers are sharded by stages.

Per micro-batch and boundary between ranks: one isend of the residual stream [rows, D] forward and one of its gradient
backward, both overlapped with compute; no message between two stages of one rank.

Every stage ends in a scalar: the loss, or an ``_Exit`` that feeds the received gradient to autograd. So a stage's
output is freed once it is sent, and only its graph is kept. Zero-bubble tables defer dW to W in ``WgradStore``.
Stages below the first trained weight (``Table.first_backward``) keep no graph, and their B does nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fivefold.errors import UserError
from fivefold.layout.schedule.action import Action, Part, format_part
from fivefold.layout.schedule.p2p import P2PStep, find_receiver, list_links, list_p2p_steps
from fivefold.layout.schedule.pipeline_schedule import list_pairing_names
from fivefold.layout.schedule.table import Table, check
from fivefold.trainer.model.linear import WgradStore, Work
from fivefold.trainer.parallel.collectives import Pending, receive, send
from fivefold.trainer.parallel.mesh import AxisGroup, Ranks

Stage = Callable[[Tensor | None, int], Tensor]  # (input rows; None: first stage), micro-batch → rows, or the loss


class Pipeline:
    """The part of the pipeline that this rank runs.

    Calls ``on_progress`` and ``on_action`` just before each action, ``before_wait`` before it waits for another rank's
    rows, and ``on_pass`` after each forward, backward or W; measurements replace ``on_action`` and ``on_pass`` for some
    steps. ``stages``: the stages that the table gives this rank;
    ``shape``, ``dtype``: of the rows sent between ranks; ``losses``: shape of what the last stage returns in training.
    The F and B of an FB alternate by ``ranks.interleaver`` or, without one, run one after the other. Raises a user
    error if the table is invalid or has nothing to interleave, ``ValueError`` if it does not fit these ranks and
    stages.
    """

    def __init__(
        self,
        table: Table,
        *,
        ranks: Ranks,
        wgrad_store: WgradStore,
        stages: Mapping[int, Stage],
        shape: tuple[int, ...],
        dtype: torch.dtype,
        losses: tuple[int, ...] = (),
    ) -> None:
        check(table)
        self.table, self.ranks, self.wgrad_store, self.stages = table, ranks, wgrad_store, stages
        self.shape, self.dtype, self.rank, self.losses = shape, dtype, ranks["pp"].rank, losses
        self.last, self.interleaver = table.stages - 1, ranks.interleaver
        if table.pp != ranks["pp"].size:
            raise ValueError(f"schedule {table.name} is for {table.pp} pipeline ranks, but pp={ranks['pp'].size}")
        if set(table.rank_stages[self.rank]) - set(stages):
            raise ValueError(f"rank {self.rank} runs stages {table.rank_stages[self.rank]}, but has {tuple(stages)}")
        if self.interleaver is not None:
            check_pairs(table)
        self.row = list_p2p_steps(table, rank=self.rank)
        self.on_progress: Callable[[], None] | None = None
        self.on_action: Callable[[Action], None] | None = None
        self.on_pass: Callable[[], None] | None = None
        self.before_wait: Callable[[], None] | None = None
        self._loss = torch.zeros(())
        self._receiving: dict[Part, Pending] = {}
        self._sending: dict[Part, Pending] = {}
        self._local_rows: dict[Part, Tensor] = {}  # between two stages of this rank
        self._graphs: dict[tuple[int, int], tuple[Tensor | None, Tensor, list[Tensor]]] = {}
        self._deferred_wgrads: dict[tuple[int, int], list[Work]] = {}
        self._connect_links()

    def step(self) -> Tensor:
        """Run all micro-batches forward and backward; return the sum of this rank's losses (0 if none has the head)."""
        return self._run_row(self.row, losses=self.losses)

    @torch.no_grad()
    def evaluate(self, micro_batches: int) -> Tensor:
        """Run ``micro_batches`` forward only, in the order of the table; return the sum of this rank's losses."""
        total = torch.zeros((), device=self.ranks.device)
        for first in range(0, micro_batches, self.table.micro_batches):
            rows = self.table.list_forwards(micro_batches - first)
            forwards = Table.from_rows(self.table.name, rows, self.table.paths[: micro_batches - first])
            total += self._run_row(list_p2p_steps(forwards, rank=self.rank), first=first)
        return total

    def _run_row(self, row: Sequence[P2PStep], *, first: int = 0, losses: tuple[int, ...] = ()) -> Tensor:
        """Run the actions of ``row`` and return the loss; ``first``: index of the micro-batch that ``row`` calls 0."""
        self._loss = torch.zeros(losses, device=self.ranks.device)
        for action, post_receives, wait_sends in row:
            for part in post_receives:
                self._receive(part)
            for part in wait_sends:
                self._sending.pop(part).wait()
            if self.on_progress is not None:
                self.on_progress()
            if self.on_action is not None:
                self.on_action(action)
            self._run_action(action, first=first)
        while self._sending:
            self._sending.popitem()[1].wait()
        return self._loss

    def _run_action(self, action: Action, *, first: int) -> None:
        """Run one action of the schedule; ``first``: the number of the first micro-batch."""
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
            works = self._deferred_wgrads.pop((stage, i))[::-1]
            with torch.no_grad():
                while works:
                    works.pop()()  # popped, so that each frees its saved tensors
            self._pass_ended()
        else:
            self._backward(stage, i, split=kind == "B")

    def _forward(self, stage: int, i: int, *, first: int) -> None:
        """Run the forward of a stage for micro-batch ``i``, and send its output to the next stage."""
        stage_input = self._take_received(("F", stage - 1, i)) if stage else None
        if stage_input is not None and torch.is_grad_enabled() and stage > self.table.first_backward:
            stage_input.requires_grad_()
        output = self.stages[stage](stage_input, first + i)
        inbox: list[Tensor] = []
        if stage < self.last:
            self._send(("F", stage, i), output.detach())
            output = end_stage(output, inbox)
        if torch.is_grad_enabled():
            if stage >= self.table.first_backward:
                input_leaf = stage_input if stage > self.table.first_backward else None
                self._graphs[stage, i] = input_leaf, output, inbox
        elif stage == self.last:
            self._loss += output
        del stage_input, output
        self._pass_ended()

    def _backward(self, stage: int, i: int, *, split: bool = False) -> None:
        """Run the backward of a stage for micro-batch ``i``; ``split``: leave the weight gradients to W."""
        if stage < self.table.first_backward:
            self._pass_ended()
            return
        stage_input, end, inbox = self._graphs.pop((stage, i))
        if stage < self.last:
            inbox.append(self._take_received(("B", stage + 1, i)))
        self.wgrad_store.deferring = split
        run_backward(end)
        self.wgrad_store.deferring = False
        if stage == self.last:
            self._loss += end.detach()  # after the backward, because a chunked loss is computed in its backward
        if split:
            self._deferred_wgrads[stage, i] = self.wgrad_store.take()
        if stage_input is not None:
            assert stage_input.grad is not None, f"stage {stage} does not depend on what enters it"
            self._send(("B", stage, i), stage_input.grad)
        del stage_input, end
        self._pass_ended()

    def _pass_ended(self) -> None:
        if self.on_pass is not None:
            self.on_pass()

    def messages(self) -> list[Tensor]:
        """Return the buffers of the messages in flight to or from other ranks."""
        return [message.output_buffer for message in (*self._receiving.values(), *self._sending.values())]

    # Messages

    def _connect_links(self) -> None:
        """Send one byte over each link in turn.

        NCCL's first message between two ranks blocks both to connect, which could deadlock in the middle of a schedule.
        """
        byte = torch.zeros(1, dtype=torch.uint8, device=self.ranks.device)
        for kind, source, target in list_links(self.table):
            if self.rank in (source, target):
                axis = self._get_axis((kind, 0, 0), source=source, target=target)
                (send(byte, axis, target) if self.rank == source else receive(byte, axis, source)).wait()

    def _get_axis(self, part: Part, *, source: int, target: int) -> AxisGroup:
        """Return the process group for a message.

        F and B, to higher and to lower ranks, have one group each, so that no message waits for one of another kind.
        """
        pass_kind = "onward" if part[0] == "F" else "back"
        direction = "down" if source < target else "up"
        return self.ranks[f"pp_{pass_kind}_{direction}"]

    def _send(self, part: Part, rows: Tensor) -> None:
        """Hand the output of ``part`` to the next stage: keep it if that stage is on this rank, else start an isend."""
        if rows.shape != self.shape or rows.dtype != self.dtype:
            actual = f"{tuple(rows.shape)} {rows.dtype}"
            expected = f"{self.shape} {self.dtype}"
            raise ValueError(f"{format_part(part)} returned a tensor of {actual}, but stages exchange {expected}")
        target = find_receiver(part, self.table)
        if target is None:
            self._local_rows[part] = rows
            return
        self._sending[part] = send(rows.contiguous(), self._get_axis(part, source=self.rank, target=target), target)

    def _receive(self, part: Part) -> None:
        """Start the irecv of the output of ``part``."""
        source = self.table.paths[part[2]][part[1]]
        axis = self._get_axis(part, source=source, target=self.rank)
        rows = torch.empty(self.shape, dtype=self.dtype, device=self.ranks.device)
        self._receiving[part] = receive(rows, axis, source)

    def _take_received(self, part: Part) -> Tensor:
        if part in self._local_rows:
            return self._local_rows.pop(part)
        if self.before_wait is not None:
            self.before_wait()
        return self._receiving.pop(part).wait()


def end_stage(rows: Tensor, inbox: list[Tensor]) -> Tensor:
    """Return a scalar whose backward runs that of ``rows`` with the gradient from ``inbox``."""
    return _Exit.apply(rows, inbox)


def run_backward(end: Tensor, gradient: Tensor | None = None) -> None:
    """Run the backward of a stage from the scalar that ends it, or from several losses that are summed."""
    end.backward(torch.ones_like(end) if gradient is None and end.dim() else gradient)


class _Exit(torch.autograd.Function):
    """The scalar end of a stage.

    Its backward pops the gradient from ``inbox``, so that only autograd holds it and frees it after its last use.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, inbox: list[Tensor]) -> Tensor:
        ctx.inbox = inbox
        return rows.new_empty(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, None]:
        return ctx.inbox.pop(), None


def check_pairs(table: Table) -> None:
    """Raise a user error if the table has no FB to interleave, or an FB whose F and B are of the same stage."""
    combined_actions = [action for row in table.rows for action in row if action.kind == "FB"]
    if not combined_actions:
        raise UserError(
            f"overlap=pairs: schedule {table.name} does not run a forward together with a backward; "
            f"try {list_pairing_names()}"
        )
    for action in combined_actions:  # F and B each gather and release the weights of their stage
        if action.stage == action.backward_stage:
            raise UserError(
                f"overlap=pairs: schedule {table.name} runs {action}, a forward and a backward of the same stage "
                f"{action.stage}, together; schedule one after the other"
            )
