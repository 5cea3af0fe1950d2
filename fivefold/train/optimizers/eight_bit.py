"""AdamW whose moments of matrices have 8 bits: a code per element, and an fp32 scale per 256 elements of a row.

    x ≈ table[code] · scale      scale = max |x| of the block      table: of 7 decades, the upper the finer

Dettmers et al., arXiv:2110.02861 §2.2 (dynamic tree quantization). Blocks lie within rows, which ZeRO does not cut, so
codes do not depend on it; the last block of a row may be short. v has no code for 0: where a small v became it, m / √v
would be boundless (arXiv:2309.01507 §4.1). Vectors, and matrices below 4096 elements, keep fp32 moments.
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
    """Over the weights of ``sharded_weights``, in ``groups``."""

    def __init__(
        self, groups: fp32_update.Groups, sharded_weights: list[ShardedWeight], *, lr: float, betas: tuple[float,
        float], eps: float
    ) -> None:  # fmt: skip
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps})
        self.parts: dict[Tensor, dict[str, Shard]] = {}  # of which tensors the scales are this rank's part
        self.narrow: list[Shard] = []
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
                scales = _scales(cut)
                self.narrow.append(shard)
                self.parts[shard.weight] = {f"{name}_scale": scales for name in NAMES}
                for name in self.parts[shard.weight]:
                    state[name] = torch.zeros(shard.rows, scales.columns, device=device)

    def check_reshardable(self, then: Layout) -> None:
        """A ``Mistake`` where codes made under another layout have blocks that are not those of this one."""
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
                self._narrow(weight, state, group)
                continue
            for w, g, m, v in fp32_update.blocks(weight, *(state[name] for name in NAMES)):
                fp32_update.adamw(w, g, m, v, step=state["step"], group=group)

    def _narrow(self, weight: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
        """So many rows at once that what is fp32 is never large."""
        assert weight.grad is not None
        rows = len(weight)
        size = max(1, fp32_update.BLOCK * rows // weight.numel())
        kept = [state[name + end] for name in NAMES for end in ("", "_scale")]
        pieces = [tensor.view(rows, -1).split(size) for tensor in (weight, weight.grad, *kept)]
        for w, g, *codes in zip(*pieces, strict=True):
            self._piece(w, g, *codes, step=state["step"], group=group)

    def _piece(
        self, w: Tensor, g: Tensor, m_codes: Tensor, m_scale: Tensor, v_codes: Tensor, v_scale: Tensor,
        *, step: Tensor, group: dict[str, Any],
    ) -> None:  # fmt: skip
        first, second = self.codes
        m, v = first.read(m_codes, m_scale), second.read(v_codes, v_scale)
        moved = w.float()  # itself, where it is wide
        fp32_update.adamw(moved, g.float(), m, v, step=step, group=group)
        first.write(m, m_codes, m_scale)
        second.write(v, v_codes, v_scale)
        if moved is not w:
            w.copy_(moved)


class Codes(NamedTuple):
    """The ascending ``values`` of codes, and the ``middles`` between neighbours."""

    values: Tensor
    middles: Tensor

    @classmethod
    def of(cls, *, signed: bool, device: torch.device) -> Codes:
        """Each decade has twice as many values as the one below it, in its middle parts; 1 besides."""
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
        """Codes [rows, columns] and scales [rows, blocks] → fp32 [rows, columns]."""
        found = self.values.index_select(0, codes.view(-1).int()).view(codes.shape)
        for block, scale in _blocks(found, scales):
            block.mul_(scale)
        return found

    def write(self, rows: Tensor, codes: Tensor, scales: Tensor) -> None:
        """The way back, to the nearest value; ``rows`` are used up."""
        for block, scale in _blocks(rows, scales):
            scale.copy_(torch.linalg.vector_norm(block, ord=float("inf"), dim=-1, keepdim=True))
            block.div_(scale.clamp(min=torch.finfo(torch.float32).tiny))
        codes.copy_(torch.bucketize(rows, self.middles, out_int32=True))


def _blocks(rows: Tensor, scales: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Views [rows, blocks, elements] and of their scales [rows, blocks, 1]: of whole blocks, and of the short ones."""
    whole = rows.shape[1] // QUANTISED_BLOCK
    if whole:
        yield rows[:, : whole * QUANTISED_BLOCK].unflatten(1, (whole, QUANTISED_BLOCK)), scales[:, :whole, None]
    if rows.shape[1] % QUANTISED_BLOCK:
        yield rows[:, None, whole * QUANTISED_BLOCK :], scales[:, whole:, None]


def _scales(cut: ShardedWeight) -> Shard:
    """Those of one weight as a tensor that lies over ranks like it, a column for each block of the weight's rows."""
    held, piece = cut.shard.local_weight, cut.shard.local_weight.local_slice
    here, last = piece.shape[-1], piece.slices[-1]
    blocks = ceil_div(here, QUANTISED_BLOCK)
    first = last.start // here * blocks
    thin = LocalSlice((*piece.shape[:-1], blocks), (*piece.slices[:-1], slice(first, first + blocks)), piece.holders)
    whole = (*held.weight.shape[:-1], held.weight.shape[-1] // here * blocks)
    return Shard(LocalWeight(held.weight._replace(shape=whole), thin, held.holders), axis=cut.rows)
