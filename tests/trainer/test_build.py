"""A build fails at once where the module tree and the table of weights disagree, also in a dry run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fivefold.layout.local_weight
from fivefold.dry_run import dryrun
from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.machine.catalog import resolve
from fivefold.model import weights as table
from fivefold.model.experts import MoE
from fivefold.model.latent_attention import MLA
from fivefold.model.shape import ModelShape
from fivefold.model.spec import Model
from fivefold.trainer.build import build_module
from fivefold.trainer.parallel.placement import ShardPlacement
from tests.selection import mark_share

MODEL = Model(
    name="small",
    layers=2,
    width=16,
    heads=2,
    kv_heads=2,
    head_dim=6,
    ffn=16,
    vocab=40,
    attention_sinks=True,
    mla=MLA(q_rank=8, kv_rank=8, nope_dim=4, rope_dim=2, v_dim=4),
    moe=MoE(experts=2, topk=1, ffn=8),
)


def findings(text: str = "tp2") -> tuple[str, ...]:
    """Return the findings of a dry run of ``MODEL``."""
    layout, job = Layout.parse(text), Job(sequence=8, global_batch=8)
    machine = resolve(f"h100:{layout.world}", local=Path("/nowhere"))
    return tuple(dryrun(model=MODEL, machine=machine, layout=layout, job=job).findings)


def test_a_module_of_some_layers_has_their_weights_and_those_of_both_ends() -> None:
    module, full = (build_module(MODEL, Job(sequence=8, global_batch=8), layers=layers) for layers in ([1], None))
    names = [name for name, _ in full.named_parameters() if not name.startswith("blocks.0.")]
    assert [name for name, _ in module.named_parameters()] == names
    assert len(module.blocks) == MODEL.layers


@pytest.mark.slow
@pytest.mark.parametrize("text", mark_share(3, ["dp2 zero3 ep2", "tp2", "pp2 dualpipe zero0"]))
def test_the_parameter_check_accepts_a_model_whose_weights_match_the_table(text: str) -> None:
    assert findings(text) == ()


def test_a_parameter_that_the_table_lacks_ends_the_dry_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """As latent attention's sinks did, which stayed on the meta device."""
    monkeypatch.setattr(table, "_list_sinks", lambda model: iter(()))
    (line,) = findings()
    assert "blocks.0.attention.sinks of model 'small' is (2,) in the modules and missing in model/weights.py" in line


def test_a_weight_that_no_module_has_ends_the_dry_run(monkeypatch: pytest.MonkeyPatch) -> None:
    known = table._list_sinks

    def list_more(model: ModelShape) -> Iterator[table.Weight]:
        yield from known(model)
        yield table.Weight("attention.more", (3,), "vector")

    monkeypatch.setattr(table, "_list_sinks", list_more)
    (line,) = findings()
    assert "blocks.0.attention.more of model 'small' is missing in the modules and (3,) in model/weights.py" in line


def test_a_weight_that_is_left_on_meta_ends_the_dry_run(monkeypatch: pytest.MonkeyPatch) -> None:
    known = ShardPlacement._zero_unit

    def build_fewer(self: ShardPlacement, weights: list[table.Weight], backwards: int, **rest: Any) -> Any:
        return known(self, [weight for weight in weights if not weight.name.endswith("sinks")], backwards, **rest)

    monkeypatch.setattr(ShardPlacement, "_zero_unit", build_fewer)
    (line,) = findings()
    assert "blocks.0.attention.sinks of model 'small' is on device meta after the build, not cpu" in line


def test_a_weight_with_another_shard_shape_ends_the_dry_run(monkeypatch: pytest.MonkeyPatch) -> None:
    known = fivefold.layout.local_weight.shard_weight

    def uncut(weight: table.Weight, **rest: Any) -> table.Weight:
        return weight if weight.name.endswith("sinks") else known(weight, **rest)

    monkeypatch.setattr(fivefold.layout.local_weight, "shard_weight", uncut)
    (line,) = findings()
    assert "blocks.0.attention.sinks of model 'small' is (2,) on this rank, and (1,) in layout/sharding.py" in line
