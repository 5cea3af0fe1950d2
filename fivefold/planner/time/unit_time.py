"""Seconds of a unit (embedding, block, head): its kernels and its exposed messages.

    tp    split into tp parts that overlap the matmul before or after: exposed is the first part and any excess
    cp    each hop of the ring overlaps the attention on the keys already present
    ep    dispatch and combine overlap the shared experts

Without overlap a message is fully exposed. The host launches kernels one by one, so a unit of small kernels takes as
long as their launches.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import takewhile
from operator import itemgetter
from typing import NamedTuple

from fivefold.job import Job
from fivefold.layout.mesh import RankGroup
from fivefold.machine.spec import Machine
from fivefold.model.spec import Model
from fivefold.planner.counts.operations.op import Op, OpMessage
from fivefold.planner.time.compute import OpTime
from fivefold.planner.time.constants import Constants
from fivefold.planner.time.network import ONE_COPY, MessageTime, Network, TokenCopies
from fivefold.stack.spec import Stack

AXES = ("tp", "cp", "ep", "etp")
COPIED = ("all_gather", "reduce_scatter")  # messages that may be copied out of a buffer, or into one
HOST_LAUNCHES = "kernel launches (CPU-bound)"  # what the launches of kernels add to their seconds on the device


class UnitTime(NamedTuple):
    """Seconds of one micro-batch through one unit; exposed messages are in the order of ``AXES``."""

    forward: float
    backward: float  # gradient of the input, with recomputation
    weight: float  # gradient of the weights
    forward_exposed: tuple[float, ...]
    backward_exposed: tuple[float, ...]
    forward_unoverlapped: tuple[
        float, ...
    ]  # exposed seconds if no message of an axis in ``Stack.overlap`` were overlapped
    backward_unoverlapped: tuple[float, ...]
    longest: str  # the operation or message that takes most, or ``HOST_LAUNCHES``


class UnitKernels(NamedTuple):
    """The part of a unit's time that does not depend on the placement of its groups."""

    ops: tuple[Op, ...]
    times: list[OpTime]
    messages: tuple[int, ...]  # operations that send messages
    seconds: tuple[float, float, float]  # forward, backward with recomputation, weight gradient
    launches: list[tuple[float, float]]  # kernels that the host launches for each, forward and backward
    in_graph: frozenset[int]  # operations in a CUDA graph: the host launches neither them nor their messages
    overlap_seconds: tuple[float, float]  # compute that ep messages overlap, forward and backward
    longest: tuple[str, float]  # longest operation and its seconds


def build_unit_kernels(
    ops: tuple[Op, ...], times: list[OpTime], stack: Stack, *, extra_launches: tuple[int, int] = (0, 0)
) -> UnitKernels:
    """Return the kernels of a unit.

    ``extra_launches``: kernels launched in addition to those of ``ops``, forward and backward.
    """
    ops_and_times = list(zip(ops, times, strict=True))
    seconds_by_name = dict[str, float]()
    for op, time in ops_and_times:
        total = time.forward * (2 if op.recomputed else 1) + time.backward + time.weight
        seconds_by_name[op.name] = seconds_by_name.get(op.name, 0.0) + total
    longest = max(seconds_by_name, key=lambda name: seconds_by_name[name])
    # ep messages overlap the shared experts, or all compute of the other micro-batch, which runs in the
    # other direction
    shared = times if stack.pairs else [time for op, time in ops_and_times if op.name.startswith("moe.shared.")]
    overlap_seconds = sum(t.forward for t in shared), sum(t.backward + t.weight for t in shared)
    recomputed_seconds = sum([time.forward for op, time in ops_and_times if op.recomputed])
    forward, backward, weight = (sum(column) for column in list(zip(*times, strict=True))[:3])
    in_graph = frozenset(index for index, op in enumerate(ops) if _is_in_graph(op, stack))
    launches = [
        (0, 0) if index in in_graph else (time.kernels, time.backward_kernels + (time.kernels if op.recomputed else 0))
        for index, (op, time) in enumerate(ops_and_times)
    ]
    if stack.cuda_graphs == "none":
        (forward_launches, backward_launches), (more_forward, more_backward) = launches[0], extra_launches
        launches[0] = (
            forward_launches + more_forward,
            backward_launches + more_backward + (more_forward if ops[0].recomputed else 0),
        )
    return UnitKernels(
        ops,
        times,
        tuple(index for index, op in enumerate(ops) if op.message is not None),
        (forward, backward + recomputed_seconds, weight),
        launches,
        in_graph,
        overlap_seconds[::-1] if stack.pairs else overlap_seconds,
        (longest, seconds_by_name[longest]),
    )


def _is_in_graph(op: Op, stack: Stack) -> bool:
    """Return True if the operation is in a CUDA graph, so that the host does not launch it by itself."""
    if stack.cuda_graphs in ("none", "full"):
        return stack.cuda_graphs == "full"
    return op.name in ("moe.router", "moe.topk") or (stack.cuda_graphs == "partial" and not op.name.startswith("moe."))


class UnitTimer:
    """The sum of the kernels and messages of one unit."""

    def __init__(
        self,
        model: Model,
        machine: Machine,
        network: Network,
        job: Job,
        get_rank_group: Callable[[str], RankGroup],
        unit: UnitKernels,
        constants: Constants,
        *,
        copy_seconds: Callable[[float], float] | None = None,
    ) -> None:
        """Initialize the sum.

        ``copy_seconds``: returns the seconds of a kernel that reads and writes n bytes, if tp's messages need it.
        """
        self.model, self.machine, self.network, self.job = model, machine, network, job
        self.get_rank_group, self.unit, self.ops, self.times = get_rank_group, unit, unit.ops, unit.times
        self.constants, self.copy_seconds = constants, copy_seconds
        self.nccl, self.can_overlap = machine.has_gpus, machine.can_overlap
        # without NCCL, the seconds in which messages keep a core busy are exposed instead
        self.contention = constants.hidden_message_slowdown if self.nccl else 0.0
        self.exposed = dict.fromkeys(AXES, 0.0), dict.fromkeys(AXES, 0.0)  # forward, backward
        self.unoverlapped = dict.fromkeys(AXES, 0.0), dict.fromkeys(AXES, 0.0)
        self.sent = dict.fromkeys(AXES, 0.0), dict.fromkeys(AXES, 0.0)  # overlapped or not
        self.overlapped = [0.0, 0.0]
        self.copied = [0.0, 0.0]  # forward, backward: between the buffers of messages and activations
        self.launched: dict[int, tuple[float, float]] = {}  # messages that the host issues, by operation
        self.ep_exposed: dict[int, float] = {}  # exposed seconds of ep messages, forward, by operation
        self.longest = unit.longest
        self.overlap_seconds = list(unit.overlap_seconds)
        for index in unit.messages:
            self._add(index)

    def _add(self, index: int) -> None:
        """Add the messages of one operation to the exposed and overlapped seconds."""
        op = self.ops[index]
        assert op.message is not None
        message = op.message.uncast if op.recomputed else op.message
        rank_group = self.get_rank_group(message.axis)
        if rank_group.ranks == 1:
            return
        axis = message.axis.partition("_")[0]  # both of 2D tensor parallelism count as tp
        forward, backward, resent = self._time_messages(message, rank_group, recomputed=op.recomputed)
        if index not in self.unit.in_graph:
            self.launched[index] = bool(forward.seconds), bool(backward.seconds) + bool(resent.seconds)
        total = forward.seconds + backward.seconds + resent.seconds
        if total > self.longest[1]:
            self.longest = f"{message.axis} {op.name}", total
        if axis == "tp" and self.copy_seconds is not None:
            repeats = message.forward, message.forward if op.recomputed else message.regather, message.backward
            copies = [self.copy_seconds(2 * message.payload) * (collective in COPIED) for collective in repeats]
            self.copied = [self.copied[0] + copies[0], self.copied[1] + copies[1] + copies[2]]
        overlapped_compute = self._find_overlapped_compute(index)
        exposed = self._estimate_exposed_seconds(index, forward, side=0, compute_seconds=overlapped_compute.forward)
        backward_exposed = self._estimate_exposed_seconds(
            index, backward, side=1, compute_seconds=overlapped_compute.backward + overlapped_compute.weight
        )
        self.sent[0][axis] += forward.seconds
        self.sent[1][axis] += backward.seconds + resent.seconds
        is_ring = not self.nccl and _is_ring(op)  # its hops are always overlapped
        forward_alone, backward_alone, resent_alone = (
            (exposed, backward_exposed, resent) if is_ring else (forward.seconds, backward.seconds, resent)
        )
        if axis == "tp" and message.regather and not op.recomputed and self.can_overlap:
            gather, reduce = self._overlap_products(index, resent, backward)
            can_overlap = "tp" not in self.job.stack.overlap or self.job.stack.kernel_facts.fuses_linears
            resent_alone = resent_alone._replace(seconds=resent_alone.seconds - (gather if can_overlap else 0.0))
            backward_alone -= self._overlap_wgrad(index, backward) if can_overlap else 0.0
            resent = resent._replace(seconds=resent.seconds - gather)
            backward_exposed -= reduce
            self.overlapped[1] += gather + reduce
        elif axis == "tp" and self.job.stack.async_tp and self.can_overlap:
            sends_in_parts = "tp" in self.job.stack.overlap
            if not message.forward or (message.regather and not sends_in_parts):  # the input of a column-parallel layer
                reduce = min(backward_exposed, sum(self.times[at].weight for at in self._list_readers(index)))
                backward_exposed -= reduce
                backward_alone -= 0.0 if sends_in_parts else reduce
                self.overlapped[1] += reduce
        resent_exposed = self._estimate_exposed_seconds(
            index, resent, side=1, compute_seconds=overlapped_compute.forward
        )
        backward_exposed = backward_exposed + resent_exposed
        backward_alone = backward_alone + (resent_exposed if is_ring else resent_alone.seconds)
        if message.axis == "ep":
            self.ep_exposed[index] = exposed
        self.exposed[0][axis] += exposed
        self.exposed[1][axis] += backward_exposed
        self.unoverlapped[0][axis] += forward_alone
        self.unoverlapped[1][axis] += backward_alone

    def _time_messages(
        self, message: OpMessage, rank_group: RankGroup, *, recomputed: bool
    ) -> tuple[MessageTime, MessageTime, MessageTime]:
        """Return the seconds of an operation's messages by pass.

        They are those in the forward, of its gradients, and those sent again for the gradients.
        """
        moe = self.model.moe
        is_fused = moe is not None and message.axis == "ep" and self.job.stack.dispatcher == "fused"
        copies = TokenCopies(moe.topk, moe.groups, moe.topk_groups) if moe and is_fused else ONE_COPY
        back_payload = message.payload if message.backward_payload is None else message.backward_payload
        forward = self._estimate_message_time(
            message, message.forward, message.payload, rank_group=rank_group, copies=copies
        )
        resent = self._estimate_message_time(
            message, message.regather, message.uncast.payload, rank_group=rank_group, copies=copies
        )
        parts = message.backward_parts
        backward = self._estimate_message_time(
            message, message.backward, back_payload, rank_group=rank_group, copies=copies, parts=parts
        )
        if recomputed:
            resent = forward
        for collective, payload in message.scales:
            scales = self._estimate_message_time(message, collective, payload, rank_group=rank_group, copies=copies)
            forward = forward._replace(seconds=forward.seconds + scales.seconds)
        return forward, backward, resent

    def _overlap_products(self, index: int, gather: MessageTime, reduce: MessageTime) -> tuple[float, float]:
        """Return the overlapped seconds of tensor parallelism's messages in the backward.

        The gather of a column-parallel layer's input for dW overlaps dx, and the reduction of its dx overlaps dW; in
        the trainer, which treats all linear layers on one input as one, and in software with ``async_tp``.
        """
        stack = self.job.stack
        if stack.kernel_facts.fuses_linears:
            dgrad = sum(self.times[at].backward for at in self._list_readers(index))
        else:
            dgrad = self._find_overlapped_compute(index).backward if stack.async_tp else 0.0
        return min(gather.overlappable_seconds, dgrad), (
            self._overlap_wgrad(index, reduce) if "tp" not in stack.overlap else 0.0
        )

    def _overlap_wgrad(self, index: int, reduce: MessageTime) -> float:
        if not (self.job.stack.kernel_facts.fuses_linears or self.job.stack.async_tp):
            return 0.0
        return min(reduce.overlappable_seconds, sum(self.times[at].weight for at in self._list_readers(index)))

    def _list_readers(self, index: int) -> list[int]:
        """Return the linear layers that read the output of a gather."""
        return [*takewhile(lambda at: self.ops[at].kind == "matmul", range(index + 1, len(self.ops)))]

    def _estimate_message_time(
        self,
        message: OpMessage,
        collective: str,
        payload: int,
        *,
        rank_group: RankGroup,
        copies: TokenCopies,
        parts: int = 1,
    ) -> MessageTime:
        """Return the seconds of all messages of one collective of an operation in one pass, sent in ``parts``.

        "": none.
        """
        if not collective:
            return MessageTime(0.0, 0.0)
        network = self.network
        times = message.times * parts
        size = payload // parts
        seconds = network.seconds(collective, size, rank_group, copies=copies)
        return MessageTime(times * seconds, times * network.busy_seconds(collective, size, rank_group))

    def _find_overlapped_compute(self, index: int) -> OpTime:
        """Return the compute that overlaps a message: the matmul after it, else the one before.

        For a ring its attention.
        """
        op = self.ops[index]
        if op.kind == "attention":
            return self.times[index]
        for other in (index + 1, index - 1):
            if 0 <= other < len(self.ops) and self.ops[other].kind == "matmul":
                return self.times[other]
        return OpTime(0.0, 0.0)

    def _estimate_exposed_seconds(self, index: int, sent: MessageTime, *, side: int, compute_seconds: float) -> float:
        """Return the exposed seconds of a message that overlaps ``compute_seconds`` seconds of compute.

        ``side``: forward 0, backward 1.
        """
        if not sent.seconds:
            return 0.0
        message, seconds = self.ops[index].message, sent.overlappable_seconds
        assert message is not None
        axis, times = message.axis.partition("_")[0], max(1, message.times)
        is_ring = _is_ring(self.ops[index])
        if not (self.can_overlap and axis in self.job.stack.overlap) and not (is_ring and not self.nccl):
            return sent.seconds  # also with gloo, the hops of a ring overlap attention
        if axis == "tp":
            parts = self.get_rank_group(message.axis).ranks
            exposed = seconds / parts + max(0.0, seconds * (1 - 1 / parts) - compute_seconds)
        elif is_ring:
            # in our backward, gradients follow keys and values around the ring, and the last hop returns them
            returns_gradients = (
                self.job.stack.kernel_facts.has_own_attention_kernels and side and message.backward_parts > 1
            )
            return_seconds = seconds / (times * message.backward_parts) if returns_gradients else 0.0
            exposed = return_seconds + max(0.0, seconds - return_seconds - compute_seconds * times / (times + 1))
        elif axis in ("ep", "etp"):
            exposed = max(0.0, seconds - self.overlap_seconds[side])
            self.overlap_seconds[side] = max(0.0, self.overlap_seconds[side] - seconds)
        else:
            exposed = seconds
        self.overlapped[side] += seconds - exposed
        return sent.busy + exposed

    def _forward_with_host(self, host: float) -> float:
        """Return the seconds of a forward whose kernels the host launches one by one, ``host`` seconds each.

        The host runs ahead of the device, but with dropless experts it waits for the token counts before it sends
        tokens (before_ep_alltoall in NVIDIA/Megatron-LM:megatron/core/transformer/moe/token_dispatcher.py). It has
        launched the permutation by then, which is all of its lead. Two layers are simulated and the seconds of the
        second returned; messages leave time to launch.
        """
        moe = self.model.moe
        waits_for_counts = moe is not None and moe.capacity is None and self.job.stack.cuda_graphs != "full"
        launches = [ahead for ahead, _ in self.unit.launches]
        for index, (ahead, _) in self.launched.items():
            launches[index] += ahead
        device = launched = start = 0.0
        for _ in range(2):
            start = device
            for index, (op, time) in enumerate(zip(self.ops, self.times, strict=True)):
                launched += launches[index] * host
                waits = op.blocks_host and index not in self.unit.in_graph
                if waits or (waits_for_counts and op.name == "moe.dispatch"):
                    launched = max(launched, device)
                device = max(device + time.forward, launched) + self.ep_exposed.get(index, 0.0)
        return device - start

    def _count_launches(self) -> tuple[float, float]:
        """Return the number of kernels and messages that the host launches one by one, forward and backward."""
        all_launches = *self.unit.launches, *self.launched.values()
        return sum([forward_launches for forward_launches, _ in all_launches]), sum(
            [backward_launches for _, backward_launches in all_launches]
        )

    def to_unit_time(self) -> UnitTime:
        """Return the totals of all operations added."""
        forward, backward, weight = self.unit.seconds
        forward = forward + self.contention * self.overlapped[0] + self.copied[0]
        backward = backward + self.contention * self.overlapped[1] + self.copied[1]
        longest = self.longest
        if self.nccl:
            device_seconds = forward + backward + weight
            per_launch = self.constants.compiled_launch_share if self.job.stack.is_compiled else 1
            host = self.machine.chip.launch_seconds * per_launch
            forward_launch, backward_launch = (host * times for times in self._count_launches())
            if self.job.stack.launch_blocking:  # +: the host launches a kernel only when the previous one has ended
                forward += forward_launch
                backward += backward_launch
            else:  # max: the host runs ahead, and can launch while the device waits for messages
                forward_exposed = sum(self.exposed[0].values())
                forward = max(
                    combine_host_and_device(forward, forward_launch - forward_exposed, self.constants),
                    self._forward_with_host(host) - forward_exposed,
                )
                device = backward + weight  # launches are split in proportion to the seconds
                backward_exposed = sum(self.exposed[1].values())
                both = combine_host_and_device(device, backward_launch - backward_exposed, self.constants)
                slowdown = both / device if device else 1.0
                backward, weight = backward * slowdown, weight * slowdown
            longest = max(longest, (HOST_LAUNCHES, forward + backward + weight - device_seconds), key=itemgetter(1))
        forward_by_axis, backward_by_axis, forward_alone, backward_alone = (
            tuple(side.values()) for side in (*self.exposed, *self.unoverlapped)
        )
        return UnitTime(
            forward, backward, weight, forward_by_axis, backward_by_axis, forward_alone, backward_alone, longest[0]
        )


def _is_ring(op: Op) -> bool:
    """Return True if messages go around a ring, each overlapping the attention on the keys already present."""
    return op.kind == "attention" and op.message is not None and op.message.forward == "p2p"


def combine_host_and_device(device: float, host: float, constants: Constants) -> float:
    """Return the seconds of device and host running at the same time.

    This is their p-norm, above the maximum if they are close (jitter).
    """
    exponent = constants.host_device_exponent
    return float((device**exponent + max(0.0, host) ** exponent) ** (1 / exponent))
