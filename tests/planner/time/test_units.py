"""A layer in time, against the layer times of Korthikanti 2022, and the host that launches it."""

from pathlib import Path

import pytest

from benchmarks.published.readers.gpt import FP16_FP32_GRADIENTS, gpt
from fivefold.job import Job
from fivefold.layout.mesh import RankGroup
from fivefold.layout.spec import Layout
from fivefold.machine.catalog import resolve
from fivefold.model.catalog import build_model as of_catalog
from fivefold.planner.counts.counts import UnitGroup
from fivefold.planner.counts.operations import feedforward
from fivefold.planner.predict import Planner
from fivefold.planner.time.constants import PUBLISHED
from fivefold.planner.time.network import Network
from fivefold.stack.catalog import build_stack

GPT_22B = gpt(layers=48, width=6144, heads=64, vocab=51200, positions=2048)
JOB = Job(sequence=2048, global_batch=4, precision=FP16_FP32_GRADIENTS, stack=build_stack("megatron-lm"))


def layer(text: str, job: Job = JOB, model=GPT_22B) -> tuple[float, float]:
    """Milliseconds of a block's forward and backward."""
    planner, layout = Planner(model=model, machine=resolve("a100:8", local=Path("no")), job=job), Layout.parse(text)
    run = planner.counts.stage_work(layout)[0][1][0]
    unit = planner.units.unit(layout, run)
    back = unit.backward + unit.weight + sum(unit.backward_exposed)
    return 1e3 * (unit.forward + sum(unit.forward_exposed)), 1e3 * back


# Table 4 of arXiv:2205.05198: 22B, 8 A100, four sequences of 2048.
@pytest.mark.parametrize(
    ("layout", "forward", "backward"),
    [
        ("tp8 mbs4 nosp", 7.7, 11.9),
        ("tp8 mbs4", 7.2, 11.8),  # 12.7 backward if the reduce-scatter of dx did not overlap dW
        ("tp8 mbs4 nosp ac=selective", 7.7, 13.2),
    ],
)
def test_a_layer_of_the_22b_model_takes_the_published_time(layout, forward, backward):
    # of eight average cards; Ampere's power is between this layer and slower loops of matmuls
    assert layer(layout) == pytest.approx((forward, backward), rel=0.03)


@pytest.mark.parametrize(("recomputed", "messages"), [("", 4), (" ac=full", 2)])
def test_a_repeated_gather_overlaps_dx_and_a_reduce_scatter_of_dx_overlaps_dw(recomputed, messages):
    """Of the two column-parallel layers; if they are recomputed, their gather is that of the forward."""
    text = f"tp8 mbs4{recomputed}"
    waits, overlapped = layer(text, JOB.replace(async_tp=False))[1], layer(text)[1]
    # each of 101 MB in a ring of NVLink 3: start, seven steps, bytes
    seconds = messages * (0.020 + 7 * 0.008 + 4 * 2048 * 6144 * 2 * 7 / 8 / 235e9 * 1e3)
    assert waits - overlapped == pytest.approx((1 - PUBLISHED.hidden_message_slowdown) * seconds, rel=0.01)


def test_an_all_reduce_of_dx_overlaps_the_gradient_of_the_weight():
    """Without sequence parallelism (Megatron-LM's allreduce_dgrad): those before q, k, v and before the MLP."""
    waits, overlapped = layer("tp8 mbs4 nosp", JOB.replace(async_tp=False))[1], layer("tp8 mbs4 nosp")[1]
    payload = 4 * 2048 * 6144 * 2
    reduce = 2e3 * Network(resolve("a100:8", local=Path("no"))).seconds("all_reduce", payload, RankGroup(8, 1))
    assert waits - overlapped == pytest.approx(0.9 * reduce, rel=0.03)  # dW of q, k, v is a little shorter


@pytest.mark.parametrize(("text", "more"), [("tp8 mbs4 nosp", 3), ("tp8 mbs4", 0)])
def test_layers_that_reduce_their_input_gradient_apart_all_reduce_it_once_more_each(text, more):
    """As q, k, v and as gate and up; with sequence parallelism they share what is gathered and reduced."""
    job, payload = JOB.replace(async_tp=False), 4 * 2048 * 6144 * 2
    joint, apart = (sum(layer(text, job.replace(input_grad_all_reduces=times))) for times in ((1, 1), (3, 2)))
    reduce = 1e3 * Network(resolve("a100:8", local=Path("no"))).seconds("all_reduce", payload, RankGroup(8, 1))
    assert apart - joint == pytest.approx(more * reduce, rel=0.02)


def test_messages_of_dtensor_are_copied():
    """Over sequences of several, eight messages of a llama's layer are read and written once more each."""
    llama, sent = of_catalog("llama3-8b"), 8 * (2 * 2 * 4096 * 4096 * 2 / (0.86 * 2.039e12) + 3e-6) * 1e3
    job = Job(sequence=4096, global_batch=8, stack=build_stack("fsdp2"))
    for mbs, async_tp, share in ((2, False, 1), (1, False, 0), (2, True, 0)):
        here = job.replace(overlap=("dp", "tp") if async_tp else ("dp",))
        copied, plain = (
            sum(layer(f"tp4 mbs{mbs}", here.replace(tp_buffers=buffers), llama)) for buffers in ("copied", "in_place")
        )
        assert copied - plain == pytest.approx(share * sent, rel=0.02), (mbs, async_tp)


def test_a_narrow_layer_takes_as_long_as_its_launches():
    """vTrain's traces, 1024 wide, whatever tp: what each layer and micro-batch adds to what it composes."""
    narrow = gpt(layers=16, width=1024, heads=16, vocab=50257, positions=1024)
    job = JOB.replace(sequence=1024, async_tp=False)
    for tp, measured in ((1, 3.00), (2, 3.33), (4, 3.44)):
        assert sum(layer(f"tp{tp}" + (" nosp" if tp > 1 else ""), job, narrow)) == pytest.approx(measured, rel=0.12)


def test_extra_kernels_add_their_launch_time_to_a_block():
    narrow = gpt(layers=16, width=1024, heads=16, vocab=50257, positions=1024)
    job = JOB.replace(sequence=1024, async_tp=False)
    for text, times in (("tp1", 1), ("tp1 ac=full", 2)):  # recomputed, those of the forward come again
        plain, more = (layer(text, job.replace(extra_kernels=kernels), narrow) for kernels in ((0, 0), (10, 18)))
        assert more[0] - plain[0] == pytest.approx(10 * 0.067, rel=0.05)
        assert more[1] - plain[1] == pytest.approx((18 + 10 * (times - 1)) * 0.067, rel=0.05)
    graphed = job.replace(cuda_graphs="full")
    assert layer("tp1", graphed.replace(extra_kernels=(10, 18)), narrow) == layer("tp1", graphed, narrow)


def test_a_permutation_is_launched_before_the_host_waits_for_its_counts():
    """Megatron waits before it sends, so that the device does not wait for these launches where it has work."""
    job, layout = Job(sequence=4096, global_batch=64, stack=build_stack("megatron-core")), Layout.parse("dp8 ep8 mbs4")

    def forward(further: int = 0) -> float:
        launched, launched_backward = PUBLISHED.moe_kernels["moe.dispatch"]
        kernels = PUBLISHED.moe_kernels | {"moe.dispatch": (launched + further, launched_backward)}
        constants, machine = PUBLISHED.replace(moe_kernels=kernels), resolve("h100:8", local=Path("no"))
        planner = Planner(model=of_catalog("qwen3-30b-a3b"), machine=machine, job=job, constants=constants)
        run = next(run for run, _ in planner.counts.stage_work(layout)[0] if run.routes)
        return planner.units.unit(layout, run).forward

    assert forward(8) - forward() < 0.1 * 8 * 67e-6


def test_the_host_waits_for_what_it_copies_to_the_device(monkeypatch):
    """Megatron copies the offset of gpt-oss's activation by torch.tensor: later kernels are launched no earlier."""
    job, layout = Job(sequence=4096, global_batch=8, stack=build_stack("megatron-core")), Layout.parse("dp8 ep8 mbs1")
    split_clamp = feedforward._split_clamp

    def forward() -> float:
        planner = Planner(model=of_catalog("gpt-oss-20b"), machine=resolve("h100:8", local=Path("no")), job=job)
        run = next(run for run, _ in planner.counts.stage_work(layout)[0] if run.routes)
        return planner.units.unit(layout, run).forward

    waits = forward()
    monkeypatch.setattr(
        feedforward, "_split_clamp", lambda op, size: split_clamp(op, size=size)._replace(blocks_host=False)
    )
    assert 1.02 < waits / forward() < 1.2


def test_a_host_that_waits_for_every_kernel_adds_its_time_once_per_launch():
    for text in ("tp8 mbs4 nosp ac=full", "tp8 mbs1 nosp ac=full"):
        apart = sum(layer(text, JOB.replace(launch_blocking=True))) - sum(layer(text))
        assert 3.0 < apart < 5.0, text  # some 55 launches of 67 us, however large the micro-batch


@pytest.mark.parametrize("stack", ["fivefold", "megatron-core"])
@pytest.mark.parametrize("overlap", [("dp", "cp", "ep", "pp"), ("dp", "tp", "cp", "ep")])
def test_separate_messages_are_those_exposed_without_overlap(stack, overlap):
    machine, job = resolve("h800:64", local=Path("no")), Job(sequence=4096, global_batch=64, stack=build_stack(stack))
    async_tp = job.stack.async_tp and "tp" not in overlap
    planner, alone = (
        Planner(model=of_catalog("deepseek-v3"), machine=machine, job=item)
        for item in (job.replace(overlap=overlap), job.replace(overlap=(), async_tp=async_tp))
    )
    for text in ("dp8 tp2 cp4 ep16 mbs1", "dp8 tp2 cp4 ep16 mbs1 ac=full", "dp16 tp4 ep8 etp2 mbs2 ac=norm+act"):
        layout = Layout.parse(text)
        for run in (
            UnitGroup("head", 0, 1, True),
            *(UnitGroup(kind, at, 1, True) for kind, at in planner.counts.example.items()),
        ):
            unit, bare = (item.units.unit(layout, run) for item in (planner, alone))
            assert unit.forward_unoverlapped == bare.forward_exposed
            assert unit.backward_unoverlapped == bare.backward_exposed
            if run.routes and run.name != "head":
                assert unit.forward_exposed != unit.forward_unoverlapped
