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
from fivefold.planner.counts.operations.chunks import ChunkGroup, count_hand_on_flops, split_sequence, sum_flops
from fivefold.planner.counts.operations.launches import (
    GATE_LAUNCHES,
    count_convolution_launches,
    count_launched_bytes,
    count_launches,
)
from fivefold.planner.counts.operations.linear import LinearInput, list_row_parallel
from fivefold.planner.counts.operations.local_shapes import Local
from fivefold.planner.counts.operations.mixers.gated_delta_net import list_swapped
from fivefold.planner.counts.operations.mixers.symbolic_scan import ScanInputs, count_scratch, decay_pairs, hand_on_sums
from fivefold.planner.counts.operations.op import Op, elementwise, rename_tensors
from fivefold.planner.counts.operations.symbolic import Tensor, addcmul


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
    moved = _count_fused_bytes(local, net, states) if fused else _count_bytes(local, net, states)
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
        convolved=rows * convolved if fused else 0,
        gated=rows * inner if fused else 0,
        launches=_count_launches(net, groups, fused=fused),
        launched_bytes=_count_launched_bytes(net.shard(local.part.cp), local.part.sequences, groups),
        moved_bytes=moved[0],
        moved_backward_bytes=moved[1],
        forward_scratch=forward_scratch,
        backward_scratch=backward_scratch,
        scratch_tensor=max(4 * rows * convolved, 4 * heads * groups[0] * max(chunks[0], net.head_dim)),
    )


def _count_bytes(local: Local, net: Mamba2, states: int) -> tuple[int, int]:
    """Return the bytes that move, forward and backward, if each part reads and writes its tensors once.

    Convolution: x, B, C in and out; scan: these, dt, o and the states; gate: o, z and its output.
    """
    convolved, inner = (local.rows * columns * local.width for columns in (net.conv_width, net.inner_width))
    scanned = convolved + local.rows * net.heads * local.width + inner
    return 2 * convolved + scanned + 2 * states + 3 * inner, 5 * convolved + 3 * scanned + 6 * states + 6 * inner


def _count_fused_bytes(local: Local, net: Mamba2, states: int) -> tuple[int, int]:
    """Return the bytes that the kernels of mamba-ssm's scan read and write, forward and backward.

    They are those of ``ssd_combined.py`` of state-spaces/mamba@e9594ce, in the order of x, B or C, the states of all
    chunks in fp32, and C·B of all pairs of a chunk in fp32:

        forward    states of chunks (1, 1, 1), handed on (1 + h), C·B (2, and 1), output (2, 1, h, and 1)
        backward   C·B (2, and 1) and states again (1, 1, 3), their gradients (1, 1, 1), handed on (2 + 2h),
                   x (3, 1, h, and 1), B (1, 1, h), C (1, 1, h), C·B (2, and 3: a sum of parts), through C·B (4, and 2),
                   decays (2, and 1)

    h: half of a state, in 16 bits. Gradients of B and C are written, summed and added in fp32, four times each. Decays
    and steps, about a hundredth, are left out.
    """
    width = local.width
    x, shared = local.rows * net.inner_width * width, local.rows * net.groups * net.state * width
    low_states = states * width // 4
    pairs = 4 * local.rows * min(net.chunk, local.job.sequence) * net.groups
    summed = 4 * local.rows * net.groups * net.state
    return (
        3 * x + 4 * shared + 2 * states + 2 * low_states + 2 * pairs,
        11 * x + 11 * shared + 8 * summed + 6 * states + 5 * low_states + 8 * pairs,
    )


def _count_launches(net: Mamba2, groups: Sequence[int], *, fused: bool) -> tuple[int, int]:
    """Return the kernels of the core, forward and backward; those of a fused scan run by themselves."""
    launches = count_launches("mamba2", groups, net.chunk, fused=fused)
    if not fused:
        return launches
    parts = launches, count_convolution_launches(1, net.taps), GATE_LAUNCHES
    return sum(forward for forward, _ in parts), sum(backward for _, backward in parts)


def _count_launched_bytes(net: Mamba2, sequences: int, groups: Sequence[int]) -> tuple[int, int]:
    """Return the bytes that the kernels other than matmuls read and write.

    ``pairs``, ``dims``, ``shared_pairs``, ``shared_dims``: bytes in fp32 of all pairs of tokens in a chunk, of the
    heads' dims, of the pairs, and of B or C, that heads share; ``states``: bytes of all states between chunks.
    """
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
    scan, scan_backward = count_scan_scratch(net.shard(local.part.cp), local.part.sequences, groups, width=width)
    return (
        max(convolved * width + scan - inner * width, gate * inner),
        max((convolved + inner) * width + scan_backward, gate_backward * inner, (8 if is_wide else 12) * convolved),
    )


def count_scan_scratch(net: Mamba2, sequences: int, groups: Sequence[int], *, width: int) -> tuple[int, int]:
    """Return the bytes of temporaries of the scan of ``net``, forward and backward, the output not among them."""
    columns, factors = (net.conv_width, net.heads), (net.heads,) * 3
    inputs = ScanInputs(columns, factors, net.inner_width, sequences, width)
    return count_scratch(compute_chunks, net, inputs, groups)


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


def compute_chunks(
    inputs: Sequence[Tensor], state: Tensor | None, *, net: Mamba2, is_last: bool = False, only_state: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Run ``compute_chunks`` of ``trainer/model/mixers/mamba2.py`` with symbolic tensors."""
    xbc, dt, a_log, dt_bias, d = inputs
    heads = (net.groups, net.heads // net.groups)
    size = xbc.shape[1] if only_state else min(net.chunk, xbc.shape[1])
    chunked = xbc.cast(4).unflatten(1, (-1, size))
    x, b, c = chunked.split(-1, (net.inner_width, *[net.groups * net.state] * 2))
    b, c = (part.unflatten(-1, (net.groups, -1)).transpose(2, 3) for part in (b, c))
    x = x.unflatten(-1, (*heads, -1)).permute(0, 1, 3, 4, 2, 5)
    step = (dt.cast(4) + dt_bias.cast(4)).softplus().clamp()
    decay, step = (
        part.unflatten(1, (-1, size)).transpose(2, 3).unflatten(2, heads)
        for part in (step * a_log.cast(4).exp().neg(), step)
    )
    decay = decay.cumsum()
    driven = x * step.unsqueeze(-1)
    last = decay.narrow(-1, 1)
    before: Tensor | None = None
    after: Tensor | None = None
    if not is_last or chunked.shape[1] > 1:
        added = b.mT @ (driven * (last - decay).exp().unsqueeze(-1)).transpose(3, 4).flatten(4)
        before, after = hand_on_sums(added, last.select(-1), state, is_last=is_last)
        del added
    elif state is not None:
        before = state.unsqueeze(1)
    if only_state:
        return xbc, after
    out = ((c @ b.mT).tril().unsqueeze(3) * decay_pairs(decay)) @ driven
    out = addcmul(out, x, d.cast(4).reshape(*heads, 1, 1))
    if before is not None:
        read = (c @ before).unflatten(-1, (heads[1], -1)).transpose(3, 4)
        out = addcmul(out, read, decay.exp().unsqueeze(-1))
    return out.permute(0, 1, 4, 2, 3, 5).flatten(3).flatten(1, 2), after
