"""AdamW with moments of one or two bytes: a format per moment, updated in fp32, one block of rows at a time.

    x ≈ value of its code · scale      scale: max |x| of 256 elements of a row over the format's maximum; bf16 has none

``adamw8bit`` uses the dynamic tree of ``adamw8bit.py`` for both moments. Recipes use e4m3 and e5m2, e4m3 and fp16, or
bf16 for both. Blocks lie within rows, and ZeRO shards by full rows, so codes do not depend on ZeRO; the last block of a
row may be short. A small v is not rounded to 0, because m / √v would be unbounded (arXiv:2309.01507 §4.1). In formats
with scales, vectors and small matrices keep fp32.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fivefold.errors import UserError
from fivefold.layout.local_weight import LocalSlice
from fivefold.layout.spec import Layout
from fivefold.trainer.optimizers import fp32_update
from fivefold.trainer.optimizers.gather_matrices import ShardAxes
from fivefold.trainer.parallel.shard import LocalWeight, WeightShard
from fivefold.units import ceil_div
from fivefold.update import QUANTISED_BLOCK, is_quantized

NAMES = ("exp_avg", "exp_avg_sq")


class MomentFormat(Protocol):
    """The storage format of a moment."""

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the codes."""

    @property
    def has_scales(self) -> bool:
        """Return whether blocks have scales."""

    def read(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Convert codes [rows, columns] with scales [rows, blocks] to fp32 [rows, columns]."""

    def write(self, rows: Tensor, codes: Tensor, scales: Tensor) -> None:
        """Round fp32 ``rows`` into ``codes`` and ``scales``; overwrites ``rows``."""


class UnscaledFormat(NamedTuple):
    """Format without scales: elements are stored in bf16 or fp32 (fp32 is not copied)."""

    dtype: torch.dtype
    has_scales: bool = False

    def read(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Return ``codes`` in fp32."""
        return codes.float()

    def write(self, rows: Tensor, codes: Tensor, scales: Tensor) -> None:
        """Round ``rows`` to nearest, into ``codes``."""
        if rows is not codes:
            codes.copy_(rows)


class ScaledFormat(NamedTuple):
    """Format with a scale per block, which maps the block's largest |x| to the largest value of the dtype.

    If not ``signed``, a nonzero x does not become 0 but the smallest positive value of the dtype.
    """

    value: torch.dtype
    signed: bool
    has_scales: bool = True

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the codes.

        One-byte formats are stored as uint8, because torch's checkpoints do not support fp8.
        """
        return torch.uint8 if self.value.itemsize == 1 else self.value

    def read(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Return ``codes`` times their block's scale, in fp32."""
        rows = codes.view(self.value).float()
        for block, scale in iterate_blocks(rows, scales):
            block.mul_(scale)
        return rows

    def write(self, rows: Tensor, codes: Tensor, scales: Tensor) -> None:
        """Round ``rows`` to nearest, in units of their block's scale."""
        info = torch.finfo(self.value)
        for block, scale in iterate_blocks(rows, scales):
            scale.copy_(torch.linalg.vector_norm(block, ord=float("inf"), dim=-1, keepdim=True).div_(info.max))
            block.div_(scale.clamp(min=torch.finfo(torch.float32).tiny)).clamp_(-info.max, info.max)
        if not self.signed:
            rows.clamp_(min=info.smallest_normal * info.eps)
        codes.view(self.value).copy_(rows)


class NarrowAdamW(torch.optim.Optimizer):
    """Update ``sharded_weights`` with moments in ``formats``.

    ``groups``: torch's parameter groups of the same weights; ``name``: the optimizer's name in error messages.
    """

    def __init__(
        self,
        groups: fp32_update.Groups,
        sharded_weights: list[ShardAxes],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        formats: tuple[MomentFormat, MomentFormat],
        name: str,
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps})
        self.name = name
        self.parts: dict[Tensor, dict[str, WeightShard]] = {}  # weight → scale's name → its sharding, for checkpoints
        self.formats: dict[Tensor, tuple[MomentFormat, ...]] = {}
        self.low_precision_shards: list[WeightShard] = []  # weights with scales
        fp32_format: MomentFormat = UnscaledFormat(torch.float32)
        for cut in (cut for cut in sharded_weights if cut.shard.rows):
            shard, state = cut.shard, self.state[cut.shard.weight]
            blocks = is_quantized(shard.local_weight.weight.numel, vector=shard.local_weight.weight.is_vector)
            weight_formats: tuple[MomentFormat, ...] = tuple(
                moment_format if blocks or not moment_format.has_scales else fp32_format for moment_format in formats
            )
            self.formats[shard.weight] = weight_formats
            state["step"] = torch.zeros((), device=shard.weight.device)
            for moment, moment_format in zip(NAMES, weight_formats, strict=True):
                state[moment] = torch.zeros_like(shard.weight, dtype=moment_format.dtype)
            scaled_moments = [
                moment for moment, moment_format in zip(NAMES, weight_formats, strict=True) if moment_format.has_scales
            ]
            if scaled_moments:
                scale_shard = _scale_sharding(cut)
                self.low_precision_shards.append(shard)
                self.parts[shard.weight] = {f"{moment}_scale": scale_shard for moment in scaled_moments}
                for moment in self.parts[shard.weight]:
                    state[moment] = torch.zeros(shard.rows, scale_shard.columns, device=shard.weight.device)

    def check_reshardable(self, then: Layout) -> None:
        """Raise a user error if blocks of the layout ``then``, which wrote the moments, do not align here."""
        degrees = {"row": ("tp", then.tp), "expert_row": ("etp", then.etp)}
        for shard in self.low_precision_shards:
            weight, columns = shard.local_weight.weight, shard.shape[-1]
            axis, degree = degrees.get(weight.kind, ("tp", 1))
            saved_columns = weight.shape[-1] // degree
            if saved_columns != columns and (saved_columns % QUANTISED_BLOCK or columns % QUANTISED_BLOCK):
                raise UserError(
                    f"{self.name}: under {axis}{degree} rows of {weight.name} had {saved_columns} elements, "
                    f"here {columns}, and blocks of {QUANTISED_BLOCK} do not fit both; "
                    f"resume with {axis}{degree} or start a new run"
                )

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all weights once, by chunks of rows, so that few elements are in fp32 at a time."""
        for weight, state, group in fp32_update.count_step(self):
            assert weight.grad is not None
            formats, rows = self.formats[weight], len(weight)
            if not any(moment_format.has_scales or moment_format.dtype != torch.float32 for moment_format in formats):
                for w, g, m, v in fp32_update.iterate_blocks(weight, *(state[name] for name in NAMES)):
                    fp32_update.apply_adamw(w, g, m, v, step=state["step"], group=group)
                continue
            rows_per_chunk = max(1, fp32_update.CONVERTED_ELEMENTS * rows // weight.numel())
            no_scales = torch.empty(rows, 0, device=weight.device)
            state_tensors = [state.get(name + end, no_scales) for name in NAMES for end in ("", "_scale")]
            chunks = [tensor.view(rows, -1).split(rows_per_chunk) for tensor in (weight, weight.grad, *state_tensors)]
            for w, g, *moments in zip(*chunks, strict=True):
                _update_rows(w, g, moments, formats=formats, step=state["step"], group=group)


def _update_rows(
    w: Tensor, g: Tensor, kept: list[Tensor], *, formats: tuple[MomentFormat, ...], step: Tensor, group: dict[str, Any]
) -> None:
    """Update some rows of a weight; ``kept`` holds codes and scales of the first moment, then of the second."""
    first_format, second_format = formats
    m, v = first_format.read(*kept[:2]), second_format.read(*kept[2:])
    w_fp32 = w.float()  # w itself if it is fp32
    fp32_update.apply_adamw(w_fp32, g.float(), m, v, step=step, group=group)
    first_format.write(m, *kept[:2])
    second_format.write(v, *kept[2:])
    if w_fp32 is not w:
        w.copy_(w_fp32)


def iterate_blocks(rows: Tensor, scales: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield views [rows, blocks, elements] and their scales [rows, blocks, 1]: the full blocks, then the short one."""
    full_blocks = rows.shape[1] // QUANTISED_BLOCK
    if full_blocks:
        yield (
            rows[:, : full_blocks * QUANTISED_BLOCK].unflatten(1, (full_blocks, QUANTISED_BLOCK)),
            scales[:, :full_blocks, None],
        )
    if rows.shape[1] % QUANTISED_BLOCK:
        yield rows[:, None, full_blocks * QUANTISED_BLOCK :], scales[:, full_blocks:, None]


def _scale_sharding(cut: ShardAxes) -> WeightShard:
    """Return the sharding of a weight's scales: that of the weight, with one column per block of a row."""
    local_weight, piece = cut.shard.local_weight, cut.shard.local_weight.local_slice
    local_columns, column_slice = piece.shape[-1], piece.parts[0][-1]
    blocks = ceil_div(local_columns, QUANTISED_BLOCK)
    first = column_slice.start // local_columns * blocks
    parts = tuple((*part[:-1], slice(first, first + blocks)) for part in piece.parts)
    scale_slice = LocalSlice((*piece.shape[:-1], blocks), parts, piece.holders)
    full_shape = (*local_weight.weight.shape[:-1], local_weight.weight.shape[-1] // local_columns * blocks)
    return WeightShard(
        LocalWeight(local_weight.weight._replace(shape=full_shape), scale_slice, local_weight.holders), axis=cut.rows
    )
