import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.cli.arguments import resolve_machine
from fivefold.errors import UsageWarning, UserError
from fivefold.machine import toml
from fivefold.machine.catalog import (
    ALIASES,
    INSTANCES,
    ROWS,
    is_counted,
    is_named,
    list_names,
    replace_ranks,
    resolve,
    spell_machine,
    with_ranks,
)
from fivefold.machine.spec import LAUNCH_SECONDS, Calibration

NOWHERE = Path("no/such/local.toml")


def machine(text: str):
    return resolve(text, local=NOWHERE)


# Figures as the collected data sheets print them: dense peak in TFLOP/s, HBM in TB/s, links in GB/s one way, NIC in
# Gbit/s per GPU.
@pytest.mark.parametrize(
    ("name", "dtype", "tflops", "terabytes", "near", "nic"),
    [
        ("a100", "bf16", 312, 2.0, 300, 200),
        ("h100", "bf16", 989, 3.35, 450, 400),
        ("h100", "fp8", 1979, 3.35, 450, 400),
        ("h200", "tf32", 494.5, 4.8, 450, 400),
        ("h800", "bf16", 989, 3.35, 200, 400),
        ("b200", "bf16", 2250, 8.0, 900, 400),
        ("gb200", "fp4", 10000, 8.0, 900, 400),
        ("b300", "fp4", 12600, 8.0, 900, 800),
        ("gb300", "bf16", 2500, 8.0, 900, 800),
        ("mi300x", "fp8", 2610, 5.3, 448, 400),
        ("mi355x", "fp32", 157.3, 8.0, 535.5, 400),
        ("a6000", "bf16", 154.8, 0.768, 31, 12.5),
        ("rtx6000-ada", "bf16", 364.2, 0.96, 31, 12.5),
    ],
)
def test_figures_are_those_of_the_data_sheets(name, dtype, tflops, terabytes, near, nic):
    result = machine(name)
    assert result.chip.peak_flops[dtype] == pytest.approx(tflops * 1e12, rel=1e-15)
    assert result.chip.memory_bandwidth == pytest.approx(terabytes * 1e12, rel=1e-15)
    assert result.links[0].bandwidth == near * 1e9
    assert result.links[1].bandwidth == nic * 1e9 / 8


def test_memory_is_what_torch_reports_and_less_than_nvidia_smi_shows():
    shown = {"h100": 81559, "h200": 143771, "b200": 183359, "a100": 81920, "l4": 23034, "rtx4090": 24564}  # MiB
    shown |= {"a6000": 49140, "rtx6000-ada": 49140}
    assert machine("h100").chip.memory_bytes == 81_089 * 2**20
    for name, mebibytes in shown.items():
        assert 0.975 < machine(name).chip.memory_bytes / 2**20 / mebibytes < 0.997, name
    assert machine("mi300x").chip.memory_bytes == 206_141_652_992


def test_the_catalog_has_at_least_fourteen_chips_with_plausible_figures():
    assert len(list_names()) >= 14
    for name in list_names():
        result = machine(name)
        near, far = result.links
        assert result.name == result.chip.name == name
        assert result.ranks == (1 if near.name.startswith("PCIe") else result.ranks_per_node)
        assert result.ranks_per_node == near.span
        assert near.bandwidth >= far.bandwidth
        assert near.latency_seconds <= far.latency_seconds
        assert result.chip.source
        assert result.chip.generation
        assert near.source
        assert far.source
        assert result.chip.peak("fp32") <= result.chip.peak("bf16")
        assert 10 * 2**30 < result.chip.memory_bytes < 300 * 2**30


def test_a_chip_of_the_same_die_with_less_power_is_not_faster():
    """Also where its matmuls were not measured: their share of the peak is that of the chip that was."""
    pairs = ("mi350x", "mi355x"), ("h100-pcie", "h100-nvl"), ("h100-nvl", "h100"), ("h20", "h100")
    for slow, quick in pairs:
        rates = [resolve(f"{name}:1", local=Path()).chip.sustained_flops("bf16") for name in (slow, quick)]
        assert rates[0] < rates[1], slow


def test_a_chip_whose_flops_per_joule_are_known_has_a_limit_of_power():
    """Without one it is predicted at the rate of its best short matmul."""
    chips = [resolve(f"{name}:1", local=Path()).chip for name in ROWS]
    assert [chip.name for chip in chips if chip.flops_per_joule and chip.power_watts is None] == []


def test_a_superchip_is_capped_by_the_power_of_its_module():
    """CPU and GPU of a GH200 share 660 W on Alps (eth-cscs/cscs-docs): less than the 700 W of an H100 alone."""
    gh200, h100 = (resolve(f"{name}:1", local=Path()).chip for name in ("gh200", "h100"))
    assert gh200.power_watts == 660
    assert gh200.sustained_flops("bf16") == pytest.approx(660 / 700 * h100.sustained_flops("bf16"))


def test_a_grace_cpu_takes_as_long_for_an_operation_as_was_measured():
    """A linear layer of Transformer Engine: 90.5 us on GH200, 99.7 on GB200 (NVIDIA/TransformerEngine issue 2053)."""
    slower = {name for name in list_names() if machine(name).chip.launch_seconds != LAUNCH_SECONDS}
    assert slower == {"gh200", "gb200", "gb300"}
    assert all(90.5e-6 < machine(name).chip.launch_seconds < 99.7e-6 for name in slower)


def test_a_machine_name_is_one_node_and_a_count_that_many_ranks():
    assert machine("h100").ranks == 8
    assert machine("gb300").ranks == 72
    cluster = machine("H100:512")
    assert (cluster.ranks, cluster.ranks_per_node, cluster.nodes) == (512, 8, 64)
    assert [cluster.link(span).name for span in (2, 8, 16, 512)] == ["NVLink 4", "NVLink 4", "NIC", "NIC"]
    assert machine("h100:4").ranks == 4


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("h1000", "did you mean h100"),
        ("m3-ultra", "unknown machine 'm3-ultra'; `fivefold machines` lists all; `local` is this computer"),
        ("", "`fivefold machines` lists all"),
        ("h100:0", "'0' is not a number of ranks"),
        ("h100:-8", "'-8' is not"),
        ("h100:many", "'many' is not"),
        ("h100:64-256", "as in h100:8; search takes several by --gpu-counts 64-256"),
        ("h100:", "'' is not"),
        ("h100:1.5", "'1.5' is not"),
        ("local", "run `fivefold calibrate`"),
        ("local:2", "run `fivefold calibrate`"),
        ("absent.toml:4", "absent.toml: no such file"),
    ],
)
def test_invalid_machine_is_a_one_line_error(text, says):
    with pytest.raises(UserError) as refusal:
        machine(text)
    assert says in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_files_and_local_take_a_count(tmp_path):
    path = tmp_path / "cluster.toml"
    toml.write(machine("a100"), path)
    assert resolve(str(path), local=NOWHERE) == machine("a100")
    assert resolve(f"{path}:64", local=NOWHERE).ranks == 64
    assert resolve("local:16", local=path).ranks == 16


def test_processes_of_one_calibrated_cpu_share_it():
    calibration = Calibration(date="2026-01-01", torch="2.13.0", cores=2)
    two = machine("h100:2").replace(ranks_per_node=2, backend="gloo", calibration=calibration)
    one, four = with_ranks(two, 1), with_ranks(two, 4)
    for field in ("memory_bytes", "memory_bandwidth"):
        whole = 2 * getattr(two.chip, field)
        assert getattr(one.chip, field) == whole
        assert 4 * getattr(four.chip, field) == whole
    assert 4 * four.chip.peak("bf16") == one.chip.peak("bf16") == 2 * two.chip.peak("bf16")
    assert four.nodes == 1


def test_the_catalog_loads_without_torch():
    code = "import sys, fivefold.machine.catalog; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@settings(deadline=None, max_examples=100)
@given(st.sampled_from([*list_names(), "H100"]), st.integers(1, 9_999_999), st.data())
def test_the_number_of_gpus_of_a_machine_may_be_written_in_several_forms(name, count, data):
    sign = data.draw(st.sampled_from(["x", "*", "×", " x ", " * "]))
    word = data.draw(st.sampled_from([f"{name}{sign}{count}", f"{count}{sign}{name}"]))
    assert spell_machine(word) == f"{name.lower()}:{count}"
    assert spell_machine(f"{word} nic=100Gbit/node") == f"{name.lower()}:{count} nic=100Gbit/node"
    assert is_named(word)
    assert machine(word) == machine(f"{name}:{count}")


@pytest.mark.parametrize("text", ["rtx4090", "rtx4090:8", "examples/8x4.toml", "h100", "local:2", "4x2", "tp4x2"])
def test_a_text_without_a_machine_name_is_returned_unchanged(text):
    assert spell_machine(text) == text


def test_the_machine_of_a_config_may_be_written_in_several_forms():
    assert resolve_machine("8xh100", 64).ranks == 8
    assert resolve_machine("h100", 64).ranks == 64
    assert resolve_machine("h100 nic=100Gbit", 64).ranks == 64
    assert replace_ranks("8xh100 nic=1Gbit", 64) == "h100:64 nic=1Gbit"


def test_other_names_of_a_chip_are_known() -> None:
    assert [machine(name).name for name in ("a100-80g", "A100-80GB:16", "a100-40gb", "h100-80gb", "rtx-a6000")] == [
        "a100",
        "a100",
        "a100-40",
        "h100",
        "a6000",
    ]
    assert spell_machine("8xa100-80gb nic=1Gbit") == "a100:8 nic=1Gbit"
    assert [spell_machine(text) for text in ("2x8 H100", "2 nodes of 8 H100", "16 H100s", "8 L40S GPUs", "2 3090")] == [
        "h100:16",
        "h100:16",
        "h100:16",
        "l40s:8",
        "rtx3090:2",
    ]
    assert [spell_machine(text) for text in ("16 nodes H100", "2 nodes of MI300X", "1 node with 4 H100")] == [
        "h100:128",
        "mi300x:16",
        "h100:4",
    ]
    assert spell_machine("4 nodes p4d.24xlarge nic=1Gbit") == "a100-40:32 latency=75us nic=1Gbit"
    assert spell_machine("4 nodes RTX4090").startswith("4 nodes")  # a card on PCIe has no usual node
    assert spell_machine("2 nodes GB200").startswith("2 nodes")  # a tray of four, or a rack of 72
    assert spell_machine("2x8 p4d.24xlarge") == spell_machine("2x p4d.24xlarge") == "a100-40:16 nic=50Gbit latency=75us"
    assert [spell_machine(text) for text in ("HGX H200", "Tesla V100-SXM2-32GB", "NVIDIA GH200 480GB")] == [
        "h200",
        "v100",
        "gh200",
    ]
    assert spell_machine("2x RTX 4090 nic=1Gbit") == "rtx4090:2 nic=1Gbit"
    assert [spell_machine(text) for text in ("NVIDIA GeForce RTX 4090", "A100 80GB x 8", "AMD Instinct MI300X:8")] == [
        "rtx4090",
        "a100:8",
        "mi300x:8",
    ]
    assert is_named("a100-80gb")
    assert is_named("rtx 4090")
    assert not set(ALIASES) & set(list_names())
    assert set(ALIASES.values()) <= set(list_names())


@pytest.mark.parametrize("name", INSTANCES)
def test_every_cloud_instance_is_one_node(name: str) -> None:
    node = machine(name)
    assert node.ranks == node.ranks_per_node == INSTANCES[name].gpus
    assert machine(f"3x{name}").ranks == 3 * node.ranks
    assert machine(f"{name.upper()}:64").ranks == 64
    assert is_named(name)
    assert not is_counted(name)


def test_a_part_of_an_instance_is_said_to_be_a_number_of_gpus() -> None:
    with pytest.warns(
        UsageWarning,
        match="4 is the number of GPUs, of which one p5.48xlarge has 8; write 4xp5.48xlarge for as many instances",
    ):
        assert machine("p5.48xlarge:4").ranks == 4
    assert machine("p5.48xlarge:16").ranks == machine("2xp5.48xlarge").ranks == 16  # without a warning


@pytest.mark.parametrize(
    ("text", "spelled", "nic"),  # network in Gbit/s per GPU
    [
        ("p4d.24xlarge", "a100-40 nic=50Gbit latency=75us", 50),
        ("4xp5.48xlarge", "h100:32 nic=400Gbit latency=20us", 400),
        ("2xp5.4xlarge", "h100:2 node=1 nic=100Gbit/node latency=75us", 100),
        ("V100-SXM2-16GB", "v100-16", 50),
        ("p3.8xlarge", "v100-16 node=4 nic=10Gbit/node", 2.5),
        ("Standard_NC24ads_A100_v4", "a100-pcie node=1 nic=20Gbit/node", 20),
        ("a3-megagpu-8g:16", "h100:16 nic=200Gbit", 200),
        ("g5.12xlarge", "a10g node=4 nic=40Gbit/node", 10),
        ("2 x g5.12xlarge nic=1Gbit", "a10g:8 node=4 nic=1Gbit", 1),
        ("2xStandard_ND96isr_H100_v5", "h100:16 nic=400Gbit", 400),
        ("8x4090", "rtx4090:8", 12.5),
        ("16,384 H100", "h100:16384", 400),
        ("1,024 x A100-80GB", "a100:1024", 200),
        ("4090x8", "rtx4090:8", 12.5),
    ],
)
def test_instances_and_bare_numbers_of_chips_are_spelled_as_the_catalog(text: str, spelled: str, nic: float) -> None:
    assert spell_machine(text) == spelled
    assert machine(text).links[-1].bandwidth == nic * 1e9 / 8


def test_one_node_has_as_many_gpus_as_its_text_says() -> None:
    assert [machine(name).ranks for name in ("rtx4090", "a6000", "t4 nic=10Gbit", "l40s")] == [1, 1, 1, 1]
    assert machine("rtx4090:2").nodes == 1
    assert machine("h100 node=4").ranks == 4
    assert spell_machine("g5.48xlarge") == "a10g node=8 nic=100Gbit/node"
    assert spell_machine("2xg5.48xlarge") == "a10g:16 nic=100Gbit/node"
    assert machine("h100:8 node=4").nodes == 2
