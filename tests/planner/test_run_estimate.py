"""A full run compared with a simulation of failures, against published runs, and on several machines."""

from __future__ import annotations

import random
from math import exp, inf, sqrt
from pathlib import Path

import pytest

import fivefold as ff
from fivefold.errors import StopSignal, UserError
from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.layout.where import Where
from fivefold.machine.catalog import resolve
from fivefold.machine.datacenter import SOURCES, Site, apply_assumptions
from fivefold.machine.spec import Machine
from fivefold.model.catalog import build_model
from fivefold.model.spec import Model
from fivefold.planner.predict import predict
from fivefold.planner.run_estimate import (
    compute_goodput,
    count_checkpoint_bytes,
    find_best_checkpoint_interval,
    predict_full_run,
)
from fivefold.planner.search.multi_machine import MachineChoice, list_sizes, search_machines
from fivefold.results.run_estimate import RunEstimate
from fivefold.units import show_count
from fivefold.update import Optimizer

NODE = resolve("h100:8", local=Path("/nowhere"))
LLAMA, JOB = build_model("llama3-8b"), Job(sequence=4096, global_batch=512)
NOTHING = Site(failures=0, evaluation=0, pause_seconds=0, node_power=1, pue=1)


def run(
    text: str = "dp8 zero3 mbs1", *, tokens: float = 1e9, site: Site = NOTHING, machine: Machine = NODE
) -> RunEstimate:
    step = predict(model=LLAMA, machine=machine, layout=Layout.parse(text), job=JOB)
    return predict_full_run(step=step, model=LLAMA, machine=machine, job=JOB, tokens=tokens, site=site)


def simulate(
    work: float, *, interval: float, pause_seconds: float, recovery_seconds: float, mtbf_seconds: float
) -> dict[str, float]:
    """Seconds of a run by what they went to, event by event."""
    draw, spent = random.Random(7), {"trained": 0.0, "checkpoints": 0.0, "restarts": 0.0, "repeated": 0.0}
    done = 0.0
    while done < work:
        fails = draw.expovariate(1 / mtbf_seconds)
        if fails >= interval + pause_seconds:
            done += interval
            spent["trained"] += interval
            spent["checkpoints"] += pause_seconds
            continue
        spent["repeated"] += fails
        while (again := draw.expovariate(1 / mtbf_seconds)) < recovery_seconds:
            spent["restarts"] += again
        spent["restarts"] += recovery_seconds
    return spent


@pytest.mark.parametrize(
    ("interval", "pause_seconds", "recovery_seconds", "mtbf_seconds"),
    [(600, 20, 300, 3600), (1200, 5, 900, 4000), (100, 30, 60, 9000)],
)
def test_goodput_is_that_of_a_simulation(
    interval: float, pause_seconds: float, recovery_seconds: float, mtbf_seconds: float
) -> None:
    times = {
        "pause_seconds": float(pause_seconds),
        "recovery_seconds": float(recovery_seconds),
        "mtbf_seconds": float(mtbf_seconds),
    }
    spent = simulate(40_000 * interval, interval=interval, **times)
    share = compute_goodput(interval, **times)
    assert share == pytest.approx(spent["trained"] / sum(spent.values()), rel=0.01)


def test_lost_time_equals_a_simulation() -> None:
    site = Site(failures=3000, restart_seconds=300, checkpoint_seconds=400, pause_seconds=25, storage=1e9, evaluation=0)
    result = run(tokens=1e13, site=site)
    assert result.written_seconds == pytest.approx(96.36, rel=1e-3)  # a third of a restart: it reads what it writes
    assert sum(result.lost.values()) == pytest.approx(result.seconds - result.training_seconds)
    assert result.between_failures_seconds == pytest.approx(86400e3 / 3000 / 8)
    recovery_seconds = 300 + 96.36
    spent = simulate(
        result.training_seconds,
        interval=400,
        pause_seconds=25,
        recovery_seconds=recovery_seconds,
        mtbf_seconds=result.between_failures_seconds or 0,
    )
    for name in ("checkpoints", "restarts", "repeated"):
        assert result.lost[name] == pytest.approx(spent[name], rel=0.03), name


def test_a_checkpoint_holds_masters_and_moments() -> None:
    """Llama 3 8B has 8,030,261,248 parameters in 291 tensors: fp32 masters, two fp32 moments and a count of steps."""
    assert count_checkpoint_bytes(LLAMA, JOB) == run().checkpoint_bytes == 8_030_261_248 * (4 + 4 + 4) + 291 * 4
    # Muon keeps one moment of what is no table, no head and no norm (65 of them): arXiv:2502.16982
    adam = 2 * 128_256 * 4096 + 65 * 4096
    muon = JOB.replace(optimizer=Optimizer(kind="muon"))
    assert count_checkpoint_bytes(LLAMA, muon) == 8_030_261_248 * (4 + 4) + adam * 4 + (2 + 65) * 4
    assert count_checkpoint_bytes(LLAMA, JOB.replace(optimizer=Optimizer(kind="sgd", momentum=0))) == 8_030_261_248 * 4


@pytest.mark.parametrize(("pause_seconds", "mtbf_seconds"), [(1.0, 1e5), (10.0, 1e4), (60.0, 3000.0)])
def test_the_best_checkpoint_interval_has_the_highest_goodput_and_equals_youngs_formula(
    pause_seconds: float, mtbf_seconds: float
) -> None:
    times = {"pause_seconds": pause_seconds, "recovery_seconds": 300.0, "mtbf_seconds": mtbf_seconds}
    best = find_best_checkpoint_interval(write_seconds=0.0, **times)
    every = [exp(i / 50) for i in range(700)]
    assert compute_goodput(best, **times) >= max(compute_goodput(item, **times) for item in every) - 1e-12
    if pause_seconds < mtbf_seconds / 1000:
        assert best == pytest.approx(sqrt(2 * pause_seconds * mtbf_seconds), rel=0.03)
    assert find_best_checkpoint_interval(write_seconds=1e4, **times) == pytest.approx(max(best, 1e4), rel=1e-3)


def test_without_failures_a_run_is_its_steps() -> None:
    priced = NODE.replace(dollars_per_rank_hour=2.0)
    result = run(machine=priced)
    assert result.steps == -(-(10**9) // JOB.tokens_per_step)
    assert result.seconds == pytest.approx(result.steps * result.step_seconds, rel=1e-4)
    assert result.dollars == pytest.approx(result.seconds * 8 / 3600 * 2)
    assert result.goodput == pytest.approx(1, rel=1e-4)
    assert result.verdict == "fits"
    assert run("dp8 mbs1").verdict == "does not fit"
    assert run().dollars is None


def test_evaluations_take_their_share_of_the_training() -> None:
    """A tenth of the training's seconds more, and all of them are said to be lost to evaluations."""
    sites = [Site(failures=0, pause_seconds=0, evaluation=share) for share in (0.0, 0.1)]
    plain, evaluated = (run(site=site) for site in sites)
    assert evaluated.seconds == pytest.approx(1.1 * plain.seconds, rel=1e-4)
    assert evaluated.lost["evaluation"] == pytest.approx(0.1 * evaluated.training_seconds)
    assert evaluated.training_seconds == plain.training_seconds


def test_rate_per_gpu_is_over_all_ranks() -> None:
    """512 sequences of 4,096 tokens over the 8 GPUs of the layout, not over its 2 data-parallel ranks."""
    step = predict(model=LLAMA, machine=NODE, layout=Layout.parse("dp2 tp2 pp2 zero1 mbs1"), job=JOB)
    assert step.tokens_per_second_per_gpu * step.time.step_seconds == pytest.approx(512 * 4096 / 8)
    # 6 FLOPs per parameter of a matmul and token, and attention's two products over half of a square, times three
    flops = 512 * 4096 * (6 * (8_030_261_248 - 128_256 * 4096 - 65 * 4096) + 3 * 2 * 32 * 4097 * 4096)
    peak = NODE.chip.peak("bf16")
    assert step.mfu.causal == pytest.approx(flops / (8 * peak * step.time.step_seconds), rel=1e-6)


def test_energy_and_carbon_of_blooms_gpu_hours_equal_the_published() -> None:
    """1,082,990 GPU-hours of 400 W: 433,196 kWh, and 24.7 t with 57 g/kWh (arXiv:2211.02001, tables 2 and 3)."""
    a100 = resolve("a100:8", local=Path("/nowhere"))
    result = run(machine=a100, site=NOTHING.replace(carbon=57))
    assert result.kwh is not None
    assert result.co2_kg is not None
    scale = 1_082_990 / result.gpu_hours
    assert result.kwh * scale == pytest.approx(433_196, rel=1e-4)
    assert result.co2_kg * scale == pytest.approx(24_690, rel=1e-3)
    more = run(machine=a100, site=NOTHING.replace(node_power=1.5, pue=1.2))
    assert more.kwh == pytest.approx(1.8 * result.kwh)
    assert more.chip_kwh == pytest.approx(result.kwh)


def test_failures_of_llama_3s_gpu_days_equal_the_published() -> None:
    """419 in 54 days of 16,384 (arXiv:2407.21783 §3.3.4)."""
    assert Site().failures * 16_384 * 54 / 1000 == pytest.approx(419, rel=0.02)


def test_published_failures_bound_the_days() -> None:
    result = run(tokens=1e13, site=Site())
    assert result.low_seconds < result.seconds < result.high_seconds
    stated = run(tokens=1e13, site=Site(failures=0.48, restart_seconds=601))
    assert stated.high_seconds < result.high_seconds  # what is stated is no range


def test_the_interval_of_a_run_spans_the_fastest_and_slowest_published_restart() -> None:
    """The two ends of the range are runs whose restart is stated as the fastest and the slowest published one."""
    known, site = SOURCES["restart"], Site(failures=5000, checkpoint_seconds=900)
    assert known.low is not None
    assert known.high is not None
    fastest, slowest = (run(site=site.replace(restart_seconds=end), tokens=1e11) for end in (known.low, known.high))
    result = run(site=site, tokens=1e11)
    assert (result.low_seconds, result.high_seconds) == pytest.approx((fastest.low_seconds, slowest.high_seconds))


def test_a_run_that_never_ends_is_rejected() -> None:
    with pytest.raises(UserError, match="the run never ends; lower --assume restart= or checkpoint="):
        run(tokens=1e12, site=Site(failures=1e9, restart_seconds=1e5))


def test_assumptions_are_read_by_name() -> None:
    site = apply_assumptions(["failures=2", "grid=france", "checkpoint=30min", "restart=90s", "storage=2GB", "pue=1.1"])
    assert (site.failures, site.carbon, site.checkpoint_seconds, site.restart_seconds) == (2, 56, 1800, 90)
    assert (site.storage, site.pue, site.grid) == (2e9, 1.1, "france")
    assert apply_assumptions(["grid=350"]).carbon == 350
    for word, line in (
        ("failure=2", "unknown assumption 'failure'; did you mean failures"),
        ("pue", "'pue' is not NAME=VALUE"),
        ("pue=0.5", "pue must be 1 or more"),
        ("grid=mars", "is not a known grid"),
        ("restart=10", "is not a number and a unit; write for example 90s"),
        ("failures=-1", "is not a number"),
    ):
        with pytest.raises(UserError, match=line):
            apply_assumptions([word])


FEW = {"where": Where.parse("tp=1 cp=1 pp=1 ac=none mbs=1 zero<=1"), "within": 0.02, "site": Site()}
SMALL = Model(name="small", layers=6, width=1024, heads=8, kv_heads=4, head_dim=128, ffn=4096, vocab=32_000)


def offers(by: str, **options: object):  # type: ignore[no-untyped-def]
    machines = [resolve(name, local=Path("/nowhere")) for name in ("h100:8 price=2", "h200:8 price=9")]
    choices = [MachineChoice(machine, (8,)) for machine in machines]
    return search_machines(model=SMALL, choices=choices, job=JOB, tokens=1e9, by=by, **FEW, **options)  # type: ignore[arg-type]


@pytest.mark.slow
def test_machines_are_ranked_by_the_requested_goal() -> None:
    by_cost = offers("cost").offers
    assert [item.machine for item in by_cost] == ["h100 price=2", "h200 price=9"]
    assert by_cost[0].run.dollars == pytest.approx(by_cost[0].run.gpu_hours * 2)
    assert [offer.run.seconds for offer in offers("time").offers] == sorted(item.run.seconds for item in by_cost)


@pytest.mark.slow
def test_the_machine_of_least_energy_may_be_slower() -> None:
    """A GPU of a third of the power that is a little slower takes less energy."""
    machines = [resolve(name, local=Path("/nowhere")) for name in ("h200:8 watts=900", "h100:8 watts=300")]
    choices = [MachineChoice(machine, (8,)) for machine in machines]
    fast, thrifty = (
        search_machines(model=SMALL, choices=choices, job=JOB, tokens=1e9, by=by, **FEW).offers  # type: ignore[arg-type]
        for by in ("time", "energy")
    )
    assert [item.machine.split()[0] for item in fast] == ["h200", "h100"]
    assert [item.machine.split()[0] for item in thrifty] == ["h100", "h200"]


def test_a_search_that_is_stopped_keeps_the_machines_it_has_searched() -> None:
    begun: list[str] = []

    def second(name: str) -> None:
        begun.append(name)
        if len(begun) == 2:
            raise StopSignal("SIGINT")

    result = offers("time", done=second)
    assert result.stopped
    assert [offer.machine for offer in result.offers] == ["h100 price=2"]
    assert not offers("time").stopped
    begun[:] = ["before"]
    with pytest.raises(StopSignal):  # nothing is known yet
        offers("time", done=second)


def test_an_estimate_says_that_a_machine_has_no_price_or_watts() -> None:
    choices = [MachineChoice(NODE, (8,))]
    common = {"model": SMALL, "job": JOB, "tokens": 1e9, **FEW}
    with pytest.raises(UserError, match=r"--by cost: h100 has no price; give --price h100=2.2/h"):
        search_machines(choices=choices, by="cost", **common)  # type: ignore[arg-type]
    dark = NODE.replace(chip=NODE.chip.replace(power_watts=None))
    with pytest.raises(UserError, match="--by energy: the watts of h100 are not known"):
        search_machines(choices=[MachineChoice(dark, (8,))], by="energy", **common)  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_deadline_takes_the_fewest_ranks_that_keep_it() -> None:
    assert list_sizes(1, 8, node=8) == (1, 2, 4, 8)
    common = {"model": SMALL, "job": JOB, "tokens": 1e11, "by": "time", **FEW}
    choices = [MachineChoice(NODE, (8, 16, 32))]
    every = {offer.ranks: offer.run for offer in search_machines(choices=choices, **common).offers if offer.run}  # type: ignore[arg-type]
    assert len(every) == 3
    for ranks, slower in ((32, 16), (16, 8)):
        deadline = (every[ranks].seconds + every[slower].seconds) / 2
        (result,) = search_machines(choices=choices, deadline=deadline, **common).offers  # type: ignore[arg-type]
        assert result.ranks == ranks
        gaps = [MachineChoice(NODE, (8, 16, 24, 32))]  # a batch of 512 does not divide by three
        (again,) = search_machines(choices=gaps, deadline=deadline, **common).offers  # type: ignore[arg-type]
        assert again.replace(remark=result.remark) == result
        assert ("left out: 24 GPUs: no layout" in again.remark) == (ranks == 32)
        assert result.remark.startswith("tried: ")
        assert f"{ranks}" in result.remark
    (late,) = search_machines(choices=choices, deadline=every[32].seconds / 2, **common).offers  # type: ignore[arg-type]
    assert late.run is None
    assert late.error.endswith("a rank, 64 ranks would meet it; try --gpu-counts 64-128")
    priced = [MachineChoice(NODE.replace(dollars_per_rank_hour=2.0), (8,))]
    (late,) = search_machines(choices=priced, deadline=every[8].seconds / 2, **common).offers  # type: ignore[arg-type]
    dollars = 2 * 8 * every[8].seconds / 3600
    assert (
        f"2.0 times the deadline; at this speed of a rank, 16 ranks would meet it for the same ${dollars:,.0f};"
        in late.error
    )
    assert list_sizes(64, 512, node=8) == (64, 96, 128, 192, 256, 384, 512)


def test_a_machine_on_which_nothing_fits_is_last_with_the_nearest() -> None:
    tight = NODE.replace(ranks=1, chip=NODE.chip.replace(memory_bytes=2**31))
    result = search_machines(
        model=LLAMA, choices=[MachineChoice(tight, (1,))], job=JOB, tokens=1e9, site=Site(), by="time", within=0.02
    )
    assert result.offers[0].run is None
    assert result.offers[0].error.startswith("nothing fits: dp1 ")


def test_a_run_that_never_ends_has_no_time() -> None:
    assert compute_goodput(100, pause_seconds=1, recovery_seconds=5, mtbf_seconds=inf) == 100 / 101


def test_the_tokens_of_a_run_are_the_most_that_its_limits_allow() -> None:
    words = ("llama3-8b", "h100:16", "dp16 zero3 mbs1")
    day, site = 86400.0, {"assume": "failures=5", "price": 2.5}
    for limits, seconds in (
        ({"deadline": "10d"}, 10 * day),
        ({"budget": "6,000"}, 6000 / (2.5 * 16) * 3600),
        ({"deadline": "3d", "budget": 6000}, 3 * day),
    ):
        (longest,) = ff.ask("tokens", *words, gbs=512, **limits, **site)  # type: ignore[call-overload]
        assert longest == ff.ask("run", *words, gbs=512, tokens=longest.tokens, **site)[0]
        assert longest.tokens % (512 * 4096) == 0
        assert longest.seconds <= seconds * (1 + 1e-12)
        (longer,) = ff.ask("run", *words, gbs=512, tokens=longest.tokens + 512 * 4096, **site)
        assert longer.seconds > seconds
        assert longest.dollars == pytest.approx(2.5 * 16 * longest.seconds / 3600)


@pytest.mark.filterwarnings("ignore::fivefold.errors.UsageWarning")
def test_the_batch_of_the_longest_run_is_advised_for_its_tokens() -> None:
    words = ("llama3-8b", "h100:64", "dp64 zero3 mbs1")
    for deadline in ("1h", "2d", "30d", "300d"):
        (longest,) = ff.ask("tokens", *words, deadline=deadline)
        (same,) = ff.ask("run", *words, tokens=longest.tokens)
        (remark,) = [remark for remark in longest.remarks if "advised" in remark] or [""]
        assert remark.endswith(f"advised for {show_count(longest.tokens)} tokens" if longest.tokens > 1e11 else "")
        assert (longest.steps, longest.seconds) == (same.steps, same.seconds)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({}, "add deadline=30d or budget=50k, or both"),
        ({"budget": 1000}, "budget: h100 has no price; add the dollars per GPU hour: price=2.5"),
        ({"budget": "much"}, "budget.*'much' must be a number of dollars, such as 50000, 50k or 2M"),
        ({"budget": 0}, "budget=0 must be a number of dollars"),
        ({"deadline": "1s"}, r"a run of 1.00 s has no time for a step of .* s; allow more, or use more GPUs"),
        ({"deadline": "30"}, "deadline.*'30' is not a number and a unit"),
    ],
)
def test_limits_of_a_run_that_allow_nothing_are_errors_with_a_fix(limits: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        ff.ask("tokens", "llama3-8b", "h100:64", "dp64 zero3 mbs1", gbs=512, **limits)  # type: ignore[call-overload]
