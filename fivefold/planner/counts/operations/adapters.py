"""Operations over frozen weights: what autograd no longer keeps or computes, and what low-rank adapters add.

    x ── W (frozen) ───────────────────────(+)── y        x, a kept; no dW; dW_A, dW_B [rank, in], [out, rank]
      └─ dropout? ── A ── a ── B ── · s ────┘

A frozen linear layer computes only dx and keeps no input; one whose input needs no gradient computes nothing in the
backward. That is so in the first block, up to its first adapter, unless PyTorch's checkpoints recompute anything:
then the embedding's output gets a gradient (peft's ``enable_input_require_grads``). A weight in nf4 or fp4 is
dequantized before each product, and so are routed experts in mxfp4; one in int8 or fp8 too in the trainer, and only
before that of the backward in others.

DoRA multiplies the sum by m / n. The norms n of the rows of W + s · B A are computed in every forward, which adds a
product that no backward follows. The trainer scales the sum; peft adds (m / n − 1) W x and m / n · s B A x to W x.

Of routed experts peft multiplies rows by W + s · B A, which it makes of all experts in every forward and keeps for dx:
the backward makes the gradient of that sum, and from it those of A and B.

Megatron-Bridge gives layers that are one matmul, as q, k and v, one pair of factors, and shards both over tp
(``_list_merged``).
Sources: huggingface/peft@0.21.2:src/peft/tuners/lora/layer.py, Linear.forward and ParamWrapper, and dora.py,
DoraLinearLayer; transformers@5.23.0:src/transformers/integrations/moe.py, grouped_mm_experts_forward;
bitsandbytes@0.50.2:bitsandbytes/autograd/_functions.py, MatMul4Bit and MatMul8bitLt;
transformers@5.23.0:src/transformers/integrations/finegrained_fp8.py, FP8LinearFunction and FP8GroupedMatmulFunction;
NVIDIA-NeMo/Megatron-Bridge@067f987:src/megatron/bridge/peft/lora_layers.py, LoRALinear, and utils.py,
ParallelLinearAdapter and get_adapter_attributes_from_linear.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache, partial

from fivefold.adapter import EMBEDDING, Adapter
from fivefold.base_format import BITSANDBYTES_BASES, FOUR_BIT_BASES, FOUR_BIT_BLOCK, FP8_BLOCK, BaseFormat
from fivefold.job import Job
from fivefold.model.adapted import has_adapter, map_linears, resolve_linear
from fivefold.planner.counts.operations.launches import DROPOUT_LAUNCHES
from fivefold.planner.counts.operations.linear import drop_wgrad, keeps_casts
from fivefold.planner.counts.operations.local_shapes import Local
from fivefold.planner.counts.operations.op import Op, OpMessage, dropout, elementwise, exchange, is_weight_cast, matmul
from fivefold.units import ceil_div

FP8_EXPERTS_BYTES = 2**30  # of routed experts in fp8 that are dequantized at once (dequant_budget_bytes)


def apply_frozen_weights(ops: Sequence[Op], local: Local, *, input_gradient: bool) -> list[Op]:
    """Return the operations of a unit as they run with its frozen weights and the job's adapter.

    ``input_gradient``: the input of the unit needs a gradient.
    """
    adapter = local.job.adapter
    if not local.frozen and input_gradient:
        return list(ops)
    if adapter is not None:
        uncast = {op.name: op.reads[0] for op in ops if op.kind == "cast" and op.name in op.writes}
        outputs = {op.name: next(iter(op.writes)) for op in ops if op.kind == "matmul"}
        changed = [
            added for op in ops for added in _list_with_adapter(op, local, adapter, uncast=uncast, outputs=outputs)
        ]
    else:
        changed = [op if local.trains(op.name) else _freeze(op, local, adapter) for op in ops]
    entry = {name for op in changed for name in op.reads} if input_gradient else set()
    return differentiate(changed, entry - {name for op in changed for name in op.writes})


@lru_cache(maxsize=64)
def _use_16_bits(adapter: Adapter) -> Adapter:
    """Return an adapter over a base in the dtype of the activations."""
    return adapter.replace(base=None, double_quantization=True)


def runs_in_reference(op: Op, job: Job) -> bool:
    """Tell whether the forward of DPO's reference runs an operation: all, but none of an adapter and no rewards."""
    return job.has_reference and ".lora_" not in op.name and op.name != "loss.rewards"


def is_per_step(op: Op) -> bool:
    """Tell whether an operation does not depend on the number of tokens, such as DoRA's product of both factors."""
    return ".lora_norm" in op.name or ".lora_merge" in op.name


def _list_with_adapter(
    op: Op, local: Local, adapter: Adapter, *, uncast: Mapping[str, str], outputs: Mapping[str, str]
) -> Iterator[Op]:
    """Yield an operation with frozen weights, followed by those of its adapter if it has one.

    ``uncast``: the tensors of which casts to fp8 or fp4 are made; factors multiply in 16 bits, and so keep those.
    ``outputs``: the tensors that linear layers write.
    """
    model = local.model
    if local.trains(op.name):
        yield op
        return
    if op.name in local.unquantized:
        adapter = _use_16_bits(adapter)
    if op.name == "embed.tokens" and adapter.has_target(EMBEDDING):
        yield from _list_embedding(op, local, adapter.resolve_target(EMBEDDING))
        return
    is_ours = local.job.stack.kernel_facts.fuses_linears
    if op.name == "moe.combine" and adapter.adapts_experts and not is_ours:
        yield _weigh_outputs(op, local)
        return
    is_merged = local.job.stack.merges_adapters
    if is_merged and op.name.endswith(".reduce") and has_adapter(model, adapter, op.name.removesuffix(".reduce")):
        yield from _add_to_reduced(op)
        return
    if op.kind != "matmul" or not has_adapter(model, adapter, op.name):
        yield _freeze(op, local, adapter)
        return
    adapter = resolve_linear(model, adapter, op.name)
    if is_merged:
        yield from _list_merged(op, local, adapter, uncast=uncast)
        return
    if op.name.startswith("moe.experts."):
        yield from (_list_experts_in_place if is_ours else _list_merged_experts)(op, local, adapter)
        return
    leader = map_linears(model)[op.name].leader
    # the output of the first of several layers that are one in transformers, by which its factor A is named
    first = "" if leader == op.name else outputs[leader]
    if is_ours:
        yield from _list_in_place(op, local, adapter, first=first)
        return
    yield from _list_separate(op, local, adapter, uncast=uncast, first=first)


def _list_separate(op: Op, local: Local, adapter: Adapter, *, uncast: Mapping[str, str], first: str) -> Iterator[Op]:
    """Yield an operation with frozen weights and those of its adapter as peft runs them, one after another.

    ``first``: the output of the layer that has the factor A of this one; "": it has one of its own.
    """
    (out, size), *_ = op.writes.items()
    (rows, out_features, in_features), (source, *_) = op.shape, op.reads
    base, high, scaled = (f"{out}.{suffix}" for suffix in ("base", "lora_b", "lora"))
    leader = first or out
    low = f"{leader}.lora_a"
    yield _freeze(op, local, adapter)._replace(writes={base: size})
    source = uncast.get(source, source)
    keeps, held = tuple(uncast.get(name, name) for name in op.keeps), tuple[str, ...]()
    scratch, regathered = op.backward_scratch, op.regathered_bytes
    size_of_input, width = rows * in_features * local.width, 1
    widens = local.job.precision.autocasts and adapter.base not in BITSANDBYTES_BASES
    if widens:  # peft widens x and holds both until it returns; autocast casts it back to 16 bits for the product
        fp32_name, width = f"{leader}.lora_wide", 2
        if not first:
            yield _cast(f"{op.name}.lora_widen", source, fp32_name, size=2 * size_of_input)
        source, held = fp32_name, (fp32_name, source)
    if adapter.has_magnitudes:
        norms = tuple(_list_row_norms(op, local, adapter, widens=widens, first=first))
        held = (*held, *(name for norm in norms for name in norm.writes))
        yield from norms
    if adapter.dropout:
        dropped = f"{leader}.lora_drop"
        mask = rows * in_features
        if not first:
            yield dropout(f"{op.name}.lora_dropout", source, dropped, size=width * size_of_input, mask=mask)
        source = dropped
    if widens:
        if not first:
            yield _cast(f"{op.name}.lora_cast", source, f"{leader}.lora_x", size=size_of_input)
        source = f"{leader}.lora_x"
    if widens or adapter.dropout:
        keeps, scratch, regathered = (source,), 0, 0
    multiply = partial(matmul, rows=rows, width=local.width)
    factor_a = multiply(f"{op.name}.lora_a", source, low, in_features=in_features, out_features=adapter.rank)
    factor_b = multiply(f"{op.name}.lora_b", low, high, in_features=adapter.rank, out_features=out_features)
    factor_a = factor_a._replace(keeps=keeps, backward_scratch=scratch, regathered_bytes=regathered)
    for factor in (factor_b,) if first else (factor_a, factor_b):
        if local.job.precision.autocasts:  # autocast's cache keeps the cast of a factor
            weight = f"{factor.name}.weight"
            cast_bytes = local.width * factor.shape[1] * factor.shape[2]
            yield _cast(weight, factor.reads[0], weight, size=cast_bytes)._replace(kind="cast", differentiates=())
            factor = factor._replace(keeps=(*factor.keeps, weight), differentiates=factor.reads)
        yield factor
    if adapter.has_magnitudes:
        yield from _list_rescaled(op, local, adapter, held=held, widens=widens, dropped=source)
        return
    yield elementwise(f"{op.name}.lora_scale", "activation", (high,), scaled, size=size)
    add = elementwise(f"{op.name}.lora_add", "add", (base, scaled), out, size=size)
    yield add._replace(reads=(*add.reads, *held), differentiates=add.reads)


def _list_merged(op: Op, local: Local, adapter: Adapter, *, uncast: Mapping[str, str]) -> Iterator[Op]:
    """Yield an operation with frozen weights and those of its adapter as Megatron-Bridge runs them: W, A, B, scale, +.

    Under tensor parallelism A computes this rank's share of ranks of the update, which are gathered, or in a
    row-parallel layer partial sums, which are all-reduced. B computes this rank's outputs; those of a row-parallel
    layer then are gathered, or exchanged for all outputs of this rank's rows, and added to what the layer reduced.
    """
    (out, size), *_ = op.writes.items()
    rows, out_features, in_features = op.shape
    width, rank, part, name = local.width, adapter.rank, local.part, op.name
    is_row = name.endswith((".out", ".down"))
    is_sharded = part.tp > 1
    is_reduced = is_row and is_sharded  # the base's output is a partial sum, to which nothing is added
    base = out if is_reduced else f"{out}.base"
    total = out.removesuffix(".partial")
    yield _freeze(op, local, adapter)._replace(writes={base: size})
    source, keeps = uncast.get(op.reads[0], op.reads[0]), tuple(uncast.get(kept, kept) for kept in op.keeps)
    held = dict[str, int]()
    if op.regathered_bytes:  # the gathered output of the norm is returned in 16 bits, and kept for A
        held = {f"{out}.lora_input": rows * in_features * width} if keeps_casts(local) else {}
        keeps = tuple(held) or (source,)
    if adapter.dropout:
        dropped = f"{out}.lora_drop"
        numel = rows * in_features
        yield dropout(f"{name}.lora_dropout", source, dropped, size=width * numel, mask=numel)
        source, keeps, held = dropped, (dropped,), {}
    if is_sharded and not is_row and not part.sp:  # A sums its own gradient of x over the ranks
        source, copied = source if adapter.dropout else keeps[0], f"{out}.lora_copy"
        message = OpMessage("tp", "", "all_reduce", rows * in_features * width)
        yield exchange(f"{name}.lora_copy", source, copied, size=0, message=message)
        source = copied
    low, high, update = f"{out}.lora_a", f"{out}.lora_b", f"{total}.lora"
    share = rank if is_row else rank // part.tp
    product = matmul(f"{name}.lora_a", source, low, rows=rows, in_features=in_features, out_features=share, width=width)
    product = product._replace(writes=product.writes | held, keeps=keeps)
    yield drop_wgrad(product, local.job)
    if is_sharded:
        kinds = ("all_reduce", "all_reduce") if is_row else ("all_gather", "all_reduce")
        low_bytes = rows * rank * width
        yield exchange(
            f"{name}.lora_gather", low, f"{low}.whole", size=low_bytes, message=OpMessage("tp", *kinds, low_bytes)
        )
        low = f"{low}.whole"
    outputs = out_features // part.tp if is_row else out_features
    product = matmul(f"{name}.lora_b", low, high, rows=rows, in_features=rank, out_features=outputs, width=width)
    yield drop_wgrad(product, local.job)
    if is_reduced:
        size = local.stream_rows * out_features * width
        yield _send_updates(f"{name}.lora_send", local, high, rows=rows, out_features=out_features)
        high = f"{high}.whole"
    yield elementwise(f"{name}.lora_scale", "activation", (high,), update, size=size)
    if not is_reduced:
        yield elementwise(f"{name}.lora_add", "add", (base, update), out, size=size)


def _send_updates(name: str, local: Local, source: str, *, rows: int, out_features: int) -> Op:
    """Return the message by which a rank gets all outputs of its rows of a row-parallel layer's update.

    all_gather: of all rows, of which it takes its own; the backward gathers the gradients of those.
    """
    part, full_bytes = local.part, rows * out_features * local.width
    if local.job.stack.merged_adapters == "all_to_all" and part.sp:
        payload = full_bytes // part.tp
        message = OpMessage("tp", "all_to_all", "all_to_all", payload)
        return exchange(name, source, f"{source}.whole", size=payload, message=message)
    message = OpMessage("tp", "all_gather", "all_gather" if part.sp else "", full_bytes)
    return exchange(name, source, f"{source}.whole", size=full_bytes, message=message)


def _add_to_reduced(op: Op) -> Iterator[Op]:
    """Yield the reduction of a row-parallel layer's output and the sum with the update of its adapter."""
    (out, size), *_ = op.writes.items()
    yield op._replace(writes={f"{out}.base": size})
    yield elementwise(
        f"{op.name.removesuffix('.reduce')}.lora_add", "add", (f"{out}.base", f"{out}.lora"), out, size=size
    )


def _list_embedding(op: Op, local: Local, adapter: Adapter) -> Iterator[Op]:
    """Yield the lookup of frozen rows and of columns of A, and the product with B, which the trainer adds in place."""
    (out, size), *_ = op.writes.items()
    base, low, high, scaled = (f"{out}.{suffix}" for suffix in ("base", "lora_a", "lora_b", "lora"))
    rows, width, rank = local.rows, local.width, adapter.rank
    numel = rank * local.model.vocab
    lookup = elementwise(f"{op.name}.lora_a", "embedding", op.reads, low, size=rows * rank * width, keeps=("ids",))
    lookup = lookup._replace(parameters=numel, wgrad_numels=(numel,), differentiates=())
    product = matmul(
        f"{op.name}.lora_b", low, high, rows=rows, in_features=rank, out_features=local.model.width, width=width
    )
    frozen = _freeze(op, local, adapter)._replace(keeps=())
    if not local.job.stack.kernel_facts.fuses_linears:
        yield frozen._replace(writes={base: size})
        yield lookup
        yield product
        yield elementwise(f"{op.name}.lora_scale", "activation", (high,), scaled, size=size)
        yield elementwise(f"{op.name}.lora_add", "add", (base, scaled), out, size=size)
        return
    yield lookup
    yield frozen._replace(writes={base: 0}, gradients={base: size}, forward_scratch=size)
    yield product._replace(writes={high: 0}, gradients={high: size})
    yield elementwise(f"{op.name}.lora_add", "add", (base, high), out, size=size)._replace(moved_bytes=size)


def _list_row_norms(op: Op, local: Local, adapter: Adapter, *, widens: bool, first: str) -> Iterator[Op]:
    """Yield the operations of PEFT for the norms of the rows of W + s · B A: B A is B(A(identity)), kept as a graph.

    The norms have no gradient; identity and B A are held until the layer returns, and so is W if it is a copy.
    """
    (out, *_), (_, out_features, in_features) = op.writes, op.shape
    width = (2 if widens else 1) * local.width
    autocasts = local.job.precision.autocasts
    identity = in_features * in_features * local.width
    numel = out_features * in_features
    low_name = f"{first or out}.lora_norm_a"
    low = matmul(
        f"{op.name}.lora_norm_a",
        op.reads[0],
        low_name,
        rows=in_features,
        in_features=in_features,
        out_features=adapter.rank,
        width=local.width,
    )
    if not first:
        yield _detach(low)._replace(
            writes={low_name: identity + in_features * adapter.rank * local.width},
            forward_scratch=2 * identity * autocasts,
        )
    high = matmul(
        f"{op.name}.lora_norm",
        low_name,
        f"{out}.lora_norm",
        rows=in_features,
        in_features=adapter.rank,
        out_features=out_features,
        width=local.width,
    )
    is_copied = widens or adapter.base in FOUR_BIT_BASES
    rows = 3 * out_features * (4 if autocasts else width)  # n, m / n and m / n − 1, which the products below keep
    yield _detach(high)._replace(
        writes={f"{out}.lora_norm": numel * width * (1 + is_copied), f"{out}.lora_rows": rows},
        forward_scratch=2 * numel * width,
        moved_bytes=high.moved_bytes + 6 * numel * width,  # times s, added to W, and read for the norms
    )


def _list_rescaled(
    op: Op, local: Local, adapter: Adapter, *, held: tuple[str, ...], widens: bool, dropped: str
) -> Iterator[Op]:
    """Yield the operations of PEFT that add (m / n − 1) W x and m / n · s B A x to W x, in fp32 under autocast.

    With dropout the first is a second product of W, with the ``dropped`` input; its backward keeps a copy of W.
    """
    (out, size), *_ = op.writes.items()
    rows, out_features, in_features = op.shape
    base = f"{out}.base"
    high = f"{out}.lora_b"
    factor = 2 if local.job.precision.autocasts else 1
    result, plain = (f"{out}.lora_wide_sum" if factor == 2 else out), base
    if adapter.dropout:
        plain = f"{out}.lora_base"
        second = matmul(
            f"{op.name}.lora_base",
            dropped,
            plain,
            rows=rows,
            in_features=in_features,
            out_features=out_features,
            width=local.width,
        )._replace(parameters=0, wgrad_numels=(), keeps=())
        if widens or adapter.base in FOUR_BIT_BASES:
            weight = f"{out}.lora_base_weight"
            writes = second.writes | {weight: out_features * in_features * local.width}
            second = second._replace(writes=writes, keeps=(weight,))
        yield second
    elif len(op.wgrad_numels) > 1:
        plain = f"{out}.lora_unbiased"
        yield elementwise(f"{op.name}.lora_unbias", "add", (base,), plain, size=size)
    for name, source, product in (("lora_rescale", plain, "lora_plain"), ("lora_magnitude", high, "lora_update")):
        scaled = elementwise(
            f"{op.name}.{name}",
            "activation",
            (source,),
            f"{out}.{product}",
            size=factor * size,
            keeps=(source, f"{out}.lora_rows"),
            backward_scratch=factor * size,
        )
        is_last = name == "lora_rescale"  # in the backward: the gradient of m / n is complete
        yield scaled._replace(parameters=out_features, wgrad_numels=(out_features,)) if is_last else scaled
    scaled = elementwise(
        f"{op.name}.lora_scale", "activation", (f"{out}.lora_update",), f"{out}.lora", size=factor * size
    )
    yield scaled
    terms = f"{out}.lora_plain", f"{out}.lora"
    yield elementwise(f"{op.name}.lora_sum", "add", terms, f"{out}.lora_sum", size=factor * size)
    add = elementwise(f"{op.name}.lora_add", "add", (base, f"{out}.lora_sum"), result, size=factor * size)
    yield add._replace(reads=(*add.reads, *held), differentiates=add.reads)
    if factor == 2:
        yield _cast(f"{op.name}.lora_narrow", result, out, size=size)


def _list_in_place(op: Op, local: Local, adapter: Adapter, *, first: str) -> Iterator[Op]:
    """Yield an operation with frozen weights and those of its adapter as the trainer runs them: A, W, and B onto it.

    A comes first, so that a recomputed block ends with it (``trainer/model/lora.py``). Dropout keeps its mask; the
    dropped input is a temporary of the products with A, and so is the gradient through A, before it is added to dx.
    ``first``: the output of the layer that has the factor A of this one; "": it has one of its own.
    """
    (out, size), *_ = op.writes.items()
    (rows, out_features, in_features), (source, *_) = op.shape, op.reads
    base, high, mask = (f"{out}.{part}" for part in ("base", "lora_b", "lora_mask"))
    low = f"{first or out}.lora_a"
    width = local.width
    frozen = _freeze(op, local, adapter)  # its output is allocated here, and counted where B has been added to it
    factor = matmul(
        f"{op.name}.lora_a", source, low, rows=rows, in_features=in_features, out_features=adapter.rank, width=width
    )
    factor = factor._replace(
        keeps=op.keeps,
        backward_scratch=op.backward_scratch,
        regathered_bytes=op.regathered_bytes,
        accumulates_dgrad=True,
    )
    if adapter.dropout:
        dropped = rows * in_features * width
        moved = rows * in_features * (2 * width + 1)
        drawn, applied = DROPOUT_LAUNCHES
        factor = factor._replace(
            launches=(drawn, 2 * applied),  # the backward drops the input again, and then its gradient
            launched_bytes=(rows * in_features, 0),
            writes=factor.writes | {mask: rows * in_features},
            keeps=(*op.keeps, mask),
            forward_scratch=dropped,
            backward_scratch=op.backward_scratch + dropped,
            moved_cast_bytes=(moved + rows * in_features, moved + rows * in_features * width, moved),
        )
        frozen = frozen._replace(backward_scratch=max(frozen.backward_scratch, dropped))
    if not first:
        yield factor
    if adapter.has_magnitudes:
        yield _compute_row_norms(op, local, adapter, scratch=frozen.forward_scratch)
    yield frozen._replace(
        writes={base: 0}, gradients={base: size}, forward_scratch=frozen.forward_scratch + size, accumulates_dgrad=True
    )
    factor = matmul(
        f"{op.name}.lora_b", low, high, rows=rows, in_features=adapter.rank, out_features=out_features, width=width
    )
    yield factor._replace(writes={high: 0}, gradients={high: size})
    total = f"{out}.lora_sum" if adapter.has_magnitudes else out
    yield elementwise(f"{op.name}.lora_add", "add", (base, high), total, size=size)._replace(moved_bytes=size)
    if adapter.has_magnitudes:
        yield _rescale(op, local, total, f"{out}.lora_norms", out, size=size)


def _list_experts_in_place(op: Op, local: Local, adapter: Adapter) -> Iterator[Op]:
    """Yield a grouped product of frozen experts and those of their adapters, as the trainer runs them: A, W, and B.

    Gate and up share A, which comes first (``trainer/model/expert_lora.py``). A product with B is a temporary, which is
    added to the output in place.
    """
    (out, size), *_ = op.writes.items()
    (group_rows, out_features, in_features), (source, *_) = op.shape, op.reads
    experts, width, name = op.batch, local.width, op.name.rpartition(".")[2]
    rows = size // (out_features * width)
    ends = tuple(kept for kept in op.keeps if kept == "ends")
    base, high = f"{out}.base", f"{out}.lora_b"
    low = "moe.experts.down.low" if name == "down" else "moe.experts.gate_up.low"

    def multiply(name: str, source: str, written: str, *, in_features: int, out_features: int) -> Op:
        """Return a grouped matmul of all local experts."""
        product = matmul(
            name, source, written, rows=rows, in_features=in_features, out_features=out_features, width=width
        )
        return product._replace(
            parameters=experts * product.parameters,
            wgrad_numels=(experts * in_features * out_features,),
            shape=(group_rows, out_features, in_features),
            batch=experts,
            keeps=(source, *ends),
        )

    if name != "up":
        lowering = f"{op.name.removesuffix('.gate')}{'.gate_up' if name == 'gate' else ''}.lora_a"
        yield multiply(lowering, source, low, in_features=in_features, out_features=adapter.rank)
    frozen = _freeze(op, local, adapter)
    yield frozen._replace(
        writes={base: 0}, gradients={base: size}, forward_scratch=frozen.forward_scratch + size, accumulates_dgrad=True
    )
    factor = multiply(f"{op.name}.lora_b", low, high, in_features=adapter.rank, out_features=out_features)
    yield factor._replace(writes={high: 0}, gradients={high: size}, forward_scratch=2 * size)
    yield elementwise(f"{op.name}.lora_add", "add", (base, high), out, size=size)._replace(moved_bytes=size)


def _list_merged_experts(op: Op, local: Local, adapter: Adapter) -> Iterator[Op]:
    """Yield W + s · B A of all experts, as PEFT adds them up, and a grouped product with that sum.

    Gate and up are one parameter, whose sum is complete before the first of them is multiplied.
    """
    name = op.name.rpartition(".")[2]
    if name != "up":
        yield from (_merge_factors(op, local, adapter, of) for of in (("gate", "up") if name == "gate" else ("down",)))
    merged = f"moe.experts.{name}.merged"
    product = _freeze(op, local, adapter)
    source = op.reads[0]
    is_joined = name == "gate"  # whose gradient of x is that of up too
    yield product._replace(
        reads=(source, merged),
        keeps=tuple(dict.fromkeys((source, merged, *product.keeps))),
        accumulates_dgrad=is_joined,
    )


def _merge_factors(op: Op, local: Local, adapter: Adapter, name: str) -> Op:
    """Return the sum of the stacked weights of ``op`` and their updates, for the layer ``name`` of its geometry.

    Every forward computes it twice: the registration of the parametrization checks its result by a first one. So the
    shape has the rows of both, and the backward's products of both factors have as many FLOPs.
    """
    _, out_features, in_features = op.shape
    experts, rank, width = op.batch, adapter.rank, local.width
    numel = experts * out_features * in_features
    factors = tuple(
        experts * rank * size for size in ((out_features, in_features) if name != "up" else (out_features,))
    )
    product = matmul(
        f"moe.experts.{name}.lora_merge",
        op.reads[0],
        f"moe.experts.{name}.merged",
        rows=2 * out_features,
        in_features=rank,
        out_features=in_features,
        width=width,
    )
    casts = {f"moe.experts.{name}.lora_casts": sum(factors) * width} if local.job.precision.autocasts else {}
    return product._replace(
        writes={f"moe.experts.{name}.merged": numel * width, **casts},
        keeps=(*casts,),  # in the dtype of W
        parameters=sum(factors),
        wgrad_numels=factors,
        flops=experts * product.flops,
        causal_flops=experts * product.causal_flops,
        moved_bytes=experts * product.moved_bytes + 2 * numel * width,  # W is read too, twice
        moved_backward_bytes=experts * product.moved_backward_bytes,
        batch=experts,
        differentiates=(),
    )


def _weigh_outputs(op: Op, local: Local) -> Op:
    """Return the sum of the experts' outputs as transformers makes it: it multiplies them by their routing weights."""
    returned = op.reads[0]
    (_, size), *_ = op.writes.items()
    routed = size * local.model.moe.computed_per_token if local.model.moe is not None else 0
    return op._replace(
        keeps=(*op.keeps, returned),
        forward_scratch=max(routed, 2 * routed - size),  # weighted, and those in the order of tokens
        backward_scratch=routed,
    )


def _compute_row_norms(op: Op, local: Local, adapter: Adapter, *, scratch: int) -> Op:
    """Return the norms of the rows of W + s · B A as the trainer computes them; ``scratch``: bytes of dequantized W."""
    _, out_features, in_features = op.shape
    norms, (out, *_) = 4 * out_features, op.writes
    product = matmul(
        f"{op.name}.lora_norm",
        op.reads[0],
        f"{out}.lora_norms",
        rows=out_features,
        in_features=adapter.rank,
        out_features=in_features,
        width=local.width,
    )
    is_row_parallel = op.name.endswith((".out", ".down")) and op.name != "head.out"
    message = OpMessage("tp", "all_reduce", "", norms) if is_row_parallel and local.part.tp > 1 else None
    updated = out_features * in_features * local.width
    return _detach(product)._replace(
        writes={f"{out}.lora_norms": norms},
        moved_bytes=product.moved_bytes + 2 * updated,  # W is read too, and the sum for its norms
        forward_scratch=scratch + updated,
        message=message,
    )


def _detach(op: Op) -> Op:
    """Return an operation whose result has no gradient."""
    return op._replace(parameters=0, wgrad_numels=(), keeps=(), differentiates=())


def _rescale(op: Op, local: Local, total: str, norms: str, out: str, *, size: int) -> Op:
    """Return the product with m / n, which keeps both and trains m.

    The backward sums the products of g and z in fp32 and frees them before it makes m / n · g.
    """
    _, out_features, _ = op.shape
    scales = 4 * out_features
    return Op(
        f"{op.name}.lora_scale",
        "activation",
        (total, norms),
        {out: size},
        keeps=(total, norms),
        parameters=out_features,
        wgrad_numels=(out_features,),
        differentiates=(total,),
        moved_bytes=2 * size,
        moved_backward_bytes=5 * size,  # g z is written and summed, then m / n · g
        forward_scratch=scales,
        accumulates_wgrads=True,
        cast_scratch_bytes=(scales, scales - local.job.precision.gradients_bytes * out_features),
    )


def _cast(name: str, source: str, out: str, *, size: int) -> Op:
    """Return a cast between 16 bits and fp32, to ``size`` bytes."""
    moved = 3 * size if name.endswith(("lora_cast", "weight")) else 3 * size // 2
    return Op(name, "activation", (source,), {out: size}, moved_bytes=moved, moved_backward_bytes=moved)


def _freeze(op: Op, local: Local, adapter: Adapter | None) -> Op:
    """Return an operation whose weights are not trained."""
    op = op._replace(parameters=0, wgrad_numels=(), bias_wgrad_numel=0, wgrad_operand_bytes=0)
    if op.kind == "norm":  # x̂ is kept for the gradient of the weight alone
        keeps = tuple(name for name in op.keeps if not name.endswith(".normal"))
        scratch = 0 if local.job.stack.kernels == "triton" else op.backward_scratch
        return op._replace(keeps=keeps, backward_scratch=scratch)
    if op.kind != "matmul":
        return op
    is_expert = op.name.startswith("moe.experts.")
    base = None if adapter is None else adapter.base_format
    if base is not None:
        is_quantized = base.quantizes_experts if is_expert else base.quantizes_linears
        base = base if is_quantized and op.name not in ("head.out", "moe.router") else None
    is_ours = local.job.stack.kernel_facts.fuses_linears
    if base is not None and base.name == "int8" and not is_ours:
        return _quantize_to_int8(op, width=local.width, kept=op.reads)
    # dx of experts reads which rows each of them has; a router's is made in fp32
    keeps = tuple(name for name in op.keeps if name == "ends")
    if local.part.keeps_linear_inputs and not is_expert and not (base is not None and base.is_four_bit):
        keeps = op.keeps
    scratch = op.backward_scratch if op.name == "moe.router" else 0
    op = op._replace(keeps=keeps, backward_scratch=scratch, regathered_bytes=0)
    if base is not None and base.name == "fp8" and not is_ours:
        return _dequantize_fp8(op, local, is_expert=is_expert)
    return op if base is None else _dequantize(op, local, base)


def _dequantize(op: Op, local: Local, base: BaseFormat) -> Op:
    """Return a product with a frozen weight that is dequantized before y and before dx, and freed after it.

    Of double quantization bitsandbytes makes fp32 scales first, by two kernels: dequantized, and with the offset added
    (bitsandbytes@0.50.2:bitsandbytes/functional.py, ``dequantize_4bit``; all but short sequences run the same in the
    forward: backends/cuda/ops.py, ``_dequant_linear_fallback``).
    """
    _, out_features, in_features = op.shape
    experts = op.batch if op.name.startswith("moe.experts.") else 1
    numel = experts * out_features * in_features
    weight, scales = numel * local.width, 4 * ceil_div(numel, FOUR_BIT_BLOCK)
    moved = weight + base.count_bytes(experts, out_features, in_features)
    scratch, kernels = weight, 1
    if base.double_quantization and not local.job.stack.kernel_facts.fused_dequantization:
        # fp32 scales are freed before the product; its result is allocated after them
        scratch, kernels = max(weight, weight + scales - sum(op.writes.values())), 3
        moved += 4 * scales  # written, read and written with the offset, and read
    return op._replace(
        forward_scratch=scratch,
        backward_scratch=weight,
        moved_cast_bytes=(moved, moved, 0),
        dequantizing_kernels=kernels,
    )


def _dequantize_fp8(op: Op, local: Local, *, is_expert: bool) -> Op:
    """Return a product with a frozen weight in fp8: y by a kernel that reads it, dx by the dequantized weight.

    The scales are repeated for each row first. Of routed experts as many are dequantized at once as 1 GiB holds, gate
    and up together.
    """
    rows, out_features, in_features = op.shape
    experts = op.batch if is_expert else 1
    numel = experts * out_features * in_features
    weight = numel * local.width
    scales = experts * out_features * ceil_div(in_features, FP8_BLOCK) * local.width
    if is_expert:
        together = 2 if op.name in ("moe.experts.gate", "moe.experts.up") and local.model.mlp == "gated" else 1
        expert_bytes = together * out_features * in_features * local.width
        dequantized = min(experts, max(1, FP8_EXPERTS_BYTES // expert_bytes))
        weight, scales = dequantized * expert_bytes, scales * dequantized * together // experts
        products = (
            0 if dequantized == experts else dequantized * rows * in_features * local.width
        )  # rows of each expert
        scratch = weight + max(scales, products)
    else:
        scratch = max(weight, weight + scales - rows * in_features * local.width)
    moved = numel * (1 + 3 * local.width)  # read, cast, scaled in place
    return op._replace(backward_scratch=scratch, moved_cast_bytes=(0, moved, 0))


def _quantize_to_int8(op: Op, *, width: int, kept: tuple[str, ...]) -> Op:
    """Return a product with a frozen weight as LLM.int8 runs it on GPUs: x in int8, sums in int32, dx in 16 bits.

    Its backward dequantizes the weight. It keeps its input, which it does not read again. Columns of x with outliers
    are not counted. Source: bitsandbytes@0.50.2:bitsandbytes/backends/cuda/ops.py.
    """
    rows, out_features, in_features = op.shape
    quantized = rows * in_features + 4 * rows  # with a scale of each row
    search = rows * in_features * (2 + 2 + 1)  # a copy in fp16, its absolute values, and where they are large
    sums = rows * out_features * (4 + 2)  # in int32, and an output in fp16 before it is cast
    weight = out_features * in_features * width
    moved_inputs = rows * in_features * ((width + 2) + (2 + 2) + (2 + 1) + (2 + 1))  # cast, absolute, compare, quantize
    moved_outputs = rows * out_features * (4 + (4 + 2) + (2 + width))  # sums, scaled, cast
    return op._replace(
        keeps=kept,
        forward_scratch=quantized + max(search, sums),
        backward_scratch=weight,
        regathered_bytes=0,
        moved_cast_bytes=(moved_inputs + moved_outputs, out_features * in_features * (1 + 3 * width), 0),
    )


def differentiate(ops: Sequence[Op], entry: set[str]) -> list[Op]:
    """Return the operations with the backward that autograd runs if of the inputs only ``entry`` needs a gradient."""
    needs_gradient, result = set(entry), list[Op]()
    sizes = {name: size for op in ops for name, size in op.writes.items()}
    for op in ops:
        inputs = op.reads if op.differentiates is None else op.differentiates
        wanted = tuple(name for name in inputs if name in needs_gradient)
        trains = bool(op.wgrad_numels)
        if is_weight_cast(op):
            result.append(op)
            continue
        if not wanted and not trains:
            result.append(drop_backward(op))
            continue
        needs_gradient.update(op.writes)
        if op.kind == "norm" and not wanted:  # a norm of several kernels keeps x̂ for its weight, and nothing for x
            op = op._replace(keeps=tuple(name for name in op.keeps if name.endswith(".normal")) or op.keeps)
        products = op.backward_products
        if op.kind in ("matmul", "loss"):  # a loss in chunks has the products of the head
            merged = [name for name in wanted if name.endswith(".merged")]
            # experts may make their gradients in another operation
            products = (len(wanted) > len(merged)) + bool(op.parameters or merged)
        if op.kind in ("attention", "scan"):  # whose backward makes the gradients of all inputs
            unwanted = sum(sizes.get(name, 0) for name in inputs if name not in wanted)
            op = op._replace(backward_scratch=op.backward_scratch + unwanted)
        result.append(op._replace(differentiates=wanted, backward_products=products))
    kept_inputs = {name for op in ops if op.regathered_bytes for name in op.reads}
    return [
        op._replace(message=op.message._replace(regather=""))
        if op.message and op.message.forward and op.message.regather and kept_inputs.isdisjoint(op.writes)
        else op
        for op in result
    ]


def drop_backward(op: Op) -> Op:
    """Return an operation that autograd does not differentiate."""
    message = op.message and op.message._replace(backward="", backward_payload=None)
    return op._replace(
        keeps=(),
        differentiates=(),
        backward_products=0,
        backward_flops=0,
        moved_backward_bytes=0,
        backward_scratch=0,
        message=message,
        moved_cast_bytes=(op.moved_cast_bytes[0], 0, 0),
    )
