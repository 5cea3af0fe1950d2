"""The step in time: its parts add up, a continued schedule is the simulated one, and better never costs."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.errors import UserError
from fivefold.job import Job
from fivefold.layout.schedule import schedule, simulation
from fivefold.layout.schedule.order import Task
from fivefold.layout.spec import Layout
from fivefold.layout.validity import refuse
from fivefold.machine.catalog import resolve
from fivefold.model.catalog import resolve as model_of
from fivefold.planner.predict import Planner
from fivefold.planner.time.action_time import estimate_action_costs, pass_seconds
from fivefold.planner.time.constants import PUBLISHED
from fivefold.planner.time.stage_time import StageSeconds, estimate_stage_seconds
from fivefold.planner.time.steady_state import Extrapolated, extrapolate, list_distinct_tasks
from fivefold.planner.time.unit_time import AXES, HOST_LAUNCHES

JOB = Job(sequence=2048, global_batch=64)
LAYOUTS = st.builds(
    lambda dp, tp, cp, pp, zero, ac, tail: f"dp{dp} tp{tp} cp{cp} pp{pp} zero{zero} ac={ac} {tail if pp > 1 else ''}",
    dp=st.sampled_from([1, 2, 8, 16]), tp=st.sampled_from([1, 2, 8]), cp=st.sampled_from([1, 2]),
    pp=st.sampled_from([1, 2, 4]), zero=st.integers(0, 3), ac=st.sampled_from(["none", "selective", "full"]),
    tail=st.sampled_from(["1f1b", "v2", "gpipe", "zb1p", "zb2p", "zbv", "dualpipev"]),
)  # fmt: skip
OVERLAPS = st.sets(st.sampled_from(["dp", "tp", "cp", "pp"])).map(lambda axes: tuple(sorted(axes)))


def planner(job: Job = JOB, machine: str = "h100:256", model: str = "llama3-8b") -> Planner:
    return Planner(model=model_of(model), machine=resolve(machine, local=Path("no")), job=job)


def seconds(text: str, **known) -> float:
    return planner(**known).estimate(Layout.parse(text)).step_time.seconds


def parse_legal(text: str, job: Job = JOB) -> Layout | None:
    layout = Layout.parse(text)
    try:
        refuse(layout, model=model_of("llama3-8b"), job=job, machine=resolve("h100:256", local=Path("no")))
    except UserError:
        return None
    return layout


@settings(max_examples=80, deadline=None)
@given(text=LAYOUTS, overlap=OVERLAPS, weights=st.sampled_from(["overlapped", "before_forward", "broadcast"]))
def test_the_parts_of_a_step_add_up_and_none_is_negative(text, overlap, weights):
    job = JOB.replace(overlap=overlap, param_all_gather=weights)
    layout = parse_legal(text, job)
    if layout is None:
        return
    step_time = planner(job).estimate(layout).step_time
    parts = [step_time.compute, step_time.bubble, *step_time.exposed.values(), step_time.optimizer]
    assert min(parts) >= 0
    assert sum(parts) == pytest.approx(step_time.seconds, rel=1e-6)
    assert step_time.compute > 0
    assert step_time.longest_part


def test_a_step_of_small_kernels_takes_most_time_in_host_launches():
    def longest_part(model: str, job: Job = JOB) -> str:
        estimate = planner(job, machine="h100:8", model=model).estimate(Layout.parse("dp8"))
        return estimate.step_time.longest_part

    graphs = JOB.replace(stack=JOB.stack.replace(cuda_graphs="full"))
    assert longest_part("tiny") == HOST_LAUNCHES
    assert longest_part("tiny", graphs) != HOST_LAUNCHES
    assert longest_part("llama3-8b") != HOST_LAUNCHES


def extrapolate_step(layout, count, duration, *, hop: float, first_equal_stages) -> Extrapolated:
    tasks = list_distinct_tasks(layout, count, tuple(first_equal_stages))
    return extrapolate(
        layout, count, seconds=list(map(duration, tasks)), hop_seconds=hop, first_equal_stages=tuple(first_equal_stages)
    )


def costs_of(stages: StageSeconds, *tasks: Task) -> list:
    costs = estimate_action_costs(stages, tasks)
    return [costs[task] for task in tasks]


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(["1f1b", "interleaved", "gpipe", "zb1p", "zb2p", "zbv", "dualpipev"]),
    pp=st.sampled_from([2, 3, 4]),
    rounds=st.integers(5, 9),
    forward=st.floats(1, 2),
    slow=st.floats(1, 1.5),
    hop=st.floats(0, 0.2),
)
def test_a_continued_schedule_ends_when_the_whole_one_does(name, pp, rounds, forward, slow, hop):
    v = 2 if name in ("interleaved", "zbv", "dualpipev") else 1
    layout, count = Layout(pp=pp, v=v, schedule=name), rounds * pp

    def duration(task):  # the last stage holds the head
        item = {"F": 1, "B": 1, "W": 1, "BW": 2}.get(task.kind, 3)
        return item * forward * (slow if pp * v - 1 in (task.stage, task.backward_stage) else 1.0)

    table = schedule(name, pp=pp, v=v, micro_batches=count)
    whole = simulation.simulate_schedule(table, seconds=duration, hop_seconds=lambda *_: hop)
    result = extrapolate_step(layout, count, duration, hop=hop, first_equal_stages=range(pp * v))
    # A schedule whose pace is set late is not periodic yet where it is cut.
    assert max(result.ends) == pytest.approx(whole.seconds, rel=0.02)
    assert result.busy == pytest.approx(whole.busy_seconds, rel=1e-9)


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(["1f1b", "interleaved", "gpipe", "zb1p", "zbv", "dualpipe", "dualpipev"]),
    pp=st.sampled_from([2, 4]),
    count=st.integers(4, 20).map(lambda half: 2 * half),
    seconds=st.lists(st.floats(1, 2), min_size=3, max_size=3),
    data=st.data(),
)
def test_equal_stages_are_priced_once(name, pp, count, seconds, data):
    """With the first of the equal ones asked alone, as with each asked for itself."""
    v = 2 if name in ("interleaved", "zbv", "dualpipev") else 1
    layout = Layout(pp=pp, v=v, schedule=name)
    kinds = data.draw(st.lists(st.integers(0, 2), min_size=pp * v, max_size=pp * v))
    asked = []

    def duration(task):
        asked.append(task)
        back = seconds[kinds[task.backward_stage]] if task.backward_stage >= 0 else 0.0
        return {"F": 1, "B": 1, "W": 0.7, "BW": 1.7, "FB": 1}[task.kind] * seconds[kinds[task.stage]] + 1.7 * back

    item = extrapolate_step(layout, count, duration, hop=0.1, first_equal_stages=range(pp * v))
    alone, first_equal_stages = len(asked), tuple(map(kinds.index, kinds))
    result = extrapolate_step(layout, count, duration, hop=0.1, first_equal_stages=first_equal_stages)
    assert result.ends == pytest.approx(item.ends, rel=1e-12)
    assert result.busy == pytest.approx(item.busy, rel=1e-12)
    assert len(asked) - alone <= alone
    assert {task.stage for task in asked[alone:]} <= set(first_equal_stages)
    for rank, (mine, every) in enumerate(zip(result.task_counts, item.task_counts, strict=True)):
        assert sum(times for _, times in mine) == sum(times for _, times in every)
        assert result.first_equal_ranks[rank] == next(
            other
            for other, held in enumerate(result.rank_stages)
            if [kinds[stage] for stage in held] == [kinds[stage] for stage in result.rank_stages[rank]]
        )


@settings(max_examples=40, deadline=None)
@given(text=LAYOUTS, overlap=OVERLAPS)
def test_overlapping_data_parallelism_costs_at_most_its_contention(text, overlap):
    layout = parse_legal(text)
    if layout is None:
        return
    without = tuple(axis for axis in overlap if axis != "dp")
    hidden = planner(JOB.replace(overlap=(*without, "dp"))).estimate(layout).step_time.seconds
    assert hidden <= planner(JOB.replace(overlap=without)).estimate(layout).step_time.seconds * (1 + 1e-9)


@settings(max_examples=40, deadline=None)
@given(text=LAYOUTS)
def test_a_better_machine_and_less_recomputation_are_never_slower(text):
    layout = parse_legal(text)
    if layout is None:
        return
    time = planner().estimate(layout).step_time.seconds
    # in an order that stands, a rank may wait longer for what became faster less than its own work did
    assert planner(machine="b200:256").estimate(layout).step_time.seconds <= time * 1.005
    assert planner(JOB.replace(early_stop=True)).estimate(layout).step_time.seconds <= time
    if layout.zero < 3:  # ZeRO-3 may wait for gathers, during which recomputation is free
        assert planner().estimate(layout.replace(ac="none")).step_time.seconds <= time * (1 + 1e-9)


@settings(max_examples=60, deadline=None)
@given(
    text=st.builds(
        "dp{} tp2 cp{} ep{} pp4 zero{} {}".format,
        st.sampled_from([4, 8]),
        st.sampled_from([1, 2]),
        st.sampled_from([1, 2, 4]),
        st.sampled_from([0, 1, 3]),
        st.sampled_from(["dualpipe", "v2 dualpipev"]),
    ),
    overlap=OVERLAPS.map(lambda axes: (*axes, "ep")),
)
def test_paired_passes_overlap_messages_once_and_at_a_cost(text, overlap):
    job = JOB.replace(overlap=overlap, global_batch=256, cuda_graphs="full")
    layout, plan = Layout.parse(text), planner(job, model="qwen3-30b-a3b", machine="h800:256")
    stages = estimate_stage_seconds(plan.units, layout)
    for other in range(layout.pp * layout.v):
        both, forward, backward = costs_of(stages, Task("FB", 1, other), Task("F", 1, -1), Task("BW", other, -1))
        one, two = pass_seconds(stages, 1, backward=False), pass_seconds(stages, other, backward=True)
        talk, compute = (
            sum((*one.overlapping.values(), *two.overlapping.values())),
            one.compute + two.compute,
        )
        stays = sum((*one.exposed.values(), *two.exposed.values())) + 2 * stages.p2p_send_seconds
        assert both.seconds >= (max(talk, compute) + stays) * (1 - 1e-9)
        assert both.seconds >= (one.max_with_gathers + two.max_with_gathers) * (1 - 1e-9)  # of ZeRO-3, unit by unit
        hidden = talk + one.gathers + two.gathers + stays - sum(both.exposed.values())
        slowdown = PUBLISHED.hidden_message_slowdown
        assert (
            both.compute - compute
            >= slowdown * (hidden - one.overlapped_by_pass - two.overlapped_by_pass) * (1 - 1e-9) - 1e-12
        )
        # Apart only what one direction has room for is hidden; together more contends.
        assert both.seconds <= (forward.seconds + backward.seconds) * (1 + slowdown)
        for axis in (*AXES, "pp"):
            apart = forward.exposed.get(axis, 0.0) + backward.exposed.get(axis, 0.0)
            assert both.exposed.get(axis, 0.0) <= apart + 1e-12


@pytest.mark.parametrize("schedule", ["dualpipe", "v2 dualpipev"])
def test_an_axis_without_overlap_is_exposed_in_paired_passes_too(schedule):
    text = f"dp4 ep4 tp2 pp4 {schedule}"
    known = {"model": "qwen3-30b-a3b", "machine": "h800:32"}
    shown, hidden = (
        planner(JOB.replace(overlap=axes, cuda_graphs="full"), **known).estimate(Layout.parse(text)).step_time
        for axes in (("dp", "pp"), ("dp", "ep", "pp"))
    )
    flat = planner(JOB.replace(overlap=("dp", "pp"), cuda_graphs="full"), **known)
    layout = Layout.parse(text)
    fb, *apart = costs_of(
        estimate_stage_seconds(flat.units, layout), Task("FB", 1, 2), Task("F", 1, -1), Task("BW", 2, -1)
    )
    assert fb.exposed["ep"] == pytest.approx(sum(item.exposed["ep"] for item in apart), rel=1e-9)
    assert hidden.exposed.get("ep", 0.0) < 0.5 * shown.exposed["ep"]
    assert hidden.seconds < shown.seconds


@pytest.mark.parametrize(
    "name", ["gpipe", "1f1b", "v2 interleaved", "zb1p", "zb2p", "v2 zbv", "dualpipe", "v2 dualpipev"]
)
@pytest.mark.parametrize("zero", [1, 3])
def test_the_parts_are_those_of_the_critical_rank_action_by_action(name, zero):
    """Messages of each axis are as many as its actions have, also where a long table is extrapolated."""
    plan, layout = (
        planner(JOB.replace(global_batch=256, overlap=("dp", "cp"))),
        Layout.parse(f"dp4 tp2 cp2 pp4 zero{zero} {name}"),
    )
    step_time, stages = plan.estimate(layout).step_time, estimate_stage_seconds(plan.units, layout)
    table = schedule(layout.schedule, pp=4, v=layout.v, micro_batches=64)
    rows = [
        costs_of(stages, *(Task(action.kind, action.stage, action.backward_stage) for action in row))
        for row in table.rows
    ]
    sums = [{axis: sum(cost.exposed.get(axis, 0.0) for cost in row) for axis in ("tp", "cp", "pp")} for row in rows]
    assert (
        min(max(abs(item[axis] - step_time.exposed.get(axis, 0.0)) for axis in item) for item in sums)
        < 1e-9 * step_time.seconds
    )


def test_broadcast_weights_take_longer_on_more_ranks_and_gathered_ones_do_not():
    """InternEvo on A100: 4.06 to 2.86 thousand tokens/s per GPU from 8 to 512 ranks, sharded in eights 4.08 to 3.84."""
    job = JOB.replace(global_batch=4096, overlap=("dp",), param_all_gather="broadcast")
    known = {"machine": "a100:512", "model": "llama2-7b"}
    few, many = (seconds(f"dp{dp} zero1 mbs2", job=job.replace(global_batch=8 * dp), **known) for dp in (8, 512))
    eights = seconds("dp512 zero1/8 mbs2", job=job, **known)
    assert 1.25 < many / few < 1.45  # measured: 4062 / 2861 = 1.42 on half the network
    assert eights / few < 1.08  # measured: 4078 / 3835 = 1.06


def test_activations_sharded_over_tp_cross_a_slow_link_faster():
    job = JOB.replace(overlap=())
    whole, parts = (
        seconds("dp1 tp8 pp8 nosp", job=job.replace(scatter_gather_tensors=on), machine="a100:64", model="llama2-13b")
        for on in (False, True)
    )
    hop = 2048 * 5120 * 2 / (0.95 * 25e9)  # 21 MB over a NIC of 200 Gbit/s
    assert whole - parts == pytest.approx(2 * 64 * hop * 7 / 8, rel=0.25)


@pytest.mark.parametrize(("layout", "axis"), [("tp8 mbs1", "tp"), ("dp4 tp2 mbs1", "dp"), ("cp8 mbs1", "dp")])
def test_messages_at_the_ends_are_those_of_an_axis_that_has_ranks(layout: str, axis: str) -> None:
    """With tp alone they reduce the gradients of the norms, which every rank holds."""
    exposed = planner(machine="h100:8").estimate(Layout.parse(layout)).step_time.exposed
    assert exposed.get(axis, 0.0) > 0
    assert axis == "dp" or exposed.get("dp", 0.0) == 0
