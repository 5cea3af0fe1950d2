"""Attention to compressed keys against transformers: every kind of layer, its gradients, and what a step changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.masking_utils import create_sliding_window_causal_mask
from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Attention, DeepseekV4RotaryEmbedding

from fivefold.job import Job, get_recipe
from fivefold.layout.spec import Layout
from fivefold.model.huggingface.families.deepseek_v4 import KINDS, MIXER
from fivefold.model.huggingface.read import from_config
from fivefold.model.spec import Model
from fivefold.trainer.build import build
from fivefold.trainer.engine import Engine
from fivefold.trainer.model.mixers import build_mixer, compressed_core
from fivefold.trainer.model.rotary import RowInputs, list_tables
from tests.planner.counts.operations.test_compressed_attention import MODEL

SEQUENCES, WIDTH = 2, 48
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


FIELDS: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": WIDTH, "moe_intermediate_size": 20, "num_hidden_layers": 3,
    "num_attention_heads": 6, "head_dim": 8, "partial_rotary_factor": 0.5, "q_lora_rank": 12, "index_n_heads": 2,
    "index_head_dim": 8, "index_topk": 3, "o_groups": 3, "o_lora_rank": 10, "sliding_window": 5, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "hc_mult": 2, "layer_types": list(KINDS), "max_position_embeddings": 64,
    "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 3}, "pad_token_id": None,
}  # fmt: skip


def make_config(**fields: Any) -> DeepseekV4Config:
    config = DeepseekV4Config(**FIELDS | fields)
    config._attn_implementation = "eager"
    return config


def name_theirs(name: str) -> str:
    if name in MIXER:
        return MIXER[name]
    stem, leaf = name.rsplit(".", 1)
    return f"{MIXER[stem]}.{leaf}"


@pytest.fixture(params=[2**22, 200], ids=["one block", "many blocks"])
def _blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compressed_core, "MAX_TEMPORARY_ELEMENTS", request.param)


@pytest.mark.usefixtures("_blocks")
@pytest.mark.parametrize("layer", range(3), ids=list(KINDS))
@pytest.mark.parametrize(
    ("tokens", "fields"),
    [
        (24, {}),
        (23, {"index_topk": 50}),  # no multiple of the tokens of a compressed key
        (2, {}),  # fewer than the tokens of a compressed key
        (40, {"rope_parameters": YARN}),
    ],
    ids=["even", "odd, all keys", "short", "yarn"],
)
def test_outputs_and_gradients_equal_transformers(tokens: int, fields: dict[str, Any], layer: int) -> None:
    config = make_config(**fields)
    torch.manual_seed(layer)
    theirs = DeepseekV4Attention(config, layer)
    weights = dict(theirs.named_parameters())
    with torch.no_grad():
        for name, weight in weights.items():
            weight.normal_(1.0 if "norm" in name else 0.0, 0.3 if weight.dim() > 1 else 1.0)
    model = from_config(config.to_dict(), name="compressed")
    ours = build_mixer(model, layer=layer)
    names = {name: name_theirs(name) for name, _ in ours.named_parameters()}
    assert sorted(names.values()) == sorted(weights)
    with torch.no_grad():
        for name, weight in ours.named_parameters():
            weight.copy_(weights[names[name]])
    positions = torch.arange(tokens)
    x, gradient = torch.randn(2, SEQUENCES, tokens, WIDTH)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    of_tokens = {"config": config, "position_ids": positions[None]}
    mask = create_sliding_window_causal_mask(inputs_embeds=x, attention_mask=None, past_key_values=None, **of_tokens)
    rotary = DeepseekV4RotaryEmbedding(config)
    tables = {kind: rotary(x, position_ids=positions[None], layer_type=kind) for kind in ("main", "compress")}
    wanted = theirs(inputs[0], tables, positions.expand(SEQUENCES, -1), mask)[0]
    rows = RowInputs(tokens, list_tables(model, positions=positions, dtype=torch.float32, device=torch.device("cpu")))
    out = ours(inputs[1].flatten(0, 1), rows).view_as(wanted)
    assert_close(out.detach(), wanted.detach(), "output")
    wanted.backward(gradient)
    out.backward(gradient)
    pairs = [(name, weight.grad, weights[names[name]].grad) for name, weight in ours.named_parameters()]
    for name, mine, other in [*pairs, ("x", inputs[1].grad, inputs[0].grad)]:
        if other is None:  # of the indexer, or of compressed keys that no query sees
            assert mine is None or not mine.any(), name
        else:
            assert_close(mine, other, name)


def assert_close(ours: Tensor | None, wanted: Tensor, name: str) -> None:
    assert ours is not None, name
    assert (ours - wanted).norm() <= 2e-6 * max(1.0, float(wanted.norm())), name


def test_a_step_leaves_the_weights_of_the_indexer_as_they_are(forked: Callable[..., list[list[str]]]) -> None:
    (changed,) = forked(1, list_changed, MODEL)
    assert {"blocks.2.mixer.compress.position_bias", "blocks.2.mixer.sinks"} <= set(changed)
    assert not [name for name in changed if ".indexer." in name]


def list_changed(model: Model) -> list[str]:
    """Return the names of the weights that a step changes."""
    job = Job(sequence=16, global_batch=2, steps=2, precision=get_recipe("fp32"))
    layout = Layout.parse("mbs1")
    built = build(model=model, layout=layout, job=job, device=torch.device("cpu"))
    engine = Engine(built, model=model, layout=layout, job=job)
    shards = [shard for unit in built.units for shard in unit.shards]
    before = [shard.weight.detach().clone() for shard in shards]
    engine.step(torch.randint(64, (2, 1, 17), generator=torch.Generator().manual_seed(0)))
    return [shard.name for shard, old in zip(shards, before, strict=True) if not torch.equal(shard.weight, old)]
