"""What writers say of optimizer, learning rate, clipping, seed and steps: exactly what was asked, and read back so."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from fivefold.errors import UserError
from fivefold.interop.equivalence import resolve_rate
from fivefold.interop.format import ConfigPlan, Overrides
from fivefold.interop.read import read
from fivefold.interop.registry import FORMATS, find_format
from fivefold.interop.write import describe_model, write
from fivefold.job import Job, get_recipe
from fivefold.layout.spec import Layout
from fivefold.model.catalog import build_model as model_named
from fivefold.optimizers import KINDS
from fivefold.stack.catalog import build_stack as stack_named
from fivefold.update import LearningRate, Optimizer
from tests.selection import mark_share

LAYOUTS = {
    "fivefold": "dp8 zero3 mbs2", "torchtitan": "dp8 zero3 mbs2", "torchtitan-0.2": "dp8 zero3 mbs2",
    "nanotron": "dp8 zero1 mbs2", "megatron": "dp4 tp2 zero1 mbs1", "bridge": "dp4 tp2 zero1 mbs1",
    "accelerate": "dp8 zero3 mbs2", "deepspeed": "dp8 zero2 mbs2",
    "axolotl": "dp8 zero3 mbs2", "llamafactory": "dp8 zero3 mbs2", "trl": "dp8 zero3 mbs2",
    "torchtune": "dp8 zero3 mbs2",
}  # fmt: skip
PRECISIONS = {
    "fivefold": "bf16", "torchtitan": "bf16", "torchtitan-0.2": "bf16", "nanotron": "bf16", "megatron": "bf16",
    "bridge": "bf16", "deepspeed": "bf16", "torchtune": "fp32",
}  # fmt: skip
OPTIMIZER = Optimizer(betas=(0.8, 0.97), clip=0.7, weight_decay=0.03, epsilon=1e-7)
RATES = {
    "cosine": LearningRate(kind="cosine", peak=7e-4, floor=0.2, warmup_steps=13),
    "cosine-to-zero": LearningRate(kind="cosine", peak=7e-4, floor=0.0, warmup_steps=0),
    "constant": LearningRate(kind="constant", peak=7e-4, warmup_steps=13),
    "wsd": LearningRate(kind="wsd", peak=7e-4, floor=0.2, warmup_steps=13, decay_steps=30),
    "wsd-default": LearningRate(kind="wsd", peak=7e-4, floor=0.0, warmup_steps=13),
}
# As each software calls them, of the plan with RATES["wsd"]: not by the tables of which reader and writer are made.
LINES: dict[str, tuple[str, ...]] = {
    "fivefold": (
        "peak = 0.0007", "floor = 0.2", "warmup_steps = 13", "decay_steps = 30", "seed = 9", "steps = 170",
        "clip = 0.7", "betas = [0.8, 0.97]", "weight_decay = 0.03", "epsilon = 1e-07",
    ),
    "torchtitan": (
        "lr=0.0007", "betas=(0.8, 0.97)", "eps=1e-07", "weight_decay=0.03", "max_norm=0.7", "steps=170",
        "warmup_steps=13", "decay_type='linear'", "min_lr_factor=0.2", "decay_ratio=0.17647058823529413", "seed=9",
    ),
    "torchtitan-0.2": (
        "lr = 0.0007", "beta1 = 0.8", "beta2 = 0.97", "eps = 1.0e-07", "weight_decay = 0.03", "max_norm = 0.7",
        "steps = 170", "warmup_steps = 13", 'decay_type = "linear"', "min_lr_factor = 0.2", "seed = 9",
    ),
    "nanotron": (
        "learning_rate: 0.0007", "adam_beta1: 0.8", "adam_beta2: 0.97", "adam_eps: 1.0e-07", "weight_decay: 0.03",
        "clip_grad: 0.7", "train_steps: 170", "lr_warmup_steps: 13", "lr_decay_steps: 30", "min_decay_lr: 0.00014",
        "seed: 9", 'lr_decay_style: "linear"', "lr_decay_starting_step: 140",
    ),
    "megatron": (
        "--lr 0.0007", "--adam-beta1 0.8", "--adam-beta2 0.97", "--adam-eps 1e-07", "--weight-decay 0.03",
        "--clip-grad 0.7", "--train-iters 170", "--lr-warmup-iters 13", "--lr-wsd-decay-iters 30",
        "--min-lr 0.00014", "--seed 9", "--lr-decay-style WSD", "--lr-wsd-decay-style linear",
    ),
    "bridge": (
        "lr: 0.0007", "adam_beta1: 0.8", "adam_beta2: 0.97", "adam_eps: 1.0e-07", "weight_decay: 0.03",
        "clip_grad: 0.7", "train_iters: 170", "lr_warmup_iters: 13", "lr_wsd_decay_iters: 30", "min_lr: 0.00014",
        "rng:\n  _target_: megatron.bridge.training.config.RNGConfig\n  seed: 9", 'lr_decay_style: "WSD"',
        'lr_wsd_decay_style: "linear"', "  random_seed: 9",
    ),
    "accelerate": (
        "learning_rate: 0.0007", "adam_beta1: 0.8", "adam_beta2: 0.97", "adam_epsilon: 1.0e-07", "weight_decay: 0.03",
        "max_grad_norm: 0.7", "max_steps: 170", "warmup_steps: 13", 'lr_scheduler_type: "warmup_stable_decay"',
        "num_decay_steps: 30", "min_lr_ratio: 0.2", 'decay_type: "linear"', "seed: 9", 'optim: "adamw_torch_fused"',
    ),
    "torchtune": (
        "lr: 0.0007", "betas: [0.8, 0.97]", "eps: 1.0e-07", "weight_decay: 0.03", "clip_grad_norm: 0.7",
        "max_steps_per_epoch: 170", "num_warmup_steps: 13", "seed: 9", '_component_: "torch.optim.AdamW"',
    ),
}  # fmt: skip
WRITTEN_OPTIMIZERS = {
    "fivefold": set(KINDS),
    "megatron": {"adamw", "sgd", "muon"},
    "bridge": {"adamw", "sgd", "muon"},
    "accelerate": {"adamw", "adamw8bit", "adamw4bit", "adafactor", "sgd"},
    "deepspeed": {"adamw", "adamw8bit", "adamw4bit", "adafactor", "sgd"},
    "axolotl": {"adamw", "adamw8bit", "adamw4bit", "adafactor", "sgd"},
    "llamafactory": {"adamw", "adamw8bit", "adamw4bit", "adafactor", "sgd"},
    "trl": {"adamw", "adamw8bit", "adamw4bit", "adafactor", "sgd"},
    "torchtitan": {"adamw"},
    "torchtitan-0.2": {"adamw"},
    "nanotron": {"adamw"},
    "torchtune": {"adamw", "adamw8bit", "adamw4bit", "sgd"},
}
# Rates that a format expresses, if not all; the others are written as the nearest, with a remark.
WRITTEN_RATES = {"torchtune": {"cosine-to-zero", "constant"}}
LINES["trl"] = LINES["llamafactory"] = LINES["accelerate"]
LINES["axolotl"] = tuple(
    line.replace("lr_scheduler_type", "lr_scheduler").replace("optim:", "optimizer:") for line in LINES["accelerate"]
)
LINES["deepspeed"] = (*LINES["accelerate"], '"gradient_clipping": 0.7', '"grad_accum_dtype": "fp32"')


def plan(name: str, rate: LearningRate) -> ConfigPlan:
    model = model_named("llama2-7b" if name == "nanotron" else "llama3-8b")
    job = Job(
        sequence=2048,
        global_batch=32,
        precision=get_recipe(PRECISIONS.get(name, "bf16-grad16")),
        steps=170,
        seed=9,
        stack=stack_named(find_format(name).stack or "fsdp2"),
        learning_rate=rate,
        optimizer=OPTIMIZER,
    )
    return ConfigPlan(model, Layout.parse(LAYOUTS[name]), job, 8, "h100:8")


def test_every_format_that_is_written_and_read_is_tested() -> None:
    assert {form.name for form in FORMATS if form.emit and form.parse} == set(LAYOUTS) == set(LINES)


@pytest.mark.parametrize("rate", mark_share(2, RATES))
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_update_is_read_back_exactly(name: str, rate: str, tmp_path: Path) -> None:
    asked = plan(name, RATES[rate])
    written = write(asked, to=name)
    for file, text in written.files.items():
        (tmp_path / file).write_text(text)
    back = read([str(tmp_path / next(iter(written.files)))], Overrides(ranks=8)).job
    assert back is not None

    def update(job: Job) -> dict[str, Any]:
        schedule = resolve_rate(job.learning_rate, steps=job.steps)
        return {"optimizer": job.optimizer, "rate": schedule, "seed": job.seed, "steps": job.steps}

    if rate not in WRITTEN_RATES.get(name, RATES):
        (remark,) = (remark for remark in written.remarks if "the learning rate is written with" in remark)
        expressed = dict(resolve_rate(back.learning_rate, steps=back.steps))
        for field, wanted in resolve_rate(asked.job.learning_rate, steps=asked.job.steps):
            differs = f"{field}={expressed[field]!r} instead of {wanted!r}"
            assert (differs in remark) == (expressed[field] != wanted)
        return
    assert update(back) == update(asked.job)
    # torchtitan always separates them
    documents = "the job is written with documents='separate' instead of 'joined' (same cost)"
    remarks = [remark for remark in written.remarks if remark != documents]
    assert not [remark for remark in remarks if "learning rate" in remark or "the job" in remark]


@pytest.mark.parametrize("name", LAYOUTS)
def test_another_optimizer_is_read_back_or_is_an_error_by_name(name: str, tmp_path: Path) -> None:
    asked, read_back, errors = plan(name, RATES["cosine"]), set[str](), list[str]()
    for kind in KINDS:
        job = asked.job.replace(optimizer=Optimizer(kind=kind))
        try:
            written = write(asked._replace(job=job), to=name)
        except UserError as error:
            errors.append(str(error))
            continue
        for file, text in written.files.items():
            (tmp_path / file).write_text(text)
        back = read([str(tmp_path / next(iter(written.files)))], Overrides(ranks=8)).job
        assert back is not None
        assert back.optimizer.kind == kind
        read_back.add(kind)
    assert read_back == WRITTEN_OPTIMIZERS[name]
    assert all("optimizer" in error for error in errors)


@pytest.mark.parametrize("name", LINES)
def test_the_written_file_has_the_keys_of_the_software(name: str) -> None:
    text = "\n".join(write(plan(name, RATES["wsd"]), to=name).files.values())
    for line in LINES[name]:
        assert re.search(rf"(?<![\w-]){re.escape(line)}(?![1-9])", text), line


@pytest.mark.parametrize("name", ["megatron", "bridge", "nanotron"])
def test_every_job_field_that_a_config_cannot_express_is_reported(name: str) -> None:
    job = Job(documents="separate", imbalance=1.5, seed=0, global_batch=64)
    written = write(ConfigPlan(model_named("llama3-8b"), Layout.parse("dp8 zero1 mbs1"), job), to=name)
    said = "\n".join(written.remarks)
    assert "documents='joined' instead of 'separate'" in said
    assert "imbalance=1.5 is an assumption of predictions" in said
    assert re.search(r"^no data set is given, so it trains on .+: put yours there$", said, re.MULTILINE)
    if name == "megatron":
        assert "the job is written with documents='joined' instead of 'separate', seed=1234 instead of 0" in said


def test_training_settings_of_a_model_that_a_config_cannot_express_are_reported() -> None:
    model = model_named("mixtral-8x7b").replace(dropout=0.1)
    assert model.moe is not None
    model = model.replace(moe=model.moe.replace(capacity=1.5))
    read_model = model_named("mixtral-8x7b")
    assert list(describe_model(model, read_model)) == [
        f"dropout is written as {read_model.dropout_rates}, not {model.dropout_rates}",
        "the capacity factor of experts is written as None, not 1.5",
    ]


def test_a_learning_rate_that_would_be_another_is_remarked(monkeypatch: pytest.MonkeyPatch) -> None:
    from fivefold.interop.huggingface import emit as writer

    monkeypatch.setattr(writer, "emit_schedule", lambda job: {"lr_scheduler_type": "cosine"})
    written = write(plan("deepspeed", RATES["wsd"]), to="deepspeed")
    assert any("the learning rate is written with" in remark for remark in written.remarks)


@pytest.mark.parametrize(
    ("name", "model", "layout", "lines"),
    [
        ("accelerate", "llama3-8b", "dp4 cp2 zero3 mbs1", ("dp_replicate_size: 1", "dp_shard_size: 4", "cp_size: 2")),
        ("accelerate", "llama3-8b", "dp4 cp2 zero3/4 mbs1", ("dp_replicate_size: 2", "dp_shard_size: 2", "cp_size: 2")),
        (
            "megatron",
            "deepseek-v3",
            "dp8 ep8 zero1 mbs1",
            ("--moe-router-num-groups 8", "--moe-router-group-topk 4", "--moe-shared-expert-intermediate-size 1536"),
        ),
    ],
)
def test_layout_and_experts_are_written_with_the_keys_of_the_software(
    name: str, model: str, layout: str, lines: tuple[str, ...]
) -> None:
    wanted = model_named(model)
    if wanted.moe is not None:
        wanted = wanted.replace(moe=wanted.moe.replace(shared_ffn=1536))
    asked = plan(name, RATES["cosine"])._replace(model=wanted, layout=Layout.parse(layout))
    text = "\n".join(write(asked, to=name).files.values())
    for line in lines:
        assert re.search(rf"{re.escape(line)}(?![0-9])", text), line
