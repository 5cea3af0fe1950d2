"""What PyTorch's pipelines hold of a stage: its output until its backward has ended; inputs and gradients in buffers.

Source: pytorch/pytorch@v2.13.0:torch/distributed/pipelining/stage.py, fwd_cache, args_recv_info and grad_recv_info.
"""

from __future__ import annotations

from fivefold.job import Job
from fivefold.layout.spec import Layout


class StageBuffers:
    """Bytes by stage, of ``stages``; ``stream``: of one input or output."""

    def __init__(self, layout: Layout, job: Job, *, stages: int, stream: int) -> None:
        self.stages, self.stream = stages, stream
        self.received = layout.pp > 1 and job.stack.received == "held"  # lives in a buffer of each micro-batch
        self.outputs = layout.pp > 1 and job.stack.outputs == "held"
        self.graph = job.stack.deferred == "graph"  # stays between B and W
        self.turn = stages // 2 - 1 if layout.pipeline.places_v else -1  # whose next is on the same rank

    def output(self, stage: int) -> int:
        """Bytes of a stage's output, if it lives until its backward has ended: not of the last, nor where it is the
        input of the next on the same rank.
        """
        return self.stream * (self.outputs and stage < self.stages - 1 and stage != self.turn)

    def of_graph(self, stage: int) -> int:
        """Bytes of what a stage keeps between B and W that are counted as buffers: its input, its output's gradient."""
        return self.stream * (self.graph and self.received) * ((stage > 0) + (stage < self.stages - 1))
