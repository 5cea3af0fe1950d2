"""The small training runs whose units ``calibrate`` measures within a step (without torch).

They vary what the time of a unit depends on: width, tokens, head size, dense layers and experts, precision,
recomputation, and how ranks share the work. Every model has few layers, and every step few micro-batches, because a
unit counts the same in each. Runs are in order of importance: the budget may end before the last.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from fivefold.errors import UserError
from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.layout.validity import refuse
from fivefold.machine.spec import Machine
from fivefold.model.experts import MoE
from fivefold.model.spec import Model
from fivefold.planner.predict import Estimate, get_planner
from fivefold.units import Dtype

VOCABULARY = 512
MICRO_BATCHES = 3  # of a step, if it has no pipeline
MEMORY_SHARE = 0.8  # a run that would use more of a rank's memory is left out


class GridRun(NamedTuple):
    """A run of the grid."""

    model: Model
    layout: Layout
    job: Job


class GridShape(NamedTuple):
    """The shape of a small model, and of its micro-batches: ``sequences`` of ``tokens``."""

    width: int
    heads: int
    head_dim: int
    kv_heads: int
    ffn: int
    tokens: int
    sequences: int
    experts: int = 0
    expert_ffn: int = 0
    layers: int = 2

    def model(self) -> Model:
        """Return the model."""
        fields: dict[str, Any] = {name: getattr(self, name) for name in ("width", "heads", "head_dim", "kv_heads")}
        if self.experts:
            fields["moe"] = MoE(experts=self.experts, topk=2, ffn=self.expert_ffn, balance="free")
        return Model(name="grid", layers=self.layers, ffn=self.ffn, vocab=VOCABULARY, **fields)

    def job(self, layout: Layout, dtype: Dtype) -> Job:
        """Return a job of a few micro-batches: the first of a step takes longer, as memory is mapped again."""
        micro_batches = max(MICRO_BATCHES, 2 * layout.pp if layout.pp > 1 else 1)
        return Job(
            sequence=self.tokens, global_batch=micro_batches * self.sequences * layout.dp, precision=dtype, steps=1
        )


SMALL = GridShape(128, 4, 32, 4, 512, tokens=128, sequences=1)
MIDDLE = GridShape(256, 4, 64, 2, 1024, tokens=256, sequences=2)
LONG_SEQUENCE = GridShape(128, 4, 32, 2, 384, tokens=512, sequences=2, layers=4)  # more weights to update
WIDE = GridShape(512, 8, 64, 8, 1536, tokens=128, sequences=1)
LARGE = GridShape(512, 8, 64, 4, 1536, tokens=512, sequences=1)
EXPERTS = GridShape(128, 4, 32, 4, 512, tokens=128, sequences=2, experts=8, expert_ffn=128)
WIDE_EXPERTS = GridShape(256, 4, 64, 4, 1024, tokens=256, sequences=2, experts=4, expert_ffn=512)

# Layouts of one rank and of {n} ranks.
ONE_PROCESS_RUNS = (
    (SMALL, "dp1"), (EXPERTS, "dp1"), (MIDDLE, "dp1"), (LONG_SEQUENCE, "dp1"), (WIDE, "dp1"), (WIDE_EXPERTS, "dp1"),
    (MIDDLE, "dp1 ac=full"), (LARGE, "dp1"), (EXPERTS, "dp1 ac=selective"), (LONG_SEQUENCE, "dp1 ac=full"),
)  # fmt: skip
ALL_PROCESS_RUNS = (
    (SMALL, "dp{n} zero1"), (EXPERTS, "dp{n} zero1 ep{n}"), (MIDDLE, "tp{n}"), (MIDDLE, "dp{n} zero3"),
    (LONG_SEQUENCE, "cp{n}"), (WIDE, "dp{n} zero3"), (MIDDLE, "dp{n} zero0"), (WIDE_EXPERTS, "dp{n} zero2"),
    (SMALL, "pp{n}"), (LONG_SEQUENCE, "pp{n}"),
    (WIDE, "tp{n} nosp"), (MIDDLE, "cp{n} cp=ulysses"), (LARGE, "dp{n} zero1"), (EXPERTS, "pp{n}"),
)  # fmt: skip
QUICK_RUNS = 4  # of each list, with ``--quick``

# On a GPU, kernels of these shapes take longer than their launches.
GPU_SHAPES = {
    SMALL: GridShape(2048, 16, 128, 16, 8192, tokens=2048, sequences=1),
    MIDDLE: GridShape(4096, 32, 128, 8, 14336, tokens=4096, sequences=1),
    LONG_SEQUENCE: GridShape(2048, 16, 128, 4, 8192, tokens=16384, sequences=1),
    WIDE: GridShape(8192, 64, 128, 8, 28672, tokens=2048, sequences=1),
    LARGE: GridShape(4096, 32, 128, 8, 14336, tokens=8192, sequences=2),
    EXPERTS: GridShape(2048, 16, 128, 16, 8192, tokens=4096, sequences=1, experts=16, expert_ffn=1024),
    WIDE_EXPERTS: GridShape(4096, 32, 128, 8, 14336, tokens=4096, sequences=1, experts=8, expert_ffn=4096),
}


def list_grid_runs(ranks: int, *, gpu: bool, quick: bool) -> list[GridRun]:
    """Return the runs to time on ``ranks`` processes, most important first.

    ``gpu``: larger shapes, only in bf16. ``quick``: only the first.
    """
    dtypes: tuple[Dtype, ...] = ("bf16",) if gpu else ("fp32", "bf16")
    listed = ONE_PROCESS_RUNS if ranks == 1 else ALL_PROCESS_RUNS
    return [
        run
        for shape, layout in (listed[:QUICK_RUNS] if quick else listed)
        for dtype in dtypes
        for run in _list_legal_runs(GPU_SHAPES[shape] if gpu else shape, layout.format(n=ranks), dtype, ranks=ranks)
    ]


def _list_legal_runs(shape: GridShape, words: str, dtype: Dtype, *, ranks: int) -> Iterator[GridRun]:
    """Yield the run, if its shape can be sharded so."""
    pipelined = words.startswith("pp")
    model = shape._replace(layers=max(shape.layers, 2 * ranks if pipelined else 0)).model()
    try:
        layout = Layout.parse(f"{words} mbs{shape.sequences}")
        job = shape.job(layout, dtype)
        refuse(layout, model=model, job=job)
    except UserError:
        return
    yield GridRun(model, layout, job)


def select_fitting_runs(runs: Sequence[GridRun], machine: Machine) -> list[tuple[int, GridRun, Estimate]]:
    """Return the runs that use at most ``MEMORY_SHARE`` of a rank's memory, with their numbers and estimates."""
    estimates = (
        (number, run, get_planner(run.model, machine, run.job).estimate(run.layout)) for number, run in enumerate(runs)
    )
    most_bytes = MEMORY_SHARE * machine.chip.memory_bytes
    return [(number, run, estimate) for number, run, estimate in estimates if estimate.peak_bytes < most_bytes]
