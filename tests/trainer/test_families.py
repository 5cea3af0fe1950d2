"""Changed keys of the families that we train: logits are the reference's, with weights read from its own files."""

from __future__ import annotations

import copy
import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fivefold.errors import UserError
from fivefold.job import Job, get_recipe
from fivefold.layout.spec import Layout
from fivefold.trainer.checkpoint.huggingface_import import HuggingFaceFolder
from fivefold.trainer.supported import check_supported
from tests.model.judged import reference, silence_transformers, texts
from tests.model.mutations import FAMILIES, mutations
from tests.trainer.checkpoint.test_huggingface_import import decoder

PICKED = 1  # of each of these families, by a seed; `python -m tests.endure.families` compares them all
CHANGED = frozenset([*FAMILIES][::3])


def compare(kind: str, config: dict[str, Any], folder: Path) -> str:
    """How far our logits are from theirs, of a short and a long text: "" is nowhere more than 1e-5 of the largest."""
    try:
        theirs = reference(kind, config)
        with torch.no_grad():
            wanted = [theirs(text, use_cache=False).logits for text in texts(theirs.config.vocab_size)]
    except Exception:
        return "the reference fails"
    theirs.save_pretrained(folder)
    try:
        opened = HuggingFaceFolder.open(folder)
        check_supported(Layout(), Job(sequence=16, global_batch=1, precision=get_recipe("fp32")), model=opened.model)
        logits = [_logits(opened, text) for text in texts(theirs.config.vocab_size)]
    except UserError as refusal:
        return f"refused: {refusal}"
    errors = [
        float((mine - other).abs().max() / other.abs().max().clamp(min=1))
        for mine, other in zip(logits, wanted, strict=True)
    ]
    return "" if max(errors) <= 1e-5 else f"logits differ by {max(errors):.1e}"


def _logits(opened: HuggingFaceFolder, text: Tensor) -> Tensor:
    with torch.no_grad():
        logits: Tensor = decoder(opened)(text)
    return logits


def compare_family(kind: str, folder: Path, **changed: Any) -> str:
    with silence_transformers(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return compare(kind, copy.deepcopy(FAMILIES[kind] | changed), folder)


@pytest.mark.slow
@pytest.mark.parametrize("kind", FAMILIES)
def test_changed_keys_give_the_logits_of_transformers(kind: str, tmp_path: Path) -> None:
    assert compare_family(kind, tmp_path / "plain") == ""
    for key, value in random.Random(f"{kind} 2").sample(list(mutations(kind)), PICKED if kind in CHANGED else 0):
        said = compare_family(kind, tmp_path / f"{key} {len(list(tmp_path.iterdir()))}", **{key: value})
        assert not said.startswith("logits"), f"{key}={value!r}: {said}"


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {"rope_type": "llama3", "factor": 16.0, "original_max_position_embeddings": 16}
TRAINS: list[tuple[str, dict[str, Any]]] = [  # what must not be refused
    ("llama", {"partial_rotary_factor": 0.5}),
    ("llama", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}),
    ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 3.0, "attention_factor": 1.7}}),
    ("llama", {"rope_scaling": YARN | {"beta_fast": 0.1, "beta_slow": 0.05}}),
    ("llama", {"rope_scaling": YARN | {"beta_fast": 2.0, "beta_slow": 8.0}}),
    ("llama4_text", {"rope_scaling": LLAMA3 | {"low_freq_factor": 1.0, "high_freq_factor": 1.0}}),  # as published
    ("qwen2", {"head_dim": 12, "norm_eps": 0.05, "attention_bias": True}),
    ("mixtral", {"layer_types": ["sliding_attention"] * 2, "use_sliding_window": True}),
    ("deepseek_v2", {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}),
    ("deepseek_v3", {"rope_interleave": None, "mlp_bias": True, "head_dim": 4}),
]


@pytest.mark.parametrize(("kind", "changed"), TRAINS, ids=[f"{kind}-{'-'.join(keys)}" for kind, keys in TRAINS])
def test_keys_that_were_once_read_wrongly_give_the_logits_of_transformers(
    kind: str, changed: dict[str, Any], tmp_path: Path
) -> None:
    assert compare_family(kind, tmp_path, **changed) == ""
