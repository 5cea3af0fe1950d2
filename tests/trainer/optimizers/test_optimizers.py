"""Every optimizer on sharded weights equals torch's on full ones, given the same gradients; and its checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from fivefold.errors import UserError
from fivefold.job import Job, get_recipe
from fivefold.layout.spec import Layout
from fivefold.model.experts import MoE
from fivefold.model.spec import Model
from fivefold.model.weights import Weight, list_weights
from fivefold.trainer.build import Built, build, draw_initial_weight
from fivefold.trainer.checkpoint.checkpoint import RunProgress, find_latest, load, save
from fivefold.trainer.optimizers import fp32_update, optimizer
from fivefold.update import Group, LearningRate, Optimizer
from tests.selection import mark_share

Kind = Literal["sgd", "adafactor", "muon", "adamw", "adamw8bit"]
Fork = Callable[..., list[Any]]
Wholes = dict[str, Tensor]

DENSE = Model(
    name="odd", layers=2, width=24, heads=4, kv_heads=2, head_dim=6, ffn=44, vocab=83, qkv_bias=True, out_bias=True
)
SPARSE = DENSE.replace(
    name="sparse", moe=MoE(experts=4, topk=2, ffn=20, shared_experts=1, dense_layers=1, expert_bias=True)
)
STEPS, RATE = 4, 0.02


def job(kind: Kind, precision: str = "fp32", **fields: Any) -> Job:
    return Job(
        sequence=8,
        global_batch=12,
        precision=get_recipe(precision),
        optimizer=Optimizer(kind=kind, **fields),
        learning_rate=LearningRate(kind="constant", peak=RATE),
        steps=STEPS,
    )


def gradient(weight: Weight, step: int) -> Tensor:
    """Its scale differs from column to column, lest a wrong mean of squares goes unseen."""
    drawn = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1000 * step + len(weight.name)))
    return drawn * torch.linspace(0.1, 3, weight.shape[-1]) * 1e-2


def run_steps(
    model: Model, layout: Layout, task: Job, first: int = 0, folder: Path | None = None, steps: int = STEPS
) -> list[Any]:
    """Some steps with given gradients, from the last checkpoint of ``folder`` if there is one: before, after."""
    built = build(model=model, layout=layout, job=task, device=torch.device("cpu"))
    if folder and find_latest(folder):
        load(find_latest(folder), built=built, model=model, job=task)
    before = parts(built)
    for step in range(first, min(first + steps, STEPS)):
        for shard in built.shards:
            shard.weight.grad = shard.select_rows(gradient(shard.local_weight.weight, step)).to(shard.weight.dtype)
        built.optimizer.step()
    if folder:
        done = RunProgress(step=first + 1, samples=0, tokens=0)
        save(folder, built=built, progress=done, model=model, layout=layout, job=task)
    return [before, parts(built)]


def parts(built: Built) -> list[tuple[str, tuple[int, ...], tuple[int, ...], Tensor]]:
    """Return weights and moments: name, full shape, where the part begins, the part."""
    results = []
    for shard in built.shards:
        kept = [("weight", shard, shard.weight.detach()), *optimizer.list_moments(built.optimizer, shard)]
        for kind, part, tensor in kept:
            if part is None:
                results.append((f"{shard.name}/{kind}", (), (), tensor.clone()))
                continue
            for box in part.boxes():
                values = tensor[box.rows].reshape(box.sizes).clone()
                results.append((f"{shard.name}/{kind}", part.local_weight.weight.shape, box.offsets, values))
    return results


def combine_ranks(ranks: list[Any]) -> Wholes:
    """Join full tensors from the parts of all ranks; copies must be equal to the last bit."""
    result: Wholes = {}
    for name, shape, offsets, values in (part for rank in ranks for part in rank):
        whole = result.setdefault(name, torch.full(shape, torch.nan))
        place = tuple(slice(at, at + size) for at, size in zip(offsets, values.shape, strict=True))
        assert whole[place].isnan().all() or torch.equal(whole[place], values.float()), f"{name} differs between copies"
        whole[place] = values.float()
    assert not any(whole.isnan().any() for whole in result.values())
    return result


def split(weight: Weight, whole: Tensor) -> list[Tensor]:
    return list(whole) if weight.kind.startswith("expert") else [whole]


def torch_run(model: Model, kind: Kind) -> Wholes:
    """Run torch's optimizer on full tensors, with one tensor per expert."""
    hidden, rest, result = [], {0.0: [], 0.1: []}, {}
    for weight in list_weights(model):
        item = [
            torch.nn.Parameter(part.clone()) for part in split(weight, draw_initial_weight(weight, model=model, seed=0))
        ]
        result[weight] = item
        vector = item[0].ndim == 1
        if not vector and kind == "muon" and weight.kind not in ("embedding", "head"):
            hidden += item
        else:
            rest[0.0 if vector else 0.1] += item
    groups = [{"params": params, "weight_decay": decay} for decay, params in rest.items()]
    made: list[torch.optim.Optimizer] = [
        {
            "sgd": lambda: torch.optim.SGD(groups, lr=RATE, momentum=0.95),
            "adafactor": lambda: torch.optim.Adafactor(groups, lr=RATE, eps=(1e-15, 1e-3)),
            "adamw": lambda: torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95)),
            "muon": lambda: torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95)),
        }[kind]()
    ]
    if hidden:
        made.append(torch.optim.Muon(hidden, lr=RATE, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"))
    for step in range(STEPS):
        for weight, item in result.items():
            for parameter, part in zip(item, split(weight, gradient(weight, step)), strict=True):
                parameter.grad = part.clone()
        for one in made:
            one.step()
    return {
        weight.name: torch.stack([part.detach() for part in entry]).view(weight.shape)
        for weight, entry in result.items()
    }


LAYOUTS = [
    (DENSE, "mbs1"), (DENSE, "dp3 zero1 mbs1"), (DENSE, "dp2 tp2 zero3 mbs1"), (DENSE, "tp4 mbs1"),
    (DENSE, "dp4 zero2/2 mbs1"), (DENSE, "dp2 pp2 zero1 mbs1"), (SPARSE, "mbs1"), (SPARSE, "dp3 zero3 mbs1"),
    (SPARSE, "dp2 tp2 ep2 zero1 mbs1"), (SPARSE, "pp2 ep2 dualpipe mbs1 dp2"),
]  # fmt: skip


CHAIN = "dp2 tp2 ep2 zero1 mbs1", "dp3 zero3 mbs1", "mbs4"
CASES = [(kind, *layout) for layout in LAYOUTS for kind in ("sgd", "adafactor", "muon")]


@pytest.mark.parametrize(
    ("kind", "model", "text"), mark_share(13, CASES), ids=lambda value: getattr(value, "name", value)
)
def test_every_layout_equals_torch_on_full_weights(forked: Fork, kind: Kind, model: Model, text: str) -> None:
    if kind == "muon" and not hasattr(torch.optim, "Muon"):
        pytest.skip("torch before 2.9 has no Muon")
    layout, expected = Layout.parse(text), torch_run(model, kind)
    ours = combine_ranks([after for _, after in forked(layout.world, run_steps, model, layout, job(kind))])
    start = {weight.name: draw_initial_weight(weight, model=model, seed=0) for weight in list_weights(model)}
    for name, whole in expected.items():
        change = (whole - start[name]).norm()
        assert change > 0
        assert (ours[f"{name}/weight"] - whole).norm() <= (1e-3 if kind == "muon" else 2e-6) * change, name


@pytest.mark.parametrize(
    ("model", "text"), mark_share(3, [LAYOUTS[2], LAYOUTS[3], LAYOUTS[8]]), ids=["zero3", "tp4", "experts"]
)
def test_a_matrix_is_made_orthogonal_to_the_last_bit_as_in_one_process(forked: Fork, model: Model, text: str) -> None:
    """Without momentum what is sent is the gradient itself; bf16 would show any other sum as 1e-3."""
    task, layout = job("muon", momentum=0.0, weight_decay=0.0), Layout.parse(text)
    ours, alone = (
        combine_ranks([after for _, after in forked(item.world, run_steps, model, item, task, 0, None, 2)])
        for item in (layout, Layout.parse("mbs1"))
    )
    matrices = [name.replace("/momentum", "/weight") for name in ours if name.endswith("/momentum")]
    assert len(matrices) > 10
    for name in matrices:
        torch.testing.assert_close(ours[name], alone[name], rtol=0, atol=1e-6)


@pytest.mark.parametrize("texts", mark_share(2, [[*CHAIN[1:]], [*CHAIN]]), ids=len)
@pytest.mark.parametrize("kind", mark_share(4, ["adafactor", "sgd", "muon", "adamw"]))
def test_moments_are_resharded_between_layouts(forked: Fork, tmp_path: Path, kind: Kind, texts: Sequence[str]) -> None:
    """And every rank goes on as one process would."""
    left: Wholes | None = None
    precision = "bf16-pure" if kind == "adamw" else "fp32"
    error = {"adamw": 1e-2, "muon": 1e-3}.get(kind, 1e-5)
    for number, text in enumerate(texts):
        layout = Layout.parse(text)
        task = job(kind, precision)
        ranks = forked(layout.world, run_steps, SPARSE, layout, task, number, tmp_path / "changing", 1)
        (alone,) = forked(1, run_steps, SPARSE, Layout.parse("mbs4"), task, number, tmp_path / "alone", 1)
        result = combine_ranks([before for before, _ in ranks])
        if left is not None:
            assert result.keys() == left.keys()
            assert [name for name in result if not torch.equal(result[name], left[name])] == []
        left = combine_ranks([after for _, after in ranks])
        expected, before = combine_ranks([alone[1]]), combine_ranks([alone[0]])
        for name in (name for name in expected if not name.endswith("step")):
            change = (expected[name] - before[name]).norm()
            assert change > 0
            assert (left[name] - expected[name]).norm() <= error * change, name


def resume_with_other_kind(folder: Path) -> str:
    layout = Layout.parse("mbs1")
    run_steps(DENSE, layout, job("sgd"), folder=folder)
    try:
        run_steps(DENSE, layout, job("muon"), folder=folder)
    except UserError as error:
        return str(error)
    return ""


def test_moments_of_another_optimizer_are_rejected(forked: Fork, tmp_path: Path) -> None:
    assert (
        "holds moments of optimizer.kind=sgd, which muon cannot continue with"
        in forked(1, resume_with_other_kind, tmp_path)[0]
    )


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_fp32_adamw_equals_that_of_torch(decay: float) -> None:
    start = torch.randn(50, 7)
    ours, theirs = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    one = fp32_update.AdamW([{"params": [ours], "weight_decay": decay}], lr=0.01, betas=(0.9, 0.95), eps=1e-8)
    other = torch.optim.AdamW([theirs], lr=0.01, betas=(0.9, 0.95), weight_decay=decay, fused=True)
    for _ in range(5):
        ours.grad = torch.randn(50, 7)
        theirs.grad = ours.grad.clone()
        one.step()
        other.step()
    assert torch.equal(ours, theirs)


def test_low_precision_weights_are_updated_in_fp32_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """One step from fp32 of the same values, rounded once; a block may end anywhere."""
    monkeypatch.setattr(fp32_update, "CONVERTED_ELEMENTS", 37)
    start = torch.randn(50, 7).bfloat16()
    narrow, plain = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.float())
    for parameter in (narrow, plain):
        parameter.grad = torch.linspace(-1, 1, 350).view(50, 7).bfloat16().to(parameter.dtype)
        fp32_update.AdamW([{"params": [parameter], "weight_decay": 0.1}], lr=0.01, betas=(0.9, 0.95), eps=1e-8).step()
    assert torch.equal(narrow, plain.bfloat16())
    assert not torch.equal(narrow, start)


def groups_of(task: Job) -> dict[tuple[float, float], int]:
    built = build(model=SPARSE, layout=Layout.parse("mbs1"), job=task, device=torch.device("cpu"))
    optimizer.set_rate(built.optimizer, 1.0)
    return {(group["lr"], group["weight_decay"]): len(group["params"]) for group in built.optimizer.param_groups}


def test_parameter_groups_have_their_rates_and_weight_decays(forked: Fork) -> None:
    every = list(list_weights(SPARSE))
    vectors = sum(len(weight.shape) == 1 or weight.name.endswith("bias") for weight in every)
    rest, experts = len(every) - vectors, 3
    (usual,) = forked(1, groups_of, job("adamw"))
    assert usual == {(1.0, 0.1): rest, (1.0, 0.0): vectors}
    own = (
        Group(of="embeddings", rate=0.5),
        Group(of="head", weight_decay=0.0),
        Group(of="router", weight_decay=0.0),
        Group(of="experts", rate=2.0, weight_decay=0.3),
        Group(of="vectors", weight_decay=0.1),
    )
    (result,) = forked(1, groups_of, job("adamw", groups=own))
    assert result == {(0.5, 0.1): 1, (1.0, 0.0): 2, (2.0, 0.3): experts, (1.0, 0.1): rest - 3 - experts + vectors}


@pytest.mark.parametrize("kind", mark_share(5, ["adamw", "sgd", "adafactor", "muon", "adamw8bit"]))
def test_a_parameter_group_trains_as_a_run_with_its_rate_and_decay(forked: Fork, kind: Kind) -> None:
    """Its weights are those of a run in which all have that rate and decay; the others are what they were."""
    part = Group(of="experts", rate=0.25, weight_decay=0.4)
    layout = Layout.parse("mbs1")
    every = job(kind, weight_decay=0.4)
    every = every.replace(learning_rate=every.learning_rate.replace(peak=RATE * 0.25))
    usual, all_so, mixed = (
        combine_ranks([after for _, after in forked(1, run_steps, SPARSE, layout, task, 0, None, 2)])
        for task in (job(kind), every, job(kind, groups=(part,)))
    )
    names = [name for name in usual if name.endswith("/weight")]
    own = [name for name in names if ".experts." in name and not name.endswith("_bias/weight")]
    assert len(own) == 3
    for name in names:
        expected, other = (all_so, usual) if name in own else (usual, all_so)
        torch.testing.assert_close(mixed[name], expected[name], rtol=0, atol=1e-6, msg=name)
        assert not torch.equal(mixed[name], other[name]) or name.endswith("bias/weight"), name
