"""torchtitan 0.3 parses and builds what is written for it: degrees, batches, stages, parameters on meta."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from fivefold.interop.format import ConfigPlan
from fivefold.interop.write import write
from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.layout.stages import list_stage_layers
from fivefold.model.catalog import build_model
from tests.interop.draws import Range, list_written_plans

manager = pytest.importorskip("torchtitan.config.manager")

AMONG = Range(
    models=("llama3-8b", "llama3-70b", "llama3.2-1b", "qwen3-8b", "tiny"),
    recipes=("bf16", "bf16", "fp32"),
    acs=("none", "full"),
)


def parse_plan(plan: ConfigPlan, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """torchtitan's own Trainer.Config of a plan."""
    written = write(plan, to="torchtitan")
    (folder / "torchtitan_config.py").write_text(written.files["torchtitan_config.py"])
    monkeypatch.syspath_prepend(str(folder))
    sys.modules.pop("torchtitan_config", None)
    return manager.ConfigManager().parse_args(["--module", "torchtitan_config", "--config", "config"])


def test_torchtitan_derives_the_written_degrees_and_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchtitan.distributed import ParallelDims

    drawn = list_written_plans("torchtitan", to="torchtitan", count=20, among=AMONG)
    assert len(drawn) == 20
    for plan in drawn:
        config, layout = parse_plan(plan, tmp_path, monkeypatch), plan.layout
        asked = config.parallelism
        dims = ParallelDims(
            dp_replicate=asked.data_parallel_replicate_degree,
            dp_shard=asked.data_parallel_shard_degree,
            cp=asked.context_parallel_degree,
            tp=asked.tensor_parallel_degree,
            pp=asked.pipeline_parallel_degree,
            ep=asked.expert_parallel_degree,
            world_size=layout.world,
        )
        assert (dims.tp, dims.cp, dims.pp) == (layout.tp, layout.cp, layout.pp)
        assert dims.dp_replicate * dims.dp_shard == layout.dp
        assert dims.dp_shard * dims.cp == (layout.shards if layout.zero else 1)
        training = config.training
        assert (training.seq_len, training.global_batch_size) == (plan.job.sequence, plan.job.global_batch)
        assert training.global_batch_size % (training.local_batch_size * layout.dp) == 0
        item = asked.pipeline_parallel_microbatch_size if layout.pp > 1 else training.local_batch_size
        assert item == layout.mbs


@pytest.mark.parametrize(
    ("name", "text"), [("llama3-8b", "dp2 zero3"), ("tiny", "dp2 zero3"), ("qwen3-8b", "dp2 zero3")]
)
def test_the_model_that_torchtitan_builds_has_our_parameters(
    name: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    model = build_model(name)
    plan = ConfigPlan(model, Layout.parse(text), Job(sequence=2048, global_batch=8, documents="separate"))
    config = parse_plan(plan, tmp_path, monkeypatch)
    with torch.device("meta"):
        built = config.model_spec.model.build()
    assert sum(parameter.numel() for parameter in built.parameters()) == model.parameters


def test_torchtitan_distributes_layers_over_stages_as_we_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchtitan.distributed import pipeline_parallel

    generate = getattr(pipeline_parallel, "_generate_llm_fqn_per_model_part", None) or (
        pipeline_parallel.generate_llm_fqn_per_model_part
    )
    model = build_model("llama3-8b")
    for text in ("pp4 zero0 mbs1", "pp2 v2 mbs1", "dp2 pp4 v2 zero2 mbs1 stages=3-4-4-4-4-4-5-4"):
        layout = Layout.parse(text)
        config = parse_plan(ConfigPlan(model, layout, Job(sequence=2048, global_batch=16)), tmp_path, monkeypatch)
        parts = config.parallelism.module_fqns_per_model_part or generate(layout.pp * layout.v, model.layers, 1, 1)
        sizes = [sum(name.startswith("layers.") for name in part) for part in parts]
        assert sizes == [len(item) for item in list_stage_layers(model, layout)]
