"""The operations of attention to compressed keys (DeepSeek-V4): projections, compressed keys, their choice, core, out.

    operation   keeps for its backward                                              bytes of a token, w per element
    compress    projections and softmax of the gates, in fp32 and as they multiply   c H (2w + 4)
    core        q, keys of tokens, compressed keys, indices, output, log-sum-exp     2w N H + w H (1 + 1/m) + 4 K + 4 N

N heads of H, c series of projections (2 if compressed keys overlap), m tokens of a compressed key, K chosen keys.
A query at t sees the last W tokens and, of the (t + 1) / m compressed keys that are complete, all or the K best. The
indexer scores all of them: T² / 2m products of each head, which its choice keeps no gradient of. Attention is counted
as one kernel that reads the keys that a query sees, as FlashMLA's sparse kernels do; transformers 5.23 computes all
pairs under a mask. ``position_bias``, norm and softmax of the compressor are kept as its autograd keeps them there.
"""

from __future__ import annotations

from collections.abc import Callable

from fivefold.model.mixers.compressed_attention import CompressedAttention, count_complete, count_pairs
from fivefold.model.mixers.kinds import MixerName
from fivefold.model.norms import NORMS
from fivefold.planner.counts.operations.indexer import INDEX_BYTES, QUERY_BLOCK, drop_gradient
from fivefold.planner.counts.operations.linear import LinearInput, list_row_parallel
from fivefold.planner.counts.operations.local_shapes import Local
from fivefold.planner.counts.operations.op import NormKind, Op, matmul, matmul_groups, norm, rope


def make_operations(kind: MixerName) -> Callable[[Local, str], list[Op]]:
    """Return the function that lists the operations of a kind of layer: ``source`` → ``a``, both [stream rows, D]."""

    def operations(local: Local, source: str) -> list[Op]:
        net = getattr(local.model, kind)
        assert isinstance(net, CompressedAttention)
        return _list_operations(local, net, source)

    return operations


def _list_operations(local: Local, net: CompressedAttention, source: str) -> list[Op]:
    """Return the operations of compressed attention: projections, compressed keys, their selection, and the core."""
    model, rows, width = local.model, local.rows, local.width
    entry = LinearInput(local, source, in_features=model.width, rows=rows)
    q_ops = [
        entry.column("mixer.q_down", "cq", out_features=net.q_rank),
        entry.column("mixer.kv", "kv", out_features=net.head_dim),
        norm("mixer.q_norm", "cq", "cqn", rows=rows, dim=net.q_rank, width=width, kind=_get_rms_norm(local)),
    ]
    latent = LinearInput(local, "cqn", in_features=net.q_rank, rows=rows, needs_all_rows=False)
    unit = _get_rms_norm(local)._replace(weight=False)
    heads = rows * net.heads
    q_ops += [
        *latent.ops,
        latent.column("mixer.q_up", "q", out_features=net.query_width),
        norm("mixer.head_norm", "q", "qn", rows=heads, dim=net.head_dim, width=width, kind=unit),
        rope("rope.q", "qn", "qr", numel=rows * net.query_width, width=width),
        norm("mixer.kv_norm", "kv", "kvn", rows=rows, dim=net.head_dim, width=width, kind=_get_rms_norm(local)),
        rope("rope.kv", "kvn", "kvr", numel=rows * net.head_dim, width=width),
    ]
    keys = list[Op]()
    if net.rate is not None:
        names = "mixer.core.pool", "rope.compress"
        keys += _compress(local, net, source, name="mixer.compress", dim=net.head_dim, names=names)
    if net.indexer is not None:
        keys += _choose(local, net, source)
    return [
        *entry.ops,
        *q_ops,
        *keys,
        _attend(local, net),
        rope("rope.out", "o", "or", numel=rows * net.query_width, width=width),
        matmul_groups(
            "mixer.out_down",
            "or",
            "ol",
            rows=rows,
            groups=net.out_groups,
            in_features=net.query_width // net.out_groups,
            out_features=net.out_rank,
            width=width,
        ),
        *list_row_parallel(
            local, "mixer.out", "ol", "a", in_features=net.projected_width, out_features=model.width, bias=False
        ),
    ]


def _get_rms_norm(local: Local) -> NormKind:
    """Return the norm of latents and keys, which is an RMSNorm with weights in any model."""
    return local.norm._replace(norm=NORMS["rmsnorm"], weight=True)


def _count_keys(local: Local, net: CompressedAttention) -> int:
    """Return the compressed keys of all sequences: only of complete groups of tokens."""
    assert net.rate is not None
    return local.part.sequences * (local.job.sequence // net.rate)


def _compress(
    local: Local, net: CompressedAttention, source: str, *, name: str, dim: int, names: tuple[str, str]
) -> list[Op]:
    """List the operations that make compressed keys of ``dim``, tensor ``name``.r; ``names``: of pool and rotation."""
    rows, width, columns = local.rows, local.width, net.series * dim
    assert net.rate is not None
    keys = _count_keys(local, net)
    numel = keys * net.rate * columns  # of the tokens of complete keys
    bias = net.rate * columns
    D = local.model.width
    values, gates, pooled = f"{name}.v", f"{name}.g", f"{name}.p"
    # overlapping keys are made of a copy, in which each token is part of two
    copy = {f"{name}.joined": numel * width} if net.overlaps else {}
    narrow = {f"{name}.weights": numel * width} if width < 4 else {}
    softmax = {f"{name}.softmax": 4 * numel}
    pool = Op(
        names[0],
        "activation",
        (values, gates),
        {pooled: keys * dim * width, **copy, **narrow, **softmax},
        keeps=(*(copy or (values,)), *narrow, *softmax),
        parameters=bias,
        wgrad_numels=(bias,),
        moved_bytes=(2 * numel + keys * dim) * width,
        moved_backward_bytes=(4 * numel + keys * dim) * width + 4 * numel,
        forward_scratch=(1 + net.overlaps) * numel * width,
        backward_scratch=4 * numel + (1 + net.overlaps) * numel * width,
    )
    return [
        matmul(f"{name}.kv", source, values, rows=rows, in_features=D, out_features=columns, width=width),
        matmul(f"{name}.gate", source, gates, rows=rows, in_features=D, out_features=columns, width=width),
        pool,
        norm(f"{name}.norm", pooled, f"{name}.n", rows=keys, dim=dim, width=width, kind=_get_rms_norm(local)),
        rope(names[1], f"{name}.n", f"{name}.r", numel=keys * dim, width=width),
    ]


def _choose(local: Local, net: CompressedAttention, source: str) -> list[Op]:
    """List the operations of the indexer, → ``indices``; they have no gradient."""
    indexer, rows, width, tokens = net.indexer, local.rows, local.width, local.job.sequence
    assert indexer is not None
    assert net.rate is not None
    heads, dim, keys = indexer.heads, indexer.head_dim, tokens // net.rate
    pairs = local.part.sequences * count_complete(tokens, net.rate)
    chosen_bytes = INDEX_BYTES * min(indexer.topk, keys)
    compressed = "mixer.indexer.compress"
    choice = Op(
        "mixer.indexer.choice",
        "attention",
        ("iqr", f"{compressed}.r", "iw"),
        {"indices": rows * chosen_bytes},
        flops=2 * rows * keys * heads * (dim + 1),
        causal_flops=2 * pairs * heads * (dim + 1),
        shape=(local.part.sequences, tokens, dim),
        batch=heads,
        moved_bytes=rows * (heads * (dim + 1) * width + chosen_bytes) + 2 * 4 * pairs,
        forward_scratch=4 * min(QUERY_BLOCK, rows) * keys,
    )
    rank, D = net.q_rank, local.model.width
    ops = [
        *_compress(local, net, source, name=compressed, dim=dim, names=(f"{compressed}.pool", f"{compressed}.rope")),
        matmul("mixer.indexer.q", "cqn", "iq", rows=rows, in_features=rank, out_features=heads * dim, width=width),
        matmul("mixer.indexer.w", source, "iw", rows=rows, in_features=D, out_features=heads, width=width),
        rope("mixer.indexer.rope.q", "iq", "iqr", numel=rows * heads * dim, width=width),
        choice,
    ]
    return [drop_gradient(op) for op in ops]


def _attend(local: Local, net: CompressedAttention) -> Op:
    """Return attention to the keys of a window and to compressed ones: ``qr`` → ``o`` [rows, N · H]."""
    rows, width, tokens, sequences = local.rows, local.width, local.job.sequence, local.part.sequences
    reads, key_rows, most = ["qr", "kvr"], rows, net.indexer.topk if net.indexer else None
    pairs = count_pairs(tokens, window=net.window, rate=net.rate, most=most)
    if net.rate is not None:
        key_rows += _count_keys(local, net)
        reads.append("mixer.compress.r")
    indices = ("indices",) if net.indexer is not None else ()
    flops = 4 * net.heads * sequences * pairs * net.head_dim
    out_bytes = rows * net.query_width * width
    key_bytes = key_rows * net.head_dim * width
    # keys that an indexer chose are those of one query, read for it alone
    chosen = sequences * pairs * (net.head_dim * width + INDEX_BYTES) if indices else key_bytes
    return Op(
        "mixer.core",
        "attention",
        (*reads, *indices),
        {"o": out_bytes, "lse": 4 * rows * net.heads},
        keeps=(*reads, *indices, "o", "lse"),
        differentiates=tuple(reads),
        parameters=net.heads,  # sinks
        wgrad_numels=(net.heads,),
        flops=flops,
        causal_flops=flops,
        windowed_flops=flops,
        shape=(sequences, tokens, net.head_dim),
        batch=net.heads,
        moved_bytes=2 * out_bytes + chosen,
        moved_backward_bytes=4 * out_bytes + 2 * chosen,
        # sums of the gradients of the keys in fp32, as several queries add to one
        backward_scratch=4 * key_rows * net.head_dim,
    )
