"""nccl-tests as clouds and users print them: out-of-place times of all-reduces over full nodes of 8 GPUs.

aws-samples/awsome-distributed-training@0162aac:micro-benchmarks/nccl-tests/README.md (EFA), a fork's log of Google's
a3-megagpu-8g, and issues of NVIDIA/nccl and nccl-tests (InfiniBand). Of an instance that is named, the latency is that
of the catalog. Half of the rows are held out.

The log of a3-megagpu-8g passes on every NCCL variable of Google's profile (``README.md`` and ``startup_script.sh`` of
the same commit, plugin v1.0.3). With that plugin the profile is required, and sets algorithms, protocol, channels, the
size of chunks and a tuner (GoogleCloudPlatform/container-engine-accelerators@992db812:gpudirect-tcpxo/README.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from benchmarks.published.case import Excluded, Message, is_held_out, rows
from benchmarks.published.cells import Row, number, read_machine, read_required_integer
from benchmarks.published.convert import NOTHING, outcome
from fivefold.errors import UserError
from fivefold.machine.catalog import INSTANCES
from fivefold.machine.overrides import apply_overrides
from fivefold.machine.spec import Collective, Machine

FORCED = "NCCL's choice of algorithm, protocol or channels was overridden"
COLLECTIVES = {name: name for name in get_args(Collective)}


def _read_cluster(row: Row) -> Machine:
    machine = read_machine(row, nic_gigabits=number(row, "nic_gbps_per_gpu") or None, source=row["source"])
    instance = next((INSTANCES[word] for word in row["network"].split(", ") if word in INSTANCES), None)
    overrides = instance.list_overrides(is_counted=True) if instance else []
    latencies = [word for word in overrides if word.startswith("latency=")]
    return apply_overrides(machine, latencies, text=row["network"])


def _read_message(row: Row) -> Message:
    """Return the message of a row: its cluster, collective, bytes and seconds."""
    machine = _read_cluster(row)
    if read_required_integer(row, "nodes") * machine.ranks_per_node != machine.ranks:
        raise UserError(f"{machine.ranks} GPUs on {row['nodes']} nodes, where a node has {machine.ranks_per_node}")
    if row["collective"] not in COLLECTIVES:
        raise UserError(f"collective {row['collective']!r} is none of ours")
    size = number(row, "size_bytes")
    if size < 1 or size % 1:
        raise UserError(f"size_bytes is {row['size_bytes']!r}, which is no number of bytes")
    return Message(
        source=row["row_id"].rpartition("-")[0],
        row=row["row_id"],
        machine=machine,
        collective=COLLECTIVES[row["collective"]],
        payload=int(size),
        seconds=number(row, "time_us") * 1e-6,
        held_out=is_held_out(row["row_id"]),
    )


def read_messages(source: str) -> Iterator[Message | Excluded]:
    """Yield one message, or one exclusion, per printed size of a data file."""
    for row in rows(source):
        outcomes = outcome(row, rule=lambda row: FORCED if "NCCL_ALGO" in row["note"] else "", case=_read_message)
        if isinstance(outcomes, str):
            yield Excluded(source, row["row_id"], outcomes)
        else:
            yield outcomes if outcomes.seconds else Excluded(source, outcomes.row, NOTHING)


def cases() -> Iterator[Message | Excluded]:
    """Yield the messages of the logs, or why they are excluded."""
    return read_messages("nccl_logs")
