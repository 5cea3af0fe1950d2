"""Fivefold's own linear layers next to adapters for the liveness count: two operations for all linears on one input.

    gather? → A x of all          forward: masks and A x, of which the backward keeps x (or what was gathered)
    W x + B (A x) → reduce?       backward: gradients of all outputs in, then layer by layer dx, dB and the gradient of
                                  A x, which is multiplied by A and added to dx at the last layer that reads it
    · m / n → reduce?             of DoRA, one for each layer

A frozen weight is dequantized for a product and freed after it (``trainer/model/lora.py``, ``expert_lora.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from fivefold.planner.counts.operations.op import Op
from fivefold.planner.counts.operations.recompute import UnitOperations, is_fused_with, is_linear

MODULES = ("attention", "mixer", "mlp", "moe.shared", "moe")
AFTER_MODULES = ("add", "scale", "dropout", "stream")  # operations on the stream, which have the name of a module


class _AdaptedLinear(NamedTuple):
    """The operations of one linear layer and of its adapter, if it has one, by the last part of their names."""

    product: Op  # with W
    lora_a: Op | None = None  # None: another layer has it, or there is none
    lora_norm: Op | None = None  # DoRA's norms
    lora_b: Op | None = None
    lora_add: Op | None = None
    lora_scale: Op | None = None  # DoRA's m / n

    @property
    def result(self) -> tuple[str, int]:
        """Return the tensor that it writes before a rescaling, with its bytes."""
        ((name, size),) = (self.lora_add or self.product).writes.items()
        return name, size

    @property
    def is_expert(self) -> bool:
        """Return True for the grouped product of routed experts."""
        return self.product.name.startswith("moe.experts.")

    @property
    def weight_bytes(self) -> tuple[int, int]:
        """Return the bytes of the weight as it is dequantized for the forward and for the backward."""
        forward = self.product.forward_scratch
        return forward if self.lora_add is None else forward - self.result[1], self.product.backward_scratch


ADAPTER_OPERATIONS = _AdaptedLinear._fields[1:]


class _Group(NamedTuple):
    """Linear layers on one input, with the messages before and after them."""

    linears: tuple[_AdaptedLinear, ...]
    gather: Op | None
    reduce: Op | None

    @property
    def products_with_a(self) -> tuple[Op, ...]:
        """Return the products with A."""
        return tuple(linear.lora_a for linear in self.linears if linear.lora_a is not None)

    @property
    def gathered_input(self) -> dict[str, int]:
        """Return the gathered input with its bytes, if it is a tensor of its own."""
        return {} if self.gather is None else {name: size for name, size in self.gather.writes.items() if size}

    @property
    def gathered_gradient(self) -> int:
        """Return the bytes of the gradient of the gathered input, before it is reduced over ranks."""
        return 0 if self.gather is None else sum((self.gather.gradients or self.gather.writes).values())


def fuse_adapted_linears(unit: UnitOperations, *, width: int, inputs: Mapping[str, int]) -> UnitOperations:
    """Return the unit with all linear layers on one input, their adapters and messages as the trainer's operations.

    ``width``: bytes per element of a weight's gradient; ``inputs``: bytes of the tensors that enter the unit.
    """
    sizes = dict(inputs)
    for op in unit.ops:
        sizes |= op.writes | (op.gradients or {})
    fused_ops: list[Op] = []
    start = 0
    while start < len(unit.ops):
        group, end = _read_group(unit.ops, start)
        if group is None:
            fused_ops.append(unit.ops[start])
        else:
            fused_ops += _fuse(group, width=width, sizes=sizes)
        start = end
    return UnitOperations(tuple(_keep_inputs(fused_ops)), unit.dropped)


def _keep_inputs(ops: Sequence[Op]) -> Iterator[Op]:
    """Yield the operations with the input of a module among what its last operation reads: its caller holds it."""
    inputs, last = dict[str, tuple[str, ...]](), dict[str, int]()
    for index, op in enumerate(ops):
        module = next((name for name in MODULES if op.name.startswith(f"{name}.")), None)
        if module is not None and op.name.rpartition(".")[2] not in AFTER_MODULES:
            inputs.setdefault(module, op.reads)
            last[module] = index
    held = {index: inputs[module] for module, index in last.items()}
    for index, op in enumerate(ops):
        yield op._replace(reads=tuple(dict.fromkeys((*op.reads, *held.get(index, ())))))


def _read_group(ops: Sequence[Op], start: int) -> tuple[_Group | None, int]:
    """Return the group that begins with an operation, if one does, and where the next operations begin."""
    index, gather, first = start, None, ops[start]
    is_message = first.kind == "message" and first.message is not None and first.message.axis == "tp"
    if is_message and index + 1 < len(ops) and ops[index + 1].reads == tuple(first.writes):
        gather, index = first, index + 1
    linears: list[_AdaptedLinear] = []
    while index < len(ops):
        linear, end = _read_linear(ops, index)
        if linear is None or (linears and not is_fused_with(linear.product, linears[0].product)):
            break
        linears.append(linear)
        index = end
    if not linears:
        return None, start + 1
    reduce = ops[index] if index < len(ops) and ops[index].name == f"{linears[0].product.name}.reduce" else None
    return _Group(tuple(linears), gather, reduce), index + (reduce is not None)


def _read_linear(ops: Sequence[Op], start: int) -> tuple[_AdaptedLinear | None, int]:
    """Return the linear layer whose operations begin at ``start``, if one does, and where they end."""
    parts = dict[str, Op]()
    index = start
    while index < len(ops):
        op = ops[index]
        suffix = op.name.rpartition(".")[2]
        name = suffix if suffix in ADAPTER_OPERATIONS else "product" if is_linear(op) else ""
        # an adapter's first operation is that with A, or DoRA's norms, or the product itself
        begins_next = name in ("lora_a", "product", "lora_norm") and "product" in parts
        if not name or name in parts or begins_next:
            break
        parts[name] = op
        index += 1
    return (_AdaptedLinear(**parts), index) if "product" in parts else (None, start)


def _fuse(group: _Group, *, width: int, sizes: Mapping[str, int]) -> Iterator[Op]:
    """Yield the operations of a group as the trainer runs them."""
    if group.products_with_a:
        yield _fuse_products_with_a(group)
    is_rescaled = group.linears[-1].lora_scale is not None
    yield _fuse_products(group, width=width, sizes=sizes)
    for linear in group.linears:
        if linear.lora_scale is not None:
            yield _fuse_rescale(linear, group, group.reduce if is_rescaled else None)


def _fuse_products_with_a(group: _Group) -> Op:
    """Return the products with A of all layers, with the gather of their input."""
    first = group.products_with_a[0]
    written = {name: size for op in group.products_with_a for name, size in op.writes.items()}
    keeps = tuple(dict.fromkeys(name for op in group.products_with_a for name in op.keeps))
    scratch = first.backward_scratch
    if first.recomputed and group.gathered_input:  # what is gathered in the recomputation is kept until the backward
        local_input = next(name for name in first.keeps if name not in written)
        keeps = (*group.gathered_input, *(name for name in keeps if name != local_input))
        scratch -= first.regathered_bytes
    return first._replace(
        reads=(group.gather or first).reads,
        writes=written | group.gathered_input,
        keeps=tuple(dict.fromkeys((*keeps, *(group.gather.keeps if group.gather else ())))),
        wgrad_numels=tuple(size for op in group.products_with_a for size in op.wgrad_numels),
        backward_scratch=scratch,
        differentiates=(),
        accumulates_wgrads=True,
        accumulates_dgrad=False,
    )


def _fuse_products(group: _Group, *, width: int, sizes: Mapping[str, int]) -> Op:
    """Return the products with W and B of all layers."""
    linears = group.linears
    first = linears[0].product
    low_rank_bytes = {name: op.writes[name] for op in group.products_with_a for name in list(op.writes)[:1]}
    masks = [name for op in group.products_with_a for name in list(op.writes)[1:]]
    differentiated = next((linear.product.differentiates for linear in linears if linear.product.differentiates), ())
    if differentiated and group.gather is not None:
        differentiated = group.gather.reads if group.gather.differentiates is None else group.gather.differentiates
    reduce = group.reduce if group.linears[-1].lora_scale is None else None
    writes = dict(linear.result for linear in linears)
    partial = 0
    if reduce is not None:
        ((result, size),), (partial_bytes,) = reduce.writes.items(), writes.values()
        writes = {result: size}
        partial = partial_bytes if size < partial_bytes else 0  # a reduce-scatter: its result is another tensor
    norms = {name: size for linear in linears if linear.lora_norm for name, size in linear.lora_norm.writes.items()}
    forward = _find_forward_peak(linears, partial=partial, total=sum(writes.values()))
    readers = [linear.lora_b for linear in linears if linear.lora_b is not None]
    wgrads = tuple(size for op in readers for size in op.wgrad_numels)
    input_bytes = sum(sizes[name] for name in differentiated)
    before, after = _find_backward_peaks(group, low_rank_bytes, input_bytes=input_bytes, width=width)
    made, weights = input_bytes + sum(low_rank_bytes.values()), width * max(wgrads, default=0)
    messages = [message for message in (group.gather, reduce) if message is not None]
    kept = dict.fromkeys(name for op in (*messages, *(linear.product for linear in linears)) for name in op.keeps)
    gathered = 0 if group.products_with_a else sum(group.gathered_input.values())
    return first._replace(
        reads=(
            *(group.gather or first).reads,
            *(group.gathered_input if group.products_with_a else ()),
            *low_rank_bytes,
        ),
        writes=writes | norms,
        keeps=(*kept, *low_rank_bytes, *masks),
        wgrad_numels=wgrads,
        forward_scratch=gathered + forward - sum(writes.values()),
        backward_scratch=partial,
        regathered_bytes=0,
        differentiates=(*differentiated, *low_rank_bytes),
        recomputed=any(linear.product.recomputed for linear in linears),
        gradients=None,
        accumulates_wgrads=True,
        accumulates_dgrad=False,
        cast_scratch_bytes=(before - made, after - made - weights),
    )


def _find_forward_peak(linears: Sequence[_AdaptedLinear], *, partial: int, total: int) -> int:
    """Return the most bytes of outputs and temporaries in the forward of the products with W and B.

    ``partial``: bytes of an output that is reduced to another tensor; ``total``: bytes of all outputs in the end.
    """
    peak = written = 0
    for linear in linears:
        _, size = linear.result
        dequantized, _ = linear.weight_bytes
        if linear.lora_norm is not None:
            peak = max(peak, written + linear.lora_norm.forward_scratch)
        added = size if linear.is_expert and linear.lora_b is not None else 0  # their product with B is a tensor
        peak = max(peak, written + size + max(dequantized, added))
        written += size
    return max(peak, partial + total) if partial else peak


def _find_backward_peaks(
    group: _Group, low_rank_bytes: Mapping[str, int], *, input_bytes: int, width: int
) -> tuple[int, int]:
    """Return the most bytes of gradients and temporaries before and after the first gradient of a B is accumulated.

    ``low_rank_bytes``: of the products with A; ``input_bytes``: of the gradient of this rank's input, if it is made.
    """
    gathered = group.gathered_gradient if input_bytes else 0
    total = gathered or input_bytes
    dropped = max((op.forward_scratch for op in group.products_with_a), default=0)
    last_of = {linear.lora_b.reads[0]: linear for linear in group.linears if linear.lora_b is not None}
    is_expert = group.linears[0].is_expert
    peaks, made = [0, 0], 0
    met = set[str]()

    def update_peak(size: int) -> None:
        peaks[bool(met)] = max(peaks[bool(met)], total + made + size)

    for linear in group.linears:
        if input_bytes:  # the product of later experts is added to dx
            update_peak(linear.weight_bytes[1] + (total if is_expert and linear is not group.linears[0] else 0))
        if linear.lora_b is None:
            continue
        (low,) = linear.lora_b.reads
        is_first = low not in met
        met.add(low)
        update_peak(width * max(linear.lora_b.wgrad_numels))
        made += low_rank_bytes[low] if is_first else 0
        update_peak(low_rank_bytes[low] if is_expert and not is_first else 0)
        if input_bytes and linear is last_of[low]:
            update_peak(total if is_expert else dropped)
    if gathered:
        update_peak(input_bytes)
    return peaks[0], peaks[1]


def _fuse_rescale(linear: _AdaptedLinear, group: _Group, reduce: Op | None) -> Op:
    """Return the product with m / n, with the reduction of its result; the caller holds the input of the layer."""
    op = linear.lora_scale
    assert op is not None
    op = op._replace(reads=(*op.reads, *(group.gather.reads if group.gather else ()), *group.linears[0].product.reads))
    if reduce is None:
        return op
    (size,), (partial,) = reduce.writes.values(), op.writes.values()
    if size == partial:
        return op._replace(writes=reduce.writes)
    return op._replace(writes=reduce.writes, forward_scratch=max(partial, op.forward_scratch), backward_scratch=partial)
