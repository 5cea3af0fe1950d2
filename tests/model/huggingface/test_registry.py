"""The registry of families: each record is complete, and a new family is one file."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fivefold.model.huggingface import families
from fivefold.model.huggingface.config import Config
from fivefold.model.huggingface.families import FAMILIES, WRAPPERS, import_modules, list_families, list_wrappers
from fivefold.model.huggingface.read import from_config, remark
from fivefold.model.huggingface.tensors import parts
from fivefold.model.huggingface.write import differs, to_config
from fivefold.model.weights import weights
from fivefold.record import Mistake
from tests.model.mutations import FAMILIES as SMALL

LIKE_ANOTHER = {"kimi_k2", "qwen2_5_vl_text"}  # of which transformers builds no model by itself


def test_every_family_has_a_small_config_in_the_tests() -> None:
    assert set(FAMILIES) - LIKE_ANOTHER == set(SMALL)


def test_no_model_type_is_listed_twice() -> None:
    modules = list(import_modules())
    records = [*list_families(modules), *list_wrappers(modules)]
    assert len({record.model_type for record in records}) == len(records) == len(FAMILIES | WRAPPERS)
    assert {wrapper.text for wrapper in WRAPPERS.values()} <= FAMILIES.keys()


@pytest.mark.parametrize("kind", FAMILIES)
def test_keys_and_defaults_name_fields_of_a_config(kind: str) -> None:
    family = FAMILIES[kind]
    assert {*family.keys.values(), *family.defaults} <= Config.model_fields.keys()


@pytest.mark.parametrize("kind", SMALL)
@pytest.mark.parametrize("stacked", [False, True])
def test_the_tensors_of_every_family_hold_every_weight(kind: str, stacked: bool) -> None:
    model = from_config({"model_type": kind, **SMALL[kind]}, name="x")
    tensors = {part.name: part.numel for part in parts(model, family=kind, stacked=stacked)}
    biases = sum(size for name, size in tensors.items() if name.endswith("e_score_correction_bias"))
    assert sum(tensors.values()) - biases == model.parameters
    assert {part.ours for part in parts(model, family=kind)} >= {weight.name for weight in weights(model)}


MODULE = """
from fivefold.model.huggingface import decoder
from fivefold.model.huggingface.family import Family, Supported
from fivefold.model.huggingface.mapping import build_model
from fivefold.model.huggingface.rope import read_rope

FAKE = Family(
    model_type="fake",
    architecture="FakeForCausalLM",
    keys=decoder.KEYS | {"d_model": "hidden_size"},
    defaults={**decoder.DEFAULTS, "intermediate_size": 300, "num_hidden_layers": 3, "hidden_act": "gelu"},
    supported={"use_memory": Supported((False,), "a memory of earlier sequences")},
    to_model=lambda config: build_model(config, **read_rope(config), block="post", norm_plus_one=True),
    write=lambda model: {"use_memory": False},
    tensors=decoder.TENSORS | {"blocks": "fake.layers.{}", "norm1": "ln_attention", "norm2": "ln_mlp"},
)
FAMILIES = (FAKE,)
"""


def test_a_new_family_is_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"model_type": "fake", "d_model": 96, "num_attention_heads": 6, "vocab_size": 512}
    with pytest.raises(Mistake, match="architecture 'fake' is not known"):
        from_config(config, name="x")

    (tmp_path / "fake.py").write_text(MODULE)
    monkeypatch.setattr(families, "__path__", [*families.__path__, str(tmp_path)])
    registry = {family.model_type: family for family in list_families(list(import_modules()))}
    monkeypatch.delitem(sys.modules, f"{families.__name__}.fake")
    monkeypatch.setitem(FAMILIES, "fake", registry["fake"])

    model = from_config(config, name="x")
    assert (model.layers, model.width, model.block, model.activation) == (3, 96, "post", "gelu")
    layer = 4 * 96 * 96 + 3 * 96 * 300 + 2 * 96
    assert model.parameters == 3 * layer + 2 * 512 * 96 + 96
    assert from_config({**config, "architectures": ["FakeForCausalLM"]}, name="x") == model

    assert remark(config | {"n_group": 4}, name="x") == "x: not read, nor by transformers' FakeForCausalLM: n_group=4"
    with pytest.raises(Mistake, match="use_memory=True needs a memory of earlier sequences"):
        from_config({**config, "use_memory": True}, name="x")

    written = to_config(model)
    assert (written["architectures"], written["d_model"], written["use_memory"]) == (["FakeForCausalLM"], 96, False)
    assert differs(from_config(written, name="x"), model) is None

    tensors = {part.name: part.shape for part in parts(model, family="fake")}
    assert tensors["fake.layers.2.ln_mlp.weight"] == (96,)
    assert tensors["fake.layers.0.mlp.up_proj.weight"] == (300, 96)
    assert len(tensors) == 3 * 9 + 3
