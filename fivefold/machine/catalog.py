"""Catalog of training chips, each in its usual node, and ``resolve``, which converts a text to a ``Machine``.

Peaks are dense, per rank. Memory is what PyTorch can allocate. Bandwidths and peaks are the
vendors'; ``kernel_efficiency.py`` has the shares that kernels reach.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from fivefold.bounded_types import RANKS
from fivefold.errors import UserError, warn
from fivefold.machine import kernel_efficiency as measured
from fivefold.machine import toml
from fivefold.machine.kernel_efficiency import KernelEfficiency, build_chip_fields
from fivefold.machine.overrides import apply_overrides
from fivefold.machine.spec import LAUNCH_SECONDS, Chip, Link, Machine
from fivefold.spelling import make_unknown_name_error
from fivefold.text_files import locate, read_file
from fivefold.units import GIB, MIB, Dtype

POSTED = "total_memory as torch.cuda reports it"
KEPT_BY_DRIVER = (
    0.004  # share of what nvidia-smi shows: on B200 (183359 and 182631 MiB) and H200 (143771 and 143156 MiB)
)


class TotalMemory(NamedTuple):
    """The bytes of a chip that a process can use, as ``torch.cuda.get_device_properties(0).total_memory`` reports them.

    PyTorch prints the same figure as "total capacity" when it runs out of memory. It is less than ``nvidia-smi`` shows,
    since the driver keeps 0.4 to 2 % (an H100 of 81559 MiB has 81089 MiB). Each figure was posted publicly; drivers
    differ by up to 0.3 %.
    """

    total_bytes: int
    source: str


def from_nvidia_smi(mebibytes: int) -> int:
    """Estimate the bytes of a chip for which only the figure of ``nvidia-smi`` was published."""
    return int(mebibytes * (1 - KEPT_BY_DRIVER)) * MIB


def from_posted(gibibytes: float) -> int:
    """Return the bytes of a chip whose memory was posted in GiB with two digits."""
    return int(gibibytes * GIB)


# The source of most rows: github.com/stas00/ml-engineering at commit 744d01e.
SHEET = "stas00/ml-engineering@744d01e:compute/accelerator/README.md"
NETWORK = "stas00/ml-engineering@744d01e:network/README.md"
RECALLED = "vendor data sheet from memory, unverified"


class Fabric(NamedTuple):
    """A tier of links, with the fields of ``machine.spec.Link``: bytes/s per rank and direction, seconds per step."""

    name: str
    bandwidth: float
    sustained: float
    reduction_bandwidth: float | None
    latency_seconds: float
    source: str
    direct: bool = False


def _scale_up(name: str, gigabytes: float, source: str, *, ring: float, switch: float | None = None) -> Fabric:
    """Return links within a node, in GB/s. ``ring``: bandwidth of large all_gathers; ``switch``: of in-switch sums."""
    # An 8-GPU all-reduce of 32 KiB takes 44 us on A100 and 40 us on H200: 20 us to start, 6 tree steps of 3 us.
    latency = f"3 us per step: 32 KiB all-reduce over 8 GPUs in 40 to 44 us, {NETWORK}#L1222 and #L1257"
    reduction = switch * 1e9 if switch else None
    return Fabric(name, gigabytes * 1e9, ring / gigabytes, reduction, 3e-6, f"{gigabytes:g} GB/s: {source}; {latency}")


def _build_pcie(generation: int, gigabytes: float) -> Fabric:
    source = f"{gigabytes:g} GB/s, x16: {NETWORK}; four fifths of it sustained and 4 us per step are our assumption"
    return Fabric(f"PCIe {generation}", gigabytes * 1e9, 0.8, None, 4e-6, source)


def _build_nic(gigabits: float, source: str) -> Fabric:
    # NVIDIA expects 24 of 25 GB/s (nccl-tests issue 119) and 46 to 48 of 50 (nccl-tests issue 290). An all-reduce of
    # a few bytes over 32 nodes of 8 A100 takes 65 us (nccl issue 652): 20 us to start, 6 near and 10 far tree steps.
    share = "0.95 of it sustained: NVIDIA/nccl-tests issues 119 and 290; 4 us per step: NVIDIA/nccl issue 652"
    return Fabric("NIC", gigabits * 1e9 / 8, 0.95, None, 4e-6, f"{gigabits:g} Gbit/s: {source}; {share}")


# A linear layer of Transformer Engine takes the host of a GH200 90.5 us and of a GB200 99.7 us, the geometric mean of
# which is used; PyTorch's takes 2.5 and 2.8 times as long as on the Xeon 8480C of a DGX H100
# (NVIDIA/TransformerEngine issue 2053).
GRACE_LAUNCH_SECONDS = 95e-6


class ChipRow(NamedTuple):
    """A chip and its node: TFLOP/s, TB/s and watts as in the data sheets, memory and kernel efficiency.

    ``block_scales`` from compute capability 10 (Transformer Engine's guide: MXFP8) and CDNA 4 on.
    """

    generation: str
    efficiency: KernelEfficiency
    tflops: dict[Dtype, float]
    terabytes_per_second: float
    near: Fabric
    far: Fabric
    watts: float | None
    memory: TotalMemory
    source: str
    block_scales: bool = False
    ranks_per_node: int = 8
    launch_seconds: float = LAUNCH_SECONDS

    @property
    def default_ranks(self) -> int:
        """Return the GPUs that the name alone stands for: one node, or one card on PCIe, which has no usual node."""
        return 1 if self.near.name.startswith("PCIe") else self.ranks_per_node


# An all-reduce of S bytes in the switch sends (n + 1) / n · S per rank. On H200 that is 305 GB/s for 5, 6, 7 and 8
# GPUs too (bus bandwidths 414, 436, 460 and 473, NETWORK#L926 to #L929), on B200 465 to 476 GB/s at 1 to 4 GiB
# (#L1419), on the 72 GPUs of a GB200 rack 429 GB/s (coreweave/nccl-tests pull request 43).
NVLINK2 = _scale_up("NVLink 2", 150, f"{NETWORK}; 120 in a ring is our assumption", ring=120)
NVLINK3 = _scale_up("NVLink 3", 300, f"{SHEET}; 235 in a ring, {NETWORK}#L1241", ring=235)
RING4 = f"362 in a ring, {NETWORK}#L980"
NVLINK4 = _scale_up("NVLink 4", 450, f"{SHEET}; {RING4}; 305 in the switch, #L926", ring=362, switch=305)
NVLINK4_DIRECT = _scale_up("NVLink 4, no switch", 450, f"{SHEET}; {RING4} of H200", ring=362)._replace(direct=True)
NVLINK3_A800 = _scale_up(
    "NVLink 3, A800", 200, f"{RECALLED}; as large a share of it in a ring as on A100 is our assumption", ring=157
)
NVLINK4_H800 = _scale_up(
    "NVLink 4, H800", 200, f"{RECALLED}; deepseek-ai/DeepEP@b57e5e2:README.md reaches 158 GB/s", ring=158
)
RING5 = "606 in a ring, MooreThreads/SimuMax@e691807:configs/system/b200_bf16_ceperm.json"
NVLINK5 = _scale_up("NVLink 5", 900, f"{SHEET}; {RING5}; 476 in the switch, {NETWORK}#L1419", ring=606, switch=476)
XGMI_RING = "three quarters of it in a ring is our assumption"
XGMI_MI250 = _scale_up("Infinity Fabric", 175, f"half a module's 350, {SHEET}; {XGMI_RING}", ring=131)
XGMI_MI300 = _scale_up(
    "Infinity Fabric", 448, f"{SHEET}; to all 7 neighbours at once, 64 to one, {NETWORK}; {XGMI_RING}", ring=336
)._replace(direct=True)
XGMI_MI355 = _scale_up(
    "Infinity Fabric", 535.5, f"{SHEET}; to all 7 neighbours at once, 76.5 to one; {XGMI_RING}", ring=402
)._replace(direct=True)
PCIE3, PCIE4, PCIE5 = _build_pcie(3, 15.5), _build_pcie(4, 31), _build_pcie(5, 63)

NIC_50 = _build_nic(50, f"DGX-1, 4 x 100 Gbit/s for 8 GPUs, {RECALLED}")
NIC_200 = _build_nic(200, f"DGX A100, {RECALLED}")
NIC_400 = _build_nic(400, f"DGX H100 and H200, {RECALLED}")
NIC_400_H800 = _build_nic(400, "deepseek-ai/DeepEP@b57e5e2:README.md")
NIC_400_B200 = _build_nic(400, f"P6-B200 node, {NETWORK}#L1396")
NIC_400_GB200 = _build_nic(400, f"GB200 NVL72, {RECALLED}")
NIC_400_AMD = _build_nic(400, "our assumption, one NIC per GPU as is usual")
NIC_800_B300 = _build_nic(800, f"P6-B300 node, {NETWORK}#L1396")
NIC_800_GB300 = _build_nic(800, f"GB300 NVL72, {RECALLED}")
NIC_200_GH200 = _build_nic(200, f"four superchips with a NIC each, as in Alps, {RECALLED}")
NIC_100_MI250 = _build_nic(100, f"Frontier, 4 x 200 Gbit/s for 8 dies, {RECALLED}")
NIC_100 = _build_nic(100, "our assumption, one NIC per GPU; where a node shares one, write nic=100Gbit/node")
NIC_SHARED = _build_nic(12.5, "our assumption, 100 Gbit/s shared by the 8 GPUs of a node; else write nic=")

VOLTA: dict[Dtype, float] = {"fp32": 15.7, "fp16": 125}
TURING: dict[Dtype, float] = {"fp32": 8.1, "fp16": 65}
AMPERE: dict[Dtype, float] = {"fp32": 19.5, "tf32": 156, "bf16": 312, "fp16": 312}
HOPPER: dict[Dtype, float] = {"fp32": 67, "tf32": 494.5, "bf16": 989, "fp16": 989, "fp8": 1979}
H20: dict[Dtype, float] = {"fp32": 44, "tf32": 74, "bf16": 148, "fp16": 148, "fp8": 296}
HOPPER_NVL: dict[Dtype, float] = {"fp32": 60, "tf32": 417.5, "bf16": 835.5, "fp16": 835.5, "fp8": 1671}
HOPPER_PCIE: dict[Dtype, float] = {"fp32": 51, "tf32": 378, "bf16": 756, "fp16": 756, "fp8": 1513}
B200: dict[Dtype, float] = {"fp32": 80, "tf32": 1125, "bf16": 2250, "fp16": 2250, "fp8": 4500, "fp4": 9000}
B300: dict[Dtype, float] = {**B200, "fp4": 12600}
GB200: dict[Dtype, float] = {"fp32": 80, "tf32": 1250, "bf16": 2500, "fp16": 2500, "fp8": 5000, "fp4": 10000}
GB300: dict[Dtype, float] = {**GB200, "fp4": 15000}
CDNA2_DIE: dict[Dtype, float] = {"fp32": 23.95, "bf16": 191.5, "fp16": 191.5}
CDNA3: dict[Dtype, float] = {"fp32": 163.4, "tf32": 653.7, "bf16": 1300, "fp16": 1300, "fp8": 2610}
CDNA4: dict[Dtype, float] = {"fp32": 157.3, "bf16": 2500, "fp16": 2500, "fp8": 5000, "fp4": 10100}
MI350X: dict[Dtype, float] = {"fp32": 144.2, "bf16": 2300, "fp16": 2300, "fp8": 4600, "fp4": 9200}
L40S: dict[Dtype, float] = {"fp32": 91.6, "tf32": 183, "bf16": 362, "fp16": 362, "fp8": 733}
L40: dict[Dtype, float] = {"fp32": 90.5, "tf32": 90.5, "bf16": 181, "fp16": 181, "fp8": 362}
L20: dict[Dtype, float] = {"fp32": 59.8, "tf32": 59.8, "bf16": 119.5, "fp16": 119.5, "fp8": 239}
L4: dict[Dtype, float] = {"fp32": 30.3, "bf16": 121, "fp8": 242}
RTX4090: dict[Dtype, float] = {"fp32": 82.58, "bf16": 165.2}
RTX3090: dict[Dtype, float] = {"fp32": 35.58, "bf16": 71}
RTX3060: dict[Dtype, float] = {"fp32": 12.74, "bf16": 25.5}
RTX5090: dict[Dtype, float] = {"fp32": 104.8, "tf32": 104.8, "bf16": 209.5, "fp16": 209.5, "fp8": 419}
RTX_PRO_6000: dict[Dtype, float] = {"fp32": 126, "tf32": 252, "bf16": 503.8, "fp16": 503.8, "fp8": 1007.6}
A10: dict[Dtype, float] = {"fp32": 31.2, "tf32": 62.5, "bf16": 125, "fp16": 125}
A10G: dict[Dtype, float] = {"fp32": 35, "tf32": 35, "bf16": 70, "fp16": 70}
A30: dict[Dtype, float] = {"fp32": 10.3, "tf32": 82, "bf16": 165, "fp16": 165}
A40: dict[Dtype, float] = {"fp32": 37.4, "tf32": 74.8, "bf16": 149.7, "fp16": 149.7}
A6000: dict[Dtype, float] = {"fp32": 38.7, "tf32": 77.4, "bf16": 154.8, "fp16": 154.8}
RTX6000_ADA: dict[Dtype, float] = {"fp32": 91.1, "tf32": 182.1, "bf16": 364.2, "fp16": 364.2, "fp8": 728.5}

DIE = f"one die of two per module, each a rank: half of the module in {SHEET}"
GH200 = (
    f"the 96 GB part, {SHEET}#L466; watts: of the module, CPU and GPU together, "
    "eth-cscs/cscs-docs@1e11d78:docs/running/slurm.md (Alps; 680 in JUPITER)"
)
GA102 = (
    "16 bits and memory rate: NVIDIA's GA102 white paper 2 as quoted in "
    f"hahnyuan/LLM-Viewer@f307ca5:hardwares/hardware_params.py; others: {RECALLED}"
)
PROVIZ = (
    "16 bits and fp8: NVIDIA's Ada ProViz white paper 1.1 as public tables quote it; fp32, memory rate and watts: "
    f"grafikkarten.com; tf32: {RECALLED}"
)
AS_L4 = "memory as the L4, of which nvidia-smi shows 23034 MiB, and of the A10 23028 MiB (QwenLM/Qwen3 issue 678)"
B300_WATTS = "the limit that nvidia-smi shows, ademeure/QuickRunCUDA@fede479:b300_clean/B300_TRUE_REFERENCE.md"
GB300_SOURCE = f"peaks and watts: {SHEET}; 8 TB/s: {RECALLED}"
# Compute capability 10: NVIDIA/TransformerEngine@d0067d0:transformer_engine/common/transformer_engine.cpp
# (nvte_is_non_tn_fp8_gemm_supported, without 12). On AMD's chips a kernel writes both copies: MLPerf's configurations
# choose it (mlcommons/training_results_v5.1@4da2d1c: NVTE_USE_CAST_TRANSPOSE_TRITON of config_MI355X_1x8x1_8b.sh).
FP8_IN_ANY_LAYOUT = ("blackwell",)

# generation, kernel efficiency, dense TFLOP/s, TB/s, links of the node and to other nodes, watts;
# memory and the source of the other figures
ROWS: dict[str, ChipRow] = {
    "v100": ChipRow("volta", measured.V100, VOLTA, 0.9, NVLINK2, NIC_50, None,
        TotalMemory(32491 * MIB, f"{POSTED}: 31.73 GiB; 31.75 in deepspeedai/DeepSpeed issue 3312"),
        f"V100 SXM 32 GB: {RECALLED}"),
    "v100-16": ChipRow("volta", measured.V100, VOLTA, 0.9, NVLINK2, NIC_50, None,
        TotalMemory(from_posted(15.78), f"{POSTED}: 15.78 GiB, kchengiva/Shift-GCN issue 34"),
        f"V100 SXM 16 GB: {RECALLED}"),
    "a100-40": ChipRow("ampere", measured.A100, AMPERE, 1.555, NVLINK3, NIC_200, 400,
        TotalMemory(40438 * MIB,
            f"{POSTED}: 39.49 GiB; 39.39 in imoneoi/openchat issue 34, 39.50 in TianheWu/CoSeR 10"),
        f"A100 SXM 40 GB: {RECALLED}; peaks: {SHEET}"),
    "a100": ChipRow("ampere", measured.A100, AMPERE, 2.0, NVLINK3, NIC_200, 400,
        TotalMemory(81152 * MIB, f"{POSTED}: 79.25 GiB; 79.14 to 79.33 with other drivers"),
        f"A100 SXM 80 GB: {SHEET}"),
    "a100-pcie": ChipRow("ampere", measured.A100_PCIE, AMPERE, 1.94, PCIE4, NIC_100, 300,
        TotalMemory(81152 * MIB, "memory as the A100 SXM's"), f"A100 PCIe 80 GB: {SHEET}; watts: {RECALLED}"),
    "a800": ChipRow("ampere", measured.A100, AMPERE, 2.0, NVLINK3_A800, NIC_200, 400,
        TotalMemory(from_posted(79.33), f"{POSTED}: 79.33 GiB, hahnyuan/PB-LLM issue 3"),
        f"A800 SXM 80 GB, as A100: {RECALLED}"),
    "h100": ChipRow("hopper", measured.H100, HOPPER, 3.35, NVLINK4, NIC_400, 700,
        TotalMemory(81089 * MIB, f"{POSTED}: total_memory=81089MB, torch 2.7; 79.10 to 79.21 GiB with other drivers"),
        f"H100 SXM 80 GB: {SHEET}"),
    "h100-pcie": ChipRow("hopper", measured.H100_PCIE, HOPPER_PCIE, 2.0, PCIE5, NIC_100, 350,
        TotalMemory(81008 * MIB, f"{POSTED}: total_memory=81008MB"),
        f"H100 PCIe 80 GB: {SHEET}; watts: its data sheet in realworldtech.com/forum/?threadid=206399"),
    "h100-nvl": ChipRow("hopper", measured.H100_NVL, HOPPER_NVL, 3.9, PCIE5, NIC_100, 400,
        TotalMemory(from_posted(93.00), f"{POSTED}: 93.00 GiB, ali-vilab/VACE issue 56"),
        f"H100 NVL 94 GB, without the NVLink bridge between two: {RECALLED}"),
    "h200": ChipRow("hopper", measured.H200, HOPPER, 4.8, NVLINK4, NIC_400, 700,
        TotalMemory(143156 * MIB, f"{POSTED}: total_memory=143156MB; 139.72 to 139.81 GiB with other drivers"),
        f"H200 SXM: {SHEET}"),
    "h800": ChipRow("hopper", measured.H100, HOPPER, 3.35, NVLINK4_H800, NIC_400_H800, 700,
        TotalMemory(81089 * MIB, "memory as the H100's"),
        f"H800 SXM, as H100: {RECALLED}; watts: nvidia-smi shows 700 W and 81559 MiB"),
    "h20": ChipRow("hopper", measured.H20, H20, 4.0, NVLINK4, NIC_400, 400,
        TotalMemory(from_nvidia_smi(97871), "memory: 0.4 % less than nvidia-smi shows, as on H200"),
        "H20 96 GB: willitrunai.com/gpus/h20-96gb, fp32 and tf32: zangshuxian.com/new/674733024499207168"),
    "gh200": ChipRow("hopper", measured.GH200, HOPPER, 4.0, NVLINK4_DIRECT, NIC_200_GH200, 660,
        TotalMemory(96768 * MIB, f"{POSTED}: 94.50 GiB of a 96 GB part"), GH200, ranks_per_node=4,
        launch_seconds=GRACE_LAUNCH_SECONDS),
    "b200": ChipRow("blackwell", measured.B200, B200, 8.0, NVLINK5, NIC_400_B200, 1000,
        TotalMemory(182631 * MIB,
            f"{POSTED}: total_memory=182631MB; 178.35 GiB in stas00/ml-engineering@744d01e:debug"),
        f"B200 SXM: {SHEET}", block_scales=True),
    "gb200": ChipRow("blackwell", measured.GB200, GB200, 8.0, NVLINK5, NIC_400_GB200, 1200,
        TotalMemory(from_nvidia_smi(189471), "memory: 0.4 % less than nvidia-smi shows, as on B200"),
        f"GB200 NVL72: {SHEET}", block_scales=True, ranks_per_node=72,
        launch_seconds=GRACE_LAUNCH_SECONDS),
    "b300": ChipRow("blackwell", measured.B300, B300, 8.0, NVLINK5, NIC_800_B300, 1100,
        TotalMemory(from_nvidia_smi(275040), "memory: 0.4 % less than nvidia-smi shows, as on B200"),
        f"B300 SXM: {SHEET}; watts: {B300_WATTS}", block_scales=True),
    "gb300": ChipRow("blackwell", measured.GB300, GB300, 8.0, NVLINK5, NIC_800_GB300, 1400,
        TotalMemory(from_nvidia_smi(284208), "memory: 0.4 % less than nvidia-smi shows, as on B200"),
        f"GB300 NVL72, {GB300_SOURCE}", block_scales=True, ranks_per_node=72,
        launch_seconds=GRACE_LAUNCH_SECONDS),
    "mi250x": ChipRow("cdna", measured.MI250X, CDNA2_DIE, 1.64, XGMI_MI250, NIC_100_MI250, 280,
        TotalMemory(68_702_699_520, "memory as rocm-smi shows it, which is torch's figure on MI300X"),
        f"MI250X, {DIE}"),
    "mi300x": ChipRow("cdna", measured.MI300X, CDNA3, 5.3, XGMI_MI300, NIC_400_AMD, 750,
        TotalMemory(206_141_652_992, f"{POSTED}: 191.98 GiB, as rocm-smi shows it"), f"MI300X: {SHEET}"),
    "mi325x": ChipRow("cdna", measured.MI325X, CDNA3, 6.0, XGMI_MI300, NIC_400_AMD, 1000,
        TotalMemory(256 * 10**9, "memory of the data sheet"), f"MI325X: {SHEET}"),
    "mi350x": ChipRow("cdna", measured.MI350X, MI350X, 8.0, XGMI_MI355, NIC_400_AMD, 1000,
        TotalMemory(309_220_868_096, "memory as the MI355X's"),
        f"MI350X: memory and its rate {SHEET}; peaks and watts: {RECALLED}", block_scales=True),
    "mi355x": ChipRow("cdna", measured.MI355X, CDNA4, 8.0, XGMI_MI355, NIC_400_AMD, 1400,
        TotalMemory(309_220_868_096, "memory as rocm-smi shows it, which is torch's figure on MI300X"),
        f"MI355X: {SHEET}", block_scales=True),
    "l40s": ChipRow("ada", measured.L40S, L40S, 0.86, PCIE4, NIC_100, 350,
        TotalMemory(45465 * MIB, f"{POSTED}: 44.40 GiB, vllm-project/vllm issue 38486"), f"L40S: {SHEET}"),
    "l40": ChipRow("ada", measured.L40, L40, 0.864, PCIE4, NIC_100, 300,
        TotalMemory(from_posted(44.40), f"{POSTED}: 44.40 GiB, QwenLM/Qwen3-VL issue 2097"), f"L40: {RECALLED}"),
    "l20": ChipRow("ada", measured.L20, L20, 0.864, PCIE4, NIC_100, 275,
        TotalMemory(from_posted(44.53), f"{POSTED}: 44.53 GiB, Tencent-Hunyuan/HunyuanCustom issue 36"),
        f"L20: 16 bits and fp32 DefTruth/CUDA-Learn-Notes:hgemm and sgemm; others: {RECALLED}"),
    "l4": ChipRow("ada", measured.L4, L4, 0.3, PCIE4, NIC_SHARED, None,
        TotalMemory(22558 * MIB, f"{POSTED}: 22.03 GiB"), f"L4: fp32 fpsbench.com, {RECALLED}"),
    "a10": ChipRow("ampere", measured.A10, A10, 0.6, PCIE4, NIC_SHARED, 150,
        TotalMemory(22558 * MIB, AS_L4), f"A10: {RECALLED}"),
    "a10g": ChipRow("ampere", measured.A10G, A10G, 0.6, PCIE4, NIC_SHARED, 300,
        TotalMemory(22558 * MIB, AS_L4), f"A10G, in AWS only: {RECALLED}"),
    "a30": ChipRow("ampere", measured.A30, A30, 0.933, PCIE4, NIC_SHARED, 165,
        TotalMemory(from_posted(23.53), f"{POSTED}: 23.53 GiB, google/RB-Modulation issue 5"),
        f"A30, without the NVLink bridge between two: {RECALLED}"),
    "a40": ChipRow("ampere", measured.A40, A40, 0.696, PCIE4, NIC_SHARED, 300,
        TotalMemory(45465 * MIB, "memory as the L40S, which also has 48 GB and ECC"),
        f"A40, without the NVLink bridge between two: {RECALLED}"),
    "t4": ChipRow("turing", measured.T4, TURING, 0.32, PCIE3, NIC_SHARED, 70,
        TotalMemory(from_posted(14.56),
            f"{POSTED}: 14.56 GiB, Zheng-Chong/CatVTON issue 133; 14.58 in mbzuai-oryx/GeoPixel 5"),
        f"T4: {RECALLED}"),
    "rtx5090": ChipRow("blackwell-rtx", measured.RTX5090, RTX5090, 1.792, PCIE5, NIC_SHARED, 575,
        TotalMemory(from_posted(31.37), f"{POSTED}: 31.37 GiB, Wan-Video/Wan2.1 issue 465"),
        f"RTX 5090: peaks main-horse.github.io/posts/5090-mm-perf; others: {RECALLED}"),
    "rtxpro6000": ChipRow("blackwell-rtx", measured.RTX_PRO_6000, RTX_PRO_6000, 1.792, PCIE5, NIC_100, 600,
        TotalMemory(from_posted(94.97), f"{POSTED}: 94.97 GiB, antirez/ds4 issue 431"),
        f"RTX PRO 6000 Blackwell: {RECALLED}"),
    "rtx4090": ChipRow("ada", measured.RTX4090, RTX4090, 1.008, PCIE4, NIC_SHARED, None,
        TotalMemory(24207 * MIB, f"{POSTED}: 23.64 GiB"), f"RTX 4090: fp32 waredb.com, {RECALLED}"),
    "rtx3090": ChipRow("ampere", measured.RTX3090, RTX3090, 0.936, PCIE4, NIC_SHARED, None,
        TotalMemory(24248 * MIB, f"{POSTED}: 23.68 GiB, vllm-project/vllm issue 16343"),
        f"RTX 3090: fp32 digitaltrends.com, {RECALLED}"),
    "rtx3060": ChipRow("ampere", measured.RTX3060, RTX3060, 0.36, PCIE4, NIC_SHARED, 170,
        TotalMemory(from_posted(11.75), f"{POSTED}: 11.75 GiB, Kunhao-Liu/StyleGaussian issue 12"),
        "RTX 3060 12 GB: fp32 and memory rate sysrqmts.com, watts pcpartdb.com; 16 bits: 112 tensor cores at 1.777 GHz "
        "of the 128 FLOPs each that those of the RTX 3090 have"),
    "a6000": ChipRow("ampere", measured.A6000, A6000, 0.768, PCIE4, NIC_SHARED, 300,
        TotalMemory(48676 * MIB,
            f"{POSTED}: total_memory=48676MB, pytorch/ao@b5b9525:torchao/prototype/hqq/README.md; ECC off"),
        f"RTX A6000, {GA102}"),
    "rtx6000-ada": ChipRow("ada", measured.RTX6000_ADA, RTX6000_ADA, 0.96, PCIE4, NIC_SHARED, 300,
        TotalMemory(48622 * MIB,
            f"{POSTED}: total_memory=48622MB, torch 2.3; ECC off, with it 44.43 GiB in DINGYANB/MTVCrafter issue 21"),
        f"RTX 6000 Ada, {PROVIZ}"),
}  # fmt: skip

ALIASES = {  # other names of the catalog's chips
    **dict.fromkeys(("a100-80", "a100-80g", "a100-80gb", "a100-sxm", "a100-sxm4-80gb"), "a100"),
    **dict.fromkeys(("a100-40g", "a100-40gb", "a100-sxm4-40gb"), "a100-40"),
    **dict.fromkeys(("a100-pcie-80gb", "a100-80gb-pcie"), "a100-pcie"),
    **dict.fromkeys(("a800-80g", "a800-80gb", "a800-sxm4-80gb"), "a800"),
    **dict.fromkeys(("h100-80", "h100-80g", "h100-80gb", "h100-sxm", "h100-sxm5", "h100-80gb-hbm3"), "h100"),
    **dict.fromkeys(("h200-sxm", "h200-141gb"), "h200"),
    "b200-sxm": "b200",
    "gh200-480gb": "gh200",
    "gb200-nvl72": "gb200",
    "gb300-nvl72": "gb300",
    "mi300": "mi300x",
    **dict.fromkeys(("v100-32", "v100-32gb", "v100-sxm2-32gb"), "v100"),
    **dict.fromkeys(("v100-16g", "v100-16gb", "v100-sxm2-16gb"), "v100-16"),
    **dict.fromkeys(("3090", "rtx-3090"), "rtx3090"),
    **dict.fromkeys(("3060", "rtx-3060", "rtx3060-12gb", "rtx-3060-12gb"), "rtx3060"),
    **dict.fromkeys(("4090", "rtx-4090"), "rtx4090"),
    **dict.fromkeys(("5090", "rtx-5090"), "rtx5090"),
    **dict.fromkeys(("rtx-pro-6000", "rtx6000-pro", "rtx-pro6000", "rtx-6000-pro"), "rtxpro6000"),
    **dict.fromkeys(("rtxa6000", "rtx-a6000"), "a6000"),
    **dict.fromkeys(("rtx6000ada", "rtx-6000-ada", "rtx-6000-ada-generation", "a6000-ada"), "rtx6000-ada"),
}


class CloudInstance(NamedTuple):
    """A node that a cloud rents, as the catalog's chip and what differs from its node (``overrides.py``)."""

    chip: str
    gpus: int
    nic: str
    latency_microseconds: float | None = None  # of a message between nodes; None: InfiniBand's

    def list_overrides(self, *, is_counted: bool) -> list[str]:
        """Return the words that make the chip's usual node this one: ``["node=4", "nic=40Gbit/node"]``.

        ``is_counted``: whether the number of GPUs is stated next to them, which else is that of this node.
        """
        row = ROWS[self.chip]
        usual = row.ranks_per_node if is_counted else row.default_ranks
        node = [] if self.gpus == usual == row.ranks_per_node else [f"node={self.gpus}"]
        latency = [] if self.latency_microseconds is None else [f"latency={self.latency_microseconds:g}us"]
        return [*node, self.nic, *latency]


# Rates of the networks: EFA of P4d to P6 and Google's A3 from NETWORK#L577 to #L591; the others as the clouds' pages of
# instance types have them, recalled and unverified. A rate per node is shared by its GPUs.
# Latencies of EFA: aws/aws-ofi-nccl@2daf7d3, of P5, P5e and P5en as its model of collectives has them
# (src/tuner/nccl_ofi_model.cpp, "8B RDMA w/imm lat"), of P3dn, P4d and P4de, which do not write to remote memory, as it
# reports them to NCCL (src/platform-aws.cpp).
INSTANCES: dict[str, CloudInstance] = {
    "p3.2xlarge": CloudInstance("v100-16", 1, "nic=10Gbit/node"),
    "p3.8xlarge": CloudInstance("v100-16", 4, "nic=10Gbit/node"),
    "p3.16xlarge": CloudInstance("v100-16", 8, "nic=25Gbit/node"),
    "p3dn.24xlarge": CloudInstance("v100", 8, "nic=100Gbit/node", 150),
    "p4d.24xlarge": CloudInstance("a100-40", 8, "nic=50Gbit", 75),
    "p4de.24xlarge": CloudInstance("a100", 8, "nic=50Gbit", 75),
    "p5.4xlarge": CloudInstance("h100", 1, "nic=100Gbit/node", 75),
    "p5.48xlarge": CloudInstance("h100", 8, "nic=400Gbit", 20),
    "p5e.48xlarge": CloudInstance("h200", 8, "nic=400Gbit", 20),
    "p5en.48xlarge": CloudInstance("h200", 8, "nic=400Gbit", 18),
    "p6-b200.48xlarge": CloudInstance("b200", 8, "nic=400Gbit"),
    "p6-b300.48xlarge": CloudInstance("b300", 8, "nic=800Gbit"),
    "g4dn.xlarge": CloudInstance("t4", 1, "nic=25Gbit/node"),
    "g4dn.12xlarge": CloudInstance("t4", 4, "nic=50Gbit/node"),
    "g4dn.metal": CloudInstance("t4", 8, "nic=100Gbit/node"),
    "g5.xlarge": CloudInstance("a10g", 1, "nic=10Gbit/node"),
    "g5.2xlarge": CloudInstance("a10g", 1, "nic=10Gbit/node"),
    "g5.12xlarge": CloudInstance("a10g", 4, "nic=40Gbit/node"),
    "g5.48xlarge": CloudInstance("a10g", 8, "nic=100Gbit/node"),
    "g6.xlarge": CloudInstance("l4", 1, "nic=10Gbit/node"),
    "g6.12xlarge": CloudInstance("l4", 4, "nic=40Gbit/node"),
    "g6.48xlarge": CloudInstance("l4", 8, "nic=100Gbit/node"),
    "g6e.xlarge": CloudInstance("l40s", 1, "nic=20Gbit/node"),
    "g6e.12xlarge": CloudInstance("l40s", 4, "nic=100Gbit/node"),
    "g6e.48xlarge": CloudInstance("l40s", 8, "nic=400Gbit/node"),
    "a2-highgpu-1g": CloudInstance("a100-40", 1, "nic=24Gbit/node"),
    "a2-highgpu-2g": CloudInstance("a100-40", 2, "nic=32Gbit/node"),
    "a2-highgpu-4g": CloudInstance("a100-40", 4, "nic=50Gbit/node"),
    "a2-highgpu-8g": CloudInstance("a100-40", 8, "nic=100Gbit/node"),
    "a2-ultragpu-1g": CloudInstance("a100", 1, "nic=25Gbit/node"),
    "a2-ultragpu-2g": CloudInstance("a100", 2, "nic=50Gbit/node"),
    "a2-ultragpu-4g": CloudInstance("a100", 4, "nic=50Gbit/node"),
    "a2-ultragpu-8g": CloudInstance("a100", 8, "nic=100Gbit/node"),
    "a3-highgpu-1g": CloudInstance("h100", 1, "nic=25Gbit/node"),
    "a3-highgpu-2g": CloudInstance("h100", 2, "nic=50Gbit/node"),
    "a3-highgpu-4g": CloudInstance("h100", 4, "nic=100Gbit/node"),
    "a3-highgpu-8g": CloudInstance("h100", 8, "nic=100Gbit"),
    "a3-megagpu-8g": CloudInstance("h100", 8, "nic=200Gbit"),
    "a3-ultragpu-8g": CloudInstance("h200", 8, "nic=400Gbit"),
    "a4-highgpu-8g": CloudInstance("b200", 8, "nic=400Gbit"),
    "g2-standard-96": CloudInstance("l4", 8, "nic=100Gbit/node"),
    "nc24ads_a100_v4": CloudInstance("a100-pcie", 1, "nic=20Gbit/node"),
    "nc48ads_a100_v4": CloudInstance("a100-pcie", 2, "nic=40Gbit/node"),
    "nc96ads_a100_v4": CloudInstance("a100-pcie", 4, "nic=80Gbit/node"),
    "nc40ads_h100_v5": CloudInstance("h100-nvl", 1, "nic=40Gbit/node"),
    "nc80adis_h100_v5": CloudInstance("h100-nvl", 2, "nic=80Gbit/node"),
    "nd96asr_v4": CloudInstance("a100-40", 8, "nic=200Gbit"),
    "nd96amsr_a100_v4": CloudInstance("a100", 8, "nic=200Gbit"),
    "nd96isr_h100_v5": CloudInstance("h100", 8, "nic=400Gbit"),
    "nd96isr_h200_v5": CloudInstance("h200", 8, "nic=400Gbit"),
    "nd96isr_mi300x_v5": CloudInstance("mi300x", 8, "nic=400Gbit"),
    "bm.gpu4.8": CloudInstance("a100-40", 8, "nic=200Gbit"),
    "bm.gpu.a100-v2.8": CloudInstance("a100", 8, "nic=200Gbit"),
    "bm.gpu.h100.8": CloudInstance("h100", 8, "nic=400Gbit"),
    "bm.gpu.h200.8": CloudInstance("h200", 8, "nic=400Gbit"),
    "bm.gpu.b200.8": CloudInstance("b200", 8, "nic=400Gbit"),
    "bm.gpu.mi300x.8": CloudInstance("mi300x", 8, "nic=400Gbit"),
}


def list_names() -> list[str]:
    """Return the names of the catalog's chips, in its order."""
    return list(ROWS)


def is_named(text: str) -> bool:
    """Tell whether ``text`` names a machine: it has ranks after a colon, or a name that ``resolve`` knows."""
    if "://" in text:  # an address, such as that of a model
        return False
    return has_ranks(text) or spell_machine(text).partition(" ")[0].lower() in (*ROWS, "local")


_NODES = r"((?P<nodes>\d+)\s*([x*×]|nodes? (of|with|x))\s*)?"
_COUNT_FIRST = re.compile(_NODES + r"(?P<count>\d+)(\s*[x*×]\s*| )(?P<name>\w[\w. -]*?)", re.IGNORECASE)
_COUNT_LAST = re.compile(r"(?P<name>\w[\w. -]*?)\s*[x*×]\s*(?P<count>\d+)")
_NODES_ONLY = re.compile(r"(?P<nodes>\d+)\s*nodes?\s+((of|with)\s+)?(?P<name>[a-z]\w[\w. -]*?)", re.IGNORECASE)
MAX_NODE_GPUS = 16  # that one host has; the NVLink domains of racks are larger
_THOUSANDS = re.compile(r"^\d{1,3}(,\d{3})+(?=\s)")  # 16,384 H100


def spell_machine(text: str) -> str:
    """Normalize a machine to ``NAME:GPUS``, which people also write as ``h100x8``, ``8xh100`` or ``8*h100``.

    ``NAME`` becomes that of the catalog: ``a100-80gb`` is ``a100``, and the instance of a cloud its chip with what
    differs: ``4xp4d.24xlarge`` is ``a100-40:32 nic=50Gbit latency=75us``.
    """
    name, *overrides = re.split(r"\s+(?=[a-z]+=)", text.strip())
    chip, count = _split_count(_THOUSANDS.sub(lambda match: match[0].replace(",", ""), name))
    if instance := INSTANCES.get(chip):
        stated = {word.partition("=")[0] for word in overrides}
        usual = instance.list_overrides(is_counted=bool(count))
        kept = (word for word in usual if word.partition("=")[0] not in stated)
        return " ".join([f"{instance.chip}{count}", *kept, *overrides])
    return " ".join([f"{chip}{count}", *overrides])


def _split_count(name: str) -> tuple[str, str]:
    """Split the name of a machine from its number of GPUs, as ``:8`` in any spelling, or nothing."""
    for pattern in (_COUNT_FIRST, _COUNT_LAST):
        match = pattern.fullmatch(name)
        chip = _find_name(match["name"]) if match else None
        nodes = match.groupdict().get("nodes") if match else None
        if match and chip in INSTANCES and not nodes and len(match["count"]) < len(str(RANKS)):  # that many nodes
            return chip, f":{int(match['count']) * INSTANCES[chip].gpus}"
        if match and chip:
            return chip, f":{int(match['count']) * int(nodes or 1)}"
    match = _NODES_ONLY.fullmatch(name)
    chip = _find_name(match["name"]) if match else None
    if match and chip and (gpus := INSTANCES[chip].gpus if chip in INSTANCES else _count_node_gpus(chip)):
        return chip, f":{int(match['nodes']) * gpus}"
    text, colon, count = name.partition(":")
    return _find_name(text) or text, f"{colon}{count}"


def _warn_of_part_of_instance(text: str) -> None:
    """Warn of a number after an instance's name that is of GPUs, but no multiple of those of the instance."""
    name, _, count = text.partition(" ")[0].partition(":")
    instance = INSTANCES.get(_find_name(name) or "")
    if instance and count.isdecimal() and int(count) % instance.gpus:
        warn(
            f"machine {text!r}: {int(count):,} is the number of GPUs, of which one {name} has {instance.gpus}; "
            f"write {int(count)}x{name} for as many instances"
        )


def _count_node_gpus(chip: str) -> int | None:
    """Return the GPUs of a node of a chip; None for this computer, for a card on PCIe, and for racks such as NVL72.

    A card has no usual node, and people call a tray of four GPUs of a rack a node.
    """
    row = ROWS.get(chip)
    return row.default_ranks if row and 1 < row.default_ranks <= MAX_NODE_GPUS else None


def _find_name(text: str) -> str | None:
    """Return the name of a chip or an instance in the catalog for one in any case, with spaces or its vendor's name."""
    name = re.sub(
        r"^(nvidia-|amd-|standard_)?(geforce-|instinct-|tesla-|dgx-|hgx-)?", "", "-".join(text.lower().split())
    )
    known = {*ROWS, *INSTANCES, "local"}
    singular = name.removesuffix("-gpus")
    spellings = (ALIASES.get(spelling, spelling) for spelling in (singular, singular.removesuffix("s")))
    return next((spelling for spelling in spellings if spelling in known), None)


def is_counted(text: str) -> bool:
    """Tell whether the text of a machine gives the number of ranks, which only the bare name of a chip does not."""
    return spell_machine(text).partition(" ")[0].lower() not in ROWS


def has_ranks(text: str) -> bool:
    """Tell whether the text of a machine states its number of ranks, or is a file, which does."""
    name = spell_machine(text).partition(" ")[0]
    return ":" in name or Path(name).suffix in (".toml", ".json")


def replace_ranks(text: str, ranks: int) -> str:
    """Return the text of a machine with another number of ranks: ``h100:8 nic=1Gbit`` → ``h100:64 nic=1Gbit``."""
    chip, space, overrides = spell_machine(text).partition(" ")
    return f"{chip.rpartition(':')[0] or chip}:{ranks}{space}{overrides}"


_NODE_SIZE = re.compile(r"\bnode=([1-9][0-9]{0,6})\b")


class UncalibratedError(UserError):
    """The machine ``local`` was asked for before this computer was calibrated."""


def resolve(text: str, *, local: Path, ranks: int | None = None, find: Callable[[str], Path] = Path) -> Machine:
    """Return the machine named ``h100`` (one node), ``h100:512``, ``FILE.toml``, ``FILE.toml:4`` or ``local``.

    A card on PCIe has no usual node: ``rtx4090`` is one GPU.
    Further words override fields (``overrides.py``): ``l40s:320 nic=100Gbit/node``. ``local``: the file that
    ``fivefold calibrate`` wrote for this computer. ``ranks`` replaces the number in the text; ``find`` maps a path in
    the text to the file. Raises a one-line ``UserError`` for an unknown name.
    """
    name, *overrides = re.split(r"\s+(?=[a-z]+=)", spell_machine(text))
    _warn_of_part_of_instance(text)
    if ranks is None and name.lower() in ROWS:  # node=4 is one node of four
        ranks = next((int(value) for value in _NODE_SIZE.findall(" ".join(overrides))), None)
    machine = _resolve_name(name, local=local, ranks=ranks, find=find)
    return apply_overrides(machine, overrides, text=text) if overrides else machine


def locate_machine(text: str, *, named_in: Path) -> str:
    """Resolve a machine named in the file ``named_in``: a path in it is relative to that file."""
    path = re.match(r"[^\s:]+\.(?:toml|json)", text)
    return locate(path[0], named_in=named_in) + text[path.end() :] if path else text


def _resolve_name(text: str, *, local: Path, ranks: int | None, find: Callable[[str], Path]) -> Machine:
    """Return the machine of a catalog name, of a file, or this computer; ``ranks`` replaces the count in the name."""
    name, count = _split(text)
    count = ranks or count
    if name == "local" and not local.exists():
        raise UncalibratedError(f"this computer is not calibrated yet ({local} is missing); run `fivefold calibrate`")
    if name == "local" or Path(name).suffix in (".toml", ".json"):
        machine = _read(local if name == "local" else find(name))
        return machine if count is None else with_ranks(machine, count)
    if name.lower() not in ROWS:
        chip, dash, digits = name.lower().rpartition("-")
        if dash and chip in ROWS and digits.isdecimal():  # not read as a number of GPUs: h100-80 may mean 80 GB
            raise UserError(
                f"unknown machine {name.lower()!r}; for {digits} GPUs write {chip}:{digits}. "
                "`fivefold machines` lists all"
            )
        instances = [instance for instance in INSTANCES if instance.startswith(name.lower()[:1])]  # m3-ultra is no a3
        error = make_unknown_name_error(name.lower(), [*ROWS, *instances, "local"], kind="machine")
        if "did you mean" in str(error):
            raise error
        raise UserError(
            f"{error}; `local` is this computer, and a file describes any other (docs/reference/machines.md)"
        )
    return _build(name.lower(), ROWS[name.lower()], count)


def _read(path: Path) -> Machine:
    """Read a machine file. If it has ``base``, a catalog machine, its other keys override those of the base."""
    values = read_file(path)
    if "base" not in values:
        return toml.read(path)
    base = values.pop("base")
    chip = re.split("[: ]", spell_machine(base).lower())[0] if isinstance(base, str) else None
    if chip not in ROWS:
        raise UserError(
            f"{path}: base={base!r} does not begin with a chip of the catalog; write for example 'l40s:320'"
        )
    base_fields = resolve(str(base), local=path).model_dump() | {"name": path.stem}
    return Machine.read(_merge(base_fields, values), origin=str(path))


def _merge(known: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """Merge ``values`` into ``known`` recursively; ``values`` take precedence."""
    shared_tables = {
        key for key in known.keys() & values if isinstance(known[key], dict) and isinstance(values[key], dict)
    }
    return {**known, **values, **{key: _merge(known[key], values[key]) for key in shared_tables}}


def with_ranks(machine: Machine, ranks: int) -> Machine:
    """Return ``machine`` with ``ranks`` ranks; on a calibrated CPU the processes share the same FLOP/s and memory."""
    if machine.nodes > 1 and machine.calibration is not None:  # more or fewer hosts
        *inner_links, outer_link = machine.links
        return machine.replace(ranks=ranks, links=(*inner_links, outer_link.replace(span=max(outer_link.span, ranks))))
    if machine.calibration is None or machine.has_gpus:
        *inner_links, outer_link = machine.links
        return machine.replace(ranks=ranks, links=(*inner_links, outer_link.replace(span=max(outer_link.span, ranks))))
    share = machine.ranks / ranks
    chip = machine.chip.replace(
        peak_flops={dtype: flops * share for dtype, flops in machine.chip.peak_flops.items()},
        memory_bytes=int(machine.chip.memory_bytes * share),
        memory_bandwidth=machine.chip.memory_bandwidth * share,
    )
    links = tuple(link.replace(span=max(link.span, ranks)) for link in machine.links)
    return machine.replace(ranks=ranks, ranks_per_node=ranks, chip=chip, links=links)


def _split(text: str) -> tuple[str, int | None]:
    """Split ``"h100:512"`` into ``("h100", 512)``; None without a count."""
    name, colon, count = text.strip().rpartition(":")
    if not colon or Path(count).suffix in (".toml", ".json"):
        return text.strip(), None
    if not (count.isascii() and count.isdigit() and count.strip("0")):
        first, dash, last = count.partition("-")
        hint = (
            f"; search takes several by --gpu-counts {count}" if dash and first.isdecimal() and last.isdecimal() else ""
        )
        raise UserError(
            f"machine {text!r}: {count!r} is not a number of ranks; write a whole number from 1, as in h100:8{hint}"
        )
    if len(count) > len(str(RANKS)):
        raise UserError(f"machine {name!r} of {count[:20]} ranks is larger than {RANKS:,}; use fewer")
    return name, int(count)


def _build(name: str, row: ChipRow, count: int | None) -> Machine:
    """Build the machine of one row of the catalog."""
    ranks = count or row.default_ranks
    chip = Chip(
        name=name,
        peak_flops={dtype: float(round(tflops * 1e12)) for dtype, tflops in row.tflops.items()},
        memory_bytes=row.memory.total_bytes,
        memory_bandwidth=float(round(row.terabytes_per_second * 1e12)),
        power_watts=row.watts,
        generation=row.generation,
        block_scales=row.block_scales,
        launch_seconds=row.launch_seconds,
        fp8_in_any_layout=row.generation in FP8_IN_ANY_LAYOUT,
        source=f"{row.source}; {row.memory.source}",
        **build_chip_fields(row.efficiency, tflops=row.tflops),
    )
    near = Link(span=row.ranks_per_node, **row.near._asdict())
    outer_link = Link(span=max(ranks, row.ranks_per_node), **row.far._asdict())
    return Machine(name=name, chip=chip, ranks=ranks, ranks_per_node=row.ranks_per_node, links=(near, outer_link))
