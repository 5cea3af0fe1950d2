"""A scan of a sequence in groups of chunks of tokens, between which a state is handed on.

    out[g], S[g + 1] = compute(inputs[g], factors, S[g])

A group's chunks are computed at once (``fivefold/model/mixers/chunk_groups.py``). A scan saves only its inputs. Its
backward first computes the states again, then each group with autograd, from the last to the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.trainer.model.mixers.convolution import get_sum_dtype
from fivefold.trainer.model.operation import exclude_from_graphs


class GroupFunction(Protocol):
    """Computes one group of chunks.

    ``inputs``: each [B, tokens of the group, columns], then the factors, which are the same for all tokens. ``state``:
    the state after the previous group; None: zero. It returns the outputs [B, tokens, columns], and the state after the
    group unless it ``is_last``. ``only_state``: the outputs are not used.
    """

    def __call__(
        self, inputs: Sequence[Tensor], state: Tensor | None, *, is_last: bool = False, only_state: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Return outputs and state."""


def limit_temporaries(module: nn.Module, temporary_bytes: int) -> None:
    """Let the scans of every submodule of ``module`` compute groups of chunks of at most ``temporary_bytes``."""
    for submodule in module.modules():
        if hasattr(submodule, "temporary_bytes"):
            submodule.temporary_bytes = temporary_bytes  # type: ignore[assignment]


@exclude_from_graphs
def scan(
    compute: GroupFunction, rows: Sequence[Tensor], factors: Sequence[Tensor], *, columns: int, groups: Sequence[int]
) -> Tensor:
    """Return the outputs [R, ``columns``] of a scan of ``rows`` [R, ·].

    ``factors``: the tensors that are the same for all tokens; ``groups``: the tokens of each group of a sequence.
    """
    return _Scan.apply(compute, columns, groups, len(rows), *rows, *factors)


def scan_forward(
    compute: GroupFunction, rows: Sequence[Tensor], factors: Sequence[Tensor], *, columns: int, groups: Sequence[int]
) -> Tensor:
    """Return the outputs of ``scan``, without autograd."""
    out = rows[0].new_empty(len(rows[0]), columns)
    (outs,), inputs = zip(*_split([out], groups), strict=True), _split(rows, groups)
    state: Tensor | None = None
    for index, part in enumerate(inputs):
        o, state = compute((*part, *factors), state, is_last=index + 1 == len(inputs))
        outs[index].copy_(o)
        del o
    return out


def scan_backward(
    compute: GroupFunction,
    rows: Sequence[Tensor],
    factors: Sequence[Tensor],
    grad: Tensor,
    *,
    grads: Sequence[Tensor],
    groups: Sequence[int],
) -> list[Tensor]:
    """Write the gradients of ``rows`` (tensors with a row per token) into ``grads``; return those of ``factors``.

    Factors are weights, which all groups share. States between groups are computed again, group by group.
    """
    factor_grads = [torch.zeros_like(factor, dtype=get_sum_dtype(factor.dtype)) for factor in factors]
    parts, part_grads = (_split(tensors, groups) for tensors in (rows, grads))
    (out_grads,) = zip(*_split([grad], groups), strict=True)
    states: list[Tensor | None] = [None]
    for part in parts[:-1]:
        states.append(compute((*part, *factors), states[-1], only_state=True)[1])
    state_grad: Tensor | None = None
    for index in reversed(range(len(parts))):
        state = states.pop()
        leaves = [x.detach().requires_grad_() for x in (*parts[index], *factors)]
        inputs = tuple(leaves)
        leaves += [] if state is None else [state.requires_grad_()]
        with torch.enable_grad():
            o, new_state = compute(inputs, state, is_last=state_grad is None)
        outputs, output_grads = [o], [out_grads[index].to(o.dtype)]
        if new_state is not None and state_grad is not None:
            outputs, output_grads = [o, new_state], [*output_grads, state_grad]
        gradients = list(torch.autograd.grad(outputs, leaves, output_grads, materialize_grads=True))
        del o, new_state, outputs, output_grads, leaves, inputs
        state_grad = gradients.pop() if state is not None else None
        for into, gradient in zip(part_grads[index], gradients, strict=False):
            into.copy_(gradient)
        for total, gradient in zip(factor_grads, gradients[len(rows) :], strict=True):
            total += gradient
        del state, gradient, gradients
    return [total.to(factor.dtype) for total, factor in zip(factor_grads, factors, strict=True)]


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, compute: GroupFunction, columns: int, groups: Sequence[int], inputs: int, *tensors: Tensor
    ) -> Tensor:
        ctx.save_for_backward(*tensors)
        ctx.settings = compute, groups, inputs
        return scan_forward(compute, tensors[:inputs], tensors[inputs:], columns=columns, groups=groups)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        compute, groups, inputs = ctx.settings
        rows, factors = ctx.saved_tensors[:inputs], ctx.saved_tensors[inputs:]
        grads = [torch.empty_like(x) for x in rows]
        factor_grads = scan_backward(compute, rows, factors, grad, grads=grads, groups=groups)
        return None, None, None, None, *grads, *factor_grads


def hand_on_states(
    added: Tensor, log_decay: Tensor, state: Tensor | None, *, is_last: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Return the states before each chunk of a group, None if all are zero; and after it, None if it is the last group.

        S[c + 1] = added[c] + e^log_decay[c] S[c]

    ``added`` [B, chunks, heads, state, parts · dims]; ``log_decay`` [B or 1, chunks, heads, parts]; ``state``: the
    state before the group, without a chunk dim. The states are sums over earlier chunks, decayed: one matmul for all.
    """
    chunks, parts = log_decay.shape[1], log_decay.shape[3]
    if chunks == 1:
        before = None if state is None else state[:, None]
        if is_last:
            return before, None
        after = added[:, 0]
        if state is not None:
            decay = log_decay[:, 0, ..., None].exp().expand(-1, -1, -1, added.shape[4] // parts)
            after = after + state * decay.flatten(2)[:, :, None]
        return before, after
    start = torch.zeros_like(added[:, :1]) if state is None else state[:, None]
    if is_last:
        added, log_decay = added[:, :-1], log_decay[:, :-1]
    chain = torch.cat([start, added], dim=1).unflatten(4, (parts, -1)).permute(0, 2, 4, 1, 3, 5)
    sums = F.pad(log_decay.permute(0, 2, 3, 1).cumsum(-1), (1, 0))  # from the start of the group
    states = (decay_pairs(sums).tril() @ chain.flatten(4)).unflatten(4, chain.shape[4:])  # [B, heads, parts, chunks, …]
    states = states.permute(0, 3, 1, 4, 2, 5).flatten(4)
    # a view would keep the states of all chunks
    return states[:, :chunks], None if is_last else states[:, chunks].clone()


def accumulate(driven: Tensor, decay: Tensor, state: Tensor | None, *, size: int) -> Tensor:
    """Return S[t] = decay[t] S[t − 1] + driven[t] of all tokens of a group, all [B, tokens, ...].

    ``driven`` is overwritten; ``state`` [B, ...]: the state before the group; None: zero. ``size``: tokens of a chunk.
    All chunks are added up at once, token after token; then what each leaves to those after it, chunk after chunk.
    """
    return _Accumulate.apply(driven, decay, state, size)


class _Accumulate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, driven: Tensor, decay: Tensor, state: Tensor | None, size: int) -> Tensor:
        ctx.mark_dirty(driven)
        size = min(size, driven.shape[1])
        sums, decays = (x.unflatten(1, (-1, size)) for x in (driven, decay))
        for token in range(1, size):
            sums[:, :, token].addcmul_(decays[:, :, token], sums[:, :, token - 1])
        if state is not None:  # what decays into the tokens of the first chunk
            sums[:, 0].addcmul_(decays[:, 0].cumprod(1), state[:, None])
        if sums.shape[1] > 1:
            reach = decays[:, 1:].cumprod(2)
            for chunk in range(1, sums.shape[1]):
                sums[:, chunk, -1].addcmul_(reach[:, chunk - 1, -1], sums[:, chunk - 1, -1])
            sums[:, 1:, :-1].addcmul_(reach[:, :, :-1], sums[:, :-1, -1:])
        ctx.save_for_backward(driven, decay, state)
        ctx.size = size
        return driven

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        states, decay, state = ctx.saved_tensors
        grad = grad.clone(memory_format=torch.contiguous_format)
        sums, decays = (x.unflatten(1, (-1, ctx.size)) for x in (grad, decay))
        chunks, size = sums.shape[1:3]
        for token in reversed(range(size - 1)):
            sums[:, :, token].addcmul_(decays[:, :, token + 1], sums[:, :, token + 1])
        if chunks > 1:
            # from each token to the first of the next chunk
            reach = decay[:, 1 : (chunks - 1) * size + 1].unflatten(1, (-1, size)).flip(2).cumprod(2).flip(2)
            for chunk in reversed(range(chunks - 1)):
                sums[:, chunk, 0].addcmul_(reach[:, chunk, 0], sums[:, chunk + 1, 0])
            sums[:, :-1, 1:].addcmul_(reach[:, :, 1:], sums[:, 1:, :1])
            del reach
        decay_grad = torch.empty_like(decay)
        torch.mul(grad[:, 1:], states[:, :-1], out=decay_grad[:, 1:])
        if state is None:
            decay_grad[:, 0].zero_()
            return grad, decay_grad, None, None
        torch.mul(grad[:, 0], state, out=decay_grad[:, 0])
        return grad, decay_grad, grad[:, 0] * decay[:, 0], None


def decay_pairs(sums: Tensor) -> Tensor:
    """Return e^(sums[i] − sums[j]) for j < i, else 1: [..., T, T] of ``sums`` [..., T]."""
    # the diagonal is 1, and its gradients would cancel but for their rounding
    return (sums[..., :, None] - sums[..., None, :]).tril_(-1).exp_()


def _split(rows: Sequence[Tensor], groups: Sequence[int]) -> list[tuple[Tensor, ...]]:
    """Return views of each group: [B, tokens, columns] of each of ``rows``."""
    return list(zip(*(x.view(-1, sum(groups), x.shape[1]).split(groups, dim=1) for x in rows), strict=True))
