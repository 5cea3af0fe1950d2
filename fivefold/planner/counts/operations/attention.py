"""The operations of self-attention: grouped-query (GQA) or multi-head latent (MLA), flash or unfused.

    grouped   x → q, k, v → (norm) → rope → core → out           tied values: v = k, before its norm and rotation
    latent    x → q_down → norm → q_up;  x → kv_down → norm → kv_up;  rope on a part of each;  core → out

Heads are sharded over tp. Under cp the core sees all keys: they are passed around a ring, or an all_to_all swaps heads
and tokens (Ulysses). MLA (DeepSeek-V2, arXiv:2405.04434) has query and key heads of nope + rope dims and value heads of
v dims.
"""

from __future__ import annotations

from math import lcm
from typing import Literal

from fivefold.job import Job
from fivefold.model.attention import AttentionShape
from fivefold.model.latent_attention import MLA
from fivefold.model.norms import NORMS
from fivefold.model.spec import Model
from fivefold.planner.counts.operations.feedforward import list_router
from fivefold.planner.counts.operations.indexer import attend_to_chosen, choose_keys
from fivefold.planner.counts.operations.launches import (
    LATENT_PARTS_LAUNCHES,
    LATENT_ROPE_LAUNCHES,
    PADDED_CORE_LAUNCHES,
    RING_BLOCK_LAUNCHES,
    RING_COPY_LAUNCHES,
    RING_LAUNCHES,
)
from fivefold.planner.counts.operations.linear import LinearInput, build_sub_norm, list_row_parallel
from fivefold.planner.counts.operations.local_shapes import Local
from fivefold.planner.counts.operations.op import (
    Op,
    OpMessage,
    dropout,
    elementwise,
    exchange,
    matmul,
    norm,
    rename_tensors,
    rope,
    split,
    swap_heads,
)
from fivefold.units import ceil_div

# PyTorch's memory-efficient kernel keeps the log-sum-exp of a multiple of this many queries of a head
# (kAlignLSE, pytorch/pytorch@v2.13.0:aten/src/ATen/native/transformers/cuda/mem_eff_attention/kernel_forward.h)
LSE_QUERIES = 32


def list_attention(local: Local, source: str, *, layer: int) -> list[Op]:
    """List the operations ``source`` [stream rows, D] → ``a`` [stream rows, D]."""
    if local.model.attention_experts:
        return _list_experts(local, source, layer=layer)
    return (_list_latent if local.model.mla else _list_grouped)(local, source, layer=layer)


def count_attended_pairs(model: Model, job: Job, *, layer: int, causal: bool) -> int:
    """Count the query-key pairs of one sequence and head: T² (``causal=False``), or those within mask and window."""
    tokens = job.sequence
    chunk = get_chunk(model, job, layer=layer)
    if chunk is not None:
        n_chunks, rest = divmod(tokens, chunk)
        sizes = (*[chunk] * n_chunks, rest)
        return sum(size * (size + 1) // 2 if causal else size * size for size in sizes)
    if not causal:
        return tokens * tokens
    window = get_window(model, job, layer=layer) or tokens
    return window * (window + 1) // 2 + (tokens - window) * window


def get_window(model: Model, job: Job, *, layer: int) -> int | None:
    """Return a layer's sliding window; None if it has none, or one that is no shorter than the sequence."""
    return _find_shorter_window(model, job, layer=layer) if model.window_kind == "sliding" else None


def get_chunk(model: Model, job: Job, *, layer: int) -> int | None:
    """Return the chunk that a layer attends within; None if it has none, or none shorter than the sequence."""
    return _find_shorter_window(model, job, layer=layer) if model.window_kind == "chunks" else None


def _find_shorter_window(model: Model, job: Job, *, layer: int) -> int | None:
    if not model.has_window(layer) or model.window is None or model.window >= job.sequence:
        return None
    return model.window


def _list_grouped(local: Local, source: str, *, layer: int) -> list[Op]:
    """List the operations of grouped-query attention."""
    heads = _GroupedHeads(local, layer)
    heads.project(source)
    heads.normalize("projections")
    heads.clip()
    heads.scale()
    heads.normalize_values()
    heads.normalize("heads")
    heads.rotate()
    heads.normalize("rotated heads")
    heads.attend()
    return [*heads.ops, *_list_output(local, heads.shape, layer=layer)]


class _GroupedHeads:
    """The operations of grouped-query attention so far, and the tensors ``q``, ``k``, ``v`` that the next one reads."""

    def __init__(self, local: Local, layer: int) -> None:
        self.local = local
        self.layer = layer
        self.model = local.model
        self.shape = shape = local.attention(layer)
        self.has_own_kv = not local.model.shares_kv(layer)  # else k and v are an earlier layer's, complete
        self.columns = {
            "q": shape.query_dims,
            "k": shape.kv_heads * shape.head_dim,
            "v": shape.kv_heads * shape.value_dim,
        }
        self.ops: list[Op] = []
        self.q, self.k = "q", "k"
        self.v = "k" if shape.tied_values and self.has_own_kv else "v"

    def count_bytes(self, name: str) -> int:
        """Return the bytes of all queries (``"q"``), keys or values of this rank."""
        return self.local.rows * self.columns[name] * self.local.width

    def project(self, source: str) -> None:
        """Add the projections of ``source`` to queries, keys, values and gate; shared keys and values have none."""
        local, model, shape = self.local, self.model, self.shape
        if model.multipliers is not None and model.multipliers.attention_in != 1:
            scaled = f"{source}.in"
            self.ops.append(elementwise("attention.in.scale", "activation", (source,), scaled, size=local.stream_bytes))
            source = scaled
        projected_input = LinearInput(
            local,
            source,
            in_features=local.stream_width,
            rows=local.stream_rows,
            all_reduces=local.job.stack.input_grad_all_reduces[0],
        )
        self.ops += projected_input.ops
        columns = {"q": self.columns["q"]}
        if self.has_own_kv:
            columns |= {name: self.columns[name] for name in ("k" if shape.tied_values else "kv")}
        if model.output_gate:
            columns["gate"] = model.count_gate_columns(shape)
        if local.job.stack.merged_projections:
            sizes = {name: local.rows * out * local.width for name, out in columns.items()}
            self.ops += [
                projected_input.column("attention.qkv", "qkv", out_features=sum(columns.values()), bias=model.qkv_bias),
                split("attention.split", "qkv", sizes),
            ]
        else:
            shares_head = local.part.tp > model.kv_heads  # the inner ranks of 2D tensor parallelism share one key head
            for name, out in columns.items():
                shared = shares_head and name in "kv"
                self.ops.append(
                    projected_input.column(
                        f"attention.{name}",
                        name,
                        out_features=out // local.part.tp_inner if shared else out,
                        bias=model.qkv_bias,
                        shared=shared,
                    )
                )
        self.ops += projected_input.sums
        if not self.has_own_kv:  # views of tensors that the earlier layer keeps
            gradients = {name: self.count_bytes(name) for name in "kv"}
            shared_kv = Op("attention.shared", "message", (source,), {"k": 0, "v": 0}, gradients=gradients)
            self.ops.append(shared_kv._replace(differentiates=()))

    def normalize(self, what: Literal["projections", "heads", "rotated heads"]) -> None:
        """Add the norms of queries and keys, if the model normalizes ``what``."""
        model = self.model
        if model.qk_norm == "none" or (model.qk_norm == "unit" and not model.has_rope(self.layer)):
            return
        is_full = model.qk_norm == "full"
        if what != ("projections" if is_full else "rotated heads" if model.qk_norm_after_rope else "heads"):
            return

        def add(name: Literal["q", "k"], source: str) -> str:
            columns = self.columns[name]
            dim = columns if is_full else self.shape.head_dim
            self.ops.append(_norm_heads(self.local, name, source, columns=columns, dim=dim))
            return f"{name}n"

        self.q = add("q", self.q)
        if self.has_own_kv:
            self.k = add("k", self.k)

    def clip(self) -> None:
        """Add the clipping of queries, keys and values."""
        if self.model.qkv_clip is None:
            return
        for name, tensor in (("q", self.q), ("k", self.k), ("v", self.v)):
            clipped, size = f"{name}c", self.count_bytes(name)
            self.ops.append(
                elementwise(f"attention.clip.{name}", "activation", (tensor,), clipped, size=size, keeps=(tensor,))
            )
        self.q, self.k, self.v = "qc", "kc", "vc"

    def scale(self) -> None:
        """Add the factors of keys and of values."""
        if self.model.multipliers is not None and self.model.multipliers.key != 1:
            self.ops.append(elementwise("attention.scale.k", "activation", (self.k,), "ks", size=self.count_bytes("k")))
            self.k = "ks"
        if self.model.value_scale != 1 and self.has_own_kv:
            self.ops.append(elementwise("attention.scale.v", "activation", (self.v,), "vs", size=self.count_bytes("v")))
            self.v = "vs"

    def normalize_values(self) -> None:
        """Add the norm of the values."""
        if self.model.value_norm and self.has_own_kv:
            self.ops.append(_norm_heads(self.local, "v", self.v, columns=self.columns["v"], dim=self.shape.value_dim))
            self.v = "vn"

    def rotate(self) -> None:
        """Add the rotation of queries and of this layer's own keys by their positions."""
        if not self.model.has_rope(self.layer):
            return
        local, source = self.local, self.q
        rotated = [rope("rope.q", source, "qr", numel=local.rows * self.columns["q"], width=local.width)]
        self.q = "qr"
        if self.has_own_kv:
            rotated.append(rope("rope.k", self.k, "kr", numel=local.rows * self.columns["k"], width=local.width))
            self.k = "kr"
            if local.job.stack.rope == "in_place" and source == "q" and self.shape.heads == self.shape.kv_heads:
                # queries are rotated within the joined projection, whose keys and values are then kept with them
                joined = sum(map(self.count_bytes, self.columns))
                rotated[0] = rotated[0]._replace(writes={"qr": joined}, gradients={"qr": self.count_bytes("q")})
        self.ops += rotated

    def attend(self) -> None:
        """Add the temperature of the queries and the core of attention, which keeps keys and values that it lends."""
        local, model, layer = self.local, self.model, self.layer
        if model.has_temperature(layer):
            self.ops.append(
                rope("rope.temperature", self.q, "qt", numel=local.rows * self.columns["q"], width=local.width)
            )
            self.q = "qt"
        if model.dynamic_mask is not None:
            self.ops += _make_mask(local, self.v, layer=layer)
        if model.differential:
            self.ops += _attend_twice(local, q=self.q, k=self.k, v=self.v, layer=layer)
        else:
            written = [name for op in self.ops for name in op.writes]
            keys_last = self.v != "v" and written.index(self.k) < written.index(self.v)
            self.ops += _list_core(local, q=self.q, k=self.k, v=self.v, layer=layer, frees_keys_last=keys_last)
        if model.lends_kv(layer):
            # Ulysses' core keeps what it received instead; layers that are recomputed read the sent keys and values
            # again
            core, lent = self.ops[-1], (self.k, self.v)
            is_read_again = local.part.cp > 1 and local.part.ulysses and "layer" in local.part.recomputed
            self.ops[-1] = core._replace(always_kept=lent, keeps=core.keeps + lent if is_read_again else core.keeps)


def _list_output(local: Local, shape: AttentionShape, *, layer: int) -> list[Op]:
    """List the operations from the core's output ``o`` to ``a``: gate, norms and the projection."""
    model, columns = local.model, shape.output_dims
    ops, out = list[Op](), "o"
    if model.output_gate:
        ops += _gate_output(local, shape)
        out = "og"
    if model.differential:
        ops += _subtract_heads(local, out, columns=columns, dim=shape.head_dim)
        out = "on"
    if model.sub_norm:
        ops.append(build_sub_norm(local, "attention.out_norm", out, dim=columns))
        out = f"{out}n"
    if local.job.stack.transposes_attention and local.part.sequences > 1:
        size = local.rows * columns * local.width
        ops.append(elementwise("attention.transpose", "cast", (out,), f"{out}.t", size=size))
        out = f"{out}.t"
    sizes = {"in_features": columns, "out_features": model.width}
    return [*ops, *list_row_parallel(local, "attention.out", out, "a", bias=model.has_out_bias(layer), **sizes)]


def _make_mask(local: Local, v: str, *, layer: int) -> list[Op]:
    """List what makes a mask from values: a number of each key and key head, of the largest of which queries see keys.

    The mask is a tensor of each head, query and key, which attention keeps, as transformers 5.23 makes it
    (``DogeAttention.prepare_dynamic_mask``).
    """
    model, shape, width = local.model, local.attention(layer), local.width
    assert model.dynamic_mask is not None
    rows, heads, tokens = local.rows, shape.kv_heads, local.job.sequence
    size, mask = rows * heads * width, rows * tokens * shape.heads * width
    bias = model.qkv_bias
    sizes = {"in_features": heads * shape.value_dim, "out_features": heads}
    chosen = mask if model.dynamic_mask < tokens else 0  # zeros with ones at the chosen keys
    decay = elementwise("attention.mask.act", "activation", ("dt",), "dta", size=size, keeps=("dt", "dta"))
    expand = elementwise("attention.mask", "activation", ("dta",), "mask", size=mask, keeps=())
    if local.facts.has_own_attention_kernels:  # one mask for each key head; of the keys that are not seen, a byte
        numel = rows * tokens * heads
        indices = 8 * rows * heads * model.dynamic_mask
        unseen = numel + max(indices + numel, indices + indices * width // 8) if chosen else 0
        scratch = (numel * width + unseen, 0)
    else:
        scratch = (mask + 2 * chosen, mask)
    return [
        matmul("attention.mask.dt", v, "dt", rows=rows, width=width, bias=bias, **sizes),
        decay._replace(parameters=heads, wgrad_numels=(heads,), forward_scratch=2 * size, backward_scratch=2 * size),
        expand._replace(writes={"mask": mask}, forward_scratch=scratch[0], backward_scratch=scratch[1]),
    ]


def _list_experts(local: Local, source: str, *, layer: int) -> list[Op]:
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
        *_list_core(local, q=q, k=k, v="v", layer=layer),
        collect._replace(keeps=("o", "attention.share", *collect.keeps), backward_scratch=copies * size * width),
        multiply("attention.experts.out", "o.sorted", "ao", size, dim),
        combine._replace(
            keeps=("attention.permutation",),
            moved_bytes=(copies + rows) * dim * width,
            moved_backward_bytes=2 * copies * dim * width,
        ),
        *([bias._replace(parameters=dim, wgrad_numels=(dim,), passes_gradient=True)] if model.out_bias else []),
    ]


def _gate_output(local: Local, shape: AttentionShape) -> list[Op]:
    """List the product of attention's output and its gate, which has the width of heads or of their dims: o → og."""
    model, rows, width = local.model, local.rows, local.width
    size, factors = rows * shape.output_dims * width, rows * model.count_gate_columns(shape) * width
    ops, gate_name = list[Op](), "gate"
    if model.gate_bias:
        gate_name = "gateb"
        biased = elementwise("attention.gate.bias", "activation", ("gate",), gate_name, size=factors)
        ops.append(biased._replace(parameters=shape.heads, wgrad_numels=(shape.heads,), passes_gradient=True))
    kept = ("o", gate_name)
    gate = elementwise("attention.core.gate", "activation", kept, "og", size=size, keeps=kept, backward_scratch=size)
    if model.gate_per_head:  # its factors are small compared with the heads that they multiply
        gate = gate._replace(
            moved_bytes=2 * size + factors,
            moved_backward_bytes=3 * size + 2 * factors,
            forward_scratch=factors,
            backward_scratch=factors,
        )
    return [*ops, gate]


def _attend_twice(local: Local, *, q: str, k: str, v: str, layer: int) -> list[Op]:
    """List the cores of differential attention: all queries and keys, with each half of the values repeated.

    The outputs are joined, [rows, heads, 2 H]. Source: transformers 5.23, ``DiffLlamaAttention.forward``.
    """
    size = local.rows * local.attention(layer).kv_heads * local.attention(layer).head_dim * local.width
    half = local.rows * local.attention(layer).output_dims * local.width
    ops = [split("attention.core.halves", v, {"v1": size, "v2": size})]  # a half, and its repetition
    ops[0] = ops[0]._replace(moved_bytes=3 * size, moved_backward_bytes=3 * size)
    for index in "12":
        ops += [
            rename_tensors(op, {name: f"{name}{index}" for name in ("o", "lse", "seeds", "core.s", "core.p")})._replace(
                name=op.name.replace("core", f"core.{index}", 1)
            )
            for op in _list_core(local, q=q, k=k, v=f"v{index}", layer=layer)
        ]
    if local.facts.has_own_attention_kernels:
        return ops
    joined = elementwise("attention.join", "cast", ("o1", "o2"), "o", size=2 * half)
    return [*ops, joined._replace(moved_bytes=4 * half, moved_backward_bytes=4 * half)]


def _subtract_heads(local: Local, source: str, *, columns: int, dim: int) -> list[Op]:
    """List the difference of the first and second half of the heads, and its norm over 2 H without a weight."""
    size = local.rows * columns * local.width
    if local.facts.has_own_attention_kernels:  # one operation on the outputs of both cores
        sums, numel = local.rows * columns // (2 * dim), local.rows * columns
        return [
            Op(
                "attention.core.difference",
                "activation",
                ("o1", "o2"),
                {"on": size, "on.stat": 4 * sums},
                keeps=("o1", "o2", "on.stat"),
                parameters=4 * dim,
                wgrad_numels=(dim,) * 4,
                moved_bytes=3 * size,
                moved_backward_bytes=5 * size,
                # fp32: the difference and its square, and in the backward two gradients and a product
                forward_scratch=4 * numel if local.width == 4 else 6 * numel,
                backward_scratch=6 * numel if local.width == 4 else 8 * numel,
            )
        ]
    product = elementwise("attention.lambda", "activation", (source,), "ol", size=size, keeps=(source,))
    product = product._replace(parameters=4 * dim, wgrad_numels=(dim,) * 4, backward_scratch=size)
    difference = elementwise("attention.subtract", "add", (source, "ol"), "od", size=size)
    kind = local.norm._replace(norm=NORMS["rmsnorm"], weight=False)
    rows = local.rows * columns // (2 * dim)
    scale = elementwise("attention.core.scale", "activation", ("odn",), "on", size=size)
    return [
        product,
        difference,
        norm("attention.out_norm", "od", "odn", rows=rows, dim=2 * dim, width=local.width, kind=kind),
        scale,
    ]


def _norm_heads(local: Local, name: str, source: str, *, columns: int, dim: int) -> Op:
    """Return the norm over ``dim`` of queries, keys or values [rows, columns] of this rank: ``source`` → ``name``n."""
    rows, qk_norm = local.rows, "unit" if name == "v" else local.model.qk_norm
    heads = columns // dim
    kind = local.norm._replace(norm=NORMS["rmsnorm"]) if qk_norm == "unit" else local.norm
    op = norm(f"attention.{name}_norm", source, f"{name}n", rows=rows * heads, dim=dim, width=local.width, kind=kind)
    if qk_norm == "unit":
        return op._replace(parameters=0, wgrad_numels=())
    if qk_norm == "heads":
        widths = tuple(size * heads for size in op.wgrad_numels)
        return op._replace(parameters=op.parameters * heads, batch=heads, wgrad_numels=widths)
    if (
        qk_norm == "full" and local.part.tp > 1
    ):  # all-reduce over the heads of all ranks: sums of squares, for LayerNorm also of values
        sums_bytes = 4 * kind.norm.statistics  # bytes of a row
        return op._replace(message=OpMessage("tp", "all_reduce", "all_reduce", sums_bytes * rows))
    return op


def _list_core(
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
        0 if local.part.sequences == 1 else q_bytes // 2 if padded_bytes else q_bytes // 2 + o_bytes
    )  # halves are copies only if there are several sequences
    first_step = 2 * ring_bytes + 2 * padded_bytes
    ring_step = (
        fp32_column * dims[1]
        + ring_bytes * min(cp - 1, 2)
        + 3 * padded_bytes // 2
        - (o_bytes // 2 if fp32_column else -o_bytes // 2)
    )
    ring_backward = q_bytes // 2 + 3 * padded_bytes + halves_bytes + ring_bytes * (3, 5, 6)[min(cp, 4) - 2]
    last_step = 4 * ring_bytes - q_bytes // 2 if cp == 2 else 0
    return max(first_step, ring_step), fp32_column * dims[0] + max(ring_backward, last_step)


def _list_latent(local: Local, source: str, *, layer: int) -> list[Op]:
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
    gated = _gate_output(local, shape) if model.output_gate else []
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
    core = _list_core(local, q=q, k="kr", v="v", layer=layer, value_storage="kv")
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
