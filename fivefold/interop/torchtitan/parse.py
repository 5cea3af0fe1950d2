"""Parse a Python config into keys, from its syntax tree: nothing in the file is executed.

``Trainer.Config(training=TrainingConfig(seq_len=8192))`` → ``training.seq_len`` = 8192. The value of a call is its name
(``activation_checkpoint`` = ``FullAC``). The config that another function of the file returns is read too, with the
changes made to it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from fivefold.errors import UserError
from fivefold.interop.files import find_file, read_named
from fivefold.interop.format import Document, Overrides, ParsedConfig
from fivefold.interop.keys import Values
from fivefold.interop.shell.launch import parse_keys
from fivefold.interop.torchtitan.flavors import MODULES, build_llama, resolve_flavor
from fivefold.interop.torchtitan.keys import MODEL_SPEC, SIZES, TABLE, VERSION
from fivefold.model.multi_token_prediction import MTP
from fivefold.model.spec import Model
from fivefold.results.reading import ParsedKey
from fivefold.spelling import make_unknown_name_error

IGNORED_CALLS = ("model_spec.0", "optimizer.0", "optimizer.name")

STATEMENTS_WITHOUT_EFFECT = (ast.Import, ast.ImportFrom, ast.Assert, ast.FunctionDef, ast.Pass)


def is_torchtitan(document: Document) -> bool:
    """Return whether a Python file returns a ``Trainer.Config`` of torchtitan, or a launch line names one."""
    if document.kind == "words":
        return {"--module", "--config"} <= {word.partition("=")[0] for word in document.words}
    return document.kind == "python" and "torchtitan" in document.text and "Config" in document.text


def parse(document: Document, overrides: Overrides) -> ParsedConfig:
    """Return the values of a Python config; ``FILE:FUNCTION`` names one of several, a launch line one with changes."""
    line_keys = parse_keys(document.words) if document.kind == "words" else {}
    if line_keys:
        document = _find_config_file(line_keys, document)
    origin, text = document.origin, document.text
    name = document.values.get("function")
    if not name:
        known = list_configs(text, origin=origin)
        if len(known) != 1:
            raise UserError(
                f"{origin} holds {len(known)} configs; name one, as {origin}:{known[0] if known else 'NAME'}"
            )
        name = known[0]
    config_function = read_config_function(text, str(name), origin=origin)
    override_node = {key: value for key, value in line_keys.items() if "." in key}
    given, model = _find_model({**config_function.values, **override_node}, text, document, overrides.model)
    document = document._replace(remarks=(*document.remarks, *config_function.remarks))
    given = {key: value for key, value in given.items() if key not in IGNORED_CALLS}
    values = Values(TABLE, given, origin=document.origin, software="torchtitan", version=VERSION)
    return ParsedConfig(document, values, model=model)


def _find_config_file(imports: dict[str, object], document: Document) -> Document:
    """Return the file that ``--module`` names, with the function of ``--config``; ``UserError`` if it is missing."""
    module, function = str(imports["module"]), str(imports["config"])
    names = (f"torchtitan/models/{module}/config_registry.py", f"{module.replace('.', '/')}.py")
    path = find_file(document, *names)
    if path is None:
        raise UserError(
            f"{document.origin}: {names[0]} was not found next to it; give its path, as "
            f"PATH/config_registry.py:{function}"
        )
    config_document = read_named(document, path)
    return config_document._replace(values={"function": function}, ranks=document.ranks, origin=document.origin)


class CallValue(NamedTuple):
    """A call as a value; ``name`` is without ``.Config``."""

    name: str
    positional: tuple[Any, ...]
    named: Mapping[str, Any]

    def __repr__(self) -> str:
        named = (f"{key}={value!r}" for key, value in self.named.items())
        return f"{self.name}({', '.join([*map(repr, self.positional), *named])})"


class ConfigFunction(NamedTuple):
    """The keys that a config function sets, and the lines of it that were not followed."""

    values: Mapping[str, Any]
    remarks: tuple[ParsedKey, ...]


def _find_model(
    given: dict[str, Any], text: str, document: Document, overrides: Model | None
) -> tuple[dict[str, Any], Model | None]:
    """Split the call of ``model_registry`` into the keys family and flavor; return all keys, and the model.

    The model is ``overrides`` if the user names one.
    """
    if given.get("model_spec") == "replace":  # (model_registry(…), model=Llama3Model.Config(…))
        replaced_spec = given.pop("model_spec.0", None)
        if isinstance(replaced_spec, CallValue):
            given["model_spec"] = replaced_spec.name
            given |= {f"model_spec.{index}": argument for index, argument in enumerate(replaced_spec.positional)}
            given |= {f"model_spec.{key}": value for key, value in replaced_spec.named.items()}
    if given.get("model_spec") != "model_registry":
        return given, overrides
    module = list_imported_modules(text).get("model_registry", "")
    family = next((name for name in MODULES if name in module.split(".")), document.folder.name)
    flavor = str(given.pop("model_spec.flavor", given.get("model_spec.0")))
    given |= {"model_spec": family, "model_spec.flavor": flavor}
    if overrides:
        return given, overrides
    if f"{MODEL_SPEC}.dim" in given:
        size_values = {field: given.get(f"{MODEL_SPEC}.{key}") for key, field in SIZES.items()}
        size_values["kv_heads"] = size_values["kv_heads"] or size_values["heads"]
        numbers = [size_values[field] for field in ("layers", "width", "heads", "kv_heads", "ffn", "vocab")]
        if not all(isinstance(number, int) and number > 0 for number in numbers):
            raise UserError(f"{document.origin}: the sizes of its Llama3Model must be whole numbers, not {numbers}")
        layers, width, heads, kv_heads, ffn, vocab = (int(str(number)) for number in numbers)
        sizes = (layers, width, heads, kv_heads, ffn, vocab, bool(size_values["tied_embeddings"]))
        model = build_llama(f"llama-{layers}x{width}", sizes)
        return given, model.replace(rope_theta=size_values["rope_theta"] or model.rope_theta)
    model = resolve_flavor(family, flavor)
    mtp_layers = given.get("model_spec.num_mtp_layers")
    return given, model.replace(mtp=MTP(depth=mtp_layers)) if isinstance(mtp_layers, int) and mtp_layers > 0 else model


def list_functions(text: str, *, origin: str) -> dict[str, ast.FunctionDef]:
    """Return the functions of a file that return a value, by name."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise UserError(f"{origin}: not valid Python: {error}") from None
    all_functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    return {
        name: node
        for name, node in all_functions.items()
        if any(isinstance(inner_node, ast.Return) for inner_node in ast.walk(node))
    }


def list_imported_modules(text: str) -> dict[str, str]:
    """Return the module from which each imported name comes."""
    modules_by_name: dict[str, str] = {}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            modules_by_name |= {alias.asname or alias.name: node.module or "" for alias in node.names}
    return modules_by_name


def list_configs(text: str, *, origin: str) -> list[str]:
    """Return the names of the functions that return a ``Trainer.Config``."""
    known = list_functions(text, origin=origin)
    return [name for name, node in known.items() if "Trainer" in ast.unparse(node.returns or ast.Constant(None))]


def read_config_function(text: str, name: str, *, origin: str, depth: int = 0) -> ConfigFunction:
    """Return the keys that the function ``name`` sets; raise ``UserError`` if there is none."""
    known = list_functions(text, origin=origin)
    if name not in known:
        raise make_unknown_name_error(name, list(known), kind=f"config of {origin}")
    values: dict[str, Any] = {}
    local: dict[str, Any] = {}
    remarks: list[ParsedKey] = []
    for node in known[name].body:
        if isinstance(node, ast.Return):
            values |= _read_return(node.value, local, text, origin=origin, depth=depth, remarks=remarks)
        elif isinstance(node, ast.Assign) and len(node.targets) == 1:
            target = node.targets[0]
            if isinstance(target, ast.Name):
                local[target.id] = node.value
            elif isinstance(target, ast.Attribute):
                path = ast.unparse(target).split(".")
                base = local.get(path[0])
                if isinstance(base, ast.AST):
                    local[path[0]] = _read_return(base, local, text, origin=origin, depth=depth, remarks=remarks)
                changed_config = local.setdefault(path[0], {})
                _replace(changed_config, ".".join(path[1:]), _evaluate_node(node.value, local))
        elif not isinstance(node, STATEMENTS_WITHOUT_EFFECT) and not (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        ):
            line = ast.unparse(node).partition("\n")[0]
            remarks.append(ParsedKey(key=f"line {node.lineno}", value=line[:60], means="is code, which was not run"))
    return ConfigFunction(values, tuple(remarks))


def _read_return(
    node: ast.AST | None, local: Mapping[str, Any], text: str, *, origin: str, depth: int, remarks: list[ParsedKey]
) -> dict[str, Any]:
    """Return the keys of what a config function returns: a call of Config, a variable, or another function."""
    if isinstance(node, ast.Name):
        assigned = local.get(node.id)
        if isinstance(assigned, dict):
            return dict(assigned)
        return (
            _read_return(assigned, local, text, origin=origin, depth=depth, remarks=remarks)
            if assigned is not None
            else {}
        )
    returned_value = _evaluate_node(node, local) if node is not None else None
    if not isinstance(returned_value, CallValue):
        raise UserError(f"{origin}: a config function returns {returned_value!r}; it must return a Trainer.Config")
    if returned_value.name in list_functions(text, origin=origin):
        if depth > 8:
            raise UserError(f"{origin}: {returned_value.name} is called within itself")
        base = read_config_function(text, returned_value.name, origin=origin, depth=depth + 1)
        remarks += base.remarks
        return dict(base.values)
    values: dict[str, Any] = {}
    for key, value in returned_value.named.items():
        _replace(values, key, value)
    return values


def _replace(values: dict[str, Any], key: str, value: Any) -> None:
    """Set a key, and drop the keys below it."""
    for name in [name for name in values if name.startswith(f"{key}.")]:
        del values[name]
    values.update(_flatten_keys(key, value))


def _flatten_keys(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, CallValue):
        yield key, value
        return
    yield key, value.name
    for index, argument in enumerate(value.positional):
        yield f"{key}.{index}", argument
    for name, argument in value.named.items():
        yield from _flatten_keys(f"{key}.{name}", argument)


def _evaluate_node(node: ast.AST, local: Mapping[str, Any], depth: int = 0) -> Any:
    """Return a literal, a call, or the source text of anything else."""
    if depth > 32:
        raise UserError("calls are nested more than 32 deep; write the values themselves")
    if isinstance(node, ast.Name) and isinstance(local.get(node.id), ast.AST):
        return _evaluate_node(local[node.id], {**local, node.id: None}, depth + 1)
    if isinstance(node, ast.Call):
        name = ast.unparse(node.func).removesuffix(".Config").rpartition(".")[2]
        named = {
            element.arg: _evaluate_node(element.value, local, depth + 1) for element in node.keywords if element.arg
        }
        return CallValue(name, tuple(_evaluate_node(element, local, depth + 1) for element in node.args), named)
    if isinstance(node, ast.List | ast.Tuple):
        return [_evaluate_node(element, local, depth + 1) for element in node.elts]
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, RecursionError):
        return ast.unparse(node)
