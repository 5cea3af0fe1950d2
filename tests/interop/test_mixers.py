"""Software that cannot say token mixers, output gates or gated shared experts: its config is not written without."""

from __future__ import annotations

import pytest

from fivefold.interop.format import Plan
from fivefold.interop.write import write
from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.model.catalog import build_model
from fivefold.model.shape import MoE
from fivefold.model.spec import Model
from fivefold.record import UserError

GATED_EXPERT = MoE(experts=128, topk=8, ffn=768, shared_experts=1, shared_gate=True)
LACKING: list[tuple[Model, str]] = [
    (build_model("lfm2-1.2b"), r"mixers=\(\)"),
    (build_model("qwen3-next-80b-a3b"), "output_gate=False"),
    (build_model("qwen3-0.6b").replace(output_gate=True), "output_gate=False"),
    (build_model("qwen3-30b-a3b").replace(moe=GATED_EXPERT), "moe.shared_gate=False"),
]


@pytest.mark.parametrize(("model", "lacks"), LACKING, ids=["short_conv", "gated_delta_net", "gate", "shared_gate"])
@pytest.mark.parametrize("to", ["megatron", "bridge", "nanotron", "torchtitan", "torchtitan-0.2"])
def test_a_config_that_would_drop_a_part_of_the_model_is_not_written(to: str, model: Model, lacks: str) -> None:
    plan = Plan(model=model, layout=Layout(dp=8), job=Job(sequence=4096, global_batch=8))
    says = f"can only say {lacks}" if to in ("megatron", "bridge") else f"^model '{model.name}'"
    with pytest.raises(UserError, match=says):
        write(plan, to=to)
