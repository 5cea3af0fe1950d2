"""Overrides of a machine on the command line: ``l40s:320 nic=100Gbit/node`` changes the catalog's network.

nic=100Gbit       between nodes, per GPU and direction      100Gbit/node: shared by the GPUs of a node
latency=20us      of a message between nodes
link=200GB        within a node, per GPU and direction      node=4: GPUs per node
memory=80GiB      per GPU       hbm=2TB: bytes/s            watts=350      price=2.5: dollars per GPU and hour
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from fivefold.errors import UserError
from fivefold.machine.spec import Link, Machine
from fivefold.spelling import make_unknown_name_error
from fivefold.units import GIB, KIB, MIB

SIZES = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": 2**40}
SECONDS = {"us": 1e-6, "ms": 1e-3}
BITS = {"Mbit": 10**6, "Gbit": 10**9, "Tbit": 10**12}
OWNER = "as named by its owner"


def apply_overrides(machine: Machine, words: list[str], *, text: str) -> Machine:
    """Apply each ``KEY=VALUE`` of ``words`` to ``machine``; ``text``: the user's full text, for a ``UserError``."""
    value_by_key: dict[str, str] = {}
    for word in words:
        key, _, value = word.partition("=")
        if key not in WORDS:
            raise make_unknown_name_error(key, list(WORDS), kind="word of a machine")
        if key in value_by_key:
            raise UserError(f"machine {text!r}: {word!r} sets {key} a second time; keep one")
        value_by_key[key] = value
    for key in (key for key in WORDS if key in value_by_key):  # node comes first, as 100Gbit/node depends on it
        try:
            changed = WORDS[key](machine, value_by_key[key])
        except ValueError as error:
            raise UserError(f"machine {text!r}: {key}={value_by_key[key]} {error}") from None
        machine = Machine.read(changed.model_dump(), origin=f"machine {text!r}: {key}={value_by_key[key]}")
    return machine.replace(name=" ".join([machine.name, *words]))


def _override_node(machine: Machine, value: str) -> Machine:
    if not (value.isascii() and value.isdigit() and len(value) < 8 and int(value)):
        raise ValueError("is not a number of GPUs; write node=8")
    near, *rest = machine.links
    size = int(value)
    links = (_copy(near, span=size), *(_copy(link, span=max(link.span, size)) for link in rest))
    return machine.model_copy(update={"ranks_per_node": size, "links": links})


def _override_nic(machine: Machine, value: str) -> Machine:
    sharers = machine.ranks_per_node if value.endswith("/node") else 1
    return _override_outer_link(machine, bandwidth=_parse_rate(value.removesuffix("/node")) / sharers)


def _override_latency(machine: Machine, value: str) -> Machine:
    return _override_outer_link(machine, latency_seconds=_parse_quantity(value, SECONDS, such="20us"))


def _override_outer_link(machine: Machine, **changes: object) -> Machine:
    if len(machine.links) < 2:
        raise ValueError(f"needs links between nodes, and {machine.name} has none; leave it out")
    outer_link = _copy(machine.links[-1], **changes)
    return machine.model_copy(update={"links": (*machine.links[:-1], outer_link)})


def _link(machine: Machine, value: str) -> Machine:
    near, *rest = machine.links
    rate = _parse_rate(value)
    switch = near.reduction_bandwidth and near.reduction_bandwidth * rate / near.bandwidth
    return machine.model_copy(update={"links": (_copy(near, bandwidth=rate, reduction_bandwidth=switch), *rest)})


def _copy(link: Link, **changes: object) -> Link:
    return link.model_copy(update={**changes, "source": f"{OWNER}; else {link.source}"})


def _override_chip(field: str, read: Callable[[str], float]) -> Callable[[Machine, str], Machine]:
    def change(machine: Machine, value: str) -> Machine:
        source = f"{field} {OWNER}; else {machine.chip.source}"
        chip = machine.chip.model_copy(update={field: read(value), "source": source})
        return machine.model_copy(update={"chip": chip})

    return change


def _price(machine: Machine, value: str) -> Machine:
    return machine.model_copy(update={"dollars_per_rank_hour": _number(value)})


def _number(text: str) -> float:
    if not re.fullmatch(r"[0-9]{1,12}(\.[0-9]{1,12})?", text):
        raise ValueError("is not a number; write for example 2.5")
    return float(text)


def _parse_quantity(text: str, units: Mapping[str, float], *, such: str) -> float:
    match = re.fullmatch(r"([0-9]{1,12}(?:\.[0-9]{1,12})?) ?([A-Za-z]+)", text)
    if match is None or match[2] not in units:
        raise ValueError(f"is not a number and a unit; write for example {such}")
    return float(match[1]) * units[match[2]]


def _parse_rate(text: str) -> float:
    bits = {unit: size / 8 for unit, size in BITS.items()}
    return _parse_quantity(text.removesuffix("/s"), {**SIZES, **bits}, such="100Gbit, 100Gbit/node or 12.5GB")


def _parse_bytes(text: str) -> float:
    return int(_parse_quantity(text, SIZES, such="80GiB"))


WORDS: dict[str, Callable[[Machine, str], Machine]] = {
    "node": _override_node,
    "nic": _override_nic,
    "latency": _override_latency,
    "link": _link,
    "memory": _override_chip("memory_bytes", _parse_bytes),
    "hbm": _override_chip("memory_bandwidth", _parse_rate),
    "watts": _override_chip("power_watts", _number),
    "price": _price,
}
