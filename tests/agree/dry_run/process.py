"""One process of a gloo world that writes what it does to a tape, with the recorder of the dry run.

    operation of torch → recorder → real tensors            message → recorder → a copy of it ⇢ gloo

Two steps are recorded, a third is metered.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._distributed_c10d import Work
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map_only

from fivefold.dry_run.fake.collectives import Handle, make_result
from fivefold.dry_run.fake.world import index_groups
from fivefold.dry_run.rank_tapes import CATEGORIES, SKIPPED_FILES, RankTapes, record_steps
from fivefold.dry_run.record.recorder import READ_SCALAR, TapeRecorder
from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.model.experts import MoE
from fivefold.model.spec import Model
from fivefold.trainer.build import build
from fivefold.trainer.engine import Engine
from fivefold.trainer.measure.meter import Meter, list_tensors
from fivefold.trainer.model import routing
from tests.agree.said import Said

c10d = torch.ops.c10d


class Told(NamedTuple):
    """What one process saw: the tapes of its first two steps, and what the meter counted in the third."""

    tapes: RankTapes
    said: Said
    flops: int
    peak: int
    host_peak: int


def train_rank(model: Model, layout: Layout, job: Job) -> Told:
    """Build and run three steps, in which experts are chosen in turn."""
    routing.choose_experts = route_in_turn(routing.choose_experts)
    recorder = Sender(
        rank=torch.distributed.get_rank(), categories=CATEGORIES, skipped_files=(*SKIPPED_FILES, __file__)
    )
    with recorder:
        recorder.silent = True
        built = build(model=model, layout=layout, job=job, device=torch.device("cpu"), streams=False)
        recorder.groups = index_groups(built.ranks)
        first, steady = record_steps(built, recorder, model=model, layout=layout, job=job)
    engine = Engine(built, model=model, layout=layout, job=job)
    engine.hold_reference()
    tokens = torch.randint(model.vocab, (layout.micro_batches(job), layout.mbs, job.row_tokens()))
    named_tensors = [tokens, engine.loads, engine.keys, *built.module.buffers(), *built.module.tables]
    on_host = built.host_tensors()
    named_tensors += [*built.weights(), *([] if on_host else built.moments())]
    meter = Meter(named_tensors, axis=built.ranks.axis, on_host=on_host)
    with Sending(), meter:
        engine.step(tokens)
    said = {(line.axis, line.collective): (line.calls, line.bytes) for line in meter.traffic}
    return Told(
        RankTapes(recorder.rank, first, steady, built.parameters),
        said,
        meter.flops,
        meter.peak_bytes,
        meter.host_peak_bytes,
    )


class Sender(TapeRecorder):
    """The recorder, but messages are sent and numbers are asked of tensors."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args) if func is READ_SCALAR else super().__torch_dispatch__(func, types, args, kwargs)

    def _record_message(self, func: Any, args: Any) -> Any:
        out = super()._record_message(func, args)
        handle: Any = self._work_handles[-1][0]  # type: ignore[index]
        noted, arrive = handle._on_wait, send(func, args)

        def wait() -> None:
            noted()
            arrive()

        handle._on_wait = wait
        return out


class Sending(TorchDispatchMode):
    """Below a meter: messages are sent as the recorder sends them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept: list[object] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "c10d":
            return func(*args, **(kwargs or {}))
        handle = Handle(send(func, args))
        boxed: torch.ScriptObject = handle.boxed()
        self._kept.append((handle, boxed))
        return make_result(func, args, boxed)


_THREAD = ThreadPoolExecutor(1)


def send(func: Any, args: Any) -> Callable[[], None]:
    """Start a collective; what is returned waits for it.

    Gloo's threads free late what they were given, and what was set up in the thread that gave it: modes, the
    hooks of a recomputation. So they get copies, from a thread that has nothing. What gloo makes is not seen.
    """
    copies = tree_map_only(Tensor, torch.clone, args)
    out = _THREAD.submit(func, *copies).result()
    work: Any = Work.unbox(out[-1] if isinstance(out, tuple) else out)
    filled = [] if func is c10d.send.default else [*zip(list_tensors(args[0]), list_tensors(copies[0]), strict=True)]

    def arrive() -> None:
        with _disable_current_modes():
            work.wait()
            for tensor, copy in filled:
                tensor.data.copy_(copy)

    return arrive


def route_in_turn(choose: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Which chooses, and then takes experts in turn instead: each of them as often as any other."""

    def choose_evenly(scores: Tensor, bias: Tensor | None, *, moe: MoE) -> Tensor:
        chosen = choose(scores, bias, moe=moe)
        with _disable_current_modes():
            chosen.copy_(torch.arange(chosen.numel()).remainder_(moe.experts).view_as(chosen))
        return chosen

    return choose_evenly
