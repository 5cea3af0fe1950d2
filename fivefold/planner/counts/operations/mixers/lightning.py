"""The operations of lightning attention: project, gate → act → scan → norm → gate → out.

    operation   keeps for its backward                                   bytes of a token, w per element
    act         q, k, v as projected                                     w 3I
    scan        q, k, v; computes its states again                       w 3I
    norm        the scan's output, one fp32 statistic                    w I + 4
    gate        the norm's output, the gates' logits                     w 2I

I: width of the N heads of this rank of tp, of d dims; the norm is over those of all ranks. The scan computes chunks of
C tokens by matmuls. FLOPs of a chunk and head:

    4C²d    pairs of tokens: q·k, and their product with v
    4Cd²    the state: its part of the output, its update

The first chunk has no state, the last one updates none. The backward computes the states and each chunk again;
``ChunkSimpleGLAFunction`` of fla-org/flash-linear-attention@07784bc:fla/ops/simple_gla/chunk.py, which
``chunk_lightning_attn`` of fla/ops/lightning_attn/chunk.py calls, saves the same tensors and computes the states and
the products of queries and keys again. ``trainer/model/mixers/lightning.py`` runs them.
"""

from __future__ import annotations

from collections.abc import Sequence

from fivefold.model.activations import ACTIVATIONS
from fivefold.model.mixers.lightning import Lightning
from fivefold.model.norms import NORMS
from fivefold.planner.counts.operations.chunks import group_chunks
from fivefold.planner.counts.operations.launches import count_launches
from fivefold.planner.counts.operations.linear import LinearInput, build_sub_norm, list_row_parallel
from fivefold.planner.counts.operations.local_shapes import Local
from fivefold.planner.counts.operations.mixers.gated_delta_net import list_swapped
from fivefold.planner.counts.operations.mixers.mamba2 import split_chunks
from fivefold.planner.counts.operations.op import Op, elementwise


def operations(local: Local, source: str) -> list[Op]:
    """List the operations ``source`` [stream rows, D] → ``a`` [stream rows, D]."""
    model, net = local.model, local.model.lightning
    assert net is not None
    net = net.shard(local.part.tp)
    rows, width, inner = local.rows, local.width, net.inner_width
    size = rows * inner * width
    scratch = ACTIVATIONS[model.activation].plain_scratch * 3 * rows * inner * width
    entry = LinearInput(local, source, in_features=model.width, rows=local.stream_rows)
    project = entry.column("mixer.project", "projected", out_features=3 * inner)
    gate = entry.column("mixer.gate", "gate", out_features=inner)
    act = elementwise("mixer.core.act", "activation", ("projected",), "qkv", size=3 * size, keeps=("projected",))
    kept, kind = ("on", "gate"), local.norm._replace(norm=NORMS["rmsnorm"], bias=False, weight=True)
    return [
        *entry.ops,
        project,
        gate,
        act._replace(forward_scratch=scratch, backward_scratch=scratch),
        *list_swapped(local, [_build_scan(local, net)], sizes={"qkv": 3 * inner}, out_features=inner),
        build_sub_norm(local, "mixer.norm", "o", dim=inner, kind=kind),
        elementwise("mixer.core.gate", "activation", kept, "og", size=size, keeps=kept, backward_scratch=size),
        *list_row_parallel(local, "mixer.out", "og", "a", in_features=inner, out_features=model.width, bias=False),
    ]


def _build_scan(local: Local, net: Lightning) -> Op:
    """Return the decayed sums over all chunks; under cp, of the heads that this rank scans for all tokens."""
    rows, width, inner = local.rows, local.width, net.inner_width
    net = net.shard(local.part.cp)
    chunks = split_chunks(local.job.sequence, net.chunk)
    heads = local.part.sequences * net.heads
    forward, backward = (heads * flops for flops in scan_flops(chunks, dim=net.dim))
    states = 4 * len(chunks) * heads * net.dim**2  # bytes of all states
    # bytes in fp32 of a chunk: its pairs of tokens, their decays, which sequences share, and queries, keys or values
    pairs = 4 * heads * chunks[0] ** 2
    decays = pairs // local.part.sequences
    dims = 4 * local.part.sequences * chunks[0] * net.inner_width
    casts = 0 if width == 4 else 3 * dims
    moved = 4 * rows * inner * width + 2 * states
    return Op(
        "mixer.core.scan",
        "scan",
        ("qkv",),
        {"o": rows * inner * width},
        keeps=("qkv",),
        flops=forward,
        causal_flops=forward,
        backward_flops=backward,
        shape=(chunks[0], chunks[0], net.dim),
        batch=heads * len(chunks),
        moved_bytes=moved,
        moved_backward_bytes=2 * moved,
        launches=count_launches("lightning", len(chunks)),
        forward_scratch=2 * pairs + decays + 3 * dims + casts + states,
        backward_scratch=2 * pairs + decays + 6 * dims + 2 * casts + 2 * states,
        scratch_tensor=max(pairs, states),
    )


def scan_flops(chunks: Sequence[int], *, dim: int) -> tuple[int, int]:
    """Return the FLOPs of one sequence and head in chunks of these tokens: of the forward, and of the backward.

    The backward computes the updates of the states again, then each chunk, then twice the FLOPs of its matmuls.
    """
    forward = backward = 0
    for tokens, has_state, updates, count in group_chunks(chunks):
        through_state = 2 * tokens * dim * dim
        products = 4 * tokens * tokens * dim + (has_state + updates) * through_state
        forward += count * products
        backward += count * (3 * products + updates * through_state)
    return forward, backward
