"""The operations of a gated short convolution: project → core → out.

The core, C · conv(B · x), keeps only its input [R, 3D] and computes the convolution again in its backward
(``trainer/model/mixers/short_conv.py``). A depthwise convolution of a few taps is memory-bound; as with norms and
activations, its 2 · R · D · taps FLOPs are not counted. Under cp each rank sends the B · x of the last taps − 1 tokens
of each sequence to the rank after it, which keeps them, and gets their gradients back.
"""

from __future__ import annotations

from fivefold.planner.counts.operations.linear import LinearInput, list_row_parallel
from fivefold.planner.counts.operations.local_shapes import Local
from fivefold.planner.counts.operations.op import Op, OpMessage


def operations(local: Local, source: str) -> list[Op]:
    """List the operations ``source`` [stream rows, D] → ``a`` [stream rows, D]."""
    model, rows, width = local.model, local.rows, local.width
    conv, channels = model.short_conv, model.width // local.part.tp
    assert conv is not None
    elements = rows * channels
    halo = local.part.sequences * (conv.taps - 1) * channels * width if local.part.cp > 1 else 0  # bytes
    entry = LinearInput(local, source, in_features=model.width, rows=local.stream_rows)
    bias = (channels,) if conv.bias else ()
    core = Op(
        "mixer.core",
        "scan",
        ("bcx",),
        {"o": elements * width} | ({"o.halo": halo} if halo else {}),
        keeps=("bcx", "o.halo") if halo else ("bcx",),
        parameters=channels * conv.taps + sum(bias),
        wgrad_numels=(channels * conv.taps, *bias),
        moved_bytes=4 * elements * width,
        moved_backward_bytes=7 * elements * width,
        forward_scratch=elements * 4,  # B · x and the fp32 sums of the taps, which become the output
        backward_scratch=elements * (8 + width),  # the fp32 gradient, its product with B · x; B · x
        scratch_tensor=elements * 4,
        message=OpMessage("cp", "p2p", "p2p", halo) if halo else None,
    )
    return [
        *entry.ops,
        entry.column("mixer.project", "bcx", out_features=3 * channels, bias=conv.bias),
        core,
        *list_row_parallel(
            local, "mixer.out", "o", "a", in_features=channels, out_features=model.width, bias=conv.bias
        ),
    ]
