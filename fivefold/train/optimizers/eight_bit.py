"""8-bit AdamW: moments of matrices as a uint8 code per element and an fp32 scale per block of 256 elements of a row.

    x ≈ table[code] · scale      scale = max |x| of the block      table: 7 decades, finer towards 1

Dettmers et al., arXiv:2110.02861 §2.2 (dynamic tree quantization). Blocks lie within rows, and ZeRO shards by whole
rows, so codes do not depend on it; the last block of a row may be short. v has no code for 0: a small v rounded to 0
would make m / √v unbounded (arXiv:2309.01507 §4.1). Vectors, and matrices below 4096 elements, keep fp32 moments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fivefold.layout.local_weight import LocalSlice
from fivefold.layout.spec import Layout
from fivefold.record import Mistake
from fivefold.train.optimizers import fp32_update
from fivefold.train.optimizers.gather_matrices import ShardedWeight
from fivefold.train.parallel.shard import LocalWeight, Shard
from fivefold.units import ceil_div
from fivefold.update import QUANTISED_BLOCK, quantised

DECADES = 7
NAMES = ("exp_avg", "exp_avg_sq")


class AdamW8bit(torch.optim.Optimizer):
    """Updates ``sharded_weights``; ``groups``: torch's parameter groups of the same weights."""

    def __init__(
        self, groups: fp32_update.Groups, sharded_weights: list[ShardedWeight], *, lr: float, betas: tuple[float,
        float], eps: float
    ) -> None:  # fmt: skip
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps})
        self.parts: dict[Tensor, dict[str, Shard]] = {}  # weight → scale's name → its sharding, for checkpoints
        self.narrow: list[Shard] = []  # weights with 8-bit moments
        here = [cut for cut in sharded_weights if cut.shard.rows]
        device = here[0].shard.weight.device if here else torch.device("cpu")
        self.codes = [Codes.of(signed=signed, device=device) for signed in (True, False)]
        for cut in here:
            shard, state = cut.shard, self.state[cut.shard.weight]
            narrow = quantised(shard.local_weight.weight.numel, vector=shard.local_weight.weight.is_vector)
            state["step"] = torch.zeros((), device=device)
            for name in NAMES:
                state[name] = torch.zeros_like(shard.weight, dtype=torch.uint8 if narrow else torch.float32)
            if narrow:
                scales = _scale_sharding(cut)
                self.narrow.append(shard)
                self.parts[shard.weight] = {f"{name}_scale": scales for name in NAMES}
                for name in self.parts[shard.weight]:
                    state[name] = torch.zeros(shard.rows, scales.columns, device=device)

    def check_reshardable(self, then: Layout) -> None:
        """Raise a ``Mistake`` if blocks of the layout ``then``, which wrote the moments, do not align with ours."""
        degrees = {"row": ("tp", then.tp), "expert_row": ("etp", then.etp)}
        for shard in self.narrow:
            weight, here = shard.local_weight.weight, shard.shape[-1]
            axis, degree = degrees.get(weight.kind, ("tp", 1))
            there = weight.shape[-1] // degree
            if there != here and (there % QUANTISED_BLOCK or here % QUANTISED_BLOCK):
                raise Mistake(
                    f"adamw8bit: under {axis}{degree} rows of {weight.name} had {there} elements, here {here}, and "
                    f"blocks of {QUANTISED_BLOCK} do not fit both; resume with {axis}{degree} or start a new run"
                )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update of all weights."""
        for weight, state, group in fp32_update.count_step(self):
            if weight in self.parts:
                self._update_by_rows(weight, state, group)
                continue
            for w, g, m, v in fp32_update.blocks(weight, *(state[name] for name in NAMES)):
                fp32_update.adamw(w, g, m, v, step=state["step"], group=group)

    def _update_by_rows(self, weight: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
        """Update a weight with 8-bit moments by chunks of rows, so that few elements are fp32 at a time."""
        assert weight.grad is not None
        rows = len(weight)
        size = max(1, fp32_update.BLOCK * rows // weight.numel())
        kept = [state[name + end] for name in NAMES for end in ("", "_scale")]
        pieces = [tensor.view(rows, -1).split(size) for tensor in (weight, weight.grad, *kept)]
        for w, g, *codes in zip(*pieces, strict=True):
            self._update_rows(w, g, *codes, step=state["step"], group=group)

    def _update_rows(
        self, w: Tensor, g: Tensor, m_codes: Tensor, m_scale: Tensor, v_codes: Tensor, v_scale: Tensor,
        *, step: Tensor, group: dict[str, Any],
    ) -> None:  # fmt: skip
        first, second = self.codes
        m, v = first.read(m_codes, m_scale), second.read(v_codes, v_scale)
        wide = w.float()  # w itself if it is fp32
        fp32_update.adamw(wide, g.float(), m, v, step=step, group=group)
        first.write(m, m_codes, m_scale)
        second.write(v, v_codes, v_scale)
        if wide is not w:
            w.copy_(wide)


class Codes(NamedTuple):
    """Quantisation table: ascending ``values`` of the codes, and ``middles`` between neighbours; fp32."""

    values: Tensor
    middles: Tensor

    @classmethod
    def of(cls, *, signed: bool, device: torch.device) -> Codes:
        """Table of up to 256 values: each decade has twice as many as the one below, evenly spaced; and 1."""
        found = [1.0]
        for decade in range(DECADES):
            many = 2**decade * (1 if signed else 2)
            found += [10.0 ** (decade + 1 - DECADES) * (0.1 + 0.9 * (part + 0.5) / many) for part in range(many)]
        if signed:
            found += [0.0, *(-value for value in found if value < 1)]
        values = sorted(found)
        middles = [(low + high) / 2 for low, high in pairwise(values)]
        return cls(torch.tensor(values, device=device), torch.tensor(middles, device=device))

    def read(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Dequantise codes [rows, columns] with scales [rows, blocks] → fp32 [rows, columns]."""
        found = self.values.index_select(0, codes.view(-1).int()).view(codes.shape)
        for block, scale in _blocks(found, scales):
            block.mul_(scale)
        return found

    def write(self, rows: Tensor, codes: Tensor, scales: Tensor) -> None:
        """Quantise fp32 ``rows`` to the nearest values, into ``codes`` and ``scales``; overwrites ``rows``."""
        for block, scale in _blocks(rows, scales):
            scale.copy_(torch.linalg.vector_norm(block, ord=float("inf"), dim=-1, keepdim=True))
            block.div_(scale.clamp(min=torch.finfo(torch.float32).tiny))
        codes.copy_(torch.bucketize(rows, self.middles, out_int32=True))


def _blocks(rows: Tensor, scales: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Views [rows, blocks, elements] and their scales' [rows, blocks, 1]: of full blocks, then of the short one."""
    whole = rows.shape[1] // QUANTISED_BLOCK
    if whole:
        yield rows[:, : whole * QUANTISED_BLOCK].unflatten(1, (whole, QUANTISED_BLOCK)), scales[:, :whole, None]
    if rows.shape[1] % QUANTISED_BLOCK:
        yield rows[:, None, whole * QUANTISED_BLOCK :], scales[:, whole:, None]


def _scale_sharding(cut: ShardedWeight) -> Shard:
    """Sharding of a weight's scales: as the weight's, with a column per block of a row."""
    held, piece = cut.shard.local_weight, cut.shard.local_weight.local_slice
    here, last = piece.shape[-1], piece.slices[-1]
    blocks = ceil_div(here, QUANTISED_BLOCK)
    first = last.start // here * blocks
    thin = LocalSlice((*piece.shape[:-1], blocks), (*piece.slices[:-1], slice(first, first + blocks)), piece.holders)
    whole = (*held.weight.shape[:-1], held.weight.shape[-1] // here * blocks)
    return Shard(LocalWeight(held.weight._replace(shape=whole), thin, held.holders), axis=cut.rows)
