from pathlib import Path

import pytest

from fivefold.errors import UserError
from fivefold.job import Job
from fivefold.layout.mesh import RankGroup
from fivefold.layout.spec import Layout
from fivefold.machine.catalog import resolve
from fivefold.machine.spec import Machine
from fivefold.model.catalog import build_model
from fivefold.planner.predict import predict
from fivefold.planner.time.network import Network

NOWHERE = Path("no/such/local.toml")
EXAMPLES = Path(__file__).parents[2] / "examples" / "machines"


def machine(text: str) -> Machine:
    return resolve(text, local=NOWHERE)


@pytest.mark.parametrize(
    ("words", "bandwidth"),
    [
        ("nic=100Gbit/node", 100e9 / 8 / 8),
        ("nic=100Gbit", 100e9 / 8),
        ("nic=100Gbit/s/node", 100e9 / 8 / 8),
        ("nic=0.4Tbit/node node=4", 400e9 / 8 / 4),
        ("node=4 nic=50GB/node", 50e9 / 4),
        ("nic=12.5GB/s", 12.5e9),
    ],
)
def test_the_network_between_nodes_can_be_changed(words: str, bandwidth: float) -> None:
    varied, stock = machine(f"l40s:320 {words}"), machine("l40s:320")
    assert varied.links[-1].bandwidth == pytest.approx(bandwidth)
    assert varied.links[-1].sustained == stock.links[-1].sustained
    assert (varied.ranks, varied.chip) == (320, stock.chip)
    assert varied.name == f"l40s {words}"
    assert "owner" in varied.links[-1].source


def test_the_latency_between_nodes_can_be_changed() -> None:
    """A small all-reduce of two nodes crosses the network twice, up the tree and down."""
    names = ("h100:16", "h100:16 latency=20us", "2xp5.48xlarge", "h100:16 latency=0.02ms")
    ib, *efa = (machine(name) for name in names)
    assert (ib.links[-1].latency_seconds, ib.links[0]) == (4e-6, efa[0].links[0])
    assert [item.links[-1].latency_seconds for item in efa] == pytest.approx([20e-6] * 3)
    seconds = [Network(item).seconds("all_reduce", 64, RankGroup(16, 1)) for item in (ib, *efa)]
    assert [item - seconds[0] for item in seconds[1:]] == pytest.approx([2 * 16e-6] * 3, rel=1e-3)


def test_the_network_changes_what_is_predicted() -> None:
    """One NIC of 100 Gbit/s for eight L40S instead of one each: gathers of 16 GB take eight times as long."""
    job, layout, model = Job(global_batch=16, sequence=2048), Layout.parse("dp16 zero3"), build_model("llama3-8b")
    item, shared = (
        predict(model=model, machine=machine(text), layout=layout, job=job).time
        for text in ("l40s:16", "l40s:16 nic=100Gbit/node")
    )
    assert item.step_seconds * 2 < shared.step_seconds < item.step_seconds * 8
    assert shared.longest_part.startswith("dp")


def test_figures_of_a_chip_and_its_node_can_be_changed() -> None:
    result = machine("h100:16 node=4 link=225GB memory=94GiB hbm=3.9TB watts=350 price=2.5")
    near = result.links[0]
    assert (result.ranks_per_node, near.span, near.bandwidth, result.nodes) == (4, 4, 225e9, 4)
    assert near.reduction_bandwidth == pytest.approx(305e9 / 2)
    assert (result.chip.memory_bytes, result.chip.memory_bandwidth) == (94 * 2**30, 3.9e12)
    assert (result.chip.power_watts, result.dollars_per_rank_hour) == (350, 2.5)
    assert result.chip.name == "h100"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("l40s nc=3Gbit", "unknown word of a machine 'nc'; did you mean nic?"),
        (
            "l40s:8 nic=many",
            "machine 'l40s:8 nic=many': nic=many is not a number and a unit; write for example 100Gbit, ",
        ),
        ("l40s:8 nic=100", "nic=100 is not a number and a unit"),
        ("l40s:8 nic=0Gbit", "links[1].bandwidth must be 1 or more, not 0.0"),
        ("l40s:8 nic=-1GB", "nic=-1GB is not a number"),
        ("l40s:8 nic=nanGB", "nic=nanGB is not a number"),
        ("l40s:8 node=0", "node=0 is not a number of GPUs; write node=8"),
        ("l40s:8 node=٣", "is not a number of GPUs"),
        ("h100:16 latency=20", "latency=20 is not a number and a unit; write for example 20us"),
        ("l40s:8 memory=9e9GB", "memory=9e9GB is not a number and a unit; write for example 80GiB"),
        ("l40s:8 price=1 price=2", "'price=2' sets price a second time; keep one"),
        ("l40s:1" + "0" * 5000, "is larger than 9,999,999; use fewer"),
    ],
)
def test_invalid_input_is_a_one_line_error(text: str, says: str) -> None:
    with pytest.raises(UserError) as refusal:
        machine(text)
    assert says in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_machine_file_states_only_what_differs_from_its_base(tmp_path: Path) -> None:
    path = tmp_path / "ours.toml"
    path.write_text('base = "l40s:320 nic=100Gbit/node"\ndollars_per_rank_hour = 2.5\n[chip]\nmemory_bytes = 1024\n')
    result, wanted = machine(str(path)), machine("l40s:320 nic=100Gbit/node")
    chip = wanted.chip.replace(memory_bytes=1024)
    assert result == wanted.replace(name="ours", dollars_per_rank_hour=2.5, chip=chip)
    assert machine(f"{path}:16 nic=50Gbit").links[-1].bandwidth == 50e9 / 8
    for base in ('"ours.toml"', '"l41"', "3", '"l40s:0"'):
        path.write_text(f"base = {base}\n")
        with pytest.raises(UserError, match=r"base=.* does not begin with a chip|'0' is not a number of ranks"):
            machine(str(path))


def test_the_example_machine_files_are_read_and_predicted() -> None:
    shared, whole = (machine(str(EXAMPLES / f"{name}.toml")) for name in ("l40s-shared-nic", "complete"))
    assert shared.links[-1].bandwidth == 200e9 / 8 / 8
    assert (shared.chip.power_watts, shared.chip.memory_bytes) == (300, machine("l40s").chip.memory_bytes)
    assert whole.chip.source == whole.links[0].source == "not stated"
    for item in (shared, whole):
        job, layout = Job(global_batch=64), Layout.parse("dp16 zero3")
        assert predict(model=build_model("llama3-8b"), machine=item, layout=layout, job=job).time.step_seconds > 0


def test_an_assumed_network_is_called_assumed() -> None:
    assert "our assumption, one NIC per GPU" in machine("l40s").links[-1].source
