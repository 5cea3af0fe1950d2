"""What the engine runs so far, out of all that the planner plans. Refused before a process starts."""

from __future__ import annotations

from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.record import Mistake


def check_supported(layout: Layout, job: Job) -> None:
    """Raise a ``Mistake`` of one line for an axis or a kernel that the engine does not have yet."""
    plain = Layout(dp=layout.dp, zero=layout.zero, shard_group=layout.shard_group, mbs=layout.mbs)
    if layout != plain:
        raise Mistake(f"layout {str(layout)!r}: the engine runs dp, zero and mbs so far; try {str(plain)!r}")
    wanted = {"attention": job.attention, "loss": job.loss, "kernels": job.kernels, "reduce": job.reduce,
              "optimizer": job.optimizer.kind, "offload": "+".join(job.offload) or "nothing",
              "vocab_multiple": str(job.vocab_multiple)}  # fmt: skip
    has = {"attention": "flash", "loss": "fused", "kernels": "fused", "reduce": "step", "optimizer": "adamw",
           "offload": "nothing", "vocab_multiple": "1"}  # fmt: skip
    for field, value in wanted.items():
        if value != has[field]:
            raise Mistake(f"job: the engine has {field}={has[field]} so far, not {value}; `predict` plans both")
