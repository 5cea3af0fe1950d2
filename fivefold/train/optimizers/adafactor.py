"""Adafactor: of the second moment of a matrix only the means of rows and columns are kept, in fp32; no first moment.

    R ← β R + (1−β) mean_columns g²     C ← β C + (1−β) mean_rows g²     1−β = t^-0.8     v = R C / mean R
    u = g / √v      w ← (1 − lr λ) w − max(ε, rms w) min(lr, 1/√t) u / max(1, rms u)          arXiv:1804.04235

The means are of the whole matrix, though rows lie over ZeRO's group and pieces over tp: sums over what is here are
summed over both axes, those of all weights in one message. So R lies as the rows of its weight, C on all of the group.
Each expert is a matrix of its own. Vectors keep all of v.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from math import prod

import torch
from torch import Tensor

from fivefold.layout.local_weight import LocalSlice
from fivefold.train.optimizers.gather_matrices import ShardedWeight
from fivefold.train.parallel.collectives import all_reduce
from fivefold.train.parallel.mesh import Axis
from fivefold.train.parallel.shard import LocalWeight, Shard
from fivefold.update import Rates

ALONE = Axis("alone", 0, (0,), None)
DECAY = -0.8
LEAST, LEAST_RMS = 1e-15, 1e-3  # ε of the root of v (the paper has 1e-30 of v) and of rms w


class Adafactor(torch.optim.Optimizer):
    """Over the weights of ``sharded_weights``; ``rates``: λ and the rate's factor of each by name."""

    def __init__(self, sharded_weights: list[ShardedWeight], *, lr: float, rates: dict[str, Rates]) -> None:
        super().__init__([cut.shard.weight for cut in sharded_weights], {"lr": lr})
        found = [_Moments(cut, rates[cut.shard.name]) for cut in sharded_weights]
        # what lies over one group of ranks speaks at once
        found.sort(key=_group)
        self.families = [list(same) for _, same in groupby(found, _group)]
        self.parts: dict[Tensor, dict[str, Shard]] = {}  # of which tensors the moments are this rank's part
        for each in found:
            if each.cut.shard.rows:
                self.state[each.cut.shard.weight] = each.state
                self.parts[each.cut.shard.weight] = each.parts

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update of all weights; every rank of the stage calls it."""
        for family in self.families:
            for each in family:
                each.square()
            _meet(family, "row", "column", "weight")
            for each in family:
                each.remember()
            _meet(family, "mean")
            for each in family:
                each.measure()
            _meet(family, "update")
            for each in family:
                each.apply(self.param_groups[0]["lr"])


class _Moments:
    """Those of one weight. ``sums`` are over what is here, and after ``_meet`` over the whole weight, by expert."""

    def __init__(self, cut: ShardedWeight, rates: Rates) -> None:
        self.cut, self.rates = cut, rates
        shard, weight = cut.shard, cut.shard.local_weight.weight
        self.experts = shard.shape[0] if cut.stacked else 1
        whole = weight.shape[1:] if cut.stacked else weight.shape
        self.numel, self.factored = prod(whole), len(whole) == 2
        each = shard.shape.numel() // shard.columns // self.experts  # rows of one expert here
        last = shard.first_row + shard.rows
        self.experts_rows = [
            (expert, slice(max(shard.first_row, expert * each) - shard.first_row,
                           min(last, (expert + 1) * each) - shard.first_row))
            for expert in range(shard.first_row // each, -(-last // each) if shard.rows else 0)
        ]  # fmt: skip
        device = shard.weight.device
        self.state = {"step": torch.zeros((), device=device)}
        self.parts: dict[str, Shard] = {}
        if self.factored:
            self.rows, self.columns = whole
            self.state["rows"] = torch.zeros(shard.rows, 1, device=device)
            self.state["columns"] = torch.zeros(self.experts, shard.columns, device=device)
            self.parts = {"rows": _thin(cut, dim=-1), "columns": _thin(cut, dim=-2)}
        else:
            self.state["square"] = torch.zeros_like(shard.weight, dtype=torch.float32)
        self.sums: dict[str, Tensor] = {}

    def square(self) -> None:
        """Squares of the gradient by row and column, and of the weight."""
        gradient = self._gradient()
        self.state["step"] += 1
        self.sums = {"weight": self._norms(self._grid(self.cut.shard.weight))}
        if self.factored:
            column = torch.zeros_like(self.state["columns"])
            for expert, rows in self.experts_rows:
                column[expert] = torch.linalg.vector_norm(gradient[rows], dim=0).square()
            self.sums |= {"row": torch.linalg.vector_norm(gradient, dim=1, keepdim=True).square(), "column": column}

    def remember(self) -> None:
        """Let the moments follow the squares."""
        fresh = self.state["step"] ** DECAY
        if not self.factored:
            self.state["square"].lerp_(self._gradient().square().view_as(self.state["square"]), fresh)
            return
        self.state["rows"].lerp_(self.sums["row"] / self.columns, fresh)
        self.state["columns"].lerp_(self.sums["column"] / self.rows, fresh)
        self.sums["mean"] = torch.zeros(self.experts, device=fresh.device)
        for expert, rows in self.experts_rows:
            self.sums["mean"][expert] = self.state["rows"][rows].sum() / self.rows

    def measure(self) -> None:
        """How large the update is."""
        self.sums["update"] = self._norms(self._update())

    def apply(self, rate: float) -> None:
        """Change the weight."""
        rate *= self.rates.rate
        size, weight = self.numel**-0.5, self._grid(self.cut.shard.weight)
        relative = self.state["step"].rsqrt().clamp(max=rate)
        steps = (self.sums["weight"].sqrt() * size).clamp(min=LEAST_RMS) * relative
        steps /= (self.sums["update"].sqrt() * size).clamp(min=1.0)
        wide, update = weight.float(), self._update()  # itself, where it is wide
        wide.mul_(1 - rate * self.rates.weight_decay)
        for expert, rows in self.experts_rows:
            wide[rows] -= update[rows] * steps[expert]
        weight.copy_(wide)
        self.sums = {}

    def crosses(self, name: str) -> bool:
        """Whether that sum is over dims that ``cut.pieces`` cut."""
        dim, last = self.cut.dim, len(self.cut.shard.shape) - 1
        return dim is not None and {"row": dim == last, "column": dim < last, "mean": dim < last}.get(name, True)

    def _update(self) -> Tensor:
        """g / √v, made anew where it is needed, since it is as large as the shard."""
        found = self._gradient().clone()
        if not self.factored:
            return found.mul_(self._grid(self.state["square"]).clamp(min=LEAST**2).rsqrt_())
        for expert, rows in self.experts_rows:
            across = self.state["columns"][expert] / self.sums["mean"][expert].clamp(min=LEAST)
            found[rows] *= (self.state["rows"][rows] * across).clamp_(min=LEAST**2).rsqrt_()
        return found

    def _gradient(self) -> Tensor:
        gradient = self.cut.shard.weight.grad
        return self._grid(self.cut.shard.weight if gradient is None else gradient).float()

    def _grid(self, tensor: Tensor) -> Tensor:
        return tensor.view(self.cut.shard.rows, self.cut.shard.columns)

    def _norms(self, values: Tensor) -> Tensor:
        """Σ of squares by expert."""
        found = torch.zeros(self.experts, device=values.device)
        for expert, rows in self.experts_rows:
            found[expert] = torch.linalg.vector_norm(values[rows], dtype=torch.float32).square()
        return found


def _group(each: _Moments) -> str:
    return each.cut.rows.name


def _meet(family: list[_Moments], *names: str) -> None:
    """Sum what each has of ``names`` over ZeRO's group, and where pieces cut it over them: a message each."""
    found = [(each, name, each.sums[name]) for each in family for name in names if name in each.sums]
    _sum([tensor for _, name, tensor in found if name != "row"], family[0].cut.rows)
    across = [(each, tensor) for each, name, tensor in found if each.crosses(name)]
    for each, tensor in across:
        tensor /= each.cut.copies
    _sum([tensor for _, tensor in across], family[0].cut.pieces)


def _sum(tensors: list[Tensor], axis: Axis) -> None:
    if axis.size > 1 and tensors:
        summed = all_reduce(torch.cat([tensor.flatten() for tensor in tensors]), axis).wait()
        for tensor, part in zip(tensors, summed.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(part.view_as(tensor))


def _thin(cut: ShardedWeight, *, dim: int) -> Shard:
    """The means over ``dim``: a tensor of one row or column, of which a rank has those of its weight."""
    held, piece = cut.shard.local_weight, cut.shard.local_weight.local_slice

    def one(sizes: tuple[int, ...]) -> tuple[int, ...]:
        return (*sizes[:-2], *((sizes[-2], 1) if dim == -1 else (1, sizes[-1])))

    slices = list(piece.slices)
    slices[dim] = slice(0, 1)
    thin = LocalSlice(one(piece.shape), tuple(slices), piece.holders)
    weight = held.weight._replace(shape=one(held.weight.shape))
    return Shard(LocalWeight(weight, thin, held.holders), axis=cut.rows if dim == -1 else ALONE)
