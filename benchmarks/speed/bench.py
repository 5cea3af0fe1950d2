"""Measure speed as ratios: contenders run one step each per round, and every round gives a ratio.

    ratio = seconds of the other / seconds of ours in the same round; the median and the extremes are printed

Other load on the machine thus slows all contenders equally. Before a race all must compute the same loss. Warm-up and
compilation are excluded. If other processes keep the cores busy, use ``--shared``: one thread each, and CPU seconds
instead of wall-clock time, summed over parallel processes. CPU seconds leave out the time that a process waits.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path

import contenders
import torch
from crew import Race, Taken, crew, time_step
from rich.console import Console
from torch import Tensor

from fivefold.job import Job, LearningRate, get_recipe
from fivefold.layout.spec import Layout
from fivefold.machine import catalog as machines
from fivefold.model import catalog as models
from fivefold.model.spec import Model
from fivefold.planner.predict import predict
from fivefold.rendering.grid import Grid
from fivefold.trainer.process import Process

TINY = Model(name="tiny", layers=6, width=256, heads=8, kv_heads=4, head_dim=32, ffn=768, vocab=512)
WIDE = Model(name="wide", layers=4, width=512, heads=8, kv_heads=4, head_dim=64, ffn=1408, vocab=4096)
DEEP = Model(name="deep", layers=8, width=256, heads=8, kv_heads=4, head_dim=32, ffn=768, vocab=512)
BATCH = ("tp2 mbs4", "cp2 mbs4")
PIPES = ("pp2", "pp2 interleaved v2", "pp2 zb1p", "pp2 zbv", "pp2 dualpipev")
FOUR = ("tp4 mbs4", "cp4 mbs4", "pp4", "pp4 interleaved v2", "pp4 zbv")
PARALLEL = ((DEEP, (*BATCH, *PIPES)), (WIDE, (*BATCH, "pp2")), (DEEP, FOUR))  # dimensions that PyTorch has too
TARGETS = {"plain torch": 0.97, "transformers": 1.0, "litgpt": 1.0, "native": 1.0}

Racer = Callable[[Tensor], Taken]


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


@dataclass(frozen=True)
class Bench:
    """The settings of a benchmark: ``seconds`` per race, ``shared`` for CPU time, ``only`` to filter by name."""

    seconds: float
    shared: bool
    only: str
    say: Callable[[str], None]

    def is_selected(self, setting: str) -> bool:
        """Return whether to run a setting, and print its name."""
        if self.only not in setting:
            return False
        self.say(f"{setting} …")
        return True

    def race(self, setting: str, racers: Mapping[str, Racer], *, job: Job, vocab: int, error: float) -> list[Result]:
        """Run rounds for about ``seconds``, at least three. Each begins with the racer that was second before."""
        names, taken = list(racers), {name: list[float]() for name in racers}
        chance = torch.Generator().manual_seed(job.seed)
        tokens = torch.randint(vocab, (job.global_batch, job.sequence + 1), generator=chance)
        losses = {name: racers[name](tokens).loss for name in names}
        if max(losses.values()) - min(losses.values()) > error:
            raise SystemExit(f"{setting}: not the same work: " + ", ".join(f"{n} {x:.6f}" for n, x in losses.items()))
        for name in names:
            racers[name](tokens)  # warm
        begin = time.perf_counter()
        while len(taken["ours"]) < 3 or time.perf_counter() - begin < self.seconds:
            for name in names:
                outcome = racers[name](tokens)
                taken[name].append(outcome.cpu if self.shared else outcome.wall)
            names.append(names.pop(0))
        own = taken.pop("ours")
        rate = job.tokens_per_step / statistics.median(own)
        results = []
        for other, theirs in taken.items():
            ratios = [a / b for a, b in zip(theirs, own, strict=True)]
            middle = statistics.median(ratios)
            results.append(Result(setting, rate, other, middle, min(ratios), max(ratios), len(ratios)))
            self.say(f"  {middle:.3f} ({min(ratios):.3f} to {max(ratios):.3f}) against {other}")
        return results


def job_of(*, precision: str = "fp32", compiled: bool = False, pipeline: bool = False) -> Job:
    """Return a step of about a second on two cores."""
    return Job(
        sequence=256 if pipeline else 512,
        global_batch=8 if pipeline else 4,
        precision=get_recipe(precision),
        compile=compiled,
        learning_rate=LearningRate(kind="constant", peak=1e-4),
    )


def compare_one_process(bench: Bench) -> list[Result]:
    """Compare our step with plain PyTorch, transformers and litgpt."""
    results = []
    for compiled, model, precision in product((False, True), (TINY, WIDE), ("fp32", "bf16")):
        setting = f"{model.name} {precision}{' compiled' if compiled else ''}"
        if not bench.is_selected(setting):
            continue
        torch.compiler.reset()
        job = job_of(precision=precision, compiled=compiled)
        steps: dict[str, contenders.Step] = {
            "ours": contenders.build_fivefold_step(model, job, layout=Layout(mbs=job.global_batch)),
            "plain torch": contenders.build_torch_step(model, job),
            "transformers": contenders.transformers(model, job),
            "litgpt": contenders.litgpt(model, job),
        }
        racers = {name: partial(time_step, step) for name, step in steps.items()}
        # litgpt leaves the loss in bf16, to three digits
        error = 1e-4 if precision == "fp32" else 5e-2
        results += bench.race(setting, racers, job=job, vocab=model.vocab, error=error)
    return results


def parallel(bench: Bench) -> list[Result]:
    """Compare our tensor, context and pipeline parallel forward and backward with PyTorch's, one process per rank."""
    results = []
    for model, text in ((model, text) for model, texts in PARALLEL for text in texts):
        setting = f"{model.name} fp32 {text}"
        if not bench.is_selected(setting):
            continue
        layout = Layout.parse(text)
        job = job_of(pipeline=layout.pp > 1)
        with crew(Race(model, job, layout)) as racers:
            results += bench.race(setting, racers, job=job, vocab=model.vocab, error=1e-4)
    return results


def zero_against_one(bench: Bench) -> list[Result]:
    """Compare ZeRO-2 on two processes of one thread each with one process of two, at the same global batch."""
    setting, job = "tiny fp32 dp2 zero2", job_of()
    if torch.get_num_threads() != 2 or not bench.is_selected(setting):
        return []
    one = contenders.build_fivefold_step(TINY, job, layout=Layout(mbs=job.global_batch))
    with crew(Race(TINY, job, Layout(dp=2, zero=2, mbs=job.global_batch // 2)), against=False) as racers:
        racers = {**racers, "one process": partial(time_step, one)}
        return bench.race(setting, racers, job=job, vocab=TINY.vocab, error=1e-4)


def predictions_per_second(*, seconds: float) -> float:
    """Return the predictions per second of different questions about llama3-8b on h100:8.

    They differ in ZeRO stage and sequence, so that no cache answers.
    """
    model = models.build_model("llama3-8b")
    machine = machines.resolve("h100:8", local=Path())
    layouts = [Layout(dp=8, zero=zero, mbs=mbs) for zero, mbs in product((3, 2, 1, 0), (1, 2, 4))]
    begin, number = time.perf_counter(), 0
    while time.perf_counter() - begin < seconds:
        job = Job(sequence=1024 + 8 * number, global_batch=64)
        predict(model=model, machine=machine, layout=layouts[number % len(layouts)], job=job)
        number += 1
    return number / (time.perf_counter() - begin)


def table(results: list[Result]) -> Grid:
    """Return one row per race and contender."""
    headings = ("ours", "tokens/s", "against", "ratio", "from", "to", "rounds", "target")
    rows = tuple(
        (
            r.setting,
            f"{r.tokens_per_second:,.0f}",
            r.other,
            f"{r.ratio:.3f}",
            f"{r.lowest:.3f}",
            f"{r.highest:.3f}",
            str(r.rounds),
            _format_verdict(r),
        )
        for r in results
    )
    return Grid(headings, rows, words=("ours", "against"))


def _format_verdict(result: Result) -> str:
    target = TARGETS.get(result.other)
    if target is None:
        return ""
    return f"{'✓' if result.ratio >= target else '✗'} {target:.2f}"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=12, help="of every race")
    parser.add_argument("--shared", action="store_true", help="one thread each, CPU seconds")
    parser.add_argument("--only", default="", metavar="TEXT", help="races whose name contains it: tp2, compiled, …")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    log = Console(stderr=True)
    Process().start()
    if options.shared:
        torch.set_num_threads(1)
    bench = Bench(options.seconds, options.shared, options.only, log.print)
    results = [*compare_one_process(bench), *zero_against_one(bench), *parallel(bench)]
    predictions = predictions_per_second(seconds=3)
    Process.end()
    if options.json:
        print(json.dumps({"races": [asdict(result) for result in results], "predictions_per_second": predictions}))
        return
    console = Console()
    console.print(table(results))
    console.print(f"predict: {predictions:,.0f} calls per second on one core (llama3-8b, h100:8, dp8)")


if __name__ == "__main__":
    main()
