"""Megatron's arguments: published scripts are read as their authors say, and what is written is read back."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

import pytest

from fivefold.errors import UserError
from fivefold.interop.format import ConfigPlan, Overrides
from fivefold.interop.megatron.emit import emit_arguments
from fivefold.interop.megatron.to_job import parse_stages
from fivefold.interop.read import read
from fivefold.interop.write import write
from fivefold.job import Job
from fivefold.layout.names import Axis
from fivefold.layout.spec import Layout
from fivefold.model.catalog import build_model, resolve
from fivefold.results.reading import Reading
from fivefold.stack.catalog import build_stack
from fivefold.trainer.optimizers.optimizer import compute_learning_rate
from tests.interop.draws import Range, check_round_trip, plans
from tests.selection import mark_share

# NVIDIA/Megatron-LM@157006d:examples/gpt3/train_gpt3_175b_distributed.sh, "the 175B parameter model"; 16 nodes
GPT3 = """
GPUS_PER_NODE=8
NUM_NODES=16
CHECKPOINT_PATH=$1 #<Specify path>
DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NUM_NODES
    --master_addr $MASTER_ADDR
)
GPT_MODEL_ARGS=(
    --num-layers 96
    --hidden-size 12288
    --num-attention-heads 96
    --seq-length 2048
    --max-position-embeddings 2048
    --attention-backend auto # Can use (flash/fused/unfused/local)
)
TRAINING_ARGS=(
    --micro-batch-size 1
    --global-batch-size 1536
    --rampup-batch-size 16 16 5859375
    --train-iters 500000
    --weight-decay 0.1
    --adam-beta2 0.95
    --fp16
    --lr 6.0e-5
    --lr-decay-style cosine
    --min-lr 6.0e-6
    --lr-warmup-fraction .001
)
MODEL_PARALLEL_ARGS=(
	--tensor-model-parallel-size 8
	--pipeline-model-parallel-size 16
)
DATA_ARGS=(
    --vocab-file $VOCAB_FILE
    --tokenizer-type GPT2BPETokenizer
    --save $CHECKPOINT_PATH
)
from tests.selection import mark_share
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py \\
    ${GPT_MODEL_ARGS[@]} \\
    ${TRAINING_ARGS[@]} \\
    ${MODEL_PARALLEL_ARGS[@]} \\
    ${DATA_ARGS[@]}
"""
# NVIDIA/Megatron-LM@157006d:examples/llama/train_llama3_8b_h100_fp8.sh
LLAMA3 = """
DTYPE="fp8"
MODEL_ARGS=(
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
    --group-query-attention --num-query-groups 8 --kv-channels 128 --seq-length 8192
    --max-position-embeddings 8192 --position-embedding-type rope --rotary-base 1000000
    --attention-dropout 0.0 --hidden-dropout 0.0 --swiglu --attention-backend fused --apply-layernorm-1p
    --untie-embeddings-and-output-weights --disable-bias-linear
)
TRAINING_ARGS=(
    --micro-batch-size 1 --global-batch-size 128 --train-samples 1953125000 --lr 0.00015 --bf16
    --grad-reduce-in-bf16 --cross-entropy-loss-fusion
)
DTYPE_ARGS=( "--fp8-format hybrid" "--fp8-amax-history-len 1024" "--fp8-param-gather" )
if [[ "$DTYPE" == "bf16" ]]; then
    DTYPE_ARGS=()
fi
DDP_ARGS=(
    --use-distributed-optimizer
    --overlap-grad-reduce
    --overlap-param-gather
)
TRAINING_ARGS+=("${DDP_ARGS[@]}")
torchrun --nproc_per_node 8 --nnodes 1 pretrain_gpt.py ${MODEL_ARGS[@]} ${TRAINING_ARGS[@]} ${DTYPE_ARGS[@]} \\
    --sequence-parallel --vocab-size 128256
"""
# yanring/Megatron-MoE-ModelZoo@31942f0:model_configs/benchmarking/DeepSeek-V3.yaml
DEEPSEEK = """
ENV_VARS:
  PYTORCH_CUDA_ALLOC_CONF: expandable_segments:True
MODEL_ARGS:
  --tensor-model-parallel-size: ${TP}
  --pipeline-model-parallel-size: ${PP}
  --expert-model-parallel-size: ${EP}
  --expert-tensor-parallel-size: 1
  --use-distributed-optimizer: true
  --overlap-grad-reduce: true
  --overlap-param-gather: true
  --sequence-parallel: true
  --disable-bias-linear: true
  --micro-batch-size: 1
  --global-batch-size: 8192
  --cross-entropy-loss-fusion: true
  --pipeline-model-parallel-layout: Et*3|(tt|)*29m|L
  --seq-length: 4096
  --num-layers: 61
  --hidden-size: 7168
  --ffn-hidden-size: 18432
  --num-attention-heads: 128
  --kv-channels: 128
  --max-position-embeddings: 4096
  --position-embedding-type: rope
  --make-vocab-size-divisible-by: 3232
  --normalization: RMSNorm
  --norm-epsilon: 1e-6
  --swiglu: true
  --untie-embeddings-and-output-weights: true
  --multi-latent-attention: true
  --attention-dropout: 0.0
  --hidden-dropout: 0.0
  --qk-layernorm: true
  --tokenizer-model: deepseek-ai/DeepSeek-V3
  --num-experts: 256
  --moe-layer-freq: ([0]*3+[1]*58)
  --moe-ffn-hidden-size: 2048
  --moe-shared-expert-intermediate-size: 2048
  --moe-router-topk: 8
  --moe-grouped-gemm: true
  --moe-token-dispatcher-type: flex
  --moe-router-group-topk: 4
  --moe-router-num-groups: 8
  --moe-router-topk-scaling-factor: 2.5
  --moe-router-score-function: sigmoid
  --moe-router-enable-expert-bias: true
  --q-lora-rank: 1536
  --kv-lora-rank: 512
  --qk-head-dim: 128
  --qk-pos-emb-head-dim: 64
  --v-head-dim: 128
  --bf16: true
"""


def put(folder: Path, name: str, text: str) -> str:
    (folder / name).write_text(text, encoding="utf-8")
    return str(folder / name)


# The arguments with type=float, NVIDIA/Megatron-LM@core_v0.16.1:megatron/training/arguments.py; other numbers are int
FLOATS = {
    "adam_beta1", "adam_beta2", "adam_eps", "attention_dropout", "clip_grad", "hidden_dropout", "lr", "min_lr",
    "moe_aux_loss_coeff", "moe_router_bias_update_rate", "moe_router_topk_scaling_factor", "mtp_loss_scaling_factor",
    "mscale", "mscale_all_dim", "norm_epsilon", "rotary_percent", "rotary_scaling_factor", "sgd_momentum",
    "weight_decay",
    "beta_fast", "beta_slow",  # fields of MLATransformerConfig, which no argument sets
}  # fmt: skip


def test_a_launch_script_of_gpt3_is_read(tmp_path: Path) -> None:
    result = read([put(tmp_path, "train.sh", GPT3)])
    assert result.model is not None
    assert result.job is not None
    assert result.model.parameters == pytest.approx(175e9, rel=5e-3)
    assert str(result.layout) == "dp1 tp8 pp16 zero0 1f1b mbs1 nosp"
    job = result.job
    assert (job.sequence, job.global_batch, job.precision.name, job.stack.name) == (2048, 1536, "fp16", "megatron-core")
    assert job.ramp is not None
    assert (job.ramp.first, job.ramp.step, job.ramp.samples) == (16, 16, 5_859_375)
    assert (result.missing, result.not_understood, result.errors) == ((), (), ())
    left = {said.key: said.value for said in result.defaulted}
    assert (left["recompute_modules"], left["hidden_dropout"]) == ("['core_attn']", "0.1")


def test_ffn_of_a_gated_block_is_megatrons_default(tmp_path: Path) -> None:
    """NVIDIA/Megatron-LM@157006d:megatron/training/arguments.py: int((4 * hidden * 2 / 3) / 64) * 64."""
    sizes = (
        ("--hidden-size 12288", "--hidden-size 1024 --swiglu"),
        ("--num-attention-heads 96", "--num-attention-heads 16"),
    )
    script = GPT3
    for before, after in sizes:
        script = script.replace(before, after)
    result = read([put(tmp_path, "train.sh", script)])
    assert result.model is not None
    assert result.model.ffn == 2688


@pytest.mark.parametrize(
    "flags",
    [
        "--num-virtual-stages-per-pipeline-rank 8 --account-for-embedding-in-pipeline-split "
        "--account-for-loss-in-pipeline-split",
        "--pipeline-model-parallel-layout E|(t|)*126L",
    ],
)
def test_stages_of_the_embedding_and_of_the_loss_alone_are_read(flags: str, tmp_path: Path) -> None:
    script = GPT3.replace("--num-layers 96", f"--num-layers 126 {flags}")
    result = read([put(tmp_path, "train.sh", script)])
    assert result.layout is not None
    assert (result.layout.pp, result.layout.v, result.layout.stages) == (16, 8, ())
    assert result.not_understood == ()


@pytest.mark.parametrize(
    ("flags", "biases"), [("--disable-bias-linear --add-qkv-bias", True), ("--disable-bias-linear", False)]
)
def test_biases_of_queries_keys_and_values_have_a_flag_of_their_own(flags: str, biases: bool, tmp_path: Path) -> None:
    script = GPT3.replace("--num-layers 96", f"--num-layers 96 {flags}")
    result = read([put(tmp_path, "train.sh", script)])
    assert result.model is not None
    assert result.model.qkv_bias is biases


def test_a_launch_script_of_llama3_in_fp8_is_read(tmp_path: Path) -> None:
    result = read([put(tmp_path, "train.sh", LLAMA3)])
    assert result.model is not None
    assert result.job is not None
    assert result.model.parameters == pytest.approx(8.03e9, rel=1e-3)
    assert str(result.layout) == "dp8 zero1 mbs1"
    recipe = result.job.precision
    assert (recipe.compute, recipe.weights_bytes, recipe.gathers, recipe.accumulated_bytes) == ("fp8", 1, "fp8", 0)
    assert (result.job.stack.loss, result.job.stack.overlap) == ("upcast_compiled", ("dp", "cp", "pp"))
    assert result.not_understood == ()


def test_a_yaml_of_deepseek_v3_with_variables_is_read(tmp_path: Path) -> None:
    path = put(tmp_path, "args.yaml", DEEPSEEK)
    with pytest.raises(UserError, match=r"--tensor-model-parallel-size is \$\{TP\}, which is not set; add TP=VALUE"):
        read([path], Overrides(ranks=1024))
    result = read([path, "TP=2", "PP=16", "EP=64"], Overrides(ranks=2048))
    assert result.model is not None
    assert result.job is not None
    assert result.model.parameters == pytest.approx(671e9, rel=1e-3)
    assert result.model.moe is not None
    assert result.model.moe.dense_layers == 3
    assert str(result.layout) == "dp64 tp2 pp16 ep64 v2 zero1 interleaved mbs1"
    assert [said.key for said in result.not_understood] == ["pipeline_model_parallel_layout"]
    assert (result.job.stack.dispatcher, result.job.stack.vocab_multiple) == ("fused", 3232)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (("--tensor-model-parallel-size 8", "--tensor-model-parallel-size 6"), "128 ranks are not a multiple of .*=96"),
        (("--tensor-model-parallel-size 8", "--tensor-model-parallel-size $TP"), r"is \$TP, which is not set; add TP="),
        (
            ("--tensor-model-parallel-size 8", "--tensor-model-parallel-size $(cat tp)"),
            r"the output of a command, \$\(cat",
        ),
        (("--num-layers 96", "--num-layers 95"), "num_layers=95 is not divisible by pp=16"),
        (("--num-layers 96", "--num-layers many"), "num_layers must be a whole number of 1 or more, not 'many'"),
        (
            ("--rampup-batch-size 16 16 5859375", "--rampup-batch-size 16"),
            "rampup_batch_size is 16; give three numbers",
        ),
        (
            ("--num-layers 96", "--num-layers 96 --recompute-granularity full --recompute-num-layers 1 2"),
            r"recompute_num_layers must be a whole number of 1 or more, not \['1', '2'\]",
        ),
        (
            (
                "--num-layers 96",
                "--num-layers 96 --decoder-last-pipeline-num-layers 5 --pipeline-model-parallel-layout Et*96|L",
            ),
            "pipeline_model_parallel_layout and decoder_last_pipeline_num_layers both set stages; remove one",
        ),
        ((GPT3, "cd here"), "holds no command"),
    ],
)
def test_contradictions_are_one_line_errors(change: tuple[str, str], reason: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=reason) as refused:
        read([put(tmp_path, "train.sh", GPT3.replace(*change))])
    assert "\n" not in str(refused.value)


def test_user_and_launcher_must_agree(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"number of GPUs: 128 in its launcher, 64 in --gpus; .* NAME:128"):
        read([put(tmp_path, "train.sh", GPT3)], Overrides(ranks=64))


def test_missing_keys_are_reported(tmp_path: Path) -> None:
    result = read([put(tmp_path, "train.sh", GPT3.replace("--tokenizer-type GPT2BPETokenizer", ""))])
    assert result.missing == (
        "the vocabulary, which its tokenizer has: add --vocab-size 128256 to it (or to read and write --vocab 128256)",
    )
    given = read(
        [put(tmp_path, "train.sh", GPT3.replace("--tokenizer-type GPT2BPETokenizer", ""))], Overrides(vocab=51200)
    )
    assert given.model is not None
    assert given.model.vocab == 51_200


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("Et*3|(tt|)*29m|L", (3, *(2,) * 29, 0, 0)),
        ("Et|t|t|tL", (1, 1, 1, 1)),
        ("E,t*2|t,t,L", (2, 2)),
        ("Ett|(t|t|)*2tL", (2, 1, 1, 1, 1, 1)),
    ],
)
def test_texts_of_pipeline_layouts_are_parsed_as_stages(text: str, sizes: tuple[int, ...]) -> None:
    assert parse_stages(text, origin="here") == sizes


CORES = Range(
    models=("llama3-8b", "llama3-70b", "gpt3-175b", "qwen3-8b", "qwen3-30b-a3b", "mixtral-8x7b", "deepseek-v3"),
    recipes=(
        "bf16", "bf16", "bf16-grad16", "fp32", "fp16", "fp8", "fp8-param", "fp8-delayed",
        "fp8-delayed-param", "fp8-tiles-param", "fp8-tiles", "mxfp8",
    ),
    acs=("none", "none", "full", "selective", "norm+act", "up+rope", "core+moe"),
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("seed", mark_share(3, range(3)))
def test_written_config_is_read_back(tmp_path: Path, seed: int) -> None:
    drawn = plans("megatron-core", count=20, seed=seed, among=CORES)
    refused = [check_round_trip(plan, to="megatron", folder=tmp_path) for plan in drawn]
    assert refused.count(None) >= 7, [why for why in refused if why]


@pytest.mark.parametrize("name", ["deepseek-v3", "deepseek-v2-lite", "kimi-k2"])
def test_latent_attention_keeps_its_scale_and_its_scaling_of_positions(name: str, tmp_path: Path) -> None:
    """``mscale² / √(qk_head_dim + qk_pos_emb_head_dim)`` (megatron/core/transformer/multi_latent_attention.py)."""
    model = resolve(name)
    job = Job.read({"global_batch": 64, "stack": "megatron-core"}, origin="job")
    written = write(ConfigPlan(model, Layout.parse("dp8 ep8 zero1 mbs1"), job, 8), to="megatron")
    (script,) = written.files.values()
    (tmp_path / "run.sh").write_text(script)
    assert f"--rotary-scaling-factor {model.rope_scaling.factor:g}" in re.sub(r"\.0(?= )", "", script)
    read_back = read([str(tmp_path / "run.sh")], Overrides(ranks=8)).model
    assert read_back is not None
    assert read_back.attention_scale == pytest.approx(model.attention_scale, rel=1e-12)
    if name != "kimi-k2":  # beta_fast is no argument
        assert read_back.rope_scaling == model.rope_scaling


@pytest.mark.parametrize("name", ["deepseek-v3", "kimi-k2", "mistral-small-4"])
def test_bridge_keeps_all_numbers_of_yarn(name: str, tmp_path: Path) -> None:
    model = resolve(name).replace(temperature=None)  # of Mistral's scores, which Bridge has no field for
    job = Job.read({"global_batch": 64, "stack": "megatron-bridge"}, origin="job")
    written = write(ConfigPlan(model, Layout.parse("dp8 ep8 zero1 mbs1"), job, 8), to="bridge")
    (text,) = written.files.values()
    (tmp_path / "run_config.yaml").write_text(text)
    read_back = read([str(tmp_path / "run_config.yaml")], Overrides(ranks=8)).model
    assert read_back is not None
    assert read_back.rope_scaling == model.rope_scaling


@pytest.mark.parametrize(
    ("text", "model", "precision", "reason"),
    [
        (
            "dp2 pp2 zero1 mbs1 ac=full@1",
            "llama3-8b",
            "bf16",
            "recomputes the same on every pipeline rank; use ac=full",
        ),
        ("dp4 zero1 mbs1 ac=qkv", "llama3-8b", "bf16", "recomputes full, selective, or any of norm, act, mlp, moe"),
        ("dp4 zero3 mbs1", "llama3-8b", "bf16", "megatron-core does not support zero3; use zero0 or zero1"),
        ("dp4 zero1 mbs1", "llama3-8b", "fp8-rowwise", "precision fp8-rowwise: Megatron has fp32, fp16, bf16"),
        ("dp4 zero1 mbs1", "gemma2-9b", "bf16", "the config cannot express model 'gemma2-9b'"),
        (
            "dp2 pp2 zero1 mbs1 zb1p",
            "llama3-8b",
            "bf16",
            "megatron-core does not support zb1p; use 1f1b or interleaved",
        ),
    ],
)
def test_inexpressible_layout_is_an_error_with_the_closest_one(
    text: str, model: str, precision: str, reason: str
) -> None:
    plan = ConfigPlan(build_model(model), Layout.parse(text), Job(precision=precision, sequence=2048, global_batch=16))
    with pytest.raises(UserError, match=reason):
        write(plan, to="megatron")


def changed_llama3(folder: Path, *words: str, drop: str = "") -> Reading:
    text = LLAMA3.replace("--grad-reduce-in-bf16 ", "").replace('DTYPE="fp8"', 'DTYPE="bf16"').replace(drop, "")
    text = text.replace("--vocab-size 128256", " ".join(("--vocab-size 128256", *words)))
    return read([put(folder, "train.sh", text)], Overrides(ranks=8))


def test_each_moment_has_its_own_type(tmp_path: Path) -> None:
    words = "--use-precision-aware-optimizer", "--exp-avg-dtype fp8", "--exp-avg-sq-dtype bf16"
    job = changed_llama3(tmp_path, *words).job
    assert job is not None
    assert job.precision.moments_bytes == (1, 2)


@pytest.mark.parametrize(
    ("words", "ac"),
    [
        (("--checkpoint-activations",), "full"),
        (("--recompute-activations",), "selective"),
        (("--recompute-granularity full", "--recompute-method uniform", "--recompute-num-layers 1"), "full"),
        ((), "none"),
    ],
)
def test_old_and_new_arguments_of_recomputation_are_read(words: tuple[str, ...], ac: str, tmp_path: Path) -> None:
    layout = changed_llama3(tmp_path, *words).layout
    assert layout is not None
    assert layout.ac == ac


def test_a_linear_decay_goes_from_the_warm_up_to_the_end(tmp_path: Path) -> None:
    """optimizer_param_scheduler.py: max_lr - (step - warmup) / (decay - warmup) · (max_lr - min_lr), but for a step."""
    words = "--lr-decay-style linear", "--train-iters 1000", "--lr-warmup-iters 200", "--min-lr 1.5e-5"
    job = changed_llama3(tmp_path, *words, drop="--train-samples 1953125000").job
    assert job is not None
    assert (job.learning_rate.warmup_steps, job.learning_rate.decay_steps) == (200, 800)
    for step in (200, 400, 600, 999):
        theirs = 1.5e-4 - (step - 200) / 800 * (1.5e-4 - 1.5e-5)
        assert compute_learning_rate(job.learning_rate, step=step, steps=job.steps) == pytest.approx(
            theirs, rel=2e-2
        ), step


def test_numbers_are_of_the_types_that_megatron_parses() -> None:
    written = []
    for plan in plans("megatron-core", count=60, seed=5):
        with suppress(UserError):  # not all that the stack runs can be written
            written.append(emit_arguments(plan))
    assert len(written) > 20
    for values in written:
        floats = {name for name, value in values.items() if isinstance(value, float)}
        assert floats <= FLOATS, floats - FLOATS
    assert set().union(*written) >= {"seed", "rotary_base", "max_position_embeddings", "seq_length"}
    assert all(values.get("seed", 1) > 0 for values in written)  # initialize.py refuses others
    assert all(values["max_position_embeddings"] >= values["seq_length"] for values in written)


def test_a_rotary_base_that_is_no_whole_number_is_rejected() -> None:
    model = build_model("llama3-8b").replace(rope_theta=10_000.5)
    plan = ConfigPlan(model, Layout(dp=8, zero=1), Job(sequence=8192, global_batch=8), ranks_per_node=8)
    with pytest.raises(UserError, match="use 10000"):
        write(plan, to="megatron")


@pytest.mark.parametrize("fused", [True, False])
def test_a_flag_with_no_is_read_by_its_positive_name_in_a_yaml(fused: bool, tmp_path: Path) -> None:
    text = f"{DEEPSEEK}\ngradient_accumulation_fusion: {str(fused).lower()}\n"
    result = read([put(tmp_path, "args.yaml", text), "TP=2", "PP=16", "EP=64"], Overrides(ranks=2048))
    assert result.job is not None
    assert result.job.stack.wgrad_accumulation.startswith("fused") is fused


@pytest.mark.parametrize("size", [None, 1000])
def test_the_size_of_a_bucket_is_read_and_written(size: int | None, tmp_path: Path) -> None:
    words = () if size is None else ("--ddp-bucket-size", str(size))
    reading = changed_llama3(tmp_path, *words)
    assert reading.job is not None
    assert reading.job.stack.ddp_bucket_size == ((40_000_000, 1_000_000) if size is None else (size, 0))
    assert reading.layout is not None
    plan = ConfigPlan(reading.model, reading.layout, reading.job, ranks_per_node=8)
    (text, *_) = write(plan, to="megatron").files.values()
    assert ("ddp-bucket-size" in text) == (size is not None)


@pytest.mark.parametrize(
    ("flags", "loss"),
    [
        ("", "upcast"),
        ("--cross-entropy-loss-fusion", "upcast_compiled"),
        ("--cross-entropy-loss-fusion --cross-entropy-fusion-impl native", "upcast_compiled"),
        ("--cross-entropy-loss-fusion --cross-entropy-fusion-impl te", "fused"),
    ],
)
def test_both_kernels_of_a_fused_loss_are_read_and_written(flags: str, loss: str, tmp_path: Path) -> None:
    script = LLAMA3.replace("--cross-entropy-loss-fusion", flags)
    reading = read([put(tmp_path, "train.sh", script)])
    assert reading.job is not None
    assert reading.job.stack.loss == loss
    assert reading.layout is not None
    plan = ConfigPlan(reading.model, reading.layout, reading.job, ranks_per_node=8)
    (text, *_) = write(plan, to="megatron").files.values()
    assert ("--cross-entropy-loss-fusion" in text) == (loss != "upcast")
    assert ("--cross-entropy-fusion-impl te" in text) == (loss == "fused")
    again = read([put(tmp_path, "again.sh", text)])
    assert again.job is not None
    assert again.job.stack.loss == loss


def test_a_fused_loss_of_an_unknown_kernel_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cross_entropy_fusion_impl is 'triton'; Megatron has native and te"):
        changed_llama3(tmp_path, "--cross-entropy-fusion-impl", "triton")


def test_tensor_parallel_overlap_without_sequence_parallelism_is_an_error(tmp_path: Path) -> None:
    """NVIDIA/Megatron-LM:megatron/training/arguments.py, validate_args: an assertion."""
    words = "--tensor-model-parallel-size 2", "--tp-comm-overlap"
    with pytest.raises(UserError, match="ends with tp_comm_overlap without sequence_parallel"):
        changed_llama3(tmp_path, *words, drop="--sequence-parallel ")
    job = changed_llama3(tmp_path, *words, "--sequence-parallel").job
    assert job is not None
    assert "tp" in job.stack.overlap


@pytest.mark.parametrize(
    ("layout", "overlap", "megatron", "bridge"),
    [
        ("dp1 tp1 pp4 v2 interleaved", ("dp", "pp"), False, True),
        ("dp1 tp1 pp4 v2 interleaved", ("dp",), True, False),
        ("dp1 tp1 pp4 1f1b", ("dp", "pp"), False, False),
    ],
)
def test_written_configs_overlap_messages_between_stages_as_the_plan_does(
    layout: str, overlap: tuple[Axis, ...], megatron: bool, bridge: bool
) -> None:
    """Megatron-LM overlaps them unless a flag says no, Megatron-Core's fields unless they say yes."""
    texts: dict[str, str] = {}
    for software, name in (("megatron", "megatron-core"), ("bridge", "megatron-bridge")):
        job = Job(sequence=2048, global_batch=16, stack=build_stack(name).replace(overlap=overlap))
        plan = ConfigPlan(build_model("llama3-8b"), Layout.parse(layout), job)
        (texts[software],) = write(plan, to=software).files.values()
    script, config = texts["megatron"], texts["bridge"]
    assert ("--no-overlap-p2p-communication" in script) is megatron
    assert ("overlap_p2p_comm: true" in config) is bridge
    assert ("batch_p2p_comm: false" in config) is bridge
