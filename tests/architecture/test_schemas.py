"""The published JSON schemas are those of a stored copy, and a change that breaks readers raises the version.

A wanted change is stored with ``FIVEFOLD_FREEZE=1 pytest tests/architecture/test_schemas.py`` and seen in the diff.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from fivefold.requests.commands import COMMANDS, JsonOption
from fivefold.requests.output_schemas import OUTPUTS, write_schema
from tests.cli.commands import run
from tests.selection import mark_share

STORED = Path(__file__).with_name("schemas")
JOB = ("--gbs", "16", "--seq", "512")
LAYOUT = "dp8 zero3 mbs1"
STEP = ("nano", "h100:8", LAYOUT, *JOB)


def find_breaks(old: Any, new: Any, place: str = "") -> Iterator[str]:
    """What a reader of the old JSON cannot rely on any more: a field that went, is of another type or may be absent."""
    if isinstance(old, dict):
        for key, value in old.items():
            if key in ("description", "title", "default", "version", "$id"):
                continue
            if not isinstance(new, dict) or key not in new:
                yield f"{place}/{key}"
            elif key == "required":
                yield from (f"{place}/required {name}" for name in value if name not in new[key])
            else:
                yield from find_breaks(value, new[key], f"{place}/{key}")
    elif isinstance(old, list) and old and isinstance(old[0], dict):
        yield from (f"{place}: {item}" for item in old if not any(not [*find_breaks(item, of)] for of in new))
    elif isinstance(old, list):
        yield from (f"{place}: {item}" for item in new if item not in old)  # a word that readers do not know
    elif old != new:
        yield f"{place}: {old} became {new}"


def drop_texts(schema: Any) -> Any:
    """The schema without its texts for people, which may be reworded at any time."""
    if isinstance(schema, dict):
        texts = {key for key in ("description", "title") if isinstance(schema.get(key), str)}
        return {key: drop_texts(value) for key, value in schema.items() if key not in texts}
    return [drop_texts(item) for item in schema] if isinstance(schema, list) else schema


@pytest.mark.parametrize("command", OUTPUTS)
def test_the_schema_of_a_command_equals_the_stored_one(command: str) -> None:
    path, now = STORED / f"{command}.json", drop_texts(write_schema(command))
    jsonschema.Draft202012Validator.check_schema(now)
    if path.exists():
        stored = json.loads(path.read_text(encoding="utf-8"))
        if stored["version"] == now["version"]:
            assert [*find_breaks(stored, now)] == [], "raise the version in OUTPUTS, and say so in the changelog"
    if os.environ.get("FIVEFOLD_FREEZE"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(now, indent=1) + "\n", encoding="utf-8")
    assert now == json.loads(path.read_text(encoding="utf-8")), "stored anew as the docstring says?"


def test_every_command_with_json_has_a_schema_and_no_other() -> None:
    assert set(OUTPUTS) == {name for name, schema in COMMANDS.items() if issubclass(schema, JsonOption)}
    assert {path.stem for path in STORED.glob("*.json")} == set(OUTPUTS)


def test_an_incompatible_change_of_a_schema_is_detected() -> None:
    old = {
        "properties": {"a": {"type": "integer"}, "b": {"anyOf": [{"type": "string"}, {"type": "null"}]}},
        "required": ["a"],
        "kind": {"enum": ["x", "y"]},
    }
    added = {**old, "properties": {**old["properties"], "c": {"type": "string"}}, "required": ["a", "c"]}
    assert [*find_breaks(old, added)] == []
    for change in (
        {"properties": {"a": {"type": "integer"}}},
        {"properties": {**old["properties"], "a": {"type": "number"}}},
        {"required": []},
        {"kind": {"enum": ["x", "y", "z"]}},
    ):
        assert [*find_breaks(old, {**old, **change})] != []


ANSWERS = [
    ("predict", *STEP),
    ("search", "nano", "h100:2", "--top", "2", *JOB),
    ("search", "nano", "h100:8", "--keep", LAYOUT, *JOB),
    ("search", "nano", "h100:2", "a100:2", "--tokens", "1B", *JOB),
    ("plan", "nano", "h100:2", "--tokens", "1B", *JOB),
    ("compare", "nano", "h100:8", LAYOUT, "dp8 zero1 mbs1", *JOB),
    ("ratios", "nano", "h100:8", *JOB),
    *(("ask", question, *STEP) for question in ("micro-batch", "batch", "run", "changes", "finetune")),
    ("ask", "tokens", *STEP, "--deadline", "30d"),
    ("ask", "sequence", "nano", "h100:2", "dp2", "--gbs", "8"),
    ("ask", "gpus", "nano", "h100:8", *JOB),
    ("models",),
    ("models", "--families", "llama"),
    ("machines",),
    ("stacks",),
]


def _read_checked(capsys: pytest.CaptureFixture[str], command: str) -> Any:
    values = json.loads(capsys.readouterr().out)
    jsonschema.Draft202012Validator(write_schema(command)).validate(values)
    return values


@pytest.mark.slow
@pytest.mark.parametrize("words", mark_share(2, map(pytest.param, ANSWERS)), ids=lambda words: "-".join(words[:2]))
def test_answers_are_as_their_schema_says(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, *words, "--json") == 0
    assert _read_checked(capsys, words[0])


def test_answers_with_notes_and_settings_are_as_their_schema_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    file = tmp_path / "run.sh"
    assert run(monkeypatch, "config", "set", "machine", "h100:8") == 0
    assert run(monkeypatch, "write", "dp8 zero1 mbs1", "--to", "megatron", "--model", "nano", *JOB, "-o", file) == 0
    capsys.readouterr()
    assert run(monkeypatch, "config", "list", "--json") == 0
    assert _read_checked(capsys, "config")
    for words in (("predict",), ("compare", "dp8 zero2 mbs1")):
        assert run(monkeypatch, *words, "--from", file, "--json") == 0
        values = _read_checked(capsys, words[0])
        assert {"config", "settings"} <= set(values)
    assert run(monkeypatch, "read", file, "--json") == 0
    _read_checked(capsys, "read")


def test_answers_on_files_are_as_their_schema_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = tmp_path / "sweep.toml"
    sweep.write_text('models = ["nano"]\nmachines = ["h100:8"]\nlayouts = ["dp8 zero3 mbs1"]\n', encoding="utf-8")
    assert run(monkeypatch, "sweep", sweep, "--dry", "--json") == 0
    _read_checked(capsys, "sweep")
    assert run(monkeypatch, "sweep", sweep, "--json", "--out", tmp_path / "rows.jsonl") == 0
    _read_checked(capsys, "sweep")
    log = tmp_path / "log.txt"
    log.write_text(
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 "
        "GiB of which 1.50 GiB is free. Process 1 has 77.60 GiB memory in use. Of the allocated memory 70.00 GiB is "
        "allocated by PyTorch, and 5.00 GiB is reserved by PyTorch but unallocated.\n",
        encoding="utf-8",
    )
    assert run(monkeypatch, "explain", log, "--json") == 0
    assert _read_checked(capsys, "explain")["explanations"]


@pytest.mark.slow
def test_a_dry_run_is_as_its_schema_says(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "dryrun", "nano", "h100:2", "dp2 zero1 mbs1", "--gbs", "4", "--seq", "64", "--json") == 0
    assert _read_checked(capsys, "dryrun")["dry_run"]


@pytest.mark.long
def test_a_run_is_as_its_schemas_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every command of a run's life, on this computer."""
    text, folder = tmp_path / "text.txt", tmp_path / "run"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 4000, encoding="utf-8")
    file = tmp_path / "run.toml"
    file.write_text(
        f'model = "nano"\nmachine = "local:1"\nlayout = "dp1 mbs1"\nfolder = "{folder}"\n'
        '[job]\nsequence = 64\nglobal_batch = 4\nsteps = 8\nprecision = "fp32"\n'
        f'[data]\ncorpus = "{text}"\ntokenizer = "bytes"\n',
        encoding="utf-8",
    )
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for words in (
        ("calibrate", "--quick", "--processes", "1"),
        ("data", file),
        ("train", file, "--force"),
        ("show", folder),
        ("generate", folder, "--tokens", "4"),
        ("numerics", file, "--precision", "bf16"),
        ("export", folder, "--to", tmp_path / "exported"),
        ("import", tmp_path / "exported"),
    ):
        assert run(monkeypatch, *words, "--json") == 0, words
        assert _read_checked(capsys, words[0])
