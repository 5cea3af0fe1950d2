"""A Python config as keys, read from its syntax tree: nothing in the file is run.

``Trainer.Config(training=TrainingConfig(seq_len=8192))`` → ``training.seq_len`` = 8192; a call that is a value has its
name (``activation_checkpoint`` = ``FullAC``), and so has what another function of the file returns, with changes to it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from fivefold.interop.files import document as load
from fivefold.interop.format import Asked, Document, ParsedConfig
from fivefold.interop.keys import Values
from fivefold.interop.shell.launch import keys
from fivefold.interop.torchtitan.flavors import MODULES, flavored, llama
from fivefold.interop.torchtitan.keys import BELOW, SIZES, TABLE, VERSION
from fivefold.model.shape import MTP
from fivefold.model.spec import Model
from fivefold.record import Mistake, nearest
from fivefold.results.reading import Said

DROPPED = ("model_spec.0", "optimizer.0", "optimizer.name")

PLAIN = (ast.Import, ast.ImportFrom, ast.Assert, ast.FunctionDef, ast.Pass)


def is_torchtitan(document: Document) -> bool:
    """Return whether a Python file returns a ``Trainer.Config`` of torchtitan, or a launch line names one."""
    if document.kind == "words":
        return {"--module", "--config"} <= {word.partition("=")[0] for word in document.words}
    return document.kind == "python" and "torchtitan" in document.text and "Config" in document.text


def parse(document: Document, asked: Asked) -> ParsedConfig:
    """Return the values of a Python config; ``FILE:FUNCTION`` names one of several, a launch line one with changes."""
    said = keys(document.words) if document.kind == "words" else {}
    if said:
        document = _named(said, document)
    origin, text = document.origin, document.text
    name = document.values.get("function")
    if not name:
        known = configs(text, origin=origin)
        if len(known) != 1:
            raise Mistake(
                f"{origin}: holds {len(known)} configs; name one, as {origin}:{known[0] if known else 'NAME'}"
            )
        name = known[0]
    found = config(text, str(name), origin=origin)
    over = {key: value for key, value in said.items() if "." in key}
    given, model = _model({**found.values, **over}, text, document, asked.model)
    document = document._replace(remarks=(*document.remarks, *found.remarks))
    given = {key: value for key, value in given.items() if key not in DROPPED}
    values = Values(TABLE, given, origin=document.origin, software="torchtitan", version=VERSION)
    return ParsedConfig(document, values, model=model)


def _named(said: dict[str, object], document: Document) -> Document:
    """The file that ``--module`` names, with the function of ``--config``; ``Mistake`` if it is not there."""
    module, function = str(said["module"]), str(said["config"])
    names = (f"torchtitan/models/{module}/config_registry.py", f"{module.replace('.', '/')}.py")
    path = next((each for name in names if (each := document.folder / name).is_file()), None)
    if path is None:
        raise Mistake(f"{document.origin}: {names[0]} is not here; read that file, as config_registry.py:{function}")
    found = load(path)
    return found._replace(values={"function": function}, ranks=document.ranks, origin=document.origin)


class Call(NamedTuple):
    """A call that stands for a value; ``name`` without ``.Config``."""

    name: str
    positional: tuple[Any, ...]
    named: Mapping[str, Any]

    def __repr__(self) -> str:
        named = (f"{key}={value!r}" for key, value in self.named.items())
        return f"{self.name}({', '.join([*map(repr, self.positional), *named])})"


class ConfigFunction(NamedTuple):
    """The keys of one config function, and lines of it that were not followed."""

    values: Mapping[str, Any]
    remarks: tuple[Said, ...]


def _model(
    given: dict[str, Any], text: str, document: Document, asked: Model | None
) -> tuple[dict[str, Any], Model | None]:
    """The keys with family and flavor as their own, and the model, which is ``asked`` if the user names one."""
    if given.get("model_spec") == "replace":  # (model_registry(…), model=Llama3Model.Config(…))
        inner = given.pop("model_spec.0", None)
        if isinstance(inner, Call):
            given["model_spec"] = inner.name
            given |= {f"model_spec.{place}": each for place, each in enumerate(inner.positional)}
            given |= {f"model_spec.{key}": value for key, value in inner.named.items()}
    if given.get("model_spec") != "model_registry":
        return given, asked
    module = modules(text).get("model_registry", "")
    family = next((name for name in MODULES if name in module.split(".")), document.folder.name)
    flavor = str(given.pop("model_spec.flavor", given.get("model_spec.0")))
    given |= {"model_spec": family, "model_spec.flavor": flavor}
    if asked:
        return given, asked
    if f"{BELOW}.dim" in given:
        said = {field: given.get(f"{BELOW}.{key}") for key, field in SIZES.items()}
        said["kv_heads"] = said["kv_heads"] or said["heads"]
        numbers = [said[field] for field in ("layers", "width", "heads", "kv_heads", "ffn", "vocab")]
        if not all(isinstance(number, int) and number > 0 for number in numbers):
            raise Mistake(f"{document.origin}: the sizes of its Llama3Model are not all whole numbers: {numbers}")
        layers, width, heads, kv_heads, ffn, vocab = (int(str(number)) for number in numbers)
        sizes = (layers, width, heads, kv_heads, ffn, vocab, bool(said["tied_embeddings"]))
        model = llama(f"llama-{layers}x{width}", sizes)
        return given, model.replace(rope_theta=said["rope_theta"] or model.rope_theta)
    model, ahead = flavored(family, flavor), given.get("model_spec.num_mtp_layers")
    return given, model.replace(mtp=MTP(depth=ahead)) if isinstance(ahead, int) and ahead > 0 else model


def functions(text: str, *, origin: str) -> dict[str, ast.FunctionDef]:
    """The functions of a file that return a config, by name."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise Mistake(f"{origin}: not valid Python: {error}") from None
    found = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    return {name: node for name, node in found.items() if any(isinstance(part, ast.Return) for part in ast.walk(node))}


def modules(text: str) -> dict[str, str]:
    """From what module each imported name comes."""
    found: dict[str, str] = {}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            found |= {name.asname or name.name: node.module or "" for name in node.names}
    return found


def configs(text: str, *, origin: str) -> list[str]:
    """Names of the functions that return a ``Trainer.Config``."""
    known = functions(text, origin=origin)
    return [name for name, node in known.items() if "Trainer" in ast.unparse(node.returns or ast.Constant(None))]


def config(text: str, name: str, *, origin: str, depth: int = 0) -> ConfigFunction:
    """The keys that the function ``name`` sets; ``Mistake`` if there is none."""
    known = functions(text, origin=origin)
    if name not in known:
        raise nearest(name, list(known), kind=f"config of {origin}")
    values: dict[str, Any] = {}
    local: dict[str, Any] = {}
    remarks: list[Said] = []
    for node in known[name].body:
        if isinstance(node, ast.Return):
            values |= _returned(node.value, local, text, origin=origin, depth=depth, remarks=remarks)
        elif isinstance(node, ast.Assign) and len(node.targets) == 1:
            target = node.targets[0]
            if isinstance(target, ast.Name):
                local[target.id] = node.value
            elif isinstance(target, ast.Attribute):
                path = ast.unparse(target).split(".")
                base = local.get(path[0])
                if isinstance(base, ast.AST):
                    local[path[0]] = _returned(base, local, text, origin=origin, depth=depth, remarks=remarks)
                changed = local.setdefault(path[0], {})
                _replace(changed, ".".join(path[1:]), _value(node.value, local))
        elif not isinstance(node, PLAIN) and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            line = ast.unparse(node).partition("\n")[0]
            remarks.append(Said(key=f"line {node.lineno}", value=line[:60], means="is code, which was not run"))
    return ConfigFunction(values, tuple(remarks))


def _returned(
    node: ast.AST | None, local: Mapping[str, Any], text: str, *, origin: str, depth: int, remarks: list[Said]
) -> dict[str, Any]:
    """Keys of what a config function returns: a call of Config, a variable, or another function of the file."""
    if isinstance(node, ast.Name):
        held = local.get(node.id)
        if isinstance(held, dict):
            return dict(held)
        return _returned(held, local, text, origin=origin, depth=depth, remarks=remarks) if held is not None else {}
    found = _value(node, local) if node is not None else None
    if not isinstance(found, Call):
        raise Mistake(f"{origin}: a config function returns {found!r}; it must return a Trainer.Config")
    if found.name in functions(text, origin=origin):
        if depth > 8:
            raise Mistake(f"{origin}: {found.name} is called within itself")
        base = config(text, found.name, origin=origin, depth=depth + 1)
        remarks += base.remarks
        return dict(base.values)
    values: dict[str, Any] = {}
    for key, value in found.named.items():
        _replace(values, key, value)
    return values


def _replace(values: dict[str, Any], key: str, value: Any) -> None:
    """Set a key, and drop what was set below it."""
    for name in [name for name in values if name.startswith(f"{key}.")]:
        del values[name]
    values.update(_keys(key, value))


def _keys(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, Call):
        yield key, value
        return
    yield key, value.name
    for place, each in enumerate(value.positional):
        yield f"{key}.{place}", each
    for name, each in value.named.items():
        yield from _keys(f"{key}.{name}", each)


def _value(node: ast.AST, local: Mapping[str, Any], depth: int = 0) -> Any:
    """A literal, a call, or the text of anything else."""
    if depth > 32:
        raise Mistake("a config of calls within calls, more than 32 deep")
    if isinstance(node, ast.Name) and isinstance(local.get(node.id), ast.AST):
        return _value(local[node.id], {**local, node.id: None}, depth + 1)
    if isinstance(node, ast.Call):
        name = ast.unparse(node.func).removesuffix(".Config").rpartition(".")[2]
        named = {each.arg: _value(each.value, local, depth + 1) for each in node.keywords if each.arg}
        return Call(name, tuple(_value(each, local, depth + 1) for each in node.args), named)
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(each, local, depth + 1) for each in node.elts]
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, RecursionError):
        return ast.unparse(node)
