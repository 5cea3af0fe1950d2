"""The operations of a decoder on one rank, in the order they run: embedding, block, head.

    x ── norm1 ── q,k,v ── rope ── attention ── out ──(+)── norm2 ── gate,up ── swiglu ── down ──(+)── x'

Letters: B sequences of T tokens in the micro-batch, D width, N and K heads of H, F feed-forward, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from fivefold.job import LOSS_CHUNK_ELEMENTS, LOSS_CHUNK_ROWS, Job
from fivefold.layout.stages import find_first_backward_layer, trains_embedding
from fivefold.model.activations import ACTIVATIONS
from fivefold.model.factors import Multipliers
from fivefold.model.mixers.kinds import MixerName
from fivefold.model.norms import NORMS
from fivefold.model.spec import Model
from fivefold.model.weights import resolve_freeze
from fivefold.planner.counts.operations.altup import add_laurel, correct, predict
from fivefold.planner.counts.operations.altup import collapse as average
from fivefold.planner.counts.operations.attention import list_attention
from fivefold.planner.counts.operations.autocast import apply_autocast
from fivefold.planner.counts.operations.feedforward import list_experts, list_mlp
from fivefold.planner.counts.operations.hyper_connections import collapse, connect, expand, mix
from fivefold.planner.counts.operations.linear import LinearInput, drop_wgrad, get_row_group, list_norm
from fivefold.planner.counts.operations.local_shapes import Local
from fivefold.planner.counts.operations.mixers import OPERATIONS
from fivefold.planner.counts.operations.narrow import apply_low_precision
from fivefold.planner.counts.operations.op import (
    Op,
    OpMessage,
    dropout,
    elementwise,
    exchange,
    list_tensors,
    matmul,
    norm,
    rename_tensors,
)
from fivefold.planner.counts.operations.per_layer_inputs import add_input, make_inputs
from fivefold.planner.counts.operations.recompute import UnitOperations, recompute


def list_embedding(local: Local) -> list[Op]:
    """List the operations from token ids to x, with learned positions if the model has them.

    Tp shards the table by rows.
    """
    model, part, width = local.model, local.part, local.stream_width
    size = local.rows * width * local.width
    table = local.vocab * model.width
    output = "x" if part.tp == 1 else "x.partial"
    tokens = elementwise("embed.tokens", "embedding", ("ids",), output, size=size, keeps=("ids",))
    ops = [tokens._replace(parameters=table, wgrad_numels=(table,), differentiates=())]
    if part.tp > 1:
        kinds = ("reduce_scatter", "all_gather") if part.sp else ("all_reduce", "")
        message = OpMessage(get_row_group(part), *kinds, payload=size)
        ops.append(exchange("embed.reduce", output, "x", size=local.stream_bytes, message=message))
    if model.embedding_scale != 1:
        ops.append(elementwise("embed.scale", "activation", ("x",), "xs", size=local.stream_bytes))
    if model.position == "learned":
        table = (model.positions + model.position_offset) * width
        source = "x" if model.embedding_scale == 1 else "xs"
        add = elementwise("embed.positions", "embedding", (source,), "xp", size=local.stream_bytes)
        ops.append(
            add._replace(
                parameters=table,
                wgrad_numels=(table,),
                passes_gradient=True,
                forward_scratch=8 * local.stream_rows,
                backward_scratch=8 * local.stream_rows,
            )
        )
    if model.position == "sinusoidal":
        source = "x" if model.embedding_scale == 1 else "xs"
        add = elementwise("embed.positions", "add", (source,), "xp", size=local.stream_bytes)
        angles = 4 * (local.stream_rows + 1) * (width // 2)  # fp32, of rows and frequencies
        ops.append(add._replace(passes_gradient=True, forward_scratch=2 * angles))
    if model.embedding_norm != "none":
        source, kind = next(iter(ops[-1].writes)), local.norm
        if model.embedding_norm == "unit":
            kind = kind._replace(norm=NORMS["rmsnorm"], weight=False)
        normed = norm("embed.norm", source, "xn", rows=local.stream_rows, dim=width, width=local.width, kind=kind)
        ops.append(list_norm(local, normed))
    if model.dropout_rates.embedding:
        source = next(iter(ops[-1].writes))
        mask = local.stream_rows * width
        ops.append(dropout("embed.dropout", source, "xd", size=local.stream_bytes, mask=mask))
    if model.hyper_connections is not None:
        ops.append(expand(local, next(iter(ops[-1].writes)), "xh"))
    if model.per_layer_inputs is not None:
        ops = make_inputs(local, ops, model.per_layer_inputs)
    return apply_autocast(local, ops)


def list_block(local: Local, *, layer: int) -> list[Op]:
    """List the operations of one decoder layer: x → z."""
    return [*list_attention_half(local, layer=layer), *list_feedforward_half(local, layer=layer)]


def list_attention_half(local: Local, *, layer: int) -> list[Op]:
    """List a layer's operations up to its first residual addition, x → y; they do not depend on expert degrees.

    A layer without a token mixer has none.
    """
    model, block_kind = local.model, local.model.get_block(layer)
    post, mixer = block_kind in ("post", "sandwich"), model.mixer_name(layer)
    pre = block_kind not in ("post", "post_sum") and model.has_norm1(layer)
    altup, hyper, stream = model.altup, model.hyper_connections, "x"
    if mixer == "none":
        return []
    ops = [connect(local, "hyper1", "x")] if hyper else []
    if model.adds_lent_experts(layer):
        ops = [_receive_experts(local, stream)]
    if altup is not None:
        ops, stream = predict(local, altup, "x", "p"), "p.0"
    source = "norm1.out" if pre else stream
    ops += [_list_norm(local, "norm1", "hyper1.out" if hyper else stream)] if pre else []
    if pre and model.gates_norm(layer, "norm1"):
        ops += _gate_norm(local, "norm1")
        source = "norm1.gated"
    ops += list_attention(local, source, layer=layer) if mixer == "attention" else OPERATIONS[mixer](local, source)
    branch = "a"
    if model.joins_mamba2:
        ops, branch = _join_mamba2(local, ops, source), "am"
    if post:
        name = "norm1_post" if block_kind == "sandwich" else "norm1"
        ops, branch = [*ops, _list_norm(local, name, "a")], f"{name}.out"
    if block_kind == "post_sum":
        ops += [*_list_residual(local, "attention", branch, "x", "y.sum"), _list_norm(local, "norm1", "y.sum", out="y")]
        return _apply_software(local, ops, layer=layer)
    if hyper:
        return _apply_software(local, [*ops, mix(local, "hyper1", branch, "x", "y")], layer=layer)
    onto = source if block_kind == "norm_stream" else stream
    factors, rank = model.get_residual_factors(layer)[0], model.laurel_rank
    ops += _list_residual(local, "attention", branch, onto, "y" if rank is None else "y.a", factors)
    ops += add_laurel(local, rank, source, "y.a", "y") if rank is not None else []
    return _apply_software(local, ops, layer=layer)


def list_feedforward_half(local: Local, *, layer: int) -> list[Op]:
    """List a layer's operations after its first residual addition: y → z; a layer without a feed-forward has none."""
    model = local.model
    if not model.has_feed_forward(layer):
        return []
    stream = "x" if model.mixer_name(layer) == "none" else "y"
    block_kind = model.get_block(layer)
    pre = block_kind not in ("post", "post_sum")
    post = block_kind == "post" or model.norms_feed_forward(layer)
    hyper = model.hyper_connections
    ops = [connect(local, "hyper2", stream)] if hyper else list[Op]()
    source = "norm1.out"
    if block_kind != "parallel_shared":  # else the MLP reads what attention reads
        source = "x" if block_kind == "parallel" else "hyper2.out" if hyper else stream
        if pre:
            ops = [*ops, _list_norm(local, "norm2", source)]
            source = "norm2.out"
            if model.gates_norm(layer, "norm2"):
                ops = [*ops, *_gate_norm(local, "norm2")]
                source = "norm2.gated"
    branch = "d"
    if model.has_mlp(layer):
        ops += list_mlp(local, source, layer=layer)
    if model.lends_experts(layer):
        ops += _list_joined_experts(local, source, stream)[:-1]
    elif model.is_moe(layer):
        if model.has_mlp(layer):
            ops, branch = [*ops, *_list_joined_experts(local, source, stream)], "de"
        else:
            ops += list_experts(local, source)
    if post:
        name = "norm2" if block_kind == "post" else "norm2_post"
        ops, branch = [*ops, _list_norm(local, name, branch)], f"{name}.out"
    if block_kind == "post_sum":
        ops += [*_list_residual(local, "mlp", branch, stream, "z.sum"), _list_norm(local, "norm2", "z.sum", out="z")]
        return _apply_software(local, ops, layer=layer)
    if hyper:
        return _apply_software(local, [*ops, mix(local, "hyper2", branch, stream, "z")], layer=layer)
    onto = source if block_kind == "norm_stream" else stream
    factors = model.get_residual_factors(layer)[1]
    inputs = model.per_layer_inputs
    if model.adds_lent_experts(layer):
        ops += _list_residual(local, "mlp", branch, onto, "z.mlp", factors)
        ops.append(_add_lent_experts(local))
        return _apply_software(local, ops, layer=layer)
    ops += _list_residual(local, "mlp", branch, onto, "z" if inputs is None else "z.mlp", factors)
    if model.lends_experts(layer):
        ops = [*ops[:-1], _keep_experts(), ops[-1]._replace(reads=(*ops[-1].reads, "e.lent", "e.d"))]
        ops[-1] = ops[-1]._replace(differentiates=ops[-1].reads[:-1])
    if inputs is not None and model.altup is not None:
        first = "c.s" if model.altup.scales else "c.0"
        ops += [*correct(local, model.altup, "p", "z.mlp", "c"), *add_input(local, inputs, first, "z", onto="c")]
    elif inputs is not None:
        ops += add_input(local, inputs, "z.mlp", "z")
    return _apply_software(local, ops, layer=layer)


def _list_joined_experts(local: Local, source: str, stream: str) -> list[Op]:
    """List the operations of experts next to an MLP, whose output is ``d``, and of the sum of both outputs: → de.

    Tensors of the experts have the prefix "e.". They read ``source``, as the MLP does, or norms of ``stream``.
    """
    normed = local.model.moe is not None and local.model.moe.joined_norms
    experts = list_experts(local, "x", router_source="r") if normed else list_experts(local, source)
    ops = [
        rename_tensors(op, {name: f"e.{name}" for name in list_tensors(op) if normed or name != source})
        for op in experts
    ]
    join = elementwise("moe.join", "add", ("d", "e.d"), "de", size=local.stream_bytes)
    if not normed:
        return [*ops, join]
    return [
        _list_norm(local, "moe.mlp_norm", "d", out="d.n"),
        _list_norm(local, "moe.router.norm", stream, out="e.r"),
        _list_norm(local, "moe.input_norm", stream, out="e.x"),
        *ops,
        _list_norm(local, "moe.output_norm", "e.d", out="e.n"),
        rename_tensors(join, {"d": "d.n", "e.d": "e.n"}),
    ]


def _keep_experts() -> Op:
    """Return the operation by which experts' output stays for the next layer; its gradient is a tensor of its own."""
    return Op("moe.lend", "message", ("e.d",), {"e.lent": 0})


def _receive_experts(local: Local, stream: str) -> Op:
    """Return the operation by which the output of the experts of the layer before is there from the beginning."""
    kept = ("lent",) if "layer" in local.part.recomputed else ()
    return Op("moe.receive", "message", (stream,), {"lent": local.stream_bytes}, differentiates=(), always_kept=kept)


def _add_lent_experts(local: Local) -> Op:
    """Return the sum of the stream and of the output of the experts of the layer before."""
    kept = ("lent",) if "layer" in local.part.recomputed else ()
    add = elementwise("mlp.shortcut", "add", ("z.mlp", "lent"), "z", size=local.stream_bytes)
    return add._replace(keeps=kept)


def _join_mamba2(local: Local, ops: Sequence[Op], source: str) -> list[Op]:
    """Return the operations of attention, of a Mamba-2 on the same ``source``, and of their sum: a + m.a → am.

    Tensors of the Mamba-2 have the prefix "m.". A factor other than 1 is a kernel that writes a copy.
    """
    size = local.stream_bytes
    factors = local.model.multipliers or Multipliers()
    joined = [*ops]

    def scale(name: str, tensor: str, factor: float) -> str:
        if factor == 1:
            return tensor
        joined.append(elementwise(f"{name}.scale", "activation", (tensor,), f"{tensor}.scaled", size=size))
        return f"{tensor}.scaled"

    attended = scale("attention.out", "a", factors.attention_out)
    inner = scale("mixer.in", source, factors.mixer_in)
    joined += [
        rename_tensors(op, {name: f"m.{name}" for name in list_tensors(op) if name != inner})
        for op in OPERATIONS["mamba2"](local, inner)
    ]
    mixed = scale("mixer.out", "m.a", factors.mixer_out)
    return [*joined, elementwise("mixer.join", "add", (attended, mixed), "am", size=size)]


def _gate_norm(local: Local, name: str) -> list[Op]:
    """List the product of a norm's output and a sigmoid of two matrices of low rank on it: ``name``.out → .gated."""
    model, rows, width, rank = local.model, local.stream_rows, local.width, local.model.norm_gate_rank
    assert rank is not None
    source = f"{name}.out"
    size = local.stream_bytes
    latent_size = rows * rank * width
    kept = (source, f"{name}.up")
    act = elementwise(f"{name}.gate_act", "activation", (f"{name}.low",), f"{name}.lowa", size=latent_size)
    product = elementwise(f"{name}.gate", "activation", kept, f"{name}.gated", size=size, keeps=kept)
    numbers = 4 * rows * model.width  # transformers makes the logits, their sigmoid and the product in fp32
    scratch = (0, size) if local.facts.has_own_attention_kernels else (2 * numbers, 3 * numbers)
    down = {"in_features": model.width, "out_features": rank}
    up = {"in_features": rank, "out_features": model.width}
    return [
        matmul(f"{name}.gate_down", source, f"{name}.low", rows=rows, width=width, bias=False, **down),
        act._replace(keeps=(f"{name}.low",)),
        matmul(f"{name}.gate_up", f"{name}.lowa", f"{name}.up", rows=rows, width=width, bias=False, **up),
        product._replace(forward_scratch=scratch[0], backward_scratch=scratch[1]),
    ]


def _list_norm(local: Local, name: str, source: str, *, out: str = "") -> Op:
    """Return a norm of the residual stream: ``source`` → ``out``, by default ``name``.out."""
    width = local.stream_width
    norm_op = norm(
        name, source, out or f"{name}.out", rows=local.stream_rows, dim=width, width=local.width, kind=local.norm
    )
    return list_norm(local, norm_op)


def _list_residual(
    local: Local, name: str, branch: str, onto: str, out: str, factors: tuple[float, float] = (1.0, 1.0)
) -> list[Op]:
    """List the operations that add a branch to the residual stream, after its dropout and scale if it has them."""
    model, size, ops = local.model, local.stream_bytes, list[Op]()
    if model.dropout:
        mask = local.stream_rows * local.stream_width
        ops.append(dropout(f"{name}.dropout", branch, f"{branch}.drop", size=size, mask=mask))
        branch = f"{branch}.drop"
    for source, factor in ((onto, factors[0]), (branch, factors[1])):
        if factor != 1:
            ops.append(elementwise(f"{name}.scale.{source}", "activation", (source,), f"{source}.scaled", size=size))
            onto, branch = (f"{source}.scaled", branch) if source == onto else (onto, f"{source}.scaled")
    if model.residual_weights:
        weighted = elementwise(f"{name}.stream", "activation", (onto,), f"{onto}.weighted", size=size, keeps=(onto,))
        dim = local.stream_width
        ops.append(weighted._replace(parameters=dim, wgrad_numels=(dim,), backward_scratch=size))
        onto = f"{onto}.weighted"
    add = elementwise(f"{name}.add", "add", (onto, branch), out, size=size)
    if model.residual_scale != 1:  # the same kernel scales, so the branch has its own gradient
        scaled = f"{branch}.scaled"
        scale = elementwise(f"{name}.scale", "activation", (branch,), scaled, size=size)
        ops.append(scale._replace(writes={scaled: 0}, gradients={scaled: size}, moved_bytes=0))
        add = add._replace(reads=(onto, scaled, branch), differentiates=(onto, scaled))
    return [*ops, add]


def _apply_software(local: Local, ops: Sequence[Op], *, layer: int) -> list[Op]:
    """Return ``ops`` as the stack runs them.

    This applies low-precision storage and autocast, and drops the gradient tensors of matmuls that accumulate into the
    gradient sums themselves.
    """
    cast_ops = apply_autocast(local, apply_low_precision(local, ops), stream_in_16_bits=local.has_16bit_stream(layer))
    return [drop_wgrad(op, local.job) for op in cast_ops]


class Kind(NamedTuple):
    """The kind of a block: blocks of one kind do equal work.

    ``slides``: sliding-window attention; ``moe``: routed experts; ``still``: attention without rotary positions in a
    model that has them; ``leads``: nothing below the block is trained, so that its input needs no gradient; ``mixer``:
    the token mixer; ``feeds``: it has a feed-forward; ``chooses``: an indexer of its own chooses the keys; ``own``:
    its attention has the geometry of sliding layers; ``unnormed``: it does not norm the input of its token mixer;
    ``biased``: attention's output has a bias, which in other layers it has not; ``kv``: its keys and values are those
    of an earlier layer, or later layers attend to its own, or to the keys that it chooses; ``sparse``: its MLP sets
    gates to zero; ``frozen``: the modules that the job freezes (``freeze.py``); ``is_below``: no weight of it or below
    is trained, so that it has no backward; ``unquantized``: its linear layers that a base in few bits has in 16.
    """

    slides: bool
    moe: bool
    still: bool = False
    leads: bool = False
    mixer: MixerName = "attention"
    feeds: bool = True
    chooses: bool = False
    own: bool = False
    unnormed: bool = False
    biased: bool = False
    kv: Literal["own", "lent", "shared"] = "own"
    sparse: bool = False
    frozen: frozenset[str] = frozenset()
    is_below: bool = False
    unquantized: frozenset[str] = frozenset()


def merge_windows(model: Model, layer: int, kind: Kind) -> Kind:
    """Return the same for all kinds that keep equally many bytes: a window changes work, not memory.

    It does where heads of queries and of values differ in size, as their kernels then keep other tensors.
    """
    shape = model.attention(layer)
    return kind._replace(slides=kind.slides and shape.head_dim != shape.value_dim)


def get_kind(model: Model, layer: int) -> Kind:
    """Return the kind of one block."""
    mixer = model.mixer_name(layer)
    is_lent = model.lends_kv(layer) or model.lends_chosen(layer)
    is_still = mixer == "attention" and model.position == "rope" and not model.has_rope(layer)
    return Kind(
        model.has_window(layer),
        model.is_moe(layer),
        is_still,
        mixer=mixer,
        feeds=model.has_feed_forward(layer),
        chooses=model.has_indexer(layer),
        own=(model.sliding is not None or model.sliding_mla is not None) and model.has_window(layer),
        unnormed=mixer != "none" and not model.has_norm1(layer),
        biased=model.has_out_bias(layer) != model.out_bias,
        sparse=model.has_sparse_gates(layer),
        kv="shared" if model.shares_kv(layer) else "lent" if is_lent else "own",
    )


def list_kinds(model: Model, job: Job) -> list[Kind]:
    """Return the kind of each block, with what the job freezes of it."""
    frozen = resolve_freeze(model, job.freeze)
    kinds = [get_kind(model, layer) for layer in range(model.layers)]
    if job.adapter is not None and model.unquantized and job.adapter.base == model.quantization:
        kinds = [kind._replace(unquantized=model.list_unquantized(layer)) for layer, kind in enumerate(kinds)]
    first, is_entered = find_first_backward_layer(model, job), trains_embedding(model, job)
    # peft lets the embedding's output have a gradient where anything is recomputed, which not every layout does
    has_end = job.adapter is None or job.stack.kernel_facts.fuses_linears
    return [
        kind._replace(
            frozen=frozen.blocks[layer],
            is_below=layer < first and has_end,
            leads=layer <= first and not is_entered,
        )
        for layer, kind in enumerate(kinds)
    ]


def list_head(local: Local) -> list[Op]:
    """List the operations x → loss with the vocabulary sharded over tp. Maxima, sums and target logits are all-reduced.

    fused: the logits exist once, in the matmuls' dtype, and their gradient replaces them in place. plain,
    low_precision: PyTorch's cross-entropy, which keeps its log-softmax, on an fp32 copy (plain; autocast) or not.
    upcast: an fp32 copy becomes softmax and gradient in place; upcast_copy: a second copy does; upcast_separate: it
    does while the logits are held in both dtypes; upcast_compiled: the gradient is a second copy. chunked: a chunk of
    rows at a time, in the backward.
    """
    model, job, rows, width, vocab = local.model, local.job, local.rows, local.width, local.vocab
    part, ranks_pairs = local.part, job.objective == "dpo"
    logits = rows * vocab * width
    entry_ops, hidden = _list_head_entry(local)
    norm_output = LinearInput(_use_bf16(local), hidden, in_features=local.stream_width, rows=local.stream_rows)
    project = norm_output.column("head.out", "logits", out_features=vocab, bias=model.head_bias)
    # DPO's loss reads one sequence after another, and keeps a factor of the gradient for each
    sequences, sums = (part.sequences, {"loss": 16, "loss.factors": 4 * part.sequences}) if ranks_pairs else (1, {})
    vocab_reduce = (
        OpMessage("tp", "all_reduce", "", rows // sequences * 4, times=3 * sequences) if part.tp > 1 else None
    )
    loss = Op(
        "loss",
        "loss",
        ("logits",),
        sums or {"loss": 4},
        keeps=("logits", *(["loss.factors"] if sums else [])),
        in_place=True,
        shape=(rows, vocab, model.width),
        moved_bytes=2 * logits,
        moved_backward_bytes=2 * logits,
        forward_scratch=_count_softmax_bytes(local, rows // sequences),
        message=vocab_reduce,
    )
    if job.stack.loss_facts.chunked:
        return apply_autocast(local, [*entry_ops, *_list_chunked_loss(local, hidden)])
    loss = _use_loss_kernels(loss, local, logits)
    ops = apply_autocast(local, [*entry_ops, *norm_output.ops, project, *norm_output.sums, loss])
    return [*ops[:-1], _sum_rewards(sequences), ops[-1]] if ranks_pairs and part.cp > 1 else ops


def _use_loss_kernels(loss: Op, local: Local, logits: int) -> Op:
    """Return the loss as the kernels of the job's software compute it from ``logits`` bytes of logits."""
    stack, fp32_logits, is_cast = local.job.stack, local.rows * local.vocab * 4, local.width < 4
    facts, compiled, cast_bytes = stack.loss_facts, stack.compiles_loss, logits + fp32_logits if is_cast else 0
    # PyTorch's log-softmax reads long rows for their maximum, for their sum, and to write. Its backward reads the
    # gradient twice, and the result; that gradient is filled with zeros first
    # (pytorch/pytorch@v2.13.0:aten/src/ATen/native/cuda/SoftMax.cu and Loss.cu).
    if facts.under_autograd and (facts.in_fp32 or local.autocast_loss):
        # fp32 copy, log-softmax; backward: two fp32 gradients before that of the logits
        separate = local.part.tp > 1 and not compiled  # DTensor's loss.py: x - max x; zeros with a one, a sum
        keeps_logits = facts.retains_logits or (local.part.piped and stack.stage_outputs == "retained")
        return loss._replace(
            writes={"loss": 4, "softmax": fp32_logits},
            keeps=("logits", "softmax") if keeps_logits else ("softmax",),
            in_place=False,
            forward_scratch=fp32_logits * (separate + is_cast),
            backward_scratch=(2 + separate) * fp32_logits - logits,
            scratch_tensor=fp32_logits,
            moved_bytes=cast_bytes + (2 if compiled else 4) * fp32_logits,
            moved_backward_bytes=cast_bytes + (2 if compiled else 5) * fp32_logits,
        )
    if facts.under_autograd:  # the caller holds the logits too
        return loss._replace(
            writes={"loss": 4, "softmax": logits},
            keeps=("logits", "softmax"),
            in_place=False,
            forward_scratch=0,
            backward_scratch=logits,
            moved_bytes=(3 if compiled else 4) * logits,
            moved_backward_bytes=(4 if compiled else 5) * logits,
        )
    if not facts.in_fp32:
        return loss
    return loss._replace(
        writes={"loss": 4, "softmax": fp32_logits},
        keeps=("softmax",),
        in_place=False,
        # unless they are held, the 16-bit logits are freed before the fp32 ones are copied
        forward_scratch=facts.keeps_fp32_logits * (fp32_logits - logits * (not facts.holds_logits)),
        backward_scratch=fp32_logits if facts.copies_softmax else 0,
        # cast, max, subtract, exp, sum, divide: each a kernel (Megatron-LM's cross_entropy.py). torch.compile makes
        # three of them: cast with max; subtract, exp and sum; divide. Its backward copies, and multiplies in place
        # while it casts (fused_cross_entropy.py, each function compiled by itself)
        moved_bytes=logits + (5 if facts.copies_softmax else 9) * fp32_logits,
        moved_backward_bytes=logits + (4 if facts.copies_softmax else 3) * fp32_logits,
    )


def _sum_rewards(sequences: int) -> Op:
    """Return the sum over cp of the rewards of ``sequences``, of which each rank holds a part (DPO)."""
    message = OpMessage("cp", "all_reduce", "", 4 * sequences)
    return Op("loss.rewards", "message", ("logits",), {}, differentiates=(), message=message)


def _list_head_entry(local: Local) -> tuple[list[Op], str]:
    """List the operations from the last block's output to the head's input, and return the name of that."""
    model, rows, dim, width = local.model, local.stream_rows, local.stream_width, local.width
    ops, hidden = list[Op](), "x"
    if model.hyper_connections is not None:
        ops, hidden = [collapse(local, "x", "xc")], "xc"
    if model.altup is not None:
        ops, hidden = average(local, model.altup, "x", "xc"), "xc"
    if model.final_norm:
        ops.append(list_norm(local, norm("head.norm", hidden, "h", rows=rows, dim=dim, width=width, kind=local.norm)))
        hidden = "h"
    if model.head_transform is not None:  # every rank of tensor parallelism holds the matrix, for its rows
        bias = model.head_transform_bias
        sizes = {"in_features": model.width, "out_features": model.width}
        ops.append(matmul("head.transform", hidden, "ht", rows=rows, **sizes, width=width, bias=bias))
        scratch = ACTIVATIONS[model.head_transform].plain_scratch * local.stream_bytes
        act = elementwise("head.act", "activation", ("ht",), "hm", size=local.stream_bytes, keeps=("ht",))
        ops.append(act._replace(forward_scratch=scratch, backward_scratch=scratch))
        normed = norm("head.transform_norm", "hm", "hn", rows=rows, dim=dim, width=width, kind=local.norm)
        ops.append(list_norm(local, normed))
        hidden = "hn"
    return ops, hidden


def _count_softmax_bytes(local: Local, rows: int) -> int:
    """Return the fp32 scratch of the softmax for the ``rows`` that are cast at once.

    It is input and softmax under tp 1, and the derivative of a soft cap.
    """
    if local.job.stack.kernels == "triton":  # cast to fp32 in registers
        return 0
    chunk = min(rows, max(1, LOSS_CHUNK_ELEMENTS // local.vocab)) * local.vocab * 4
    return 2 * chunk if (local.width < 4 and local.part.tp == 1) or local.model.logit_softcap else chunk


def _list_chunked_loss(local: Local, hidden: str) -> list[Op]:
    """List the operations ``hidden`` → loss, all in the backward: per chunk of rows logits, their gradient, dh and dW.

    Under tp the input is gathered only there, and each chunk sends the all-reduces that ``fused`` sends for all rows.
    """
    model, part = local.model, local.part
    rows, vocab, width = local.rows, local.vocab, local.width
    chunk, bias = min(rows, LOSS_CHUNK_ROWS), vocab if model.head_bias else 0
    weight = vocab * model.width
    flops = 2 * rows * vocab * model.width
    logits = chunk * vocab * width
    gathered_bytes = rows * model.width * width if part.sp else 0  # the gathered input; its gradient has the same size
    softmax = _count_softmax_bytes(local, chunk)
    if rows == chunk and local.trains("loss"):  # dW is allocated after it is freed
        softmax = max(0, softmax - (weight + bias) * width)
    targets = 8 * rows if part.cp > 1 else 0  # else a view of the batch
    ops = [
        Op(
            "loss",
            "loss",
            (hidden,),
            {"loss.own": 4, "targets": targets},
            keeps=(hidden, "targets"),
            parameters=weight + bias,
            wgrad_numels=(weight, bias) if bias else (weight,),
            flops=flops,
            causal_flops=flops,
            shape=(rows, vocab, model.width),
            moved_backward_bytes=4 * rows * vocab * width,  # read and written in both passes of ``fused``
            backward_scratch=2 * gathered_bytes
            - gathered_bytes // part.tp
            + logits
            + softmax
            + (bias * width if local.trains("loss") else 0),
            regathered_bytes=gathered_bytes,
            differentiates=(hidden,),
            accumulates_wgrads=True,
        )
    ]
    if part.tp > 1:
        size = rows * model.width * width
        regather, sums = ("all_gather", "reduce_scatter") if part.sp else ("", "all_reduce")
        n_chunks, rest = divmod(rows, chunk)
        loss_messages = [
            OpMessage("tp", "", sums, size, regather=regather),
            *(
                OpMessage("tp", "", "all_reduce", chunk_rows * 4, times=3 * times)
                for chunk_rows, times in ((chunk, n_chunks), (rest, 1))
                if chunk_rows
            ),
        ]
        names = ("loss.own", "loss.sums", "loss.chunks", "loss.rest")
        ops += [
            exchange(result, source, result, size=4, message=message)
            for source, result, message in zip(names[:-1], names[1:], loss_messages, strict=False)
        ]
    return ops


def _use_bf16(local: Local) -> Local:
    """Return ``local`` in bf16: the head's matmul is never in fp8 or fp4 (Transformer Engine, DeepSeek-V3 §3.3)."""
    if not local.job.precision.is_low_precision:
        return local
    bf16_recipe = local.job.precision.replace(compute="bf16", gathers="weights", dispatches="rows")
    return Local(local.model, local.job.replace(precision=bf16_recipe), local.part, local.frozen, local.unquantized)


def build_block_unit(ops: Sequence[Op], local: Local) -> UnitOperations:
    """Return the operations of one block, the recomputed ones marked."""
    stack = local.job.stack
    fused = stack.kernel_facts.fuses_linears and local.job.adapter is None
    return recompute(ops, local.part.recomputed, early_stop=stack.drops_unused_recomputation, fused=fused)
