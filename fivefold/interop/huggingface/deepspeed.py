"""Sizes in elements of DeepSpeed's buckets, and of what ZeRO-3 gathers ahead and keeps: read and written.

``auto`` follows from the model's width: transformers/integrations/deepspeed.py (5.23.0), trainer_config_finalize.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fivefold.interop.keys import Values
from fivefold.record import Mistake
from fivefold.stack.spec import Stack

PREFIX = "deepspeed.zero_optimization."
OF_WIDTH: dict[str, Callable[[int], int]] = {
    f"{PREFIX}reduce_bucket_size": lambda width: width * width,
    f"{PREFIX}stage3_prefetch_bucket_size": lambda width: int(0.9 * width * width),
    f"{PREFIX}stage3_param_persistence_threshold": lambda width: 10 * width,
}
STAGE_3 = {
    "stage3_prefetch_bucket_size": "fetch_ahead", "stage3_param_persistence_threshold": "fetch_small",
    "stage3_max_live_parameters": "fetch_live", "stage3_max_reuse_distance": "fetch_reuse",
}  # fmt: skip
MOST = 2**48


def sizes(values: Values) -> dict[str, Any]:
    """Fields of the stack by path."""
    found = dict[str, Any]()
    for name, ours in {"reduce_bucket_size": "reduce_bucket", **STAGE_3}.items():
        value = values[PREFIX + name]
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MOST:
            raise Mistake(f"{values.origin}: {name} is {value!r}; it is a number of elements, from 0 to {MOST}")
        found[f"job.stack.{ours}"] = int(value)
    return found


def written_sizes(stack: Stack, *, zero: int) -> dict[str, int]:
    """Keys of ``zero_optimization`` for a stage."""
    found = {"reduce_bucket_size": stack.reduce_bucket} if zero and stack.reduce_bucket else {}
    if zero == 3 and stack.fetch == "weights":
        found |= {name: getattr(stack, ours) for name, ours in STAGE_3.items()}
    return found
