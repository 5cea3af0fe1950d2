"""The report: one file that stands alone, says what was asked, and holds the commands that make it again."""

from __future__ import annotations

import json
import re
import shlex
from html import unescape
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import fivefold as ff
from fivefold.cli import app
from fivefold.cli.commands import report as report_command
from fivefold.cli.commands.report import NAME
from fivefold.cli.commands.train import write_report
from fivefold.errors import UserError
from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.machine.catalog import resolve as machine_of
from fivefold.model.catalog import resolve as model_of
from fivefold.profiling.closed_loop import write_steps
from fivefold.rendering.drawing import pipeline, plot
from fivefold.rendering.drawing.style import read_css
from fivefold.requests.job import load_job
from fivefold.results.spans import Span
from fivefold.step import Step
from fivefold.trainer.run import Run
from tests.api.standalone import check_standalone
from tests.planner import draws

QUESTION = ("llama3-8b", "h100:8", "dp2 tp2 pp2 v2 zero1 mbs1")
JOB = ("--seq", "2048", "--gbs", "16", "--precision", "fp8")


@pytest.fixture(autouse=True)
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(*words: str) -> str:
    result = CliRunner().invoke(app, [*words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def report(*words: str, at: str = NAME) -> str:
    run("report", *words)
    text = Path(at).read_text()
    check_standalone(text)
    assert re.findall(r"<h2>(What was asked|To make it again|Environment)", text)
    return text


def commands(text: str) -> list[list[str]]:
    result = re.search(r"To make it again</h2><pre>(.*?)</pre>", text, flags=re.DOTALL)
    assert result
    return [shlex.split(line, comments=True) for line in unescape(result[1]).splitlines()]


def test_a_report_on_a_given_layout_has_the_figures_of_predict() -> None:
    text = report(*QUESTION, *JOB)
    step = ff.predict(*QUESTION, seq=2048, gbs=16, precision="fp8")
    for figure in (
        "dp2 tp2 pp2 v2 zero1",
        f"{step.mfu.causal:.1%}",
        "stage 1",
        "rank 1",
        "mlp.down",
        "32.77 k tokens a step",
    ):
        assert figure in text
    assert text.count('<svg class="chart') == 2
    predict, again_ = commands(text)
    assert json.loads(run(*predict[1:], "--json")) == step.model_dump(mode="json")
    assert report(*again_[2:]) == text


@pytest.mark.slow
def test_a_report_without_a_layout_has_the_proposal_of_search() -> None:
    text = report("nano", "h100:2", "--gbs", "8")
    proposed = ff.search("nano", "h100:2", gbs=8).proposal
    assert proposed is not None
    for word in (proposed.layout, "Proposal", "to be found", proposed.why[0].line):
        assert word in unescape(text)
    assert json.loads(run(*commands(text)[1][1:], "--json"))["layout"] == proposed.layout


def steps(factor: float) -> tuple[Step, Step]:
    step = ff.predict(*QUESTION, seq=2048, gbs=16)
    time = step.time
    slower = time.replace(step_seconds=time.step_seconds * factor, parts={"<core>": time.step_seconds * factor})
    return step, step.replace(kind="measured", time=slower, findings=("slow link: <b>",))


def folder() -> Path:
    path = Path("runs/a")
    path.mkdir(parents=True)
    write_steps(path / "step.json", *steps(1.25))
    lines: list[dict[str, Any]] = [{"step": at, "loss": 5 - at / 100} for at in range(100)]
    lines += [{"step": at, "heldout_loss": 5 - at / 100} for at in range(0, 100, 20)]
    lines += [{"step": 50, "loss": float("nan")}, {"step": 60, "event": "rolled back <to> 40"}]
    (path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_report_on_a_run_compares_prediction_and_measurement() -> None:
    text = report(str(folder()), at="runs/a/report.html")
    for word in (
        "-20.0%",
        "exact",
        "Held-out loss fell from 5.00 to 4.20",
        "rolled back &lt;to&gt; 40",
        "&lt;core&gt;",
        "slow link: &lt;b&gt;",
        "What the error consists of",
        "measured",
    ):
        assert word in text
    assert text.count('<svg class="chart') == 3
    assert [words[1] for words in commands(text)] == ["predict", "report"]


def test_a_report_on_a_config_predicts_the_layout_of_the_config() -> None:
    Path("run.toml").write_text('model = "nano"\nlayout = "dp2 zero1 mbs2"\n[job]\nsequence = 128\nglobal_batch = 8\n')
    text = report("--from", "run.toml", "--gpus", "h100:2")
    assert "8 sequences of 128 tokens" in text
    predict, again_ = commands(text)
    assert json.loads(run(*predict[1:], "--json"))["layout"] == "dp2 zero1 mbs2"
    assert report(*again_[2:]) == text


@pytest.mark.slow
def test_a_report_is_made_from_files_that_other_commands_wrote() -> None:
    axes = 'models = ["nano"]\nmachines = ["h100"]\nranks = [1, 2]\nbatches = [4, 8]\n'
    Path("sweep.toml").write_text(axes + 'layouts = ["dp*", "dp2 mbs3"]\n')
    run("sweep", "sweep.toml", "--out", "rows.csv")
    asked = ("compare", "llama3-8b", "h100:8", "dp8 zero3", "dp4 tp2 zero1", *JOB)
    for name, words in {
        "search": ("search", "nano", "h100:2", "--gbs", "8"),
        "step": ("predict", *QUESTION, *JOB),
        "beside": asked,
    }.items():
        Path(f"{name}s.json").write_text(run(*words, "--json"))
    rows = report("rows.csv")
    assert "4 fit" in rows
    assert "invalid" in rows.lower()
    text = report("searchs.json", "steps.json", "besides.json", "-o", "all.html", at="all.html")
    assert "3 reports" in text
    assert "trains most tokens per second" in text
    assert text.count('<svg class="chart') == 5


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ((), "nothing to report; write fivefold report RUN"),
        (("--from", "a.toml"), "add only the machine, such as --gpus h100:64"),
        (("nano", "h100:2", "--from", "a.toml", "--gpus", "h100:2"), "add only the machine"),
        (("nano",), "report nano needs a machine; write for example: fivefold report nano h100:8"),
        (("own",), "report own needs a machine"),
        (("own/config.json",), "report own/config.json needs a machine"),
        (
            ("nano", "h100:2", "dp2", "dp1"),
            "a report needs a run's folder, files that a command wrote, or MODEL MACHINE",
        ),
        (("nano", "h100:2", "dp2", "-o", "a.pdf"), "a report is .html; print it to PDF from a browser"),
        (("nano", "h100:2", "dp3"), "needs 3 ranks"),
        (("gone.json",), "gone.json: no such file"),
        ((".", "--gbs", "16"), "a result file already contains its job"),
        ((".",), "has no step.json"),
    ],
)
def test_a_user_error_is_a_one_line_error(words: tuple[str, ...], line: str) -> None:
    Path("own").mkdir()
    Path("own/config.json").write_text("{}")
    with pytest.raises(UserError, match=re.escape(line)):
        CliRunner().invoke(app, ["report", *words], catch_exceptions=False)


def test_train_writes_a_report_and_does_not_fail_if_that_fails(capsys: pytest.CaptureFixture[str]) -> None:
    path, (predicted, _) = folder(), steps(1.0)
    run_ = Run(folder=path, model="llama3-8b", job=report_command.get_job(predicted))
    what = {"model": model_of("llama3-8b"), "machine": machine_of("h100:8", local=Path("none"))}
    write_report(run_, Layout.parse(predicted.layout), **what)  # type: ignore[arg-type]
    assert "wrote runs/a/report.html" in capsys.readouterr().err
    text = (path / NAME).read_text()
    check_standalone(text)
    assert "fivefold train run.json --layout" in text
    (path / NAME).unlink()
    (path / NAME).mkdir()
    write_report(run_, Layout.parse(predicted.layout), **what)  # type: ignore[arg-type]
    assert "no report: runs/a/report.html: the report cannot be written" in capsys.readouterr().err
    (path / "step.json").write_text("{")
    write_report(run_, Layout.parse(predicted.layout), **what)  # type: ignore[arg-type]
    assert "no report: runs/a/step.json: not valid JSON" in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_in_a_report_reproduces_the_job() -> None:
    """Of 100 random jobs, every field drawn: the options say the same job, or the line names a file of it."""
    named = 0
    for seed in range(100):
        job = draws.case(seed).job
        words = shlex.split(report_command.format_command("predict", ["nano", "h100:8", "dp8"], job), comments=True)
        assert words[:5] == ["fivefold", "predict", "nano", "h100:8", "dp8"]
        if words[5] == "--job":
            named += 1
            continue
        pairs = list(zip(words[5::2], words[6::2], strict=True))
        plain: dict[str, Any] = {name[2:]: value for name, value in pairs if name != "--set"}
        assert load_job(settings=[value for name, value in pairs if name == "--set"], **plain) == job
    assert named < 97, "some jobs are said by options"


@pytest.mark.parametrize(("first", "last"), [(0.0, 1.0), (3.0, 3.0), (0.0, 7e9), (-5.0, 1e-3), (999.0, 1001.5)])
def test_axis_ticks_are_round_numbers_within_the_range(first: float, last: float) -> None:
    result = plot.choose_ticks(last, first=first)
    assert 1 <= len(result) <= 8
    assert all(first - 1e-9 <= item <= last + 1e-9 for item in result)
    assert len({round(b - a, 9) for a, b in pairwise(result)}) <= 1


def test_names_of_pipeline_lanes_are_not_cut() -> None:
    """Each name ends left of the lanes, and begins within the margin: some 6.6 pixels for a letter."""
    span = Span("F", "F0.0", 0.0, 1.0, stage=0, micro_batch=0)
    names = ["predicted 0", "a very long name of a lane 12"]
    for name in names:
        text = pipeline.draw_pipeline([[span], [span]], names=["0", name], pp=2, label="lanes")
        assert re.search(rf'<text x="-8" [^>]*text-anchor="end">{name}</text>', text)
        look = re.search(r'<svg class="chart pipeline (\w+)"', text)
        assert look
        margin = re.search(rf"svg.{look[1]} \{{ margin-left: (\d+)px", read_css())
        assert margin
        assert float(margin[1]) - 8 - 6.6 * len(name) > 0


def test_the_command_in_a_report_reproduces_the_risk() -> None:
    words = ["nano", "h100:8"]
    assert "--risk" not in report_command.format_command("search", words, Job())
    assert report_command.format_command("search", words, Job(), risk=0.2).startswith(
        "fivefold search nano h100:8 --risk 0.2 "
    )
