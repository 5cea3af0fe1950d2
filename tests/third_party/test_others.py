"""nanotron's parser, Kubeflow Trainer's models and SkyPilot's schemas take what is written for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from fivefold.errors import UserError
from fivefold.interop.format import ConfigPlan
from fivefold.interop.write import write
from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.model.catalog import build_model
from tests.interop.draws import Range, plans

AMONG = Range(
    models=("tiny", "llama2-7b", "llama2-13b"), recipes=("bf16", "fp32"), acs=("none",), axes=("dp", "tp", "pp")
)


def test_nanotron_parses_its_yaml(tmp_path: Path, nanotron_config: Any) -> None:
    taken = 0
    for plan in plans("nanotron", count=60, among=AMONG):
        try:
            written = write(plan, to="nanotron")
        except UserError:
            continue
        (tmp_path / "nanotron.yaml").write_text(written.files["nanotron.yaml"])
        config = nanotron_config.get_config_from_file(str(tmp_path / "nanotron.yaml"))
        layout, said = plan.layout, config.parallelism
        assert (said.dp, said.tp, said.pp) == (layout.dp, layout.tp, layout.pp)
        assert config.tokens.micro_batch_size == layout.mbs
        assert config.tokens.batch_accumulation_per_replica == layout.micro_batches(plan.job)
        assert config.optimizer.zero_stage == layout.zero
        model = config.model.model_config
        assert (model.hidden_size, model.num_hidden_layers, model.num_key_value_heads) == (
            plan.model.width,
            plan.model.layers,
            plan.model.kv_heads,
        )
        taken += 1
    assert taken >= 20


PLAN = ConfigPlan(
    build_model("llama3-8b"),
    Layout.parse("dp4 tp2 pp2 zero1 mbs1"),
    Job(sequence=8192, global_batch=128),
    machine="h100:16",
)


def test_kubeflow_accepts_the_written_job() -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models")
    _, _, runtime, job = yaml.safe_load_all(write(PLAN, to="kubernetes").files["trainjob.yaml"])
    for kind, values in (("TrainerV1alpha1TrainingRuntime", runtime), ("TrainerV1alpha1TrainJob", job)):
        result = getattr(models, kind).from_dict(values)
        assert result.to_dict() == values  # nothing of it was passed over


def test_skypilot_accepts_the_written_task(sky_schemas: Any) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    task = yaml.safe_load(write(PLAN, to="skypilot").files["task.yaml"])
    schema = sky_schemas.get_task_schema()
    del schema["properties"]["config"]  # of the user's own SkyPilot, which the task has not
    jsonschema.validate(task, schema)
