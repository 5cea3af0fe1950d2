"""The operations of a Gated DeltaNet: q, k, v, z, b, a → conv → scan → gate → out.

    operation   keeps for its backward                                           bytes of a token, w per element
    conv        q, k, v of the projection                                        w (2K + V)
    scan        q, k, v of the convolution, b, a; computes its states again      w (2K + V + 2N)
    gate        the scan's output, z, one fp32 statistic per head                w 2V + 4N

K and V: widths of the keys and of the values of this rank of tp, N its value heads. The scan computes chunks of C
tokens by matmuls of its value heads. FLOPs of a chunk and head, with heads of k and v dims:

    4C²k + 4C²v + C³    pairs of tokens: β k·k, q·k, the inverse of a triangle, its product with v, the output
    6Ckv                the state: what it predicts, its part of the output, its update

The first chunk has no state, the last one updates none. ``trainer/model/mixers/gated_delta_net.py`` runs them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from fivefold.model.mixers.gated_delta_net import CHUNK, GatedDeltaNet
from fivefold.planner.counts.operations.chunks import group_chunks
from fivefold.planner.counts.operations.launches import count_launches
from fivefold.planner.counts.operations.linear import LinearInput, list_row_parallel
from fivefold.planner.counts.operations.local_shapes import Local
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
        moved_bytes=3 * size,
        moved_backward_bytes=5 * size,
        forward_scratch=4 * rows * V * (1 if is_wide else 2),
        backward_scratch=rows * V * (16 - width + kept_sigmoid if is_wide else 16),
        scratch_tensor=4 * rows * V,
    )


def _scan(local: Local, net: GatedDeltaNet) -> Op:
    """Return the gated delta rule over all chunks."""
    rows, width, tokens, N = local.rows, local.width, local.job.sequence, net.value_heads
    chunks = [CHUNK] * (tokens // CHUNK) + ([tokens % CHUNK] if tokens % CHUNK else [])
    heads = local.part.sequences * N // local.part.cp
    forward, backward = (heads * flops for flops in scan_flops(chunks, key_dim=net.key_dim, value_dim=net.value_dim))
    state = 4 * heads * net.key_dim * net.value_dim  # bytes
    # fp32 numbers of a token and head in a chunk: of its keys, values and pairs
    chunk_rows = heads * chunks[0]
    largest = net.key_dim + net.value_dim + chunks[0]
    moved = rows * (2 * net.key_width + 2 * net.value_width) * width + 2 * len(chunks) * state
    return Op(
        "mixer.core.scan",
        "scan",
        ("qc", "kc", "vc", "b", "dt"),
        {"o": rows * net.value_width * width},
        keeps=("qc", "kc", "vc", "b", "dt"),
        parameters=2 * N,
        wgrad_numels=(N, N),
        flops=forward,
        causal_flops=forward,
        backward_flops=backward,
        shape=(chunks[0], chunks[0], net.key_dim),
        batch=heads * len(chunks),
        launches=count_launches("gated_delta_net", len(chunks)),
        moved_bytes=moved,
        moved_backward_bytes=3 * moved,
        forward_scratch=4 * 3 * chunk_rows * largest + 2 * state,
        backward_scratch=4 * (28 if width == 4 else 30) * chunk_rows * largest // 4 + (len(chunks) + 2) * state,
        scratch_tensor=max(state, 4 * chunk_rows * max(net.key_dim, net.value_dim, chunks[0])),
    )


def scan_flops(chunks: Sequence[int], *, key_dim: int, value_dim: int) -> tuple[int, int]:
    """Return the FLOPs of one sequence and head in chunks of these tokens: of the forward, and of the backward.

    The backward computes the states again, then each chunk, then twice the FLOPs of its matmuls; the inverse of a
    triangle of C tokens takes C³, and its backward 4C³.
    """
    forward = backward = 0
    for tokens, has_state, updates, count in group_chunks(chunks):
        pairs = 2 * tokens * tokens
        through_state = 2 * tokens * key_dim * value_dim
        of_state = pairs * (key_dim + value_dim) + has_state * through_state  # what the next state needs
        of_output = pairs * (key_dim + value_dim) + has_state * through_state
        products = of_state + of_output + updates * through_state
        forward += count * (products + tokens**3)
        backward += count * (3 * products + 5 * tokens**3 + updates * (of_state + through_state + tokens**3))
    return forward, backward
