"""The short runs of ``make endure``: each that is drawn is legal, and none that ends badly passes for good."""

from __future__ import annotations

import json
import random

import pytest

from fivefold.layout.spec import Layout
from fivefold.layout.validity import refuse
from fivefold.trainer.run import Run
from fivefold.trainer.supported import check_supported
from tests.endure.runs import ADAPTERS, LAYOUTS, MODELS, draw_run, fault
from tests.trainer.test_faults import MACHINE, RUN

SAID = "step 0  held-out loss 5.5784\nfinished 16 steps; saved run/checkpoints/step-00000016\n"
TABLE = (
    "quantity      predicted    measured  difference\nstep time\ntokens/s per GPU     1.17 k      2.03 k      -42.7%\n"
)
BUDGET = "\nWhat the error consists of\nrest         3.1 ms   7.2 ms   -4.1 ms\n"
PAIR = json.dumps({"predicted": {}, "measured": {}}, indent=2)
EXIT_RETRY = "fivefold: rank 1 was ended by SIGABRT; the same command goes on\nfivefold: started again from run\n"


def test_every_random_run_is_valid() -> None:
    machine, seen = MACHINE.replace(ranks=4, ranks_per_node=4), set[object]()
    for number in range(400):
        changes, _ = draw_run(random.Random(number))
        model = MODELS[changes["model"]]
        values = {**RUN, **changes, "job": {**RUN["job"], **changes["job"]}}
        run, layout = Run.read(values, origin="drawn"), Layout.parse(changes["layout"])
        refuse(layout, model=model, job=run.job, machine=machine)
        check_supported(layout, run.job, model=model)
        seen |= {changes["layout"], changes["model"], changes["job"].get("adapter")}
    assert seen == {*LAYOUTS, *MODELS, *ADAPTERS, None}


@pytest.mark.parametrize(
    ("out", "error", "code", "found"),
    [
        (TABLE + BUDGET, SAID, 0, ""),
        (TABLE, SAID, 0, "no budget of the error"),
        (PAIR, SAID, 0, ""),
        (TABLE, SAID, 1, "exit code 1"),
        (TABLE, SAID, -6, "exit code -6"),
        ("", SAID + "too few steps to measure one\n", 0, "no closing table"),
        (TABLE[: len(TABLE) // 2], SAID, 0, "no closing table"),
        (PAIR[:-1], SAID, 0, "no JSON"),
        (json.dumps({"predicted": {}}), SAID, 0, "no pair of steps"),
        (TABLE, EXIT_RETRY + SAID, 0, "it was started again"),
        (TABLE, SAID.partition("\n")[0], 0, "no word of its end"),
        (TABLE, SAID + "Fatal Python error: Aborted\n", 0, "an account of an error"),
    ],
)
def test_an_invalid_plan_is_detected(out: str, error: str, code: int, found: str) -> None:
    assert fault(out, error, code, json_asked=out.startswith("{")) == found
