"""What the update costs, in worked numbers; ``tests/agree/dry_run/test_update.py`` compares it with the dry run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.machine.catalog import resolve
from fivefold.model.catalog import build_model
from fivefold.planner.counts.counts import Counts
from fivefold.planner.counts.flops import work
from fivefold.planner.counts.message import RepeatedMessage
from fivefold.planner.counts.update import count_scratch_bytes, update_flops, update_messages, update_products
from fivefold.planner.predict import predict
from fivefold.update import Optimizer

LLAMA = build_model("llama3-8b")
ONE = Layout()


def job(kind: Any) -> Job:
    return Job(global_batch=8, optimizer=Optimizer(kind=kind))


def orthogonal(low: int, high: int) -> int:
    """Per iteration the square of [low, high], its own square, and their product: a multiply-add is two FLOPs."""
    return 5 * (2 * low * low * high + 2 * low**3 + 2 * low * low * high)


def test_muons_products_are_newton_schulz_of_every_hidden_matrix_once() -> None:
    layer = 2 * orthogonal(4096, 4096) + 2 * orthogonal(1024, 4096) + 3 * orthogonal(4096, 14336)
    assert 32 * layer == 665_891_729_571_840
    counts = Counts(LLAMA, job("muon"))
    assert update_flops(counts, ONE) == 32 * layer
    assert sum(update_product.flops for update_product in update_products(counts, ONE, chunks=(0,))) == 32 * layer
    for text, times in (("dp8 zero1", 1), ("dp8 zero0", 8), ("tp4 pp2", 1), ("dp8 zero1/4", 2), ("pp2 dualpipe", 2)):
        layout = Layout.parse(text)
        assert update_flops(counts, layout) == times * 32 * layer, text
        plain = work(LLAMA, layout=layout, job=job("adamw"))
        assert work(LLAMA, layout=layout, job=job("muon")).hardware_flops - plain.hardware_flops == times * 32 * layer
        assert work(LLAMA, layout=layout, job=job("muon")).model_flops_non_causal == plain.model_flops_non_causal


def test_matrices_of_muon_are_sent_to_their_owner_and_back_in_16_bits() -> None:
    """28 rounds of 8 among 224 matrices of 6 979 321 856 elements over eight shards."""
    result = list(update_messages(Counts(LLAMA, job("muon")), Layout.parse("dp8 zero1"), chunks=(0,)))
    assert len(result) == 2 * 28
    assert {item._replace(payload=0) for item in result} == {RepeatedMessage("dp", "all_to_all", 1, 0, 8, "shard")}
    there, back = (sum(item.payload for item in result[way::2]) for way in (0, 1))
    hidden = 32 * (2 * 4096**2 + 2 * 1024 * 4096 + 3 * 4096 * 14336)
    assert there == 2 * hidden // 8  # a rank's parts of all
    assert back == pytest.approx(there, rel=0.02)  # all parts of its own, of each round the largest
    assert back >= there


def test_adafactor_reduces_only_vectors() -> None:
    result = list(update_messages(Counts(LLAMA, job("adafactor")), Layout.parse("dp8 zero1"), chunks=(0,)))
    matrices, vectors = 32 * 7 + 2, 32 * 2 + 1
    columns = 32 * (6 * 4096 + 14336) + 2 * 4096
    assert result == [
        RepeatedMessage("dp", "all_reduce", 1, 4 * size, 8, "shard")
        for size in (columns + matrices + vectors, matrices, matrices + vectors)
    ]


@pytest.mark.parametrize("kind", ["adamw", "adamw8bit", "sgd"])
def test_other_optimizers_send_no_messages_and_have_no_matmuls(kind: str) -> None:
    counts, layout = Counts(LLAMA, job(kind)), Layout.parse("dp8 tp2 zero1")
    assert list(update_messages(counts, layout, chunks=(0,))) == update_products(counts, layout, chunks=(0,)) == []
    assert update_flops(counts, layout) == 0
    assert count_scratch_bytes(counts, layout, chunks=(0,)) == (12 * 2**22 if kind == "adamw8bit" else 0)


def test_muons_update_is_priced_by_its_products_and_messages() -> None:
    """On one H100 at 600 to 900 TFLOP/s; eight share it, and wait for the slowest and for what they send."""

    def count_difference(ranks: int, text: str) -> float:
        machine, layout = resolve(f"h100:{ranks}", local=Path("/nowhere")), Layout.parse(text)
        times = [predict(model=LLAMA, machine=machine, layout=layout, job=job(kind)).time for kind in ("muon", "adamw")]
        return times[0].optimizer_seconds - times[1].optimizer_seconds

    alone, shared, repeated = (
        count_difference(1, "dp1"),
        count_difference(8, "dp8 zero1"),
        count_difference(8, "dp8 zero0"),
    )
    assert 666.5e12 / 900e12 < alone < 666.5e12 / 600e12
    assert alone < repeated < alone * 1.03  # as quick as the slowest of eight chips
    sent = 2 * 2 * 6.98e9 / 8 * 7 / 8 / 450e9  # there and back over NVLink
    assert alone / 8 + sent / 2 < shared < alone / 8 * 1.3 + 8 * sent
