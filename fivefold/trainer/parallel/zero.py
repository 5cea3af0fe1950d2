"""Data parallelism with ZeRO 0-3 in one mechanism; the stages differ in what a unit keeps (``layout/sharding.py``).

Sharded: the rows of every local weight over the shard group, in the copy that the optimizer updates.
Per unit: all_gather of the weights when they are stale or were released; its gradients are reduced to the shards once a
step or after every backward (``gradients.py``).
FSDP2 is not used: it copies the weights even if nothing is sharded (``docs/explanation/decisions/001-own-zero.md``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from fivefold.layout.sharding import Policy
from fivefold.model.weight import is_gemm_weight
from fivefold.trainer.model.experts import Experts
from fivefold.trainer.model.float8.cast import Cast
from fivefold.trainer.model.linear import Linear, WgradStore, accumulate_grad
from fivefold.trainer.model.precision import Dtypes
from fivefold.trainer.model.quantized.formats import allocate
from fivefold.trainer.parallel.collectives import Pending, all_gather
from fivefold.trainer.parallel.fp8_gather import Payload
from fivefold.trainer.parallel.gradients import Gradients, resize
from fivefold.trainer.parallel.host_memory import allocate_on_host, copy_to_device
from fivefold.trainer.parallel.mesh import AxisGroup
from fivefold.trainer.parallel.shard import WeightShard

Ends = Sequence[Callable[[], None]]


class ZeroUnit:
    """The weights of one unit, as in FSDP: gathers them for its module and keeps the shards that the optimizer updates.

    ``frozen``: weights that are not trained: kept in full where gathered weights stay, else gathered with the others
    from ``frozen_rows``, or from ``quantized_rows`` if they are in few bits. ``prefetches``: prefetch the next module's
    weights during this one's compute. ``wgrad_store``: the store in which gradients made by autograd wait while those
    of matrices are deferred, so that all of a micro-batch come together; None: they do not wait. ``offloads``: what the
    optimizer updates is in host memory; this rank's rows on the device are a copy in the dtype of the weights.
    """

    def __init__(
        self,
        module: nn.Module,
        shards: list[WeightShard],
        gradients: Gradients,
        *,
        frozen: list[WeightShard],
        shard: AxisGroup,
        policy: Policy,
        dtypes: Dtypes,
        device: torch.device,
        prefetches: bool = False,
        wgrad_store: WgradStore | None = None,
        offloads: bool = False,
    ) -> None:
        self.shards, self.gradients, self.shard, self.policy, self.dtypes = shards, gradients, shard, policy, dtypes
        self.device, self.prefetches, self.wgrad_store = device, prefetches, wgrad_store
        self.sizes, self.numel = gradients.sizes, gradients.numel
        self.gathers_frozen = bool(frozen) and not policy.weights_stay
        quantized = [part for part in frozen if part.stored is not None]
        self.frozen = [*(part for part in frozen if part.stored is None), *quantized]  # these may begin at any byte
        self._packs = bool(quantized) and self.gathers_frozen  # one message of several formats, so of bytes
        self.gathered_sizes = self.sizes + [part.stored_numel for part in self.frozen if self.gathers_frozen]
        self._is_quantized = [False] * len(self.sizes) + [part.stored is not None for part in self.frozen]
        if self._packs:
            self.gathered_sizes = [
                size if is_quantized else size * dtypes.weights.itemsize
                for size, is_quantized in zip(self.gathered_sizes, self._is_quantized, strict=True)
            ]
        self.matrices = tuple(is_gemm_weight(weight_shard.local_weight.weight) for weight_shard in shards)
        self.neighbours: dict[str, list[ZeroUnit]] = {}  # "forward", "backward": the units to prefetch next
        self.sibling_units: list[ZeroUnit] = []  # units of the same module, released with this one
        self.is_released_by_sibling = False  # another unit releases this one
        self.ends_at_input = False  # the input's gradient ends the backward
        self.has_backward = True  # False: neither it nor a unit before it has a trained weight
        self.payload: Payload | None = None  # set if the all_gather sends fp8
        self.host_rows: Tensor | None = None  # what the optimizer updates, if it is in host memory
        self._rows_are_current = not offloads  # the rows on the device have what the optimizer updated
        self._gathered_is_current = False
        self._gathering: Pending | None = None
        self.reference: Tensor | None = None  # of DPO: a frozen copy of the gathered weights, or of this rank's rows
        self._reads_reference = False
        self._allocate(module, offloads=offloads)

    def _allocate(self, module: nn.Module, *, offloads: bool) -> None:
        """Allocate weights and shards; a shard is a view of the gathered buffer if dtype and policy allow."""
        self._allocate_gathered()
        self.parameters: list[nn.Parameter] = []
        for index, (shard, part) in enumerate(zip(self.shards, self._parts, strict=False)):
            parameter = _set_parameter(module, shard, part, trained=True)
            parameter.collect = self._make_grad_hook(index)  # type: ignore[attr-defined]  # called by linear.accumulate_grad
            parameter.grad_buffer = partial(self.gradients.grad_buffer, index)  # type: ignore[attr-defined]  # read by model/linear.py
            parameter.waits = self.wgrad_store is not None  # type: ignore[attr-defined]  # whether gradients may wait for W
            parameter.register_post_accumulate_grad_hook(_collect)
            self.parameters.append(parameter)
        rows_dtype = self.dtypes.weights if offloads else self.dtypes.updated
        cast = self.gathered.dtype == torch.uint8
        self.has_own_shard = cast or rows_dtype != self.dtypes.weights or not self.policy.weights_stay
        if self.has_own_shard:
            self.own = torch.zeros(self.numel, dtype=rows_dtype, device=self.device)
            chunks = list(self.own.split(self.sizes)) if self.sizes else []
        else:
            chunks = [part[self.shard.rank] for part in self._parts[: len(self.shards)]]
        frozen_chunks = self._allocate_frozen()
        updated_chunks = self._allocate_on_host() if offloads and self.shards else chunks
        for shard, chunk in zip((*self.shards, *self.frozen), (*updated_chunks, *frozen_chunks), strict=True):
            shard.weight.data = shard.view_local(chunk)
        for shard, part in zip(self.frozen, self._parts[len(self.shards) :] or frozen_chunks, strict=True):
            _set_parameter(module, shard, part, trained=False)
        self._chunks = chunks + frozen_chunks * self.gathers_frozen

    def _allocate_on_host(self) -> list[Tensor]:
        """Allocate what the optimizer updates in host memory; return it by weight."""
        self.host_rows = allocate_on_host((self.numel,), dtype=self.dtypes.updated, device=self.device).zero_()
        for shard in self.shards:
            shard.is_offloaded = True
        return list(self.host_rows.split(self.sizes))

    def _allocate_frozen(self) -> list[Tensor]:
        """Allocate this rank's rows of frozen weights, and the scales of quantized ones; return the rows by weight."""
        sizes = [part.stored_numel for part in self.frozen if part.stored is None]
        quantized = [part for part in self.frozen if part.stored is not None]
        quantized_sizes = [part.stored_numel for part in quantized]
        self.frozen_rows = torch.zeros(sum(sizes), dtype=self.dtypes.weights, device=self.device)
        self.quantized_rows = torch.zeros(sum(quantized_sizes), dtype=torch.uint8, device=self.device)
        self.scale_buffers: list[Tensor] = []
        for stored in {part.stored: None for part in quantized if part.stored is not None}:
            parts = [part for part in quantized if part.stored == stored]
            slices = [part.matrix_slice for part in parts]
            weights, buffers = allocate(stored, slices, dtype=self.dtypes.weights, device=self.device)
            self.scale_buffers += buffers
            for part, weight in zip(parts, weights, strict=True):
                part.quantized = weight
        chunks = list(self.frozen_rows.split(sizes)) if sizes else []
        return chunks + (list(self.quantized_rows.split(quantized_sizes)) if quantized else [])

    def _allocate_gathered(self) -> None:
        """Allocate the gathered weights and ``_parts``, each weight's [ranks, numel of a shard].

        The buffer is of bytes if matrices have a dtype of their own; they come last, because two-byte elements must
        begin at an even byte.
        """
        ranks, weight_dtype, matrix_dtype = self.shard.size, self.dtypes.weights, self.dtypes.matrices
        if self._packs:
            sizes = [size * ranks for size in self.gathered_sizes]
            self.gathered = torch.zeros(sum(sizes), dtype=torch.uint8, device=self.device)
            self._byte_parts = [part.view(ranks, -1) for part in self.gathered.split(sizes)]
            self._parts = [
                part if is_quantized else part.view(weight_dtype)
                for part, is_quantized in zip(self._byte_parts, self._is_quantized, strict=True)
            ]
            return
        if weight_dtype == matrix_dtype or not any(self.matrices):
            sizes = [size * ranks for size in self.gathered_sizes]
            self.gathered = torch.zeros(sum(sizes), dtype=weight_dtype, device=self.device)
            self._parts = [part.view(ranks, -1) for part in self.gathered.split(sizes)] if sizes else []
            return
        dtypes = [matrix_dtype if matrix else weight_dtype for matrix in self.matrices]
        order = sorted(range(len(dtypes)), key=lambda index: self.matrices[index])
        sizes = [self.sizes[index] * ranks * dtypes[index].itemsize for index in order]
        self.gathered = torch.zeros(sum(sizes), dtype=torch.uint8, device=self.device)
        slots = dict(zip(order, self.gathered.split(sizes), strict=True))
        self._parts = [slots[index].view(dtype).view(ranks, -1) for index, dtype in enumerate(dtypes)]

    # Weights: shards → gathered

    def begin(self) -> None:
        """Start the all_gather of the weights, unless they are current or it is running."""
        if self._gathered_is_current or self._gathering is not None:
            return
        self._copy_rows_to_device()
        if not self.gathered_sizes:  # all weights are frozen and stay
            self._gathered_is_current = True
            return
        if self.gathered.untyped_storage().size() == 0:
            resize(self.gathered, self.gathered.numel())
        if self.shard.size == 1:
            if self.payload is not None:
                self.payload.unpack(self.payload.pack(), self._parts, self.parameters)
            elif self.has_own_shard:
                self.gathered.copy_(self.own)
            self._gathered_is_current = True
            return
        cast = self.payload is not None or (self.has_own_shard and self.own.dtype != self.dtypes.weights)
        self._sent_copied = cast or not self.has_own_shard or self.gathers_frozen
        send = self.own if not self._sent_copied else self._pack_rows()
        self._gathering, self._sent = all_gather(send, self.shard), send

    def _copy_rows_to_device(self) -> None:
        """Copy what the optimizer has updated in host memory to this rank's rows on the device."""
        if self.host_rows is not None and not self._rows_are_current:
            for rows, updated in zip(self._chunks, self.host_rows.split(self.sizes), strict=False):
                copy_to_device(rows, updated)
        self._rows_are_current = True

    def _pack_rows(self) -> Tensor:
        """Copy this rank's rows of all weights of the unit into one buffer to send."""
        if self.payload is not None:
            return self.payload.pack()
        send = torch.empty(
            sum(self.gathered_sizes), dtype=torch.uint8 if self._packs else self.dtypes.weights, device=self.device
        )
        rows = list(send.split(self.gathered_sizes))
        if self._packs:
            rows = [
                part if is_quantized else part.view(self.dtypes.weights)
                for part, is_quantized in zip(rows, self._is_quantized, strict=True)
            ]
        torch._foreach_copy_(rows, self._chunks)
        return send

    def gather(self) -> None:
        """Wait until the gathered weights are current."""
        if not self._gathered_is_current:
            self.begin()
        if self._gathering is not None:
            received = self._gathering.wait()
            self._gathering = None
            if self.payload is not None:
                self.payload.unpack(received, self._parts, self.parameters)
            else:
                parts = self._byte_parts if self._packs else self._parts
                torch.split_with_sizes_copy(received.view(self.shard.size, -1), self.gathered_sizes, dim=1, out=parts)
            resize(received, 0)
            if self._sent_copied:
                resize(self._sent, 0)
            del self._sent
            self._gathered_is_current = True

    def prefetch(self, direction: str) -> None:
        """Start the all_gathers of the next units in ``direction``: "forward" or "backward"; "": of none."""
        if self.prefetches:
            for unit in self.neighbours.get(direction, ()):
                unit.begin()

    def release(self) -> None:
        """Free the gathered weights if the policy says so (ZeRO-3); autograd keeps its view of the empty storage."""
        if not self.policy.weights_stay and self._gathering is None:
            resize(self.gathered, 0)
            self._gathered_is_current = False

    def live_tensors(self) -> list[Tensor]:
        """Return the tensors that the unit holds between steps."""
        frozen = [self.frozen_rows, self.quantized_rows, *self.scale_buffers]
        reference = [] if self.reference is None else [self.reference]
        return [self.gathered, *frozen, *([self.own] if self.has_own_shard else []), *reference]

    def transient_tensors(self) -> list[Tensor]:
        """Return the tensors that are allocated within a step: gathered weights, message buffers and gradients."""
        message_buffers = [self._gathering.output_buffer, self._sent] if self._gathering is not None else []
        return [self.gathered, *message_buffers, *self.gradients.transient_tensors()]

    def drop(self) -> None:
        """Mark the gathered weights stale, and free them if the policy says so."""
        if self._gathering is not None:
            self.gather()
        self.release()
        self._mark_stale()

    # The reference of DPO

    def hold_reference(self) -> None:
        """Keep a frozen copy of the weights: in full where gathered weights stay, else this rank's rows."""
        if self.policy.weights_stay:
            self.gather()
            self.reference = self.gathered.clone()
        else:
            self._copy_rows_to_device()
            self.reference = self.own.to(self.dtypes.weights, copy=True)

    def swap_reference(self) -> None:
        """Swap the weights and their frozen copy: the parameters compute with the other."""
        assert self.reference is not None
        if self.policy.weights_stay:
            parts = self.reference.split([size * self.shard.size for size in self.sizes])
            self._reads_reference = not self._reads_reference
            for parameter, ours, reference in zip(self.parameters, self._parts, parts, strict=True):
                source = reference if self._reads_reference else ours
                parameter.data = source.view(-1)[: parameter.numel()].view(parameter.shape)
        else:
            self.own, self.reference = self.reference, self.own
            self._chunks = list(self.own.split(self.sizes))
            self.drop()

    def drop_released(self) -> None:
        """Mark weights that do not stay gathered as stale, and free them."""
        if not self.policy.weights_stay:
            self.drop()

    def _mark_stale(self) -> None:
        self._gathered_is_current = False
        if self.payload is not None:
            self.payload.scales.forget()

    def on_optimizer_step(self) -> None:
        """Drop gradients and mark the gathered weights stale; call it after the optimizer has changed the shards."""
        assert self._gathering is None, "weights that were fetched ahead were not used"
        self.gradients.on_optimizer_step()
        self._rows_are_current = False
        self._mark_stale()

    # Gradients: gathered → shards

    def add_sibling(self, sibling: ZeroUnit) -> None:
        """Add a unit of the same module, which this one releases together with itself."""
        self.sibling_units.append(sibling)
        sibling.is_released_by_sibling = True

    def _make_grad_hook(self, index: int) -> Callable[[Tensor | Cast | None], None]:
        """Return the function that takes the gradient of weight ``index``; the first weight's ends the unit."""

        def collect(gradient: Tensor | Cast | None) -> None:
            # weight 0 is used first in the forward, so last in the backward: the unit is done
            if index == 0 and not self.is_released_by_sibling and not self.ends_at_input:
                for unit in (self, *self.sibling_units):
                    unit.release()
            if (
                self.wgrad_store is not None and self.wgrad_store.deferring
            ):  # a norm's gradient waits for the matrices' gradients
                self.wgrad_store.run_or_defer(lambda: self.gradients.add(index, gradient))
            else:
                self.gradients.add(index, gradient)

        return collect


def _set_parameter(module: nn.Module, shard: WeightShard, part: Tensor, *, trained: bool) -> nn.Parameter:
    """Make the parameter of a weight in ``module`` a view of its gathered ``part``."""
    flat = part.view(-1)
    numel = shard.shape.numel()
    view = flat[:numel].view(shard.shape) if shard.stored is None else flat[: shard.stored.count_element_bytes(numel)]
    # .data: a new all_gather must not count as an in-place change for autograd
    parameter = nn.Parameter(view.data, requires_grad=trained)
    owner, _, attribute = shard.name.rpartition(".")
    reader = module.get_submodule(owner)
    setattr(reader, attribute, parameter)
    if shard.quantized is not None and isinstance(reader, Experts):
        reader.quantized[attribute] = shard.quantized
    elif shard.quantized is not None:
        cast(Linear, reader).quantized = shard.quantized
    return parameter


def _collect(weight: nn.Parameter) -> None:
    """Move ``weight.grad`` to the unit's buffer. Autograd also calls this hook without a gradient."""
    gradient, weight.grad = weight.grad, None
    if gradient is not None:
        accumulate_grad(weight, gradient)


def gather_all(units: Sequence[ZeroUnit], direction: str) -> None:
    """Gather ``units``, then start to prefetch those that come next in ``direction``."""
    for unit in units:
        unit.gather()
    for unit in units:
        unit.prefetch(direction)


def attach(
    module: nn.Module,
    units: Sequence[ZeroUnit],
    *,
    keep: bool = False,
    shared: bool = False,
    backward: bool = True,
    prefetch_direction: str = "forward",
    ends_at_input: bool = False,
) -> None:
    """Gather ``units`` before ``module``'s forward, release them after it unless ``keep``, gather before its backward.

    ``shared``: the units are shared with another module, so they are kept without a backward too. ``backward``: gather
    before the backward. ``prefetch_direction``: key in ``neighbours`` of what the forward prefetches; "": nothing.
    ``ends_at_input``: the backward ends with the gradient of the input, not with that of the first weight.
    """

    def begin_forward(_module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        for unit in units:  # an input without a gradient: that of the first weight ends the backward
            unit.ends_at_input = ends_at_input and not unit.policy.weights_stay and inputs[0].requires_grad
        gather_all(units, prefetch_direction)
        return watch_backward_end(inputs, [unit.release for unit in units]) if units[0].ends_at_input else inputs

    def end_forward(_module: nn.Module, _inputs: object, outputs: Tensor | tuple[Tensor, ...]) -> None:
        if all(unit.policy.weights_stay for unit in units):
            return
        if not keep or (not shared and not torch.is_grad_enabled()):  # no backward comes
            for unit in units:
                unit.release()
        output = outputs[0] if isinstance(outputs, tuple) else outputs
        if backward and output.requires_grad:
            output.register_hook(re_gather)

    def re_gather(_gradient: Tensor) -> None:
        gather_all(units, "backward")

    module.register_forward_pre_hook(begin_forward)
    module.register_forward_hook(end_forward)


class _Entry(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ends: Ends) -> Tensor:
        ctx.ends = ends
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        for end in ctx.ends:
            end()
        return gradient, None


def watch_backward_end(inputs: tuple[Any, ...], ends: Ends) -> tuple[Any, ...]:
    """Return the ``inputs`` of a module, with ``ends`` called once the gradient of the first input is complete.

    In a block that begins with a norm, the norm's weight gradient is the last one and marks the end of the backward. If
    the norms come after attention and MLP, the input goes through an autograd node of its own.
    """
    if not inputs[0].requires_grad:
        return inputs
    return (_Entry.apply(inputs[0], ends), *inputs[1:])
