"""Adapters trained by the trainer against LoRA and DoRA in a few lines of torch: the updated weight in place of W."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fivefold.adapter import ALL_TARGETS, END_TARGETS, TARGETS, Adapter
from fivefold.errors import UserError
from fivefold.job import Job, LearningRate, Optimizer, get_recipe
from fivefold.layout.spec import Layout
from fivefold.model.weight import MAGNITUDE, is_gemm_weight
from fivefold.model.weights import list_weights, strip_block
from fivefold.trainer.build import build, draw_initial_weight
from fivefold.trainer.checkpoint.full_weights import gather_full_weights
from fivefold.trainer.engine import Engine
from fivefold.trainer.model.quantized.formats import round_to
from fivefold.trainer.supported import check_supported
from tests.selection import mark_share
from tests.trainer.test_parity import PLAIN, TIED, reference

STEPS, BATCH, TOKENS = 2, 8, 24  # the second has moments
LORA = Adapter(rank=4, alpha=12)
QLORA = LORA.replace(base="nf4")
DORA = LORA.replace(kind="dora")
SAVED = LORA.replace(modules_to_save=("embed_tokens", "lm_head"))
ENDS = LORA.replace(
    targets=("all-linear", *END_TARGETS), rank_pattern={"lm_head": 6}, alpha_pattern={"embed_tokens": 5}
)
PATTERNS = LORA.replace(rank_pattern={"q_proj": 2, "down_proj": 7}, alpha_pattern={"o_proj": 3, "q_proj": 5})
SOME = Adapter(rank=3, targets=("q_proj", "v_proj", "down_proj"), rank_stabilized=True)


def batches() -> Tensor:
    """One for each step, and one of which the loss after them is compared."""
    return torch.randint(0, PLAIN.vocab, (STEPS + 1, BATCH, TOKENS + 1), generator=torch.Generator().manual_seed(5))


def job_of(adapter: Adapter) -> Job:
    return Job(
        sequence=TOKENS,
        global_batch=BATCH,
        precision=get_recipe("fp32"),
        steps=STEPS,
        adapter=adapter,
        # AdamW divides by more than the rounding of small gradients: with 1e-5 the reference itself differs by 1.5e-5
        # from one in fp64 in its second step, with 1e-3 by 9e-7
        optimizer=Optimizer(clip=0.5, epsilon=1e-3),
        learning_rate=LearningRate(kind="constant", peak=1e-3),
    )


def train_reference(model: object, job: Job) -> tuple[list[float], list[dict[str, Tensor]], dict[str, Tensor]]:
    """Losses, the clipped gradients of every step, and the final factors."""
    adapter = job.adapter
    assert adapter is not None
    listed = tuple(list_weights(model, adapter))  # type: ignore[arg-type]
    drawn = {
        weight.name: draw_initial_weight(weight, model=model, seed=job.seed)  # type: ignore[arg-type]
        for weight in listed
        if not weight.name.endswith(MAGNITUDE)
    }
    if adapter.base_format is not None:
        drawn |= {
            weight.name: round_to(adapter.base_format, drawn[weight.name], dtype=torch.float32)
            for weight in listed
            if is_gemm_weight(weight) and not weight.is_adapter
        }
    magnitudes = [weight.name for weight in listed if weight.name.endswith(MAGNITUDE)]
    drawn |= {name: drawn[f"{name.removesuffix(MAGNITUDE)}.weight"].norm(dim=1) for name in magnitudes}
    factors = {
        name: value.requires_grad_() for name, value in drawn.items() if ".lora_" in name or adapter.is_saved(name)
    }
    linears = [linear for target, linears in TARGETS.items() for linear in linears if adapter.has_target(target)]
    names = [f"blocks.{layer}.{linear}" for layer in range(PLAIN.layers) for linear in linears]
    names += [end for target, (end,) in END_TARGETS.items() if adapter.has_target(target)]
    adapted = [name for name in names if f"{name}.weight" in drawn]
    optimizer = torch.optim.AdamW(
        factors.values(), lr=1e-3, betas=job.optimizer.betas, eps=job.optimizer.epsilon, weight_decay=0.1
    )
    targets = {linear: target for target, linears in ALL_TARGETS.items() for linear in linears}

    def scale_of(at: str) -> float:
        target = targets[strip_block(at)]
        rank = adapter.ranks.get(target, adapter.rank)
        alpha = adapter.alphas.get(target, adapter.alpha or 2 * adapter.rank)
        return alpha / (rank**0.5 if adapter.rank_stabilized else rank)

    losses, gradients = [], []
    for tokens in batches()[:STEPS]:
        updated = {name: value for name, value in drawn.items() if ".lora_" not in name}
        for at in adapted:
            update = scale_of(at) * factors[f"{at}.lora_b"] @ factors[f"{at}.lora_a"]
            rows = drawn[f"{at}.weight"] + (update.t() if at == "embed.tokens" else update)
            if adapter.has_magnitudes:
                rows = rows * (factors[f"{at}{MAGNITUDE}"] / rows.detach().norm(dim=1))[:, None]
            updated[f"{at}.weight"] = rows
        loss = reference(model, updated, tokens)  # type: ignore[arg-type]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(factors.values(), job.optimizer.clip)
        gradients.append({name: factor.grad.clone() for name, factor in factors.items() if factor.grad is not None})
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, gradients, {name: factor.detach() for name, factor in factors.items()}


# Under tp2 and tp4 its slices consist of full blocks of 64 elements, and of 128 x 128
WIDE = PLAIN.replace(name="wide", width=128, head_dim=128, ffn=512)
Box = tuple[str, tuple[int, ...], Tensor]


def train(model: object, text: str, job: Job) -> tuple[list[float], list[list[Box]], list[Box], int]:
    """Losses, this rank's boxes of the gradients of every step and of the final factors, and gradients' elements."""
    layout = Layout.parse(text)
    built = build(model=model, layout=layout, job=job, device=torch.device("cpu"))  # type: ignore[arg-type]
    engine = Engine(built, model=model, layout=layout, job=job)  # type: ignore[arg-type]
    losses, gradients = [], []

    def boxes(of: str) -> list[Box]:
        found = []
        for shard in built.shards:
            rows = shard.weight if of == "weights" else shard.weight.grad
            assert rows is not None
            found += [
                (shard.name, box.offsets, rows.detach()[box.rows].view(box.sizes).clone()) for box in shard.boxes()
            ]
        return found

    for tokens in batches()[:STEPS]:
        rows = tokens.view(layout.micro_batches(job), layout.dp, layout.mbs, -1)[:, built.ranks["dp"].rank]
        losses.append(engine.step(rows).loss)
        gradients.append(boxes("gradients"))
        engine.zero_grad()
    assert all(parameter.grad is None for parameter in built.module.parameters())
    states = sum(len(state) for state in built.optimizer.state.values())
    assert len(built.optimizer.state) == len({shard.name for shard in built.shards if shard.rows}), states
    return losses, gradients, boxes("weights"), sum(shard.weight.numel() for shard in built.shards)


def measure_distance(ours: list[Box], theirs: dict[str, Tensor]) -> float:
    """The largest ‖Δ‖ of a box by the norm of its weight."""
    worst = 0.0
    for name, offsets, part in ours:
        there = theirs[name][tuple(slice(at, at + size) for at, size in zip(offsets, part.shape, strict=True))]
        worst = max(worst, float((part - there).norm() / theirs[name].norm().clamp(min=1e-12)))
    return worst


@pytest.mark.parametrize(
    ("text", "adapter", "model"),
    [
        ("dp2 zero3 mbs2", SOME, TIED),
        ("tp2 nosp mbs8", LORA.replace(base="int8"), PLAIN),  # without blocks, so any slice
        ("dp2 zero3 mbs2 ac=full", DORA.replace(base="nf4"), PLAIN),
        ("dp2 zero3 mbs2 ac=full", SAVED, PLAIN),
        ("tp2 mbs4 ac=full", PATTERNS, PLAIN),
        ("pp3 mbs1 ac=full", ENDS, PLAIN),
        *mark_share(
            11,
            [
                ("dp2 zero3 mbs2", LORA.replace(base="fp4", double_quantization=False), PLAIN),
                ("dp1 mbs8", LORA.replace(base="fp8"), PLAIN),
                ("tp2 mbs4 ac=full", QLORA, WIDE),
                ("tp4 mbs4", DORA.replace(base="fp8"), WIDE),  # with fewer key heads than ranks
                ("pp3 mbs2 stages=0-3-0", LORA, PLAIN),  # embedding and head are stages that train nothing
                ("dp2 zero3 mbs1 ac=norm+act", DORA, PLAIN),
                ("dp2 zero2 mbs1", QLORA.replace(modules_to_save=("embed_tokens",)), PLAIN),
                ("dp2 zero3 mbs2", SOME.replace(modules_to_save=("lm_head",)), PLAIN),
                ("tp2 mbs4", LORA, PLAIN),
                ("dp2 zero3 mbs1 ac=full", LORA.replace(base="int8"), PLAIN),
                ("tp2 mbs4 ac=full", DORA.replace(base="nf4", double_quantization=False), WIDE),
            ],
        ),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_training_steps_equal_a_short_reference_of_lora(forked, text: str, adapter: Adapter, model: object) -> None:
    job = job_of(adapter)
    losses, gradients, finals = train_reference(model, job)
    ranks = forked(Layout.parse(text).world, train, model, text, job)
    for ours, steps, final, _ in ranks:
        assert ours == pytest.approx(losses, rel=1e-6)
        assert max(measure_distance(mine, theirs) for mine, theirs in zip(steps, gradients, strict=True)) <= 5e-6
        assert measure_distance(final, finals) <= 5e-6
    trained = sum(value.numel() for value in finals.values())
    assert sum(held for *_, held in ranks) >= trained


@pytest.mark.parametrize(
    ("text", "changed", "words"),
    [
        ("dp1", {"adapter": Adapter(kind="dora", dropout=0.1)}, "DoRA with dropout"),
        ("dp1", {"compile": True}, "compiled blocks"),
        ("dp1", {"precision": get_recipe("tf32")}, "precision tf32"),
        ("dp1 ac=mlp+norm", {}, "ac=mlp"),
    ],
)
def test_unsupported_adapters_are_rejected_by_name(text: str, changed: dict[str, object], words: str) -> None:
    with pytest.raises(UserError, match=words):
        check_supported(Layout.parse(text), job_of(LORA).replace(**changed), model=PLAIN)


def merge(text: str, job: Job) -> tuple[dict[str, Tensor], float, float]:
    """Full weights after two steps (on rank 0), and the loss of the next batch: the trainer's, and of these weights."""
    layout, tokens = Layout.parse(text), batches()[STEPS]
    built = build(model=PLAIN, layout=layout, job=job, device=torch.device("cpu"))
    engine = Engine(built, model=PLAIN, layout=layout, job=job)
    tokens = tokens[: job.global_batch]
    for batch in (*batches()[:STEPS, : job.global_batch], tokens):
        full = gather_full_weights(built, model=PLAIN)
        rows = batch.view(layout.micro_batches(job), layout.dp, layout.mbs, -1)[:, built.ranks["dp"].rank]
        loss = engine.step(rows).loss
        engine.zero_grad()
    return full, loss, float(reference(PLAIN, full, tokens)) if full else loss


@pytest.mark.parametrize(
    ("text", "adapter"),
    mark_share(
        4,
        [
            ("tp2 mbs2", SOME.replace(kind="dora", rank_pattern={"q_proj": 5}, alpha_pattern={"v_proj": 2})),
            ("dp3 zero3 mbs1", SOME.replace(base="nf4")),
            ("dp2 zero3 mbs2", SOME),
            ("tp2 pp3 mbs2", SOME),
        ],
    ),
)
def test_full_weights_have_the_adapters_merged(forked, text: str, adapter: Adapter) -> None:
    batch = 6 if "dp3" in text else BATCH
    job = job_of(adapter).replace(global_batch=batch)
    (full, loss, expected), *others = forked(Layout.parse(text).world, merge, text, job)
    assert full.keys() == {weight.name for weight in list_weights(PLAIN)}
    assert not any(rest for rest, *_ in others)
    assert loss == pytest.approx(expected, rel=1e-6)
