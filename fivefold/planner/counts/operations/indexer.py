"""The operations of a lightning indexer and of latent attention to the keys that it chooses (arXiv:2512.02556 §2.1).

    cq → q;  x → k → norm;  x → w;  rope;  Σ w · ReLU(q k) → top-k → indices
    q → absorb (W_uk) → core with the latent as key and value, top-k pairs of each query → absorb (W_uv)

The choice has no gradient (transformers 5.23:models/deepseek_v32/modeling_deepseek_v32.py, ``DeepseekV32Indexer``, runs
under ``no_grad``), so nothing is saved for it but the indices. Its scores are still T² / 2 products. Attention runs in
its multi-query form, as each query has keys of its own: all heads read one latent key of kv_rank + rope_dim numbers.
"""

from __future__ import annotations

from fivefold.model.indexer import Indexer
from fivefold.model.norms import NORMS
from fivefold.planner.counts.operations.linear import LinearInput, get_row_group
from fivefold.planner.counts.operations.local_shapes import Local
from fivefold.planner.counts.operations.op import (
    Op,
    OpMessage,
    elementwise,
    exchange,
    matmul,
    matmul_groups,
    norm,
    rope,
)

QUERY_BLOCK = 1024  # queries whose fp32 scores are held at once, until their keys are chosen: our assumption
INDEX_BYTES = 4  # an int32 index (FlashMLA, flash_mla_interface.py: indices of flash_mla_sparse_fwd)


def choose_keys(local: Local, indexer: Indexer, *, latent: str, hidden: str, lends: bool) -> list[Op]:
    """List the operations of the indexer: latents of queries and the input, of this rank's rows, → ``indices``.

    Under sp a rank chooses the keys of its own rows among the keys of all, and all get the indices. ``lends``: later
    layers attend to these keys too, so that a recomputed layer keeps them.
    """
    model, part, width, heads, dim = local.model, local.part, local.width, indexer.heads, indexer.head_dim
    assert model.mla is not None
    assert model.mla.q_rank is not None
    rows, tokens, sequences = local.stream_rows, local.job.sequence, part.sequences
    pairs = sequences * tokens * (tokens + 1) // 2 * rows // local.rows
    chosen_bytes = INDEX_BYTES * min(indexer.topk, tokens)
    norm_kind = local.norm._replace(norm=NORMS["layernorm"], bias=True, weight=True)
    keys, indices = ("ika", "ichosen") if part.sp else ("ikr", "indices")
    choice = Op(
        "attention.indexer.choice",
        "attention",
        ("iqr", keys, "iw"),
        {indices: rows * chosen_bytes},
        flops=2 * rows * tokens * heads * (dim + 1),
        causal_flops=2 * pairs * heads * (dim + 1),
        shape=(sequences, tokens, dim),
        batch=heads,
        moved_bytes=(rows * (heads * dim + heads) + local.rows * dim) * width + 2 * 4 * pairs + rows * chosen_bytes,
        forward_scratch=4 * min(QUERY_BLOCK, rows) * tokens,
    )
    ops = [
        matmul(
            "attention.indexer.q",
            latent,
            "iq",
            rows=rows,
            in_features=model.mla.q_rank,
            out_features=heads * dim,
            width=width,
        ),
        matmul("attention.indexer.k", hidden, "ik", rows=rows, in_features=model.width, out_features=dim, width=width),
        norm("attention.indexer.k_norm", "ik", "ikn", rows=rows, dim=dim, width=width, kind=norm_kind),
        matmul(
            "attention.indexer.w", hidden, "iw", rows=rows, in_features=model.width, out_features=heads, width=width
        ),
        rope("attention.indexer.rope.q", "iq", "iqr", numel=rows * heads * dim, width=width),
        rope("attention.indexer.rope.k", "ikn", "ikr", numel=rows * dim, width=width),
        *([_gather_rows(local, "ikr", "ika", row_bytes=dim * width)] if part.sp else ()),
        choice,
        *([_gather_rows(local, "ichosen", "indices", row_bytes=chosen_bytes)] if part.sp else ()),
    ]
    if lends:
        ops[-1] = ops[-1]._replace(always_kept=("indices",))
    return [drop_gradient(op) for op in ops]


def _gather_rows(local: Local, source: str, out: str, *, row_bytes: int) -> Op:
    """Return the gather of all rows over tp."""
    size = local.rows * row_bytes
    message = OpMessage(get_row_group(local.part), "all_gather", "", payload=size)
    return exchange(f"attention.indexer.{source}.gather", source, out, size=size, message=message)


def drop_gradient(op: Op) -> Op:
    """Return an operation that runs without autograd: it keeps nothing and has no backward."""
    return op._replace(
        keeps=(),
        differentiates=(),
        wgrad_numels=(),
        backward_products=0,
        backward_scratch=0,
        scratch_tensor=0,
        moved_backward_bytes=0,
    )


def attend_to_chosen(local: Local, latent: LinearInput, *, q: str, key: str, chosen_here: bool) -> list[Op]:
    """List the operations of attention to the chosen keys: ``q`` and latent | ``key`` → ``o`` [rows, N · v_dim].

    ``chosen_here``: this layer's indexer chose them, and its indices are kept for this layer and those that share them.
    """
    mla, rows, width, N = local.model.mla, local.rows, local.width, local.heads
    assert mla is not None
    assert mla.indexer is not None
    tokens, sequences = local.job.sequence, local.part.sequences
    dim = mla.kv_rank + mla.rope_dim
    indices = ("indices",) if chosen_here else ()
    topk = min(mla.indexer.topk, tokens)
    pairs = sequences * (topk * (topk + 1) // 2 + (tokens - topk) * topk)
    flops = 2 * N * pairs * (dim + mla.kv_rank)
    key_bytes, query_bytes = rows * dim * width, rows * N * dim * width
    join = elementwise("attention.core.key", "activation", (latent.read, key), "lk", size=key_bytes)
    core = Op(
        "attention.core",
        "attention",
        ("qr", "lk", *indices),
        {"ol": rows * N * mla.kv_rank * width, "lse": rows * N * 4},
        keeps=("qr", "lk", *indices, "ol", "lse"),
        differentiates=("qr", "lk"),
        parameters=N if local.model.attention_sinks else 0,
        wgrad_numels=(N,) if local.model.attention_sinks else (),
        flops=flops,
        causal_flops=flops,
        windowed_flops=flops,
        shape=(sequences, tokens, dim),
        batch=N,
        moved_bytes=query_bytes + rows * N * mla.kv_rank * width + pairs * (dim * width + INDEX_BYTES),
        moved_backward_bytes=2 * (query_bytes + rows * N * mla.kv_rank * width) + 2 * pairs * dim * width,
        # sums of the gradients of the latent keys in fp32, as several queries add to one
        backward_scratch=4 * rows * dim,
    )
    of_heads = {"rows": rows, "groups": N, "width": width}
    return [
        matmul_groups(
            "attention.core.absorb_k", q, "qa", in_features=mla.nope_dim, out_features=mla.kv_rank, **of_heads
        ),
        rope("rope.q", "qa", "qr", numel=rows * N * dim, width=width)._replace(reads=("qa", q)),
        join,
        core,
        matmul_groups(
            "attention.core.absorb_v", "ol", "o", in_features=mla.kv_rank, out_features=mla.v_dim, **of_heads
        ),
    ]
