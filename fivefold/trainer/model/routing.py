"""MoE routing: top-k choice of experts, capacity, token permutation, load balancing.

    chosen = top-k of (score + bias), within the best groups · weight = score / Σ chosen scores · scaling
    aux      α Σ_i f_i P_i per sequence, f_i = E/(k T) · tokens of expert i, P_i its mean normalized score
    free     after each step bias_i += rate · sign(mean load − load_i)
Sources: DeepSeek-V3, arXiv:2412.19437 §2.1.2; capacity: Switch Transformer, arXiv:2101.03961 §2.2.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import torch
from torch import Tensor

from fivefold.model.experts import MoE
from fivefold.units import ceil_div


class Sequences:
    """The sequence of each row of a micro-batch, here for ranks that hold full sequences of ``tokens``."""

    parts = 1  # pieces into which cp and tp cut a sequence, in order of position

    def __init__(self, tokens: int | None = None) -> None:
        self.tokens = tokens  # of a full sequence; None: all rows are one sequence

    def number(self, rows: int) -> int:
        """Return the number of sequences in a micro-batch of which this rank holds ``rows`` rows."""
        return 1 if self.tokens is None else ceil_div(rows, self.tokens)

    def piece(self, rows: int, device: torch.device) -> Tensor:
        """Return for each row its sequence index · ``parts`` + piece index, [R]; rows of a piece are neighbours."""
        return torch.arange(rows, device=device) // (self.tokens or rows)

    def total(self, counts: Tensor) -> Tensor:
        """Sum ``counts`` over the ranks that hold other rows of the same sequences; here there are none."""
        return counts


@dataclass(frozen=True)
class Permutation:
    """Token permutation: copies of rows in order of expert, and of token within an expert."""

    order: Tensor  # [n] index of each copy among the R · k choices
    tokens: Tensor  # [n] row of each copy
    places: Tensor  # [n] position of each copy, listed in order of token: the inverse of ``order``
    starts: Tensor  # [R] start of each token's copies in ``places``
    counts: Tensor  # [E] copies for each expert


def choose_experts(scores: Tensor, bias: Tensor | None, *, moe: MoE) -> Tensor:
    """Return the indices [R, k] of each row's top-k experts by ``scores`` [R, E] + ``bias`` [E], in the best groups."""
    biased_scores = scores if bias is None else scores + bias
    if moe.groups > 1:
        grouped = biased_scores.unflatten(1, (moe.groups, -1))
        experts_per_group = 1 if moe.score == "softmax" else min(2, grouped.shape[2])
        groups = grouped.topk(experts_per_group, dim=-1).values.sum(-1).topk(moe.topk_groups, dim=-1).indices
        is_excluded = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter_(1, groups, False)
        biased_scores = grouped.masked_fill(is_excluded[..., None], float("-inf")).flatten(1)
    return biased_scores.topk(moe.topk, dim=-1).indices


def draw_expert_table(vocab: int, *, moe: MoE, generator: torch.Generator) -> Tensor:
    """Draw the table [V, k] of the experts of each token id: distinct ones, all equally likely."""
    return torch.rand(vocab, moe.experts, generator=generator).topk(moe.topk, dim=-1).indices.to(torch.int32)


def routing_weights(scores: Tensor, chosen: Tensor, *, moe: MoE) -> Tensor:
    """Return the weight [R, k] of each chosen expert: its score [R, E], normalized and scaled as ``moe`` says."""
    weights = scores.gather(1, chosen)
    if moe.normalized:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)  # sigmoids may all be 0
    return weights * moe.scaling


def mask_capacity(chosen: Tensor, sequences: Sequences, *, moe: MoE) -> Tensor | None:
    """Return a mask [R, k] of the choices within the expert's capacity; None: no limit.

    They are the first ⌈capacity · T k / E⌉ choices of a sequence for that expert. If a sequence is cut over ranks,
    their counts are summed first: one ``sequences.total``.
    """
    if moe.capacity is None:
        return None
    rows, device = chosen.shape[0], chosen.device
    number, piece = sequences.number(rows), sequences.piece(rows, device)
    counts = count(chosen, piece, groups=number * sequences.parts, experts=moe.experts)
    table = sequences.total(counts).view(number, sequences.parts, -1)
    earlier = (table.cumsum(1) - table).flatten(0, 1)  # choices in earlier pieces of the sequence
    is_chosen = torch.zeros(rows, moe.experts, dtype=torch.int64, device=device).scatter_(1, chosen, 1)
    earlier_rows = is_chosen.cumsum(0) - is_chosen
    starts_piece = torch.nn.functional.pad(piece[1:] != piece[:-1], (1, 0))
    first = torch.where(starts_piece, torch.arange(rows, device=device), 0).cummax(0).values
    position = (earlier_rows - earlier_rows[first] + earlier[piece]).gather(1, chosen)
    return position < ceil(moe.capacity * (sequences.tokens or rows) * moe.topk / moe.experts)


def count(chosen: Tensor, group: Tensor, *, groups: int, experts: int) -> Tensor:
    """Return [groups, E]: how many rows of each group chose each expert.

    ``group`` [R] is the group index of each row.
    """
    index = (group[:, None] * experts + chosen).flatten()
    counts = torch.zeros(groups * experts, dtype=torch.int64, device=chosen.device)
    return counts.scatter_add_(0, index, torch.ones_like(index)).view(groups, experts)


def count_copies(computed: Tensor) -> int:
    """Return how many of the choices [R, k] experts compute."""
    return int(computed.sum())


def build_permutation(chosen: Tensor, computed: Tensor | None, *, copies: int, experts: int) -> Permutation:
    """Build the permutation of the ``copies`` among the choices ``chosen`` [R, k] that ``computed`` [R, k] marks."""
    topk = chosen.shape[1]
    flat = chosen.flatten()
    if computed is None:
        order = flat.argsort(stable=True)
        starts = torch.arange(0, flat.shape[0], topk, device=flat.device)
    else:
        flat = flat.where(computed.flatten(), experts)
        order = flat.argsort(stable=True)[:copies]
        copies_per_row = computed.sum(1)
        starts = copies_per_row.cumsum(0) - copies_per_row
    places = torch.empty_like(flat).scatter_(0, order, torch.arange(order.shape[0], device=flat.device))
    if computed is not None:
        places = places[(~computed).flatten().to(torch.uint8).argsort(stable=True)[:copies]]
    counts = torch.zeros(experts + 1, dtype=torch.int64, device=flat.device)
    counts = counts.scatter_add_(0, flat, torch.ones_like(flat))[:experts]
    return Permutation(order, order // topk, places, starts, counts)


def aux_gradient(scores: Tensor, chosen: Tensor, sequences: Sequences, *, moe: MoE, scale: float) -> Tensor:
    """Return the gradient [R, E] of ``scale`` · T · α Σ f_i P_i, summed over sequences, by the scores [R, E].

    f does not depend on the scores, and P = 1/T Σ s/Σs over the sequence: so a row's gradient needs only the counts of
    the others, and the loss does not depend on how rows are spread over ranks.
    """
    rows = scores.shape[0]
    sequence = sequences.piece(rows, scores.device) // sequences.parts
    counts = count(chosen, sequence, groups=sequences.number(rows), experts=moe.choices)
    tokens = sequences.tokens or rows
    f = sequences.total(counts).float()[sequence] * (moe.choices / (moe.topk * tokens))
    total = scores.sum(-1, keepdim=True)
    mean = (f * scores).sum(-1, keepdim=True) / total
    return (f - mean).div_(total).mul_(moe.aux_coefficient * scale)


def update_bias(bias: Tensor, load: Tensor, *, rate: float) -> Tensor:
    """Return ``bias`` [E] + ``rate`` · sign(mean load − load), DeepSeek-V3's balancing without an auxiliary loss.

    ``load`` [E]: choices of each expert in a step, summed over ranks.
    """
    load = load.float()
    return bias + rate * torch.sign(load.mean() - load)
