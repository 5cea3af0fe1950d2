"""Adafactor: keeps of a matrix's second moment only the means over rows and columns, in fp32, and no first moment.

    R ← β R + (1−β) mean_columns g²     C ← β C + (1−β) mean_rows g²     1−β = t^-0.8     v = R C / mean R
    u = g / √v      w ← (1 − lr λ) w − max(ε, rms w) min(lr, 1/√t) u / max(1, rms u)          arXiv:1804.04235

The means are of the whole matrix, which ZeRO shards by rows and tp slices: local sums are all_reduced over both axes,
those of all weights in one message. R is sharded as the rows of its weight, C replicated over ZeRO's group. Each expert
is a matrix of its own. Vectors keep all of v.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from math import prod

import torch
from torch import Tensor

from fivefold.layout.local_weight import LocalSlice
from fivefold.trainer.optimizers.gather_matrices import ShardedWeight
from fivefold.trainer.optimizers.optimized_weights import OptimizedWeights
from fivefold.trainer.parallel.collectives import all_reduce
from fivefold.trainer.parallel.mesh import Axis
from fivefold.trainer.parallel.shard import LocalWeight, Shard
from fivefold.update import Rates

ALONE = Axis("alone", 0, (0,), None)
DECAY = -0.8
LEAST, LEAST_RMS = 1e-15, 1e-3  # lower bounds of √v (the paper adds 1e-30 to g²) and of rms w


def build(weights: OptimizedWeights) -> Adafactor:
    """Build Adafactor over this rank's shards."""
    return Adafactor(weights.sharded, lr=weights.job.learning_rate.peak, rates=weights.rates)


class Adafactor(torch.optim.Optimizer):
    """Updates ``sharded_weights``; ``rates``: name → weight decay λ and factor of the learning rate."""

    def __init__(self, sharded_weights: list[ShardedWeight], *, lr: float, rates: dict[str, Rates]) -> None:
        super().__init__([cut.shard.weight for cut in sharded_weights], {"lr": lr})
        found = [_Moments(cut, rates[cut.shard.name]) for cut in sharded_weights]
        # weights that are sharded over the same ranks share their messages
        found.sort(key=_rows_axis)
        self.families = [list(same) for _, same in groupby(found, _rows_axis)]
        self.parts: dict[Tensor, dict[str, Shard]] = {}  # weight → moment → its sharding, for checkpoints
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
            _all_reduce_sums(family, "row", "column", "weight")
            for each in family:
                each.update_moments()
            _all_reduce_sums(family, "mean")
            for each in family:
                each.sum_update()
            _all_reduce_sums(family, "update")
            for each in family:
                each.apply(self.param_groups[0]["lr"])


class _Moments:
    """Moments and update of one weight. ``sums``: by expert, over the local shard; then of the whole weight."""

    def __init__(self, cut: ShardedWeight, rates: Rates) -> None:
        self.cut, self.rates = cut, rates
        shard, weight = cut.shard, cut.shard.local_weight.weight
        self.experts = shard.shape[0] if cut.stacked else 1
        whole = weight.shape[1:] if cut.stacked else weight.shape
        self.numel, self.factored = prod(whole), len(whole) == 2
        each = shard.shape.numel() // shard.columns // self.experts  # rows of one expert on this tp rank
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
            self.parts = {"rows": _mean_sharding(cut, dim=-1), "columns": _mean_sharding(cut, dim=-2)}
        else:
            self.state["square"] = torch.zeros_like(shard.weight, dtype=torch.float32)
        self.sums: dict[str, Tensor] = {}

    def square(self) -> None:
        """Start a step: local sums of g² by row and by column, and of w²."""
        gradient = self._gradient()
        self.state["step"] += 1
        self.sums = {"weight": self._norms(self._grid(self.cut.shard.weight))}
        if self.factored:
            column = torch.zeros_like(self.state["columns"])
            for expert, rows in self.experts_rows:
                column[expert] = torch.linalg.vector_norm(gradient[rows], dim=0).square()
            self.sums |= {"row": torch.linalg.vector_norm(gradient, dim=1, keepdim=True).square(), "column": column}

    def update_moments(self) -> None:
        """Update the moments R and C (of a vector v) from the summed squares; local sum of R for its mean."""
        fresh = self.state["step"] ** DECAY
        if not self.factored:
            self.state["square"].lerp_(self._gradient().square().view_as(self.state["square"]), fresh)
            return
        self.state["rows"].lerp_(self.sums["row"] / self.columns, fresh)
        self.state["columns"].lerp_(self.sums["column"] / self.rows, fresh)
        self.sums["mean"] = torch.zeros(self.experts, device=fresh.device)
        for expert, rows in self.experts_rows:
            self.sums["mean"][expert] = self.state["rows"][rows].sum() / self.rows

    def sum_update(self) -> None:
        """Local sum of squares of the update u, for its rms."""
        self.sums["update"] = self._norms(self._update())

    def apply(self, rate: float) -> None:
        """Update the weight; ``rate``: learning rate of the step before the weight's own factor."""
        rate *= self.rates.rate
        size, weight = self.numel**-0.5, self._grid(self.cut.shard.weight)
        relative = self.state["step"].rsqrt().clamp(max=rate)
        steps = (self.sums["weight"].sqrt() * size).clamp(min=LEAST_RMS) * relative
        steps /= (self.sums["update"].sqrt() * size).clamp(min=1.0)
        wide, update = weight.float(), self._update()  # float() returns an fp32 weight itself
        wide.mul_(1 - rate * self.rates.weight_decay)
        for expert, rows in self.experts_rows:
            wide[rows] -= update[rows] * steps[expert]
        weight.copy_(wide)
        self.sums = {}

    def sums_over_slices(self, name: str) -> bool:
        """Whether the sum ``name`` runs along the dim that tp (or etp) slices, and so has to be reduced over it."""
        dim, last = self.cut.dim, len(self.cut.shard.shape) - 1
        return dim is not None and {"row": dim == last, "column": dim < last, "mean": dim < last}.get(name, True)

    def _update(self) -> Tensor:
        """u = g / √v [rows, columns] in fp32; computed twice rather than kept, since it is as large as the shard."""
        found = self._gradient().clone()
        if not self.factored:
            return found.mul_(self._grid(self.state["square"]).clamp(min=LEAST**2).rsqrt_())
        for expert, rows in self.experts_rows:
            across = self.state["columns"][expert] / self.sums["mean"][expert].clamp(min=LEAST)
            found[rows] *= (self.state["rows"][rows] * across).clamp_(min=LEAST**2).rsqrt_()
        return found

    def _gradient(self) -> Tensor:
        """Gradient [rows, columns] of the shard in fp32."""
        gradient = self.cut.shard.weight.grad
        return self._grid(self.cut.shard.weight if gradient is None else gradient).float()

    def _grid(self, tensor: Tensor) -> Tensor:
        """View of a flat shard as [rows, columns]."""
        return tensor.view(self.cut.shard.rows, self.cut.shard.columns)

    def _norms(self, values: Tensor) -> Tensor:
        """Σ of squares by expert [E] of ``values`` [rows, columns]."""
        found = torch.zeros(self.experts, device=values.device)
        for expert, rows in self.experts_rows:
            found[expert] = torch.linalg.vector_norm(values[rows], dtype=torch.float32).square()
        return found


def _rows_axis(each: _Moments) -> str:
    return each.cut.rows.name


def _all_reduce_sums(family: list[_Moments], *names: str) -> None:
    """All_reduce sums ``names`` of all weights over ZeRO's group, and over tp where it slices them: two messages."""
    found = [(each, name, each.sums[name]) for each in family for name in names if name in each.sums]
    _sum([tensor for _, name, tensor in found if name != "row"], family[0].cut.rows)
    across = [(each, tensor) for each, name, tensor in found if each.sums_over_slices(name)]
    for each, tensor in across:
        tensor /= each.cut.copies
    _sum([tensor for _, tensor in across], family[0].cut.pieces)


def _sum(tensors: list[Tensor], axis: Axis) -> None:
    if axis.size > 1 and tensors:
        summed = all_reduce(torch.cat([tensor.flatten() for tensor in tensors]), axis).wait()
        for tensor, part in zip(tensors, summed.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(part.view_as(tensor))


def _mean_sharding(cut: ShardedWeight, *, dim: int) -> Shard:
    """How the means over ``dim`` (one column or row per matrix) are sharded: R as its weight's rows, C not by ZeRO."""
    held, piece = cut.shard.local_weight, cut.shard.local_weight.local_slice

    def one(sizes: tuple[int, ...]) -> tuple[int, ...]:
        return (*sizes[:-2], *((sizes[-2], 1) if dim == -1 else (1, sizes[-1])))

    slices = list(piece.slices)
    slices[dim] = slice(0, 1)
    local = LocalSlice(one(piece.shape), tuple(slices), piece.holders)
    weight = held.weight._replace(shape=one(held.weight.shape))
    return Shard(LocalWeight(weight, local, held.holders), axis=cut.rows if dim == -1 else ALONE)
