"""A run file whose data and job do not go together is an error of one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from fivefold.errors import UserError
from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.layout.validity import list_reasons
from fivefold.layout.validity.job import validate_job
from fivefold.model.factors import Temperature
from fivefold.model.multi_token_prediction import MTP
from fivefold.model.spec import Model
from fivefold.trainer.run import Data, Run

MODEL = Model(name="m", layers=2, width=8, heads=1, kv_heads=1, head_dim=8, ffn=8, vocab=300)
SFT = Job(objective="sft", sequence=64)
DPO = Job(objective="dpo", sequence=64)


@pytest.mark.parametrize("name", ["run.toml", "run.json", "log.jsonl"])
def test_an_empty_run_file_is_an_error(name: str, tmp_path: Path) -> None:
    """It trained the default model, for as long as that takes."""
    (tmp_path / name).write_text("{}" if name.endswith(".json") else " \n")
    with pytest.raises(UserError, match=r"is empty; a run file names at least its model"):
        Run.load(tmp_path / name)


def test_sft_keeps_documents_separate_unless_they_are_joined() -> None:
    assert SFT.documents == "separate"
    assert Job(objective="sft", documents="joined").documents == "joined"
    assert Job().documents == DPO.documents == "joined"


@pytest.mark.parametrize(
    ("data", "job"),
    [
        (Data(format="messages"), Job()),
        (Data(), SFT),
        (Data(format="preferences"), SFT),
        (Data(format="messages"), DPO),
    ],
)
def test_objective_and_data_format_must_agree(data: Data, job: Job) -> None:
    with pytest.raises(UserError, match=r'format = "\w+" is for \[job\] objective = "\w+", not "\w+"; change either'):
        Run(data=data, job=job).check_data(MODEL)


@pytest.mark.parametrize(
    "model",
    [
        MODEL.replace(position="learned", positions=64),
        MODEL.replace(window=16, window_kind="chunks"),
        MODEL.replace(temperature=Temperature(scale=0.1, floor=16, rotated=True)),
    ],
)
def test_positions_of_the_sequence_are_not_those_of_a_packed_sample(model: Model) -> None:
    run = Run(data=Data(format="messages"), job=SFT)
    with pytest.raises(UserError, match=r'not of a packed sample; set .data. packing = "none"'):
        run.check_data(model)
    run.replace(data=Data(format="messages", packing="none")).check_data(model)
    run.check_data(MODEL)


def test_settings_that_sft_does_not_support_are_rejected_by_name() -> None:
    with pytest.raises(UserError, match="objective=sft does not train multi-token prediction"):
        validate_job(MODEL.replace(mtp=MTP()), SFT)
    with pytest.raises(UserError, match="noise_scale: needs a loss that is the mean over all tokens"):
        Run(data=Data(format="messages"), job=SFT, noise_scale=True).check_noise(Layout(dp=2))


@pytest.mark.parametrize(
    ("text", "changes", "reason"),
    [
        ("mbs1", {}, "mbs=1 splits a pair of objective=dpo, which is two sequences; try mbs2"),
        ("mbs2", {"loss": "chunked"}, "objective=dpo is not modelled with a loss in chunks; use loss=fused"),
        ("mbs2", {"precision": "fp8"}, "objective=dpo is not modelled with precision fp8; use bf16"),
    ],
)
def test_settings_that_dpo_does_not_support_are_rejected_by_name(
    text: str, changes: dict[str, object], reason: str
) -> None:
    given = list(list_reasons(Layout.parse(text), model=MODEL, job=DPO.replace(**changes), machine=None))
    assert len(given) == 1, given
    assert given[0].startswith(reason)
