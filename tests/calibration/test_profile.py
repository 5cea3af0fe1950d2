"""The units of a run, measured in the trainer's own step, and what predictions make of them."""

import io
import os
import random
import subprocess
import sys
import time
from contextlib import contextmanager, redirect_stdout
from math import exp, log

import pytest
import torch
import torch.distributed as dist

from fivefold.calibration import make_monotonic, profile
from fivefold.calibration.message_orders import MessageOrder, Timed, list_distinct_messages, list_measured_seconds
from fivefold.calibration.messages import all_gather, reduce_scatter
from fivefold.calibration.null_process_group import NullProcessGroup, init_null_process_group
from fivefold.calibration.orders import RankProfile
from fivefold.calibration.profile import add, is_profiled, profile_layout, shorten_model
from fivefold.calibration.unit_clock import UnitClock
from fivefold.errors import UserError
from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.machine import toml
from fivefold.machine.spec import Calibration, Chip, CollectivePoint, Link, Machine
from fivefold.model.catalog import resolve
from fivefold.model.experts import MoE
from fivefold.planner.counts.counts import Counts
from fivefold.planner.counts.traffic import list_messages, step_messages
from fivefold.planner.predict import Planner, get_planner
from fivefold.planner.time.network import Network
from fivefold.planner.time.timeline import estimate_small_messages
from fivefold.trainer.build import build
from fivefold.trainer.engine import Engine
from tests.forked_python import true_interpreters

NANO = resolve("nano")
JOB = Job(sequence=32, global_batch=8, precision="fp32")
EXPERTS = NANO.replace(moe=MoE(experts=4, topk=2, ffn=32, balance="free"))


@pytest.fixture(autouse=True)
def limit_steps(monkeypatch):
    """Workers, which are forked from here, measure the least number of steps: no test reads how long one takes."""
    monkeypatch.setattr(profile, "SECONDS", 0.01)


def machine(*collectives):
    link = Link(name="local", span=4, bandwidth=1e9, latency_seconds=1e-4)
    chip = Chip(name="a core", peak_flops={"fp32": 5e10}, memory_bytes=2**33, memory_bandwidth=1e10)
    return Machine(
        name="local",
        chip=chip,
        ranks=4,
        ranks_per_node=4,
        links=(link,),
        backend="gloo",
        calibration=Calibration(date="2026-11-22", torch="2.13", cores=2, collectives=tuple(collectives)),
    )


def clocked_step(layout, model=NANO, rank=0, aside=None):
    """Run one real step of ``rank`` in a world that sends nothing; return seconds by unit and in total.

    ``aside``: gets the seconds, of each step, in which made-up messages were filled.
    """
    with init_null_process_group(rank=rank, world=layout.world):
        built = build(model=model, layout=layout, job=JOB, device=torch.device("cpu"), streams=False)
        engine = Engine(built, model=model, layout=layout, job=JOB)
        clock = UnitClock(engine)
        filled = [0.0]

        @contextmanager
        def time_excluded():
            with clock.exclude():
                begin = time.thread_time()
                yield
                filled[0] += time.thread_time() - begin

        NullProcessGroup.untimed[0] = time_excluded
        tokens = torch.randint(0, model.vocab, (layout.micro_batches(JOB), layout.mbs, JOB.sequence + 1))
        for _ in range(2):
            filled[0] = 0.0
            clock.start()
            begin = time.thread_time()
            engine.step(tokens)
            seconds = time.thread_time() - begin
            result = clock.stop()
            if aside is not None:
                aside.append(filled[0])
            engine.zero_grad()
    return result, seconds


@pytest.mark.parametrize(
    "layout",
    [
        "dp1 mbs2",
        "dp1 mbs2 ac=full",
        "dp2 zero3 mbs1",
        "tp2 mbs2",
        "cp2 mbs2",
        "pp2 zb1p mbs1",
        "pp2 gpipe mbs2",
        "pp2 v2 dualpipev mbs1",
        "pp2 dualpipe mbs1",
    ],
)
def test_unit_times_add_up_to_the_step(layout):
    layout = Layout.parse(layout)
    model = NANO.replace(layers=4)
    aside = []
    result, seconds = clocked_step(layout, model, aside=aside)
    assert result.seconds.total() == pytest.approx(seconds - aside[-1], rel=0.03, abs=3e-4)
    held = {name for _, name in result.times if name.startswith("block")}
    assert len(held) == (model.layers if layout.pp == 1 or layout.schedule == "dualpipe" else model.layers // 2)
    passes = layout.micro_batches(JOB) // (2 if layout.schedule == "dualpipe" else 1)
    for name in held:
        assert result.times["F", name] == passes
        assert result.times["B", name] + result.times["BW", name] == passes
    assert any(way == "W" for way, _ in result.times) == any(way == "B" for way, _ in result.times)


@pytest.mark.parametrize("layout", ["dp2 zero1 ep2 mbs2", "tp2 etp2 mbs2", "dp2 tp2 ep2 etp2 mbs2"])
def test_an_expert_layer_runs_without_communication(layout):
    result, _ = clocked_step(Layout.parse(layout), EXPERTS)
    assert result.seconds["F", "block 0"] > 0


def test_a_fake_world_generates_received_data():
    with init_null_process_group(rank=1, world=2):
        tensor = torch.arange(4.0)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [0, 1, 2, 3]
        whole, part = torch.full((8,), float("nan")), torch.empty(2)
        all_gather(whole, tensor)
        assert whole.tolist() == [0, 1, 2, 3] * 2
        reduce_scatter(part, tensor)
        assert part.tolist() == [2, 3]
        dist.recv(whole, 0)
        assert 0 < whole.abs().max() < 0.2


def test_tokens_are_spread_over_experts_in_a_fake_world():
    """With buffers as they are, a later stage's tokens are NaN or equal, and all choose the same experts."""
    layout = Layout.parse("pp2 mbs2")
    with init_null_process_group(rank=1, world=2):
        built = build(model=EXPERTS, layout=layout, job=JOB, device=torch.device("cpu"), streams=False)
        engine = Engine(built, model=EXPERTS, layout=layout, job=JOB)
        engine.step(torch.randint(0, 256, (layout.micro_batches(JOB), 2, JOB.sequence + 1)))
        loads = next(iter(engine.expert_loads().values()))
    assert min(loads) > 0.3 * max(loads)


def make_machine(layout, *, forward=2.0, backward=5.0, weight=0.0, update=0.5, model=NANO, job=JOB):
    """A machine that holds made-up seconds of every unit of ``layout``."""
    counts = Counts(model, job)
    timed = {"update": update}
    for name in ("embed", *(f"block {layer}" for layer in range(model.layers)), "head"):
        timed |= {f"F {name}": forward, (f"B {name}" if weight else f"BW {name}"): backward}
    for stage in range(layout.pp * layout.v):
        timed[f"W {stage}"] = weight * len(counts.stage_work(layout))
    told = {name: Timed(seconds=seconds, spread=0.0) for name, seconds in timed.items()}
    profiles = [RankProfile(place=0, rank=rank, torch="", device="cpu", timed=told) for rank in range(layout.pp)]
    return add(machine(), profiles, model=model, layout=layout, job=job)


def test_a_prediction_is_the_sum_of_the_measured_units():
    layout = Layout.parse("dp1 mbs2")
    step = get_planner(NANO, make_machine(layout), JOB).estimate(layout).step_time
    units = NANO.layers + 2
    assert step.compute == pytest.approx(layout.micro_batches(JOB) * units * (2.0 + 5.0))
    assert step.optimizer == pytest.approx(0.5)


def test_a_layout_that_was_not_profiled_uses_units_of_another_sharding_or_scaled_curves():
    measured_as, layout = Layout.parse("dp2 zero1 mbs2"), Layout.parse("dp2 zero3 mbs2")
    store = make_machine(measured_as)
    assert is_profiled(store, model=NANO, layout=measured_as, job=JOB)
    assert not is_profiled(store, model=NANO, layout=layout, job=JOB)
    step = get_planner(NANO, store, JOB).estimate(layout).step_time
    assert step.compute == pytest.approx(layout.micro_batches(JOB) * (NANO.layers + 2) * 7.0)
    unknown = Layout.parse("dp2 zero3 mbs1")  # other shapes: the curves, as much slower as those of the measured blocks
    slower = get_planner(NANO, store, JOB).estimate(unknown).step_time.compute
    curves = get_planner(NANO, machine(), JOB).estimate(unknown).step_time.compute
    block = next(point for point in store.calibration.units if point.label.startswith("block"))
    assert slower == pytest.approx(block.over_curves * curves)


def test_keys_of_profiled_units_are_equal_in_every_process():
    program = """
from pathlib import Path
from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.machine.catalog import resolve
from fivefold.model.catalog import build_model
from fivefold.planner.predict import get_planner
from fivefold.planner.time.profiled import Profiled
layout, machine = Layout.parse("dp2 tp2 zero3 mbs1 ac=qkv+mlp"), resolve("h100:4", local=Path())
counts = get_planner(build_model("qwen3-30b-a3b"), machine, Job(sequence=64, global_batch=4)).counts
print([Profiled(counts, machine).make_unit_key(layout, run) for run, _ in counts.stage_work(layout)[0]])
"""
    environment = os.environ | {"PYTHONHASHSEED": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    here = io.StringIO()
    with redirect_stdout(here):
        exec(program, {})
    assert done.stdout == here.getvalue()


def test_weight_gradient_time_is_divided_among_the_units_of_a_stage():
    layout = Layout.parse("pp2 zb1p mbs1")
    store = make_machine(layout, weight=1.0)
    points = {point.label.split()[0]: point for point in store.calibration.units}
    assert points["block"].backward_seconds == 5.0
    assert 0 < points["head"].weight_seconds < points["block"].weight_seconds


def test_a_profile_of_few_ranks_predicts_a_thousand_ranks():
    big = machine().replace(ranks=1000, ranks_per_node=4)
    layout = Layout.parse("dp4 zero1 mbs2")
    store = make_machine(layout).calibration
    wide = Layout.parse("dp1000 zero1 mbs2")
    job = JOB.replace(global_batch=4000)
    step = get_planner(NANO, big.replace(calibration=store), job).estimate(wide).step_time
    assert step.compute == pytest.approx(wide.micro_batches(job) * (NANO.layers + 2) * 7.0)


def test_a_deep_model_is_measured_on_fewer_layers_of_every_kind():
    layout = Layout.parse("pp2 mbs1")
    deep = NANO.replace(layers=96)
    assert shorten_model(deep, layout, JOB).layers == 12
    late = deep.replace(moe=MoE(experts=4, topk=1, ffn=32, dense_layers=40))
    assert shorten_model(late, layout, JOB).layers == 41  # the first with an expert layer
    assert shorten_model(NANO, layout, JOB) == NANO


def test_seconds_of_messages_never_fall_as_their_size_grows():
    chance = random.Random(3)
    for _ in range(50):
        seconds = [exp(chance.uniform(-8, -2)) for _ in range(chance.randint(1, 7))]
        points = [{"collective": "p2p", "ranks": 2, "bytes": 4**at, "seconds": item} for at, item in enumerate(seconds)]
        chance.shuffle(points)
        made = [point["seconds"] for point in sorted(make_monotonic(points), key=lambda point: point["bytes"])]
        # min-max formula of isotonic regression (Barlow et al. 1972), by enumeration
        logs, many = [log(item) for item in seconds], range(len(seconds))
        best = [
            max(min(sum(logs[i : j + 1]) / (j + 1 - i) for j in many if j >= at) for i in many if i <= at)
            for at in many
        ]
        assert made == pytest.approx([exp(item) for item in best])


def test_every_message_of_this_computer_is_timed_once():
    layout = Layout.parse("dp2 zero3 tp2 mbs1")
    result = list_distinct_messages(Counts(NANO, JOB), layout, local_ranks=4)
    sent = {(m.collective, m.ranks, m.payload) for m in list_messages(Counts(NANO, JOB), layout)}
    assert {(order.collective, order.ranks, order.bytes) for order in result} == sent
    assert not list_distinct_messages(Counts(NANO, JOB), Layout.parse("dp8 mbs1"), local_ranks=2)
    hops = [
        order
        for order in list_distinct_messages(Counts(NANO, JOB), Layout.parse("pp2 mbs1"), local_ranks=2)
        if order.collective == "p2p"
    ]
    assert [order.both_ways for order in hops] == [False]


@pytest.mark.parametrize(
    "layout",
    [
        "dp2 zero3 mbs2",
        "dp2 zero0 mbs2",
        "tp2 mbs2",
        "tp2 nosp mbs2",
        "cp2 mbs2",
        "cp2 cp=ulysses mbs2",
        "dp2 zero1 ep2 mbs2",
        "pp2 zb1p mbs2",
        "dp2 tp2 ep2 etp2 mbs1",
        "cp4 mbs2",
        "dp2 pp2 zero1 mbs1",
    ],
)
def test_predictions_ask_for_no_message_that_is_not_sent(layout, monkeypatch):
    """So that every message of a profiled run is priced at its own size."""
    layout, asked = Layout.parse(layout), set()
    price = Network.seconds

    def seconds(network, collective, payload, group, **options):
        if group.ranks > 1:
            asked.add((collective, group.ranks, payload))
        return price(network, collective, payload, group, **options)

    monkeypatch.setattr(Network, "seconds", seconds)
    model = EXPERTS if layout.sp else NANO  # ranks that hold the same tokens would send them to the experts twice
    plan = Planner(model=model, machine=machine(), job=JOB)  # one that has no answers yet
    plan.estimate(layout)
    timed = list_distinct_messages(plan.counts, layout, local_ranks=layout.world)
    assert asked == {(order.collective, order.ranks, order.bytes) for order in timed}


def test_a_message_measured_in_a_step_applies_to_its_size_only():
    order = MessageOrder(collective="all_to_all", ranks=2, bytes=1000)
    timed = {f"message all_to_all 2 {size}": Timed(seconds=size, spread=0.0) for size in (100, 900, 1300, 5000)}
    assert list_measured_seconds(order, timed | {"message all_reduce 2 1000": Timed(seconds=7, spread=0.0)}) == [
        900,
        1300,
    ]
    assert list_measured_seconds(order, timed | {"message all_to_all 2 1000": Timed(seconds=8, spread=0.0)}) == [8]
    assert list_measured_seconds(order.replace(ranks=4), timed) == []


def test_the_time_of_small_messages_counts_as_often_as_they_are_sent():
    points = [
        CollectivePoint(collective=name, ranks=2, bytes=2**12, seconds=1e-3) for name in ("all_reduce", "all_to_all")
    ]
    network, counts = Network(machine(*points)), Counts(EXPERTS, JOB)
    layout = Layout.parse("dp2 zero0 ep2 mbs2")
    passes = layout.micro_batches(JOB) * EXPERTS.layers
    result = estimate_small_messages(counts, network, layout, chunks=(0,))
    # in each pass: counts of tokens, routing weights forward and back
    assert result["ep"] == pytest.approx(3 * passes * 1e-3)
    assert result["world"] == pytest.approx(1e-3)
    assert result["dp"] + result["world"] == pytest.approx(len(list(step_messages(counts, layout, chunks=(0,)))) * 1e-3)
    assert estimate_small_messages(counts, network, Layout.parse("dp1 mbs2"), chunks=(0,)) == {}


@pytest.mark.processes
def test_a_run_is_profiled_in_processes_of_its_own():
    layout = Layout.parse("dp2 zero2 mbs2")
    store = profile_layout(model=NANO, layout=layout, job=JOB, machine=machine(), cores=2)
    assert is_profiled(store, model=NANO, layout=layout, job=JOB)
    assert {point.collective for point in store.calibration.collectives} == {
        "all_gather",
        "reduce_scatter",
        "all_reduce",
    }
    again = profile_layout(model=NANO, layout=layout, job=JOB, machine=store, cores=2)
    assert len(again.calibration.units) == len(store.calibration.units)  # replaced, not added


@pytest.mark.long  # as test_unit_times_add_up…, with messages
@pytest.mark.processes
def test_the_seconds_of_a_profiled_step_are_those_of_units_and_messages():
    """All ranks are here, so the messages are sent: the profile holds every second of the step but a bubble's."""
    layout = Layout.parse("cp2 mbs2")
    store = profile_layout(model=NANO, layout=layout, job=JOB, machine=machine(), cores=2)
    (hop,) = (point for point in store.calibration.collectives if point.collective == "p2p")
    assert hop.busy_seconds is None  # what it takes concurrent with attention, which must not be overlapped twice
    step = get_planner(NANO, store, JOB).estimate(layout).step_time
    assert step.exposed["cp"] == pytest.approx(3 * NANO.layers * layout.micro_batches(JOB) * hop.seconds)


def test_paired_micro_batches_are_not_measured():
    with pytest.raises(UserError, match="two micro-batches alternate"):
        profile_layout(model=NANO, layout=Layout.parse("dp1 mbs2"), job=Job(pairs=True), machine=machine(), cores=1)


@pytest.mark.long  # new interpreters, which import torch
@pytest.mark.processes
@true_interpreters()
def test_layers_with_separate_documents_are_measured():
    layout = Layout.parse("dp1 mbs2")
    apart = JOB.replace(documents="separate")
    store = profile_layout(model=NANO, layout=layout, job=apart, machine=machine(), cores=1)
    assert is_profiled(store, model=NANO, layout=layout, job=apart)


def test_calibrate_for_a_run_adds_its_units_to_a_machine_file(tmp_path):
    path = tmp_path / "here.toml"
    toml.write(machine(), path)
    command = [sys.executable, "-m", "fivefold", "calibrate", "--for", "nano", "dp1 mbs2", "--seq", "32", "--gbs", "8"]
    done = subprocess.run([*command, "--out", str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert {p.label.split()[0] for p in toml.read(path).calibration.units} == {"embed", "block", "head"}
    lost = subprocess.run([*command[:4], "dp1 mbs2"], capture_output=True, text=True)
    assert (lost.returncode, lost.stderr) == (
        2,
        "fivefold: calibrate 'dp1 mbs2': measuring a layout needs a model; add --for MODEL\n",
    )
