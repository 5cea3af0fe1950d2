"""The operations of the feed-forward part: an MLP, or routed experts with shared ones beside them.

    mlp       source → gate, up → act → down → d
    experts   source → router → top-k → gather rows → gate, up → act · weight → down → sum of k → (+ shared) → d

Every token goes to exactly k experts (dropless), so the experts' matmuls have k rows a token, however they are spread.
The routing weight multiplies the activation before ``down``: then the experts' output need not be kept.
"""

from __future__ import annotations

from fivefold.model.spec import Model
from fivefold.plan.count.ops import Op, elementwise, matmul


def mlp(model: Model, source: str, *, rows: int, width: int) -> list[Op]:
    """``source`` [rows, D] → ``d`` [rows, D]."""
    return _mlp(model, source, "d", name="mlp", ffn=model.ffn, rows=rows, width=width, bias=model.mlp_bias)


def experts(model: Model, source: str, *, rows: int, width: int) -> list[Op]:
    """``source`` [rows, D] → ``d`` [rows, D] by way of ``topk`` experts a token."""
    moe = model.moe
    assert moe is not None
    routed, size = rows * moe.topk, rows * model.width * width
    router = matmul(
        "moe.router", source, "scores", rows=rows, into=model.width, outof=moe.experts, width=4, bias=moe.router_bias
    )._replace(keeps=(source,))
    pick = elementwise("moe.topk", "activation", ("scores",), "weights", size=rows * moe.experts * 4, keeps=("scores",))
    gather = Op(
        "moe.dispatch", "embedding", (source,), {"routed": moe.topk * size}, moved_bytes=2 * moe.topk * size,
        moved_backward_bytes=(moe.topk + 1) * size,
    )  # fmt: skip
    inner = _mlp(
        model, "routed", "returned", name="moe.experts", ffn=moe.ffn, rows=routed, width=width, bias=moe.expert_bias
    )
    inner = [_all_experts(op, moe.experts) if op.kind == "matmul" else _weighted(op) for op in inner]
    combine = Op(
        "moe.combine", "embedding", ("returned",), {"e": size}, moved_bytes=(moe.topk + 1) * size,
        moved_backward_bytes=2 * moe.topk * size,
    )  # fmt: skip
    ops = [router, pick, gather, *inner, combine]
    if not moe.shared_experts:
        return [*ops[:-1], combine._replace(writes={"d": size})]
    ffn = moe.shared_experts * (moe.shared_ffn or moe.ffn)
    shared = _mlp(model, source, "shared", name="moe.shared", ffn=ffn, rows=rows, width=width, bias=model.mlp_bias)
    return [*ops, *shared, elementwise("moe.add", "add", ("e", "shared"), "d", size=size)]


def _mlp(model: Model, source: str, out: str, *, name: str, ffn: int, rows: int, width: int, bias: bool) -> list[Op]:
    def linear(part: str, into: str, to: str, *, a: int, b: int) -> Op:
        return matmul(f"{name}.{part}", into, to, rows=rows, into=a, outof=b, width=width, bias=bias)

    g, u, m = (f"{name}.{part}" for part in ("g", "u", "m"))
    size = rows * ffn * width
    up, down = linear("up", source, u, a=model.width, b=ffn), linear("down", m, out, a=ffn, b=model.width)
    if model.mlp == "plain":
        return [up, elementwise(f"{name}.act", "activation", (u,), m, size=size, keeps=(u,)), down]
    product = elementwise(f"{name}.act", "activation", (g, u), m, size=size, keeps=(g, u), backward_scratch=size)
    return [linear("gate", source, g, a=model.width, b=ffn), up, product, down]


def _all_experts(op: Op, experts: int) -> Op:
    """A matmul whose rows are spread over all experts: the work of its rows, the weights of everyone."""
    return op._replace(
        parameters=op.parameters * experts, gradient_widths=tuple(width * experts for width in op.gradient_widths)
    )


def _weighted(op: Op) -> Op:
    """The activation, times the routing weight of each row."""
    return op._replace(reads=(*op.reads, "weights"), keeps=(*op.keeps, "weights"))
