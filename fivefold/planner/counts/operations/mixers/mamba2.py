"""The operations of a Mamba-2: project → core → out.

    operation   keeps for its backward                                             bytes of a token, w per element
    core        z, x, B, C and dt as projected; the scan's output; statistics      w (3I + 2GS + N) + 4G

I: width of the N heads of this rank of tp, G groups, S numbers of state for each dim. The core computes the convolution
and the states again, as ``MambaSplitConv1dScanCombinedFn`` of mamba-ssm does. The scan computes chunks of C tokens by
matmuls. FLOPs of a chunk and head, with heads of h dims and J heads in a group:

    2C²S/J + 2C²h    pairs of tokens: C·B, which a group shares, and their product with x
    4CSh             the state: its part of the output, its update

The first chunk has no state, the last one updates none. ``trainer/model/mixers/mamba2.py`` runs them.
"""

from __future__ import annotations

from collections.abc import Sequence

from fivefold.model.mixers.mamba2 import Mamba2
from fivefold.planner.counts.operations.chunks import group_chunks
from fivefold.planner.counts.operations.launches import count_launches
from fivefold.planner.counts.operations.linear import LinearInput, list_row_parallel
from fivefold.planner.counts.operations.local_shapes import Local
from fivefold.planner.counts.operations.mixers.gated_delta_net import list_swapped
from fivefold.planner.counts.operations.op import Op, elementwise, rename_tensors


def operations(local: Local, source: str) -> list[Op]:
    """List the operations ``source`` [stream rows, D] → ``a`` [stream rows, D]."""
    model, net = local.model, local.model.mamba2
    assert net is not None
    net = net.shard(local.part.tp)
    entry = LinearInput(local, source, in_features=model.width, rows=local.stream_rows)
    project = entry.column("mixer.project", "projected", out_features=net.projected_width, bias=net.bias)
    ops = [*entry.ops, project]
    if model.multipliers is not None and set(model.multipliers.mixer_parts) - {1.0}:  # a factor on each column
        size = local.rows * net.projected_width * local.width
        ops.append(elementwise("mixer.project.scale", "activation", ("projected",), "scaled", size=size))
    projected = next(iter(ops[-1].writes))
    core = rename_tensors(_build_core(local, net), {"projected": projected})
    return [
        *ops,
        *list_swapped(local, [core], sizes={projected: net.projected_width}, out_features=net.inner_width, out="og"),
        *list_row_parallel(
            local, "mixer.out", "og", "a", in_features=net.inner_width, out_features=model.width, bias=net.bias
        ),
    ]


def _build_core(local: Local, net: Mamba2) -> Op:
    """Return convolution, scan, gate and norm."""
    rows, width, tokens = local.rows, local.width, local.job.sequence
    inner = net.inner_width
    convolved = net.conv_width
    has_norm = net.norm != "none"
    chunks = split_chunks(tokens, net.chunk)
    heads = local.part.sequences * net.heads // local.part.cp
    forward, backward = (local.part.sequences * flops // local.part.cp for flops in scan_flops(chunks, net))
    states = 4 * len(chunks) * heads * net.head_dim * net.state  # bytes of all states
    statistics = {"og.stat": 4 * rows * net.groups} if has_norm else {}
    scanned = rows * (convolved + net.heads + inner) * width
    gradients = (
        net.conv_width * net.taps,
        *((net.conv_width,) if net.conv_bias else ()),
        *(net.heads,) * 3,
        *((inner,) if has_norm else ()),
    )
    forward_scratch, backward_scratch = _count_scratch(local, net, chunks)
    return Op(
        "mixer.core",
        "scan",
        ("projected",),
        {"og": rows * inner * width, "o": rows * inner * width, **statistics},
        keeps=("projected", "o", *statistics),
        parameters=sum(gradients),
        wgrad_numels=gradients,
        flops=forward,
        causal_flops=forward,
        backward_flops=backward,
        shape=(chunks[0], chunks[0], net.head_dim),
        batch=heads * len(chunks),
        launches=count_launches("mamba2", len(chunks)),
        # convolution: x, B, C in and out; scan: these, dt, o and the states; gate: o, z and its output
        moved_bytes=2 * rows * convolved * width + scanned + 2 * states + 3 * rows * inner * width,
        moved_backward_bytes=5 * rows * convolved * width + 3 * scanned + 6 * states + 6 * rows * inner * width,
        forward_scratch=forward_scratch,
        backward_scratch=backward_scratch,
        scratch_tensor=max(4 * rows * convolved, 4 * heads * chunks[0] * max(chunks[0], net.head_dim)),
    )


def _count_scratch(local: Local, net: Mamba2, chunks: Sequence[int]) -> tuple[int, int]:
    """Return the bytes of scratch of the forward and of the backward: the most of convolution, scan and gate.

    ``pairs``, ``dims``, ``shared``, ``state``: bytes in fp32 of a chunk's pairs of tokens, of its heads, of the pairs,
    B and C of its groups, and of a state.
    """
    width = local.width
    size = chunks[0]
    sequences = local.part.sequences
    is_wide = local.width == 4
    inner = local.rows * net.inner_width
    convolved = local.rows * net.conv_width  # elements
    tokens = sequences * size
    part = net.shard(local.part.cp)  # under cp the heads that this rank scans
    pairs, dims = 4 * tokens * size * part.heads, 4 * tokens * part.inner_width
    state = 4 * sequences * part.inner_width * part.state
    shared_pairs = 4 * tokens * size * part.groups
    shared_dims = 4 * tokens * part.groups * part.state
    gate, gate_backward = {
        "after_gate": (4 if is_wide else 8, 16 if is_wide else 24),
        "before_gate": (4 if is_wide else 12, 20 if is_wide else 28),
        "none": (0 if is_wide else 6, 8 if is_wide else 16),
    }[net.norm]
    scan = 2 * pairs + 5 * dims // 2 + shared_pairs + (4 * state if len(chunks) > 1 else 0)
    scan_backward = 5 * (pairs + dims) + shared_pairs + 4 * shared_dims
    if len(chunks) > 1:
        scan_backward += (len(chunks) + 1) * state
    return (
        max(convolved * width + scan - inner * width, gate * inner),
        max((convolved + inner) * width + scan_backward, gate_backward * inner, (8 if is_wide else 12) * convolved),
    )


def split_chunks(tokens: int, size: int) -> list[int]:
    """Return the tokens of each chunk of a sequence."""
    return [min(size, tokens - first) for first in range(0, tokens, size)]


def scan_flops(chunks: Sequence[int], net: Mamba2) -> tuple[int, int]:
    """Return the FLOPs of one sequence in chunks of these tokens: of the forward, and of the backward.

    The backward computes the states again, then each chunk, then twice the FLOPs of its matmuls.
    """
    forward = backward = 0
    for tokens, has_state, updates, count in group_chunks(chunks):
        pairs = 2 * tokens * tokens * (net.groups * net.state + net.inner_width)
        through_state = 2 * tokens * net.state * net.inner_width
        products = pairs + (has_state + updates) * through_state
        forward += count * products
        backward += count * (3 * products + updates * through_state)
    return forward, backward
