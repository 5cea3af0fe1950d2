"""Token mixers other than attention: which models, layouts and jobs are refused, each in a line."""

from __future__ import annotations

from typing import Any

import pytest

from fivefold.job import Job, recipe
from fivefold.layout.spec import Layout
from fivefold.layout.validity import refuse
from fivefold.model.mixers.short_conv import ShortConv
from fivefold.model.spec import Model
from fivefold.model.weights import weights
from fivefold.record import UserError

SMALL = Model(name="m", layers=3, width=32, heads=4, kv_heads=4, head_dim=8, ffn=64, vocab=100)
CONV = SMALL.replace(mixers=("short_conv", "attention"), short_conv=ShortConv(taps=4))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"mixers": ("short_conv",)}, "mixers has short_conv layers, but there is no short_conv with their geometry"),
        ({"short_conv": ShortConv()}, "short_conv is given, but mixers has no short_conv layer"),
    ],
)
def test_a_mixer_without_its_geometry_and_a_geometry_without_its_mixer(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        SMALL.replace(**fields)


def test_layers_of_other_mixers_have_no_window_and_no_rotary_positions() -> None:
    model = CONV.replace(window=8, rope_pattern=(False, True, True))
    assert [model.mixer_name(layer) for layer in range(4)] == ["short_conv", "attention", "short_conv", "attention"]
    assert [model.has_window(layer) for layer in range(3)] == [False, True, False]
    assert [model.has_rope(layer) for layer in range(3)] == [False, True, False]


def test_the_weights_of_a_short_convolution() -> None:
    of_first = {weight.name: weight.shape for weight in weights(CONV) if weight.name.startswith("blocks.0.mixer")}
    assert of_first == {
        "blocks.0.mixer.project.weight": (96, 32),
        "blocks.0.mixer.conv.weight": (32, 4),
        "blocks.0.mixer.out.weight": (32, 32),
    }


@pytest.mark.parametrize(
    ("layout", "job", "says"),
    [
        ("tp2", {}, "tp=2 would shard the channels of short_conv, which is not supported; take tp1"),
        ("cp2", {}, "cp=2 would shard the tokens of short_conv, which is not supported; take cp1"),
        ("dp2", {"documents": "separate"}, "short_conv mixes tokens across documents; take documents='joined'"),
        ("dp2", {"precision": recipe("bf16-autocast")}, "short_conv is not counted under autocast"),
    ],
)
def test_unsupported_feature_with_short_convolutions_is_a_one_line_error(
    layout: str, job: dict[str, Any], says: str
) -> None:
    fields: dict[str, Any] = {"sequence": 64, "global_batch": 4, "precision": recipe("bf16")}
    with pytest.raises(UserError, match=says):
        refuse(Layout.parse(layout), model=CONV, job=Job(**fields | job))
