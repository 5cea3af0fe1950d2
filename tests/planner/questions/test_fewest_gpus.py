"""The fewest GPUs fit, and fewer do not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fivefold.adapter import Adapter
from fivefold.cli import app
from fivefold.errors import UserError
from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.machine.catalog import resolve, with_ranks
from fivefold.machine.spec import Machine
from fivefold.model.catalog import build_model
from fivefold.planner.predict import Planner
from fivefold.planner.questions import fewest_gpus
from fivefold.planner.questions.fewest_gpus import find_fewest_gpus
from fivefold.planner.questions.least_states import count_least_state_bytes
from fivefold.planner.search import search
from fivefold.results.search_result import SearchResult
from tests.planner.questions.cases import JOB, LLAMA, NODE, SMALL
from tests.selection import mark_share


@pytest.mark.slow
def test_fewest_gpus_fit_and_half_of_them_do_not() -> None:
    job = JOB.replace(global_batch=16)
    answer = find_fewest_gpus(model=LLAMA, machine=NODE, job=job, risk=0.1)
    assert answer.value == 2  # 8 B parameters x 18 bytes = 135 GiB, which two GPUs hold at a risk of 7 %
    assert find_fewest_gpus(model=LLAMA, machine=NODE, job=job).value == 4
    assert answer.memory_bytes is not None
    assert answer.memory_bytes <= NODE.chip.memory_bytes


@pytest.mark.long  # several searches; the two tests around it have one each
@pytest.mark.slow
def test_the_answer_on_the_fewest_gpus_has_a_layout_that_fits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = NODE.replace(chip=NODE.chip.replace(memory_bytes=2 * 2**30))
    job = Job(sequence=1024, global_batch=8)
    full = find_fewest_gpus(model=SMALL, machine=machine, job=job)

    simple = find_fewest_gpus(model=SMALL, machine=machine, job=job, within=0.05)
    least = with_ranks(machine, int(full.value))
    proposal = search(model=SMALL, machine=least, job=job, top=1, within=0.05, tight=False).proposal
    assert proposal is not None
    assert (simple.value, simple.layout) == (full.value, proposal.layout)

    def find_none(**options: Any) -> SearchResult:
        return search(**options).replace(best=(), undecided=True)

    monkeypatch.setattr(fewest_gpus, "search", find_none)
    limited = find_fewest_gpus(model=SMALL, machine=machine, job=job)
    assert limited.value == full.value > 1
    assert limited.layout is not None
    assert limited.step_seconds >= full.step_seconds
    planner = Planner(model=SMALL, machine=with_ranks(machine, int(limited.value)), job=job)
    assert planner.fits(Layout.parse(limited.layout))
    assert "its layout is the first one that fits" in limited.remarks[-1]


def test_all_ranks_are_tried_if_they_are_no_power_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    find = fewest_gpus.find_fitting_layout

    def find_on_three(*arguments: Any, machine: Machine, **options: Any) -> Layout | None:
        return find(*arguments, machine=machine, **options) if machine.ranks == 3 else None

    monkeypatch.setattr(fewest_gpus, "find_fitting_layout", find_on_three)
    machine, job = with_ranks(NODE, 3), Job(sequence=256, global_batch=6)
    assert find_fewest_gpus(model=SMALL, machine=machine, job=job).value == 3


def test_bytes_of_states_are_those_of_trained_weights() -> None:
    """Weights, masters and two moments in mixed precision: 2 + 4 + 8 bytes of a parameter."""
    full, lora = Job(), Job(adapter=Adapter(rank=8))
    qlora = Job(adapter=Adapter(rank=8, base="nf4"))
    counted = [count_least_state_bytes(SMALL, job) / SMALL.parameters for job in (full, lora, qlora)]
    assert counted == [14, 2, 0.5]


def test_a_number_of_gpus_left_undecided_by_the_work_limit_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = NODE.replace(chip=NODE.chip.replace(memory_bytes=2 * 2**30))
    monkeypatch.setattr(fewest_gpus, "NUMBERS_UNITS", 0)
    with pytest.raises(UserError, match=r"was found to fit on no number of .* GPUs were not decided within the work"):
        find_fewest_gpus(model=SMALL, machine=machine, job=Job(sequence=2**15, global_batch=8))


@pytest.mark.long  # two searches of 192 GPUs; the tests above limit small ones
@pytest.mark.slow
@pytest.mark.parametrize("batch", [8, 1024])
def test_fewest_gpus_of_a_large_model_of_experts(batch: int) -> None:
    """A search over all layouts of 192 GPUs meets its work limit before it finds one that fits."""
    machine = resolve("h100:256", local=Path("/nowhere"))
    answer = find_fewest_gpus(
        model=build_model("deepseek-v3"), machine=machine, job=Job(sequence=4096, global_batch=batch)
    )
    assert answer.value == 192
    assert any("few for 192 ranks" in remark for remark in answer.remarks) == (batch == 8)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "word", "ranks"),
    mark_share(3, [("llama3-8b", "h100", 4), ("llama3-70b", "h200", 16), ("llama3-70b", "h100", 24)]),
)
def test_fewest_gpus_are_sought_without_a_number(model: str, word: str, ranks: int) -> None:
    result = CliRunner().invoke(app, ["ask", "gpus", model, word, "--gbs", "48", "--json"])
    (answer,) = json.loads(result.stdout)
    assert answer["value"] == ranks
    assert "(tried: powers of two, multiples of 8 from 16 to 32)" in answer["line"] or ranks < 24


def test_the_given_number_of_gpus_is_the_limit_of_the_fewest_gpus() -> None:
    result = CliRunner().invoke(app, ["ask", "gpus", "llama3-70b", "h100:8"])
    assert "llama3-70b fits on no number of h100 up to 8 with seq 4096 and 8 sequences per step (the default)" in str(
        result.exception
    )
    assert "use more GPUs (weights and optimizer states already fill 12)" in str(result.exception)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "helps"), [("llama3-405b", False), ("llama3-70b", True)])
def test_offloading_is_advised_only_where_it_fits(model: str, helps: bool) -> None:
    about: dict[str, Any] = {"model": build_model(model), "machine": NODE}
    job = Job(sequence=8192)
    with pytest.raises(UserError) as error:
        find_fewest_gpus(**about, job=job)
    assert str(error.value).endswith("use --set offload=optimizer") == helps
    if helps:
        offloaded = job.replace(offload=("optimizer",))
        assert find_fewest_gpus(**about, job=offloaded).value <= 8
