"""The line with which every answer begins, and the remark on GPUs that a layout leaves idle."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
from typer.testing import CliRunner

import fivefold as ff
from fivefold.cli import app
from fivefold.errors import UsageWarning
from fivefold.job import Job
from fivefold.rendering.question import describe_job, describe_step
from fivefold.requests.job import list_stated, load_job
from fivefold.stack.catalog import STACKS

ALL = "defaults: seq 4096, global batch 8, bf16, AdamW, software fivefold"
SAID = "seq 512, global batch 16; defaults: bf16, AdamW, software fivefold"
OPTIONS = ["--seq", "512", "--gbs", "16"]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ({"seq": 4096}, "seq 4096; defaults: global batch 8, bf16, AdamW, software fivefold"),
        ({"gbs": 8, "stack": "fivefold"}, "global batch 8, software fivefold; defaults: seq 4096, bf16, AdamW"),
        ({"settings": ["optimizer.kind=adamw", "precision=bf16"]},
         "bf16, AdamW; defaults: seq 4096, global batch 8, software fivefold"),
        ({"settings": ["optimizer.epsilon=1e-8"]}, ALL),
    ],
)  # fmt: skip
def test_a_stated_value_is_no_default(words: dict[str, object], line: str) -> None:
    job, stated = load_job(**words), list_stated(**words)  # type: ignore[arg-type]
    assert describe_job(job, stated=stated) == line


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ([], ALL),
        (["sequence=512", "global_batch=16"], SAID),
        (
            ["optimizer.kind=muon", "loss=chunked", "offload=optimizer"],
            "Muon, loss=chunked, offload=optimizer; defaults: seq 4096, global batch 8, bf16, software fivefold",
        ),
        (["stack=torchtitan"], "software torchtitan; defaults: seq 4096, global batch 8, bf16, AdamW"),
        (["precision.master_bytes=2", "precision.moments_bytes=2,1"],
         "bf16, precision.master_bytes=2, precision.moments_bytes=2,1; defaults: seq 4096, global batch 8, AdamW, "
         "software fivefold"),
        (["precision=fp8", "optimizer.epsilon=0.1", "steps=7000"],
         "fp8, optimizer.epsilon=0.1, steps=7000; defaults: seq 4096, global batch 8, AdamW, software fivefold"),
    ],
)  # fmt: skip
def test_a_job_is_described_in_one_line(settings: list[str], line: str) -> None:
    assert describe_job(load_job(settings=settings)) == line


@pytest.mark.parametrize("stack", STACKS)
def test_the_precision_of_every_software_is_its_default(stack: str) -> None:
    job = describe_job(Job(stack=stack))  # type: ignore[arg-type]
    assert "bf16" in job.partition("defaults: ")[2]


def test_jobs_share_what_is_equal() -> None:
    jobs = [Job(sequence=512, precision=name) for name in ("bf16", "fp8")]  # type: ignore[arg-type]
    assert describe_job(*jobs) == "seq 512; defaults: global batch 8, AdamW, software fivefold"


def test_values_derived_from_the_machine_are_not_printed_as_given() -> None:
    step = ff.predict("tiny", "h100:2", "dp2", seq=512, gbs=16)
    assert describe_step(step) == SAID
    on_cpu = {**step.job, "stack": {**step.job["stack"], "attention": "blocks", "overlap": [], "kernels": "eager"}}
    assert describe_step(step.replace(job=on_cpu)) == SAID


def lines(*words: str) -> list[str]:
    result = CliRunner().invoke(app, [*words], env={"COLUMNS": "200"})
    assert result.exit_code == 0, (words, result.output)
    return [line.rstrip() for line in result.output.splitlines()]


ABOUT = f"tiny on h100, 2 ranks · {SAID}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ("search", "tiny", "h100:2"), ("ratios", "tiny", "h100:2"),
        pytest.param(("search", "tiny", "h100:2", "--keep", "dp2"), marks=pytest.mark.long),
        *(("ask", question, "tiny", "h100:2", "dp2") for question in ("micro-batch", "batch", "run", "changes")),
        pytest.param(("ask", "sequence", "tiny", "h100:2", "dp2"), marks=pytest.mark.long),  # of all layouts: 8 s
        ("ask", "gpus", "tiny", "h100:2"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_every_answer_begins_with_the_question(words: tuple[str, ...]) -> None:
    assert lines(*words, *OPTIONS)[0] == ABOUT


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ("predict", "tiny", "h100:2", "dp2"), ("compare", "tiny", "h100:2", "dp2", "tp2"),
        ("search", "tiny", "h100:2", "b200:2", "--tokens", "1B"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_commands_state_the_job_in_their_first_two_lines(words: tuple[str, ...]) -> None:
    assert SAID in lines(*words, *OPTIONS)[:2]


@pytest.mark.slow
def test_a_plan_leaves_the_batch_to_its_first_step() -> None:
    assert lines("plan", "tiny", "h100:2", "--tokens", "1B", "--seq", "512")[1] == (
        "seq 512; defaults: bf16, AdamW, software fivefold"
    )


def test_a_sweep_begins_with_what_its_rows_share(tmp_path: Path) -> None:
    file = tmp_path / "s.toml"
    file.write_text('models = ["tiny"]\nmachines = ["h100:2"]\nlayouts = ["dp2", "tp2"]\n[job]\nsequence = 512\n')
    text = "\n".join(lines("sweep", str(file), "--out", str(tmp_path / "rows.jsonl")))
    assert "tiny, h100:2, 2 ranks · seq 512; defaults: global batch 8, bf16, software fivefold" in text


@pytest.mark.processes
def test_the_report_prints_the_same_line(tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    for words in (["dp2"], []):
        lines("report", "tiny", "h100:2", *words, *OPTIONS, "-o", str(file))
        assert SAID in file.read_text(encoding="utf-8")


IDLE = (
    "layout 'dp4 zero0 mbs1' uses 4 of the 8 ranks of h100; 4 stay idle, and all figures are for the other 4, at the "
    "pace of the slowest chip of all 8. Use 'h100:4', or degrees that multiply to 8, such as 'dp8 zero0 mbs1'."
)


@pytest.mark.parametrize(
    "words",
    [
        ("predict", "tiny", "h100:8", "dp4"),
        ("compare", "tiny", "h100:8", "dp4", "dp8"),
        pytest.param(("ask", "run", "tiny", "h100:8", "dp4"), marks=pytest.mark.long),
        pytest.param(("ask", "changes", "tiny", "h100:8", "dp4"), marks=pytest.mark.long),
    ],
    ids=" ".join,
)
def test_idle_ranks_are_reported_in_text_and_json(words: tuple[str, ...]) -> None:
    text = lines(*words)
    assert " ".join(text).count(IDLE) == 1
    assert IDLE in json.dumps(json.loads("\n".join(lines(*words, "--json"))))
    quiet = [word.replace("dp4", "dp8") for word in words[:4]]
    assert "stay idle" not in "".join(lines(*quiet, *(("tp8",) if words[0] == "compare" else ())))


def test_idle_ranks_are_a_warning_in_python() -> None:
    for call in (
        lambda: ff.predict("tiny", "h100:8", "dp4"),
        lambda: ff.compare("tiny", "h100:8", "dp4", "dp8"),
        lambda: ff.ask("run", "tiny", "h100:8", "dp4"),
    ):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call()
        assert [(str(item.message), item.category, Path(item.filename).name) for item in caught] == [
            (IDLE, UsageWarning, Path(__file__).name)
        ]
    assert ff.predict("tiny", "h100:4", "dp4").remarks == ()


def test_a_report_says_that_ranks_stay_idle(tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    lines("report", "tiny", "h100:8", "dp4", "-o", str(file))
    assert "4 stay idle" in file.read_text(encoding="utf-8")
