"""What a sweep file asks for, against nested loops; what it cannot ask for."""

from __future__ import annotations

import json
import random
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from fivefold.errors import UserError
from fivefold.layout.spec import Layout
from fivefold.sweeps.spec import Sweep, fill_request, list_settings, parse_best
from fivefold.sweeps.sweep import SweepPlan

NOWHERE = Path("nowhere")
LEAST: dict[str, Any] = {"models": ["nano"], "machines": ["h100"], "layouts": ["dp*"]}


def sweep(**values: Any) -> Sweep:
    return Sweep.read(LEAST | values, origin="test")


def draw_sweep(draw: random.Random) -> tuple[dict[str, Any], int]:
    """A sweep, and how many rows it has by loops over all that it lists."""
    some = {
        "models": draw.sample(["nano", "tiny", "llama3-8b"], draw.randint(1, 3)),
        "machines": draw.sample(["h100", "a100", "h200"], draw.randint(1, 2)),
        "ranks": draw.sample([1, 2, 4, 6, 8, 16], draw.randint(1, 4)),
        "sequences": draw.sample([64, 128, 4096], draw.randint(0, 2)),
        "batches": draw.sample([8, 48, 64], draw.randint(0, 2)),
        "precisions": draw.sample(["bf16", "fp32", "fp8"], draw.randint(0, 2)),
        "stacks": draw.sample(["fivefold", "megatron-core"], draw.randint(0, 2)),
        "recomputations": draw.sample(["none", "selective", "full", "mlp+norm"], draw.randint(0, 3)),
    }
    tps, mbss = draw.sample([1, 2, 3, 4], draw.randint(1, 3)), draw.sample([1, 2], draw.randint(1, 2))
    fixed = draw.choice([None, 2, 8])
    layouts = [f"dp* tp{{{','.join(map(str, tps))}}} mbs{{{','.join(map(str, mbss))}}}"]
    layouts += [f"dp{fixed} zero2"] if fixed in some["ranks"] else []
    rows = 0
    for ranks in some["ranks"]:
        item = sum(ranks % tp == 0 for tp in tps) * len(mbss) + (len(layouts) > 1 and ranks == fixed)
        others = [some[name] for name in ("sequences", "batches", "precisions", "stacks", "recomputations")]
        rows += item * len(some["models"]) * len(some["machines"]) * len(list(product(*(o or [None] for o in others))))
    return some | {"layouts": layouts}, rows


def test_every_combination_is_a_row() -> None:
    draw, counted = random.Random(0), 0
    for _ in range(60):
        values, rows = draw_sweep(draw)
        made = sweep(**values)
        used = {tp for tp in (1, 2, 3, 4) if any(ranks % tp == 0 for ranks in values["ranks"])}
        if any(f"tp{tp} " in " ".join(made.requests()) and tp not in used for tp in (2, 3, 4)):
            with pytest.raises(UserError, match="matches none of the numbers of ranks"):
                SweepPlan.from_sweep(made, local=NOWHERE)
            continue
        plan = SweepPlan.from_sweep(made, local=NOWHERE)
        assert plan.rows == rows
        parts = [
            (s.model.name, s.machine_name, s.ranks, s.sequence, s.batch, s.precision, s.stack, text)
            for s, texts in plan.parts
            for text in texts
        ]
        assert len(set(parts)) == len(parts) == rows
        counted += rows
    assert counted > 1000


def test_unlisted_settings_come_from_job_or_machine() -> None:
    (result,) = list_settings(sweep(machines=["h100:4"], job={"sequence": 512, "steps": 9}), local=NOWHERE)
    assert (result.ranks, result.sequence, result.batch, result.precision, result.stack) == (
        4,
        512,
        8,
        "bf16",
        "fivefold",
    )
    assert result.job is not None
    assert result.job.steps == 9
    filled = [fill_request(text, ranks=4) for text in ("dp*", "dp2", "dp4 zero1", "best 2")]
    assert filled == ["dp4", None, "dp4 zero1", "best 2"]


def test_a_batch_of_tokens_is_whole_sequences() -> None:
    result = list(list_settings(sweep(sequences=[64, 96, 128], batch_tokens=[1024]), local=NOWHERE))
    assert [(s.sequence, s.batch, s.job is None) for s in result] == [(64, 16, False), (96, 10, True), (128, 8, False)]
    assert result[1].why == "a batch of 1024 tokens is no whole number of sequences of 96"


def test_best_n_in_a_sweep_file_is_parsed() -> None:
    assert parse_best("best 3") == (3, None)
    assert parse_best("best 12 ac=full/2") == (12, "full/2")
    assert parse_best("dp8 ac=full") is None
    assert sweep(layouts=["best 2", "dp*"], recomputations=["none", "full"]).requests() == [
        "best 2 ac=none",
        "best 2 ac=full",
        "dp* ac=none",
        "dp* ac=full",
    ]
    assert Layout.parse("dp8 ac=none") == Layout.parse("dp8")


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"models": []}, "test: models must have 1 or more entries"),
        ({"models": "nano"}, "test: models must be a list, not 'nano'"),
        ({"modells": ["nano"]}, "unknown key 'modells'; did you mean 'models'?"),
        ({"ranks": [0]}, "ranks[0] must be 1 or more, not 0"),
        ({"batches": [8], "batch_tokens": [512]}, "batches and batch_tokens both set the batch; keep one"),
        ({"batches": [8], "job": {"global_batch": 4}}, "batches and job.global_batch both set global_batch; keep one"),
        ({"stacks": ["nanotron"], "job": {"stack": "nemo"}}, "stacks and job.stack both set stack; keep one"),
        ({"precisions": ["fp9"]}, "unknown precision 'fp9'"),
        ({"stacks": ["megatrn"]}, "unknown stack 'megatrn'"),
        ({"job": {"sequense": 4}}, "job: unknown key 'sequense'; did you mean 'sequence'?"),
        ({"layouts": ["dp* ac=full"], "recomputations": ["none"]}, "'dp* ac=full' and recomputations both set"),
        ({"layouts": ["dp{2"]}, "has an unmatched brace"),
        ({"layouts": ["best 0"]}, "unknown layout token 'best'"),
    ],
)  # fmt: skip
def test_an_invalid_sweep_file_is_an_error(tmp_path: Path, values: dict[str, Any], line: str) -> None:
    file = tmp_path / "test.json"
    file.write_text(json.dumps(LEAST | values))
    with pytest.raises(UserError) as result:
        Sweep.load(file)
    assert line.removeprefix("test: ") in str(result.value)


@pytest.mark.parametrize(("values", "line"), [
    ({"models": ["nanno"]}, r"unknown model 'nanno'; did you mean nano\?"),
    ({"machines": ["h10"]}, r"unknown machine 'h10'; did you mean h100"),
    ({"layouts": ["dp*", "dp3"], "ranks": [1, 2]}, r"'dp3' matches none of the numbers of ranks \(1, 2\); write dp\*"),
])  # fmt: skip
def test_a_sweep_without_valid_combinations_is_an_error(values: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError, match=line):
        SweepPlan.from_sweep(sweep(**values), local=NOWHERE)
