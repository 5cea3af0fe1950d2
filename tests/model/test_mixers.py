"""Token mixers other than attention: which models, layouts and jobs are refused, each in a line."""

from __future__ import annotations

from typing import Any

import pytest

from fivefold.errors import UserError
from fivefold.job import Job, get_recipe
from fivefold.layout.local_weight import RankCoordinate, find_local_slice
from fivefold.layout.spec import Layout
from fivefold.layout.validity import refuse
from fivefold.model.mixers.gated_delta_net import GatedDeltaNet
from fivefold.model.mixers.lightning import Lightning
from fivefold.model.mixers.mamba import Mamba
from fivefold.model.mixers.mamba2 import Mamba2
from fivefold.model.mixers.rg_lru import RGLRU
from fivefold.model.mixers.rwkv import RWKV
from fivefold.model.mixers.short_conv import ShortConv
from fivefold.model.spec import Model
from fivefold.model.weights import list_weights

SMALL = Model(name="m", layers=3, width=32, heads=4, kv_heads=4, head_dim=8, ffn=64, vocab=100)
GROUPS = {"mixers": ("mamba2", "attention"), "mamba2": Mamba2(heads=8, head_dim=8, state=8, groups=2)}
KEYS = {
    "mixers": ("gated_delta_net",),
    "gated_delta_net": GatedDeltaNet(key_heads=2, value_heads=8, key_dim=8, value_dim=8),
}
CHANNELS = {"mixers": ("mamba", "attention"), "mamba": Mamba(inner=66, rank=2)}
TIME_MIXING = {"mixers": ("rwkv",), "rwkv": RWKV(inner=32)}
CONV = SMALL.replace(mixers=("short_conv", "attention"), short_conv=ShortConv(taps=4))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        (
            {"mixers": ("short_conv",)},
            "mixers has short_conv layers, but the table short_conv with their sizes is missing",
        ),
        ({"short_conv": ShortConv()}, "short_conv is given, but mixers has no short_conv layer"),
    ],
)
def test_a_mixer_without_its_geometry_and_a_geometry_without_its_mixer(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        SMALL.replace(**fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"mixers": ("lightning",), "lightning": Lightning(heads=2, dim=8)},
        {"mixers": ("rg_lru",), "rg_lru": RGLRU(inner=32, blocks=2)},
    ],
)
def test_a_mixer_has_no_activation_that_clamps_a_gate_and_its_product(fields: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"is not supported with activation='clamped_swiglu': use another"):
        SMALL.replace(activation="clamped_swiglu", **fields)


def test_layers_of_other_mixers_have_no_window_and_no_rotary_positions() -> None:
    model = CONV.replace(window=8, rope_pattern=(False, True, True))
    assert [model.mixer_name(layer) for layer in range(4)] == ["short_conv", "attention", "short_conv", "attention"]
    assert [model.has_window(layer) for layer in range(3)] == [False, True, False]
    assert [model.has_rope(layer) for layer in range(3)] == [False, True, False]


def test_the_weights_of_a_short_convolution() -> None:
    of_first = {weight.name: weight.shape for weight in list_weights(CONV) if weight.name.startswith("blocks.0.mixer")}
    assert of_first == {
        "blocks.0.mixer.project.weight": (96, 32),
        "blocks.0.mixer.conv.weight": (32, 4),
        "blocks.0.mixer.out.weight": (32, 32),
    }


@pytest.mark.parametrize(
    ("layout", "job", "says"),
    [
        ("cp2", {}, "cp=2 as a ring would cut the chain of states of short_conv; use cp=ulysses"),
        (
            "cp4 cp=ulysses",
            {"sequence": 8},
            "2 tokens of a sequence on each rank of cp=4 are fewer than the 3 before a token that short_conv reads",
        ),
        ("dp2", {"documents": "separate"}, "short_conv mixes tokens across documents; use documents='joined'"),
        ("dp2", {"precision": get_recipe("bf16-autocast")}, "short_conv is not counted under autocast"),
    ],
)
def test_unsupported_feature_with_short_convolutions_is_a_one_line_error(
    layout: str, job: dict[str, Any], says: str
) -> None:
    fields: dict[str, Any] = {"sequence": 64, "global_batch": 4, "precision": get_recipe("bf16")}
    with pytest.raises(UserError, match=says):
        refuse(Layout.parse(layout), model=CONV, job=Job(**fields | job))


@pytest.mark.parametrize(
    ("layout", "mixers", "says"),
    [
        ("tp4", GROUPS, "the 2 groups of mamba2 are not divisible by tp=4; try tp2"),
        ("tp4", KEYS, "the 2 key heads of gated_delta_net are not divisible by tp=4; try tp2"),
        ("tp2", TIME_MIXING, "tp=2 would shard the channels of rwkv, which is not supported; use tp1"),
        ("cp2 cp=ulysses", TIME_MIXING, "cp=2 would shard the tokens of rwkv, which is not supported; use cp1"),
        ("tp2 cp2 cp=ulysses", CHANNELS, "33 channels of mamba on each rank of tp .* by cp=2; try cp1"),
        ("cp2", GROUPS, "cp=2 as a ring would cut the chain of states of mamba2; use cp=ulysses"),
        ("tp2 cp2 cp=ulysses", KEYS, "1 key heads of gated_delta_net on each rank of tp .* by cp=2; try cp1"),
        (
            "tp4x2",
            GROUPS,
            "2D tensor parallelism is not supported with token mixers other than attention; try 'dp1 tp8",
        ),
    ],
)
def test_parallelism_that_does_not_divide_a_mixer_is_a_one_line_error(
    layout: str, mixers: dict[str, Any], says: str
) -> None:
    model = SMALL.replace(**mixers, heads=8, kv_heads=8)
    with pytest.raises(UserError, match=says):
        refuse(Layout.parse(layout), model=model, job=Job(sequence=64, global_batch=8, precision=get_recipe("bf16")))


def test_ranks_of_tensor_parallelism_hold_a_share_of_each_part_of_a_projection() -> None:
    """z, x, B, C and dt are rows of one matrix, and every rank has heads and groups of each."""
    net = Mamba2(heads=4, head_dim=3, state=5, groups=2)
    model = SMALL.replace(mixers=("mamba2",), mamba2=net)
    (weight,) = (weight for weight in list_weights(model) if weight.name == "blocks.0.mixer.project.weight")
    place, layout = RankCoordinate(tp=1), Layout.parse("tp2")
    part = find_local_slice(weight, model=model, layout=layout, vocab=100, place=place)
    assert part.shape == (net.shard(2).projected_width, 32)
    rows = [(full[0].start, full[0].stop) for full, _ in part.list_slices()]
    assert rows == [(6, 12), (18, 24), (29, 34), (39, 44), (46, 48)]
    assert [local[0].start for _, local in part.list_slices()] == [0, 6, 12, 17, 22]
