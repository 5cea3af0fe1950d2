"""The command train with a small model of each kind of layer on two processes: it ends with counts exact."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fivefold.machine.spec import Chip, Link, Machine
from fivefold.machine.toml import write
from fivefold.results.step_comparison import compare, read_pair

MODEL = """
name = "hybrid"
layers = 2
width = 32
heads = 4
kv_heads = 2
head_dim = 8
ffn = 48
vocab = 256
"""
MIXERS = """mixers = ["{kind}", "attention"]
{kind} = {geometry}
"""
INPUTS = """block = "sandwich"
shared_kv_layers = 1
per_layer_inputs = { width = 6, vocab = 256 }
"""
ALTUP = """altup = { streams = 3 }
laurel_rank = 5
gate_sparsity = [0.9, 0.0]
"""
JOINED = """joins_mamba2 = true
mamba2 = { heads = 4, head_dim = 8, state = 6, groups = 2, chunk = 16 }
"""
RUN = """
model = "hybrid.toml"
machine = "here.toml"
layout = "{layout}"
folder = "run"
sample = "all"
sample_tokens = 4

[job]
sequence = 64
global_batch = 4
precision = "fp32"
steps = 6

[data]
corpus = "text"
heldout = 0.2
"""
GEOMETRIES = {
    "short_conv": "{ taps = 3 }",
    "mamba2": "{ heads = 4, head_dim = 8, state = 6, groups = 2, chunk = 16 }",
    "gated_delta_net": "{ key_heads = 2, value_heads = 4, key_dim = 8, value_dim = 8 }",
    "kimi_delta": "{ heads = 4, dim = 8, rank = 8 }",
    "lightning": "{ heads = 4, dim = 8, chunk = 16 }",
    "mamba": "{ inner = 64, rank = 2 }",
    "rg_lru": "{ inner = 32, blocks = 2 }",
}
CASES = [(kind, layout) for kind in GEOMETRIES for layout in ("dp2 zero3", "tp2", "pp2", "cp2 cp=ulysses")]


@pytest.mark.long  # minutes; the next test trains one model
@pytest.mark.slow
@pytest.mark.parametrize(("kind", "layout"), CASES)
def test_a_small_hybrid_of_each_kind_trains_with_exact_counts(kind: str, layout: str, tmp_path: Path) -> None:
    train(MODEL + MIXERS.format(kind=kind, geometry=GEOMETRIES[kind]), layout, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "layout"),
    [
        (INPUTS + ALTUP, "dp2 zero2"),
        pytest.param(INPUTS, "cp2 ac=full", marks=pytest.mark.long),
        pytest.param("shared_kv_layers = 1\n", "tp2", marks=pytest.mark.long),
        pytest.param(JOINED, "dp2 zero3", marks=pytest.mark.long),
        pytest.param("differential = true\n", "pp2", marks=pytest.mark.long),
    ],
    ids=["altup", "inputs of layers", "shared keys", "Mamba-2 next to attention", "differential"],
)
def test_a_model_with_other_layers_trains_with_exact_counts(fields: str, layout: str, tmp_path: Path) -> None:
    train(MODEL + fields, layout, tmp_path)


def train(model: str, layout: str, tmp_path: Path) -> None:
    """Train ``model`` on two processes; every count of its step is the planned one, and it continues a text."""
    chip = Chip(name="core", peak_flops={"fp32": 1e11}, memory_bytes=2**32, memory_bandwidth=1e10, source="test")
    link = Link(name="loopback", span=2, bandwidth=1e9, latency_seconds=1e-4, source="test")
    machine = Machine(name="here", ranks=2, ranks_per_node=2, backend="gloo", chip=chip, links=(link,))
    write(machine, tmp_path / "here.toml")
    (tmp_path / "text").mkdir()
    for number in range(20):
        (tmp_path / "text" / f"{number}.txt").write_text(f"document {number}: " + "all work and no play. " * 40)
    (tmp_path / "hybrid.toml").write_text(model)
    (tmp_path / "run.toml").write_text(RUN.format(layout=f"{layout} mbs1"))
    words = [sys.executable, "-m", "fivefold", "train", "run.toml"]
    trained = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert trained.returncode == 0, trained.stderr
    rows = compare(*read_pair(tmp_path / "run" / "step.json"))
    assert {"parameters", "hardware FLOPs"} <= {row.quantity for row in rows if row.exact}
    assert [row for row in rows if row.is_wrong] == []
    assert "sample after 'all':\nall" in trained.stderr
