"""Symbolic tensors: shapes and strides without values, whose bytes are counted as PyTorch allocates and frees them.

A token mixer's scan (``mixers/``) is written down with them as the trainer runs it, operation by operation, and its
backward follows from autograd's formulas (pytorch/pytorch@v2.13:tools/autograd/derivatives.yaml). A storage is freed
when nothing refers to it, as in PyTorch: the local variables of a function, nodes that saved it, gradients that wait.
So the bytes that live at once, and the FLOPs, follow from the list of operations alone.

Gradients of a tensor with several readers are added into a new tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from math import prod

Shape = tuple[int, ...]


class SymbolicMemory:
    """The bytes that live, the most that lived at once, and the FLOPs of matmuls."""

    def __init__(self) -> None:
        self.live = self.peak = self.flops = self.nodes = 0
        self.records = False  # a graph for the backward

    @contextmanager
    def enable_grad(self) -> Iterator[None]:
        """Record a graph of what runs in the context."""
        self.records = True
        try:
            yield
        finally:
            self.records = False

    def allocate(self, shape: Shape, *, width: int = 4, strides: Shape | None = None) -> Tensor:
        """Return a new tensor of ``width`` bytes per element, contiguous unless ``strides`` are given."""
        return Tensor(Storage(self, prod(shape) * width), shape, strides or make_contiguous(shape), width)

    def borrow(self, shape: Shape, *, width: int, strides: Shape | None = None) -> Tensor:
        """Return a tensor whose bytes are counted elsewhere."""
        return Tensor(Storage(self, 0), shape, strides or make_contiguous(shape), width)


class Storage:
    """Bytes that live until nothing refers to them."""

    __slots__ = ("memory", "size")

    def __init__(self, memory: SymbolicMemory, size: int) -> None:
        self.memory, self.size = memory, size
        memory.live += size
        memory.peak = max(memory.peak, memory.live)

    def __del__(self) -> None:
        self.memory.live -= self.size


Backward = Callable[[list["Tensor | None"]], "list[Tensor | None]"]


class Node:
    """An operation of the backward: it maps the gradients of what the forward returned to those of its inputs."""

    __slots__ = ("backward", "inputs", "number")

    def __init__(self, number: int, inputs: Sequence[Edge | None], backward: Backward | None) -> None:
        self.number, self.inputs, self.backward = number, inputs, backward


Edge = tuple[Node, int, Shape]  # a node, the index of one of its outputs, and the shape of that


class Tensor:
    """A view of a storage; ``edge``: what made it, None if it needs no gradient."""

    __slots__ = ("edge", "shape", "storage", "strides", "width")

    def __init__(
        self, storage: Storage, shape: Shape, strides: Shape, width: int = 4, edge: Edge | None = None
    ) -> None:
        self.storage, self.shape, self.strides, self.width, self.edge = storage, shape, strides, width, edge

    @property
    def memory(self) -> SymbolicMemory:
        """Return the memory that the storage is part of."""
        return self.storage.memory

    @property
    def nbytes(self) -> int:
        """Return the bytes of the elements."""
        return prod(self.shape) * self.width

    def detach(self) -> Tensor:
        """Return the same tensor, without a gradient."""
        return Tensor(self.storage, self.shape, self.strides, self.width)

    def require_grad(self) -> Tensor:
        """Return the same tensor as a leaf of the graph."""
        leaf = self.detach()
        leaf.edge = (_make_node(self.memory, (), None), 0, self.shape)
        return leaf

    def is_contiguous(self) -> bool:
        """Tell whether the elements are in order, without gaps."""
        expected = make_contiguous(self.shape)
        return all(n == 1 or a == b for n, a, b in zip(self.shape, self.strides, expected, strict=True))

    # views

    def _view(self, shape: Shape, strides: Shape, backward: Callable[[Tensor], Tensor]) -> Tensor:
        return _record(
            Tensor(self.storage, shape, strides, self.width), (self,), lambda grads: [backward(_first(grads))]
        )

    def permute(self, *dims: int) -> Tensor:
        """Return the dims in another order."""
        inverse = tuple(sorted(range(len(dims)), key=lambda dim: dims[dim]))
        shape, strides = (tuple(values[dim] for dim in dims) for values in (self.shape, self.strides))
        return self._view(shape, strides, lambda grad: grad.permute(*inverse))

    def transpose(self, first: int, second: int) -> Tensor:
        """Return two dims exchanged."""
        dims = list(range(len(self.shape)))
        dims[first], dims[second] = dims[second], dims[first]
        return self.permute(*dims)

    @property
    def mT(self) -> Tensor:  # noqa: N802 (as in PyTorch)
        """Return the last two dims exchanged."""
        return self.transpose(-2, -1)

    def reshape(self, *shape: int) -> Tensor:
        """Return a view of another shape, or a copy if strides cannot express it."""
        before = self.shape
        strides = _find_view_strides(self.shape, self.strides, shape)
        if strides is None:
            copied = self.clone(make_contiguous(self.shape))
            return copied._view(shape, make_contiguous(shape), lambda grad: grad.reshape(*before))
        return self._view(shape, strides, lambda grad: grad.reshape(*before))

    def unflatten(self, dim: int, sizes: Shape) -> Tensor:
        """Return a dim split into ``sizes``, of which one may be -1."""
        dim %= len(self.shape)
        known = -prod(sizes) if -1 in sizes else 1
        sizes = tuple(self.shape[dim] // known if size == -1 else size for size in sizes)
        return self.reshape(*self.shape[:dim], *sizes, *self.shape[dim + 1 :])

    def flatten(self, first: int, last: int = -1) -> Tensor:
        """Return dims joined into one."""
        last %= len(self.shape)
        joined = prod(self.shape[first : last + 1])
        return self.reshape(*self.shape[:first], joined, *self.shape[last + 1 :])

    def unsqueeze(self, dim: int) -> Tensor:
        """Return a new dim of size 1."""
        dim %= len(self.shape) + 1
        shape = (*self.shape[:dim], 1, *self.shape[dim:])
        stride = self.shape[dim] * self.strides[dim] if dim < len(self.shape) else 1
        return self._view(shape, (*self.strides[:dim], stride, *self.strides[dim:]), lambda grad: grad.squeeze(dim))

    def squeeze(self, dim: int) -> Tensor:
        """Return the tensor without a dim of size 1."""
        dim %= len(self.shape)
        shape, strides = (values[:dim] + values[dim + 1 :] for values in (self.shape, self.strides))
        return self._view(shape, strides, lambda grad: grad.unsqueeze(dim))

    def expand(self, *shape: int) -> Tensor:
        """Return a view in which dims of size 1 repeat."""
        before, added = self.shape, len(shape) - len(self.shape)
        old, strides = (1,) * added + self.shape, (0,) * added + self.strides
        strides = tuple(0 if a != b else stride for a, b, stride in zip(old, shape, strides, strict=True))
        return self._view(shape, strides, lambda grad: grad.sum_to(before))

    def narrow(self, dim: int, length: int) -> Tensor:
        """Return some of a dim; its gradient is written into zeros of the full shape."""
        dim %= len(self.shape)
        full, shape = self.shape, (*self.shape[:dim], length, *self.shape[dim + 1 :])
        return self._view(shape, self.strides, lambda grad: grad.memory.allocate(full, width=grad.width))

    def keep_first(self, dim: int, length: int) -> Tensor:
        """Return the first ``length`` of a dim, the tensor itself if these are all."""
        return self if self.shape[dim] == length else self.narrow(dim, length)

    def select(self, dim: int) -> Tensor:
        """Return one index of a dim, which is dropped."""
        dim %= len(self.shape)
        full, (shape, strides) = self.shape, (v[:dim] + v[dim + 1 :] for v in (self.shape, self.strides))
        return self._view(shape, strides, lambda grad: grad.memory.allocate(full, width=grad.width))

    def split(self, dim: int, lengths: Sequence[int]) -> list[Tensor]:
        """Return views of parts of a dim; their gradients are concatenated."""
        dim %= len(self.shape)
        full, memory, width = self.shape, self.memory, self.width
        shapes = [(*full[:dim], length, *full[dim + 1 :]) for length in lengths]

        def backward(grads: list[Tensor | None]) -> list[Tensor | None]:
            materialized = [
                memory.allocate(shape, width=width) if grad is None else grad
                for grad, shape in zip(grads, shapes, strict=True)
            ]
            del grads
            joined = memory.allocate(full, width=width)
            del materialized
            return [joined]

        views = [Tensor(self.storage, shape, self.strides, width) for shape in shapes]
        return _record_all(views, (self,), backward)

    def unbind(self, dim: int) -> list[Tensor]:
        """Return views of each index of a dim; their gradients are stacked."""
        dim %= len(self.shape)
        full, memory, width = self.shape, self.memory, self.width
        shape, strides = (values[:dim] + values[dim + 1 :] for values in (full, self.strides))
        views = [Tensor(self.storage, shape, strides, width) for _ in range(full[dim])]
        return _record_all(views, (self,), lambda _: [memory.allocate(full, width=width)])

    # copies

    def clone(self, strides: Shape | None = None) -> Tensor:
        """Return a copy, with the strides of this tensor if they are dense."""
        copied = self.memory.allocate(self.shape, width=self.width, strides=strides or _find_dense_strides([self]))
        return _record(copied, (self,), lambda grads: grads)

    def contiguous(self) -> Tensor:
        """Return a contiguous copy, or the tensor if it is contiguous."""
        return self if self.is_contiguous() else self.clone(make_contiguous(self.shape))

    def repeat_interleave(self, repeats: int, dim: int) -> Tensor:
        """Return a copy in which each index of a dim is repeated."""
        x = self.unsqueeze(dim + 1)
        x = x.expand(*x.shape[: dim + 1], repeats, *x.shape[dim + 2 :])
        return x.clone(make_contiguous(x.shape)).flatten(dim, dim + 1)

    def cast(self, width: int, *, contiguous: bool = False) -> Tensor:
        """Return a copy with ``width`` bytes per element, or the tensor if it has them."""
        if width == self.width:
            return self
        before = self.width
        strides = make_contiguous(self.shape) if contiguous else _find_dense_strides([self])
        copied = self.memory.allocate(self.shape, width=width, strides=strides)
        return _record(copied, (self,), lambda grads: [_first(grads).cast(before)])

    # arithmetic

    def __mul__(self, other: Tensor | float) -> Tensor:
        """Return the product."""
        out = compute(self, other)
        if not isinstance(other, Tensor):
            return _record(out, (self,), lambda grads: [compute(_first(grads))])
        left = self.detach() if other.edge else None
        right = other.detach() if self.edge else None

        def backward(grads: list[Tensor | None]) -> list[Tensor | None]:
            grad = _first(grads)
            return [compute(grad, saved) if saved is not None else None for saved in (right, left)]

        return _record(out, (self, other), backward)

    def __add__(self, other: Tensor) -> Tensor:
        """Return the sum; both have its gradient."""
        return _record(compute(self, other), (self, other), lambda grads: [_first(grads)] * 2)

    def __sub__(self, other: Tensor) -> Tensor:
        """Return the difference."""
        return _record(compute(self, other), (self, other), lambda grads: [_first(grads), compute(_first(grads))])

    def exp(self) -> Tensor:
        """Return e to this power; it saves the result."""
        out = compute(self)
        result = out.detach()
        return _record(out, (self,), lambda grads: [compute(_first(grads), result)])

    sigmoid = exp  # its backward saves the result, too

    def softplus(self) -> Tensor:
        """Return ln(1 + e^x); it saves x."""
        saved = self.detach()
        return _record(compute(self), (self,), lambda grads: [compute(_first(grads), saved)])

    def square(self) -> Tensor:
        """Return x²; its backward has x and 2x as temporaries."""
        saved = self.detach()

        def backward(grads: list[Tensor | None]) -> list[Tensor | None]:
            power = compute(saved)
            doubled = compute(power)
            return [compute(_first(grads), doubled)]

        return _record(compute(self), (self,), backward)

    def rsqrt(self) -> Tensor:
        """Return 1 / √x; its backward has two temporaries."""
        out = compute(self)
        result = out.detach()

        def backward(grads: list[Tensor | None]) -> list[Tensor | None]:
            halved, power = compute(_first(grads)), compute(result)
            return [compute(halved, power)]

        return _record(out, (self,), backward)

    def neg(self) -> Tensor:
        """Return −x."""
        return _record(compute(self), (self,), lambda grads: [compute(_first(grads))])

    def shift(self) -> Tensor:
        """Return x plus a number."""
        return _record(compute(self), (self,), lambda grads: grads)

    def tril(self) -> Tensor:
        """Return the lower triangle, contiguous; its backward makes one tensor, too."""
        return _record(_make_ordered(self), (self,), lambda grads: [_make_ordered(_first(grads))])

    def clamp(self) -> Tensor:
        """Return the values between two bounds; its backward has two masks of a byte."""
        saved = self.detach()

        def backward(grads: list[Tensor | None]) -> list[Tensor | None]:
            above = saved.memory.allocate(saved.shape, width=1)
            below = saved.memory.allocate(saved.shape, width=1)
            del below
            zero_or_grad = compute(_first(grads), saved)
            del above
            return [zero_or_grad]

        return _record(compute(self), (self,), backward)

    def apply_in_place(self, *, saves_result: bool = False) -> Tensor:
        """Return the tensor after an operation in place, whose backward makes one tensor."""
        result = self.detach() if saves_result else None
        out = Tensor(self.storage, self.shape, self.strides, self.width)

        def backward(grads: list[Tensor | None]) -> list[Tensor | None]:
            return [compute(_first(grads)) if result is None else compute(_first(grads), result)]

        return _record(out, (self,), backward)

    def cumsum(self) -> Tensor:
        """Return sums along a dim, contiguous; the backward flips, sums and flips again."""

        def backward(grads: list[Tensor | None]) -> list[Tensor | None]:
            flipped = compute(_first(grads))
            summed = _make_ordered(flipped)
            return [compute(summed)]

        return _record(_make_ordered(self), (self,), backward)

    def sum(self, dim: int, *, keepdim: bool = False) -> Tensor:
        """Return the sum over a dim; the backward expands its gradient."""
        dim %= len(self.shape)
        full = self.shape
        shape = (*full[:dim], *((1,) if keepdim else ()), *full[dim + 1 :])

        def backward(grads: list[Tensor | None]) -> list[Tensor | None]:
            grad = _first(grads)
            return [(grad if keepdim else grad.unsqueeze(dim)).expand(*full)]

        return _record(self.memory.allocate(shape, width=self.width), (self,), backward)

    def sum_to(self, shape: Shape) -> Tensor:
        """Return the sum over what broadcasting repeated: the tensor itself if it has that shape."""
        if shape == self.shape:
            return self
        added = len(self.shape) - len(shape)
        if prod(shape) == prod(self.shape):
            return Tensor(self.storage, shape, self.strides[added:], self.width)
        return self.memory.allocate(shape, width=self.width)

    def pad(self, dim: int, before: int, after: int) -> Tensor:
        """Return zeros around a dim; the backward copies what is not of them."""
        dim %= len(self.shape)
        full = self.shape
        shape = (*full[:dim], full[dim] + before + after, *full[dim + 1 :])
        return _record(
            self.memory.allocate(shape, width=self.width),
            (self,),
            lambda grads: [_first(grads).memory.allocate(full, width=_first(grads).width)],
        )

    def __matmul__(self, other: Tensor) -> Tensor:
        """Return the batched product, as ``torch.matmul``: operands are expanded and flattened to batches."""
        batch = _broadcast((self.shape[:-2], other.shape[:-2]))
        n, m, p = self.shape[-2], self.shape[-1], other.shape[-1]
        left = self.expand(*batch, n, m).reshape(prod(batch), n, m)
        right = other.expand(*batch, m, p).reshape(prod(batch), m, p)
        return _multiply_batches(left, right).reshape(*batch, n, p)


def addcmul(x: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Return x + left · right; the backward copies each factor once more."""
    saved = left.detach(), right.detach()

    def backward(grads: list[Tensor | None]) -> list[Tensor | None]:
        grad, made = _first(grads), list[Tensor | None]()
        for other, operand in ((saved[1], left_needs), (saved[0], right_needs)):
            if not operand:
                made.append(None)
                continue
            scaled = compute(other)
            made.append(compute(grad, scaled))
            del scaled
        return [grad, *made]

    left_needs, right_needs = left.edge is not None, right.edge is not None
    return _record(compute(x, left, right), (x, left, right), backward)


def concatenate(parts: Sequence[Tensor], dim: int) -> Tensor:
    """Return tensors joined along a dim; their gradients are views of its gradient."""
    dim %= len(parts[0].shape)
    lengths = [part.shape[dim] for part in parts]
    shape = (*parts[0].shape[:dim], sum(lengths), *parts[0].shape[dim + 1 :])
    out = parts[0].memory.allocate(shape, width=parts[0].width)

    def backward(grads: list[Tensor | None]) -> list[Tensor | None]:
        return list[Tensor | None](_first(grads).split(dim, lengths))

    return _record(out, tuple(parts), backward)


def call_function(outputs: Sequence[Tensor], inputs: Sequence[Tensor | None], backward: Backward) -> list[Tensor]:
    """Return ``outputs`` of an autograd function that has its own ``backward``."""
    return _record_all(list(outputs), inputs, backward)


def compute(*operands: Tensor | float) -> Tensor:
    """Return a new tensor of the shape to which ``operands`` broadcast, in the order of their dims in memory."""
    tensors = [operand for operand in operands if isinstance(operand, Tensor)]
    shape = _broadcast(tuple(tensor.shape for tensor in tensors))
    return tensors[0].memory.allocate(
        shape, width=max(tensor.width for tensor in tensors), strides=_find_dense_strides(tensors, shape)
    )


def _make_ordered(x: Tensor) -> Tensor:
    """Return a new contiguous tensor of the shape of ``x``."""
    return x.memory.allocate(x.shape, width=x.width)


def differentiate(outputs: Sequence[Tensor], grads: Sequence[Tensor], leaves: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradients of ``leaves``, as ``torch.autograd.grad``, which frees what nodes saved as it runs them."""
    buffers = dict[Node, dict[int, Tensor]]()
    reached, waiting = dict[Node, None](), [output.edge[0] for output in outputs if output.edge]
    while waiting:
        node = waiting.pop()
        if node not in reached:
            reached[node] = None
            waiting += [edge[0] for edge in node.inputs if edge]
    for output, grad in zip(outputs, grads, strict=True):
        _add(buffers, output.edge, grad)
    order = sorted(reached, key=lambda node: node.number)
    del reached, node
    while order:
        node = order.pop()
        if node.backward is None or node not in buffers:
            continue
        received = buffers.pop(node)
        made = node.backward([received.get(index) for index in range(max(received) + 1)] if received else [])
        made = [
            None if grad is None or edge is None else grad.sum_to(edge[2])
            for grad, edge in zip(made, node.inputs, strict=True)
        ]
        del received
        node.backward = None
        for index, edge in enumerate(node.inputs):
            grad_made, made[index] = made[index], None
            if edge is not None and grad_made is not None:
                _add(buffers, edge, grad_made)
            del grad_made
    return [buffers[leaf.edge[0]][0] for leaf in leaves if leaf.edge]


def _add(buffers: dict[Node, dict[int, Tensor]], edge: Edge | None, grad: Tensor) -> None:
    """Add a gradient to those that wait for the node of ``edge``."""
    assert edge is not None
    waiting = buffers.setdefault(edge[0], {})
    waiting[edge[1]] = compute(waiting[edge[1]], grad) if edge[1] in waiting else grad


def _first(grads: list[Tensor | None]) -> Tensor:
    assert grads[0] is not None
    return grads[0]


def _make_node(memory: SymbolicMemory, inputs: Sequence[Edge | None], backward: Backward | None) -> Node:
    memory.nodes += 1
    return Node(memory.nodes, inputs, backward)


def _record(out: Tensor, inputs: Sequence[Tensor], backward: Backward) -> Tensor:
    return _record_all([out], inputs, backward)[0]


def _record_all(outputs: list[Tensor], inputs: Sequence[Tensor | None], backward: Backward) -> list[Tensor]:
    """Return ``outputs`` as made by a node of the graph, if one is recorded and an input needs a gradient."""
    memory = outputs[0].storage.memory
    if memory.records:
        edges = [None if tensor is None else tensor.edge for tensor in inputs]
        if any(edges):
            node = _make_node(memory, edges, backward)
            for index, output in enumerate(outputs):
                output.edge = (node, index, output.shape)
    return outputs


def _multiply_batches(left: Tensor, right: Tensor) -> Tensor:
    """Return the product of two batches of matrices."""
    memory = left.memory
    memory.flops += 2 * prod(left.shape) * right.shape[-1]
    out = memory.allocate((*left.shape[:2], right.shape[2]), width=left.width)
    saved_left = left.detach() if right.edge else None
    saved_right = right.detach() if left.edge else None

    def backward(grads: list[Tensor | None]) -> list[Tensor | None]:
        grad = _first(grads)
        return [
            None if saved_right is None else _multiply_batches(grad, saved_right.mT),
            None if saved_left is None else _multiply_batches(saved_left.mT, grad),
        ]

    return _record(out, (left, right), backward)


@lru_cache(maxsize=4096)
def make_contiguous(shape: Shape) -> Shape:
    """Return the strides of a contiguous tensor."""
    strides, stride = list[int](), 1
    for size in reversed(shape):
        strides.append(stride)
        stride *= max(1, size)
    return tuple(reversed(strides))


@lru_cache(maxsize=4096)
def _broadcast(shapes: tuple[Shape, ...]) -> Shape:
    """Return the shape to which ``shapes`` broadcast."""
    rank = max(map(len, shapes))
    padded = [(1,) * (rank - len(shape)) + shape for shape in shapes]
    return tuple(max(sizes) for sizes in zip(*padded, strict=True))


def _find_dense_strides(tensors: Sequence[Tensor], shape: Shape | None = None) -> Shape:
    """Return the strides of a result: its dims are in the order of those of the operands (TensorIterator)."""
    shape = tensors[0].shape if shape is None else shape
    return _order_dims(shape, tuple((tensor.shape, tensor.strides) for tensor in tensors))


@lru_cache(maxsize=4096)
def _order_dims(shape: Shape, operand_shapes: tuple[tuple[Shape, Shape], ...]) -> Shape:
    """Return the strides of a result of ``shape`` of operands of these shapes and strides."""
    rank = len(shape)
    operands = [
        (0,) * (rank - len(sizes))
        + tuple(
            0 if size == 1 and full != 1 else stride
            for size, full, stride in zip(sizes, shape[rank - len(sizes) :], strides, strict=True)
        )
        for sizes, strides in operand_shapes
    ]

    def compare(first: int, second: int) -> int:
        """Return 1 if ``first``, which is to be the faster dim, must be exchanged with ``second``; -1: must not."""
        for strides in operands:
            if strides[first] == 0 or strides[second] == 0:
                continue
            if strides[first] != strides[second]:
                return -1 if strides[first] < strides[second] else 1
            if shape[first] > shape[second]:
                return 1
        return 0

    order = list(reversed(range(rank)))  # from the fastest dim
    for index in range(1, rank):
        place = index
        for other in reversed(range(index)):
            comparison = compare(order[other], order[place])
            if comparison > 0:
                order[other], order[place] = order[place], order[other]
                place = other
            elif comparison < 0:
                break
    strides, stride = [0] * rank, 1
    for dim in order:
        strides[dim] = stride
        stride *= max(1, shape[dim])
    return tuple(strides)


@lru_cache(maxsize=4096)
def _find_view_strides(before: Shape, before_strides: Shape, shape: Shape) -> Shape | None:
    """Return the strides of a view of ``shape``; None if there is none (``computeStride`` of PyTorch)."""
    strides, place = [0] * len(shape), len(shape) - 1
    base, numel, view_numel = before_strides[-1], 1, 1
    for dim in reversed(range(len(before))):
        numel *= before[dim]
        if dim == 0 or (before[dim - 1] != 1 and before_strides[dim - 1] != numel * base):
            while place >= 0 and (view_numel < numel or shape[place] == 1):
                strides[place] = view_numel * base
                view_numel *= shape[place]
                place -= 1
            if view_numel != numel:
                return None
            if dim > 0:
                base, numel, view_numel = before_strides[dim - 1], 1, 1
    return tuple(strides) if place == -1 else None
