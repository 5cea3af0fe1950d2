"""The loader: every window once per epoch, in an order that ranks, micro-batches and restarts do not change."""

from collections import Counter
from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from fivefold.errors import UserError
from fivefold.trainer.data.loader import Loader, list_heldout_batches, permute
from fivefold.trainer.data.prepare import prepare
from fivefold.trainer.data.shards import Shards

SEQUENCE = 16


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Shards:
    folder = tmp_path_factory.mktemp("data")
    (folder / "a.jsonl").write_text("".join(f'{{"text": "document {i}"}}\n' for i in range(300)))
    prepare(str(folder / "a.jsonl"), directory=folder / "out", holdout=0.2, shard_tokens=1000)
    return Shards.open(folder / "out")


@pytest.fixture(scope="module")
def loader(shards: Shards) -> Loader:
    return Loader(shards, sequence=SEQUENCE, seed=7)


def rows(loader: Loader, start: int, stop: int) -> NDArray[np.int64]:
    return loader.rows(np.arange(start, stop))


@given(size=st.integers(1, 5000), seed=st.integers(0, 2**63), epoch=st.integers(0, 10**6))
def test_the_order_of_samples_is_a_permutation(size: int, seed: int, epoch: int) -> None:
    result = permute(np.arange(size), size=size, seed=seed, epoch=epoch)
    assert np.array_equal(np.sort(result), np.arange(size))


def test_a_permutation_of_a_trillion_needs_no_memory() -> None:
    size = 10**12
    result = permute(np.arange(0, size, size // 1000), size=size, seed=1, epoch=0)
    assert len(set(result.tolist())) == len(result)
    assert result.min() >= 0
    assert size * 0.99 < result.max() < size
    assert abs(result.mean() / size - 0.5) < 0.05


def test_the_order_of_samples_is_well_mixed() -> None:
    result = permute(np.arange(4000), size=4000, seed=3, epoch=5)
    assert abs(np.corrcoef(result[:-1], result[1:])[0, 1]) < 0.06  # 4 standard errors
    assert abs(np.corrcoef(np.arange(4000), result)[0, 1]) < 0.06
    assert np.mean(np.diff(result) == 1) < 0.005


def test_the_order_of_samples_equals_the_recorded_one() -> None:
    """A change here would break the exact resume of every run."""
    assert permute(np.arange(10), size=10, seed=0, epoch=0).tolist() == FROZEN
    assert permute(np.array([3, 1]), size=10, seed=0, epoch=0).tolist() == [FROZEN[3], FROZEN[1]]


FROZEN = [1, 3, 0, 9, 2, 6, 8, 5, 7, 4]


def test_an_epoch_reads_every_window_once(loader: Loader, shards: Shards) -> None:
    tokens = shards.read("train", start=0, count=shards.index.train.tokens).astype(np.int64)
    assert loader.windows == (len(tokens) - 1) // SEQUENCE > 100
    windows = [tuple(tokens[i * SEQUENCE : (i + 1) * SEQUENCE + 1].tolist()) for i in range(loader.windows)]
    first, second = (rows(loader, n * loader.windows, (n + 1) * loader.windows) for n in (0, 1))
    assert Counter(map(tuple, first.tolist())) == Counter(map(tuple, second.tolist())) == Counter(windows)
    assert not np.array_equal(first, second)
    other = Loader(shards, sequence=SEQUENCE, seed=8)
    assert not np.array_equal(rows(other, 0, loader.windows), first)


def test_samples_are_read_across_epochs_and_out_of_order(loader: Loader) -> None:
    edge = loader.windows
    ahead = rows(loader, edge - 3, edge + 3)
    assert np.array_equal(loader.rows(np.arange(edge + 2, edge - 4, -1)), ahead[::-1])


def step(loader: Loader, number: int, *, ranks: int, micro_batches: int, mbs: int) -> NDArray[np.int64]:
    """All samples of a step in their global order, as the ranks read them."""
    read = [
        loader.batch(number * 24, global_batch=24, rank=rank, ranks=ranks, micro_batches=micro_batches, mbs=mbs)
        for rank in range(ranks)
    ]
    return np.stack(read, axis=1).reshape(24, SEQUENCE + 1)


@pytest.mark.parametrize(
    ("ranks", "micro_batches", "mbs"), [(1, 1, 24), (1, 24, 1), (2, 3, 4), (3, 4, 2), (24, 1, 1), (4, 1, 6)]
)
def test_a_step_is_the_same_for_any_ranks_and_micro_batches(
    ranks: int, micro_batches: int, mbs: int, loader: Loader
) -> None:
    for number in (0, 5, 11):  # step 11 crosses into another epoch
        expected = rows(loader, number * 24, (number + 1) * 24)
        assert np.array_equal(step(loader, number, ranks=ranks, micro_batches=micro_batches, mbs=mbs), expected)


def test_a_resumed_loader_continues_with_the_next_sample(loader: Loader, shards: Shards) -> None:
    whole = [step(loader, number, ranks=2, micro_batches=3, mbs=4) for number in range(20)]
    resumed = Loader(Shards.open(shards.directory), sequence=SEQUENCE, seed=7)
    for number in range(9, 20):  # with other ranks as well
        assert np.array_equal(step(resumed, number, ranks=4, micro_batches=6, mbs=1), whole[number])


def test_a_global_batch_that_ranks_and_micro_batches_do_not_give_is_an_error(loader: Loader) -> None:
    with pytest.raises(ValueError, match="2 ranks x 3 micro-batches x mbs 4 is not the global batch of 25"):
        loader.batch(0, global_batch=25, rank=0, ranks=2, micro_batches=3, mbs=4)


def test_a_corpus_shorter_than_one_batch_is_an_error(loader: Loader, shards: Shards) -> None:
    tokens = shards.index.train.tokens
    loader.check(global_batch=loader.windows)
    too_many = loader.windows + 1
    message = f"train holds {tokens} tokens, but {too_many} sequences of 16 need {too_many * 16 + 1}; add text or lower"
    for refuse in (
        lambda: loader.check(global_batch=too_many),
        lambda: loader.batch(0, global_batch=too_many, rank=0, ranks=1, micro_batches=1, mbs=too_many),
    ):
        with pytest.raises(UserError, match=message):
            refuse()
    Loader(shards, sequence=tokens - 1, seed=0)
    with pytest.raises(UserError, match=f"train holds {tokens} tokens, but 1 sequences of {tokens} need {tokens + 1}"):
        Loader(shards, sequence=tokens, seed=0)
    with pytest.raises(UserError, match=r"heldout holds \d+ tokens.*raise the held-out share"):
        next(list_heldout_batches(Loader(shards, split="heldout", sequence=tokens - 1, seed=0), rows=1, mbs=1))


def test_heldout_batches_are_always_the_same(shards: Shards) -> None:
    whole = np.concatenate(
        list(list_heldout_batches(Loader(shards, split="heldout", sequence=SEQUENCE, seed=0), rows=24, mbs=6))
    )
    assert whole.shape == (24, SEQUENCE + 1)
    assert len(np.unique(whole, axis=0)) == 24
    for ranks, mbs in ((2, 6), (4, 2), (1, 1)):
        read = [
            list(
                list_heldout_batches(
                    Loader(shards, split="heldout", sequence=SEQUENCE, seed=0), rows=24, mbs=mbs, rank=rank, ranks=ranks
                )
            )
            for rank in range(ranks)
        ]
        assert np.array_equal(np.stack(read, axis=1).reshape(whole.shape), whole)


def test_heldout_batches_are_as_many_on_every_rank(shards: Shards) -> None:
    loader = Loader(shards, split="heldout", sequence=SEQUENCE, seed=0)
    windows = (shards.index.heldout.tokens - 1) // SEQUENCE

    def count(*, rows: int, mbs: int) -> list[int]:
        """Count the batches of each rank, at most one more than there are windows: a wrong bound is no long loop."""
        batches = (list_heldout_batches(loader, rows=rows, mbs=mbs, rank=rank, ranks=2) for rank in (0, 1))
        return [len(list(islice(some, windows + 1))) for some in batches]

    assert count(rows=25, mbs=4) == [3, 3]
    assert count(rows=1, mbs=4) == [1, 1]
    assert count(rows=10**9, mbs=4) == [windows // 8] * 2
    assert count(rows=10**9, mbs=windows) == [1, 1]


@pytest.mark.parametrize("number", [-1, 5, 6, 7, 8, 10**6])
def test_a_number_outside_the_permutation_is_an_error(number: int) -> None:
    """Walking its cycle could go on for ever: no number of it may lie inside."""
    with pytest.raises(ValueError, match="is not one of the 5 numbers"):
        permute(np.array([0, number]), size=5, seed=1, epoch=0)


def test_samples_may_have_extra_tokens_for_multi_token_prediction(loader: Loader, shards: Shards) -> None:
    """For multi-token prediction: the same windows, with the tokens that follow them."""
    further = Loader(shards, sequence=SEQUENCE, seed=7, ahead=3)
    assert further.windows in (loader.windows, loader.windows - 1)
    tokens = shards.read("train", start=0, count=shards.index.train.tokens).astype(np.int64)
    windows = {tuple(tokens[start : start + SEQUENCE + 4]) for start in range(0, len(tokens) - SEQUENCE - 3, SEQUENCE)}
    result = further.rows(np.arange(further.windows))
    assert result.shape == (further.windows, SEQUENCE + 4)
    assert {tuple(row) for row in result.tolist()} == windows
    batch = further.batch(0, global_batch=6, rank=1, ranks=2, micro_batches=1, mbs=3)
    assert batch.shape == (1, 3, SEQUENCE + 4)
