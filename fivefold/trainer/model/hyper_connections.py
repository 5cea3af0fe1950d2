"""Hyper-connections: a stream of n parts [R, n, D], which weights that each token makes connect with every branch.

    a = scale · W RMSNorm(x) + bias          x: the parts of a token, next to one another
    u = Σ_j pre_j x_j                        what the branch reads
    x_k ← post_k · branch(u) + Σ_j comb_jk x_j,  or + x_k

pre, post and comb are functions of a, which is kept instead of them. Formulas and sources:
``fivefold/model/hyper_connections.py``.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.model.hyper_connections import HyperConnections
from fivefold.model.spec import Model
from fivefold.trainer.model.operation import Run, call_directly


class HyperConnection(nn.Module):
    """The connection of the streams with one branch, or with the head, which only sums them (``is_head``)."""

    def __init__(self, model: Model, *, name: str, is_head: bool = False) -> None:
        super().__init__()
        hyper = model.hyper_connections
        assert hyper is not None
        self.run: Run = call_directly
        self.name, self.hyper, self.norm_epsilon = name, hyper, model.norm_epsilon
        n = hyper.streams
        self.sizes = (n,) if is_head else (n, n, n * n) if hyper.mixes else (n, n)  # of pre, post and comb
        self.weight = nn.Parameter(torch.empty(sum(self.sizes), n * model.width))
        self.bias = nn.Parameter(torch.empty(sum(self.sizes)))
        self.scale = nn.Parameter(torch.empty(len(self.sizes)))

    def forward(self, x_RnD: Tensor) -> tuple[Tensor, Tensor]:
        """Return what the branch reads, [R, D], and the numbers a [R, C] from which ``mix`` adds its output."""
        weights = self.weight, self.bias, self.scale
        return self.run(self.name, collapse, x_RnD, *weights, self)

    def mix(self, x_RnD: Tensor, branch_RD: Tensor, numbers: Tensor) -> Tensor:
        """Return the streams [R, n, D] after a branch, whose output is [R, D]."""
        return self.run(f"{self.name}.mix", mix, x_RnD, branch_RD, numbers, self.hyper)


def repeat_streams(x_RD: Tensor, streams: int) -> Tensor:
    """Return the copies [R, n, D] of the embedding that the streams begin as."""
    return x_RD[:, None].expand(-1, streams, -1).contiguous()


def collapse(
    x_RnD: Tensor, weight: Tensor, bias: Tensor, scale: Tensor, connection: HyperConnection
) -> tuple[Tensor, Tensor]:
    """Return Σ pre_j x_j [R, D], and the numbers a [R, C]."""
    return _CollapseStreams.apply(x_RnD, weight, bias, scale, connection)


def mix(x_RnD: Tensor, branch_RD: Tensor, numbers: Tensor, hyper: HyperConnections) -> Tensor:
    """Return post_k · branch + Σ comb_jk x_j, or + x_k: [R, n, D]."""
    return _MixStreams.apply(x_RnD, branch_RD, numbers, hyper)


class _CollapseStreams(torch.autograd.Function):
    """Saves the streams, a, and the reciprocal root of the mean square of each row."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, scale: Tensor, connection: HyperConnection
    ) -> tuple[Tensor, Tensor]:
        ctx.connection = connection
        rows = _widen(x).flatten(1)
        squares = torch.linalg.vector_norm(rows, dim=1, keepdim=True).square_()
        reciprocal = squares.div_(rows.shape[1]).add_(connection.norm_epsilon).rsqrt_()
        numbers = F.linear(rows, weight.to(rows.dtype)).mul_(reciprocal)
        numbers = numbers.mul_(_expand_scale(scale, connection).to(rows.dtype)).add_(bias)
        ctx.save_for_backward(x, weight, bias, scale, numbers, reciprocal)
        return _sum_streams(x, _make_pre(numbers, connection.hyper)), numbers

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, numbers_gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        x, weight, bias, scale, numbers, reciprocal = ctx.saved_tensors
        connection: HyperConnection = ctx.connection
        n = x.shape[1]
        rows, out = _widen(x).flatten(1), _widen(gradient)
        pre_gradient = torch.stack([(out * x[:, k]).sum(-1) for k in range(n)], dim=1)
        total = torch.zeros_like(numbers) if numbers_gradient is None else numbers_gradient.clone()
        total[:, :n] += torch.ops.aten.sigmoid_backward(pre_gradient, numbers[:, :n].sigmoid())
        bias_gradient = total.sum(0)
        factors = _expand_scale(scale, connection).to(rows.dtype)
        products = (total * reciprocal).t() @ rows  # of the gradient of a and the normed streams
        scale_gradient = torch.stack([part.sum() for part in (products * weight).sum(1).split(connection.sizes)])
        # a − bias are the products with the normed streams, from which follows what the norm subtracts
        inner = (total * (numbers - bias)).sum(1, keepdim=True).div_(rows.shape[1]).mul_(reciprocal.square())
        x_gradient = (total.mul_(factors) @ weight.to(rows.dtype)).mul_(reciprocal).addcmul_(rows, inner, value=-1)
        streams, pre = x_gradient.view(x.shape), _make_pre(numbers, connection.hyper)
        for k in range(n):
            streams[:, k].addcmul_(out, pre[:, k, None])
        weight_gradient = products.mul_(factors[:, None]).to(weight.dtype)
        return streams.to(x.dtype), weight_gradient, bias_gradient.to(bias.dtype), scale_gradient.to(scale.dtype), None


class _MixStreams(torch.autograd.Function):
    """Saves the branch's output, a, and the streams if they are mixed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, branch: Tensor, numbers: Tensor, hyper: HyperConnections) -> Tensor:
        ctx.hyper = hyper
        ctx.save_for_backward(*([x] if hyper.mixes else []), branch, numbers)
        post = _make_post(numbers, hyper)
        if not hyper.mixes:
            parts = [torch.addcmul(_widen(x[:, k]), _widen(branch), post[:, k, None]) for k in range(hyper.streams)]
            return torch.stack(parts, dim=1).to(x.dtype)
        comb = Sinkhorn(numbers, hyper).comb
        out = torch.bmm(comb.to(x.dtype).mT, x)
        return out.addcmul_(post.to(x.dtype)[:, :, None], branch[:, None])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        *streams, branch, numbers = ctx.saved_tensors
        hyper: HyperConnections = ctx.hyper
        n = hyper.streams
        post = _make_post(numbers, hyper)
        branch_gradient = _sum_streams(gradient, post)
        wide_branch = _widen(branch)
        post_gradient = torch.stack([(gradient[:, k] * wide_branch).sum(-1) for k in range(n)], dim=1)
        del wide_branch
        total = torch.zeros_like(numbers)
        slope = torch.ops.aten.sigmoid_backward(post_gradient, numbers[:, n : 2 * n].sigmoid())
        total[:, n : 2 * n] = slope.mul_(hyper.magnitude)
        if not streams:
            return gradient, branch_gradient, total, None
        (x,) = streams
        sinkhorn = Sinkhorn(numbers, hyper)
        comb_gradient = torch.bmm(x, gradient.mT).to(numbers.dtype)
        total[:, 2 * n :] = sinkhorn.differentiate(comb_gradient).flatten(1)
        return torch.bmm(sinkhorn.comb.to(x.dtype), gradient), branch_gradient, total, None


class Sinkhorn:
    """Matrices [R, n, n] of nearly doubly stochastic weights: softmax of each row, then columns and rows in turn."""

    def __init__(self, numbers: Tensor, hyper: HyperConnections) -> None:
        n = hyper.streams
        self.softmax = numbers[:, 2 * n :].unflatten(1, (n, n)).softmax(-1)
        self.comb = self.softmax + hyper.epsilon
        self.steps: list[tuple[int, Tensor, Tensor]] = []  # of each division: the dim of its sums, they, and the result
        for index in range(2 * hyper.iterations - 1):
            dim = -1 if index % 2 else -2
            sums = self.comb.sum(dim, keepdim=True).add_(hyper.epsilon)
            self.comb = self.comb / sums
            self.steps.append((dim, sums, self.comb))

    def differentiate(self, gradient: Tensor) -> Tensor:
        """Return the gradient of the numbers [R, n, n] from that of ``comb``."""
        for dim, sums, result in reversed(self.steps):
            gradient = (gradient - (gradient * result).sum(dim, keepdim=True)) / sums
        return torch.ops.aten._softmax_backward_data(gradient, self.softmax, -1, gradient.dtype)


def _make_pre(numbers: Tensor, hyper: HyperConnections) -> Tensor:
    """Return the weights [R, n] with which the streams are summed."""
    return numbers[:, : hyper.streams].sigmoid().add_(hyper.epsilon)


def _make_post(numbers: Tensor, hyper: HyperConnections) -> Tensor:
    """Return the factors [R, n] of a branch's output; those of independent connections have epsilon too."""
    post = numbers[:, hyper.streams : 2 * hyper.streams].sigmoid().mul_(hyper.magnitude)
    return post if hyper.mixes else post.add_(hyper.epsilon)


def _sum_streams(x: Tensor, weights: Tensor) -> Tensor:
    """Return the sum [R, D] of the streams [R, n, D] times ``weights`` [R, n], in their dtype, which is fp32."""
    total = x[:, 0] * weights[:, :1]
    for k in range(1, x.shape[1]):
        total.addcmul_(x[:, k], weights[:, k, None])
    return total.to(x.dtype)


def _expand_scale(scale: Tensor, connection: HyperConnection) -> Tensor:
    """Return the factor of each number [C]: pre, post and comb have one each."""
    return torch.cat([factor.expand(size) for factor, size in zip(scale, connection.sizes, strict=True)])


def _widen(x: Tensor) -> Tensor:
    """Return ``x`` in fp32, or in a higher precision that it has."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
