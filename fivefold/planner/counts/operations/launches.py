"""Count the kernels that the trainer launches for a scan or for routing (``trainer/model``).

The trainer's own scans run as many small PyTorch kernels, so the host's launches decide how long a scan takes. The
kernels of flash-linear-attention and mamba_ssm, which other software runs, are a few for all chunks. The numbers come
from dry runs; ``tests/dry_run/test_planned_time.py`` counts them again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fivefold.model.mixers.kinds import MixerName
from fivefold.units import ceil_div


class ScanLaunches(NamedTuple):
    """Kernels of a scan in groups of chunks: ``forward`` and ``backward`` of a group."""

    forward: int
    backward: int
    states: int = 0  # of a group's states, if the backward computes them again first; 0: among ``backward``
    chunk: int = 0  # of the state of each chunk, if states are handed on one by one; each of both again in the backward
    around: tuple[int, int] = (0, 0)  # of convolution and gate, if they are counted here


# What two runs differ by that differ in their groups of chunks (``model/mixers/chunk_groups.py``) alone, or in the
# chunks of a group.
LAUNCHES_PER_GROUP: Mapping[MixerName, ScanLaunches] = {
    "mamba2": ScanLaunches(47, 163),
    "gated_delta_net": ScanLaunches(54, 177, states=38, chunk=3),
    "kimi_delta": ScanLaunches(138, 422, states=93, chunk=3),
    "lightning": ScanLaunches(42, 64, states=15),
    "mamba": ScanLaunches(39, 99, states=33, chunk=1, around=(14, 57)),
    "rg_lru": ScanLaunches(84, 183, states=84, chunk=1, around=(13, 50)),
    "rwkv": ScanLaunches(169, 332, states=175, chunk=2),
}
# Of the scans that run the kernels of flash-linear-attention 0.6 (``trainer/model/mixers/fused_scans.py``), forward and
# backward, whatever the number of chunks: its kernels and PyTorch's operations around them, the forward again in the
# backward. ``tests/third_party/test_fused_scans.py`` counts them again.
FUSED_LAUNCHES: Mapping[MixerName, tuple[int, int]] = {
    "mamba2": (18, 52),
    "gated_delta_net": (18, 46),
    "kimi_delta": (20, 43),
    "lightning": (8, 13),
}
# Times that kernels of a scan other than matmuls read or write its temporaries in fp32: in the forward, in the
# backward, and when the backward computes the states of earlier groups again (0: among those of the backward). For
# their names see the mixers. Mamba, Mamba-2 and RG-LRU: with convolution, gate and norm. Fits of dry runs of two to
# eight geometries, each within 3 %, of states within 8 %.
PASSES: Mapping[MixerName, Mapping[str, tuple[float, float, float]]] = {
    "mamba2": {
        "pairs": (8.6, 23.6, 0),
        "dims": (54.1, 175.1, 0),
        "shared_pairs": (15.6, 41.5, 0),
        "shared_dims": (41.0, 147.1, 0),
        "states": (7.7, 20.7, 0),
    },
    "gated_delta_net": {
        "pairs": (15.5, 52.1, 12.5),
        "keys": (11.9, 57.2, 8.0),
        "values": (10.5, 24.2, 3.6),
        "shared_keys": (15.1, 53.1, 6.6),
        "states": (2.0, 9.2, 3.3),
    },
    "kimi_delta": {"pairs": (15.2, 31.6, 7.7), "dims": (113.0, 477.6, 81.6), "states": (2.0, 8.9, 3.5)},
    "mamba": {"states": (17.0, 56.5, 19.9), "channels": (47.7, 139.2, 12.1)},
    "rg_lru": {"channels": (65.5, 184.9, 38.4)},
    "rwkv": {"channels": (88.1, 193.6, 56.8)},
    "lightning": {"pairs": (3.07, 5.24, 0), "dims": (26.3, 70.2, 0), "states": (4.4, 12.5, 0)},
}
GATE_LAUNCHES = (9, 18)  # of a gated norm of each head's output (``gated_delta_net.py``)
# Forward and backward around the experts, by operation (``trainer/model/moe.py``, ``routing.py``,
# ``parallel/expert.py``); of other software: ``Constants.moe_kernels``. moe.send has the counts of rows that the host
# reads, and the sort of what has arrived.
EXPERT_LAUNCHES: Mapping[str, tuple[int, int]] = {
    "moe.topk": (9, 37),
    "moe.dispatch": (10, 1),
    "moe.send": (12, 4),
    "moe.return": (2, 1),
    "moe.combine": (1, 1),
}
# Forward and backward around the experts of Megatron, counted in megatron-core 0.16.1 as ``Constants.moe_kernels`` are.
# Biases (``TEGroupedMLP._apply_bias``): of each expert, where DDP's hook adds both of its bias gradients to their sums,
# and of all together. Clamped activations (``weighted_bias_quick_geglu_impl``): both clamps, their join, the product.
EXPERT_BIAS_LAUNCHES = ((2, 2), (8, 3))
CLAMP_LAUNCHES = (4, 10)
# Of a dropout, forward and backward (``trainer/model/dropout.py``): the keys of its rows, the mask, the two products
DROPOUT_LAUNCHES = (29, 2)
# Of multi-head latent attention: a rotation of the last dims, which are joined to the others; the joined gradients of
# keys and values and of latent and rotary key; a core that pads the values, their gradient and the output to the head
# dim of the keys, and cuts what it makes (``trainer/model/attention.py``, ``flash_attention.py``)
LATENT_ROPE_LAUNCHES = (5, 6)
LATENT_PARTS_LAUNCHES = (0, 2)
PADDED_CORE_LAUNCHES = (3, 5)
# Of a ring's core (``trainer/parallel/context.py``): besides the first block, those of each further block, which is
# merged with the others by its log-sum-exp, more of them if halves of several sequences are copied
RING_LAUNCHES, RING_BLOCK_LAUNCHES, RING_COPY_LAUNCHES = (1, 4), (9, 7), (1, 4)


def count_convolution_launches(inputs: int, taps: int) -> tuple[int, int]:
    """Return the kernels of causal convolutions of ``inputs`` tensors in bf16, and of their SiLU."""
    return inputs * (3 + taps), inputs * (7 + 5 * taps) + 1


def count_launches(mixer: MixerName, groups: Sequence[int], size: int, *, fused: bool = False) -> tuple[int, int]:
    """Return the kernels of a scan, forward and backward.

    ``groups``: the tokens of each group of chunks of a sequence; ``size``: tokens of a chunk. ``fused``: the kernels of
    flash-linear-attention.
    """
    if fused:
        return FUSED_LAUNCHES[mixer]
    launches = LAUNCHES_PER_GROUP[mixer]
    chunks, again = ceil_div(sum(groups), size), ceil_div(sum(groups[:-1]), size)
    forward = launches.forward * len(groups) + launches.chunk * chunks
    backward = launches.backward * len(groups) + 2 * launches.chunk * chunks
    backward += launches.states * (len(groups) - 1) + launches.chunk * again
    return forward + launches.around[0], backward + launches.around[1]


def count_launched_bytes(mixer: MixerName, groups: Sequence[int], sizes: Mapping[str, int]) -> tuple[int, int]:
    """Return the bytes that kernels other than matmuls read and write, of temporaries of these sizes in bytes.

    ``groups``: the tokens of each group of chunks of a sequence; ``sizes``: bytes of all chunks together.
    """
    forward, backward, states = (
        sum(passes[index] * sizes[name] for name, passes in PASSES[mixer].items()) for index in range(3)
    )
    return int(forward), int(backward + states * sum(groups[:-1]) / sum(groups))
