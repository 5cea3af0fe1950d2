"""The advice against the real run with the advised modules wrapped, and against every other choice."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fivefold.diagnosis.doctor import examine, recompute
from fivefold.trainer.measure.meter import Meter
from tests.selection import mark_share

WIDTH, LAYERS, ROWS = 16, 3, 256


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = (
            nn.LayerNorm(WIDTH),
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(LAYERS)), nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss(model: nn.Module) -> Tensor:
    return functional.cross_entropy(model(torch.randn(ROWS, WIDTH)), torch.randint(8, (ROWS,)))


def recompute_net(modules: tuple[str, ...]) -> nn.Module:
    model = Net()
    recompute(model, modules)
    return model


@pytest.mark.long  # test_advised_recomputation_fits_in_a_real_run has one
@pytest.mark.slow
@pytest.mark.parametrize("share", mark_share(2, [0.8, 0.65]))
def test_the_advised_recomputation_fits_and_is_the_cheapest(share: float) -> None:
    plain = examine(Net, loss)
    budget = int(share * plain.peak_bytes)
    advice = examine(Net, loss, budget_bytes=budget).advice
    assert advice is not None
    assert advice.fits
    assert advice.modules
    assert advice.predicted_peak_bytes == pytest.approx(advice.peak_bytes, rel=0.01)
    proved = examine(lambda: recompute_net(advice.modules), loss)
    assert proved.peak_bytes == advice.peak_bytes <= budget
    assert proved.recomputed_flops == advice.extra_flops > 0
    # no choice of full blocks and of their mlps does it with fewer FLOPs
    for count in range(len(advice.modules)):
        for blocks in combinations(range(LAYERS), count):
            for inside in ("", ".mlp"):
                tried = examine(lambda b=blocks, i=inside: recompute_net(tuple(f"blocks.{n}{i}" for n in b)), loss)
                assert tried.peak_bytes > budget or tried.recomputed_flops >= advice.extra_flops


@pytest.mark.slow
def test_advised_recomputation_fits_in_a_real_run() -> None:
    budget = int(0.7 * examine(Net, loss).peak_bytes)
    advice = examine(Net, loss, budget_bytes=budget).advice
    assert advice is not None
    model = recompute_net(advice.modules)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    peaks = []
    for _ in range(2):
        states = [value for state in optimizer.state.values() for value in state.values()]
        with Meter([*model.parameters(), *states], axis=str) as meter:
            value = loss(model)
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
            del value
        peaks.append(meter.peak_bytes)
    assert max(peaks) == advice.peak_bytes


@pytest.mark.slow
def test_advice_says_if_nothing_is_needed_or_if_recomputation_cannot_reach_the_budget() -> None:
    plain = examine(Net, loss)
    enough = examine(Net, loss, budget_bytes=plain.peak_bytes).advice
    assert enough is not None
    assert (enough.fits, enough.modules, enough.extra_flops) == (True, (), 0)
    never = examine(Net, loss, budget_bytes=plain.peak_bytes // 10).advice
    assert never is not None
    assert not never.fits
    assert never.peak_bytes < 0.6 * plain.peak_bytes  # the least, not the first
    assert "is the least that recomputation reaches" in never.reason


@pytest.mark.slow
def test_advice_for_a_peak_in_the_optimizer_step_is_about_the_optimizer() -> None:
    def compute_small_loss(model: nn.Module) -> Tensor:
        return model(torch.randn(2, WIDTH)).square().mean()

    advice = examine(Net, compute_small_loss, budget_bytes=1000).advice
    assert advice is not None
    assert "it peaks in the update" in advice.reason
    assert "AdamW(fused=True) needs none" in advice.reason


class Counting(Block):
    """Each call is wider than the one before: it cannot be run again."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x.repeat(self.calls, 1))[:ROWS]


@pytest.mark.slow
def test_advice_names_modules_that_cannot_be_recomputed() -> None:
    def make() -> nn.Module:
        model = Net()
        model.blocks = nn.ModuleList(Counting() for _ in range(LAYERS))
        return model

    advice = examine(make, loss, budget_bytes=1000).advice  # the smallest change is wanted: full blocks are tried first
    assert advice is not None
    assert len(advice.not_recomputable) == 1
    assert advice.not_recomputable[0].startswith("blocks.* cannot be recomputed: ")
    assert advice.modules
    assert all(path.endswith((".mlp", ".norm")) for path in advice.modules)
    assert advice.peak_bytes < examine(make, loss).peak_bytes
