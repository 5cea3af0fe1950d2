"""``model_type`` and ``architectures``: what transformers builds, what is invalid, what is read of remote code."""

from __future__ import annotations

import json
import re
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL
from typer.testing import CliRunner

from fivefold.cli import app
from fivefold.errors import UsageWarning, UserError
from fivefold.model.catalog import from_values, list_names
from fivefold.model.huggingface.families import FAMILIES, WRAPPERS
from fivefold.model.huggingface.model_types import LACKING_TYPES, MODEL_TYPES, OTHER_NAMES
from fivefold.model.huggingface.read import SHAPE_FIELDS, describe_remark, from_config, read_config
from fivefold.requests.catalogs import list_families
from fivefold.trainer.supported_models import list_unsupported
from tests.model.huggingface.test_wrappers import LIKE
from tests.model.mutations import FAMILIES as SMALL
from tests.model.mutations import LATENT
from tests.selection import mark_share

ROOT = Path(__file__).parents[3]
CONFIGS = {
    **SMALL,
    "kimi_k2": LATENT | {"n_group": 2, "topk_group": 1},
    **{kind: SMALL[like] for kind, like in LIKE.items()},
}
READ = {*FAMILIES, *WRAPPERS}
SHARES = 16  # of all pairs of a family and another type, which are 50,000
LLAMA = {"architectures": ["LlamaForCausalLM"], **SMALL["llama"]}


def count_reference(config: dict[str, Any]) -> int:
    """Return the parameters of the model that transformers builds of a config file."""
    keys = {key: value for key, value in config.items() if key != "model_type"}
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(AutoConfig.for_model(config["model_type"], **keys))  # type: ignore[no-untyped-call]
    return sum(weight.numel() for weight in module.parameters())


def make_explicit_config(kind: str) -> dict[str, Any]:
    """Return a small config that gives every key of a family, one for each meaning."""
    family = FAMILIES[kind]
    config = read_config(CONFIGS[kind], family=family, name="x")
    given = {key: value for key, value in CONFIGS[kind].items() if key in family.keys}
    fields = {family.keys[key] for key in given}
    return given | {
        key: getattr(config, field)
        for field, key in {field: key for key, field in family.keys.items()}.items()
        if field not in fields and (field in SHAPE_FIELDS or getattr(config, field) is not None)
    }


def test_the_list_of_types_is_that_of_transformers() -> None:
    assert set(CONFIG_MAPPING_NAMES) - {"gpt-sw3"} == MODEL_TYPES
    ours = {family.architecture for family in FAMILIES.values()}
    theirs = {kind for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items() if name in ours}
    assert theirs - READ <= {"gpt-sw3"}  # every type that builds a class of ours is read by its own defaults


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "parameters"), [("internlm3", 8_804_241_408), ("iquestcoder", 39_794_283_520)])
def test_a_type_with_the_class_of_another_has_its_own_defaults(kind: str, parameters: int) -> None:
    bare = {"model_type": kind}
    published = {"architectures": [FAMILIES[kind].published_architecture], **bare}
    for config in (bare, published, {"architectures": ["LlamaForCausalLM"], **bare}):
        assert from_config(config, name="x").parameters == parameters == count_reference(bare)


def test_biases_of_internlm3_are_read_under_both_names() -> None:
    config = {"model_type": "internlm3", **SMALL["llama"], "qkv_bias": True, "bias": True}
    assert from_config(config, name="x").parameters == count_reference(config)
    assert from_config(config, name="x").parameters > from_config(LLAMA, name="x").parameters
    assert describe_remark(config, name="x") is None
    with pytest.raises(UserError, match="qkv_bias=True and bias=False"):
        from_config({**config, "bias": False}, name="x")


@pytest.mark.slow
@pytest.mark.parametrize("share", mark_share(SHARES, range(SHARES)))
def test_an_unsupported_model_type_is_rejected_with_any_known_architecture(share: int) -> None:
    for at, (family, read) in enumerate({**FAMILIES, **WRAPPERS}.items()):
        config = make_explicit_config(family) if family in CONFIGS else {}
        for other in (*sorted(MODEL_TYPES - READ), *FAMILIES)[(share + at) % SHARES :: SHARES]:
            if {**FAMILIES, **WRAPPERS}.get(other, read).architecture == read.architecture and other in READ:
                continue
            with pytest.raises(UserError, match="transformers follows model_type") as refusal:
                from_config({**config, "architectures": [read.architecture], "model_type": other}, name="x")
            assert "\n" not in str(refusal.value)


def test_config_that_would_be_read_wrongly_is_an_error() -> None:
    """A model that transformers builds otherwise than the architecture of its file says."""
    for kind in ("apertus", "arcee", "bitnet", "diffllama", "exaone4"):
        config = LLAMA | {"attention_bias": False, "mlp_bias": False, "model_type": kind}
        assert count_reference(config) != from_config({**config, "model_type": "llama"}, name="x").parameters
        with pytest.raises(UserError, match=f"says LlamaForCausalLM, but model_type '{kind}'"):
            from_config(config, name="x")


MORE_KEYS = ("internlm3", "deepseek_ocr2_text")


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in MORE_KEYS])
def test_remote_code_is_read_if_it_leaves_nothing_of_the_shape_open(family: str) -> None:
    whole = make_explicit_config(family)
    kind = next(kind for kind, read in FAMILIES.items() if read.architecture == FAMILIES[family].architecture)
    config = {**whole, "architectures": [FAMILIES[family].architecture], "model_type": "made-up"}
    assert from_config(config, name="x") == from_config({**whole, "model_type": kind}, name="x").replace(
        source=f"Hugging Face config.json, {FAMILIES[family].architecture}"
    )
    assert str(describe_remark(config, name="x")).startswith("x: model_type 'made-up' is not known: read as ")
    for key in whole:
        if FAMILIES[family].keys[key] in SHAPE_FIELDS:
            with pytest.raises(UserError, match=f"'made-up' is not known, nor .* give .*; or give model_type '{kind}'"):
                from_config({name: value for name, value in config.items() if name != key}, name="x")


def test_assumptions_about_remote_code_are_reported() -> None:
    config = LLAMA | {"attention_bias": False, "mlp_bias": False, "model_type": "made-up", "auto_map": {"A": "b.C"}}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UsageWarning)
        from_values(config, name="x", source="x")
    (line,) = (str(item.message) for item in caught)
    assert line == (
        "x: model_type 'made-up' is not known: read as LlamaForCausalLM; assumed as there: rope_theta=10000.0, "
        "rms_norm_eps=1e-06, hidden_act='silu'"
    )
    with pytest.raises(UserError, match="has no qkv_bias=True, which may change the model; remove what"):
        from_config({**config, "qkv_bias": True}, name="x")


@pytest.mark.parametrize("junk", [7, [], {}, True, "", "x" * 500], ids=repr)
def test_a_model_type_that_is_no_text_is_a_one_line_error(junk: object) -> None:
    with pytest.raises(UserError) as refusal:
        from_config({**LLAMA, "model_type": junk}, name="x")
    assert "\n" not in str(refusal.value)
    assert len(str(refusal.value)) < 400


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


def test_the_trainer_computes_every_family_that_is_listed_as_trained() -> None:
    """Read small configs: the list reads the default ones, of which some are invalid."""
    trained = {entry.name for entry in list_families() if entry.status == "trained"}
    models = {kind: from_config({"model_type": kind, **config}, name="x") for kind, config in SMALL.items()}
    assert trained & SMALL.keys() == {kind for kind, model in models.items() if not [*list_unsupported(model)]}


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
    reasons = {entry["name"]: entry["needs"] for entry in entries if entry["status"] == "predicted"}
    assert all(re.match("training: [a-z]", reason) for reason in reasons.values())
    assert not any(entry["needs"] for entry in entries if entry["status"] == "trained")
    lines = run("models", "--families", "qwen4").splitlines()
    assert any(line.split()[:1] == ["qwen4_exp"] and "embeddings per layer" in line for line in lines)
    with pytest.raises(UserError, match=r"no family contains 'zzz'; `fivefold models --families` lists all"):
        list_families("zzz")


def test_the_published_class_of_longcat_flash_is_read() -> None:
    """meituan-longcat/LongCat-Flash-Chat:config.json names the class of its own code: 560 billion parameters.

    transformers also holds weights of the experts that give a token back: no checkpoint has them, and nothing reads
    them.
    """
    config = {"architectures": ["LongcatCausalLM"], "model_type": "longcat_flash", "num_layers": 28}
    assert from_config(config, name="x") == from_config(config | {"architectures": None}, name="x")
    model = from_config(config, name="x")
    assert model.moe is not None
    assert model.moe.identity_experts == 256
    assert model.parameters / 1e9 == pytest.approx(560, rel=0.002)
    assert model.active_parameters / 1e9 == pytest.approx(27, rel=0.04)  # arXiv:2509.01322: around 27
