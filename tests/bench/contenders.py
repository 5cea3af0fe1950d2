"""Who trains: our loop, a plain PyTorch loop without a line of ours, and the same loop around transformers' Llama.

All share the shape, the text, the batch and what a step does: forward, backward, clip, AdamW, loss as a number. In
bf16 everyone computes in bf16 weights and updates fp32 masters, which beats autocast (it casts at every use).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.model.spec import Model
from fivefold.train.build import build
from fivefold.train.logs import NoLogs
from fivefold.train.loop import Loop
from fivefold.train.run import Run
from fivefold.train.shards import Shards

Step = Callable[[], float]  # one optimizer step → loss in nats per token


def ours(model: Model, job: Job, *, data: Path, layout: Layout) -> Step:
    """The real crank with loader, ZeRO hooks, clip and optimizer; the process group is started before."""
    built = build(model=model, layout=layout, job=job, device=torch.device("cpu"))
    run = Run(folder=data.parent, job=job)
    loop = Loop(
        run, model=model, layout=layout, built=built, shards=Shards.open(data), logs=NoLogs(), ideal_seconds=1.0
    )
    done = 0

    def step() -> float:
        nonlocal done
        loss, _, _ = loop._step(done, None)
        done += 1
        return loss

    return step


def plain(model: Model, job: Job, *, data: Path) -> Step:
    """A decoder in the plainest modules, its blocks compiled where the job says so."""
    decoder = _Decoder(model)
    if job.compile:
        for block in decoder.blocks:
            block.compile()
    return _loop(decoder, decoder, model, job, data=data)


def transformers(model: Model, job: Job, *, data: Path) -> Step:
    """Hugging Face's Llama, unmodified, its layers compiled where the job says so."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=model.vocab, hidden_size=model.width, intermediate_size=model.ffn, num_hidden_layers=model.layers,
        num_attention_heads=model.heads, num_key_value_heads=model.kv_heads, head_dim=model.head_dim,
        rms_norm_eps=model.norm_epsilon, max_position_embeddings=job.sequence, use_cache=False,
        tie_word_embeddings=model.tied_embeddings, attn_implementation="sdpa",
    )  # fmt: skip
    llama = LlamaForCausalLM(config)
    if job.compile:
        for layer in llama.model.layers:
            layer.compile()

    def loss(tokens: Tensor, targets: Tensor) -> Tensor:
        targets = targets.contiguous()
        found: Tensor = llama(input_ids=tokens, labels=targets, shift_labels=targets).loss
        return found

    return _loop(llama, loss, model, job, data=data)


def _loop(
    module: nn.Module, loss_of: Callable[[Tensor, Tensor], Tensor], model: Model, job: Job, *, data: Path
) -> Step:
    """The loop that one would write: random windows of the text, one micro-batch."""
    text = _tokens(data)
    low = job.precision.compute == "bf16"
    module.train()
    masters = [parameter.detach().clone() for parameter in module.parameters()] if low else list(module.parameters())
    if low:
        module.bfloat16()
    optimizer = torch.optim.AdamW(
        masters, lr=job.learning_rate.peak, betas=job.optimizer.betas, eps=job.optimizer.epsilon,
        weight_decay=job.optimizer.weight_decay, fused=True,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(job.seed)
    offsets = torch.arange(job.sequence + 1)

    def step() -> float:
        starts = torch.randint(len(text) - job.sequence, (job.global_batch, 1), generator=generator)
        batch = text[starts + offsets]
        loss = loss_of(batch[:, :-1], batch[:, 1:])
        loss.backward()
        if low:
            for master, parameter in zip(masters, module.parameters(), strict=True):
                assert parameter.grad is not None
                master.grad = parameter.grad.float()
        nn.utils.clip_grad_norm_(masters, job.optimizer.clip)
        optimizer.step()
        if low:
            with torch.no_grad():
                torch._foreach_copy_(list(module.parameters()), masters)
        module.zero_grad()
        return loss.item()

    return step


def _tokens(data: Path) -> Tensor:
    shards = Shards.open(data)
    import numpy as np

    return torch.from_numpy(shards.read("train", start=0, count=shards.index.part("train").tokens).astype(np.int64))


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
