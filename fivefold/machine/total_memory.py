"""The memory of each chip: what ``torch.cuda.get_device_properties(0).total_memory`` reports, in bytes.

PyTorch prints the same figure as "total capacity" when it runs out of memory. It is what a process can have: less than
``nvidia-smi`` shows, since the driver keeps 0.4 to 2 % for itself (an H100 of 81559 MiB has 81089 MiB).
Each figure is one that people have posted; drivers differ by up to 0.3 %.
"""

from __future__ import annotations

from fivefold.units import MIB

POSTED = "total_memory as torch.cuda reports it"
KEPT_BY_DRIVER = 0.004  # of what nvidia-smi shows: on B200 (183359 and 182631 MiB) and H200 (143771 and 143156 MiB)


def _from_nvidia_smi(mebibytes: int) -> int:
    """Return the bytes of a chip of which only what ``nvidia-smi`` shows was published."""
    return int(mebibytes * (1 - KEPT_BY_DRIVER)) * MIB


TOTAL_MEMORY: dict[str, tuple[int, str]] = {
    "v100": (32491 * MIB, f"{POSTED}: 31.73 GiB; 31.75 in deepspeedai/DeepSpeed issue 3312"),
    "a100-40": (40438 * MIB, f"{POSTED}: 39.49 GiB; 39.39 in imoneoi/openchat issue 34, 39.50 in TianheWu/CoSeR 10"),
    "a100": (81152 * MIB, f"{POSTED}: 79.25 GiB; 79.14 to 79.33 with other drivers"),
    "h100": (81089 * MIB, f"{POSTED}: total_memory=81089MB, torch 2.7; 79.10 to 79.21 GiB with other drivers"),
    "h100-pcie": (81008 * MIB, f"{POSTED}: total_memory=81008MB"),
    "h200": (143156 * MIB, f"{POSTED}: total_memory=143156MB; 139.72 to 139.81 GiB with other drivers"),
    "h800": (81089 * MIB, "memory as the H100's"),
    "gh200": (96768 * MIB, f"{POSTED}: 94.50 GiB of a 96 GB part"),
    "b200": (182631 * MIB, f"{POSTED}: total_memory=182631MB; 178.35 GiB in stas00/ml-engineering@744d01e:debug"),
    "gb200": (_from_nvidia_smi(189471), "memory: 0.4 % less than nvidia-smi shows, as on B200"),
    "b300": (_from_nvidia_smi(275040), "memory: 0.4 % less than nvidia-smi shows, as on B200"),
    "gb300": (_from_nvidia_smi(284208), "memory: 0.4 % less than nvidia-smi shows, as on B200"),
    "mi250x": (68_702_699_520, "memory as rocm-smi shows it, which is torch's figure on MI300X"),
    "mi300x": (206_141_652_992, f"{POSTED}: 191.98 GiB, as rocm-smi shows it"),
    "mi325x": (256 * 10**9, "memory of the data sheet"),
    "mi355x": (309_220_868_096, "memory as rocm-smi shows it, which is torch's figure on MI300X"),
    "l40s": (45465 * MIB, f"{POSTED}: 44.40 GiB, vllm-project/vllm issue 38486"),
    "l4": (22558 * MIB, f"{POSTED}: 22.03 GiB"),
    "rtx4090": (24207 * MIB, f"{POSTED}: 23.64 GiB"),
    "rtx3090": (24248 * MIB, f"{POSTED}: 23.68 GiB, vllm-project/vllm issue 16343"),
}
