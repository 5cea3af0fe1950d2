"""The interface by which the ranks of several hosts find each other. ``tests.endure.hosts`` has real ones."""

from __future__ import annotations

import socket
import sys
from typing import Any

import pytest

from fivefold.cli import command_line, hosts
from fivefold.cli.commands import train as train_command
from fivefold.cli.hosts import GLOO_INTERFACE_VARIABLE, choose_interface, find_interface, keeps_store
from fivefold.layout.spec import Layout
from tests.trainer.test_faults import set_run, workspace

__all__ = ["workspace"]

MANY = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1"}


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """This host's interfaces; it speaks to 10.… by the first, and by loopback to itself."""
    addresses = {"lo": "127.0.0.1", "eth0": "10.0.0.2", "ib0": "10.1.0.2"}
    monkeypatch.setattr(socket, "if_nameindex", lambda: list(enumerate(addresses)))
    monkeypatch.setattr(hosts, "_address", addresses.get)
    routes = {"10.0.0.1": "10.0.0.2", "host1": "10.0.0.2", "host2": "127.0.0.1"}
    monkeypatch.setattr(hosts, "_find_source_address", routes.get)
    return addresses


def choose(**environment: str) -> str | None:
    values = MANY | environment
    choose_interface(values)
    return values.get(GLOO_INTERFACE_VARIABLE)


def test_chosen_interface_is_the_one_towards_the_first_host(network: dict[str, str]) -> None:
    assert choose() == "eth0"
    assert choose(MASTER_ADDR="host1") == "eth0"


def test_a_host_whose_own_name_is_loopback_uses_its_only_other_interface(network: dict[str, str]) -> None:
    assert choose(MASTER_ADDR="host2") is None  # eth0 or ib0: it is for the user to say
    del network["ib0"]
    assert choose(MASTER_ADDR="host2") == "eth0"


def test_no_interface_is_chosen_for_one_host_or_if_the_user_chose_one(network: dict[str, str]) -> None:
    assert choose(LOCAL_WORLD_SIZE="4") is None
    assert choose(**{GLOO_INTERFACE_VARIABLE: "ib0"}) == "ib0"
    assert choose(MASTER_ADDR="unknown.invalid") is None


def test_a_store_that_torchrun_keeps_is_detected() -> None:
    kept = MANY | {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_MAX_RESTARTS": "3"}
    assert keeps_store(kept)
    assert not keeps_store(kept | {"LOCAL_WORLD_SIZE": "4"})
    assert not keeps_store(kept | {"TORCHELASTIC_MAX_RESTARTS": "0"})
    assert not keeps_store(kept | {"TORCHELASTIC_USE_AGENT_STORE": "False"})
    assert not keeps_store(MANY)  # Slurm


def test_addresses_are_read_from_the_system() -> None:
    assert hosts._address("lo") == "127.0.0.1"
    assert hosts._address("nothing0") is None
    assert hosts._find_source_address("127.0.0.1") == "127.0.0.1"
    assert find_interface("127.0.0.1") != "lo"


def test_an_automatic_layout_is_for_the_present_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun --nnodes 1:2 starts those that are left; a layout that the user has named waits for all."""
    started: list[Layout] = []

    def train(_settings: Any, layout: Layout, **_: Any) -> None:
        started.append(layout)

    monkeypatch.setattr(train_command, "_train_here", train)
    monkeypatch.setattr(command_line, "install_signal_handlers", lambda **_: None)  # the tests' own stay
    monkeypatch.setattr(sys, "argv", ["fivefold", "train", "run.toml"])
    monkeypatch.setenv("RANK", "0")
    for named in ("auto", "dp2 zero2 mbs2"):
        set_run(layout=named)
        for world in ("1", "2"):  # the machine has 2
            monkeypatch.setenv("WORLD_SIZE", world)
            with pytest.raises(SystemExit):
                command_line.main()
    assert [layout.world for layout in started] == [1, 2, 2, 2]
