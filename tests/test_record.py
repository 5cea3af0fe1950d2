from __future__ import annotations

import random
from pathlib import Path
from types import NoneType
from typing import Any, get_args

import pytest
from pydantic import ValidationError

from fivefold.adapter import Adapter
from fivefold.errors import UsageWarning, UserError
from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.machine.catalog import resolve as resolve_machine
from fivefold.machine.spec import Machine
from fivefold.model.catalog import build_model
from fivefold.model.spec import Model
from fivefold.record import Record
from fivefold.results.search_result import Proposal
from fivefold.spelling import make_unknown_name_error
from fivefold.step import Step
from fivefold.sweeps.spec import Sweep
from fivefold.text_files import read_file, read_lines
from fivefold.trainer.run import Run


class Wheel(Record):
    spokes: int = 36


class Bicycle(Record):
    name: str
    front: Wheel = Wheel()
    spares: tuple[Wheel, ...] = ()
    basket: Wheel | None = None


def line(values: dict[str, Any], record: type[Record] = Bicycle) -> str:
    with pytest.raises(UserError) as caught:
        record.read(values, origin="bike.toml")
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_a_record_is_frozen_and_varied_by_copy() -> None:
    bike = Bicycle(name="red")
    with pytest.raises(ValidationError, match="frozen"):
        bike.name = "blue"
    assert bike.replace(name="blue") == Bicycle(name="blue")
    assert bike.name == "red"
    with pytest.raises(UserError, match=r"^bicycle: unknown key 'nmae'; did you mean 'name'\?$"):
        bike.replace(nmae="blue")


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"nmae": "red", "name": "red"}, "bike.toml: unknown key 'nmae'; did you mean 'name'?"),
        ({"name": "red", "front": {"spoks": 3}}, "bike.toml: unknown key 'front.spoks'; did you mean 'spokes'?"),
        ({"name": "red", "spares": [{"spoks": 3}]}, "bike.toml: unknown key 'spares[0].spoks'; did you mean 'spokes'?"),
        ({"name": "red", "basket": {"spoks": 3}}, "bike.toml: unknown key 'basket.spoks'; did you mean 'spokes'?"),
        ({"name": "red", "qqqq": 1}, "bike.toml: unknown key 'qqqq'"),
        ({}, "bike.toml: name is missing"),
    ],
)
def test_an_unknown_key_is_a_one_line_error_with_the_nearest(values: dict[str, Any], text: str) -> None:
    assert line(values) == text


def test_a_bad_value_is_shown_and_cut_short() -> None:
    assert line({"name": "red", "front": {"spokes": "many"}}).endswith(", not 'many'")
    assert len(line({"name": "red", "front": {"spokes": "many\n" * 1000}})) < 200


def test_all_errors_of_a_file_are_in_one_line() -> None:
    assert line({"front": {"spokes": "many", "spoks": 3}, "basket": 7, "spares": [{"spokes": 0.5}]}) == (
        "bike.toml: name is missing; front.spokes must be a whole number, not 'many'; "
        "unknown key 'front.spoks'; did you mean 'spokes'?; spares[0].spokes must be a whole number, not 0.5; "
        "basket must be a table of fields, not 7"
    )
    assert line({}, Model).startswith("bike.toml: missing: name, layers, width, ")
    many = line({"name": "red", **{f"q{number}": 1 for number in range(20)}})
    assert many.endswith("; unknown key 'q7' (and 12 more)")


@pytest.mark.parametrize("values", [{"layers": True}, {"moe": {"experts": True}}, {"rope_theta": False}])
def test_true_and_false_are_not_read_as_numbers(values: dict[str, Any]) -> None:
    """Python's True would be one layer."""
    ((field, value),) = values.items()
    named = field if isinstance(value, bool) else f"{field}.{next(iter(value))}"
    assert f"{named} must be a " in line(values, Model)
    assert "number, not '" in line(values, Model)
    assert line({"chip": {"peak_flops": {"bf16": True}}, "ranks": 1}, Machine).count("number, not 'true'") == 1
    assert "stages[1] must be a whole number, not 'true'" in line({"stages": [1, True], "dp": 2}, Layout)
    assert "shard_group must be a whole number, not 'true'" in line({"shard_group": True, "zero": 1}, Layout)


def test_replacing_a_field_keeps_other_records_and_drops_caches() -> None:
    job = Job(global_batch=64)
    varied = job.replace(sequence=2048)
    assert varied.precision is job.precision
    assert varied == Job(global_batch=64, sequence=2048)
    assert Layout(dp=8, zero=1).replace(dp=4).shards == 4  # nothing that was cached is taken along
    with pytest.raises(UserError, match=r"^job: sequence must be .*, not 0$"):
        job.replace(sequence=0)
    with pytest.raises(UserError, match="true"):
        job.replace(sequence=True)


def test_the_error_of_a_missing_attribute_says_where_it_is() -> None:
    bike = Bicycle(name="red")
    for name, text in (
        ("nmae", "Bicycle has no 'nmae'; did you mean 'name'?"),
        ("spokes", "Bicycle has no 'spokes'; did you mean 'front.spokes', 'spares.spokes' or 'basket.spokes'?"),
        ("qqqq", "Bicycle has no 'qqqq'; it has basket, dump_changes, front, name, read, replace, spares"),
    ):
        with pytest.raises(AttributeError) as caught:
            getattr(bike, name)
        assert str(caught.value) == text
    assert not hasattr(bike, "_private")
    proposal = Proposal.model_construct(layout="dp8 zero3 mbs1")
    with pytest.raises(
        AttributeError, match=r"did you mean 'simpler.memory_bytes', 'faster.memory_bytes' or 'unchanged"
    ):
        getattr(proposal, "memory_byte")  # noqa: B009


def test_the_error_of_a_missing_attribute_is_written_when_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python looks for ``keys`` of what ``dict`` is made of, which took a millisecond for each record."""

    def describe(*_: object) -> str:
        raise AssertionError("nothing reads it")

    monkeypatch.setattr("fivefold.record._describe_missing_attribute", describe)
    assert dict(Bicycle(name="red"))["name"] == "red"
    assert getattr(Bicycle(name="red"), "nmae", None) is None


BAD = (-1, 0, True, 2**70, 1.5, float("inf"), float("nan"), "", "many\nlines", "dp", None, (), ("a", 1), {"b": 2}, b"c")


@pytest.mark.parametrize("seed", range(20))
def test_any_value_of_any_field_gives_a_record_or_an_error_of_one_line(seed: int) -> None:
    rng = random.Random(seed)
    model, machine = build_model("deepseek-v3"), resolve_machine("h100:8", local=Path("none"))
    job = Job(global_batch=64, adapter=Adapter(rank=8))
    records = (model, model.moe, machine, machine.chip, *machine.links, job, job.precision, job.optimizer, job.stack)
    for _ in range(100):
        record = rng.choice([*records, job.adapter, Layout(dp=8, zero=1)])
        assert record is not None
        field, value = rng.choice(sorted(type(record).model_fields)), rng.choice(BAD)
        text = _read_error(record, {field: value})
        assert "\n" not in text
        assert len(text) < 1000


def _read_error(record: Record, changes: dict[str, Any]) -> str:
    """Return what is wrong with changes of a record; empty if nothing is."""
    try:
        record.replace(**changes)
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.usefixtures("disable_garbage_collection")
@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.toml", "a = ", "not valid TOML"),
        ("a.json", "{", "not valid JSON"),
        ("a.json", "[1]", "holds a list, not a table"),
        ("a.json", "1" * 5000, "not valid JSON"),
        ("a.json", "[" * 200_000, "not valid JSON"),
        ("a.toml", b"\xff\xfe", "cannot be read as UTF-8"),
    ],
)
def test_an_unreadable_file_is_a_one_line_error(tmp_path: Path, name: str, content: str | bytes, words: str) -> None:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError) as caught:
        read_file(path)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_files_are_errors(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        read_file(tmp_path / "none.toml")
    with pytest.raises(UserError, match="cannot be read"):
        read_file(tmp_path)
    (tmp_path / "step.json").write_text("{}")
    with pytest.raises(UserError, match=r"step.json/step.json: no such file; .*/step.json is a file, not a folder$"):
        read_file(tmp_path / "step.json" / "step.json")
    with pytest.raises(UserError, match=r"a+/step.json: too long for a file name; check the spelling$"):
        read_file(tmp_path / ("a" * 300) / "step.json")


def test_toml_and_json_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('name = "é"\n', encoding="utf-8")
    (tmp_path / "a.json").write_text('{"name": "é"}', encoding="utf-8")
    (tmp_path / "marked.json").write_text('{"name": "é"}', encoding="utf-8-sig")  # as some editors on Windows save it
    assert read_file(tmp_path / "a.toml") == read_file(tmp_path / "a.json") == {"name": "é"}
    assert read_file(tmp_path / "marked.json") == {"name": "é"}
    (tmp_path / "wide.json").write_text('{"name": "é"}', encoding="utf-16")
    with pytest.raises(UserError, match=r"not UTF-8 at byte 0; save it as UTF-8"):
        read_file(tmp_path / "wide.json")


def test_the_error_of_an_unknown_name_suggests_the_closest() -> None:
    assert str(make_unknown_name_error("lama3-8b", ["llama3-8b", "gpt2"], kind="model")) == (
        "unknown model 'lama3-8b'; did you mean llama3-8b? `fivefold models` lists all"
    )
    assert (
        str(make_unknown_name_error("zzz", ["b"], kind="machine"))
        == "unknown machine 'zzz'; `fivefold machines` lists all"
    )
    assert (
        str(make_unknown_name_error("ab", ["b", "aab", "abb"], kind="key"))
        == "unknown key 'ab'; did you mean abb, aab or b?"
    )
    assert str(make_unknown_name_error("zzz", ["b", "a"], kind="key")) == "unknown key 'zzz'; known: a, b"


@pytest.mark.parametrize("noun", [Model, Machine, Layout, Job, Step])
def test_every_input_record_has_a_json_schema_and_rejects_unknown_keys(noun: type[Record]) -> None:
    schema = noun.model_json_schema()
    assert schema["additionalProperties"] is False
    assert set(schema["properties"]) == set(noun.model_fields)
    for definition in schema.get("$defs", {}).values():
        assert definition["additionalProperties"] is False


@pytest.mark.parametrize("noun", [Model, Machine, Job, Run, Sweep])
def test_a_field_of_a_written_record_that_may_be_none_is_none_by_default(noun: type[Record]) -> None:
    optional = [(kind, name, field) for kind in find_records(noun) for name, field in kind.model_fields.items()
                if NoneType in get_args(field.annotation)]  # fmt: skip
    assert [(kind.__name__, name) for kind, name, field in optional if field.get_default() is not None] == []


def find_records(annotation: Any) -> set[type[Record]]:
    """The records that a field's type names, with those of their own fields."""
    if not (isinstance(annotation, type) and issubclass(annotation, Record)):
        return {kind for part in get_args(annotation) for kind in find_records(part)}
    fields = annotation.model_fields.values()
    return {annotation}.union(*(find_records(field.annotation) for field in fields))


@pytest.mark.parametrize(
    ("text", "said"),
    [("null", "holds null"), ("[]", "holds a list"), ('"a"', "holds text"), ("3", "holds a number"),
     ("true", "holds true"), ('{"a": ' + "[" * 3000, "not valid JSON")],
)  # fmt: skip
def test_a_file_of_another_kind_is_a_one_line_error(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "step.json"
    path.write_text(text)
    with pytest.raises(UserError, match=said):
        read_file(path)


def test_lines_of_another_kind_are_a_one_line_error(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"a": 1}\n[2]\n')
    with pytest.raises(UserError, match="line 2 holds a list, not a table"):
        read_lines(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="cannot be read"):
        read_lines(path)
    path.write_text('{"a": 1}\n{"a": ' + "[" * 3000)
    assert read_lines(path) == [{"a": 1}]


def test_a_warning_points_to_the_line_that_led_to_it() -> None:
    with pytest.warns(UsageWarning, match="dp8 is filled in") as caught:
        Layout.parse("zero3 mbs1", machine=resolve_machine("h100:8", local=Path("none")))
    assert [warning.filename for warning in caught] == [__file__]
