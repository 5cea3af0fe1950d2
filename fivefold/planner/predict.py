"""The planner on one page: count the work, price it on a machine, simulate it in time. The result is a predicted step.

count      planner/counts          integers: bytes, FLOPs, messages; independent of a machine
price      planner/time            seconds of each operation and message on the machine
simulate   planner/time/timeline   seconds of a step, from the schedule and its actions
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import chain
from typing import NamedTuple

from fivefold.job import Job, Recipe
from fivefold.layout import remarks
from fivefold.layout.mesh import group
from fivefold.layout.spec import Layout, list_divisors
from fivefold.layout.validity import is_legal, refuse
from fivefold.layout.validity.stack import list_unwritten
from fivefold.layout.where import Where
from fivefold.machine.perturbation import with_kernels
from fivefold.machine.spec import Machine
from fivefold.model.mixers.kinds import MixerName
from fivefold.model.spec import Model
from fivefold.planner.counts.counts import Counts, get_group_degrees
from fivefold.planner.counts.flops import work
from fivefold.planner.counts.memory.allocator import AllocatorTotals, estimate_allocator_totals
from fivefold.planner.counts.memory.host import count_host_bytes
from fivefold.planner.counts.memory.liveness import count_kept_bytes
from fivefold.planner.counts.memory.peak import RankMemory, count_rank_memory
from fivefold.planner.counts.operations.launches import LAUNCHES_PER_GROUP
from fivefold.planner.counts.operations.local_shapes import get_local_degrees
from fivefold.planner.counts.traffic import sum_traffic
from fivefold.planner.time.constants import PUBLISHED, Constants
from fivefold.planner.time.errors import estimate_run_interval, run_class
from fivefold.planner.time.memory_risk import MemoryRisk
from fivefold.planner.time.ratio_errors import RunFacts, describe_run
from fivefold.planner.time.timeline import StepTime, step_seconds
from fivefold.planner.time.units import Units
from fivefold.planner.time_breakdown import break_down_seconds
from fivefold.stack.catalog import build_stack
from fivefold.stack.spec import FUSED_SCANS
from fivefold.step import FITS_RISK, TIGHT_RISK, Memory, Operation, StageMemory, Step, Time, build_step
from fivefold.units import show_bytes, show_risk, show_seconds

FUSED_DISPATCHER_GENERATIONS = ("ampere", "hopper", "blackwell")  # that DeepEP runs on
MIN_DISPATCHER_GAIN = 0.01  # share of a step by which the fused dispatcher is shorter, to be named
FUSED_SCAN_STACKS = ("megatron-core", "torchtitan", "deepspeed")  # of which the first that runs a layout is compared
MIN_FUSED_SCAN_GAIN = 0.1  # share of a step by which fused scans are shorter, to be named


class Estimate(NamedTuple):
    """A layout's memory on every pipeline rank, and its step time: what a search compares."""

    layout: Layout
    ranks: list[RankMemory]
    step_time: StepTime

    @property
    def peak_bytes(self) -> int:
        """Return the peak bytes per rank."""
        return find_max_peak_bytes(self.ranks)


def find_max_peak_bytes(ranks: list[RankMemory]) -> int:
    """Return the peak bytes of the fullest of ``ranks``."""
    return max(rank.peak_bytes for rank in ranks)


class Planner:
    """Predicts steps of one model, machine and job for any layout; counts and prices are cached between layouts."""

    def __init__(
        self,
        *,
        model: Model,
        machine: Machine,
        job: Job,
        counts: Counts | None = None,
        straggler: float = 1.0,
        risk: float = FITS_RISK,
        constants: Constants = PUBLISHED,
    ) -> None:
        """Initialize the planner of a model and a job on a machine.

        ``counts``: counts of a planner for the same model and job on a machine of the same backend, to reuse.
        ``straggler``: factor by which the kernels of one rank are slower; all others wait for it. ``risk``: the
        probability of running out of memory up to which a layout ``fits``. ``constants``: the constants of the time
        model.
        """
        job = job.replace(stack=job.stack.with_device_kernels(gpu=machine.has_gpus))
        if not machine.has_gpus:  # attention kernels with a single head dim; within one host, no overlap
            attention = "blocks" if job.stack.attention == "flash" else job.stack.attention
            overlap = job.stack.overlap if machine.can_overlap else ()
            job = job.replace(overlap=overlap, attention=attention, fp8_attention=False)
        self.model, self.machine, self.job = model, machine, job
        self.counts = counts or Counts(model, job)
        self.units = Units(self.counts, machine, constants)
        self.straggler: Units | None = None
        if straggler != 1:
            self.straggler = Units(self.counts, with_kernels(machine, speed=1 / straggler), constants)
        self.risk, self.memory_risk = risk, MemoryRisk(model=model, machine=machine, job=job)

    def describe(self, layout: Layout) -> RunFacts:
        """Return the facts of a run under ``layout``, by which its time is compared with that of another."""
        return describe_run(self.model, self.machine, layout, self.job)

    def memory(self, layout: Layout) -> list[RankMemory]:
        """Return the memory of every pipeline rank.

        Raises ``UserError`` if the layout is not legal for model and job.
        """
        refuse(layout, model=self.model, job=self.job)
        return count_rank_memory(self.counts, layout)

    def peak_bytes(self, layout: Layout) -> int:
        """Return the peak bytes per rank, without estimating time."""
        return find_max_peak_bytes(self.memory(layout))

    def allocator_totals(self, layout: Layout, ranks: list[RankMemory]) -> AllocatorTotals | None:
        """Return the bytes that PyTorch reserves and the bytes that the driver reports; None on a CPU."""
        return estimate_allocator_totals(self.counts, self.machine, layout, ranks) if self.machine.has_gpus else None

    def out_of_memory_risk(self, layout: Layout, ranks: list[RankMemory] | None = None) -> float:
        """Return the probability that the layout runs out of memory; ``ranks``: its memory, if known already."""
        ranks = self.memory(layout) if ranks is None else ranks
        totals = self.allocator_totals(layout, ranks)
        return self.memory_risk.probability(layout, peak_bytes=find_max_peak_bytes(ranks), totals=totals)

    def fits(self, layout: Layout, ranks: list[RankMemory] | None = None) -> bool:
        """Return whether the layout runs out of memory with a probability of at most ``risk``."""
        return self.out_of_memory_risk(layout, ranks) <= self.risk

    def excess_bytes(self, layout: Layout, ranks: list[RankMemory] | None = None) -> int:
        """Return by how much the peak exceeds the largest with which the layout would fit; 0 if it fits."""
        ranks = self.memory(layout) if ranks is None else ranks
        if self.fits(layout, ranks):
            return 0
        peak = find_max_peak_bytes(ranks)
        totals = self.allocator_totals(layout, ranks)
        return max(1, peak - self.memory_risk.find_peak_limit(layout, peak_bytes=peak, totals=totals, risk=self.risk))

    def count_spare_bytes(self, layout: Layout) -> int:
        """Return by how much the peak may grow until the layout no longer fits; negative if it does not fit."""
        ranks = self.memory(layout)
        peak, totals = find_max_peak_bytes(ranks), self.allocator_totals(layout, ranks)
        return self.memory_risk.find_peak_limit(layout, peak_bytes=peak, totals=totals, risk=self.risk) - peak

    def describe_miss(self, layout: Layout, ranks: list[RankMemory] | None = None) -> str:
        """Return why the layout does not fit, as a predicate; "" if it fits.

        It names the risk of a tight layout. Of others it names the bytes by which the predicted peak exceeds the
        capacity, or those by which the peak does so together with the allocator's fragments and the driver.
        """
        ranks = self.memory(layout) if ranks is None else ranks
        risk = self.out_of_memory_risk(layout, ranks)
        if risk <= self.risk:
            return ""
        peak = find_max_peak_bytes(ranks)
        totals = self.allocator_totals(layout, ranks)
        excess = self.memory_risk.excess_bytes(layout, peak_bytes=peak, totals=totals)
        if risk > TIGHT_RISK and peak > self.machine.chip.memory_bytes:
            return f"exceeds the memory by {show_bytes(peak - self.machine.chip.memory_bytes)}"
        if risk > TIGHT_RISK and excess:
            return f"exceeds the memory by {show_bytes(excess)} with the driver"
        verdict = "is tight" if risk <= TIGHT_RISK else "does not fit"
        shown, limit = show_risk(risk), show_risk(self.risk)
        above = "just over " if shown == limit else ""
        return f"{verdict}: {above}{shown} risk of running out of memory (limit {limit})"

    def estimate(self, layout: Layout, *, ranks: list[RankMemory] | None = None) -> Estimate:
        """Estimate memory and step time.

        Raises ``UserError`` if the layout is not legal. ``ranks``: the result of ``count_rank_memory`` for this layout,
        to reuse.
        """
        if ranks is None:
            refuse(layout, model=self.model, job=self.job, machine=self.machine)
            ranks = count_rank_memory(self.counts, layout)
        return Estimate(layout, ranks, step_seconds(self.units, layout, ranks, straggler=self.straggler))

    def step(self, layout: Layout) -> Step:
        """Return the full prediction as a ``Step``, the record that dry runs and measurements also return."""
        ranks, step_time = self.estimate(layout)[1:]
        model, machine, job = self.model, self.machine, self.job
        stages = tuple(_build_stage(index, rank) for index, rank in enumerate(ranks))
        peak = max(stage.peak_bytes for stage in stages)
        of = run_class(model=model, machine=machine, layout=layout, job=job)
        device = self.allocator_totals(layout, ranks)
        estimate_range = partial(estimate_run_interval, of=of, machine=machine, ranks=layout.world)
        seconds = estimate_range(step_time.seconds, "time")
        return build_step(
            "predicted",
            model=model,
            machine=machine,
            layout=layout,
            job=job,
            memory=Memory(
                peak_bytes=peak,
                reserved_bytes=device.reserved_bytes if device else None,
                driver_bytes=device.driver_bytes if device else None,
                capacity_bytes=machine.chip.memory_bytes,
                risk=self.memory_risk.probability(layout, peak_bytes=peak, totals=device),
                host_bytes=count_host_bytes(self.counts, layout, machine) if layout.list_offloaded(job) else None,
                interval=estimate_range(peak, "allocated"),
                reserved_interval=estimate_range(device.reserved_bytes, "reserved") if device else None,
                driver_interval=estimate_range(device.driver_bytes, "driver") if device else None,
                stages=stages,
            ),
            work=work(model, layout=layout, job=job),
            traffic=sum_traffic(self.counts, layout),
            time=Time(
                step_seconds=step_time.seconds,
                compute_seconds=step_time.compute,
                bubble_seconds=step_time.bubble,
                exposed_seconds=step_time.exposed,
                optimizer_seconds=step_time.optimizer,
                host_seconds=step_time.host,
                error=seconds.error if seconds else None,
                interval=seconds,
                parts=break_down_seconds(self.units, layout, step_time),
                longest_part=step_time.longest_part,
            ),
            operations=tuple(self._list_operations(layout)),
            remarks=remarks.list_remarks(model, machine, job, layout),
        )

    def list_remarks(
        self,
        layout: Layout | None,
        *,
        is_searched: bool = False,
        recipes: Iterable[Recipe] = (),
        where: Where | None = None,
    ) -> tuple[str, ...]:
        """Return all remarks on the step of a layout, or on a search: those of its records, and those that it predicts.

        ``layout``: None for a search that found none. ``is_searched`` and ``recipes``: as in ``layout/remarks.py``.
        ``where``: constraints of the search that chose the layout.
        """
        lines = remarks.list_remarks(
            self.model, self.machine, self.job, layout, is_searched=is_searched, recipes=recipes
        )
        if layout is None:
            return lines
        usual = Job()  # a default needs no remark
        chosen = {
            "optimizer": self.job.optimizer.kind != usual.optimizer.kind,
            "precision": self.job.precision.name != usual.precision.name,
        }
        fields = [field for field, is_chosen in chosen.items() if is_chosen and not is_searched]  # a search writes it
        unwritten = list_unwritten(self.model, self.job, fields)
        predicted = (self._describe_dispatcher(layout, where=where), self._describe_fused_scans(layout))
        return (*lines, *unwritten, *chain.from_iterable(predicted))

    def _describe_dispatcher(self, layout: Layout, *, where: Where | None = None) -> Iterator[str]:
        """Yield a line on the time that a fused dispatcher saves, if ep spans nodes and the software has one.

        ``where``: constraints of the search that chose the layout; a larger ep that they allow is compared too.
        """
        machine, job, moe = self.machine, self.job, self.model.moe
        has_other = job.stack.runs.fused_dispatcher and job.stack.dispatcher != "fused"
        if moe is None or not has_other or machine.chip.generation not in FUSED_DISPATCHER_GENERATIONS:
            return
        larger = list[Layout]()
        if where is not None:
            degrees = list_divisors(layout.ep * layout.expert_replicas)
            larger = [layout.replace(ep=ep) for ep in degrees if ep > layout.ep and where.is_allowed("ep", ep)]
        fused = Planner(model=self.model, machine=machine, job=job.replace(dispatcher="fused"), risk=self.risk)
        seconds = {
            other: fused.estimate(other).step_time.seconds
            for other in (layout, *larger)
            if other.ep > 1
            and self.units.network.nodes(group(other, "ep")) > 1
            and is_legal(other, model=self.model, job=job, machine=machine)
            and (other == layout or fused.fits(other))
        }
        before = self.estimate(layout).step_time.seconds
        best = min(seconds, key=lambda other: seconds[other], default=layout)
        if seconds.get(best, before) < before * (1 - MIN_DISPATCHER_GAIN):
            faster = "a step" if best == layout else repr(str(best))
            yield (
                "messages of experts on several nodes are those of the all-to-all dispatcher: with the fused one of "
                f"{job.stack.name} (DeepEP, HybridEP; --set dispatcher=fused) {faster} is predicted to take "
                f"{show_seconds(seconds[best])} instead of {show_seconds(before)}"
            )

    def _describe_fused_scans(self, layout: Layout) -> Iterator[str]:
        """Yield a line on the time that fused scans save, if the scans of PyTorch operations take long."""
        launches_scan = self.job.stack.launches_scan
        mixers = [
            name for name in dict.fromkeys(self.model.mixers) if name in LAUNCHES_PER_GROUP and launches_scan(name)
        ]
        if not mixers or not self.units.prices(layout).launches_scans:
            return
        before = self.estimate(layout).step_time.seconds
        for what, job in self._list_jobs_with_fused_scans(mixers):
            if not is_legal(layout, model=self.model, job=job, machine=self.machine):
                continue
            fused = Planner(model=self.model, machine=self.machine, job=job, risk=self.risk)
            after = fused.estimate(layout).step_time.seconds
            if after < before * (1 - MIN_FUSED_SCAN_GAIN):
                yield (
                    f"{self.job.stack.name} computes {', '.join(mixers)} with PyTorch's operations in fp32; with "
                    f"{what} a step of this layout is predicted to take {show_seconds(after)} instead of "
                    f"{show_seconds(before)}"
                )
            return

    def _list_jobs_with_fused_scans(self, mixers: Sequence[MixerName]) -> Iterator[tuple[str, Job]]:
        """Yield a description and the job with fused scans of ``mixers``: in the trainer, then in other software."""
        if set(mixers) <= set(FUSED_SCANS):
            yield "the kernels of flash-linear-attention (--set fused_scans=true)", self.job.replace(fused_scans=True)
        for name in FUSED_SCAN_STACKS:
            yield f"{name}, which has fused scans (--stack {name}),", self.job.replace(stack=build_stack(name))

    def _list_operations(self, layout: Layout) -> Iterator[Operation]:
        """Yield every operation of every distinct unit, with the number of such units in the model."""
        part, prices = get_local_degrees(layout), self.units.prices(layout)
        for run, times in self.counts.tally_units(layout).items():
            local = self.counts.get_local(part)
            unit = self.counts.unit(get_group_degrees(part, run), run.name)
            kept = count_kept_bytes(unit, sizes={"x": local.entry_bytes})
            for op, size in zip(unit.ops, kept, strict=True):
                time = prices.operation(op)
                yield Operation(
                    name=op.name,
                    times=times,
                    flops=op.flops,
                    causal_flops=op.causal_flops,
                    moved_bytes=op.moved_bytes,
                    kept_bytes=size,
                    forward_seconds=time.forward,
                    backward_seconds=time.backward + time.weight,
                )


def predict(*, model: Model, machine: Machine, layout: Layout, job: Job, using: Planner | None = None) -> Step:
    """Predict the step that ``train`` would measure. A ``UserError`` if the layout is not legal.

    ``using``: a planner of this model, machine and job.
    """
    planner = using or get_planner(model, machine, job)
    return planner.step(layout).replace(remarks=planner.list_remarks(layout))


@lru_cache(maxsize=16)
def get_planner(model: Model, machine: Machine, job: Job, risk: float = FITS_RISK) -> Planner:
    """Return the planner of a model, machine, job and risk. It is cached for the next layout."""
    return Planner(model=model, machine=machine, job=job, risk=risk)


def _build_stage(index: int, rank: RankMemory) -> StageMemory:
    """Return the memory of a stage as a record; temporary bytes are the rest of its peak."""
    rest = rank.peak_bytes - rank.parameters_bytes - rank.gradients_bytes - rank.optimizer_bytes
    return StageMemory(
        stage=index,
        parameters_bytes=rank.parameters_bytes,
        gradients_bytes=rank.gradients_bytes,
        optimizer_bytes=rank.optimizer_bytes,
        activations_bytes=rank.activations_bytes,
        temporary_bytes=max(0, rest - rank.activations_bytes),
        peak_bytes=rank.peak_bytes,
        peak_cause=rank.peak_cause,
    )
