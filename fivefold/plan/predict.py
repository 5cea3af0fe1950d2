"""The planner on one page: count what must be done, price it, play it in time → a predicted step.

count   plan/count   integers: bytes, FLOPs, messages; never sees a machine
price   plan/price   seconds of each operation and message on the machine
play    timeline     the spans of one rank → step time
"""

from __future__ import annotations

from collections.abc import Iterator

from fivefold.job import Job
from fivefold.layout.spec import Layout, refuse
from fivefold.machine.spec import Machine
from fivefold.model.spec import Model
from fivefold.plan.count.layer import activation_bytes
from fivefold.plan.count.memory import stage_memory
from fivefold.plan.count.tape import kept_bytes
from fivefold.plan.count.traffic import traffic
from fivefold.plan.count.work import work
from fivefold.plan.price.compute import Prices
from fivefold.plan.price.timeline import Unit, play, priced
from fivefold.record import Mistake
from fivefold.step import Memory, Operation, Step, utilisation


def predict(*, model: Model, machine: Machine, layout: Layout, job: Job) -> Step:
    """The step that ``train`` will measure. Refuses in one line what cannot run or cannot be counted yet."""
    check_layout(layout)
    refuse(layout, model=model, job=job, machine=machine)
    stage = stage_memory(model, layout=layout, job=job)
    done = work(model, layout=layout, job=job)
    prices = Prices(machine, ranks=layout.world, dtype=job.precision.compute)
    units = priced(model, prices=prices, layout=layout, job=job)
    time = play(model, units, prices=prices, layout=layout, job=job, memory=stage)
    return Step(
        kind="predicted",
        model=model.name,
        machine=machine.name,
        layout=str(layout),
        job=job.model_dump(mode="json"),
        world=layout.world,
        memory=Memory(peak_bytes=stage.peak_bytes, fits=stage.peak_bytes <= machine.chip.memory_bytes, stages=(stage,)),
        work=done,
        traffic=traffic(model, layout=layout, job=job),
        time=time,
        tokens_per_second_per_gpu=job.tokens_per_step / time.step_seconds / layout.world,
        mfu=utilisation(
            done,
            seconds=time.step_seconds,
            world=layout.world,
            peak_flops=machine.chip.peak(job.precision.compute),
        ),
        operations=tuple(_rows(units, stream_bytes=activation_bytes(model, job, sequences=layout.mbs))),
    )


def _rows(work: list[Unit], *, stream_bytes: int) -> Iterator[Operation]:
    for times, unit in work:
        kept = kept_bytes([op for op, _, _ in unit], sizes={"x": stream_bytes})
        for (op, forward, backward), size in zip(unit, kept, strict=True):
            yield Operation(
                name=op.name,
                times=times,
                flops=op.flops,
                kept_bytes=size,
                forward_seconds=forward,
                backward_seconds=backward,
            )


def check_layout(layout: Layout) -> None:
    """Refuse the axes that are not counted yet."""
    plain = Layout(dp=layout.dp, zero=layout.zero, shard_group=layout.shard_group, mbs=layout.mbs)
    if layout != plain:
        raise Mistake(f"layout {str(layout)!r}: the planner counts dp, zero and mbs so far; try {str(plain)!r}")
