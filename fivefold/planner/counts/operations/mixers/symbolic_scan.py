"""The operations of a scan in groups of chunks, with symbolic tensors: what lives at once, forward and backward.

The functions are those of ``trainer/model/mixers/chunks.py`` and ``delta_rule.py``, operation by operation, with the
same local variables, since these keep tensors alive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

from fivefold.model.mixers.gated_delta_net import DELTA_CHUNK
from fivefold.planner.counts.operations.symbolic import (
    SymbolicMemory,
    Tensor,
    call_function,
    compute,
    concatenate,
    differentiate,
)

MAX_GROUPS = 3  # that are walked through: the first one and the last two; those between are as the first


GroupFunction = Callable[..., tuple[Tensor, Tensor | None]]  # as ``GroupFunction`` of the trainer
RunGroup = Callable[..., tuple[Tensor, Tensor | None]]  # the same, with the geometry of the mixer as ``net``


class ScanInputs(NamedTuple):
    """The inputs of a scan: the columns of each tensor with a row per token, and the numbers of each factor."""

    columns: tuple[int, ...]
    factors: tuple[int, ...]
    out_columns: int
    sequences: int
    width: int  # bytes of an element

    def borrow(self, memory: SymbolicMemory, tokens: int, *, total: int) -> list[Tensor]:
        """Return the views of a group of ``tokens`` of ``total``, then the factors."""
        rows = [
            memory.borrow((self.sequences, tokens, columns), width=self.width, strides=(total * columns, columns, 1))
            for columns in self.columns
        ]
        return [*rows, *(memory.borrow((numbers,), width=self.width) for numbers in self.factors)]


def count_scratch(run_group: RunGroup, net: Any, inputs: ScanInputs, groups: Sequence[int]) -> tuple[int, int]:
    """Return the bytes of temporaries of a scan of ``net``, forward and backward, in groups of these tokens.

    Its inputs and outputs, and their gradients, are not among them.
    """
    walked = (groups[0], *groups[1:][1 - MAX_GROUPS :])
    forward, backward, state = _walk(run_group, net, inputs, walked)
    return forward, backward + (len(groups) - len(walked)) * state


@lru_cache(maxsize=4096)
def _walk(run_group: RunGroup, net: Any, inputs: ScanInputs, groups: tuple[int, ...]) -> tuple[int, int, int]:
    """Return the temporaries of ``scan_forward`` and of ``scan_backward`` in bytes, and the bytes of a state."""
    compute_group = partial(run_group, net=net)
    return _walk_forward(compute_group, inputs, groups), *_walk_backward(compute_group, inputs, groups)


def _walk_forward(compute_group: GroupFunction, inputs: ScanInputs, groups: Sequence[int]) -> int:
    """Return the peak of temporaries of ``scan_forward``."""
    memory = SymbolicMemory()
    state: Tensor | None = None
    for index, tokens in enumerate(groups):
        given = inputs.borrow(memory, tokens, total=sum(groups))
        o, state = compute_group(given, state, is_last=index + 1 == len(groups))
        del o
    return memory.peak


def _walk_backward(compute_group: GroupFunction, inputs: ScanInputs, groups: Sequence[int]) -> tuple[int, int]:
    """Return the peak of temporaries of ``scan_backward``, and the bytes of a state."""
    memory, total = SymbolicMemory(), sum(groups)
    states: list[Tensor | None] = [None]
    for tokens in groups[:-1]:
        states.append(compute_group(inputs.borrow(memory, tokens, total=total), states[-1], only_state=True)[1])
    state_bytes = 0 if states[-1] is None else states[-1].nbytes
    state_grad: Tensor | None = None
    for tokens in reversed(groups):
        state = states.pop()
        given = [tensor.require_grad() for tensor in inputs.borrow(memory, tokens, total=total)]
        leaves = list(given)
        if state is not None:
            state = state.require_grad()
            leaves.append(state)
        with memory.enable_grad():
            o, new_state = compute_group(given, state, is_last=state_grad is None)
        columns = inputs.out_columns
        strides = (total * columns, columns, 1)
        grad = memory.borrow((inputs.sequences, tokens, columns), width=inputs.width, strides=strides)
        outputs, output_grads = [o], [grad.cast(o.width)]
        if new_state is not None and state_grad is not None:
            outputs, output_grads = [o, new_state], [*output_grads, state_grad]
        gradients = differentiate(outputs, output_grads, leaves)
        del o, new_state, outputs, output_grads, leaves, given
        state_grad = gradients.pop() if state is not None else None
        del state, gradients
    return memory.peak, state_bytes


def split_heads(x: Tensor, heads: int) -> Tensor:
    """Return ``x`` [B, tokens, heads · dim] as [chunks, B, heads, T, dim] in fp32, contiguous."""
    view = x.unflatten(1, (-1, min(DELTA_CHUNK, x.shape[1]))).unflatten(-1, (heads, -1)).permute(1, 0, 3, 2, 4)
    return view.cast(4, contiguous=True).contiguous()


def compute_decay(x: Tensor, a_log: Tensor, dt_bias: Tensor, *, is_bounded: bool) -> Tensor:
    """Return the log of the decay of each token."""
    logits, rates = x + dt_bias.cast(4), a_log.cast(4).exp()
    return (logits * rates).sigmoid() * 1 if is_bounded else logits.softplus() * rates.neg()


def normalize_to_unit_length(x: Tensor) -> Tensor:
    """Return ``x`` divided by its length along the last dim."""
    return x * x.square().sum(-1, keepdim=True).shift().rsqrt()


def apply_delta_rule(
    lefts: Sequence[Tensor],
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    decay: Tensor,
    products: Sequence[Tensor],
    state: Tensor | None,
    *,
    is_last: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return the outputs of a group, and the state after it."""
    inverse, corrected = invert_unit_lower(products[0]), v * beta
    from_start, last = decay.exp(), decay.narrow(-2, 1)
    before: Tensor | None = None
    after: Tensor | None = None
    if v.shape[0] > 1:
        keys, reads = k * (last - decay).exp(), inverse @ (lefts[0] * from_start)
        values, before, after = hand_on_states(inverse @ corrected, reads, keys, last.exp().mT, state, is_last=is_last)
    else:
        if state is not None:
            before = state.unsqueeze(0)
            corrected = corrected - (lefts[0] * from_start) @ before
        values = inverse @ corrected
        if not is_last:
            after = ((k * (last - decay).exp()).mT @ values).select(0)
            after = after if state is None else after + state * last.select(0).exp().mT
    if len(lefts) == 1:
        return v, after
    out = products[1] @ values
    if before is not None:
        out = out + (lefts[1] * from_start) @ before
    return out.permute(1, 0, 3, 2, 4).flatten(3).flatten(1, 2), after


def hand_on_states(
    values: Tensor, reads: Tensor, keys: Tensor, decays: Tensor, state: Tensor | None, *, is_last: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return corrected values, the states before each chunk, and the state after the group, None if it is the last."""
    memory = values.memory
    chunks, *heads = values.shape[:3]
    shape = (chunks, *heads, reads.shape[-1], values.shape[-1])
    states = memory.allocate(shape)
    after = None if is_last else memory.allocate(shape[1:])
    through_state = 2 * values.shape[-2] * values.shape[-1] * reads.shape[-1] * heads[0] * heads[1]
    memory.flops += (2 * chunks - is_last) * through_state
    saved = [tensor.detach() for tensor in (values, reads, keys, decays, states)]
    has_state = state is not None

    def backward(grads: list[Tensor | None]) -> list[Tensor | None]:
        values, _, _, decays, states = saved
        values_grad, after_grads = memory.allocate(values.shape), memory.allocate(states.shape)
        state_grad = memory.allocate(states.shape[1:]) if has_state else None
        memory.flops += (2 * chunks - 1 + has_state) * through_state
        reads_grad = values_grad @ states.mT
        decays_grad = compute(after_grads, states).sum_to(decays.shape)
        return [values_grad, reads_grad, values @ after_grads.mT, decays_grad, state_grad]

    out = values.detach()
    made = call_function(
        [out, states, *([] if after is None else [after])], (values, reads, keys, decays, state), backward
    )
    return made[0], made[1], after


def invert_unit_lower(matrix: Tensor) -> Tensor:
    """Return the inverse of I + the part of ``matrix`` below the diagonal."""
    memory, size = matrix.memory, matrix.shape[-1]
    memory.flops += matrix.nbytes // 4 * size
    inverse = memory.allocate(matrix.shape)
    saved = inverse.detach()

    def backward(grads: list[Tensor | None]) -> list[Tensor | None]:
        assert grads[0] is not None
        inner = grads[0] @ saved.mT
        return [saved.mT @ inner]

    return call_function([inverse], (matrix,), backward)[0]


def hand_on_sums(
    added: Tensor, log_decay: Tensor, state: Tensor | None, *, is_last: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Run ``hand_on_states`` of ``trainer/model/mixers/chunks.py``: states as decayed sums, by one matmul."""
    chunks, parts = log_decay.shape[1], log_decay.shape[3]
    if chunks == 1:
        before = None if state is None else state.unsqueeze(1)
        if is_last:
            return before, None
        after = added.select(1)
        if state is not None:
            decay = log_decay.select(1).unsqueeze(-1).exp()
            decay = decay.expand(*decay.shape[:-1], added.shape[4] // parts)
            after = after + state * decay.flatten(2).unsqueeze(2)
        return before, after
    start = added.memory.allocate((added.shape[0], 1, *added.shape[2:])) if state is None else state.unsqueeze(1)
    if is_last:
        added, log_decay = added.narrow(1, chunks - 1), log_decay.narrow(1, chunks - 1)
    chain = concatenate([start, added], 1).unflatten(4, (parts, -1)).permute(0, 2, 4, 1, 3, 5)
    sums = log_decay.permute(0, 2, 3, 1).cumsum().pad(-1, 1, 0)
    states = (decay_pairs(sums).tril() @ chain.flatten(4)).unflatten(4, chain.shape[4:])
    states = states.permute(0, 3, 1, 4, 2, 5).flatten(4)
    return states.keep_first(1, chunks), None if is_last else states.select(1).clone()


def decay_pairs(sums: Tensor) -> Tensor:
    """Run ``decay_pairs`` of ``trainer/model/mixers/chunks.py``."""
    difference = sums.unsqueeze(-1) - sums.unsqueeze(-2)
    return difference.apply_in_place().apply_in_place(saves_result=True)
