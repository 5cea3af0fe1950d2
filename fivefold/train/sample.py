"""A look at what the model has learned: text drawn from it, token by token."""

from __future__ import annotations

import torch

from fivefold.train.tokenizer import Tokenizer
from fivefold.train.transformer import Transformer


@torch.no_grad()
def sample(module: Transformer, tokenizer: Tokenizer, *, prompt: str, tokens: int, window: int, seed: int) -> str:
    """``prompt`` and up to ``tokens`` more, drawn at temperature 0.8 from a plain decoder on CPU."""
    ids = [int(token) for token in tokenizer.encode(prompt)] or [tokenizer.end]
    generator = torch.Generator().manual_seed(seed)
    for _ in range(tokens):
        logits_V = module(torch.tensor([ids[-window:]]))[0, -1].float()
        drawn = int(torch.multinomial((logits_V / 0.8).softmax(-1), 1, generator=generator))
        if drawn == tokenizer.end:
            break
        ids.append(drawn)
    return tokenizer.decode(ids)
