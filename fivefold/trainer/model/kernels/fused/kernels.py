"""The kernels of ``kernels = "triton"``: the set of memory-bound operations in Triton."""

from __future__ import annotations

from torch import nn

from fivefold.trainer.model.kernels.eager import Kernels
from fivefold.trainer.model.kernels.fused import activations, loss, norms, rotary, rows


class TritonKernels(Kernels):
    """Triton kernels: each operation reads its inputs and writes its outputs once, forward and backward."""

    rms_norm = staticmethod(norms.rms_norm)
    layer_norm = staticmethod(norms.layer_norm)
    rotate_first = staticmethod(rotary.rotate_first)
    rotate_last = staticmethod(rotary.rotate_last)
    append_rotated = staticmethod(rotary.append_rotated)
    activate = staticmethod(activations.activate)
    activate_gated = staticmethod(activations.activate_gated)
    weighted_swiglu = staticmethod(activations.weighted_swiglu)
    input_weighted_swiglu = staticmethod(activations.input_weighted_swiglu)
    weighted_clamped_swiglu = staticmethod(activations.weighted_clamped_swiglu)
    nats = staticmethod(loss.nats)
    log_sum_exp = staticmethod(loss.log_sum_exp)
    logits_to_gradient = staticmethod(loss.logits_to_gradient)
    rescale = staticmethod(loss.rescale)
    gather_rows = staticmethod(rows.gather_rows)
    sum_copies = staticmethod(rows.sum_copies)


TRITON = TritonKernels()


def attach(module: nn.Module) -> None:
    """Let every submodule of ``module`` that has ``kernels`` use Triton's."""
    for submodule in module.modules():
        if isinstance(getattr(submodule, "kernels", None), Kernels):
            submodule.kernels = TRITON  # type: ignore[assignment]
