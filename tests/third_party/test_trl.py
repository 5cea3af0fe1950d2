"""Supervised fine-tuning against TRL's SFTTrainer on the same records: tokens that are trained, loss and gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fivefold.job import Job, Optimizer, recipe
from fivefold.layout.spec import Layout
from fivefold.model.catalog import resolve
from fivefold.trainer.build import Built, build
from fivefold.trainer.checkpoint import huggingface_import
from fivefold.trainer.data.loader import Loader
from fivefold.trainer.data.packing import PackedLoader
from fivefold.trainer.data.prepare import prepare
from fivefold.trainer.data.shards import Shards
from fivefold.trainer.data.supervised import Format, sample_format
from fivefold.trainer.engine import Engine
from tests.trainer.data.conversations import CHATML, MARKED, completions, conversations, write_lines, write_tokenizer

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


def step_of_trl(base: Path, tokenizer: Path, records: list[Any], out: Path, **settings: Any) -> float:
    """The loss of a step over all records; ``out``: a folder whose weights are its gradients."""
    gradients: Gradients = {}

    class Collect(transformers.TrainerCallback):  # type: ignore[misc]
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            gradients.update({name: weight.grad.clone() for name, weight in model.named_parameters()})

    model = transformers.LlamaForCausalLM.from_pretrained(base, dtype=torch.float32)
    arguments = trl.SFTConfig(
        output_dir=str(out / "trl"),
        max_length=SEQUENCE,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=len(records),  # all of them, as packing makes fewer
        max_steps=1,
        learning_rate=0.0,
        optim="sgd",
        max_grad_norm=0,
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to=[],
        **settings,
    )
    trainer = trl.SFTTrainer(
        model,
        args=arguments,
        train_dataset=datasets.Dataset.from_list(records),
        processing_class=transformers.AutoTokenizer.from_pretrained(tokenizer),
    )
    trainer.add_callback(Collect())
    loss = float(trainer.train().training_loss)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(gradients[name])
    model.save_pretrained(out / "gradients")
    return loss


def step_of_ours(
    base: Path, gradients: Path, data: Path, text: str, packing: str, excess: str
) -> tuple[float, float, int]:
    """The loss of a step over all samples, the largest error of a gradient by its norm, and the targets with a loss."""
    model, layout, shards = resolve(str(base / "config.json")), Layout.parse(text), Shards.open(data)
    loader = PackedLoader(shards, sequence=SEQUENCE, seed=0, packing=packing, excess=excess)  # type: ignore[arg-type]
    batch = loader.windows
    job = Job(
        sequence=SEQUENCE, global_batch=batch, objective="sft", precision=recipe("fp32"), optimizer=Optimizer(clip=0)
    )
    built = built_from(base, model, layout, job)
    engine = Engine(built, model=model, layout=layout, job=job)
    counted = loader.count_targets(np.arange(batch))
    loss = engine.step(batch_of(loader, batch), counted=counted).loss
    theirs = {shard.name: shard.weight.detach() for shard in built_from(gradients, model, layout, job).shards}
    errors = [
        float((shard.weight.grad - theirs[shard.name]).norm() / theirs[shard.name].norm())  # type: ignore[operator]
        for shard in built.shards
    ]
    return loss, max(errors), counted


def built_from(folder: Path, model: Any, layout: Layout, job: Job) -> Built:
    built = build(model=model, layout=layout, job=job, device=torch.device("cpu"))
    huggingface_import.start(folder, built=built, model=model)
    return built


def batch_of(loader: Loader, batch: int) -> Tensor:
    rows = loader.batch(0, global_batch=batch, rank=0, ranks=1, micro_batches=batch, mbs=1)
    return torch.from_numpy(rows)


MESSAGES, COMPLETIONS = conversations(SAMPLES), completions(SAMPLES)
CHATS = [
    {"prompt": record["messages"][:-1], "completion": record["messages"][-1:]} for record in conversations(SAMPLES)
]


@pytest.mark.parametrize(
    ("kind", "records", "template", "packing", "loss_on", "settings"),
    [
        ("messages", MESSAGES, MARKED, "best-fit", "replies", {"packing": True, "assistant_only_loss": True}),
        ("messages", MESSAGES, MARKED, "none", "replies", {"assistant_only_loss": True}),
        ("messages", MESSAGES, CHATML, "none", "all", {}),
        ("completions", COMPLETIONS, CHATML, "best-fit", "replies", {"packing": True}),
        ("completions", CHATS, CHATML, "none", "replies", {}),
    ],
    ids=("packed", "padded", "all", "completions", "chats"),
)
def test_a_step_equals_that_of_trl(
    forked: Any,
    base: Path,
    tmp_path: Path,
    kind: Format,
    records: list[Any],
    template: str,
    packing: str,
    loss_on: Any,
    settings: dict[str, Any],
) -> None:
    tokenizer = write_tokenizer(tmp_path / "tokenizer", template=template)
    theirs = step_of_trl(base, tokenizer, records, tmp_path, **settings)
    prepare(
        str(write_lines(tmp_path / "lines.jsonl", records)),
        tokenizer=str(tokenizer),
        directory=tmp_path / "data",
        holdout=0,
        samples=sample_format(kind, loss_on=loss_on, tokenizer=str(tokenizer)),
    )
    gradients = tmp_path / "gradients"
    ((ours, error, counted),) = forked(
        1, step_of_ours, base, gradients, tmp_path / "data", "dp1 mbs1", packing, "truncate"
    )
    assert counted > SAMPLES
    assert ours == pytest.approx(theirs, rel=1e-6)
    assert error <= 1e-5
