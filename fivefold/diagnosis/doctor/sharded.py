"""Count the cost of FSDP2, tensor parallelism or recomputation of a user's module, run on one fake rank of many.

    model() under fake tensors → fully_shard | parallelize_module | torch.utils.checkpoint → three steps, metered

PyTorch's own code shards, gathers and reduces over its "fake" process group; the meter counts what rank 0 would hold
and send (``trainer/measure/loop_meter.py``). The global tensors on which DTensor computes shapes are hidden from the
meter.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes

from fivefold.diagnosis.doctor.steps import UserCode, capture_warnings, deepcopy_by_storage, recompute
from fivefold.diagnosis.doctor.user_errors import convert_user_exceptions
from fivefold.errors import UserError
from fivefold.profiling.watch_loop import METERED, Watched, watch
from fivefold.results.diagnosis import Cost
from fivefold.spelling import make_unknown_name_error

STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel, "rowwise": RowwiseParallel, "sequence": SequenceParallel,
    "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rowwise_rep": lambda: RowwiseParallel(input_layouts=Replicate()),
    "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
    "sequence_parallel": SequenceParallel,
}  # fmt: skip
Plan = Mapping[str, Any]  # name of a module, perhaps with *, → a key of STYLES or a ParallelStyle
Wrap = Callable[[nn.Module, DeviceMesh], None]


def measure_costs(
    user: UserCode,
    *,
    fsdp: int | None,
    tp: int | None,
    plan: Callable[[nn.Module], Plan] | None,
    file: str | None = None,
    report: Callable[[str], None] = lambda _: None,
) -> tuple[Cost, ...]:
    """Return the costs of the model as it is, with its blocks recomputed, under FSDP2 and under tensor parallelism."""
    wraps: list[tuple[str, int, Wrap]] = [("as it is", 1, _leave_unsharded), ("blocks recomputed", 1, _recompute)]
    if fsdp is not None:
        wraps += [
            (f"FSDP2, {fsdp} ranks", fsdp, _shard),
            ("… weights kept gathered", fsdp, _shard_gathered),
            ("… blocks recomputed", fsdp, _shard_recomputed),
        ]
    if tp is not None:
        wraps.append((f"tensor parallel, {tp} ranks", tp, _make_tensor_parallel(plan)))
    costs_of_variants = []
    for variant, ranks, wrap in wraps:
        report(variant)
        with convert_user_exceptions(file):
            costs_of_variants.append(_measure_cost(user, variant=variant, ranks=ranks, wrap=wrap))
    return tuple(costs_of_variants)


def find_blocks(model: nn.Module) -> tuple[str, ...]:
    """Return the FSDP units: members of the outermost lists of modules; for a model without lists, its children."""
    lists = [path for path, part in model.named_modules() if isinstance(part, nn.ModuleList | nn.Sequential)]
    outermost = [
        path
        for path in lists
        if not any(path.startswith(f"{other}.") or (path and not other) for other in lists if other != path)
    ]
    paths = [
        f"{path}.{name}".lstrip(".") for path in outermost for name, _ in model.get_submodule(path).named_children()
    ]
    paths = paths or [name for name, _ in model.named_children()]
    return tuple(path for path in paths if any(True for _ in model.get_submodule(path).parameters()))


def _measure_cost(user: UserCode, *, variant: str, ranks: int, wrap: Wrap) -> Cost:
    """Run three steps of rank 0 of ``ranks`` and return their cost."""
    with capture_warnings(), _init_fake_world(ranks), _hide_global_shapes():
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp" if "tensor" in variant else "dp",))
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        with _enter_mode(mode):
            model = user.make_model()
        wrap(model, mesh)  # outside of the fake mode: meshes read real ranks
        with _enter_mode(mode):
            optimizer = _make_optimizer(user, model)
            with watch(model, optimizer, mesh=mesh, fake=True) as watched:
                for _ in range(METERED):
                    user.step(model, optimizer)
    return _read(watched, variant=variant, ranks=ranks)


def _read(watched: Watched, *, variant: str, ranks: int) -> Cost:
    """Return what was measured of one variant as a ``Cost``; raises ``UserError`` if no step ended."""
    measured = watched.measured
    if measured is None:
        raise UserError("step(model, optimizer) never calls optimizer.step(); call it at the end of the step")
    return Cost(
        variant=variant,
        ranks=ranks,
        peak_bytes=measured.peak_bytes,
        parameters_bytes=measured.parameters_bytes,
        gradients_bytes=measured.gradients_bytes,
        optimizer_bytes=measured.optimizer_bytes,
        kept_bytes=measured.kept_bytes,
        flops=measured.flops,
        traffic=measured.traffic,
    )


def _make_optimizer(user: UserCode, model: nn.Module) -> torch.optim.Optimizer:
    """Return the user's optimizer.

    It runs tensor by tensor if only some parameters are DTensors, because torch's foreach kernels do not accept both.
    """
    optimizer = user.make_optimizer(model)
    mixed = len({isinstance(parameter, DTensor) for parameter in model.parameters()}) > 1
    for group in optimizer.param_groups:
        if mixed and "foreach" in group:
            group |= {"foreach": False, "fused": False}
        elif group.get("foreach", False) is None and not group.get("fused"):
            group["foreach"] = True
    return optimizer


# How it is changed


def _leave_unsharded(_model: nn.Module, _mesh: DeviceMesh) -> None:
    """Leave the model as it is."""


def _recompute(model: nn.Module, _mesh: DeviceMesh) -> None:
    recompute(model, find_blocks(model))


def _shard(model: nn.Module, mesh: DeviceMesh, *, reshard: bool = True) -> None:
    for path in find_blocks(model):
        fully_shard(model.get_submodule(path), mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=None if reshard else False)


def _shard_gathered(model: nn.Module, mesh: DeviceMesh) -> None:
    _shard(model, mesh, reshard=False)


def _shard_recomputed(model: nn.Module, mesh: DeviceMesh) -> None:
    _recompute(model, mesh)
    _shard(model, mesh)


def _make_tensor_parallel(plan: Callable[[nn.Module], Plan] | None) -> Wrap:
    """Return a function that shards a model by the styles of ``plan``, or by those of the model itself."""

    def wrap(model: nn.Module, mesh: DeviceMesh) -> None:
        module_styles = (
            plan(model) if plan is not None else getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None)
        )
        if not isinstance(module_styles, Mapping) or not module_styles:
            raise UserError("--tp needs a plan: write plan(model), which returns {'blocks.*.mlp.up': 'colwise', …}")
        parallelize_module(
            model, mesh, {name: _parse_style(name, style, model) for name, style in module_styles.items()}
        )

    return wrap


def _parse_style(name: str, style: object, model: nn.Module) -> ParallelStyle:
    """Return one entry of a plan in torch's form; raises ``UserError`` for an unknown style or module."""
    paths = [path.split(".") for path, _ in model.named_modules()]
    words = name.split(".")
    if not any(
        len(path) == len(words) and all(word in ("*", name_part) for word, name_part in zip(words, path, strict=True))
        for path in paths
    ):
        raise make_unknown_name_error(
            name, [".".join(path) for path in paths if path != [""]], kind="module of the plan"
        )
    if isinstance(style, ParallelStyle):
        return style
    if str(style) not in STYLES:
        raise make_unknown_name_error(str(style), list(STYLES), kind="style of a plan")
    return STYLES[str(style)]()


# Where it runs


@contextmanager
def _enter_mode(mode: FakeTensorMode) -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(deepcopy_by_storage())
        stack.enter_context(mode)
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


@contextmanager
def _init_fake_world(ranks: int) -> Iterator[None]:
    """Make this process rank 0 of ``ranks`` ranks, whose messages return at once."""
    if dist.is_initialized():
        raise UserError(
            "the doctor creates its own process group, but this process has one; run it in a process without"
        )
    hook = sys.excepthook  # init_process_group wraps it, and destroy_process_group does not restore it
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook


@contextmanager
def _hide_global_shapes() -> Iterator[None]:
    """Hide the global tensors on which DTensor computes shapes."""
    propagator: Any = ShardingPropagator
    original = propagator._propagate_tensor_meta_non_cached

    def propagate_hidden(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return original(*args, **kwargs)

    propagator._propagate_tensor_meta_non_cached = propagate_hidden
    try:
        yield
    finally:
        propagator._propagate_tensor_meta_non_cached = original


def check_ranks(ranks: Sequence[tuple[str, int | None]]) -> None:
    """Validate numbers of ranks; raises ``UserError`` for one outside of 2 to 65536."""
    for option, number in ranks:
        if number is not None and not 2 <= number <= 65536:
            raise UserError(f"{option} {number} must be a number of ranks from 2 to 65536")
