"""Frozen parts of a model by the keys of LLaMA-Factory (layers that are trained) and Axolotl (patterns of weights).

Sources: llamafactory 0.9.5 llamafactory/model/adapter.py, _setup_freeze_tuning; axolotl 0.19.0 axolotl/utils/freeze.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from fivefold.errors import UserError
from fivefold.freeze import ALL, ENDS, MODULES, is_frozen
from fivefold.interop.huggingface.adapters import find_family
from fivefold.interop.keys import Table, Values, part, to_list
from fivefold.model.huggingface.peft import compile_pattern
from fivefold.model.huggingface.tensors import list_tensors
from fivefold.model.spec import Model
from fivefold.model.weights import list_block_weights, list_embedding_weights, list_head_weights

FREEZE = "job.freeze"
LLAMAFACTORY_MODULES = {"self_attn": "attention", "mlp": "mlp"}
TABLES: dict[str, Table] = {
    "axolotl": {"unfrozen_parameters": part(FREEZE, None)},
    "llamafactory": {
        "freeze_trainable_layers": part(FREEZE, 2),
        "freeze_trainable_modules": part(FREEZE, "all"),
        "freeze_extra_modules": part(FREEZE, None),
    },
}
_ROWS = re.compile(r"(.+)\[([0-9]*)(?::([0-9]*))?\]")


def read_freeze(values: Values, model: Model) -> dict[str, Any]:
    """Return the frozen parts of a config as a field of a job, or no field if it has none."""
    frozen = list[str]()
    if values.software == "llamafactory" and values["finetuning_type"] == "freeze":
        frozen = _read_trained_layers(values, model)
    elif values.software == "axolotl" and values["unfrozen_parameters"]:
        frozen = _read_patterns(values, model)
    return {FREEZE: frozen} if frozen else {}


def _list_ends(model: Model) -> list[str]:
    """Return the ends of a model that have weights of their own."""
    names = [weight.name for weight in (*list_embedding_weights(model), *list_head_weights(model))]
    return [end for end in ENDS if any(is_frozen(name, frozenset({end})) for name in names)]


def _read_trained_layers(values: Values, model: Model) -> list[str]:
    """Return all but some modules of the last layers (of the first ones if the number is negative) and some ends."""
    n = int(values.number("freeze_trainable_layers") or 0)
    key = "freeze_trainable_modules"
    trained, rest = (f"layers[-{n}:]", f"layers[:-{n}]") if n > 0 else (f"layers[:{-n}]", f"layers[{-n}:]")
    modules = _split(values[key])
    unknown = [name for name in modules if name not in ("all", *LLAMAFACTORY_MODULES)]
    if unknown:
        values.mark_not_modelled(key, f"{', '.join(unknown)}: counted as all modules of the layers")
    frozen = [rest] if abs(n) < model.layers else []
    if n and not unknown and "all" not in modules:
        left_out = {"attention", "mlp", "norms"} - {LLAMAFACTORY_MODULES[name] for name in modules}
        frozen += [f"{trained}.{module}" for module in ("attention", "mlp", "norms") if module in left_out]
    extra, ends = _split(values["freeze_extra_modules"]), _list_ends(model)
    if unknown := [name for name in extra if name not in ends]:
        values.mark_not_modelled("freeze_extra_modules", f"{', '.join(unknown)}: not among {', '.join(ends)}")
    return [*frozen, *(end for end in ends if end not in extra)]


def _split(value: object) -> list[str]:
    """Return the words of a list, or of a text with commas."""
    return [word.strip() for text in to_list(value) for word in str(text).split(",") if word.strip()]


def _read_patterns(values: Values, model: Model) -> list[str]:
    """Return the parts none of whose weights matches a pattern; periods in patterns are literal."""
    key, patterns = "unfrozen_parameters", list[re.Pattern[str]]()
    for text in map(str, to_list(values[key])):
        if rows := _ROWS.fullmatch(text):
            values.mark_not_modelled(key, f"{text}: some rows of a weight; counted as all")
        pattern = compile_pattern(re.sub(r"\.(?!\+)", "\\.", rows[1] if rows else text))
        if pattern is None:
            values.mark_not_modelled(key, f"{text}: a pattern that is not read; counted as if no part were frozen")
            return []
        patterns.append(pattern)
    family = find_family(model)
    try:
        tensors = [(tensor.name, tensor.ours) for tensor in list_tensors(model, family=family or "", stacked=True)]
    except UserError:
        values.mark_not_modelled(key, f"names of weights of {model.name} are unknown; counted as if none were frozen")
        return []
    trained = {ours for name, ours in tensors if any(pattern.match(name) for pattern in patterns)}
    frozen_ends = [
        end
        for end in _list_ends(model)
        if not any(is_frozen(name, frozenset({end})) for name in trained if not name.startswith("blocks."))
    ]
    by_module: dict[str, list[int]] = {module: [] for module in (ALL, *MODULES)}
    for layer in range(model.layers):
        names = {weight.name for weight in list_block_weights(model, layer)}
        frozen = {name for name in names if f"blocks.{layer}.{name}" not in trained}
        modules = _find_modules(names, frozen)
        if frozen - {name for name in frozen if is_frozen(name, frozenset(modules))}:
            values.mark_not_modelled(key, "leaves out only one weight of a module, which is counted as trained")
        for module in modules:
            by_module[module].append(layer)
    frozen_layers = [
        layers if module == ALL else f"{layers}.{module}"
        for module, chosen in by_module.items()
        for layers in _format_slices(chosen)
    ]
    return [*frozen_layers, *frozen_ends]


def _find_modules(names: set[str], frozen: set[str]) -> list[str]:
    """Return the modules of a block that make up its ``frozen`` weights, the largest ones first."""
    modules, covered = list[str](), set[str]()
    for module in (ALL, *MODULES):
        of_module = {name for name in names if is_frozen(name, frozenset({module}))}
        if of_module and of_module <= frozen and not of_module <= covered:
            modules.append(module)
            covered |= of_module
    return modules


def _format_slices(layers: Iterable[int]) -> list[str]:
    """Return runs of layers as slices."""
    runs = list[list[int]]()
    for layer in layers:
        if runs and runs[-1][1] == layer:
            runs[-1][1] += 1
        else:
            runs.append([layer, layer + 1])
    return [f"layers[{start}:{stop}]" for start, stop in runs]
