"""What one process of a case does: steps through the trainer, of which it tells all that can be compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.model.spec import Model
from fivefold.step import Traffic
from fivefold.trainer.build import Built, build
from fivefold.trainer.engine import Engine
from fivefold.trainer.measure.meter import ATTENTION_FORWARD, Meter
from tests.agree.parity.cases import END, FEW, METERED, count_targets, rows

Array = NDArray[np.float32]


class Part(NamedTuple):
    """A block of a weight's gradient, and where it starts in the full gradient."""

    name: str
    offsets: tuple[int, ...]
    values: Array


class Told(NamedTuple):
    """What one rank saw. ``forwards`` of blocks and ``cores`` of attention are those of the metered step."""

    losses: list[float]
    norms: list[float]
    gradients: dict[int, list[Part]]  # of the first step and the last
    traffic: tuple[Traffic, ...]
    flops: int
    forwards: int
    cores: int
    biases: dict[str, Array]  # of routers that are balanced without a loss


def train_rank(
    model: Model, layout: Layout, job: Job, sabotage: Callable[[], None] | None = None, steps: int = FEW
) -> Told:
    """One rank; ``sabotage`` breaks something before anything is built."""
    if sabotage is not None:
        sabotage()
    if job.stack.compile:
        _compile_alone()
    built = build(model=model, layout=layout, job=job, device=torch.device("cpu"))
    engine = Engine(built, model=model, layout=layout, job=job, end=END)
    engine.hold_reference()
    counted: Counter[str] = Counter()
    losses, norms, gradients = [], [], {}
    meter = _Watch(built, counted)
    for step in range(steps):
        mine = rows(job, layout, step=step, dp_rank=built.ranks["dp"].rank, ahead=model.mtp_depth)
        with meter if step == METERED else nullcontext():
            done = engine.step(mine, counted=count_targets(job, step=step))
        losses += done.loss, *done.further
        norms.append(done.norm)
        if step in (0, steps - 1):
            gradients[step] = _gradients(built)
        engine.zero_grad()
    routers = [shard.name.removesuffix("router.weight") for shard in built.shards if ".moe.router.w" in shard.name]
    biases = {f"{name}bias": built.module.get_buffer(f"{name}bias").numpy().copy() for name in routers}
    return Told(losses, norms, gradients, meter.traffic, meter.flops, counted["forwards"], counted["cores"], biases)


def _gradients(built: Built) -> list[Part]:
    """Reduced and clipped, as the optimizer has seen them."""
    results = []
    for shard in built.shards:
        for box in shard.boxes():
            gradient = shard.gradient
            assert gradient is not None, shard.name
            results.append(Part(shard.name, box.offsets, gradient[box.rows].float().reshape(box.sizes).numpy().copy()))
    return results


class _Watch(Meter):
    """The meter, which also counts how often blocks and attention run forward."""

    def __init__(self, built: Built, counted: Counter[str]) -> None:
        super().__init__([], axis=built.ranks.axis)
        self._counted, self._inside = counted, False
        for name, module in built.module.named_modules():
            if name.startswith("blocks.") and name.count(".") == 1:
                (module.norm1 or module.norm2 or module.token_mixer).register_forward_pre_hook(self._forward)

    def _forward(self, _module: torch.nn.Module, _inputs: Any) -> None:
        self._counted["forwards"] += self._inside

    def __enter__(self) -> Any:
        self._inside = True
        return super().__enter__()

    def __exit__(self, *error: Any) -> Any:
        self._inside = False
        return super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._counted["cores"] += func in ATTENTION_FORWARD
        return super().__torch_dispatch__(func, types, args, kwargs)


def _compile_alone() -> None:
    """Disable the pool of compiling processes that each process would start."""
    import torch._inductor.config as inductor

    inductor.compile_threads = 1
