"""Every schedule run with tensors over 1, 2 and 4 processes: losses and gradients of one, messages, memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from fivefold.errors import UserError
from fivefold.job import Job, get_recipe
from fivefold.layout.schedule import schedule
from fivefold.layout.schedule.action import Action
from fivefold.layout.schedule.csv_file import read_table
from fivefold.layout.schedule.table import Table
from fivefold.layout.spec import Layout
from fivefold.model.spec import Model
from fivefold.planner.counts.counts import Counts
from fivefold.planner.counts.traffic import list_messages
from fivefold.trainer.measure.meter import Meter
from fivefold.trainer.model.linear import Linear, WgradStore
from fivefold.trainer.parallel.mesh import create_ranks
from fivefold.trainer.parallel.pipeline import Pipeline
from tests.selection import mark_share

ROWS, D = 6, 16
STREAM = ROWS * D * 4


class Case(NamedTuple):
    """A table, and the layers of each of its stages."""

    table: Table
    layers: tuple[int, ...]


class CaseResult(NamedTuple):
    """What one rank saw."""

    loss: float
    gradients: dict[str, Tensor]
    forwards: Counter[tuple[int, int]]  # by layer and micro-batch
    collected: list[tuple[str, int]]  # action during which a weight's gradient came, and the layer
    sent: tuple[int, int]  # messages, bytes
    heldout: float


class Layer(nn.Module):
    """x + tanh(Wx + b), or without the residual where autograd keeps the output itself."""

    def __init__(self, index: int, *, wgrad_store: WgradStore) -> None:
        super().__init__()
        self.index = index
        self.linear = Linear(D, D, bias=True)
        self.linear.wgrad_store = wgrad_store
        self.scale = nn.Parameter(torch.ones(D))  # an ordinary weight, whose gradient autograd brings
        generator = torch.Generator().manual_seed(index)
        for weight in (self.linear.weight, self.linear.bias):
            assert weight is not None
            nn.init.normal_(weight, std=0.3, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x * self.scale))
        return x + y if self.index % 3 else y


def sample(micro_batch: int) -> tuple[Tensor, Tensor]:
    """Input and target rows."""
    return torch.randn(2, ROWS, D, generator=torch.Generator().manual_seed(100 + micro_batch)).unbind()


def run_alone(layers: int, micro_batches: int) -> tuple[float, dict[str, Tensor]]:
    """One process, one graph over all layers."""
    module = nn.ModuleList(Layer(index, wgrad_store=WgradStore()) for index in range(layers))
    total = 0.0
    for i in range(micro_batches):
        x, target = sample(i)
        for layer in module:
            x = layer(x)
        loss = (x * target).mean()
        loss.backward()
        total += loss.item()
    return total, {name: weight.grad for name, weight in module.named_parameters() if weight.grad is not None}


def pipes(pp: int) -> Any:
    return create_ranks(Layout.parse(f"pp{pp}"), kv_heads=1, device=torch.device("cpu"))


class Stages:
    """This rank's stages of a case, and what happens in them."""

    def __init__(self, case: Case, *, among: Any, kind: type[Pipeline] = Pipeline) -> None:
        self.now, self.actions = Action("F", -1, -1), []
        self.forwards: Counter[tuple[int, int]] = Counter()
        self.collected: list[tuple[str, int]] = []
        wgrad_store = WgradStore()
        first = [sum(case.layers[:stage]) for stage in range(len(case.layers))]
        self.layers = {
            stage: [Layer(first[stage] + n, wgrad_store=wgrad_store) for n in range(case.layers[stage])]
            for stage in case.table.rank_stages[among["pp"].rank]
        }
        for layer in self.all_layers:
            layer.linear.weight.collect = self._collector(layer)  # type: ignore[assignment]
        self.last = case.table.stages - 1
        self.pipeline = kind(
            case.table,
            ranks=among,
            wgrad_store=wgrad_store,
            shape=(ROWS, D),
            dtype=torch.float32,
            stages={stage: lambda entry, i, stage=stage: self.run(stage, entry, i) for stage in self.layers},
        )
        self.pipeline.on_action = self._note

    @property
    def all_layers(self) -> list[Layer]:
        return [layer for layers in self.layers.values() for layer in layers]

    def _note(self, action: Action) -> None:
        self.now = action

    def _collector(self, layer: Layer) -> Callable[[Tensor], None]:
        def collect(gradient: Tensor) -> None:
            self.collected.append((self.now.kind, layer.index))
            weight = layer.linear.weight
            weight.grad = gradient if weight.grad is None else weight.grad + gradient

        return collect

    def run(self, stage: int, entry: Tensor | None, i: int) -> Tensor:
        x, target = sample(i)
        x = x if entry is None else entry
        for layer in self.layers[stage]:
            self.forwards[layer.index, i] += 1
            x = layer(x)
        return (x * target).mean() if stage == self.last else x

    def gradients(self) -> dict[str, Tensor]:
        return {
            f"{layer.index}.{name}": weight.grad
            for layer in self.all_layers
            for name, weight in layer.named_parameters()
            if weight.grad is not None
        }


def run_all(cases: list[Case], kind: type[Pipeline] = Pipeline) -> list[CaseResult]:
    """In a child: every case in turn over the same process groups, each step under the meter."""
    among, results = pipes(cases[0].table.pp), []
    for case in cases:
        mine = Stages(case, among=among, kind=kind)
        with Meter([], axis=among.axis) as meter:
            loss = mine.pipeline.step()
        forwards = mine.forwards.copy()
        heldout = mine.pipeline.evaluate(case.table.micro_batches + 3)
        sent = sum(row.calls for row in meter.traffic), sum(row.bytes for row in meter.traffic)
        assert all((row.axis, row.collective) == ("pp", "p2p") for row in meter.traffic)
        results.append(CaseResult(loss.item(), mine.gradients(), forwards, mine.collected, sent, heldout.item()))
    return results


NAMES = [
    ("gpipe", 1),
    ("1f1b", 1),
    ("interleaved", 2),
    ("interleaved", 3),
    ("zb1p", 1),
    ("zb2p", 1),
    ("zbv", 2),
    ("dualpipe", 1),
    ("dualpipev", 2),
]


def generate_cases(pp: int) -> list[Case]:
    """Each schedule with micro-batches that pp divides, that it does not, and fewer than pp, where it takes them."""
    cases = []
    for name, v in NAMES:
        counts = (2 * pp, 2 * pp + 2) if name == "dualpipe" else (2 * pp, 2 * pp + 1)
        for m in counts if name.startswith("dualpipe") else (pp - 1, *counts):
            table = schedule(name, pp=pp, v=v, micro_batches=m)  # type: ignore[arg-type]
            uneven = tuple(1 + (stage * 7 + m) % 3 for stage in range(table.stages))
            cases.append(Case(table, uneven))
    return cases


def assert_alike(case: Case, rank_results: tuple[CaseResult, ...]) -> None:
    """The sum over ranks is what one process finds; DualPipe's two copies of a layer add up."""
    loss, gradients = run_alone(sum(case.layers), case.table.micro_batches)
    assert sum(one.loss for one in rank_results) == pytest.approx(loss, rel=1e-5)
    result: dict[str, Tensor] = {}
    for one in rank_results:
        for name, gradient in one.gradients.items():
            result[name] = result[name] + gradient if name in result else gradient
    assert set(result) == set(gradients)
    for name, gradient in gradients.items():
        assert (result[name] - gradient).norm() <= 1e-5 * gradient.norm(), name


def count_planned(case: Case) -> tuple[int, int]:
    """The planner's messages and bytes over all ranks."""
    table = case.table
    both = table.name == "dualpipe"
    v = 1 if both else table.stages // table.pp
    name = "" if table.name == "1f1b" else table.name
    layout = Layout.parse(f"pp{table.pp} v{v} {name} mbs2")
    model = Model(name="m", layers=table.stages, width=D, heads=1, kv_heads=1, head_dim=D, ffn=D, vocab=32)
    job = Job(sequence=ROWS // 2, global_batch=2 * table.micro_batches, precision=get_recipe("fp32"))
    sends = [
        message
        for message in list_messages(Counts(model, job), layout, chunks=tuple(range(table.stages)))
        if (message.axis, message.collective) == ("pp", "p2p")
    ]
    times = 1 + both
    return times * sum(send.times for send in sends), times * sum(send.times * send.payload for send in sends)


@pytest.mark.parametrize("pp", mark_share(3, [2, 1, 4]))
def test_every_schedule_trains_as_one_process(forked: Callable[..., Any], pp: int) -> None:
    cases = generate_cases(pp) if pp > 1 else [Case(schedule("1f1b", pp=1, v=1, micro_batches=3), (4,))]
    for case, *rank_results in zip(cases, *forked(pp, run_all, cases), strict=True):
        table = case.table
        assert_alike(case, tuple(rank_results))
        assert sum(one.heldout for one in rank_results) == pytest.approx(
            run_alone(sum(case.layers), table.micro_batches + 3)[0]
        )
        layers, every = range(sum(case.layers)), range(table.micro_batches)
        forwards = sum((one.forwards for one in rank_results), Counter())
        assert forwards == Counter((layer, i) for layer in layers for i in every), table.name
        sent = [sum(item) for item in zip(*(one.sent for one in rank_results), strict=True)]
        assert tuple(sent) == count_planned(case), table.name
        assert sent[1] == sent[0] * STREAM


def test_weights_gradients_come_in_w_where_the_table_splits_and_at_once_elsewhere(forked: Callable[..., Any]) -> None:
    cases = [case for case in generate_cases(2) if case.table.name in ("1f1b", "zb1p", "zb2p", "zbv", "dualpipev")]
    for case, *rank_results in zip(cases, *forked(2, run_all, cases), strict=True):
        for row, one in zip(case.table.rows, rank_results, strict=True):
            first = [sum(case.layers[:stage]) for stage in range(case.table.stages)]
            expected = [
                (kind, layer)
                for kind, *forward, stage, i in [(a.kind, a.stage, a.micro_batch, a.backward_stage, 0) for a in row]
                for at in [stage if kind == "FB" else forward[0]]
                if kind in ("W", "BW", "FB")
                for layer in reversed(range(first[at], first[at] + case.layers[at]))
            ]
            assert one.collected == expected, case.table.name


# ---- tables of one's own

OTHER_ORDER = "F0.0,F0.1,F0.2,BW0.0,BW0.1,BW0.2\nF1.2,F1.0,B1.2,F1.1,B1.1,BW1.0,W1.1,W1.2\n"
CROSSING = (
    "F0.0,F0.1,F0.2,F1.3,BW1.3,F1.4,BW1.4,F1.5,BW1.5,BW0.0,BW0.1,BW0.2\n"
    "F0.3,F0.4,F0.5,F1.0,BW1.0,F1.1,BW1.1,F1.2,BW1.2,BW0.3,BW0.4,BW0.5\n"
)


def from_text(text: str, folder: Path) -> Table:
    path = folder / "mine.csv"
    path.write_text(text)
    return read_table(path)


@pytest.mark.parametrize("text", [OTHER_ORDER, CROSSING], ids=["taken in another order", "all send first"])
def test_a_schedule_from_csv_trains_as_one_process(forked: Callable[..., Any], tmp_path: Path, text: str) -> None:
    """Also where both ranks send before either receives: no rank waits for its own sends."""
    case = Case(from_text(text, tmp_path), (2, 3))
    assert_alike(case, tuple(one for (one,) in forked(2, run_all, [case])))


def test_a_deadlock_is_a_one_line_error() -> None:
    rows = schedule("1f1b", pp=2, v=1, micro_batches=2)
    stuck = Table.from_rows(
        "stuck",
        (
            rows.rows[0][:1] + rows.rows[0][2:3] + rows.rows[0][1:2] + rows.rows[0][3:],
            rows.rows[1][2:] + rows.rows[1][:2],
        ),
        rows.paths,
    )
    with pytest.raises(UserError, match="deadlock: rank 0 at") as caught:
        Pipeline(stuck, ranks={}, wgrad_store=WgradStore(), stages={}, shape=(ROWS, D), dtype=torch.float32)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def refusals() -> list[str]:
    """In a child of one rank."""
    among, results = pipes(1), []
    for table, stages in [
        (schedule("1f1b", pp=2, v=1, micro_batches=2), {0: lambda entry, i: entry}),
        (schedule("interleaved", pp=1, v=2, micro_batches=2), {1: lambda entry, i: entry}),
        (schedule("interleaved", pp=1, v=2, micro_batches=2), dict.fromkeys((0, 1), lambda entry, i: torch.ones(2, 3))),
    ]:
        with pytest.raises(ValueError, match=r"ranks|rows|stages") as caught:
            Pipeline(
                table, ranks=among, wgrad_store=WgradStore(), stages=stages, shape=(ROWS, D), dtype=torch.float32
            ).step()
        results.append(str(caught.value))
    return results


def test_invalid_pipeline_is_an_error(forked: Callable[..., Any]) -> None:
    assert forked(1, refusals) == [
        [
            "schedule 1f1b is for 2 pipeline ranks, but pp=1",
            "rank 0 runs stages (0, 1), but has (1,)",
            "F0.0 returned a tensor of (2, 3) torch.float32, but stages exchange (6, 16) torch.float32",
        ]
    ]


# ---- memory


def measure_live_bytes(case: Case) -> list[int]:
    """In a child: bytes alive before each action of this rank, less those before the first."""
    among = pipes(case.table.pp)
    mine, results = Stages(case, among=among), []
    mine.pipeline.step()  # from now on gradients live
    living = [tensor for layer in mine.all_layers for weight in layer.parameters() for tensor in (weight, weight.grad)]
    with Meter([tensor for tensor in living if tensor is not None], axis=among.axis) as meter:
        del living
        mine.pipeline.on_action = lambda _: results.append(meter.live_bytes)
        mine.pipeline.step()
        results.append(meter.live_bytes)
    return [now - results[0] for now in results]


def test_a_stage_output_is_freed_once_it_is_sent(forked: Callable[..., Any]) -> None:
    """GPipe on rank 0 keeps what its three layers keep of every micro-batch, and of the outputs the latest alone."""
    m = 9
    case = Case(schedule("gpipe", pp=2, v=1, micro_batches=m), (3, 3))
    first, _ = forked(2, measure_live_bytes, case)
    kept = 9 * STREAM + 4  # sample and target, of each layer two products, once the sum in between; the end's scalar
    assert first[1 : m - 1] == [n * kept + STREAM for n in range(1, m - 1)]
    assert first[m - 1] == (m - 1) * kept + 2 * STREAM  # the first gradient's buffer is there
    assert first[-1] == first[0]


def test_a_pipeline_of_one_rank_has_the_memory_of_a_plain_loop(forked: Callable[..., Any]) -> None:
    table = schedule("1f1b", pp=1, v=1, micro_batches=3)
    assert forked(1, peaks, table) == [[0]]


def peaks(table: Table) -> list[int]:
    """In a child: by how much the pipeline's peak exceeds that of a plain loop."""
    mine = Stages(Case(table, (4,)), among=pipes(1))
    total = torch.zeros(())

    def run_plain() -> None:
        for i in range(table.micro_batches):
            loss = mine.run(0, None, i)
            total.add_(loss.detach())
            loss.backward()

    results = []
    for step in (run_plain, mine.pipeline.step):
        step()
        with Meter([], axis=lambda _: "") as meter:
            step()
        results.append(meter.peak_bytes)
    return [results[1] - results[0]]
