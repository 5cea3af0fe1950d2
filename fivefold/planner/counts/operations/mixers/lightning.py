"""The operations of lightning attention: project, gate → act → scan → norm → gate → out.

    operation   keeps for its backward                                   bytes of a token, w per element
    act         q, k, v as projected                                     w 3I
    scan        q, k, v; computes its states again                       w 3I
    norm        the scan's output, one fp32 statistic                    w I + 4
    gate        the norm's output, the gates' logits                     w 2I

I: width of the N heads of this rank of tp, of d dims; the norm is over those of all ranks. The scan computes chunks of
C tokens by matmuls, several chunks at once (``model/mixers/chunk_groups.py``). FLOPs of n chunks and a head:

    n 4C²d          pairs of tokens: q·k, and their product with v
    n 4Cd²          the state: its part of the output, its update
    2 (n + 1)² d²   the states between the chunks; 2 n² d² in the last group, 0 if n is 1

A single chunk has no state if it is the first one, and updates none if it is the last. The backward computes the states
and each group again; ``ChunkSimpleGLAFunction`` of
fla-org/flash-linear-attention@07784bc:fla/ops/simple_gla/chunk.py, which ``chunk_lightning_attn`` of
fla/ops/lightning_attn/chunk.py calls, saves the same tensors and computes the states and the products of queries and
keys again. ``trainer/model/mixers/lightning.py`` runs them.
"""

from __future__ import annotations

from collections.abc import Sequence

from fivefold.model.activations import ACTIVATIONS
from fivefold.model.mixers.chunk_groups import split_into_groups
from fivefold.model.mixers.lightning import Lightning
from fivefold.model.norms import NORMS
from fivefold.planner.counts.operations.chunks import ChunkGroup, count_hand_on_flops, split_sequence, sum_flops
from fivefold.planner.counts.operations.launches import count_launched_bytes, count_launches
from fivefold.planner.counts.operations.linear import LinearInput, build_sub_norm, list_row_parallel
from fivefold.planner.counts.operations.local_shapes import Local
from fivefold.planner.counts.operations.mixers.gated_delta_net import list_swapped
from fivefold.planner.counts.operations.mixers.symbolic_scan import ScanInputs, count_scratch, hand_on_sums
from fivefold.planner.counts.operations.op import Op, elementwise
from fivefold.planner.counts.operations.symbolic import Tensor, compute


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
    fused = not local.job.stack.launches_scan("lightning")
    chunks, groups = split_into_groups(local.job.sequence, net.chunk), split_sequence(local, net, fused=fused)
    net = net.shard(local.part.cp)
    heads = local.part.sequences * net.heads
    forward, backward = (heads * flops for flops in scan_flops(groups, dim=net.dim, size=net.chunk))
    causal, _ = scan_flops(chunks, dim=net.dim, size=net.chunk)
    states = 4 * len(chunks) * heads * net.dim**2  # bytes of all states
    forward_scratch, backward_scratch = count_scan_scratch(net, local.part.sequences, groups, width=width)
    moved = 4 * rows * inner * width + 2 * states
    return Op(
        "mixer.core.scan",
        "scan",
        ("qkv",),
        {"o": rows * inner * width},
        keeps=("qkv",),
        flops=forward,
        causal_flops=heads * causal,
        backward_flops=backward,
        shape=(chunks[0], chunks[0], net.dim),
        batch=heads * len(chunks),
        moved_bytes=moved,
        moved_backward_bytes=2 * moved,
        fused=fused,
        launches=count_launches("lightning", groups, net.chunk, fused=fused),
        launched_bytes=_count_launched_bytes(net, local.part.sequences, groups),
        forward_scratch=forward_scratch,
        backward_scratch=backward_scratch,
        scratch_tensor=4 * local.part.sequences * groups[0] * net.heads * max(min(net.chunk, groups[0]), net.dim),
    )


def _count_launched_bytes(net: Lightning, sequences: int, groups: Sequence[int]) -> tuple[int, int]:
    """Return the bytes that the kernels other than matmuls read and write.

    ``pairs``, ``dims``, ``states``: bytes in fp32 of all pairs of tokens in a chunk, of the queries, keys or values,
    and of all states between chunks.
    """
    tokens = sum(groups)
    size, numbers = min(net.chunk, tokens), 4 * sequences * tokens
    states = 4 * sequences * (tokens // size + len(groups)) * net.heads * net.dim**2
    sizes = {"pairs": numbers * size * net.heads, "dims": numbers * net.inner_width, "states": states}
    return count_launched_bytes("lightning", groups, sizes)


def count_scan_scratch(net: Lightning, sequences: int, groups: Sequence[int], *, width: int) -> tuple[int, int]:
    """Return the bytes of temporaries of the scan of ``net``, forward and backward, the output not among them."""
    inputs = ScanInputs((3 * net.inner_width,), (), net.inner_width, sequences, width)
    return count_scratch(compute_chunks, net, inputs, groups)


def scan_flops(groups: Sequence[int], *, dim: int, size: int) -> tuple[int, int]:
    """Return the FLOPs of one sequence and head in groups of these tokens, in chunks of ``size``: forward and backward.

    The backward computes the states again, then each group, then twice the FLOPs of its matmuls, but of the decays that
    hand states on, which are constants, no gradient.
    """

    def count_flops(group: ChunkGroup) -> tuple[int, int]:
        through_state = 2 * group.tokens * dim * dim
        products = 4 * group.tokens * group.size * dim + (group.reads_states + group.makes_states) * through_state
        handed_on = count_hand_on_flops(group, dim * dim)
        return products + handed_on, 3 * products + 2 * handed_on + group.updates * through_state

    return sum_flops(groups, size, count_flops)


def compute_chunks(
    inputs: Sequence[Tensor], state: Tensor | None, *, net: Lightning, is_last: bool = False, only_state: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Run ``compute_chunks`` of ``trainer/model/mixers/lightning.py`` with symbolic tensors."""
    (qkv,) = inputs
    memory = qkv.memory
    size = qkv.shape[1] if only_state else min(net.chunk, qkv.shape[1])
    heads = qkv.cast(4).unflatten(1, (-1, size)).unflatten(-1, (net.heads, 3, -1))
    q, k, v = heads.permute(4, 0, 1, 3, 2, 5).unbind(0)
    rate = memory.allocate((net.heads, 1, 1))
    place = memory.allocate((size, 1))
    before: Tensor | None = None
    after: Tensor | None = None
    if not is_last or k.shape[1] > 1:
        added = (k * compute(rate, compute(place))).mT @ v
        decay = compute(rate.select(-1)).expand(1, k.shape[1], net.heads, 1)
        before, after = hand_on_sums(added, decay, state, is_last=is_last)
        del added
    elif state is not None:
        before = state.unsqueeze(1)
    if only_state:
        return qkv, after
    pairs = _compute_decays(rate, place)
    out = ((q @ k.mT) * pairs) @ v
    if before is not None:
        out = out + (q * compute(rate, place)) @ before
    return out.transpose(2, 3).flatten(3).flatten(1, 2), after


def _compute_decays(rate: Tensor, place: Tensor) -> Tensor:
    """Return the decays from each token of a chunk to the later ones, by e^(−rate · ReLU(i − j)) and a triangle."""
    distances = compute(compute(place, place.mT))
    product = compute(compute(rate), distances)
    del distances
    decayed = compute(product)
    del product
    return compute(decayed)
