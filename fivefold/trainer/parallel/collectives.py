"""Asynchronous collectives along one axis of the mesh, on dim 0: each returns a ``Pending`` to wait for later.

    pending = all_gather(x, axis)  ...compute...  gathered = pending.wait()

An axis of one rank sends nothing and returns its input. No autograd: each parallelism writes its own backward.
If the axis has an ``interleaver``, ``wait`` first lets the other micro-batch compute until that one waits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from fivefold.trainer.parallel.interleave import Interleaver
from fivefold.trainer.parallel.listener import CommEvent
from fivefold.trainer.parallel.mesh import AxisGroup

if hasattr(dist, "all_gather_single"):  # since torch 2.13; 2.11 has only the older names
    _all_gather, _reduce_scatter = dist.all_gather_single, dist.reduce_scatter_single
else:
    _all_gather, _reduce_scatter = dist.all_gather_into_tensor, dist.reduce_scatter_tensor


class Pending:
    """The result of a running collective.

    It keeps ``inputs`` alive until the collective is done. ``interleaver``: runs the other micro-batch before a wait;
    ``event``: notified of the launch and of the wait.
    """

    def __init__(
        self,
        out: Tensor,
        *works: dist.Work | None,
        inputs: object = None,
        interleaver: Interleaver | None = None,
        event: CommEvent | None = None,
    ) -> None:
        self._out, self._works, self._inputs, self._interleaver = out, works, inputs, interleaver
        self._event = event
        if event is not None:
            event.on_launched()

    @property
    def output_buffer(self) -> Tensor:
        """Return the output buffer, whose contents are undefined before ``wait``."""
        return self._out

    def wait(self) -> Tensor:
        """Wait for the collective and return its output."""
        if self._works and self._interleaver is not None:
            self._interleaver.yield_turn()
        event, self._event = self._event, None
        if event is not None:
            event.on_wait_begin(all(work is not None and work.is_completed() for work in self._works))
        for work in self._works:
            assert work is not None
            work.wait()
        if event is not None:
            event.on_wait_end()
        self._works, self._inputs = (), None
        return self._out


def _post(axis: AxisGroup, collective: str, payload: Tensor) -> CommEvent | None:
    """Notify the axis' listener, if any, of a collective on ``payload``, the full tensor."""
    post = axis.listener.post
    return None if post is None else post(axis.name, axis.ranks, collective, payload.nbytes)


def all_gather(x: Tensor, axis: AxisGroup) -> Pending:
    """All-gather ``x``: [n, …] on each rank → [n · ranks, …] on all."""
    if axis.size == 1:
        return Pending(x)
    x = x.contiguous()
    out = x.new_empty(x.shape[0] * axis.size, *x.shape[1:])
    event = _post(axis, "all_gather", out)
    work = _all_gather(out, x, group=axis.group, async_op=True)
    return Pending(out, work, inputs=x, interleaver=axis.interleaver, event=event)


def reduce_scatter(x: Tensor, axis: AxisGroup, *, out: Tensor | None = None) -> Pending:
    """Reduce-scatter ``x``: [n, …] on each rank → this rank's rows [n / ranks, …] of the sum.

    Raises ``ValueError`` if n is not divisible by the number of ranks.
    """
    if axis.size == 1:
        return Pending(x)
    if x.shape[0] % axis.size:
        raise ValueError(f"{x.shape[0]} rows are not divisible by {axis.name}={axis.size}")
    x = x.contiguous()
    if out is None:
        out = x.new_empty(x.shape[0] // axis.size, *x.shape[1:])
    event = _post(axis, "reduce_scatter", x)
    work = _reduce_scatter(out, x, group=axis.group, async_op=True)
    return Pending(out, work, inputs=x, interleaver=axis.interleaver, event=event)


def all_reduce(x: Tensor, axis: AxisGroup, *, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Pending:
    """Reduce ``x`` over the ranks with ``op``, in place."""
    if axis.size == 1:
        return Pending(x)
    event = _post(axis, "all_reduce", x)
    work = dist.all_reduce(x, op=op, group=axis.group, async_op=True)
    return Pending(x, work, interleaver=axis.interleaver, event=event)


def sum_rows(axis: AxisGroup, rows: Tensor) -> Tensor:
    """Sum ``rows`` over the ranks, in place, and wait for it."""
    return all_reduce(rows, axis).wait()


def all_to_all(
    x: Tensor, axis: AxisGroup, *, sent: Sequence[int] | None = None, received: Sequence[int] | None = None
) -> Pending:
    """Exchange rows ordered by destination rank for rows ordered by source rank.

    ``sent``, ``received``: rows per rank (None: equally many).
    """
    if axis.size == 1:
        return Pending(x)
    x = x.contiguous()
    rows = x.shape[0] if received is None else sum(received)
    out = x.new_empty(rows, *x.shape[1:])
    event = _post(axis, "all_to_all", x)
    work = dist.all_to_all_single(
        out,
        x,
        None if received is None else list(received),
        None if sent is None else list(sent),
        group=axis.group,
        async_op=True,
    )
    return Pending(out, work, inputs=x, interleaver=axis.interleaver, event=event)


def exchange(
    sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]], axis: AxisGroup
) -> list[Pending]:
    """Start point-to-point messages in one batch, each given as (tensor, peer's index in ``axis``).

    Return one ``Pending`` for all of them, or none if there are no messages. Receives are posted first: gloo requests a
    message over the connection on which it sends, so a rank that is later than its peer would queue the request behind
    its own message, and the two messages would run one after the other.
    """
    own_index, ranks = axis.rank, axis.ranks
    operations = [
        dist.P2POp(dist.irecv, tensor, ranks[place], axis.way(place, own_index)) for tensor, place in receives
    ]
    operations += [dist.P2POp(dist.isend, tensor, ranks[place], axis.way(own_index, place)) for tensor, place in sends]
    if not operations:
        return []
    event = _post_p2p(axis, sends, receives)
    if axis.back is None:
        works = dist.batch_isend_irecv(operations)
    else:  # a batch can have only one group
        works = [operation.op(operation.tensor, operation.peer, group=operation.group) for operation in operations]
    arriving = (receives or sends)[-1][0]
    return [Pending(arriving, *works, inputs=operations, interleaver=axis.interleaver, event=event)]


def send(x: Tensor, axis: AxisGroup, place: int) -> Pending:
    """Start to send ``x`` to the rank at ``place`` of ``axis``; ``wait`` returns ``x``, which is kept until then."""
    event = _post_p2p(axis, [(x, place)], [])
    return Pending(x, dist.isend(x, axis.ranks[place], group=axis.group), event=event)


def receive(out: Tensor, axis: AxisGroup, place: int) -> Pending:
    """Start to receive into ``out`` from the rank at ``place`` of ``axis``."""
    event = _post_p2p(axis, [], [(out, place)])
    work = dist.irecv(out, axis.ranks[place], group=axis.group)
    return Pending(out, work, interleaver=axis.interleaver, event=event)


def _post_p2p(
    axis: AxisGroup, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]
) -> CommEvent | None:
    """Notify the axis' listener, if any, of point-to-point messages that start together."""
    post = axis.listener.post
    if post is None:
        return None
    to, source = (tuple(axis.ranks[place] for _, place in messages) for messages in (sends, receives))
    return post(axis.name, axis.ranks, "p2p", sum(tensor.nbytes for tensor, _ in sends), to=to, source=source)
