"""AdamW with moments of one or two bytes: a format per moment, updated in fp32, a block of rows at a time.

    x ≈ value of its code · scale      scale: max |x| of 256 elements of a row over the format's largest; bf16 has none

``adamw8bit``: twice the dynamic tree of ``eight_bit.py``. Recipes: e4m3 and e5m2, e4m3 and fp16, bf16 twice. Blocks
lie within rows, and ZeRO shards by whole rows, so codes do not depend on it; the last of a row may be short. A small v
is not rounded to 0, or m / √v had no bound (arXiv:2309.01507 §4.1). With scales, vectors and small matrices keep fp32.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fivefold.layout.local_weight import LocalSlice
from fivefold.layout.spec import Layout
from fivefold.record import Mistake
from fivefold.trainer.optimizers import fp32_update
from fivefold.trainer.optimizers.gather_matrices import ShardedWeight
from fivefold.trainer.parallel.shard import LocalWeight, Shard
from fivefold.units import ceil_div
from fivefold.update import QUANTISED_BLOCK, quantised

NAMES = ("exp_avg", "exp_avg_sq")


class Format(Protocol):
    """How a moment is kept."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the codes."""

    @property
    def scaled(self) -> bool:
        """Whether blocks have scales."""

    def read(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Codes [rows, columns] with scales [rows, blocks] → fp32 [rows, columns]."""

    def write(self, rows: Tensor, codes: Tensor, scales: Tensor) -> None:
        """Round fp32 ``rows`` into ``codes`` and ``scales``; overwrites ``rows``."""


class Unscaled(NamedTuple):
    """Elements as they are, in bf16 or fp32 (which is not copied)."""

    dtype: torch.dtype
    scaled: bool = False

    def read(self, codes: Tensor, scales: Tensor) -> Tensor:
        """``codes`` in fp32."""
        return codes.float()

    def write(self, rows: Tensor, codes: Tensor, scales: Tensor) -> None:
        """Round ``rows`` to nearest."""
        if rows is not codes:
            codes.copy_(rows)


class Scaled(NamedTuple):
    """Elements over a scale that makes the block's largest the format's largest. ``signed``: else 0 < |x| does not
    become 0, but the least that the format has.
    """

    value: torch.dtype
    signed: bool
    scaled: bool = True

    @property
    def dtype(self) -> torch.dtype:
        """Of the codes: formats of one byte are kept as bytes, since torch's checkpoints know none."""
        return torch.uint8 if self.value.itemsize == 1 else self.value

    def read(self, codes: Tensor, scales: Tensor) -> Tensor:
        """``codes`` times their block's scale."""
        found = codes.view(self.value).float()
        for block, scale in by_block(found, scales):
            block.mul_(scale)
        return found

    def write(self, rows: Tensor, codes: Tensor, scales: Tensor) -> None:
        """Round ``rows`` to nearest, in units of their block's scale."""
        info = torch.finfo(self.value)
        for block, scale in by_block(rows, scales):
            scale.copy_(torch.linalg.vector_norm(block, ord=float("inf"), dim=-1, keepdim=True).div_(info.max))
            block.div_(scale.clamp(min=torch.finfo(torch.float32).tiny)).clamp_(-info.max, info.max)
        if not self.signed:
            rows.clamp_(min=info.smallest_normal * info.eps)
        codes.view(self.value).copy_(rows)


class NarrowAdamW(torch.optim.Optimizer):
    """Updates ``sharded_weights`` with moments in ``formats``; ``groups``: torch's parameter groups of the same
    weights; ``name``: what its refusals call it.
    """

    def __init__(
        self, groups: fp32_update.Groups, sharded_weights: list[ShardedWeight], *, lr: float,
        betas: tuple[float, float], eps: float, formats: tuple[Format, Format], name: str,
    ) -> None:  # fmt: skip
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps})
        self.name = name
        self.parts: dict[Tensor, dict[str, Shard]] = {}  # weight → scale's name → its sharding, for checkpoints
        self.formats: dict[Tensor, tuple[Format, ...]] = {}
        self.narrow: list[Shard] = []  # weights with scales
        wide: Format = Unscaled(torch.float32)
        for cut in (cut for cut in sharded_weights if cut.shard.rows):
            shard, state = cut.shard, self.state[cut.shard.weight]
            blocks = quantised(shard.local_weight.weight.numel, vector=shard.local_weight.weight.is_vector)
            kept: tuple[Format, ...] = tuple(each if blocks or not each.scaled else wide for each in formats)
            self.formats[shard.weight] = kept
            state["step"] = torch.zeros((), device=shard.weight.device)
            for moment, each in zip(NAMES, kept, strict=True):
                state[moment] = torch.zeros_like(shard.weight, dtype=each.dtype)
            scaled = [moment for moment, each in zip(NAMES, kept, strict=True) if each.scaled]
            if scaled:
                scales = _scale_sharding(cut)
                self.narrow.append(shard)
                self.parts[shard.weight] = {f"{moment}_scale": scales for moment in scaled}
                for moment in self.parts[shard.weight]:
                    state[moment] = torch.zeros(shard.rows, scales.columns, device=shard.weight.device)

    def check_reshardable(self, then: Layout) -> None:
        """Raise a ``Mistake`` if blocks of the layout ``then``, which wrote the moments, do not align with ours."""
        degrees = {"row": ("tp", then.tp), "expert_row": ("etp", then.etp)}
        for shard in self.narrow:
            weight, here = shard.local_weight.weight, shard.shape[-1]
            axis, degree = degrees.get(weight.kind, ("tp", 1))
            there = weight.shape[-1] // degree
            if there != here and (there % QUANTISED_BLOCK or here % QUANTISED_BLOCK):
                raise Mistake(
                    f"{self.name}: under {axis}{degree} rows of {weight.name} had {there} elements, here {here}, and "
                    f"blocks of {QUANTISED_BLOCK} do not fit both; resume with {axis}{degree} or start a new run"
                )

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update of all weights, by chunks of rows, so that few elements are fp32 at a time."""
        for weight, state, group in fp32_update.count_step(self):
            assert weight.grad is not None
            formats, rows = self.formats[weight], len(weight)
            if not any(each.scaled or each.dtype != torch.float32 for each in formats):
                for w, g, m, v in fp32_update.blocks(weight, *(state[name] for name in NAMES)):
                    fp32_update.adamw(w, g, m, v, step=state["step"], group=group)
                continue
            size = max(1, fp32_update.BLOCK * rows // weight.numel())
            none = torch.empty(rows, 0, device=weight.device)
            kept = [state.get(name + end, none) for name in NAMES for end in ("", "_scale")]
            pieces = [tensor.view(rows, -1).split(size) for tensor in (weight, weight.grad, *kept)]
            for w, g, *moments in zip(*pieces, strict=True):
                _update_rows(w, g, moments, formats=formats, step=state["step"], group=group)


def _update_rows(
    w: Tensor, g: Tensor, kept: list[Tensor], *, formats: tuple[Format, ...], step: Tensor, group: dict[str, Any]
) -> None:  # fmt: skip
    """Update rows of a weight; ``kept``: codes and scales of the first moment, then of the second."""
    first, second = formats
    m, v = first.read(*kept[:2]), second.read(*kept[2:])
    wide = w.float()  # w itself if it is fp32
    fp32_update.adamw(wide, g.float(), m, v, step=step, group=group)
    first.write(m, *kept[:2])
    second.write(v, *kept[2:])
    if wide is not w:
        w.copy_(wide)


def by_block(rows: Tensor, scales: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
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
