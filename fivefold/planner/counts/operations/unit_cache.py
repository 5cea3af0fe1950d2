"""Caches the operations of a unit (embedding, block, head), so that layouts that share them build them once.

    attention half (any ep, etp) + feed-forward half (any cp) → block, with recomputed operations marked → unit
    head = norm, multi-token prediction modules (each with such a block), losses

The attention half is the same for all expert degrees. The feed-forward half is the same for all micro-batches and
context degrees with the same number of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fivefold.job import Job, count_norm_programs
from fivefold.model.activations import ACTIVATIONS
from fivefold.model.spec import Model
from fivefold.model.weights import resolve_freeze
from fivefold.planner.counts.cache import Cache
from fivefold.planner.counts.operations.adapters import apply_frozen_weights
from fivefold.planner.counts.operations.layer import (
    Kind,
    build_block_unit,
    get_kind,
    list_attention_half,
    list_embedding,
    list_feedforward_half,
)
from fivefold.planner.counts.operations.linear import has_fused_wgrad_accumulation
from fivefold.planner.counts.operations.local_shapes import Local, LocalDegrees
from fivefold.planner.counts.operations.mtp import Finish, build_head_unit
from fivefold.planner.counts.operations.op import Op
from fivefold.planner.counts.operations.recompute import UnitOperations
from fivefold.planner.counts.operations.vision import insert_images

STATISTIC = 4  # bytes of an fp32 number of a row
MAX_CACHED_BLOCKS = 100  # cached blocks, of which variants of recomputation are made


class UnitCache:
    """The operations of one model and job; the returned values are shared and must not be changed."""

    def __init__(self, model: Model, job: Job, example: Mapping[Kind, int]) -> None:
        """Start with empty caches; ``example``: a layer of each kind."""
        self.model, self.job, self.example = model, job, example
        self._locals: Cache[tuple[LocalDegrees, frozenset[str], frozenset[str]], Local] = Cache()
        self._ends = resolve_freeze(model, job.freeze).ends
        self._halves: Cache[tuple[object, ...], list[Op]] = Cache()
        self._blocks: Cache[tuple[LocalDegrees, Kind, bool], list[Op]] = Cache(MAX_CACHED_BLOCKS)
        self._units: Cache[tuple[LocalDegrees, Kind | str], UnitOperations] = Cache()
        self._heads: Cache[LocalDegrees, tuple[Op, ...]] = Cache()

    def get_local(
        self, part: LocalDegrees, frozen: frozenset[str] = frozenset(), unquantized: frozenset[str] = frozenset()
    ) -> Local:
        """Return the model's local sizes on one rank, of a unit with ``frozen`` and ``unquantized`` modules."""
        key = part, frozen, unquantized
        if key not in self._locals:
            self._locals[key] = Local(self.model, self.job, part, frozen, unquantized)
        return self._locals[key]

    def unit(self, part: LocalDegrees, name: Kind | str) -> UnitOperations:
        """Return the operations of a unit."""
        key = part, name
        if key not in self._units:
            self._units[key] = self._build_unit(part, name)
        return self._units[key]

    def list_ops(self, part: LocalDegrees, name: Kind | str) -> tuple[Op, ...]:
        """Return the operations of a unit in order.

        In the head, tensors keep the names that they have in their own block, so that equal operations are one object
        and what depends only on operations is computed once.
        """
        if name != "head" or not self.model.mtp_depth:
            return self.unit(part, name).ops
        if part not in self._heads:
            self._heads[part] = self._build_head(part, named=False).ops
        return self._heads[part]

    def _build_unit(self, part: LocalDegrees, name: Kind | str) -> UnitOperations:
        """Build the operations of a block (a ``Kind``), of the embedding or of the head."""
        if isinstance(name, Kind):
            ops = self._build_block(part, name, layer=self.example[name])
            local = self.get_local(part, name.frozen, name.unquantized)
            checkpoints = bool(part.recomputed) and not self.job.stack.kernel_facts.fuses_linears
            input_gradient = not name.leads or (checkpoints and self.job.adapter is not None)
            ops = apply_frozen_weights(ops, local, input_gradient=input_gradient)
            return UnitOperations(tuple(ops)) if name.is_below else build_block_unit(ops, local)
        local = self.get_local(part, self._ends)
        if name == "head":
            unit = self._build_head(part, named=True)
            return unit._replace(ops=tuple(apply_frozen_weights(unit.ops, local, input_gradient=True)))
        ops = [*map(self._make_finish(local), list_embedding(local))]
        if self.job.images:
            ops = insert_images(local, ops, self._make_finish)
        return UnitOperations(tuple(apply_frozen_weights(ops, local, input_gradient=not local.frozen)))

    def _build_head(self, part: LocalDegrees, *, named: bool) -> UnitOperations:
        def build_unit(layer: int) -> UnitOperations:
            return build_block_unit(
                self._build_block(part, get_kind(self.model, layer), layer=layer), self.get_local(part)
            )

        local = self.get_local(part, self._ends)
        return build_head_unit(local, inside=build_unit, finish=self._make_finish(local), named=named)

    def _build_block(self, part: LocalDegrees, kind: Kind, *, layer: int) -> list[Op]:
        """Return a block's operations, none marked; they depend on recomputation only if full layers are recomputed."""
        plain_part = part._replace(recomputed=part.recomputed & {"layer"}, piped=False)
        local = self.get_local(plain_part, kind.frozen)
        block = plain_part, kind, local.has_16bit_stream(layer)
        if block not in self._blocks:
            # attention keeps the keys that it shares for recomputed layers (``_list_grouped``), as the second layer of
            # a pair does the output of experts that it adds
            lends = self.model.moe is not None and self.model.moe.shortcut
            is_kept = lends or (self.model.shared_kv_layers and part.ulysses)
            rereads = part.recomputed & {"layer"} if is_kept else frozenset()
            attention_part = part._replace(recomputed=rereads, piped=False, ep=1, etp=1)
            feedforward_part = plain_part._replace(sequences=1, cp=1, ulysses=False)
            attention_key = (attention_part, *block[1:])
            attention = self._build_half(
                list_attention_half, attention_part, layer, key=attention_key, frozen=kind.frozen
            )
            key = (feedforward_part, local.rows, *block[1:])
            feedforward = self._build_half(list_feedforward_half, plain_part, layer, key=key, frozen=kind.frozen)
            self._blocks[block] = [*attention, *feedforward]
        return self._blocks[block]

    def _build_half(
        self,
        half: Callable[..., list[Op]],
        part: LocalDegrees,
        layer: int,
        *,
        key: tuple[object, ...],
        frozen: frozenset[str],
    ) -> list[Op]:
        """Return the operations of half a block, which are the same for all degrees with one ``key``."""
        if key not in self._halves:
            local = self.get_local(part, frozen)
            self._halves[key] = [*map(self._make_finish(local), half(local, layer=layer))]
        return self._halves[key]

    def _make_finish(self, local: Local) -> Finish:
        """Return the function that is applied to every operation after it was built."""
        has_one_byte_gradients = self.job.precision.gradients_bytes == 1

        def finish(op: Op) -> Op:
            op = fuse_kernels(op, local)
            return _with_high_precision_gradients(op) if has_one_byte_gradients else op

        return finish


def _with_high_precision_gradients(op: Op) -> Op:
    """Return ``op`` for gradients that have one byte only in fp8 matmuls.

    All other gradients have two bytes, so they count twice as many one-byte elements.
    """
    has_one_byte = has_fused_wgrad_accumulation(op) and op.name != "head.out"
    first = 1 if has_one_byte or op.name == "moe.arrive" else 2
    biases = 1 if op.name == "moe.arrive" else 2
    widths = tuple(size * (biases if index else first) for index, size in enumerate(op.wgrad_numels))
    return op._replace(wgrad_numels=widths, bias_wgrad_numel=2 * op.bias_wgrad_numel)


def fuse_kernels(op: Op, local: Local) -> Op:
    """Return ``op`` as ``trainer/model/kernels/fused/`` computes it, if the job's kernels are Triton's.

    One such kernel has next to no scratch memory; the lists of operations count that of PyTorch's kernels, which hand
    full tensors to one another (``op.py``).
    """
    if local.job.stack.kernels != "triton":
        return op
    if op.kind == "norm" and op.batch == 1:  # there is no kernel for norms with weights per head
        if not op.wgrad_numels:  # no weights, so no partial sums of their gradients
            return op._replace(forward_scratch=0, backward_scratch=0)
        width = op.wgrad_numels[0]
        rows = op.moved_bytes // (2 * local.width * width)
        partial = count_norm_programs(rows, width) * sum(op.wgrad_numels) * STATISTIC
        return op._replace(forward_scratch=0, backward_scratch=partial)
    if op.kind == "rope" or (op.kind == "activation" and op.name.endswith(".act") and _is_one_kernel(op, local)):
        return op._replace(forward_scratch=0, backward_scratch=0)
    if op.kind == "loss" and local.job.stack.loss_facts.in_place:  # log Σ exp and the target's logit
        return op._replace(forward_scratch=2 * STATISTIC * op.shape[0])
    return op


def _is_one_kernel(op: Op, local: Local) -> bool:
    """Return True if the trainer has a Triton kernel for an activation.

    It has none for trained numbers, for limits of gate and up, and for an activation that is spelled out in PyTorch.
    """
    model = local.model
    activation = ACTIVATIONS[model.activation]
    if op.name == "moe.experts.act":
        assert model.moe is not None
        return model.mlp == "gated" and activation.has_weighted_kernel and model.moe.clamp is None
    return not op.parameters and activation.value is None and model.mlp_clamp is None
