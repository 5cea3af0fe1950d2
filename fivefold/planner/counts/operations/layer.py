"""The operations of a decoder on one rank, in the order they run: embedding, block, head.

    x ── norm1 ── q,k,v ── rope ── attention ── out ──(+)── norm2 ── gate,up ── swiglu ── down ──(+)── x'

Letters: B sequences of T tokens in the micro-batch, D width, N and K heads of H, F feed-forward, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from fivefold.job import LOSS_CHUNK_ELEMENTS, LOSS_CHUNK_ROWS
from fivefold.model.spec import Model
from fivefold.planner.counts.operations.attention import attention
from fivefold.planner.counts.operations.autocast import autocasted
from fivefold.planner.counts.operations.feedforward import experts, mlp
from fivefold.planner.counts.operations.linear import Source, over, over_columns, settled
from fivefold.planner.counts.operations.local_shapes import Local
from fivefold.planner.counts.operations.narrow import narrowed
from fivefold.planner.counts.operations.op import Message, Op, dropout, elementwise, exchange, norm
from fivefold.planner.counts.operations.recompute import Unit, recompute


def embedding(local: Local) -> list[Op]:
    """Token ids → x, plus learned positions if the model has them. tp shards the table by vocabulary rows."""
    model, part, width = local.model, local.part, local.stream_width
    size = local.rows * width * local.width
    table = local.vocab * model.width
    whole = "x" if part.tp == 1 else "x.partial"
    tokens = elementwise("embed.tokens", "embedding", ("ids",), whole, size=size, keeps=("ids",))
    ops = [tokens._replace(parameters=table, gradient_widths=(table,), differentiates=())]
    if part.tp > 1:
        kinds = ("reduce_scatter", "all_gather") if part.sp else ("all_reduce", "")
        message = Message(over(part), *kinds, payload=size)
        ops.append(exchange("embed.reduce", whole, "x", size=local.stream_bytes, message=message))
    if model.embedding_scale != 1:
        ops.append(elementwise("embed.scale", "activation", ("x",), "xs", size=local.stream_bytes))
    if model.position == "learned":
        table = model.positions * width
        source = "x" if model.embedding_scale == 1 else "xs"
        add = elementwise("embed.positions", "embedding", (source,), "xp", size=local.stream_bytes)
        ops.append(
            add._replace(
                parameters=table, gradient_widths=(table,), passes=True, forward_scratch=8 * local.stream_rows,
                backward_scratch=8 * local.stream_rows,
            )
        )  # fmt: skip
    if model.dropout_rates.embedding:
        source = next(iter(ops[-1].writes))
        mask = local.stream_rows * width
        ops.append(dropout("embed.dropout", source, "xd", size=local.stream_bytes, mask=mask))
    return autocasted(local, ops)


def block(local: Local, *, layer: int) -> list[Op]:
    """One decoder layer: x → z."""
    return [*attention_half(local, layer=layer), *feedforward_half(local, layer=layer)]


def attention_half(local: Local, *, layer: int) -> list[Op]:
    """A layer's operations up to its first residual sum, x → y, which do not depend on how experts are cut."""
    model = local.model
    pre, post = model.block != "post", model.block in ("post", "sandwich")
    ops = [_normed(local, "norm1", "x")] if pre else []
    ops += attention(local, "norm1.out" if pre else "x", layer=layer)
    branch = "a"
    if post:
        name = "norm1_post" if model.block == "sandwich" else "norm1"
        ops, branch = [*ops, _normed(local, name, "a")], f"{name}.out"
    return _kept_as_told(local, [*ops, *_residual(local, "attention", branch, "x", "y")], layer=layer)


def feedforward_half(local: Local, *, layer: int) -> list[Op]:
    """A layer's operations after its first residual sum: y → z."""
    model = local.model
    pre, post = model.block != "post", model.block in ("post", "sandwich")
    ops, source = list[Op](), "norm1.out"
    if model.block != "parallel_shared":  # else the MLP reads what attention reads
        source = "x" if model.block == "parallel" else "y"
        if pre:
            ops, source = [_normed(local, "norm2", source)], "norm2.out"
    ops += experts(local, source) if model.is_moe(layer) else mlp(local, source)
    branch = "d"
    if post:
        name = "norm2_post" if model.block == "sandwich" else "norm2"
        ops, branch = [*ops, _normed(local, name, "d")], f"{name}.out"
    return _kept_as_told(local, [*ops, *_residual(local, "mlp", branch, "y", "z")], layer=layer)


def _normed(local: Local, name: str, source: str) -> Op:
    """A norm of the residual stream's width: ``source`` → ``name``.out."""
    width = local.stream_width
    made = norm(name, source, f"{name}.out", rows=local.stream_rows, dim=width, width=local.width, kind=local.norm)
    return over_columns(local, made)


def _residual(local: Local, name: str, branch: str, onto: str, out: str) -> list[Op]:
    """The sum of a branch and the residual stream, after dropout and scale of the branch, if there are any."""
    model, size, ops = local.model, local.stream_bytes, list[Op]()
    if model.dropout:
        mask = local.stream_rows * local.stream_width
        ops.append(dropout(f"{name}.dropout", branch, f"{branch}.drop", size=size, mask=mask))
        branch = f"{branch}.drop"
    add = elementwise(f"{name}.add", "add", (onto, branch), out, size=size)
    if model.residual_scale != 1:  # the same kernel scales; so the branch gets a gradient of its own
        scaled = f"{branch}.scaled"
        scale = elementwise(f"{name}.scale", "activation", (branch,), scaled, size=size)
        ops.append(scale._replace(writes={scaled: 0}, gradients={scaled: size}, moved_bytes=0))
        add = add._replace(reads=(onto, scaled, branch), differentiates=(onto, scaled))
    return [*ops, add]


def _kept_as_told(local: Local, ops: Sequence[Op], *, layer: int) -> list[Op]:
    """``ops`` with what the stack keeps narrow, under autocast if it is, and without gradients that matmuls add to the
    sums themselves."""
    found = autocasted(local, narrowed(local, ops), narrow=local.narrow_stream(layer))
    return [settled(op, local.job) for op in found]


class Kind(NamedTuple):
    """Blocks of one kind do equal work. ``slides``: sliding-window attention; ``moe``: routed experts; ``still``:
    without rotary positions, in a model that has them.
    """

    slides: bool
    moe: bool
    still: bool = False

    @property
    def alike(self) -> Kind:
        """A kind for all that keep equally many bytes: a window changes work, not memory."""
        return self._replace(slides=False)


def kind_of(model: Model, layer: int) -> Kind:
    """The kind of one block."""
    return Kind(model.slides(layer), model.is_moe(layer), model.position == "rope" and not model.rotates(layer))


def head(local: Local) -> list[Op]:
    """x → loss with the vocabulary sharded over tp: all-reduced are maxima, sums and target logits, never the logits.

    fused: the logits exist once, in the matmuls' dtype, and their gradient replaces them in place. plain, narrow:
    PyTorch's cross-entropy, which keeps its log-softmax, on an fp32 copy (plain; autocast) or not. widened: an fp32
    copy becomes softmax and gradient in place; copied: a second copy does. chunked: a chunk of rows at a time, in the
    backward.
    """
    model, job, rows, width, vocab = local.model, local.job, local.rows, local.width, local.vocab
    part = local.part
    logits = rows * vocab * width
    entry = Source(_in_16_bits(local), "h", into=local.stream_width, rows=local.stream_rows)
    project = entry.column("head.out", "logits", outof=vocab, bias=model.head_bias)
    small = Message("tp", "all_reduce", "", rows * 4, times=3) if part.tp > 1 else None
    loss = Op(
        "loss", "loss", ("logits",), {"loss": 4}, keeps=("logits",), in_place=True, shape=(rows, vocab, model.width),
        moved_bytes=2 * logits, moved_backward_bytes=2 * logits,
        forward_scratch=_softmax_bytes(local, rows),
        message=small,
    )  # fmt: skip
    wide, held = rows * vocab * 4, job.stack.loss == "narrow" or (part.piped and job.stack.outputs == "held")
    if job.stack.loss == "plain" or (
        job.stack.loss == "narrow" and local.autocast
    ):  # fp32 copy, log-softmax; backward: two fp32 gradients before that of the logits
        apart = part.tp > 1 and not job.stack.compiles_loss  # DTensor's loss.py: x - max x; zeros with a one, a sum
        loss = loss._replace(
            writes={"loss": 4, "softmax": wide}, keeps=("logits", "softmax") if held else ("softmax",), in_place=False,
            forward_scratch=wide * apart + (wide if width < 4 else 0),
            backward_scratch=(2 + apart) * wide - logits, scratch_tensor=wide,
            moved_bytes=logits + 3 * wide, moved_backward_bytes=logits + 3 * wide,
        )  # fmt: skip
    elif job.stack.loss == "narrow":  # the caller holds the logits too
        loss = loss._replace(
            writes={"loss": 4, "softmax": logits}, keeps=("logits", "softmax"), in_place=False, forward_scratch=0,
            backward_scratch=logits, moved_bytes=3 * logits, moved_backward_bytes=4 * logits,
        )  # fmt: skip
    elif job.stack.loss in ("widened", "copied"):
        loss = loss._replace(
            writes={"loss": 4, "softmax": wide}, keeps=("softmax",), in_place=False,
            # the 16-bit logits are freed before the fp32 ones are copied
            forward_scratch=wide - logits if job.stack.loss == "copied" else 0,
            # widen, max, subtract, exp, sum, divide: each a kernel (Megatron-LM's cross_entropy.py)
            moved_bytes=logits + 9 * wide, moved_backward_bytes=logits + 3 * wide,
        )  # fmt: skip
    normed = norm("head.norm", "x", "h", rows=local.stream_rows, dim=local.stream_width, width=width, kind=local.norm)
    normed = over_columns(local, normed)
    if job.stack.loss == "chunked":
        return autocasted(local, [normed, *_chunked_loss(local)])
    return autocasted(local, [normed, *entry.ops, project, *entry.sums, loss])


def _softmax_bytes(local: Local, rows: int) -> int:
    """fp32 scratch of the softmax, for as many of ``rows`` as are widened at once: input and softmax, under tp one; a
    soft cap's derivative beside it.
    """
    if local.job.stack.kernels == "triton":  # widened in registers
        return 0
    chunk = min(rows, max(1, LOSS_CHUNK_ELEMENTS // local.vocab)) * local.vocab * 4
    return 2 * chunk if (local.width < 4 and local.part.tp == 1) or local.model.logit_softcap else chunk


def _chunked_loss(local: Local) -> list[Op]:
    """h → loss, all in the backward: per chunk of rows the logits, their gradient, dh and dW.

    Under tp the input is gathered only there, and each chunk sends the all-reduces that ``fused`` sends for all rows.
    """
    model, part, rows, vocab, width = local.model, local.part, local.rows, local.vocab, local.width
    chunk, bias = min(rows, LOSS_CHUNK_ROWS), vocab if model.head_bias else 0
    weight, flops, logits = vocab * model.width, 2 * rows * vocab * model.width, chunk * vocab * width
    whole = rows * model.width * width if part.sp else 0  # the gathered input; its gradient is as large
    softmax = _softmax_bytes(local, chunk)
    if rows == chunk:  # dW is allocated after it is freed
        softmax = max(0, softmax - (weight + bias) * width)
    targets = 8 * rows if part.cp > 1 else 0  # else a view of the batch
    ops = [Op(
        "loss", "loss", ("h",), {"loss.own": 4, "targets": targets}, keeps=("h", "targets"),
        parameters=weight + bias, gradient_widths=(weight, bias) if bias else (weight,),
        flops=flops, causal_flops=flops, shape=(rows, vocab, model.width),
        moved_backward_bytes=4 * rows * vocab * width,  # read and written in both passes of ``fused``
        backward_scratch=2 * whole - whole // part.tp + logits + softmax + bias * width, regathered=whole,
        differentiates=("h",), delivers=True,
    )]  # fmt: skip
    if part.tp > 1:
        size = rows * model.width * width
        again, sums = ("all_gather", "reduce_scatter") if part.sp else ("", "all_reduce")
        each, rest = divmod(rows, chunk)
        said = [
            Message("tp", "", sums, size, regather=again),
            *(Message("tp", "", "all_reduce", many * 4, times=3 * times) for many, times in ((chunk, each), (rest, 1))
              if many),
        ]  # fmt: skip
        names = ("loss.own", "loss.sums", "loss.chunks", "loss.rest")
        ops += [
            exchange(after, before, after, size=4, message=message)
            for before, after, message in zip(names[:-1], names[1:], said, strict=False)
        ]
    return ops


def _in_16_bits(local: Local) -> Local:
    """``local`` in bf16: the head's matmul is never in fp8 or fp4 (Transformer Engine, DeepSeek-V3 §3.3)."""
    if not local.job.precision.narrow:
        return local
    wide = local.job.precision.replace(compute="bf16", gathers="weights", dispatches="rows")
    return Local(local.model, local.job.replace(precision=wide), local.part)


def block_unit(ops: Sequence[Op], local: Local) -> Unit:
    """The operations of one ``block``, with those marked that are recomputed."""
    stack = local.job.stack
    return recompute(ops, local.part.recomputed, early_stop=stack.early_stop, fused=stack.kernel_facts.fuses_linears)
