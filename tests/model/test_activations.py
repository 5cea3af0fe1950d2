"""Records of activations and norms: one for each name, and an implementation for each record."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from fivefold.errors import UserError
from fivefold.interop.megatron.keys import ACTIVATIONS as MEGATRON
from fivefold.interop.megatron.keys import NORM
from fivefold.interop.megatron_bridge.emit import FUNCTIONS as BRIDGE
from fivefold.model.activations import ACTIVATIONS, ActivationName
from fivefold.model.catalog import build_model
from fivefold.model.huggingface.mapping import NAMES
from fivefold.model.norms import NORMS, NormName
from fivefold.model.spec import Model
from fivefold.model.weights import list_weights
from fivefold.trainer.model.kernels import kinds
from fivefold.trainer.model.kernels.activations import FUNCTIONS
from fivefold.trainer.model.kernels.eager import EAGER
from fivefold.trainer.model.kernels.fused.kernels import TRITON
from fivefold.trainer.model.kernels.kinds import DENSE, INPUT_WEIGHTED, WEIGHTED
from fivefold.trainer.model.norm import BUILDERS, LayerNorm, build_norm


def test_every_activation_and_norm_name_has_a_record() -> None:
    assert tuple(ACTIVATIONS) == get_args(ActivationName)
    assert tuple(NORMS) == get_args(NormName)
    assert len(NAMES) == sum(len(activation.huggingface) for activation in ACTIVATIONS.values())


def test_the_trainer_computes_every_record() -> None:
    numbers = {name for name, record in ACTIVATIONS.items() if record.parameters}  # have a kernel of their own
    assert all(hasattr(kernels, name) for kernels in (EAGER, TRITON) for name in numbers)
    assert FUNCTIONS.keys() == set(DENSE)
    assert FUNCTIONS.keys() | WEIGHTED.keys() | numbers == ACTIVATIONS.keys()
    assert not FUNCTIONS.keys() & numbers
    clamped = {name for name, record in ACTIVATIONS.items() if record.clamps}
    assert clamped | numbers == ACTIVATIONS.keys() - FUNCTIONS.keys()
    assert {function.kind for name, function in FUNCTIONS.items() if not ACTIVATIONS[name].value} < set(range(6))
    assert FUNCTIONS["silu"].kind == kinds.SILU
    for kernels in (EAGER, TRITON):
        assert all(hasattr(kernels, method) for method in (*WEIGHTED.values(), *INPUT_WEIGHTED.values()))
    assert WEIGHTED.keys() == {name for name, record in ACTIVATIONS.items() if record.has_weighted_kernel}
    assert BUILDERS.keys() == NORMS.keys() == set(NORM.values())


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_gradient_is_the_derivative_of_the_function(name: ActivationName) -> None:
    x, step, function = torch.linspace(-6, 6, 240, dtype=torch.float64), 1e-6, FUNCTIONS[name]
    slope = (function.of(x + step) - function.of(x - step)) / (2 * step)
    torch.testing.assert_close(function.gradient(torch.ones_like(x), x), slope, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", NORMS)
def test_a_norm_has_the_bias_of_its_record(name: NormName) -> None:
    model = build_model("nano").replace(norm=name)
    module = build_norm(model, model.width)
    assert (isinstance(module, LayerNorm) and module.bias is not None) == NORMS[name].has_bias
    biases = [weight for weight in list_weights(model) if weight.name.endswith("norm1.bias")]
    assert bool(biases) == NORMS[name].has_bias
    assert not [w for w in list_weights(model.replace(norm_bias=False)) if w.name.endswith("norm1.bias")]


def test_activation_names_of_other_software_are_all_known() -> None:
    assert set(MEGATRON.values()) | BRIDGE.keys() <= ACTIVATIONS.keys()


@pytest.mark.parametrize(("field", "value"), [("activation", "mish"), ("norm", "batchnorm")])
def test_an_unknown_name_is_rejected(field: str, value: str) -> None:
    with pytest.raises(UserError, match=f"{field} must be '"):
        Model.read({**build_model("nano").model_dump(), field: value}, origin="x")
