"""The operations of Kimi delta attention: q, k, v, b, decays, gates → conv → scan → gate → out.

    operation   keeps for its backward                                                bytes of a token, w per element
    conv        q, k, v of the projection                                             w 3I
    scan        q, k, v of the convolution, decays, b; computes its states again      w (4I + N)
    gate        the scan's output, the gates' logits, one fp32 statistic per head     w 2I + 4N

I: width of the N heads of this rank of tp, of d dims. Every rank makes the latents of decays and gates for all rows.
The scan computes chunks of C tokens by matmuls, several chunks at once (``model/mixers/chunk_groups.py``). Its FLOPs
are those of ``delta_rule.py`` with P = C(C - 1)d for each of two products: blocks of tokens are joined in pairs, so
that only pairs below the diagonal are computed; a chunk's tokens are padded to a power of two.
``ChunkKDAFunction`` of
fla-org/flash-linear-attention@0395eef:fla/ops/kda/chunk.py keeps in addition the cumulated decays in fp32 (4I), the
pairs of q·k and β k·k (2 w N C) and the inverse lengths of q and k (8N). ``trainer/model/mixers/kimi_delta.py`` runs
them.
"""

from __future__ import annotations

from collections.abc import Sequence

from fivefold.model.mixers.chunk_groups import split_into_groups
from fivefold.model.mixers.gated_delta_net import DELTA_CHUNK
from fivefold.model.mixers.kimi_delta import KimiDelta
from fivefold.planner.counts.operations.chunks import ChunkGroup, split_sequence, sum_flops
from fivefold.planner.counts.operations.launches import count_launched_bytes, count_launches
from fivefold.planner.counts.operations.linear import LinearInput, list_row_parallel
from fivefold.planner.counts.operations.local_shapes import Local
from fivefold.planner.counts.operations.mixers import delta_rule
from fivefold.planner.counts.operations.mixers.gated_delta_net import list_convolution, list_gate, list_swapped
from fivefold.planner.counts.operations.mixers.symbolic_scan import (
    ScanInputs,
    apply_delta_rule,
    compute_decay,
    count_scratch,
    normalize_to_unit_length,
    split_heads,
)
from fivefold.planner.counts.operations.op import Op
from fivefold.planner.counts.operations.symbolic import Tensor, concatenate


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
    fused = not local.job.stack.launches_scan("kimi_delta")
    chunks, groups = split_into_groups(tokens, net.chunk), split_sequence(local, net, fused=fused)
    held = net.shard(local.part.cp)
    sizes = _count_sizes(held, local.part.sequences, tokens)
    heads = local.part.sequences * held.heads
    forward, backward = (heads * flops for flops in scan_flops(groups, dim=net.dim))
    causal, _ = scan_flops(chunks, dim=net.dim)
    moved = rows * (5 * inner + N) * width + 2 * len(chunks) * 4 * heads * net.dim**2
    forward_scratch, backward_scratch = count_scan_scratch(held, local.part.sequences, groups, width=width)
    return Op(
        "mixer.core.scan",
        "scan",
        ("qc", "kc", "vc", "f", "b"),
        {"o": rows * inner * width},
        keeps=("qc", "kc", "vc", "f", "b"),
        parameters=N + inner,
        wgrad_numels=(N, inner),
        flops=forward,
        causal_flops=heads * causal,
        backward_flops=backward,
        shape=(chunks[0], chunks[0], net.dim),
        batch=heads * len(chunks),
        fused=fused,
        launches=count_launches("kimi_delta", groups, net.chunk, fused=fused),
        launched_bytes=count_launched_bytes("kimi_delta", groups, sizes),
        moved_bytes=moved,
        moved_backward_bytes=3 * moved,
        forward_scratch=forward_scratch,
        backward_scratch=backward_scratch,
        scratch_tensor=max(_count_sizes(held, local.part.sequences, groups[0]).values()),
    )


def _count_sizes(net: KimiDelta, sequences: int, tokens: int) -> dict[str, int]:
    """Return the bytes of temporaries in fp32 of ``tokens`` of each sequence.

    ``pairs``: pairs of tokens in a chunk, over all heads; ``dims``: elements of queries, keys or values; ``states``:
    states of the chunks.
    """
    size, numbers = min(net.chunk, tokens), 4 * sequences * tokens
    return {
        "pairs": numbers * size * net.heads,
        "dims": numbers * net.inner_width,
        "states": numbers // size * net.heads * net.dim**2,
    }


def count_scan_scratch(net: KimiDelta, sequences: int, groups: Sequence[int], *, width: int) -> tuple[int, int]:
    """Return the bytes of temporaries of the scan of ``net``, forward and backward, the output not among them."""
    inner = net.inner_width
    inputs = ScanInputs((inner,) * 4 + (net.heads,), (net.heads, inner), inner, sequences, width)
    return count_scratch(compute_chunks, net, inputs, groups)


def scan_flops(groups: Sequence[int], *, dim: int) -> tuple[int, int]:
    """Return the FLOPs of one sequence and head in groups of these tokens: of the forward, and of the backward."""

    def count_flops(group: ChunkGroup) -> tuple[int, int]:
        tokens = 2 ** (group.size - 1).bit_length()
        return delta_rule.count_flops(group, pairs=tokens * (tokens - 1) * dim, key_dim=dim, value_dim=dim)

    return sum_flops(groups, DELTA_CHUNK, count_flops)


def compute_chunks(
    inputs: Sequence[Tensor], state: Tensor | None, *, net: KimiDelta, is_last: bool = False, only_state: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Run ``compute_chunks`` of ``trainer/model/mixers/kimi_delta.py`` with symbolic tensors."""
    q, k, v, f, b, a_log, dt_bias = inputs
    a_log, dt_bias = a_log.unsqueeze(1).unsqueeze(2), dt_bias.reshape(net.heads, 1, net.dim)
    decay = compute_decay(split_heads(f, net.heads), a_log, dt_bias, is_bounded=net.lower_bound is not None)
    decay = decay.cumsum()
    k = normalize_to_unit_length(split_heads(k, net.heads))
    beta = split_heads(b, net.heads).sigmoid()
    lefts = [k * beta]
    if not only_state:
        lefts.append(normalize_to_unit_length(split_heads(q, net.heads)) * 1)
    products = _multiply_decayed(lefts, k, decay)
    return apply_delta_rule(lefts, k, split_heads(v, net.heads), beta, decay, products, state, is_last=is_last)


def _multiply_decayed(lefts: Sequence[Tensor], right: Tensor, decay: Tensor) -> list[Tensor]:
    """Run ``multiply_decayed`` of the trainer: blocks of 1, 2, 4 … tokens are joined in pairs."""
    tokens = right.shape[-2]
    padding = 2 ** (tokens - 1).bit_length() - tokens
    if padding:
        last = decay.narrow(-2, 1).expand(*decay.shape[:-2], padding, decay.shape[-1])
        decay = concatenate([decay, last], -2)
        del last
        right, *lefts = (x.pad(-2, 0, padding) for x in (right, *lefts))
    results = [(left * right).sum(-1).unsqueeze(-1).unsqueeze(-1) for left in lefts]
    while results[0].shape[-3] > 1:
        size = results[0].shape[-1]
        earlier, later = _split_pairs(decay, size)
        begin = later.narrow(-2, 1).detach()
        before, factor = _split_pairs(right, size)[0] * (begin - earlier).exp(), (later - begin).exp()
        for index, left in enumerate(lefts):
            block = (_split_pairs(left, size)[1] * factor) @ before.mT
            first, second = results[index].unflatten(-3, (-1, 2)).unbind(-3)
            second = concatenate([block, second], -1)
            results[index] = concatenate([first.pad(-1, 0, size), second], -2)
    return [result.squeeze(-3).keep_first(-2, tokens).keep_first(-1, tokens) for result in results]


def _split_pairs(x: Tensor, size: int) -> list[Tensor]:
    return x.unflatten(-2, (-1, 2, size)).unbind(-3)
