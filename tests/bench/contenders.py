"""Who trains: our loop, a plain PyTorch loop without a line of ours, and that loop around transformers' Llama.

All share the shape, the text, the batch and what a step does: forward, backward, clip, AdamW, the loss as a number.
In bf16 all compute with bf16 weights and update fp32 masters: faster than autocast, which casts at every use.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.model.spec import Model
from fivefold.train.build import build
from fivefold.train.logs import NoLogs
from fivefold.train.loop import Loop
from fivefold.train.run import Run
from fivefold.train.shards import Shards

Step = Callable[[], float]  # one optimizer step → loss in nats per token
Loss = Callable[[Tensor, Tensor], Tensor]  # tokens, targets [B, T] → mean loss


def ours(model: Model, job: Job, *, data: Path, layout: Layout) -> Step:
    """The real crank: loader, ZeRO, clip, optimizer. The process group must have been started."""
    built = build(model=model, layout=layout, job=job, device=torch.device("cpu"))
    loop = Loop(
        Run(folder=data.parent, job=job), model=model, layout=layout, built=built, shards=Shards.open(data),
        logs=NoLogs(), ideal_seconds=1.0,
    )  # fmt: skip
    numbers = iter(range(job.steps))
    return lambda: loop._step(next(numbers), None)[0]


def plain(model: Model, job: Job, *, data: Path) -> Step:
    """A decoder of torch's own modules."""
    decoder = _Decoder(model)
    return _loop(decoder, decoder.blocks, decoder, job, data=data)


def transformers(model: Model, job: Job, *, data: Path) -> Step:
    """Hugging Face's Llama, unmodified."""
    config = LlamaConfig(
        vocab_size=model.vocab, hidden_size=model.width, intermediate_size=model.ffn, num_hidden_layers=model.layers,
        num_attention_heads=model.heads, num_key_value_heads=model.kv_heads, head_dim=model.head_dim,
        rms_norm_eps=model.norm_epsilon, max_position_embeddings=job.sequence, use_cache=False,
        attn_implementation="sdpa",  # type: ignore[call-arg]
    )  # fmt: skip
    llama = LlamaForCausalLM(config)

    def loss(tokens: Tensor, targets: Tensor) -> Tensor:
        targets = targets.contiguous()
        found: Tensor = llama(input_ids=tokens, labels=targets, shift_labels=targets).loss
        return found

    return _loop(llama, llama.model.layers, loss, job, data=data)


def _loop(module: nn.Module, blocks: nn.ModuleList, loss_of: Loss, job: Job, *, data: Path) -> Step:
    """The loop that one would write: random windows of the text, one micro-batch, fused AdamW."""
    shards = Shards.open(data)
    text = torch.from_numpy(shards.read("train", start=0, count=shards.index.part("train").tokens).astype(np.int64))
    if job.compile:
        for block in blocks:
            block.compile()
    low = job.precision.compute == "bf16"
    masters = weights = list(module.parameters())
    if low:
        masters = [nn.Parameter(weight.detach().clone()) for weight in weights]
        module.bfloat16()
    settings = job.optimizer
    optimizer = torch.optim.AdamW(
        masters, lr=job.learning_rate.peak, betas=settings.betas, eps=settings.epsilon,
        weight_decay=settings.weight_decay, fused=True,
    )  # fmt: skip

    def step() -> float:
        starts = torch.randint(len(text) - job.sequence, (job.global_batch, 1))
        batch = text[starts + torch.arange(job.sequence + 1)]
        loss = loss_of(batch[:, :-1], batch[:, 1:])
        loss.backward()
        if low:
            for master, weight in zip(masters, weights, strict=True):
                assert weight.grad is not None
                master.grad, weight.grad = weight.grad.float(), None
        nn.utils.clip_grad_norm_(masters, settings.clip)
        optimizer.step()
        if low:
            with torch.no_grad():
                torch._foreach_copy_([*weights], [*masters])
        optimizer.zero_grad()
        return loss.item()

    return step


class _Attention(nn.Module):
    def __init__(self, model: Model) -> None:
        super().__init__()
        self.head_dim, self.grouped = model.head_dim, model.kv_heads != model.heads
        self.q = nn.Linear(model.width, model.heads * model.head_dim, bias=False)
        self.k = nn.Linear(model.width, model.kv_heads * model.head_dim, bias=False)
        self.v = nn.Linear(model.width, model.kv_heads * model.head_dim, bias=False)
        self.out = nn.Linear(model.heads * model.head_dim, model.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k = _rope(q, cos, sin), _rope(k, cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.grouped)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


def _rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


class _Block(nn.Module):
    def __init__(self, model: Model) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(model.width, eps=model.norm_epsilon)
        self.attention = _Attention(model)
        self.norm2 = nn.RMSNorm(model.width, eps=model.norm_epsilon)
        self.gate = nn.Linear(model.width, model.ffn, bias=False)
        self.up = nn.Linear(model.width, model.ffn, bias=False)
        self.down = nn.Linear(model.ffn, model.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), cos, sin)
        h = self.norm2(x)
        out: Tensor = x + self.down(F.silu(self.gate(h)) * self.up(h))
        return out


class _Decoder(nn.Module):
    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model
        self.embed = nn.Embedding(model.vocab, model.width)
        self.blocks = nn.ModuleList(_Block(model) for _ in range(model.layers))
        self.norm = nn.RMSNorm(model.width, eps=model.norm_epsilon)
        self.out = nn.Linear(model.width, model.vocab, bias=False)
        self.tables: tuple[Tensor, Tensor] | None = None
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        if self.tables is None:
            exponents = torch.arange(0, self.model.head_dim, 2) / self.model.head_dim
            angles = torch.outer(torch.arange(tokens.shape[1]), self.model.rope_theta**-exponents).repeat(1, 2)
            self.tables = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for block in self.blocks:
            x = block(x, *self.tables)
        return F.cross_entropy(self.out(self.norm(x)).flatten(0, 1).float(), targets.flatten())
