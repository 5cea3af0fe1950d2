"""Read the vision tower and projector of a multimodal ``config.json`` as a ``VisionTower``.

``TOWERS`` maps the ``model_type`` of a ``vision_config`` to the function that reads it; ``PROJECTORS`` that of the full
model to the one that reads its projector and what it changes of the tower. A tower of another type, or with a value
that a ``VisionTower`` cannot represent, raises ``UserError``; its text model is read all the same (``read.py``).
Source: modelling and configuration classes of transformers 5.23.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from typing import Any

from fivefold.errors import UserError
from fivefold.model.activations import ACTIVATIONS
from fivefold.model.vision import VisionTower

Fields = dict[str, Any]
ACTIVATION_NAMES = {given: name for name, record in ACTIVATIONS.items() for given in record.huggingface}


class UnreadTower(UserError):
    """A vision tower of a kind, or with a feature, that is not read; the text model can be planned without it."""


class VisionKeys:
    """The keys of a table with their defaults; a value of another type is a ``UserError``."""

    def __init__(self, values: Mapping[str, Any], *, defaults: Mapping[str, Any], name: str) -> None:
        self.values, self.defaults, self.name = values, defaults, name

    def get(self, key: str) -> Any:
        """Return the value of a key, or its default."""
        value = self.values.get(key)
        return self.defaults.get(key) if value is None else value

    def number(self, key: str) -> int:
        """Return a positive whole number; of two for height and width, which must be equal, the one."""
        value = self.get(key)
        if isinstance(value, list | tuple) and value and all(size == value[0] for size in value):
            value = value[0]
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 2**30:
            raise self.mistake(key, "a positive whole number")
        return value

    def factor(self, key: str) -> float:
        """Return a positive number."""
        value = self.get(key)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 2**20:
            raise self.mistake(key, "a positive number")
        return float(value)

    def flag(self, key: str) -> bool:
        """Return true or false."""
        value = self.get(key)
        if not isinstance(value, bool):
            raise self.mistake(key, "true or false")
        return value

    def layers(self, key: str) -> tuple[int, ...]:
        """Return a list of layers, or one."""
        value = self.get(key)
        value = [value] if isinstance(value, int) else value
        if not isinstance(value, list | tuple) or not all(isinstance(layer, int) for layer in value):
            raise self.mistake(key, "a list of layers")
        return tuple(value)

    def activation(self, key: str) -> str:
        """Return the name of an activation."""
        value = self.get(key)
        if not isinstance(value, str) or value not in ACTIVATION_NAMES:
            raise UnreadTower(str(self.mistake(key, f"one of {', '.join(sorted(ACTIVATION_NAMES))}")))
        return ACTIVATION_NAMES[value]

    def require(self, key: str, *supported: Any) -> None:
        """Raise ``UnreadTower`` for a value that is not one of ``supported``."""
        if self.get(key) not in supported:
            raise UnreadTower(str(self.mistake(key, " or ".join(map(repr, supported)))))

    def mistake(self, key: str, wanted: str) -> UserError:
        """Make the ``UserError`` for the value of a key."""
        return UserError(f"{self.name}: {key}={reprlib.repr(self.get(key))} of its vision tower is not {wanted}")


def read_tower(config: Mapping[str, Any], *, kind: str, text_width: int, name: str) -> VisionTower:
    """Read the tower and projector of the full model of type ``kind``, whose text model is ``text_width`` wide."""
    if kind not in PROJECTORS:
        known = ", ".join(PROJECTORS)
        raise UnreadTower(f"{name}: the vision tower of {kind} is not read; those of {known} are")
    default_type, defaults, read_projector = PROJECTORS[kind]
    values = config.get("vision_config")
    if values is None:
        values = {}
    elif not isinstance(values, Mapping):
        raise UserError(f"{name}: vision_config={reprlib.repr(values)} is not a table of keys")
    else:
        defaults = {}
    tower_type = str(values.get("model_type", default_type))
    tower_type = default_type if tower_type == kind else tower_type
    if tower_type not in TOWERS:
        raise UnreadTower(f"{name}: a vision tower of type {tower_type!r} is not read; {', '.join(TOWERS)} are")
    read, keys = TOWERS[tower_type]
    tower = VisionKeys(values, defaults={**keys, **defaults}, name=name)
    outer = VisionKeys(config, defaults=PROJECTOR_DEFAULTS.get(kind, {}), name=name)
    fields = read(tower)
    fields |= read_projector(outer, tower, fields, text_width)
    return VisionTower.read(fields, origin=name)


def _build_layer(kind: str, **fields: Any) -> Fields:
    """Return the fields of a ``ProjectorLayer``."""
    return {"kind": kind, **fields}


def _square(keys: VisionKeys) -> int:
    """Return the patches of an image of ``image_size``."""
    side: int = keys.number("image_size") // keys.number("patch_size")
    return side * side


def _read_sizes(keys: VisionKeys, *, depth: str, heads: str) -> Fields:
    """Return what all towers have."""
    return {
        "patch": keys.number("patch_size"),
        "layers": keys.number(depth),
        "width": keys.number("hidden_size"),
        "heads": keys.number(heads),
        "ffn": keys.number("intermediate_size"),
        "activation": keys.activation("hidden_act"),
    }


_SIZE = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
_IMAGE = {"num_channels": 3, "image_size": 224, "attention_dropout": 0.0}


def _read_siglip(keys: VisionKeys) -> Fields:
    """Return the fields of a SigLIP tower."""
    keys.require("attention_dropout", 0.0)
    patches = _square(keys)
    return _read_sizes(keys, depth="num_hidden_layers", heads="num_attention_heads") | {
        "channels": keys.number("num_channels"),
        "patches": patches,
        "positions": patches,
        "final_norm": "used",
        "pooling_head": keys.flag("vision_use_head"),
    }


def _read_clip(keys: VisionKeys) -> Fields:
    """Return the fields of a CLIP tower, which has a class token."""
    keys.require("attention_dropout", 0.0)
    patches = _square(keys)
    return _read_sizes(keys, depth="num_hidden_layers", heads="num_attention_heads") | {
        "channels": keys.number("num_channels"),
        "patches": patches,
        "positions": patches + 1,
        "class_token": True,
        "patch_bias": False,
        "first_norm": True,
        "final_norm": "used",
    }


def _read_pixtral(keys: VisionKeys) -> Fields:
    """Return the fields of a Pixtral tower, which has rotary positions and gated MLPs."""
    keys.require("attention_dropout", 0.0)
    return _read_sizes(keys, depth="num_hidden_layers", heads="num_attention_heads") | {
        "channels": keys.number("num_channels"),
        "norm": "rmsnorm",
        "mlp": "gated",
        "mlp_bias": False,
        "qkv_bias": False,
        "out_bias": False,
        "patch_bias": False,
        "first_norm": True,
        "rotary": True,
    }


def _build_merger(*, width: int, patches: int, out: int, norm: str) -> list[Fields]:
    """Return Qwen's projector: a norm of each patch, patches side by side, an MLP as wide as they are."""
    return [
        _build_layer("norm", norm=norm, bias=True),
        _build_layer("merge", size=patches),
        _build_layer("mlp", ffn=width * patches, size=out, bias=True),
    ]


_QWEN = {"in_channels": 3, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "num_heads": 16}


def _read_qwen(keys: VisionKeys, size: Fields, *, out: int, norm: str) -> Fields:
    """Return what the towers of all versions of Qwen have."""
    patches = keys.number("spatial_merge_size") ** 2
    return size | {
        "frames": keys.number("temporal_patch_size"),
        "channels": keys.number("in_channels"),
        "rotary": True,
        "projector": _build_merger(width=size["width"], patches=patches, out=out, norm=norm),
    }


def _read_qwen2(keys: VisionKeys) -> Fields:
    """Return the fields of Qwen2-VL's tower."""
    width = keys.number("embed_dim")
    size = {
        "patch": keys.number("patch_size"),
        "layers": keys.number("depth"),
        "width": width,
        "heads": keys.number("num_heads"),
        "ffn": int(width * keys.factor("mlp_ratio")),
        "activation": keys.activation("hidden_act"),
        "patch_bias": False,
    }
    return _read_qwen(keys, size, out=keys.number("hidden_size"), norm="layernorm")


def _read_qwen25(keys: VisionKeys) -> Fields:
    """Return the fields of Qwen2.5-VL's tower, most of whose layers attend within windows."""
    merge = keys.number("spatial_merge_size")
    window = keys.number("window_size") // merge // keys.number("patch_size") * merge
    size = _read_sizes(keys, depth="depth", heads="num_heads") | {
        "norm": "rmsnorm",
        "mlp": "gated",
        "patch_bias": False,
        "window": window**2,
        "full_layers": keys.layers("fullatt_block_indexes"),
    }
    return _read_qwen(keys, size, out=keys.number("out_hidden_size"), norm="rmsnorm")


def _read_qwen3(keys: VisionKeys) -> Fields:
    out = keys.number("out_hidden_size")
    deepstack = keys.layers("deepstack_visual_indexes")
    size = _read_sizes(keys, depth="depth", heads="num_heads") | {"positions": keys.number("num_position_embeddings")}
    fields = _read_qwen(keys, size, out=out, norm="layernorm") | {"deepstack": deepstack}
    if deepstack:
        norm, merge, mlp = fields["projector"]
        fields["deepstack_projector"] = [merge, norm, mlp]
    return fields


def _read_qwen35(keys: VisionKeys) -> Fields:
    size = _read_sizes(keys, depth="depth", heads="num_heads") | {"positions": keys.number("num_position_embeddings")}
    return _read_qwen(keys, size, out=keys.number("out_hidden_size"), norm="layernorm")


def _read_internvl(keys: VisionKeys) -> Fields:
    """Read the vision tower of InternVL."""
    for key in ("attention_dropout", "hidden_dropout_prob", "projection_dropout"):
        keys.require(key, 0.0)
    keys.require("use_mask_token", False)
    keys.require("norm_type", "layer_norm", "rms_norm")
    norm = "layernorm" if keys.get("norm_type") == "layer_norm" else "rmsnorm"
    if norm == "layernorm":
        keys.require("use_qk_norm", False)
    patches = _square(keys)
    has_positions = keys.flag("use_absolute_position_embeddings")
    return _read_sizes(keys, depth="num_hidden_layers", heads="num_attention_heads") | {
        "channels": keys.number("num_channels"),
        "patches": patches,
        "positions": patches + 1 if has_positions else 0,
        "class_token": True,
        "norm": norm,
        "qkv_bias": keys.flag("attention_bias"),
        "qk_norm": keys.flag("use_qk_norm"),
        "layer_scale": True,
        "final_norm": "none" if keys.flag("use_mean_pooling") else "used",
        "final_norm_kind": "layernorm",
    }


def _read_llama4(keys: VisionKeys) -> Fields:
    keys.require("projector_dropout", 0.0)
    return _read_clip(keys) | {"activation": "gelu", "rotary": True}


def _read_kimi(keys: VisionKeys) -> Fields:
    return _read_sizes(keys, depth="num_hidden_layers", heads="num_attention_heads") | {
        "positions": keys.number("pos_emb_height") * keys.number("pos_emb_width"),
        "rotary": True,
        "final_norm": "used",
    }


def _read_glm4v(keys: VisionKeys) -> Fields:
    """Read the vision tower and projector of GLM-4V."""
    keys.require("attention_dropout", 0.0)
    out = keys.number("out_hidden_size")
    return _read_sizes(keys, depth="depth", heads="num_heads") | {
        "frames": keys.number("temporal_patch_size"),
        "channels": keys.number("in_channels"),
        "positions": _square(keys),
        "norm": "rmsnorm",
        "mlp": "gated",
        "ffn": out,
        "mlp_bias": False,
        "qkv_bias": keys.flag("attention_bias"),
        "out_bias": False,
        "first_norm": True,
        "final_norm": "used",
        "rotary": True,
        "projector": [
            _build_layer("merge", size=keys.number("spatial_merge_size") ** 2),
            _build_layer("linear", size=out, bias=True),
            _build_layer("linear", size=out),
            _build_layer("norm", norm="layernorm", bias=True),
            _build_layer("activation", activation="gelu"),
            _build_layer(
                "gated_mlp", ffn=keys.number("intermediate_size"), size=out, activation=keys.activation("hidden_act")
            ),
        ],
    }


_QWEN3 = _QWEN | {
    "depth": 27, "hidden_size": 1152, "hidden_act": "gelu_pytorch_tanh", "intermediate_size": 4304, "patch_size": 16,
    "out_hidden_size": 3584, "num_position_embeddings": 2304, "deepstack_visual_indexes": (8, 16, 24),
}  # fmt: skip
_GLM4V = {
    "depth": 24, "hidden_size": 1536, "hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0,
    "num_heads": 12, "in_channels": 3, "image_size": 336, "patch_size": 14, "spatial_merge_size": 2,
    "temporal_patch_size": 2, "out_hidden_size": 4096, "intermediate_size": 13_696,
}  # fmt: skip

# model_type of a vision_config: how it is read, and the defaults of its configuration class
TOWERS: dict[str, tuple[Callable[[VisionKeys], Fields], Fields]] = {
    "siglip_vision_model": (
        _read_siglip,
        {**_SIZE, **_IMAGE, "patch_size": 16, "hidden_act": "gelu_pytorch_tanh", "vision_use_head": True},
    ),
    "clip_vision_model": (_read_clip, {**_SIZE, **_IMAGE, "patch_size": 32, "hidden_act": "quick_gelu"}),
    "pixtral": (
        _read_pixtral,
        {
            **_IMAGE, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
            "num_attention_heads": 16, "patch_size": 16, "hidden_act": "gelu",
        },
    ),
    "qwen2_vl_vision": (
        _read_qwen2,
        _QWEN | {"depth": 32, "embed_dim": 1280, "hidden_size": 3584, "hidden_act": "quick_gelu", "mlp_ratio": 4},
    ),
    "qwen2_5_vl_vision": (
        _read_qwen25,
        _QWEN | {
            "depth": 32, "hidden_size": 3584, "hidden_act": "silu", "intermediate_size": 3420, "window_size": 112,
            "out_hidden_size": 3584, "fullatt_block_indexes": (7, 15, 23, 31),
        },
    ),
    "qwen3_vl_vision": (_read_qwen3, _QWEN3),
    "qwen3_vl_moe_vision": (_read_qwen3, _QWEN3),
    "qwen3_5_vision": (_read_qwen35, _QWEN3),
    "qwen3_5_moe_vision": (_read_qwen35, _QWEN3),
    "internvl_vision": (
        _read_internvl,
        {
            "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "attention_bias": False,
            "use_qk_norm": False, "intermediate_size": 4096, "hidden_act": "gelu", "hidden_dropout_prob": 0.0,
            "attention_dropout": 0.0, "projection_dropout": 0.0, "norm_type": "layer_norm", "image_size": 448,
            "patch_size": 14, "num_channels": 3, "use_mask_token": False, "use_absolute_position_embeddings": True,
            "use_mean_pooling": True,
        },
    ),
    "llama4_vision_model": (
        _read_llama4,
        {
            "hidden_size": 768, "hidden_act": "gelu", "num_hidden_layers": 34, "num_attention_heads": 16,
            "num_channels": 3, "intermediate_size": 5632, "vision_output_dim": 7680, "image_size": 448,
            "patch_size": 14, "pixel_shuffle_ratio": 0.5, "projector_input_dim": 4096, "projector_output_dim": 4096,
            "projector_dropout": 0.0, "attention_dropout": 0.0,
        },
    ),
    "kimi_k25_vision": (
        _read_kimi,
        {
            "patch_size": 14, "pos_emb_height": 64, "pos_emb_width": 64, "num_attention_heads": 16,
            "num_hidden_layers": 27, "hidden_size": 1152, "intermediate_size": 4304,
            "hidden_act": "gelu_pytorch_tanh", "merge_kernel_size": (2, 2),
        },
    ),
    "glm4v_vision": (_read_glm4v, _GLM4V),
    "glm4v_moe_vision": (_read_glm4v, _GLM4V),
}  # fmt: skip


def _has_projector(outer: VisionKeys, tower: VisionKeys, fields: Fields, text_width: int) -> Fields:
    """Return nothing: the tower has its projector."""
    return {}


def _project_gemma3(outer: VisionKeys, tower: VisionKeys, fields: Fields, text_width: int) -> Fields:
    """Return Gemma 3's projector, which averages patches."""
    side = tower.number("image_size") // tower.number("patch_size")
    kernel = side // int(outer.number("mm_tokens_per_image") ** 0.5)
    if kernel < 1:  # the defaults of transformers' config, which its code cannot run either
        raise UnreadTower(str(outer.mistake("mm_tokens_per_image", f"at most {side**2}, the patches of an image")))
    return {
        "projector": [
            _build_layer("pool", size=kernel**2),
            _build_layer("norm", norm="rmsnorm"),
            _build_layer("linear", size=text_width),
        ]
    }


def _project_llava(outer: VisionKeys, tower: VisionKeys, fields: Fields, text_width: int) -> Fields:
    """Return LLaVA's projector, and the layers of the tower that it reads."""
    has_class = fields.get("class_token", False)
    outer.require("vision_feature_select_strategy", "default" if has_class else "full")
    layers = tuple(
        layer if layer >= 0 else fields["layers"] + 1 + layer for layer in outer.layers("vision_feature_layer")
    )
    activation = outer.activation("projector_hidden_act")
    bias = outer.flag("multimodal_projector_bias")
    return {
        "features": layers,
        "final_norm": "unused",
        "newline": outer.defaults["image_newline"],
        "projector": [_build_layer("mlp", ffn=text_width, size=text_width, bias=bias, activation=activation)],
    }


def _project_mistral3(outer: VisionKeys, tower: VisionKeys, fields: Fields, text_width: int) -> Fields:
    """Return Mistral 3's projector, which merges patches after a norm."""
    outer.require("vision_feature_layer", -1)
    activation = outer.activation("projector_hidden_act")
    bias = outer.flag("multimodal_projector_bias")
    return {
        "projector": [
            _build_layer("norm", norm="rmsnorm"),
            _build_layer("shuffle", size=outer.number("spatial_merge_size") ** 2),
            _build_layer("linear", size=fields["width"]),
            _build_layer("mlp", ffn=text_width, size=text_width, bias=bias, activation=activation),
        ]
    }


def _project_internvl(outer: VisionKeys, tower: VisionKeys, fields: Fields, text_width: int) -> Fields:
    """Return InternVL's projector, which merges patches before a norm."""
    outer.require("vision_feature_layer", -1)
    outer.require("vision_feature_select_strategy", "default")
    activation = outer.activation("projector_hidden_act")
    return {
        "projector": [
            _build_layer("shuffle", size=int(1 / outer.factor("downsample_ratio")) ** 2),
            _build_layer("norm", norm="layernorm", bias=True),
            _build_layer("mlp", ffn=text_width, size=text_width, bias=True, activation=activation),
        ]
    }


def _project_llama4(outer: VisionKeys, tower: VisionKeys, fields: Fields, text_width: int) -> Fields:
    """Return Llama 4's projector: an MLP of the tower over merged patches, and a linear layer."""
    patches = round(1 / tower.factor("pixel_shuffle_ratio") ** 2)
    tower.require("intermediate_size", patches * fields["width"])
    tower.require("projector_output_dim", tower.get("projector_input_dim"))
    tower.require("vision_output_dim", tower.get("projector_output_dim"))
    out = tower.number("projector_output_dim")
    return {
        "projector": [
            _build_layer("shuffle", size=patches),
            _build_layer("mlp", ffn=tower.number("projector_input_dim"), size=out),
            _build_layer("activation", activation="gelu"),
            _build_layer("linear", size=text_width),
        ]
    }


def _project_kimi(outer: VisionKeys, tower: VisionKeys, fields: Fields, text_width: int) -> Fields:
    outer.require("projection_hidden_size", fields["width"])
    patches = tower.number("merge_kernel_size") ** 2
    return {"projector": _build_merger(width=fields["width"], patches=patches, out=text_width, norm="layernorm")}


_LLAVA_CLIP = {
    "intermediate_size": 4096, "hidden_size": 1024, "patch_size": 14, "image_size": 336, "num_hidden_layers": 24,
    "num_attention_heads": 16,
}  # fmt: skip
_SIGLIP_SO400M = {
    "hidden_size": 1152, "intermediate_size": 4304, "patch_size": 14, "image_size": 384, "num_hidden_layers": 26,
    "num_attention_heads": 16, "vision_use_head": False,
}  # fmt: skip
_PIXTRAL_1540 = {
    "intermediate_size": 4096, "hidden_size": 1024, "patch_size": 14, "image_size": 1540, "num_hidden_layers": 24,
    "num_attention_heads": 16, "hidden_act": "gelu",
}  # fmt: skip
Projector = Callable[[VisionKeys, VisionKeys, Fields, int], Fields]
# model_type of the full model: that of its tower if the file does not say, keys of a missing vision_config, projector
PROJECTORS: dict[str, tuple[str, Fields, Projector]] = {
    "gemma3": ("siglip_vision_model", {}, _project_gemma3),
    "shieldgemma2": ("siglip_vision_model", {}, _project_gemma3),
    "llava": ("clip_vision_model", _LLAVA_CLIP, _project_llava),
    "llava_next": ("clip_vision_model", _LLAVA_CLIP, _project_llava),
    "llava_onevision": ("siglip_vision_model", _SIGLIP_SO400M, _project_llava),
    "mistral3": ("pixtral", _PIXTRAL_1540, _project_mistral3),
    "qwen2_vl": ("qwen2_vl_vision", {}, _has_projector),
    "qwen2_5_vl": ("qwen2_5_vl_vision", {}, _has_projector),
    "qwen3_vl": ("qwen3_vl_vision", {}, _has_projector),
    "qwen3_vl_moe": ("qwen3_vl_moe_vision", {}, _has_projector),
    "qwen3_5": ("qwen3_5_vision", {}, _has_projector),
    "qwen3_5_moe": ("qwen3_5_moe_vision", {}, _has_projector),
    "internvl": ("internvl_vision", {}, _project_internvl),
    "llama4": ("llama4_vision_model", {}, _project_llama4),
    "kimi_k25": ("kimi_k25_vision", {}, _project_kimi),
    "glm4v": ("glm4v_vision", {}, _has_projector),
    "glm46v": ("glm4v_vision", {}, _has_projector),
    "glm4v_moe": ("glm4v_moe_vision", {}, _has_projector),
}
_LLAVA = {
    "projector_hidden_act": "gelu", "vision_feature_select_strategy": "default", "vision_feature_layer": -2,
    "multimodal_projector_bias": True, "image_newline": False,
}  # fmt: skip
PROJECTOR_DEFAULTS: dict[str, Fields] = {
    "gemma3": {"mm_tokens_per_image": 256},
    "shieldgemma2": {"mm_tokens_per_image": 256},
    "llava": _LLAVA,
    "llava_next": {**_LLAVA, "image_newline": True},
    "llava_onevision": {
        **_LLAVA, "vision_feature_select_strategy": "full", "vision_feature_layer": -1, "image_newline": True,
    },
    "mistral3": {
        "projector_hidden_act": "gelu", "vision_feature_layer": -1, "multimodal_projector_bias": False,
        "spatial_merge_size": 2,
    },
    "internvl": {
        "downsample_ratio": 0.5, "projector_hidden_act": "gelu", "vision_feature_layer": -1,
        "vision_feature_select_strategy": "default",
    },
    "kimi_k25": {"projection_hidden_size": 1152},
}  # fmt: skip
