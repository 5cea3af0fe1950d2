"""The operations of a decoder in the order they run: embedding, block, head. Branches by model live here only.

    x ── norm1 ── q,k,v ── rope ── attention ── out ──(+)── norm2 ── gate,up ── swiglu ── down ──(+)── x'

Letters: B sequences of T tokens in the micro-batch, D width, N and K heads of H, F feed-forward, V vocabulary.
"""

from __future__ import annotations

from fivefold.job import LOSS_CHUNK_ELEMENTS, Job
from fivefold.model.spec import Model
from fivefold.plan.count.ops import Op, elementwise, matmul, norm, rope
from fivefold.record import Mistake


def check_countable(model: Model) -> None:
    """Refuse what these lists do not describe yet, by the name of the missing operation."""
    if model.moe or model.mla:
        missing = "mixture of experts" if model.moe else "multi-head latent attention"
        raise Mistake(f"model {model.name!r}: the planner cannot count {missing} yet; it plans dense models")
    if model.block == "parallel":
        raise Mistake(f"model {model.name!r}: the planner cannot count parallel attention and MLP yet")


def embedding(model: Model, job: Job, *, sequences: int) -> list[Op]:
    """Token ids → x, with learned positions where the model has them."""
    rows = sequences * job.sequence
    size = activation_bytes(model, job, sequences=sequences)
    table = model.vocab * model.width
    tokens = elementwise("embed.tokens", "embedding", ("ids",), "x", size=size, keeps=("ids",))
    ops = [tokens._replace(parameters=table, gradient_widths=(table,), differentiates=())]
    if model.position == "learned":
        table = model.positions * model.width
        add = elementwise("embed.positions", "embedding", ("x",), "xp", size=size)
        ops.append(add._replace(parameters=table, gradient_widths=(table,)))
    if model.dropout:
        ops.append(_dropout("embed.dropout", _last(ops), "xd", size=size, mask=rows * model.width))
    return ops


def block(model: Model, job: Job, *, layer: int, sequences: int) -> list[Op]:
    """One decoder layer: x → z."""
    rows, width = sequences * job.sequence, _width(job)
    size = activation_bytes(model, job, sequences=sequences)
    pre, post = model.block != "post", model.block in ("post", "sandwich")
    ops: list[Op] = []

    def normed(name: str, source: str) -> str:
        ops.append(norm(name, source, f"{name}.out", rows=rows, dim=model.width, width=width, kind=model.norm))
        return f"{name}.out"

    def residual(name: str, branch: str, onto: str, out: str) -> None:
        if model.dropout:
            ops.append(_dropout(f"{name}.dropout", branch, f"{branch}.drop", size=size, mask=rows * model.width))
            branch = f"{branch}.drop"
        ops.append(elementwise(f"{name}.add", "add", (onto, branch), out, size=size))

    source = normed("norm1", "x") if pre else "x"
    ops += _attention(model, job, source, layer=layer, sequences=sequences)
    branch = normed("norm1_post" if model.block == "sandwich" else "norm1", "a") if post else "a"
    residual("attention", branch, "x", "y")
    source = normed("norm2", "y") if pre else "y"
    ops += _mlp(model, source, rows=rows, width=width)
    branch = normed("norm2_post" if model.block == "sandwich" else "norm2", "d") if post else "d"
    residual("mlp", branch, "y", "z")
    return ops


def head(model: Model, job: Job, *, sequences: int) -> list[Op]:
    """x → loss. The logits exist once, in the dtype of the matmuls, and become their gradient in place."""
    rows, width = sequences * job.sequence, _width(job)
    logits = rows * model.vocab * width
    chunk = min(rows, max(1, LOSS_CHUNK_ELEMENTS // model.vocab)) * model.vocab * 4
    project = matmul(
        "head.out", "h", "logits", rows=rows, into=model.width, outof=model.vocab, width=width, bias=model.head_bias
    )
    loss = Op(
        "loss", "loss", ("logits",), {"loss": 4}, keeps=("logits",), in_place=True,
        moved_bytes=2 * logits, moved_backward_bytes=2 * logits,
        forward_scratch=2 * chunk if width < 4 else chunk,  # the softmax of a chunk, and the chunk widened for it
    )  # fmt: skip
    return [norm("head.norm", "x", "h", rows=rows, dim=model.width, width=width, kind=model.norm), project, loss]


def activation_bytes(model: Model, job: Job, *, sequences: int) -> int:
    """The residual stream of a micro-batch: B·T·D in the width of activations."""
    return sequences * job.sequence * model.width * _width(job)


def attended_pairs(model: Model, job: Job, *, layer: int, causal: bool) -> int:
    """Query-key pairs of one sequence: the full square, or exactly what mask and window let through."""
    tokens = job.sequence
    if not causal:
        return tokens * tokens
    window = min(model.window or tokens, tokens) if model.slides(layer) else tokens
    return window * (window + 1) // 2 + (tokens - window) * window


def _attention(model: Model, job: Job, source: str, *, layer: int, sequences: int) -> list[Op]:
    rows, width = sequences * job.sequence, _width(job)
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
    per_pair = 4 * model.heads * model.head_dim * sequences
    flops = per_pair * attended_pairs(model, job, layer=layer, causal=False)
    core = Op(
        "attention.core", "attention", (q, k, "v"), {"o": rows * wide * width, "lse": rows * model.heads * 4},
        keeps=(q, k, "v", "o", "lse"), flops=flops,
        causal_flops=per_pair * attended_pairs(model, job, layer=layer, causal=True),
        shape=(sequences, job.sequence, model.head_dim),
        moved_bytes=2 * rows * (wide + narrow) * width, moved_backward_bytes=4 * rows * (wide + narrow) * width,
    )  # fmt: skip
    ops += [core] if job.attention == "flash" else _unfused(model, core, q=q, k=k, sequences=sequences, job=job)
    ops.append(
        matmul("attention.out", "o", "a", rows=rows, into=wide, outof=model.width, width=width, bias=model.out_bias)
    )
    return ops


def _unfused(model: Model, core: Op, *, q: str, k: str, sequences: int, job: Job) -> list[Op]:
    """Attention that writes its T x T scores: softmax keeps its output, dropout its mask (Korthikanti 2022)."""
    width = _width(job)
    pairs = sequences * model.heads * job.sequence**2
    core = core._replace(flops=core.flops // 2, causal_flops=core.causal_flops // 2)
    scores = core._replace(name="attention.scores", reads=(q, k), writes={"s": pairs * width}, keeps=(q, k))
    softmax = elementwise("attention.softmax", "activation", ("s",), "p", size=pairs * width, keeps=("p",))
    ops, probabilities = [scores, softmax], "p"
    if model.dropout:
        ops.append(_dropout("attention.dropout", "p", "pd", size=pairs * width, mask=pairs))
        probabilities = "pd"
    output = core._replace(
        name="attention.values",
        reads=(probabilities, "v"),
        writes={"o": core.writes["o"]},
        keeps=(probabilities, "v"),
    )
    return [*ops, output]


def _mlp(model: Model, source: str, *, rows: int, width: int) -> list[Op]:
    def linear(name: str, into: str, out: str, *, a: int, b: int) -> Op:
        return matmul(f"mlp.{name}", into, out, rows=rows, into=a, outof=b, width=width, bias=model.mlp_bias)

    size = rows * model.ffn * width
    up = linear("up", source, "u", a=model.width, b=model.ffn)
    down = linear("down", "m", "d", a=model.ffn, b=model.width)
    if model.mlp == "plain":
        return [up, elementwise("mlp.act", "activation", ("u",), "m", size=size, keeps=("u",)), down]
    gate = linear("gate", source, "g", a=model.width, b=model.ffn)
    product = elementwise("mlp.act", "activation", ("g", "u"), "m", size=size, keeps=("g", "u"), backward_scratch=size)
    return [gate, up, product, down]


def _dropout(name: str, source: str, out: str, *, size: int, mask: int) -> Op:
    return elementwise(name, "activation", (source,), out, size=size, mask=mask)


def _width(job: Job) -> int:
    """Bytes of an activation: as the matmuls', but fp8 exists only inside them."""
    return 4 if job.precision.compute in ("fp32", "tf32") else 2


def _last(ops: list[Op]) -> str:
    return next(iter(ops[-1].writes))
