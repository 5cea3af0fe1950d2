"""Multi-head latent attention."""

from __future__ import annotations

from typing import Literal

from fivefold.model.latent_attention import MLA
from fivefold.planner.counts.operations.attention.core import list_core
from fivefold.planner.counts.operations.attention.output import gate_output
from fivefold.planner.counts.operations.indexer import attend_to_chosen, choose_keys
from fivefold.planner.counts.operations.launches import LATENT_PARTS_LAUNCHES, LATENT_ROPE_LAUNCHES
from fivefold.planner.counts.operations.linear import LinearInput, list_row_parallel
from fivefold.planner.counts.operations.local_shapes import Local
from fivefold.planner.counts.operations.op import Op, OpMessage, elementwise, exchange, norm, rope


def list_latent(local: Local, source: str, *, layer: int) -> list[Op]:
    """List the operations of multi-head latent attention.

    Down-projections work on the rank's local tokens, and tp gathers the small latents.
    """
    model = local.model
    mla = local.model.get_latent(layer)
    assert mla is not None
    shape, width = local.attention(layer), local.width
    local_input = LinearInput(local, source, in_features=model.width, rows=local.stream_rows, needs_all_rows=False)
    ops, up_ops = _list_latent_queries(local, mla, local_input, source, layer=layer)
    ops.append(
        local_input.column("attention.kv_down", "ckv", out_features=mla.kv_rank + mla.rope_dim, bias=model.qkv_bias)
    )
    key_ops, key_tensors = _list_rotary_key(local, "ckn" if mla.key_norm else "ckv", "key", dim=mla.rope_dim)
    if mla.key_norm:
        sizes = {"rows": local.stream_rows, "dim": mla.rope_dim, "width": width}
        normed = norm("attention.key_norm", "ckv", "ckn", **sizes, kind=local.norm)
        key_ops, key_tensors = [normed, *key_ops], key_tensors or ("ckn",)
    kv_columns = shape.heads * (mla.nope_dim + mla.v_dim)
    kv_ops, kv_latent = _list_up_projection(local, mla, "kv", out="kv", out_features=kv_columns)
    gated = gate_output(local, shape) if model.output_gate else []
    out = list_row_parallel(
        local,
        "attention.out",
        "og" if gated else "o",
        "a",
        in_features=shape.heads * mla.v_dim,
        out_features=model.width,
        bias=model.out_bias,
    )
    if mla.indexer is not None:
        key, has_indexer = (*key_tensors, "ckv")[0], model.has_indexer(layer)
        sparse = attend_to_chosen(local, kv_latent, q="q", key=key, chosen_here=has_indexer)
        return [*ops, *up_ops, *key_ops, *map(_gather_once, kv_ops[:-1]), *sparse, *gated, *out]
    rotated_ops, q = _list_latent_heads(local, mla, key_tensors, layer=layer)
    core = list_core(local, q=q, k="kr", v="v", layer=layer, value_storage="kv")
    return [*ops, *up_ops, *key_ops, *kv_ops, *rotated_ops, *core, *gated, *out]


def _list_latent_queries(
    local: Local, mla: MLA, local_input: LinearInput, source: str, *, layer: int
) -> tuple[list[Op], list[Op]]:
    """List the operations of queries, of a gate and of an indexer: those down to the latent, and those up from it."""
    model, shape, indexer = local.model, local.attention(layer), mla.indexer
    q_columns, gate_columns = shape.heads * (mla.nope_dim + mla.rope_dim), model.count_gate_columns(shape)
    ops, up_ops = [*local_input.ops], list[Op]()
    has_gate = model.output_gate and not (mla.q_rank is not None and mla.gates_queries)
    if mla.q_rank is None or has_gate:
        gathered_input = LinearInput(local, source, in_features=model.width, rows=local.stream_rows)
        ops += [op for op in gathered_input.ops if op.kind != "cast"]
        if mla.q_rank is None:
            ops.append(gathered_input.column("attention.q", "q", out_features=q_columns))
        if has_gate:
            ops.append(gathered_input.column("attention.gate", "gate", out_features=gate_columns))
    if mla.q_rank is None:
        return ops, up_ops
    ops.append(local_input.column("attention.q_down", "cq", out_features=mla.q_rank, bias=model.qkv_bias))
    if mla.gates_queries:
        up_ops += _list_gated_queries(local, rank=mla.q_rank, out_features=q_columns, gate_columns=gate_columns)
    else:
        up_ops += _list_up_projection(local, mla, "q", out="q", out_features=q_columns)[0]
    if mla.scaled == "queries":
        size = local.rows * q_columns * local.width
        up_ops.append(elementwise("attention.scale.q", "activation", ("q",), "qs", size=size))
    if indexer is not None and model.has_indexer(layer):
        latent, lends = "cqns" if mla.scaled == "latents" else "cqn", model.lends_chosen(layer)
        up_ops += choose_keys(local, indexer, latent=latent, hidden=source, lends=lends)
    return ops, up_ops


def _list_latent_heads(local: Local, mla: MLA, key_tensors: tuple[str, ...], *, layer: int) -> tuple[list[Op], str]:
    """List the operations that rotate and concatenate to heads of nope + rope, and return the name of the queries.

    Without positions, only the key is concatenated. Keys and values are views of kv, which is kept as one for the
    values; their gradients are joined.
    """
    model, width, q = local.model, local.width, "qs" if mla.scaled == "queries" else "q"
    heads = local.rows * local.attention(layer).heads
    numel, scratch = heads * (mla.nope_dim + mla.rope_dim), heads * mla.rope_dim * width
    gradients = {"k": heads * width * mla.nope_dim, "v": heads * width * mla.v_dim}
    parts = Op("attention.kv.parts", "message", ("kv",), {"k": 0, "v": 0}, gradients=gradients)
    ops = [parts._replace(launches=LATENT_PARTS_LAUNCHES)]
    if model.has_rope(layer):
        rotated = rope("rope.q", q, "qr", numel=numel, width=width)
        ops.append(rotated._replace(forward_scratch=scratch, backward_scratch=scratch, launches=LATENT_ROPE_LAUNCHES))
        q = "qr"
    key = rope("rope.k", "k", "kr", numel=numel, width=width)
    if model.has_rope(layer):
        key = key._replace(launches=LATENT_ROPE_LAUNCHES)
    reads = ("k", *key_tensors)
    ops.append(key._replace(reads=(*reads, "kv"), differentiates=reads, forward_scratch=0, backward_scratch=0))
    if model.has_temperature(layer):
        ops.append(rope("rope.temperature", q, "qt", numel=numel, width=width))
        q = "qt"
    return ops, q


def _gather_once(op: Op) -> Op:
    """Return a gather whose result is kept uncast: neither the backward nor a recomputation gathers it again."""
    if op.message is None or not op.message.forward:
        return op
    return op._replace(name="attention.latent.share", message=op.message.uncast._replace(regather=""))


def _list_rotary_key(local: Local, source: str, out: str, *, dim: int) -> tuple[list[Op], tuple[str, ...]]:
    """List the operations that share the rotary key among all heads.

    It is gathered over tp under sp; otherwise its gradient is all-reduced over tp.
    """
    size, part = local.rows * dim * local.width, local.part
    if part.tp == 1:
        return [], ()
    kinds = ("all_gather", "reduce_scatter") if part.sp else ("", "all_reduce")
    message = OpMessage("tp", *kinds, payload=size)
    return [exchange("attention.key.share", source, out, size=size if part.sp else 0, message=message)], (out,)


def _list_up_projection(
    local: Local, mla: MLA, name: Literal["q", "kv"], *, out: str, out_features: int
) -> tuple[list[Op], LinearInput]:
    """List the norm of a latent and its up-projection to the heads of this rank; return the gathered latent too."""
    latent = f"c{name}"
    rank = (mla.q_rank or 0) if name == "q" else mla.kv_rank
    norm_op = norm(
        f"attention.{name}_norm",
        latent,
        f"{latent}n",
        rows=local.stream_rows,
        dim=rank,
        width=local.width,
        kind=local.norm,
    )
    ops, normed = [norm_op], f"{latent}n"
    if mla.scaled == "latents" or (mla.scaled == "queries" and name == "kv"):
        size, normed = local.stream_rows * rank * local.width, f"{latent}ns"
        ops.append(elementwise(f"attention.scale.{name}", "activation", (f"{latent}n",), normed, size=size))
    up_input = LinearInput(local, normed, in_features=rank, rows=local.stream_rows)
    return [*ops, *up_input.ops, up_input.column(f"attention.{name}_up", out, out_features=out_features)], up_input


def _list_gated_queries(local: Local, *, rank: int, out_features: int, gate_columns: int) -> list[Op]:
    """List the projections to queries and to the output gate of A.X K2.

    Both read the latent of the queries twice, side by side: after its norm and before it.
    """
    rows, width, kind = local.stream_rows, local.width, local.norm
    size = 2 * rows * rank * width
    up_input = LinearInput(local, "cqj", in_features=2 * rank, rows=rows)
    return [
        norm("attention.q_norm", "cq", "cqn", rows=rows, dim=rank, width=width, kind=kind),
        elementwise("attention.q_join", "activation", ("cqn", "cq"), "cqj", size=size)._replace(
            moved_bytes=2 * size, moved_backward_bytes=2 * size
        ),
        *up_input.ops,
        up_input.column("attention.q_up", "q", out_features=out_features),
        up_input.column("attention.gate_up", "gate", out_features=gate_columns),
    ]
