"""What a run logs, from its folder alone: ``transformers``, ``torch.optim.AdamW`` and plain Python; nothing of ours.

The shards, the order of samples and the schedules are read as ``docs/explanation/trainer.md`` and
``docs/reference/optimizers.md``
describe them.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

Values = dict[str, Any]
WORD = 2**64 - 1


class Split(NamedTuple):
    """One split of the shards: its tokens, and the place after each document's end token."""

    tokens: np.ndarray
    ends: np.ndarray

    @classmethod
    def read(cls, data: Path, name: str) -> Split:
        index = json.loads((data / "index.json").read_text())
        part = index[name]
        shards = [np.fromfile(data / shard["name"], index["dtype"]) for shard in part["shards"]]
        return cls(np.concatenate(shards).astype(np.int64), np.fromfile(data / part["ends"], np.int64))

    def starts(self, samples: range, *, sequence: int, seed: int) -> np.ndarray:
        """Where the windows of ``samples`` begin."""
        windows = (len(self.tokens) - 1) // sequence
        return np.array([sequence * shuffle(sample, windows=windows, seed=seed) for sample in samples])

    def rows(self, starts: np.ndarray, *, sequence: int) -> Tensor:
        return torch.from_numpy(self.tokens[starts[:, None] + np.arange(sequence + 1)])

    def documents(self, starts: np.ndarray, *, sequence: int) -> Tensor:
        """The number of the document in which each input lies; its end token is a part of it."""
        return torch.from_numpy(np.searchsorted(self.ends, starts[:, None] + np.arange(sequence), side="right"))


def shuffle(sample: int, *, windows: int, seed: int) -> int:
    """Which of ``windows`` a sample is: six Feistel rounds, again until the number is one of them."""
    epoch, number = divmod(sample, windows)
    half = max(1, ((windows - 1).bit_length() + 1) // 2)
    keys = struct.unpack("<6Q", hashlib.blake2b(f"{seed} {epoch}".encode(), digest_size=48).digest())
    while True:
        left, right = number >> half, number & (1 << half) - 1
        for key in keys:
            mixed = (right ^ key) * 0x9E3779B97F4A7C15 & WORD
            mixed = (mixed ^ mixed >> 29) * 0xBF58476D1CE4E5B9 & WORD
            left, right = right, left ^ mixed >> 32 & (1 << half) - 1
        number = left << half | right
        if number < windows:
            return number


def rate(schedule: Values, *, step: int, steps: int) -> float:
    """Of step ``step``, from 0: the last step of the warm-up has the peak, the last of all the floor."""
    peak, warmup = schedule["peak"], schedule["warmup_steps"]
    low, last = schedule["floor"] * peak, steps - 1
    if step < warmup:
        return peak / warmup * (step + 1)
    if schedule["kind"] == "wsd":
        return float(np.interp(step, [steps - schedule["decay_steps"], last], [peak, low]))
    if schedule["kind"] == "cosine":
        return low + (peak - low) * (1 + math.cos(math.pi * (step - warmup) / (last - warmup))) / 2
    return peak


def batches(job: Values) -> Iterator[range]:
    """The samples of each step."""
    taken, ramp = 0, job.get("ramp")
    for step in range(job["steps"]):
        size = job["global_batch"]
        if ramp:
            size = min(size, ramp["first"] + ramp["step"] * (step // ramp["every"]))
        yield range(taken, taken + size)
        taken += size


class Reference:
    """A model of transformers that is trained on one process, each batch at once."""

    def __init__(self, run: Values, *, data: Path) -> None:
        self.run, self.job = run, run["job"]
        folder = Path(run["start"]["weights"])
        architecture = json.loads((folder / "config.json").read_text())["model_type"]
        from transformers import LlamaForCausalLM, MixtralForCausalLM

        made: Any = {"llama": LlamaForCausalLM, "mixtral": MixtralForCausalLM}[architecture]
        self.model = made.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).train()
        self.train_split, self.heldout_split = Split.read(data, "train"), Split.read(data, "heldout")
        optimizer = self.job["optimizer"]
        self.optimizer = torch.optim.AdamW(self._groups(), betas=optimizer["betas"], eps=optimizer["epsilon"])

    def _groups(self) -> list[Values]:
        """Each weight by itself, with the decay and the multiple of the rate that the run file says for it."""
        settings, groups = self.job["optimizer"], []
        said = {group["of"]: group for group in settings["groups"]}
        for name, weight in self.model.named_parameters():
            parts = {"model.embed_tokens.weight": "embeddings", "lm_head.weight": "head"}
            part = "vectors" if "norm" in name else "experts" if ".experts." in name else parts.get(name)
            part = "router" if name.endswith("mlp.gate.weight") else part
            group = said.get(part, {})
            decay = group.get("weight_decay", 0.0 if part == "vectors" else settings["weight_decay"])
            groups.append({"params": [weight], "weight_decay": decay, "times": group.get("rate", 1.0)})
        return groups

    def _loss(self, split: Split, starts: np.ndarray) -> tuple[Tensor, Tensor]:
        """Mean nats per token, and the auxiliary loss of experts (DeepSeek-V3, arXiv:2412.19437 eq. 17 to 20)."""
        T = self.job["sequence"]
        rows, documents = split.rows(starts, sequence=T), split.documents(starts, sequence=T)
        seen = torch.ones(T, T, dtype=torch.bool).tril()[None]
        if self.job.get("documents") == "separate":
            seen = seen & (documents[:, :, None] == documents[:, None, :])
        mask = torch.zeros(len(rows), 1, T, T).masked_fill(~seen[:, None], torch.finfo(torch.float32).min)
        routed = {"output_router_logits": True} if hasattr(self.model.config, "router_aux_loss_coef") else {}
        out = self.model.model(rows[:, :-1], attention_mask=mask, use_cache=False, **routed)
        also = torch.zeros(())
        for routes in out.router_logits if routed else ():
            scores = routes.float().softmax(-1).view(len(rows), T, -1)
            k, experts = self.model.config.num_experts_per_tok, scores.shape[-1]
            chosen = torch.zeros_like(scores).scatter(-1, scores.topk(k, -1).indices, 1.0)
            also = also + (chosen.mean(1) * experts / k * scores.mean(1)).sum(-1).mean()
        also = also * getattr(self.model.config, "router_aux_loss_coef", 0.0)
        logits = self.model.lm_head(out.last_hidden_state)
        return F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()), also

    @torch.no_grad()
    def _evaluate(self, step: int) -> Values:
        samples, T = range(self.run["evaluate_sequences"]), self.job["sequence"]
        loss, _ = self._loss(self.heldout_split, self.heldout_split.starts(samples, sequence=T, seed=0))
        return {"step": step, "heldout_loss": loss.item()}

    def train(self) -> list[Values]:
        """The lines of a log: of each step and each evaluation."""
        job, every = self.job, self.run["evaluate_every"]
        lines = [self._evaluate(0)]
        for step, samples in enumerate(batches(job)):
            starts = self.train_split.starts(samples, sequence=job["sequence"], seed=job["seed"])
            loss, also = self._loss(self.train_split, starts)
            self.optimizer.zero_grad()
            (loss + also).backward()
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), job["optimizer"]["clip"])
            now = rate(job["learning_rate"], step=step, steps=job["steps"])
            for group in self.optimizer.param_groups:
                group["lr"] = now * group["times"]
            self.optimizer.step()
            lines.append(
                {
                    "step": step + 1,
                    "loss": loss.item(),
                    "gradient_norm": norm.item(),
                    "learning_rate": now,
                    "tokens": samples.stop * job["sequence"],
                }
            )
            if step + 1 == job["steps"] or (step + 1) % every == 0:
                lines.append(self._evaluate(step + 1))
        return lines


def train(run: Values, data: Path) -> list[Values]:
    return Reference(run, data=data).train()
