"""What FSDP2, tensor parallelism and recomputation cost: against two real processes, formulas, and torch's plans."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel
from typer.testing import CliRunner

import fivefold as ff
from fivefold.cli import app
from fivefold.diagnosis.doctor import Diagnosis, examine
from fivefold.errors import UserError
from tests.profiling.test_watch_loop import BLOCKS, ROWS, WIDTH, adamw, loss, model, run_two_ranks, steps
from tests.selection import mark_share

PLAN = {"*.0": "colwise", "*.2": "rowwise"}


def examine_model(**words: Any) -> Diagnosis:
    return examine(model, loss, make_optimizer=adamw, **words)


@pytest.mark.slow
def test_unchanged_model_is_reported_as_by_the_doctor() -> None:
    seen = examine_model(fsdp=4)
    plain, recomputed, *sharded = seen.costs
    assert plain.peak_bytes == seen.steady.peak_bytes
    assert (plain.parameters_bytes, plain.optimizer_bytes) == (seen.parameters_bytes, seen.optimizer_bytes)
    assert plain.flops == seen.forward_flops + seen.backward_flops
    assert plain.kept_bytes == seen.kept_bytes + 4 * ROWS * WIDTH
    assert recomputed.kept_bytes == 4 * (BLOCKS + 1) * ROWS * WIDTH + 8
    # each block again but for its last product, which nothing of the backward asks for
    assert recomputed.flops == plain.flops + BLOCKS * 2 * ROWS * 4 * WIDTH * WIDTH
    assert [cost.ranks for cost in sharded] == [4, 4, 4]
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("reshard", mark_share(2, [True, False]), ids=["zero-3", "zero-2"])
def test_fsdp2_is_that_of_two_real_processes(tmp_path: Path, reshard: bool) -> None:
    def body() -> dict[str, Any]:
        module = model()
        for block in module.children():
            fully_shard(block, reshard_after_forward=reshard)
        fully_shard(module, reshard_after_forward=reshard)
        optimizer = adamw(module)
        with ff.watch(module, optimizer) as watched:
            steps(module, optimizer, 4)
        return watched.step.model_dump(mode="json")

    cost = examine_model(fsdp=2).costs[2 if reshard else 3]
    # a thread of gloo may keep what it has sent a moment longer, now and then
    for attempt in range(3):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        real = run_two_ranks(folder, body)
        if real["memory"]["stages"][0]["peak_bytes"] <= cost.peak_bytes * 1.005:
            break
    assert [item.model_dump() for item in cost.traffic] == real["traffic"]
    (stage,) = real["memory"]["stages"]
    assert cost.states_bytes == sum(stage[f"{part}_bytes"] for part in ("parameters", "gradients", "optimizer"))
    assert cost.peak_bytes == pytest.approx(stage["peak_bytes"], rel=0.005)
    assert cost.kept_bytes == pytest.approx(stage["activations_bytes"], rel=0.005)


@pytest.mark.slow
def test_a_tensor_parallel_plan_divides_weights_and_sends_all_reduces() -> None:
    """Colwise and rowwise cut the matrices and the first bias; an all-reduce each way of each block."""
    cost = examine_model(tp=4, plan=lambda _: PLAN).costs[-1]
    assert cost.parameters_bytes == 4 * BLOCKS * (2 * WIDTH * WIDTH + 2 * WIDTH)
    assert cost.flops * 4 == examine_model().forward_flops + examine_model().backward_flops
    payload = 4 * ROWS * WIDTH
    # the first block's input needs no gradient
    assert [(item.collective, item.calls) for item in cost.traffic] == [("all_reduce", 2 * BLOCKS - 1)]
    assert cost.traffic[0].bytes == (2 * BLOCKS - 1) * 2 * 3 * payload // 4
    same = examine_model(tp=4, plan=lambda _: PLAN | {"*.0": ColwiseParallel()}).costs[-1]
    assert same == cost


class Tied(nn.Module):
    """Weights that two modules share stay one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(96, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, 96, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x).relu()
        return self.head(x)  # type: ignore[no-any-return]


@pytest.mark.slow
def test_tied_weights_count_once() -> None:
    seen = examine(Tied, lambda m: m(torch.zeros(4, dtype=torch.int64)).sum(), make_optimizer=adamw, fsdp=8)
    weights = 96 * WIDTH + 2 * (WIDTH * WIDTH + WIDTH)
    assert seen.costs[0].parameters_bytes == 4 * weights
    assert seen.costs[2].parameters_bytes == 4 * weights // 8


@pytest.mark.parametrize(
    ("words", "line"),
    mark_share(
        3,
        [
            ({"fsdp": 1}, "--fsdp 1 must be a number of ranks from 2"),
            ({"tp": 2}, "--tp needs a plan"),
            (
                {"tp": 2, "plan": lambda _: {"*.0": "colwide"}},
                "unknown style of a plan 'colwide'; did you mean colwise",
            ),
            ({"tp": 2, "plan": lambda _: {"*.9": "colwise"}}, "unknown module of the plan"),
            ({"fsdp": 2, "step": lambda m, _: loss(m).backward()}, "never calls optimizer"),
            ({"step": lambda *_: None}, "ran no operation"),
        ],
    ),
)
def test_invalid_plans_and_degrees_are_user_errors(words: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError, match=line):
        examine(model, loss, make_optimizer=adamw, **words)
    assert not torch.distributed.is_initialized()


@pytest.mark.slow
def test_doctor_prints_sharded_costs_of_a_module_and_reads_its_snapshot(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "import torch\nfrom torch import nn\n"
        "def model(): return nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 8))\n"
        "def loss(model): return model(torch.ones(4, 8)).sum()\n"
        "def plan(model): return {'0': 'colwise', '1': 'rowwise'}\n"
    )
    words = ["doctor", str(path), "--fsdp", "4", "--tp", "2"]
    page = CliRunner().invoke(app, words, catch_exceptions=False, env={"COLUMNS": "120"}).stdout
    assert "What it would cost" in page
    assert "FSDP2, 4 ranks" in page
    assert "tensor parallel, 2 ranks" in page
    snapshot = tmp_path / "snapshot.pickle"
    block = {"size": 2048, "requested_size": 2048, "state": "active_allocated", "frames": []}
    snapshot.write_bytes(pickle.dumps([{"device": 0, "address": 7, "total_size": 4096, "blocks": [block]}], 4))
    told = CliRunner().invoke(app, ["doctor", str(snapshot)], catch_exceptions=False)
    assert "GPU 0 held 2.00 KiB" in told.stdout
    assert CliRunner().invoke(app, ["doctor", str(snapshot), "--budget", "1KiB"]).exit_code == 3


def test_torch_prints_no_warnings(capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    """A plan that does not divide is one line; torch's own account of it, and its warnings, are not shown."""
    with pytest.raises(UserError, match="RuntimeError"):
        examine_model(tp=3, plan=lambda _: PLAN)
    assert not capfd.readouterr().err
    assert not caplog.records
