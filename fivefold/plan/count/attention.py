"""The operations of self-attention: grouped queries or multi-head latent, flash or written out.

    grouped   x → q, k, v → (norm) → rope → core → out
    latent    x → q_down → norm → q_up;  x → kv_down → norm → kv_up;  rope on a part of each;  core → out

Letters: N and K heads of H; latent attention (DeepSeek-V2, arXiv:2405.04434) has heads of nope + rope and of v dims.
"""

from __future__ import annotations

from fivefold.job import Job
from fivefold.model.spec import Model
from fivefold.plan.count.ops import Op, activation_width, dropout, elementwise, matmul, norm, rope


def attention(model: Model, job: Job, source: str, *, layer: int, sequences: int) -> list[Op]:
    """``source`` [rows, D] → ``a`` [rows, D]."""
    return (_latent if model.mla else _grouped)(model, job, source, layer=layer, sequences=sequences)


def attended_pairs(model: Model, job: Job, *, layer: int, causal: bool) -> int:
    """Query-key pairs of one sequence: the full square, or exactly what mask and window let through."""
    tokens = job.sequence
    if not causal:
        return tokens * tokens
    window = min(model.window or tokens, tokens) if model.slides(layer) else tokens
    return window * (window + 1) // 2 + (tokens - window) * window


def _grouped(model: Model, job: Job, source: str, *, layer: int, sequences: int) -> list[Op]:
    rows, width = sequences * job.sequence, activation_width(job)
    wide, narrow = model.heads * model.head_dim, model.kv_heads * model.head_dim
    bias = model.qkv_bias
    ops = [
        matmul(f"attention.{part}", source, part, rows=rows, into=model.width, outof=out, width=width, bias=bias)
        for part, out in (("q", wide), ("k", narrow), ("v", narrow))
    ]
    q, k = "q", "k"
    for part, out in (("q", wide), ("k", narrow)):
        if model.qk_norm != "none":
            dim = out if model.qk_norm == "full" else model.head_dim
            groups = rows if model.qk_norm == "full" else rows * out // model.head_dim
            ops.append(
                norm(f"attention.{part}_norm", part, f"{part}n", rows=groups, dim=dim, width=width, kind=model.norm)
            )
    if model.qk_norm != "none":
        q, k = "qn", "kn"
    if model.position == "rope":
        ops += [
            rope("rope.q", q, "qr", numel=rows * wide, width=width),
            rope("rope.k", k, "kr", numel=rows * narrow, width=width),
        ]
        q, k = "qr", "kr"
    core = _core(model, job, q=q, k=k, v="v", layer=layer, sequences=sequences)
    ops += [core] if job.attention == "flash" else _unfused(model, core, job=job, sequences=sequences)
    ops.append(
        matmul("attention.out", "o", "a", rows=rows, into=wide, outof=model.width, width=width, bias=model.out_bias)
    )
    return ops


def _core(model: Model, job: Job, *, q: str, k: str, v: str, layer: int, sequences: int) -> Op:
    """Flash attention: keeps q, k, v, its output and one fp32 log-sum-exp per query and head (arXiv:2205.14135)."""
    rows, width = sequences * job.sequence, activation_width(job)
    dims = (model.mla.nope_dim + model.mla.rope_dim, model.mla.v_dim) if model.mla else (model.head_dim,) * 2
    per_pair = 2 * model.heads * sum(dims) * sequences
    kv_heads = model.heads if model.mla else model.kv_heads
    moved = rows * (model.heads + kv_heads) * sum(dims) * width
    return Op(
        "attention.core", "attention", (q, k, v),
        {"o": rows * model.heads * dims[1] * width, "lse": rows * model.heads * 4},
        keeps=(q, k, v, "o", "lse"),
        flops=per_pair * attended_pairs(model, job, layer=layer, causal=False),
        causal_flops=per_pair * attended_pairs(model, job, layer=layer, causal=True),
        shape=(sequences, job.sequence, dims[0]),
        moved_bytes=moved, moved_backward_bytes=2 * moved,
    )  # fmt: skip


def _latent(model: Model, job: Job, source: str, *, layer: int, sequences: int) -> list[Op]:
    mla, rows, width = model.mla, sequences * job.sequence, activation_width(job)
    assert mla is not None
    N, q_dim = model.heads, mla.nope_dim + mla.rope_dim

    def linear(name: str, into: str, out: str, *, a: int, b: int, bias: bool = False) -> Op:
        return matmul(f"attention.{name}", into, out, rows=rows, into=a, outof=b, width=width, bias=bias)

    def normed(name: str, into: str, *, dim: int) -> Op:
        return norm(f"attention.{name}", into, f"{into}n", rows=rows, dim=dim, width=width, kind=model.norm)

    if mla.q_rank is None:
        ops = [linear("q", source, "q", a=model.width, b=N * q_dim)]
    else:
        ops = [
            linear("q_down", source, "cq", a=model.width, b=mla.q_rank, bias=model.qkv_bias),
            normed("q_norm", "cq", dim=mla.q_rank),
            linear("q_up", "cqn", "q", a=mla.q_rank, b=N * q_dim),
        ]
    ops += [
        linear("kv_down", source, "ckv", a=model.width, b=mla.kv_rank + mla.rope_dim, bias=model.qkv_bias),
        normed("kv_norm", "ckv", dim=mla.kv_rank),
        linear("kv_up", "ckvn", "kv", a=mla.kv_rank, b=N * (mla.nope_dim + mla.v_dim)),
        # Rotated and joined to whole heads; the values stay a view of kv, whose storage is kept for them.
        rope("rope.q", "q", "qr", numel=rows * N * q_dim, width=width),
        rope("rope.k", "kv", "kr", numel=rows * N * q_dim, width=width),
    ]
    core = _core(model, job, q="qr", k="kr", v="kv", layer=layer, sequences=sequences)
    ops += [core] if job.attention == "flash" else _unfused(model, core, job=job, sequences=sequences)
    return [*ops, linear("out", "o", "a", a=N * mla.v_dim, b=model.width, bias=model.out_bias)]


def _unfused(model: Model, core: Op, *, job: Job, sequences: int) -> list[Op]:
    """Attention that writes its T x T scores: softmax keeps its output, dropout its mask (Korthikanti 2022)."""
    width = activation_width(job)
    q, k, v = core.reads
    pairs = sequences * model.heads * job.sequence**2
    core = core._replace(flops=core.flops // 2, causal_flops=core.causal_flops // 2)
    scores = core._replace(name="attention.scores", reads=(q, k), writes={"s": pairs * width}, keeps=(q, k))
    softmax = elementwise("attention.softmax", "activation", ("s",), "p", size=pairs * width, keeps=("p",))
    ops, probabilities = [scores, softmax], "p"
    if model.dropout:
        ops.append(dropout("attention.dropout", "p", "pd", size=pairs * width, mask=pairs))
        probabilities = "pd"
    output = core._replace(
        name="attention.values",
        reads=(probabilities, v),
        writes={"o": core.writes["o"]},
        keeps=(probabilities, v),
    )
    return [*ops, output]
