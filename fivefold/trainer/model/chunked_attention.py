"""Attention inside chunks of a sequence (Llama 4): each chunk becomes a sequence of its own before the core.

[B, T, N, H] → [B · T / C, C, N, H] → core → [B, T, N, H]        views if C divides T, else padded at the end
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fivefold.trainer.model.dropout import GAMMA, mix


def split_chunks(x: Tensor, *, chunk: int, fill: float = 0) -> Tensor:
    """Split sequences into chunks: [B, T, …] → [B · ⌈T / C⌉, C, …], the last chunk of a sequence padded."""
    if padding := -x.shape[1] % chunk:
        x = F.pad(x, (*(0, 0) * (x.dim() - 2), 0, padding), value=fill)
    return x.unflatten(1, (-1, chunk)).flatten(0, 1)


def join_chunks(x: Tensor, *, sequences: int, tokens: int) -> Tensor:
    """Reverse ``split_chunks`` for ``sequences`` of ``tokens``."""
    return x.unflatten(0, (sequences, -1)).flatten(1, 2)[:, :tokens]


def make_chunk_keys(keys_B: Tensor, *, chunks: int) -> Tensor:
    """Return a dropout key for every chunk of each sequence: [B · chunks]."""
    return mix(keys_B[:, None] + torch.arange(chunks, device=keys_B.device) * GAMMA).flatten()


def get_last_chunk(keys_BSKH: Tensor, *, chunk: int) -> Tensor:
    """Return the cached keys or values that the newest token sees."""
    return keys_BSKH[:, (keys_BSKH.shape[1] - 1) // chunk * chunk :]
