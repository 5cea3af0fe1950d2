"""Configs of public repositories are read as their repositories and model cards say, or one line says what is missing.

``published/index.toml`` lists them; the files keep the keys and values that matter, with their source.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from fivefold.errors import UserError
from fivefold.interop.format import Overrides
from fivefold.interop.read import read
from fivefold.model.catalog import resolve
from fivefold.units import show_count
from tests.docs.figures import list_code, list_figures

HERE = Path(__file__).parent / "published"
PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "configs" / "published.md"
FROZEN = "<!-- table of tests/interop/test_published.py -->"
CONFIGS: list[dict[str, Any]] = tomllib.loads((HERE / "index.toml").read_text(encoding="utf-8"))["config"]
TITLES = {
    "torchtitan": "torchtitan", "megatron": "Megatron-LM, Megatron-Core, Megatron-DeepSpeed",
    "bridge": "Megatron-Bridge", "huggingface": "accelerate, DeepSpeed and TrainingArguments", "nanotron": "nanotron",
    "axolotl": "Axolotl", "llamafactory": "LLaMA-Factory", "ms-swift": "ms-swift",
    "torchtune": "torchtune",
}  # fmt: skip

TRAINERS = ("axolotl", "llamafactory", "ms-swift")  # of the same base


def name_of(config: dict[str, Any]) -> str:
    words = [word for word in config["words"].split() if "/" in word and "=" not in word]
    asked = [f"{key}={config[key]}" for key in ("model", "vocab") if key in config]
    return " ".join([words[-1], *asked, str(config.get("gpus", ""))]).strip()


@pytest.mark.parametrize("config", CONFIGS, ids=name_of)
def test_a_published_config_is_read_as_recorded(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(HERE)
    model = resolve(config["model"]) if "model" in config else None
    asked = Overrides(ranks=config.get("gpus"), model=model, vocab=config.get("vocab"))
    if "mistake" in config:
        with pytest.raises(UserError) as refused:
            read(config["words"].split(), asked)
        assert str(refused.value) == config["mistake"]
        return
    result = read(config["words"].split(), asked)
    if "parameters" in config:
        assert result.model is not None
        assert result.model.parameters == pytest.approx(config["parameters"], rel=4e-3)
    job = result.job
    said = [job.sequence, job.global_batch, job.precision.name, job.optimizer.kind, job.stack.name] if job else None
    assert (str(result.layout) if result.layout else None, said) == (config.get("layout"), config.get("job"))
    assert [item.key for item in result.not_understood] == config.get("strange", [])
    assert [item.key for item in result.approximated] == config.get("approximated", [])
    missing = [re.sub(r" \(similar: .*?\)", "", why) for why in result.missing]  # they change with the catalog
    assert (missing, list(result.errors)) == (config.get("missing", []), config.get("refused", []))
    assert result.job or result.missing


STATING_RANKS = [
    config
    for config in CONFIGS
    if {"gpus", "mistake"}.isdisjoint(config) and "layout" in config and config["format"] != "torchtune"
]  # a recipe of torchtune names its GPUs in a comment at most


@pytest.mark.parametrize("config", STATING_RANKS, ids=name_of)
def test_a_search_takes_the_batch_of_the_gpus_that_a_config_states(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(HERE)
    model = resolve(config["model"]) if "model" in config else None
    asked, words = Overrides(model=model, vocab=config.get("vocab")), config["words"].split()
    other = asked._replace(ranks=7 * 1024)
    assert read(words, other._replace(searches=True)) == read(words, asked)
    with pytest.raises(UserError, match=r"number of GPUs: \d+ in .*, 7168 in --gpus"):
        read(words, other)


def test_each_format_has_ten_published_configs() -> None:
    files = {(config["format"], tuple(re.findall(r"\S+/\S+", config["words"].partition("=")[0]))) for config in CONFIGS}
    many = Counter(form for form, _ in files)
    assert set(many) == set(TITLES)
    assert all(count >= 10 for form, count in many.items() if form not in TRAINERS), many
    assert sum(many[form] for form in TRAINERS) >= 20


def source(config: dict[str, Any]) -> str:
    """Of the file that the words name last: its first lines say so."""
    file, _, function = name_of(config).split()[0].partition(".py:")
    text = (HERE / (f"{file}.py" if function else file)).read_text(encoding="utf-8")
    result = re.search(
        r"^# ([\w.-]+/[\w.-]+@\w+:\S+?),?(?: .*)?$|^# (torchtitan|torchtune) ([\d.]+) \(package index\): (\S+)",
        text,
        flags=re.MULTILINE,
    )
    assert result, f"{file} does not say where it is from"
    return (result[1] or f"{result[2]} {result[3]}: {result[4]}") + (f":{function}" if function else "")


def rows() -> str:
    """The table: what was read of each config, and what was not understood."""
    lines = []
    for form, title in TITLES.items():
        lines += [
            f"## {title}",
            "",
            "| config | says | read | an error unless ignored, or missing | approximated |",
            "| --- | --- | --- | --- | --- |",
        ]
        for config in (item for item in CONFIGS if item["format"] == form):
            more = [
                f"{word.partition('=')[0]}={word.partition('=')[2]}" for word in config["words"].split() if "=" in word
            ]
            more += [f"--gpus {config['gpus']}"] if "gpus" in config else []
            more += [f"--{key} {config[key]}" for key in ("model", "vocab") if key in config]
            scale_note = f"<br>`{' '.join(more)}`" if more else ""
            job, size = config.get("job"), config.get("parameters")
            known = [f"`{config['layout']}`", f"{job[1]} × {job[0]} tokens, {', '.join(job[2:])}"] if job else []
            says = [f"{show_count(round(size))} parameters"] if size else []
            says += [config["says"]] if "says" in config else []
            lacks = (
                [f"`{key}`" for key in config.get("strange", [])]
                + config.get("missing", [])
                + config.get("refused", [])
            )
            lacks += [config["mistake"]] if "mistake" in config else []
            near = [f"`{key}`" for key in config.get("approximated", [])]
            cells = (
                f"{source(config)}{scale_note}",
                ": ".join(says),
                "<br>".join(known),
                "<br>".join(lacks),
                "<br>".join(near),
            )
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        lines.append("")
    return "\n".join(lines)


def test_the_page_has_the_table_of_published_configs() -> None:
    before, result, _ = PAGE.read_text(encoding="utf-8").partition(FROZEN)
    assert result
    wanted = f"{before}{FROZEN}\n\n{rows()}"
    if os.environ.get("FIVEFOLD_FREEZE"):
        PAGE.write_text(wanted, encoding="utf-8")
    text = PAGE.read_text(encoding="utf-8")
    for pick in (list_code, list_figures):
        assert pick(text) == pick(wanted), "FIVEFOLD_FREEZE=1 … pytest tests/interop/test_published.py"
