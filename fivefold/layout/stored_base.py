"""The base of an adapter that names none: as the model's repository stores its weights, if these are quantized."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fivefold.base_format import KEPT_IN_TRAINING

if TYPE_CHECKING:
    from fivefold.job import Job
    from fivefold.model.spec import Model
from fivefold.errors import warn


def keep_stored_base(job: Job, model: Model) -> Job:
    """Return ``job`` with the base of its adapter as the repository of ``model`` stores it; warns if that changes it.

    Another base that is named stays, and so does one in a format that transformers does not train over.
    """
    adapter, quantization = job.adapter, model.quantization
    if adapter is None or adapter.base not in (None, quantization) or quantization not in KEPT_IN_TRAINING:
        return job
    kept = adapter.replace(base=quantization, double_quantization=model.double_quantization)
    if kept == adapter:
        return job
    precision = "fp32" if job.activation_bytes == 4 else "bf16"
    renamed = f" ({adapter.name} over them is {kept.name})" if kept.name != adapter.name else ""
    message = (
        f"model {model.name!r}: adapter.base={kept.base_format and kept.base_format.label}, as "
        f"{model.repository or 'the checkpoint'} stores its weights{renamed}; for a base in 16 bits name a repository "
        f"in bf16, or add adapter.base={precision}"
    )
    warn(message)
    return job.replace(adapter=kept)
