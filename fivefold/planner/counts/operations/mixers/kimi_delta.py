"""The operations of Kimi delta attention: q, k, v, b, decays, gates → conv → scan → gate → out.

    operation   keeps for its backward                                                bytes of a token, w per element
    conv        q, k, v of the projection                                             w 3I
    scan        q, k, v of the convolution, decays, b; computes its states again      w (4I + N)
    gate        the scan's output, the gates' logits, one fp32 statistic per head     w 2I + 4N

I: width of the N heads of this rank of tp, of d dims. Every rank makes the latents of decays and gates for all rows.
The scan computes chunks of C tokens by matmuls, and the decays from one token to another within sub-chunks of 16
tokens. FLOPs of a chunk and head:

    4P d            pairs of tokens, β k·k and q·k: P pairs, of each sub-chunk's tokens and all up to its last one
    4C²d + C³       the inverse of a triangle, its product with v, the output
    6Cd²            the state: what it predicts, its part of the output, its update

The first chunk has no state, the last one updates none. ``ChunkKDAFunction`` of
fla-org/flash-linear-attention@0395eef:fla/ops/kda/chunk.py keeps in addition the cumulated decays in fp32 (4I), the
pairs of q·k and β k·k (2 w N C) and the inverse lengths of q and k (8N). ``trainer/model/mixers/kimi_delta.py`` runs
them.
"""

from __future__ import annotations

from collections.abc import Sequence

from fivefold.model.mixers.kimi_delta import CHUNK, SUBCHUNK, KimiDelta
from fivefold.planner.counts.operations.chunks import group_chunks
from fivefold.planner.counts.operations.launches import count_launches
from fivefold.planner.counts.operations.linear import LinearInput, list_row_parallel
from fivefold.planner.counts.operations.local_shapes import Local
from fivefold.planner.counts.operations.mixers.gated_delta_net import list_convolution, list_gate, list_swapped
from fivefold.planner.counts.operations.op import Op


def operations(local: Local, source: str) -> list[Op]:
    """List the operations ``source`` [stream rows, D] → ``a`` [stream rows, D]."""
    model, net = local.model, local.model.kimi_delta
    assert net is not None
    net = net.shard(local.part.tp)
    # tensors: f decays, fd and gd the low-rank latents of decays and gates, og the gated output, a the mixer's output
    inner, names = net.inner_width, {"decay": "f", "decay_down": "fd", "gate_down": "gd"}
    entry = LinearInput(local, source, in_features=model.width, rows=local.stream_rows)
    ops = [*entry.ops]
    ops += [entry.column(f"mixer.{name}", names.get(name, name), out_features=out) for name, out in net.linears.items()]
    if net.rank is not None:
        for name, latent, out in (("decay_up", "fd", "f"), ("gate_up", "gd", "gate")):
            up = LinearInput(local, latent, in_features=net.rank, rows=local.rows, needs_all_rows=False)
            ops += [*up.ops, up.column(f"mixer.{name}", out, out_features=inner)]
    convolution = list_convolution(local, dict.fromkeys("qkv", inner), taps=net.taps)
    mixed = "qkvf"
    sizes = {**dict.fromkeys(mixed, inner), "b": net.heads}
    return [
        *ops,
        *list_swapped(local, [convolution, _scan(local, net)], sizes=sizes, out_features=inner),
        list_gate(local, heads=net.heads, dim=net.dim, gate="sigmoid"),
        *list_row_parallel(local, "mixer.out", "og", "a", in_features=inner, out_features=model.width, bias=False),
    ]


def _scan(local: Local, net: KimiDelta) -> Op:
    """Return the delta rule over all chunks."""
    rows, width, tokens, N, inner = local.rows, local.width, local.job.sequence, net.heads, net.inner_width
    chunks = [CHUNK] * (tokens // CHUNK) + ([tokens % CHUNK] if tokens % CHUNK else [])
    heads = local.part.sequences * N // local.part.cp
    forward, backward = (heads * flops for flops in scan_flops(chunks, dim=net.dim))
    state = 4 * heads * net.dim**2  # bytes
    numbers = 4 * heads * chunks[0] * net.dim  # bytes in fp32 of a number for each channel of a chunk's tokens
    triangle = 4 * heads * chunks[0] ** 2  # of the pairs of a chunk's tokens
    pairs = numbers * min(SUBCHUNK, chunks[0])  # of those within sub-chunks
    last_pairs = pairs * min(SUBCHUNK, chunks[0]) // chunks[0]  # of one sub-chunk
    # when the triangle's inverse gets its gradient, and when the last sub-chunk's decays do
    of_inverse = (19 if width == 4 else 26) * numbers + 5 * triangle
    of_decays = 11 * numbers + 2 * last_pairs
    moved = rows * (5 * inner + N) * width + 2 * len(chunks) * state
    return Op(
        "mixer.core.scan",
        "scan",
        ("qc", "kc", "vc", "f", "b"),
        {"o": rows * inner * width},
        keeps=("qc", "kc", "vc", "f", "b"),
        parameters=N + inner,
        wgrad_numels=(N, inner),
        flops=forward,
        causal_flops=forward,
        backward_flops=backward,
        shape=(chunks[0], chunks[0], net.dim),
        batch=heads * len(chunks),
        launches=count_launches("kimi_delta", len(chunks)),
        moved_bytes=moved,
        moved_backward_bytes=3 * moved,
        forward_scratch=12 * numbers + 4 * triangle + 3 * last_pairs + 2 * state,
        backward_scratch=max(of_inverse, of_decays) + 2 * pairs + (len(chunks) + 2) * state,
        scratch_tensor=max(state, numbers, triangle, last_pairs),
    )


def scan_flops(chunks: Sequence[int], *, dim: int) -> tuple[int, int]:
    """Return the FLOPs of one sequence and head in chunks of these tokens: of the forward, and of the backward.

    The backward computes the states again, then each chunk, then twice the FLOPs of its matmuls; the inverse of a
    triangle of C tokens takes C³, and its backward 4C³.
    """
    forward = backward = 0
    for tokens, has_state, updates, count in group_chunks(chunks):
        pairs = 2 * _count_pairs(tokens) * dim
        triangle = 2 * tokens * tokens * dim
        through_state = 2 * tokens * dim * dim
        half = pairs + triangle + has_state * through_state  # of what the next state needs, and of the output
        products = 2 * half + updates * through_state
        forward += count * (products + tokens**3)
        backward += count * (3 * products + 5 * tokens**3 + updates * (half + through_state + tokens**3))
    return forward, backward


def _count_pairs(tokens: int) -> int:
    """Count the pairs of tokens of a chunk that are multiplied: each sub-chunk with itself and with all before it."""
    ends = [min(first + SUBCHUNK, tokens) for first in range(0, tokens, SUBCHUNK)]
    return sum((end - first) * end for first, end in zip([0, *ends], ends, strict=False))
