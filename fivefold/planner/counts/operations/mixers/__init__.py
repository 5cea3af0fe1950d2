"""The operations of token mixers other than attention, one module for each kind.

short_conv         gated short convolution
gated_delta_net    Gated DeltaNet with an output gate
kimi_delta         Kimi delta attention
delta_rule         FLOPs of the rule that both of these apply
symbolic_scan      scans with symbolic tensors: their temporaries
lightning          lightning attention
mamba              Mamba
mamba2             Mamba-2
rg_lru             RG-LRU
rwkv               time mixing of RWKV-4
compressed_attention    attention to compressed keys, three kinds of layers
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fivefold.model.mixers.kinds import MixerName
from fivefold.planner.counts.operations.local_shapes import Local
from fivefold.planner.counts.operations.mixers import (
    compressed_attention,
    gated_delta_net,
    kimi_delta,
    lightning,
    mamba,
    mamba2,
    rg_lru,
    rwkv,
    short_conv,
)
from fivefold.planner.counts.operations.op import Op

COMPRESSED: tuple[MixerName, ...] = (
    "shared_key_attention",
    "heavily_compressed_attention",
    "compressed_sparse_attention",
)

# Each lists the operations of a layer's mixer, ``source`` [stream rows, D] → ``a`` [stream rows, D].
OPERATIONS: Mapping[MixerName, Callable[[Local, str], list[Op]]] = {
    "short_conv": short_conv.operations,
    "gated_delta_net": gated_delta_net.operations,
    "kimi_delta": kimi_delta.operations,
    "lightning": lightning.operations,
    "mamba": mamba.operations,
    "mamba2": mamba2.operations,
    "rg_lru": rg_lru.operations,
    "rwkv": rwkv.operations,
    **{kind: compressed_attention.make_operations(kind) for kind in COMPRESSED},
}
