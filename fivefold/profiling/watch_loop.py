"""``watch``: measure any training loop as a ``Step``: memory, FLOPs, messages and time, on CPUs or GPUs.

    with watch(model, optimizer, tokens=8192) as watched:
        for batch in batches: loss(model, batch).backward(); optimizer.step(); optimizer.zero_grad()
    watched.step

A step ends where ``optimizer.step()`` ends. The first three steps are metered, below autograd, and the third of them is
reported; of the later ones, which are not metered, the median of the seconds is reported: of a step, of its update, and
of the wait for data, which is from the end of the update to the model's next forward. Every rank of a distributed loop
calls ``watch``.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from math import inf
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from fivefold.errors import UserError
from fivefold.machine.spec import Machine
from fivefold.profiling.closed_loop import average_traffic, merge_stage_memory, write_steps
from fivefold.profiling.step_advice import advise_on_step
from fivefold.results.advice import StepAdvice
from fivefold.step import Memory, Step, Time, Work
from fivefold.trainer.measure.clock import Clock, HostClock, StreamClock
from fivefold.trainer.measure.loop_meter import LoopMeter
from fivefold.trainer.measure.measured_step import MeasuredStep
from fivefold.trainer.measure.meter import read_resident_bytes

METERED = (
    3  # steps: the optimizer allocates its states in the first; DistributedDataParallel rebuilds its buckets after
)
AXES = ("dp", "tp", "cp", "ep", "pp")
ALIASES = {"fsdp": "dp", "ddp": "dp", "shard": "dp", "replicate": "dp", "data": "dp", "tensor": "tp", "pipe": "pp"}


class Watched:
    """The result of ``watch``; ``step`` is available once the loop has ended."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: tuple[torch.optim.Optimizer, ...],
        *,
        mesh: DeviceMesh | None,
        stage: int,
        tokens: int,
        described: Mapping[str, Any],
        machine: Machine | None,
        predicted: Step | None,
        fake: bool,
    ) -> None:
        self.model, self.optimizers, self.stage, self.tokens = model, optimizers, stage, tokens
        self.described, self.machine, self.predicted, self._fake = described, machine, predicted, fake
        self._axes = _name_axes(mesh)
        self.measured: MeasuredStep | None = None  # of this rank
        self._step: Step | None = None
        self._ends: list[Any] = []  # of updates
        self._starts: list[Any] = []  # of the next step, once the step before was measured
        self._updates: list[Any] = []
        self._forwards: list[Any] = []  # the first forward after each end, None while there is none
        self._hooks: list[Any] = []
        device = next((p.device.type for p in model.parameters()), "cpu")
        self._clock: Clock = StreamClock() if device == "cuda" else HostClock()
        self._on_gpu = device == "cuda"

    @property
    def step(self) -> Step:
        """Return the measured step; raises ``UserError`` if the loop has not ended, or had no step."""
        if self._step is None:
            raise UserError(
                "nothing was measured: call optimizer.step() within watch(), and let the loop end before you read it"
            )
        return self._step

    @property
    def advice(self) -> StepAdvice | None:
        """Return the largest loss that was measured, and what to change; ``str`` of it is a few sentences.

        None if the time was not measured.
        """
        return advise_on_step(self.step, self.predicted)

    def save(self, folder: str | Path) -> None:
        """Write ``folder/step.json``, which ``fivefold show`` and ``load`` read; on rank 0 only."""
        if not dist.is_initialized() or dist.get_rank() == 0:
            path = Path(folder)
            path.mkdir(parents=True, exist_ok=True)
            write_steps(path / "step.json", *([self.predicted] if self.predicted else []), self.step)

    def __enter__(self) -> Self:
        self._buckets = _count_bucket_bytes(self.model)
        self.meter: LoopMeter | None = LoopMeter(
            self._list_live_tensors(),
            states=self._count_state_bytes,
            axis=self._axis,
            hidden_bytes=self._buckets,
            fake=self._fake,
        )
        for optimizer in self.optimizers:
            self._hooks.append(optimizer.register_step_pre_hook(self._begin_update))
        self._hooks.append(self.optimizers[-1].register_step_post_hook(self._end_update))
        if self.model._compiled_call_impl is None:  # a hook would be compiled with the module
            self._hooks.append(self.model.register_forward_pre_hook(self._begin_forward))
        self._clock.begin()
        self.meter.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for hook in self._hooks:
            hook.remove()
        self._stop()
        if error is None and not self._fake:
            self._step = self._read()

    def _stop(self) -> None:
        if self.meter is not None:
            meter, self.meter = self.meter, None
            meter.__exit__(None, None, None)

    # In the loop

    def _begin_update(self, *_: object) -> None:
        if self.meter is not None:
            self.meter.updating = True
        self._updates.append(self._clock.mark())

    def _begin_forward(self, *_: object) -> None:
        if self._forwards and self._forwards[-1] is None:
            self._forwards[-1] = self._clock.mark()

    def _end_update(self, *_: object) -> None:
        self._ends.append(self._clock.mark())
        if self.meter is not None:
            self._end_metered_step(self.meter)
        self._starts.append(self._clock.mark())
        self._forwards.append(None)

    def _end_metered_step(self, meter: LoopMeter) -> None:
        """Keep what the meter measured in a step, and begin the next one or stop after the last."""
        meter.updating = False
        self.measured = self._measure(meter)
        if len(self._ends) < METERED:
            meter.live_bytes -= self._buckets  # the meter sees them from their first use on
            self._buckets = 0
            meter.begin()
            if self._on_gpu:
                torch.cuda.reset_peak_memory_stats()
        else:
            self._stop()

    def _measure(self, meter: LoopMeter) -> MeasuredStep:
        """Return the measured step: bytes of states, peak, FLOPs and messages."""
        moments = [*_iterate_unique(_to_local(t) for t in self._list_moments())]
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        return MeasuredStep(
            parameters=sum(p.numel() for p in self.model.parameters()),
            parameters_bytes=_count_bytes((*self.model.parameters(), *_list_scales(self.model))),
            gradients_bytes=_count_bytes(gradients),
            optimizer_bytes=sum(tensor.nbytes for tensor in moments),
            kept_bytes=meter.kept_bytes,
            peak_bytes=torch.cuda.max_memory_allocated() if self._on_gpu else meter.peak_bytes,
            peak_cause=meter.peak_cause,
            flops=meter.flops,
            traffic=meter.traffic,
        )

    def _list_moments(self) -> Iterator[Tensor]:
        for optimizer in self.optimizers:
            inner = getattr(optimizer, "optim", None)  # ZeroRedundancyOptimizer's
            for state in (optimizer.state or getattr(inner, "state", {})).values():
                yield from (value for value in state.values() if isinstance(value, Tensor))

    def _list_live_tensors(self) -> list[Tensor]:
        """Return the tensors that live between steps: weights, buffers, scales, gradients and moments."""
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        return [
            _to_local(tensor)
            for tensor in (
                *self.model.parameters(),
                *self.model.buffers(),
                *_list_scales(self.model),
                *_list_shards(self.model),
                *gradients,
                *self._list_moments(),
            )
        ]

    def _count_state_bytes(self) -> int:
        return _count_bytes(self._list_live_tensors())

    def _axis(self, group: str, collective: str) -> str:
        return self._axes.get(group) or ("pp" if collective == "p2p" else "dp")

    # After it

    def _take_median_seconds(self) -> tuple[float, float, float]:
        """Return the median seconds of an unmetered step, of its update, and from the update to the next forward.

        If all steps were metered, these are used.
        """
        ends, begins, starts = (self._clock.seconds(marks) for marks in (self._ends, self._updates, self._starts))
        count = len(self.optimizers)
        updates = [end - begins[count * index] for index, end in enumerate(ends)]
        steps = [end - start for start, end in zip(starts, ends[1:], strict=False)]
        unmetered = steps[METERED - 1 :] or steps or [updates[-1]]
        step_seconds = statistics.median(unmetered)
        update_seconds = min(statistics.median(updates[METERED:] or updates), step_seconds)
        begun_steps = [index for index, forward in enumerate(self._forwards) if forward is not None]
        forwards = self._clock.seconds([self._forwards[index] for index in begun_steps])
        waits = {index: forward - starts[index] for index, forward in zip(begun_steps, forwards, strict=True)}
        unmetered_waits = [wait for index, wait in waits.items() if index >= METERED - 1] or list(waits.values())
        wait_seconds = statistics.median(unmetered_waits) if unmetered_waits else 0.0
        return step_seconds, update_seconds, min(max(0.0, wait_seconds), step_seconds - update_seconds)

    def _read(self) -> Step | None:
        """Gather the measurements of all ranks; return an equal step on each."""
        own_measurement = (
            self.measured,
            read_resident_bytes(),
            *(self._take_median_seconds() if self._ends else (0.0, 0.0, 0.0)),
            self.stage,
        )
        measurements: list[Any] = [own_measurement]
        if dist.is_initialized():
            measurements = [None] * dist.get_world_size()
            dist.all_gather_object(measurements, own_measurement)
        if any(measurement[0] is None for measurement in measurements):
            return None
        return self._record(measurements)

    def _record(self, everyone: list[Any]) -> Step:
        """Merge the measurements of all ranks into one ``Step``."""
        numbers = sorted({measurement[5] for measurement in everyone})
        ranks = {number: [measurement[0] for measurement in everyone if measurement[5] == number] for number in numbers}
        stages = tuple(merge_stage_memory(number, stage_ranks) for number, stage_ranks in ranks.items())
        seconds, update, wait = max(measurement[2:5] for measurement in everyone)
        flops = sum(measurement[0].flops for measurement in everyone)
        parameters = sum(round(max(measured.parameters for measured in stage_ranks)) for stage_ranks in ranks.values())
        work = Work(
            parameters=parameters,
            active_parameters=parameters,
            model_flops_causal=flops,
            model_flops_non_causal=flops,
            hardware_flops=flops,
        )
        if self.predicted is not None:
            work = self.predicted.work.replace(parameters=parameters, hardware_flops=flops)
        job: dict[str, Any] = self.described["job"]
        memory = Memory(
            peak_bytes=max(stage.peak_bytes for stage in stages),
            stages=stages,
            risk=0.0,
            reserved_bytes=max(measurement[1] for measurement in everyone),
        )
        world = len(everyone)
        peak = inf  # unknown
        if self.machine is not None and "precision" in job:
            peak = self.machine.count_peak_flops(job["precision"]["compute"], ranks=world)
        available = (seconds or 1.0) * peak
        return Step(
            kind="measured",
            world=world,
            memory=memory,
            work=work,
            **self.described,
            traffic=average_traffic(ranks[numbers[0]]),
            time=Time(
                step_seconds=seconds,
                compute_seconds=max(0.0, seconds - update - wait),
                optimizer_seconds=update,
                data_seconds=wait,
            ),
            tokens_per_second_per_gpu=self.tokens / seconds / world if seconds else 0.0,
            mfu=work.compute_mfu(available),
            hfu=work.hardware_flops / available,
        )


def watch(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | tuple[torch.optim.Optimizer, ...],
    *,
    tokens: int = 0,
    mesh: DeviceMesh | None = None,
    stage: int = 0,
    predicted: Step | None = None,
    machine: Machine | None = None,
    layout_name: str = "",
    fake: bool = False,
) -> Watched:
    """Watch a loop that trains ``model`` with ``optimizer`` (or several optimizers, of which the last ends a step).

    ``tokens``: tokens of a step, over all ranks. ``mesh``: the mesh whose dimensions name the axes of messages.
    ``stage``: the stage of this rank in a pipeline. ``predicted``: the step to compare with. ``layout_name``: a
    name for the layout. ``fake``: the loop runs on fake tensors and ranks; then ``measured`` has the figures of rank 0
    and there is no ``step``.
    """
    optimizers = optimizer if isinstance(optimizer, tuple) else (optimizer,)
    if not optimizers:
        raise UserError("watch(model, optimizer): the tuple of optimizers is empty; give at least one")
    for item in optimizers:
        if not isinstance(item, torch.optim.Optimizer):
            raise UserError(f"watch(model, optimizer): {type(item).__name__} is not a torch.optim.Optimizer")
    if not isinstance(model, nn.Module):
        raise UserError(f"watch(model, optimizer): {type(model).__name__} is not a torch.nn.Module")
    if not isinstance(tokens, int) or tokens < 0:
        raise UserError(f"tokens={tokens} must be 0 or more")
    if stage < 0:
        raise UserError(f"stage={stage} must be 0 or more")
    world = dist.get_world_size() if dist.is_initialized() else 1
    if predicted is not None:
        if predicted.world != world:
            raise UserError(
                f"the prediction is for {predicted.world} ranks, but {world} call watch(); predict the layout that runs"
            )
        described = {name: getattr(predicted, name) for name in ("model", "machine", "layout", "job", "stack")}
    else:
        name = type(model.module if isinstance(model, DistributedDataParallel) else model).__name__
        where = machine.name if machine else "this computer"
        layout = layout_name or f"dp{world}"
        described = {"model": name, "machine": where, "layout": layout, "job": {}, "stack": "own loop"}
    return Watched(
        model,
        optimizers,
        mesh=mesh,
        stage=stage,
        tokens=tokens,
        described=described,
        machine=machine,
        predicted=predicted,
        fake=fake,
    )


def _name_axes(mesh: DeviceMesh | None) -> dict[str, str]:
    """Return the axis of each group of a mesh, by the group's name."""
    if mesh is None:
        return {}
    axis_by_group: dict[str, str] = {}
    for name in mesh.mesh_dim_names or ():
        words = [word for word in name.lower().split("_") if word]
        axis = next((axis for axis in AXES if axis in words), None)
        axis = axis or next((ALIASES[word] for word in words if word in ALIASES), name)
        axis_by_group[mesh.get_group(name).group_name] = axis
    return axis_by_group


def _to_local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _iterate_unique(tensors: Iterator[Tensor]) -> Iterator[Tensor]:
    seen_storages: set[int] = set()
    for tensor in tensors:
        key = tensor.untyped_storage()._cdata
        if key not in seen_storages:
            seen_storages.add(key)
            yield tensor


def _count_bytes(tensors: Any) -> int:
    """Return the bytes of the storages of tensors, each counted once."""
    return sum(unique.untyped_storage().nbytes() for unique in _iterate_unique(_to_local(tensor) for tensor in tensors))


def _list_shards(model: nn.Module) -> Iterator[Tensor]:
    """Yield this rank's shards of the weights that DeepSpeed's ZeRO-3 has emptied."""
    for parameter in model.parameters():
        shard = getattr(parameter, "ds_tensor", None)
        if isinstance(shard, Tensor):
            yield shard


def _list_scales(model: nn.Module) -> Iterator[Tensor]:
    """Yield the scales and codebooks of weights in 4 bits, which bitsandbytes keeps outside of parameters and buffers.

    Source: bitsandbytes@0.50.2:bitsandbytes/functional.py, QuantState, of ``Linear4bit.quant_state``.
    """
    for module in model.modules():
        state = getattr(module, "quant_state", None)
        for part in (state, getattr(state, "state2", None)):
            tensors = (getattr(part, name, None) for name in ("absmax", "code", "offset"))
            yield from (tensor for tensor in tensors if isinstance(tensor, Tensor))


def _count_bucket_bytes(model: nn.Module) -> int:
    """Return the bytes of DistributedDataParallel's buckets; 0 if gradients are views of them, which are counted."""
    if not isinstance(model, DistributedDataParallel) or model.gradient_as_bucket_view:
        return 0
    ddp_facts = _get_ddp_facts(model)
    sizes = str(ddp_facts.get("rebuilt_bucket_sizes") or ddp_facts.get("bucket_sizes") or "")
    return sum(int(size) for size in sizes.replace(" ", "").split(",") if size)


def _get_ddp_facts(model: nn.Module) -> dict[str, Any]:
    """Return the current logging data of DistributedDataParallel."""
    ddp: Any = model
    ddp.logger.set_runtime_stats_and_log()
    return dict(ddp._get_ddp_logging_data())
