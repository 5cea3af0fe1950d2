"""nccl-tests on 2 to 32 AWS p5.48xlarge with EFA: all-gathers, all-reduces and all-to-alls of 32 MiB to 8 GiB.

crazyguitar/aws-gpu-communication-benchmark@fd167f9:data (CC BY 4.0), 1,000 iterations each; seconds of the printed
out-of-place bandwidths. Read after all constants were set, so all rows are held out.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.published.case import Excluded, Message
from benchmarks.published.readers.nccl_logs import read_messages


def cases() -> Iterator[Message | Excluded]:
    """Yield one message, or one exclusion, per printed size."""
    for item in read_messages("nccl_efa"):
        yield item._replace(held_out=True) if isinstance(item, Message) else item
