"""``watch``: a loop compared with formulas, torch's FLOP counter, the doctor, and what DDP and FSDP2 send."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

import fivefold as ff
from fivefold.cli import app
from fivefold.diagnosis.doctor import examine
from fivefold.errors import UserError
from tests.two_ranks import run_two_ranks

WIDTH, ROWS, BLOCKS = 64, 48, 3
WEIGHTS = BLOCKS * (2 * 4 * WIDTH * WIDTH + 5 * WIDTH)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(BLOCKS))
    )


def loss(module: nn.Module) -> Tensor:
    return module(torch.ones(ROWS, WIDTH)).square().mean()  # type: ignore[no-any-return]


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), fused=True)


def steps(module: nn.Module, optimizer: torch.optim.Optimizer, count: int, micro_batches: int = 1) -> None:
    for _ in range(count):
        for _ in range(micro_batches):
            loss(module).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()


def test_scales_of_weights_in_4_bits_count_as_parameters() -> None:
    """bitsandbytes keeps them in an object of each layer, which is no parameter."""
    module = model()
    optimizer = adamw(module)
    second = SimpleNamespace(absmax=torch.zeros(3), code=torch.zeros(256), offset=None)
    scales = SimpleNamespace(absmax=torch.zeros(9), code=torch.zeros(16), offset=torch.zeros(()), state2=second)
    module[0][0].quant_state = scales
    with ff.watch(module, optimizer, tokens=ROWS) as watched:
        steps(module, optimizer, 4)
    assert watched.step.memory.stages[0].parameters_bytes == 4 * (WEIGHTS + 3 + 256 + 9 + 16 + 1)


@pytest.mark.slow
def test_states_flops_and_peak_of_a_loop() -> None:
    module = model()
    optimizer = adamw(module)
    with ff.watch(module, optimizer, tokens=ROWS) as watched:
        steps(module, optimizer, 6)
    step = watched.step
    (stage,) = step.memory.stages
    assert (step.kind, step.world, step.work.parameters) == ("measured", 1, WEIGHTS)
    assert (stage.parameters_bytes, stage.gradients_bytes) == (4 * WEIGHTS, 4 * WEIGHTS)
    assert stage.optimizer_bytes == 8 * WEIGHTS + 4 * 4 * BLOCKS  # and a count a tensor
    with FlopCounterMode(display=False) as counter:
        loss(module).backward()  # type: ignore[no-untyped-call]
    assert step.work.hardware_flops == counter.get_total_flops()
    examined = examine(model, loss, make_optimizer=adamw)
    assert step.memory.peak_bytes == examined.steady.peak_bytes
    assert stage.activations_bytes == examined.kept_bytes + 4 * ROWS * WIDTH  # with its input
    assert 0 < step.time.optimizer_seconds < step.time.step_seconds
    assert step.tokens_per_second_per_gpu == pytest.approx(ROWS / step.time.step_seconds)
    assert step.hfu == 0  # no machine was named, so no peak is known
    assert step.traffic == ()


def test_waits_for_data_are_measured_and_named() -> None:
    module = model()
    optimizer = adamw(module)
    with ff.watch(module, optimizer) as watched:
        for _ in range(6):
            time.sleep(0.2)  # the loader
            steps(module, optimizer, 1, micro_batches=2)
    seconds = watched.step.time
    assert 0.2 <= seconds.data_seconds < seconds.step_seconds
    assert sum(seconds.split.values()) == pytest.approx(seconds.step_seconds)
    assert watched.advice is not None
    assert watched.advice.loss == "the time between steps"
    assert watched.advice.loss_seconds == seconds.data_seconds
    assert "num_workers" in str(watched.advice)


def test_watching_a_loop_does_not_change_its_weights() -> None:
    resize = torch.UntypedStorage.resize_
    states = []
    for watching in (False, True):
        module = model()
        optimizer = adamw(module)
        if watching:
            with ff.watch(module, optimizer):
                steps(module, optimizer, 4)
        else:
            steps(module, optimizer, 4)
        states.append(module.state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert torch.UntypedStorage.resize_ is resize
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


def test_micro_batches_are_one_step() -> None:
    module = model()
    optimizer = adamw(module)
    with ff.watch(module, optimizer) as once:
        steps(module, optimizer, 4)
    with ff.watch(module, optimizer) as twice:
        steps(module, optimizer, 4, micro_batches=2)
    assert twice.step.work.hardware_flops == 2 * once.step.work.hardware_flops
    assert twice.step.memory.stages[0].activations_bytes == once.step.memory.stages[0].activations_bytes


def test_an_error_in_the_loop_is_raised_and_the_meter_removed() -> None:
    module = model()
    optimizer, resize = adamw(module), torch.UntypedStorage.resize_
    watched = ff.watch(module, optimizer)
    with pytest.raises(ZeroDivisionError), watched:
        _raise_in_step(module, optimizer)
    assert torch.UntypedStorage.resize_ is resize
    with pytest.raises(UserError, match="nothing was measured"):
        _ = watched.step
    with ff.watch(module, optimizer) as empty:
        pass
    with pytest.raises(UserError, match="call optimizer"):
        _ = empty.step


def _raise_in_step(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    steps(module, optimizer, 1)
    raise ZeroDivisionError


def test_a_saved_watched_run_is_read_by_show(tmp_path: Path) -> None:
    """Alone, and compared with a prediction."""
    module = model()
    optimizer = adamw(module)
    with ff.watch(module, optimizer, layout_name="mine") as watched:
        steps(module, optimizer, 4)
    watched.save(tmp_path / "alone")
    result = CliRunner().invoke(app, ["show", str(tmp_path / "alone")], catch_exceptions=False)
    assert "measured  Sequential on this computer" in result.stdout
    assert " ".join(str(watched.advice).split()) in " ".join(result.stdout.split())
    assert ff.predict("nano", "h100:1", "mbs1").world == 1
    with ff.watch(module, optimizer, against=("nano", "h100:1", "mbs1"), seq=128, gbs=4) as watched:
        steps(module, optimizer, 4)
    assert watched.tokens == 512
    assert watched.advice is not None
    assert watched.advice.predicted_seconds is not None
    assert watched.advice.step_seconds == watched.step.time.step_seconds
    watched.save(tmp_path / "beside")
    shown = CliRunner().invoke(app, ["show", str(tmp_path / "beside")], catch_exceptions=False).stdout
    assert " ".join(str(watched.advice).split()) in " ".join(shown.split())
    rows = json.loads(CliRunner().invoke(app, ["show", str(tmp_path / "beside"), "--json"]).stdout)
    assert {row["quantity"] for row in rows} >= {"parameters", "peak memory", "step time"}
    assert rows[0]["measured"] == WEIGHTS


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ({"optimizer": 3}, "int is not a torch.optim.Optimizer"),
        ({"optimizer": (3,)}, r"watch\(model, optimizer\): int is not a torch.optim.Optimizer"),
        ({"optimizer": ()}, "the tuple of optimizers is empty"),
        ({"model": 3}, "int is not a torch.nn.Module"),
        ({"tokens": -1}, "must be 0 or more"),
        ({"tokens": None}, "must be 0 or more"),
        ({"stage": -1}, "must be 0 or more"),
        ({"seq": 128}, "add against"),
        ({"against": ("nano", "h100:2", "dp2 mbs1"), "gbs": 2}, "for 2 ranks, but 1 call watch"),
    ],
)
def test_invalid_arguments_are_user_errors(words: dict[str, Any], line: str) -> None:
    module = model()
    words = {"model": module, "optimizer": adamw(module)} | words
    with pytest.raises(UserError, match=line):
        ff.watch(words.pop("model"), words.pop("optimizer"), **words)


def watch_ranks(wrap: Callable[[nn.Module], nn.Module]) -> dict[str, Any]:
    module = wrap(model())
    optimizer = adamw(module)
    with ff.watch(module, optimizer) as watched:
        steps(module, optimizer, 5)
    return watched.step.model_dump(mode="json")


def test_a_ddp_loop_on_two_ranks_is_measured(tmp_path: Path) -> None:
    """Gradients and their buckets, one all-reduce; of an all-reduce a rank of two sends all once. Where unused
    parameters are looked for, the first buckets stay, and their use is a message.
    """
    ddp = nn.parallel.DistributedDataParallel
    both = run_two_ranks(
        tmp_path,
        lambda: {
            "": watch_ranks(ddp),
            "unused": watch_ranks(lambda module: ddp(module, find_unused_parameters=True)),
        },
    )
    step, other = both[""], both["unused"]
    assert other["traffic"][0]["calls"] == 2
    assert other["memory"]["peak_bytes"] == pytest.approx(step["memory"]["peak_bytes"], rel=0.02)
    kept = 4 * ROWS * (WIDTH + BLOCKS * 5 * WIDTH)
    (stage,) = step["memory"]["stages"]
    assert step["traffic"] == [{"axis": "dp", "collective": "all_reduce", "calls": 1, "bytes": 4 * WEIGHTS}]
    states = 4 * WEIGHTS * 4 + stage["optimizer_bytes"] - 8 * WEIGHTS  # weights, moments; gradients are yet to come
    assert stage["activations_bytes"] == 4 * WEIGHTS + kept + 8  # the buckets are no tensors of ours
    assert step["memory"]["peak_bytes"] == pytest.approx(states + 4 * WEIGHTS + kept, rel=0.06)
    assert step["work"]["parameters"] == WEIGHTS


def test_an_fsdp2_loop_on_two_ranks_is_measured(tmp_path: Path) -> None:
    def shard(module: nn.Module) -> nn.Module:
        from torch.distributed.fsdp import fully_shard

        for block in module.children():
            fully_shard(block)
        return fully_shard(module)

    step = run_two_ranks(tmp_path, lambda: watch_ranks(shard))
    (stage,) = step["memory"]["stages"]
    assert (stage["parameters_bytes"], stage["gradients_bytes"]) == (2 * WEIGHTS, 2 * WEIGHTS)
    assert {(item["collective"], item["calls"], item["bytes"]) for item in step["traffic"]} == {
        ("all_gather", 2 * BLOCKS, 4 * WEIGHTS),
        ("reduce_scatter", BLOCKS, 2 * WEIGHTS),
    }
    assert step["work"]["parameters"] == WEIGHTS
