"""Two steps to look at: a small one on two ranks, and a large pipeline with every kind of traffic."""

from __future__ import annotations

import pytest

from fivefold.step import Memory, Mfu, StageMemory, Step, Time, Traffic, Work


def stage(number: int, *, states: tuple[int, int, int], activations: int, temporary: int, cause: str) -> StageMemory:
    parameters, gradients, optimizer = states
    return StageMemory(
        stage=number,
        parameters_bytes=parameters,
        gradients_bytes=gradients,
        optimizer_bytes=optimizer,
        activations_bytes=activations,
        temporary_bytes=temporary,
        peak_bytes=sum(states) + activations + temporary,
        peak_cause=cause,
    )


SMALL_STAGE = stage(
    0,
    states=(24_117_248, 24_117_248, 24_117_256),
    activations=88_080_384,
    temporary=16_777_216,
    cause="backward of the head",
)

SMALL = Step(
    kind="predicted",
    model="tiny",
    machine="local:2",
    layout="dp2 zero1 mbs4",
    job={"sequence": 256, "global_batch": 8},
    world=2,
    memory=Memory(peak_bytes=SMALL_STAGE.peak_bytes, fits=True, stages=(SMALL_STAGE,)),
    work=Work(
        parameters=6_029_312,
        active_parameters=6_029_312,
        model_flops_causal=71_000_000_000,
        model_flops_non_causal=74_000_000_000,
        hardware_flops=74_000_000_000,
    ),
    traffic=(
        Traffic(axis="dp", collective="reduce_scatter", calls=8, bytes=12_058_624),
        Traffic(axis="dp", collective="all_gather", calls=8, bytes=12_058_624),
    ),
    time=Time(
        step_seconds=0.82,
        compute_seconds=0.74,
        exposed_seconds={"dp": 0.05},
        optimizer_seconds=0.03,
        error=0.06,
        longest_part="matmul",
    ),
    tokens_per_second_per_gpu=1248.8,
    mfu=Mfu(causal=0.384, non_causal=0.401),
    hfu=0.401,
)

MEASURED_STAGE = SMALL_STAGE.replace(temporary_bytes=13_777_216, peak_bytes=SMALL_STAGE.peak_bytes - 3_000_000)

MEASURED = SMALL.replace(
    kind="measured",
    memory=Memory(peak_bytes=MEASURED_STAGE.peak_bytes, reserved_bytes=612_000_000, stages=(MEASURED_STAGE,)),
    time=SMALL.time.replace(step_seconds=0.79, compute_seconds=0.71, error=None),
    tokens_per_second_per_gpu=1296.2,
)

GIB = 2**30
LARGE_STAGES = tuple(
    stage(
        i,
        states=(5 * GIB, 3 * GIB, 9 * GIB),
        activations=(22 - 5 * i) * GIB,
        temporary=2 * GIB,
        cause="first backward" if i else "logits",
    )
    for i in range(4)
)

LARGE = Step(
    kind="predicted",
    model="qwen3-235b-a22b",
    machine="h100:512",
    layout="dp16 tp8 pp4 v2 ep8 zero1 interleaved mbs1 ac=selective",
    job={"sequence": 4096, "global_batch": 1024},
    world=512,
    memory=Memory(peak_bytes=LARGE_STAGES[0].peak_bytes, fits=False, stages=LARGE_STAGES),
    work=Work(
        parameters=235_093_634_560,
        active_parameters=22_190_000_000,
        model_flops_causal=610_000_000_000_000_000,
        model_flops_non_causal=690_000_000_000_000_000,
        hardware_flops=720_000_000_000_000_000,
    ),
    traffic=(
        Traffic(axis="tp", collective="all_gather", calls=12_288, bytes=180 * GIB),
        Traffic(axis="tp", collective="reduce_scatter", calls=12_288, bytes=180 * GIB),
        Traffic(axis="ep", collective="all_to_all", calls=6_144, bytes=95 * GIB),
        Traffic(axis="pp", collective="p2p", calls=256, bytes=2 * GIB),
        Traffic(axis="dp", collective="reduce_scatter", calls=96, bytes=6 * GIB),
    ),
    time=Time(
        step_seconds=3.4,
        compute_seconds=2.1,
        bubble_seconds=0.3,
        exposed_seconds={"tp": 0.6, "ep": 0.3, "pp": 0.0},
        optimizer_seconds=0.1,
        longest_part="tp all_gather over NVLink",
    ),
    tokens_per_second_per_gpu=2409.4,
    mfu=Mfu(causal=0.354, non_causal=0.401),
    hfu=0.418,
)


@pytest.fixture
def small() -> Step:
    return SMALL


@pytest.fixture
def measured() -> Step:
    return MEASURED


@pytest.fixture
def large() -> Step:
    return LARGE
