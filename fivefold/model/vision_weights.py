"""The weights of a vision tower and its projector, by name and shape.

Blocks are those of a model (``shape_encoder``), so that they are counted and sharded as blocks of text models are. All
other weights are replicated over tensor parallelism, except for those of the projector's MLPs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

from fivefold.model.norms import NORMS, NormName
from fivefold.model.spec import Model
from fivefold.model.vision import ProjectorLayer, VisionTower
from fivefold.model.weight import Kind, Weight
from fivefold.model.weights import list_block_weights

PREFIX = "vision."
CONNECTOR = f"{PREFIX}connector."


@lru_cache(maxsize=64)
def shape_encoder(tower: VisionTower) -> Model:
    """Return the blocks of a tower as a model, whose embedding and head are not used."""
    windowed = tower.window is not None
    return Model(
        name="vision tower",
        layers=tower.layers,
        width=tower.width,
        heads=tower.heads,
        kv_heads=tower.heads,
        head_dim=tower.head_dim,
        ffn=tower.ffn,
        vocab=1,
        norm=tower.norm,
        mlp=tower.mlp,
        activation=tower.activation,
        mlp_bias=tower.mlp_bias,
        qkv_bias=tower.qkv_bias,
        out_bias=tower.out_bias,
        qk_norm="full" if tower.qk_norm else "none",
        position="rope" if tower.rotary else "none",
        window=tower.window,
        window_kind="chunks" if windowed else "sliding",
        window_pattern=tuple(map(tower.has_window, range(tower.layers))) if windowed else (),
    )


def is_vision(weight: Weight) -> bool:
    """Tell whether a weight is of a vision tower or its projector."""
    return weight.name.startswith(PREFIX)


def is_connector(weight: Weight) -> bool:
    """Tell whether a weight is of the projector of a vision tower."""
    return weight.name.startswith(CONNECTOR)


def list_vision_weights(tower: VisionTower) -> Iterator[Weight]:
    """Yield all weights of a tower and its projector in module order."""
    width, encoder = tower.width, shape_encoder(tower)
    pixels = tower.channels * tower.frames * tower.patch**2
    yield from _list_linear(f"{PREFIX}patches", width, pixels, bias=tower.patch_bias)
    if tower.class_token:
        yield Weight(f"{PREFIX}class_token", (width,), "norm")
    if tower.positions:
        yield Weight(f"{PREFIX}positions", (tower.positions, width), "embedding")
    if tower.first_norm:
        yield from _list_norm(f"{PREFIX}first_norm", width, tower.norm)
    for layer in range(tower.layers):
        for weight in list_block_weights(encoder, layer):
            yield weight._replace(name=f"{PREFIX}blocks.{layer}.{weight.name}")
        if tower.layer_scale:
            for branch in "12":
                yield Weight(f"{PREFIX}blocks.{layer}.scale{branch}", (width,), "norm")
    if tower.final_norm != "none":
        yield from _list_norm(f"{PREFIX}final_norm", width, tower.final_norm_kind or tower.norm)
    if tower.pooling_head:
        yield from _list_pooling_head(tower)
    inputs = width * max(1, len(tower.features))
    yield from _list_projector(CONNECTOR.rstrip("."), tower.projector, inputs)
    if tower.newline:
        yield Weight(f"{CONNECTOR}newline", (tower.projector[-1].size,), "norm")
    for index in range(len(tower.deepstack)):
        yield from _list_projector(f"{CONNECTOR}deepstack{index}", tower.deepstack_projector, width)


@lru_cache(maxsize=64)
def count_vision(tower: VisionTower) -> int:
    """Count the parameters of a tower and its projector."""
    return sum(weight.numel for weight in list_vision_weights(tower))


def _list_linear(
    name: str, out_features: int, in_features: int, *, bias: bool, kind: Kind = "router"
) -> Iterator[Weight]:
    yield Weight(f"{name}.weight", (out_features, in_features), kind)
    if bias:
        yield Weight(f"{name}.bias", (out_features,), "bias" if kind == "column" else "norm")


def _list_norm(name: str, width: int, norm: NormName, *, bias: bool = True) -> Iterator[Weight]:
    yield Weight(f"{name}.weight", (width,), "norm")
    if NORMS[norm].has_bias and bias:
        yield Weight(f"{name}.bias", (width,), "norm")


def _list_projector(name: str, layers: Sequence[ProjectorLayer], width: int) -> Iterator[Weight]:
    """Yield the weights of a projector whose input has ``width`` channels."""
    for index, layer in enumerate(layers):
        where = f"{name}.{index}"
        if layer.kind in ("merge", "shuffle"):
            width *= layer.size
        elif layer.kind == "norm":
            yield from _list_norm(where, width, layer.norm, bias=layer.bias)
        elif layer.kind == "linear":
            yield from _list_linear(where, layer.size, width, bias=layer.bias)
            width = layer.size
        elif layer.kind in ("mlp", "gated_mlp"):
            for part in ("gate", "up") if layer.kind == "gated_mlp" else ("up",):
                yield from _list_linear(f"{where}.{part}", layer.ffn, width, bias=layer.bias, kind="column")
            yield from _list_linear(f"{where}.down", layer.size, layer.ffn, bias=layer.bias, kind="row")
            width = layer.size


def _list_pooling_head(tower: VisionTower) -> Iterator[Weight]:
    """Yield the weights of attention from one learned query to all patches, and of the MLP after it (SigLIP)."""
    name, width = f"{PREFIX}pool", tower.width
    yield Weight(f"{name}.probe", (width,), "norm")
    yield from _list_linear(f"{name}.qkv", 3 * width, width, bias=True)
    yield from _list_linear(f"{name}.out", width, width, bias=True)
    yield from _list_norm(f"{name}.norm", width, "layernorm")
    yield from _list_linear(f"{name}.up", tower.ffn, width, bias=True)
    yield from _list_linear(f"{name}.down", width, tower.ffn, bias=True)
