"""Token mixers other than attention: one module for each kind, which ``build_mixer`` makes.

short_conv         gated short convolution
gated_delta_net    Gated DeltaNet with an output gate
kimi_delta         Kimi delta attention
delta_rule         what both of these apply to groups of chunks
mamba              Mamba
mamba2             Mamba-2
lightning          lightning attention, whose heads decay at rates of their layer
rg_lru             RG-LRU
rwkv               the time mixing of RWKV-4
compressed_attention   attention to a window and to compressed keys
compressed_core        its kernels
fused_scans        scans by the kernels of flash-linear-attention
convolution · chunks   what several kinds share: the causal convolution; a scan in chunks of tokens
heads              the share of the heads that a rank of context parallelism computes
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import nn

from fivefold.model.mixers.kinds import MixerName
from fivefold.model.spec import Model
from fivefold.trainer.model.mixers.compressed_attention import CompressedAttentionMixer
from fivefold.trainer.model.mixers.gated_delta_net import GatedDeltaNetMixer
from fivefold.trainer.model.mixers.kimi_delta import KimiDeltaMixer
from fivefold.trainer.model.mixers.lightning import LightningMixer
from fivefold.trainer.model.mixers.mamba import MambaMixer
from fivefold.trainer.model.mixers.mamba2 import Mamba2Mixer
from fivefold.trainer.model.mixers.rg_lru import RGLRUMixer
from fivefold.trainer.model.mixers.rwkv import RWKVMixer
from fivefold.trainer.model.mixers.short_conv import ShortConvMixer

MODULES: Mapping[MixerName, Callable[[Model], nn.Module]] = {
    "short_conv": ShortConvMixer,
    "gated_delta_net": GatedDeltaNetMixer,
    "kimi_delta": KimiDeltaMixer,
    "mamba": MambaMixer,
    "mamba2": Mamba2Mixer,
    "rg_lru": RGLRUMixer,
    "rwkv": RWKVMixer,
}

MODULES_BY_LAYER: Mapping[MixerName, Callable[..., nn.Module]] = {  # of kinds whose modules depend on their layer
    "lightning": LightningMixer,
    "shared_key_attention": CompressedAttentionMixer,
    "heavily_compressed_attention": CompressedAttentionMixer,
    "compressed_sparse_attention": CompressedAttentionMixer,
}


def build_mixer(model: Model, *, layer: int) -> nn.Module:
    """Build the token mixer of ``layer`` that is not attention, or is next to it."""
    name: MixerName = "mamba2" if model.joins_mamba2 else model.mixer_name(layer)
    return MODULES[name](model) if name in MODULES else MODULES_BY_LAYER[name](model, layer=layer)
