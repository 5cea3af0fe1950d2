"""What a newcomer types first: lengths in k, no batch, a layout that does not fit, a price, ``fsdp`` alone."""

from __future__ import annotations

import json
import re
import shlex
import warnings
from pathlib import Path

import pytest

import fivefold as ff
from fivefold.errors import UsageWarning
from fivefold.layout.spec import Layout
from fivefold.requests.machines import load_machine
from tests.cli.commands import run
from tests.selection import mark_share

LARGE = ("llama3-8b", "h100:8", "dp8 zero1 mbs1", "--seq", "8k", "--gbs", "64")


def test_a_layout_that_does_not_fit_ends_with_the_change_that_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "predict", *LARGE) == 0
    *_, last, _ = capsys.readouterr().out.strip().split("\n\n")  # before the line on the software
    with pytest.warns(UsageWarning, match=r"dp8 zero1 mbs1 without a change exceeds the memory by .* GiB"):
        changes = ff.ask("changes", *LARGE[:3], seq=8192, gbs=64)
    best = next(change for change in changes if change.fits)
    assert f"it would fit with {best.change}: {best.layout}, peak memory" in " ".join(last.split())


def test_a_layout_that_fits_ends_without_a_change(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "predict", "llama3-8b", "h100:8", "dp8 zero3 mbs1", "--seq", "8k", "--gbs", "64") == 0
    assert "would fit" not in capsys.readouterr().out


def test_a_layout_that_no_single_change_makes_fit_points_to_search(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "predict", "llama3-405b", "h100:8", "dp8 zero0 mbs1") == 0
    assert "no single change makes it fit: try `fivefold search`" in " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
@pytest.mark.parametrize(("options", "batch"), [((), None), (("--gbs", "8"), 8)])
def test_a_search_without_a_batch_takes_one_sequence_per_gpu(
    options: tuple[str, ...], batch: int | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("nano", "h100:16", *options, "--seq", "512", "--where", "pp=1 cp=1", "--top", "1")
    assert run(monkeypatch, "search", *words) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert ("defaults: global batch 16" in text) == (batch is None)
    result = ff.search("nano", "h100:16", seq=512, gbs=batch, where="pp=1 cp=1", top=1)
    assert result.best[0].step.job["global_batch"] == (batch or 16)


def test_compare_takes_several_models(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("qwen3-0.6b", "nano", "h100:4", "dp4 zero1", "dp2 tp2", "--seq", "256")
    assert run(monkeypatch, "compare", *words, "--json") == 0
    variants = json.loads(capsys.readouterr().out)["variants"]
    steps = [variant["step"] for variant in variants]
    assert [(step["model"], step["layout"].split()[0]) for step in steps] == [
        ("qwen3-0.6b", "dp4"), ("qwen3-0.6b", "dp2"), ("nano", "dp4"), ("nano", "dp2")
    ]  # fmt: skip


def test_compare_takes_a_price(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("nano", "h100:8", "dp8 zero1", "dp8 zero3", "--price", "h100=2/h", "--json")
    assert run(monkeypatch, "compare", *words) == 0
    rows = {row["name"]: row["values"] for row in json.loads(capsys.readouterr().out)["rows"]}
    hours = rows["GPU hours of 1 T tokens"]
    assert rows["cost of 1 T tokens"] == pytest.approx([2 * value for value in hours])


@pytest.mark.parametrize("layout", ["fsdp mbs1", "tp2 ddp", "hsdp/8"])
def test_a_data_parallel_keyword_needs_a_number_of_ranks(layout: str) -> None:
    with pytest.raises(ff.UserError, match=r"; add their number, such as .dp8 "):
        Layout.parse(layout)
    assert Layout.parse("dp1 fsdp").zero == Layout.parse("cp2 fsdp").zero == 3


@pytest.mark.parametrize(
    ("text", "machine", "layout", "shared_by"),
    [
        ("dp16 hsdp", "h100:16", "dp16 zero3/8 mbs1", "8 ranks of dp and cp in one node: zero3/8"),
        ("dp8 tp2 HSDP", "h100:16", "dp8 tp2 zero3/4 mbs1", "4 ranks of dp and cp in one node: zero3/4"),
        ("dp4 cp4 hsdp", "h100:16", "dp4 cp4 zero3/8 mbs1", "8 ranks of dp and cp in one node: zero3/8"),
        ("dp8 hsdp", "h100:8", "dp8 zero3 mbs1", "8 ranks of dp and cp in one node, which are all: zero3"),
        ("dp144 hsdp", "gb200:144", "dp144 zero3/72 mbs1", "72 ranks of dp and cp in one node: zero3/72"),
        ("dp4 pp4 hsdp order=tp-cp-pp-dp", "h100:16", "dp4 pp4 zero3/2 1f1b mbs1 order=tp-cp-pp-dp", "2 ranks of dp"),
    ],
)
def test_hsdp_without_a_number_shards_within_a_node(text: str, machine: str, layout: str, shared_by: str) -> None:
    with pytest.warns(UsageWarning, match=f"hsdp shards over the {shared_by}"):
        assert str(Layout.parse(text, machine=load_machine(machine))) == layout
    with pytest.raises(ff.UserError, match="needs the number of ranks that share one copy of the states; write hsdp/8"):
        Layout.parse(text)


def test_hsdp_without_a_number_is_an_error_where_a_node_has_no_group() -> None:
    with pytest.raises(ff.UserError, match=r"a node of 8 GPUs has 1 of the dp·cp=4 ranks, .*; write hsdp/2, or fsdp"):
        Layout.parse("dp4 tp8 hsdp", machine=load_machine("h100:32"))
    with pytest.raises(ff.UserError, match=r"a node of 8 GPUs has 8 of the dp·cp=12 ranks, .*; write hsdp/6, or fsdp"):
        Layout.parse("dp12 hsdp", machine=load_machine("h100:16"))


@pytest.mark.parametrize(
    ("text", "layout"),
    [("fsdp", "dp8 zero3 mbs1"), ("zero3 mbs2", "dp8 zero3 mbs2"), ("tp2 ddp", "dp4 tp2 zero0 mbs1")],
)
def test_the_ranks_of_the_machine_fill_in_the_data_parallel_degree(
    text: str, layout: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.warns(UsageWarning, match=r"dp. is filled in, for all 8 ranks"):
        assert ff.predict("nano", "h100:8", text, gbs=64, seq=512).layout == layout
    with warnings.catch_warnings():
        warnings.simplefilter("always", UsageWarning)
        assert run(monkeypatch, "predict", "nano", "h100:8", text, "--gbs", "64", "--seq", "512") == 0
    printed = capsys.readouterr()
    assert f"fivefold: layout {text!r}: dp{layout[2]} is filled in, for all 8 ranks" in printed.err
    assert layout in printed.out
    with warnings.catch_warnings():
        warnings.simplefilter("always", UsageWarning)
        assert run(monkeypatch, "predict", "nano", "h100:8", text, "--gbs", "7") == 2
    assert re.fullmatch(r"fivefold: layout .*global batch 7 is not divisible .*\n", capsys.readouterr().err)
    with pytest.raises(ff.UserError, match="add their number"):
        ff.predict("nano", "h100:8", "tp3 fsdp")
    with pytest.warns(UsageWarning, match=r"dp. is filled in, for all 8 ranks"):
        compared = ff.compare("nano", "h100:8", text, "dp8 zero1", gbs=64, seq=512)
    assert [step.layout for variant in compared.variants if (step := variant.step)] == [layout, "dp8 zero1 mbs1"]
    assert str(Layout.parse("tp8 zero1", machine=load_machine("h100:8"))) == "dp1 tp8 zero1 mbs1"


def test_the_ranks_of_the_machine_fill_in_the_data_parallel_degree_next_to_other_axes() -> None:
    with pytest.warns(UsageWarning, match="dp8 is filled in, for all 512 ranks"):
        assert str(Layout.parse("tp8 pp8 zero1", machine=load_machine("h100:512"))) == "dp8 tp8 pp8 zero1 1f1b mbs1"
    assert str(Layout.parse("tp3", machine=load_machine("h100:8"))) == "dp1 tp3 zero0 mbs1"
    assert str(Layout.parse("dp1 tp4", machine=load_machine("h100:8"))) == "dp1 tp4 zero0 mbs1"
    with pytest.warns(UsageWarning, match="dp8 is filled in, for all 8 ranks"):
        assert str(Layout.parse("mbs4", machine=load_machine("h100:8"))) == "dp8 zero0 mbs4"
    with pytest.warns(UsageWarning, match="dp4 is filled in, for all 64 ranks"):
        assert str(Layout.parse("cp2 tp8", machine=load_machine("h100:64"))) == "dp4 tp8 cp2 zero0 mbs1"
    assert str(Layout.parse("cp8 fsdp", machine=load_machine("h100:8"))) == "dp1 cp8 zero3 mbs1"
    assert str(Layout.parse("tp4")) == "dp1 tp4 zero0 mbs1"


def test_the_ranks_of_the_machine_fill_in_the_data_parallel_degree_of_experts() -> None:
    with pytest.warns(UsageWarning, match="dp8 is filled in, for all 8 ranks"):
        assert str(Layout.parse("ep8 zero3 mbs1", machine=load_machine("h100:8"))) == "dp8 ep8 zero3 mbs1"
    with pytest.warns(UsageWarning), pytest.raises(ff.UserError, match="ep=3 does not divide"):
        Layout.parse("ep3", machine=load_machine("h100:8"))


def test_answers_in_python_print_as_the_table_of_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("micro-batch", "nano", "h100:8", "dp8 zero3")
    monkeypatch.setenv("COLUMNS", "100")
    assert run(monkeypatch, "ask", *words, "--gbs", "64", "--stack", "fivefold") == 0
    with pytest.warns(UsageWarning, match="the global batch of 64 is the limit"):
        replies = ff.ask(*words, gbs=64)
    table = str(replies).splitlines()
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()][-len(table) :] == table
    assert repr(replies) == "<1 row of QuestionAnswer>"


@pytest.mark.parametrize(
    ("synonym", "question"),
    mark_share(3, [("cost", "run"), ("time", "run"), ("lora", "finetune"), ("mbs", "micro-batch")]),
)
def test_ask_takes_everyday_words_for_its_questions(
    synonym: str, question: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("nano", "h100:8", "dp8 zero3")
    printed = []
    for name in (synonym, question):
        assert run(monkeypatch, "ask", name, *words, "--gbs", "64", "--json") == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
    from fivefold.cli.tools import AskInput  # which imports mcp, for a second

    assert AskInput(question=synonym, model="nano", machine="h100:8").question == question
    assert run(monkeypatch, "ask", "tim", *words) == 2
    assert "unknown question 'tim'; did you mean time?\n" in capsys.readouterr().err


def test_ask_in_python_takes_everyday_words_for_its_questions() -> None:
    with pytest.warns(UsageWarning, match="dp8 is filled in"):
        assert ff.ask("cost", "nano", "h100:8", "zero3", gbs=64) == ff.ask("run", "nano", "h100:8", "dp8 zero3", gbs=64)
    with pytest.raises(ff.UserError, match="unknown question 'x'; known: batch, changes, cost, finetune, "):
        ff.ask("x", "nano", "h100:8")  # type: ignore[arg-type]


def test_ask_in_python_rejects_an_option_that_the_question_does_not_use() -> None:
    with pytest.raises(ff.UserError, match="tokens: `ask micro-batch` does not use it, only batch and run; drop it"):
        ff.ask("micro-batch", "nano", "h100:8", "dp8 zero3", gbs=64, tokens=2e9)


def test_a_sequence_length_in_python_may_be_text_too() -> None:
    step = ff.predict("nano", "h100:1", "dp1", seq="1k")  # type: ignore[typeddict-item]
    assert step.job["sequence"] == 1024
    with pytest.raises(ff.UserError, match="seq='1x' must be a whole number of tokens, such as 8192 or 8k"):
        ff.predict("nano", "h100:1", "dp1", seq="1x")  # type: ignore[typeddict-item]


def test_no_layout_is_valid_because_the_global_batch_is_below_the_number_of_ranks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With 8 sequences 16 ranks have no dp16; the constraint alone is not to blame."""
    words = ("nano", "h100:16", "--seq", "512", "--gbs", "8", "--where", "tp=1 pp=1 cp=1")
    assert run(monkeypatch, "search", *words) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "meets 'tp=1 pp=1 cp=1' with gbs 8; gbs 16 would allow it, or relax the constraint tp=1" in error


def test_the_first_line_of_a_run_file_is_the_command_that_writes_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = "--tokens 1e9 --seq 512 --gbs 64 --optimizer muon --precision fp16 --set loss=chunked --where"
    words = ["plan", "nano", "h100:8", *options.split(), "ac=none pp=1 tp=1", "--risk", "0.2"]
    monkeypatch.chdir(tmp_path)
    assert run(monkeypatch, *words, "--write", "run.toml") == 0
    first_line = Path("run.toml").read_text().splitlines()[0]
    assert first_line == (
        "# fivefold plan nano h100:8 --tokens 1000000000 --seq 512 --gbs 64 --precision fp16 --set loss=chunked "
        "--optimizer muon --where 'ac=none pp=1 tp=1' --risk 0.2"
    )
    assert run(monkeypatch, *shlex.split(first_line)[2:], "--write", "again.toml") == 0
    assert Path("again.toml").read_text() == Path("run.toml").read_text()
    assert run(monkeypatch, "plan", "nano", "h100:1", "--tokens", "1e9", "--write", "plain.toml") == 0
    assert Path("plain.toml").read_text().startswith("# fivefold plan nano h100:1 --tokens 1000000000\n")
    capsys.readouterr()


@pytest.mark.parametrize(
    "words",
    mark_share(3, map(pytest.param, [("run",), ("tokens", "--deadline", "1d"), ("sequence",)])),
    ids=lambda words: words[0],
)
def test_answers_are_drawn(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    question, *limits = words
    picture = tmp_path / "answer.svg"
    asked = ("ask", question, "nano", "h100:8", "dp8 zero3", "--gbs", "64", *limits)
    assert run(monkeypatch, *asked, "--chart", str(picture)) == 0
    assert picture.read_text(encoding="utf-8").startswith("<svg")
