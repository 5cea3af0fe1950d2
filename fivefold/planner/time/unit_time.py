"""Seconds of a unit (embedding, block, head): its kernels and its exposed messages.

    tp    cut into tp parts that overlap the matmul before or after: exposed is the first part and any excess
    cp    each hop of the ring overlaps the attention on the keys that are here
    ep    dispatch and combine overlap the shared experts
Without overlap a message is fully exposed. The host launches kernels one by one: a unit of small kernels takes as long
as their launches.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import takewhile
from typing import NamedTuple

from fivefold.job import Job
from fivefold.layout.mesh import Group
from fivefold.machine.spec import Machine
from fivefold.model.spec import Model
from fivefold.planner.counts.operations.op import Message, Op
from fivefold.planner.time.compute import OpTime
from fivefold.planner.time.constants import Constants
from fivefold.planner.time.network import MessageTime, Network
from fivefold.stack.spec import Stack

AXES = ("tp", "cp", "ep", "etp")


class UnitTime(NamedTuple):
    """Seconds of one micro-batch through one unit; exposed messages are in the order of ``AXES``."""

    forward: float
    backward: float  # gradient of the input, with what is recomputed for it
    weight: float  # gradient of the weights
    forward_exposed: tuple[float, ...]
    backward_exposed: tuple[float, ...]
    forward_apart: tuple[float, ...]  # as exposed, were no message of an axis in ``Stack.overlap`` hidden
    backward_apart: tuple[float, ...]
    longest: str  # the operation or message that takes most


class UnitKernels(NamedTuple):
    """What of a unit's time does not depend on where its groups lie."""

    ops: tuple[Op, ...]
    times: list[OpTime]
    messages: tuple[int, ...]  # operations that send some
    seconds: tuple[float, float, float]  # forward, backward with what is recomputed for it, weight gradient
    launches: list[tuple[float, float]]  # kernels that the host launches for each, forward and backward
    graphed: frozenset[int]  # operations in a CUDA graph, whose messages it does not launch either
    room: tuple[float, float]  # compute behind which ep messages hide, forward and backward
    longest: tuple[str, float]  # of the operations


def unit_kernels(
    ops: tuple[Op, ...], times: list[OpTime], stack: Stack, *, further: tuple[int, int] = (0, 0)
) -> UnitKernels:  # fmt: skip
    """``further``: kernels launched beside those of ``ops``, forward and backward."""
    both, spans = list(zip(ops, times, strict=True)), dict[str, float]()
    for op, time in both:
        total = time.forward * (2 if op.recomputed else 1) + time.backward + time.weight
        spans[op.name] = spans.get(op.name, 0.0) + total
    longest = max(spans, key=lambda name: spans[name])
    # ep messages hide behind the shared experts, or behind all compute of the other micro-batch, which runs in the
    # other direction
    shared = times if stack.pairs else [time for op, time in both if op.name.startswith("moe.shared.")]
    room = sum(t.forward for t in shared), sum(t.backward + t.weight for t in shared)
    again = sum([time.forward for op, time in both if op.recomputed])
    forward, backward, weight = (sum(column) for column in list(zip(*times, strict=True))[:3])
    graphed = frozenset(index for index, op in enumerate(ops) if _in_graph(op, stack))
    launches = [
        (0, 0) if index in graphed
        else (time.kernels, time.backward_kernels + (time.kernels if op.recomputed else 0))
        for index, (op, time) in enumerate(both)
    ]  # fmt: skip
    if stack.graphs == "none":
        (ahead, back), (more, later) = launches[0], further
        launches[0] = ahead + more, back + later + (more if ops[0].recomputed else 0)
    return UnitKernels(
        ops, times, tuple(index for index, op in enumerate(ops) if op.message is not None),
        (forward, backward + again, weight), launches, graphed, room[::-1] if stack.pairs else room,
        (longest, spans[longest]),
    )  # fmt: skip


def _in_graph(op: Op, stack: Stack) -> bool:
    """Whether the operation is in a CUDA graph, so that the host does not launch it by itself."""
    if stack.graphs in ("none", "full"):
        return stack.graphs == "full"
    return op.name in ("moe.router", "moe.topk") or (stack.graphs == "partial" and not op.name.startswith("moe."))


class UnitTimer:
    """Adds up the kernels and messages of one unit."""

    def __init__(
        self, model: Model, machine: Machine, network: Network, job: Job, place: Callable[[str], Group],
        unit: UnitKernels, constants: Constants,
    ) -> None:  # fmt: skip
        self.model, self.machine, self.network, self.job = model, machine, network, job
        self.place, self.unit, self.ops, self.times = place, unit, unit.ops, unit.times
        self.constants = constants
        self.nccl, self.beside = machine.backend == "nccl", machine.overlaps
        # elsewhere messages show what they keep the core busy
        self.contention = constants.hidden_message_slowdown if self.nccl else 0.0
        self.exposed = dict.fromkeys(AXES, 0.0), dict.fromkeys(AXES, 0.0)  # forward, backward
        self.apart = dict.fromkeys(AXES, 0.0), dict.fromkeys(AXES, 0.0)
        self.sent = dict.fromkeys(AXES, 0.0), dict.fromkeys(AXES, 0.0)  # hidden or not
        self.hidden = [0.0, 0.0]
        self.launched: dict[int, tuple[float, float]] = {}  # messages that the host issues, by operation
        self.awaited: dict[int, float] = {}  # exposed seconds of ep messages, forward, by operation
        self.longest = unit.longest
        self.room = list(unit.room)
        for index in unit.messages:
            self._add(index)

    def _add(self, index: int) -> None:
        """Add the messages of one operation to those exposed and hidden."""
        op = self.ops[index]
        assert op.message is not None
        message = op.message.uncast if op.recomputed else op.message
        place = self.place(message.axis)
        if place.ranks == 1:
            return
        forward, backward, again = self._passes(message, place, recomputed=op.recomputed)
        if index not in self.unit.graphed:
            self.launched[index] = bool(forward.seconds), bool(backward.seconds) + bool(again.seconds)
        total = forward.seconds + backward.seconds + again.seconds
        if total > self.longest[1]:
            self.longest = f"{message.axis} {op.name}", total
        ahead = self._compute_beside(index)
        exposed = self._exposed(index, forward, side=0, beside=ahead.forward)
        back = self._exposed(index, backward, side=1, beside=ahead.backward + ahead.weight)
        axis = message.axis.partition("_")[0]  # both of 2D tensor parallelism count as tp
        self.sent[0][axis] += forward.seconds
        self.sent[1][axis] += backward.seconds + again.seconds
        rings = not self.nccl and _rings(message)  # whose hops are always hidden
        alone, alone_back, later = (exposed, back, again) if rings else (forward.seconds, backward.seconds, again)
        if axis == "tp" and message.regather and not op.recomputed and self.beside:
            gather, reduce = self._beside_products(index, again, backward)
            hides = "tp" not in self.job.stack.overlap or self.job.stack.kernel_facts.fuses_linears
            later = later._replace(seconds=later.seconds - (gather if hides else 0.0))
            alone_back -= self._beside_product_of_weight(index, backward)
            again = again._replace(seconds=again.seconds - gather)
            back -= reduce
            self.hidden[1] += gather + reduce
        shown = self._exposed(index, again, side=1, beside=ahead.forward)
        back, alone_back = back + shown, alone_back + (shown if rings else later.seconds)
        if message.axis == "ep":
            self.awaited[index] = exposed
        self.exposed[0][axis] += exposed
        self.exposed[1][axis] += back
        self.apart[0][axis] += alone
        self.apart[1][axis] += alone_back

    def _passes(
        self, message: Message, place: Group, *, recomputed: bool
    ) -> tuple[MessageTime, MessageTime, MessageTime]:  # fmt: skip
        """Seconds of an operation's messages in the forward, of its gradients', and of those sent again for them."""
        moe = self.model.moe
        copies = moe.topk if moe and message.axis == "ep" and self.job.stack.dispatcher == "fused" else 1
        back_payload = message.payload if message.backward_payload is None else message.backward_payload
        forward = self._sent(message, message.forward, message.payload, place=place, copies=copies)
        again = self._sent(message, message.regather, message.uncast.payload, place=place, copies=copies)
        parts = message.backward_parts
        backward = self._sent(message, message.backward, back_payload, place=place, copies=copies, parts=parts)
        if recomputed:
            again = forward
        for collective, payload in message.scales:
            scales = self._sent(message, collective, payload, place=place, copies=copies)
            forward = forward._replace(seconds=forward.seconds + scales.seconds)
        return forward, backward, again

    def _beside_products(self, index: int, gather: MessageTime, reduce: MessageTime) -> tuple[float, float]:
        """Hidden seconds of the gather of a column-parallel layer's input for dW, and of the sum of its dx over ranks.

        The former by dx; the latter by dW, in our engine, which treats all linear layers on one input as one.
        """
        stack = self.job.stack
        if not stack.kernel_facts.fuses_linears:
            return min(gather.travelling, self._compute_beside(index).backward) if stack.async_tp else 0.0, 0.0
        hidden = min(gather.travelling, sum(self.times[at].backward for at in self._fan(index)))
        return hidden, self._beside_product_of_weight(index, reduce) if "tp" not in stack.overlap else 0.0

    def _beside_product_of_weight(self, index: int, reduce: MessageTime) -> float:
        if not self.job.stack.kernel_facts.fuses_linears:
            return 0.0
        return min(reduce.travelling, sum(self.times[at].weight for at in self._fan(index)))

    def _fan(self, index: int) -> list[int]:
        """The linear layers on what an operation gathers."""
        return [*takewhile(lambda at: self.ops[at].kind == "matmul", range(index + 1, len(self.ops)))]

    def _sent(
        self, message: Message, collective: str, payload: int, *, place: Group, copies: int, parts: int = 1
    ) -> MessageTime:  # fmt: skip
        """Seconds of all messages of one collective of an operation in one pass, sent in ``parts``; "": none."""
        if not collective:
            return MessageTime(0.0, 0.0)
        network, times, size = self.network, message.times * parts, payload // parts
        seconds = network.seconds(collective, size, place, copies=copies)
        return MessageTime(times * seconds, times * network.busy(collective, size, place))

    def _compute_beside(self, index: int) -> OpTime:
        """The compute that overlaps a message: the matmul after it, else the one before; for a ring its attention."""
        op = self.ops[index]
        if op.kind == "attention":
            return self.times[index]
        for other in (index + 1, index - 1):
            if 0 <= other < len(self.ops) and self.ops[other].kind == "matmul":
                return self.times[other]
        return OpTime(0.0, 0.0)

    def _exposed(self, index: int, sent: MessageTime, *, side: int, beside: float) -> float:
        """Exposed seconds of a message beside ``beside`` seconds of compute; ``side``: forward 0, backward 1."""
        if not sent.seconds:
            return 0.0
        message, seconds = self.ops[index].message, sent.travelling
        assert message is not None
        axis, times = message.axis.partition("_")[0], max(1, message.times)
        ring = _rings(message)
        if not (self.beside and axis in self.job.stack.overlap) and not (ring and not self.nccl):
            return sent.seconds  # with gloo, too, the hops of a ring run beside attention
        if axis == "tp":
            parts = self.place(message.axis).ranks
            exposed = seconds / parts + max(0.0, seconds * (1 - 1 / parts) - beside)
        elif ring:
            # in our backward gradients go round behind keys and values, and the last hop brings them home
            ours = self.job.stack.kernel_facts.own_attention and side and message.backward_parts > 1
            home = seconds / (times * message.backward_parts) if ours else 0.0
            exposed = home + max(0.0, seconds - home - beside * times / (times + 1))
        elif axis in ("ep", "etp"):
            exposed = max(0.0, seconds - self.room[side])
            self.room[side] = max(0.0, self.room[side] - seconds)
        else:
            exposed = seconds
        self.hidden[side] += seconds - exposed
        return sent.busy + exposed

    def _forward_with_host(self, host: float) -> float:
        """Seconds of a forward whose kernels the host launches one by one, ``host`` seconds each.

        The host runs ahead of the device, but with dropless experts it waits before the dispatch for the token counts,
        so every layer starts without a lead. Plays two layers and returns the second; messages leave time to launch.
        """
        moe = self.model.moe
        waits = moe is not None and moe.capacity is None and self.job.stack.graphs != "full"
        launches = [ahead for ahead, _ in self.unit.launches]
        for index, (ahead, _) in self.launched.items():
            launches[index] += ahead
        device = launched = start = 0.0
        for _ in range(2):
            start = device
            for index, (op, time) in enumerate(zip(self.ops, self.times, strict=True)):
                if waits and op.name == "moe.dispatch":
                    launched = device
                launched += launches[index] * host
                device = max(device + time.forward, launched) + self.awaited.get(index, 0.0)
        return device - start

    def _launches(self) -> tuple[float, float]:
        """Kernels and messages that the host launches one by one, forward and backward."""
        both = *self.unit.launches, *self.launched.values()
        return sum([ahead for ahead, _ in both]), sum([back for _, back in both])

    def read(self) -> UnitTime:
        """The totals of all operations added."""
        forward, backward, weight = self.unit.seconds
        forward, backward = forward + self.contention * self.hidden[0], backward + self.contention * self.hidden[1]
        if self.nccl:
            per_launch = self.constants.compiled_launch_share if self.job.stack.compiles else 1
            host = self.machine.chip.launch_seconds * per_launch
            ahead, later = (host * times for times in self._launches())
            exponent = self.constants.host_device_exponent
            if self.job.stack.blocking:  # +: the host launches a kernel only when the one before has ended
                forward += ahead
                backward += later
            else:  # max: the host runs ahead, and can launch while the device waits for messages
                waited = sum(self.exposed[0].values())
                forward = max(_slower(forward, ahead - waited, exponent), self._forward_with_host(host) - waited)
                device = backward + weight  # whose launches are shared as their seconds are
                talk = sum(self.exposed[1].values())
                share = _slower(device, later - talk, exponent) / device if device else 1.0
                backward, weight = backward * share, weight * share
        fronts, backs, fronts_apart, backs_apart = (tuple(side.values()) for side in (*self.exposed, *self.apart))
        return UnitTime(forward, backward, weight, fronts, backs, fronts_apart, backs_apart, self.longest[0])


def _rings(message: Message) -> bool:
    """Whether messages go round in a ring, each beside the attention on the keys that are here."""
    return message.axis == "cp" and message.forward == "p2p"


def _slower(device: float, host: float, exponent: float) -> float:
    """Seconds of device and host side by side: their p-norm, above the maximum where they are close (jitter)."""
    return float((device**exponent + max(0.0, host) ** exponent) ** (1 / exponent))
