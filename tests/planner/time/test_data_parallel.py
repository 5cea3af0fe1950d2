"""Messages of data parallelism in time: what hides behind a backward hides there once."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from fivefold.job import Job
from fivefold.layout.mesh import group
from fivefold.layout.spec import Layout
from fivefold.layout.validity import list_reasons
from fivefold.machine.catalog import resolve
from fivefold.model.catalog import build_model
from fivefold.planner.predict import Planner, predict
from fivefold.planner.search.neighbours import list_neighbours
from fivefold.planner.time.constants import PUBLISHED
from fivefold.planner.time.data_parallel import _sum_overlapped_seconds, estimate_step_ends
from fivefold.planner.time.gather_reduce import _count_unit_buckets
from fivefold.planner.time.network import MessageTime
from fivefold.planner.time.stage_time import estimate_stage_seconds
from fivefold.planner.time.unit_overlap import estimate_unit_seconds
from fivefold.stack.catalog import build_stack as named_stack
from tests.planner.draws import case

JOB = Job(sequence=2048, global_batch=64, cuda_graphs="full")


def planner(job: Job = JOB, machine: str = "a100:64") -> Planner:
    return Planner(model=build_model("llama3-8b"), machine=resolve(machine, local=Path("none")), job=job)


def test_gathers_and_reductions_overlap_a_backward_one_after_the_other() -> None:
    """One sequence a rank on slow links: the last backward is fully used by ZeRO-3's gathers."""
    plan, layout = planner(JOB.replace(sequence=1024)), Layout.parse("dp64 zero3")  # one micro-batch
    trips = {run.name: plan.units.gather_reduce(layout, run.name) for run, _ in plan.counts.stage_work(layout)[0]}
    units = {run.name: plan.units.unit(layout, run) for run, _ in plan.counts.stage_work(layout)[0]}
    (block,) = set(units) - {"embed", "head"}
    gather, backward = trips[block].gather, units[block].backward + units[block].weight
    assert max(gather, trips[block].reduce) < 1.5 * backward < 1.5 * (gather + trips[block].reduce)
    ends = estimate_step_ends(plan.units, layout, (0,), estimate_unit_seconds(plan.units, layout))
    reduce = 32 * trips[block].reduce + trips["head"].reduce
    room = max(0.0, backward - gather)  # of a block for the reduction of the unit behind it; the embedding has its own
    hidden = 31 * min(trips[block].reduce, room) + min(trips["head"].reduce, room)
    hidden += min(trips[block].reduce, units["embed"].backward + units["embed"].weight)
    first = min(gather, units[block].forward)  # the first block's gather, counted as overlapped
    assert ends.exposed == pytest.approx(trips["embed"].reduce + reduce - hidden + first, rel=1e-9)
    assert ends.slowdown == pytest.approx(PUBLISHED.hidden_message_slowdown * (hidden - first), rel=1e-9)


@pytest.mark.parametrize("zero", [2, 3])
def test_reductions_after_every_backward_are_paid_every_time(zero: int) -> None:
    layout = Layout.parse(f"dp8 zero{zero}")
    once, item = (
        planner(JOB.replace(overlap=(), reduce=how)).estimate(layout).step_time.exposed["dp"]
        for how in ("step", "micro_batch")
    )
    plan = planner()
    reduce = sum(n * plan.units.gather_reduce(layout, run.name).reduce for run, n in plan.counts.stage_work(layout)[0])
    assert item - once == pytest.approx((8 - 1) * reduce, rel=1e-9)


def test_the_last_reduction_is_exposed() -> None:
    """Nor does the first gather; each other one runs concurrently with the unit before it."""
    layout = Layout.parse("dp8 zero2")
    for stack in ("fivefold", "fsdp2"):
        plan = planner(JOB.replace(stack=named_stack(stack).replace(reduce="micro_batch", zero2_shards="view")))
        runs = [run for run, times in plan.counts.stage_work(layout)[0] for _ in range(times)]
        gathers = [plan.units.gather_reduce(layout, run.name).gather for run in runs]
        units = [plan.units.unit(layout, run) for run in runs]
        last = plan.units.gather_reduce(layout, runs[0].name).reduce
        if stack == "fsdp2":  # which waits for it after every backward
            sums = estimate_unit_seconds(plan.units, layout)[runs[0]].messages.accumulation
            last = min(last, units[0].backward + units[0].weight + sums)
        late = sum(max(0.0, gather - unit.forward) for gather, unit in zip(gathers[1:], units, strict=False))
        assert late > 0  # the first block's: looking tokens up hides nothing
        exposed = estimate_step_ends(plan.units, layout, (0,), estimate_unit_seconds(plan.units, layout)).exposed
        assert exposed == pytest.approx(last + gathers[0] + late, rel=1e-9)


def test_the_reduction_of_the_embedding_overlaps_the_next_forward() -> None:
    """In our engine, where that takes longer; the others during the backward of another unit, or not at all."""
    plan = planner(JOB.replace(reduce="micro_batch"))
    layout = Layout.parse("dp8 zero2")
    stage = estimate_stage_seconds(plan.units, layout).times[0]
    units = {run.name: (plan.units.unit(layout, run), times) for run, times in plan.counts.stage_work(layout)[0]}
    reduce = {name: plan.units.gather_reduce(layout, name).reduce for name in units}
    assert reduce["embed"] < sum(times * unit.forward for unit, times in units.values())
    late = sum(
        times * max(0.0, reduce[name] - unit.backward - unit.weight)
        for name, (unit, times) in units.items()
        if name != "embed"
    )
    assert stage.full_backward.exposed.get("dp", 0.0) == pytest.approx(late, abs=1e-12)


def test_reduction_over_tp_depends_on_sequence_parallelism() -> None:
    """Whatever was asked first: norms see all rows without sequence parallelism."""
    plain, cut = Layout.parse("dp4 tp2 zero1 nosp"), Layout.parse("dp4 tp2 zero1")
    results = [[planner().units.gather_reduce(item, "head").copies for item in (plain, cut)]]
    again = planner()
    results.append([again.units.gather_reduce(item, "head").copies for item in (plain, cut)])
    assert results[0] == results[1]
    assert results[0][0] == 0 < results[0][1]


@pytest.mark.parametrize("chunks", [1, 3])
def test_equal_messages_overlapped_as_a_group_equal_one_by_one(chunks: int) -> None:
    """Random runs of equal messages, concurrent with runs of equal units; the other stages overlap theirs fully."""
    some = random.Random(4)
    for _ in range(300):
        messages = [
            (MessageTime(seconds := some.uniform(0, 3), some.uniform(0, seconds)), some.randint(1, 4))
            for _ in range(some.randint(0, 4))
        ]
        rooms = [(some.uniform(0, 3), some.randint(1, 4)) for _ in range(some.randint(1, 4))]
        later = [message.overlappable_seconds for message, times in messages for _ in range(times)][1:]
        every = [room for room, times in rooms for _ in range(times)]
        wanted = sum(min(message, room) for message, room in zip(later, every, strict=False))
        if chunks > 1:
            wanted = (1 - 1 / chunks) * sum(later) + min(sum(later) / chunks, sum(every))
        assert _sum_overlapped_seconds(messages, rooms, chunks=chunks) == pytest.approx(wanted, rel=1e-12, abs=1e-12)


def test_sums_of_copies_by_weight_are_priced_by_micro_batch() -> None:
    """torchtitan sums gradients of copies with every micro-batch: a planner that has priced one number of micro-batches
    says of another what a new one says.
    """
    job, layouts = JOB.replace(stack="torchtitan"), [Layout.parse(f"dp2 tp4 zero3 mbs{mbs}") for mbs in (1, 4)]
    together = planner(job, "a100:8")
    for layout in layouts:
        assert together.estimate(layout) == planner(job, "a100:8").estimate(layout)


def test_fsdp_copies_weights_and_gradients_of_every_message() -> None:
    """FSDP2 copies gathered weights out (read and written) and gradients in (16 bits read, fp32 written).

    It gathers all units before their forward, and all but the head before their backward. FSDP concatenates gradients
    in 16 bits, casts them to fp32 and divides them (``test_accumulation.py`` runs it).
    """
    layout, chip = Layout.parse("dp8 zero3 mbs1"), resolve("h100:8", local=Path("none")).chip
    copies = JOB.replace(stack=named_stack("fsdp2").replace(overlap=()))
    none = copies.replace(comm_buffers="freed")
    seconds, seconds_without, seconds_flat = (
        planner(job, "h100:8").estimate(layout).step_time.seconds
        for job in (copies, none, none.replace(flat_shards=True))
    )
    model, micro_batches = build_model("llama3-8b"), 8
    numel, head = model.parameters, model.vocab * model.width + model.width
    gathered_bytes, kernel_seconds = 2 * (2 * numel - head), PUBLISHED.smallest_kernel_seconds
    by_hand = (2 * gathered_bytes + (2 + 4) * numel) / chip.memory_bandwidth / chip.bandwidth_share
    by_hand += kernel_seconds * (34 + 33 + 34)
    assert seconds - seconds_without == pytest.approx(micro_batches * by_hand, rel=1e-6)
    by_hand = (2 + 2 + 2 + 4 + 8 + 8 / 8) * numel / chip.memory_bandwidth / chip.bandwidth_share + kernel_seconds * 34
    assert seconds_flat - seconds_without == pytest.approx(micro_batches * by_hand, rel=1e-6)


def test_the_first_gather_and_the_last_reduction_of_a_micro_batch_overlap_nothing() -> None:
    """Of blocks whose messages are shorter than their passes, the first block's gather and reduction are exposed."""
    job, layout = JOB.replace(stack=named_stack("fsdp2")), Layout.parse("dp8 zero3 mbs1")
    plan = planner(job, "h100:8")
    seconds = estimate_unit_seconds(plan.units, layout)
    runs = dict(plan.counts.stage_work(layout)[0])
    block = next(run for run in runs if run.name not in ("embed", "head"))
    time = seconds[block].messages.time
    assert 0 < time.gather < seconds[block].time.forward
    assert time.gather + time.reduce < seconds[block].time.backward + seconds[block].time.weight
    ends = {
        pieces: estimate_step_ends(planner(job.replace(global_batch=8 * pieces), "h100:8").units, layout, (0,), seconds)
        for pieces in (1, 3)
    }
    more = 2 * (time.gather + time.reduce)
    assert ends[3].exposed - ends[1].exposed == pytest.approx(more, rel=1e-6)
    assert ends[1].slowdown - ends[3].slowdown == pytest.approx(plan.units.contention * more, rel=1e-6)


def test_the_first_gather_of_deepspeed_is_a_bucket_of_modules() -> None:
    """5e7 of the 218 million elements of a block, while its other modules are gathered during the computation."""
    job, layout = JOB.replace(stack=named_stack("deepspeed")), Layout.parse("dp8 zero3 mbs1")
    plan = planner(job.replace(global_batch=24), "h100:8")
    seconds = estimate_unit_seconds(plan.units, layout)
    exposed = {
        size: estimate_step_ends(
            planner(job.replace(global_batch=24, prefetch_bucket_size=size), "h100:8").units, layout, (0,), seconds
        ).exposed
        for size in (10**6, 50_000_000, 10**9)
    }
    block = next(run for run, _ in plan.counts.stage_work(layout)[0] if run.name not in ("embed", "head"))
    gather, numel = seconds[block].messages.forward.overlappable_seconds, 218_112_000
    assert gather < seconds[block].time.forward
    for size, share in ((10**6, 10**6 / numel), (50_000_000, 50_000_000 / numel)):
        assert exposed[10**9] - exposed[size] == pytest.approx(3 * gather * (1 - share), rel=1e-3)


def test_adapters_below_which_nothing_is_reduced_leave_no_time_below_zero() -> None:
    """The embedding is frozen, so the first message has no bytes and all others overlap."""
    job = Job(sequence=131_072, global_batch=128, adapter="lora:16")  # type: ignore[arg-type]
    spec = resolve("l40s:2", local=Path("none"))
    layouts = [Layout.parse(f"cp2 zero{zero} mbs4 ac=full") for zero in (1, 2, 3)]
    for name in ("qwen2.5-0.5b", "llama3.2-1b", "qwen3-0.6b"):
        plan = Planner(model=build_model(name), machine=spec, job=job)
        assert min(plan.estimate(layout).step_time.exposed.get("dp", 0.0) for layout in layouts) >= 0


LINEARS = ((32 + 2 * 8) * 128 * 4096, 4096 * 4096, 2 * 14336 * 4096, 4096 * 14336)  # Llama 3 8B: qkv, proj, fc1, fc2
TABLE = 128_256 * 4096


@pytest.mark.parametrize(
    ("size", "ranks"), [((40_000_000, 1_000_000), 8), ((40_000_000, 1_000_000), 1024), ((2**27, 0), 64)]
)
def test_a_bucket_of_megatron_ends_with_the_weight_that_fills_it(size: tuple[int, int], ranks: int) -> None:
    """As in ``_ParamAndGradBuffer`` of megatron/core/distributed/param_and_grad_buffer.py: params[::-1], by hand."""
    limit, buckets = max(size[0], size[1] * ranks), [0]
    for numel in [TABLE, *32 * LINEARS, TABLE][::-1]:
        buckets[-1] += numel
        if buckets[-1] >= limit:
            buckets.append(0)
    buckets = [bucket for bucket in buckets if bucket]
    assert len(buckets) == {8: 98, 1024: 7, 64: 34}[ranks]

    job = Job(sequence=2048, global_batch=2048, stack=named_stack("megatron-core").replace(ddp_bucket_size=size))
    layout = Layout.parse(f"dp{ranks} zero1")
    plan, by_unit = (planner(job.replace(**change), f"h100:{ranks}") for change in ({}, {"ddp_bucket_size": (0, 0)}))
    work = plan.counts.stage_work(layout)[0]
    times = {run.name: (plan.units.gather_reduce(layout, run.name), n_units) for run, n_units in work}
    assert sum(time.buckets * n_units for time, n_units in times.values()) == pytest.approx(len(buckets), rel=1e-6)

    block = work[1][0].name
    time, alone = times[block][0], by_unit.units.gather_reduce(layout, block)
    bucket = plan.units.network.seconds("reduce_scatter", int(4 * 218.1e6 / time.buckets), group(layout, "dp"))
    assert time.reduce == pytest.approx(time.buckets * bucket, rel=1e-3)
    assert (time.reduce < alone.reduce, time.gather < alone.gather) == (ranks == 1024,) * 2

    ends = estimate_step_ends(plan.units, layout, (0,), estimate_unit_seconds(plan.units, layout))
    embed = times["embed"][0]
    assert ends.exposed >= embed.reduce / max(1.0, embed.buckets)  # the last one has no backward to overlap


def test_the_buckets_of_experts_are_those_of_their_own_buffer() -> None:
    """Qwen3 30B A3B over ep8: 48 layers of 16 experts, each with its fc1 and fc2; a router, a norm are small."""
    size = 10**8
    job = Job(sequence=2048, global_batch=64, stack=named_stack("megatron-core").replace(ddp_bucket_size=(size, 0)))
    plan = Planner(model=build_model("qwen3-30b-a3b"), machine=resolve("h100:64", local=Path("none")), job=job)
    layout, filled, number = Layout.parse("dp64 ep8 zero1"), 0, 0
    for numel in [*48 * (*16 * [2 * 768 * 2048], *16 * [768 * 2048])][::-1]:
        filled += numel
        if filled >= size:
            filled, number = 0, number + 1
    number += filled > 0
    (block,) = plan.counts.example
    assert _count_unit_buckets(plan.counts, layout, block)["expert_"] == pytest.approx(number / 48)


def test_megatron_without_overlap_reduces_all_gradients_in_one_message() -> None:
    job = Job(sequence=2048, global_batch=64, stack=named_stack("megatron-core").replace(overlap=()))
    plan, layout = planner(job), Layout.parse("dp8 tp8 zero1")
    work = plan.counts.stage_work(layout)[0]
    times = [(plan.units.gather_reduce(layout, run.name), n_units) for run, n_units in work]
    assert sum(time.buckets * n_units for time, n_units in times) == pytest.approx(1, rel=1e-6)


def test_later_stages_of_megatrons_pipeline_reduce_all_gradients_in_one_bucket() -> None:
    """NVIDIA/Megatron-LM@d98e8a6:megatron/core/distributed/distributed_data_parallel.py, pp_rank > 0."""
    job = Job(sequence=2048, global_batch=64, stack=named_stack("megatron-core"))
    plan, layout = planner(job), Layout.parse("dp16 pp4 zero1 mbs1")
    by_unit = planner(job.replace(ddp_bucket_size=(0, 0)))
    for stage in range(4):
        ends, free = (
            estimate_step_ends(one.units, layout, (stage,), estimate_unit_seconds(one.units, layout))
            for one in (plan, by_unit)
        )
        work = plan.counts.stage_work(layout)[stage]
        times = [(plan.units.gather_reduce(layout, run.name), n_units) for run, n_units in work]
        messages = sum((time.gather + time.reduce) * n_units for time, n_units in times)
        assert free.exposed < ends.exposed
        if stage:
            assert ends.exposed == pytest.approx(messages, rel=1e-6)
        else:
            assert ends.exposed < messages


@pytest.mark.parametrize("seed", range(12))
def test_messages_that_are_listed_once_for_equal_layouts_are_those_of_each(seed: int) -> None:
    """Of a layout of a random job and its single changes, estimated after one another and each by itself."""
    model, machine, layout, job = case(seed)
    shared = Planner(model=model, machine=machine, job=job)
    changed = list(list_neighbours(layout, shared, uneven=False))
    for other in (layout, *random.Random(seed).sample(changed, min(12, len(changed)))):
        alone = Planner(model=model, machine=machine, job=job)
        for name in ("embed", *shared.counts.example, "head"):
            assert shared.units.gather_reduce(other, name) == alone.units.gather_reduce(other, name), (other, name)


def test_a_faster_chip_never_lengthens_a_step() -> None:
    """A second of compute that overlaps a hop of a ring between nodes does not overlap a reduction as well.

    Of random layouts with context parallelism, within nodes and between them.
    """
    compared = 0
    for seed in range(120):
        some = random.Random(seed)
        stack = named_stack(some.choice(("fivefold", "nemo", "megatron-core", "torchtitan")))
        dp, tp, cp, zero = (some.choice(of) for of in ((1, 2, 4), (1, 2, 4, 8), (2, 4, 8, 16), (0, 1, 2, 3)))
        layout = Layout.parse(f"dp{dp} tp{tp} cp{cp} zero{zero} mbs1")
        chip = some.choice(("a100", "h100", "b200", "mi325x"))
        machine = resolve(f"{chip}:{layout.world}", local=Path("none"))
        rates = {
            field: {dtype: 1.5 * rate for dtype, rate in getattr(machine.chip, field).items()}
            for field in ("peak_flops", "flops_per_joule")
        }
        faster = machine.replace(chip=machine.chip.replace(**rates))
        model = build_model(some.choice(("llama3.2-1b", "llama3-8b", "qwen3-30b-a3b", "mixtral-8x7b")))
        precision, sequence = some.choice(("bf16", "fp8")), some.choice((4096, 16384, 65536))
        job = Job(sequence=sequence, global_batch=some.choice((4, 8)), precision=precision, stack=stack)
        if any(list_reasons(layout, model=model, job=job, machine=machine)):
            continue
        usual, shorter = (
            predict(model=model, machine=on, layout=layout, job=job).time.step_seconds for on in (machine, faster)
        )
        assert shorter <= usual * (1 + 1e-9), (seed, layout, job.stack.name)
        compared += 1
    assert compared > 50
