"""A file or a launch line of any known software -> model, layout, job and stack, as far as it says them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fivefold.interop.equivalence import fitted
from fivefold.interop.files import document
from fivefold.interop.format import Asked, Document
from fivefold.interop.registry import FORMATS
from fivefold.interop.shell.expand import substituted
from fivefold.interop.shell.launch import launched
from fivefold.interop.shell.script import is_script, script
from fivefold.layout.legal import reasons
from fivefold.model import catalog
from fivefold.model.huggingface.write import differs
from fivefold.model.spec import Model
from fivefold.record import Mistake, read_text
from fivefold.results.reading import Reading


def read(
    words: Sequence[str],
    asked: Asked = Asked(),  # noqa: B008 (a frozen record)
) -> Reading:
    """What ``words`` say: a file (``FILE.py:FUNCTION`` one of its configs), with ``NAME=VALUE`` for variables that it
    leaves open, or a launch line.

    Raises ``Mistake`` if they are of no known software, or contradict themselves.
    """
    documents = _documents(words)
    pairs = ((form, each) for each in documents for form in FORMATS if form.recognizes(each))
    form, found = next(pairs, (None, documents[0]))
    if form is None:
        known = ", ".join(dict.fromkeys(each.name for each in FORMATS if each.parse))
        raise Mistake(f"{found.origin}: is no config that is known; of {known}, it has none's keys")
    result = form.read(found, asked)
    if result.model is not None and asked.model is None:
        result = result.replace(model=_known(result.model))
    if result.model is None or result.layout is None or result.job is None:
        return result
    refused = tuple(reasons(result.layout, model=result.model, job=result.job, machine=None))
    return result.replace(refused=refused)


def _known(model: Model) -> Model:
    """The model under its name in the catalog, if it is one of it."""
    for name, entry in catalog.CATALOG.items():
        config = entry.config
        if (config["num_hidden_layers"], config["hidden_size"]) == (model.layers, model.width):
            there = catalog.named(name)
            if differs(there, fitted(model, there)) is None:
                return model.replace(name=name)
    return model


def _documents(words: Sequence[str]) -> list[Document]:
    """What may be the config, the likeliest first: the file, or the commands of a script, the last first."""
    if not words:
        raise Mistake("nothing to read; name a file, or give a launch line after --")
    path, _, function = words[0].partition(".py:")
    variables = dict(word.split("=", 1) for word in words[1:] if SETS.fullmatch(word))
    alone = len(variables) == len(words) - 1
    if function and len(words) == 1:
        found = document(Path(f"{path}.py"))
        return [found._replace(values={"function": function})]
    if alone and Path(words[0]).is_dir():
        first = next((file for name in FIRST if (file := Path(words[0]) / name).is_file()), None)
        if first is None:
            raise Mistake(f"{words[0]}: is a folder without {' or '.join(FIRST)}; name a file in it")
        return _documents([str(first), *words[1:]])
    if alone and (is_script(Path(words[0])) or Path(words[0]).suffix == ""):
        return _commands(Path(words[0]), variables)
    if alone:
        found = document(Path(words[0]))
        return [found._replace(values=_set(found.values, variables), given=variables)]
    run = launched(words)
    here = Document("the launch line", "words", words=run.words, folder=Path.cwd(), ranks=run.ranks())
    return [here._replace(options=run.options)]


FIRST = ("run.sh", "run_config.yaml", "run.toml")  # of a folder, what says the rest
SETS = re.compile(r"[A-Za-z_]\w*=.*")


def _set(values: Any, variables: Mapping[str, str]) -> Any:
    """The values of a file with ``${NAME}`` replaced."""
    if isinstance(values, dict):
        return {key: _set(value, variables) for key, value in values.items()}
    if isinstance(values, list):
        return [_set(value, variables) for value in values]
    return substituted(values, variables) if isinstance(values, str) and variables else values


def _commands(path: Path, variables: Mapping[str, str]) -> list[Document]:
    """The commands of a script."""
    text = read_text(path, kind="a script")
    read = script(text, variables)
    more = {
        name: value for name, value in variables.items() if not re.search(rf"\b{name}\b", text)
    }  # keys, not its own
    found = []
    for words in reversed(read.commands):
        run = launched(words)
        ranks = run.ranks(read.slurm.nodes, read.slurm.per_node)
        known = Document(str(path), "words", words=run.words, folder=path.resolve().parent, ranks=ranks)
        known = known._replace(options=run.options, given=more)
        found.append(known._replace(remarks=read.remarks, values=read.variables))
    if not found:
        passed = "".join(f", and {each.key}, {each.value!r}, {each.means}" for each in read.remarks[:1])
        raise Mistake(f"{path}: holds no command{passed}; name a config, a script, or a launch line")
    return found
