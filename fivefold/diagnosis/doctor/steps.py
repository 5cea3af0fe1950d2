"""Run two training steps of a user's own module on fake tensors: the first step, and one for every later step.

    make_model() · make_optimizer(model) · step(model, optimizer), twice     step: loss(model).backward(), update

The optimizer runs as on a GPU: with ``foreach`` where the user has left the choice to torch.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils.checkpoint import checkpoint

from fivefold.diagnosis.doctor.memory import StepLifetimes, read
from fivefold.diagnosis.doctor.watch import ForwardCall, ModuleRecorder
from fivefold.errors import UserError

FAILURES = logging.getLogger("torch._subclasses.fake_tensor")  # logs pages about exceptions that are raised anyway
NO_GPU = "Disabling autocast"  # in torch's warning for autocast("cuda") without a GPU
Step = Callable[[nn.Module, torch.optim.Optimizer], object]


class UserCode(NamedTuple):
    """The user's functions that make a step."""

    make_model: Callable[[], nn.Module]
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    step: Step


class ExaminedSteps(NamedTuple):
    """The lifetimes of two steps, the calls of followed modules, and remarks for the user."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    first: StepLifetimes
    steady: StepLifetimes
    calls: tuple[ForwardCall, ...]
    remarks: tuple[str, ...]

    @property
    def peak_step(self) -> StepLifetimes:
        """Return the step with the higher peak."""
        return max(self.steady, self.first, key=lambda lifetimes: lifetimes.peak_bytes)

    @property
    def peak_bytes(self) -> int:
        """Return the higher peak of both steps."""
        return self.peak_step.peak_bytes


def run_steps(
    user: UserCode, *, recompute_in: tuple[str, ...] = (), follow: Callable[[nn.Module], tuple[str, ...]] | None = None
) -> ExaminedSteps:
    """Run two steps, with some modules recomputed. ``follow`` chooses the modules whose calls are recorded."""
    watch = ModuleRecorder()
    with _enter_fake_mode(watch), watch:
        model, optimizer = _build(user, watch)
        watch.memo = None
        recompute(model, recompute_in)
        tapes = []
        with watch.install_hooks(model, optimizer, follow(model) if follow else ()):
            for _ in range(2):
                watch.begin()
                user.step(model, optimizer)
                states = (
                    (f"{name}.{key}", value)
                    for name, parameter in model.named_parameters()
                    for key, value in optimizer.state.get(parameter, {}).items()
                    if isinstance(value, Tensor)
                )
                watch.note(states, "optimizer")
                tapes.append(watch.finish_tape())
    first, steady = (read(tape, watch.roles) for tape in tapes)
    if steady.begin == len(steady.tape):
        raise UserError("step(model, optimizer) ran no operation; it has to train the model")
    return ExaminedSteps(model, optimizer, first, steady, tuple(watch.calls), tuple(watch.remarks))


def recompute(model: nn.Module, modules: tuple[str, ...]) -> None:
    """Wrap each module's forward in ``torch.utils.checkpoint``: it keeps its inputs and runs again in the backward."""
    for path in modules:
        part = model.get_submodule(path)
        part.forward = partial(checkpoint, part.forward, use_reentrant=False)


def make_plain_step(loss: Callable[[nn.Module], Tensor]) -> Step:
    """Return a step of one micro-batch: loss(model).backward(), optimizer.step(), zero_grad()."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        value = loss(model)
        if not isinstance(value, Tensor) or value.numel() != 1:
            what = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise UserError(f"loss(model) returned {what}; return one number, such as cross_entropy(…)")
        if not value.requires_grad:
            raise UserError("loss(model) returned a tensor without a graph; leave out no_grad and detach")
        value.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _build(user: UserCode, watch: ModuleRecorder) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Build and check the user's model and optimizer, and record their storages and remarks; raises ``UserError``."""
    model = user.make_model()
    if not isinstance(model, nn.Module):
        raise UserError(f"model() returned {type(model).__name__}; return a torch.nn.Module")
    for name, parameter in model.named_parameters():
        if parameter.device.type != "cpu" or not isinstance(parameter, FakeTensor):
            where = (
                f"is on {parameter.device}" if parameter.device.type != "cpu" else "was made before model() was called"
            )
            raise UserError(f"parameter {name} {where}; build the model inside of model(), on the default device")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserError(f"{type(model).__name__} has no parameter that requires a gradient; there is nothing to train")
    watch.note(model.named_parameters(), "parameters")
    watch.note(model.named_buffers(), "buffers")
    if not model.training:
        watch.remarks["model() returned a model in evaluation: dropout and the like are off; call train()"] = None
    if any(hasattr(part, "_orig_mod") for part in model.modules()):
        watch.remarks["torch.compile is passed over: all figures are of eager"] = None
    optimizer = user.make_optimizer(model)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UserError(f"optimizer(model) returned {type(optimizer).__name__}; return a torch.optim.Optimizer")
    for group in optimizer.param_groups:
        if group.get("foreach", False) is None and not group.get("fused"):
            group["foreach"] = True
    return model, optimizer


@contextmanager
def deepcopy_by_storage() -> Iterator[None]:
    """Make ``deepcopy`` of a fake tensor allocate one storage per tensor.

    torch's own implementation gives a tensor and its views different storages.
    """

    def deepcopy_tensor(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
        if id(tensor) not in memo:
            copy = tensor.detach().clone()
            if isinstance(tensor, nn.Parameter):
                copy = nn.Parameter(copy, tensor.requires_grad)
            memo[id(tensor)] = copy.requires_grad_(tensor.requires_grad)
        return cast("Tensor", memo[id(tensor)])

    FakeTensor.__deepcopy__ = deepcopy_tensor  # type: ignore[method-assign]
    try:
        yield
    finally:
        del FakeTensor.__deepcopy__


@contextmanager
def capture_warnings() -> Iterator[list[warnings.WarningMessage]]:
    """Collect torch's warnings in a list and silence its log of failures.

    The failures are raised as exceptions as well.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        level = FAILURES.level
        FAILURES.setLevel(logging.CRITICAL)
        try:
            yield caught
        finally:
            FAILURES.setLevel(level)


@contextmanager
def _enter_fake_mode(watch: ModuleRecorder) -> Iterator[None]:
    """Run within a ``FakeTensorMode``, with ``torch.compile`` forced to eager."""
    with (
        capture_warnings() as caught,
        deepcopy_by_storage(),
        FakeTensorMode(allow_non_fake_inputs=True) as mode,
        torch.compiler.set_stance("force_eager"),
    ):
        watch.memo = mode.fake_tensor_converter.meta_converter.tensor_memo
        yield
    if any(NO_GPU in str(warning.message) for warning in caught):
        watch.remarks["torch.autocast('cuda') does nothing without a GPU: write autocast('cpu') for the doctor"] = None
