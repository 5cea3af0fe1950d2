"""The trainer refuses in one line what the planner counts for other software only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fivefold.errors import UserError
from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.machine import catalog as machines
from fivefold.model.catalog import build_model
from fivefold.model.experts import MoE
from fivefold.model.latent_attention import MLA
from fivefold.model.mixers.lightning import Lightning
from fivefold.planner.predict import predict
from fivefold.stack.catalog import STACKS
from fivefold.stack.spec import Stack
from fivefold.trainer.supported import ENGINE_BEHAVIOUR, check_supported

OTHER_BEHAVIOUR: dict[str, Any] = {
    "kernels": "plain", "merged_projections": True, "merged_adapters": "all_gather",
    "wgrad_accumulation": "fused", "flat_copies": ("weights",),
    "recv_buffers": "preallocated", "zero2_shards": "separate", "zero3_gather": "weights", "reduce_bucket": 1000,
    "reduced_gradients": "updated", "ddp_bucket_size": (1, 1),
    "comm_buffers": "retained", "tp_buffers": "copied", "token_permutation": "scatter_add",
    "transposes_attention": True, "input_grad_all_reduces": (1, 2),
    "deferred_wgrad": "graph", "dispatcher": "fused", "scatter_gather_tensors": True,
    "rope": "unfused",
    "low_precision_saved": ("attention",), "fp8_attention": True,
    "extra_kernels": (10, 18), "update_kernels": 10, "flat_shards": True, "update_group_size": 1000,
    "linears": "separate", "reduce_dtype": "backward", "backward_all_gather": "all",
    "replicated_grad_reduce": "weight", "stage_outputs": "retained", "param_all_gather": "broadcast",
    "early_stop": False, "async_tp": True, "run_ahead": True, "cuda_graphs": "full", "p2p_overlap": "interleaved",
    "second_communicators": ("world",),
}  # fmt: skip


def test_the_default_stack_is_supported() -> None:
    check_supported(Layout(), Job(), model=build_model("nano"))


@pytest.mark.parametrize("field", ENGINE_BEHAVIOUR)
def test_settings_of_other_software_are_rejected(field: str) -> None:
    job = Job.read({field: OTHER_BEHAVIOUR[field]}, origin="test")
    with pytest.raises(UserError, match=f"job: the trainer supports {field}="):
        check_supported(Layout(), job, model=build_model("nano"))


# Fields of a stack that the trainer computes by, or whose values it checks elsewhere.
COMPUTED = {
    "attention", "loss", "kernels", "compile", "compile_loss", "fused_scans", "scan_temporary_bytes", "pairs",
    "overlap", "reduce", "reshard", "reduce_in_fp32", "vocab_multiple", "runs",
}  # fmt: skip
# Those of the process and its libraries, which it takes as they are.
OF_THE_PROCESS = {"launch_blocking", "runtime_connect", "expandable_segments"}
# Those without an effect next to the supported value of another field.
WITHOUT_EFFECT = {
    "column_inputs": "linears", "prefetch_bucket_size": "zero3_gather", "param_persistence_threshold": "zero3_gather",
    "max_reuse_distance": "zero3_gather", "max_live_parameters": "zero3_gather",
}  # fmt: skip


def test_every_field_of_a_stack_is_run_or_rejected() -> None:
    assert set(WITHOUT_EFFECT.values()) <= ENGINE_BEHAVIOUR.keys()
    known = {*ENGINE_BEHAVIOUR, *COMPUTED, *OF_THE_PROCESS, *WITHOUT_EFFECT, "name", "version", "family"}
    assert known == Stack.model_fields.keys()


@pytest.mark.parametrize("name", sorted(STACKS.keys() - {"fivefold"}))
def test_every_other_stack_is_planned_and_not_run(name: str) -> None:
    with pytest.raises(UserError, match=f"job: the trainer is fivefold's own and does not run as {name}"):
        check_supported(Layout(), Job(stack=STACKS[name]), model=build_model("nano"))


@pytest.mark.parametrize(
    "changed",
    [
        {"head_dim": 25, "position": "learned"},
        {"head_dim": 25, "position": "none"},
        {"head_dim": 25, "mla": MLA(q_rank=None, kv_rank=16, nope_dim=17, rope_dim=8, v_dim=16)},
    ],
    ids=str,
)
def test_odd_heads_are_computed_where_nothing_or_another_part_is_rotated(changed: dict[str, Any]) -> None:
    model = build_model("nano").replace(**changed)
    check_supported(Layout(), Job(), model=model)


@pytest.mark.parametrize("dense", [{"dense_layers": 1}, {"pattern": (True, False)}, {"shared_experts": 1}], ids=str)
def test_a_dense_mlp_among_clamped_experts_is_rejected(dense: dict[str, Any]) -> None:
    moe = MoE(experts=4, topk=1, ffn=16)
    model = build_model("nano").replace(activation="clamped_swiglu", moe=moe)
    check_supported(Layout(), Job(), model=model)
    with pytest.raises(UserError, match="does not support activation='clamped_swiglu'"):
        check_supported(Layout(), Job(), model=model.replace(moe=moe.replace(**dense)))


@pytest.mark.parametrize(
    ("kind", "layout", "changed", "line"),
    [
        ("flash2", "dp1", {}, "the trainer supports attention=flash or unfused, not flash2"),
        ("unfused", "cp2", {}, "ring attention needs flash attention; with attention='unfused' use cp=ulysses"),
        ("unfused", "dp1", {"attention_sinks": True}, "unfused attention does not support attention_sinks"),
        ("unfused", "dp1", {"attention_softcap": 5.0}, "unfused attention does not support attention_softcap"),
    ],
)
def test_a_kernel_that_does_not_fit_is_rejected(kind: Any, layout: str, changed: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError, match=line):
        check_supported(Layout.parse(layout), Job(attention=kind), model=build_model("nano").replace(**changed))


def test_a_norm_after_the_embedding_is_trained_up_to_zero2() -> None:
    model, job = build_model("nano").replace(embedding_norm="weighted"), Job(sequence=64, global_batch=4)
    check_supported(Layout.parse("dp2 zero2 mbs1"), job, model=model)
    check_supported(Layout.parse("dp2 zero3 mbs1"), job, model=model.replace(embedding_norm="unit"))
    with pytest.raises(UserError, match=r"does not shard the weights of a norm after the embedding.*use zero2"):
        check_supported(Layout.parse("dp2 zero3 mbs1"), job, model=model)


def test_a_tied_head_without_weights_of_its_own_is_planned_and_trained_up_to_zero2() -> None:
    model = build_model("nano").replace(tied_embeddings=True, final_norm=False)
    job = Job(sequence=64, global_batch=4)
    for layout in (Layout.parse("dp2 zero3 mbs1"), Layout.parse("dp2 zero2 mbs1")):
        step = predict(model=model, machine=machines.resolve("h100:2", local=Path("/nowhere")), layout=layout, job=job)
        assert step.memory.peak_bytes > 0
    check_supported(Layout.parse("dp2 zero2 mbs1"), job, model=model)
    with pytest.raises(UserError, match=r"does not shard a tied head without weights of its own; use zero2"):
        check_supported(Layout.parse("dp2 zero3 mbs1"), job, model=model)


def test_lightning_attention_has_no_activation_with_weights() -> None:
    model = build_model("nano").replace(mixers=("lightning",), lightning=Lightning(heads=2, dim=8), mlp="plain")
    check_supported(Layout(), Job(), model=model)
    with pytest.raises(UserError, match="xielu within lightning attention"):
        check_supported(Layout(), Job(), model=model.replace(activation="xielu"))
