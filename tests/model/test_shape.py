"""What of a model's shape cannot be: fields that would be left out without a word."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.layout.validity import list_reasons
from fivefold.layout.validity.sharding import is_divisible_by_tp
from fivefold.machine.catalog import resolve
from fivefold.model.attention import Sliding
from fivefold.model.factors import Temperature
from fivefold.model.latent_attention import MLA
from fivefold.model.spec import Model
from fivefold.model.weights import list_weights

SMALL = Model(name="m", layers=2, width=32, heads=4, kv_heads=4, head_dim=8, ffn=64, vocab=100)
LATENT = SMALL.replace(mla=MLA(q_rank=16, kv_rank=16, nope_dim=6, rope_dim=4, v_dim=6))


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"norm_weight": False, "qk_norm": "head"}, "has no weights for qk_norm='head': use qk_norm='unit'"),
        ({"norm_weight": False, "norm_plus_one": True}, "drop one"),
        ({"pre_norm_mixers": True}, "pre_norm_mixers is of models with block='post'"),
        ({"sub_norm": True, "norm_weight": False}, "sub_norm is not supported with norm_weight=False"),
        ({"sub_norm": True, "mlp": "receptance"}, "sub_norm is not supported with mlp='receptance'"),
        ({"qk_norm": "full", "qk_norm_after_rope": True}, "qk_norm_after_rope needs norms per head"),
    ],
    ids=str,
)
def test_norms_that_contradict_each_other_are_rejected(changed: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        SMALL.replace(**changed)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"position_offset": 2}, "position_offset=2 applies to learned or sinusoidal positions only"),
        ({"sinusoid_endpoint": True}, "sinusoid_endpoint applies to sinusoidal positions only"),
        ({"position": "sinusoidal", "width": 35}, "needs an even width of 4 or more, not 35"),
    ],
    ids=str,
)
def test_position_settings_that_would_be_ignored_are_errors(changed: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        SMALL.replace(**changed)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"tied_values": True}, "give value_norm, or leave it out"),
        ({"tied_values": True, "value_norm": True, "value_dim": 4}, "values of 4 dims cannot be keys of 8 dims"),
    ],
    ids=str,
)
def test_values_that_cannot_be_keys_are_rejected(changed: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        SMALL.replace(**changed)


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("position", "learned", "position='learned' is not supported with mla: use 'rope' or 'none'"),
        ("rope_pattern", (True, False), "with mla every layer rotates: leave rope_pattern out"),
        ("temperature", Temperature(), "use temperature.rotated = true, or leave temperature out"),
        ("value_norm", True, "value_norm applies to grouped attention, not to mla: leave it out"),
        ("qk_norm", "head", "mla norms its latents, not its heads: leave qk_norm='head' out"),
    ],
)
def test_settings_that_latent_attention_would_ignore_are_errors(field: str, value: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        LATENT.replace(**{field: value})


@pytest.mark.parametrize("model", [SMALL, LATENT], ids=["grouped", "latent"])
def test_every_layer_has_a_sink_per_head(model: Model) -> None:
    names = {weight.name for weight in list_weights(model)}
    sinks = {weight for weight in list_weights(model.replace(attention_sinks=True)) if weight.name not in names}
    assert {(weight.name, weight.shape) for weight in sinks} == {
        (f"blocks.{layer}.attention.sinks", (4,)) for layer in range(2)
    }
    assert model.replace(attention_sinks=True).parameters == model.parameters + 2 * 4


@pytest.mark.parametrize(
    ("changed", "dims"),
    [
        ({}, (8,)),
        ({"rope_fraction": 0.5}, (4,)),
        ({"window": 8, "rope_theta_sliding": 50.0}, (8, 8)),
        ({"temperature": Temperature()}, (8,)),  # every layer rotates
        ({"temperature": Temperature(), "rope_pattern": (True, False)}, (8, 8)),
        ({"temperature": Temperature(), "position": "none", "head_dim": 7}, (7,)),
        ({"temperature": Temperature(rotated=True)}, (8, 8)),
        ({"position": "learned"}, ()),
    ],
    ids=str,
)
def test_rotary_tables_have_the_dims_of_the_layers(changed: dict[str, Any], dims: tuple[int, ...]) -> None:
    assert SMALL.replace(**changed).table_dims == dims


SLIDING = Model(
    name="sliding", layers=4, width=512, heads=8, kv_heads=8, head_dim=64, ffn=1024, vocab=512, window=128,
    window_pattern=(True, False), rope_theta_sliding=1e4, value_dim=48,
    sliding=Sliding(heads=4, kv_heads=2, head_dim=32, value_dim=16, rope_fraction=0.5),
)  # fmt: skip


def test_sliding_layers_have_heads_dims_and_position_tables_of_their_own() -> None:
    full, own = SLIDING.attention_shapes
    assert (full.heads, full.kv_heads, full.head_dim, full.value_dim, full.rope_dim) == (8, 8, 64, 48, 64)
    assert (own.heads, own.kv_heads, own.head_dim, own.value_dim, own.rope_dim) == (4, 2, 32, 16, 16)
    assert SLIDING.table_dims == (64, 16)


@pytest.mark.parametrize(("tp", "divides"), [(1, True), (2, True), (4, False), (8, False)])
def test_tensor_parallelism_does_not_replicate_kv_heads_of_sliding_layers_only(tp: int, divides: bool) -> None:
    assert is_divisible_by_tp(SLIDING, tp) == divides


@pytest.mark.parametrize(("cp", "is_legal"), [(2, True), (4, True), (8, False)])
def test_ulysses_shards_the_heads_of_every_layer(cp: int, is_legal: bool) -> None:
    layout, job = Layout(cp=cp, cp_kind="ulysses"), Job(sequence=1024, global_batch=8)
    errors = list(list_reasons(layout, model=SLIDING, job=job, machine=resolve("h100:8", local=Path("/nowhere"))))
    assert any("heads/tp=4 is not divisible by cp=8" in error for error in errors) != is_legal
