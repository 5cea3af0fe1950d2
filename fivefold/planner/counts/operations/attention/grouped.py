"""Grouped-query attention."""

from __future__ import annotations

from typing import Literal

from fivefold.model.norms import NORMS
from fivefold.planner.counts.operations.attention.core import list_core
from fivefold.planner.counts.operations.attention.differential import attend_twice
from fivefold.planner.counts.operations.attention.mask import make_mask
from fivefold.planner.counts.operations.attention.output import list_output
from fivefold.planner.counts.operations.linear import LinearInput
from fivefold.planner.counts.operations.local_shapes import Local
from fivefold.planner.counts.operations.op import Op, OpMessage, elementwise, norm, rope, split


def list_grouped(local: Local, source: str, *, layer: int) -> list[Op]:
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
    return [*heads.ops, *list_output(local, heads.shape, layer=layer)]


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
            self.ops += make_mask(local, self.v, layer=layer)
        if model.differential:
            self.ops += attend_twice(local, q=self.q, k=self.k, v=self.v, layer=layer)
        else:
            written = [name for op in self.ops for name in op.writes]
            keys_last = self.v != "v" and written.index(self.k) < written.index(self.v)
            self.ops += list_core(local, q=self.q, k=self.k, v=self.v, layer=layer, frees_keys_last=keys_last)
        if model.lends_kv(layer):
            # Ulysses' core keeps what it received instead; layers that are recomputed read the sent keys and values
            # again
            core, lent = self.ops[-1], (self.k, self.v)
            is_read_again = local.part.cp > 1 and local.part.ulysses and "layer" in local.part.recomputed
            self.ops[-1] = core._replace(always_kept=lent, keeps=core.keeps + lent if is_read_again else core.keeps)


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
