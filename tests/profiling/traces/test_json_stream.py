"""Files of any shape, in pieces of any size: the events that json reads, those before a cut; one line if it is none."""

from __future__ import annotations

import gzip
import json
import random
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fivefold.errors import UserError
from fivefold.machine.catalog import resolve
from fivefold.profiling.traces import json_stream, read
from fivefold.profiling.traces.json_stream import JsonStream
from fivefold.rendering.trace_report import render_page
from tests.printed import to_text
from tests.profiling.traces import kineto
from tests.selection import mark_share

LEAF = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text())
VALUE = st.recursive(LEAF, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3))
EVENT = st.dictionaries(st.text(), VALUE, max_size=4)
KEYS = st.dictionaries(st.text().filter(lambda key: key != "traceEvents"), VALUE, max_size=3)
SAME_FOLDER = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


def read_all(path: Path) -> tuple[list[dict[str, Any]], JsonStream]:
    with JsonStream(path) as stream:
        return list(stream.events()), stream


@pytest.mark.slow
@SAME_FOLDER
@given(
    before=KEYS,
    events=st.lists(EVENT, max_size=6),
    after=KEYS,
    chunk=st.sampled_from((1, 3, 17, 1000)),
    indent=st.sampled_from((None, 1)),
    zipped=st.booleans(),
    wrapped=st.booleans(),
)
def test_stream_reads_the_same_as_json(
    before: dict[str, Any],
    events: list[dict[str, Any]],
    after: dict[str, Any],
    chunk: int,
    indent: int | None,
    zipped: bool,
    wrapped: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    after = {key: value for key, value in after.items() if key not in before}
    whole = {**before, "traceEvents": events, **after} if wrapped else events
    content = json.dumps(whole, indent=indent, ensure_ascii=chunk == 3).encode()
    path = tmp_path / "trace"
    path.write_bytes(gzip.compress(content) if zipped else content)
    monkeypatch.setattr(json_stream, "CHUNK_BYTES", chunk)
    result, stream = read_all(path)
    assert result == json.loads(json.dumps(events))
    assert stream.metadata == (json.loads(json.dumps({**before, **after})) if wrapped else {})
    assert (stream.broken, stream.cut) == (0, "")


@pytest.fixture(scope="module")
def content() -> tuple[bytes, list[dict[str, Any]]]:
    events = kineto.events(kineto.draw(2, kineto.Shape(ranks=1, steps=1, operations=8)), 0)
    return kineto.text(events).encode(), events


@pytest.mark.parametrize("zipped", [False, True])
def test_a_cut_file_gives_what_came_before(
    content: tuple[bytes, list[dict[str, Any]]], zipped: bool, tmp_path: Path
) -> None:
    """Cut anywhere: the events are the first ones, and the cut is said."""
    text, events = content
    whole = gzip.compress(text, mtime=0) if zipped else text
    begin = whole.index(b'"traceEvents"') if not zipped else 40
    for at in random.Random(1).sample(range(begin + 20, len(whole) - 40), 120):
        path = tmp_path / "cut"
        path.write_bytes(whole[:at])
        if zipped and at < len(whole) // 3:  # perhaps within the metadata
            continue
        result, stream = read_all(path)
        assert stream.broken == 0
        assert stream.cut
        assert result == events[: len(result)]
        if not zipped:  # no complete event is lost
            assert len(result) >= text[:at].count(b"}},\n") - 1


def test_broken_events_are_passed_over(content: tuple[bytes, list[dict[str, Any]]], tmp_path: Path) -> None:
    """A quote within a name, as some versions wrote it, costs the one event."""
    text, events = content
    lines = text.decode().splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith('{"ph"'))
    for number in (first + 2, first + 9):
        lines[number] = lines[number].replace('"name": "', '"name": "std::map<"a"> ', 1)
    path = tmp_path / "trace.json"
    path.write_text("\n".join(lines), encoding="utf-8")
    result, stream = read_all(path)
    assert stream.broken == 2
    assert result == [event for number, event in enumerate(events) if number not in (2, 9)]
    report = read([path]).report
    assert any("2 broken events" in remark for remark in report.remarks)


def test_damage_within_a_gzip_file_is_a_cut(content: tuple[bytes, list[dict[str, Any]]], tmp_path: Path) -> None:
    rows = bytearray(gzip.compress(content[0], compresslevel=0, mtime=0))
    rows[-5] ^= 0xFF  # of the checksum
    path = tmp_path / "trace.json.gz"
    path.write_bytes(bytes(rows))
    result, stream = read_all(path)
    assert "damaged" in stream.cut
    assert result == content[1]


@pytest.mark.usefixtures("disable_garbage_collection")
@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b"  \n ", "is empty"),
        (b"hello, world", "is not JSON"),
        (b"\x0a\x9c\x01\x0a\x07perfetto\x00\x01", "is not JSON"),
        (b'{"a": 1}', "has no traceEvents"),
        (b'{"traceEvents": 5}', "has no traceEvents"),
        (b'{"traceEvents": []}', "holds no kernel and no operator"),
        (b'{"traceEvents": [{"ph": "X", "cat": "F", "name": "F0.0", "ts": 0, "dur": 3}]}', "holds no kernel"),
        (b'{"traceEvents": [{"ph": "X", "cat": "kernel", "name"', "holds no kernel and no operator before its cut"),
        (b"[" * 100_000, "holds no kernel"),
        (b'[{"ph": "X", "cat": "cpu_op", "name": "c10d::send", "ts": 0, "dur": 3}]', "has no operator that computes"),
        (b'{"a": ' + b"9" * 5000 + b"}", "has no traceEvents"),
        (
            gzip.compress(b'{"traceEvents": [' + b'{"ph": "M"},' * 1000, mtime=0)[:-9],
            "before its cut (the gzip file is cut",
        ),
        (b"\x1f\x8b\x08\x00garbage", "is empty"),
    ],
)
def test_invalid_trace_is_a_one_line_error(content: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(content)
    with pytest.raises(UserError) as mistake:
        read([path])
    line = str(mistake.value)
    assert said in line
    assert line.startswith(f"{path} ")
    assert "\n" not in line


def test_incomplete_events_are_counted(tmp_path: Path) -> None:
    good = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 1.5, "dur": 2}
    bad: list[Any] = [
        {**good, "ts": "soon"},
        {**good, "dur": -1},
        {**good, "dur": float("nan")},
        {**good, "name": 5},
        17,
        None,
        {**good, "ts": None},
        {**good, "pid": [1]},
        {**good, "ts": 1e300},
        {**good, "args": 7},
        {**good, "args": {"correlation": "x"}},
        {key: value for key, value in good.items() if key != "dur"},
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": [*bad, good, {**good, "ts": 9}]}), encoding="utf-8")
    report = read([path]).report
    assert report.categories[0].calls == 2
    assert any(remark == "trace.json: 10 broken events left out" for remark in report.remarks), report.remarks


STRANGE: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    2**63,
    10**400,
    1e308,
    -1e-300,
    float("nan"),
    float("inf"),
    "",
    "x",
    "ncclDevKernel",
    "ProfilerStep#",
    "²",
    [],
    [1, [2]],
    {},
    {"a": 1},
    "[0, 1, ..., 7]",
    "c10d::send",
    "gloo:all_reduce",
    "kernel",
)


@pytest.mark.slow
@pytest.mark.parametrize("seed", mark_share(4, range(40)))
def test_random_traces_are_read_or_rejected(seed: int, tmp_path: Path) -> None:
    """Some values of two ranks' files replaced, three times; page and data are made of what is read."""
    dice = random.Random(seed)
    job = kineto.draw(seed, kineto.Shape(steps=2, operations=6))
    for _ in range(3):
        paths = []
        for rank in range(2):
            whole: dict[str, Any] = {**kineto.metadata(rank, 2), "traceEvents": kineto.events(job, rank)}
            for _ in range(dice.choice((1, 3, 30))):
                replace_some(dice, whole)
            paths.append(tmp_path / f"rank{rank}.json")
            paths[-1].write_text(json.dumps(whole), encoding="utf-8")
        try:
            report = read(paths, machine=resolve("h100:8", local=tmp_path)).report
        except UserError as mistake:
            assert "\n" not in str(mistake)  # noqa: PT017
        else:
            assert "Where the time goes" in to_text(render_page(report), width=120)
            json.loads(report.model_dump_json())


def replace_some(dice: random.Random, whole: Any) -> None:
    """Replace a value somewhere in lists and tables, more often deep within."""
    while isinstance(whole, dict | list) and whole:
        key = dice.choice(list(whole) if isinstance(whole, dict) else range(len(whole)))
        if not isinstance(whole[key], dict | list) or dice.random() < 0.05:
            if dice.random() < 0.15 and isinstance(whole, dict):
                del whole[key]
            else:
                whole[key] = deepcopy(dice.choice(STRANGE))
            return
        whole = whole[key]
