"""The list of ``fivefold models --families`` against the installed transformers: a new version shows what is new."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL
from typer.testing import CliRunner

from fivefold.cli import app
from fivefold.job import Job, get_recipe
from fivefold.layout.spec import Layout
from fivefold.model.catalog import list_names
from fivefold.model.huggingface.causal_types import LACKING_TYPES, OTHER_NAMES
from fivefold.model.huggingface.families import FAMILIES, WRAPPERS
from fivefold.model.huggingface.read import from_config
from fivefold.record import UserError
from fivefold.requests.catalogs import list_families
from fivefold.trainer.supported import check_supported
from tests.model.mutations import FAMILIES as SMALL

ROOT = Path(__file__).parents[3]


def run(*words: str) -> str:
    return CliRunner().invoke(app, words, env={"COLUMNS": "200", "TERM": "dumb"}, catch_exceptions=False).output


def test_every_causal_type_of_transformers_is_listed_once() -> None:
    listed = [entry.name for entry in list_families()]
    assert len(set(listed)) == len(listed)
    new = CAUSAL.keys() - OTHER_NAMES.keys() - set(listed)
    assert new == set(), "read them, or say in causal_types.py what is missing"
    assert LACKING_TYPES.keys() <= CAUSAL.keys()
    assert not LACKING_TYPES.keys() & {**FAMILIES, **WRAPPERS}.keys()


def test_classes_are_those_of_transformers() -> None:
    classes = {entry.name: entry.architecture for entry in list_families() if entry.name in CAUSAL and not entry.text}
    assert {name: CAUSAL[name] for name in classes} == classes


def test_the_page_of_features_has_their_numbers() -> None:
    status = {entry.name: entry.status for entry in list_families()}
    counts = Counter(status[OTHER_NAMES.get(name, name)] for name in CAUSAL)
    text = " ".join((ROOT / "docs" / "reference" / "features.md").read_text(encoding="utf-8").split())
    planned = counts["predicted"] + counts["trained"]
    assert f"{len(list_names())} in the [catalog](models.md)" in text
    assert f"of {planned} of the {len(CAUSAL)} causal families of transformers 5.23 ({counts['trained']} of" in text


@pytest.mark.parametrize("kind", SMALL)
def test_the_trainer_computes_every_family_that_is_listed_as_trained(kind: str) -> None:
    model = from_config({"model_type": kind, **SMALL[kind]}, name="x")
    job = Job(sequence=16, global_batch=1, precision=get_recipe("fp32"))
    try:
        check_supported(Layout(), job, model=model)
    except UserError:
        assert not FAMILIES[kind].is_trained
    else:
        assert FAMILIES[kind].is_trained


@pytest.mark.parametrize("key", ["model_type", "architectures"])
def test_an_unsupported_type_is_rejected_with_what_it_needs(key: str) -> None:
    for name, (architecture, reason) in LACKING_TYPES.items():
        config = {"model_type": name} if key == "model_type" else {"architectures": [architecture]}
        with pytest.raises(UserError) as refusal:
            from_config(config, name="x")
        assert str(refusal.value).endswith(reason) or key == "architectures"
        assert "is not supported: " in str(refusal.value)


def test_models_with_families_lists_all_families_or_those_with_a_word() -> None:
    entries = json.loads(run("models", "--families", "--json"))
    assert [entry["name"] for entry in entries] == [entry.name for entry in list_families()]
    lines = run("models", "--families", "qwen3").splitlines()
    assert any(line.split()[:2] == ["qwen3", "trained"] for line in lines)
    lines = run("models", "--families", "qwen4").splitlines()
    assert any(line.split()[:1] == ["qwen4_exp"] and "embeddings per layer" in line for line in lines)
    with pytest.raises(UserError, match=r"no family contains 'zzz'; `fivefold models --families` lists all"):
        list_families("zzz")
