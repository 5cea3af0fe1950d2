"""Read a file or a launch line of any known software as model, layout, job and stack, as far as it specifies them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from fivefold.errors import UserError
from fivefold.interop.equivalence import fit_free_fields
from fivefold.interop.files import parse_values, read_document
from fivefold.interop.format import Document, Overrides
from fivefold.interop.registry import FORMATS
from fivefold.interop.shell.expand import substitute
from fivefold.interop.shell.launch import strip_launchers
from fivefold.interop.shell.script import is_script, read_script
from fivefold.layout.validity import list_reasons
from fivefold.model import catalog
from fivefold.model.huggingface.write import find_difference
from fivefold.model.published import CATALOG, CatalogEntry
from fivefold.model.spec import Model
from fivefold.results.reading import Reading
from fivefold.text_files import read_text


def read(
    words: Sequence[str],
    overrides: Overrides = Overrides(),  # noqa: B008 (a frozen record)
) -> Reading:
    """Read a config file or a launch line as model, layout and job.

    ``words``: a file, with ``NAME=VALUE`` for variables that it leaves open, or the words of a launch line.
    ``FILE.py:FUNCTION`` names one of several configs in a Python file. Raises ``UserError`` if they are of no known
    software, or contradict each other.
    """
    return _read_first(_list_documents(words), overrides)


def read_pasted(
    text: str,
    overrides: Overrides = Overrides(),  # noqa: B008 (a frozen record)
    *,
    folder: Path,
    find: Callable[[str], Path],
) -> Reading:
    """Read the text of a config file, a script or a launch line, whose kind it shows itself.

    ``folder``: where files are that it names, each of which ``find`` allows. Raises ``UserError`` as ``read`` does.
    """
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    return _read_first(_list_readings(Document(PASTED, "", text=text, folder=folder, find=find)), overrides)


def _read_first(documents: Sequence[Document], overrides: Overrides) -> Reading:
    """Read the first of the documents that a format recognizes."""
    _check_is_no_model(documents[0])
    pairs = ((config_format, text) for text in documents for config_format in FORMATS if config_format.recognizes(text))
    config_format, document = next(pairs, (None, documents[0]))
    if config_format is None:
        formats = ", ".join(dict.fromkeys(format_.name for format_ in FORMATS if format_.parse))
        raise UserError(
            f"{document.origin}: unknown kind of config: it has no keys of {formats}; name a config of one of these"
        )
    result = config_format.read(document, overrides)
    if result.model is not None and overrides.model is None:
        result = result.replace(model=_find_known(result.model))
    if result.model is None or result.layout is None or result.job is None:
        return result
    errors = tuple(list_reasons(result.layout, model=result.model, job=result.job, machine=None))
    return result.replace(errors=errors)


def _check_is_no_model(document: Document) -> None:
    """Raise ``UserError`` for the ``config.json`` of a Hugging Face model, some of whose keys Megatron has too."""
    values = document.values if document.kind == "json" else {}
    if "model_type" in values and ("architectures" in values or "hidden_size" in values or "text_config" in values):
        raise UserError(
            f"{document.origin} is the config of a model, not of a run; name it in place of the model, as in "
            f"`fivefold predict {document.origin} h100:8 'dp8 zero3 mbs1'`"
        )


def _find_known(model: Model) -> Model:
    """Return the model under its name in the catalog, if the catalog has it.

    Of several with its sizes, the one that is named like it, then one with its scaling of positions.
    """
    named = catalog.find_published(model.name)
    if named is not None and find_difference(named, model) is None:
        return model.replace(name=named.name, repository=model.repository or named.repository)
    same = [name for name in CATALOG if _is_same(CATALOG[name], name, model)]
    scaled = [name for name in same if catalog.build_model(name).rope_scaling == model.rope_scaling]
    name = next(iter([*scaled, *same]), model.name)
    return model.replace(name=name)


def _is_same(entry: CatalogEntry, name: str, model: Model) -> bool:
    """Return whether a catalog model is ``model``, except for what costs nothing."""
    layers = entry.config.get("num_hidden_layers", model.layers)  # a key that is left out has a default: build it
    width = entry.config.get("hidden_size", model.width)
    if (layers, width) != (model.layers, model.width):
        return False
    published = catalog.build_model(name)
    return published.layers == model.layers and find_difference(published, fit_free_fields(model, published)) is None


def _list_documents(words: Sequence[str]) -> list[Document]:
    """Return the documents that may be the config, most likely first.

    They are the file itself, or the commands of a script, the last first.
    """
    if not words:
        raise UserError("nothing to read; name a file, or give a launch command after --")
    path, _, function = words[0].partition(".py:")
    assignment = DOTTED_ASSIGNMENT if Path(words[0]).suffix in (".yaml", ".yml") else ASSIGNMENT
    variables = dict(word.split("=", 1) for word in words[1:] if assignment.fullmatch(word))
    only_variables = len(variables) == len(words) - 1
    if function and len(words) == 1:
        file_document = read_document(Path(f"{path}.py"))
        return [file_document._replace(values={"function": function})]
    if only_variables and Path(words[0]).is_dir():
        config_file = next((file for name in MAIN_FILES if (file := Path(words[0]) / name).is_file()), None)
        if config_file is None:
            raise UserError(f"{words[0]} is a folder without {' or '.join(MAIN_FILES)}; name a file in it")
        return _list_documents([str(config_file), *words[1:]])
    if only_variables and (is_script(Path(words[0])) or Path(words[0]).suffix == ""):
        return _list_commands(Path(words[0]), variables)
    if only_variables:
        file_document = read_document(Path(words[0]))
        return [file_document._replace(values=_assign_variables(file_document.values, variables), given=variables)]
    run = strip_launchers(words)
    line_document = Document("the launch line", "words", words=run.words, folder=Path.cwd(), ranks=run.ranks())
    return [line_document._replace(options=run.options, environment=run.environment)]


def _list_readings(pasted: Document) -> list[Document]:
    """Return a pasted text as each kind of document that it may be; raises ``UserError`` if it is of none."""
    documents, errors = list[Document](), dict[str, UserError]()
    for suffix in (".json", ".toml", ".yaml"):  # JSON is YAML too, with equal values
        if not documents:
            try:
                documents.append(parse_values(pasted, suffix))
            except UserError as error:
                errors[suffix] = error
    has_values = bool(documents)
    documents.append(pasted._replace(kind="python"))
    with suppress(UserError):  # it has no command
        documents += _list_script_commands(pasted, {})
    if not (has_values or any(form.recognizes(document) for form in FORMATS for document in documents)):
        raise errors[".json" if pasted.text.lstrip()[:1] == "{" else ".toml" if TABLE.search(pasted.text) else ".yaml"]
    return documents


PASTED = "the pasted config"
TABLE = re.compile(r"^\[+[\w.\"-]+\]+\s*(#.*)?$", flags=re.MULTILINE)  # the head of a table of TOML
MAIN_FILES = ("run.sh", "run_config.yaml", "run.toml")  # files of a folder that name its other files
ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*")
DOTTED_ASSIGNMENT = re.compile(r"[A-Za-z_][\w.]*=.*")


def _assign_variables(values: Any, variables: Mapping[str, str]) -> Any:
    """Replace ``${NAME}`` in the values of a file."""
    if isinstance(values, dict):
        return {key: _assign_variables(value, variables) for key, value in values.items()}
    if isinstance(values, list):
        return [_assign_variables(value, variables) for value in values]
    return substitute(values, variables) if isinstance(values, str) and variables else values


def _list_commands(path: Path, variables: Mapping[str, str]) -> list[Document]:
    """Return the commands of a script as documents, the last first."""
    text = read_text(path, kind="a script")
    return _list_script_commands(Document(str(path), "words", text=text, folder=path.resolve().parent), variables)


def _list_script_commands(script: Document, variables: Mapping[str, str]) -> list[Document]:
    """Return the commands of the text of a script as documents, the last first."""
    parsed = read_script(script.text, variables)
    extra_keys = {
        name: value for name, value in variables.items() if not re.search(rf"\b{name}\b", script.text)
    }  # variables that the script does not use are keys of the config
    documents = []
    for words, environment in reversed([*zip(parsed.commands, parsed.environments, strict=True)]):
        run = strip_launchers(words)
        ranks = run.ranks(parsed.slurm.nodes, parsed.slurm.per_node)
        command_document = script._replace(kind="words", text="", words=run.words, ranks=ranks, options=run.options)
        command_document = command_document._replace(given=extra_keys, environment=environment)
        documents.append(command_document._replace(remarks=parsed.remarks, values=parsed.variables))
    if not documents:
        skipped = "".join(f", and {remark.key}, {remark.value!r}, {remark.means}" for remark in parsed.remarks[:1])
        raise UserError(f"{script.origin} holds no command{skipped}; name a config, a script, or a launch line")
    return documents
