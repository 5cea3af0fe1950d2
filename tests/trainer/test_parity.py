"""Every ZeRO stage on 1, 2, 3 and 4 processes against a plain decoder in a plain loop on one."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fivefold.job import Job, LearningRate, Optimizer, get_recipe
from fivefold.layout.spec import Layout
from fivefold.model.spec import Model
from fivefold.model.weights import list_weights
from fivefold.trainer.build import build, draw_initial_weight
from fivefold.trainer.optimizers.optimizer import clip, sum_over_ranks
from tests.selection import mark_share

STEPS, BATCH, TOKENS = 3, 12, 24
PLAIN = Model(name="plain", layers=3, width=48, heads=4, kv_heads=2, head_dim=12, ffn=100, vocab=251, rope_theta=500.0)
TIED = PLAIN.replace(name="tied", tied_embeddings=True, qkv_bias=True)


def reference(model: Model, weight: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """Mean loss, written without any code of ours and with torch's own norm, loss and unfused attention."""
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    B, T = inputs.shape
    N, K, H = model.heads, model.kv_heads, model.head_dim
    frequencies = 1.0 / model.rope_theta ** (torch.arange(0, H, 2).double() / H)
    angles = torch.outer(torch.arange(T).double(), frequencies).repeat(1, 2)
    cos, sin = angles.cos().float(), angles.sin().float()

    def rope(x: Tensor) -> Tensor:
        return x * cos + torch.cat((-x[..., H // 2 :], x[..., : H // 2]), -1) * sin

    x = weight["embed.tokens.weight"][inputs]
    for layer in range(model.layers):
        w = {name.removeprefix(f"blocks.{layer}."): value for name, value in weight.items()}
        h = F.rms_norm(x, (model.width,), w["norm1.weight"], model.norm_epsilon)
        q, k, v = (
            F.linear(h, w[f"attention.{n}.weight"], w.get(f"attention.{n}.bias")).view(B, T, -1, H).transpose(1, 2)
            for n in "qkv"
        )
        q, k, v = rope(q), rope(k).repeat_interleave(N // K, 1), v.repeat_interleave(N // K, 1)
        scores = (q @ k.transpose(-1, -2) / H**0.5).masked_fill(torch.ones(T, T).triu(1).bool(), -torch.inf)
        x = x + F.linear((scores.softmax(-1) @ v).transpose(1, 2).reshape(B, T, N * H), w["attention.out.weight"])
        h = F.rms_norm(x, (model.width,), w["norm2.weight"], model.norm_epsilon)
        gate, up = F.linear(h, w["mlp.gate.weight"]), F.linear(h, w["mlp.up.weight"])
        x = x + F.linear(F.silu(gate) * up, w["mlp.down.weight"])
    x = F.rms_norm(x, (model.width,), weight["head.norm.weight"], model.norm_epsilon)
    logits = F.linear(x, weight.get("head.out.weight", weight["embed.tokens.weight"]))
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batches() -> Tensor:
    return torch.randint(0, PLAIN.vocab, (STEPS, BATCH, TOKENS + 1), generator=torch.Generator().manual_seed(5))


def run_plain(model: Model, job: Job) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Losses, the first step's gradients, and the final weights of one plain process on the full batch."""
    weight = {w.name: draw_initial_weight(w, model=model, seed=job.seed).requires_grad_() for w in list_weights(model)}
    optimizer = torch.optim.AdamW(
        [
            {"params": [w for w in weight.values() if w.ndim > 1], "weight_decay": job.optimizer.weight_decay},
            {"params": [w for w in weight.values() if w.ndim == 1], "weight_decay": 0.0},
        ],
        lr=job.learning_rate.peak,
        betas=job.optimizer.betas,
        eps=job.optimizer.epsilon,
    )
    losses, first = [], {}
    for tokens in batches():
        loss = reference(model, weight, tokens)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weight.values(), job.optimizer.clip)
        first = first or {name: w.grad.clone() for name, w in weight.items()}
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, first, {name: w.detach() for name, w in weight.items()}


def run_engine(model: Model, layout_text: str, job: Job) -> tuple[list[float], list[tuple[str, int, Tensor, Tensor]]]:
    """Losses, and of this rank every shard: name, first row, first step's gradient, final rows."""
    layout = Layout.parse(layout_text)
    built = build(model=model, layout=layout, job=job, device=torch.device("cpu"))
    micro, losses, first = layout.micro_batches(job), [], {}
    for tokens in batches():
        mine = tokens.view(micro, layout.dp, layout.mbs, -1)[:, built.ranks.rank]
        total = torch.zeros(())
        for part in mine:
            loss = built.module(part[:, :-1], part[:, 1:], scale=1 / (BATCH * TOKENS))
            loss.backward()
            total += loss.detach()
        for unit in built.units:
            unit.gradients.finish()
        norm, (loss,) = sum_over_ranks(built.shards, total, ranks=built.ranks)
        clip(built.shards, norm, largest=job.optimizer.clip)
        first = first or {s.name: s.weight.grad.clone() for s in built.shards if s.weight.grad is not None}
        built.optimizer.step()
        for unit in built.units:
            unit.on_optimizer_step()
        losses.append(loss.item())
    return losses, [(s.name, s.first_row, first.get(s.name, s.weight[:0]), s.weight.detach()) for s in built.shards]


LAYOUTS = [
    "dp1 zero0 mbs12", "dp1 zero0 mbs3", "dp2 zero0 mbs6", "dp2 zero1 mbs6", "dp2 zero2 mbs3", "dp2 zero3 mbs3",
    "dp3 zero1 mbs2", "dp3 zero3 mbs4", "dp4 zero0 mbs1", "dp4 zero1 mbs1", "dp4 zero2 mbs3", "dp4 zero3 mbs1",
    "dp4 zero3/2 mbs3", "dp4 zero1/2 mbs1",
]  # fmt: skip


@pytest.mark.parametrize(
    ("model", "layout"),
    mark_share(
        8,
        [
            *((PLAIN, layout) for layout in LAYOUTS),
            *((TIED, layout) for layout in ("dp2 zero3 mbs3", "dp3 zero1 mbs2")),
        ],
    ),
    ids=lambda value: value.name if isinstance(value, Model) else value,
)
def test_every_zero_stage_equals_one_plain_process(forked, model: Model, layout: str) -> None:
    job = Job(
        sequence=TOKENS,
        global_batch=BATCH,
        precision=get_recipe("fp32"),
        steps=STEPS,
        optimizer=Optimizer(clip=0.5),
        learning_rate=LearningRate(kind="constant", peak=1e-3),
    )
    losses, grads, finals = run_plain(model, job)
    for ours, shards in forked(Layout.parse(layout).world, run_engine, model, layout, job):
        assert ours == pytest.approx(losses, rel=1e-6)
        for name, row, grad, final in shards:
            rows = slice(row, row + len(final))
            assert (grad - grads[name][rows]).norm() <= 1e-6 * grads[name].norm(), name
            torch.testing.assert_close(final, finals[name][rows], rtol=0, atol=2e-5)
