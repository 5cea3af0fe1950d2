"""The registry of families: each record is complete. ``tests/architecture/additions/family`` adds one."""

from __future__ import annotations

import subprocess
import sys

import pytest

from fivefold.model.huggingface.config import Config
from fivefold.model.huggingface.families import FAMILIES, WRAPPERS, import_modules, list_families, list_wrappers
from fivefold.model.huggingface.family import Family
from fivefold.model.huggingface.read import from_config
from fivefold.model.huggingface.tensors import list_tensors
from fivefold.model.weights import list_weights
from tests.model.mutations import FAMILIES as SMALL

# Families of which transformers builds no model by itself, and one whose class is another's.
LIKE_ANOTHER = {"kimi_k2", *(kind for kind, family in FAMILIES.items() if family.is_part)}


def test_every_family_has_a_small_config_in_the_tests() -> None:
    assert set(FAMILIES) - LIKE_ANOTHER == set(SMALL)


def test_no_model_type_is_listed_twice() -> None:
    modules = list(import_modules())
    records = [*list_families(modules), *list_wrappers(modules)]
    assert len({record.model_type for record in records}) == len(records) == len(FAMILIES) + len(WRAPPERS)
    assert {wrapper.text for wrapper in WRAPPERS.values()} <= FAMILIES.keys()


@pytest.mark.parametrize("kind", FAMILIES)
def test_keys_and_defaults_name_fields_of_a_config(kind: str) -> None:
    family = FAMILIES[kind]
    assert {*family.keys.values(), *family.defaults} <= Config.model_fields.keys()


@pytest.mark.parametrize("kind", SMALL)
@pytest.mark.parametrize("stacked", [False, True])
def test_the_tensors_of_every_family_hold_every_weight(kind: str, stacked: bool) -> None:
    model = from_config({"model_type": kind, **SMALL[kind]}, name="x")
    result = list(list_tensors(model, family=kind, stacked=stacked))
    tensors = {part.name: part.numel for part in result}
    biases = sum(part.numel for part in result if part.ours.endswith((".moe.bias", ".moe.table")))
    assert sum(tensors.values()) - biases == model.parameters
    assert {part.ours for part in list_tensors(model, family=kind)} >= {weight.name for weight in list_weights(model)}


def test_a_family_is_found_by_its_model_type_and_class_names() -> None:
    for record in (*FAMILIES.values(), *WRAPPERS.values()):
        classes = {record.architecture, getattr(record, "published_architecture", "")} - {""}
        for name in (record.model_type, *classes):
            registry = FAMILIES if isinstance(record, Family) else WRAPPERS
            assert record in registry.list_named(name), name


def test_reading_one_model_imports_few_families() -> None:
    code = (
        "import sys; from fivefold.model.catalog import build_model; build_model('llama3-8b'); "
        "print(sum(name.startswith('fivefold.model.huggingface.families.') for name in sys.modules))"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(answer.stdout) < 10
