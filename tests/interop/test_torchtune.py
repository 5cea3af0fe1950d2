"""torchtune's configs: what each recipe trains, on what, and over how many GPUs, computed by hand from the file."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from fivefold.errors import UserError
from fivefold.interop.format import ConfigPlan, Overrides
from fivefold.interop.read import read
from fivefold.interop.write import write
from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.model.catalog import build_model
from fivefold.model.spec import Model
from fivefold.model.weights import count_adapters
from fivefold.results.reading import Reading
from tests.interop.draws import Range, check_round_trip, plans

CONFIGS = Path(__file__).parent / "published" / "torchtune"
LENGTH = "tokenizer.max_seq_len=2048"
PLAN = "tensor_parallel_plan._component_=torchtune.models.llama3.base_llama_tp_plan"


def read_config(name: str, *words: str, ranks: int | None = None) -> Reading:
    return read([str(CONFIGS / name), *words], Overrides(ranks=ranks))


def read_records(name: str, *words: str, ranks: int | None = None) -> tuple[Model, Layout, Job]:
    reading = read_config(name, *words, ranks=ranks)
    assert reading.model is not None
    assert reading.layout is not None
    assert reading.job is not None
    return reading.model, reading.layout, reading.job


def test_full_distributed_shards_bf16_weights_and_moments() -> None:
    model, layout, job = read_records("llama3_8b_full.yaml", LENGTH)
    assert model.name == "llama3-8b"
    assert str(layout) == "dp4 zero3 mbs2 ac=full"  # 4 of its head
    assert (job.global_batch, job.sequence, job.documents, job.objective) == (2 * 1 * 4, 2048, "separate", "sft")
    assert job.precision.total_bytes == 2 + 2 + 2 + 2  # weight, gradient, two moments
    assert (job.optimizer.kind, job.optimizer.weight_decay, job.optimizer.clip) == ("adamw", 0.01, 0.0)
    assert (job.learning_rate.kind, job.learning_rate.peak) == ("constant", 2e-5)
    # its tok_embeddings and output are units, so that all are gathered again
    assert (job.stack.loss, job.stack.reshard, job.stack.backward_all_gather) == ("upcast", "forward", "all")


def test_lora_distributed_trains_factors_of_three_of_attention_and_all_of_the_mlp() -> None:
    model, layout, job = read_records("llama31_8b_lora.yaml", LENGTH)
    assert str(layout) == "dp2 zero3 mbs2"
    assert job.global_batch == 2 * 8 * 2
    assert job.adapter is not None
    # rank · (inputs + outputs) of q, v and the output, then of the three layers of the MLP, in 32 blocks
    block = 8 * (4096 + 4096) + 8 * (4096 + 1024) + 8 * (4096 + 4096) + 3 * 8 * (4096 + 14_336)
    assert count_adapters(model, job.adapter) == 32 * block == 19_660_800
    assert (job.adapter.alpha, job.adapter.dropout, job.adapter.base) == (16, 0.0, None)
    assert (job.learning_rate.kind, job.learning_rate.floor, job.learning_rate.warmup_steps) == ("cosine", 0.0, 100)
    assert job.stack.backward_all_gather == "root"  # embedding and head are no units


def test_qlora_on_one_device_keeps_the_matrices_of_blocks_in_4_bits() -> None:
    model, layout, job = read_records("llama2_7b_qlora.yaml", LENGTH)
    assert str(layout) == "dp1 zero0 mbs2 ac=full"
    assert job.global_batch == 2 * 8
    assert job.adapter is not None
    assert job.adapter.base == "nf4"
    block = 3 * 8 * (4096 + 4096) + 3 * 8 * (4096 + 11_008)
    assert count_adapters(model, job.adapter) == 32 * block == 17_891_328
    adapter = read_records("llama3_8b_qdora.yaml", LENGTH)[2].adapter
    assert adapter is not None
    assert adapter.name == "qdora:8"


def test_keys_and_models_of_the_main_branch_are_read() -> None:
    validation = (
        "run_val_every_n_steps=null", "dataset_val._component_=torchtune.datasets.alpaca_cleaned_dataset",
        "dataset_val.split=train[95%:]", "batch_size_val=${batch_size}", "save_every_n_steps=100",
    )  # fmt: skip
    reading = read_config("llama31_8b_lora.yaml", LENGTH, *validation, ranks=2)
    assert reading.not_understood == ()
    plain = read_records("llama31_8b_lora.yaml", LENGTH, ranks=2)
    assert (reading.model, reading.layout, reading.job) == plain

    qwen = "model._component_=torchtune.models.qwen3.lora_qwen3_8b_instruct"
    model, _, job = read_records("llama31_8b_lora.yaml", LENGTH, qwen, ranks=2)
    assert model == build_model("qwen3-8b")
    assert job.adapter == plain[2].adapter
    with pytest.raises(UserError, match="torchtune has no builder of it"):  # that a release has
        write(ConfigPlan(model, Layout.parse("dp2 zero3 mbs2"), job), to="torchtune")


def test_dpo_counts_pairs_as_two_sequences() -> None:
    _, layout, job = read_records("llama31_8b_lora_dpo.yaml")
    assert str(layout) == "dp2 zero3 mbs8 ac=full"
    assert (job.global_batch, job.sequence) == (2 * 4 * 8 * 2, 1024)
    assert (job.objective, job.dpo_beta, job.stack.loss) == ("dpo", 0.1, "low_precision")
    _, layout, job = read_records("llama31_8b_full_dpo.yaml")
    assert (str(layout), job.adapter, job.dpo_beta) == ("dp4 zero3 mbs8 ac=full", None, 0.05)
    assert job.copies_reference


def test_a_compiled_run_on_two_nodes() -> None:
    model, layout, job = read_records("llama33_70b_multinode.yaml", ranks=16)
    assert (model.name, str(layout)) == ("llama3.3-70b", "dp16 zero3 mbs4 ac=full")
    assert (job.global_batch, job.sequence) == (4 * 16, 1024)
    assert (job.stack.compile, job.stack.kernels, job.stack.loss) == (True, "fused", "fused")


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        (["fsdp_cpu_offload=true"], "offload", ("parameters",)),
        (["enable_activation_offloading=true"], "offload", ("activations",)),
        (["optimizer._component_=bitsandbytes.optim.AdamW8bit"], "optimizer.kind", "adamw8bit"),
        (["optimizer.betas=[0.8, 0.9]"], "optimizer.betas", (0.8, 0.9)),
        (["fsdp_reshard_after_forward=false"], "stack.reshard", "backward"),
        (["max_steps_per_epoch=50", "epochs=3"], "steps", 150),
        (["clip_grad_norm=1.0"], "optimizer.clip", 1.0),
        (["dataset._component_=torchtune.datasets.text_completion_dataset"], "objective", "pretrain"),
        (["seed=1234"], "seed", 1234),
    ],
)
def test_keys_are_added_after_the_file(words: list[str], field: str, value: object) -> None:
    job: object = read_records("llama3_8b_full.yaml", LENGTH, *words)[2]
    for name in field.split("."):
        job = getattr(job, name)
    assert job == value


def test_tensor_parallelism_needs_a_plan_and_gathers_the_logits() -> None:
    reading = read_config("llama3_8b_full.yaml", LENGTH, PLAN, "tensor_parallel_dim=2", ranks=8)
    assert str(reading.layout) == "dp4 tp2 zero3 mbs2 ac=full nosp"
    assert "tensor_parallel_dim" in {key.key for key in reading.approximated}
    with pytest.raises(UserError, match="tensor_parallel_dim without tensor_parallel_plan"):
        read_config("llama3_8b_full.yaml", LENGTH, "tensor_parallel_dim=2", ranks=8)


@pytest.mark.parametrize(
    ("name", "words", "ranks", "error"),
    [
        ("llama2_7b_qlora.yaml", [LENGTH], 8, "lora_finetune_single_device trains on one GPU, not on 8"),
        ("llama3_8b_full.yaml", [LENGTH, "recipe=qat_distributed"], 4, "recipe qat_distributed trains weights"),
        ("llama3_8b_full.yaml", [LENGTH, "dtype=fp16"], 4, "dtype is 'fp16'; torchtune's recipes train in bf16"),
        (
            "llama3_8b_full.yaml",
            [LENGTH, "enable_activation_checkpointing=false", "enable_activation_offloading=true"],
            4,
            "enable_activation_offloading without enable_activation_checkpointing",
        ),
    ],
)
def test_settings_that_torchtune_does_not_run_are_errors(name: str, words: list[str], ranks: int, error: str) -> None:
    with pytest.raises(UserError, match=error) as mistake:
        read_config(name, *words, ranks=ranks)
    assert "\n" not in str(mistake.value)


def test_a_missing_sequence_length_and_model_builder_are_reported(tmp_path: Path) -> None:
    assert read_config("llama3_8b_full.yaml").missing == (
        "the length of a sequence: add tokenizer.max_seq_len=4096 after the file (in quotes with --from); `predict` "
        "and `write` take --seq too",
    )
    missing = read_config("llama3_8b_full.yaml", LENGTH, "model._component_=torchtune.models.own.own_8b").missing
    assert missing[0].startswith("the model: torchtune's builder 'torchtune.models.own.own_8b' is not known")
    near = read_config("llama3_8b_full.yaml", LENGTH, "model._component_=torchtune.models.llama3.llama3_9b").missing
    assert "is not known (similar: llama3_8b, " in near[0]
    images = "model._component_=torchtune.models.llama4.lora_llama4_scout_17b_16e"
    assert "of images and text" in read_config("llama3_8b_full.yaml", LENGTH, images).missing[0]
    copy = tmp_path / "7B_qlora_single_device.yaml"
    shutil.copy(CONFIGS / "llama2_7b_qlora.yaml", copy)
    copy.write_text(copy.read_text().partition("\noutput_dir")[2].partition("\n")[2])  # without its head
    reading = read([str(copy), LENGTH], Overrides())
    assert str(reading.layout) == "dp1 zero0 mbs2 ac=full"
    assert "recipe" in {key.key for key in reading.approximated}


def test_recipe_ranks_and_keys_are_read_from_a_launch_command(tmp_path: Path) -> None:
    path = str(CONFIGS / "llama3_8b_full.yaml")
    line = ["tune", "run", "--nproc_per_node", "8", "full_finetune_distributed", "--config", path, LENGTH]
    reading = read([*line, "batch_size=4"], Overrides())
    assert str(reading.layout) == "dp8 zero3 mbs4 ac=full"
    assert reading.ranks == 8
    script = tmp_path / "run.sh"
    script.write_text(" ".join([*line, "seed=7"]) + "\n")
    job = read([str(script)], Overrides()).job
    assert job is not None
    assert job.seed == 7
    with pytest.raises(UserError, match="recipe qat_distributed trains weights"):
        read(["tune", "run", "qat_distributed", "--config", path], Overrides())
    with pytest.raises(UserError, match="--config llama3/8B_full: no such file; copy it by `tune cp"):
        read(["tune", "run", "full_finetune_distributed", "--config", "llama3/8B_full"], Overrides())


def test_references_between_yaml_keys_are_resolved(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    text = (CONFIGS / "llama3_8b_full.yaml").read_text()
    path.write_text(text.replace("batch_size: 2", "size: 3\nbatch_size: ${size}"))
    layout = read([str(path), LENGTH], Overrides()).layout
    assert layout is not None
    assert layout.mbs == 3


MODELS = ("llama3-8b", "llama3.2-1b", "qwen2.5-1.5b", "gemma2-9b")
RECIPES = ("bf16-pure", "bf16-pure", "fp32")
FINE_TUNING = Range(MODELS, RECIPES, ("none", "full"), ("dp",), fine_tuning=True)
FULL = Range(MODELS, RECIPES, ("none", "full", "full/2"), ("dp",))


@pytest.mark.slow
@pytest.mark.parametrize("drawn", [FINE_TUNING, FULL], ids=["fine-tuning", "full"])
def test_drawn_plans_are_read_back(drawn: Range, tmp_path: Path) -> None:
    reasons = [
        check_round_trip(plan, to="torchtune", folder=tmp_path)
        for plan in plans("torchtune", count=60, seed=3, among=drawn)
    ]
    assert reasons.count(None) >= 15, reasons


@pytest.mark.parametrize(
    ("name", "words", "ranks"),
    [
        ("llama3_8b_full.yaml", [LENGTH], None),
        ("llama3_8b_full.yaml", [LENGTH, PLAN, "tensor_parallel_dim=2", "optimizer.fused=false"], None),
        ("llama3_8b_selective.yaml", [LENGTH], 8),
        ("llama31_8b_lora.yaml", [LENGTH], None),
        ("llama3_8b_qdora.yaml", [LENGTH], None),
        ("llama31_8b_lora_dpo.yaml", [], None),
        ("llama31_8b_full_dpo.yaml", [], None),
        ("llama33_70b_multinode.yaml", [], 16),
    ],
)
def test_a_published_config_is_written_as_it_was_read(
    name: str, words: list[str], ranks: int | None, tmp_path: Path
) -> None:
    model, layout, job = read_records(name, *words, ranks=ranks)
    files = write(ConfigPlan(model, layout, job), to="torchtune").files
    path = tmp_path / "torchtune.yaml"
    path.write_text(files["torchtune.yaml"])
    reading = read([str(path)], Overrides())
    assert (reading.model, reading.layout) == (model, layout)
    assert reading.job == job
    assert not reading.not_understood


@pytest.mark.parametrize(
    ("layout", "model", "job", "reason"),
    [
        ("dp2 pp2 zero1 mbs1", "llama3-8b", {}, "torchtune does not support pp; use pp1"),
        ("dp2 zero3 mbs1", "qwen3-8b", {}, "model 'qwen3-8b': torchtune has no builder of it"),
        ("dp2 zero3 mbs1", "llama3-8b", {"precision": "bf16"}, "torchtune has no master copy; use bf16-pure or fp32"),
        ("dp2 zero3 mbs1", "llama3-8b", {"adapter": {"targets": ["up_proj"]}}, "adapts layers of attention, and all"),
        ("dp1 mbs1", "llama3-8b", {"adapter": {"base": "int8"}}, "adapter.base=int8: torchtune has no argument"),
    ],
)
def test_settings_that_torchtune_cannot_express_are_errors(
    layout: str, model: str, job: dict[str, object], reason: str
) -> None:
    job_fields = {"stack": "torchtune", "precision": "bf16-pure", "global_batch": 8, **job}
    plan = ConfigPlan(build_model(model), Layout.parse(layout), Job.read(job_fields, origin=""))
    with pytest.raises(UserError, match=reason):
        write(plan, to="torchtune")
