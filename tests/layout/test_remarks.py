"""What is valid but perhaps not intended, or is not counted, is said, and no command leaves out what another says."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import fivefold as ff
from fivefold.adapter import Adapter, parse_adapter
from fivefold.errors import UsageWarning, UserError
from fivefold.job import RECIPES, Job
from fivefold.layout.remarks import list_remarks
from fivefold.layout.spec import Layout
from fivefold.layout.where import ANY_LAYOUT, Where
from fivefold.machine.catalog import resolve
from fivefold.model.catalog import build_model
from fivefold.planner.counts.operations.launches import FUSED_LAUNCHES, LAUNCHES_PER_GROUP
from fivefold.planner.predict import Planner, predict
from fivefold.planner.questions.changes import list_changes
from fivefold.planner.questions.fewest_gpus import find_fewest_gpus
from fivefold.planner.search import search
from fivefold.stack.catalog import build_stack
from fivefold.stack.spec import FUSED_SCANS, Stack
from fivefold.units import show_seconds
from tests.selection import mark_share

NANO = build_model("nano")
WINDOW = NANO.replace(window=64, window_pattern=(True, False))
JOB = Job(sequence=64, global_batch=4)
NODE = resolve("h100:4", local=Path("/nowhere"))


@pytest.mark.parametrize(
    ("machine", "recipe", "words"),
    [
        ("a100:8", "fp8", "a100 has no fp8 matrix units: matmuls of fp8 are predicted at the rate of fp16"),
        ("h100:8", "nvfp4", "h100 has no fp4 matrix units: matmuls of nvfp4 are predicted at the rate of fp8"),
        ("h100:8", "mxfp8", "the matrix units of h100 do not support the block scales"),
        ("mi300x:8", "mxfp8", "the matrix units of mi300x do not support the block scales"),
        ("h100:8", "fp8-tiles", None),
        ("b200:8", "mxfp8", None),
        ("mi355x:8", "mxfp8", None),
        ("b200:8", "nvfp4", None),
        ("a100:8", "bf16", None),
        ("v100:8", "bf16", "v100 has no bf16 matrix units: matmuls of bf16 are predicted at the rate of fp32"),
    ],
)
def test_a_warning_lists_number_formats_that_a_chip_does_not_multiply(
    machine: str, recipe: str, words: str | None
) -> None:
    chips, job = resolve(machine, local=Path("/nowhere")), JOB.replace(precision=RECIPES[recipe])
    lines = [line for line in list_remarks(NANO, chips, job, Layout(dp=8)) if "matrix units" in line]
    assert [words in line for line in lines] == ([True] if words else [])
    of_recipes = list_remarks(NANO, chips, JOB, None, recipes=(RECIPES[recipe],))
    assert [line for line in of_recipes if "matrix units" in line] == lines


@pytest.mark.parametrize(("bf16", "is_slow"), [(10e9, True), (800e9, False)])
def test_a_warning_says_that_a_processor_without_instructions_for_bf16_is_faster_in_fp32(
    bf16: float, is_slow: bool
) -> None:
    chip = NODE.chip.replace(peak_flops={"fp32": 87e9, "bf16": bf16})
    lines = list_remarks(NANO, NODE.replace(backend="gloo", chip=chip), JOB, Layout(dp=4))
    told = "matmuls in bf16 reach 10.00 GFLOP/s on a rank of this computer, those in fp32 87.00 GFLOP/s"
    assert any(line.startswith(told) for line in lines) == is_slow
    exact = JOB.replace(precision=RECIPES["fp32"])
    assert not [line for line in list_remarks(NANO, NODE.replace(chip=chip), exact, None) if "matmuls" in line]


@pytest.mark.parametrize(
    ("quantization", "adapter", "words"),
    [
        ("nf4", "qlora:8", None),
        ("fp8", "lora:8+fp8", None),
        ("nf4", "lora:8", "in the precision of the job: add adapter.base=nf4 to train over them as they are"),
        ("nf4", "lora:8+int8", "as a base in int8: add adapter.base=nf4"),
        ("fp8", None, "or train an adapter over them (adapter lora:16 with adapter.base=fp8)"),
        ("mxfp4", None, "(adapter lora:16 with adapter.base=mxfp4)"),
        ("gptq", "qlora:8", "as a base in nf4, as no base is counted in gptq: name a repository in bf16"),
        ("", "lora:8", None),
    ],
)
def test_a_warning_lists_quantized_weights_that_are_counted_in_another_format(
    quantization: str, adapter: str | None, words: str | None
) -> None:
    method, _, base = (adapter or "").partition("+")
    fields = parse_adapter(method) | ({"base": base} if base else {}) if adapter else None
    job = JOB.replace(adapter=fields and Adapter.read(fields, origin=""))
    model = NANO.replace(quantization=quantization, repository="some/nano-4bit")
    lines = [line for line in list_remarks(model, NODE, job, None) if "quantized" in line]
    assert [words in line for line in lines] == ([True] if words else [])


def test_a_warning_says_that_unsloth_quantizes_only_a_part_of_a_base() -> None:
    model = NANO.replace(quantization="nf4", repository="unsloth/nano-unsloth-bnb-4bit")
    lines = list_remarks(model, NODE, JOB.replace(adapter=Adapter(rank=8, base="nf4")), None)
    assert [line for line in lines if "keeps some linear layers in 16 bits" in line]


LONG = Job(sequence=4096, global_batch=8)
FUSED = {
    "--set fused_scans=true": LONG.replace(fused_scans=True),
    "--stack megatron-core": LONG.replace(stack=build_stack("megatron-core")),
    "--stack torchtitan": LONG.replace(stack=build_stack("torchtitan")),
}


@pytest.mark.parametrize(
    ("model", "layout", "option"),
    [
        ("qwen3-next-80b-a3b", "dp8 ep8 zero1 mbs1", "--set fused_scans=true"),
        ("jamba-v0.1", "dp8 ep8 zero1 mbs1", "--stack megatron-core"),  # flash-linear-attention has no Mamba
        ("jamba-v0.1", "dp8 zero3", "--stack torchtitan"),
    ],
)
def test_a_remark_compares_step_times_with_and_without_fused_scans(model: str, layout: str, option: str) -> None:
    chips, plan = resolve("h200:8", local=Path("/nowhere")), Layout.parse(layout)
    planner = Planner(model=build_model(model), machine=chips, job=LONG)
    (line,) = (line for line in planner.list_remarks(plan) if "PyTorch's operations" in line)
    fused = Planner(model=planner.model, machine=chips, job=FUSED[option])
    before, after = (show_seconds(one.estimate(plan).step_time.seconds) for one in (planner, fused))
    assert f"({option})" in line
    assert line.endswith(f"a step of this layout is predicted to take {after} instead of {before}")
    assert not any("PyTorch's operations" in line for line in fused.list_remarks(plan))
    dense = Planner(model=build_model("llama3-8b"), machine=chips, job=LONG)
    assert not any("PyTorch's operations" in line for line in dense.list_remarks(plan.replace(ep=1)))


def test_a_remark_says_that_attention_in_fp8_changes_nothing_next_to_matmuls_in_16_bits() -> None:
    model, chips = build_model("llama3-8b"), resolve("b200:8", local=Path("/nowhere"))
    for precision, is_said in (("bf16", True), ("fp8", False)):
        job = JOB.replace(stack=build_stack("megatron-core"), precision=RECIPES[precision]).replace(fp8_attention=True)
        lines = [line for line in list_remarks(model, chips, job, Layout(dp=8)) if "fp8_attention" in line]
        assert [f"precision {precision} multiplies in 16 bits" in line for line in lines] == [True] * is_said


@pytest.mark.parametrize(
    ("model", "stack", "reason"),
    [
        ("llama3-8b", "fivefold", "model 'llama3-8b' has no layers of gated_delta_net, "),
        ("jamba-v0.1", "fivefold", "model 'jamba-v0.1' has no layers of gated_delta_net, "),
        ("kimi-linear-48b-a3b", "megatron-core", "scans of megatron-core are fused anyway"),
        ("kimi-linear-48b-a3b", "fivefold", None),
    ],
)
def test_a_remark_says_that_fused_scans_change_nothing_without_scans(
    model: str, stack: str, reason: str | None
) -> None:
    chips, job = resolve("h200:8", local=Path("/nowhere")), LONG.replace(stack=build_stack(stack))
    planner, fused = (
        Planner(model=build_model(model), machine=chips, job=job.replace(fused_scans=is_set))
        for is_set in (False, True)
    )
    lines = [line for line in list_remarks(planner.model, chips, fused.job, Layout(dp=8)) if "fused_scans" in line]
    assert [f"fused_scans=true changes nothing: {reason}" in line for line in lines] == ([True] if reason else [])
    is_equal = planner.estimate(Layout(dp=8)) == fused.estimate(Layout(dp=8))
    assert is_equal == bool(reason)


@pytest.mark.parametrize(
    ("model", "changes", "reason"),
    [
        ("llama3-8b", {}, "model 'llama3-8b' has no scans"),
        ("qwen3-next-80b-a3b", {"fused_scans": True}, "the scans of this job are fused kernels"),
        ("jamba-v0.1", {"fused_scans": True}, None),  # flash-linear-attention has no Mamba
        ("qwen3-next-80b-a3b", {}, None),
    ],
)
def test_a_remark_says_that_a_limit_of_temporaries_changes_nothing_without_scans_in_groups(
    model: str, changes: dict[str, bool], reason: str | None
) -> None:
    chips, job = resolve("h200:8", local=Path("/nowhere")), LONG.replace(**changes)
    planner, limited = (
        Planner(model=build_model(model), machine=chips, job=job.replace(scan_temporary_bytes=limit))
        for limit in (None, 2**25)
    )
    lines = [line for line in list_remarks(planner.model, chips, limited.job, Layout(dp=8)) if "scan_temp" in line]
    assert lines == ([f"scan_temporary_bytes=33554432 changes nothing: {reason}"] if reason else [])
    assert (planner.estimate(Layout(dp=8)) == limited.estimate(Layout(dp=8))) == bool(reason)


def test_fused_scans_on_a_machine_without_gpus_are_an_error() -> None:
    hosts, model, job = NODE.replace(backend="gloo"), build_model("nano"), FUSED["--set fused_scans=true"]
    for ask in (partial(predict, layout=Layout()), search, find_fewest_gpus):
        with pytest.raises(UserError, match="fused_scans=true needs GPUs, for which its kernels are compiled"):
            ask(model=model, machine=hosts, job=job)


def test_fused_scans_have_launches_of_their_own() -> None:
    assert set(FUSED_LAUNCHES) == set(FUSED_SCANS) < set(LAUNCHES_PER_GROUP)


def test_a_warning_says_that_a_chip_does_not_run_flash_attention() -> None:
    v100 = resolve("v100:8", local=Path("/nowhere"))
    fp16 = JOB.replace(precision=RECIPES["fp16"])
    (line,) = list_remarks(NANO, v100, fp16, Layout(dp=8))
    assert line.startswith("v100 runs no FlashAttention")
    assert list_remarks(NANO, v100, fp16.replace(attention="unfused"), Layout(dp=8)) == ()
    t4 = resolve("t4:8", local=Path("/nowhere"))
    (line,) = list_remarks(NANO, t4, fp16, Layout(dp=8))
    assert line.startswith("t4 runs no FlashAttention-2, which needs Ampere; attention is predicted as if it ran")
    assert list_remarks(NANO, t4, fp16.replace(attention="flash1"), Layout(dp=8)) == ()
    assert list_remarks(NANO, resolve("a100:8", local=Path("/nowhere")), fp16, Layout(dp=8)) == ()


def test_a_warning_says_that_sequences_exceed_the_positions_of_published_weights() -> None:
    falcon, bloom = build_model("falcon-7b"), build_model("bloom-7b1")
    (line,) = list_remarks(falcon, NODE, LONG, Layout(dp=4))
    assert line.startswith("sequences longer than 2,048 tokens are beyond the model's positions")
    assert list_remarks(falcon, NODE, LONG.replace(sequence=2048), Layout(dp=4)) == ()
    assert list_remarks(NANO, NODE, LONG, Layout(dp=4)) == ()
    assert list_remarks(bloom, NODE, LONG, Layout(dp=4)) == ()  # whose biases grow with the distance


def test_a_remark_says_that_pairs_without_messages_to_overlap_change_nothing() -> None:
    model, hosts = build_model("mixtral-8x7b"), resolve("h100:16", local=Path("/nowhere"))
    job, layout = Job(sequence=4096, global_batch=64, stack=build_stack("megatron-core")), Layout.parse("dp16 ep16")
    paired = job.replace(pairs=True)

    def list_pairs(job: Job, layout: Layout) -> list[str]:
        return [line for line in list_remarks(model, hosts, job, layout) if line.startswith("pairs=true changes")]

    (line,) = list_pairs(paired, layout)
    assert "add --set overlap=dp,cp,pp,ep" in line
    (line,) = list_pairs(paired, Layout.parse("dp16"))
    assert "ep=1" in line
    assert list_pairs(job, layout) == list_pairs(paired.replace(overlap=("dp", "cp", "pp", "ep")), layout) == []


def test_a_warning_proposes_the_fused_dispatcher_where_experts_span_nodes() -> None:
    model, hosts = build_model("qwen3-235b-a22b"), resolve("h100:256", local=Path("/nowhere"))
    job = Job(sequence=4096, global_batch=2048, stack=build_stack("megatron-core"))
    layout = Layout.parse("dp16 tp2 pp8 ep32 v4 zero1 interleaved mbs1 ac=norm+act")

    def list_dispatchers(job: Job, layout: Layout) -> list[str]:
        step = predict(model=model, machine=hosts, layout=layout, job=job)
        return [line for line in step.remarks if "dispatcher" in line]

    (line,) = list_dispatchers(job, layout)
    fused = predict(model=model, machine=hosts, layout=layout, job=job.replace(dispatcher="fused"))
    assert f"dispatcher=fused) a step is predicted to take {show_seconds(fused.time.step_seconds)} instead" in line
    within_a_node = Layout.parse("dp32 pp8 ep8 v4 zero1 interleaved mbs1 ac=full")
    assert list_dispatchers(job, within_a_node) == list_dispatchers(job.replace(dispatcher="fused"), layout) == []
    assert list_dispatchers(job.replace(stack=Stack()), layout) == []
    planner = Planner(model=model, machine=hosts, job=job)
    (line,) = (line for line in planner.list_remarks(within_a_node, where=ANY_LAYOUT) if "dispatcher" in line)
    assert not any("dispatcher" in line for line in planner.list_remarks(within_a_node, where=Where.parse("ep=8")))
    assert "'dp32 pp8 ep16 v4" in line
    changes = list_changes(model=model, machine=hosts, job=job, layout=layout)
    change = next(change for change in changes if change.change == "dispatcher=fused")
    assert change.step_seconds == fused.time.step_seconds


def test_block_scales_are_a_fact_of_the_chip() -> None:
    job = JOB.replace(precision=RECIPES["mxfp8"])
    able = NODE.replace(chip=NODE.chip.replace(block_scales=True))
    assert list_remarks(NANO, able, job, Layout(dp=4)) == ()
    assert len(list_remarks(NANO, NODE, job, Layout(dp=4))) == 1


def test_a_warning_says_that_a_window_is_as_long_as_the_sequence() -> None:
    line = "model 'nano': its window of 64 tokens does nothing in sequences of 64"
    assert list_remarks(WINDOW, NODE, JOB, None) == (line,)
    assert list_remarks(WINDOW, NODE, JOB.replace(sequence=65), None) == ()
    assert list_remarks(WINDOW.replace(window_pattern=(False,)), NODE, JOB, None) == ()
    assert list_remarks(NANO, NODE, JOB, None) == ()


def test_a_warning_counts_idle_ranks_unless_the_search_left_them_out() -> None:
    (line,) = list_remarks(NANO, NODE, JOB, Layout(dp=2))
    assert "uses 2 of the 4 ranks of h100; 2 stay idle" in line
    assert line.endswith("or degrees that multiply to 4, such as 'dp4 zero0 mbs1'.")
    assert list_remarks(NANO, NODE, JOB, Layout(dp=2), is_searched=True) == ()


LAYOUT = "dp1 pp2 zb1p mbs1 ac=full"
WINDOW_WORDS, FORMAT_WORDS = "does nothing in sequences of 64", "do not support the block scales"
IDLE_WORDS, DEFERRED_WORDS = "uses 2 of the 4 ranks", "defers weight gradients"
OF_JOB = {WINDOW_WORDS, FORMAT_WORDS}
OF_ALL = {*OF_JOB, IDLE_WORDS, DEFERRED_WORDS}
COMMANDS: dict[str, tuple[Callable[..., Any], set[str]]] = {
    "predict": (lambda model, **job: ff.predict(model, "h100:4", LAYOUT, **job), OF_ALL),
    "compare": (lambda model, **job: ff.compare(model, "h100:4", LAYOUT, "dp4", **job).variants[0].step, OF_ALL),
    "dryrun": (lambda model, **job: ff.dryrun(model, "h100:4", LAYOUT, **job).step, OF_ALL),
    "search": (
        lambda model, **job: ff.search(model, "h100:4", where="pp=2 ac=full schedule=zb1p", **job),
        {*OF_JOB, DEFERRED_WORDS},
    ),
    **{
        f"ask {question}": (lambda model, what=question, **job: ff.ask(what, model, "h100:4", LAYOUT, **job)[0], OF_ALL)
        for question in ("micro-batch", "batch", "run", "changes", "sequence")
    },
    "ask gpus": (lambda model, **job: ff.ask("gpus", model, "h100:4", **job)[0], OF_JOB),
    "ask model": (lambda model, **job: ff.ask("model", model, "h100:4", **job)[0], OF_JOB),
    "ask finetune": (
        lambda model, **job: ff.ask("finetune", model, "h100:4", "dp2", **{**job, "precision": "bf16"})[0],
        {WINDOW_WORDS, IDLE_WORDS},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("command", mark_share(2, COMMANDS))
def test_every_command_shows_the_remarks_of_the_job_and_of_the_layout(command: str, tmp_path: Path) -> None:
    answer, expected = COMMANDS[command]
    (tmp_path / "nano.json").write_text(WINDOW.model_dump_json(exclude_defaults=True))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UsageWarning)
        remarks = answer(str(tmp_path / "nano.json"), seq=64, gbs=4, precision="mxfp8").remarks
    assert {words for words in OF_ALL if any(words in line for line in remarks)} == expected
    assert len(set(remarks)) == len(remarks)


def test_the_remark_of_an_answer_is_shown_with_those_on_its_job() -> None:
    with pytest.warns(UsageWarning) as warned:
        ff.ask("micro-batch", "nano", "h100:4", "dp2", seq=64, gbs=4)
    lines = [str(warning.message) for warning in warned]
    assert [IDLE_WORDS in lines[0], "the global batch of 4 is the limit" in lines[1]] == [True, True]


def test_an_optimizer_or_precision_without_a_config_is_a_remark() -> None:
    chips, plan = resolve("h100:8", local=Path("/nowhere")), Layout.parse("dp8 zero3")
    job = JOB.replace(stack=build_stack("torchtitan"), optimizer={"kind": "muon"}, precision=RECIPES["nvfp4"])

    def list_lines(job: Job, **options: bool) -> list[str]:
        lines = Planner(model=NANO, machine=chips, job=job).list_remarks(plan, **options)
        return [line for line in lines if "is written with" in line or "known to train" in line]

    assert list_lines(job) == [
        "no config of torchtitan is written with optimizer muon; use adamw, or another stack",
        "no config of torchtitan is written with precision nvfp4; use fp32, bf16, bf16-full, bf16-autocast, fp8, "
        "fp8-wire, fp8-rowwise, fp8-rowwise-gw or mxfp8, or another stack",
    ]
    assert list_lines(job, is_searched=True) == []  # a search ends in the config, or in what would have to change
    assert list_lines(job.replace(stack=build_stack("nemo"))) == []  # no config of it is written at all
    assert list_lines(JOB.replace(stack=build_stack("deepseek"), precision="mxfp8")) == [
        "deepseek is not known to train with precision mxfp8; use bf16 or fp8-deepseek, or another stack"
    ]  # no config of it is written, but what it trains with is published
    assert list_lines(JOB.replace(stack=build_stack("torchtitan"))) == []
    assert list_lines(JOB.replace(stack=build_stack("fsdp2"))) == [], "the default precision was not chosen"


@pytest.mark.parametrize(
    ("layout", "stack", "is_padded"),
    [
        ("dp64 zero3", "fivefold", True),
        ("dp64 zero1", "fivefold", True),
        ("dp64 zero3", "fsdp2", True),
        ("dp64 zero1", "megatron-core", False),  # one flat buffer
        ("dp64 zero3/16", "fsdp2", False),
        ("dp16 zero3", "fsdp2", False),
        ("dp64", "fivefold", False),
    ],
)
def test_a_remark_says_that_rows_of_adapters_are_padded_where_a_shard_is_less_than_one(
    layout: str, stack: str, is_padded: bool
) -> None:
    job = JOB.replace(adapter=Adapter(rank=16), stack=build_stack(stack))
    remarks = list_remarks(NANO, resolve("h100:64", local=Path("/nowhere")), job, Layout.parse(layout))
    assert any("in 4 times the bytes" in line for line in remarks) == is_padded
