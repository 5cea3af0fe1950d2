"""The operations of RWKV-4's time mixing: shift → mix → k, v, r → core → out.

    operation   keeps for its backward                                     bytes of a token, w per element
    mix         the input and its shift, for each of k, v and r            w 2D
    core        k, v, the scan's output, the sigmoid of r                  w 4I

I channels. As ``RwkvLinearAttention`` of transformers 5.23 (``models/rwkv/modeling_rwkv.py``) saves them. The scan is
elementwise: as with norms and activations, its operations are not counted.
"""

from __future__ import annotations

from fivefold.model.mixers.rwkv import MIXED
from fivefold.planner.counts.operations.linear import LinearInput, list_row_parallel
from fivefold.planner.counts.operations.local_shapes import Local
from fivefold.planner.counts.operations.op import Op, elementwise


def operations(local: Local, source: str) -> list[Op]:
    """List the operations ``source`` [stream rows, D] → ``a`` [stream rows, D]."""
    model, net = local.model, local.model.rwkv
    assert net is not None
    size = local.rows * net.inner * local.width
    ops = [shift(local, source, prefix="mixer")]
    for name in MIXED:
        ops += [mix(local, source, "shifted", prefix="mixer", name=name)]
        entry = LinearInput(local, f"{name}.in", in_features=model.width, rows=local.stream_rows)
        ops += [*entry.ops, entry.column(f"mixer.{name}", f"{name}.out", out_features=net.inner)]
    core = elementwise("mixer.core", "scan", ("key.out", "value.out"), "o", size=size, keeps=("key.out", "value.out"))
    core = core._replace(
        keeps=(*core.keeps, "o"), parameters=2 * net.inner, wgrad_numels=(net.inner,) * 2, backward_scratch=2 * size
    )
    sigmoid = elementwise("mixer.core.sigmoid", "activation", ("receptance.out",), "r", size=size, keeps=("r",))
    gate = elementwise("mixer.core.gate", "activation", ("o", "r"), "og", size=size, keeps=("o", "r"))
    return [
        *ops,
        core,
        sigmoid,
        gate,
        *list_row_parallel(local, "mixer.out", "og", "a", in_features=net.inner, out_features=model.width, bias=False),
    ]


def shift(local: Local, source: str, *, prefix: str) -> Op:
    """Return the copy of ``source`` in which each token is the one before it."""
    return elementwise(f"{prefix}.shift", "cast", (source,), "shifted", size=local.stream_bytes)


def mix(local: Local, source: str, shifted: str, *, prefix: str, name: str) -> Op:
    """Return the mean of a token and the one before it, by trained weights of each channel: → ``name``.in."""
    width, kept = local.model.width, (source, shifted)
    op = elementwise(f"{prefix}.mix_{name}", "activation", kept, f"{name}.in", size=local.stream_bytes, keeps=kept)
    scratch = 2 * local.stream_bytes  # two products
    return op._replace(parameters=width, wgrad_numels=(width,), forward_scratch=scratch, backward_scratch=scratch)
