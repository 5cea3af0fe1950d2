"""How fast we are, as ratios: contenders take turns, one step each per round, and every round gives a ratio.

    ratio = seconds of the other / seconds of ours in the same round; said are the median and the extremes

So whatever else the machine does falls on all alike. Warm-up and compilation are left out. Where others keep the
cores busy, threads wait for one another and only ``--shared`` says anything: one thread each, seconds of its CPU.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory

import contenders
import torch
import torch.distributed as dist
from rich.console import Console
from torch._C._distributed_c10d import FileStore

from fivefold.job import Job, LearningRate, recipe
from fivefold.layout.spec import Layout
from fivefold.machine import catalog as machines
from fivefold.model import catalog as models
from fivefold.model.spec import Model
from fivefold.plan.predict import predict
from fivefold.show.grid import Grid
from fivefold.train.prepare import prepare
from fivefold.train.process import Process

TINY = Model(name="tiny", layers=6, width=256, heads=8, kv_heads=4, head_dim=32, ffn=768, vocab=512)
WIDE = Model(name="wide", layers=4, width=512, heads=8, kv_heads=4, head_dim=64, ffn=1408, vocab=4096)
TARGETS = {"plain torch": 0.97, "transformers": 1.0}

Clock = Callable[[], float]
Clocked = Callable[[], float]  # one step → its seconds


@dataclass(frozen=True)
class Result:
    """Ours against another: ``ratio`` times as fast, the median of the rounds."""

    setting: str
    tokens_per_second: float  # ours
    other: str
    ratio: float
    lowest: float
    highest: float
    rounds: int


def race(setting: str, racers: Mapping[str, Clocked], *, tokens: int, seconds: float) -> list[Result]:
    """Rounds for about ``seconds``, at least three; each begins with the racer that was second before."""
    names, taken = list(racers), {name: list[float]() for name in racers}
    for name in [*names, *names]:
        racers[name]()  # warm up
    begin = time.perf_counter()
    while len(taken["ours"]) < 3 or time.perf_counter() - begin < seconds:
        for name in names:
            taken[name].append(racers[name]())
        names.append(names.pop(0))
    own = taken.pop("ours")
    rate = tokens / statistics.median(own)
    found = []
    for other, theirs in taken.items():
        ratios = [a / b for a, b in zip(theirs, own, strict=True)]
        found.append(Result(setting, rate, other, statistics.median(ratios), min(ratios), max(ratios), len(ratios)))
    return found


def clocked(step: contenders.Step, clock: Clock) -> float:
    """Seconds of one step."""
    begin = clock()
    step()
    return clock() - begin


def job_of(*, precision: str, compiled: bool) -> Job:
    """A step of about a second on two cores."""
    return Job(
        sequence=512, global_batch=4, precision=recipe(precision), compile=compiled,
        learning_rate=LearningRate(kind="constant", peak=1e-4),
    )  # fmt: skip


def against_others(
    model: Model, *, precision: str, compiled: bool, data: Path, seconds: float, clock: Clock
) -> list[Result]:
    """Our loop against plain PyTorch and transformers, one process each."""
    torch.compiler.reset()
    job = job_of(precision=precision, compiled=compiled)
    steps: dict[str, contenders.Step] = {
        "ours": contenders.ours(model, job, data=data, layout=Layout(mbs=job.global_batch)),
        "plain torch": contenders.plain(model, job, data=data),
        "transformers": contenders.transformers(model, job, data=data),
    }
    racers: dict[str, Clocked] = {name: partial(clocked, step, clock) for name, step in steps.items()}
    setting = f"{model.name} {precision}{' compiled' if compiled else ''}"
    return race(setting, racers, tokens=job.tokens_per_step, seconds=seconds)


def zero_against_one(*, data: Path, seconds: float) -> list[Result]:
    """ZeRO-2 on two processes of half the cores each against one process with all of them, same global batch."""
    job = job_of(precision="fp32", compiled=False)
    one = contenders.ours(TINY, job, data=data, layout=Layout(mbs=job.global_batch))
    with _ranks(2, job, data) as two:
        racers: dict[str, Clocked] = {"ours": two, "one process": partial(clocked, one, time.perf_counter)}
        return race("tiny fp32 2 ranks", racers, tokens=job.tokens_per_step, seconds=seconds)


@contextmanager
def _ranks(count: int, job: Job, data: Path) -> Iterator[Clocked]:
    """Processes that wait for a word, take a step together, and answer with its seconds."""
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(count)]
    workers = [
        context.Process(target=_rank, args=(rank, count, job, data, there), daemon=True)
        for rank, (_, there) in enumerate(pipes)
    ]
    for worker in workers:
        worker.start()

    def step() -> float:
        for here, _ in pipes:
            here.send(True)
        return max(float(here.recv()) for here, _ in pipes)

    yield step
    for here, _ in pipes:
        here.send(False)
    for worker in workers:
        worker.join(timeout=60)


def _rank(rank: int, count: int, job: Job, data: Path, orders: Connection) -> None:
    torch.set_num_threads(max(1, torch.get_num_threads() // count))
    dist.init_process_group("gloo", store=FileStore(str(data / "store"), count), rank=rank, world_size=count)
    layout = Layout(dp=count, zero=2, mbs=job.global_batch // count)
    step = contenders.ours(TINY, job, data=data, layout=layout)
    while orders.recv():
        orders.send(clocked(step, time.perf_counter))
    dist.destroy_process_group()


def predictions_per_second(*, seconds: float) -> float:
    """Different questions about llama3-8b on h100:8, so that caches do not answer: all ZeRO stages, many sequences."""
    model, machine = models.named("llama3-8b"), machines.resolve("h100:8", local=Path())
    layouts = [Layout(dp=8, zero=zero, mbs=mbs) for zero, mbs in product((3, 2, 1, 0), (1, 2, 4))]
    begin, number = time.perf_counter(), 0
    while time.perf_counter() - begin < seconds:
        job = Job(sequence=1024 + 8 * number, global_batch=64)
        predict(model=model, machine=machine, layout=layouts[number % len(layouts)], job=job)
        number += 1
    return number / (time.perf_counter() - begin)


def measure(*, seconds: float, shared: bool, say: Callable[[str], None]) -> tuple[list[Result], float]:
    """All races of about ``seconds`` each, and predictions per second."""
    Process().start()
    if shared:
        torch.set_num_threads(1)
    clock = time.process_time if shared else time.perf_counter
    results = []
    with TemporaryDirectory() as folder:
        text, data = Path(folder, "text.txt"), Path(folder, "data")
        text.write_text("".join(f"line {n}: all work and no play, {n * n % 9973} times\n" for n in range(20_000)))
        prepare(str(text), directory=data, holdout=0)
        for compiled, model, precision in product((False, True), (TINY, WIDE), ("fp32", "bf16")):
            say(f"{model.name} {precision}{' compiled' if compiled else ''} …")
            results += against_others(
                model, precision=precision, compiled=compiled, data=data, seconds=seconds, clock=clock
            )
        if not shared:
            say("two processes …")
            results += zero_against_one(data=data, seconds=seconds)
    say("predictions …")
    rate = predictions_per_second(seconds=3)
    Process.end()
    return results, rate


def table(results: list[Result]) -> Grid:
    """One row per race and other."""
    headings = ("ours", "tokens/s", "against", "ratio", "from", "to", "rounds", "target")
    rows = tuple(
        (r.setting, f"{r.tokens_per_second:,.0f}", r.other, f"{r.ratio:.3f}", f"{r.lowest:.3f}", f"{r.highest:.3f}",
         str(r.rounds), _judged(r))
        for r in results
    )  # fmt: skip
    return Grid(headings, rows, words=("ours", "against"))


def _judged(result: Result) -> str:
    target = TARGETS.get(result.other)
    if target is None:
        return ""
    return f"{'✓' if result.ratio >= target else '✗'} {target:.2f}"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=22, help="of every race (there are nine)")
    parser.add_argument("--shared", action="store_true", help="one thread, CPU seconds, no two processes")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    log = Console(stderr=True)
    results, predictions = measure(seconds=options.seconds, shared=options.shared, say=log.print)
    if options.json:
        print(json.dumps({"races": [asdict(result) for result in results], "predictions_per_second": predictions}))
        return
    console = Console()
    console.print(table(results))
    console.print(f"predict: {predictions:,.0f} calls per second on one core (llama3-8b, h100:8, dp8)")


if __name__ == "__main__":
    main()
