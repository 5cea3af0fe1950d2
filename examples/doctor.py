"""One's own model for the doctor: `fivefold doctor examples/doctor.py --budget 4GiB`.

A small GPT in plain PyTorch, with the embedding tied to the head. `loss` makes its own inputs: only their shapes count.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH, LAYERS, HEADS, VOCABULARY = 768, 12, 12, 50304
SEQUENCES, TOKENS = 8, 1024


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def attention(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(-2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places.weight
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def model() -> nn.Module:
    return Gpt()


def loss(model: nn.Module) -> Tensor:
    tokens = torch.randint(VOCABULARY, (SEQUENCES, TOKENS + 1))
    with torch.autocast("cpu", dtype=torch.bfloat16):  # without a GPU it is the CPU's that counts
        logits = model(tokens[:, :-1])
    return functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)


def plan(model: nn.Module) -> dict[str, str]:
    """For `--tp 4`."""
    return {"blocks.*.mlp.0": "colwise", "blocks.*.mlp.2": "rowwise"}
