"""Configs that Megatron-Bridge and NeMo 2 save: fields by Megatron-Core's names, in sections with a target."""

from __future__ import annotations

from pathlib import Path

import pytest

from fivefold.interop.format import Overrides
from fivefold.interop.read import read
from tests.interop.draws import Range, check_round_trip, plans
from tests.selection import mark_share

# As ConfigContainer.to_yaml writes (megatron-bridge 0.3.1 training/utils/config_utils.py, utils/yaml_utils.py); sizes,
# degrees and batch of recipes/llama/llama3.py, llama3_70b_pretrain_config
BRIDGE = """
_target_: megatron.bridge.training.config.ConfigContainer
model:
  _target_: megatron.bridge.models.llama.llama_provider.Llama3ModelProvider70B
  num_layers: 80
  hidden_size: 8192
  ffn_hidden_size: 28672
  num_attention_heads: 64
  num_query_groups: 8
  kv_channels: null
  normalization: RMSNorm
  gated_linear_unit: true
  activation_func:
    _target_: torch.nn.functional.silu
    _call_: false
  add_bias_linear: false
  position_embedding_type: rope
  rotary_base: 500000
  share_embeddings_and_output_weights: false
  vocab_size: 128256
  seq_length: 8192
  hidden_dropout: 0.0
  attention_dropout: 0.0
  tensor_model_parallel_size: 4
  pipeline_model_parallel_size: 4
  virtual_pipeline_model_parallel_size: 5
  context_parallel_size: 2
  sequence_parallel: true
  cross_entropy_loss_fusion: true
  bf16: true
  params_dtype:
    _target_: torch.bfloat16
    _call_: false
  init_method:
    _target_: torch.nn.init.normal_
    _partial_: true
    std: 0.01
  tp_comm_overlap_rs: true
  fp8_dot_product_attention: false
train:
  _target_: megatron.bridge.training.config.TrainingConfig
  micro_batch_size: 1
  global_batch_size: 512
  train_iters: 1000
optimizer:
  _target_: megatron.bridge.training.config.OptimizerConfig
  optimizer: adam
  lr: 0.0003
  adam_beta2: 0.95
  weight_decay: 0.1
  use_distributed_optimizer: true
ddp:
  _target_: megatron.bridge.training.config.DistributedDataParallelConfig
  grad_reduce_in_fp32: true
  overlap_grad_reduce: true
  overlap_param_gather: true
comm_overlap:
  _target_: megatron.bridge.training.comm_overlap.CommOverlapConfig
  tp_comm_overlap: true
logger:
  _target_: megatron.bridge.training.config.LoggerConfig
  log_interval: 10
"""
# As nemo_run saves a recipe; names of NVIDIA/NeMo:nemo/collections/llm/recipes/llama3_8b.py
NEMO = """
_target_: nemo.collections.llm.api.pretrain
model:
  _target_: nemo.collections.llm.gpt.model.llama.LlamaModel
  config:
    _target_: nemo.collections.llm.gpt.model.llama.Llama3Config8B
    seq_length: 8192
trainer:
  _target_: nemo.lightning.pytorch.trainer.Trainer
  devices: 8
  num_nodes: 2
  max_steps: 100
  plugins:
    _target_: nemo.lightning.pytorch.plugins.mixed_precision.MegatronMixedPrecision
    precision: bf16-mixed
    grad_reduce_in_fp32: false
  strategy:
    _target_: nemo.lightning.pytorch.strategies.megatron_strategy.MegatronStrategy
    tensor_model_parallel_size: 2
    context_parallel_size: 2
    sequence_parallel: true
    ddp:
      _target_: megatron.core.distributed.distributed_data_parallel_config.DistributedDataParallelConfig
      overlap_grad_reduce: true
      overlap_param_gather: true
data:
  _target_: nemo.collections.llm.gpt.data.mock.MockDataModule
  seq_length: 8192
  micro_batch_size: 1
  global_batch_size: 512
optim:
  _target_: nemo.lightning.pytorch.optim.megatron.MegatronOptimizerModule
  config:
    _target_: megatron.core.optimizer.optimizer_config.OptimizerConfig
    optimizer: adam
    lr: 0.0003
    use_distributed_optimizer: true
"""


def put(folder: Path, text: str) -> str:
    (folder / "run_config.yaml").write_text(text, encoding="utf-8")
    return str(folder / "run_config.yaml")


def test_a_saved_config_of_megatron_bridge_is_read(tmp_path: Path) -> None:
    result = read([put(tmp_path, BRIDGE)], Overrides(ranks=64))
    assert result.model is not None
    assert result.job is not None
    assert result.model.name == "llama3-70b"
    assert str(result.layout) == "dp2 tp4 cp2 pp4 v5 zero1 interleaved mbs1"
    job = result.job
    assert (job.sequence, job.global_batch, job.precision.name, job.stack.name) == (
        8192,
        512,
        "bf16",
        "megatron-bridge",
    )
    assert (job.stack.loss, job.stack.overlap) == ("upcast_compiled", ("dp", "cp", "pp", "tp"))
    assert (result.not_understood, result.missing, result.errors) == ((), (), ())


@pytest.mark.parametrize(
    ("gate", "function", "understood", "activation"),
    [
        (True, "torch.nn.functional.silu", True, "silu"),
        (True, "torch.nn.functional.gelu", False, "silu"),
        (True, "megatron.core.fusions.fused_bias_geglu.quick_gelu", False, "silu"),
        (False, "torch.nn.functional.gelu", True, "gelu"),
        (False, "megatron.core.activations.fast_gelu", True, "gelu_tanh"),
        (False, "megatron.core.activations.squared_relu", True, "relu2"),
        (False, "torch.nn.functional.silu", False, "gelu"),
    ],
)
def test_an_activation_that_megatron_cannot_name_is_not_understood(
    tmp_path: Path, gate: bool, function: str, understood: bool, activation: str
) -> None:
    text = BRIDGE.replace("gated_linear_unit: true", f"gated_linear_unit: {str(gate).lower()}")
    result = read([put(tmp_path, text.replace("torch.nn.functional.silu", function))], Overrides(ranks=64))
    assert result.model is not None
    assert result.model.activation == activation
    assert [said.key for said in result.not_understood] == ([] if understood else ["activation_func"])


def test_a_saved_recipe_of_nemo_is_read(tmp_path: Path) -> None:
    result = read([put(tmp_path, NEMO)])
    assert result.model is not None
    assert result.job is not None
    assert result.model.name == "llama3-8b"
    assert str(result.layout) == "dp4 tp2 cp2 zero1 mbs1"
    assert (result.job.global_batch, result.job.precision.name, result.job.stack.name) == (512, "bf16-grad16", "nemo")
    assert (result.not_understood, result.missing, result.errors) == ((), (), ())


@pytest.mark.parametrize(("value", "q_rank"), [("null", None), ("1536", 1536), (None, 512)])
def test_queries_are_compressed_unless_the_rank_is_null(value: str | None, q_rank: int | None, tmp_path: Path) -> None:
    """A key that is missing has the default of MLATransformerConfig."""
    changed = BRIDGE.replace("num_query_groups: 8", "multi_latent_attention: true")
    changed = changed if value is None else changed.replace("kv_channels: null", f"q_lora_rank: {value}")
    result = read([put(tmp_path, changed)], Overrides(ranks=64))
    assert result.model is not None
    assert result.model.mla is not None
    assert result.model.mla.q_rank == q_rank


@pytest.mark.parametrize(("value", "factor"), [("1.0", None), ("8.0", 8), (None, 40)])
def test_latent_attention_has_yarn_unless_its_factor_is_one(
    value: str | None, factor: int | None, tmp_path: Path
) -> None:
    """A key that is missing has the default of MLATransformerConfig (megatron/core/transformer)."""
    changed = BRIDGE.replace("num_query_groups: 8", "multi_latent_attention: true")
    changed = changed if value is None else changed.replace("kv_channels: null", f"rotary_scaling_factor: {value}")
    result = read([put(tmp_path, changed)], Overrides(ranks=64))
    assert result.model is not None
    assert (result.model.rope_scaling.factor if result.model.rope_scaling else None) == factor


def test_unknown_keys_that_may_change_costs_are_reported(tmp_path: Path) -> None:
    changed = BRIDGE.replace("fp8_dot_product_attention: false", "fp8_multi_head_attention: true\n  new_kernel: 3")
    lora = changed + "peft:\n  _target_: megatron.bridge.peft.lora.LoRA\n  dim: 32\n"
    result = read([put(tmp_path, lora)], Overrides(ranks=64))
    assert {said.key for said in result.not_understood} == {"fp8_multi_head_attention", "new_kernel", "peft"}


def test_attention_in_fp8_is_read(tmp_path: Path) -> None:
    changed = BRIDGE.replace("fp8_dot_product_attention: false", "fp8_dot_product_attention: true")
    results = [read([put(tmp_path, text)], Overrides(ranks=64)) for text in (BRIDGE, changed)]
    assert [result.job and result.job.stack.fp8_attention for result in results] == [False, True]


CORES = Range(
    models=(
        "llama3-8b",
        "llama3-70b",
        "qwen3-8b",
        "qwen3-30b-a3b",
        "mixtral-8x7b",
        "deepseek-v3",
        "deepseek-v2-lite",
        "a.x-k2-light-20b",
    ),
    recipes=("bf16", "bf16-grad16", "fp8", "mxfp8"),
    acs=("none", "none", "full", "selective", "norm+act"),
)


@pytest.mark.slow
@pytest.mark.parametrize("seed", mark_share(3, range(3)))
def test_written_config_is_read_back(tmp_path: Path, seed: int) -> None:
    drawn = plans("megatron-bridge", count=20, seed=seed, among=CORES)
    refused = [check_round_trip(plan, to="bridge", folder=tmp_path) for plan in drawn]
    assert refused.count(None) >= 7, [why for why in refused if why]


@pytest.mark.parametrize("text", ["model: {}\ntrain: {}\nddp: {}\n", "_target_: megatron.bridge.x\nmodel: 3\n"])
def test_an_empty_config_says_what_is_missing(text: str, tmp_path: Path) -> None:
    result = read([put(tmp_path, text)])
    assert result.missing[0].startswith("the model")


@pytest.mark.parametrize(
    ("name", "precision", "not_understood"),
    [
        ("bf16_mixed", "bf16", set()),
        ("fp16-mixed", "fp16", set()),
        ("bf16_with_fp8_delayed_scaling_mixed", "fp8-delayed-param", set()),
        ("bf16_with_fp8_current_scaling_mixed", "fp8-param", {"first_last_layers_bf16"}),
        ("nanov2_bf16_with_fp8_current_scaling_mixed", "fp8-tiles-param", {"first_last_layers_bf16"}),
        ("bf16_with_fp8_subchannel_scaling_mixed", "fp8-tiles", set()),
        ("bf16-with-mxfp8-mixed", "mxfp8", {"fp8_param_gather", "reuse_grad_buf_for_mxfp8_param_ag"}),
        ("bf16_with_nvfp4_mixed", "nvfp4", set()),
        ("other_mixed", "bf16", {"mixed_precision"}),
    ],
)
def test_a_named_recipe_of_precision_sets_its_fields(
    name: str, precision: str, not_understood: set[str], tmp_path: Path
) -> None:
    """As megatron-bridge 0.3.1 training/mixed_precision.py, whose fields override those of the model and of DDP."""
    result = read([put(tmp_path, BRIDGE + f"mixed_precision: {name}\n")], Overrides(ranks=64))
    assert result.job is not None
    assert result.job.precision.name == precision
    assert {said.key for said in result.not_understood} == not_understood


@pytest.mark.parametrize(
    ("config", "parameters", "not_understood"),
    [
        ("llama.Llama3Config8B", 8_030_261_248, set()),
        ("llama.Llama3Config8B\n    num_layers: 4", 1_923_125_248, set()),
        ("llama.Llama3Config8B\n    ffn_hidden_size: 8192", 5_614_342_144, set()),
        ("nemotron.Nemotron4Config15B\n    vocab_size: 256000", 15_628_775_424, set()),
        ("mixtral.MixtralConfig8x7B", 46_702_792_704, {"moe_grouped_gemm"}),
        ("gemma2.Gemma2Config9B\n    ffn_hidden_size: 8192", 9_241_705_984, {"ffn_hidden_size"}),
    ],
)
def test_fields_of_a_class_of_nemo_and_their_changes(
    config: str, parameters: int, not_understood: set[str], tmp_path: Path
) -> None:
    """A recipe has only what differs from the defaults of its classes (nemo-toolkit 2.4.0)."""
    text = NEMO.replace("llama.Llama3Config8B\n    seq_length: 8192", config)
    result = read([put(tmp_path, text)])
    assert result.model is not None
    assert result.model.parameters == parameters
    assert {said.key for said in result.not_understood} == not_understood


def test_another_plugin_of_nemo_is_an_error(tmp_path: Path) -> None:
    plugin = "nemo.lightning.pytorch.plugins.mixed_precision.MegatronMixedPrecision"
    result = read([put(tmp_path, NEMO.replace(plugin, "lightning.pytorch.plugins.precision.MixedPrecision"))])
    assert {said.key for said in result.not_understood} == {"plugins"}


def test_defaults_of_the_data_of_nemo(tmp_path: Path) -> None:
    text = NEMO.replace("  seq_length: 8192\n  micro_batch_size: 1\n  global_batch_size: 512\n", "")
    result = read([put(tmp_path, text)])
    assert result.job is not None
    assert result.layout is not None
    assert (result.job.sequence, result.layout.mbs, result.job.global_batch) == (2048, 4, 8)


def test_the_callback_of_overlaps_turns_on_those_of_data_parallelism(tmp_path: Path) -> None:
    plain = NEMO.replace("overlap_grad_reduce: true", "overlap_grad_reduce: false")
    callback = "megatron_comm_overlap.MegatronCommOverlapCallback"
    text = plain.replace("  max_steps: 100\n", f"  max_steps: 100\n  callbacks:\n  - _target_: nemo.{callback}\n")
    without, result = (read([put(tmp_path, config)]) for config in (plain, text))
    assert without.job is not None
    assert result.job is not None
    assert ("dp" in without.job.stack.overlap, "dp" in result.job.stack.overlap) == (False, True)
    assert result.not_understood == ()


def test_the_callback_of_overlaps_overrides_the_tensor_parallelism_of_the_model(tmp_path: Path) -> None:
    """NVIDIA/NeMo:nemo/lightning/pytorch/callbacks/megatron_comm_overlap.py, _apply_model_comm_overlap_cfgs."""
    plain = NEMO.replace("    sequence_parallel: true\n", "    sequence_parallel: {sp}\n")
    model = "    _target_: nemo.collections.llm.gpt.model.llama.Llama3Config8B\n"
    plain = plain.replace(model, f"{model}    tp_comm_overlap: true\n")
    callback = "  callbacks:\n  - _target_: nemo.megatron_comm_overlap.MegatronCommOverlapCallback\n"
    unset = plain.replace("  max_steps: 100\n", f"  max_steps: 100\n{callback}")
    given = plain.replace("  max_steps: 100\n", f"  max_steps: 100\n{callback}    tp_comm_overlap: true\n")
    for text, is_parallel, overlaps in (
        (plain, "true", True), (unset, "true", False), (given, "true", True), (given, "false", False)
    ):  # fmt: skip
        job = read([put(tmp_path, text.replace("{sp}", is_parallel))]).job
        assert job is not None
        assert ("tp" in job.stack.overlap) == overlaps


def read_overlaps(folder: Path, text: str) -> set[str]:
    job = read([put(folder, text)], Overrides(ranks=64)).job
    assert job is not None
    return {*job.stack.overlap}


def test_comm_overlap_turns_on_what_megatron_bridge_can_overlap(tmp_path: Path) -> None:
    """NVIDIA-NeMo/Megatron-Bridge@v0.3.1:src/megatron/bridge/training/comm_overlap.py, CommOverlapConfig.setup."""
    section = "comm_overlap:\n  _target_: megatron.bridge.training.comm_overlap.CommOverlapConfig\n"
    full = f"{section}  tp_comm_overlap: true\n"
    no_overlap_in_ddp = BRIDGE.replace("  overlap_grad_reduce: true\n  overlap_param_gather: true\n", "")
    undistributed = no_overlap_in_ddp.replace("  use_distributed_optimizer: true\n", "")
    for text, overlaps in (
        (BRIDGE, {"dp", "cp", "pp", "tp"}),
        (BRIDGE.replace("  sequence_parallel: true\n", ""), {"dp", "cp", "pp"}),
        (BRIDGE.replace("tensor_model_parallel_size: 4", "tensor_model_parallel_size: 1"), {"dp", "cp", "pp"}),
        (BRIDGE.replace(full, f"{full}  overlap_p2p_comm: false\n"), {"dp", "cp", "tp"}),
        (BRIDGE.replace(full, ""), {"dp", "cp"}),  # ModelParallelConfig overlaps no messages between stages
        (BRIDGE.replace("  virtual_pipeline_model_parallel_size: 5\n", ""), {"dp", "cp", "tp"}),
        (no_overlap_in_ddp, {"dp", "cp", "pp", "tp"}),
        (no_overlap_in_ddp.replace(full, f"{full}  overlap_grad_reduce: false\n"), {"cp", "pp", "tp"}),
        (undistributed, {"cp", "pp", "tp"}),
        (undistributed.replace(full, f"{full}  overlap_grad_reduce: true\n"), {"cp", "pp", "tp"}),
    ):
        assert read_overlaps(tmp_path, text) == overlaps


def test_comm_overlap_sets_the_size_of_a_bucket(tmp_path: Path) -> None:
    """As above, _get_optimizer_overlap_cfgs: 128 * 1024 * 1024 elements, unless it says otherwise."""
    section = "comm_overlap:\n  _target_: megatron.bridge.training.comm_overlap.CommOverlapConfig\n"
    assert section in BRIDGE
    for text, size in (
        (BRIDGE, (128 * 1024 * 1024, 0)),
        (BRIDGE.replace(section, f"{section}  bucket_size: 1000\n"), (1000, 0)),
        (BRIDGE.replace(f"{section}  tp_comm_overlap: true\n", ""), (40_000_000, 1_000_000)),
    ):
        job = read([put(tmp_path, text)], Overrides(ranks=64)).job
        assert job is not None
        assert job.stack.ddp_bucket_size == size


def test_overrides_of_a_recipe_overlap_what_most_recipes_do(tmp_path: Path) -> None:
    text = """
model: {num_layers: 80, hidden_size: 8192, num_attention_heads: 64, num_query_groups: 8, ffn_hidden_size: 28672,
        vocab_size: 128256, seq_length: 8192, tensor_model_parallel_size: 4, pipeline_model_parallel_size: 4,
        virtual_pipeline_model_parallel_size: 5}
train: {micro_batch_size: 1, global_batch_size: 512}
optimizer: {lr: 0.0003}
comm_overlap: {tp_comm_overlap: true}
"""
    assert read_overlaps(tmp_path, text) >= {"dp", "cp", "pp"}


@pytest.mark.parametrize("rate", ["2", "2.0"])
def test_a_rate_without_decimals_has_its_minimum(rate: str, tmp_path: Path) -> None:
    job = read([put(tmp_path, NEMO.replace("    lr: 0.0003\n", f"    lr: {rate}\n    min_lr: 1\n"))]).job
    assert job is not None
    assert (job.learning_rate.peak, job.learning_rate.floor) == (2.0, 0.5)
