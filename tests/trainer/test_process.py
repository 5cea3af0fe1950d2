"""A start has a name of its own, whatever the dead left in the store."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch._C._distributed_c10d import PrefixStore, TCPStore

from fivefold.errors import RunFailure
from fivefold.trainer import process
from fivefold.trainer.process import agree_on_store_prefix

WORLD = 3


class Peers:
    """Ranks as threads, each with a connection of its own to one store."""

    def __init__(self) -> None:
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.threads = ThreadPoolExecutor(2 * WORLD)

    def come(self, rank: int) -> Future[str]:
        store = PrefixStore("job", self.store.clone())
        return self.threads.submit(agree_on_store_prefix, store, rank=rank, world=WORLD)

    def start(self) -> set[str]:
        return {future.result(timeout=20) for future in [self.come(rank) for rank in range(WORLD)]}


def test_each_start_gets_a_new_name_that_is_equal_on_all_ranks() -> None:
    peers = Peers()
    names = [peers.start() for _ in range(4)]
    assert [len(name) for name in names] == [1] * 4
    assert len(set.union(*names)) == 4


@pytest.mark.parametrize("late", range(WORLD))
def test_ranks_of_a_new_start_do_not_join_dead_ranks(late: int) -> None:
    peers = Peers()
    (former,) = peers.start()
    early = [peers.come(rank) for rank in range(WORLD) if rank != late]
    time.sleep(0.3)
    assert not any(future.done() for future in early)
    names = {future.result(timeout=20) for future in [*early, peers.come(late)]}
    assert len(names) == 1
    assert former not in names


def test_a_rank_that_died_before_all_joined_is_not_counted() -> None:
    peers = Peers()
    dies = peers.come(1)
    first = peers.come(0)
    time.sleep(0.2)
    again = peers.come(1)  # the next incarnation of rank 1: what the other said counts no more
    assert not first.done()
    last = peers.come(2)
    assert first.result(timeout=20) == again.result(timeout=20) == last.result(timeout=20)
    assert not dies.done()


def test_a_rank_that_waits_alone_reports_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "TIMEOUT", timedelta(seconds=0.3))
    peers = Peers()
    peers.start()
    with pytest.raises(RunFailure, match=r"rank 0: not all of the 3 ranks have joined within 0:00:00\.3"):
        peers.come(0).result(timeout=20)
