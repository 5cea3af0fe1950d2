"""The operations of RWKV-4's time mixing: shift → mix → k, v, r → core → out.

    operation   keeps for its backward                                     bytes of a token, w per element
    mix         the input and its shift, for each of k, v and r            w 2D
    core        k, v, the scan's output, the sigmoid of r                  w 4I

I channels. As ``RwkvLinearAttention`` of transformers 5.23 (``models/rwkv/modeling_rwkv.py``) saves them. The scan is
elementwise: as with norms and activations, its operations are not counted.
"""

from __future__ import annotations

from fivefold.model.mixers.rwkv import MIXED, RWKV
from fivefold.planner.counts.operations.chunks import split_sequence
from fivefold.planner.counts.operations.launches import count_launched_bytes, count_launches
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
        ops += [mix(local, source, prefix="mixer", name=name)]
        entry = LinearInput(local, f"mixer.{name}.in", in_features=model.width, rows=local.stream_rows)
        ops += [*entry.ops, entry.column(f"mixer.{name}", f"{name}.out", out_features=net.inner)]
    return [
        *ops,
        _build_core(local, net),
        *gate_by_sigmoid(local, "mixer.core", "o", "receptance.out", "og", size=size),
        *list_row_parallel(local, "mixer.out", "og", "a", in_features=net.inner, out_features=model.width, bias=False),
    ]


def _build_core(local: Local, net: RWKV) -> Op:
    """Return the scan: one kernel, or ours of PyTorch's operations on groups of chunks, which has fp32 temporaries."""
    size, kept = local.rows * net.inner * local.width, ("key.out", "value.out")
    core = elementwise("mixer.core", "scan", kept, "o", size=size, keeps=kept)
    core = core._replace(parameters=2 * net.inner, wgrad_numels=(net.inner,) * 2)
    if not local.job.stack.launches_scan("rwkv"):
        return core._replace(keeps=(*kept, "o"), backward_scratch=2 * size)
    groups = split_sequence(local, net, fused=False)
    state = 4 * local.part.sequences * net.inner  # bytes
    states = groups[0] * state
    return core._replace(
        launches=count_launches("rwkv", groups, net.chunk),
        launched_bytes=count_launched_bytes("rwkv", groups, {"channels": local.job.sequence * state}),
        forward_scratch=(9 + 2 * (local.width == 2)) * states,  # keys and values in fp32 too
        backward_scratch=(13 + 2 * (local.width == 2)) * states + (3 * len(groups) + 4 * (len(groups) > 1)) * state,
        scratch_tensor=states,
    )


def gate_by_sigmoid(local: Local, name: str, source: str, logits: str, out: str, *, size: int) -> list[Op]:
    """List the product of ``source`` and the sigmoid of ``logits``: one operation of ours, else two, which keep it."""
    if local.facts.has_own_attention_kernels:
        kept = (source, logits)
        return [elementwise(f"{name}.gate", "activation", kept, out, size=size, keeps=kept, backward_scratch=size)]
    return [
        elementwise(f"{name}.sigmoid", "activation", (logits,), "r", size=size, keeps=("r",)),
        elementwise(f"{name}.gate", "activation", (source, "r"), out, size=size, keeps=(source, "r")),
    ]


def shift(local: Local, source: str, *, prefix: str) -> Op:
    """Return the copy of ``source`` in which each token is the one before it."""
    return elementwise(f"{prefix}.shift", "activation", (source,), f"{prefix}.shifted", size=local.stream_bytes)


def mix(local: Local, source: str, *, prefix: str, name: str) -> Op:
    """Return the mean of a token and the one before it, by trained weights: → ``prefix``.``name``.in."""
    width, size, kept = local.model.width, local.stream_bytes, (source, f"{prefix}.shifted")
    op = elementwise(f"{prefix}.mix_{name}", "activation", kept, f"{prefix}.{name}.in", size=size, keeps=kept)
    scratch = 0 if local.facts.has_own_attention_kernels else 2 * local.stream_bytes  # two products
    return op._replace(parameters=width, wgrad_numels=(width,), forward_scratch=scratch, backward_scratch=scratch)
