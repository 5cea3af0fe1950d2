import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.errors import RunFailure, UserError
from fivefold.machine import toml
from fivefold.machine.catalog import list_names, resolve
from fivefold.machine.spec import (
    AttentionPoint,
    Calibration,
    CollectivePoint,
    KernelPoint,
    Machine,
    MatmulPoint,
)


def make_calibrated_machine(path) -> Machine:
    """A machine with every kind of point, awkward floats and awkward words."""
    calibration = Calibration(
        date="2026-01-01",
        torch='2.13.0+cpu "quoted" \\ µs \x7f\n',
        cores=2,
        matmuls=(MatmulPoint(dtype="bf16", ranks=2, m=64, n=8, k=1, seconds=1e-07),) * 2,
        attentions=(
            AttentionPoint(
                dtype="fp32",
                ranks=1,
                sequences=1,
                tokens=2,
                heads=3,
                kv_heads=3,
                head_dim=4,
                forward_seconds=0.1 + 0.2,
                backward_seconds=1 / 3,
            ),
        ),
        kernels=(KernelPoint(kernel="copy", dtype="fp32", ranks=1, moved_bytes=2**40, seconds=3.0),),
        collectives=(CollectivePoint(collective="p2p", ranks=2, bytes=1024, seconds=5e-324),),
    )
    return resolve("h100:2", local=path).replace(calibration=calibration, dollars_per_rank_hour=2.5)


def test_every_catalog_machine_reads_back_equal(tmp_path):
    for name in list_names():
        machine = resolve(name, local=tmp_path)
        toml.write(machine, tmp_path / "machine.toml")
        assert toml.read(tmp_path / "machine.toml") == machine


def test_a_calibrated_machine_reads_back_with_one_measured_point_on_a_line(tmp_path):
    machine = make_calibrated_machine(tmp_path)
    path = tmp_path / "new" / "folder" / "local.toml"
    toml.write(machine, path)
    assert toml.read(path) == machine
    assert sum(line.startswith("  { dtype") for line in path.read_text().splitlines()) == 3
    assert [file.name for file in path.parent.iterdir()] == ["local.toml"]


def test_every_catalog_entry_is_tested(tmp_path):
    toml.write(resolve("v100", local=tmp_path), tmp_path / "v100.toml")
    text = (tmp_path / "v100.toml").read_text()
    assert "calibration" not in text
    assert "power_watts" not in text


words = st.text(st.characters(exclude_categories=["Cs"]))
scalars = st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False) | words
tables = st.recursive(
    st.dictionaries(words, scalars),
    lambda inner: st.dictionaries(words, scalars | inner | st.lists(inner) | st.lists(scalars)),
    max_leaves=10,
)


@pytest.mark.slow
@given(tables)
def test_any_toml_table_reads_back(values):
    assert tomllib.loads(toml.emit(values)) == values


def test_a_failed_write_keeps_the_old_file_and_is_a_one_line_error(tmp_path):
    path = tmp_path / "local.toml"
    path.mkdir()  # a folder in the way
    with pytest.raises(RunFailure, match=r"local\.toml: the machine cannot be written: ") as fault:
        toml.write(make_calibrated_machine(tmp_path), path)
    assert "\n" not in str(fault.value)
    assert [file.name for file in tmp_path.iterdir()] == ["local.toml"]


def test_the_error_of_a_damaged_file_contains_its_path(tmp_path):
    path = tmp_path / "local.toml"
    toml.write(make_calibrated_machine(tmp_path), path)
    path.write_text(path.read_text().replace("ranks_per_node", "ranks_per_nod"))
    with pytest.raises(UserError, match=r"local\.toml: .*ranks_per_node"):
        toml.read(path)


def test_a_machine_without_a_name_is_a_one_line_error(tmp_path):
    """Its first word names it in options and messages."""
    path = tmp_path / "mine.toml"
    toml.write(resolve("h100:8", local=tmp_path), path)
    path.write_text(path.read_text().replace('name = "h100:8"', 'name = " "').replace('name = "h100"', 'name = " "', 1))
    with pytest.raises(UserError, match=r"mine\.toml: .*name is empty; give one such as 'mine'"):
        toml.read(path)
