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
from fivefold.planner.counts.operations.chunks import ChunkGroup, split_sequence, sum_flops
from fivefold.planner.counts.operations.launches import (
    GATE_LAUNCHES,
    count_convolution_launches,
    count_launched_bytes,
    count_launches,
)
from fivefold.planner.counts.operations.linear import LinearInput, list_row_parallel
from fivefold.planner.counts.operations.local_shapes import Local
from fivefold.planner.counts.operations.mixers import delta_rule
from fivefold.planner.counts.operations.mixers.symbolic_scan import (
    ScanInputs,
    apply_delta_rule,
    compute_decay,
    count_scratch,
    decay_pairs,
    normalize_to_unit_length,
    split_heads,
)
from fivefold.planner.counts.operations.op import Op, rename_tensors, swap_heads
from fivefold.planner.counts.operations.symbolic import Tensor


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
    forward_scratch, backward_scratch = count_scan_scratch(held, local.part.sequences, groups, width=width)
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


def count_scan_scratch(net: GatedDeltaNet, sequences: int, groups: Sequence[int], *, width: int) -> tuple[int, int]:
    """Return the bytes of temporaries of the scan of ``net``, forward and backward, the output not among them."""
    heads, columns = net.value_heads, (net.key_width, net.key_width, net.value_width)
    inputs = ScanInputs((*columns, heads, heads), (heads, heads), net.value_width, sequences, width)
    return count_scratch(compute_chunks, net, inputs, groups)


def scan_flops(groups: Sequence[int], *, key_dim: int, value_dim: int) -> tuple[int, int]:
    """Return the FLOPs of one sequence and head in groups of these tokens: of the forward, and of the backward."""

    def count_flops(group: ChunkGroup) -> tuple[int, int]:
        pairs = 2 * group.size**2 * key_dim
        return delta_rule.count_flops(group, pairs=pairs, key_dim=key_dim, value_dim=value_dim)

    return sum_flops(groups, DELTA_CHUNK, count_flops)


def compute_chunks(
    inputs: Sequence[Tensor],
    state: Tensor | None,
    *,
    net: GatedDeltaNet,
    is_last: bool = False,
    only_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Run ``compute_chunks`` of ``trainer/model/mixers/gated_delta_net.py`` with symbolic tensors."""
    q, k, v, b, a, a_log, dt_bias = inputs
    repeats = net.value_heads // net.key_heads
    k = normalize_to_unit_length(split_heads(k, net.key_heads)).repeat_interleave(repeats, 2)
    beta = split_heads(b, net.value_heads).sigmoid()
    if net.negative_eigenvalues:
        beta = beta * 2
    a_log, dt_bias = (factor.unsqueeze(1).unsqueeze(2) for factor in (a_log, dt_bias))
    decay = compute_decay(split_heads(a, net.value_heads), a_log, dt_bias, is_bounded=False)
    decay = decay.cumsum()
    pairs = decay_pairs(decay.select(-1)).tril()
    lefts = [k * beta]
    if not only_state:
        q = normalize_to_unit_length(split_heads(q, net.key_heads)) * 1
        lefts.append(q.repeat_interleave(repeats, 2))
    products = [(left @ k.mT) * pairs for left in lefts]
    return apply_delta_rule(lefts, k, split_heads(v, net.value_heads), beta, decay, products, state, is_last=is_last)
