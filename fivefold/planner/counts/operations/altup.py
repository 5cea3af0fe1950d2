"""The operations of AltUp, and of the low-rank branch next to attention that comes with it (LAuReL, arXiv:2411.07501).

    predict   x → router(x_0) → W;  x + W x → p            kept: x, the router's input and numbers, W, a copy of p_0
    correct   y → router(y) → w;  p + w (y − p_0) → c      kept: y − p_0, the router's input and numbers, w
    laurel    h → left → right → norm → (+ h) → l          (y' + l) / √2 → y

n parts of D, as the trainer's modules compute and keep them. With kernels=plain they are those of transformers 5.23
(``Gemma3nTextAltUp``): y − p_0 is kept n times.
"""

from __future__ import annotations

from fivefold.model.altup import AltUp
from fivefold.planner.counts.operations.linear import list_norm
from fivefold.planner.counts.operations.local_shapes import Local
from fivefold.planner.counts.operations.op import Op, elementwise, matmul, matmul_groups, norm


def predict(local: Local, altup: AltUp, source: str, out: str) -> list[Op]:
    """List what predicts all parts of the stream, ``out``, and names the first of them, ``out``.0."""
    rows, n, size = local.stream_rows, altup.streams, local.stream_bytes
    flops = 2 * rows * local.stream_width * n * n
    product = elementwise("altup.mix", "activation", (source, f"{out}.w"), out, size=n * size)
    copy = Op("altup.predicted", "cast", (out,), {f"{out}.0": size}, moved_bytes=2 * size,
              moved_backward_bytes=2 * n * size)  # fmt: skip
    return [
        # a view of the first part of the stream, whose gradient has the size of that part
        Op("altup.first", "message", (source,), {f"{source}.0": 0}, gradients={f"{source}.0": size}),
        *_route(local, altup, "altup.predict", f"{source}.0", f"{out}.w", numbers=n * n),
        product._replace(
            keeps=(source, f"{out}.w"),
            flops=flops,
            causal_flops=flops,
            moved_bytes=4 * n * size,  # the product is permuted back by a copy
            moved_backward_bytes=6 * n * size,
        ),
        copy,
    ]


def correct(local: Local, altup: AltUp, predicted: str, source: str, out: str) -> list[Op]:
    """List what corrects the ``predicted`` parts by what the layer made of the first, ``source``, and what reads it.

    ``out``: the corrected parts; ``out``.s: the first of them, copied and scaled.
    """
    n, size, width = altup.streams, local.stream_bytes, local.stream_width
    copies = n if local.norm.plain else 1
    new = elementwise("altup.innovation", "activation", (source, f"{predicted}.0"), f"{out}.new", size=copies * size)
    sum_ = elementwise("altup.correct.add", "activation", (f"{out}.new", f"{out}.w", predicted), out, size=n * size)
    ops = [
        *_route(local, altup, "altup.correct", source, f"{out}.w", numbers=n),
        new._replace(moved_bytes=(2 + copies) * size, moved_backward_bytes=(2 + copies) * size),
        sum_._replace(keeps=(f"{out}.new", f"{out}.w"), backward_scratch=n * size),
    ]
    copy = Op("altup.copy", "cast", (out,), {f"{out}.0": size}, moved_bytes=2 * size, moved_backward_bytes=2 * n * size)
    scale = elementwise("altup.scale", "activation", (f"{out}.0",), f"{out}.s", size=size, keeps=(f"{out}.0",))
    return [*ops, copy, scale._replace(parameters=width, wgrad_numels=(width,), backward_scratch=size)]


def add_laurel(local: Local, rank: int, source: str, onto: str, out: str) -> list[Op]:
    """List the branch of rank ``rank`` that reads what attention reads, and its mean with ``onto``: → ``out``."""
    rows, width, dim, size = local.stream_rows, local.width, local.stream_width, local.stream_bytes
    normed = norm("laurel.norm", "ll", "ln", rows=rows, dim=dim, width=width, kind=local.norm)
    return [
        matmul("laurel.left", source, "lr", rows=rows, in_features=dim, out_features=rank, width=width),
        matmul("laurel.right", "lr", "ll", rows=rows, in_features=rank, out_features=dim, width=width),
        list_norm(local, normed),
        elementwise("laurel.add", "add", (source, "ln"), "l", size=size),
        elementwise("laurel.join", "add", (onto, "l"), f"{out}.sum", size=size),
        elementwise("laurel.mean", "activation", (f"{out}.sum",), out, size=size),
    ]


def expand(local: Local, altup: AltUp, source: str, out: str) -> list[Op]:
    """List the operations that expand the embedding to all streams of AltUp."""
    rows, n, dim, size = local.stream_rows, altup.streams, local.stream_width, local.stream_bytes
    project = matmul(
        "embed.altup", source, "au", rows=rows, in_features=dim, out_features=(n - 1) * dim, width=local.width
    )
    scale = elementwise("embed.altup.scale", "activation", (source, "au"), "av", size=(n - 1) * size)
    join = elementwise("embed.altup.join", "cast", (source, "av"), out, size=n * size)
    return [
        project._replace(wgrad_numels=(dim * dim,) * (n - 1)),
        scale._replace(keeps=(source, "au", *(["av"] if local.norm.plain else [])), backward_scratch=(n - 1) * size),
        join._replace(moved_bytes=2 * n * size, moved_backward_bytes=2 * n * size),
    ]


def collapse(local: Local, altup: AltUp, source: str, out: str) -> list[Op]:
    """List what makes the mean of all parts, which the final norm reads."""
    rows, n, dim, size = local.stream_rows, altup.streams, local.stream_width, local.stream_bytes
    sizes = {"rows": rows, "in_features": dim, "out_features": dim, "width": local.width}
    project = matmul_groups("head.altup", source, "hu", groups=n - 1, **sizes)
    scale = elementwise("head.altup.scale", "activation", (source, "hu"), "hv", size=(n - 1) * size)
    mean = elementwise("head.altup.mean", "activation", (source, "hv"), out, size=size)
    return [
        project._replace(wgrad_numels=(dim * dim,) * (n - 1)),
        scale._replace(keeps=(source, "hu", *(["hv"] if local.norm.plain else [])), backward_scratch=(n - 1) * size),
        # parts are joined in a copy, whose mean is taken
        mean._replace(forward_scratch=n * size, moved_bytes=(3 * n + 1) * size, moved_backward_bytes=(n + 1) * size),
    ]


def _route(local: Local, altup: AltUp, name: str, source: str, out: str, *, numbers: int) -> list[Op]:
    """List what makes ``numbers`` of each token from a part of the stream.

    Both routers of a layer are one module, whose weights are counted where it predicts.
    """
    rows, dim, width, n = local.stream_rows, local.stream_width, local.width, altup.streams
    act = elementwise(f"{name}.act", "activation", (f"{out}.r",), f"{out}.t", size=rows * n * width)
    ops = [
        norm(f"{name}.norm", source, f"{out}.n", rows=rows, dim=dim, width=width, kind=local.norm),
        elementwise(f"{name}.norm.scale", "activation", (f"{out}.n",), f"{out}.s", size=local.stream_bytes),
        matmul(f"{name}.project", f"{out}.s", f"{out}.r", rows=rows, in_features=dim, out_features=n, width=width),
        act._replace(keeps=(f"{out}.t",), forward_scratch=4 * rows * n),
    ]
    if name == "altup.correct":
        ops = [op._replace(parameters=0) for op in ops]
    return [*ops, matmul(name, f"{out}.t", out, rows=rows, in_features=n, out_features=numbers, width=width)]
