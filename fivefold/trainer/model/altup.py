"""AltUp (arXiv:2301.13310): a stream of n parts [R, n, D], of which a layer computes one and predicts the others.

    p = x + W(x_0) x        y = layer(p_0)        c = p + w(y) (y − p_0)

Formulas: ``fivefold/model/altup.py``. With it comes a low-rank branch next to attention (LAuReL, arXiv:2411.07501).
"""

from __future__ import annotations

from math import sqrt
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.model.spec import Model
from fivefold.trainer.model.linear import Linear
from fivefold.trainer.model.norm import build_norm
from fivefold.trainer.model.operation import Run, call_directly

MIN_MEAN_SQUARE = 1e-5  # of a part of the stream that is made as large as the first


class SharedMatrix(nn.Module):
    """A matrix that a layer multiplies by more than once in a forward, so that autograd adds up its gradients."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, columns))


class AltUpLayer(nn.Module):
    """The prediction and the correction of all parts of the stream in a layer."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        altup = model.altup
        assert altup is not None
        self.run: Run = call_directly
        n = altup.streams
        self.clip, self.width = altup.clip, model.width
        self.scale = nn.Parameter(torch.empty(model.width))
        self.correct = SharedMatrix(n, n)
        self.predict = SharedMatrix(n * n, n)
        self.router = SharedMatrix(n, model.width)
        self.norm = build_norm(model, model.width)

    def predict_parts(self, parts: Tensor) -> tuple[Tensor, Tensor]:
        """Return the predicted parts [R, n, D], and a copy of the first of them [R, D]."""
        streams = parts.shape[1]
        numbers = self._route("altup.predict", parts[:, 0], self.predict, masks=False)
        mixed = self.run("altup.mix", _mix, parts, numbers.view(-1, streams, streams))
        return mixed, self.run("altup.predicted", _copy_first, mixed)

    def correct_parts(self, predicted: Tensor, first_RD: Tensor, y_RD: Tensor) -> Tensor:
        """Return the parts [R, n, D] corrected by what the layer made of the first, ``first_RD`` → ``y_RD``."""
        numbers = self._route("altup.correct", y_RD, self.correct, masks=True)
        new_RD = self.run("altup.innovation", torch.sub, y_RD, first_RD)
        return self.run("altup.correct.add", _correct, predicted, numbers, new_RD)

    def read_first(self, parts: Tensor) -> Tensor:
        """Return a copy [R, D] of the first part, scaled, from which the layer's input is made."""
        first_RD = self.run("altup.copy", _copy_first, parts)
        return self.run("altup.scale", torch.mul, first_RD, self.scale)

    def _route(self, name: str, x_RD: Tensor, matrix: SharedMatrix, *, masks: bool) -> Tensor:
        """Return the numbers that ``matrix`` makes of tanh(router(norm(x) / D)); ``masks``: as in ``_multiply``."""
        normed_RD = self.run(f"{name}.norm", self.norm, x_RD)
        normed_RD = self.run(f"{name}.norm.scale", torch.mul, normed_RD, 1 / self.width)
        logits = self.run(f"{name}.project", F.linear, normed_RD, self.router.weight)
        del normed_RD
        routed = self.run(f"{name}.act", _tanh, logits)
        del logits
        clip = self.clip if torch.is_grad_enabled() else None
        return self.run(name, _multiply, routed, matrix.weight, clip, masks)


class Laurel(nn.Module):
    """The branch next to attention that reads its input: norm(right(left(h))) + h, of low rank."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        assert model.laurel_rank is not None
        self.run: Run = call_directly
        self.left = Linear(model.width, model.laurel_rank, bias=False, is_low_precision=False)
        self.right = Linear(model.laurel_rank, model.width, bias=False, is_low_precision=False)
        self.norm = build_norm(model, model.width)

    def forward(self, h_RD: Tensor, onto_RD: Tensor) -> Tensor:
        """Return (``onto`` + branch(h)) / √2, [R, D]."""
        low = self.run("laurel.left", self.left, h_RD)
        out_RD = self.run("laurel.right", self.right, low)
        del low
        out_RD = self.run("laurel.norm", self.norm, out_RD)
        out_RD = self.run("laurel.add", torch.add, h_RD, out_RD)
        out_RD = self.run("laurel.join", torch.add, onto_RD, out_RD)
        return self.run("laurel.mean", torch.mul, out_RD, 1 / sqrt(2))


def make_projections(model: Model) -> nn.ModuleList | None:
    """Return the matrices of all parts but the first, in the embedding or in the head; None without AltUp."""
    if model.altup is None:
        return None
    layers = (Linear(model.width, model.width, bias=False) for _ in range(model.altup.streams - 1))
    return nn.ModuleList(layers)


def add_to_others(parts: Tensor, y_RD: Tensor) -> Tensor:
    """Return the parts of the stream, with ``y_RD`` added to all but the first."""
    return _AddToOthers.apply(parts, y_RD)


def match_magnitudes(first_RD: Tensor, *others_RD: Tensor) -> Tensor:
    """Return all parts [R, n, D]: ``first``, and the others made as large as it, by the root of their mean square."""
    return _MatchMagnitudes.apply(first_RD, *others_RD)


def _copy_first(parts: Tensor) -> Tensor:
    """Return a copy of the first part, so that what reads it does not keep all of them."""
    return parts[:, 0].clone(memory_format=torch.contiguous_format)


def _mix(parts: Tensor, numbers: Tensor) -> Tensor:
    return _Mix.apply(parts, numbers)


def _correct(parts: Tensor, numbers: Tensor, new_RD: Tensor) -> Tensor:
    return _Correct.apply(parts, numbers, new_RD)


def _tanh(x: Tensor) -> Tensor:
    return _Tanh.apply(x)


def _multiply(x: Tensor, weight: Tensor, clip: float | None, masks: bool) -> Tensor:
    """Return ``x`` times the transposed ``weight``, whose elements are at most ``clip`` in size.

    ``masks``: elements beyond it get no gradient.
    """
    return _Multiply.apply(x, weight, clip, masks)


class _Mix(torch.autograd.Function):
    """x + W x of every row; saves x and W."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, numbers: Tensor) -> Tensor:
        ctx.save_for_backward(x, numbers)
        return torch.baddbmm(x, numbers, x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, numbers = ctx.saved_tensors
        return torch.baddbmm(grad, numbers.mT, grad), torch.bmm(grad, x.mT)


class _Correct(torch.autograd.Function):
    """p_k + (1 + w_k) · new; saves w and new."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, numbers: Tensor, new: Tensor) -> Tensor:
        ctx.save_for_backward(numbers, new)
        return torch.addcmul(parts, (numbers + 1)[:, :, None], new[:, None])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        numbers, new = ctx.saved_tensors
        numbers_grad = (grad * new[:, None]).sum(-1)
        return grad, numbers_grad, (grad * (numbers + 1)[:, :, None]).sum(1)


class _Tanh(torch.autograd.Function):
    """tanh in fp32; saves its output in the dtype of the input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = x.float().tanh().to(x.dtype)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (out,) = ctx.saved_tensors
        return torch.ops.aten.tanh_backward(grad, out)


class _Multiply(torch.autograd.Function):
    """A product with a clamped matrix; saves the input and the matrix."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, clip: float | None, masks: bool) -> Tensor:
        ctx.clip, ctx.masks = clip, masks
        ctx.save_for_backward(x, weight)
        return F.linear(x, _clamp(weight, clip))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight = ctx.saved_tensors
        weight_grad = grad.t() @ x
        if ctx.masks and ctx.clip is not None:
            weight_grad.masked_fill_(weight.abs() > ctx.clip, 0)
        return grad @ _clamp(weight, ctx.clip), weight_grad, None, None


def _clamp(weight: Tensor, clip: float | None) -> Tensor:
    return weight if clip is None else weight.clamp(-clip, clip)


class _AddToOthers(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: Tensor, y: Tensor) -> Tensor:
        out = parts.clone()
        out[:, 1:] += y[:, None]
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad[:, 1:].sum(1)


class _MatchMagnitudes(torch.autograd.Function):
    """Parts as large as the first, u · rms(x) / rms(u), next to it; saves x and u."""

    @staticmethod
    def forward(ctx: Any, first: Tensor, *others: Tensor) -> Tensor:
        ctx.save_for_backward(first, *others)
        rows, width = first.shape
        out = torch.empty(rows, 1 + len(others), width, dtype=first.dtype, device=first.device)
        out[:, 0] = first
        wanted = _mean_square(first).sqrt_()
        for index, other in enumerate(others, start=1):
            size = _mean_square(other).clamp_(min=MIN_MEAN_SQUARE).sqrt_()
            out[:, index] = other * (wanted / size)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        first, *others = ctx.saved_tensors
        wanted = _mean_square(first).sqrt_()
        wanted_grad = torch.zeros_like(wanted)
        grads = []
        for index, other in enumerate(others, start=1):
            square = _mean_square(other)
            size = square.clamp(min=MIN_MEAN_SQUARE).sqrt_()
            inner = (grad[:, index] * other).sum(-1, keepdim=True, dtype=wanted.dtype)
            wanted_grad += inner / size
            shrink = (wanted * inner / size**3 / other.shape[1]).masked_fill_(square < MIN_MEAN_SQUARE, 0)
            grads.append((grad[:, index] * (wanted / size) - other * shrink).to(other.dtype))
        slope = (wanted_grad / wanted / first.shape[1]).masked_fill_(wanted == 0, 0)
        return (grad[:, 0] + first * slope).to(first.dtype), *grads


def _mean_square(x: Tensor) -> Tensor:
    """Return the mean of the squares of each row [R, 1], in fp32 or higher."""
    return x.square().mean(-1, keepdim=True, dtype=torch.promote_types(x.dtype, torch.float32))
