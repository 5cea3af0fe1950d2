"""Multi-host settings of a rank: what torchrun and Slurm put into its environment, and its network interface.

The interface is the one that routes to the first host. By default Gloo takes the address of this host's own name,
which in Debian's /etc/hosts is 127.0.1.1. NCCL chooses by itself, and may take several at once.
"""

from __future__ import annotations

import fcntl
import socket
import struct
from collections.abc import Mapping, MutableMapping

GLOO_INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
RESTARTS = "FIVEFOLD_RESTARTS"  # set by the script of a Slurm job
_SIOCGIFADDR = 0x8915  # <linux/sockios.h>: the address of an interface
_NAME_BYTES, _REQUEST_BYTES = 16, 40  # of struct ifreq


def choose_interface(environment: MutableMapping[str, str]) -> None:
    """Set the interface in the ``environment`` of a rank, unless all ranks are on this host or the user has set it."""
    if GLOO_INTERFACE_VARIABLE in environment or environment.get("WORLD_SIZE") == environment.get("LOCAL_WORLD_SIZE"):
        return
    if name := find_interface(environment["MASTER_ADDR"]):
        environment[GLOO_INTERFACE_VARIABLE] = name


def keeps_store(environment: Mapping[str, str]) -> bool:
    """Tell whether torchrun may restart this rank of several hosts with a store unknown to a new torchrun."""
    has_several_hosts = environment.get("WORLD_SIZE") != environment.get("LOCAL_WORLD_SIZE")
    can_restart = int(environment.get("TORCHELASTIC_MAX_RESTARTS", 0)) > 0
    return has_several_hosts and can_restart and environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def count_restarts(environment: Mapping[str, str]) -> int:
    """Return how often torchrun, or the script of a Slurm job, has started all ranks again."""
    return int(environment.get(RESTARTS) or environment.get("TORCHELASTIC_RESTART_COUNT") or 0)


def find_interface(host: str) -> str | None:
    """Return the interface that routes to ``host``; for this host itself, its only non-loopback one. None: unknown."""
    addresses = {name: address for _, name in socket.if_nameindex() if (address := _address(name))}
    source_address = _find_source_address(host)
    if source_address is None or source_address.startswith("127."):
        external = [name for name, address in addresses.items() if not address.startswith("127.")]
        return external[0] if len(external) == 1 else None
    return next((name for name, address in addresses.items() if address == source_address), None)


def _find_source_address(host: str) -> str | None:
    """Return the IPv4 address with which this host would connect to ``host``; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp_socket:
        try:
            udp_socket.connect((host, 9))
        except OSError:
            return None
        return str(udp_socket.getsockname()[0])


def _address(interface: str) -> str | None:
    """Return the IPv4 address of ``interface``, if it has one."""
    request = struct.pack(f"{_REQUEST_BYTES}s", interface.encode()[: _NAME_BYTES - 1])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, request)
        except OSError:
            return None
    return socket.inet_ntoa(answer[_NAME_BYTES + 4 : _NAME_BYTES + 8])
