"""Every number of the nouns has a limit, far above what there is; what is beyond is refused at once."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fivefold.bounded_types import COUNTED_BYTES, MAX_SIMULATED_ACTIONS
from fivefold.errors import UserError
from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.machine.catalog import resolve as machine
from fivefold.machine.spec import Link, Machine
from fivefold.model.catalog import build_model, list_names, resolve
from fivefold.model.huggingface.config import Config
from fivefold.model.spec import Model
from fivefold.planner.predict import predict
from fivefold.planner.questions.largest_model import scale_model
from fivefold.record import Record

ONE = {"layers": 1, "width": 64, "heads": 4, "kv_heads": 4, "head_dim": 16, "ffn": 64, "vocab": 256}
EXPERTS = {"experts": 2**11, "topk": 1, "ffn": 2**22}
HUGE = 10**8
MEASURED = (
    "Calibration",
    "AttentionPoint",
    "CollectivePoint",
    "KernelPoint",
    "MatmulPoint",
    "StepFactor",
    "StepOverhead",
    "UnitPoint",
    "UpdatePoint",
)
CHIPS = machine("h100:64", local=Path())


def numbers(schema: dict[str, Any], name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each number within a JSON schema, by its path; what measured (Calibration) or a key ignores has no limit."""
    if schema.get("type") in ("integer", "number"):
        yield name, schema
    for key in ("properties", "$defs"):
        for field, inner in schema.get(key, {}).items():
            if field not in MEASURED:
                yield from numbers(inner, f"{name}.{field}")
    for key in ("anyOf", "prefixItems"):
        for inner in schema.get(key, ()):
            yield from numbers(inner, name)
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            yield from numbers(schema[key], name)


@pytest.mark.parametrize("noun", [Model, Machine, Layout, Job, Config])
def test_every_number_of_a_record_has_a_limit(noun: type[Record]) -> None:
    result = dict(numbers(noun.model_json_schema(), noun.__name__))
    assert len(result) > 10
    assert [name for name, schema in result.items() if not {"maximum", "exclusiveMaximum"} & schema.keys()] == []


@pytest.mark.parametrize("field", [*ONE, "positions", "window"])
def test_one_size_beyond_all_bounds_is_rejected(field: str) -> None:
    with pytest.raises(UserError, match=rf"{field} must be \d+ or less, not 10000000000"):
        Model.read({"name": "one", **ONE, field: 10**10}, origin="one.toml")


def test_sizes_that_are_too_large_only_together_are_errors() -> None:
    Model.read({"name": "one", **ONE, "layers": 2**12}, origin="one.toml")
    with pytest.raises(UserError, match=r"about 7e\+19 parameters are more than 1e\+17; make the model smaller"):
        Model.read({"name": "one", **ONE, "layers": 2**12, "width": 2**20, "moe": EXPERTS}, origin="one.toml")
    endless = Job(sequence=2**30, global_batch=2**20, attention="unfused")
    with pytest.raises(UserError, match=r"would hold about \de\+\d\d bytes on a rank, more than the 1e\+18 that can"):
        predict(model=build_model("llama3-70b"), machine=CHIPS, layout=Layout(mbs=2**20), job=endless)
    with pytest.raises(UserError, match=r"ramp.step=1 makes 16777215 sizes"):
        Job.read({"global_batch": 2**24, "ramp": {"first": 1, "step": 1, "every": 1}}, origin="job")


@pytest.mark.parametrize("name", list_names())
def test_known_values_stay_below_limits_at_32_times_the_width(name: str) -> None:
    assert scale_model(build_model(name), 32).layers == 32 * build_model(name).layers


@pytest.mark.parametrize("key", ["num_hidden_layers", "hidden_size", "vocab_size", "num_attention_heads"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3_text"])
def test_a_config_of_huge_sizes_is_rejected_at_once(tmp_path: Path, family: str, key: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family, key: HUGE}))
    begin = time.process_time()
    with pytest.raises(UserError, match=rf"{key} must be \d+ or less, not 100000000"):
        resolve(str(tmp_path))
    assert time.process_time() - begin < 0.5


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved v2", "zb1p", "dualpipev"])
def test_a_schedule_is_simulated_or_rejected_at_once(schedule: str) -> None:
    """Those with a period take as many micro-batches as a job can have, the others up to a limit."""
    layout = Layout.parse(f"pp2 {schedule}")
    begin = time.process_time()
    job = Job(sequence=64, global_batch=2**23 + 1)
    if layout.schedule in ("gpipe", "interleaved"):
        with pytest.raises(
            UserError, match=r"8388609 micro-batches of .* stages are too many to simulate; raise dp or mbs"
        ):
            predict(model=build_model("tiny"), machine=CHIPS, layout=layout, job=job)
    else:
        predict(model=build_model("tiny"), machine=CHIPS, layout=layout, job=job)
    assert time.process_time() - begin < 2


def test_a_long_pipeline_without_a_period_takes_seconds() -> None:
    begin = time.process_time()
    job = Job(sequence=64, global_batch=MAX_SIMULATED_ACTIONS // 2**6)
    step = predict(model=build_model("tiny"), machine=CHIPS, layout=Layout.parse("pp4 gpipe"), job=job)
    assert time.process_time() - begin < 5
    assert step.memory.peak_bytes < COUNTED_BYTES


@pytest.mark.parametrize(
    ("noun", "values", "says"),
    [
        (Job, {"precision": {"name": "bf16", "weights_bytes": 0}}, "precision.weights_bytes must be 1 or more, not 0"),
        (Job, {"precision": {"name": "bf16", "gradients_bytes": 9}}, "precision.gradients_bytes must be 8 or less"),
        (Config, {"max_position_embeddings": 1}, "max_position_embeddings must be more than 1, not 1"),
        (Config, {"max_position_embeddings": 2**31}, "max_position_embeddings must be 1073741824 or less"),
        (Config, {"original_max_position_embeddings": 1}, "original_max_position_embeddings must be more than 1"),
        (Link, {"sustained": 1.5}, "sustained must be 1 or less, not 1.5"),
        (Link, {"sustained": 0}, "sustained must be 1e-06 or more, not 0"),
    ],
)  # fmt: skip
def test_a_limit_of_one_field_is_no_looser_than_of_its_kind(
    noun: type[Record], values: dict[str, Any], says: str
) -> None:
    with pytest.raises(UserError) as refusal:
        noun.read(values, origin="file")
    assert says in str(refusal.value)
