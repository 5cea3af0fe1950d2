"""The operations of a Gated DeltaNet: q, k, v, z, b, a → conv → scan → gate → out.

    operation   keeps for its backward                                           bytes of a token, w per element
    conv        q, k, v of the projection                                        w (2K + V)
    scan        q, k, v of the convolution, b, a; computes its states again      w (2K + V + 2N)
    gate        the scan's output, z, one fp32 statistic per head                w 2V + 4N

K and V: widths of the keys and of the values of this rank of tp, N its value heads. The scan computes chunks of C
tokens by matmuls of its value heads, several chunks at once (``model/mixers/chunk_groups.py``). Its FLOPs are those of
``delta_rule.py`` with P = 2C²k for each of two products. ``trainer/model/mixers/gated_delta_net.py`` runs them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from fivefold.model.mixers.chunk_groups import split_into_groups
from fivefold.model.mixers.gated_delta_net import DELTA_CHUNK, GatedDeltaNet
from fivefold.planner.counts.operations.chunks import ChunkGroup, count_state_bytes, split_sequence, sum_flops
from fivefold.planner.counts.operations.launches import (
    GATE_LAUNCHES,
    count_convolution_launches,
    count_launched_bytes,
    count_launches,
)
from fivefold.planner.counts.operations.linear import LinearInput, list_row_parallel
from fivefold.planner.counts.operations.local_shapes import Local
from fivefold.planner.counts.operations.mixers import delta_rule
from fivefold.planner.counts.operations.op import Op, rename_tensors, swap_heads


def operations(local: Local, source: str) -> list[Op]:
    """List the operations ``source`` [stream rows, D] → ``a`` [stream rows, D]."""
    model, net = local.model, local.model.gated_delta_net
    assert net is not None
    net = net.shard(local.part.tp)
    K, V, N = net.key_width, net.value_width, net.value_heads
    entry = LinearInput(local, source, in_features=model.width, rows=local.stream_rows)
    widths = {"q": K, "k": K, "v": V, "gate": V, "b": N, "dt": N}
    names = dict(
        zip(widths, ("q", "k", "v", "z", "b", "a"), strict=True)
    )  # the checkpoint's names; here "a" and "z" are the mixer's and the layer's output
    columns = [
        entry.column(f"mixer.{names[tensor]}", tensor, out_features=out_features)
        for tensor, out_features in widths.items()
    ]
    mixed = {"q": K, "k": K, "v": V, "b": N, "dt": N}
    scan = [list_convolution(local, {"q": K, "k": K, "v": V}, taps=net.taps), _scan(local, net)]
    return [
        *entry.ops,
        *columns,
        *list_swapped(local, scan, sizes=mixed, out_features=V),
        list_gate(local, heads=N, dim=net.value_dim),
        *list_row_parallel(local, "mixer.out", "og", "a", in_features=V, out_features=model.width, bias=False),
    ]


def list_swapped(
    local: Local, scan: Sequence[Op], *, sizes: Mapping[str, int], out_features: int, out: str = "o"
) -> list[Op]:
    """List the operations of ``scan``, which reads columns of ``sizes`` by tensor and writes ``out``.

    Under cp a rank computes some heads for all tokens: what it reads and writes is swapped (Ulysses).
    """
    if local.part.cp == 1:
        return list(scan)
    bytes_per_column = local.rows * local.width
    names = {name: f"{name}.all" for name in (*sizes, out)}
    return [
        *(swap_heads("mixer", name, names[name], size=size * bytes_per_column) for name, size in sizes.items()),
        *(rename_tensors(op, names) for op in scan),
        swap_heads("mixer", names[out], out, size=out_features * bytes_per_column),
    ]


def list_convolution(local: Local, sizes: Mapping[str, int], *, taps: int) -> Op:
    """Return the causal convolutions of q, k and v, ``sizes`` columns, and their SiLU; the sums are in fp32."""
    rows, width = local.rows, local.width
    total, parameters = sum(sizes.values()), sum(sizes.values()) * taps
    is_wide = width == 4
    scratch, left = 0, total  # left: columns whose gradients are not yet made
    for columns in sizes.values():
        scratch = max(scratch, (8 if is_wide else 12) * columns - width * left)
        left -= columns
    return Op(
        "mixer.core.conv",
        "scan",
        ("q", "k", "v"),
        {f"{name}c": rows * columns * width for name, columns in sizes.items()},
        keeps=("q", "k", "v"),
        parameters=parameters,
        wgrad_numels=(parameters,),
        launches=count_convolution_launches(len(sizes), taps),
        launched_bytes=(rows * total * (10 + 14 * taps), rows * total * (9 + 43 * taps)),
        moved_bytes=2 * rows * total * width,
        moved_backward_bytes=3 * rows * total * width,
        forward_scratch=0 if is_wide else 4 * rows * sizes["v"],
        backward_scratch=rows * scratch,
        scratch_tensor=4 * rows * max(sizes.values()),
    )


def list_gate(local: Local, *, heads: int, dim: int, gate: Literal["silu", "sigmoid"] = "silu") -> Op:
    """Return the norm of each head's output, times the SiLU or the sigmoid of its gate."""
    rows, width, V = local.rows, local.width, heads * dim
    size, is_wide = rows * V * width, width == 4
    kept_sigmoid = 4 if gate == "sigmoid" and is_wide else 0  # bytes per element; of a cast it takes the place
    return Op(
        "mixer.core.gate",
        "scan",
        ("o", "gate"),
        {"og": size, "og.stat": 4 * rows * heads},
        keeps=("o", "gate", "og.stat"),
        parameters=dim,
        wgrad_numels=(dim,),
        launches=GATE_LAUNCHES,
        launched_bytes=(48 * rows * V, 148 * rows * V),
        moved_bytes=3 * size,
        moved_backward_bytes=5 * size,
        forward_scratch=4 * rows * V * (1 if is_wide else 2),
        backward_scratch=rows * V * (16 - width + kept_sigmoid if is_wide else 16),
        scratch_tensor=4 * rows * V,
    )


def _scan(local: Local, net: GatedDeltaNet) -> Op:
    """Return the gated delta rule over all chunks."""
    rows, width, tokens, N = local.rows, local.width, local.job.sequence, net.value_heads
    fused = not local.job.stack.launches_scan("gated_delta_net")
    chunks, groups = split_into_groups(tokens, net.chunk), split_sequence(local, net, fused=fused)
    held = net.shard(local.part.cp)
    sizes = _count_sizes(held, local.part.sequences, tokens)
    heads = local.part.sequences * held.value_heads
    forward, backward = (heads * flops for flops in scan_flops(groups, key_dim=net.key_dim, value_dim=net.value_dim))
    causal, _ = scan_flops(chunks, key_dim=net.key_dim, value_dim=net.value_dim)
    state = 4 * heads * net.key_dim * net.value_dim  # bytes
    moved = rows * (2 * net.key_width + 2 * net.value_width) * width + 2 * len(chunks) * state
    forward_scratch, backward_scratch = count_scan_scratch(held, local.part.sequences, groups, is_wide=width == 4)
    return Op(
        "mixer.core.scan",
        "scan",
        ("qc", "kc", "vc", "b", "dt"),
        {"o": rows * net.value_width * width},
        keeps=("qc", "kc", "vc", "b", "dt"),
        parameters=2 * N,
        wgrad_numels=(N, N),
        flops=forward,
        causal_flops=heads * causal,
        backward_flops=backward,
        shape=(chunks[0], chunks[0], net.key_dim),
        batch=heads * len(chunks),
        fused=fused,
        launches=count_launches("gated_delta_net", groups, net.chunk, fused=fused),
        launched_bytes=count_launched_bytes("gated_delta_net", groups, sizes),
        moved_bytes=moved,
        moved_backward_bytes=3 * moved,
        forward_scratch=forward_scratch,
        backward_scratch=backward_scratch,
        scratch_tensor=max(_count_sizes(held, local.part.sequences, groups[0]).values()),
    )


def _count_sizes(net: GatedDeltaNet, sequences: int, tokens: int) -> dict[str, int]:
    """Return the bytes of temporaries in fp32 of ``tokens`` of each sequence.

    ``pairs``: pairs of tokens in a chunk, over all heads; ``keys``, ``values``: keys and values of all value heads;
    ``shared_keys``: keys of the key heads; ``states``: states of the chunks.
    """
    size, numbers = min(net.chunk, tokens), 4 * sequences * tokens
    return {
        "pairs": numbers * size * net.value_heads,
        "keys": numbers * net.value_heads * net.key_dim,
        "values": numbers * net.value_width,
        "shared_keys": numbers * net.key_width,
        "states": numbers // size * net.value_heads * net.key_dim * net.value_dim,
    }


def count_scan_scratch(net: GatedDeltaNet, sequences: int, groups: Sequence[int], *, is_wide: bool) -> tuple[int, int]:
    """Return the bytes of temporaries of the scan of ``net``, forward and backward, the output not among them.

    The backward is largest when the states' gradients are made, or, with small heads, those of the pairs.
    """
    pairs, keys, values, shared_keys, states = _count_sizes(net, sequences, groups[0]).values()
    state = 4 * sequences * net.value_heads * net.key_dim * net.value_dim
    after = count_state_bytes(groups, net.chunk, state).after
    kept = (len(groups) - 1) * state + after
    if groups[0] > net.chunk:
        forward = 5 * keys + 4 * pairs + shared_keys + 6 * values + states + after
        of_states = 8 * keys + 6 * pairs + (7 - is_wide) * values + 4 * states
        of_pairs = 6 * keys + 9 * pairs + (4 - is_wide) * values
    elif len(groups) > 1:
        forward = 3 * keys + 4 * pairs + shared_keys + max(5 * values, 3 * (values + state)) + after
        of_states = 7 * keys + 6 * pairs + (7 - is_wide) * values + 2 * state
        of_pairs = 7 * keys + 9 * pairs + (4 - is_wide) * values
    else:
        forward = 3 * keys + 4 * pairs + shared_keys + 5 * values
        of_states = 3 * keys + 7 * pairs + (6 - is_wide) * values
        of_pairs = 3 * keys + 9 * pairs + (3 - is_wide) * values
    return forward, kept + 2 * shared_keys + max(of_states, of_pairs)


def scan_flops(groups: Sequence[int], *, key_dim: int, value_dim: int) -> tuple[int, int]:
    """Return the FLOPs of one sequence and head in groups of these tokens: of the forward, and of the backward."""

    def count_flops(group: ChunkGroup) -> tuple[int, int]:
        pairs = 2 * group.size**2 * key_dim
        return delta_rule.count_flops(group, pairs=pairs, key_dim=key_dim, value_dim=value_dim)

    return sum_flops(groups, DELTA_CHUNK, count_flops)
