"""The choice of kernels on this computer: ``fused`` means Triton's kernels on GPUs if installed, else PyTorch's."""

from __future__ import annotations

import torch

from fivefold.errors import UserError
from fivefold.job import Job
from fivefold.trainer.model.kernels.fused.launch import explain_unavailability
from fivefold.trainer.model.mixers import fused_scans


def resolve_kernels(job: Job, *, gpu: bool) -> Job:
    """Return ``job`` with the kernels that ``fused`` stands for on GPUs or CPUs; without Triton on a GPU: ``eager``."""
    stack = job.stack.with_device_kernels(gpu=gpu)
    if stack.kernels == "triton" and job.stack.kernels != "triton" and explain_unavailability():
        stack = stack.replace(kernels="eager")
    return job if stack is job.stack else job.replace(stack=stack)


def check_kernels(job: Job) -> tuple[Job, str]:
    """Return ``job`` as it runs on this computer, and a one-line warning if Triton is missing ("": it is not).

    Raises a user error if the job asks for kernels that cannot run.
    """
    if job.stack.fused_scans and (reason := fused_scans.explain_unavailability()):
        raise UserError(f"job: fused_scans=true cannot run: {reason}; drop it, or use a machine that has both")
    requires_triton = job.stack.kernels == "triton"
    has_gpu = torch.cuda.is_available()
    if not (requires_triton or has_gpu):
        return job, ""  # answered without importing Triton
    reason = explain_unavailability()
    if requires_triton and reason:
        raise UserError(f"job: kernels='triton' cannot run: {reason}; drop it, or use kernels='compiled' or 'eager'")
    if not has_gpu:
        return job, ""
    resolved_job = resolve_kernels(job, gpu=True)
    if resolved_job.stack.kernels == "eager" != job.stack.kernels:
        return (
            resolved_job,
            f"kernels='eager': {reason}, so that norms, rotary, activations and the loss are many kernels each",
        )
    return job, ""
