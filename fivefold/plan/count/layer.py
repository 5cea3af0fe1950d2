"""The operations of a decoder in the order they run: embedding, block, head.

    x ── norm1 ── q,k,v ── rope ── attention ── out ──(+)── norm2 ── gate,up ── swiglu ── down ──(+)── x'

Letters: B sequences of T tokens in the micro-batch, D width, N and K heads of H, F feed-forward, V vocabulary.
"""

from __future__ import annotations

from fivefold.job import LOSS_CHUNK_ELEMENTS, Job
from fivefold.model.spec import Model
from fivefold.plan.count.attention import attention
from fivefold.plan.count.feedforward import experts, mlp
from fivefold.plan.count.ops import Op, activation_width, dropout, elementwise, matmul, norm


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
        ops.append(dropout("embed.dropout", next(iter(ops[-1].writes)), "xd", size=size, mask=rows * model.width))
    return ops


def block(model: Model, job: Job, *, layer: int, sequences: int) -> list[Op]:
    """One decoder layer: x → z."""
    rows, width = sequences * job.sequence, activation_width(job)
    size = activation_bytes(model, job, sequences=sequences)
    pre, post = model.block != "post", model.block in ("post", "sandwich")
    ops: list[Op] = []

    def normed(name: str, source: str) -> str:
        ops.append(norm(name, source, f"{name}.out", rows=rows, dim=model.width, width=width, kind=model.norm))
        return f"{name}.out"

    def residual(name: str, branch: str, onto: str, out: str) -> None:
        if model.dropout:
            ops.append(dropout(f"{name}.dropout", branch, f"{branch}.drop", size=size, mask=rows * model.width))
            branch = f"{branch}.drop"
        ops.append(elementwise(f"{name}.add", "add", (onto, branch), out, size=size))

    source = normed("norm1", "x") if pre else "x"
    ops += attention(model, job, source, layer=layer, sequences=sequences)
    branch = normed("norm1_post" if model.block == "sandwich" else "norm1", "a") if post else "a"
    residual("attention", branch, "x", "y")
    stream = "x" if model.block == "parallel" else "y"  # in parallel, the MLP reads what attention reads
    source = normed("norm2", stream) if pre else stream
    ops += (experts if model.is_moe(layer) else mlp)(model, source, rows=rows, width=width)
    branch = normed("norm2_post" if model.block == "sandwich" else "norm2", "d") if post else "d"
    residual("mlp", branch, "y", "z")
    return ops


def kinds(model: Model) -> dict[int, int]:
    """The first layer of every kind of block, and how many there are of it."""
    first: dict[tuple[bool, bool], int] = {}
    counts: dict[int, int] = {}
    for layer in range(model.layers):
        alike = first.setdefault((model.slides(layer), model.is_moe(layer)), layer)
        counts[alike] = counts.get(alike, 0) + 1
    return counts


def head(model: Model, job: Job, *, sequences: int) -> list[Op]:
    """x → loss. The logits exist once, in the dtype of the matmuls, and become their gradient in place."""
    rows, width = sequences * job.sequence, activation_width(job)
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
    return sequences * job.sequence * model.width * activation_width(job)
