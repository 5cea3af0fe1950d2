"""The adapters that peft adds to routed experts; ``tests/third_party/test_adapters.py`` compares them with peft."""

from __future__ import annotations

from fivefold.adapter import Adapter
from fivefold.model.spec import Model


def count_expert_adapters(model: Model, adapter: Adapter) -> int:
    """Return the parameters of adapters that peft adds to all routed experts of ``model``, routers not included.

    Gate and up share a factor A of twice the rank.
    """
    moe = model.moe
    assert moe is not None
    layers = sum(model.is_moe(layer) for layer in range(model.layers))
    gate_up = 2 * adapter.rank * (model.width + 2 * moe.ffn)
    down = adapter.rank * (moe.ffn + model.width)
    return layers * moe.experts * (gate_up + down)
