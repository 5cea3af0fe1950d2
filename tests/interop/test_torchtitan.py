"""torchtitan's configs: published ones are read as their files say, and what is written is read back."""

from __future__ import annotations

from pathlib import Path

import pytest

from fivefold.errors import UserError
from fivefold.interop.format import ConfigPlan, Overrides
from fivefold.interop.read import read
from fivefold.interop.torchtitan.flavors import list_flavors, resolve_flavor
from fivefold.interop.write import write
from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.layout.validity.stack import can_express
from fivefold.model.catalog import build_model
from fivefold.planner.search.space import Space
from fivefold.results.reading import Reading
from fivefold.stack.catalog import build_stack
from tests.interop.draws import Range, check_round_trip, plans

# pytorch/torchtitan, shortened to what costs something. ranks: as the file's head, or its name, says.
LLAMA3_405B = """# @01424cb:torchtitan/models/llama3/train_configs/llama3_405b.toml: a preset for 128 H100 GPUs
[model]
name = "llama3"
flavor = "405B"
converters = "float8"
[optimizer]
lr = 8e-5
[training]
batch_size = 2
seq_len = 8192
steps = 3000
compile = true
[parallelism]
data_parallel_shard_degree = -1
tensor_parallel_degree = 8
enable_async_tensor_parallel = true
[activation_checkpoint]
mode = 'full'
[float8]
enable_fsdp_float8_all_gather = true
filter_fqns = "output"
"""
LLAMA3_70B_8XB200 = """# @25079f1:configs/llama3_70b-8xb200-8k.toml
[model]
name = "llama3"
flavor = "70B"
converters = []
[training]
local_batch_size = 6
seq_len = 8192
dtype = "bfloat16"
mixed_precision_reduce = "bfloat16"
[parallelism]
data_parallel_shard_degree = 8
[activation_checkpoint]
mode = "full"
[optimizer]
early_step_in_backward = true
[compile]
enable = true
"""
DEEPSEEK_671B = """# @0a8d2b0:torchtitan/models/deepseek_v3/train_configs/deepseek_v3_671b.toml
[model]
name = "deepseek_v3"
flavor = "671B"
[training]
local_batch_size = 4
seq_len = 4096
[parallelism]
expert_parallel_degree = 32
pipeline_parallel_degree = 4
pipeline_parallel_schedule = "Interleaved1F1B"
[activation_checkpoint]
mode = "selective"
selective_ac_option = 'op'
[compile]
enable = true
components = ["loss"]
"""
QWEN3_06B = """# @51e84ed:torchtitan/models/qwen3/train_configs/qwen3_0.6b.toml
[model]
name = "qwen3"
flavor = "0.6B"
[training]
local_batch_size = 4
seq_len = 4096
[activation_checkpoint]
mode = "selective"
selective_ac_option = "2"
[checkpoint]
enable = false
"""


def read_config_text(text: str, folder: Path, *, ranks: int | None, name: str = "config.toml") -> Reading:
    (folder / name).write_text(text, encoding="utf-8")
    return read([str(folder / name)], Overrides(ranks=ranks))


@pytest.mark.parametrize(
    ("text", "ranks", "parameters", "layout", "job", "strange"),
    [
        (LLAMA3_405B, 128, 405.9e9, "dp16 tp8 zero3 mbs2 ac=full", (8192, 32, "fp8-wire"), []),
        (
            LLAMA3_70B_8XB200, 8, 70.6e9, "dp8 zero3 mbs6 ac=full", (8192, 48, "bf16-full"),
            ["training.mixed_precision_reduce", "optimizer.early_step_in_backward"],
        ),
        (
            DEEPSEEK_671B, 256, 671e9,
            "dp64 pp4 ep32 v2 zero2 interleaved mbs1 ac=norm+rope+act stages=7-8x6-6", (4096, 256, "bf16"),
            ["activation_checkpoint.selective_ac_option"],
        ),
        (QWEN3_06B, 8, 0.596e9, "dp8 zero3 mbs4 ac=full/2", (4096, 32, "bf16"), []),
    ],
    ids=["llama3-405b", "llama3-70b-8xb200", "deepseek-671b", "qwen3-0.6b"],
)  # fmt: skip
def test_published_configs_of_torchtitan_are_read(
    text: str, ranks: int, parameters: float, layout: str, job: tuple[int, int, str], strange: list[str], tmp_path: Path
) -> None:
    result = read_config_text(text, tmp_path, ranks=ranks)
    assert result.model is not None
    assert result.job is not None
    assert result.model.parameters == pytest.approx(parameters, rel=2e-3)
    assert str(result.layout) == layout
    assert (result.job.sequence, result.job.global_batch, result.job.precision.name) == job
    assert [said.key for said in (*result.not_understood, *result.approximated)] == strange
    assert (result.job.stack.name, result.missing) == ("torchtitan", ())


def test_checkpoints_that_no_key_describes_are_those_of_the_stack(tmp_path: Path) -> None:
    result = read_config_text(LLAMA3_405B, tmp_path, ranks=128)
    assert result.job is not None
    assert result.job.stack.early_stop is build_stack("torchtitan").early_stop is False  # since 0.2.0


def test_replicated_shards_are_read_as_shard_groups(tmp_path: Path) -> None:
    degrees = "data_parallel_replicate_degree = 4\ndata_parallel_shard_degree = 4"
    text = LLAMA3_405B.replace("data_parallel_shard_degree = -1", degrees)
    assert str(read_config_text(text, tmp_path, ranks=128).layout) == "dp16 tp8 zero3/4 mbs2 ac=full"


def test_omitted_key_has_the_default_of_the_version(tmp_path: Path) -> None:
    result = read_config_text(QWEN3_06B, tmp_path, ranks=8)
    left = {said.key: said.value for said in result.defaulted}
    assert left["training.global_batch_size"] == "-1"
    assert left["parallelism.fsdp_reshard_after_forward"] == "default"
    assert left["compile.enable"] == "false"
    assert result.job is not None
    assert (result.job.stack.compile, result.job.stack.kernels) == (False, "plain")


def test_without_a_number_of_gpus_the_layout_is_missing(tmp_path: Path) -> None:
    result = read_config_text(QWEN3_06B, tmp_path, ranks=None)
    assert (result.layout, result.job) == (None, None)
    assert result.model is not None
    assert "--gpus" in result.missing[0]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            ("data_parallel_shard_degree = -1", "data_parallel_shard_degree = 4"),
            r"=1·4·1·8·1=32, but there are 128 ranks",
        ),
        (("tensor_parallel_degree = 8", "tensor_parallel_degree = 3"), "128 ranks are not a multiple of .*=3"),
        (
            ("tensor_parallel_degree = 8", "tensor_parallel_degree = 'x'"),
            "must be a number, not 'x'",
        ),
        (("batch_size = 2", "batch_size = 2\nglobal_batch_size = 33"), "not a multiple of local_batch_size·dp=2·16"),
        (('flavor = "405B"', 'flavor = "406B"'), "unknown flavor of torchtitan's llama3 '406B'; did you mean 405B"),
        (('name = "llama3"', 'name = "flux"'), "unknown model of torchtitan 'flux'"),
        (("[model]", "[model"), "not valid TOML"),
    ],
)
def test_contradictions_are_one_line_errors(change: tuple[str, str], reason: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=reason) as refused:
        read_config_text(LLAMA3_405B.replace(*change), tmp_path, ranks=128)
    assert "\n" not in str(refused.value)


def test_unknown_keys_are_reported(tmp_path: Path) -> None:
    result = read_config_text(QWEN3_06B.replace("seq_len", "secret_kernel = 3\nseq_len"), tmp_path, ranks=8)
    assert [(said.key, said.means) for said in result.not_understood] == [
        ("training.secret_kernel", "is not a known key of torchtitan 0.2.2")
    ]


CONFIG = '''
from torchtitan.models.llama3 import model_registry
from torchtitan.trainer import Trainer

def small() -> Trainer.Config:
    spec = model_registry("1B", attn_backend="varlen")
    return Trainer.Config(
        model_spec=spec,
        training=TrainingConfig(local_batch_size=2, seq_len=4096, disable_cuda_graphs=True),
        activation_checkpoint=FullAC.Config(),
        loss=ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config()),
    )

def wide() -> Trainer.Config:
    """As small, over two."""
    config = small()
    config.parallelism = ParallelismConfig(tensor_parallel_degree=2, fsdp_reshard_after_forward="never")
    config.activation_checkpoint = None
    if SOMETHING:
        config.training.seq_len = 1
    return config
'''


def test_python_configs_are_read_and_not_run(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(CONFIG + "\nraise SystemExit('was run')\n")
    result = read([f"{tmp_path}/mine.py:wide"], Overrides(ranks=8))
    assert result.job is not None
    assert (str(result.layout), result.job.stack.reshard) == ("dp4 tp2 zero3 mbs2", "backward")
    assert (result.job.stack.loss, result.job.stack.cuda_graphs, result.job.documents) == (
        "chunked",
        "none",
        "separate",
    )
    assert [(said.key, said.value) for said in result.not_understood] == [("line 19", "if SOMETHING:")]
    with pytest.raises(UserError, match=r"holds 2 configs; name one, as .*mine.py:small"):
        read([f"{tmp_path}/mine.py"], Overrides(ranks=8))
    with pytest.raises(UserError, match="did you mean wide"):
        read([f"{tmp_path}/mine.py:wyde"], Overrides(ranks=8))


TITANS = Range(
    models=("llama3-8b", "llama3-70b", "qwen3-8b", "qwen3-30b-a3b", "deepseek-v3"),
    recipes=("bf16", "bf16", "bf16", "fp32"),
    acs=("none", "norm+rope+act", "full", "full", "full/2"),
)


@pytest.mark.slow
@pytest.mark.parametrize("to", ["torchtitan", "torchtitan-0.2"])
def test_written_config_is_read_back(to: str, tmp_path: Path) -> None:
    refused = [check_round_trip(plan, to=to, folder=tmp_path) for plan in plans("torchtitan", count=40, among=TITANS)]
    assert refused.count(None) >= 15
    assert not any("\n" in why for why in refused if why)


@pytest.mark.parametrize(
    ("text", "model", "precision", "to", "reason"),
    [
        (
            "dp2 pp2 zero3 mbs1 ac=full/2@1",
            "llama3-8b",
            "bf16",
            "torchtitan",
            "on every pipeline rank; use ac=full/2",
        ),
        ("dp4 zero3 mbs1 ac=selective", "llama3-8b", "bf16", "torchtitan", "no such groups.*use ac=norm.rope.act"),
        ("dp4 zero2 mbs1", "llama3-8b", "bf16", "torchtitan", "the nearest is zero3 with --set reshard=backward"),
        ("dp4 zero0 mbs1", "llama3-8b", "bf16", "torchtitan-0.2", "use zero3, precision fp32"),
        (
            "dp4 zero1 mbs1",
            "llama3-8b",
            "bf16",
            "torchtitan",
            "torchtitan does not support zero1; use zero0 or zero2 or zero3",
        ),
        ("dp4 zero3 mbs1", "gpt3-175b", "bf16", "torchtitan-0.2", r"the nearest is gpt_oss 120b"),
        ("dp4 zero3 mbs1", "gpt3-175b", "bf16", "torchtitan", "torchtitan's Llama has"),
        ("dp4 tp2 etp2 zero3 mbs1", "qwen3-30b-a3b", "fp8", "torchtitan", "experts in fp8 are not written"),
    ],
)
def test_inexpressible_layout_is_an_error_with_the_closest_one(
    text: str, model: str, precision: str, to: str, reason: str
) -> None:
    plan = ConfigPlan(build_model(model), Layout.parse(text), Job(precision=precision, sequence=2048, global_batch=16))
    with pytest.raises(UserError, match=reason):
        write(plan, to=to)


@pytest.mark.parametrize("to", ["torchtitan", "torchtitan-0.2"])
def test_selective_recomputation_that_is_read_is_written_and_searched(to: str, tmp_path: Path) -> None:
    text = """[model]
name = "llama3"
flavor = "8B"
[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"
"""
    reading = read_config_text(text, tmp_path, ranks=8)
    assert reading.model is not None
    assert reading.layout is not None
    assert reading.job is not None
    assert reading.layout.ac == "norm+rope+act"
    assert check_round_trip(ConfigPlan(reading.model, reading.layout, reading.job), to=to, folder=tmp_path) is None
    assert can_express(reading.layout, model=reading.model, job=reading.job)
    assert "norm+rope+act" in Space(reading.model, reading.job, world=8).recomputations


def test_a_llama_of_any_size_is_spelled_out(tmp_path: Path) -> None:
    plan = ConfigPlan(build_model("tiny"), Layout.parse("dp2 tp2 zero3 mbs1"), Job(sequence=256, global_batch=8))
    assert check_round_trip(plan, to="torchtitan", folder=tmp_path) is None


def test_flavors_have_as_many_parameters_as_their_names_say() -> None:
    said = {"8B": 8.03e9, "70B": 70.55e9, "405B": 405.85e9, "1B": 1.236e9, "3B": 3.213e9}
    assert {name: resolve_flavor("llama3", name).parameters for name in said} == {
        name: pytest.approx(size, rel=1e-3) for name, size in said.items()
    }
    assert list_flavors("deepseek_v3")["671B"].parameters == pytest.approx(671e9, rel=1e-3)


def test_supported_keys_are_in_the_input_records(tmp_path: Path) -> None:
    deep = (
        "from torchtitan.models.deepseek_v3 import model_registry\ndef deep() -> Trainer.Config:\n"
        '    return Trainer.Config(model_spec=model_registry("16B", num_mtp_layers=1), '
        "training=TrainingConfig(disable_cuda_graphs=True))  # torchtitan\n"
    )
    result = read_config_text(deep, tmp_path, ranks=8, name="deep.py")
    assert result.model is not None
    assert result.model.mtp is not None
    assert result.model.mtp.depth == 1
    paired = DEEPSEEK_671B.replace("Interleaved1F1B", "DualPipeV").replace("'op'", "'2'")
    reading = read_config_text(paired, tmp_path, ranks=256)
    assert reading.job is not None
    assert reading.job.stack.pairs


def test_a_launch_command_selects_a_config_and_overrides_its_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "torchtitan" / "models" / "llama3"
    place.mkdir(parents=True)
    (place / "config_registry.py").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    line = "torchrun --nproc_per_node 8 -m torchtitan.train --module llama3 --config small --training.seq_len 1024"
    result = read(line.split())
    assert result.job is not None
    assert (str(result.layout), result.job.sequence) == ("dp8 zero3 mbs2 ac=full", 1024)
    with pytest.raises(UserError, match=r"models/qwen3/config_registry\.py was not found next to it"):
        read(line.replace("llama3", "qwen3").split())


def test_without_a_share_the_rate_decays_from_the_warm_up_to_the_end(tmp_path: Path) -> None:
    """lr_scheduler.py: ``decay_ratio`` None is a decay of training_steps - warmup_steps, with no stable phase."""
    text = LLAMA3_405B.replace("[parallelism]", "[lr_scheduler]\nwarmup_steps = 600\n[parallelism]")
    job = read_config_text(text, tmp_path, ranks=128).job
    assert job is not None
    rate = job.learning_rate
    assert (rate.kind, rate.warmup_steps, rate.decay_steps, job.steps) == ("wsd", 600, 2400, 3000)
