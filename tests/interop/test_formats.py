"""A format is one folder with four modules, and one line of the registry; reading, writing and listing are generic.

A format of a software that does not exist is written as such a folder; it is read, written and recognized, and a key of
it that nothing counts is an error.
"""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from fivefold.cli.completion import formats as complete_formats
from fivefold.interop.format import Asked, Format, Plan
from fivefold.interop.read import read
from fivefold.interop.registry import FORMATS, list_written
from fivefold.interop.write import write
from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.model.catalog import named
from fivefold.record import Mistake
from fivefold.requests.configs import check_keys

ROOT = Path(__file__).parents[2]
FOLDERS = {  # formats by folder, of those that are read; our own run file has no keys of another software
    form.parse.__module__.split(".")[2]: form for form in FORMATS if form.parse is not None and form.stack != "fivefold"
}
MODULES = {"__init__", "keys", "parse", "to_job", "emit"}
DATA = {"dialects", "effects", "harmless", "flavors"}  # tables of what a software has

FAKE = {
    "__init__": """
from fivefold.interop.format import Format
from megacorp.emit import emit
from megacorp.keys import TABLE
from megacorp.parse import is_megacorp, parse
from megacorp.to_job import to_job

FORMATS = (Format("megacorp", "7.0", "megatron-core", is_megacorp, parse, to_job, emit, keys={"megacorp": TABLE}),)
""",
    "keys": """
from fivefold.interop.keys import field, foreign, idle, part, near

TABLE = {
    "megacorp.model": part("model", None), "megacorp.tensor": field("layout.tp", 1),
    "megacorp.batch": field("job.global_batch", None), "megacorp.tokens": field("job.sequence", 4096),
    "megacorp.micro": field("layout.mbs", 1), "megacorp.shard": field("layout.zero", 0),
    "megacorp.adapters": foreign("adapters, not the weights, are trained", False),
    **near("another kernel", "megacorp.kernel", default="usual"), **idle("megacorp.log.*"),
}
""",
    "parse": """
from fivefold.interop.format import ParsedConfig
from fivefold.interop.keys import Values, flat
from megacorp.keys import TABLE

def is_megacorp(document):
    return document.kind == "yaml" and "megacorp" in document.values

def parse(document, asked):
    given = flat(document.values, origin=document.origin)
    return ParsedConfig(document, Values(TABLE, given, origin=document.origin, software="megacorp", version="7.0"))
""",
    "to_job": """
from fivefold.interop.format import build_reading, replicas, world
from fivefold.model.catalog import resolve

def to_job(config, asked):
    values, model = config.values, asked.model or resolve(str(config.values["megacorp.model"]))
    ranks, fields = world(config.document, asked), values.fields()
    fields |= {"job.stack.name": "megatron-core", "layout.dp": replicas(
        ranks, values.whole("megacorp.tensor"), of="tensor", origin=values.origin)}
    return build_reading(config, fields, model=model, ranks=ranks)
""",
    "emit": """
from fivefold.interop.format import Written
from fivefold.interop.keys import written
from fivefold.interop.render import yaml_file
from megacorp.keys import TABLE

def emit(plan):
    values = written(TABLE, {"job": plan.job, "layout": plan.layout}) | {"megacorp.model": plan.model.name}
    return Written({"megacorp.yaml": yaml_file(values, TABLE, about=("megacorp",), extra={})})
""",
}


@pytest.fixture(scope="module")
def formats(tmp_path_factory: pytest.TempPathFactory) -> tuple[Format, ...]:
    """Return the registry with one more format, which one folder holds."""
    folder = tmp_path_factory.mktemp("formats") / "megacorp"
    folder.mkdir()
    for name, text in FAKE.items():
        (folder / f"{name}.py").write_text(text, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder.parent))
        fake = importlib.import_module("megacorp")
    return (*FORMATS, *fake.FORMATS)


def test_a_new_format_is_read(formats: tuple[Format, ...], tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("megacorp: {model: llama3-8b, tensor: 2, batch: 64, log: {every: 10}}\n")
    reading = read([str(tmp_path / "run.yaml")], Asked(ranks=8), formats=formats)
    assert (reading.software, reading.version) == ("megacorp", "7.0")
    assert reading.job is not None
    assert (str(reading.layout), reading.job.global_batch) == ("dp4 tp2 zero0 mbs1", 64)
    assert [said.key for said in reading.defaulted] == ["megacorp.tokens", "megacorp.micro", "megacorp.shard"]
    assert [said.key for said in reading.harmless] == ["megacorp.log.every"]


def test_a_new_format_refuses_keys_with_an_effect(formats: tuple[Format, ...], tmp_path: Path) -> None:
    text = "megacorp: {model: llama3-8b, batch: 64, adapters: true, kernel: new, unknown: 1}\n"
    (tmp_path / "run.yaml").write_text(text)
    reading = read([str(tmp_path / "run.yaml")], Asked(ranks=8), formats=formats)
    assert [said.key for said in reading.approximated] == ["megacorp.kernel"]
    with pytest.raises(
        Mistake, match=r"unknown=1 \(is no key that is known of megacorp 7\.0\).*megacorp\.adapters=true"
    ):
        check_keys(reading)


def test_a_new_format_is_written_and_read_back(formats: tuple[Format, ...], tmp_path: Path) -> None:
    plan = Plan(named("llama3-8b"), Layout.parse("dp4 tp2 zero1 mbs2"), Job(sequence=2048, global_batch=64))
    (tmp_path / "run.yaml").write_text(write(plan, to="megacorp", formats=formats).files["megacorp.yaml"])
    reading = read([str(tmp_path / "run.yaml")], Asked(ranks=8), formats=formats)
    assert (reading.layout, reading.job and reading.job.sequence) == (plan.layout, 2048)
    with pytest.raises(Mistake, match="of layout 'dp2 tp2 pp2"):
        write(plan._replace(layout=Layout.parse("dp2 tp2 pp2 zero1 mbs2")), to="megacorp", formats=formats)


def test_a_new_format_is_among_the_choices(formats: tuple[Format, ...], tmp_path: Path) -> None:
    assert "megacorp" in list_written(formats)
    assert complete_formats("") == list_written()
    with pytest.raises(Mistake, match=r"known: .*megacorp"):
        write(Plan(named("nano"), Layout(), Job()), to="?", formats=formats)
    (tmp_path / "run.yaml").write_text("a: 1\n")
    with pytest.raises(Mistake, match=r"of fivefold.*, megacorp, it has none's keys"):
        read([str(tmp_path / "run.yaml")], formats=formats)


def test_every_format_has_the_same_four_modules() -> None:
    for name, form in FOLDERS.items():
        present = {path.stem for path in (ROOT / "fivefold" / "interop" / name).glob("*.py")}
        assert present - DATA <= MODULES, name
        assert form.to_job is not None
        assert form.emit is not None
        functions = {"parse": form.parse, "to_job": form.to_job, "emit": form.emit}
        assert all(function.__module__.endswith(f".{module}") for module, function in functions.items() if function)
        assert form.keys, name
    assert len(FOLDERS) == 6


def test_every_format_that_is_written_is_on_the_page() -> None:
    page = (ROOT / "docs" / "how-to" / "configs" / "index.md").read_text(encoding="utf-8")
    assert [name for name in list_written() if f"--to {name}" not in page] == []
