"""The operations of the feed-forward layer: an MLP, or routed experts with optional shared ones.

    mlp       source → gate, up → act → down → d
    experts   source → router → top-k → dispatch ⇄ ep → gate, up → act · weight → down → ⇄ combine → (+ shared) → d
    latent    the same, with source → latent_down before the dispatch, and latent_up after the combine

Dropless: every token goes to exactly k experts. With a capacity c an expert computes at most c times the even share, or
exactly that if rows are padded to it (Megatron). The routing weight multiplies the activation before ``down``, so that
the experts' output need not be kept.
"""

from __future__ import annotations

from math import ceil

from fivefold.model.activations import ACTIVATIONS
from fivefold.model.factors import Multipliers
from fivefold.planner.counts.operations.launches import CLAMP_LAUNCHES
from fivefold.planner.counts.operations.linear import (
    LinearInput,
    add_casts,
    build_sub_norm,
    cast,
    drop_wgrad,
    keeps_casts,
    list_row_parallel,
)
from fivefold.planner.counts.operations.local_shapes import Local
from fivefold.planner.counts.operations.mixers.rwkv import gate_by_sigmoid, mix, shift
from fivefold.planner.counts.operations.op import (
    Float8Casts,
    Op,
    OpMessage,
    elementwise,
    exchange,
    matmul,
    rename_tensors,
)
from fivefold.units import ceil_div


def list_mlp(local: Local, source: str, *, layer: int) -> list[Op]:
    """List the operations of an MLP from its input, tensor ``source`` [R, D], to its output, tensor ``d`` [R, D]."""
    return _list_mlp(local, source, "d", name="mlp", ffn=local.model.get_ffn(layer),
                sparse=local.model.has_sparse_gates(layer))  # fmt: skip


def list_experts(local: Local, source: str, *, router_source: str | None = None) -> list[Op]:
    """List the operations of routed experts, ``topk`` for each token, from ``source`` to ``d``, both [stream rows, D].

    Stream rows: the rows of the residual stream that this rank holds (``local_shapes.py``). ``router_source``: what the
    router reads; by default ``source``.
    """
    model, moe, rows = local.model, local.model.moe, local.stream_rows
    assert moe is not None
    size = rows * model.width * local.width
    row_size = rows * model.expert_width * local.width
    sent = rows * moe.computed_per_token
    received = count_routed_rows(local)
    entry, latent_ops = _project_to_latent(local, source)
    gather = Op(
        "moe.dispatch",
        "embedding",
        (entry, "weights"),
        {"routed": moe.computed_per_token * row_size, "share": 4 * sent},
        keeps=("permutation",),
        moved_bytes=2 * moe.computed_per_token * row_size,
        moved_backward_bytes=(moe.computed_per_token + 1) * row_size,
    )
    ops = [*list_router(local, router_source or source), *latent_ops, gather]
    ungated = "shared.whole" if moe.shared_gate else "shared"
    shared = _list_mlp(local, source, ungated, name="moe.shared", ffn=moe.shared_width) if moe.shared_experts else []
    shared += [_gate_shared_experts(local, source, ungated)] if moe.shared_gate else []
    if local.part.ep > 1 or local.part.etp > 1:
        dispatch_ops = _dispatch(local, sent=sent, received=received)
        expert_ops = _list_grouped_mlp(local, "arrived", "made", rows=received)
        if local.facts.overlaps_expert_wgrad and local.trains("moe.experts.up"):
            dispatch_ops, expert_ops = _overlap_wgrad(local, dispatch_ops, expert_ops)
        combine_ops = _combine(local, "made", "returned", sent=sent, received=received)
        # the shared experts compute while tokens are sent over ep; those that arrived are gathered over etp afterwards
        first = 1 if local.part.ep > 1 else 0
        ops += [*dispatch_ops[:first], *shared, *dispatch_ops[first:], *expert_ops, *combine_ops]
    else:
        kept_names = () if "layer" in local.part.recomputed else ("ends",)
        ops[-1] = gather._replace(writes=gather.writes | {"ends": 4 * moe.experts}, always_kept=kept_names)
        ops += [*shared, *_list_grouped_mlp(local, "routed", "returned", rows=received)]
    ops += _list_combined(local, source, "e" if shared else "d")
    return [*ops, elementwise("moe.add", "add", ("e", "shared"), "d", size=size)] if shared else ops


def _list_combined(local: Local, source: str, combined: str) -> list[Op]:
    """List the sum over the experts of each token, and what is projected up from it or added to it."""
    model, moe = local.model, local.model.moe
    assert moe is not None
    size, row_size = (local.stream_rows * columns * local.width for columns in (model.width, model.expert_width))
    ops = [
        Op(
            "moe.combine",
            "embedding",
            ("returned",),
            {combined if moe.latent_width is None else "latent.sum": row_size},
            moved_bytes=(moe.computed_per_token + 1) * row_size,
            moved_backward_bytes=2 * moe.computed_per_token * row_size,
        )
    ]
    if moe.latent_width is not None:
        ops += _project(local, "latent.sum", combined, name="moe.latent_up", columns=(moe.latent_width, model.width))
    if moe.identity_experts:  # tokens times the sum of their weights
        kept = (source, "weights", "chosen")
        op = elementwise("moe.identity", "activation", (source, combined, "weights"), f"{combined}.i", size=size)
        ops.append(op._replace(keeps=kept, moved_bytes=3 * size, moved_backward_bytes=3 * size))
        ops[-1] = rename_tensors(ops[-1], {combined: f"{combined}.m", f"{combined}.i": combined})
        ops[-2] = rename_tensors(ops[-2], {combined: f"{combined}.m"})
    if moe.output_bias:
        op = elementwise("moe.bias", "activation", (combined,), f"{combined}.b", size=size)
        op = op._replace(parameters=model.width, wgrad_numels=(model.width,), passes_gradient=True)
        ops = [*ops[:-1], rename_tensors(ops[-1], {combined: f"{combined}.u"})]
        ops.append(rename_tensors(op, {combined: f"{combined}.u", f"{combined}.b": combined}))
    return ops


def _project_to_latent(local: Local, source: str) -> tuple[str, list[Op]]:
    """Return the tensor whose rows are dispatched, and the projection that makes it if experts are latent."""
    model, moe = local.model, local.model.moe
    assert moe is not None
    if moe.latent_width is None:
        return source, []
    columns = (model.width, moe.latent_width)
    return "latent", _project(local, source, "latent", name="moe.latent_down", columns=columns)


def _project(local: Local, source: str, out: str, *, name: str, columns: tuple[int, int]) -> list[Op]:
    """List a projection of the rows of the stream whose weight every rank of tensor parallelism holds."""
    in_features, out_features = columns
    entry = LinearInput(local, source, in_features=in_features, rows=local.stream_rows, needs_all_rows=False)
    return [*entry.ops, entry.column(name, out, out_features=out_features, bias=local.model.mlp_bias)]


def _gate_shared_experts(local: Local, source: str, shared: str) -> Op:
    """Return the shared experts' output times a sigmoid of each row, which is memory-bound."""
    width = local.model.width
    size = local.stream_rows * local.model.width * local.width
    kept = (source, shared)
    op = elementwise("moe.shared_gate", "activation", kept, "shared", size=size, keeps=kept, backward_scratch=size)
    return op._replace(parameters=width, wgrad_numels=(width,))


def list_router(local: Local, source: str, *, name: str = "moe") -> list[Op]:
    """List the router's fp32 matmul and the top-k, as the operations ``name.router`` and ``name.topk``.

    The top-k writes scores, chosen experts and their weights per token, and the permutation of all T·k copies, which is
    computed once and kept even under recomputation (``trainer/model/routing.py``).
    """
    model, moe, rows = local.model, local.model.moe, local.stream_rows
    assert moe is not None
    scores, copies = 4 * rows * moe.choices, rows * moe.topk
    fp32_copies = 0 if local.width == 4 else 4 * (rows + moe.choices) * model.width
    router = matmul(
        f"{name}.router",
        source,
        "choices",
        rows=rows,
        in_features=model.width,
        out_features=moe.choices,
        width=4,
        bias=moe.router_bias,
    )._replace(keeps=(source,), forward_scratch=fp32_copies, backward_scratch=fp32_copies)
    kept_tensors = {"scores": scores, "chosen": 8 * copies} | (
        {"shares": 4 * (copies + rows)} if moe.normalized else {}
    )
    if moe.score == "sparsemixer":  # the backward computes the probabilities of candidates again from the logits
        del kept_tensors["scores"]
    topk = elementwise(f"{name}.topk", "activation", ("choices",), "weights", size=scores)
    if moe.joined_norms:  # the weights before the factors of their experts
        kept_tensors["unscaled"] = 4 * copies
        topk = topk._replace(parameters=moe.choices, wgrad_numels=(moe.choices,))
    computed = rows * moe.computed_per_token  # of all choices, which are sorted
    permutation = {"permutation": 8 * (copies + 2 * computed + rows + moe.experts + 1)}
    return [
        router,
        topk._replace(
            writes={"weights": 4 * copies, **kept_tensors, **permutation},
            keeps=(*(("choices",) if moe.score == "sparsemixer" else ()), *kept_tensors),
            always_kept=(*permutation,),
        ),
    ]


def count_routed_rows(local: Local) -> int:
    """Return the rows that the most loaded expert rank computes."""
    moe = local.model.moe
    assert moe is not None
    share = local.job.imbalance if local.part.ep > 1 else 1.0
    if moe.capacity is not None:
        share = moe.capacity if local.facts.pads_to_capacity else min(moe.capacity, share)
    balanced_rows = local.stream_rows * moe.computed_per_token * local.part.etp
    return balanced_rows if share == 1 else ceil(balanced_rows * share)


def _needs_sort(local: Local) -> bool:
    """Return True if arriving rows must be sorted by expert: always, unless a rank has one expert and no etp."""
    assert local.model.moe is not None
    return local.part.ep < local.model.moe.experts or local.part.etp > 1


def _dispatch(local: Local, *, sent: int, received: int) -> list[Op]:
    """List the operations that send tokens to experts.

    They are an all_to_all over ep, an all_gather over etp (equal rows per rank) and a sort.

    Rows dispatched in fp8 are cast back on arrival; their gradients are not cast.
    """
    part = local.part
    row_bytes = local.model.expert_width * local.width
    moe = local.model.moe
    assert moe is not None
    ops, tensor, rows = list[Op](), "routed", ceil_div(received, part.etp)
    sent_row_bytes = local.row_bytes
    scaled_row_bytes = local.row_bytes + local.row_scales_bytes
    if part.ep > 1:
        message = OpMessage("ep", "all_to_all", "all_to_all", sent * sent_row_bytes, backward_payload=sent * row_bytes)
        ops.append(
            exchange(
                "moe.send",
                tensor,
                "received",
                size=rows * scaled_row_bytes,
                message=message,
                gradient_bytes=rows * row_bytes,
            )
        )
        tensor = "received"
    if part.etp > 1:
        message = OpMessage(
            "etp", "all_gather", "reduce_scatter", received * sent_row_bytes, backward_payload=received * row_bytes
        )
        gather = exchange(
            "moe.etp_dispatch",
            tensor,
            "gathered",
            size=received * scaled_row_bytes,
            message=message,
            gradient_bytes=received * row_bytes,
        )
        ops.append(gather._replace(forward_scratch=rows * scaled_row_bytes))
        tensor = "gathered"
    # order of the rows, and the end of each expert's
    dispatch_plan = (8 * received if _needs_sort(local) else 0) + 4 * ceil_div(moe.experts, part.ep)
    in_fp8, cast = local.row_scales_bytes > 0, "routed.cast"
    if in_fp8:
        ops[0] = ops[0]._replace(writes=ops[0].writes | {cast: sent * scaled_row_bytes})
    arrival = Op(
        "moe.arrive",
        "message",
        (tensor, "share", cast if in_fp8 else "routed"),
        {"arrived": received * row_bytes, "arrived.share": 4 * received, "dispatch_plan": dispatch_plan},
        differentiates=(tensor, "share"),
        always_kept=("dispatch_plan",),
        # the sent copy is freed
        forward_scratch=max(0, received - sent) * scaled_row_bytes if in_fp8 and _needs_sort(local) else 0,
    )
    return [ops[0]._replace(keeps=("dispatch_plan",)), *ops[1:], arrival]


def _combine(local: Local, source: str, out: str, *, sent: int, received: int) -> list[Op]:
    """List the reverse of ``_dispatch``: reduce_scatter of partial sums over etp, all_to_all over ep."""
    part, row_bytes = local.part, local.model.expert_width * local.width
    ops, tensor, rows = list[Op](), source, ceil_div(received, part.etp)
    sent_row_bytes = local.row_bytes
    scaled_row_bytes = local.row_bytes + local.row_scales_bytes
    in_fp8 = local.row_scales_bytes > 0
    if part.etp > 1:
        message = OpMessage(
            "etp", "reduce_scatter", "all_gather", received * row_bytes, backward_payload=received * sent_row_bytes
        )
        op = exchange(
            "moe.etp_combine",
            tensor,
            f"{out}.part",
            size=rows * row_bytes,
            message=message,
            gradient_bytes=rows * scaled_row_bytes,
        )
        ops.append(op)
        tensor = f"{out}.part"
    if part.ep > 1:
        message = OpMessage("ep", "all_to_all", "all_to_all", sent * row_bytes, backward_payload=sent * sent_row_bytes)
        op = exchange("moe.return", tensor, out, size=sent * row_bytes, message=message)
        ops.append(op._replace(backward_scratch=sent * scaled_row_bytes if in_fp8 else 0))
    else:
        ops[-1] = ops[-1]._replace(writes={out: sent * row_bytes}, gradients=None)
    sorted_bytes = received * row_bytes if _needs_sort(local) else 0
    padded_bytes = rows * row_bytes if part.etp > 1 else 0
    if in_fp8:  # gradients are sorted in fp8, then cast back
        return [ops[0]._replace(forward_scratch=sorted_bytes, backward_scratch=received * scaled_row_bytes), *ops[1:]]
    return [ops[0]._replace(forward_scratch=sorted_bytes, backward_scratch=sorted_bytes + padded_bytes), *ops[1:]]


def _overlap_wgrad(local: Local, remote_ops: list[Op], local_ops: list[Op]) -> tuple[list[Op], list[Op]]:
    """Return ``remote_ops`` and ``local_ops`` with dW of gate and up computed during the backward's all_to_all.

    Their inputs and output gradients stay allocated until then. The weight gradients move from these matmuls to
    ``moe.arrive``.
    """
    first = [op for op in local_ops if op.kind == "matmul" and op.name != "moe.experts.down"]
    held_bytes = sum(sum(op.writes.values()) for op in first)
    weights = [size for op in first for size in op.wgrad_numels]
    casts = max(op.casts.columns + op.casts.gradient_columns for op in first)
    arrival = remote_ops[-1]
    sent_bytes = (remote_ops[0].message.backward_payload or 0) if remote_ops[0].message and local.part.ep > 1 else 0
    if local.part.etp > 1:  # the input of the reduce_scatter over etp is freed before them
        arrived_bytes = arrival.writes["arrived"]
        wgrad_bytes = max(weights) * local.job.precision.gradients_bytes
        local_bytes = arrived_bytes // local.part.etp
        sent_bytes = (
            max(local_bytes + arrived_bytes, local_bytes + sent_bytes + wgrad_bytes) - arrived_bytes - wgrad_bytes
        )
    arrival = arrival._replace(
        keeps=(*arrival.keeps, *first[0].keeps),
        accumulates_wgrads=True,
        wgrad_numels=tuple(weights),
        backward_scratch=held_bytes + sent_bytes,
        wgrad_operand_bytes=held_bytes,
        cast_scratch_bytes=(0, casts),
    )
    return [*remote_ops[:-1], arrival], [op._replace(wgrad_numels=()) if op in first else op for op in local_ops]


def _list_grouped_mlp(local: Local, source: str, out: str, *, rows: int) -> list[Op]:
    """List the grouped matmuls of this rank's experts, each on its share of ``rows``."""
    model, moe, width = local.model, local.model.moe, local.width
    assert moe is not None
    local_experts = ceil_div(moe.experts, local.part.ep)
    ffn = moe.ffn // local.part.etp
    activated = "moe.experts.m"
    share, ends = ("arrived.share", ()) if source == "arrived" else ("share", ("ends",))
    entry = LinearInput(local, source, in_features=model.expert_width, rows=rows, needs_all_rows=False)

    def to_grouped(op: Op) -> Op:
        """Return one expert's operation as the grouped operation of all experts of this rank."""
        first = not op.name.endswith(".up") or model.mlp == "plain" or local.job.stack.merged_projections
        op = add_casts(op._replace(batch=1), local, first=first, experts=local_experts)
        widths = tuple(size * local_experts for size in op.wgrad_numels)
        of_matmul = 1 if local.facts.separate_biases else len(widths)
        if len(widths) > of_matmul:  # a bias for each row, and int64 numbers of their experts
            (size,) = op.writes.values()
            is_weighed = op.name == "moe.experts.down"  # its routing weights have a gradient
            op = op._replace(bias_scratch=(size + 8 * rows, is_weighed * size + 8 * rows))
        op = op._replace(
            parameters=op.parameters * local_experts,
            wgrad_numels=widths[:of_matmul],
            bias_wgrad_numel=sum(widths[of_matmul:]),
            shape=(max(1, rows // local_experts), *op.shape[1:]),
            batch=local_experts,
            keeps=(*op.keeps, *ends),
        )
        return drop_wgrad(op, local.job)

    ops = [*entry.ops]
    ops += [to_grouped(op) for op in _list_up_and_gate(local, entry, "moe.experts", ffn=ffn, bias=moe.expert_bias)]
    # dx of gate and up are summed before their dW are computed
    if local.facts.sums_expert_dgrad and not local.job.precision.is_low_precision:
        ops[-1] = ops[-1]._replace(casts=Float8Casts(product=rows * model.expert_width * width))
    ops.append(_weigh_activation(local, share, numel=rows * ffn))
    down_input = activated
    if keeps_casts(local):
        down_input = f"{activated}.cast"
        ops.append(cast(local, activated, down_input, numel=rows * ffn))
    down = matmul(
        "moe.experts.down",
        down_input,
        out,
        rows=rows,
        in_features=ffn,
        out_features=model.expert_width,
        width=width,
        bias=moe.expert_bias,
    )
    return [*ops, to_grouped(down)]


def _weigh_activation(local: Local, share: str, *, numel: int) -> Op:
    """Return the activation of experts times the fp32 routing weight of each row, the tensor ``share``."""
    model, moe, width = local.model, local.model.moe, local.width
    assert moe is not None
    activation = _build_activation(local, "moe.experts", size=numel * width)
    activation = _clamp(activation, local, "moe.experts", size=numel * width, limit=moe.clamp)
    scratch = activation.backward_scratch
    if local.facts.weighs_in_own_kernel:
        if width < 4 and ACTIVATIONS[model.activation].widens_weighted_gradient:
            scratch += numel * 2  # the gradient's product with the weight is fp32, too
        if model.mlp == "plain":  # the gradient, times the weight
            scratch = numel * width
        if moe.router_weight_on == "inputs":  # gate and up, each times the weight
            scratch = 2 * numel * width
    reads, keeps = (*activation.reads, share), (*activation.keeps, share)
    return activation._replace(reads=reads, keeps=keeps, backward_scratch=scratch)


def _list_mlp(local: Local, source: str, out: str, *, name: str, ffn: int, sparse: bool = False) -> list[Op]:
    """List the operations of a tensor-parallel MLP: ``source`` → ``out``, both [stream rows, D].

    ``sparse``: gates below a number of their token are set to zero (transformers 5.23, ``Gemma3nTextMLP``).
    """
    model, inner = local.model, ffn // local.part.tp
    if model.mlp == "receptance":
        return _list_receptance(local, source, out, name=name, ffn=inner)
    m = f"{name}.m"
    reader = ".mlp" if model.block == "parallel_shared" else ""  # attention reads the same norm
    entry = LinearInput(
        local,
        source,
        in_features=local.stream_width,
        rows=local.stream_rows,
        reader=reader,
        all_reduces=local.job.stack.input_grad_all_reduces[1],
    )
    ops = [*entry.ops, *_list_up_and_gate(local, entry, name, ffn=inner, bias=model.mlp_bias), *entry.sums]
    factors = model.multipliers or Multipliers()
    size = local.rows * inner * local.width
    act = _clamp(_build_activation(local, name, size=size), local, name, size=size, limit=model.mlp_clamp)
    if factors.gate != 1 and model.mlp == "gated":
        gate = act.reads[0]  # with merged projections it holds up too
        halves = 2 if gate.endswith(".gu") else 1
        ops.append(elementwise(f"{name}.gate.scale", "activation", (gate,), f"{gate}.scaled", size=halves * size))
        act = rename_tensors(act, {gate: f"{gate}.scaled"})
    if sparse:  # relu(gate − (mean + c · deviation)), whose output the activation keeps too
        gate = act.reads[0]
        statistics = {f"{gate}.deviation": local.rows * local.width}
        size *= 2 if gate.endswith(".gu") else 1
        zero = elementwise(f"{name}.sparsify", "activation", (gate,), f"{gate}.sparse", size=size, keeps=(gate,))
        ops.append(
            zero._replace(
                writes=zero.writes | statistics,
                keeps=(gate, f"{gate}.sparse", *statistics),
                moved_bytes=5 * size,  # mean, deviation, difference, relu
                moved_backward_bytes=6 * size,
                forward_scratch=size,
                backward_scratch=2 * size,
            )
        )
        act = rename_tensors(act, {gate: f"{gate}.sparse"})
    ops.append(act)
    if model.sub_norm:
        ops.append(build_sub_norm(local, f"{name}.norm", m, dim=inner))
        m = f"{m}n"
    down = out if factors.down == 1 else f"{out}.unscaled"
    ops += list_row_parallel(
        local, f"{name}.down", m, down, in_features=inner, out_features=model.width, bias=model.mlp_bias
    )
    if down != out:
        ops.append(elementwise(f"{name}.down.scale", "activation", (down,), out, size=local.stream_bytes))
    return ops


def _list_receptance(local: Local, source: str, out: str, *, name: str, ffn: int) -> list[Op]:
    """List RWKV-4's channel mixing: a plain MLP of a mean of a token and the one before it, and a gate of another mean.

    Source: transformers 5.23, ``RwkvFeedForward``.
    """
    width, size = local.model.width, local.stream_bytes
    ops = [shift(local, source, prefix=name)]
    for part, result, out_features in (("up", f"{name}.u", ffn), ("receptance", "rl", width)):
        ops.append(mix(local, source, prefix=name, name=part))
        entry = LinearInput(local, f"{name}.{part}.in", in_features=width, rows=local.stream_rows)
        ops += [*entry.ops, entry.column(f"{name}.{part}", result, out_features=out_features)]
    op = elementwise(f"{name}.act", "activation", (f"{name}.u",), f"{name}.m", size=local.rows * ffn * local.width)
    ops.append(op._replace(keeps=(f"{name}.u",)))
    ops += list_row_parallel(local, f"{name}.down", f"{name}.m", "v", in_features=ffn, out_features=width, bias=False)
    return [*ops, *gate_by_sigmoid(local, name, "v", "rl", out, size=size)]


def _list_up_and_gate(local: Local, entry: LinearInput, name: str, *, ffn: int, bias: bool) -> list[Op]:
    """List the matmuls before the activation: up, and gate if there is one; ``joint``: one matmul, gate first."""
    if local.model.mlp == "plain":
        return [entry.column(f"{name}.up", f"{name}.u", out_features=ffn, bias=bias)]
    if local.job.stack.merged_projections:
        return [entry.column(f"{name}.gate_up", f"{name}.gu", out_features=2 * ffn, bias=bias)]
    return [entry.column(f"{name}.{part}", f"{name}.{part[0]}", out_features=ffn, bias=bias) for part in ("gate", "up")]


def _build_activation(local: Local, name: str, *, size: int) -> Op:
    """Return the activation of u, or silu(g)·u, with its trained numbers; ``size``: bytes of its output."""
    op = _build_elementwise_activation(local, name, size=size)
    numbers = len(ACTIVATIONS[local.model.activation].parameters)
    if not numbers:
        return op
    softplus = 4 * 2 * numbers  # of each number in fp32, and what is made from it
    return op._replace(
        parameters=numbers,
        wgrad_numels=(1,) * numbers,
        forward_scratch=op.forward_scratch + softplus,
        backward_scratch=op.backward_scratch + softplus,
    )


def _clamp(op: Op, local: Local, name: str, *, size: int, limit: float | None) -> Op:
    """Return the product of gate and up after both are clamped; the kernels of PyTorch keep what they clamped."""
    if limit is None:
        return op
    if local.norm.plain:
        clamped = {f"{name}.clamped": 2 * size}
        return op._replace(writes=op.writes | clamped, keeps=(*op.keeps, *clamped))
    return op._replace(forward_scratch=op.forward_scratch + 2 * size, backward_scratch=op.backward_scratch + 2 * size)


def _build_elementwise_activation(local: Local, name: str, *, size: int) -> Op:
    """Return the activation of u, or silu(g)·u; ``size``: bytes of its output."""
    g, u, m = (f"{name}.{part}" for part in ("g", "u", "m"))
    activation = ACTIVATIONS[local.model.activation]
    if local.model.mlp == "plain":
        scratch = activation.plain_scratch * size
        op = elementwise(f"{name}.act", "activation", (u,), m, size=size, keeps=(u,), backward_scratch=scratch)
        op = op._replace(forward_scratch=scratch)
        return _list_saved_tensors(op, local, name, size=size) if local.norm.plain else op
    scratch = activation.gated_backward_scratch
    gated = elementwise(
        f"{name}.act", "activation", (g, u), m, size=size, keeps=(g, u), backward_scratch=scratch * size
    )
    gated = gated._replace(forward_scratch=activation.gated_scratch * size, scratch_tensor=size if scratch > 1 else 0)
    plain = local.job.stack.kernels in ("norms", "plain") and not local.job.stack.is_compiled
    if local.job.stack.merged_projections:  # one kernel writes the gradient of both halves, or two gradients are joined
        gated = gated._replace(reads=(f"{name}.gu",), keeps=(f"{name}.gu",), backward_scratch=2 * size if plain else 0)
        if activation.clamps:
            gated = _split_clamp(gated, size=size)
    if plain:  # silu(gate) is a separate tensor, kept by the product
        silu = f"{name}.silu"
        gated = gated._replace(writes=gated.writes | {silu: size}, keeps=(*gated.keeps, silu))
        one_gradient = local.job.stack.merged_projections or activation.clamps
        return (
            gated if one_gradient else gated._replace(backward_scratch=0)
        )  # the product's backward frees silu's gradient
    return gated


def _list_saved_tensors(op: Op, local: Local, name: str, *, size: int) -> Op:
    """Return the activation with the tensors that PyTorch saves if it is not a kernel of its own."""
    activation = ACTIVATIONS[local.model.activation]
    saved_factors = {f"{name}.{factor}": size for factor in activation.written_out}
    if not saved_factors:
        return op
    cube = {f"{op.reads[0]}.cube": 0} if activation.cubes_input else {}
    return op._replace(
        writes=op.writes | saved_factors | cube, keeps=(*op.keeps, *saved_factors), backward_scratch=size
    )


def _split_clamp(op: Op, *, size: int) -> Op:
    """Return the activation as Megatron clamps its halves: a kernel each, and one that joins them before the fused one.

    It copies the offset of the linear half to the device by ``torch.tensor``. The backward of a clamp compares,
    combines and selects in kernels of its own. Source: megatron-core 0.16.1, megatron/core/fusions/fused_bias_geglu.py,
    weighted_bias_quick_geglu_impl.
    """
    clamped = op.name.replace(".act", ".clamped")
    return op._replace(
        writes=op.writes | {clamped: 2 * size},
        keeps=(*op.keeps, clamped),
        backward_scratch=2 * size,
        scratch_tensor=0,
        moved_bytes=op.moved_bytes + 8 * size,
        moved_backward_bytes=op.moved_backward_bytes + 15 * size,
        launches=CLAMP_LAUNCHES,
        blocks_host=True,
    )
