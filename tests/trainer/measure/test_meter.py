"""What the meter counts as live, and what it leaves to the transport."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

from fivefold.trainer.measure.meter import Meter


def test_a_storage_counts_from_the_operation_that_allocates_it_until_it_is_freed() -> None:
    weights = torch.empty(100)
    with Meter([weights], axis=str) as meter:
        made = weights + 1
        half = made[:50]
        assert meter.live_bytes == 800
        del made
        assert meter.live_bytes == 800
        del half
        assert meter.live_bytes == 400
    assert (meter.base_bytes, meter.peak_bytes) == (400, 800)


def test_views_of_a_buffer_that_the_step_did_not_allocate_are_not_counted() -> None:
    """gloo's ``wait`` splits a copy of the input that gloo made, and may hold it for a moment after."""
    buffer, out = torch.ones(100), torch.empty(50)
    with Meter([out], axis=str) as meter:
        out.copy_(buffer.split(50)[1])
        assert meter.live_bytes == meter.peak_bytes == 200


def test_compiled_module_stays_compiled_after_a_metered_step() -> None:
    """Under a dispatch mode PyTorch's compiler skips a function, and does ever after."""
    ran: list[str] = []

    def backend(graph: Any, _inputs: object) -> Any:
        def run(*inputs: Any) -> Any:
            ran.append("compiled")
            return graph.forward(*inputs)

        return run

    double = torch.compile(lambda x: x * 2, backend=backend)
    x = torch.ones(3)
    for metered in (False, True, False):
        ran.clear()
        with Meter([x], axis=str) if metered else nullcontext() as meter:
            assert double(x).tolist() == [2.0] * 3
        assert ran == ([] if metered else ["compiled"])
        assert meter is None or meter.peak_bytes - meter.base_bytes == x.nbytes
