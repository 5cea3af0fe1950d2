"""The operations of an RG-LRU: x, y → core → out.

    operation   keeps for its backward                            bytes of a token, w per element
    core        x and y as projected; the states                  w 3I

I channels of this rank of tp, in blocks of b for the gates. The core computes the convolution and the gates again. Its
FLOPs are those of the gates' matmuls, 2 · 2 I b of each row, of which the backward computes both again. The scan is
elementwise: as with norms and activations, its operations are not counted. ``trainer/model/mixers/rg_lru.py`` runs
them.
"""

from __future__ import annotations

from fivefold.model.mixers.rg_lru import RGLRU
from fivefold.planner.counts.operations.chunks import split_sequence
from fivefold.planner.counts.operations.launches import count_launched_bytes, count_launches
from fivefold.planner.counts.operations.linear import LinearInput, list_row_parallel
from fivefold.planner.counts.operations.local_shapes import Local
from fivefold.planner.counts.operations.mixers.gated_delta_net import list_swapped
from fivefold.planner.counts.operations.op import Op
from fivefold.units import ceil_div


def operations(local: Local, source: str) -> list[Op]:
    """List the operations ``source`` [stream rows, D] → ``a`` [stream rows, D]."""
    model, net = local.model, local.model.rg_lru
    assert net is not None
    net = net.shard(local.part.tp)
    entry = LinearInput(local, source, in_features=model.width, rows=local.stream_rows)
    columns = [entry.column(f"mixer.{name}", f"{name}l", out_features=net.inner, bias=True) for name in "xy"]
    return [
        *entry.ops,
        *columns,
        *list_swapped(
            local,
            [_build_core(local, net)],
            sizes=dict.fromkeys(("xl", "yl"), net.inner),
            out_features=net.inner,
            out="og",
        ),
        *list_row_parallel(local, "mixer.out", "og", "a", in_features=net.inner, out_features=model.width, bias=True),
    ]


def _build_core(local: Local, net: RGLRU) -> Op:
    """Return convolution, gates, scan and the gate on the output."""
    rows, width, tokens, inner, cp = local.rows, local.width, local.job.sequence, net.inner, local.part.cp
    fused = not local.job.stack.launches_scan("rg_lru")
    size, groups = rows * inner * width, split_sequence(local, net, fused=fused)
    gradients = (inner * net.taps, inner, *(inner * net.block_width, inner) * 2, inner)
    flops = rows * count_gate_flops(net)
    # fp32 numbers of the channels of a group; the scan holds several
    state = 4 * local.part.sequences * inner // cp  # bytes
    states, chunks = groups[0] * state, ceil_div(tokens, net.chunk)
    return Op(
        "mixer.core",
        "scan",
        ("xl", "yl"),
        {"og": size, "o": size},
        keeps=("xl", "yl", "o"),
        parameters=sum(gradients),
        wgrad_numels=gradients,
        flops=flops,
        causal_flops=flops,
        backward_flops=3 * flops,
        shape=(rows * cp, net.block_width, net.block_width),
        batch=2 * net.blocks // cp,
        launches=count_launches("rg_lru", groups, net.chunk),
        launched_bytes=count_launched_bytes("rg_lru", groups, {"channels": tokens * state}),
        # convolution: x in and out; gates: x in, two logits out; scan: these in, the states out; gate: these, y, output
        moved_bytes=12 * size + 2 * chunks * state,
        moved_backward_bytes=30 * size + 4 * chunks * state,
        forward_scratch=3 * size + 5 * states,
        backward_scratch=6 * size + (11 + 2 * (width == 2) + (len(groups) > 1)) * states + (len(groups) + 2) * state,
        scratch_tensor=max(size, states),
    )


def count_gate_flops(net: RGLRU) -> int:
    """Return the FLOPs of a token in the gates of a layer's core, forward; the backward takes three times as many."""
    return 2 * 2 * net.inner * net.block_width
