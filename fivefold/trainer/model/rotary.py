"""Rotary position tables of full sequences (RoPE, arXiv:2104.09864), and the inputs of attention besides its rows.

    angle of pair j of a token = position · θ^(−2j / dim)      scaled for texts longer than those of the pre-training

Scalings: linear; dynamic (NTK-aware), by the length of the sequence; llama3; YaRN (arXiv:2309.00071); longrope
(arXiv:2402.13753), one list of factors up to the original length, another beyond; proportional, the first pairs alone.
"""

from __future__ import annotations

from math import ceil, floor, log, pi
from typing import NamedTuple

import torch
from torch import Tensor

from fivefold.errors import UserError
from fivefold.model.factors import Temperature
from fivefold.model.rope import RopeScaling, RotaryTable
from fivefold.model.spec import Model


class RowInputs(NamedTuple):
    """Inputs of the blocks for the rows [B · T] of a micro-batch. ``tokens``: T, of each sequence on this rank.

    ``tables``: what ``list_tables`` returns. ``documents`` [B, T]: a document id per token of the full sequences;
    tokens attend inside their document. None: a sequence is one document. ``keys`` [B]: keys of the sequences for
    dropout; None: no dropout. ``layer_input`` [B · T, P]: what the ids make for this layer (``per_layer_inputs.py``).
    ``keys_values``: keys and values of an earlier layer, to which this one attends. ``chosen`` [B · T, K]: the indices
    of keys that an earlier layer chose (``indexer.py``). ``experts`` [B · T, D]: the output of the experts of the layer
    before, which this one adds. ``ids`` [B, T]: the token ids, by which a table names the
    experts of this layer.
    """

    tokens: int
    tables: tuple[Tensor, ...] = ()
    documents: Tensor | None = None
    keys: Tensor | None = None
    layer_input: Tensor | None = None
    keys_values: tuple[Tensor, Tensor] | None = None
    chosen: Tensor | None = None
    experts: Tensor | None = None
    ids: Tensor | None = None

    def rotary(self, *, sliding: bool) -> tuple[Tensor, Tensor]:
        """Return cos and sin; ``sliding``: return those of sliding layers, if they have their own."""
        first = 2 if sliding else 0
        return self.tables[first], self.tables[first + 1]

    def temperature(self) -> tuple[Tensor, Tensor]:
        """Return the factors of queries by position, as cos, and zeros, as sin."""
        return self.tables[-2], self.tables[-1]


def list_tables(
    model: Model, *, positions: Tensor, length: int | None = None, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, ...]:
    """Return the tables of cos and sin of all layers, those of sliding layers if they differ, those of compressed keys.

    Last are the factors of the temperature with which some models scale queries by position.

    Their number and dims are those of ``model.table_dims``.
    """
    sliding_kinds = () if model.position != "rope" else (False, True) if model.rope_theta_sliding else (False,)
    compressed = model.compressed_tables
    tables = tuple(
        table
        for sliding in sliding_kinds
        for table in rotary_tables(
            model, positions=positions, length=length, sliding=sliding, dtype=dtype, device=device
        )
    )
    for shape in compressed:
        tables += paired_tables(shape, positions=positions, name=model.name, dtype=dtype, device=device)
    if model.temperature is None or len(model.table_dims) == len(sliding_kinds) + len(compressed):
        return tables
    head_dim = model.table_dims[-1]
    return *tables, *_temperature(model.temperature, positions, head_dim=head_dim, dtype=dtype, device=device)


def _temperature(
    rule: Temperature, positions: Tensor, *, head_dim: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the factors of ``positions`` as tables that rotate nothing: cos and sin [T, 1, H], of which sin is 0."""
    numbers = positions.to(device, torch.float64) + rule.first
    if rule.form == "power":
        factors = (1 + numbers / rule.floor) ** rule.scale
    else:
        factors = 1 + rule.scale * torch.div(numbers, rule.floor, rounding_mode="floor").log1p()
    factors = factors.to(dtype)[:, None, None].expand(-1, 1, head_dim).contiguous()
    return factors, torch.zeros_like(factors)


def rotary_tables(
    model: Model,
    *,
    positions: Tensor,
    length: int | None = None,
    sliding: bool = False,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """Return ``cos | cos`` and ``−sin | sin`` [T, 1, H] in ``dtype`` for the tokens at ``positions`` [T].

    H: the dims of a head that are rotated. With tables of this width, rope is x · cos + (halves swapped x) · sin.
    ``length``: tokens of a full sequence, if ``positions`` are a part of it. ``sliding``: return the tables of
    sliding-window layers.
    """
    frequencies = compute_frequencies(model, length=length or len(positions), sliding=sliding)
    scaling = None if _has_own_base(model, sliding) else model.rope_scaling
    cos, sin = _compute_tables(frequencies, scaling, positions=positions, dtype=dtype, device=device)
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def paired_tables(
    shape: RotaryTable, *, positions: Tensor, name: str, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return ``cos, cos, …`` and ``−sin, sin, …`` [T, 1, H] of pairs of neighbours, which ``rotate_pairs`` turns."""
    frequencies = _scale_frequencies(shape, length=len(positions), name=name)
    cos, sin = _compute_tables(frequencies, shape.scaling, positions=positions, dtype=dtype, device=device)
    return cos.repeat_interleave(2, dim=-1), torch.stack((-sin, sin), dim=-1).flatten(-2)


def _compute_tables(
    frequencies: list[float],
    scaling: RopeScaling | None,
    *,
    positions: Tensor,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [T, 1, H / 2] of the angles at ``positions``."""
    angles = torch.outer(
        positions.to(device, torch.float64), torch.tensor(frequencies, dtype=torch.float64, device=device)
    )[:, None, :]
    factor = (scaling and scaling.attention_factor) or 1.0
    return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)


def compute_frequencies(model: Model, *, length: int = 1, sliding: bool = False) -> list[float]:
    """Return the radians per token of each pair of rotated dims, in sequences of ``length`` tokens.

    Scaling divides some of them. Raises a user error for a scaling with a missing value.
    """
    if _has_own_base(model, sliding):
        assert model.rope_theta_sliding is not None
        return _compute_powers(model.rope_theta_sliding, model.table_dims[1])
    shape = RotaryTable(model.rope_dim, model.rope_theta, model.rope_scaling)
    return _scale_frequencies(shape, length=length, name=model.name)


def _scale_frequencies(shape: RotaryTable, *, length: int, name: str) -> list[float]:
    """Return the radians per token of each pair; ``name``: of the model, for errors."""
    dim, theta, scaling = shape
    if scaling is None:
        return _compute_powers(theta, dim)
    if scaling.kind == "dynamic":
        original = _get_pretraining_length(scaling, name)
        length_ratio = max(length, original) / original
        stretch = (scaling.factor * length_ratio - (scaling.factor - 1)) ** (dim / (dim - 2))
        return _compute_powers(theta * stretch, dim)
    unscaled = _compute_powers(theta, dim)
    if scaling.kind == "proportional":
        rotating = int(scaling.fraction * dim // 2)
        return [frequency / scaling.factor if pair < rotating else 0.0 for pair, frequency in enumerate(unscaled)]
    if scaling.kind == "longrope":
        is_long = length > _get_pretraining_length(scaling, name)
        factors = scaling.long_factors if is_long else scaling.short_factors
        return [frequency / factor for frequency, factor in zip(unscaled, factors, strict=True)]
    shares = _compute_unscaled_shares(shape, scaling, name=name, plain=unscaled)
    return [
        share * frequency + (1 - share) * frequency / scaling.factor
        for share, frequency in zip(shares, unscaled, strict=True)
    ]


def _has_own_base(model: Model, sliding: bool) -> bool:
    """Return whether these layers have a base of their own, to which no scaling applies."""
    return sliding and model.rope_theta_sliding is not None


def _compute_powers(theta: float, dim: int) -> list[float]:
    return [theta ** -(index / dim) for index in range(0, dim, 2)]


def _get_pretraining_length(scaling: RopeScaling, name: str) -> int:
    """Return the longest sequence of the pre-training; raise a user error if it is not given."""
    if scaling.original_positions is None:
        raise UserError(
            f"model {name!r}: rope scaling {scaling.kind!r} needs original_positions; give it in rope_scaling"
        )
    return scaling.original_positions


def _compute_unscaled_shares(shape: RotaryTable, scaling: RopeScaling, *, name: str, plain: list[float]) -> list[float]:
    """Return the weight, from 0 to 1, of each pair's unscaled frequency in the mix.

    It is 1 for pairs that rotate fast (llama3, YaRN).
    """
    if scaling.kind == "linear":
        return [0.0 for _ in plain]
    length, kind = _get_pretraining_length(scaling, name), scaling.kind
    if kind == "yarn" and scaling.attention_factor is None:
        raise UserError(f"model {name!r}: rope scaling 'yarn' needs attention_factor; give it in rope_scaling")
    if kind == "llama3":
        low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
        turns = [length * frequency / (2 * pi) for frequency in plain]  # within the pre-training length
        if low == high:  # a step (Llama 4)
            return [float(times > high) for times in turns]
        return [_clamp((times - low) / (high - low)) for times in turns]
    # YaRN (arXiv:2309.00071) §3.2: a linear ramp between the pairs that rotate beta_fast and beta_slow times
    first, last = (
        shape.dim * log(length / (turns * 2 * pi)) / (2 * log(shape.theta))
        for turns in (scaling.beta_fast, scaling.beta_slow)
    )
    if scaling.truncate:
        first, last = floor(first), ceil(last)
    first, last = max(first, 0), min(last, shape.dim - 1)
    span = last - first or 1e-3  # negative if both are beyond the last pair: every pair is scaled
    return [1 - _clamp((pair - first) / span) for pair in range(len(plain))]


def _clamp(share: float) -> float:
    """Clamp ``share`` to 0 … 1."""
    return min(max(share, 0.0), 1.0)
