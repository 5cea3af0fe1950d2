"""Frozen parts in training against the same steps in torch: an optimizer of all weights with ``requires_grad``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from fivefold.errors import UserError
from fivefold.job import Job
from fivefold.layout.sharding import is_trained, list_units
from fivefold.layout.spec import Layout
from fivefold.layout.validity import refuse
from fivefold.model.spec import Model
from fivefold.model.weights import list_weights
from fivefold.trainer.build import build, draw_initial_weight
from fivefold.trainer.checkpoint import checkpoint
from fivefold.trainer.checkpoint.full_weights import gather_full_weights
from fivefold.trainer.engine import Engine
from tests.selection import mark_share
from tests.trainer.test_lora import LORA, STEPS, batches, job_of, measure_distance, train
from tests.trainer.test_parity import PLAIN, TIED, reference

LAST = ("embed_tokens", "layers[:-1]", "norm", "lm_head")
MLPS = ("layers.mlp",)
SOME = ("embed_tokens", "layers[0].norms", "layers[0].q_proj", "layers[1:].k_proj", "layers[1].down_proj", "norm")


def freeze_job(*parts: str) -> Job:
    return job_of(LORA).replace(adapter=None, freeze=parts)


def list_trained(model: Model, job: Job) -> set[str]:
    return {weight.name for unit in list_units(model, job) for weight in unit.weights if is_trained(weight, job)}


def train_reference(model: Model, job: Job) -> tuple[list[float], list[dict[str, Tensor]], dict[str, Tensor]]:
    """Losses, the clipped gradients of every step, and the final trained weights."""
    listed, trained = tuple(list_weights(model)), list_trained(model, job)
    drawn = {weight.name: draw_initial_weight(weight, model=model, seed=job.seed) for weight in listed}
    for name, tensor in drawn.items():
        tensor.requires_grad_(name in trained)
    vectors = {weight.name for weight in listed if weight.is_vector}
    groups = [
        {"params": [drawn[name] for name in trained - vectors], "weight_decay": 0.1},
        {"params": [drawn[name] for name in trained & vectors], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=job.optimizer.betas, eps=job.optimizer.epsilon)
    losses, gradients = [], []
    for tokens in batches()[:STEPS]:
        loss = reference(model, drawn, tokens)
        loss.backward()
        torch.nn.utils.clip_grad_norm_([drawn[name] for name in trained], job.optimizer.clip)
        gradients.append({name: drawn[name].grad.clone() for name in trained})  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, gradients, {name: drawn[name].detach() for name in trained}


LAYOUTS = (
    "dp1 mbs8",
    "dp4 zero1 mbs2",
    "dp2 zero3 mbs2 ac=full",
    "dp4 zero3/2 mbs1",
    "tp2 mbs4 ac=selective",
    "cp2 mbs4",
)


@pytest.mark.parametrize(
    ("text", "parts", "model"),
    [
        ("dp2 zero3 mbs2 ac=full", LAST, PLAIN),
        ("dp2 zero3 mbs1 ac=norm+act", SOME, PLAIN),
        ("tp2 mbs4", SOME, TIED),
        ("pp3 mbs2", LAST, PLAIN),  # the first two stages have no backward
        *mark_share(
            99, [(text, parts, model) for text in LAYOUTS for parts in (MLPS, SOME) for model in (TIED, PLAIN)]
        ),
        *mark_share(
            99,
            [
                ("pp3 mbs2", MLPS, TIED),
                *((text, LAST, PLAIN) for text in LAYOUTS),
                ("tp2 pp2 zero1 mbs2", MLPS, PLAIN),
                ("dp2 pp3 zero3 mbs1 ac=norm+act", SOME, PLAIN),
                ("dp2 pp2 zero1 mbs2 stages=1-2", LAST, PLAIN),
                ("pp3 gpipe mbs2", ("layers[1:]", "norm", "lm_head"), PLAIN),
            ],
        ),
    ],
    ids=lambda value: getattr(value, "name", ",".join(value) if isinstance(value, tuple) else value),
)
def test_training_with_frozen_parts_equals_weights_without_gradients(
    forked, text: str, parts: tuple[str, ...], model: Model
) -> None:
    job = freeze_job(*parts)
    losses, gradients, finals = train_reference(model, job)
    ranks = forked(Layout.parse(text).world, train, model, text, job)
    for ours, steps, final, _ in ranks:
        assert ours == pytest.approx(losses, rel=1e-6)
        assert max(measure_distance(mine, theirs) for mine, theirs in zip(steps, gradients, strict=True)) <= 1e-5
        assert measure_distance(final, finals) <= 1e-5
    assert {name for _, steps, _, _ in ranks for name, *_ in steps[0]} == finals.keys()


@pytest.mark.parametrize(
    ("text", "changed", "parts"),
    [
        ("dp2 zero3 mbs2 ac=full", {"block": "parallel"}, ("embed_tokens", "layers[0]", "layers[1].mlp")),
        *mark_share(
            99,
            [
                ("dp1 mbs8", {"embedding_norm": "weighted", "first_norm": False}, ("layers[0].attention", "norm")),
                ("dp2 zero1 mbs4", {"block": "post"}, SOME[1:]),
                ("tp2 mbs4", {"block": "post"}, SOME[1:]),
                ("dp4 zero1 mbs2", {"block": "parallel_shared"}, MLPS),
                ("tp2 mbs4", {"block": "sandwich"}, LAST),
            ],
        ),
    ],
)
def test_frozen_parts_change_no_gradient_of_others(
    forked, text: str, changed: dict[str, object], parts: tuple[str, ...]
) -> None:
    """Gradients of the first step are those of full training, which other tests compare with transformers and torch."""
    model, job = PLAIN.replace(**changed), freeze_job(*parts)
    job = job.replace(optimizer=job.optimizer.replace(clip=0.0))
    world = Layout.parse(text).world
    of_full = {(rank, name, at): part for rank, (_, steps, *_) in enumerate(
        forked(world, train, model, text, job.replace(freeze=()))) for name, at, part in steps[0]}  # fmt: skip
    names = set[str]()
    for rank, (_, steps, *_) in enumerate(forked(world, train, model, text, job)):
        for name, at, part in steps[0]:
            full = of_full[rank, name, at]
            assert (part - full).norm() <= 1e-5 * full.norm(), name
            names.add(name)
    assert names == list_trained(model, job)


def resume(folder: Path, before: str, after: str, job: Job) -> tuple[float, dict[str, Tensor]]:
    """Train two steps under ``before`` if ranks suffice, save; load under ``after``; the loss of the next batch."""
    directory = folder / "checkpoints"
    for text, is_first in ((before, True), (after, False)):
        layout = Layout.parse(text)
        built = build(model=PLAIN, layout=layout, job=job, device=torch.device("cpu"))
        engine = Engine(built, model=PLAIN, layout=layout, job=job)

        def step(tokens: Tensor, layout: Layout = layout, engine: Engine = engine) -> float:
            rows = tokens.view(layout.micro_batches(job), layout.dp, layout.mbs, -1)[:, engine.built.ranks["dp"].rank]
            loss = engine.step(rows).loss
            engine.zero_grad()
            return loss

        if is_first:
            step(batches()[0])
            progress = checkpoint.RunProgress(step=1, samples=8, tokens=8 * job.sequence)
            path = checkpoint.save(directory, built=built, progress=progress, model=PLAIN, layout=layout, job=job)
            continue
        with torch.no_grad():
            for shard in built.base_shards:
                shard.weight.zero_()  # what is not restored is seen
        checkpoint.load(path, built=built, model=PLAIN, job=job)
        full = gather_full_weights(built, model=PLAIN)
        return step(batches()[1]), full
    raise AssertionError


def test_a_checkpoint_holds_frozen_weights_and_resumes_under_another_layout(forked, tmp_path: Path) -> None:
    job = freeze_job(*LAST)
    losses, *_ = train_reference(PLAIN, job)
    (loss, full), _ = forked(2, resume, tmp_path, "dp2 zero3 mbs2 ac=full", "tp2 mbs4", job)
    assert loss == pytest.approx(losses[1], rel=1e-6)
    frozen = {weight.name: weight for weight in list_weights(PLAIN) if weight.name not in list_trained(PLAIN, job)}
    assert all(
        torch.equal(full[name], draw_initial_weight(weight, model=PLAIN, seed=job.seed))
        for name, weight in frozen.items()
    )


@pytest.mark.parametrize(
    ("parts", "changed", "words"),
    [
        (("layers[0].experts",), {}, "layers.0..experts is not a part of plain"),
        (("layers[9]",), {}, "which has 3 layers"),
        (("embed_tokens", "layers", "norm"), {}, "leaves only the head of plain to train"),
        (("embed_tokens", "layers", "norm", "lm_head"), {}, "leaves nothing of plain to train"),
        (LAST, {"objective": "dpo"}, "not modelled with objective=dpo"),
        (LAST, {"optimizer": {"kind": "muon"}}, "not modelled with optimizer muon"),
    ],
)
def test_unsupported_frozen_parts_are_one_line_errors(
    parts: tuple[str, ...], changed: dict[str, object], words: str
) -> None:
    job = Job.model_validate(freeze_job(*parts).model_dump() | changed)
    with pytest.raises(UserError, match=words):
        refuse(Layout.parse("dp1"), model=PLAIN, job=job)
