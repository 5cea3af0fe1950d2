"""What the parity proof runs: small odd models, a text of a prime number of documents, and cases drawn from them.

A case is a model, a layout line and whether blocks are compiled; the job follows: five steps of fp32 AdamW.
"""

from __future__ import annotations

import sysconfig
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from fivefold.job import Job, LearningRate, Optimizer, get_recipe
from fivefold.layout.spec import Layout
from fivefold.model.experts import MoE
from fivefold.model.factors import Multipliers, ResidualFactors
from fivefold.model.latent_attention import MLA
from fivefold.model.mixers.gated_delta_net import GatedDeltaNet
from fivefold.model.mixers.kimi_delta import KimiDelta
from fivefold.model.mixers.lightning import Lightning
from fivefold.model.mixers.mamba import Mamba
from fivefold.model.mixers.mamba2 import Mamba2
from fivefold.model.mixers.rg_lru import RGLRU
from fivefold.model.mixers.short_conv import ShortConv
from fivefold.model.multi_token_prediction import MTP
from fivefold.model.spec import Model
from fivefold.trainer.data.packing import IGNORED, LAST

STEPS, TOKENS, VOCAB = 5, 24, 251
METERED = 1  # the second step: by then every buffer of the steady state exists
FEW = METERED + 1  # steps of the tests; the matrix takes all
DOCUMENTS = 101  # a prime number of them, of 61 to 161 tokens, packed: rows begin and end within documents
END = VOCAB - 1

DENSE = Model(name="dense", layers=5, width=52, heads=8, kv_heads=4, head_dim=10, ffn=44, vocab=VOCAB, rope_theta=500.0)
EXPERTS = MoE(experts=4, topk=2, ffn=14, shared_experts=1, shared_ffn=20, dense_layers=1, balance="none")
LATENT = MLA(q_rank=22, kv_rank=14, nope_dim=6, rope_dim=4, v_dim=8)
MODELS: dict[str, Model] = {
    model.name: model
    for model in (
        DENSE,
        DENSE.replace(name="few-kv", kv_heads=2),  # fewer than tp4
        DENSE.replace(name="tied", tied_embeddings=True),
        DENSE.replace(name="biased", qkv_bias=True, out_bias=True, mlp_bias=True, head_bias=True, qk_norm="head"),
        DENSE.replace(name="moe", moe=EXPERTS.replace(balance="aux", aux_coefficient=0.1)),
        DENSE.replace(name="moe-free", moe=EXPERTS.replace(score="sigmoid", balance="free", scaling=2.5)),
        DENSE.replace(
            name="moe-biased",
            activation="clamped_swiglu",
            moe=EXPERTS.replace(shared_experts=0, dense_layers=0, router_bias=True, expert_bias=True),
        ),
        DENSE.replace(
            name="windows",
            window=7,
            window_pattern=(True, False, True),
            rope_theta_sliding=50.0,
            rope_pattern=(True, True, True, False),
            attention_sinks=True,
            qk_norm="head",
        ),
        DENSE.replace(name="softcap", window=4, window_pattern=(True, False), attention_softcap=0.3),
        DENSE.replace(name="mtp", mtp=MTP(), tied_embeddings=True),
        DENSE.replace(name="mtp-moe", mtp=MTP(depth=2), moe=EXPERTS.replace(score="sigmoid", balance="free")),
        DENSE.replace(name="mla", kv_heads=8, mla=LATENT, moe=EXPERTS),
        DENSE.replace(
            name="delta",
            mixers=("gated_delta_net", "gated_delta_net", "attention"),
            gated_delta_net=GatedDeltaNet(key_heads=2, value_heads=4, key_dim=6, value_dim=10),
            output_gate=True,
            norm_epsilon=1e-4,  # a small one enlarges the rounding of small outputs of the scan
            moe=EXPERTS.replace(shared_gate=True),
        ),
        DENSE.replace(
            name="convolution",
            mixers=("short_conv", "attention"),
            short_conv=ShortConv(bias=True),
        ),
        DENSE.replace(
            name="mamba2",
            mixers=("mamba2", "mamba2", "attention"),
            mamba2=Mamba2(heads=4, head_dim=6, state=10, groups=2, chunk=16),
            norm_epsilon=1e-4,  # as of "delta"
        ),
        DENSE.replace(
            name="mamba",
            mixers=("mamba", "attention"),
            feed_forwards=(False, True),
            mamba=Mamba(inner=48, state=6, rank=5, norms="weighted"),
        ),
        DENSE.replace(
            name="kimi delta",
            mixers=("kimi_delta", "kimi_delta", "attention"),
            kimi_delta=KimiDelta(heads=4, dim=6, rank=5),
            kv_heads=8,
            position="none",
            mla=LATENT,
            norm_epsilon=1e-4,  # as of "delta"
        ),
        DENSE.replace(
            name="lightning",
            mixers=("lightning", "attention"),
            lightning=Lightning(heads=4, dim=6, chunk=16),
            block="norm_stream",
            residual_factors=ResidualFactors(attention=(1.5, 1.0), mixer=(1.0, 0.7), feed_forward=(0.8, 1.2)),
        ),
        DENSE.replace(
            name="griffin",
            mixers=("rg_lru", "rg_lru", "attention"),
            rg_lru=RGLRU(inner=24, blocks=4),
        ),
        DENSE.replace(
            name="nemotron",
            mixers=("mamba2", "none", "attention", "none"),
            feed_forwards=(False, True),
            mamba2=Mamba2(heads=4, head_dim=6, state=10, groups=2, chunk=16),
            norm_epsilon=1e-4,
            mlp="plain",
            activation="relu2",
            moe=EXPERTS.replace(pattern=(False, True, False, False), latent_width=20),
        ),
        DENSE.replace(
            name="joined",
            joins_mamba2=True,
            mamba2=Mamba2(heads=4, head_dim=6, state=10, groups=4, chunk=16),
            norm_epsilon=1e-4,  # as of "delta"
            multipliers=Multipliers(
                attention_in=0.8,
                attention_out=1.2,
                key=0.7,
                mixer_in=1.1,
                mixer_out=0.9,
                mixer_parts=(0.5, 1.0, 1.5, 2.0, 0.8),
                gate=0.7,
                down=1.3,
            ),
        ),
        DENSE.replace(name="latent", kv_heads=8, mla=LATENT.replace(q_rank=None)),
    )
}


class Case(NamedTuple):
    """One run to be compared with one process."""

    model_name: str
    layout_text: str
    compiled: bool = False

    def __str__(self) -> str:
        return f"{self.model_name} {self.layout_text}" + (" compile" if self.compiled else "")

    @property
    def layout(self) -> Layout:
        return Layout.parse(self.layout_text)

    @property
    def model(self) -> Model:
        """Five layers, or nine where the pipeline has more stages than that: stages are uneven either way."""
        return model_for(self.model_name, self.layout)

    @property
    def job(self) -> Job:
        return job_for(self.layout, compiled=self.compiled)


class ShortCase(Case):
    """A case of three layers, which two stages divide unevenly too: what ``make test`` compares."""

    @property
    def model(self) -> Model:
        return super().model.replace(layers=3)


def model_for(name: str, layout: Layout) -> Model:
    return MODELS[name].replace(layers=5 if layout.pp * layout.v <= 5 else 9)


def job_for(layout: Layout, *, compiled: bool = False) -> Job:
    """As few micro-batches as the schedule takes, and one more where it may be odd: gradients add up in any case."""
    rounds = max(1, layout.pipeline.min_rounds) * layout.pp
    micro_batches = rounds if layout.schedule == "dualpipe" else rounds + 1
    return Job(
        sequence=TOKENS,
        global_batch=layout.dp * layout.mbs * micro_batches,
        precision=get_recipe("fp32"),
        steps=STEPS,
        compile=compiled,
        optimizer=Optimizer(clip=0.5, epsilon=1e-5),
        learning_rate=LearningRate(kind="constant", peak=3e-4),
        seed=11,
    )


def use_one_process(job: Job) -> tuple[Layout, Job]:
    """Return what every case is compared with: one rank, a sequence or pair at a time, uncompiled, full logits."""
    return Layout(mbs=2 if job.objective == "dpo" else 1), job.replace(compile=False, loss="fused", pairs=False)


def make_uneven_stages(layout: Layout) -> str:
    """``stages=`` with all that is over on the last but one stage; of two on the last."""
    stages = layout.pp * layout.v
    sizes = [1] * stages
    sizes[max(1, stages - 2)] += (5 if stages <= 5 else 9) - stages
    return f"stages={'-'.join(map(str, sizes))}"


@lru_cache(maxsize=1)
def text() -> Tensor:
    """Source files of Python's own library as bytes, each ended by a token of its own."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(folder.glob("*.py"))[:DOCUMENTS]
    assert len(files) == DOCUMENTS
    tokens: list[int] = []
    for number, file in enumerate(files):
        tokens += [*islice((byte for byte in file.read_bytes() if byte < END), 61 + number), END]
    return torch.tensor(tokens)


def batch(job: Job, *, step: int, ahead: int = 0) -> Tensor:
    """Tokens [global batch, T + 1 + ahead] of a step; inputs are the first T, targets begin at the second."""
    whole = text()
    first = torch.arange(step * job.global_batch, (step + 1) * job.global_batch) * job.sequence
    tokens = whole[(first[:, None] + torch.arange(job.sequence + 1 + ahead)) % len(whole)]
    return tokens if job.objective == "pretrain" else with_targets(tokens)


def with_targets(tokens: Tensor) -> Tensor:
    """Inputs and targets [global batch, 2 T]: of letters alone, and of none in the first row of several."""
    inputs, targets = tokens[:, :-1], tokens[:, 1:].clone()
    targets[(targets < ord("a")) | (targets > ord("z"))] = IGNORED
    targets[0, : None if len(tokens) > 1 else 1] = IGNORED
    targets[inputs == END] = LAST
    return torch.cat((inputs, targets), dim=1)


def count_targets(job: Job, *, step: int) -> int | None:
    """The targets with a loss in the batches of all ranks; None: all, or all pairs."""
    if job.objective != "sft":
        return None
    return int((batch(job, step=step)[:, job.sequence :] >= 0).sum())


def rows(job: Job, layout: Layout, *, step: int, dp_rank: int, ahead: int = 0) -> Tensor:
    """What a data-parallel rank reads, [micro-batches, mbs, T + 1 + ahead]: row j of m is sample (m · dp + rank) · mbs
    + j."""
    return batch(job, step=step, ahead=ahead).view(layout.micro_batches(job), layout.dp, layout.mbs, -1)[:, dp_rank]
