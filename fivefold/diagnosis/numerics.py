"""Measure a precision recipe's error against fp32: one batch, the same weights, compared tensor by tensor.

    weights ──┬─> fp32 ────> every result, its gradient, the gradients of weights ──┐
              └─> recipe ──> the same, each compared as it is made <────────────────┘

Both run in the trainer, in one process; hooks only observe. The tensors of fp32 wait in host memory. The run of the
recipe uses the experts that fp32 has chosen; otherwise rows could not be compared.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fivefold.errors import RunFailure
from fivefold.job import RECIPES, Job
from fivefold.layout.schedule import schedule
from fivefold.layout.spec import Layout
from fivefold.model.spec import Model
from fivefold.results.numerics import Compared, Kind, Numerics
from fivefold.trainer.build import Built, build
from fivefold.trainer.checkpoint.full_weights import gather_full
from fivefold.trainer.engine import Engine
from fivefold.trainer.generate.source import WeightSource
from fivefold.trainer.model.experts import Experts
from fivefold.trainer.model.float8.blocks import has_block_scales, widen_blocks
from fivefold.trainer.model.float8.cast import Cast, widen
from fivefold.trainer.model.linear import Linear
from fivefold.trainer.optimizers.loss_scaling import INITIAL_SCALE

MOVING_OPERATIONS = ("enter", "leave", "dispatch", "send", "arrive", "return")  # operations that only move values
MIN_RELATIVE_VALUE = (
    2.0**-20
)  # relative to the largest: a smaller fp32 value may be only rounding, so 0 is no underflow there
COMPARED_ELEMENTS = 2**17  # elements compared at a time: their fp64 copies stay in the cache
Place = tuple[Kind, int | None, str]  # kind, layer (None outside of blocks), name


@dataclass
class ErrorStats:
    """Running error statistics of the tensors of one place (a: the recipe's values, b: fp32's)."""

    elements: int = 0
    underflow: int = 0
    overflow: int = 0
    largest: float = 0.0
    difference: float = 0.0  # Σ (a − b)²
    squared: float = 0.0  # Σ a²
    reference: float = 0.0  # Σ b²
    product: float = 0.0  # Σ a·b

    def add(self, observed: Tensor, wanted: Tensor, *, top: float, scale: float = 1.0) -> None:
        """Compare ``found`` ÷ ``scale`` with ``wanted``.

        Values with abs(found) ≥ ``top``, the largest value of the format, count as overflow.
        """
        values = observed.detach().reshape(-1)
        expected = wanted.to(observed.device).reshape(-1)
        noise = MIN_RELATIVE_VALUE * float(expected.abs().max()) if expected.numel() else 0.0
        self.elements += values.numel()
        for value_piece, expected_piece in zip(
            values.split(COMPARED_ELEMENTS), expected.split(COMPARED_ELEMENTS), strict=True
        ):
            a, b = value_piece.double(), expected_piece.double()
            is_overflow = ~(a.abs() < top)
            self.underflow += int(((a == 0) & (b.abs() > noise)).sum())
            self.overflow += int(is_overflow.sum())
            a = (a / scale).masked_fill_(is_overflow, 0)
            b = b.masked_fill_(is_overflow, 0)
            if a.numel():
                self.largest = max(self.largest, float(a.abs().max()))
            self.squared, self.reference = self.squared + float(a.dot(a)), self.reference + float(b.dot(b))
            self.product += float(a.dot(b))
            self.difference += float(a.sub_(b).dot(a))

    def to_row(self, place: Place) -> Compared:
        """Return the statistics as a row of the report: relative error, cosine, shares of underflow and overflow."""
        kind, layer, name = place
        count = max(1, self.elements)
        norm_product = math.sqrt(self.squared * self.reference)
        equal_cosine = 1.0 if self.difference == 0 else 0.0
        return Compared(
            kind=kind,
            layer=layer,
            name=name,
            elements=self.elements,
            underflow=self.underflow / count,
            overflow=self.overflow / count,
            largest=self.largest,
            error=math.sqrt(self.difference / self.reference) if self.reference else math.sqrt(self.difference),
            cosine=max(-1.0, min(1.0, self.product / norm_product)) if norm_product else equal_cosine,
        )


@dataclass
class TensorProbe:
    """The tensors of one run: kept, or compared as they are made if there is a ``reference`` run."""

    reference: TensorProbe | None = None
    scale: float = 1.0  # loss scale, which gradients carry
    tensors: dict[tuple[Place, int], Tensor] = field(default_factory=dict)
    tallies: dict[Place, ErrorStats] = field(default_factory=dict)
    choices: int = 0  # (token, expert) choices compared
    rerouted: int = 0  # choices that differ from those of fp32
    loss: float = math.nan

    def take(self, place: Place, index: int, observed: Tensor) -> None:
        """Keep or compare the ``index``-th tensor of a place."""
        if self.reference is None:
            self.tensors[place, index] = observed.detach().to("cpu", copy=True)
            return
        expected = self.reference.tensors[place, index]
        scale = 1.0 if place[0] == "activation" else self.scale
        tally = self.tallies.setdefault(place, ErrorStats())
        tally.add(observed, expected, top=torch.finfo(observed.dtype).max, scale=scale)

    def cast(self, place: Place, x: Tensor, cast: Cast) -> None:
        """Compare a matmul's operand with its fp8 cast.

        A value that rounds to the format's largest is no overflow, so there is none in MXFP8 and NVFP4.
        """
        if has_block_scales(cast):
            widened = widen_blocks(cast, columns=x.shape[-1]).double()
            self.tallies.setdefault(place, ErrorStats()).add(widened, x, top=torch.inf)
            return
        info = torch.finfo(cast.data.dtype)
        step = info.eps * 2.0 ** math.floor(math.log2(info.max))
        ones = widen(cast._replace(data=torch.ones_like(cast.data)), torch.float32).double()
        top = (info.max + step / 2) * ones
        value, widened = x.double(), widen(cast, torch.float32).double()
        observed = widened.masked_fill(value.abs() >= top, torch.inf)
        self.tallies.setdefault(place, ErrorStats()).add(observed, x, top=torch.inf)

    def pick(self, place: Place, function: Callable[..., Any], *inputs: Any) -> Any:
        """Run the choice of experts, but return the reference's choice; count where the two differ."""
        if self.reference is None:
            routing = function(*inputs)
            self.tensors[place, 1] = routing[1].cpu()
            return routing
        with torch.no_grad():
            own_choice = function(*inputs)[1]
        chosen = self.reference.tensors[place, 1].to(own_choice.device)
        self.choices += own_choice.numel()
        self.rerouted += int((own_choice[:, :, None] != chosen[:, None, :]).all(-1).sum())
        return function(*inputs, chosen=chosen)

    def rows(self) -> tuple[Compared, ...]:
        """Return a row per place, in order of first occurrence."""
        return tuple(tally.to_row(place) for place, tally in self.tallies.items())


def examine(
    *,
    model: Model,
    job: Job,
    source: WeightSource | None,
    tokens: NDArray[Any],
    end: int,
    device: torch.device,
    report: Callable[[str, int, int], None],
) -> Numerics:
    """Compare ``job``'s recipe with fp32 on ``tokens`` [sequences, T + 1]; weights of ``source``, or initialised.

    ``end``: ID of the end-of-document token, at which attention ends if the job's documents are separate.

    Needs a process group of one rank. With loss scaling, the scale is halved, as in training, until no gradient of a
    weight overflows. ``report(what, done, total)`` is called before each run. Raises ``RunFailure`` if the loss in fp32
    is not finite.
    """
    weights = None if source is None else source.weights(dtype=torch.float32)
    job = job.replace(compile=False)
    run = partial(_run, model=model, weights=weights, tokens=torch.from_numpy(tokens), end=end, device=device)
    report("fp32", 0, 2)
    reference = run(TensorProbe(), job=job.replace(precision=RECIPES["fp32"]))
    report(job.precision.name, 1, 2)
    scale = INITIAL_SCALE if job.precision.loss_scaling else 1.0
    probe = reference
    while True:
        probe = run(TensorProbe(reference, scale=scale), job=job)
        gradients = [row for row in probe.rows() if row.kind == "weight"]
        if scale <= 1 or all(row.overflow == 0 for row in gradients):
            break
        scale /= 2
    return Numerics(
        model=model.name,
        recipe=job.precision.name,
        weights="drawn" if source is None else str(source.path),
        tokens=tokens[:, 1:].size,
        loss=probe.loss if math.isfinite(probe.loss) else None,
        reference_loss=reference.loss,
        loss_scale=scale,
        rows=probe.rows(),
        rerouted=probe.rerouted / probe.choices if probe.choices else None,
    )


def _run(
    probe: TensorProbe,
    *,
    job: Job,
    model: Model,
    weights: dict[str, Tensor] | None,
    tokens: Tensor,
    end: int,
    device: torch.device,
) -> TensorProbe:
    """Run one micro-batch forward and backward in the trainer, scaled as in the job's step; return ``probe``."""
    layout = Layout.parse(f"dp1 mbs{len(tokens)}")
    table = schedule(layout.schedule, pp=1, v=1, micro_batches=1)
    built = build(model=model, layout=layout, job=job, device=device, table=table)
    if weights is not None:
        _load_weights(built, weights)
    engine = Engine(built, model=model, layout=layout, job=job, end=end)
    engine.scale = probe.scale / job.tokens_per_step
    for moe in engine.moe_layers.values():
        moe.scale = engine.scale
    with probe_module(built.module, probe):
        total = engine.backward(tokens[None])
    probe.loss = float(total.view(-1)[0]) / engine.scale / (len(tokens) * job.sequence)
    if probe.reference is None and not math.isfinite(probe.loss):
        raise RunFailure(
            f"the loss in fp32 is {probe.loss}: these weights cannot be compared; use an earlier checkpoint"
        )
    rows = [
        torch.zeros_like(weight) if weight.grad is None else weight.grad
        for weight in (shard.weight for shard in built.shards)
    ]
    for name, gradient in gather_full(built, rows).items():
        layer = int(name.split(".")[1]) if name.startswith("blocks.") else None
        short_name = name.removesuffix(".weight").removeprefix(f"blocks.{layer}.")
        probe.take(("weight", layer, short_name), 0, gradient)
    return probe


@torch.no_grad()
def _load_weights(built: Built, weights: dict[str, Tensor]) -> None:
    """Copy full ``weights``, by name, into the shards."""
    for shard in built.shards:
        shard.weight.copy_(shard.select_rows(weights[shard.name]))
    for name, tensor in built.router_tensors.items():
        tensor.copy_(weights[name])
    for unit in built.units:
        unit.on_optimizer_step()


@contextmanager
def probe_module(module: nn.Module, probe: TensorProbe) -> Iterator[None]:
    """Pass the result of every operation of ``module``, and its gradient, to ``probe`` within this context."""
    hooks = []
    for layer, block in enumerate(module.get_submodule("blocks").children()):
        for path, part in block.named_modules():
            if hasattr(part, "run"):
                part.run = partial(_observe_operation, probe, layer, part.run)
            if isinstance(part, Linear | Experts) and hasattr(part.gemms, "casts"):
                part.gemms = _observe_casts(part.gemms, probe, layer, path)
        hooks.append(block.register_forward_hook(partial(_observe_output, probe, layer, "stream")))
    outside = ("embed", "head.norm", "head.out")
    hooks += [
        module.get_submodule(path).register_forward_hook(partial(_observe_output, probe, None, path))
        for path in outside
    ]
    yield
    for hook in hooks:
        hook.remove()


def _observe_operation(
    probe: TensorProbe, layer: int, run: Callable[..., Any], name: str, function: Any, *inputs: Any
) -> Any:
    """Run one operation in place of a module's ``run``, and observe its result."""
    if name == "moe.topk":
        return run(name, partial(probe.pick, ("activation", layer, name), function), *inputs)
    result = run(name, function, *inputs)
    if name.split(".")[-1] not in MOVING_OPERATIONS:
        _observe(probe, layer, name, result)
    return result


def _observe_output(
    probe: TensorProbe, layer: int | None, name: str, _module: nn.Module, _inputs: Any, output: Any
) -> None:
    _observe(probe, layer, name, output)


def _observe(probe: TensorProbe, layer: int | None, name: str, output: Any) -> None:
    for index, tensor in enumerate(output if isinstance(output, tuple) else (output,)):
        probe.take(("activation", layer, name), index, tensor)
        if tensor.requires_grad:
            tensor.register_hook(partial(_observe_gradient, probe, ("gradient", layer, name), index))


def _observe_gradient(probe: TensorProbe, place: Place, index: int, gradient: Tensor) -> None:
    probe.take(place, index, gradient)


def _observe_casts(gemms: Any, probe: TensorProbe, layer: int, path: str) -> Any:
    """Return a copy of fp8 ``gemms`` whose casts are observed."""
    observed_gemms = copy.copy(gemms)
    roles = {"x": "x", "gradient": "gradient", "weight": "weight", "weight_back": "weight"}
    observed_gemms.casts = gemms.casts._replace(
        **{
            role: partial(_cast, probe, ("operand", layer, f"{path} {name}"), getattr(gemms.casts, role))
            for role, name in roles.items()
        }
    )
    return observed_gemms


def _cast(probe: TensorProbe, place: Place, caster: Callable[[Tensor], Cast], x: Tensor) -> Cast:
    cast = caster(x)
    probe.cast(place, x, cast)
    return cast
