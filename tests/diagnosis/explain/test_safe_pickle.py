"""A pickle with code in it is refused, and none of it runs."""

from __future__ import annotations

import io
import os
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest

from fivefold.diagnosis.explain.safe_pickle import load
from fivefold.errors import UserError

DATA = {
    "segments": [],
    "device_traces": [[{"action": "alloc", "addr": 2**47, "size": 512, "frames": []}]],
    "n": (1, 2.5),
}


class Runs:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_pickled_data_is_read(tmp_path: Path, protocol: int) -> None:
    assert load(write(tmp_path / "x", pickle.dumps(DATA, protocol))) == DATA


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_with_code_is_rejected_and_not_run(tmp_path: Path, protocol: int) -> None:
    there = tmp_path / "made"
    path = write(tmp_path / "x", pickle.dumps({"segments": [Runs(there)]}, protocol))
    with pytest.raises(UserError, match=r"names posix\.mkdir, which unpickling would run") as refused:
        load(path)
    assert "\n" not in str(refused.value)
    assert not there.exists()
    pickle.loads(path.read_bytes())
    assert there.exists(), "the pickle would have run it"


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (pickle.dumps(OrderedDict(a=1), 4), "names collections.OrderedDict"),
        (b"\x80\x02ios\nsystem\n.", "pickle"),
        (b"\x80\x02(S'id'\nios\nsystem\n.", "names os.system"),
        (b"\x80\x02\x82\x01.", "not a readable pickle"),
        (pickle.dumps(DATA, 4)[:-20], "truncated"),
        (b"\x80\x04garbage", "pickle"),
        (b"\x80\xff", "not a readable pickle"),
    ],
)
def test_pickle_with_code_is_a_one_line_error(tmp_path: Path, data: bytes, word: str) -> None:
    with pytest.raises(UserError, match=word) as refused:
        load(write(tmp_path / "x", data))
    assert "\n" not in str(refused.value)


def test_a_pickle_that_refers_to_outside_objects_is_rejected(tmp_path: Path) -> None:
    class Points(pickle.Pickler):
        def persistent_id(self, each: object) -> object:
            return "storage" if each == 7 else None

    out = io.BytesIO()
    Points(out, 4).dump([7])
    with pytest.raises(UserError, match="refers to objects outside"):
        load(write(tmp_path / "x", out.getvalue()))
