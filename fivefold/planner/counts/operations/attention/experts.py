"""Attention whose queries and output each token's experts make (JetMoE, arXiv:2404.07413)."""

from __future__ import annotations

from fivefold.planner.counts.operations.attention.core import list_core
from fivefold.planner.counts.operations.feedforward import list_router
from fivefold.planner.counts.operations.linear import LinearInput
from fivefold.planner.counts.operations.local_shapes import Local
from fivefold.planner.counts.operations.op import Op, elementwise, matmul, rename_tensors, rope


def list_experts(local: Local, source: str, *, layer: int) -> list[Op]:
    """List attention whose queries and output each token's experts make: gather, grouped matmul, scatter, twice.

    The rows that the experts of the output read are multiplied by the routing weights, so that what they make need not
    be kept. Source: transformers 5.23, ``JetMoeMoA``, which multiplies afterwards.
    """
    model, moe, shape, width = local.model, local.model.moe, local.attention(layer), local.width
    assert moe is not None
    rows, dim, size = local.rows, model.width, shape.kv_heads * shape.head_dim
    copies = rows * moe.topk
    router, topk = list_router(local, source, name="attention")
    names = {tensor: f"attention.{tensor}" for tensor in (*router.writes, *topk.writes)}

    def multiply(name: str, tensor: str, out: str, in_features: int, out_features: int) -> Op:
        numel = in_features * out_features * moe.experts
        n = max(1, copies // moe.experts)
        op = matmul(name, tensor, out, rows=copies, in_features=in_features, out_features=out_features, width=width)
        return op._replace(
            parameters=numel,
            wgrad_numels=(numel,),
            batch=moe.experts,
            shape=(n, out_features, in_features),
            keeps=(*op.keeps, "attention.ends"),
        )

    def move(name: str, reads: tuple[str, ...], out: str, columns: int) -> Op:
        return elementwise(
            name, "embedding", reads, out, size=copies * columns * width, keeps=("attention.permutation",)
        )

    gather = move("attention.gather", (source, names["weights"]), "copied", dim)
    collect = move("attention.out.gather", ("o", "attention.share"), "o.sorted", size)
    combine = elementwise("attention.combine", "embedding", ("ao",), "a.u", size=rows * dim * width)
    bias = elementwise("attention.bias", "activation", ("a.u",), "a", size=rows * dim * width)
    if not model.out_bias:
        combine = rename_tensors(combine, {"a.u": "a"})
    rotate = model.has_rope(layer)
    q, k = ("qr", "kr") if rotate else ("q", "k")
    entry = LinearInput(local, source, in_features=dim, rows=local.stream_rows)
    return [
        *entry.ops,
        *(rename_tensors(op, names) for op in (router, topk)),
        gather._replace(writes=gather.writes | {"attention.share": 4 * copies, "attention.ends": 4 * moe.experts}),
        multiply("attention.experts.q", "copied", "q.sorted", dim, size),
        move("attention.scatter", ("q.sorted",), "q", size),
        *(entry.column(f"attention.{name}", name, out_features=size) for name in "kv"),
        *(
            [
                rope("rope.q", "q", "qr", numel=rows * shape.query_dims, width=width),
                rope("rope.k", "k", "kr", numel=rows * size, width=width),
            ]
            if rotate
            else []
        ),
        *list_core(local, q=q, k=k, v="v", layer=layer),
        collect._replace(keeps=("o", "attention.share", *collect.keeps), backward_scratch=copies * size * width),
        multiply("attention.experts.out", "o.sorted", "ao", size, dim),
        combine._replace(
            keeps=("attention.permutation",),
            moved_bytes=(copies + rows) * dim * width,
            moved_backward_bytes=2 * copies * dim * width,
        ),
        *([bias._replace(parameters=dim, wgrad_numels=(dim,), passes_gradient=True)] if model.out_bias else []),
    ]
