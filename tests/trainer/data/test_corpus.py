"""Documents out of files of every kind, and one line for each file that cannot be read."""

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pyarrow
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from fivefold.errors import UserError
from fivefold.trainer.data import corpus
from fivefold.trainer.data.corpus import list_files, list_slices, read_documents, read_slice


def documents(path: Path, *, key: str = "text") -> list[str]:
    return list(read_documents(list_files(str(path)), key=key))


def rows(path: Path, values: list[object], *, column: str = "text", group: int = 2) -> None:
    parquet.write_table(pyarrow.table({column: values}), path, row_group_size=group)


def test_the_standard_library_is_over_five_megabytes_of_utf8() -> None:
    files = list_files("stdlib")
    names = [file.name for file in files]
    assert sum(file.size_bytes for file in files) > 5e6
    assert "json/decoder.py" in names
    assert len(set(names)) == len(names)
    folders = {part for name in names for part in name.split("/")[:-1]}
    assert folders.isdisjoint({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})
    assert names == [file.name for file in list_files("stdlib")]


def test_a_folder_of_all_kinds_is_read_in_the_order_of_names(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git/hidden.txt").write_text("hidden")
    (tmp_path / ".hidden.txt").write_text("hidden")
    (tmp_path / "picture.png").write_bytes(b"\xff")
    (tmp_path / "a.txt").write_text("plain é\n")
    (tmp_path / "b/c.md").write_text("# mark")
    (tmp_path / "b/d.py").write_bytes(b"x = 1\r\n")
    (tmp_path / "e.jsonl").write_text('{"text": "one"}\n\n{"text": "two\\n", "more": 2}\r\n{"text": "three"}')
    rows(tmp_path / "f.parquet", ["four", None, "five", "", "six"])
    (tmp_path / "g.txt").write_text(" \n\0")
    expected = ["plain é\n", "# mark", "x = 1\r\n", "one", "two\n", "three", "four", "five", "six"]
    assert documents(tmp_path) == expected
    assert documents(tmp_path / "e.jsonl") == expected[3:6]


def test_the_text_field_of_a_corpus_can_be_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"body": "one"}')
    rows(tmp_path / "b.parquet", ["two"], column="body")
    assert documents(tmp_path, key="body") == ["one", "two"]


def test_nul_characters_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a\0b\0")
    (tmp_path / "b.jsonl").write_text('{"text": "c\\u0000d"}')
    assert documents(tmp_path) == ["ab", "cd"]


LINE = st.text(st.sampled_from("aé日😀 "), max_size=40)


@settings(max_examples=60, deadline=None)
@given(lines=st.lists(LINE, min_size=1, max_size=20), limit=st.integers(5, 60))
def test_long_texts_are_cut_without_loss(
    lines: list[str], limit: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("long") / "a.txt"
    path.write_text("\n".join(lines))
    data = path.read_bytes()
    assume(data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "DOCUMENT_BYTES", limit)
        results = [text for piece in list_slices(list_files(str(path))[0]) for text in read_slice(piece, key="text")]
    assert "".join(results).encode() == data
    assert all(len(text.encode()) < 2 * limit + 4 for text in results)
    for before, after in pairwise(text for text in results if text):
        # a cut inside a line only where no line ends within reach
        assert before.endswith("\n") or "\n" not in after.encode()[: limit - 4].decode(errors="ignore")


@pytest.mark.parametrize("limit", [1, 7, 30, 1000])
def test_pieces_of_jsonl_hold_each_line_once(limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "LINES_BYTES", limit)
    texts = [f"{i} " * (i % 7 + 1) for i in range(40)]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" * (i % 3 + 1) for i, text in enumerate(texts)))
    assert documents(path) == texts


def test_the_sizes_of_pieces_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "LINES_BYTES", 7)
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": "two"}')
    rows(tmp_path / "b.parquet", ["x"] * 7)
    (tmp_path / "c.txt").write_text("text" * 50_000)
    for file in list_files(str(tmp_path)):
        result = list(list_slices(file))
        assert len(result) > 2
        assert sum(piece.size_bytes for piece in result) == file.size_bytes


def _write_deep(folder: Path) -> None:
    (folder / "a.jsonl").write_text('{"text": "one"}\n' + "[" * 100_000)


BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty folder": (lambda folder: None, "no file ends in .txt .md .py .jsonl .parquet; it holds no files"),
    "unknown endings": (
        lambda folder: [(folder / name).write_text("text") for name in ("a.pdf", "b.pdf", "c")],
        r"no file ends in .*; it holds 2 of \.pdf, 1 of no ending",
    ),
    "empty files": (lambda folder: (folder / "a.txt").touch(), "the corpus is empty: 1 files of 0 bytes"),
    "dangling link": (
        lambda folder: (folder / "a.txt").symlink_to("nowhere"),
        r"a\.txt cannot be read: No such file or directory",
    ),
    "not UTF-8": (
        lambda folder: (folder / "a.txt").write_bytes(b"line\n" * 20_000 + "é".encode("latin-1")),
        r"a\.txt: not UTF-8: byte 0xe9 at offset 100000; convert",
    ),
    "cut short in a character": (
        lambda folder: (folder / "a.md").write_bytes(b"x\xe6\x97"),
        r"a\.md: not UTF-8: byte 0xe6 at offset 1",
    ),
    "jsonl, not UTF-8": (
        lambda folder: (folder / "a.jsonl").write_bytes(b'{"text": "one"}\n{"text": "\xff"}'),
        r"a\.jsonl: not UTF-8: byte 0xff at offset 26",
    ),
    "jsonl without the key": (
        lambda folder: (folder / "a.jsonl").write_text('{"text": "one"}\n\n{"body": "two"}'),
        r"a\.jsonl:3: has no key 'text'; it has 'body'",
    ),
    "jsonl, no object": (
        lambda folder: (folder / "a.jsonl").write_text("[1]"),
        r"a\.jsonl:1: is of type list, not an object with named fields",
    ),
    "jsonl, no text": (
        lambda folder: (folder / "a.jsonl").write_text('{"text": 1}'),
        r"a\.jsonl:1: the value of 'text' is of type int, not text",
    ),
    "jsonl, no JSON": (
        lambda folder: (folder / "a.jsonl").write_text('{"text": "one"}\n{"text": "tw'),
        r"a\.jsonl:2: Unterminated string",
    ),
    "jsonl, half a surrogate pair": (
        lambda folder: (folder / "a.jsonl").write_text('{"text": "\\ud83d"}'),
        r"a\.jsonl:1: the value of 'text' holds half of a surrogate pair",
    ),
    "jsonl, too deep": (_write_deep, r"a\.jsonl:2: .*recursion"),
    "parquet without the column": (
        lambda folder: rows(folder / "a.parquet", ["one"], column="body"),
        r"a\.parquet has no column 'text'; it has 'body'",
    ),
    "parquet, no text": (
        lambda folder: rows(folder / "a.parquet", [1, 2, 3]),
        r"a\.parquet: row 0 of row group 0: the value of 'text' is of type int, not text",
    ),
    "parquet, cut short": (
        lambda folder: (folder / "a.parquet").write_bytes(b"PAR1 and no more"),
        r"a\.parquet cannot be read as Parquet",
    ),
}


@pytest.mark.usefixtures("disable_garbage_collection")
@pytest.mark.parametrize("case", BAD)
def test_unreadable_corpus_is_a_one_line_error(case: str, tmp_path: Path) -> None:
    make, message = BAD[case]
    make(tmp_path)
    with pytest.raises(UserError, match=message) as error:
        documents(tmp_path)
    assert str(tmp_path) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_corpus_is_an_error() -> None:
    with pytest.raises(UserError, match="stdlb: no such file or folder; the corpus is 'stdlib' or a path"):
        list_files("stdlb")


def test_an_error_in_a_later_piece_of_a_file_has_the_line_number_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "LINES_BYTES", 64)
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\n' * 30 + "{}\n")
    with pytest.raises(UserError, match=r"a\.jsonl:31: has no key 'text'; it has none"):
        documents(path)
