"""Decode autoregressively on a single-process decoder, with a KV cache if every token mixer is attention.

Other token mixers have no cache: with them all tokens of the window are read again for each new one. The cache holds
per token and layer:

    GQA   k and v of each key/value head, after rope                                          2 K H numbers
    MLA   the latent and the rotary key; W_UK is absorbed into q, W_UV into the output        kv_rank + rope_dim

A text that fills the window is read again from its second half, with positions from 0, so that no position exceeds
those of the training. MLA: DeepSeek-V2, arXiv:2405.04434 §2.1; top-p: Holtzman et al., arXiv:1904.09751.
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
from fivefold.trainer.model.attention import LatentAttention
from fivefold.trainer.model.attention_mask import AttentionMask
from fivefold.trainer.model.block import Block
from fivefold.trainer.model.flash_attention import Flash, add_sinks, attend
from fivefold.trainer.model.moe import Moe
from fivefold.trainer.model.rotary import RowInputs, list_tables
from fivefold.trainer.model.transformer import Transformer


class SamplingParams(Record):
    """The settings by which a token is drawn. Temperature 0: greedy; ``top_p``: fewest tokens of that probability."""

    temperature: NonNegativeFloat = 0.8
    top_p: float = Field(1.0, gt=0, le=1)
    seed: NonNegativeInt = 0

    def draw(self, logits_V: Tensor, generator: torch.Generator) -> int:
        """Draw one token id from ``logits`` [V], fp32 on CPU."""
        if self.temperature == 0:
            return int(logits_V.argmax())
        probabilities = (logits_V / self.temperature).softmax(-1)
        if self.top_p < 1:
            ordered, ids = probabilities.sort(descending=True)
            in_top_p = ordered.cumsum(-1) - ordered < self.top_p  # always includes the most probable one
            probabilities = torch.zeros_like(probabilities).scatter_(0, ids[in_top_p], ordered[in_top_p])
        return int(torch.multinomial(probabilities, 1, generator=generator))


@torch.no_grad()
def generate(
    module: Transformer,
    prompts: Sequence[Sequence[int]],
    *,
    tokens: int,
    window: int,
    vocab: int,
    ends: frozenset[int],
    sampling: SamplingParams,
) -> Iterator[list[int | None]]:
    """Yield at each step the next token of every prompt; None for one that has ended or is still being read.

    All texts are decoded as one batch at the same position: a longer prompt is still read while shorter ones are
    continued. Text n is drawn with ``sampling.seed`` + n, from ids below ``vocab``; it ends with a token of ``ends``
    or after ``tokens`` new ones. ``window``: maximum tokens of context.
    """
    texts = [list(prompt) for prompt in prompts]
    stops = [len(text) + tokens for text in texts]
    generators = [torch.Generator().manual_seed(sampling.seed + number) for number in range(len(texts))]
    start, read, length = 0, 0, min(map(len, texts))
    with open_reader(module, tokens=min(window, max(stops))) as reader:
        while any(length < stop for stop in stops):
            if length - start > window:
                start = read = length - max(1, window // 2)
                reader.forget()
            logits_BV = reader.read([text[read:length] for text in texts])[:, :vocab].float().cpu()
            read, new_tokens = length, list[int | None]()
            for number, text in enumerate(texts):
                is_drawn = len(text) == length < stops[number]
                new_tokens.append(sampling.draw(logits_BV[number], generators[number]) if is_drawn else None)
                if len(text) == length:
                    text.append(new_tokens[-1] or 0)  # an ended text is padded to stay in the batch
                if new_tokens[-1] in ends:
                    stops[number] = length
            length += 1
            yield new_tokens


class CachedDecoder:
    """A decoder with the KV caches of its blocks; ``length``: tokens read so far."""

    def __init__(self, module: Transformer, *, tokens: int) -> None:
        """Attach caches of a capacity of ``tokens``."""
        self.module, self.length = module, 0
        weight = module.embed.tokens.weight
        positions = torch.arange(tokens, device=weight.device)
        self.tables = list_tables(module.model, positions=positions, dtype=weight.dtype, device=weight.device)
        self.kept = [attach(block, tokens=tokens) for block in _list_blocks(module)]

    def read(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """Read ``texts`` [B, T] after the cached tokens; return its last logits [B, V]. T = 1 after the first call."""
        tokens_BT = torch.tensor(texts, device=self.module.embed.tokens.weight.device)
        new = slice(self.length, self.length + tokens_BT.shape[1])
        rows = RowInputs(tokens_BT.shape[1], tuple(table[new] for table in self.tables))
        x_RD = self.module.embed(tokens_BT, torch.arange(new.start, new.stop, device=tokens_BT.device))
        for layer, block in enumerate(self.module.blocks):
            x_RD = block(x_RD, rows)
            x_RD, experts = x_RD if self.module.model.lends_experts(layer) else (x_RD, None)
            rows = rows._replace(experts=experts)
        self.length = new.stop
        last_BD = x_RD.unflatten(0, tokens_BT.shape)[:, -1]
        return self.module.head(last_BD, None, 1.0)

    def forget(self) -> None:
        """Empty the caches, for another text."""
        self.length = 0
        for cache in self.kept:
            cache.length = 0


class UncachedDecoder:
    """A decoder that reads all tokens since the last ``forget`` again in every call."""

    def __init__(self, module: Transformer) -> None:
        self.module = module
        self.texts: list[list[int]] = []

    def read(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """Read ``texts`` [B, T] after the tokens before them; return the last logits [B, V]."""
        known = self.texts or [[] for _ in texts]
        self.texts = [[*old, *new] for old, new in zip(known, texts, strict=True)]
        logits_BTV: Tensor = self.module(torch.tensor(self.texts, device=self.module.embed.tokens.weight.device))
        return logits_BTV[:, -1]

    def forget(self) -> None:
        """Begin another text."""
        self.texts = []


@contextmanager
def open_reader(module: Transformer, *, tokens: int) -> Iterator[CachedDecoder | UncachedDecoder]:
    """Give ``module`` KV caches of ``tokens`` within the context, if its layers have them; restore it afterwards."""
    model = module.model
    has_indexer = model.mla is not None and model.mla.indexer is not None
    hashes = model.moe is not None and model.moe.hashed_layers > 0
    shares_keys = bool(model.shared_kv_layers or model.per_layer_inputs is not None)
    if not (model.non_attention_mixers or shares_keys or has_indexer or hashes or model.dynamic_mask is not None):
        with enable_kv_cache(module, tokens=tokens) as reader:
            yield reader
        return
    with disable_expert_capacity(module):
        yield UncachedDecoder(module)


@contextmanager
def enable_kv_cache(module: Transformer, *, tokens: int) -> Iterator[CachedDecoder]:
    """Give ``module`` KV caches of ``tokens`` within the context; restore it afterwards."""
    with disable_expert_capacity(module):
        try:
            yield CachedDecoder(module, tokens=tokens)
        finally:
            for block in _list_blocks(module):
                detach(block)


@contextmanager
def disable_expert_capacity(module: Transformer) -> Iterator[None]:
    """Drop no tokens of experts within the context: a capacity is a share of a full training sequence."""
    moe_layers = [layer for layer in module.modules() if isinstance(layer, Moe)]
    configs = [layer.moe for layer in moe_layers]
    for layer in moe_layers:
        layer.moe = layer.moe.replace(capacity=None)
    try:
        yield
    finally:
        for layer, config in zip(moe_layers, configs, strict=True):
            layer.moe = config


class KVCache:
    """A KV cache of one layer, as ``AttentionHooks``. ``tokens``: its capacity; ``length``: tokens cached so far."""

    def __init__(self, tokens: int) -> None:
        self.tokens, self.length = tokens, 0
        self.parts: tuple[Tensor, ...] = ()

    def add(self, *new: Tensor) -> tuple[Tensor, ...]:
        """Append ``new`` tensors [B, T, …] to the cache; return all cached rows of each [B, S, …]."""
        if not self.parts:
            self.parts = tuple(x.new_empty(x.shape[0], self.tokens, *x.shape[2:]) for x in new)
        rows = slice(self.length, self.length + new[0].shape[1])
        for part, x in zip(self.parts, new, strict=True):
            part[:, rows] = x
        self.length = rows.stop
        return tuple(part[:, : self.length] for part in self.parts)

    def enter(self, q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor) -> tuple[Tensor, ...]:
        """Append k and v; return q of the new tokens, k and v of all tokens."""
        return q_BTNH, *self.add(k_BTKH, v_BTKH)

    def leave(self, out_BTNH: Tensor) -> Tensor:
        """Return the output unchanged."""
        return out_BTNH


class LatentKVCache(KVCache):
    """A KV cache of MLA: latent | rotary key per token, shared by all heads; W_UK and W_UV are parts of ``kv_up``."""

    def __init__(self, tokens: int, *, attention: LatentAttention) -> None:
        super().__init__(tokens)
        self.mla, self.up = attention.mla, attention.kv_up

    def enter(self, q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor) -> tuple[Tensor, ...]:
        """Append the latents; absorb W_UK into q: q · (W_UK latent) = (q W_UK) · latent, so that no keys are made."""
        (latents,) = self.add(k_BTKH)
        q_nope, q_rope = q_BTNH.split((self.mla.nope_dim, self.mla.rope_dim), dim=-1)
        absorbed = torch.einsum("btnh,nhr->btnr", q_nope, self._join_matrices()[:, : self.mla.nope_dim])
        return torch.cat((absorbed, q_rope), dim=-1), latents, latents[..., : self.mla.kv_rank]

    def leave(self, out_BTNH: Tensor) -> Tensor:
        """Map attention output over latents [B, T, N, kv_rank] to values [B, T, N, v_dim], by W_UV."""
        return torch.einsum("btnr,nhr->btnh", out_BTNH, self._join_matrices()[:, self.mla.nope_dim :])

    def _join_matrices(self) -> Tensor:
        """Return W_UK | W_UV of each head: [N, nope_dim + v_dim, kv_rank]."""
        return self.up.matrix.view(-1, self.mla.nope_dim + self.mla.v_dim, self.mla.kv_rank)


def attach(block: Block, *, tokens: int) -> KVCache:
    """Replace the core of the block's attention by one that reads a KV cache of ``tokens``; return the cache."""
    attention = block.attention
    assert attention is not None
    if isinstance(attention, LatentAttention):
        attention.bare = True
        cache: KVCache = LatentKVCache(tokens, attention=attention)
    else:
        cache = KVCache(tokens)
    attention.hooks, attention.core = cache, partial(_compute_cached_core, attention.rule)
    return cache


def detach(block: Block) -> None:
    """Remove the KV cache from the attention of ``block``."""
    attention = block.attention
    assert attention is not None
    attention.hooks, attention.core = None, Flash(attention.rule)
    if isinstance(attention, LatentAttention):
        attention.bare = False


def _compute_cached_core(
    rule: AttentionMask,
    q_BTNH: Tensor,
    k_BSKH: Tensor,
    v_BSKH: Tensor,
    documents_BT: Tensor | None,
    sinks_N: Tensor | None,
    keys_B: Tensor | None,
) -> Tensor:
    """Compute the attention core: causal in the first call, as many queries as keys; then one query on all keys."""
    rule = rule.apply_dropout(k_BSKH.shape[1], training=False)
    if not rule.is_plain or sinks_N is not None:
        out, lse = attend(q_BTNH, k_BSKH, v_BSKH, rule, offset=k_BSKH.shape[1] - q_BTNH.shape[1])
        if sinks_N is not None:
            add_sinks(out, lse, sinks_N)
        return out
    out_BNTH = F.scaled_dot_product_attention(
        q_BTNH.transpose(1, 2),
        k_BSKH.transpose(1, 2),
        v_BSKH.transpose(1, 2),
        is_causal=q_BTNH.shape[1] > 1,
        scale=rule.scale,
        enable_gqa=q_BTNH.shape[2] != k_BSKH.shape[2],
    )
    return out_BNTH.transpose(1, 2)


def _list_blocks(module: Transformer) -> list[Block]:
    """Return the blocks that attend; those with only a feed-forward need no cache."""
    return [block for block in module.blocks if isinstance(block, Block) and block.attention is not None]
