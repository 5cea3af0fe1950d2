"""The search against brute force, what it says of the losers, and what predict refuses."""

from __future__ import annotations

import re
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import fivefold
from fivefold.errors import UserError
from fivefold.job import RECIPES, Job
from fivefold.layout.names import Axis
from fivefold.layout.spec import Layout
from fivefold.layout.validity import list_reasons
from fivefold.layout.validity.stack import can_express
from fivefold.layout.where import ANY_LAYOUT, Where
from fivefold.machine.catalog import resolve, with_ranks
from fivefold.machine.spec import Machine
from fivefold.model.catalog import build_model
from fivefold.model.experts import MoE
from fivefold.model.spec import Model
from fivefold.planner.predict import Estimate, Planner, predict
from fivefold.planner.search import SearchProblem, find_fitting_layout, search
from fivefold.planner.search.neighbours import list_neighbours
from fivefold.planner.search.rejections import find_fixes, find_job_fixes
from fivefold.planner.search.space import Space
from fivefold.planner.search.work import FIRST_GAP, MAX_DOUBLINGS, SearchWork
from fivefold.planner.time.memory_risk import MemoryRisk
from fivefold.rendering.html import render_search as html
from fivefold.rendering.search import render_page
from fivefold.results.search_result import By, SearchResult, TightLayout
from fivefold.stack.catalog import build_stack as stack
from fivefold.step import FITS_RISK, TIGHT_RISK
from fivefold.units import show_bytes, show_seconds
from tests.selection import mark_share

pytestmark = pytest.mark.slow

JOB = Job(sequence=4096, global_batch=64)
NODE = resolve("h100:8", local=Path("/nowhere"))
SMALL = Model(name="small", layers=6, width=1024, heads=8, kv_heads=4, head_dim=128, ffn=4096, vocab=32_000)
EXPERTS = SMALL.replace(name="experts", layers=4, moe=MoE(experts=8, topk=2, ffn=1024, dense_layers=1))
FEW = Job(sequence=2048, global_batch=16)
PLAIN: dict[str, Any] = {"recomputations": ("none", "full"), "placements": False}


def search_by_brute_force(
    model: Model, machine: Machine, job: Job, risk: float = FITS_RISK, **narrowed: Any
) -> list[Estimate]:
    """Every layout, estimated, that fits."""
    planner = Planner(model=model, machine=machine, job=job, risk=risk)
    roomy = machine.replace(chip=machine.chip.replace(memory_bytes=2**40))
    results = estimate_all(model, roomy, job, tuple(sorted(narrowed.items())))
    return [result for result in results if planner.fits(result.layout, result.ranks)]


@cache
def estimate_all(model: Model, machine: Machine, job: Job, narrowed: tuple[tuple[str, Any], ...]) -> list[Estimate]:
    """Every layout, estimated, which does not depend on the memory of a chip."""
    planner, space = (
        Planner(model=model, machine=machine, job=job),
        Space(model, job, world=machine.ranks, **dict(narrowed)),
    )
    candidates = space.expand(space.partials, space.partials.dp.nonzero()[0])
    candidates = space.shard(space.partials, space.place(space.partials, candidates))
    return [planner.estimate(space.layout(space.partials, candidates, at)) for at in range(len(candidates.partial))]


@cache
def best_of_tight_machine() -> SearchResult:
    """Return the best layout, which a tight one beats."""
    return search(model=SMALL, machine=make_tight_machine(4, gib=1.0), job=FEW.replace(global_batch=4), top=1, **PLAIN)


def make_tight_machine(ranks: int, *, gib: float) -> Machine:
    """Nodes of two on which a peak of up to about ``gib`` fits, so that layouts cross nodes and many do not fit."""
    machine = resolve(f"h100:{ranks}", local=Path("/nowhere"))
    near, far = machine.links
    links, memory = (near.replace(span=2), far), int(1.25 * gib * 2**31)
    return machine.replace(links=links, ranks_per_node=2, chip=machine.chip.replace(memory_bytes=memory))


@pytest.mark.parametrize(
    ("model", "batch", "only"),
    mark_share(
        3,
        [
            pytest.param(SMALL, 4, {"recomputations": ("none", "full")}, id="dense"),
            pytest.param(SMALL, 16, {"recomputations": ("none", "full")}, id="dense-16"),
            pytest.param(EXPERTS, 4, {"recomputations": ("none", "moe", "full")}, id="moe"),
        ],
    ),
)
def test_the_best_are_those_of_brute_force(model: Model, batch: int, only: dict[str, Any]) -> None:
    machine, job = make_tight_machine(4, gib=1.5), FEW.replace(global_batch=batch)
    every = search_by_brute_force(model, machine, job, **only)
    assert len(every) > 100
    result = search(model=model, machine=machine, job=job, top=1, levels=4, **only)
    best = result.best[0].step
    fastest = min((item.step_time.seconds, item.peak_bytes) for item in every)
    assert (best.time.step_seconds, best.memory.peak_bytes) == fastest  # equal times by memory
    smallest = search(model=model, machine=machine, job=job, top=1, by="memory", **only).best[0].step
    assert smallest.memory.peak_bytes == min(item.peak_bytes for item in every)
    for level in (1, 2, 3, 4):  # the fastest under each share of the memory
        budget = MemoryRisk(model=model, machine=machine, job=job).largest_peak(4, risk=FITS_RISK) * level / 4
        within = [item.step_time.seconds for item in every if item.peak_bytes <= budget]
        known = [point.step_seconds for point in result.front if point.memory_bytes <= budget]
        assert min(within, default=None) == min(known, default=None)
    assert result.evaluated < result.tried / 10


def test_memory_budgets_take_no_work_from_the_search_for_the_best() -> None:
    """DeepSeek-V3 on 2,048 H800 got a proposal that was 2.8 % slower if six points of the front were asked for."""
    machine, job = resolve("h100:64", local=Path("/nowhere")), Job(sequence=4096, global_batch=128)
    plain, budgeted = (
        search(
            model=build_model("llama3-8b"),
            machine=machine,
            job=job,
            within=0.02,
            levels=levels,
            work=SearchWork(exact_units=500_000),
        )
        for levels in (1, 6)
    )
    assert budgeted.gap == plain.gap
    assert [result.proposal and result.proposal.layout for result in (plain, budgeted)] == ["dp64 zero1 mbs2"] * 2
    assert len(budgeted.front) > len(plain.front)


@pytest.mark.parametrize(
    "narrowed",
    mark_share(
        5,
        [
            {"adapter": "qlora:16", "objective": "dpo"},
            {"adapter": "lora:16"},
            {"objective": "dpo"},
            {"freeze": ["embed_tokens", "layers[:2]"]},
            {"adapter": {"rank": 16, "dropout": 0.1}, "stack": "megatron-bridge"},
        ],
    ),
    ids=str,
)
def test_the_best_of_fine_tuning_are_those_of_brute_force(narrowed: dict[str, Any]) -> None:
    machine, job = make_tight_machine(4, gib=0.6), Job.model_validate({**dict(FEW), "global_batch": 8, **narrowed})
    only: dict[str, Any] = {"recomputations": ("none", "full"), "axes": ("tp", "pp"), "placements": False}
    model = SMALL.replace(layers=4, width=256, ffn=1024)
    every = search_by_brute_force(model, machine, job, **only)
    result = search(model=model, machine=machine, job=job, top=1, **only)
    best = result.best[0].step
    fastest = min((item.step_time.seconds, item.peak_bytes) for item in every)
    assert (best.time.step_seconds, best.memory.peak_bytes) == fastest
    assert result.evaluated < result.tried


@pytest.mark.parametrize("batch", mark_share(2, [4, 16]))
def test_the_best_tight_layout_is_that_of_brute_force(batch: int) -> None:
    """Of all that run out of memory with a probability above the limit, but less likely than not."""
    machine, job = make_tight_machine(4, gib=1.0), FEW.replace(global_batch=batch)
    planner = Planner(model=SMALL, machine=machine, job=job)
    only: dict[str, Any] = {"recomputations": ("none", "full"), "axes": ("tp", "pp"), "placements": False}
    every = search_by_brute_force(SMALL, machine, job, TIGHT_RISK, **only)
    risks = {item.layout: planner.out_of_memory_risk(item.layout, item.ranks) for item in every}
    fastest = min(item.step_time.seconds for item in every if risks[item.layout] <= FITS_RISK)
    between = [item for item in every if risks[item.layout] > FITS_RISK and item.step_time.seconds < fastest]
    result = search(model=SMALL, machine=machine, job=job, top=1, **only)
    assert result.best[0].step.time.step_seconds == fastest
    assert result.tight is not None
    assert between, "a tight layout beats all that fit"
    best = min(between, key=lambda item: (item.step_time.seconds, item.peak_bytes))
    assert (result.tight.step_seconds, result.tight.memory_bytes) == (best.step_time.seconds, best.peak_bytes)
    assert result.tight.faster == pytest.approx(fastest / best.step_time.seconds - 1)
    allowed = search(model=SMALL, machine=machine, job=job, top=1, risk=float(result.tight.option), **only)
    assert allowed.best[0].step.time.step_seconds == best.step_time.seconds
    assert allowed.best[0].step.memory.verdict == "tight"
    no_more = search(model=SMALL, machine=machine, job=job, top=1, within=result.tight.faster * 1.01, **only)
    assert no_more.tight is None, "gains no more than a proposal gives up for a simpler layout"


@pytest.mark.parametrize(("gib", "software", "wins"), [(4, "torchtitan", "step"), (6, "fivefold", "micro_batch")])
def test_the_search_chooses_how_often_gradients_are_reduced(gib: float, software: str, wins: str) -> None:
    """Against brute force under both: which one wins depends on what else the memory allows."""
    machine = make_tight_machine(4, gib=gib)
    job = FEW.replace(sequence=8192, stack=stack(software))
    only: dict[str, Any] = {"axes": (), "placements": False, "recomputations": ("none", "full")}
    best = min(
        (item.step_time.seconds, item.peak_bytes, str(item.layout), reduce)
        for reduce in ("micro_batch", "step")
        for item in search_by_brute_force(SMALL, machine, job.replace(reduce=reduce), **only)
    )
    assert best[3] == wins
    result = search(model=SMALL, machine=machine, job=job, top=2, reduces=("step",), **only)
    first = result.best[0]
    assert (first.step.time.step_seconds, first.step.memory.peak_bytes, first.step.layout, first.reduce) == best
    assert (first.step.layout, wins) in {(point.layout, point.reduce) for point in result.front}


def test_a_stack_finds_the_best_of_what_it_runs() -> None:
    """Of all layouts of ours, those that ``refuse`` lets pass under the stack, and its config can be told."""
    machine, job = make_tight_machine(4, gib=1.5), FEW.replace(stack=stack("megatron-core"))
    only: dict[str, Any] = {"recomputations": ("none", "mlp"), "placements": False}
    ours = Space(SMALL, FEW, world=4, **only)
    candidates = ours.expand(ours.partials, ours.partials.dp.nonzero()[0])
    candidates = ours.shard(ours.partials, ours.place(ours.partials, candidates))
    every = [ours.layout(ours.partials, candidates, at) for at in range(len(candidates.partial))]
    runs = [
        layout
        for layout in every
        if can_express(layout, model=SMALL, job=job)
        and not any(list_reasons(layout, model=SMALL, job=job, machine=machine))
    ]
    assert 100 < len(runs) < len(every) / 2
    planner = Planner(model=SMALL, machine=machine, job=job)
    fitting = [item for item in map(planner.estimate, runs) if planner.fits(item.layout, item.ranks)]
    result = search(model=SMALL, machine=machine, job=job, top=5, **only)
    best = result.best[0].step
    fastest = min((item.step_time.seconds, item.peak_bytes) for item in fitting)
    assert (best.time.step_seconds, best.memory.peak_bytes) == fastest
    assert result.tried == len(runs)
    assert {item.step.layout for item in result.best} <= set(map(str, runs))


def test_layouts_that_differ_by_order_alone_and_cost_the_same_are_one_row() -> None:
    machine, job = resolve("h100:16", local=Path("/nowhere")), Job(sequence=4096, global_batch=64)
    result = search(model=build_model("llama3-8b"), machine=machine, job=job, top=12)
    rows = [
        (re.sub(" order=[a-z-]+", "", item.step.layout), item.step.time.step_seconds, item.step.memory.peak_bytes)
        for item in result.best
    ]
    assert len(set(rows)) == len(rows) == 12
    assert any("only by order=" in remark for remark in result.remarks)


def test_the_ranking_is_sorted_and_counts_all_layouts() -> None:
    seen: list[tuple[int, int]] = []
    result = search(
        model=build_model("llama3-8b"), machine=NODE, job=JOB, top=5, report=lambda *done: seen.append(done)
    )
    ranks = [(item.step.time.step_seconds, item.step.memory.peak_bytes) for item in result.best]
    assert ranks == sorted(ranks)
    assert len({item.step.layout for item in result.best}) == 5
    assert all(item.step.memory.fits for item in result.best)
    assert seen == sorted(seen)
    assert seen[-1][0] <= seen[-1][1] == result.tried > 50_000
    assert sum(reason.layouts for reason in result.reasons if reason.cause == "memory") > 0
    assert SearchResult.model_validate_json(result.model_dump_json()) == result


def test_a_search_by_cost_counts_gpu_hours_and_dollars() -> None:
    priced = make_tight_machine(4, gib=1.0).replace(dollars_per_rank_hour=2.5)
    result = search(model=SMALL, machine=priced, job=FEW.replace(global_batch=4), top=1, by="cost", **PLAIN)
    best = result.best[0]
    assert best.gpu_hours == pytest.approx(best.step.time.step_seconds * best.step.world / 3600)
    assert best.dollars == pytest.approx(2.5 * best.gpu_hours)
    fastest = best_of_tight_machine().best[0].step
    assert best.gpu_hours <= fastest.time.step_seconds * fastest.world / 3600


def test_a_lower_precision_is_searched_only_if_allowed() -> None:
    model, job, only = (
        build_model("llama3-8b"),
        JOB.replace(global_batch=8),
        Where.parse("tp=1 pp=1 cp=1 order=default"),
    )
    wide, narrow = (
        search(model=model, machine=NODE, job=job, top=1, where=only, recipes=recipes).best[0].step
        for recipes in ([], [RECIPES["fp8"]])
    )
    assert narrow.time.step_seconds < wide.time.step_seconds
    assert narrow.job["precision"]["name"] == "fp8"  # type: ignore[index]


@pytest.mark.parametrize("where", mark_share(2, ["pp=1 tp=1 cp=1 order=default", "pp=1 tp=1 order=default"]))
def test_the_ranking_has_the_fastest_layouts_of_all_precisions(where: str) -> None:
    """The slower layouts of the job's own precision, searched first, do not stand for faster ones in fp8."""
    model, job, only = build_model("llama3-8b"), JOB.replace(global_batch=8), Where.parse(where)
    result = search(model=model, machine=NODE, job=job, top=4, within=0.02, where=only, recipes=[RECIPES["fp8"]])
    seconds = {
        name: sorted(
            estimate.step_time.seconds
            for estimate in search_by_brute_force(model, NODE, job.replace(precision=RECIPES[name]), where=only)
        )
        for name in ("bf16", "fp8")
    }
    fastest = sorted((*seconds["bf16"], *seconds["fp8"]))[:4]
    assert [ranked.step.time.step_seconds for ranked in result.best] == pytest.approx(fastest)
    assert [ranked.precision for ranked in result.best] == ["fp8"] * 4
    proposal = result.proposal
    assert proposal is not None
    assert proposal.unchanged is not None
    assert (proposal.choice.precision, proposal.unchanged.precision) == ("fp8", "bf16")
    assert proposal.unchanged.step_seconds == pytest.approx(seconds["bf16"][0])
    console = Console(width=200, file=StringIO())
    console.print(render_page(result, precision="bf16"))
    assert f"in bf16  {proposal.unchanged.layout}: step time" in console.file.getvalue()  # type: ignore[attr-defined]


def test_the_layout_of_a_config_is_ranked_with_the_best() -> None:
    own, only = Layout.parse("dp8 zero3 mbs1 ac=full"), Where.parse("pp=1 tp=1 cp=1 order=default")
    model = build_model("llama3-8b")
    result = search(model=model, machine=NODE, job=JOB, top=2, within=0.02, where=only, own=own)
    expected = predict(model=model, machine=NODE, layout=own, job=JOB)
    assert result.own is not None
    assert result.proposal is not None
    assert result.own.step == expected
    best = result.proposal.choice.step
    less = 1 - best.time.step_seconds / expected.time.step_seconds
    assert f"yours: {own}, step time" in result.describe_gain()
    assert f"the proposal takes {less:.1%} less time" in result.describe_gain()
    console = Console(width=200, file=StringIO())
    console.print(render_page(result))
    rows = console.file.getvalue().partition("The fastest layouts")[2].splitlines()  # type: ignore[attr-defined]
    assert rows[3].split()[:6] == ["yours", *str(own).split(), *show_seconds(expected.time.step_seconds).split()[:1]]
    assert "yours" in html(result)
    same = search(model=model, machine=NODE, job=JOB, top=2, within=0.02, where=only, own=Layout.parse(best.layout))
    assert same.describe_gain().endswith(": it is the proposal")
    assert search(model=model, machine=NODE, job=JOB, top=1, where=only).describe_gain() == ""


def test_a_search_without_a_fit_proposes_what_would_fit() -> None:
    model, only = build_model("llama3-70b"), Where.parse("ac=none,full order=default cp=1")
    result = search(model=model, machine=NODE, job=JOB, where=only)
    assert result.best == ()
    assert result.front == ()
    miss = result.misses[0]
    assert [reason.nearest for reason in result.reasons if reason.cause == "memory"] == [miss.layout]
    assert miss.needs_bytes > miss.has_bytes == NODE.chip.memory_bytes
    assert miss.risk is not None
    assert miss.risk > FITS_RISK
    assert any(" ranks as 'dp" in mend for mend in miss.fixes)  # its batch is kept where it can be divided
    assert result.reasons[0].cause == "memory"
    precisions = {mend.partition(":")[0] for mend in miss.fixes if mend.startswith("--precision ")}
    assert len(precisions) <= 1
    for name in (words.split()[1] for words in precisions):
        smaller = JOB.replace(precision=name)
        assert Planner(model=model, machine=NODE, job=smaller).fits(Layout.parse(miss.layout))
    few = search(model=model, machine=NODE, job=JOB.replace(global_batch=8), where=only)
    assert any(" ranks with gbs " in mend for miss in few.misses for mend in miss.fixes)


def test_what_would_fit_is_a_precision_of_the_software_or_more_of_its_gpus() -> None:
    """A model that 13 to 15 bytes per parameter fit, in software with ZeRO-1 and its own fp8."""
    model = SMALL.replace(layers=30, width=4096, heads=32, kv_heads=8, ffn=14336, moe=None)
    job = JOB.replace(stack="deepseek", global_batch=2)
    layout, narrow = Layout.parse("dp1 pp2 mbs1"), resolve("h100:2", local=Path("/nowhere"))
    peak = {
        name: Planner(model=model, machine=narrow, job=job.replace(precision=name)).step(layout).memory.peak_bytes
        for name in ("bf16", "fp8-deepseek")
    }
    machine = narrow.replace(chip=narrow.chip.replace(memory_bytes=(peak["bf16"] + peak["fp8-deepseek"]) // 2))
    fixes = [fix.line for fix in find_fixes(Planner(model=model, machine=machine, job=job, risk=0.4), layout)]
    assert [fix for fix in fixes if "precision" in fix] == [
        f"--precision fp8-deepseek: {show_bytes(peak['fp8-deepseek'])}"
    ]
    assert any(re.match(r"4 ranks .*as 'dp2 pp2 zero1 1f1b mbs1'", fix) for fix in fixes)
    old = machine.replace(chip=machine.chip.replace(peak_flops={"bf16": 312e12}))
    old_planner = Planner(model=model, machine=old, job=job, risk=0.4)
    assert not any("fp8" in fix.words for fix in find_fixes(old_planner, layout))


def test_changes_that_the_software_does_not_have_are_not_offered() -> None:
    """Megatron-Core has no 8-bit AdamW, which would fit a mixture on 8 GPUs that offloading fits too."""
    planner = Planner(
        model=build_model("qwen3-30b-a3b"),
        machine=resolve("h100:8", local=Path("/nowhere")),
        job=Job(stack="megatron-core", global_batch=512),
        risk=FITS_RISK,
    )
    layout = Layout.parse("dp2 tp2 pp2 ep4 zero1 1f1b mbs4 ac=full")
    narrow = planner.job.replace(optimizer=planner.job.optimizer.replace(kind="adamw8bit"))
    assert Planner(model=planner.model, machine=planner.machine, job=narrow, risk=FITS_RISK).fits(layout)
    assert [fix.words for fix in find_job_fixes(planner, layout)] == ["offload=optimizer"]
    tight = TightLayout(
        layout=str(layout), precision="bf16", risk=0.48, memory_bytes=1, step_seconds=1.0, faster=1.2, fixes=("a", "b")
    )
    assert tight.line().endswith("; it would fit with a or b")


def test_layouts_on_one_gpu_are_not_rejected_because_of_messages() -> None:
    """Those that take more memory in less time than the best by memory have no part that takes longer."""
    one_gpu = resolve("h100:1", local=Path("/nowhere"))
    result = search(
        model=build_model("llama3.2-1b"), machine=one_gpu, job=Job(sequence=4096, global_batch=16), by="memory", top=3
    )
    assert {reason.cause for reason in result.reasons} <= {"bound", "memory"}


def test_a_search_by_cost_compares_with_the_cheapest() -> None:
    result = search(model=SMALL, machine=make_tight_machine(2, gib=64.0), job=FEW, by="cost", within=0.02)
    printed = StringIO()
    Console(file=printed, width=120).print(render_page(result))
    text = " ".join(printed.getvalue().split())
    assert "of the cheapest" in text
    assert "The cheapest layouts" in text


def test_a_search_by_cost_proposes_all_ranks_where_that_costs_the_same() -> None:
    machine, job = make_tight_machine(4, gib=64.0), FEW.replace(global_batch=64)
    only: dict[str, Any] = {"recomputations": ("none", "full"), "axes": ("tp", "pp"), "placements": False}
    result = search(model=SMALL, machine=machine, job=job, by="cost", within=0.02, **only)
    assert result.proposal is not None
    proposed = result.proposal.choice
    assert proposed.gpu_hours <= 1.02 * result.best[0].gpu_hours
    by_world = [
        search(model=SMALL, machine=machine, job=job, by="cost", top=1, worlds=(world,), **only).best[0]
        for world in (1, 2, 4)
    ]
    similar = [best for best in by_world if best.gpu_hours <= 1.02 * result.best[0].gpu_hours]
    assert proposed.step.world == max(best.step.world for best in similar)


def test_a_search_by_cost_says_what_idle_gpus_would_gain() -> None:
    result = search(model=SMALL, machine=make_tight_machine(4, gib=64.0), job=FEW, by="cost", within=0.02)
    assert result.proposal is not None
    world = result.proposal.choice.step.world
    assert (f"{world} of the 4 GPUs: the others are idle" in result.proposal.remark) == (world < 4)
    assert world < 4


def test_the_nearest_misses_are_those_of_brute_force() -> None:
    """Of equal memory the fastest."""
    machine, job = make_tight_machine(4, gib=0.25), FEW.replace(global_batch=4)
    only: dict[str, Any] = {"recomputations": ("none", "full"), "axes": ("tp", "pp"), "placements": False}
    every = search_by_brute_force(EXPERTS, make_tight_machine(4, gib=80), job, **only)
    nearest = sorted((item.peak_bytes, item.step_time.seconds, str(item.layout)) for item in every)[:3]
    result = search(model=EXPERTS, machine=machine, job=job, **only)
    assert result.best == ()
    assert [(miss.needs_bytes, miss.layout) for miss in result.misses] == [(peak, text) for peak, _, text in nearest]


def test_where_no_layout_fits_the_fastest_tight_one_is_that_of_brute_force() -> None:
    machine, job = make_tight_machine(4, gib=0.86), FEW.replace(global_batch=4)
    only: dict[str, Any] = {"recomputations": ("none", "full"), "axes": ("tp", "pp"), "placements": False}
    every = search_by_brute_force(EXPERTS, machine, job, TIGHT_RISK, **only)
    planner = Planner(model=EXPERTS, machine=machine, job=job)
    assert min(planner.out_of_memory_risk(item.layout, item.ranks) for item in every) > FITS_RISK
    result = search(model=EXPERTS, machine=machine, job=job, top=1, **only)
    assert (result.best, result.undecided) == ((), False)
    assert result.tight is not None
    assert result.tight.step_seconds == min(item.step_time.seconds for item in every)


@pytest.mark.long  # of a large model; the nearest misses of small ones are those of brute force above
def test_where_no_layout_fits_the_work_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Near misses need little more than the least memory, which takes several times the work to find."""
    spent: list[SearchWork] = []

    def record(**limits: int) -> SearchWork:
        spent.append(SearchWork(**limits))
        return spent[-1]

    model, machine = build_model("glm4.5-air"), resolve("h100:16", local=Path("/nowhere"))
    monkeypatch.setattr("fivefold.planner.search.SearchWork", record)
    result = search(model=model, machine=machine, job=JOB, top=1)
    assert (result.best, result.undecided, result.describe_unfit()) == ((), False, "none fits")
    assert sum(work.units for work in spent) < 1_500_000
    smallest = Layout.parse("dp1 tp8 cp2 ep8 zero3 mbs1 ac=full")  # by a search without a limit
    least = Planner(model=model, machine=machine, job=JOB).peak_bytes(smallest)
    assert least <= result.misses[0].needs_bytes <= 1.01 * least


@pytest.mark.long  # only speed
def test_first_layouts_that_are_tried_are_those_that_may_fit() -> None:
    """Tight layouts, which are faster, would take the place of those that lower the threshold."""
    work, machine = SearchWork(), make_tight_machine(4, gib=1.0)
    result = search(model=SMALL, machine=machine, job=FEW.replace(global_batch=4), top=1, work=work)
    assert (result.evaluated, work.units) <= (92, 610_000)


@pytest.mark.long  # only speed
def test_few_sequences_on_many_ranks_are_first_searched_beyond_a_node() -> None:
    """With 2 sequences on 64 ranks no layout has its tp and cp within a node, and as many micro-batches as stages.

    The first layout was then one that fits by any means, and none was found for large models of experts.
    """
    machine = with_ranks(NODE, 64)
    job, only = FEW.replace(global_batch=2), ("none", "full")
    assert search(model=EXPERTS, machine=machine, job=job, top=1, recomputations=only).evaluated < 100


@pytest.mark.long  # of 7 million layouts
@pytest.mark.slow
def test_a_layout_of_few_sequences_is_found_for_a_large_model() -> None:
    machine = resolve("h100:256", local=Path("/nowhere"))
    job = Job(sequence=4096, global_batch=4)
    assert search(model=build_model("gpt-oss-20b"), machine=machine, job=job, top=1).best


def test_a_layout_of_least_memory_that_fits_is_proposed_after_a_search_that_found_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was shown as a near miss, which needs 3 of 15 GiB."""

    def find_none(solver: Any, spaces: Any, known: Any, problem: SearchProblem) -> Any:
        solver.incumbents.is_undecided = True
        return {job: problem._replace(job=job).build_planner() for job, _ in spaces}

    monkeypatch.setattr("fivefold.planner.search._search_until_stopped", find_none)
    machine, job = make_tight_machine(4, gib=8), FEW.replace(global_batch=4)
    result = search(model=SMALL, machine=machine, job=job, within=0.02, recomputations=("none", "full"))
    assert (result.misses, result.undecided) == ((), False)
    assert result.proposal is not None
    assert all(ranked.step.memory.verdict == "fits" for ranked in result.best)
    assert result.gap is None
    assert "not proven to be near the best possible within the work limit" in result.gap_line()
    small = make_tight_machine(4, gib=0.3)
    unfit = search(model=SMALL, machine=small, job=job, within=0.02, recomputations=("none", "full"))
    assert (unfit.best, unfit.undecided, len(unfit.misses)) == ((), True, 3)


def test_a_search_that_ends_at_its_work_limit_does_not_claim_that_nothing_fits() -> None:
    machine, job = make_tight_machine(4, gib=0.6), FEW.replace(global_batch=4)

    def find(**options: Any) -> SearchResult:
        only: dict[str, Any] = {"recomputations": ("none", "full"), "axes": ("tp", "pp"), "placements": False}
        return search(model=EXPERTS, machine=machine, job=job, top=1, **only, **options)

    limited, exact = find(work=SearchWork(exact_units=0)), find(exact=True)
    assert (limited.best, limited.undecided, exact.best, exact.undecided) == ((), True, (), False)
    console = Console(width=200, record=True, file=StringIO())
    console.print(render_page(limited))
    for text in (console.export_text(), html(limited), limited.line()):
        assert "none was found to fit within the work limit" in text
        assert "none fits" not in text
    assert "none fits" in exact.line()
    assert limited.misses == exact.misses


def test_a_search_without_any_candidate_layout_ends_with_near_misses() -> None:
    long = Job(sequence=2**20, global_batch=1, stack=stack("megatron-core"))
    result = search(model=build_model("llama3-8b"), machine=NODE, job=long, top=1)
    assert (result.best, len(result.misses) > 0) == ((), True)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("dp2 tp2x2 mbs1 nosp", "2D tensor parallelism is not supported with nosp; try 'dp2 tp4"),
        ("dp16 mbs1", "needs 16 ranks"),
        ("dp8 mbs16", "gbs 128"),
    ],
)
def test_a_layout_that_cannot_run_is_a_one_line_error(text: str, said: str) -> None:
    with pytest.raises(UserError, match=said) as caught:
        predict(model=build_model("llama3-8b"), machine=NODE, layout=Layout.parse(text), job=JOB)
    assert "\n" not in str(caught.value)


def test_recomputation_that_the_software_cannot_express_is_reported() -> None:
    job = JOB.replace(stack=stack("fsdp2"))
    with pytest.raises(UserError, match="search does not try ac=mlp with fsdp2"):
        search(model=SMALL, machine=NODE, job=job, where=Where.parse("ac=mlp"))
    result = search(model=SMALL, machine=NODE, job=job, where=Where.parse("ac=none,mlp tp=1"))
    assert any("does not try ac=mlp with fsdp2" in remark for remark in result.remarks)


def test_a_number_of_ranks_that_no_layout_can_use_is_an_error() -> None:
    with pytest.raises(UserError, match="try gbs 11"):
        search(model=SMALL, machine=NODE.replace(ranks=11), job=FEW.replace(global_batch=8))


def test_a_faster_chip_shortens_the_step_and_parts_add_up() -> None:
    model, layout = build_model("llama3-8b"), Layout.parse("dp8 zero3 mbs1")
    step = predict(model=model, machine=NODE, layout=layout, job=JOB)
    chip = NODE.chip.replace(peak_flops={k: 2 * v for k, v in NODE.chip.peak_flops.items()}, power_watts=None)
    double = NODE.replace(chip=chip)
    assert predict(model=model, machine=double, layout=layout, job=JOB).time.step_seconds < step.time.step_seconds
    parts = step.time.compute_seconds + sum(step.time.exposed_seconds.values()) + step.time.optimizer_seconds
    assert parts == pytest.approx(step.time.step_seconds)
    assert 0.2 < step.mfu.causal < step.mfu.non_causal < 0.75


def test_predict_with_names_equals_predict_with_records() -> None:
    step = fivefold.predict("llama3-8b", "h100:8", "dp8 zero3 mbs1", sequence=4096, global_batch=64)
    assert step == predict(model=build_model("llama3-8b"), machine=NODE, layout=Layout.parse("dp8 zero3 mbs1"), job=JOB)


def test_fits_any_agrees_with_search() -> None:
    """Of sizes on both sides of the limit; and a search without a time has the same nearest misses."""
    job, node = Job(sequence=2048, global_batch=8), resolve("l4:2", local=Path("/nowhere"))
    for layers in (1, 64):
        model = build_model("llama3.2-1b").replace(layers=layers)
        result = search(model=model, machine=node, job=job, top=1)
        assert bool(find_fitting_layout(ANY_LAYOUT, model=model, machine=node, job=job)) == bool(result.best)
        needs = [miss.needs_bytes for miss in result.misses]
        assert needs == sorted(needs)
        assert not needs or len(needs) == 3


def test_a_search_without_tight_layouts_finds_the_same_best() -> None:
    machine, job = make_tight_machine(4, gib=1.0), FEW.replace(global_batch=4)
    every, some = best_of_tight_machine(), search(model=SMALL, machine=machine, job=job, top=1, tight=False, **PLAIN)
    assert every.tight is not None
    assert some.tight is None
    assert (some.best[0].step, some.evaluated < every.evaluated) == (every.best[0].step, True)


def test_an_interrupted_search_returns_the_best_so_far() -> None:
    told: list[tuple[str, float]] = []

    def on_improved(layout: str, score: float) -> None:
        told.append((layout, score))
        raise KeyboardInterrupt

    def interrupt(*_: int) -> None:
        raise KeyboardInterrupt

    model, machine = SMALL, make_tight_machine(4, gib=1.5)
    result = search(model=model, machine=machine, job=FEW, within=0.02, improved=on_improved, **PLAIN)
    assert result.stopped
    assert result.proposal is not None
    assert result.best[0].step.time.step_seconds <= told[0][1]
    assert len(told) == 1
    whole = search(model=model, machine=machine, job=FEW, top=1, **PLAIN)
    assert not whole.stopped
    assert result.tried < whole.tried
    with pytest.raises(KeyboardInterrupt):  # nothing is known yet
        search(model=model, machine=NODE.replace(chip=NODE.chip.replace(memory_bytes=2**31)), job=JOB, report=interrupt)


@pytest.mark.parametrize("by", mark_share(2, ["time", "memory"]))
def test_a_search_at_its_work_limit_states_the_gap_to_the_best_possible(by: By) -> None:
    """The gap is proven: the optimum of brute force lies within it, and the limit does not depend on the computer."""
    machine, job = make_tight_machine(4, gib=1.5), FEW.replace(global_batch=4)
    only: dict[str, Any] = {"recomputations": ("none", "full"), "axes": ("tp", "pp"), "placements": False}
    every = search_by_brute_force(EXPERTS, machine, job, **only)
    optimum = min(item.step_time.seconds if by == "time" else item.peak_bytes for item in every)

    def find(work: SearchWork) -> SearchResult:
        return search(model=EXPERTS, machine=machine, job=job, by=by, top=1, work=work, **only)

    full = SearchWork()
    exact = find(full)
    assert exact.gap == 0
    for share in (0.0, 0.6):
        result, again = (find(SearchWork(exact_units=int(share * full.units), doubling_units=1000)) for _ in range(2))
        first = result.best[0].step
        best = first.time.step_seconds if by == "time" else first.memory.peak_bytes
        assert result.gap
        assert best <= optimum * (1 + result.gap) * (1 + 1e-9)
        assert again.replace(seconds=0) == result.replace(seconds=0)


@pytest.mark.long  # ``test_no_single_change…`` holds what a search at its limit ends with
def test_a_search_at_its_work_limit_is_no_worse_than_one_without_tensor_and_context_parallelism() -> None:
    """Few layouts fit, without tp and cp, and bounds of the many others take the work."""
    model, machine = build_model("qwen3.5-397b-a17b"), resolve("h200:64", local=Path("/nowhere"))

    def find(*axes: Axis) -> SearchResult:
        return search(
            model=model,
            machine=machine,
            job=Job(global_batch=512),
            top=1,
            axes=axes,
            recomputations=("none", "full"),
            schedules=("1f1b", "interleaved"),
            placements=False,
            tight=False,
            work=SearchWork(exact_units=1_000_000),
        )

    plain, full = find("pp", "ep"), find("tp", "cp", "pp", "ep")
    assert plain.gap == 0
    assert full.gap != 0
    assert full.best[0].step.time.step_seconds <= plain.best[0].step.time.step_seconds


def test_no_single_change_is_faster_than_the_best_of_a_search_at_its_work_limit() -> None:
    model, machine, job = build_model("mixtral-8x7b"), resolve("h100:64", local=Path("/nowhere")), Job(global_batch=256)
    only: dict[str, Any] = {"recomputations": ("none", "full"), "placements": False}
    result = search(model=model, machine=machine, job=job, top=1, tight=False, work=SearchWork(exact_units=0), **only)
    assert result.gap != 0
    best, space = result.best[0].step, Space(model, job, world=64, **only)
    planner = Planner(model=model, machine=machine, job=job)
    changed = filter(None, map(space.find, list_neighbours(Layout.parse(best.layout), planner, uneven=False)))
    fitting = [planner.estimate(layout).step_time.seconds for layout in changed if planner.fits(layout)]
    assert min(fitting) >= best.time.step_seconds


def test_a_search_within_its_work_limit_is_exact() -> None:
    machine, job = make_tight_machine(4, gib=1.5), FEW.replace(global_batch=4)
    only: dict[str, Any] = {"recomputations": ("none", "moe", "full"), "axes": ("tp", "pp"), "placements": False}
    limited = search(model=EXPERTS, machine=machine, job=job, top=5, **only)
    exact = search(model=EXPERTS, machine=machine, job=job, top=5, exact=True, **only)
    assert limited.gap == 0
    assert limited.replace(seconds=0) == exact.replace(seconds=0)


def test_a_search_for_any_layout_that_fits_ends_at_its_work_limit() -> None:
    machine, job, work = make_tight_machine(4, gib=1.5), FEW.replace(global_batch=4), SearchWork(exact_units=0)
    assert find_fitting_layout(ANY_LAYOUT, model=EXPERTS, machine=machine, job=job) is not None
    assert find_fitting_layout(ANY_LAYOUT, model=EXPERTS, machine=machine, job=job, work=work) is None
    assert work.is_spent


def test_the_gap_grows_with_the_work_beyond_the_limit() -> None:
    work = SearchWork(exact_units=1000, doubling_units=100)
    gaps = []
    for units in (1000, 1, 500, 100, 100, 10**9):
        work.add(units)
        gaps.append(work.allowed_gap)
    assert gaps == [0.0, FIRST_GAP, FIRST_GAP, 2 * FIRST_GAP, 4 * FIRST_GAP, FIRST_GAP * 2.0**MAX_DOUBLINGS]
    with work.extend(10):
        assert work.allowed_gap == 0
        work.add(11)
        assert work.allowed_gap == FIRST_GAP
    assert work.allowed_gap == gaps[-1]


@pytest.mark.parametrize(
    ("gap", "line"),
    [
        (0.0, ""),
        (None, "not proven to be near the best possible within the work limit; --exact searches without one"),
        (0.01301, "within 1.4 % of the best possible; --exact searches without a work limit"),  # rounded up
        (0.6, "not proven to be near the best possible within the work limit; --exact searches without one"),
    ],
)
def test_every_page_says_that_a_better_layout_may_exist(gap: float | None, line: str) -> None:
    result = best_of_tight_machine().replace(gap=gap)
    assert result.gap_line() == line
    console = Console(width=200, record=True, file=StringIO())
    console.print(render_page(result))
    for text in (console.export_text(), html(result)):
        assert ("The best layout is" in text) == bool(line)
        assert line in text
    assert line in result.line()


def test_a_search_without_a_valid_layout_says_why_data_parallelism_alone_is_none() -> None:
    """Not that another batch would help, which is divisible already."""
    job = Job.model_validate({**dict(FEW), "stack": "fsdp2", "adapter": {"rank": 8, "base": "fp8"}})
    with pytest.raises(UserError, match=r"'dp8 zero3 mbs1': .* sharded by ZeRO-3; use dp with zero0 to zero2"):
        search(model=SMALL, machine=NODE, job=job)
