"""Where the host waits for the device in a step: nowhere in a dense model's forward and backward, three times after."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fivefold.job import Job, get_recipe
from fivefold.layout.spec import Layout
from fivefold.model.experts import MoE
from fivefold.model.spec import Model
from fivefold.trainer.build import build
from fivefold.trainer.engine import Engine
from tests.selection import mark_share

Fork = Callable[..., list[Any]]
# operations whose result, or whose size, the host must see
READS = {"_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "_unique2", "unique_dim", "equal", "bincount"}
DENSE = Model(name="dense", layers=4, width=24, heads=4, kv_heads=2, head_dim=6, ffn=44, vocab=83)
SPARSE = DENSE.replace(name="sparse", moe=MoE(experts=4, topk=2, ffn=16, balance="free"))
PACKAGE = str(Path(sys.modules["fivefold.trainer.build"].__file__ or "").parent)


class Waits(TorchDispatchMode):
    """Who asks for numbers. What CPU tensors answer without an operation is seen by ``told``."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        indices = args[1] if func._opname.startswith("index") and isinstance(args[1], list) else ()
        masked = any(isinstance(index, Tensor) and index.dtype == torch.bool for index in indices)
        if func._opname in READS or masked:
            self.note()
        return func(*args, **(kwargs or {}))

    def note(self) -> None:
        frame: Any = sys._getframe(1)
        while not frame.f_code.co_filename.startswith(PACKAGE):
            frame = frame.f_back
            if frame is None:  # a test, or torch by itself
                return
        self.found.append(frame.f_code.co_qualname)


@contextmanager
def record_waits() -> Iterator[list[str]]:
    """Functions of the trainer that make the host wait, in order."""
    mode, names = Waits(), ("tolist", "cpu", "numpy")
    former = {name: getattr(Tensor, name) for name in names}

    def wrap_method(name: str) -> Callable[..., Any]:
        def method(tensor: Tensor, *args: Any, **options: Any) -> Any:
            mode.note()
            with torch.utils._python_dispatch._disable_current_modes():
                return former[name](tensor, *args, **options)

        return method

    for name in names:
        setattr(Tensor, name, wrap_method(name))
    try:
        with mode:
            yield mode.found
    finally:
        for name in names:
            setattr(Tensor, name, former[name])


def list_waits(model: Model, text: str, changes: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Who waits in forward and backward of a steady step, and who in all of it."""
    layout = Layout.parse(text)
    values = {"sequence": 16, "global_batch": 8, "precision": get_recipe("bf16")} | changes
    job = Job.model_validate(values)
    built = build(model=model, layout=layout, job=job, device=torch.device("cpu"))
    engine = Engine(built, model=model, layout=layout, job=job, end=0)
    rows = torch.randint(model.vocab, (layout.micro_batches(job), layout.mbs, 17))
    engine.step(rows)
    engine.zero_grad()
    inside, backward = list[str](), engine.backward

    def backward_watched(tokens: Tensor) -> Tensor:
        with record_waits() as result:
            total = backward(tokens)
        inside.extend(result)
        return total

    engine.backward = backward_watched  # type: ignore[method-assign]
    with record_waits() as whole:
        engine.step(rows)
    engine.zero_grad()
    return inside, whole


@pytest.mark.parametrize(
    ("text", "changes"),
    mark_share(3, [
        ("mbs2", {"loss": "chunked"}), ("mbs2 ac=full", {"precision": "bf16-pure"}), ("tp2 mbs2", {}),
        ("dp2 tp2 zero3 mbs2", {"loss": "chunked"}), ("cp2 mbs2", {}), ("dp2 pp2 zb1p zero1 mbs1", {}),
    ]),
)  # fmt: skip
def test_the_host_does_not_wait_in_forward_and_backward(forked: Fork, text: str, changes: dict[str, Any]) -> None:
    for inside, whole in forked(Layout.parse(text).world, list_waits, DENSE, text, changes):
        assert inside == []
        assert whole == ["Engine.step"] * 3  # loss, norm and a wish to stop, when all is under way


def test_a_step_waits_for_the_host_only_at_expert_counts_and_loss_scale(forked: Fork) -> None:
    """The rows of experts, and with a loss scale whether the gradients are finite."""
    for inside, whole in forked(2, list_waits, SPARSE, "dp2 ep2 zero1 mbs2", {"precision": "fp16"}):
        assert inside == ["DispatchPlan.read"] * 4 * 2  # layers, micro-batches
        assert whole.count("Engine.step") == 4
        assert set(whole) == {"DispatchPlan.read", "Engine.step"}
    ((inside, _),) = forked(1, list_waits, DENSE, "mbs2", {"documents": "separate"})
    assert set(inside) == {"list_self_attention_spans"}
