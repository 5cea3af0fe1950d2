"""Runs of a dozen steps in which every part of the loop matters: the text, the weights, the jobs, the layouts."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from fivefold.layout.spec import Layout
from fivefold.trainer.data.prepare import prepare

Values = dict[str, Any]
LLAMA = {
    "vocab_size": 256, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512, "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5, "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
}  # fmt: skip
MIXTRAL = LLAMA | {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": None,
    "router_aux_loss_coef": 0.05,
}
COSINE = {"kind": "cosine", "peak": 8e-3, "floor": 0.2, "warmup_steps": 3}
WSD = {"kind": "wsd", "peak": 6e-3, "floor": 0.1, "warmup_steps": 2, "decay_steps": 5}
CONSTANT = {"kind": "constant", "peak": 5e-3, "floor": 0.0, "warmup_steps": 4}
GROUPS = [{"of": "embeddings", "rate": 0.5, "weight_decay": 0.0}, {"of": "head", "rate": 0.7}]
JOB = {
    "sequence": 64, "global_batch": 12, "precision": "fp32", "steps": 12, "seed": 5, "documents": "joined",
    "ramp": {"first": 4, "step": 4, "every": 3},
    # an epsilon by which the size of a gradient matters; norms begin above the clip and end below it
    "optimizer": {"betas": [0.8, 0.9], "epsilon": 1e-3, "weight_decay": 0.5, "clip": 2.2, "groups": GROUPS},
}  # fmt: skip
APART = {"documents": "separate"}
LONG = {"sequence": 288, "global_batch": 2, "ramp": None}  # positions beyond 256, which bf16 cannot count
SHORT = {"steps": 5, "ramp": {"first": 4, "step": 4, "every": 1}}


class Case(NamedTuple):
    """A model, a layout, and what is special about the job."""

    family: str
    line: str
    schedule: Values
    job: Values = {}

    def __str__(self) -> str:
        return f"{self.family} {self.line} {self.schedule['kind']} {' '.join(self.job)}".strip()

    @property
    def world(self) -> int:
        return Layout.parse(self.line).world

    def run(self, place: Path) -> Values:
        """The run file, whose every value is said."""
        job = JOB | {"learning_rate": self.schedule} | self.job
        return {
            "model": str(place / self.family),
            "layout": self.line,
            "start": {"weights": str(place / self.family)},
            "job": job,
            "evaluate_every": 5,
            "evaluate_sequences": 8,
            "sample": "",
        }


def make(place: Path) -> None:
    """The shards of a text of short and long documents, and both models with weights so wide that each matters."""
    draw = random.Random(1)
    words = ["".join(draw.choices("abcdefghij", k=draw.randint(1, 7))) for _ in range(60)]
    texts = [" ".join(draw.choices(words, k=draw.choice((3, 20, 60)))) for _ in range(36)]
    (place / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    prepare(str(place / "text.jsonl"), directory=place / "data", holdout=0.5, shard_tokens=1000)
    for family, values in (("llama", LLAMA), ("mixtral", MIXTRAL)):
        config = AutoConfig.for_model(family, **values)
        model: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
        generator = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                spread = torch.randn(weight.shape, generator=generator)
                weight.copy_(1 + 0.3 * spread if "norm" in name else spread * weight.shape[-1] ** -0.5)
        model.save_pretrained(place / family)
