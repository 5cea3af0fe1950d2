"""Reasonable global batches have 4 to 60 million tokens and are legal for the layout."""

from __future__ import annotations

from pathlib import Path

import pytest

from fivefold.errors import UserError
from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.machine.catalog import resolve
from fivefold.planner.questions.batches import list_reasonable_batches
from tests.planner.questions.cases import JOB, LLAMA, SMALL


def test_reasonable_batches_have_the_micro_batches_of_their_schedule() -> None:
    about = {"model": LLAMA, "machine": resolve("h100:32", local=Path("/nowhere")), "tokens": 1e12}
    job = Job(sequence=131_072, global_batch=8)
    plain, dual = (
        [
            sound_batch.micro_batches
            for sound_batch in list_reasonable_batches(job=job, layout=Layout.parse(text), **about)
        ]
        for text in ("dp2 pp16", "dp2 pp16 dualpipev")
    )
    assert dual == [size for size in plain if size >= 32]
    assert 0 < len(dual) < len(plain)


def test_reasonable_batches_have_4_to_60_million_tokens() -> None:
    sound_batches = list_reasonable_batches(job=JOB, layout=Layout(dp=128, mbs=2), tokens=1e12)
    assert [batch.micro_batches for batch in sound_batches] == [4, 8, 16, 32]
    assert all(4e6 <= batch.tokens <= 60e6 for batch in sound_batches)
    assert sound_batches[0].tokens == 4 * 2 * 128 * 4096
    assert sound_batches[0].steps == -(-(10**12) // sound_batches[0].tokens)


def test_reasonable_batches_name_their_laws_and_published_runs() -> None:
    layout = Layout(dp=64, mbs=1)
    job = JOB.replace(sequence=8192)
    sound_batches = list_reasonable_batches(job=job, layout=layout, tokens=2e12, model=LLAMA, noise=5e6)
    references = {batch.tokens: " ".join(batch.references) for batch in sound_batches}
    assert "the measured noise scale, 5.00 M" in references[512 * 8192]
    assert "DeepSeek LLM's law" in references[1024 * 8192]
    assert all(2.5e6 < batch.tokens <= 60e6 for batch in sound_batches)
    small = list_reasonable_batches(job=JOB.replace(sequence=64), layout=Layout(), tokens=1e6, model=SMALL)
    assert small[0].tokens < 4000  # where the laws say so
    assert small[-1].tokens < 200_000


@pytest.mark.parametrize("noise", [-1.0, 0.0, float("nan")])
def test_a_noise_scale_is_positive(noise: float) -> None:
    with pytest.raises(UserError, match="noise="):
        list_reasonable_batches(job=Job(sequence=512, global_batch=8), layout=Layout(), tokens=1e9, noise=noise)
