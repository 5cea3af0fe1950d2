"""Scratch memory of operations that a single Triton kernel computes: next to none.

The lists of operations count the scratch of PyTorch's kernels, which hand full tensors to one another (``op.py``).
"""

from __future__ import annotations

from fivefold.job import count_norm_programs
from fivefold.planner.counts.operations.local_shapes import Local
from fivefold.planner.counts.operations.op import Op

STATISTIC = 4  # bytes of an fp32 number of a row


def fuse_kernels(op: Op, local: Local) -> Op:
    """Return ``op`` as ``trainer/model/kernels/fused/`` computes it, if the job's kernels are Triton's."""
    if local.job.stack.kernels != "triton":
        return op
    if op.kind == "norm" and op.batch == 1:  # there is no kernel for norms with weights per head
        if not op.wgrad_numels:  # no weights, so no partial sums of their gradients
            return op._replace(forward_scratch=0, backward_scratch=0)
        width = op.wgrad_numels[0]
        rows = op.moved_bytes // (2 * local.width * width)
        partial = count_norm_programs(rows, width) * sum(op.wgrad_numels) * STATISTIC
        return op._replace(forward_scratch=0, backward_scratch=partial)
    if op.kind == "rope" or (op.kind == "activation" and op.name.endswith(".act") and not op.parameters):
        return op._replace(forward_scratch=0, backward_scratch=0)
    if op.kind == "loss" and local.job.stack.loss_facts.in_place:  # log Σ exp and the target's logit
        return op._replace(forward_scratch=2 * STATISTIC * op.shape[0])
    return op
