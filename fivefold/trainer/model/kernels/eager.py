"""The memory-bound operations of a model as one replaceable set; this one runs PyTorch's own kernels one by one.

Modules call them through their attribute ``kernels``. A set that computes some of them differently derives from this
one: same inputs, outputs and saved tensors.
"""

from __future__ import annotations

from fivefold.trainer.model.kernels import activations, loss, norms, rotary, rows


class Kernels:
    """The kernels of ``kernels = "eager"``: each operation as several of PyTorch's kernels."""

    rms_norm = staticmethod(norms.rms_norm)
    layer_norm = staticmethod(norms.layer_norm)
    rotate_first = staticmethod(rotary.rotate_first)
    rotate_last = staticmethod(rotary.rotate_last)
    append_rotated = staticmethod(rotary.append_rotated)
    activate = staticmethod(activations.activate)
    xielu = staticmethod(activations.xielu)
    activate_gated = staticmethod(activations.activate_gated)
    gate_output = staticmethod(activations.gate_output)
    weighted_plain = staticmethod(activations.weighted_plain)
    weighted_gated = staticmethod(activations.weighted_gated)
    weighted_swiglu = staticmethod(activations.weighted_swiglu)
    input_weighted_swiglu = staticmethod(activations.input_weighted_swiglu)
    weighted_clamped_swiglu = staticmethod(activations.weighted_clamped_swiglu)
    nats = staticmethod(loss.nats)
    log_sum_exp = staticmethod(loss.log_sum_exp)
    logits_to_gradient = staticmethod(loss.logits_to_gradient)
    rescale = staticmethod(loss.rescale)
    gather_rows = staticmethod(rows.gather_rows)
    sum_copies = staticmethod(rows.sum_copies)


EAGER = Kernels()
