"""The core of attention: scores, softmax and values, by a flash kernel or unfused."""

from __future__ import annotations

from math import lcm

from fivefold.model.attention import AttentionShape
from fivefold.planner.counts.operations.attention.windows import count_attended_pairs, get_chunk, get_window
from fivefold.planner.counts.operations.launches import (
    PADDED_CORE_LAUNCHES,
    RING_BLOCK_LAUNCHES,
    RING_COPY_LAUNCHES,
    RING_LAUNCHES,
)
from fivefold.planner.counts.operations.local_shapes import Local
from fivefold.planner.counts.operations.op import Op, OpMessage, dropout, elementwise, swap_heads
from fivefold.units import ceil_div

# PyTorch's memory-efficient kernel keeps the log-sum-exp of a multiple of this many queries of a head
# (kAlignLSE, pytorch/pytorch@v2.13.0:aten/src/ATen/native/transformers/cuda/mem_eff_attention/kernel_forward.h)
LSE_QUERIES = 32


def list_core(
    local: Local, *, q: str, k: str, v: str, layer: int, value_storage: str = "", frees_keys_last: bool = False
) -> list[Op]:
    """List the operations of the attention core.

    Flash keeps q, k, v, its output and an fp32 log-sum-exp per query and head (arXiv:2205.14135). ``value_storage``:
    the tensor that the values are a view of, if they are one. ``frees_keys_last``: in the backward the gradient of the
    keys is read after that of the values.
    """
    model, job, part, rows, width = local.model, local.job, local.part, local.rows, local.width
    shape = local.attention(layer)
    heads, kv_heads, dims = shape.heads, shape.kv_heads, (shape.head_dim, shape.value_dim)
    ops, message = [], None
    if part.cp > 1 and part.ulysses:  # key heads are repeated to a multiple of cp
        kv_heads = lcm(kv_heads, part.cp)
    kv_bytes = rows * kv_heads * sum(dims) * width
    if part.cp > 1 and part.ulysses:
        for tensor, size in ((q, heads * dims[0]), (k, kv_heads * dims[0]), (v, kv_heads * dims[1])):
            ops.append(swap_heads("attention", tensor, f"{tensor}.all", size=rows * size * width))
        q, k, v, value_storage = f"{q}.all", f"{k}.all", f"{v}.all", ""
    elif part.cp > 1:
        # in the backward the gradients of keys and values travel with them
        message = OpMessage(
            "cp", "p2p", "p2p", kv_bytes, times=part.cp - 1, backward_payload=2 * kv_bytes, backward_parts=2
        )
    window = get_window(model, job, layer=layer)
    chunk = get_chunk(model, job, layer=layer) or job.sequence
    by_bands = model.attention_softcap is not None or model.position == "alibi" or _uses_dropout_kernel(local)
    windowed = window is not None or by_bands or model.dynamic_mask is not None  # by the kernel that pads no head dim
    kernel = dims if windowed else _choose_kernel_dims(local, shape._replace(kv_heads=kv_heads))
    sinks = (heads,) if shape.sinks else ()
    moved = rows * (heads + kv_heads) * sum(dims) * width
    out = "o.all" if part.ulysses and part.cp > 1 else "o"
    core = Op(
        "attention.core",
        "attention",
        (q, k, v),
        {out: rows * heads * dims[1] * width, "lse": rows * heads * 4},
        keeps=(q, k, value_storage or v, out, "lse"),
        parameters=sum(sinks),
        wgrad_numels=sinks,
        shape=(part.sequences * job.sequence // chunk, chunk, dims[0]),
        batch=heads,
        moved_bytes=moved,
        moved_backward_bytes=2 * moved,
        message=message,
    )
    forward, backward = _count_scratch(local, shape, kernel=kernel, ring_bytes=kv_bytes if message else 0)
    core = _with_flops(core, local, layer=layer, dims=kernel)._replace(
        forward_scratch=forward,
        backward_scratch=backward,
        launches=_count_core_launches(local, is_padded=kernel != dims, ring_steps=message.times if message else 0),
    )
    # PyTorch's kernel for two head dims saves its random seeds, and the log-sum-exp of a multiple of 32 queries
    if not windowed and dims[0] != dims[1] and kernel == dims and local.facts.has_own_attention_kernels:
        n_sequences = part.sequences * ceil_div(job.sequence, chunk) * heads // (part.cp if part.ulysses else 1)
        lse_bytes = 4 * n_sequences * ceil_div(chunk, LSE_QUERIES) * LSE_QUERIES
        core = core._replace(writes=core.writes | {"lse": lse_bytes, "seeds": 16}, keeps=(*core.keeps, "seeds"))
    # the gradients of k and v are views of one tensor, which is held until the last of them is freed
    if message and model.mla is None and local.facts.has_own_attention_kernels:
        sums_keys = shape.tied_values and k == "k"  # values made from them have a gradient that is added to theirs
        if not sums_keys:
            core = core._replace(gradients={k: kv_bytes, v: 0} if frees_keys_last else {k: 0, v: kv_bytes})
    if model.dynamic_mask is not None:
        core = _add_mask(core, local, dims=dims)
    ops += _list_unfused(local, core, dims=dims) if job.stack.attention_facts.materializes_scores else [core]
    if out != "o":
        ops.append(swap_heads("attention", out, "o", size=rows * heads * dims[1] * width))
    return ops


def _add_mask(core: Op, local: Local, *, dims: tuple[int, int]) -> Op:
    """Return the attention with a mask of values, which has a gradient as large as it."""
    numel, width = local.rows * local.job.sequence * core.batch, local.width
    if local.facts.has_own_attention_kernels:  # scores in fp32, which the backward computes again
        core = core._replace(
            backward_flops=2 * core.flops + core.flops * dims[0] // sum(dims),
            forward_scratch=numel * (4 + (width if width < 4 else 0)),
            backward_scratch=numel * 4,
        )
    return core._replace(
        reads=(*core.reads, "mask"),
        keeps=(*core.keeps, "mask"),
        moved_bytes=core.moved_bytes + numel * width,
        moved_backward_bytes=core.moved_backward_bytes + 2 * numel * width,
    )


def _uses_dropout_kernel(local: Local) -> bool:
    """Return True if attention dropout selects our sliding-window kernel, which redraws the masks."""
    dropped = local.model.dropout_rates.attention > 0
    return dropped and not local.job.stack.attention_facts.materializes_scores and local.facts.has_own_attention_kernels


def _with_flops(core: Op, local: Local, *, layer: int, dims: tuple[int, int]) -> Op:
    """Return the core with its FLOPs.

    ``flops`` count all T × T pairs of query and key, ``causal_flops`` only the visible ones, both divided by cp.
    ``windowed_flops`` are those of the visible pairs of all cp ranks together, and 0 without a window.
    """
    model, job, part = local.model, local.job, local.part
    per_pair = 2 * core.batch * sum(dims) * part.sequences
    full_flops, visible_flops = (
        per_pair * count_attended_pairs(model, job, layer=layer, causal=causal) for causal in (False, True)
    )
    by_bands = get_window(model, job, layer=layer) is not None or _uses_dropout_kernel(local)
    windowed_flops = visible_flops if by_bands and model.dynamic_mask is None else 0  # a mask has all pairs
    return core._replace(
        flops=ceil_div(full_flops, part.cp),
        causal_flops=ceil_div(visible_flops, part.cp),
        windowed_flops=windowed_flops,
    )


def _choose_kernel_dims(local: Local, shape: AttentionShape) -> tuple[int, int]:
    """Return the head dims of q and k and of v in the kernel.

    The trainer's blockwise kernel (its ring, sinks, grouped query heads, or on CPU) pads both to the larger
    (``trainer/model/flash_attention.py``).
    """
    dims = shape.head_dim, shape.value_dim
    by_blocks = (local.part.cp > 1 and not local.part.ulysses) or shape.sinks or shape.heads != shape.kv_heads
    by_blocks = by_blocks and not local.job.stack.attention_facts.materializes_scores
    pads = local.job.stack.attention_facts.pads_heads or (by_blocks and local.facts.has_own_attention_kernels)
    return (max(dims),) * 2 if pads else dims


def _count_core_launches(local: Local, *, is_padded: bool, ring_steps: int) -> tuple[int, int]:
    """Return the kernels of the trainer's attention core, forward and backward."""
    core = PADDED_CORE_LAUNCHES if is_padded else (1, 1)
    if not ring_steps:
        return core
    copies = RING_COPY_LAUNCHES if local.part.sequences > 1 else (0, 0)
    forward, backward = (
        core[way] + RING_LAUNCHES[way] + ring_steps * (RING_BLOCK_LAUNCHES[way] + copies[way]) for way in (0, 1)
    )
    return forward, backward


def _count_scratch(local: Local, shape: AttentionShape, *, kernel: tuple[int, int], ring_bytes: int) -> tuple[int, int]:
    """Return the scratch bytes of the core, forward and backward.

    ``ring_bytes``: bytes of this rank's keys and values in a ring, else 0. If head dims differ, v and the output are
    padded, in the backward also their gradients. A ring holds its keys and values and those that arrive, the result of
    a half of the queries, and fp32 sums; in the backward a result, and sums of the gradients of keys and values: the
    local ones and, with more than two ranks, those that arrive and leave.
    """
    n_rows = local.rows * shape.heads
    width = local.width
    cp = local.part.cp
    dims = (shape.head_dim, shape.value_dim)
    padded_bytes = n_rows * max(dims) * width if kernel != dims else 0
    if not ring_bytes:
        return 2 * padded_bytes, 4 * padded_bytes
    fp32_column = 4 * n_rows if width < 4 else 0
    q_bytes, o_bytes = n_rows * dims[0] * width, n_rows * dims[1] * width
    halves_bytes = (
        0 if local.part.sequences == 1 else q_bytes // 2 if padded_bytes else q_bytes // 2 + o_bytes + 2 * n_rows
    )  # halves, also of the log-sum-exp, are copies only if there are several sequences
    first_step = 2 * ring_bytes + 2 * padded_bytes
    ring_step = (
        fp32_column * dims[1]
        + ring_bytes * min(cp - 1, 2)
        + 3 * padded_bytes // 2
        - (o_bytes // 2 if fp32_column else -o_bytes // 2)
    )
    # with the gradients of the block before: in the second step of all queries; later also sums on their way
    second_block = ring_bytes * (3 if cp == 2 else 4) + q_bytes // 2
    later_block = ring_bytes * (5 if cp == 3 else 6) + (0 if fp32_column else q_bytes) if cp > 2 else 0
    ring_backward = max(second_block, later_block) + 3 * padded_bytes + halves_bytes
    last_step = 4 * ring_bytes + q_bytes // 2 if cp == 2 else 0
    return max(first_step, ring_step), fp32_column * dims[0] + max(ring_backward, last_step)


def _list_unfused(local: Local, core: Op, *, dims: tuple[int, int]) -> list[Op]:
    """List the unfused core with T x T scores: softmax keeps its output, dropout its mask (Korthikanti 2022).

    ``dims``: dims of a head of q and k, for the scores, and of a head of v, for the weighted sum.
    """
    width, (q, k, v) = local.width, core.reads
    n_pairs = local.rows * core.batch * local.job.sequence
    of_scores, of_values = (
        core._replace(
            flops=core.flops * dim // sum(dims),
            causal_flops=core.causal_flops * dim // sum(dims),
            windowed_flops=0,
            forward_scratch=0,
            backward_scratch=0,
            parameters=0,
            wgrad_numels=(),
        )
        for dim in dims
    )
    scores = of_scores._replace(
        name="attention.core.scores", reads=(q, k), writes={"core.s": n_pairs * width}, keeps=(q, k)
    )
    softmax = elementwise(
        "attention.core.softmax", "activation", ("core.s",), "core.p", size=n_pairs * width, keeps=("core.p",)
    )
    ops, probabilities = [scores, softmax], "core.p"
    if local.model.dropout_rates.attention:
        ops.append(dropout("attention.core.dropout", "core.p", "core.pd", size=n_pairs * width, mask=n_pairs))
        probabilities = "core.pd"
    out = next(iter(core.writes))
    output = of_values._replace(
        name="attention.core.values",
        reads=(probabilities, v),
        writes={out: core.writes[out]},
        keeps=(probabilities, core.keeps[2]),
        message=None,
        parameters=core.parameters,
        wgrad_numels=core.wgrad_numels,
    )
    return [*ops, output]
