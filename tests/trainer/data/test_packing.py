"""Packed sequences: as TRL packs them, every sample once, targets within samples, counts as they are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.errors import UserError
from fivefold.trainer.data.packing import IGNORED, LAST, PackedLoader, PairLoader, pack
from fivefold.trainer.data.prepare import prepare
from fivefold.trainer.data.samples import describe_split, show_pair, show_sample
from fivefold.trainer.data.shards import Shards
from fivefold.trainer.data.supervised import sample_format
from tests.trainer.data.conversations import conversations, preferences, write_lines, write_tokenizer

SEQUENCE = 96


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Shards:
    folder = tmp_path_factory.mktemp("packing")
    tokenizer = str(write_tokenizer(folder / "tokenizer"))
    lines = write_lines(folder / "a.jsonl", conversations(120))
    samples = sample_format("messages", tokenizer=tokenizer)
    prepare(str(lines), tokenizer=tokenizer, directory=folder / "out", holdout=0.1, samples=samples, shard_tokens=777)
    return Shards.open(folder / "out")


@given(st.lists(st.integers(1, 50), max_size=60))
def test_best_fit_packing_puts_every_sample_in_one_bin(lengths: list[int]) -> None:
    bins = pack(np.array(lengths, np.int64), size=50)
    assert sorted(item for members in bins for item in members) == list(range(len(lengths)))
    room: list[int] = []  # replayed slowly: each item goes where the least room is left
    for item in sorted(range(len(lengths)), key=lambda item: -lengths[item]):
        fitting = [left for left in room if left >= lengths[item]]
        room.append(50) if not fitting else None
        room[room.index(min(fitting, default=50))] -= lengths[item]
    assert sorted(50 - sum(lengths[item] for item in members) for members in bins) == sorted(room)


def samples_of(loader: PackedLoader) -> list[tuple[list[int], list[int]]]:
    """Inputs and targets of every sample in every sequence, without padding."""
    found = []
    for row in loader.rows(np.arange(loader.windows)):
        inputs, targets = row[: loader.sequence], row[loader.sequence :]
        begin = 0
        for end in np.flatnonzero(targets == LAST) + 1:
            found.append((inputs[begin:end].tolist(), targets[begin:end].tolist()))
            begin = end
        assert (targets[begin:] == IGNORED).all()
        assert (inputs[begin:] == loader.shards.tokenizer.end).all()
    return found


@pytest.mark.parametrize("packing", ["best-fit", "none"])
@pytest.mark.parametrize("excess", ["truncate", "drop"])
def test_sequences_hold_every_sample_once(shards: Shards, packing: str, excess: str) -> None:
    loader = PackedLoader(shards, sequence=SEQUENCE, seed=3, packing=packing, excess=excess)  # type: ignore[arg-type]
    expected, trained = [], 0
    for start, stop in zip([0, *shards.read_ends("train")[:-1]], shards.read_ends("train"), strict=True):
        count = int(min(stop - start, SEQUENCE))
        tokens = shards.read("train", start=int(start), count=count).astype(np.int64)
        marks = shards.marks["train"][start : start + count]
        if marks.any() and (excess == "truncate" or stop - start <= SEQUENCE):
            expected.append((tokens.tolist(), [*np.where(marks[1:], tokens[1:], IGNORED).tolist(), LAST]))
            trained += int(marks.sum())
    assert sorted(samples_of(loader)) == sorted(expected)
    assert any(length > SEQUENCE for length in loader.full_lengths)
    every = np.arange(loader.windows)
    assert loader.count_targets(every) == trained
    for position in every[:5]:
        assert loader.count_targets(position[None]) == (loader.rows(position[None])[:, SEQUENCE:] >= 0).sum()
    assert packing == "none" or loader.windows < len(expected)


def test_several_ranks_read_the_samples_that_one_rank_reads(shards: Shards) -> None:
    loader = PackedLoader(shards, sequence=SEQUENCE, seed=3)
    one = loader.batch(8, global_batch=8, rank=0, ranks=1, micro_batches=8, mbs=1)[:, 0]
    two = [loader.batch(8, global_batch=8, rank=rank, ranks=2, micro_batches=2, mbs=2) for rank in (0, 1)]
    assert np.array_equal(np.stack(two, axis=1).reshape(8, -1), one)


def test_too_few_samples_are_an_error(shards: Shards) -> None:
    loader = PackedLoader(shards, sequence=SEQUENCE, seed=3)
    with pytest.raises(UserError, match=r"samples fill \d+ sequences of 96 tokens, but a batch needs 1000"):
        loader.check(global_batch=1000)


def test_truncated_samples_are_reported(shards: Shards) -> None:
    loader = PackedLoader(shards, sequence=SEQUENCE, seed=3)
    longer = int((loader.full_lengths > SEQUENCE).sum())
    lost = 100 * (1 - int(loader.counts.sum()) / int(shards.marks["train"].sum()))
    line = loader.describe_excess()
    assert line is not None
    assert line.startswith(f"{longer} of {len(loader.full_lengths)} train samples are longer than 96 tokens and lose")
    assert line.endswith(f"{lost:.1f} % of all trained tokens")
    assert line in describe_split(loader)
    dropping = PackedLoader(shards, sequence=SEQUENCE, seed=3, excess="drop")
    assert "are left out" in (dropping.describe_excess() or "")
    assert PackedLoader(shards, sequence=4096, seed=3).describe_excess() is None


def test_a_sample_shows_what_is_trained(shards: Shards) -> None:
    head, *text = show_sample(shards, 0, sequence=SEQUENCE).split("\n")
    assert head.startswith("sample 0: ")
    shown = "\n".join(text)
    assert "<|im_start|>assistant\n⟦It was " in shown
    assert shown.count("⟦") == shown.count("⟧") >= 1


def test_a_missing_file_of_marks_is_an_error(tmp_path: Path) -> None:
    lines = write_lines(tmp_path / "a.jsonl", [{"prompt": str(n), "completion": "x"} for n in range(9)])
    form = sample_format("completions", tokenizer="bytes")
    prepare(str(lines), directory=tmp_path / "out", holdout=0, samples=form)
    (tmp_path / "out" / "train-trained.bin").unlink()
    with pytest.raises(UserError, match=r"train-trained\.bin cannot be read"):
        Shards.open(tmp_path / "out")


@pytest.mark.parametrize("chat", [False, True])
def test_pairs_stay_together_in_any_order(tmp_path: Path, chat: bool) -> None:
    tokenizer, records = str(write_tokenizer(tmp_path / "tokenizer")), preferences(24, chat=chat)
    if chat:  # without a prompt of their own, some begin with it
        for record in records[::2]:
            prompt = record.pop("prompt")
            record |= {end: [*prompt, *record[end]] for end in ("chosen", "rejected")}
    form = sample_format("preferences", tokenizer=tokenizer)
    lines = write_lines(tmp_path / "a.jsonl", records)
    prepare(str(lines), tokenizer=tokenizer, directory=tmp_path / "out", holdout=0.2, samples=form)
    shards = Shards.open(tmp_path / "out")
    assert shards.index.train.documents + shards.index.heldout.documents == 2 * len(records)
    loader = PairLoader(shards, sequence=128, seed=3)
    rows = loader.rows(np.arange(2 * loader.windows))
    assert loader.count_targets(np.arange(6)) == 3
    for chosen, rejected in rows.reshape(-1, 2, 2, 128):
        (start,) = (min(np.flatnonzero(targets >= 0)[0] for _, targets in (chosen, rejected)),)
        assert (chosen[0][: start + 1] == rejected[0][: start + 1]).all()  # the prompt
        assert not np.array_equal(chosen[0], rejected[0])
    first, second = np.split(rows, 2)
    assert not np.array_equal(first, second)
    assert {row.tobytes() for row in first} == {row.tobytes() for row in second}
    assert "pairs" in describe_split(loader)
    shown = show_pair(shards, 0, sequence=128)
    assert shown.startswith("pair 0, chosen: ")
    assert "\npair 0, rejected: " in shown


@pytest.mark.parametrize("excess", ["truncate", "drop"])
def test_a_pair_is_left_out_as_a_whole(tmp_path: Path, excess: str) -> None:
    records = [{"prompt": "p" * 9, "chosen": "c" * length, "rejected": "r"} for length in (3, 5, 40)]
    records.append({"prompt": "q" * 40, "chosen": "c", "rejected": "r"})
    form = sample_format("preferences", tokenizer="bytes")
    prepare(str(write_lines(tmp_path / "a.jsonl", records)), directory=tmp_path / "out", holdout=0, samples=form)
    loader = PairLoader(Shards.open(tmp_path / "out"), sequence=20, seed=0, excess=excess)  # type: ignore[arg-type]
    assert loader.windows == 2 * (3 if excess == "truncate" else 2)
