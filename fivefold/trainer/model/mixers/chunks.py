"""A scan of a sequence in chunks of tokens, between which a state is handed on.

    out[c], S[c + 1] = chunk(inputs[c], factors, S[c])

A scan saves its inputs alone. Its backward first computes the states again, then each chunk with autograd, from the
last to the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from fivefold.trainer.model.mixers.convolution import get_sum_dtype
from fivefold.trainer.model.operation import exclude_from_graphs


class ChunkFunction(Protocol):
    """Computes one chunk.

    ``inputs``: of each [B, C, columns], then the factors, which are the same for all tokens. ``state``: after the
    chunk before; None: zero. It returns the outputs [B, C, columns], and the state after the chunk unless it
    ``is_last``. ``only_state``: the outputs are not used.
    """

    def __call__(
        self, inputs: Sequence[Tensor], state: Tensor | None, *, is_last: bool = False, only_state: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Return outputs and state."""


@exclude_from_graphs
def scan(
    chunk: ChunkFunction, rows: Sequence[Tensor], factors: Sequence[Tensor], *, columns: int, tokens: int, size: int
) -> Tensor:
    """Return the outputs [R, ``columns``] of a scan of ``rows`` [R, ·], in sequences of ``tokens``.

    ``factors``: the tensors that are the same for all tokens; ``size``: tokens of a chunk.
    """
    out: Tensor = _Scan.apply(chunk, columns, tokens, size, len(rows), *rows, *factors)  # type: ignore[no-untyped-call]
    return out


def scan_forward(
    chunk: ChunkFunction, rows: Sequence[Tensor], factors: Sequence[Tensor], *, columns: int, tokens: int, size: int
) -> Tensor:
    """Return the outputs of ``scan``, without autograd."""
    out = rows[0].new_empty(len(rows[0]), columns)
    (outs,), inputs = zip(*_split([out], tokens, size), strict=True), _split(rows, tokens, size)
    state: Tensor | None = None
    for index, part in enumerate(inputs):
        o, state = chunk((*part, *factors), state, is_last=index + 1 == len(inputs))
        outs[index].copy_(o)
        del o
    return out


def scan_backward(
    chunk: ChunkFunction,
    rows: Sequence[Tensor],
    factors: Sequence[Tensor],
    grad: Tensor,
    *,
    grads: Sequence[Tensor],
    tokens: int,
    size: int,
) -> list[Tensor]:
    """Write the gradients of ``rows`` (tensors with a row per token) into ``grads``; return those of ``factors``.

    Factors are weights, which all chunks share. States between chunks are computed again, chunk by chunk.
    """
    factor_grads = [torch.zeros_like(factor, dtype=get_sum_dtype(factor.dtype)) for factor in factors]
    chunks, chunk_grads = (_split(tensors, tokens, size) for tensors in (rows, grads))
    (out_grads,) = zip(*_split([grad], tokens, size), strict=True)
    states: list[Tensor | None] = [None]
    for part in chunks[:-1]:
        states.append(chunk((*part, *factors), states[-1], only_state=True)[1])
    state_grad: Tensor | None = None
    for index in reversed(range(len(chunks))):
        state = states.pop()
        leaves = [x.detach().requires_grad_() for x in (*chunks[index], *factors)]
        inputs = tuple(leaves)
        leaves += [] if state is None else [state.requires_grad_()]
        with torch.enable_grad():
            o, new_state = chunk(inputs, state, is_last=state_grad is None)
        made, made_grads = [o], [out_grads[index].to(o.dtype)]
        if new_state is not None and state_grad is not None:
            made, made_grads = [o, new_state], [*made_grads, state_grad]
        chunk_gradients = list(torch.autograd.grad(made, leaves, made_grads, materialize_grads=True))
        del o, new_state, made, made_grads, leaves, inputs
        state_grad = chunk_gradients.pop() if state is not None else None
        for into, part_grad in zip(chunk_grads[index], chunk_gradients, strict=False):
            into.copy_(part_grad)
        for total, part_grad in zip(factor_grads, chunk_gradients[len(rows) :], strict=True):
            total += part_grad
        del state, chunk_gradients
    return [total.to(factor.dtype) for total, factor in zip(factor_grads, factors, strict=True)]


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, chunk: ChunkFunction, columns: int, tokens: int, size: int, inputs: int, *tensors: Tensor
    ) -> Tensor:
        ctx.save_for_backward(*tensors)
        ctx.settings = chunk, tokens, size, inputs
        return scan_forward(chunk, tensors[:inputs], tensors[inputs:], columns=columns, tokens=tokens, size=size)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        chunk, tokens, size, inputs = ctx.settings
        rows, factors = ctx.saved_tensors[:inputs], ctx.saved_tensors[inputs:]
        grads = [torch.empty_like(x) for x in rows]
        factor_grads = scan_backward(chunk, rows, factors, grad, grads=grads, tokens=tokens, size=size)
        return None, None, None, None, None, *grads, *factor_grads


def _split(rows: Sequence[Tensor], tokens: int, size: int) -> list[tuple[Tensor, ...]]:
    """Return views of each chunk: [B, C, columns] of each of ``rows``."""
    return list(zip(*(x.view(-1, tokens, x.shape[1]).split(size, dim=1) for x in rows), strict=True))
