"""Why each choice of a proposal is as it is: every line made again by hand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.layout.text import read_token
from fivefold.layout.where import ANY_LAYOUT, Where
from fivefold.machine.catalog import resolve
from fivefold.model.catalog import build_model
from fivefold.planner.predict import Planner
from fivefold.planner.search.alternatives import explain_choices
from fivefold.planner.search.simplest import Evaluated
from fivefold.results.comparison import break_down, list_differences
from fivefold.results.search_result import Why
from fivefold.stack.catalog import build_stack as stack
from fivefold.step import TIGHT_RISK
from fivefold.units import show_risk
from tests.planner.search.test_search import EXPERTS, FEW, NODE, SMALL

A100 = resolve("a100:64", local=Path("none"))
H100 = resolve("h100:16384", local=Path("none"))
GPT3 = Planner(
    model=build_model("gpt3-175b"), machine=A100, job=Job(sequence=2048, global_batch=64, stack=stack("megatron-lm"))
)
LLAMA = Planner(model=build_model("llama3-405b"), machine=H100, job=Job(sequence=8192, global_batch=2048))


def list_reasons(planner: Planner, text: str, where: Where = ANY_LAYOUT) -> dict[str, str]:
    """The lines by choice."""
    result = planner.estimate(Layout.parse(text))
    lines = list(explain_choices(Evaluated(result.layout, result.step_time, result.peak_bytes, planner), where=where))
    assert all(isinstance(line, Why) for line in lines)
    return {line.choice: line.line for line in lines}


def change_layout(chosen: Layout, name: str) -> Layout:
    """The layout that differs from the chosen one in the words of ``name``, and in dp."""
    added, _, dropped = name.partition(" without ")
    given = {key: value for word in added.split() for key, value in read_token(word).items()}
    defaults = {key: Layout.model_fields[key].default for word in dropped.split() for key in read_token(word)}
    fields = {key: getattr(chosen, key) for key in Layout.model_fields} | defaults | given
    if "zero" in given:
        fields["shard_group"] = given.get("shard_group")
    if given.get("schedule", "interleaved") != "interleaved":
        fields["v"] = 1
    elif fields["v"] > 1:
        fields["schedule"] = "interleaved"
    if len(fields["stages"]) != fields["pp"] * fields["v"]:  # those of the chosen one do not hold for other numbers
        fields["stages"] = ()
    fields["dp"] = chosen.world // (fields["tp"] * fields["cp"] * fields["pp"])
    return Layout(**fields)


@pytest.mark.parametrize(
    ("planner", "text"),
    [
        (Planner(model=SMALL, machine=NODE, job=FEW), "dp4 tp2 zero1 mbs1"),
        (Planner(model=EXPERTS, machine=NODE, job=FEW), "dp8 ep4 zero2/4 mbs1"),
        (GPT3, "dp1 tp4 pp16 v6 zero0 mbs1 ac=selective"),
        (LLAMA, "dp512 tp8 pp4 v16 zero1/64 mbs1 ac=norm+act"),
    ],
    ids=["dense", "experts", "gpt3", "llama3"],
)
def test_stated_cost_of_alternatives_equals_their_estimate(planner: Planner, text: str) -> None:
    chosen = Layout.parse(text)
    seconds, lines = planner.estimate(chosen).step_time.seconds, list_reasons(planner, text)
    phrases = [phrase for line in lines.values() for phrase in line.split("; ")]
    held = 0
    for phrase in phrases:
        name, verdict, cost = re.fullmatch(
            r"(.+?) (exceeds the memory by|is tight:|does not fit:|(?:leaves the node: )?takes) (.+)", phrase
        ).groups()  # type: ignore[union-attr]
        name = name.removesuffix(" leaves the node:")
        result = planner.estimate(change_layout(chosen, name))
        miss = planner.describe_miss(result.layout, result.ranks)
        if "takes" not in verdict:
            assert f"{verdict} {cost}" == miss, phrase
        else:
            by = result.step_time.seconds / seconds - 1
            word = f"{abs(by):.1%} {'longer' if by > 0 else 'less'}" if abs(by) > 5e-4 else "as long"
            assert cost.startswith(word), phrase
            assert not miss, phrase
        held += 1
    assert held >= 5


def test_an_alternative_with_a_peak_below_the_capacity_has_its_risk() -> None:
    """A size "exceeding the memory" next to a peak of 69 of 79 GiB would puzzle."""
    machine = resolve("h100:8", local=Path("none"))
    planner = Planner(model=build_model("llama3-8b"), machine=machine, job=Job(sequence=8192, global_batch=64))
    tight = Layout.parse("dp8 zero2 mbs1")
    assert planner.peak_bytes(tight) < machine.chip.memory_bytes
    risk = show_risk(planner.out_of_memory_risk(tight))
    line = list_reasons(planner, "dp8 zero3 mbs1")["zero3"]
    assert line == f"zero2 is tight: {risk} risk of running out of memory (limit 5 %)"


def test_fastest_way_to_an_alternative_is_reported() -> None:
    """Thirty virtual stages on eight ranks would be more stages than layers and the two ends."""
    line = list_reasons(LLAMA, "dp512 tp8 pp4 v30 zero1/64 mbs1 ac=norm+act")["pp4"]
    assert re.search(r"pp8 v1\d takes [0-9.]+% longer \(bubble \+[0-9.]+ ms[,)]", line)


def test_an_alternative_takes_ranks_from_other_axes_if_dp_is_1() -> None:
    """GPT-3 on 64 A100, dp1: half the tp goes to dp, twice the tp is taken from pp."""
    lines = list_reasons(GPT3, "dp1 tp4 pp16 v6 zero0 mbs1 ac=selective")
    assert re.search(
        r"tp2( zero1)? exceeds the memory by .*; tp8 pp8 takes [0-9.]+% longer \(tp communication", lines["tp4"]
    )
    assert "pp8" in lines["pp16"]


def test_an_alternative_may_reduce_gradients_at_another_frequency_if_that_is_faster() -> None:
    """ZeRO-2 after every micro-batch would send all gradients four times, and ZeRO-3 the weights as well."""
    text = "dp512 tp8 pp4 v16 zero3 mbs1 ac=norm+act"
    often, once = (
        Planner(model=LLAMA.model, machine=H100, job=LLAMA.job.replace(reduce=reduce), risk=TIGHT_RISK)
        for reduce in ("micro_batch", "step")
    )
    result = often.estimate(Layout.parse(text))
    chosen = Evaluated(result.layout, result.step_time, result.peak_bytes, often)
    line = next(item.line for item in explain_choices(chosen, planners=[often, once]) if item.choice == "zero3")
    by = once.estimate(Layout.parse(text.replace("zero3", "zero2"))).step_time.seconds / chosen.seconds - 1
    assert by < 0
    assert f"zero2 (--set reduce=step) takes {-by:.1%} less" in line


def test_a_degree_is_represented_by_its_fastest_known_layout() -> None:
    """A reason said that pp2 takes longer, above a row of the table whose uneven pp2 takes as long."""
    planner = Planner(
        model=build_model("llama3-8b"), machine=resolve("h100:64", local=Path("none")),
        job=Job(sequence=8192, global_batch=512, stack=stack("torchtitan")),
    )  # fmt: skip
    texts = ("dp64 zero3 mbs1", "dp32 pp2 zero2 1f1b mbs1 stages=17-15", "dp16 cp2 pp2 v2 zero2 zbv mbs1")
    chosen, *others = (
        Evaluated(Layout.parse(text), result.step_time, result.peak_bytes, planner)
        for text in texts
        for result in [planner.estimate(Layout.parse(text))]
    )
    lines = {item.choice: item.line for item in explain_choices(chosen, evaluated=others)}
    assert lines["pp1"].startswith("pp2 zero2 1f1b stages=17-15 takes ")
    assert lines["cp1"].startswith("cp2 takes ")  # not the pipeline with cp2, whose pp is another
    plain = {item.choice: item.line for item in explain_choices(chosen)}
    assert "stages=" in plain["pp1"], "a pipeline has uneven stages here without any search"
    assert {choice: line for choice, line in lines.items() if choice != "pp1"} == {
        choice: line for choice, line in plain.items() if choice != "pp1"
    }


def test_an_alternative_says_which_keywords_it_drops() -> None:
    planner = Planner(model=SMALL, machine=NODE, job=FEW)
    texts = ("dp4 tp2 zero1 mbs1 ac=full", "dp8 zero1 mbs1")
    chosen, other = (
        Evaluated(Layout.parse(text), result.step_time, result.peak_bytes, planner)
        for text in texts
        for result in [planner.estimate(Layout.parse(text))]
    )
    line = next(item.line for item in explain_choices(chosen, evaluated=[other]) if item.choice == "tp2")
    assert line.startswith("tp1 without ac=full takes ")


def test_an_alternative_outside_the_constraints_is_marked() -> None:
    where = Where.parse("tp<=8 v<=16")
    lines = list_reasons(LLAMA, "dp512 tp8 pp4 v16 zero1/64 mbs1 ac=norm+act", where)
    assert "tp16 (excluded) leaves the node: takes" in lines["tp8"]
    assert re.search(r"pp2 exceeds the memory by [0-9.]+ .iB", lines["pp4"])  # with v16, which is admitted


def test_differing_parts_of_the_step_time_are_listed_by_size() -> None:
    before, after = (
        {"compute": 4.0, "bubble": 1.0, "tp communication": 0.5},
        {"compute": 4.1, "bubble": 0.4, "update": 0.01},
    )
    assert list_differences(before, after) == [
        ("bubble", -0.6),
        ("tp communication", -0.5),
        ("compute", pytest.approx(0.1)),
        ("update", 0.01),
    ]


@pytest.mark.parametrize(
    ("before", "after", "named"),
    [
        ({"compute": 4.0, "bubble": 1.0}, {"compute": 4.0, "bubble": 1.0}, ""),
        ({"compute": 4.0}, {"compute": 4.5}, "compute +500.0 ms"),
        ({"compute": 4.0, "bubble": 1.0}, {"compute": 4.5, "bubble": 0.93}, "compute +500.0 ms"),  # −70 ms is little
        ({"compute": 4.0, "bubble": 1.0}, {"compute": 4.5, "bubble": 0.9}, "compute +500.0 ms, bubble −100.0 ms"),
        ({"compute": 4.0, "bubble": 1.0}, {"compute": 2.35, "bubble": 2.58}, "compute −1.65 s, bubble +1.58 s"),
        (
            {"compute": 4.0, "bubble": 1.0, "tp": 0.5, "update": 0.5},
            {"compute": 4.1, "bubble": 0.4, "tp": 0.0, "update": 0.51},
            "bubble −600.0 ms, tp −500.0 ms",
        ),
        (
            {"compute": 4.0, "bubble": 1.0, "tp": 0.5, "dp": 0.5},
            {"compute": 3.5, "bubble": 1.3, "tp": 0.6, "dp": 0.59},
            "compute −500.0 ms, bubble +300.0 ms, others +190.0 ms",
        ),
        (
            {"compute": 4.0, "bubble": 1.0, "tp": 0.5, "dp": 0.5},
            {"compute": 3.5, "bubble": 1.3, "tp": 0.7, "dp": 0.51},
            "compute −500.0 ms, bubble +300.0 ms, tp +200.0 ms",
        ),
    ],
)
def test_parts_of_a_difference_are_named_until_they_explain_it(
    before: dict[str, float], after: dict[str, float], named: str
) -> None:
    assert break_down(before, after) == named
