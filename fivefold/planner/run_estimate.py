"""A complete training run: days, money, energy and CO2, with checkpoints and failures (Daly, FGCS 22 (2006) 303).

    T = M·exp(R / M)·(exp((τ + δ) / M) - 1)·W / τ        goodput = W / T        Young: τ = sqrt(2·δ·M)

W seconds of work are saved every τ seconds by a checkpoint, for which training stops for δ seconds. Failures occur at
random, one in M seconds. Each costs a restart of R seconds and the work since the last complete checkpoint.
"""

from __future__ import annotations

from math import ceil, exp, expm1, floor, inf, log, sqrt

from fivefold.bounded_types import RUN_TOKENS
from fivefold.errors import UserError
from fivefold.job import Job
from fivefold.layout.sharding import is_trained, list_units
from fivefold.machine.datacenter import SOURCES, Site
from fivefold.machine.spec import Machine
from fivefold.model.spec import Model
from fivefold.model.vision_weights import list_vision_weights
from fivefold.model.weights import Weight, list_trained_weights
from fivefold.optimizers.cost import find_cost
from fivefold.results.run_estimate import Goodput, RunEstimate
from fivefold.step import Step
from fivefold.units import show_seconds
from fivefold.update import is_quantized

DAY = 86400.0
POINTS = 33  # of the curve of goodput against the interval
MAX_EXPONENT = 600.0  # exponent beyond which a float overflows: nothing is ever done
ENDLESS_SECONDS = 1e30  # seconds of a run that does not end
MIN_RUN_TOKENS = 1000  # fewer are a number without its T or B
MAX_FAILURE_SECONDS = (
    100 * 365 * DAY
)  # between failures; a run that never fails is saved as if it did so once in a century


def validate_tokens(tokens: float) -> float:
    """Return ``tokens`` if a run can have that many. Otherwise raises a ``UserError``."""
    if not MIN_RUN_TOKENS <= tokens <= RUN_TOKENS:
        raise UserError(
            f"tokens={tokens:g}: a run has {MIN_RUN_TOKENS:,} to {RUN_TOKENS:g}; write for example 2T or 1e12"
        )
    return tokens


def compute_goodput(interval: float, *, pause_seconds: float, recovery_seconds: float, mtbf_seconds: float) -> float:
    """Return W / T, the share of time spent training if a checkpoint is saved every ``interval`` seconds.

    ``pause_seconds`` (δ): training waits for each checkpoint; ``recovery_seconds`` (R): restart and reading it;
    ``mtbf_seconds`` (M): mean time between failures of any rank. 0 if no interval ever ends.
    """
    if mtbf_seconds == inf:
        return interval / (interval + pause_seconds)
    if (interval + pause_seconds) / mtbf_seconds > MAX_EXPONENT or recovery_seconds / mtbf_seconds > MAX_EXPONENT:
        return 0.0
    return interval / (
        mtbf_seconds * exp(recovery_seconds / mtbf_seconds) * expm1((interval + pause_seconds) / mtbf_seconds)
    )


def find_best_checkpoint_interval(
    *, pause_seconds: float, write_seconds: float, recovery_seconds: float, mtbf_seconds: float
) -> float:
    """Return the checkpoint interval with the highest goodput, by golden section.

    It is at least ``write_seconds``, in which a checkpoint becomes complete; the others are as in ``compute_goodput``.
    """
    mtbf_seconds = min(mtbf_seconds, MAX_FAILURE_SECONDS)
    least = max(write_seconds, 1.0)
    low = log(least)
    high = log(max(2 * least, 100 * sqrt(2 * max(pause_seconds, 1e-3) * mtbf_seconds), mtbf_seconds))
    share = (sqrt(5) - 1) / 2

    def negate_goodput(at: float) -> float:
        return -compute_goodput(
            exp(at), pause_seconds=pause_seconds, recovery_seconds=recovery_seconds, mtbf_seconds=mtbf_seconds
        )

    while high - low > 1e-6:
        left, right = high - share * (high - low), low + share * (high - low)
        low, high = (low, right) if negate_goodput(left) <= negate_goodput(right) else (left, high)
    return exp((low + high) / 2)


def predict_full_run(*, step: Step, model: Model, machine: Machine, job: Job, tokens: float, site: Site) -> RunEstimate:
    """Return the full run of ``tokens`` with steps of ``step`` at ``site``.

    Raises ``UserError`` if it would never end.
    """
    steps = ceil(validate_tokens(tokens) / job.tokens_per_step)
    size = count_checkpoint_bytes(model, job)
    write_seconds = size / (site.storage * max(1, ceil(step.world / machine.ranks_per_node)))
    pause_seconds = max(site.pause_seconds, size / (site.to_host * step.world))
    mtbf_seconds = 1000 * DAY / (site.failures * step.world) if site.failures else inf
    recovery_seconds = site.restart_seconds + write_seconds  # the last checkpoint may have been incomplete
    times = {"pause_seconds": pause_seconds, "recovery_seconds": recovery_seconds, "mtbf_seconds": mtbf_seconds}
    interval = site.checkpoint_seconds or find_best_checkpoint_interval(write_seconds=write_seconds, **times)
    training = steps * step.time.step_seconds
    seconds = _compute_run_seconds(training, site=site, interval=interval, **times)
    if seconds == inf:
        raise UserError(
            f"a failure every {mtbf_seconds:.0f} s and {recovery_seconds:.0f} s to restart: with a checkpoint every "
            f"{interval:.0f} s the run never ends; lower --assume restart= or checkpoint="
        )
    low, high = (
        _bound_run_seconds(step, steps, site=site, interval=interval, high=high, **times) for high in (False, True)
    )
    hours = seconds * step.world / 3600
    price = machine.dollars_per_rank_hour
    watts = machine.chip.power_watts
    kwh = None if watts is None else hours * watts / 1000
    total_kwh = None if kwh is None else kwh * site.node_power * site.pue
    return RunEstimate(
        model=step.model,
        machine=machine.name,
        layout=step.layout,
        ranks=step.world,
        tokens=tokens,
        steps=steps,
        step_seconds=step.time.step_seconds,
        step_interval=step.time.interval,
        peak_bytes=step.memory.peak_bytes,
        capacity_bytes=machine.chip.memory_bytes,
        risk=step.memory.risk,
        training_seconds=training,
        seconds=seconds,
        low_seconds=low,
        high_seconds=high,
        lost=_estimate_lost_seconds(training, site=site, interval=interval, **times),
        failures=seconds / mtbf_seconds,
        between_failures_seconds=None if mtbf_seconds == inf else mtbf_seconds,
        checkpoint_bytes=size,
        blocked_seconds=pause_seconds,
        written_seconds=write_seconds,
        interval_seconds=interval,
        young_seconds=sqrt(2 * pause_seconds * min(mtbf_seconds, MAX_FAILURE_SECONDS)),
        goodput=training / seconds,
        curve=tuple(_list_goodput(interval, **times)),
        gpu_hours=hours,
        dollars=None if price is None else hours * price,
        chip_kwh=kwh,
        kwh=total_kwh,
        co2_kg=None if total_kwh is None else total_kwh * site.carbon / 1000,
        site=site,
    )


def count_steps_within(seconds: float, run: RunEstimate) -> int:
    """Return how many steps as those of ``run`` can be run in ``seconds``; raises ``UserError`` if not one can."""
    steps = floor(seconds * run.steps / run.seconds)
    if not steps:
        step = show_seconds(run.seconds / run.steps)
        raise UserError(
            f"a run of {show_seconds(seconds)} has no time for a step of {step}; allow more, or use more GPUs"
        )
    return steps


def _compute_run_seconds(
    training: float, *, site: Site, interval: float, pause_seconds: float, recovery_seconds: float, mtbf_seconds: float
) -> float:
    share = compute_goodput(
        interval, pause_seconds=pause_seconds, recovery_seconds=recovery_seconds, mtbf_seconds=mtbf_seconds
    )
    return training * (1 + site.evaluation) / share if share else inf


def _estimate_lost_seconds(
    training: float, *, site: Site, interval: float, pause_seconds: float, recovery_seconds: float, mtbf_seconds: float
) -> dict[str, float]:
    """Return the lost seconds by cause.

    An interval of τ seconds with its pause δ fails exp((τ + δ) / M) - 1 times at a mean time M between failures. With a
    recovery of R seconds, which may fail too, each failure takes M·(exp(R / M) - 1) seconds to recover from.
    """
    pieces = training * (1 + site.evaluation) / interval
    cycle = interval + pause_seconds
    fails = 0.0 if mtbf_seconds == inf else expm1(cycle / mtbf_seconds)
    return {
        "evaluation": training * site.evaluation,
        "checkpoints": pieces * pause_seconds,
        "restarts": pieces * fails * mtbf_seconds * expm1(recovery_seconds / mtbf_seconds) if fails else 0.0,
        "repeated": max(0.0, pieces * (mtbf_seconds * fails - cycle)) if fails else 0.0,
    }


def _bound_run_seconds(
    step: Step,
    steps: int,
    *,
    site: Site,
    interval: float,
    high: bool,
    pause_seconds: float,
    recovery_seconds: float,
    mtbf_seconds: float,
) -> float:
    """Return the seconds of the run at one end of the 50 % interval.

    It combines the step's interval with published failures and restarts.
    """
    expected, seconds = step.time.interval, step.time.step_seconds
    if expected is not None:  # where predictions have a bias, a bound may lie beyond them
        seconds = max(seconds, expected.high_50) if high else min(seconds, expected.low_50)
    if site.failures == Site().failures:
        known = SOURCES["failures"]
        mtbf_seconds *= site.failures / ((known.high if high else known.low) or site.failures)
    if site.restart_seconds == Site().restart_seconds:
        known = SOURCES["restart"]
        recovery_seconds += ((known.high if high else known.low) or site.restart_seconds) - site.restart_seconds
    times = {"pause_seconds": pause_seconds, "recovery_seconds": recovery_seconds, "mtbf_seconds": mtbf_seconds}
    run_seconds = _compute_run_seconds(steps * seconds, site=site, interval=interval, **times)
    return min(run_seconds, ENDLESS_SECONDS)


def _list_goodput(
    interval: float, *, pause_seconds: float, recovery_seconds: float, mtbf_seconds: float
) -> list[Goodput]:
    """Return goodput at intervals from a thirtieth to thirty times the chosen one."""
    curve = []
    for place in range(POINTS):
        at = interval * 30 ** (2 * place / (POINTS - 1) - 1)
        share = compute_goodput(
            at, pause_seconds=pause_seconds, recovery_seconds=recovery_seconds, mtbf_seconds=mtbf_seconds
        )
        curve.append(Goodput(interval_seconds=at, share=share))
    return curve


def count_checkpoint_bytes(model: Model, job: Job) -> int:
    """Return the bytes of a checkpoint: the weights that the optimizer updates and its states, each once.

    Frozen weights are in it too, but those under adapters.
    """
    if job.adapter is not None:
        in_full = job.replace(precision=job.saved_precision)
        weights = list(list_trained_weights(model, job.adapter, merged=job.stack.merges_adapters))
        factors = [weight for weight in weights if weight.is_adapter]
        saved = [weight for weight in weights if not weight.is_adapter]
        return _count_updated_bytes(factors, job) + _count_updated_bytes(saved, in_full)
    tower = list_vision_weights(model.vision) if model.vision is not None and job.images else ()
    every = [*(weight for unit in list_units(model, job) for weight in unit.weights), *tower]
    trained = [weight for weight in every if is_trained(weight, job)]
    frozen_bytes: int = job.activation_bytes * sum(weight.numel for weight in every if not is_trained(weight, job))
    hashed = sum(map(model.hashes_experts, range(model.layers)))
    table_bytes = 4 * hashed * model.vocab * model.moe.topk if model.moe is not None else 0
    return _count_updated_bytes(trained, job) + frozen_bytes + table_bytes


def _count_updated_bytes(weights: list[Weight], job: Job) -> int:
    """Return the bytes of the weights that the optimizer updates and of its states, each once."""
    scaled = frozenset(weight.name for weight in weights if is_quantized(weight.numel, vector=weight.is_vector))
    states: int = find_cost(job.optimizer.kind).state_bytes(tuple(weights), shards=1, quantised=scaled, job=job)
    return sum(weight.numel for weight in weights) * job.precision.updated_bytes + states
