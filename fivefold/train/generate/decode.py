"""Text from a plain decoder, token by token; attention keeps what it needs of the tokens before.

    grouped   k and v of each key/value head, after rotation                                 2 K H numbers a token
    latent    the latent and the rotated key: q W_UK meets the latent, W_UV the output       kv_rank + rope_dim

A text that has filled the window is read anew from the middle of it, as if it began there: no position is ever beyond
those of the training. Latent: DeepSeek-V2, arXiv:2405.04434 §2.1; top-p: Holtzman et al., arXiv:1904.09751.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from pydantic import Field, NonNegativeFloat, NonNegativeInt
from torch import Tensor

from fivefold.record import Record
from fivefold.train.model.attention import LatentAttention, rotary_tables
from fivefold.train.model.flash_attention import Flash
from fivefold.train.model.moe import Moe
from fivefold.train.model.transformer import Block, Transformer


class SamplingParams(Record):
    """How a token is drawn. Temperature 0: the likeliest; ``top_p``: of the fewest tokens that have so much share."""

    temperature: NonNegativeFloat = 0.8
    top_p: float = Field(1.0, gt=0, le=1)
    seed: NonNegativeInt = 0

    def draw(self, logits_V: Tensor, generator: torch.Generator) -> int:
        """One token of ``logits``, which are fp32 on CPU."""
        if self.temperature == 0:
            return int(logits_V.argmax())
        shares = (logits_V / self.temperature).softmax(-1)
        if self.top_p < 1:
            ordered, places = shares.sort(descending=True)
            kept = ordered.cumsum(-1) - ordered < self.top_p  # the first of them always
            shares = torch.zeros_like(shares).scatter_(0, places[kept], ordered[kept])
        return int(torch.multinomial(shares, 1, generator=generator))


@torch.no_grad()
def generate(
    module: Transformer, prompts: Sequence[Sequence[int]], *, tokens: int, window: int, vocab: int,
    ends: frozenset[int], sampling: SamplingParams,
) -> Iterator[list[int | None]]:  # fmt: skip
    """Step by step, the next token of each prompt; None where there is none, as it has ended or is still being read.

    Texts grow side by side: a longer prompt is read on while shorter ones are continued, and each draws by itself, the
    n-th with ``sampling.seed`` + n. A token of ``ends`` or ``tokens`` of them end a text. Drawn are tokens below
    ``vocab``.
    """
    texts = [list(prompt) for prompt in prompts]
    stops = [len(text) + tokens for text in texts]
    generators = [torch.Generator().manual_seed(sampling.seed + number) for number in range(len(texts))]
    first, read, known = 0, 0, min(map(len, texts))
    with kv_cached(module, tokens=min(window, max(stops))) as reader:
        while any(known < stop for stop in stops):
            if known - first > window:
                first = read = known - max(1, window // 2)
                reader.forget()
            logits_BV = reader.read([text[read:known] for text in texts])[:, :vocab].float().cpu()
            read, new = known, list[int | None]()
            for number, text in enumerate(texts):
                wanted = len(text) == known < stops[number]
                new.append(sampling.draw(logits_BV[number], generators[number]) if wanted else None)
                if len(text) == known:
                    text.append(new[-1] or 0)  # of a text that has ended, no matter what
                if new[-1] in ends:
                    stops[number] = known
            known += 1
            yield new


class CachedDecoder:
    """A decoder with what its attention keeps of the tokens read so far."""

    def __init__(self, module: Transformer, *, tokens: int) -> None:
        """``tokens``: at most so many are kept."""
        self.module, self.here = module, 0
        like = module.embed.tokens.weight
        positions = torch.arange(tokens, device=like.device)
        self.tables = rotary_tables(module.model, positions=positions, dtype=like.dtype, device=like.device)
        self.kept = [attach(block, tokens=tokens) for block in _blocks(module)]

    def read(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """Read on, as many tokens of each text; → logits [B, V] after the last. After the first time one at a time."""
        tokens_BT = torch.tensor(texts, device=self.tables[0].device)
        rows = slice(self.here, self.here + tokens_BT.shape[1])
        x_RD = self.module.embed(tokens_BT)
        for block in _blocks(self.module):
            x_RD = block(x_RD, *(table[rows] for table in self.tables))
        self.here = rows.stop
        last_BD = x_RD.view(*tokens_BT.shape, -1)[:, -1]
        logits_BV: Tensor = self.module.head(last_BD, None, 1.0)
        return logits_BV

    def forget(self) -> None:
        """Begin anew."""
        self.here = 0
        for kept in self.kept:
            kept.here = 0


@contextmanager
def kv_cached(module: Transformer, *, tokens: int) -> Iterator[CachedDecoder]:
    """``module`` reads with a memory of so many ``tokens``; afterwards it is as before.

    Experts then have room for whoever chooses them: capacity is a matter of whole sequences, which nobody has here.
    """
    limited = [part for part in module.modules() if isinstance(part, Moe)]
    limits = [part.moe for part in limited]
    for part in limited:
        part.moe = part.moe.replace(capacity=None)
    try:
        yield CachedDecoder(module, tokens=tokens)
    finally:
        for part, limit in zip(limited, limits, strict=True):
            part.moe = limit
        for block in _blocks(module):
            detach(block)


class KVCache:
    """Keys and values of one layer, the latest with all before them. The ``AttentionHooks`` of attention."""

    def __init__(self, tokens: int) -> None:
        self.tokens, self.here = tokens, 0
        self.parts: tuple[Tensor, ...] = ()

    def add(self, *new: Tensor) -> tuple[Tensor, ...]:
        """What is new [B, T, …], behind what is kept."""
        if not self.parts:
            self.parts = tuple(x.new_empty(x.shape[0], self.tokens, *x.shape[2:]) for x in new)
        rows = slice(self.here, self.here + new[0].shape[1])
        for part, x in zip(self.parts, new, strict=True):
            part[:, rows] = x
        self.here = rows.stop
        return tuple(part[:, : self.here] for part in self.parts)

    def enter(self, q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor) -> tuple[Tensor, ...]:
        """Queries of the new tokens, keys and values of all."""
        return q_BTNH, *self.add(k_BTKH, v_BTKH)

    def leave(self, out_BTNH: Tensor) -> Tensor:
        """As it is."""
        return out_BTNH


class LatentKVCache(KVCache):
    """Latents and rotated keys of one layer, which all heads share; W_UK and W_UV are halves of ``kv_up``."""

    def __init__(self, tokens: int, *, attention: LatentAttention) -> None:
        super().__init__(tokens)
        self.mla, self.up = attention.mla, attention.kv_up

    def enter(self, q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor) -> tuple[Tensor, ...]:
        """q · (W_UK latent) = (q W_UK) · latent, so that queries go to the latents' dims and no key is made."""
        (bare,) = self.add(k_BTKH)
        still, turned = q_BTNH.split((self.mla.nope_dim, self.mla.rope_dim), dim=-1)
        wide = torch.einsum("btnh,nhr->btnr", still, self._matrix()[:, : self.mla.nope_dim])
        return torch.cat((wide, turned), dim=-1), bare, bare[..., : self.mla.kv_rank]

    def leave(self, out_BTNH: Tensor) -> Tensor:
        """What heads have seen of the latents, as values."""
        return torch.einsum("btnr,nhr->btnh", out_BTNH, self._matrix()[:, self.mla.nope_dim :])

    def _matrix(self) -> Tensor:
        return self.up.matrix.view(-1, self.mla.nope_dim + self.mla.v_dim, self.mla.kv_rank)


def attach(block: Block, *, tokens: int) -> KVCache:
    """Give the attention of ``block`` a memory."""
    attention = block.attention
    latent = isinstance(attention, LatentAttention)
    kept = LatentKVCache(tokens, attention=attention) if isinstance(attention, LatentAttention) else KVCache(tokens)
    if latent:
        attention.bare = True
    attention.hooks, attention.core = kept, partial(_see, attention.scale)
    return kept


def detach(block: Block) -> None:
    """Take it away."""
    attention = block.attention
    attention.hooks, attention.core = None, Flash(scale=attention.scale)
    if isinstance(attention, LatentAttention):
        attention.bare = False


def _see(scale: float, q_BTNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor, documents_BT: Tensor | None) -> Tensor:
    """The first time causal, of as many queries as keys; later of one query, which comes after all keys."""
    out_BNTH = F.scaled_dot_product_attention(
        q_BTNH.transpose(1, 2), k_BSKH.transpose(1, 2), v_BSKH.transpose(1, 2), is_causal=q_BTNH.shape[1] > 1,
        scale=scale, enable_gqa=q_BTNH.shape[2] != k_BSKH.shape[2],
    )  # fmt: skip
    return out_BNTH.transpose(1, 2)


def _blocks(module: Transformer) -> list[Block]:
    return [block for block in module.blocks if isinstance(block, Block)]
