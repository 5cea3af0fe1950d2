"""Parse torchtune's YAML into values of its keys, with the recipe that the head of the file starts."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from fivefold.errors import UserError
from fivefold.interop.files import find_file, parse_yaml, read_named
from fivefold.interop.format import Document, Overrides, ParsedConfig
from fivefold.interop.keys import Values, flatten
from fivefold.interop.torchtune.builders import METHODS
from fivefold.interop.torchtune.keys import TABLE, VERSION
from fivefold.spelling import join_names


class TuneRecipe(NamedTuple):
    """A recipe of torchtune: what it trains, and which keys it reads. It prints as its name."""

    name: str
    is_distributed: bool = False
    trains_adapters: bool = False
    has_pairs: bool = False  # trains on pairs of answers, by DPO
    reads_tensor_parallel: bool = False  # and recomputation of some blocks

    def __str__(self) -> str:
        """Return the name."""
        return self.name


RECIPES = {
    recipe.name: recipe
    for recipe in (
        TuneRecipe("full_finetune_single_device"),
        TuneRecipe("full_finetune_distributed", is_distributed=True, reads_tensor_parallel=True),
        TuneRecipe("lora_finetune_single_device", trains_adapters=True),
        TuneRecipe("lora_finetune_distributed", is_distributed=True, trains_adapters=True),
        TuneRecipe("lora_dpo_single_device", trains_adapters=True, has_pairs=True),
        TuneRecipe("lora_dpo_distributed", is_distributed=True, trains_adapters=True, has_pairs=True),
        TuneRecipe("full_dpo_distributed", is_distributed=True, has_pairs=True),
    )
}

# Recipes that are not modelled, by how their names begin, and why
OTHER_RECIPES = {
    "qat": "trains weights that are rounded as if they were quantized",
    "knowledge_distillation": "runs a teacher next to the model",
    "ppo": "trains on replies that it generates",
    "grpo": "trains on replies that it generates",
    "async_grpo": "trains on replies that it generates",
    "eleuther_eval": "evaluates",
    "generate": "generates text",
    "quantize": "quantizes",
    "lora_finetune_distributed_multi_dataset": "mixes data sets, here of images",
}

# Keys of another model, which tell a recipe that is not modelled whatever the head of the file says
MODEL_SIGNS = {"teacher_model": "knowledge_distillation", "policy_model": "ppo"}

# Keys that tell one if the file does not name its recipe
SIGNS = {"tasks": "eleuther_eval", "prompt": "generate", "quantizer": "qat"}

COMMAND = re.compile(
    r"tune run((?:[ \t]+(?:\\\n#?[ \t]*)?--\S+(?:[ =]\S+)?)*)[ \t]+(?:\\\n#?[ \t]*)?([\w/]+)\s.*--config"
)
REFERENCE = re.compile(r"\$\{([\w.]+)\}")


class RecipeCommand(NamedTuple):
    """The command in the head of a config: its recipe and, if it says, the number of ranks."""

    recipe: str = ""
    ranks: int | None = None


def is_torchtune(document: Document) -> bool:
    """Return whether a YAML names parts of a recipe as torchtune does, or a line starts one of its recipes."""
    if document.kind == "words":
        recipe = document.words[0].rpartition("/")[2] if document.words else ""
        return "--config" in document.words and (recipe in RECIPES or recipe.startswith(tuple(OTHER_RECIPES)))
    sections = document.values.values() if document.kind == "yaml" else ()
    return any(isinstance(section, dict) and "_component_" in section for section in sections)


def parse(document: Document, overrides: Overrides) -> ParsedConfig:
    """Return the values of a config's keys; raise ``UserError`` for a recipe that is not modelled."""
    if document.kind == "words":
        document = _read_command(document)
    given = flatten(document.values, origin=document.origin)
    given |= {key: parse_yaml(text) for key, text in document.given.items()}
    given = {key: _resolve(value, given) for key, value in given.items()}
    launch = find_launch(document.text)
    recipe = str(given.get("recipe") or _find_sign(given, MODEL_SIGNS) or launch.recipe or _find_sign(given, SIGNS))
    check_recipe(recipe, document.origin)
    values = Values(TABLE, given, origin=document.origin, software="torchtune", version=VERSION)
    if recipe:
        values.given["recipe"] = recipe
    else:
        ranks = overrides.ranks or launch.ranks
        values.given["recipe"] = _choose_recipe(values, Path(document.origin).stem, ranks)
        values.approximate("recipe", "not in the head of the file; as its keys and its name suggest")
    if document.ranks is None and overrides.ranks is None:
        document = document._replace(ranks=launch.ranks)
    return ParsedConfig(document, values, model=overrides.model)


def _read_command(document: Document) -> Document:
    """Return the file that ``RECIPE --config FILE KEY=VALUE …`` names, with its recipe, its keys and its ranks."""
    recipe, *words = document.words
    name = next((word for before, word in pairwise(words) if before == "--config"), "")
    path = find_file(document, name)
    check_recipe(recipe.rpartition("/")[2], document.origin)
    if path is None:
        raise UserError(f"{document.origin}: --config {name}: no such file; copy it by `tune cp {name} FILE.yaml`")
    keys = dict(word.split("=", 1) for word in words if re.fullmatch(r"[A-Za-z_][\w.]*=.*", word))
    given = {**document.given, **keys, "recipe": recipe.rpartition("/")[2]}
    return read_named(document, path)._replace(ranks=document.ranks, given=given, remarks=document.remarks)


def find_launch(text: str) -> RecipeCommand:
    """Return the first command ``tune run … RECIPE --config`` in a text."""
    match = COMMAND.search(text)
    if match is None:
        return RecipeCommand()
    sizes = dict(re.findall(r"--(nnodes|nproc[_-]per[_-]node)[ =](\d+)", match[1]))
    per_node = next((int(size) for name, size in sizes.items() if name.startswith("nproc")), None)
    return RecipeCommand(match[2].rpartition("/")[2], per_node and per_node * int(sizes.get("nnodes", 1)))


def _find_sign(given: dict[str, Any], signs: dict[str, str]) -> str:
    """Return the recipe of the first of ``signs``, keys or tables, that a config has; empty if it has none."""
    groups = {key.partition(".")[0] for key in given}
    return next((recipe for key, recipe in signs.items() if key in groups), "")


def check_recipe(recipe: str, origin: str) -> None:
    """Raise ``UserError`` for a recipe that is not modelled; an empty name is that of none."""
    if recipe in ("", *RECIPES):
        return
    exact = OTHER_RECIPES.get(recipe)
    what = exact or next((why for name, why in OTHER_RECIPES.items() if recipe.startswith(name)), "")
    reason = f"{what}, which is not modelled" if what else "is unknown"
    raise UserError(
        f"{origin}: torchtune's recipe {recipe} {reason}; configs of these recipes can be read: "
        f"{join_names(tuple(RECIPES), 'and')}"
    )


def _choose_recipe(values: Values, stem: str, ranks: int | None) -> str:
    """Return the recipe that fits the keys of a config, or its file's name."""
    builder = str(values["model._component_"]).rpartition(".")[2]
    trains_adapters = builder.startswith(METHODS)
    has_pairs = str(values["loss._component_"]).endswith("DPOLoss")
    is_distributed = not (ranks == 1 or "single_device" in stem or "low_memory" in stem)
    return find_recipe(is_distributed=is_distributed, trains_adapters=trains_adapters, has_pairs=has_pairs).name


def find_recipe(*, is_distributed: bool, trains_adapters: bool, has_pairs: bool) -> TuneRecipe:
    """Return the recipe that trains so; without one of a single device the distributed one, which also runs on one."""
    recipes = [
        recipe
        for recipe in RECIPES.values()
        if (recipe.trains_adapters, recipe.has_pairs) == (trains_adapters, has_pairs)
    ]
    return next((recipe for recipe in recipes if recipe.is_distributed == is_distributed), recipes[-1])


def _resolve(value: Any, given: dict[str, Any]) -> Any:
    """Replace ``${a.b}`` by the value of the key ``a.b``, as OmegaConf does; unknown references stay."""
    if not isinstance(value, str):
        return value
    if match := REFERENCE.fullmatch(value):
        return given.get(match[1], value)
    return REFERENCE.sub(lambda match: str(given.get(match[1], match[0])), value)
