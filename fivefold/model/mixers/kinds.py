"""The kinds of token mixers, and their geometries."""

from typing import Literal

from fivefold.model.mixers.compressed_attention import CompressedAttention
from fivefold.model.mixers.gated_delta_net import GatedDeltaNet
from fivefold.model.mixers.kimi_delta import KimiDelta
from fivefold.model.mixers.lightning import Lightning
from fivefold.model.mixers.mamba import Mamba
from fivefold.model.mixers.mamba2 import Mamba2
from fivefold.model.mixers.rg_lru import RGLRU
from fivefold.model.mixers.rwkv import RWKV
from fivefold.model.mixers.short_conv import ShortConv

# The kinds of token mixers, by the field with their geometry; none: the layer is only a feed-forward.
MixerName = Literal[
    "attention",
    "none",
    "short_conv",
    "gated_delta_net",
    "mamba",
    "mamba2",
    "rg_lru",
    "kimi_delta",
    "lightning",
    "rwkv",
    "shared_key_attention",
    "heavily_compressed_attention",
    "compressed_sparse_attention",
]


Mixer = (
    ShortConv | GatedDeltaNet | Mamba | Mamba2 | RGLRU | KimiDelta | Lightning | RWKV | CompressedAttention
)  # the geometry of a token mixer other than attention
