"""The real command trains a small model of each kind of layer on two processes, and its counts are those predicted."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fivefold.job import Job, get_recipe
from fivefold.layout.spec import Layout
from fivefold.layout.validity import is_legal
from fivefold.machine.toml import emit
from fivefold.model.spec import Model
from fivefold.results.step_comparison import compare, read_pair
from tests.agree.parity.families import model_of
from tests.selection import mark_share
from tests.trainer.test_faults import RUN, set_run, workspace  # noqa: F401

VOCAB = 256  # of the bytes of a corpus
# The family of Hugging Face whose small config has the kind.
KINDS = {
    "Gated DeltaNet": "qwen3_next",
    "Kimi delta attention": "kimi_linear",
    "Mamba-1": "jamba",
    "Mamba-2": "bamba",
    "lightning attention": "minimax",
    "short convolution": "lfm2",
    "RG-LRU": "recurrent_gemma",
    "RWKV": "rwkv",
    "indexer": "deepseek_v32",
    "compressed keys, hashed experts, hyper-connections": "deepseek_v4",
    "latent experts": "nemotron_h",
    "experts of attention": "jetmoe",
    "per-layer inputs": "gemma4_text",
    "shared keys, streams, sparse gates": "gemma3n_text",
}
LAYOUTS = ("dp2 zero2 mbs2", "tp2 mbs2", "pp2 mbs1", "cp2 mbs2 cp=ulysses", "dp2 ep2 zero1 mbs2")
MIN_LEGAL = 50  # of the 70 pairs


def build_model(kind: str, layout: Layout) -> Model:
    """Build the small model of a kind for tokens that are bytes, with heads that two processes can share."""
    model = model_of(KINDS[kind], layout).replace(vocab=VOCAB)
    if model.per_layer_inputs is not None:
        model = model.replace(per_layer_inputs=model.per_layer_inputs.replace(vocab=VOCAB))
    return model if model.kimi_delta is None else model.replace(kimi_delta=model.kimi_delta.replace(heads=4))


def list_cases() -> Iterator[tuple[str, str]]:
    job = Job(sequence=32, global_batch=8, precision=get_recipe("fp32"))
    for kind in KINDS:
        for text in LAYOUTS:
            layout = Layout.parse(text)
            if is_legal(layout, model=build_model(kind, layout), job=job):
                yield kind, text


def test_most_kinds_take_most_layouts() -> None:
    cases = [*list_cases()]
    assert {kind for kind, _ in cases} == {*KINDS}
    assert len(cases) >= MIN_LEGAL


@pytest.mark.parametrize(("kind", "text"), mark_share(100, list_cases()))
def test_a_run_of_each_kind_ends_with_the_counts_predicted(kind: str, text: str) -> None:
    layout = Layout.parse(text)
    model = build_model(kind, layout)
    Path("model.toml").write_text(emit(model.model_dump(exclude_none=True, exclude_defaults=True)))
    set_run(model="model.toml", layout=text, job={**RUN["job"], "global_batch": 8, "steps": 5})
    ended = subprocess.run([sys.executable, "-m", "fivefold", "train", "run.toml"], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    rows = compare(*read_pair(Path("run/step.json")))
    assert [row for row in rows if row.is_wrong] == []
    if layout.ep == 1:  # routing decides how many rows an expert's rank gets
        memory = next(row for row in rows if row.quantity == "peak memory")
        assert memory.error == pytest.approx(0, abs=0.01)
