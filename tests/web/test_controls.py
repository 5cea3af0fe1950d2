from __future__ import annotations

from pathlib import Path

import pytest

from fivefold.errors import UserError
from fivefold.layout.spec import Layout
from fivefold.layout.validity import is_legal
from fivefold.planner.predict import predict
from fivefold.web.controls import JOB_CHOICES, JOB_HELP, change_keyword, list_controls, list_job_choices, list_sizes
from fivefold.web.folder import ServedFolder
from fivefold.web.question import PRECISION_PARTS, PredictQuestion, ResolvedRequest


def resolve_question(**fields: object) -> tuple[ResolvedRequest, Layout]:
    question = PredictQuestion.model_validate(fields)
    resolved = question.resolve(folder=ServedFolder(Path()), local=Path("none.toml"))
    return resolved, question.parse_layout(resolved.machine)


@pytest.mark.parametrize(
    ("model", "machine", "layout", "gbs"),
    [
        ("llama3-8b", "h100:8", "dp8 zero3 mbs1", 64),
        ("llama3-70b", "h100:512", "dp16 tp8 pp4 v2 zero1 mbs1", 2048),
        ("deepseek-v3", "h800:512", "dp32 pp16 ep32 dualpipe zero1", 3840),
        ("gpt3-175b", "a100:96", "tp8 pp12", 96),
        ("mixtral-8x7b", "h100:16", "dp8 tp2 cp1 ep4 etp2 zero1/4", 64),
    ],
)
def test_every_choice_of_a_control_is_valid_or_says_why_not(model: str, machine: str, layout: str, gbs: int) -> None:
    resolved, now = resolve_question(model=model, machine=machine, layout=layout, gbs=gbs)
    rows = list_controls(resolved, now)
    assert {row.word for row in rows} >= {"dp", "tp", "pp", "zero", "mbs", "ac"}
    for row in rows:
        assert sum(option.chosen for option in row.options) == 1, row.word
        for option in row.options:
            if option.reason:
                assert "\n" not in option.reason
                continue
            other = Layout.parse(option.layout)
            assert is_legal(other, model=resolved.model, job=resolved.job, machine=resolved.machine), option
            if resolved.machine.ranks <= 16:
                predict(model=resolved.model, machine=resolved.machine, layout=other, job=resolved.job)
            if row.word != "dp" and row.word != "zero":
                assert other.world == now.world


def test_a_batch_that_the_question_leaves_open_follows_the_choice() -> None:
    """Of the default batch of 8 sequences, 8 ranks would have no other micro-batch than 1."""
    resolved, now = resolve_question(model="llama3-8b", machine="h100:8", layout="dp8 zero3 mbs2 ac=full")
    rows = {row.word: {option.text: option for option in row.options} for row in list_controls(resolved, now)}
    assert resolved.job.global_batch == 16
    assert [text for text, option in rows["mbs"].items() if not option.reason] == ["1", "2", "4", "8", "16", "32", "64"]
    assert rows["tp"]["8"].layout == "dp1 tp8 zero3 mbs2 ac=full"
    for option in (*rows["mbs"].values(), *rows["tp"].values()):
        changed, layout = resolve_question(model="llama3-8b", machine="h100:8", layout=option.layout)
        assert is_legal(layout, model=changed.model, job=changed.job, machine=changed.machine), option


def test_an_invalid_choice_states_the_rule_with_its_numbers() -> None:
    resolved, now = resolve_question(model="llama3-70b", machine="h100:512", layout="dp512 zero3", gbs=512)
    tensor = {
        option.text: option.reason for row in list_controls(resolved, now) if row.word == "tp" for option in row.options
    }
    assert tensor["8"] == ""
    resolved, now = resolve_question(model="gpt2", machine="h100:8", layout="dp8", gbs=64, seq=1024)
    tensor = {
        option.text: option.reason for row in list_controls(resolved, now) if row.word == "tp" for option in row.options
    }
    assert tensor["8"].startswith("heads=12 is not divisible by tp=8; try tp")


def test_the_plan_page_has_a_control_for_offloading() -> None:
    resolved, now = resolve_question(model="llama3-8b", machine="h100:8", layout="dp8 zero3 offload=optimizer", gbs=64)
    row = next(row for row in list_controls(resolved, now) if row.word == "offload")
    chosen = {option.text: option.chosen for option in row.options}
    assert chosen == {
        "none": False, "optimizer": True, "activations": False, "optimizer+activations": False, "parameters": False,
    }  # fmt: skip
    assert row.options[0].layout == "dp8 zero3 mbs1"
    assert "offload=optimizer+activations" in row.options[3].layout
    assert row.options[4].reason == ""
    resolved, now = resolve_question(model="llama3-8b", machine="h100:8", layout="dp8 zero1", gbs=64)
    row = next(row for row in list_controls(resolved, now) if row.word == "offload")
    assert row.options[4].reason.startswith("offload=parameters is not modelled with")
    resolved, now = resolve_question(
        model="llama3-8b", machine="h100:8", layout="dp8 zero3 offload=parameters", gbs=64, stack="fsdp2"
    )
    row = next(row for row in list_controls(resolved, now) if row.word == "offload")
    assert [(option.text, option.reason) for option in row.options if option.chosen] == [("parameters", "")]


def test_layers_of_an_adapter_are_controls() -> None:
    asked = {"model": "mixtral-8x7b", "machine": "h100:8", "layout": "dp8 zero3", "gbs": 64}
    choices = list_job_choices(*resolve_question(**asked))
    for field in ("adapter_targets", "modules_to_save"):
        assert {choice.reason for choice in choices[field]} == {"no adapter is chosen; use one, such as lora:16"}
    choices = list_job_choices(*resolve_question(**asked, adapter="lora:16"))
    for field in ("adapter_targets", "modules_to_save"):
        for choice in choices[field]:
            if choice.value == "gate_proj,up_proj,down_proj":
                assert "no such layer" in choice.reason
                continue
            assert choice.reason == ""
            changed, now = resolve_question(**asked, adapter="lora:16", **{field: choice.value})
            assert is_legal(now, model=changed.model, job=changed.job, machine=changed.machine)
            assert changed.job.adapter is not None
            assert getattr(changed.job.adapter, field.removeprefix("adapter_")) == tuple(choice.value.split(","))
    dense = list_job_choices(*resolve_question(**asked | {"model": "llama3-8b"}, adapter="lora:16"))
    off = {choice.value: choice.reason for choice in dense["adapter_targets"]}
    assert "experts" in off["all-linear,experts.gate_up_proj,experts.down_proj"]
    assert off["q_proj,v_proj"] == ""
    asked |= {"adapter": "lora:16", "adapter_targets": "q_proj,v_proj", "rank_pattern": "q_proj:4"}
    off = {choice.value: choice.reason for choice in list_job_choices(*resolve_question(**asked))["adapter_targets"]}
    assert "rank_pattern" in off["gate_proj,up_proj,down_proj"]  # whose target it would not have


def test_fused_scans_are_a_control_of_models_with_scans() -> None:
    def explain(model: str, stack: str) -> str:
        asked = resolve_question(model=model, machine="h100:8", layout="dp8 zero3", gbs=64, stack=stack)
        (choice,) = list_job_choices(*asked)["fused_scans"]
        return choice.reason

    assert explain("qwen3-next-80b-a3b", "fivefold") == ""
    assert "has no layers of gated_delta_net" in explain("llama3-8b", "fivefold")
    assert explain("qwen3-next-80b-a3b", "torchtitan").endswith("scans of torchtitan are fused anyway")


def test_an_optimizer_or_precision_that_no_config_can_express_is_marked() -> None:
    def list_off(field: str, **other: str) -> dict[str, str]:
        asked = {"model": "llama3-8b", "machine": "h100:8", "layout": "dp8 zero3", "gbs": 64} | other
        choices = list_job_choices(*resolve_question(**asked))[field]
        return {choice.value: choice.reason for choice in choices if choice.reason}

    assert list_off("optimizer", stack="torchtitan").keys() == set(JOB_CHOICES["optimizer"]) - {"adamw"}
    assert list_off("optimizer", stack="torchtitan")["muon"] == (
        "no config of torchtitan is written with optimizer muon; use adamw, or another stack"
    )
    assert list_off("precision", stack="torchtitan")["nvfp4"].startswith("no config of torchtitan is written with")
    # what another field causes is said there alone
    assert (
        list_off("precision", stack="torchtitan", optimizer="muon").keys()
        == list_off("precision", stack="torchtitan").keys()
    )
    assert list_off("optimizer") == {}


def test_sharding_group_is_a_control() -> None:
    resolved, now = resolve_question(model="llama3-8b", machine="h100:16", layout="dp16 zero3/8 mbs1", gbs=64)
    row = next(row for row in list_controls(resolved, now) if row.word == "shard_group")
    assert {option.text: option.layout for option in row.options} == {
        "2": "dp16 zero3/2 mbs1", "4": "dp16 zero3/4 mbs1", "8": "dp16 zero3/8 mbs1", "all": "dp16 zero3 mbs1",
    }  # fmt: skip
    assert [option.text for option in row.options if option.chosen] == ["8"]
    resolved, now = resolve_question(
        model="llama3-8b", machine="h100:16", layout="dp16 zero3 mbs1", gbs=64, stack="deepspeed"
    )
    row = next(row for row in list_controls(resolved, now) if row.word == "shard_group")
    assert row.options[0].reason.startswith("deepspeed does not support shard groups")
    resolved, now = resolve_question(model="llama3-8b", machine="h100:16", layout="dp16 mbs1", gbs=64)
    assert "shard_group" not in {row.word for row in list_controls(resolved, now)}


def test_values_that_no_config_can_express_are_disabled() -> None:
    asked = {"model": "llama3-8b", "machine": "h100:8", "gbs": 64, "stack": "torchtitan"}

    def list_options(layout: str, word: str, **other: str) -> dict[str, str]:
        resolved, now = resolve_question(**asked | {"layout": layout} | other)
        row = next(row for row in list_controls(resolved, now) if row.word == word)
        return {option.text: option.reason for option in row.options}

    recomputations = list_options("dp8 zero3 mbs1", "ac")
    assert [text for text, reason in recomputations.items() if not reason] == ["none", "norm+rope+act", "full"]
    assert recomputations["selective"] == (
        "a config of torchtitan cannot express ac=selective; use ac=none, ac=full or ac=norm+rope+act, or another stack"
    )
    assert list_options("dp8 zero3 mbs1", "zero")["2"].startswith("a config of torchtitan cannot express zero2")
    typed = "dp8 zero3 mbs1 ac=norm+act"  # is predicted, and does not switch off what it could change to
    assert [text for text, reason in list_options(typed, "ac").items() if not reason] == [
        "none", "norm+act", "norm+rope+act", "full"
    ]  # fmt: skip
    assert list_options(typed, "tp")["2"] == ""
    assert list_options("dp8 zero3 mbs1", "ac", stack="fivefold")["selective"] == ""
    resolved, now = resolve_question(**asked | {"layout": typed, "stack": "fivefold"})
    reasons = {choice.value: choice.reason for choice in list_job_choices(resolved, now)["stack"]}
    assert reasons["torchtitan"].startswith("a config of torchtitan cannot express ac=norm+act")


def test_parts_of_the_precision_are_controls() -> None:
    resolved, now = resolve_question(model="llama3-8b", machine="h100:8", layout="dp8 zero3", gbs=64)
    reasons = {(part, choice.value): choice.reason for part, choices in list_job_choices(resolved, now).items()
               for choice in choices if part in PRECISION_PARTS}  # fmt: skip
    assert reasons["gathers", "fp8"].startswith("gathers='fp8' needs a master copy and fp8 matmuls")
    assert reasons["scaling", "tiles"].startswith("matmuls in bf16 have no scales")
    assert reasons["moments_bytes", "2,2"] == reasons["master_bytes", "0"] == ""
    for (part, value), reason in reasons.items():  # what is not off can be chosen
        if not reason:
            changed, _ = resolve_question(
                model="llama3-8b", machine="h100:8", layout="dp8 zero3", gbs=64, **{part: value}
            )
            predict(model=changed.model, machine=changed.machine, layout=now, job=changed.job)


def test_all_ranks_of_a_larger_machine_are_used() -> None:
    resolved, now = resolve_question(model="llama3-8b", machine="h100:8", layout="dp4 tp2 zero1 mbs4", gbs=32)
    assert list_sizes(resolved, now) == [
        (2, "dp1 tp2 zero1 mbs4"),
        (4, "dp2 tp2 zero1 mbs4"),
        (8, "dp4 tp2 zero1 mbs4"),
        (16, "dp8 tp2 zero1 mbs4"),
        (32, "dp16 tp2 zero1 mbs2"),
    ]
    resolved, now = resolve_question(model="llama3-8b", machine="h100:8", layout="tp8", gbs=32)
    assert [text for _, text in list_sizes(resolved, now)][:3] == ["dp1 tp8 zero0 mbs1"] * 3  # no half of a replica
    resolved, now = resolve_question(model="llama3-8b", machine="h100:8", layout="dp2", gbs=32)
    assert {text for _, text in list_sizes(resolved, now)} == {"dp2 zero0 mbs1"}  # it did not use all before


def test_changing_a_keyword_adapts_the_dependent_keywords() -> None:
    resolved, now = resolve_question(model="llama3-8b", machine="h100:8", layout="dp2 pp4 v2 mbs4 zero1/2", gbs=16)
    assert str(change_keyword(resolved, now, pp=1)) == "dp8 zero1/2 mbs2"
    assert change_keyword(resolved, now, schedule="zb1p").v == 1
    assert change_keyword(resolved, now, schedule="zbv").v == 2
    assert change_keyword(resolved, now, v=1).schedule == "1f1b"
    assert change_keyword(resolved, now, zero=0).shard_group is None
    assert change_keyword(resolved, now, tp=2).dp == 1
    with pytest.raises(UserError, match="does not divide the 8 ranks"):
        change_keyword(resolved, now, tp=3)
    now = now.replace(ac="full@1")
    assert change_keyword(resolved, now, zero=3).ac == "full@1"
    assert (change_keyword(resolved, now, pp=1).ac, change_keyword(resolved, now, schedule="dualpipe").ac) == (
        "full",
        "full",
    )


def test_uneven_stages_go_with_another_number_of_stages() -> None:
    resolved, layout = resolve_question(model="llama3-8b", machine="h100:8", layout="dp4 pp2 stages=15-17 mbs1", gbs=64)
    assert layout.stages == (15, 17)
    assert change_keyword(resolved, layout, pp=4).stages == ()


def test_stages_of_the_embedding_and_the_head_alone_are_choices() -> None:
    """Llama 3 405B has 126 layers in 16·8 = 128 stages."""
    resolved, layout = resolve_question(model="llama3-405b", machine="h100:2048", layout="dp16 tp8 pp16 mbs1", gbs=512)
    options = {row.word: {option.text: option for option in row.options} for row in list_controls(resolved, layout)}
    chosen = Layout.parse(options["v"]["8"].layout)
    assert (options["v"]["8"].reason, chosen.pp, chosen.v) == ("", 16, 8)
    assert [*options["stages"]] == ["even", "0-9x14-0"]  # even is 7-8x14-7
    assert [option.reason for option in options["stages"].values()] == ["", ""]
    alone = Layout.parse(options["stages"]["0-9x14-0"].layout)
    assert (alone.stages[0], sum(alone.stages), alone.stages[-1]) == (0, 126, 0)
    rows = {row.word: row for row in list_controls(resolved, alone)}
    assert [option.text for option in rows["stages"].options if option.chosen] == ["0-9x14-0"]
    resolved, layout = resolve_question(model="llama3-8b", machine="h100:4", layout="pp4 mbs1", gbs=64)
    (row,) = (row for row in list_controls(resolved, layout) if row.word == "stages")
    assert [option.text for option in row.options] == ["even", "7-9-9-7", "0-16-16-0"]
    for text in ("pp98 mbs1", "pp2 dp49 mbs1"):
        resolved, layout = resolve_question(model="gpt3-175b", machine="a100:98", layout=text, gbs=98, seq=2048)
        options = {row.word: {option.text: option for option in row.options} for row in list_controls(resolved, layout)}
        assert options["pp"]["98"].reason == ""


def test_a_layout_grows_with_the_machine_if_its_ranks_divide_it() -> None:
    resolved, layout = resolve_question(model="llama3-8b", machine="h100:6", layout="dp3 tp2 zero1 mbs1", gbs=12)
    assert {size.ranks: size.layout.split()[0] for size in list_sizes(resolved, layout)} == {
        1: "dp3", 3: "dp3", 6: "dp3", 12: "dp6", 24: "dp12",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("setting", "stack", "reason"),
    [
        ("kernels=eager", "torchtitan", "stack torchtitan: compile=true compiles what kernels='eager' runs one by one"),
        ("kernels=eager", "fsdp2", ""),
        ("fused_scans=true", "fsdp2", ""),
    ],
)
def test_software_that_contradicts_a_setting_is_marked(setting: str, stack: str, reason: str) -> None:
    asked = resolve_question(model="llama3-8b", machine="h100:8", layout="dp8 zero3", gbs=64, set=[setting])
    reasons = {choice.value: choice.reason for choice in list_job_choices(*asked)["stack"]}
    assert reasons[stack].startswith(reason)
    assert bool(reasons[stack]) == bool(reason)


def test_adapters_next_to_frozen_parts_are_disabled_with_the_reason() -> None:
    asked = resolve_question(
        model="llama3-8b", machine="h100:8", layout="dp8 zero3", gbs=64, set=["freeze=embed_tokens"]
    )
    reasons = [choice.reason for choice in list_job_choices(*asked)["adapter"]]
    assert all(reason.startswith("freeze is not supported with an adapter") for reason in reasons)


def test_a_job_value_that_the_layout_excludes_states_the_reason() -> None:
    resolved, layout = resolve_question(model="llama3-8b", machine="h100:8", layout="dp8 zero3", gbs=64)
    choices = list_job_choices(resolved, layout)
    assert {field: len(values) for field, values in choices.items()} == {
        field: len(values) for field, values in JOB_CHOICES.items()
    }
    reasons_by_stack = {choice.value: choice.reason for choice in choices["stack"]}
    assert reasons_by_stack["torchtitan"] == ""
    assert reasons_by_stack["megatron-core"].startswith("megatron-core does not support zero3")
    resolved, layout = resolve_question(model="deepseek-v3", machine="h800:512", layout="dp32 pp16 ep32", gbs=3840)
    hybrid = resolve_question(model="recurrentgemma-2b", machine="h100:8", layout="dp8 zero3", gbs=64)
    assert all("adapters are not modelled" in choice.reason for choice in list_job_choices(*hybrid)["adapter"])
    jobs = [  # of fields that no rule of a layout reads
        *(
            resolved.job.replace(stack=resolved.job.stack.replace(attention=choice.value))
            for choice in list_job_choices(resolved, layout)["attention"]
        ),
        *(
            resolved.job.replace(precision=resolved.job.precision.replace(moments_bytes=tuple(choice.value.split(","))))
            for choice in list_job_choices(resolved, layout)["moments_bytes"]
        ),
    ]
    for job in jobs:
        assert is_legal(layout, model=resolved.model, job=job, machine=resolved.machine)
    assert set(JOB_HELP) == set(JOB_CHOICES)
