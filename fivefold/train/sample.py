"""A look at what the model has learned: text drawn from it, token by token."""

from __future__ import annotations

import torch

from fivefold.train.build import Built
from fivefold.train.tokenizer import Tokenizer


@torch.no_grad()
def sample(built: Built, tokenizer: Tokenizer, *, prompt: str, tokens: int, window: int, seed: int) -> str:
    """``prompt`` and up to ``tokens`` more, drawn at temperature 0.8. Every rank calls it and draws the same."""
    ids = [int(token) for token in tokenizer.encode(prompt)] or [tokenizer.end]
    generator = torch.Generator().manual_seed(seed)
    for _ in range(tokens):
        seen = torch.tensor([ids[-window:]], device=built.ranks.device)
        logits_V = built.module(seen)[0, -1].float().cpu()
        drawn = int(torch.multinomial((logits_V / 0.8).softmax(-1), 1, generator=generator))
        if drawn == tokenizer.end:
            break
        ids.append(drawn)
    return tokenizer.decode(ids)
