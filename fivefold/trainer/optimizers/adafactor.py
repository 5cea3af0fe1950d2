"""Adafactor: keeps only the row and column means of a matrix's second moment, in fp32, and no first moment.

    R ← β R + (1−β) mean_columns g²     C ← β C + (1−β) mean_rows g²     1−β = t^-0.8     v = R C / mean R
    u = g / √v      w ← (1 − lr λ) w − max(ε, rms w) min(lr, 1/√t) u / max(1, rms u)          arXiv:1804.04235

The means are over the full matrix, which ZeRO shards by rows and tp slices: local sums are all-reduced over both axes,
the sums of all weights in one message. R is sharded like the rows of its weight; C is replicated over ZeRO's group.
Each expert is a matrix of its own. Vectors keep the full v.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from math import prod

import torch
from torch import Tensor

from fivefold.layout.local_weight import LocalSlice
from fivefold.trainer.optimizers.gather_matrices import ShardAxes
from fivefold.trainer.optimizers.optimized_weights import OptimizedWeights
from fivefold.trainer.parallel.collectives import all_reduce
from fivefold.trainer.parallel.mesh import AxisGroup
from fivefold.trainer.parallel.shard import LocalWeight, WeightShard
from fivefold.update import Rates

ONE_RANK = AxisGroup("alone", 0, (0,), None)
DECAY = -0.8
MIN_RMS_GRADIENT, MIN_RMS_WEIGHT = 1e-15, 1e-3  # lower bounds of √v (the paper adds 1e-30 to g²) and of rms w


def build(weights: OptimizedWeights) -> Adafactor:
    """Build Adafactor over this rank's shards."""
    return Adafactor(weights.sharded, lr=weights.job.learning_rate.peak, rates=weights.rates)


class Adafactor(torch.optim.Optimizer):
    """Update ``sharded_weights``; ``rates`` maps a weight's name to its weight decay λ and learning-rate factor."""

    def __init__(self, sharded_weights: list[ShardAxes], *, lr: float, rates: dict[str, Rates]) -> None:
        super().__init__([cut.shard.weight for cut in sharded_weights], {"lr": lr})
        moments = [_Moments(cut, rates[cut.shard.name]) for cut in sharded_weights]
        # weights that are sharded over the same ranks share their messages
        moments.sort(key=_find_rows_axis)
        self.families = [list(same) for _, same in groupby(moments, _find_rows_axis)]
        self.parts: dict[Tensor, dict[str, WeightShard]] = {}  # weight → moment → its sharding, for checkpoints
        for moment in moments:
            if moment.cut.shard.rows:
                self.state[moment.cut.shard.weight] = moment.state
                self.parts[moment.cut.shard.weight] = moment.parts

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all weights once; every rank of the stage must call it."""
        for family in self.families:
            for moments in family:
                moments.square()
            _reduce_sums(family, "row", "column", "weight")
            for moments in family:
                moments.update_moments()
            _reduce_sums(family, "mean")
            for moments in family:
                moments.sum_update()
            _reduce_sums(family, "update")
            for moments in family:
                moments.apply(self.param_groups[0]["lr"])


class _Moments:
    """Moments and update of one weight.

    ``sums`` holds one value per expert, first summed over the local shard, then over the full weight.
    """

    def __init__(self, cut: ShardAxes, rates: Rates) -> None:
        self.cut, self.rates = cut, rates
        shard, weight = cut.shard, cut.shard.local_weight.weight
        self.experts = shard.shape[0] if cut.is_stacked else 1
        full_shape = weight.shape[1:] if cut.is_stacked else weight.shape
        self.numel, self.factored = prod(full_shape), len(full_shape) == 2
        expert_rows = shard.shape.numel() // shard.columns // self.experts  # rows of one expert on this tp rank
        end_row = shard.first_row + shard.rows
        self.experts_rows = [
            (
                expert,
                slice(
                    max(shard.first_row, expert * expert_rows) - shard.first_row,
                    min(end_row, (expert + 1) * expert_rows) - shard.first_row,
                ),
            )
            for expert in range(shard.first_row // expert_rows, -(-end_row // expert_rows) if shard.rows else 0)
        ]
        device = shard.weight.device
        self.state = {"step": torch.zeros((), device=device)}
        self.parts: dict[str, WeightShard] = {}
        if self.factored:
            self.rows, self.columns = full_shape
            self.state["rows"] = torch.zeros(shard.rows, 1, device=device)
            self.state["columns"] = torch.zeros(self.experts, shard.columns, device=device)
            self.parts = {"rows": _shard_means(cut, dim=-1), "columns": _shard_means(cut, dim=-2)}
        else:
            self.state["square"] = torch.zeros_like(shard.weight, dtype=torch.float32)
        self.sums: dict[str, Tensor] = {}

    def square(self) -> None:
        """Start a step: compute local sums of g² by row and by column, and of w²."""
        gradient = self._gradient()
        self.state["step"] += 1
        self.sums = {"weight": self._norms(self._grid(self.cut.shard.weight))}
        if self.factored:
            column_sums = torch.zeros_like(self.state["columns"])
            for expert, rows in self.experts_rows:
                column_sums[expert] = torch.linalg.vector_norm(gradient[rows], dim=0).square()
            self.sums |= {
                "row": torch.linalg.vector_norm(gradient, dim=1, keepdim=True).square(),
                "column": column_sums,
            }

    def update_moments(self) -> None:
        """Update the moments R and C (v for a vector) from the reduced sums of squares; sum R locally for its mean."""
        new_fraction = self.state["step"] ** DECAY
        if not self.factored:
            self.state["square"].lerp_(self._gradient().square().view_as(self.state["square"]), new_fraction)
            return
        self.state["rows"].lerp_(self.sums["row"] / self.columns, new_fraction)
        self.state["columns"].lerp_(self.sums["column"] / self.rows, new_fraction)
        self.sums["mean"] = torch.zeros(self.experts, device=new_fraction.device)
        for expert, rows in self.experts_rows:
            self.sums["mean"][expert] = self.state["rows"][rows].sum() / self.rows

    def sum_update(self) -> None:
        """Compute the local sum of squares of the update u, for its rms."""
        self.sums["update"] = self._norms(self._update())

    def apply(self, rate: float) -> None:
        """Update the weight. ``rate`` is the learning rate of the step, before the weight's own factor."""
        rate *= self.rates.rate
        inverse_sqrt_numel = self.numel**-0.5
        weight = self._grid(self.cut.shard.weight)
        relative_step = self.state["step"].rsqrt().clamp(max=rate)
        step_sizes = (self.sums["weight"].sqrt() * inverse_sqrt_numel).clamp(min=MIN_RMS_WEIGHT) * relative_step
        step_sizes /= (self.sums["update"].sqrt() * inverse_sqrt_numel).clamp(min=1.0)
        weight_fp32 = weight.float()
        update = self._update()  # float() returns an fp32 weight itself
        weight_fp32.mul_(1 - rate * self.rates.weight_decay)
        for expert, rows in self.experts_rows:
            weight_fp32[rows] -= update[rows] * step_sizes[expert]
        weight.copy_(weight_fp32)
        self.sums = {}

    def needs_tp_reduction(self, name: str) -> bool:
        """Return whether the sum ``name`` runs along the dim that tp (or etp) slices and must be reduced over it.

        ``name``: row, column or mean, or update or weight: sums over the full matrix, which any slicing divides.
        """
        dim, last_dim = self.cut.dim, len(self.cut.shard.shape) - 1
        return dim is not None and {"row": dim == last_dim, "column": dim < last_dim, "mean": dim < last_dim}.get(
            name, True
        )

    def _update(self) -> Tensor:
        """Return u = g / √v [rows, columns] in fp32. It is computed twice, because it is as large as the shard."""
        update = self._gradient().clone()
        if not self.factored:
            return update.mul_(self._grid(self.state["square"]).clamp(min=MIN_RMS_GRADIENT**2).rsqrt_())
        for expert, rows in self.experts_rows:
            column_factor = self.state["columns"][expert] / self.sums["mean"][expert].clamp(min=MIN_RMS_GRADIENT)
            update[rows] *= (self.state["rows"][rows] * column_factor).clamp_(min=MIN_RMS_GRADIENT**2).rsqrt_()
        return update

    def _gradient(self) -> Tensor:
        """Return the gradient [rows, columns] of the shard in fp32."""
        gradient = self.cut.shard.weight.grad
        return self._grid(self.cut.shard.weight if gradient is None else gradient).float()

    def _grid(self, tensor: Tensor) -> Tensor:
        """View a flat shard as [rows, columns]."""
        return tensor.view(self.cut.shard.rows, self.cut.shard.columns)

    def _norms(self, values: Tensor) -> Tensor:
        """Return the sum of squares of ``values`` [rows, columns] by expert: [E]."""
        squares = torch.zeros(self.experts, device=values.device)
        for expert, rows in self.experts_rows:
            squares[expert] = torch.linalg.vector_norm(values[rows], dtype=torch.float32).square()
        return squares


def _find_rows_axis(moments: _Moments) -> str:
    return moments.cut.rows.name


def _reduce_sums(family: list[_Moments], *names: str) -> None:
    """All-reduce the sums ``names`` of all weights over ZeRO's group, and over tp where it slices them.

    That takes two messages.
    """
    named_sums = [(moments, name, moments.sums[name]) for moments in family for name in names if name in moments.sums]
    _sum([tensor for _, name, tensor in named_sums if name != "row"], family[0].cut.rows)
    sliced_sums = [(moments, tensor) for moments, name, tensor in named_sums if moments.needs_tp_reduction(name)]
    for moments, tensor in sliced_sums:
        tensor /= moments.cut.copies
    _sum([tensor for _, tensor in sliced_sums], family[0].cut.pieces)


def _sum(tensors: list[Tensor], axis: AxisGroup) -> None:
    if axis.size > 1 and tensors:
        summed = all_reduce(torch.cat([tensor.flatten() for tensor in tensors]), axis).wait()
        for tensor, part in zip(tensors, summed.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(part.view_as(tensor))


def _shard_means(cut: ShardAxes, *, dim: int) -> WeightShard:
    """Return the sharding of the means over ``dim`` (one column or row per matrix).

    R is sharded like its weight's rows; ZeRO does not shard C.
    """
    local_weight, piece = cut.shard.local_weight, cut.shard.local_weight.local_slice

    def shrink(sizes: tuple[int, ...]) -> tuple[int, ...]:
        return (*sizes[:-2], *((sizes[-2], 1) if dim == -1 else (1, sizes[-1])))

    # the means of columns do not depend on which rows a rank has
    parts = [(*part[:-1], slice(0, 1)) if dim == -1 else (*part[:-2], slice(0, 1), part[-1]) for part in piece.parts]
    local_slice = LocalSlice(shrink(piece.shape), tuple(parts[: None if dim == -1 else 1]), piece.holders)
    weight = local_weight.weight._replace(shape=shrink(local_weight.weight.shape))
    return WeightShard(LocalWeight(weight, local_slice, local_weight.holders), axis=cut.rows if dim == -1 else ONE_RANK)
