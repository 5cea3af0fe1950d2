"""The operations of hyper-connections: streams → what a branch reads → branch → streams; and their sum for the head.

    operation   keeps for its backward                                    bytes of a token, w per element
    hyperN      the streams, the numbers m that they make, one statistic   w nD + 4(2n + n²) + 4
    hyperN.mix  the streams (if they are mixed), the branch's output, m    w nD + w D

n streams of D. One kernel each computes them and, in its backward, all that follows from m again (arXiv:2512.24880
§4.3.1). PyTorch's kernels, one after another, keep the streams in fp32, normed or not, and each result of Sinkhorn's
iterations (transformers 5.23, ``DeepseekV4HyperConnection.forward``). Products of the streams with W and comb are
FLOPs; weighted sums, as those of norms, are not.
"""

from __future__ import annotations

from fivefold.model.hyper_connections import HyperConnections
from fivefold.planner.counts.operations.local_shapes import Local
from fivefold.planner.counts.operations.op import Op, elementwise


def expand(local: Local, source: str, out: str) -> Op:
    """Return the copies of the embedding that the streams begin as."""
    hyper = _get(local)
    size = local.stream_bytes
    return Op(
        "embed.streams",
        "cast",
        (source,),
        {out: hyper.streams * size},
        moved_bytes=(1 + hyper.streams) * size,
        moved_backward_bytes=(1 + hyper.streams) * size,
    )


def connect(local: Local, name: str, source: str) -> Op:
    """Return the operation before a branch: it writes the input of the branch, ``name``.out, and ``name``.m.

    ``name``.m are the coefficients by which ``mix`` adds the output of the branch to the streams.
    """
    hyper = _get(local)
    op = _collapse(local, name, source, connections=hyper.connections, scales=2 + hyper.mixes)
    if not local.norm.plain:
        return op
    return _with_saved_coefficients(op, local, hyper, name, connections=hyper.connections)


def mix(local: Local, name: str, branch: str, onto: str, out: str) -> Op:
    """Return the streams after a branch: ``out`` = post · ``branch`` + comb · ``onto``, or + ``onto``."""
    hyper, rows, width = _get(local), local.stream_rows, local.width
    size, n = local.stream_bytes, hyper.streams
    reads = (onto, branch, f"{name}.m")
    kept = (*(reads[:1] if hyper.mixes else ()), *reads[1:])
    writes = {out: n * size}
    if local.norm.plain:  # post and comb in the stream's dtype, or post and the branch's output in fp32
        size_of_number = width if hyper.mixes else 4
        numbers = {f"{name}.weights": rows * n * (1 + n * hyper.mixes) * size_of_number}
        copy = {f"{branch}.wide": 4 * rows * local.stream_width} if width < 4 and not hyper.mixes else {}
        writes |= numbers | copy
        kept = (*((onto,) if hyper.mixes else ()), *(copy or (branch,)), *numbers)
    flops = 2 * rows * n * n * local.stream_width if hyper.mixes else 0
    forward_scratch, backward_scratch = _count_mix_scratch(local, hyper)
    return Op(
        f"{name}.mix",
        "activation",
        reads,
        writes,
        keeps=kept,
        flops=flops,
        causal_flops=flops,
        moved_bytes=(2 * n + 1) * size,
        moved_backward_bytes=(3 * n + 2) * size,
        forward_scratch=forward_scratch,
        backward_scratch=backward_scratch,
    )


def collapse(local: Local, source: str, out: str) -> Op:
    """Return the weighted sum of all streams that the final norm reads."""
    hyper = _get(local)
    op = _collapse(local, "head.hyper", source, connections=hyper.streams, scales=1)
    if local.norm.plain:
        op = _with_saved_coefficients(op, local, hyper, "head.hyper", connections=hyper.streams)
    writes = {out if name == "head.hyper.out" else name: size for name, size in op.writes.items()}
    return op._replace(writes=writes)


def _get(local: Local) -> HyperConnections:
    """Return the model's hyper-connections, which it is known to have."""
    assert local.model.hyper_connections is not None
    return local.model.hyper_connections


def _collapse(local: Local, name: str, source: str, *, connections: int, scales: int) -> Op:
    """Return the norm and product that make ``connections`` numbers, and the sum of the streams by the first of them.

    One kernel reads the streams once; in 16 bits the trainer's hold them in fp32 (forward), them, their gradient and
    that of the sum (backward).
    """
    rows, n, size = local.stream_rows, _get(local).streams, local.stream_bytes
    numel = rows * n * local.stream_width
    matrix = connections * n * local.stream_width
    flops = 2 * numel * connections
    fp32_bytes = 0 if local.norm.fused or local.width == 4 else 4 * numel
    column_bytes, number_bytes = fp32_bytes // n, 0 if local.norm.fused else 4 * rows
    op = elementwise(name, "activation", (source,), f"{name}.out", size=size)
    statistics = {f"{name}.m": 4 * rows * connections, f"{name}.stat": 4 * rows}
    return op._replace(
        writes=op.writes | statistics,
        keeps=(source, *statistics),
        parameters=matrix + connections + scales,
        wgrad_numels=(matrix, connections, scales),
        flops=flops,
        causal_flops=flops,
        moved_bytes=(n + 1) * size,
        moved_backward_bytes=(2 * n + 1) * size,
        forward_scratch=fp32_bytes + column_bytes + n * number_bytes,
        # after the copies the gradient of the numbers, pre and its gradient, and a product of each row
        backward_scratch=2 * fp32_bytes + column_bytes + (connections + 2 * n + 1) * number_bytes,
        scratch_tensor=fp32_bytes or connections * number_bytes,
    )


def _count_mix_scratch(local: Local, hyper: HyperConnections) -> tuple[int, int]:
    """Return the scratch bytes of ``mix``, forward and backward: of one kernel only the numbers' gradient.

    PyTorch's kernels hold each half iteration of Sinkhorn: before the streams are made, and while their gradient is.
    In 16 bits the backward begins with the branch's output and a product with it in fp32.
    """
    rows, n = local.stream_rows, hyper.streams
    numel, number_bytes = rows * local.stream_width, 4 * rows
    if local.norm.fused:
        return 0, hyper.connections * number_bytes
    is_fp32 = local.width == 4
    begin_bytes = (4 if is_fp32 else 8) * numel + 3 * n * number_bytes
    begin_bytes -= n * local.stream_bytes + hyper.connections * number_bytes  # gradients that do not exist yet
    if not hyper.mixes:  # the new streams, one by one and joined, in fp32
        return (4 if is_fp32 else 8) * n * numel + n * number_bytes, max(n * number_bytes, begin_bytes)
    sinkhorn_bytes = (n * n + (2 * hyper.iterations - 1) * (n * n + n)) * number_bytes
    cast_bytes = 0 if is_fp32 else n * n * number_bytes // 2
    forward_bytes = max((n * n + n) * number_bytes + cast_bytes, sinkhorn_bytes - n * local.stream_bytes)
    return forward_bytes, max(sinkhorn_bytes + (n * n + 3 * n) * number_bytes + cast_bytes, begin_bytes)


def _with_saved_coefficients(op: Op, local: Local, hyper: HyperConnections, name: str, *, connections: int) -> Op:
    """Return ``op`` as unfused PyTorch runs it: each factor of a product or division is kept, in fp32."""
    rows, n, (source,) = local.stream_rows, hyper.streams, op.reads
    fp32 = 4 * rows * n * local.stream_width
    saved = {} if local.width == 4 else {f"{name}.wide": fp32}
    if hyper.mixes:  # the normed streams, which W multiplies; independent ones are multiplied before the norm
        saved |= {f"{name}.normal": fp32}
    per_row = n + min(2, connections // n) * n  # pre, and sigmoids
    if connections > 2 * n:  # softmax; then, per half iteration of Sinkhorn, the matrix and its sums
        per_row += n * n + (2 * hyper.iterations - 1) * (n * n + n)
    elif not hyper.mixes:  # the product with W, before the norm's factor
        per_row += connections
    saved |= {f"{name}.weights.saved": 4 * rows * per_row}
    return op._replace(writes=op.writes | saved, keeps=(source, *op.keeps[1:], *saved))
