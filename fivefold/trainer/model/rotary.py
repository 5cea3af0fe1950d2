"""Rotary position tables of whole sequences (RoPE, arXiv:2104.09864), and what attention knows of its rows.

    angle of pair j of a token = position · θ^(−2j / dim)      scaled for texts longer than those of the pre-training

Scalings: linear; dynamic (NTK-aware), by the length of the sequence; llama3; YaRN (arXiv:2309.00071); longrope
(arXiv:2402.13753), one list of factors up to the original length, another beyond.
"""

from __future__ import annotations

from math import ceil, floor, log, pi
from typing import NamedTuple

import torch
from torch import Tensor

from fivefold.model.shape import RopeScaling, Temperature
from fivefold.model.spec import Model
from fivefold.record import Mistake


class Rows(NamedTuple):
    """What the blocks know of the rows [B · T] of a micro-batch. ``tokens``: T, of each sequence on this rank.

    ``tables``: of ``rotary_tables``, and those of sliding layers where they have their own. ``documents`` [B, T]: a
    document id per token of the whole sequences; tokens attend inside their document. None: a sequence is one.
    ``keys`` [B]: of the sequences, for dropout; None: nothing is dropped.
    """

    tokens: int
    tables: tuple[Tensor, ...] = ()
    documents: Tensor | None = None
    keys: Tensor | None = None

    def rotary(self, *, own: bool) -> tuple[Tensor, Tensor]:
        """cos and sin; ``own``: those of sliding layers, which have their own."""
        first = 2 if own else 0
        return self.tables[first], self.tables[first + 1]

    def temperature(self) -> tuple[Tensor, Tensor]:
        """Factors of queries by position, as cos, and zeros, as sin."""
        return self.tables[-2], self.tables[-1]


def tables_of(
    model: Model, *, positions: Tensor, length: int | None = None, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, ...]:  # fmt: skip
    """``rotary_tables`` of all layers, then those of sliding layers where they differ, then those of the temperature.

    Their number and dims are those of ``model.table_dims``.
    """
    kinds = () if model.position != "rope" else (False, True) if model.rope_theta_sliding else (False,)
    turns = tuple(
        table for sliding in kinds
        for table in rotary_tables(
            model, positions=positions, length=length, sliding=sliding, dtype=dtype, device=device
        )
    )  # fmt: skip
    if model.temperature is None or len(model.table_dims) == len(kinds):
        return turns
    return *turns, *_temperature(model.temperature, positions, head_dim=model.head_dim, dtype=dtype, device=device)


def _temperature(
    rule: Temperature, positions: Tensor, *, head_dim: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The factors of ``positions`` as tables that turn nothing: as cos and sin [T, 1, H], of which sin is 0."""
    steps = torch.div(positions.to(device, torch.float64) + 1, rule.floor, rounding_mode="floor")
    factors = (1 + rule.scale * steps.log1p()).to(dtype)[:, None, None].expand(-1, 1, head_dim).contiguous()
    return factors, torch.zeros_like(factors)


def rotary_tables(
    model: Model, *, positions: Tensor, length: int | None = None, sliding: bool = False, dtype: torch.dtype,
    device: torch.device,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``cos | cos`` and ``−sin | sin`` [T, 1, H] in ``dtype`` for the tokens at ``positions`` [T].

    H: the dims of a head that are rotated. With tables as wide as that, rope is x · cos + (halves swapped x) · sin.
    ``length``: tokens of a whole sequence, if ``positions`` are a part of it. ``sliding``: of sliding-window layers.
    """
    turns = frequencies(model, length=length or len(positions), sliding=sliding)
    angles = torch.outer(positions.to(device, torch.float64), torch.tensor(turns, dtype=torch.float64, device=device))[
        :, None, :
    ]
    scaling = None if _own(model, sliding) else model.rope_scaling
    factor = (scaling and scaling.attention_factor) or 1.0
    cos, sin = (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def frequencies(model: Model, *, length: int = 1, sliding: bool = False) -> list[float]:
    """Radians per token of each pair of rotated dims, in sequences of ``length`` tokens; scaling divides some of them.

    Raises ``Mistake`` for a scaling that lacks a value.
    """
    dim, scaling = model.rope_dim, model.rope_scaling
    if _own(model, sliding):
        assert model.rope_theta_sliding is not None
        return _powers(model.rope_theta_sliding, dim)
    if scaling is None:
        return _powers(model.rope_theta, dim)
    if scaling.kind == "dynamic":
        longer = max(length, _original(scaling, model)) / _original(scaling, model)
        stretch = (scaling.factor * longer - (scaling.factor - 1)) ** (dim / (dim - 2))
        return _powers(model.rope_theta * stretch, dim)
    plain = _powers(model.rope_theta, dim)
    if scaling.kind == "longrope":
        long = length > _original(scaling, model)
        factors = scaling.long_factors if long else scaling.short_factors
        return [own / factor for own, factor in zip(plain, factors, strict=True)]
    shares = _unscaled_shares(scaling, model=model, plain=plain)
    return [share * own + (1 - share) * own / scaling.factor for share, own in zip(shares, plain, strict=True)]


def _own(model: Model, sliding: bool) -> bool:
    """Whether these layers have a base of their own, to which no scaling applies."""
    return sliding and model.rope_theta_sliding is not None


def _powers(theta: float, dim: int) -> list[float]:
    return [theta ** -(index / dim) for index in range(0, dim, 2)]


def _original(scaling: RopeScaling, model: Model) -> int:
    """Longest sequence of the pre-training; ``Mistake`` where it is not given."""
    if scaling.original_positions is None:
        raise Mistake(
            f"model {model.name!r}: rope scaling {scaling.kind!r} needs original_positions; give it in rope_scaling"
        )
    return scaling.original_positions


def _unscaled_shares(scaling: RopeScaling, *, model: Model, plain: list[float]) -> list[float]:
    """Weight from 0 to 1 of each pair's unscaled frequency in the mix; 1 for pairs that turn fast (llama3, YaRN)."""
    if scaling.kind == "linear":
        return [0.0 for _ in plain]
    length, kind = _original(scaling, model), scaling.kind
    if kind == "yarn" and scaling.attention_factor is None:
        raise Mistake(f"model {model.name!r}: rope scaling 'yarn' needs attention_factor; give it in rope_scaling")
    if kind == "llama3":
        low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
        turns = [length * own / (2 * pi) for own in plain]  # within the pre-training length
        if low == high:  # a step (Llama 4)
            return [float(times > high) for times in turns]
        return [_clamp((times - low) / (high - low)) for times in turns]
    # YaRN (arXiv:2309.00071) §3.2: a linear ramp between the pairs that rotate beta_fast and beta_slow times
    first, last = (
        model.rope_dim * log(length / (turns * 2 * pi)) / (2 * log(model.rope_theta))
        for turns in (scaling.beta_fast, scaling.beta_slow)
    )
    if scaling.truncate:
        first, last = floor(first), ceil(last)
    first, last = max(first, 0), min(last, model.rope_dim - 1)
    span = last - first or 1e-3  # negative where both lie beyond the last pair: every pair is scaled
    return [1 - _clamp((pair - first) / span) for pair in range(len(plain))]


def _clamp(share: float) -> float:
    """Clamp to 0 … 1."""
    return min(max(share, 0.0), 1.0)
