"""The operations of a Mamba: project → core → out.

    operation   keeps for its backward                            bytes of a token, w per element
    core        x and z as projected; dt, B and C; the scan's output      w (3I + r + 2S)

I channels with S numbers of state each, r: rank of the steps. The core computes the convolution, the steps and the
states again. ``MambaInnerFn`` of mamba-ssm keeps the same, and 8 S I bytes more per 2,048 tokens (states). Its FLOPs
are those of two matmuls of each row, 2 I (r + 2S) and 2 r I, of which the backward computes the second again. The scan
is elementwise: as with norms and activations, its about 9 operations of each of I S numbers are not counted. Under cp
a rank has some channels for all tokens, and dt, B and C, which all channels make, are summed over cp.
``trainer/model/mixers/mamba.py`` runs them.
"""

from __future__ import annotations

from fivefold.model.mixers.mamba import Mamba
from fivefold.planner.counts.operations.chunks import split_sequence
from fivefold.planner.counts.operations.launches import count_launched_bytes, count_launches
from fivefold.planner.counts.operations.linear import LinearInput, list_row_parallel
from fivefold.planner.counts.operations.local_shapes import Local
from fivefold.planner.counts.operations.mixers.gated_delta_net import list_swapped
from fivefold.planner.counts.operations.op import Op, OpMessage, exchange
from fivefold.units import ceil_div


def operations(local: Local, source: str) -> list[Op]:
    """List the operations of a Mamba layer from ``source`` to ``a``, both [stream rows, D].

    Stream rows: the rows of the residual stream that this rank holds (``local_shapes.py``).
    """
    model, net = local.model, local.model.mamba
    assert net is not None
    net = net.shard(local.part.tp)
    entry = LinearInput(local, source, in_features=model.width, rows=local.stream_rows)
    return [
        *entry.ops,
        entry.column("mixer.project", "xz", out_features=2 * net.inner, bias=net.bias),
        *list_swapped(local, _list_core(local, net), sizes={"xz": 2 * net.inner}, out_features=net.inner, out="og"),
        *list_row_parallel(
            local, "mixer.out", "og", "a", in_features=net.inner, out_features=model.width, bias=net.bias
        ),
    ]


def _list_core(local: Local, net: Mamba) -> list[Op]:
    """List convolution, selection, scan and gate, and under cp before them the sum of what all channels select."""
    rows, width, tokens, cp = local.rows, local.width, local.job.sequence, local.part.cp
    fused = not local.job.stack.launches_scan("mamba")
    size, groups = rows * net.inner * width, split_sequence(local, net, fused=fused)
    selected = sum(net.selected_widths)
    selected_bytes = rows * cp * selected * width  # of all tokens of a sequence
    state = 4 * local.part.sequences * net.inner * net.state // cp  # bytes
    forward, backward = scan_flops(net)
    gradients = (
        net.inner * net.taps,
        *((net.inner,) if net.conv_bias else ()),
        selected * net.inner,
        net.inner * net.rank,
        net.inner,
        net.inner * net.state,
        net.inner,
        *(net.selected_widths if net.norms == "weighted" else ()),
    )
    moved = 9 * size + selected_bytes + 2 * ceil_div(tokens, net.chunk) * state
    # fp32 states and channels of all tokens of a group: the scan holds several
    states = groups[0] * state
    channels = states // net.state
    later_states = max(states, 2 * states - 2 * net.chunk * state)  # and of those of all chunks but one, twice
    sizes = {"states": tokens * state, "channels": tokens * state // net.state}
    core = Op(
        "mixer.core",
        "scan",
        ("xz",),
        {"og": size, "o": size, "selected": selected_bytes},
        keeps=("xz", "o", "selected"),
        message=OpMessage("tp", "all_reduce", "all_reduce", selected_bytes) if local.part.tp > 1 else None,
        parameters=sum(gradients),
        wgrad_numels=gradients,
        flops=rows * forward,
        causal_flops=rows * forward,
        backward_flops=rows * backward,
        shape=(rows * cp, selected, net.inner // cp),
        launches=count_launches("mamba", groups, net.chunk),
        launched_bytes=count_launched_bytes("mamba", groups, sizes),
        moved_bytes=moved,
        moved_backward_bytes=2 * moved,
        forward_scratch=2 * size + 3 * states + 3 * channels,
        backward_scratch=(5 if width == 4 else 6) * size
        + 4 * states
        + later_states
        + (5 if width == 4 else 7) * channels
        + (len(groups) + 2) * state,
        scratch_tensor=max(size, states),
    )
    if cp == 1:
        return [core]
    sum_message = OpMessage("cp", "all_reduce", "all_reduce", selected_bytes)
    return [  # the core makes the gradient of the sum, and frees it
        exchange("mixer.core.sum", "xz", "selected", size=selected_bytes, message=sum_message),
        core._replace(reads=("xz", "selected"), writes={"og": size, "o": size}, differentiates=("xz",)),
    ]


def scan_flops(net: Mamba) -> tuple[int, int]:
    """Return the FLOPs of a token in a layer's core: of the forward, and of the backward."""
    select = 2 * net.inner * sum(net.selected_widths)
    step = 2 * net.rank * net.inner
    return select + step, 2 * select + 3 * step
