"""The largest model fits and the next does not; a scaled model keeps its proportions."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.layout.where import Where
from fivefold.model.catalog import build_model
from fivefold.model.spec import Model
from fivefold.planner.predict import Planner
from fivefold.planner.questions import largest_model
from fivefold.planner.questions.largest_model import find_largest_model, scale_model
from fivefold.planner.search import search
from fivefold.planner.search.neighbours import MIN_GAIN, list_neighbours
from fivefold.planner.search.work import SearchWork
from tests.planner.questions.cases import LLAMA, NODE, SMALL


@pytest.mark.slow
def test_the_largest_model_fits_and_the_next_does_not() -> None:
    machine = NODE.replace(ranks=2, chip=NODE.chip.replace(memory_bytes=5 * 2**30))
    job = Job(sequence=1024, global_batch=2)
    answer, model = find_largest_model(model=SMALL, machine=machine, job=job)
    assert answer.value == model.parameters > SMALL.parameters
    factor = float(model.name.rpartition("x")[2]) + 1 / 8
    larger = scale_model(SMALL, factor)
    assert larger.parameters > model.parameters
    assert search(model=larger, machine=machine, job=job, by="memory", top=1).best == ()
    planner = Planner(model=model, machine=machine, job=job)
    assert answer.layout is not None
    estimates = [planner.estimate(other) for other in list_neighbours(Layout.parse(answer.layout), planner)]
    fitting = [found.step_time.seconds for found in estimates if planner.fits(found.layout, found.ranks)]
    assert answer.step_seconds is not None
    assert min(fitting) >= answer.step_seconds * (1 - MIN_GAIN)  # no single change of its layout is faster
    assert "a search may find a faster one" in answer.remarks[-1]


@pytest.mark.parametrize("name", ["llama3-8b", "mixtral-8x7b", "deepseek-v3", "gemma4-e2b", "longcat-flash-560b-a27b"])
def test_a_scaled_model_keeps_the_proportions_of_the_model(name: str) -> None:
    """Twice the layers, heads and widths are eight times the weights, but for tables and ranks; each eighth exists."""
    model = build_model(name)
    assert scale_model(model, 1).parameters == model.parameters
    scaled = scale_model(model, 2)
    assert scaled.layers == 2 * model.layers
    tables = model.vocab * model.width * (1 if model.tied_embeddings else 2)
    assert scaled.parameters - 2 * tables == pytest.approx(8 * (model.parameters - tables), rel=0.5)
    if model.moe is not None:
        assert scaled.moe is not None
        assert scaled.moe.ffn / scaled.width == model.moe.ffn / model.width
        assert scaled.moe.experts == model.moe.experts
    sizes = [scale_model(model, eighths / 8).parameters for eighths in range(1, 17)]
    assert sizes == sorted(sizes)


@pytest.mark.parametrize(
    "name",
    ["mamba2-2.7b", "mamba-2.8b", "qwen3.5-0.8b", "nemotron-nano-9b-v2", "kimi-linear-48b-a3b", "recurrentgemma-2b",
     "minimax-text-01", "deepseek-v4-flash"],
)  # fmt: skip
def test_token_mixers_of_a_scaled_model_have_as_many_times_the_heads_or_channels(name: str) -> None:
    model, scaled = build_model(name), scale_model(build_model(name), 2)
    tables = model.vocab * model.width * (1 if model.tied_embeddings else 2)
    assert scaled.parameters - 2 * tables == pytest.approx(8 * (model.parameters - tables), rel=0.02)
    for mixer, larger in zip(model.mixer_geometries, scaled.mixer_geometries, strict=True):
        units, more = mixer.get_sharded_units(model.width), larger.get_sharded_units(scaled.width)
        if units is not None and more is not None and units.name in ("heads", "channels"):
            assert more.number == 2 * units.number


@pytest.mark.slow
def test_a_work_limit_leaves_only_sizes_between_known_ones_undecided(monkeypatch: pytest.MonkeyPatch) -> None:
    """A size that fits and twice that size are decided whatever it takes; else the answer was far too small."""
    largest = scale_model(LLAMA, 1.5).parameters  # as the next test finds
    monkeypatch.setattr(largest_model, "SearchWork", partial(SearchWork, doubling_units=1))
    monkeypatch.setattr(largest_model, "MODEL_UNITS", 0)
    limited, _ = find_largest_model(model=LLAMA, machine=NODE, job=Job())
    assert largest / 8 < limited.value <= largest  # twice the layers and heads are eight times the weights


def test_a_layout_that_fits_is_tried_at_the_next_size_before_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[str] = []
    find = largest_model.find_fitting_layout

    def record(*where: Where, model: Model, **options: Any) -> Layout | None:
        searched.append(model.name)
        return find(*where, model=model, **options)

    monkeypatch.setattr(largest_model, "find_fitting_layout", record)
    _, largest = find_largest_model(model=LLAMA, machine=NODE, job=Job())
    assert largest.name == "llama3-8b x1.5"  # whose states alone exceed the memory at twice the size
    assert searched == ["llama3-8b x1", "llama3-8b x1.75", "llama3-8b x1.625"]
