"""300 steps of the demo model in bf16: do layouts differ from one process by more than seeds do?

    python -m tests.agree.parity.seeds --out docs/explanation/measurements/003-seeds

Writes OUT.csv (run, step, loss) and OUT.png. Finished runs are kept in FOLDER. All runs read the same text in the same
order; a seed draws the weights. On two cores expect an hour or more.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.model.catalog import build_model
from fivefold.rendering.charts import save
from fivefold.rendering.progress import show_progress
from fivefold.trainer.build import build
from fivefold.trainer.data.loader import Loader
from fivefold.trainer.data.prepare import prepare
from fivefold.trainer.data.shards import Shards
from fivefold.trainer.engine import Engine
from fivefold.trainer.optimizers import optimizer
from fivefold.trainer.run import Run as RunFile
from tests.processes import run_forked

STEPS, LAST, SMOOTH = 300, 50, 10  # steps; those whose mean is compared; and over which curves are drawn
LAYOUTS = (
    "dp2 zero3 mbs2",
    "tp2 mbs2 ac=selective",
    "cp2 mbs2",
    "pp2 zb2p mbs1",
    "dp2 tp2 zero1 mbs2 ac=full",
    "cp2 pp2 interleaved v2 zero2 mbs1 cp=ulysses",
)
SEEDS = (1, 2, 3)


class Run(NamedTuple):
    """One curve: a layout and the seed of its weights."""

    layout_text: str
    seed: int

    def __str__(self) -> str:
        return f"one process, seed {self.seed}" if self.layout_text == "dp1 mbs2" else self.layout_text


RUNS = (*(Run("dp1 mbs2", seed) for seed in SEEDS), *(Run(text, SEEDS[0]) for text in LAYOUTS))
Curves = dict[str, list[float]]


def main() -> int:
    """Run what is not yet done, then write the table and the chart."""
    parser = argparse.ArgumentParser(description="layouts against seeds")
    parser.add_argument("--out", type=Path, default=Path("docs/explanation/measurements/003-seeds"))
    parser.add_argument("--folder", type=Path, default=Path("runs/seeds"))
    parser.add_argument("--demo", type=Path, default=Path("examples/demo.toml"))
    options = parser.parse_args()
    demo = RunFile.load(options.demo)
    prepare(
        demo.data.corpus, tokenizer=demo.data.tokenizer, directory=options.folder / "data", holdout=demo.data.heldout
    )
    curves: Curves = {}
    with show_progress("seeds") as report:
        for number, run in enumerate(RUNS):
            report(str(run), number, len(RUNS))
            kept = options.folder / f"{run.layout_text} seed{run.seed}.txt".replace(" ", "-")
            if not kept.exists():
                layout = Layout.parse(run.layout_text)
                losses = run_forked(
                    layout.world, losses_of, demo, layout, run.seed, options.folder / "data", seconds=7200
                )[0]
                kept.write_text("\n".join(map(repr, losses)))
            curves[str(run)] = [float(line) for line in kept.read_text().split()]
    _write(curves, options.out.with_suffix(".csv"))
    save(chart(curves), options.out.with_suffix(".png"))
    between, within = measure_spreads(curves)
    print(f"mean loss of the last {LAST} steps: layouts within {between:.4f} of one process, seeds within {within:.4f}")
    return 0 if between <= within else 1


def losses_of(demo: RunFile, layout: Layout, seed: int, data: Path) -> list[float]:
    """What one rank logs."""
    job: Job = demo.job.replace(seed=seed, steps=STEPS)
    built = build(model=build_model(demo.model), layout=layout, job=job, device=torch.device("cpu"))
    engine = Engine(built, model=build_model(demo.model), layout=layout, job=job)
    loader = Loader(Shards.open(data), sequence=job.sequence, seed=SEEDS[0])
    losses = []
    for step in range(STEPS):
        rate = optimizer.compute_learning_rate(job.learning_rate, step=step, steps=job.steps)
        for group in built.optimizer.param_groups:
            group["lr"] = rate
        rows = loader.batch(
            step * job.global_batch,
            global_batch=job.global_batch,
            rank=built.ranks["dp"].rank,
            ranks=layout.dp,
            micro_batches=layout.micro_batches(job),
            mbs=layout.mbs,
        )
        losses.append(engine.step(torch.from_numpy(rows)).loss)
        engine.zero_grad()
    return losses


def measure_spreads(curves: Curves) -> tuple[float, float]:
    """Largest distance in mean loss over the last steps: of a layout from one process, and of two seeds."""
    ends = {name: statistics.fmean(losses[-LAST:]) for name, losses in curves.items()}
    seeds = [ends[str(run)] for run in RUNS[: len(SEEDS)]]
    layouts = [ends[str(run)] for run in RUNS[len(SEEDS) :]]
    return max(abs(end - seeds[0]) for end in layouts), max(seeds) - min(seeds)


def _write(curves: Curves, path: Path) -> None:
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(("run", "step", "loss"))
        table.writerows(
            (name, step + 1, f"{loss:.6f}") for name, losses in curves.items() for step, loss in enumerate(losses)
        )


def _smooth(losses: Sequence[float]) -> list[tuple[int, float]]:
    return [(step, statistics.fmean(losses[step - SMOOTH : step])) for step in range(SMOOTH, len(losses) + 1, SMOOTH)]


def chart(curves: Curves) -> Any:
    """Distance of each curve from one process of the same seed, seeds in grey."""
    import altair as alt

    one = _smooth(curves[str(RUNS[0])])
    values = [
        {"run": name, "step": step, "distance": loss - base, "kind": "seed" if name.startswith("one") else "layout"}
        for name, losses in curves.items()
        for (step, loss), (_, base) in zip(_smooth(losses), one, strict=True)
        if name != str(RUNS[0])
    ]
    between, within = measure_spreads(curves)
    finding = f"Six layouts stay within {between:.4f} nats of one process; its seeds differ by {within:.4f}"
    names = list(dict.fromkeys(value["run"] for value in values))
    colours = ["#bbbbbb", "#888888", "#4c78a8", "#f58518", "#54a24b", "#e45756", "#72b7b2", "#b279a2"]
    return (
        alt.Chart(alt.Data(values=values))
        .mark_line(strokeWidth=2)
        .encode(
            x=alt.X("step:Q", title="optimizer step", axis=alt.Axis(grid=False)),
            y=alt.Y("distance:Q", title=f"loss less that of one process, nats per token, mean of {SMOOTH} steps"),
            color=alt.Color(
                "run:N", title=None, scale=alt.Scale(domain=names, range=colours), legend=alt.Legend(labelLimit=400)
            ),
            strokeDash=alt.StrokeDash("kind:N", title=None),
        )
        .properties(width=640, height=320, title=finding, padding=16, background="white")
    )


if __name__ == "__main__":
    sys.exit(main())
