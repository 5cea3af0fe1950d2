"""The published JSON schema of each command's ``--json``: versioned, for programs that read it.

A field may be added within a version. A field that is removed, renamed, of another type or no longer always present
needs a new version in ``OUTPUTS``; ``tests/architecture/test_schemas.py`` compares with a stored copy and says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from importlib import import_module
from operator import or_
from typing import Any, NamedTuple

from fivefold.errors import UserError
from fivefold.requests.settings import COMMANDS_WITH_SETTINGS, AppliedSettings

DIALECT = "https://json-schema.org/draft/2020-12/schema"


class Output(NamedTuple):
    """The JSON of a command: one of ``records``, as ``module:class``; or a list of one of ``entries``; its version."""

    records: Sequence[str] = ()
    entries: Sequence[str] = ()
    version: int = 1


_RESULTS = "fivefold.results"
OUTPUTS: Mapping[str, Output] = {
    "predict": Output(["fivefold.step:Step"], version=3),
    "search": Output(
        [f"{_RESULTS}.search_result:SearchResult", f"{_RESULTS}.search_result:Walk", f"{_RESULTS}.run_estimate:Offers"],
        version=3,
    ),
    "plan": Output([f"{_RESULTS}.playbook:Playbook"], version=3),
    "compare": Output([f"{_RESULTS}.comparison:Comparison"], version=3),
    "ratios": Output([f"{_RESULTS}.balance:Ratios"], version=2),
    "ask": Output(
        entries=[
            *(
                f"{_RESULTS}.search_result:{name}"
                for name in ("QuestionAnswer", "Batch", "Change", "FineTune", "Lengths")
            ),
            f"{_RESULTS}.run_estimate:RunEstimate",
        ],
        version=2,
    ),
    "sweep": Output([f"{_RESULTS}.outputs:SweepSize"], [f"{_RESULTS}.sweep_row:SweepRow"], version=3),
    "dryrun": Output([f"{_RESULTS}.outputs:DryrunOutput"], version=3),
    "models": Output(entries=[f"{_RESULTS}.catalog:CatalogModel", f"{_RESULTS}.catalog:CatalogFamily"], version=2),
    "machines": Output(entries=[f"{_RESULTS}.catalog:CatalogMachine"]),
    "stacks": Output(entries=[f"{_RESULTS}.catalog:CatalogStack"]),
    "read": Output([f"{_RESULTS}.reading:Reading"], version=25),
    "calibrate": Output(["fivefold.machine.spec:Machine"]),
    "trace": Output([f"{_RESULTS}.trace_report:Traced"], version=3),
    "explain": Output([f"{_RESULTS}.outputs:ExplainOutput"], version=3),
    "train": Output([f"{_RESULTS}.outputs:StepPair"], version=3),
    "data": Output(["fivefold.trainer.data.shards:Index"]),
    "show": Output(["fivefold.step:Step"], [f"{_RESULTS}.step_comparison:QuantityComparison"], version=3),
    "doctor": Output([f"{_RESULTS}.diagnosis:Diagnosis", f"{_RESULTS}.explanation:Explanation"], version=3),
    "generate": Output([f"{_RESULTS}.outputs:GenerateOutput"]),
    "numerics": Output([f"{_RESULTS}.numerics:Numerics"]),
    "import": Output([f"{_RESULTS}.outputs:ImportOutput"]),
    "export": Output([f"{_RESULTS}.outputs:ExportOutput"]),
    "config": Output([f"{_RESULTS}.outputs:SettingValues"]),
}


def write_schema(command: str) -> dict[str, Any]:
    """Return the JSON schema of what ``fivefold COMMAND --json`` prints; raises ``UserError`` for another command."""
    from pydantic import TypeAdapter

    if command not in OUTPUTS:
        raise UserError(f"no schema for {command!r}; commands that print JSON: {', '.join(sorted(OUTPUTS))}")
    output = OUTPUTS[command]
    kinds: list[Any] = [_import_record(name) for name in output.records]
    if output.entries:
        kinds.append(list[reduce(or_, map(_import_record, output.entries))])  # type: ignore[misc]
    answer = TypeAdapter(reduce(or_, kinds)).json_schema(mode="serialization")
    definitions = answer.pop("$defs", {})
    if command in COMMANDS_WITH_SETTINGS:
        definitions["AppliedSettings"] = _describe(AppliedSettings, definitions)
    if command in WITH_CONFIG:
        from fivefold.results.reading import ConfigNotes

        definitions["ConfigNotes"] = _describe(ConfigNotes, definitions)
    body = _with_notes(answer, command)
    heading = {
        "$schema": DIALECT,
        "$id": f"urn:fivefold:output:{command}:{output.version}",
        "title": f"fivefold {command} --json",
        "description": "Fields may be added within a version; ignore those that are not listed.",
        "version": output.version,
    }
    body = {key: value for key, value in body.items() if key not in ("title", "description")}
    schema: dict[str, Any] = heading | _allow_extra_fields(
        body | ({"$defs": dict(sorted(definitions.items()))} if definitions else {})
    )
    return schema


WITH_CONFIG = ("predict", "search", "plan", "compare", "dryrun")  # answers with notes on the keys of --from


def _import_record(name: str) -> Any:
    module, _, kind = name.partition(":")
    return getattr(import_module(module), kind)


def _describe(record: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a record that commands add to answers, and put what it refers to into ``definitions``."""
    schema: dict[str, Any] = record.model_json_schema(mode="serialization")
    definitions |= schema.pop("$defs", {})
    return schema


def _with_notes(answer: dict[str, Any], command: str) -> dict[str, Any]:
    """Add the fields that the command line adds to any answer: ``settings``, and ``config`` of ``--from``."""
    notes: dict[str, Any] = {}
    if command in COMMANDS_WITH_SETTINGS:
        notes["settings"] = {"$ref": "#/$defs/AppliedSettings"}
    if command in WITH_CONFIG:
        one = {"$ref": "#/$defs/ConfigNotes"}
        notes["config"] = {"type": "array", "items": one} if command == "compare" else one
    if not notes:
        return answer
    if answer.get("type") == "array":
        return answer | {"items": {"allOf": [answer["items"], {"type": "object", "properties": notes}]}}
    return {"allOf": [answer, {"type": "object", "properties": notes}]}


def _allow_extra_fields(schema: Any) -> Any:
    """Return a schema that admits fields which a later release adds."""
    if isinstance(schema, dict):
        return {
            key: _allow_extra_fields(value)
            for key, value in schema.items()
            if not (key == "additionalProperties" and value is False)
        }
    return [_allow_extra_fields(item) for item in schema] if isinstance(schema, list) else schema
