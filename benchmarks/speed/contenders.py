"""Who trains in one process: our engine, a plain PyTorch loop without a line of ours, transformers' and litgpt's Llama.

All share the shape, the first weights, the tokens and what a step does: forward, backward, clip, AdamW, the loss.
In bf16 all compute with bf16 weights and update fp32 masters: faster than autocast, which casts at every use.
Compiled are the blocks, each by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from decoder import Decoder, cross_entropy, initial_weights
from litgpt import GPT, Config
from litgpt.utils import chunked_cross_entropy
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.model.spec import Model
from fivefold.trainer.build import build
from fivefold.trainer.engine import Engine

Step = Callable[[Tensor], float]  # one step on tokens [B, T + 1] → loss in nats per token, of it this rank's share
Loss = Callable[[Tensor, Tensor], Tensor]  # tokens, targets [B, T] → mean loss


def build_fivefold_step(model: Model, job: Job, *, layout: Layout, update: bool = True) -> Step:
    """Build our engine. Without ``update`` it stops when all gradients are where the optimizer wants them."""
    built = build(model=model, layout=layout, job=job, device=torch.device("cpu"))
    engine = Engine(built, model=model, layout=layout, job=job)
    part, parts = built.ranks["dp"].rank, layout.dp

    def step(tokens: Tensor) -> float:
        rows = tokens.chunk(parts)[part].unflatten(0, (-1, layout.mbs))
        loss = engine.step(rows).loss / layout.world if update else engine.backward(rows).item() / layout.tp
        engine.zero_grad()
        return loss

    return step


def build_torch_step(model: Model, job: Job) -> Step:
    """Return a decoder of torch's own modules."""
    decoder = Decoder(model, seed=job.seed)
    loss: Loss = lambda tokens, targets: cross_entropy(decoder(tokens), targets)  # noqa: E731
    return _loop(decoder, decoder.blocks.values(), loss, job)


def transformers(model: Model, job: Job) -> Step:
    """Build Hugging Face's Llama, unmodified."""
    config = LlamaConfig(
        vocab_size=model.vocab,
        hidden_size=model.width,
        intermediate_size=model.ffn,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        num_key_value_heads=model.kv_heads,
        head_dim=model.head_dim,
        rms_norm_eps=model.norm_epsilon,
        max_position_embeddings=job.sequence,
        use_cache=False,
        attn_implementation="sdpa",  # type: ignore[call-arg]
    )
    llama = LlamaForCausalLM(config)
    renamed = {
        "blocks.": "model.layers.",
        "norm1": "input_layernorm",
        "norm2": "post_attention_layernorm",
        "attention.out": "self_attn.o_proj",
        **{f"attention.{x}.": f"self_attn.{x}_proj." for x in "qkv"},
        **{f"mlp.{x}": f"mlp.{x}_proj" for x in ("gate", "up", "down")},
        "embed.tokens": "model.embed_tokens",
        "head.norm": "model.norm",
        "head.out": "lm_head",
    }
    llama.load_state_dict(
        {_rename_parts(name, renamed): x for name, x in initial_weights(model, seed=job.seed).items()}
    )

    def loss(tokens: Tensor, targets: Tensor) -> Tensor:
        targets = targets.contiguous()
        value: Tensor = llama(input_ids=tokens, labels=targets, shift_labels=targets).loss
        return value

    return _loop(llama, llama.model.layers, loss, job)


def litgpt(model: Model, job: Job) -> Step:
    """Build litgpt's GPT, unmodified, with the loss of its pretraining."""
    gpt = GPT(
        Config(
            block_size=job.sequence,
            n_layer=model.layers,
            n_embd=model.width,
            padded_vocab_size=model.vocab,
            vocab_size=model.vocab,
            n_head=model.heads,
            n_query_groups=model.kv_heads,
            head_size=model.head_dim,
            norm_class_name="RMSNorm",
            norm_eps=model.norm_epsilon,
            parallel_residual=False,
            rotary_percentage=1.0,
            rope_base=int(model.rope_theta),
            bias=False,
            mlp_class_name="LLaMAMLP",
            intermediate_size=model.ffn,
        )
    )
    renamed = {
        "blocks.": "transformer.h.",
        "norm1": "norm_1",
        "norm2": "norm_2",
        "attention.out": "attn.proj",
        "mlp.gate": "mlp.fc_1",
        "mlp.up": "mlp.fc_2",
        "mlp.down": "mlp.proj",
        "embed.tokens": "transformer.wte",
        "head.norm": "transformer.ln_f",
        "head.out": "lm_head",
    }
    model_weights = initial_weights(model, seed=job.seed)
    for layer in range(model.layers):
        heads = [model_weights.pop(f"blocks.{layer}.attention.{x}.weight") for x in "qkv"]
        model_weights[f"blocks.{layer}.attn.qkv.weight"] = torch.cat(heads)
    gpt.load_state_dict({_rename_parts(name, renamed): x for name, x in model_weights.items()})
    loss: Loss = lambda tokens, targets: chunked_cross_entropy(gpt(tokens), targets)  # noqa: E731
    return _loop(gpt, gpt.transformer.h, loss, job)


def _rename_parts(name: str, parts: dict[str, str]) -> str:
    for old, new in parts.items():
        name = name.replace(old, new)
    return name


def _loop(module: nn.Module, blocks: Iterable[nn.Module], loss_of: Loss, job: Job) -> Step:
    """Return the loop that one would write: one micro-batch, fused AdamW."""
    if job.stack.compile:
        for block in blocks:
            block.compile()
    low = job.precision.compute == "bf16"
    masters = weights = list(module.parameters())
    if low:
        masters = [nn.Parameter(weight.detach().clone()) for weight in weights]
        module.bfloat16()
    settings = job.optimizer
    optimizer = torch.optim.AdamW(
        masters,
        lr=job.learning_rate.peak,
        betas=settings.betas,
        eps=settings.epsilon,
        weight_decay=settings.weight_decay,
        fused=True,
    )

    def step(tokens: Tensor) -> float:
        loss = loss_of(tokens[:, :-1], tokens[:, 1:])
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
