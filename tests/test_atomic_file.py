"""Files are written completely or not at all."""

import errno
from pathlib import Path

import pytest

from fivefold.atomic_file import replace_file
from fivefold.errors import RunFailure


def test_file_is_replaced_when_the_block_ends(tmp_path: Path) -> None:
    path = tmp_path / "new" / "table.csv"
    with replace_file(path, contents="the table") as file:
        assert file.suffix == ".csv"
        file.write_text("rows")
        assert not path.exists()
    assert path.read_text() == "rows"
    assert [entry.name for entry in path.parent.iterdir()] == ["table.csv"]


def test_interruption_keeps_the_old_file_and_leaves_no_other(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text("old")

    def interrupt_while_writing() -> None:
        with replace_file(path, contents="the table") as file:
            file.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupt_while_writing()
    assert path.read_text() == "old"
    assert [*tmp_path.iterdir()] == [path]


def test_the_error_contains_path_contents_reason_and_advice(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "table.csv"
    with (
        pytest.raises(RunFailure, match=r"table\.csv: the table cannot be written: .*; name another file with --out"),
        replace_file(path, contents="the table", advice="name another file with --out"),
    ):
        pass


def test_the_advice_on_a_failed_write_fits_its_cause(tmp_path: Path) -> None:
    def write(path: Path, error: OSError | None = None) -> None:
        with replace_file(path, contents="the table") as file:
            if error:
                raise error
            file.write_text("rows")

    with pytest.raises(RunFailure, match="cannot be written: Is a directory; name another path"):
        write(tmp_path)
    with pytest.raises(RunFailure, match="No space left on device; free some space or name another path"):
        write(tmp_path / "table.csv", OSError(errno.ENOSPC, "No space left on device"))


def test_device_is_written_to_and_not_replaced() -> None:
    with replace_file(Path("/dev/null"), contents="the table") as file:
        file.write_text("rows")
    assert Path("/dev/null").is_char_device()
