"""Each answer is the last that holds: one step more does not fit, or is not divisible."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import fivefold as ff
from fivefold.adapter import Adapter
from fivefold.cli import app
from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.layout.where import Where
from fivefold.machine.catalog import resolve, with_ranks
from fivefold.machine.spec import Machine
from fivefold.model.catalog import build_model, find_published
from fivefold.model.spec import Model
from fivefold.planner import context_length, questions
from fivefold.planner.compare import ComparedCase, compare, with_stack
from fivefold.planner.context_length import (
    LENGTH_RATIO,
    compute_lengths,
    find_longest_sequence,
    find_offloaded_sequence,
)
from fivefold.planner.predict import Planner, predict
from fivefold.planner.ratios import compute_ratios
from fivefold.planner.search import search
from fivefold.planner.search.neighbours import MIN_GAIN, list_neighbours, walk
from fivefold.planner.search.work import SearchWork
from fivefold.record import UserError
from fivefold.results.search_result import SearchResult
from fivefold.stack.catalog import build_stack
from fivefold.units import show_bytes
from tests.selection import mark_share

NODE = resolve("h100:8", local=Path("/nowhere"))
LLAMA = build_model("llama3-8b")
JOB = Job(sequence=4096, global_batch=512)
SMALL = Model(name="small", layers=8, width=1024, heads=8, kv_heads=4, head_dim=128, ffn=4096, vocab=32_000)


def peak(layout: Layout, job: Job = JOB) -> int:
    return Planner(model=LLAMA, machine=NODE, job=job).estimate(layout).peak_bytes


def fits(layout: Layout, job: Job = JOB) -> bool:
    return Planner(model=LLAMA, machine=NODE, job=job).fits(layout)


def test_the_largest_micro_batch_is_the_last_that_fits() -> None:
    layout = Layout.parse("dp8 zero3 mbs1")
    answer = questions.find_largest_micro_batch(model=LLAMA, machine=NODE, job=JOB, layout=layout)
    size = int(answer.value)
    assert peak(layout.replace(mbs=size)) == answer.memory_bytes
    assert fits(layout.replace(mbs=size))
    assert not fits(layout.replace(mbs=2 * size))


def test_a_job_that_does_not_fit_the_model_is_rejected_before_layouts_are_tried() -> None:
    for question in (questions.find_fewest_gpus, questions.find_largest_model):
        with pytest.raises(UserError, match="images=4: small has no vision tower that is read; leave images out"):
            question(model=SMALL, machine=NODE, job=Job(global_batch=8, images=4))


def test_an_answer_says_that_the_global_batch_limits_the_micro_batch() -> None:
    layout, job = Layout.parse("dp8 zero3 mbs1"), Job(sequence=4096)
    limited = questions.find_largest_micro_batch(model=LLAMA, machine=NODE, job=job, layout=layout)
    assert limited.value == 1
    assert "the global batch of 8 is the limit, not memory" in limited.remarks[0]
    answer = questions.find_largest_micro_batch(model=LLAMA, machine=NODE, job=JOB, layout=layout)
    assert answer.value > 1
    assert answer.remarks == ()


@pytest.mark.parametrize("words", ["dp8 zero3", "dp4 tp2 zero2", "dp2 tp2 pp2 zero1 ac=full", "dp4 cp2 zero3"])
def test_without_a_given_batch_only_memory_limits_the_micro_batch(words: str) -> None:
    layout = Layout.parse(words)
    answer = questions.find_largest_micro_batch(
        model=LLAMA, machine=NODE, job=Job(sequence=2048), layout=layout, is_batch_given=False
    )
    size, batch = int(answer.value), 2 * layout.pp * layout.dp
    jobs = [Job(sequence=2048, global_batch=batch * number) for number in (size, size + 1)]
    assert fits(layout.replace(mbs=size), jobs[0])
    assert not fits(layout.replace(mbs=size + 1), jobs[1])
    assert peak(layout.replace(mbs=size), jobs[0]) == answer.memory_bytes


@pytest.mark.filterwarnings("ignore::fivefold.record.UsageWarning")
@pytest.mark.parametrize("given", mark_share(2, [{}, {"gbs": 128}]))
def test_the_largest_micro_batch_of_a_chosen_layout_names_that_of_full_recomputation(given: dict[str, int]) -> None:
    (answer,) = ff.ask("micro-batch", "llama3-8b", "h100:8", seq=8192, **given)
    chosen = Layout.parse(str(answer.layout))
    assert chosen.ac != "full"
    (full,) = ff.ask("micro-batch", "llama3-8b", "h100:8", str(chosen.replace(ac="full", mbs=1)), seq=8192, **given)
    assert full.value > answer.value
    seconds = [
        float(each.step_seconds or 0) / given.get("gbs", 2 * chosen.pp * chosen.dp * each.value)
        for each in (answer, full)
    ]
    more = seconds[1] / seconds[0] - 1
    words = f"with full recomputation (ac=full) {full.line} fit; each sequence takes {more:.1%} more time"
    assert answer.remarks[-1] == words
    assert not any("full recomputation" in remark for remark in full.remarks)


@pytest.mark.slow
def test_a_sequence_is_not_shorter_than_its_images() -> None:
    about: dict[str, Any] = {"model": build_model("gemma3-4b"), "layout": Layout.parse("dp8 zero3 mbs1 ac=full")}
    job = Job(sequence=4096, global_batch=8, images=20, freeze_vision_tower=True)  # 5,120 tokens
    answer = questions.search_longest_sequence(machine=NODE, job=job, **about)
    steps = [predict(machine=NODE, job=job.replace(sequence=int(answer.value) + more), **about) for more in (0, 2)]
    assert [step.memory.risk <= 0.05 for step in steps] == [True, False]
    assert answer.memory_bytes == steps[0].memory.peak_bytes
    small = NODE.replace(chip=NODE.chip.replace(memory_bytes=6 * 2**30))
    with pytest.raises(UserError, match="needs at least"):
        questions.search_longest_sequence(machine=small, job=job, **about)


@pytest.mark.slow
def test_an_answer_lists_fine_tuning_methods_that_are_not_modelled() -> None:
    model = build_model("gemma3-4b")
    job = Job(sequence=4096, global_batch=8, images=2, freeze_vision_tower=True, freeze_projector=True)
    full, _, lora, faster = questions.list_fine_tunes(model=model, machine=NODE, job=job)
    assert (full.method, lora.method, faster.method) == ("full", "lora:16", "lora:16")
    assert (lora.layout, faster.layout) == ("dp8 zero3 mbs1 ac=full", "dp8 zero3 mbs1")
    assert faster.tokens_per_second > lora.tokens_per_second
    assert full.memory_bytes > 1.5 * lora.memory_bytes
    (remark,) = full.remarks
    assert remark.startswith("no answer for qlora:16: layout 'dp8 zero3 mbs1 ac=full': images=2 are not counted with")
    only = questions.list_fine_tunes(model=build_model("deepseek-v3-mtp"), machine=NODE, job=JOB)
    assert [way.method for way in only] == ["full"]
    assert [remark.split(":")[0] for remark in only[0].remarks] == [
        *("no answer for lora", "no answer for qlora", "no answer for lora")
    ]
    with pytest.raises(UserError, match="dp16"):
        questions.list_fine_tunes(model=model, machine=NODE, job=job, layout=Layout.parse("dp16"))


def test_the_longest_sequence_is_the_last_that_fits() -> None:
    layout = Layout.parse("dp2 cp4 zero3 mbs1")
    answer = questions.search_longest_sequence(model=LLAMA, machine=NODE, job=JOB, layout=layout)
    longest = int(answer.value)
    assert longest % 8 == 0
    assert fits(layout, JOB.replace(sequence=longest))
    assert not fits(layout, JOB.replace(sequence=longest + 8))
    assert "beyond the model's 8192 positions" in answer.line


def test_model_that_never_fits_is_a_one_line_error() -> None:
    with pytest.raises(
        UserError, match=r"needs at least .* per GPU, which has 79.19 GiB; its risk .* is > 99 %, more than --risk 0.05"
    ):
        questions.find_largest_micro_batch(model=LLAMA, machine=NODE, job=JOB, layout=Layout(dp=8))


@pytest.mark.parametrize(
    ("model", "machine", "layout", "why"),
    [
        ("tiny", "h200:8", "dp2 pp4 v3 ac=full", "12 stages are more than layers=6"),
        (
            "gpt-oss-20b",
            "h100-pcie:128",
            "dp8 tp2x2 pp4 gpipe zero1",
            "2D tensor parallelism is not supported with expert",
        ),
        (
            "deepseek-v3",
            "h800:24",
            "dp2 tp2x2 pp3 zb2p zero3 mbs4",
            "2D tensor parallelism is not supported with expert",
        ),
        ("nemotron4-15b", "l40s:16", "dp2 tp8 zero1 mbs4", "rows are not divisible by tp=8"),
        ("llama3-8b", "h100:4", "dp8", "needs 8 ranks, but h100 has 4"),
    ],
)
def test_every_question_rejects_a_layout_that_predict_rejects(model: str, machine: str, layout: str, why: str) -> None:
    """In the words of ``predict``, whatever is asked; the planner itself has no other way in."""
    job = Job(sequence=3 if model == "nemotron4-15b" else 512, global_batch=64)
    chips, spec, chosen = resolve(machine, local=Path("/nowhere")), build_model(model), Layout.parse(layout)
    with pytest.raises(UserError, match=re.escape(why)):
        predict(model=spec, machine=chips, layout=chosen, job=job)
    planner = Planner(model=spec, machine=chips, job=job)
    about = {"model": spec, "machine": chips, "job": job, "layout": chosen}
    asks: dict[str, Callable[[], object]] = {
        "estimate": lambda: planner.estimate(chosen),
        "step": lambda: planner.step(chosen),
        "changes": lambda: questions.list_changes(**about),
        "ratios": lambda: compute_ratios(spec, machine=chips, job=job, layout=chosen),
        "walk": lambda: walk(planner, chosen),
        "compare": lambda: compare([ComparedCase(spec, chips, chosen, item) for item in (job, job.replace(steps=2))]),
    }
    if "rows" not in why:  # else another micro-batch, sequence or batch is the answer
        asks |= {
            "micro-batch": lambda: questions.find_largest_micro_batch(**about),
            "sequence": lambda: questions.search_longest_sequence(**about),
            "batch": lambda: questions.list_reasonable_batches(**about, tokens=1e12),
        }
    for name, ask in asks.items():
        with pytest.raises(UserError) as caught:
            ask()
        assert why in str(caught.value), name


def test_a_layout_that_fits_only_with_full_recomputation_is_advised_to_recompute() -> None:
    job, layout = Job(sequence=32768, global_batch=8), Layout.parse("dp8 zero3")
    full = layout.replace(ac="full")
    asked: dict[str, Any] = {"model": LLAMA, "machine": NODE, "job": job}
    peak = show_bytes(predict(layout=full, **asked).memory.peak_bytes)
    with pytest.raises(UserError, match=f"raise zero, tp or pp, or use ac=full, which needs {peak}$"):
        questions.find_largest_micro_batch(layout=layout, **asked)
    with pytest.raises(UserError, match=r"raise zero, tp or pp$"):
        questions.find_largest_micro_batch(layout=Layout.parse("dp8"), **asked)


def test_a_micro_batch_that_is_not_legal_is_not_the_smallest() -> None:
    """Of 4 tokens over tp8 it takes two sequences; of these the answer says by how much they do not fit."""
    job, layout = Job(sequence=4, global_batch=64), Layout.parse("dp1 tp8")
    with pytest.raises(UserError, match=r"'dp1 tp8 zero0 mbs2' needs at least .*"):
        questions.find_largest_micro_batch(model=build_model("llama3-405b"), machine=NODE, job=job, layout=layout)


def test_reasonable_batches_have_the_micro_batches_of_their_schedule() -> None:
    about = {"model": LLAMA, "machine": resolve("h100:32", local=Path("/nowhere")), "tokens": 1e12}
    job = Job(sequence=131_072, global_batch=8)
    plain, dual = (
        [
            sound_batch.micro_batches
            for sound_batch in questions.list_reasonable_batches(job=job, layout=Layout.parse(text), **about)
        ]
        for text in ("dp2 pp16", "dp2 pp16 dualpipev")
    )
    assert dual == [size for size in plain if size >= 32]
    assert 0 < len(dual) < len(plain)


@pytest.mark.slow
def test_fewest_gpus_fit_and_half_of_them_do_not() -> None:
    job = JOB.replace(global_batch=16)
    answer = questions.find_fewest_gpus(model=LLAMA, machine=NODE, job=job)
    assert answer.value == 2  # 8 B parameters x 18 bytes = 135 GiB, which two GPUs hold at a small risk
    assert questions.find_fewest_gpus(model=LLAMA, machine=NODE, job=job, risk=0.001).value == 4
    assert answer.memory_bytes is not None
    assert answer.memory_bytes <= NODE.chip.memory_bytes


@pytest.mark.long  # several searches; the two tests around it have one each
@pytest.mark.slow
def test_the_answer_on_the_fewest_gpus_has_a_layout_that_fits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = NODE.replace(chip=NODE.chip.replace(memory_bytes=2 * 2**30))
    job = Job(sequence=1024, global_batch=8)
    full = questions.find_fewest_gpus(model=SMALL, machine=machine, job=job)

    simple = questions.find_fewest_gpus(model=SMALL, machine=machine, job=job, within=0.05)
    least = with_ranks(machine, int(full.value))
    proposal = search(model=SMALL, machine=least, job=job, top=1, within=0.05, tight=False).proposal
    assert proposal is not None
    assert (simple.value, simple.layout) == (full.value, proposal.layout)

    def find_none(**options: Any) -> SearchResult:
        return search(**options).replace(best=(), undecided=True)

    monkeypatch.setattr(questions, "search", find_none)
    limited = questions.find_fewest_gpus(model=SMALL, machine=machine, job=job)
    assert limited.value == full.value > 1
    assert limited.layout is not None
    assert limited.step_seconds >= full.step_seconds
    planner = Planner(model=SMALL, machine=with_ranks(machine, int(limited.value)), job=job)
    assert planner.fits(Layout.parse(limited.layout))
    assert "its layout is the first one that fits" in limited.remarks[-1]


def test_all_ranks_are_tried_if_they_are_no_power_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    find = questions.find_fitting_layout

    def find_on_three(*arguments: Any, machine: Machine, **options: Any) -> Layout | None:
        return find(*arguments, machine=machine, **options) if machine.ranks == 3 else None

    monkeypatch.setattr(questions, "find_fitting_layout", find_on_three)
    machine, job = with_ranks(NODE, 3), Job(sequence=256, global_batch=6)
    assert questions.find_fewest_gpus(model=SMALL, machine=machine, job=job).value == 3


def test_bytes_of_states_are_those_of_trained_weights() -> None:
    """Weights, masters and two moments in mixed precision: 2 + 4 + 8 bytes of a parameter."""
    full, lora = Job(), Job(adapter=Adapter(rank=8))
    qlora = Job(adapter=Adapter(rank=8, base="nf4"))
    counted = [questions.count_least_state_bytes(SMALL, job) / SMALL.parameters for job in (full, lora, qlora)]
    assert counted == [14, 2, 0.5]


def test_a_number_of_gpus_left_undecided_by_the_work_limit_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = NODE.replace(chip=NODE.chip.replace(memory_bytes=2 * 2**30))
    monkeypatch.setattr(questions, "NUMBERS_UNITS", 0)
    with pytest.raises(UserError, match=r"was found to fit on no number of .* GPUs were not decided within the work"):
        questions.find_fewest_gpus(model=SMALL, machine=machine, job=Job(sequence=2**15, global_batch=8))


@pytest.mark.long  # two searches of 192 GPUs; the tests above limit small ones
@pytest.mark.slow
@pytest.mark.parametrize("batch", [8, 1024])
def test_fewest_gpus_of_a_large_model_of_experts(batch: int) -> None:
    """A search over all layouts of 192 GPUs meets its work limit before it finds one that fits."""
    machine = resolve("h100:256", local=Path("/nowhere"))
    answer = questions.find_fewest_gpus(
        model=build_model("deepseek-v3"), machine=machine, job=Job(sequence=4096, global_batch=batch)
    )
    assert answer.value == 192
    assert any("few for 192 ranks" in remark for remark in answer.remarks) == (batch == 8)


@pytest.mark.slow
def test_the_largest_model_fits_and_the_next_does_not() -> None:
    machine = NODE.replace(ranks=2, chip=NODE.chip.replace(memory_bytes=5 * 2**30))
    job = Job(sequence=1024, global_batch=2)
    answer, model = questions.find_largest_model(model=SMALL, machine=machine, job=job)
    assert answer.value == model.parameters > SMALL.parameters
    factor = float(model.name.rpartition("x")[2]) + 1 / 8
    larger = questions.scale_model(SMALL, factor)
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
    assert questions.scale_model(model, 1).parameters == model.parameters
    scaled = questions.scale_model(model, 2)
    assert scaled.layers == 2 * model.layers
    tables = model.vocab * model.width * (1 if model.tied_embeddings else 2)
    assert scaled.parameters - 2 * tables == pytest.approx(8 * (model.parameters - tables), rel=0.5)
    if model.moe is not None:
        assert scaled.moe is not None
        assert scaled.moe.ffn / scaled.width == model.moe.ffn / model.width
        assert scaled.moe.experts == model.moe.experts
    sizes = [questions.scale_model(model, eighths / 8).parameters for eighths in range(1, 17)]
    assert sizes == sorted(sizes)


@pytest.mark.parametrize(
    "name",
    ["mamba2-2.7b", "mamba-2.8b", "qwen3.5-0.8b", "nemotron-nano-9b-v2", "kimi-linear-48b-a3b", "recurrentgemma-2b",
     "minimax-text-01", "deepseek-v4-flash"],
)  # fmt: skip
def test_token_mixers_of_a_scaled_model_have_as_many_times_the_heads_or_channels(name: str) -> None:
    model, scaled = build_model(name), questions.scale_model(build_model(name), 2)
    tables = model.vocab * model.width * (1 if model.tied_embeddings else 2)
    assert scaled.parameters - 2 * tables == pytest.approx(8 * (model.parameters - tables), rel=0.02)
    for mixer, larger in zip(model.mixer_geometries, scaled.mixer_geometries, strict=True):
        units, more = mixer.get_sharded_units(model.width), larger.get_sharded_units(scaled.width)
        if units is not None and more is not None and units.name in ("heads", "channels"):
            assert more.number == 2 * units.number


@pytest.mark.filterwarnings("ignore::fivefold.record.UsageWarning")
def test_changes_without_a_layout_name_the_one_that_is_changed() -> None:
    changes = ff.ask("changes", "llama3-8b", "h100:8")
    layout, _, why = changes[0].remarks[-1].removeprefix("changes of ").partition(", ")
    assert why == "the fastest layout that fits"
    base = ff.predict("llama3-8b", "h100:8", layout).time.step_seconds
    assert all(base / change.step_seconds == pytest.approx(change.faster) for change in changes)


@pytest.mark.slow
def test_a_work_limit_leaves_only_sizes_between_known_ones_undecided(monkeypatch: pytest.MonkeyPatch) -> None:
    """A size that fits and twice that size are decided whatever it takes; else the answer was far too small."""
    largest = questions.scale_model(LLAMA, 1.5).parameters  # as the next test finds
    monkeypatch.setattr(questions, "SearchWork", partial(SearchWork, doubling_units=1))
    monkeypatch.setattr(questions, "MODEL_UNITS", 0)
    limited, _ = questions.find_largest_model(model=LLAMA, machine=NODE, job=Job())
    assert largest / 8 < limited.value <= largest  # twice the layers and heads are eight times the weights


def test_a_layout_that_fits_is_tried_at_the_next_size_before_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[str] = []
    find = questions.find_fitting_layout

    def record(*where: Where, model: Model, **options: Any) -> Layout | None:
        searched.append(model.name)
        return find(*where, model=model, **options)

    monkeypatch.setattr(questions, "find_fitting_layout", record)
    _, largest = questions.find_largest_model(model=LLAMA, machine=NODE, job=Job())
    assert largest.name == "llama3-8b x1.5"  # whose states alone exceed the memory at twice the size
    assert searched == ["llama3-8b x1", "llama3-8b x1.75", "llama3-8b x1.625"]


def test_changes_of_a_layout_move_ranks_between_axes() -> None:
    """Half the ranks of tensor parallelism, which is wide for this model, train faster as replicas."""
    machine = resolve("h100:64", local=Path("/nowhere"))
    common = {"machine": machine, "job": Job(sequence=8192, global_batch=256)}
    best = questions.list_changes(model=build_model("llama3-8b"), layout=Layout.parse("dp4 tp8 pp2 mbs1"), **common)[0]
    assert (best.change, best.layout) == ("dp8 tp4", "dp8 tp4 pp2 zero0 1f1b mbs1")
    experts = questions.list_changes(
        model=build_model("deepseek-v2-lite"), layout=Layout.parse("dp64 ep8 zero1 mbs1"), **common
    )
    assert {"ep4", "ep16", "dp32 tp2", "dp32 cp2"} <= {change.change for change in experts}
    alone = questions.list_changes(model=build_model("llama3-8b"), layout=Layout.parse("dp1 tp8 pp8 mbs1"), **common)
    assert not {"zero1", "zero2", "zero3"} & {change.change for change in alone}


@pytest.mark.parametrize(("chip", "is_tried"), [("h100", True), ("a100", False), ("rtx3090", False)])
def test_a_change_to_fp8_is_tried_on_chips_with_matrix_units_for_it(chip: str, is_tried: bool) -> None:
    machine, layout = resolve(f"{chip}:8", local=Path("/nowhere")), Layout.parse("dp8 zero3 mbs1")
    changes = questions.list_changes(model=LLAMA, machine=machine, job=JOB.replace(global_batch=8), layout=layout)
    assert ("fp8" in {change.change for change in changes}) == is_tried


def test_reasonable_batches_have_4_to_60_million_tokens() -> None:
    sound_batches = questions.list_reasonable_batches(job=JOB, layout=Layout(dp=128, mbs=2), tokens=1e12)
    assert [batch.micro_batches for batch in sound_batches] == [4, 8, 16, 32]
    assert all(4e6 <= batch.tokens <= 60e6 for batch in sound_batches)
    assert sound_batches[0].tokens == 4 * 2 * 128 * 4096
    assert sound_batches[0].steps == -(-(10**12) // sound_batches[0].tokens)


@pytest.mark.parametrize(
    ("model", "machine", "layout", "expected"),
    [
        pytest.param(  # dp4 tp4 alone does not fit
            *("llama3-70b", "h100:64", "dp2 tp8 pp4 zero1 mbs1", ("dp4 tp4", "ac=norm+act")), marks=pytest.mark.long
        ),
        ("llama3-70b", "h100:32", "dp4 tp8 zero1 mbs1", ("dp2 pp2 1f1b", "ac=norm+act")),  # nor does the layout
        ("llama3-8b", "h100:8", "dp8 zero3 mbs1", None),
    ],
)
def test_pairs_of_changes_are_listed_where_neither_change_alone_helps(
    model: str, machine: str, layout: str, expected: tuple[str, str] | None
) -> None:
    job = Job(sequence=8192, global_batch=512 if model == "llama3-70b" else 64)
    chips = resolve(machine, local=Path("/nowhere"))
    base = Planner(model=build_model(model), machine=chips, job=job)
    spec = Layout.parse(layout)
    changes = questions.list_changes_and_pairs(model=base.model, machine=chips, job=job, layout=spec)
    fitting = [change for change in changes if change.fits and not change.together]
    if base.fits(spec):
        limit = base.estimate(spec).step_time.seconds
        fitting = [change for change in fitting if change.step_seconds < limit]
    else:
        limit = min((change.step_seconds for change in fitting if change.change != "fp8"), default=float("inf"))
    helpful = {change.change for change in fitting}
    pairs = [change for change in changes if change.together]
    assert (pairs[0].together if pairs else None) == expected
    for pair in pairs:
        assert pair.fits
        assert pair.step_seconds < limit
        assert helpful.isdisjoint(pair.together)
        assert pair.memory_bytes == Planner(model=base.model, machine=chips, job=job).peak_bytes(
            Layout.parse(pair.layout)
        )


@pytest.mark.parametrize(
    ("stack", "settings", "is_tried"),
    [
        ("torchtitan", {"compile": False, "kernels": "plain"}, True),
        ("torchtitan", {}, False),
        ("fsdp2", {}, True),
        ("megatron-core", {}, False),
        ("fivefold", {}, False),
    ],
)
def test_compiling_is_a_change_of_software_that_runs_pytorch_kernels_one_by_one(
    stack: str, settings: dict[str, Any], is_tried: bool
) -> None:
    job = Job(sequence=8192, global_batch=16, stack=build_stack(stack)).replace(**settings)
    layout = Layout.parse("dp8 zero1 mbs2" if stack == "megatron-core" else "dp8 zero3 mbs2")
    changes = questions.list_changes_and_pairs(model=LLAMA, machine=NODE, job=job, layout=layout)
    compiled = [change for change in changes if change.change == "compile=true"]
    assert bool(compiled) == is_tried
    for change in compiled:  # as a config with torch.compile is read
        read_back = job.replace(compile=True, kernels="fused")
        estimate = Planner(model=LLAMA, machine=NODE, job=read_back).estimate(layout)
        assert (change.step_seconds, change.memory_bytes) == (estimate.step_time.seconds, estimate.peak_bytes)
        assert change.saved_bytes > 0


@pytest.mark.parametrize(
    ("model", "backend", "stack", "is_tried"),
    [
        ("nemotron3-nano-30b-a3b", "nccl", "fivefold", True),
        ("nemotron3-nano-30b-a3b", "nccl", "megatron-core", False),  # its scans are fused
        ("nemotron3-nano-30b-a3b", "gloo", "fivefold", False),  # the kernels are compiled for GPUs
        ("jamba-v0.1", "nccl", "fivefold", False),  # there are none for Mamba
        ("llama3-8b", "nccl", "fivefold", False),
    ],
)
def test_fused_scans_are_a_change_of_models_with_scans(model: str, backend: str, stack: str, is_tried: bool) -> None:
    chips = NODE.replace(backend=backend)
    job = Job(sequence=2048, global_batch=8, stack=build_stack(stack))
    layout = Layout(dp=chips.ranks, zero=1)
    changes = questions.list_changes(model=build_model(model), machine=chips, job=job, layout=layout)
    fused = [change for change in changes if change.change == "fused_scans=true"]
    assert bool(fused) == is_tried
    for change in fused:
        after = Planner(model=build_model(model), machine=chips, job=job.replace(fused_scans=True)).estimate(layout)
        assert (change.step_seconds, change.memory_bytes) == (after.step_time.seconds, after.peak_bytes)
        assert change.faster > 1


@pytest.mark.parametrize(
    ("model", "layout", "left_out"), [("nano", "dp2 pp4 1f1b", "v2"), ("gpt-oss-20b", "dp8 ep8 zero1", "mbs2")]
)
def test_changes_to_a_layout_that_is_not_legal_are_left_out(model: str, layout: str, left_out: str) -> None:
    """nano's two layers give no eight stages, and eight sequences no two for each of eight ranks."""
    job = Job(sequence=512, global_batch=8)
    changes = questions.list_changes(model=build_model(model), machine=NODE, job=job, layout=Layout.parse(layout))
    assert len(changes) > 5
    assert left_out not in {token for change in changes for token in change.layout.split()}


def test_changes_are_relative_to_the_given_layout() -> None:
    layout = Layout.parse("dp8 zero3 mbs1 ac=full")
    result = questions.list_changes(model=LLAMA, machine=NODE, job=JOB, layout=layout)
    by = {change.change: change for change in result}
    before = Planner(model=LLAMA, machine=NODE, job=JOB).estimate(layout)
    without = Planner(model=LLAMA, machine=NODE, job=JOB).estimate(layout.replace(ac="none"))
    assert by["ac=none"].faster == pytest.approx(before.step_time.seconds / without.step_time.seconds)
    assert by["ac=none"].faster > 1.1  # full recomputation is a fourth of the work
    assert by["ac=none"].saved_bytes == before.peak_bytes - without.peak_bytes < 0
    assert by["adamw8bit"].saved_bytes > 0
    assert "flash attention" not in by  # it is on
    assert "mbs2" in by
    half = questions.list_changes(model=LLAMA, machine=NODE, job=JOB, layout=layout.replace(mbs=2))
    assert next(change.layout for change in half if change.change == "mbs1") == str(layout)


def test_a_global_batch_that_dp_does_not_divide_is_an_error() -> None:
    with pytest.raises(UserError, match="global batch 7 is not divisible by dp"):
        questions.find_largest_micro_batch(
            model=LLAMA, machine=NODE, job=Job(global_batch=7), layout=Layout(dp=8, zero=3)
        )


def test_a_change_of_the_schedule_leaves_stages_that_were_cut_by_hand() -> None:
    """With other numbers of stages they would not add up."""
    for text in ("dp4 pp2 stages=15-17", "dp4 pp2 zbv stages=7-8-8-9"):
        result = questions.list_changes(model=LLAMA, machine=NODE, job=JOB, layout=Layout.parse(text))
        assert {"interleaved, twice the stages", "zero bubble"} <= {change.change for change in result}


def test_the_error_is_about_the_invalid_layout_and_not_the_sequence_length() -> None:
    layout, hardware = Layout.parse("dp1 pp4 zbv zero0 mbs1"), resolve("h100:4", local=Path())
    with pytest.raises(UserError, match="pp·v=8 stages are more than layers=2, embedding and head"):
        questions.search_longest_sequence(
            model=build_model("nano"), machine=hardware, job=Job(global_batch=256), layout=layout
        )


def test_reasonable_batches_name_their_laws_and_published_runs() -> None:
    layout = Layout(dp=64, mbs=1)
    job = JOB.replace(sequence=8192)
    sound_batches = questions.list_reasonable_batches(job=job, layout=layout, tokens=2e12, model=LLAMA, noise=5e6)
    references = {batch.tokens: " ".join(batch.references) for batch in sound_batches}
    assert "the measured noise scale, 5.00 M" in references[512 * 8192]
    assert "DeepSeek LLM's law" in references[1024 * 8192]
    assert all(2.5e6 < batch.tokens <= 60e6 for batch in sound_batches)
    small = questions.list_reasonable_batches(job=JOB.replace(sequence=64), layout=Layout(), tokens=1e6, model=SMALL)
    assert small[0].tokens < 4000  # where the laws say so
    assert small[-1].tokens < 200_000


@pytest.mark.slow
def test_longest_sequences_are_listed_by_recomputation_and_cp() -> None:
    layout = Layout.parse("dp4 zero3 mbs1")
    machine = resolve("h100:4", local=Path("/nowhere"))

    def find(job: Job) -> SearchResult:
        return search(model=SMALL, machine=machine, job=job, top=1, within=0.02, axes=("cp",), placements=False)

    job = Job(sequence=4096, global_batch=64)
    result = compute_lengths(model=SMALL, machine=machine, job=job, layout=layout, search=find)
    assert [(item.cp, item.ac) for item in result.curves] == [
        (cp, ac) for cp in (1, 2, 4) for ac in ("none", "selective", "full")
    ]
    for curve in result.curves:
        other = Layout.parse(curve.layout)
        assert (other.world, other.cp, other.ac) == (4, curve.cp, curve.ac)
        for point in curve.points:
            planner = Planner(model=SMALL, machine=machine, job=job.replace(sequence=point.tokens))
            step = planner.step(other)
            assert (step.memory.peak_bytes, step.mfu.causal) == (point.peak_bytes, point.mfu)
            assert point.fits == planner.fits(other)
    assert result.longest.value >= max(item.longest for item in result.curves)
    risky = questions.search_longest_sequence(
        model=SMALL, machine=machine, job=job, layout=Layout.parse(result.longest.layout or ""), risk=0.2
    )
    assert risky.value > result.longest.value
    assert result.longest.remarks[0] == (
        "the longest sequence has a risk of running out of memory of at most 5 %; "
        f"with --risk 0.2 its layout has {risky.value:,.0f} tokens"
    )
    assert result.longest.layout is not None
    longest_planner = Planner(model=SMALL, machine=machine, job=job.replace(sequence=int(result.longest.value)))
    assert longest_planner.fits(Layout.parse(result.longest.layout))
    assert result.offloaded is not None
    assert str(result.offloaded.layout).endswith(" offload=optimizer")  # Fivefold's own trainer keeps no more there
    about: dict[str, Any] = {"model": SMALL, "machine": machine, "job": with_stack(job, "deepspeed")}
    longest = questions.search_longest_sequence(**about, layout=Layout.parse("cp4 zero3 mbs1 ac=full cp=ulysses"))
    offloaded = find_offloaded_sequence(longest, **about)
    assert offloaded is not None
    assert offloaded.layout == f"{longest.layout} offload=optimizer+activations"
    assert offloaded.value > longest.value
    assert find_offloaded_sequence(longest.replace(value=offloaded.value * 2), **about) is None
    lengths = {(item.cp, item.ac): item.longest for item in result.curves}
    assert lengths[1, "none"] == result.answer.value
    assert lengths[4, "full"] > lengths[4, "none"] > lengths[1, "none"]
    assert result.changes[0].startswith("the model's context length, 4096 tokens")
    changed = Layout.parse(result.changes[1].partition("so ")[2].partition(" with gbs")[0])
    step = Planner(model=SMALL, machine=machine, job=job.replace(sequence=2**20, global_batch=1)).step(changed)
    assert step.memory.fits


@pytest.mark.long  # of 16 GPUs; the test above compares lengths on four
@pytest.mark.slow
def test_the_longest_sequence_of_any_layout_does_not_fall_with_a_smaller_batch() -> None:
    """Of layouts named by hand none reaches more, and fewer micro-batches take no more memory."""
    model, machine = build_model("qwen3-32b"), resolve("h200:16", local=Path("/nowhere"))
    layouts = [Layout.parse(f"dp1 tp{tp} cp{16 // tp} zero3 mbs1 ac=full") for tp in (1, 2, 4)]
    known, lengths_by_batch = Layout.parse("dp1 tp16 mbs1"), list[float]()
    for batch in (16, 1):
        about = {"model": model, "machine": machine, "job": Job(sequence=4096, global_batch=batch)}
        longest = find_longest_sequence(**about, known=[known])
        by_hand = max(questions.search_longest_sequence(**about, layout=layout).value for layout in layouts)
        assert by_hand / LENGTH_RATIO <= longest.value
        assert "beyond the model's 40960 positions" in longest.line
        assert longest.remarks == ()
        lengths_by_batch.append(longest.value)
    assert lengths_by_batch == sorted(lengths_by_batch)
    assert lengths_by_batch[-1] > 1_350_000


def test_a_sequence_length_left_undecided_by_the_work_limit_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = resolve("h100:4", local=Path("/nowhere"))
    monkeypatch.setattr(context_length, "LENGTH_UNITS", 0)
    longest = find_longest_sequence(
        model=SMALL, machine=machine, job=JOB.replace(global_batch=4), known=[Layout.parse("dp4 zero3 mbs1")]
    )
    assert longest.layout == "dp1 cp4 zero3 mbs1 ac=full"
    assert "was not decided within the work limit" in longest.remarks[0]


@pytest.mark.long  # of 32 GPUs; `test_longest_sequences_are_listed…` has four
@pytest.mark.slow
def test_every_length_up_to_the_longest_fits_also_in_a_pipeline() -> None:
    """A batch with fewer sequences would not fill the interleaved pipeline, or keep fewer micro-batches in memory."""
    model, machine = build_model("llama3-8b"), resolve("h100:32", local=Path("/nowhere"))
    job, layout = Job(global_batch=8), Layout.parse("dp2 tp2 cp2 pp4 v2 zero1 interleaved mbs1")
    result = compute_lengths(
        model=model,
        machine=machine,
        job=job,
        layout=layout,
        search=lambda job: search(model=model, machine=machine, job=job, top=1, axes=("cp",), placements=False),
    )
    points = [(point, curve.longest) for curve in result.curves for point in curve.points]
    assert {curve.cp for curve in result.curves for point in curve.points if point.tokens == 8192} == {2, 4}
    assert [point.fits for point, _ in points] == [point.tokens <= longest for point, longest in points]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "word", "ranks"),
    mark_share(3, [("llama3-8b", "h100", 2), ("llama3-70b", "h200", 16), ("llama3-70b", "h100", 24)]),
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
def test_a_model_that_is_published_in_few_bits_is_fine_tuned_over_its_own_weights() -> None:
    """gpt-oss fits a GPU with 24 GB with its experts in MXFP4, not with nf4 next to experts in 16 bits."""
    machine, job = resolve("rtx4090:1", local=Path("/nowhere")), Job(sequence=2048, global_batch=16)
    ways = questions.list_fine_tunes(model=build_model("gpt-oss-20b"), machine=machine, job=job)
    assert [way.method for way in ways if way.micro_batch] == ["lora:16 over mxfp4", "lora:16 over mxfp4"]
    assert ways[2].method == "qlora:16"
    assert ways[2].memory_bytes > 30 * 2**30 > 24 * 2**30 > ways[3].memory_bytes
    planner = Planner(model=build_model("gpt-oss-20b"), machine=machine, job=job.replace(adapter={"base": "mxfp4"}))
    assert planner.estimate(Layout.parse(ways[3].layout)).peak_bytes == ways[3].memory_bytes
    in_16_bits = find_published("unsloth/gpt-oss-20b-BF16")
    assert in_16_bits is None or [
        way.method for way in questions.list_fine_tunes(model=in_16_bits, machine=machine, job=job)
    ] == ["full", "lora:16", "qlora:16"]


@pytest.mark.long  # `test_fine_tuning_of_an_8b_model…` has this line too
@pytest.mark.slow
def test_an_answer_says_on_how_many_gpus_a_method_fits_if_none_does() -> None:
    """Experts stay in 16 bits next to a base in nf4, which the remarks say too."""
    machine, job = resolve("rtx4090:1", local=Path("/nowhere")), Job(sequence=2048, global_batch=16)
    ways = questions.list_fine_tunes(model=build_model("qwen3-30b-a3b"), machine=machine, job=job)
    assert {way.micro_batch for way in ways} == {0}
    assert [line for line in ways[0].remarks if "routed experts stay in the dtype of activations" in line]
    assert [line for line in ways[0].remarks if line.startswith("qlora:16 fits on 8 of rtx4090, as 'dp8 zero3 mbs1")]


@pytest.mark.long  # four searches for one line
def test_a_remark_compares_the_step_of_the_fastest_way_to_fine_tune_alone() -> None:
    ways = questions.list_fine_tunes(
        model=build_model("qwen3.5-0.8b"), machine=NODE, job=Job(sequence=1024, global_batch=8)
    )
    assert len(ways) >= 3
    assert len([line for line in ways[0].remarks if "fused_scans=true" in line]) == 1


@pytest.mark.slow
def test_fine_tuning_of_an_8b_model_on_one_24_gb_gpu() -> None:
    """It needs QLoRA: weights in 16 bits take 15 GiB, and their states more than there is."""
    machine = resolve("rtx4090:1", local=Path("/nowhere"))
    ways = questions.list_fine_tunes(
        model=build_model("llama3-8b"), machine=machine, job=Job(sequence=2048, global_batch=16)
    )
    assert [way.method for way in ways] == ["full", "lora:16", "qlora:16", "qlora:16"]
    full, lora, qlora, faster = ways
    assert (full.longest_sequence, full.micro_batch) == (0, 0)
    assert full.remarks == (
        "sequences longer than 8,192 tokens are beyond the model's positions: scale its rotary embedding, train on "
        "longer text",
        "full fits as 'dp1 zero3 mbs1 ac=full offload=optimizer+parameters' with --stack deepspeed, with 164.53 GiB in "
        "the memory of each host",
        "full fits on 16 of rtx4090, as 'dp16 zero3 mbs1 ac=full'",
    )
    assert lora.longest_sequence < qlora.longest_sequence > 8192
    assert qlora.micro_batch >= 4
    assert faster.layout == "dp1 zero0 mbs1"
    assert faster.tokens_per_second > qlora.tokens_per_second
    for way in ways[1:]:
        chosen = Job(sequence=2048, global_batch=16, adapter=way.method)  # type: ignore[arg-type]
        planner = Planner(model=build_model("llama3-8b"), machine=machine, job=chosen)
        if way.micro_batch:
            result = planner.estimate(Layout.parse(way.layout))
            assert planner.fits(result.layout)
            assert result.peak_bytes == way.memory_bytes
            memory = planner.step(result.layout).memory
            assert (memory.driver_bytes, memory.risk) == (way.driver_bytes, way.risk)
            assert chosen.tokens_per_step / result.step_time.seconds == way.tokens_per_second
        longer = chosen.replace(sequence=way.longest_sequence + 2)
        single = Layout.parse(way.layout).replace(mbs=1)
        assert not Planner(model=build_model("llama3-8b"), machine=machine, job=longer).fits(single)


@pytest.mark.parametrize("noise", [-1.0, 0.0, float("nan")])
def test_a_noise_scale_is_positive(noise: float) -> None:
    with pytest.raises(UserError, match="noise="):
        questions.list_reasonable_batches(
            job=Job(sequence=512, global_batch=8), layout=Layout(), tokens=1e9, noise=noise
        )


@pytest.mark.long  # two long searches
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:no layout was found to fit with sequences")
def test_the_longest_sequence_is_found_where_no_layout_fits_at_the_job_length() -> None:
    """A layout that is given and one that is found have the same answer."""
    import fivefold as ff

    (found,) = ff.ask("sequence", "qwen2-7b", "l4:1", adapter="lora:64", gbs=16)
    given = questions.search_longest_sequence(
        model=build_model("qwen2-7b"),
        machine=resolve("l4:1", local=Path("/nowhere")),
        job=Job(global_batch=16, adapter=Adapter(rank=64)),
        layout=Layout.parse("dp1 zero0 mbs1 ac=full"),
    )
    assert found.longest.value == given.value > 256
    assert "no layout was found to fit with sequences of 4,096 tokens" in " ".join(found.remarks)


def test_a_layout_that_fits_at_no_length_is_not_advised_to_shorten_it() -> None:
    model, machine = build_model("qwen2.5-32b"), resolve("rtx4090:1", local=Path("/nowhere"))
    job, layout = Job(sequence=2048, adapter=Adapter(base="nf4")), Layout.parse("mbs1 ac=full")
    with pytest.raises(UserError) as error:
        questions.search_longest_sequence(model=model, machine=machine, job=job, layout=layout)
    assert "even with the shortest sequence" in str(error.value)
    assert "shorten" not in str(error.value)
    risk = float(re.findall(r"accept the risk with --risk ([\d.]+)", str(error.value))[0])
    assert questions.search_longest_sequence(model=model, machine=machine, job=job, layout=layout, risk=risk).value > 0


@pytest.mark.slow
@pytest.mark.parametrize(("model", "helps"), [("llama3-405b", False), ("llama3-70b", True)])
def test_offloading_is_advised_only_where_it_fits(model: str, helps: bool) -> None:
    about: dict[str, Any] = {"model": build_model(model), "machine": NODE}
    job = Job(sequence=8192)
    with pytest.raises(UserError) as error:
        questions.find_fewest_gpus(**about, job=job)
    assert str(error.value).endswith("use --set offload=optimizer") == helps
    if helps:
        offloaded = job.replace(offload=("optimizer",))
        assert questions.find_fewest_gpus(**about, job=offloaded).value <= 8


@pytest.mark.slow
def test_each_global_batch_has_its_fastest_layout_and_one_is_recommended() -> None:
    import fivefold as ff

    batches = ff.ask("batch", "llama3.2-1b", "h100:2", tokens=1e12)
    assert [batch.recommended for batch in batches].count(True) == 1
    fastest = ff.search("llama3.2-1b", "h100:2", gbs=batches[0].global_batch, top=1).best[0].step
    assert batches[0].step_seconds == pytest.approx(fastest.time.step_seconds, rel=0.01)  # which also varies ``reduce``
    given = ff.ask("batch", "llama3.2-1b", "h100:2", "dp2 zero3 mbs1", tokens=1e12)
    assert {batch.layout for batch in given} == {"dp2 zero3 mbs1"}
    assert not any(batch.recommended for batch in given)


def test_where_nothing_fits_the_layout_of_least_risk_comes_first() -> None:
    """A faster layout of a higher risk is named with it, not alone."""
    import fivefold as ff

    result = ff.search("llama3-8b", "h100:2", seq=8192)
    assert not result.best
    assert result.tight is not None
    least = min(result.misses, key=lambda miss: miss.risk or 1.0)
    assert least.risk is not None
    assert least.risk < result.tight.risk
    line = result.describe_tight()
    assert line.index(f"accepts {least.layout}") < line.index(
        f"--risk {result.tight.option} also {result.tight.layout}"
    )


@pytest.mark.long  # two searches of 64 GPUs; `test_each_global_batch…` compares those of two
@pytest.mark.slow
def test_the_fastest_layout_of_a_question_is_the_first_of_search() -> None:
    """``search`` balances the stages of pipelines; the questions did not."""
    import fivefold as ff

    asked: dict[str, Any] = {"seq": 8192, "gbs": 64, "stack": "megatron-core"}
    first = ff.search("llama3-70b", "h100:64", **asked).best[0].step
    run = ff.ask("run", "llama3-70b", "h100:64", tokens=15e12, **asked)[0]
    assert (run.layout, run.step_seconds) == (first.layout, pytest.approx(first.time.step_seconds))
