"""Fine-tuning against TRL's SFTTrainer and DPOTrainer on the same records: loss, rewards and gradients of a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fivefold.adapter import TARGETS, Adapter
from fivefold.job import Job, Optimizer, get_recipe
from fivefold.layout.spec import Layout
from fivefold.model.catalog import resolve
from fivefold.trainer.build import Built, build
from fivefold.trainer.checkpoint import huggingface_import, peft_adapter
from fivefold.trainer.data.loader import Loader
from fivefold.trainer.data.packing import PackedLoader, PairLoader
from fivefold.trainer.data.prepare import prepare
from fivefold.trainer.data.shards import Shards
from fivefold.trainer.data.supervised import DataFormat, sample_format
from fivefold.trainer.engine import Engine, Rewards
from tests.trainer.data.conversations import (
    CHATML,
    MARKED,
    completions,
    conversations,
    preferences,
    write_lines,
    write_tokenizer,
)

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
transformers = pytest.importorskip("transformers")

SEQUENCE, SAMPLES, VOCAB = 96, 24, 400
Gradients = dict[str, Tensor]


@pytest.fixture(autouse=True)
def disable_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL compiles its loss; no hub is asked."""
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A small Llama with random weights, as transformers saves it."""
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=48,
        intermediate_size=100,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def peft_config(adapter: Adapter | None) -> Any:
    """The adapter as peft's config; None without one."""
    if adapter is None:
        return None
    peft = pytest.importorskip("peft")
    targets = list(TARGETS) if adapter.targets == ("all-linear",) else list(adapter.targets)
    return peft.LoraConfig(r=adapter.rank, lora_alpha=adapter.scale_numerator, target_modules=targets)


def perturb_factors(model: Any) -> None:
    """Replace the zeros of every factor B, so that A has a gradient."""
    torch.manual_seed(3)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            weight.data.normal_(0, 0.05)


def step_of_trl(
    base: Path, tokenizer: Path, records: list[Any], out: Path, adapter: Adapter | None, **settings: Any
) -> float:
    """The loss of a step over all records.

    ``out``: a folder for its gradients, as weights, and for the adapter before the step.
    """
    model = transformers.LlamaForCausalLM.from_pretrained(base, dtype=torch.float32)
    trainer = trl.SFTTrainer(
        model,
        args=trl.SFTConfig(**step_settings(out, accumulated=len(records)), **settings),  # all, as packing makes fewer
        train_dataset=datasets.Dataset.from_list(records),
        processing_class=transformers.AutoTokenizer.from_pretrained(tokenizer),
        peft_config=peft_config(adapter),
    )
    if adapter is not None:
        perturb_factors(trainer.model)
        trainer.model.save_pretrained(out / "adapter")
    return run_step(trainer, out)


def step_settings(out: Path, *, accumulated: int, sequence: int = SEQUENCE) -> dict[str, Any]:
    """The settings of one step on a CPU that changes no weight."""
    return {
        "output_dir": str(out / "trl"),
        "max_length": sequence,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": accumulated,
        "max_steps": 1,
        "learning_rate": 0.0,
        "optim": "sgd",
        "max_grad_norm": 0,
        "bf16": False,
        "use_cpu": True,
        "gradient_checkpointing": False,
        "save_strategy": "no",
        "report_to": [],
    }


def run_step(trainer: Any, out: Path) -> float:
    """The loss of the step of a trainer, whose gradients become the weights of the folder ``gradients``."""
    gradients: Gradients = {}

    class Collect(transformers.TrainerCallback):  # type: ignore[misc]
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            gradients.update({name: x.grad.clone() for name, x in model.named_parameters() if x.requires_grad})

    trainer.add_callback(Collect())
    loss = float(trainer.train().training_loss)
    with torch.no_grad():
        for name, weight in trainer.model.named_parameters():
            if weight.requires_grad:
                weight.copy_(gradients[name])
    trainer.model.save_pretrained(out / "gradients")
    return loss


def step_of_ours(
    base: Path, out: Path, data: Path, text: str, packing: str, excess: str, adapter: Adapter | None
) -> tuple[float, float, int]:
    """The loss of a step over all samples, the largest error of a gradient by its norm, and the targets with a loss."""
    model, layout, shards = resolve(str(base / "config.json")), Layout.parse(text), Shards.open(data)
    loader = PackedLoader(shards, sequence=SEQUENCE, seed=0, packing=packing, excess=excess)  # type: ignore[arg-type]
    batch = loader.windows
    job = Job(
        sequence=SEQUENCE,
        global_batch=batch,
        objective="sft",
        precision=get_recipe("fp32"),
        optimizer=Optimizer(clip=0),
        adapter=adapter,
    )
    built = built_from(base, model, layout, job, factors=out / "adapter")
    engine = Engine(built, model=model, layout=layout, job=job)
    counted = loader.count_targets(np.arange(batch))
    loss = engine.step(batch_of(loader, batch), counted=counted).loss
    return loss, measure_gradients(built, base, out, model, layout, job), counted


def measure_gradients(built: Built, base: Path, out: Path, model: Any, layout: Layout, job: Job) -> float:
    """The largest error of a gradient by its norm, against those of the folder ``gradients``."""
    gradients = out / "gradients"
    there = built_from(gradients if job.adapter is None else base, model, layout, job, factors=gradients)
    theirs = {shard.name: shard.weight.detach() for shard in there.shards}
    return max(
        float((shard.weight.grad - theirs[shard.name]).norm() / theirs[shard.name].norm())  # type: ignore[operator]
        for shard in built.shards
    )


def built_from(folder: Path, model: Any, layout: Layout, job: Job, *, factors: Path) -> Built:
    """A model with the weights of ``folder``, and with the ``factors`` of peft if the job has an adapter."""
    built = build(model=model, layout=layout, job=job, device=torch.device("cpu"))
    huggingface_import.start(folder, built=built, model=model)
    if job.adapter is not None:
        peft_adapter.start(factors, base=folder, built=built, model=model, job=job)
    return built


def batch_of(loader: Loader, batch: int) -> Tensor:
    rows = loader.batch(0, global_batch=batch, rank=0, ranks=1, micro_batches=batch, mbs=1)
    return torch.from_numpy(rows)


MESSAGES, COMPLETIONS = conversations(SAMPLES), completions(SAMPLES)
CHATS = [
    {"prompt": record["messages"][:-1], "completion": record["messages"][-1:]} for record in conversations(SAMPLES)
]


@pytest.mark.parametrize(
    ("kind", "records", "template", "packing", "loss_on", "settings", "adapter"),
    [
        ("messages", MESSAGES, MARKED, "best-fit", "replies", {"packing": True, "assistant_only_loss": True}, None),
        ("messages", MESSAGES, MARKED, "none", "replies", {"assistant_only_loss": True}, None),
        ("messages", MESSAGES, CHATML, "none", "all", {}, None),
        ("completions", COMPLETIONS, CHATML, "best-fit", "replies", {"packing": True}, None),
        ("completions", CHATS, CHATML, "none", "replies", {}, None),
        ("messages", MESSAGES, MARKED, "none", "replies", {"assistant_only_loss": True}, Adapter(rank=4, alpha=12)),
        (
            "completions",
            COMPLETIONS,
            CHATML,
            "best-fit",
            "replies",
            {"packing": True},
            Adapter(rank=3, targets=("q_proj", "v_proj", "down_proj")),
        ),
    ],
    ids=("packed", "padded", "all", "completions", "chats", "LoRA", "LoRA on some layers"),
)
def test_a_step_equals_that_of_trl(
    forked: Any,
    base: Path,
    tmp_path: Path,
    kind: DataFormat,
    records: list[Any],
    template: str,
    packing: str,
    loss_on: Any,
    settings: dict[str, Any],
    adapter: Adapter | None,
) -> None:
    tokenizer = write_tokenizer(tmp_path / "tokenizer", template=template)
    theirs = step_of_trl(base, tokenizer, records, tmp_path, adapter, **settings)
    prepare(
        str(write_lines(tmp_path / "lines.jsonl", records)),
        tokenizer=str(tokenizer),
        directory=tmp_path / "data",
        holdout=0,
        samples=sample_format(kind, loss_on=loss_on, tokenizer=str(tokenizer)),
    )
    ((ours, error, counted),) = forked(
        1, step_of_ours, base, tmp_path, tmp_path / "data", "dp1 mbs1", packing, "truncate", adapter
    )
    assert counted > SAMPLES
    assert ours == pytest.approx(theirs, rel=1e-6)
    assert error <= 1e-5


# Preference optimization

BETA, PAIR_SEQUENCE = 0.3, 128  # a few completions lose their end
# a reward is a difference of two sums of log-probabilities in fp32, each of up to as many nats
REWARDS_ROUNDING = BETA * PAIR_SEQUENCE * np.log(VOCAB) * 2.0**-23


def preference_step_of_trl(
    base: Path, tokenizer: Path, records: list[Any], out: Path, adapter: Adapter | None
) -> tuple[float, Rewards]:
    """Loss and rewards of a step of DPO over all records; the policy is not the reference.

    In fp64: the loss is of differences of sums of log-probabilities, which TRL rounds to 3e-6 of it in fp32.
    """
    model = transformers.LlamaForCausalLM.from_pretrained(base, dtype=torch.float64)
    if adapter is None:
        torch.manual_seed(5)
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(torch.randn_like(weight), alpha=0.01)
        model.save_pretrained(out / "policy")
    reference = None if adapter else transformers.LlamaForCausalLM.from_pretrained(base, dtype=torch.float64)
    trainer = trl.DPOTrainer(
        model,
        ref_model=reference,
        args=trl.DPOConfig(
            **step_settings(out, accumulated=len(records), sequence=PAIR_SEQUENCE), beta=BETA, logging_steps=1
        ),
        train_dataset=datasets.Dataset.from_list(records),
        processing_class=transformers.AutoTokenizer.from_pretrained(tokenizer),
        peft_config=peft_config(adapter),
    )
    if adapter is not None:
        perturb_factors(trainer.model)
        trainer.model.save_pretrained(out / "adapter")
    loss, logged = run_step(trainer, out), trainer.state.log_history[0]
    return loss, Rewards(*(logged[f"rewards/{name}"] for name in ("chosen", "rejected", "accuracies")))


def preference_step_of_ours(
    base: Path, out: Path, data: Path, text: str, adapter: Adapter | None
) -> tuple[float, Rewards, float]:
    """Loss and rewards of a step over all pairs, and the largest error of a gradient by its norm."""
    model, layout, shards = resolve(str(base / "config.json")), Layout.parse(text), Shards.open(data)
    loader = PairLoader(shards, sequence=PAIR_SEQUENCE, seed=0)
    job = Job(
        sequence=PAIR_SEQUENCE,
        global_batch=loader.windows,
        objective="dpo",
        dpo_beta=BETA,
        precision=get_recipe("fp32"),
        optimizer=Optimizer(clip=0),
        adapter=adapter,
    )
    built = built_from(base, model, layout, job, factors=out / "adapter")
    engine = Engine(built, model=model, layout=layout, job=job)
    engine.hold_reference()
    if adapter is None:
        huggingface_import.start(out / "policy", built=built, model=model)
    rows = loader.batch(
        0,
        global_batch=job.global_batch,
        rank=built.ranks["dp"].rank,
        ranks=layout.dp,
        micro_batches=layout.micro_batches(job),
        mbs=layout.mbs,
    )
    step = engine.step(torch.from_numpy(rows))
    assert step.rewards is not None
    return step.loss, step.rewards, measure_gradients(built, base, out, model, layout, job)


@pytest.mark.parametrize("text", ["dp1 mbs4", "dp2 zero3 mbs2 ac=full"])
@pytest.mark.parametrize(("chat", "adapter"), [(False, None), (True, None), (True, Adapter(rank=4, alpha=12))])
def test_a_step_of_preferences_equals_that_of_trl(
    forked: Any, base: Path, tmp_path: Path, text: str, chat: bool, adapter: Adapter | None
) -> None:
    tokenizer, records = write_tokenizer(tmp_path / "tokenizer"), preferences(SAMPLES, chat=chat)
    theirs, rewards = preference_step_of_trl(base, tokenizer, records, tmp_path, adapter)
    prepare(
        str(write_lines(tmp_path / "lines.jsonl", records)),
        tokenizer=str(tokenizer),
        directory=tmp_path / "data",
        holdout=0,
        samples=sample_format("preferences", tokenizer=str(tokenizer)),
    )
    world = Layout.parse(text).world
    for ours, our_rewards, error in forked(
        world, preference_step_of_ours, base, tmp_path, tmp_path / "data", text, adapter
    ):
        assert ours == pytest.approx(theirs, rel=1e-6)
        assert np.abs(np.subtract(our_rewards, rewards)).max() <= REWARDS_ROUNDING
        assert error <= 1e-5
    assert 0 < rewards.accuracy < 1
