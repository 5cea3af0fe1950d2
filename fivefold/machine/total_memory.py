"""The memory of each chip as ``torch.cuda.get_device_properties(0).total_memory`` reports it, in bytes.

PyTorch prints the same figure as "total capacity" when it runs out of memory. It is the memory that a process can use,
which is less than ``nvidia-smi`` shows, since the driver keeps 0.4 to 2 % (an H100 of 81559 MiB has 81089 MiB).
The catalog has the figures. Each was posted publicly; drivers differ by up to 0.3 %.
"""

from __future__ import annotations

from typing import NamedTuple

from fivefold.units import GIB, MIB

POSTED = "total_memory as torch.cuda reports it"
KEPT_BY_DRIVER = (
    0.004  # share of what nvidia-smi shows: on B200 (183359 and 182631 MiB) and H200 (143771 and 143156 MiB)
)


class TotalMemory(NamedTuple):
    """The memory of a chip that a process can use, in bytes, and the source of the figure."""

    total_bytes: int
    source: str


def from_nvidia_smi(mebibytes: int) -> int:
    """Estimate the bytes of a chip for which only the figure of ``nvidia-smi`` was published."""
    return int(mebibytes * (1 - KEPT_BY_DRIVER)) * MIB


def from_posted(gibibytes: float) -> int:
    """Return the bytes of a chip whose memory was posted in GiB with two digits."""
    return int(gibibytes * GIB)
