"""On a GPU: what is kept changes no token, in fp32; in bf16 it runs. Skipped where there is none."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fivefold.model.experts import MoE
from fivefold.model.latent_attention import MLA
from fivefold.model.spec import Model
from fivefold.model.weights import list_weights
from fivefold.trainer.build import draw_initial_weight
from fivefold.trainer.checkpoint.full_weights import build_decoder
from fivefold.trainer.generate.decode import SamplingParams, generate
from fivefold.trainer.model.transformer import Transformer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
SIZES = {"width": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "ffn": 128, "vocab": 128}
MODELS = [
    Model(name="grouped", layers=3, **SIZES),
    Model(
        name="latent", layers=3, mla=MLA(q_rank=24, kv_rank=32, nope_dim=16, rope_dim=8, v_dim=16),
        moe=MoE(experts=8, topk=2, ffn=32, dense_layers=1), **SIZES | {"kv_heads": 4, "head_dim": 24},
    ),
]  # fmt: skip


def build_on_gpu(model: Model, dtype: torch.dtype) -> Transformer:
    drawn: dict[str, Tensor] = {
        w.name: (draw_initial_weight(w, model=model, seed=0) * 4).to(dtype) for w in list_weights(model)
    }
    layers = [layer for layer in range(model.layers) if model.is_moe(layer)]
    return build_decoder(drawn | {f"blocks.{layer}.moe.bias": torch.zeros(8) for layer in layers}, model=model).to(
        "cuda"
    )


def generate_tokens(module: Transformer, prompts: list[list[int]]) -> list[list[int | None]]:
    sampling = SamplingParams(temperature=0)
    return list(generate(module, prompts, tokens=24, window=16, vocab=128, ends=frozenset(), sampling=sampling))


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_incremental_and_full_reading_agree_on_a_gpu(model: Model) -> None:
    module, text, first = build_on_gpu(model, torch.float32), [3, 1, 4, 1, 5], 0
    for _ in range(24):
        if len(text) - first > 16:
            first = len(text) - 8
        with torch.no_grad():
            text.append(int(module(torch.tensor([text[first:]], device="cuda"))[0, -1].argmax()))
    assert [step[0] for step in generate_tokens(module, [text[:5]])] == text[5:]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_prompts_of_different_lengths_are_generated_in_bf16_on_a_gpu(model: Model) -> None:
    steps = generate_tokens(build_on_gpu(model, torch.bfloat16), [[3, 1, 4], [1, 5, 9, 2, 6]])
    assert [sum(token is not None for token in row) for row in zip(*steps, strict=True)] == [24, 24]
