"""The operations of a Mamba-2: project → core → out.

    operation   keeps for its backward                                             bytes of a token, w per element
    core        z, x, B, C and dt as projected; the scan's output; statistics      w (3I + 2GS + N) + 4G

I: width of the N heads of this rank of tp, G groups, S numbers of state for each dim. The core computes the convolution
and the states again, as ``MambaSplitConv1dScanCombinedFn`` of mamba-ssm does. The scan computes chunks of C tokens by
matmuls, several chunks at once (``model/mixers/chunk_groups.py``). FLOPs of n chunks and a head, with heads of h dims
and J heads with the same B and C:

    n (2C²S/J + 2C²h)    pairs of tokens: C·B, which J heads share, and their product with x
    n 4CSh               the state: its part of the output, its update
    2 (n + 1)² Sh        the states between the chunks; 2 n² Sh in the last group, 0 if n is 1

A single chunk has no state if it is the first one, and updates none if it is the last. ``trainer/model/mixers/
mamba2.py`` runs them.
"""

from __future__ import annotations

from collections.abc import Sequence

from fivefold.model.mixers.chunk_groups import split_into_groups
from fivefold.model.mixers.mamba2 import Mamba2
from fivefold.planner.counts.operations.chunks import (
    ChunkGroup,
    count_hand_on_flops,
    count_state_bytes,
    split_sequence,
    sum_flops,
)
from fivefold.planner.counts.operations.launches import (
    GATE_LAUNCHES,
    count_convolution_launches,
    count_launched_bytes,
    count_launches,
)
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
    fused = not local.job.stack.launches_scan("mamba2")
    chunks, groups = split_into_groups(tokens, net.chunk), split_sequence(local, net, fused=fused)
    heads = local.part.sequences * net.heads // local.part.cp
    forward, backward = (local.part.sequences * flops // local.part.cp for flops in scan_flops(groups, net))
    causal = local.part.sequences * scan_flops(chunks, net)[0] // local.part.cp
    states = 4 * len(chunks) * heads * net.head_dim * net.state  # bytes of all states
    statistics = {"og.stat": 4 * rows * net.groups} if has_norm else {}
    scanned = rows * (convolved + net.heads + inner) * width
    gradients = (
        net.conv_width * net.taps,
        *((net.conv_width,) if net.conv_bias else ()),
        *(net.heads,) * 3,
        *((inner,) if has_norm else ()),
    )
    forward_scratch, backward_scratch = _count_scratch(local, net, groups)
    return Op(
        "mixer.core",
        "scan",
        ("projected",),
        {"og": rows * inner * width, "o": rows * inner * width, **statistics},
        keeps=("projected", "o", *statistics),
        parameters=sum(gradients),
        wgrad_numels=gradients,
        flops=forward,
        causal_flops=causal,
        backward_flops=backward,
        shape=(chunks[0], chunks[0], net.head_dim),
        batch=heads * len(chunks),
        fused=fused,
        launches=_count_launches(net, groups, fused=fused),
        launched_bytes=_count_launched_bytes(net.shard(local.part.cp), local.part.sequences, groups),
        # convolution: x, B, C in and out; scan: these, dt, o and the states; gate: o, z and its output
        moved_bytes=2 * rows * convolved * width + scanned + 2 * states + 3 * rows * inner * width,
        moved_backward_bytes=5 * rows * convolved * width + 3 * scanned + 6 * states + 6 * rows * inner * width,
        forward_scratch=forward_scratch,
        backward_scratch=backward_scratch,
        scratch_tensor=max(4 * rows * convolved, 4 * heads * groups[0] * max(chunks[0], net.head_dim)),
    )


def _count_launches(net: Mamba2, groups: Sequence[int], *, fused: bool) -> tuple[int, int]:
    """Return the kernels of the core, forward and backward; those of a fused scan run by themselves."""
    launches = count_launches("mamba2", groups, net.chunk, fused=fused)
    if not fused:
        return launches
    parts = launches, count_convolution_launches(1, net.taps), GATE_LAUNCHES
    return sum(forward for forward, _ in parts), sum(backward for _, backward in parts)


def _count_launched_bytes(net: Mamba2, sequences: int, groups: Sequence[int]) -> tuple[int, int]:
    """Return the bytes that the kernels other than matmuls read and write; for names see ``count_scan_scratch``."""
    tokens = sum(groups)
    size, numbers = min(net.chunk, tokens), 4 * sequences * tokens
    sizes = {
        "pairs": numbers * size * net.heads,
        "dims": numbers * net.inner_width,
        "shared_pairs": numbers * size * net.groups,
        "shared_dims": numbers * net.groups * net.state,
        "states": 4 * sequences * (tokens // size + len(groups)) * net.inner_width * net.state,
    }
    return count_launched_bytes("mamba2", groups, sizes)


def _count_scratch(local: Local, net: Mamba2, groups: Sequence[int]) -> tuple[int, int]:
    """Return the bytes of scratch of the forward and of the backward: the most of convolution, scan and gate."""
    width = local.width
    is_wide = local.width == 4
    inner = local.rows * net.inner_width
    convolved = local.rows * net.conv_width  # elements
    gate, gate_backward = {
        "after_gate": (4 if is_wide else 8, 16 if is_wide else 24),
        "before_gate": (4 if is_wide else 12, 20 if is_wide else 28),
        "none": (0 if is_wide else 6, 8 if is_wide else 16),
    }[net.norm]
    scan, scan_backward = count_scan_scratch(net.shard(local.part.cp), local.part.sequences, groups, is_wide=is_wide)
    return (
        max(convolved * width + scan - inner * width, gate * inner),
        max((convolved + inner) * width + scan_backward, gate_backward * inner, (8 if is_wide else 12) * convolved),
    )


def count_scan_scratch(net: Mamba2, sequences: int, groups: Sequence[int], *, is_wide: bool) -> tuple[int, int]:
    """Return the bytes of temporaries of the scan of ``net``, forward and backward, the output not among them.

    ``pairs``, ``dims``, ``shared_pairs``, ``shared_dims``: bytes in fp32 of a group's pairs of tokens in a chunk, of
    its heads' dims, of the pairs, and of B or C, that heads share; ``state``: bytes of one state; ``states``: bytes of
    all states between the chunks of a group.
    """
    size, tokens = min(net.chunk, groups[0]), groups[0]
    chunks = tokens // size
    dims = 4 * sequences * tokens * net.inner_width
    pairs = 4 * sequences * tokens * size * net.heads
    shared_pairs = 4 * sequences * tokens * size * net.groups
    shared_dims = 4 * sequences * tokens * net.groups * net.state
    state = 4 * sequences * net.inner_width * net.state
    cast = 0 if is_wide else dims + 2 * shared_dims
    has_after = len(groups) > 1
    states, added, after = count_state_bytes(groups, net.chunk, state)
    handed_on = added + 3 * states + dims if chunks > 1 else 0
    scan = cast + dims + max(2 * pairs + shared_pairs + states + after, handed_on)
    copies = 4 if chunks > 1 or has_after else 2  # of dims, by matmuls and sums that read them in another order
    shared_copies = 4 if chunks > 1 or sequences > 1 else 0
    scan_backward = cast + (copies + (not is_wide) + 1) * dims + 4 * pairs + 2 * shared_pairs
    scan_backward += shared_copies * shared_dims + added + (1 + has_after) * states + (len(groups) - 1) * state
    return scan, scan_backward


def scan_flops(groups: Sequence[int], net: Mamba2) -> tuple[int, int]:
    """Return the FLOPs of the forward and of the backward of one sequence, in groups of these tokens.

    The backward computes the states again, then each group, then twice the FLOPs of its matmuls.
    """

    def count_flops(group: ChunkGroup) -> tuple[int, int]:
        pairs = 2 * group.tokens * group.size * (net.groups * net.state + net.inner_width)
        through_state = 2 * group.tokens * net.state * net.inner_width
        products = pairs + (group.reads_states + group.makes_states) * through_state
        products += count_hand_on_flops(group, net.state * net.inner_width)
        return products, 3 * products + group.updates * through_state

    return sum_flops(groups, net.chunk, count_flops)
