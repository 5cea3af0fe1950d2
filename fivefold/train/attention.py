"""Self-attention of a plain decoder: rotary positions, grouped queries, flash attention.

    x_BTD → q_BTNH, k_BTKH, v_BTKH → softmax(q·kᵀ/√H, causal)·v → out_BTD

Flash attention keeps q, k, v, its output and one log-sum-exp per query (Dao, arXiv:2205.14135).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.model.spec import Model
from fivefold.train.kernels import rotate


class Attention(nn.Module):
    """Causal self-attention over whole sequences."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = model.heads, model.kv_heads, model.head_dim
        wide, narrow = model.heads * model.head_dim, model.kv_heads * model.head_dim
        self.q = nn.Linear(model.width, wide, bias=model.qkv_bias)
        self.k = nn.Linear(model.width, narrow, bias=model.qkv_bias)
        self.v = nn.Linear(model.width, narrow, bias=model.qkv_bias)
        self.out = nn.Linear(wide, model.width, bias=model.out_bias)

    def forward(self, x_BTD: Tensor, cos_TH: Tensor, sin_TH: Tensor) -> Tensor:
        """[B, T, D] → [B, T, D]."""
        B, T, _ = x_BTD.shape
        q_BTNH = rotate(self.q(x_BTD).view(B, T, self.heads, self.head_dim), cos_TH=cos_TH, sin_TH=sin_TH)
        k_BTKH = rotate(self.k(x_BTD).view(B, T, self.kv_heads, self.head_dim), cos_TH=cos_TH, sin_TH=sin_TH)
        v_BTKH = self.v(x_BTD).view(B, T, self.kv_heads, self.head_dim)
        out_BNTH = F.scaled_dot_product_attention(
            q_BTNH.transpose(1, 2),
            k_BTKH.transpose(1, 2),
            v_BTKH.transpose(1, 2),
            is_causal=True,
            enable_gqa=self.kv_heads != self.heads,
        )
        out: Tensor = self.out(out_BNTH.transpose(1, 2).reshape(B, T, self.heads * self.head_dim))
        return out


def rotary_tables(model: Model, *, tokens: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """``cos | cos`` and ``−sin | sin`` [T, 1, H] of positions 0..tokens−1 (RoFormer, arXiv:2104.09864).

    So wide that x · cos + (its halves exchanged) · sin runs over whole heads.
    """
    exponents = torch.arange(0, model.head_dim, 2, dtype=torch.float64, device=device) / model.head_dim
    angles = torch.outer(torch.arange(tokens, dtype=torch.float64, device=device), model.rope_theta**-exponents)
    cos, sin = angles.cos().to(dtype)[:, None, :], angles.sin().to(dtype)[:, None, :]
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
