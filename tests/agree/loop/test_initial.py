"""Drawn weights have the distribution of ``docs/explanation/trainer.md``, by name and seed, under all layouts."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from functools import lru_cache, partial
from itertools import combinations

import numpy as np
import pytest
import torch

from fivefold.job import Job, get_recipe
from fivefold.layout.spec import Layout
from fivefold.model.experts import MoE
from fivefold.model.latent_attention import MLA
from fivefold.model.spec import Model
from fivefold.trainer.build import build
from fivefold.trainer.checkpoint.full_weights import gather_full_weights
from tests.agree.loop.mutate import Mutation, locate, plant
from tests.processes import run_forked
from tests.selection import mark_share

LAYERS = 3
EXPERTS = MoE(experts=4, topk=2, ffn=32, shared_experts=1, dense_layers=1)
DENSE = Model(
    name="dense",
    layers=LAYERS,
    width=64,
    heads=4,
    kv_heads=2,
    head_dim=16,
    ffn=80,
    vocab=100,
    qkv_bias=True,
    mlp_bias=True,
    out_bias=True,
)
MODELS = [
    DENSE,
    DENSE.replace(name="tied, of experts", qkv_bias=False, tied_embeddings=True, moe=EXPERTS),
    DENSE.replace(
        name="latent", qkv_bias=False, out_bias=False, kv_heads=4, moe=EXPERTS,
        mla=MLA(q_rank=24, kv_rank=24, nope_dim=12, rope_dim=8, v_dim=16),
    ),
]  # fmt: skip
ERRORS = 5.0  # standard errors; drawn once and for all, so that a test which passes always does
Drawn = dict[str, np.ndarray]


def draw_weights(model: Model, line: str, sabotage: Callable[[], None] | None) -> list[Drawn]:
    """Return the full weights on the first rank, as training starts from them, for the seeds 1 and 2."""
    gc.freeze()
    if sabotage is not None:
        sabotage()
    layout, results = Layout.parse(line), []
    for seed in (1, 2):
        job = Job(sequence=32, global_batch=4, precision=get_recipe("fp32"), seed=seed)
        built = build(model=model, layout=layout, job=job, device=torch.device("cpu"))
        results.append({name: weight.numpy() for name, weight in gather_full_weights(built, model=model).items()})
    return results


def start(model: Model, line: str, sabotage: Callable[[], None] | None = None) -> list[Drawn]:
    result: list[Drawn] = run_forked(Layout.parse(line).world, draw_weights, model, line, sabotage)[0]
    return result


@lru_cache
def start_alone(model: Model) -> list[Drawn]:
    return start(model, "dp1")


def spread(name: str) -> float:
    """Of a matrix by its name: what is added to the stream is smaller, as there are 2 L such."""
    adds = name.endswith(("attention.out.weight", ".down.weight", ".experts.down"))
    return 0.02 / math.sqrt(2 * LAYERS) if adds else 0.02


def find_faults(weights: Drawn) -> list[str]:
    """What is not as the documentation says."""
    results, matrices = [], {}
    for name, weight in weights.items():
        if "norm" in name or name.endswith(".bias"):
            if not (weight == (1.0 if name.endswith("weight") else 0.0)).all():
                results.append(f"{name} is not constant")
            continue
        x = matrices[name] = weight.astype(np.float64).ravel() / spread(name)
        n = x.size
        for what, value, error in (
            ("mean", x.mean(), n**-0.5),
            ("deviation", x.std() - 1, (2 * n) ** -0.5),
            ("share within one deviation", (abs(x) < 1).mean() - math.erf(0.5**0.5), 0.47 * n**-0.5),
        ):
            if abs(value) > ERRORS * error:
                results.append(f"{name}: {what} is off by {value:.3f}")
    for (one, x), (other, y) in combinations(matrices.items(), 2):
        n = min(x.size, y.size)
        if abs(np.mean(x[:n] * y[:n])) > ERRORS * n**-0.5:
            results.append(f"{one} is as {other}")
    return results


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_initial_weights_follow_the_stated_distribution(model: Model) -> None:
    weights, others = start_alone(model)
    assert find_faults(weights) == find_faults(others) == []
    experts = {name: weight for name, weight in weights.items() if ".experts." in name}
    assert len(experts) == (3 * (LAYERS - 1) if model.moe else 0)
    assert (
        find_faults({f"{name[:9]}.{e}.{name}": weight[e] for name, weight in experts.items() for e in range(4)}) == []
    )


@pytest.mark.parametrize(
    ("model", "line"),
    mark_share(2, [(DENSE, "dp2 zero3 mbs1"), (DENSE, "tp2 mbs1"), (DENSE, "cp2 mbs1"), (MODELS[1], "pp2 mbs1"),
     (MODELS[2], "dp2 ep2 zero1 mbs1"), (MODELS[2], "tp2 etp2 mbs1")]),
)  # fmt: skip
def test_initial_weights_are_bitwise_equal_under_every_layout(model: Model, line: str) -> None:
    for whole, cut in zip(start_alone(model), start(model, line), strict=True):
        assert whole.keys() == cut.keys()
        assert [name for name in whole if not np.array_equal(whole[name], cut[name])] == []


def test_each_seed_draws_other_initial_weights() -> None:
    weights, others = start_alone(DENSE)
    for name, weight in weights.items():
        together = np.mean(weight * others[name]) / spread(name) ** 2
        assert abs(together) < ERRORS * weight.size**-0.5 or weight.ndim == 1, name


INITIAL = "trainer.build:draw_initial_weight"
GENERATOR = "trainer.build:_make_generator"
MUTATIONS = [
    Mutation("the seed is ignored", GENERATOR, 'f"{seed} {weight.name}"', "weight.name"),
    Mutation("all weights are drawn alike", GENERATOR, 'f"{seed} {weight.name}"', 'f"{seed}"'),
    Mutation("outputs are not scaled", INITIAL, 'weight.kind in ("row", "expert_row")', "False"),
    Mutation("experts' outputs are not scaled", INITIAL, '("row", "expert_row")', '("row",)'),
    Mutation("outputs are scaled by L", INITIAL, "math.sqrt(2 * model.layers)", "math.sqrt(model.layers)"),
    Mutation("weights are uniform", INITIAL, "normal_(0.0, std,", "uniform_(-(3**0.5) * std, 3**0.5 * std,"),
]  # fmt: skip


@pytest.mark.long  # a test of a test
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_planted_mistake_is_detected(mutation: Mutation) -> None:
    first, second = start(MODELS[1], "dp1", partial(plant, mutation))
    assert find_faults(first) or any(
        np.array_equal(first[name], second[name]) for name in first if first[name].ndim > 1
    )


def test_the_source_text_of_every_planted_mistake_exists() -> None:
    for mutation in MUTATIONS:
        assert locate(mutation).text.count(mutation.old) == 1, mutation
