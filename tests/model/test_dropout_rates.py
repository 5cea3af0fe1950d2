"""Rates of dropout are read where the reference applies them in training: its calls are recorded, and their shapes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from fivefold.model.huggingface.families import FAMILIES as REGISTRY
from fivefold.model.huggingface.keys import flatten_tables, nest_tables
from fivefold.model.huggingface.read import from_config
from fivefold.model.shape import DropoutRates
from tests.model.judged import build_reference, silence_transformers
from tests.model.mutations import FAMILIES
from tests.selection import mark_share

DRAWN = {"attention_dropout": 0.125, "hidden_dropout": 0.25, "embedding_dropout": 0.375}
TOKENS = 5
TAKES_INTEGERS = {"mpt"}  # transformers refuses a rate that is no integer
CHOOSES_KEYS = {"axk2", "deepseek_v32", "deepseek_v4", "dots3_note_text", "glm_moe_dsa", "hy_v4"}  # take no dropout


@contextmanager
def record_dropouts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[float, tuple[int, ...]]]]:
    """Rate and shape of every dropout that is applied."""
    calls: list[tuple[float, tuple[int, ...]]] = []

    def dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if training and p:
            calls.append((p, tuple(x.shape)))
        return x

    with monkeypatch.context() as patched:
        patched.setattr(torch.nn.functional, "dropout", dropout)
        yield calls


@pytest.mark.parametrize("kind", sorted(FAMILIES.keys() - {"falcon"} - CHOOSES_KEYS - TAKES_INTEGERS))
@pytest.mark.parametrize("given", mark_share(2, ["all", "attention_dropout"]))
def test_rates_are_those_that_the_reference_applies(kind: str, given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = DRAWN if given == "all" else {given: DRAWN[given]}
    still = {key: 0.0 for key, field in REGISTRY[kind].keys.items() if field in DRAWN}
    flat: dict[str, Any] = flatten_tables(FAMILIES[kind], family=REGISTRY[kind], name=kind) | still
    flat |= {key: fields[field] for key, field in REGISTRY[kind].keys.items() if field in fields}
    config = nest_tables(flat)
    model = from_config({"model_type": kind, **config}, name="x")
    with silence_transformers(), torch.no_grad(), record_dropouts(monkeypatch) as calls:
        theirs = build_reference(kind, config).train()
        for weight in theirs.parameters():
            weight.zero_()
        theirs(torch.ones(1, TOKENS, dtype=torch.long), use_cache=False)
    layers, attentions = model.layers, sum(model.has_attention(layer) for layer in range(model.layers))
    heads = {model.attention(layer).heads for layer in range(model.layers)}
    # XGLM has batch and heads in one dim
    scores = [rate for rate, shape in calls if len(shape) > 2 and shape[-2] == TOKENS and shape[-3] in heads]
    stream = [rate for rate, shape in calls if shape in ((1, TOKENS, model.width), (TOKENS, model.width))]
    assert len(scores) + len(stream) == len(calls)
    assert scores == [model.dropout_rates.attention] * attentions * (model.dropout_rates.attention > 0)
    embedding = stream[:1] if len(stream) % 2 else []
    assert embedding == [model.dropout_rates.embedding] * (model.dropout_rates.embedding > 0)
    assert stream[len(embedding) :] == [model.dropout] * 2 * layers * (model.dropout > 0)


def test_a_dropout_without_its_own_rate_has_that_of_the_residual_branches() -> None:
    model = from_config({"model_type": "gpt2", **FAMILIES["gpt2"], "attn_pdrop": 0.2}, name="x")
    assert model.dropout_rates == DropoutRates(embedding=0.0, attention=0.2, residual=0.0)
    assert (model.attention_dropout, model.embedding_dropout) == (0.2, None)
    assert model.replace(dropout=0.1).dropout_rates == DropoutRates(embedding=0.1, attention=0.2, residual=0.1)


def test_mpt_has_one_rate_for_attention_and_branches() -> None:
    """As MptAttention, MptMLP and MptBlock of transformers read it; the embedding has none."""
    values = FAMILIES["mpt"] | {"attn_config": FAMILIES["mpt"].get("attn_config", {}) | {"attn_pdrop": 0.125}}
    model = from_config({"model_type": "mpt", **values}, name="x")
    assert model.dropout_rates == DropoutRates(embedding=0.0, attention=0.125, residual=0.125)
