"""Kernels on a calibrated computer: their number against those that the trainer runs, and their rates."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fivefold.calibration.null_process_group import init_null_process_group
from fivefold.calibration.step_clock import build_step
from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.machine.spec import AttentionPoint, KernelPoint
from fivefold.model.latent_attention import MLA
from fivefold.model.spec import Model
from fivefold.planner.counts.memory.peak import count_rank_memory
from fivefold.planner.counts.operations.local_shapes import get_local_degrees
from fivefold.planner.counts.update import list_stages
from fivefold.planner.predict import get_planner
from fivefold.planner.time.compute import Prices
from fivefold.planner.time.measured_kernels import count_kernels
from fivefold.planner.time.units import Units
from fivefold.planner.time.update_time import estimate_elementwise_seconds
from tests.calibration.test_profile import machine

JOB = Job(sequence=64, precision="fp32", steps=1)
DENSE = Model(name="dense", layers=2, width=64, heads=4, head_dim=16, kv_heads=4, ffn=128, vocab=128)
LATENT = MLA(q_rank=48, kv_rank=32, nope_dim=16, rope_dim=8, v_dim=16)
CASES = {
    "multi-head": (DENSE, "dp1 mbs1"),
    "grouped": (DENSE.replace(kv_heads=2), "dp1 mbs2"),
    "latent": (DENSE.replace(mla=LATENT), "dp1 mbs1"),
    "latent with one head dim": (DENSE.replace(mla=LATENT.replace(v_dim=24)), "dp1 mbs1"),
    "tensor parallel": (DENSE, "tp2 nosp mbs1"),
    "ring": (DENSE, "cp2 mbs1"),
    "long ring": (DENSE.replace(kv_heads=2), "cp4 mbs2"),
}
NO_KERNELS = {"empty", "empty_strided", "empty_like", "new_empty", "_unsafe_view"}


class KernelCounter(TorchDispatchMode):
    """The number of PyTorch's kernels that run, without views."""

    kernels = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.kernels += not func.is_view and func._opname not in NO_KERNELS
        return func(*args, **(kwargs or {}))


def count_kernels_of_step(model: Model, layout: Layout, job: Job) -> int:
    """Count the kernels of a rank's step; those of the update are a few for all weights."""
    with init_null_process_group(rank=0, world=layout.world):
        step = build_step(model, layout, job, rank=0, device=torch.device("cpu"), sends=False)
        for _ in range(2):
            step()
        with KernelCounter() as counter:
            step()
    return counter.kernels


@pytest.mark.parametrize("name", CASES)
def test_the_kernels_of_a_block_are_as_many_as_the_trainer_runs(name: str) -> None:
    """What a step of three layers runs more than one of two; the host takes a time for each."""
    model, layout = CASES[name][0], Layout.parse(CASES[name][1])
    job = JOB.replace(global_batch=layout.mbs)
    shallow, deep = (count_kernels_of_step(model.replace(layers=layers), layout, job) for layers in (2, 3))
    counts = get_planner(model, machine(), job).counts
    ops = counts.list_ops(get_local_degrees(layout), counts.kinds[-1])
    assert deep - shallow == sum(sum(count_kernels(op, width=job.activation_bytes)) for op in ops)


def test_a_block_of_a_ring_is_as_long_as_its_queries() -> None:
    """The kernels of a ring over two ranks have the rate of half the sequence."""
    rates = {32: 1e9, 64: 4e9}
    points = tuple(
        AttentionPoint(
            dtype="fp32", ranks=1, sequences=1, tokens=tokens, heads=4, kv_heads=4, head_dim=16,
            forward_seconds=2 * 4 * 16 * tokens**2 / rate, backward_seconds=4 * 4 * 16 * tokens**2 / rate,
        )
        for tokens, rate in rates.items()
    )  # fmt: skip
    known = machine()
    assert known.calibration is not None
    known = known.replace(calibration=known.calibration.replace(attentions=points))
    counts = get_planner(DENSE, known, JOB).counts
    for text, rate in (("dp1 mbs1", rates[64]), ("cp2 mbs1", rates[32])):
        ops = counts.list_ops(get_local_degrees(Layout.parse(text)), counts.kinds[-1])
        (core,) = (op for op in ops if op.kind == "attention")
        assert Prices(known, ranks=1, job=counts.job).price_repeated(core).forward == pytest.approx(
            core.causal_flops / rate
        )


def test_an_update_finds_no_tensor_in_a_cache() -> None:
    """A small tensor takes its share of the largest that was measured; a kernel that is repeated on it is faster."""
    rates = {2**16: 4e10, 2**26: 1e10}
    points = tuple(
        KernelPoint(kernel=kernel, dtype="fp32", ranks=1, moved_bytes=size, seconds=size / rate)
        for size, rate in rates.items()
        for kernel in ("copy", "adamw")
    )
    known = machine()
    assert known.calibration is not None
    prices = Prices(known.replace(calibration=known.calibration.replace(kernels=points)), ranks=1, job=JOB)
    for kernel in ("adamw", "copy", "never measured"):
        assert prices.memory_bound_seconds(2**16, kernel=kernel) == pytest.approx(2**16 / 4e10)
        assert [prices.uncached_seconds(2**power, kernel=kernel) for power in (16, 20, 26)] == pytest.approx(
            [2**power / 1e10 for power in (16, 20, 26)]
        )


@pytest.mark.parametrize("text", ["dp1 mbs1", "dp2 zero0 mbs1", "dp2 zero1 mbs1", "pp2 mbs1"])
def test_an_update_of_our_trainer_neither_zeroes_nor_scales_the_sums(text: str) -> None:
    """On a calibrated computer as elsewhere: AdamW moves seven tensors and clipping three, however work is shared."""
    rate, layout, job = 1e10, Layout.parse(text), JOB.replace(global_batch=2)
    points = tuple(
        KernelPoint(kernel=kernel, dtype="fp32", ranks=ranks, moved_bytes=2**26, seconds=2**26 / rate)
        for kernel in ("copy", "adamw")
        for ranks in (1, 2)
    )
    known = machine()
    assert known.calibration is not None
    known = known.replace(calibration=known.calibration.replace(kernels=points))
    counts = get_planner(DENSE, known, job).counts
    (rank, *_), (chunks, *_) = count_rank_memory(counts, layout), list_stages(layout)
    seconds = estimate_elementwise_seconds(Units(counts, known), layout, rank, tuple(chunks))
    assert seconds == pytest.approx((7 + 3) * 4 * rank.updated_numel / rate)
