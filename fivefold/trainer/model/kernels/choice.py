"""Which kernels a job gets on this computer: ``fused`` are Triton's on GPUs, if it is installed, else PyTorch's."""

from __future__ import annotations

import torch

from fivefold.job import Job
from fivefold.record import Mistake
from fivefold.trainer.model.kernels.fused.launch import unavailable


def settled(job: Job, *, gpu: bool) -> Job:
    """``job`` with the kernels that its ``fused`` stands for on GPUs or CPUs. Without Triton on a GPU: ``eager``."""
    stack = job.stack.on(gpu=gpu)
    if stack.kernels == "triton" and job.stack.kernels != "triton" and unavailable():
        stack = stack.replace(kernels="eager")
    return job if stack is job.stack else job.replace(stack=stack)


def check_kernels(job: Job) -> tuple[Job, str]:
    """``job`` as it runs here, and a remark in one line if Triton is missed ("": it is not).

    Raises a ``Mistake`` if it asks for Triton's kernels and they cannot run.
    """
    wanted, gpu = job.stack.kernels == "triton", torch.cuda.is_available()
    if not (wanted or gpu):
        return job, ""  # asked without loading Triton
    lack = unavailable()
    if wanted and lack:
        raise Mistake(f"job: kernels='triton' cannot run: {lack}; drop it, or take kernels='compiled' or 'eager'")
    if not gpu:
        return job, ""
    here = settled(job, gpu=True)
    if here.stack.kernels == "eager" != job.stack.kernels:
        return here, f"kernels='eager': {lack}, so that norms, rotary, activations and the loss are many kernels each"
    return job, ""
