"""What a rank of several hosts finds in its environment, and the interface by which it speaks to the others.

That is the one by which it reaches the first of them. Left alone, Gloo takes the address that this host's own name has,
which in Debian's /etc/hosts is 127.0.1.1. NCCL looks for itself, and may take several at once.
"""

from __future__ import annotations

import fcntl
import socket
import struct
from collections.abc import Mapping, MutableMapping

VARIABLE = "GLOO_SOCKET_IFNAME"
RESTARTS = "FIVEFOLD_RESTARTS"  # set by the script of a Slurm job
_SIOCGIFADDR = 0x8915  # <linux/sockios.h>: the address of an interface
_NAME_BYTES, _REQUEST_BYTES = 16, 40  # of struct ifreq


def choose_interface(environment: MutableMapping[str, str]) -> None:
    """Put the interface into the ``environment`` of a rank, unless all ranks are on this host or the user has."""
    if VARIABLE in environment or environment.get("WORLD_SIZE") == environment.get("LOCAL_WORLD_SIZE"):
        return
    if name := towards(environment["MASTER_ADDR"]):
        environment[VARIABLE] = name


def keeps_store(environment: Mapping[str, str]) -> bool:
    """Whether torchrun may start this rank of several hosts again, with a store that no new torchrun is told of."""
    several = environment.get("WORLD_SIZE") != environment.get("LOCAL_WORLD_SIZE")
    again = int(environment.get("TORCHELASTIC_MAX_RESTARTS", 0)) > 0
    return several and again and environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def count_restarts(environment: Mapping[str, str]) -> int:
    """Return how often torchrun, or the script of a Slurm job, has started all ranks again."""
    return int(environment.get(RESTARTS) or environment.get("TORCHELASTIC_RESTART_COUNT") or 0)


def towards(host: str) -> str | None:
    """The interface by which ``host`` is reached; to itself, a host's only other than loopback. None: who knows."""
    addresses = {name: address for _, name in socket.if_nameindex() if (address := _address(name))}
    mine = _source(host)
    if mine is None or mine.startswith("127."):
        others = [name for name, address in addresses.items() if not address.startswith("127.")]
        return others[0] if len(others) == 1 else None
    return next((name for name, address in addresses.items() if address == mine), None)


def _source(host: str) -> str | None:
    """The IPv4 address with which this host would speak to ``host``; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as speaking:
        try:
            speaking.connect((host, 9))
        except OSError:
            return None
        return str(speaking.getsockname()[0])


def _address(interface: str) -> str | None:
    """The IPv4 address of ``interface``, if it has one."""
    asked = struct.pack(f"{_REQUEST_BYTES}s", interface.encode()[: _NAME_BYTES - 1])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, asked)
        except OSError:
            return None
    return socket.inet_ntoa(answer[_NAME_BYTES + 4 : _NAME_BYTES + 8])
