"""tf32: what an operand is rounded to, products of it, and what a chip without it says."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from fivefold.job import Job, get_recipe
from fivefold.layout.spec import Layout
from fivefold.machine.catalog import resolve
from fivefold.model.catalog import build_model
from fivefold.planner.predict import Planner
from fivefold.trainer.model.linear import Linear, fused_linears
from fivefold.trainer.model.precision import describe_other_format
from fivefold.trainer.model.tf32 import Tf32Gemms, round_to_tf32


def find_nearest(value: float) -> float:
    """Of the numbers with ten bits behind the point the nearest, of two the larger in size."""
    if value == 0 or not math.isfinite(value):
        return value
    step = 2.0 ** (max(math.frexp(value)[1] - 1, -126) - 10)
    return math.copysign(math.floor(abs(value) / step + 0.5) * step, value)


def test_an_operand_keeps_ten_bits() -> None:
    drawn = torch.randn(5000, generator=torch.Generator().manual_seed(1)) * torch.logspace(-30, 30, 5000)
    ties = torch.tensor([1 + 2**-11, 1 + 3 * 2**-11, -1 - 2**-11, 2 - 2**-11, 1.5 * 2**-136, 0.0, -0.0])
    x = torch.cat([drawn, ties, 1 + 2**-11 - 2.0**-23 * torch.arange(1, 3)])
    assert round_to_tf32(x).tolist() == [find_nearest(value) for value in x.tolist()]
    assert round_to_tf32(torch.tensor([torch.inf, -torch.inf])).tolist() == [torch.inf, -torch.inf]
    payload = torch.tensor([0x7F800001], dtype=torch.int32).view(torch.float32)  # would round to infinity
    assert round_to_tf32(payload).isnan().all()


def test_three_products_read_rounded_operands() -> None:
    one, other = Linear(40, 24, bias=True), Linear(40, 8, bias=False)
    for seed, weight in enumerate((*one.parameters(), *other.parameters())):
        with torch.no_grad():
            weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed)))
    one.gemms = other.gemms = Tf32Gemms()
    x = torch.randn(30, 40, generator=torch.Generator().manual_seed(9)).requires_grad_()
    g = [torch.randn(30, out, generator=torch.Generator().manual_seed(out)) for out in (24, 8)]
    outs = fused_linears(x, one, other)
    torch.autograd.backward(outs, g)
    wide = [round_to_tf32(item.detach()).double() for item in (x, one.matrix, other.matrix, *g)]
    assert one.bias is not None
    torch.testing.assert_close(outs[0].double(), wide[0] @ wide[1].t() + one.bias.double(), rtol=1e-5, atol=1e-5)
    assert x.grad is not None
    torch.testing.assert_close(x.grad.double(), wide[3] @ wide[1] + wide[4] @ wide[2], rtol=1e-5, atol=1e-5)
    assert other.matrix.grad is not None
    torch.testing.assert_close(other.matrix.grad.double(), wide[4].t() @ wide[0], rtol=1e-5, atol=1e-5)


def test_a_chip_without_units_says_that_it_computes_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(precision=get_recipe("tf32"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert describe_other_format(job).startswith("precision 'tf32': a CPU has no tf32 units and multiplies in fp32")
    assert describe_other_format(job.replace(emulate=True)) == describe_other_format(Job()) == ""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    assert describe_other_format(job) == ""


def test_the_planner_prices_products_at_the_chips_tf32_peak() -> None:
    """An H100 has 494.5 and 67 TFLOP/s; memory and messages are those of fp32."""
    steps = [
        Planner(
            model=build_model("llama3-8b"),
            machine=resolve("h100:8", local=Path("/nowhere")),
            job=Job(sequence=4096, global_batch=8, precision=get_recipe(name)),
        ).step(Layout.parse("dp8 zero3 mbs1"))
        for name in ("tf32", "fp32")
    ]
    intervals = dict.fromkeys(("interval", "reserved_interval", "driver_interval"))  # of precisions that were measured
    assert steps[0].memory.replace(**intervals) == steps[1].memory.replace(**intervals)
    assert steps[0].traffic == steps[1].traffic
    assert 0.1 < steps[0].time.compute_seconds / steps[1].time.compute_seconds < 0.3
