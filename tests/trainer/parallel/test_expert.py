"""Experts with a capacity over 2 and 4 ranks against one process, and what overlaps.

``tests/agree/parity`` compares all other layers.
"""

from __future__ import annotations

import weakref
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fivefold.layout.spec import Layout
from fivefold.model.spec import Model
from fivefold.trainer.model.moe import Moe
from fivefold.trainer.model.routing import Sequences
from fivefold.trainer.parallel import expert
from fivefold.trainer.parallel.collectives import Pending
from fivefold.trainer.parallel.mesh import AxisGroup, Ranks, create_ranks
from tests.selection import mark_share

D, FFN, E, K, ROWS = 16, 16, 8, 2, 32
SCALE = 1 / 50


def model(tokens: int = 8, **moe: Any) -> Model:
    """Sequences of ``tokens``. Expert 0 is asked for often, 2 and 3 never: under ep4 one rank has nothing to do."""
    fields = {
        "experts": E,
        "topk": K,
        "ffn": FFN,
        "shared_experts": 1,
        "router_bias": True,
        "expert_bias": True,
        "balance": "aux",
        "aux_coefficient": 0.5,
    }
    return Model(
        name="m",
        layers=1,
        width=D,
        heads=4,
        kv_heads=4,
        head_dim=8,
        ffn=32,
        vocab=64,
        positions=tokens,
        moe=fields | moe,
    )


def draw_inputs(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def build_full_layer(of: Model) -> Moe:
    layer = Moe(of)
    with torch.no_grad():
        for index, weight in enumerate(layer.parameters()):
            weight.copy_(draw_inputs(*weight.shape, seed=index) * 0.3)
        assert layer.router.bias is not None
        layer.router.bias[0] = 2.0
        layer.router.bias[2:4] = -100.0
    layer.scale = SCALE
    return layer


@cache
def run_alone(of: Model) -> tuple[Tensor, Tensor, dict[str, Tensor], Tensor]:
    """Output, gradient of the rows, gradients of the weights, load: of one process."""
    layer, x = build_full_layer(of), draw_inputs(ROWS, D).requires_grad_()
    layer.sequences = Sequences(of.positions)
    out = layer(x)
    out.backward(draw_inputs(ROWS, D, seed=9))
    gradients = {name: weight.grad for name, weight in layer.named_parameters() if weight.grad is not None}
    assert x.grad is not None
    return out.detach(), x.grad, gradients, layer.load


def select_local_rows(of: Model, layout: Layout, mesh: Ranks) -> Tensor:
    """Which of the rows this rank has."""
    rows = torch.arange(ROWS).view(layout.dp, -1, of.positions)[mesh["dp"].rank]
    if layout.cp_kind == "ring":
        chunks = rows.chunk(2 * layout.cp, 1)
        rows = torch.cat((chunks[mesh["cp"].rank], chunks[-1 - mesh["cp"].rank]), 1) if layout.cp > 1 else rows
    else:
        rows = rows.chunk(layout.cp, 1)[mesh["cp"].rank]
    sp = layout.sp and layout.tp > 1
    return rows.flatten().chunk(layout.tp)[mesh["tp"].rank] if sp else rows.flatten()


def select_local_part(name: str, weight: Tensor, mesh: Ranks) -> Tensor:
    if not name.startswith("experts."):
        return weight
    part = weight.chunk(mesh["ep"].size)[mesh["ep"].rank]
    dim = {"experts.down": 2, "experts.down_bias": None}.get(name, 1)
    return part if dim is None else part.chunk(mesh["etp"].size, dim)[mesh["etp"].rank]


def spread(text: str, of: Model) -> tuple[Moe, Layout, Ranks]:
    layout = Layout.parse(text)
    mesh = create_ranks(layout, kv_heads=of.kv_heads, device=torch.device("cpu"), experts=True)
    layer = build_full_layer(of)
    sp, zigzag = layout.sp and layout.tp > 1, layout.cp_kind == "ring"
    expert.attach(layer, mesh, sp=sp, sequence=of.positions, zigzag=zigzag)
    for name, weight in list(layer.named_parameters()):
        owner, _, attribute = name.rpartition(".")
        part = select_local_part(name, weight.detach(), mesh).clone()
        setattr(layer.get_submodule(owner), attribute, nn.Parameter(part))
    return layer, layout, mesh


def run_rank(text: str, of: Model) -> dict[str, Any]:
    """Return one rank's share of ``run_alone``."""
    layer, layout, mesh = spread(text, of)
    rows = select_local_rows(of, layout, mesh)
    x = draw_inputs(ROWS, D)[rows].requires_grad_()
    out = layer(x)
    out.backward(draw_inputs(ROWS, D, seed=9)[rows])
    gradients = {name: weight.grad for name, weight in layer.named_parameters()}
    places = {name: mesh[name].rank for name in ("ep", "etp")}
    return {
        "rows": rows,
        "out": out.detach(),
        "x": x.grad,
        "gradients": gradients,
        "load": layer.load,
        **places,
    }


def measure_error(text: str, of: Model, answers: list[dict[str, Any]]) -> float:
    """The largest relative error over all ranks; gradients of the same weight are summed, as ZeRO does."""
    layout, (out, x, gradients, load) = Layout.parse(text), run_alone(of)
    errors = [_error(a["out"], out[a["rows"]]) for a in answers] + [_error(a["x"], x[a["rows"]]) for a in answers]
    copies = layout.tp if layout.tp > 1 and not layout.sp else 1
    total: dict[Any, Tensor] = {}
    for answer in answers:
        for name, gradient in answer["gradients"].items():
            inside = name.startswith("experts.")
            key = (name, *((answer["ep"], answer["etp"]) if inside else ()))
            total[key] = total.get(key, 0) + gradient / (1 if inside else copies)
    for (name, *place), result in total.items():
        places = zip(("ep", "etp"), place or (0, 0), strict=True)
        axes = {axis: SimpleNamespace(rank=rank, size=getattr(layout, axis)) for axis, rank in places}
        errors.append(_error(result, select_local_part(name, gradients[name], axes)))  # type: ignore[arg-type]
    errors.append(_error(sum(a["load"] for a in answers) / copies, load.float()))
    return max(errors)


def _error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm().clamp(min=1e-9))


@pytest.mark.parametrize(
    ("layout", "tokens"),
    mark_share(2, [("dp2 ep2", 8), ("cp2 ep2", 16), ("tp2 ep2", 32), ("cp2 cp=ulysses ep2", 8), ("cp2 tp2 ep4", 32)]),
)
def test_the_capacity_drops_the_same_tokens_under_every_layout(forked, layout: str, tokens: int) -> None:
    of = model(tokens, capacity=0.6, score="sigmoid", balance="free")
    assert (run_alone(of)[0] - run_alone(model(tokens, score="sigmoid", balance="free"))[0]).norm() > 0.1  # some are
    assert measure_error(layout, of, forked(Layout.parse(layout).world, run_rank, layout, of)) < 1e-5


ALL_TO_ALL = expert.all_to_all


def balance(text: str, of: Model) -> tuple[Tensor, Tensor, int]:
    """Load that was reported, biases that came of it, and what is left of the load."""
    layer, layout, mesh = spread(text, of)
    layer(draw_inputs(ROWS, D)[select_local_rows(of, layout, mesh)].requires_grad_()).sum().backward()
    total = expert.balance(layer, mesh["dp"], mesh["cp"], mesh["tp"])
    return total, layer.bias, int(layer.load.sum())


def test_expert_load_is_summed_over_ranks_and_biases_stay_equal(forked) -> None:
    of = model(balance="free")
    load = run_alone(of)[3]
    for total, bias, left in forked(4, balance, "dp2 tp2 ep4", of):
        assert total.tolist() == [load.tolist()]
        assert bias.tolist() == pytest.approx([1e-3 if item < ROWS * K / E else -1e-3 for item in load.tolist()])
        assert left == 0


def test_module_built_on_meta_gets_its_buffers() -> None:
    with torch.device("meta"):
        layer = Moe(model())
    nobody = AxisGroup("", 0, (0,), None)
    here = Ranks(0, 1, torch.device("cpu"), dict.fromkeys(("ep", "etp", "tp", "cp"), nobody))
    expert.attach(layer, here, sp=False)
    assert layer.load.tolist() == layer.bias.tolist() == [0] * E


def test_the_backward_frees_the_order_of_received_rows_before_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan was an attribute of the graph's nodes, which last as long as the loss."""
    plans = []

    class Plan(expert.DispatchPlan):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            plans.append(weakref.ref(self))

    monkeypatch.setattr(expert, "DispatchPlan", Plan)
    layer, alone = build_full_layer(model()), AxisGroup("ep", 0, (0,), None)
    layer.sequences, layer.dispatcher = Sequences(8), expert.AllToAllDispatcher(alone, alone)
    loss = layer(draw_inputs(ROWS, D).requires_grad_()).sum()
    assert [plan() is None for plan in plans] == [False]
    loss.backward()
    assert [plan() is None for plan in plans] == [True]


def record_overlap(text: str) -> list[str]:
    """What one rank did in which order, forward and backward."""
    did: list[str] = []
    of = model()
    layer, layout, mesh = spread(text, of)

    class Watched(Pending):
        def wait(self) -> Tensor:
            did.append("wait")
            return super().wait()

    def exchange_watched(x: Tensor, axis: Any, **sizes: Any) -> Pending:
        pending = ALL_TO_ALL(x, axis, **sizes)
        did.append("start")
        pending.__class__ = Watched
        return pending

    expert.all_to_all = exchange_watched  # type: ignore[assignment]
    assert layer.shared is not None
    layer.shared.register_forward_hook(lambda *_: did.append("shared"))
    x = draw_inputs(ROWS, D)[select_local_rows(of, layout, mesh)].requires_grad_()
    out = layer(x)
    layer.shared.gate.weight.collect = lambda _gradient: did.append("shared")  # type: ignore[attr-defined]
    for name in ("gate", "down"):
        layer.experts.get_parameter(name).collect = lambda _gradient, name=name: did.append(name)  # type: ignore[attr-defined]
    did.append("backward")
    out.sum().backward()
    return did


def test_shared_experts_compute_during_the_token_exchange(forked) -> None:
    """Forward: counts; rows and weights start; shared; both arrive; back. Backward the mirror, and the gradients of
    the experts' first weights meanwhile.
    """
    for did in forked(2, record_overlap, "dp2 ep2"):
        forward = "start wait start start shared wait wait start wait"
        assert " ".join(did) == f"{forward} backward start wait down start start gate shared wait wait"
