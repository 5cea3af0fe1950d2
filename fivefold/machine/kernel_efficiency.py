"""Measured kernel efficiency of chips: best published matmul TFLOP/s, and shares for other kernels.

The best is the maximum over thousands of shapes in a short run. In a long step a chip sustains less, as its power is
capped:

    sustained share of the peak = SUSTAINED · best measured ÷ peak
"""

from __future__ import annotations

from typing import Any, NamedTuple

from fivefold.units import Dtype

# In a loop the large matmuls of an H100 hold 681 to 743 TFLOP/s, 0.86 to 0.94 of its best
# (microsoft/vidur@683364e:data/profiling/compute/h100/meta-llama/Llama-2-70b-hf/mlp.csv); those of an A100
# 227 to 270, 0.84 to 0.99 of its best (microsoft/vidur@2bb7a08:data/profiling/compute/a100/meta-llama).
SUSTAINED = 0.93

MAMF = "best matmul: stas00/ml-engineering@744d01e, maximum achievable matmul FLOPS"
TORCH = "best matmul: zzc0721/torch-performence-test-data:database.md"  # (spelled as there)
RECALLED = "multiprocessors from memory"
FLASH3 = "attention: cuDNN, FlashAttention-3 and -2 in figures 5 and 6 of arXiv:2407.08608"
CUDNN = "attention: cuDNN 9.18 to 9.22, NVIDIA/cudnn-frontend@df73764:benchmark/sdpa_benchmark_training/results"
AITER = "attention: ROCm/aiter@0403bcd:op_tests/cpp/mha/README.md"
FP8_ATTENTION = "attention in fp8: NVIDIA/cudnn-frontend@3929da2:benchmark/sdpa_benchmark_training/results/llama3.1"
FLASH2_ON_B200 = "FlashAttention-2: meta-pytorch/tritonbench pull request 171, Dao-AILab/flash-attention issue 1589"
MI300X_STEP = "bandwidth: kernels of a step, ZhangDanyang-AMD/Lumen@c410f2c:examples/llama2/results/mlperf/profiling"
UNKNOWN = "what its kernels reach is our assumption"


class KernelEfficiency(NamedTuple):
    """Best measured matmul in TFLOP/s by number format; the other fields are those of ``machine.spec.Chip``."""

    multiprocessors: int
    best: dict[Dtype, float]
    source: str
    bandwidth_share: float = 0.9
    attention_share: float = 0.8
    attention_backward_share: float = 0.73
    fp8_attention_share: float = 1.0
    fp8_attention_backward_share: float = 1.0
    hidden_softmax_dim: float = 0.0
    flash2_share: float = 1.0
    flops_per_joule: dict[Dtype, float] = {}


# FLOPs per joule of large matmuls in long training steps: a chip with a higher power limit sustains a higher clock.
# Fitted to step times (what depends on each: docs/explanation/how-a-step-costs/constants.md): on the flat dense runs of
# NVIDIA/dgxc-benchmarking on H100 (700 W, 0.65 of the peak in bf16) and of NVIDIA-NeMo/Megatron-Bridge on B200, GB200
# and GB300 (1000, 1200 and 1400 W: 0.53, 0.58 and 0.67 of it in fp8).
# They are those of an average card; the slowest of a step's has less (``Constants.chip_spread``).
# Ampere and Hopper, and the bandwidth of H100 and B200: fitted to the open runs of all sources with a prior
# (docs/explanation/decisions/050-a-prior-for-fits.md). With Hopper in bf16 the runs of dgxc-benchmarking alone would
# fit 0.94, those of others 0.85 to 0.9. Ampere: the larger of Llama-2-7B's matmuls hold 230 TFLOP/s of 400 W in a loop,
# 0.575 (microsoft/vidur@bee57da:data/profiling/compute/a100); a layer of Korthikanti 2022 fits 0.60 (arXiv:2205.05198,
# table 4: 7.7 and 11.9 ms), its runs of 175B and 1T fit 0.62, all other runs on A100 0.54 to 0.57.
# Blackwell in bf16: in loops of large matmuls a B200 holds 1388 TFLOP/s of 1000 W in fp16 (tmoreau89/triton@aabd14f:
# python/triton_cublas_bench/RESULTS.md), a B300 1463 to 1503 of 1100 W in bf16 (NVIDIA/TransformerEngine@8f2e635:docs/
# examples/gemm_profiling/gemm_profiling.rst): 1.33 to 1.39 per joule. An H100 holds 0.97 to 1.06 in loops and 0.91 in
# steps; 0.9 of 1.35 is 1.2. The B200 of SimuMax holds less, 1070 to 1100 (its reader).
# Held against loops that no constant was set on, of random values after 10,000 warm-up runs: products of 4096 and more
# hold 2579 to 2973 TFLOP/s in fp8 on a GB200 (1200 W), 2.15 to 2.48 per joule, by driver and version of one page, and
# those of 16384 and more 5262 to 7628 in fp4, 4.4 to 6.4 (Azure_Results/ND_GB200_v6_results.md of
# samuel-bohman/AI-benchmarking-guide@2598bed and @154d35c, egmsft/AI-benchmarking-guide@0682f76 and
# Azure/AI-benchmarking-guide@2a370be); an H100 holds 1217 to 1382 in fp8, 1.74 to 1.97, as loops do more than steps
# (samuel-bohman/AI-benchmarking-guide@26d18e9:Azure_Results/ND_H100_v5_results.md).
AMPERE_JOULE: dict[Dtype, float] = {"bf16": 0.575e12}
HOPPER_JOULE: dict[Dtype, float] = {"bf16": 0.91e12, "fp8": 1.63e12}
BLACKWELL_JOULE: dict[Dtype, float] = {"bf16": 1.2e12, "fp8": 2.37e12, "fp4": 4.5e12}
# AMD's acceptance tests run a matmul of hipBLASLt for 15 s on all cards of a node, on operands that are sines, whose
# bits switch as often as those of real data: an MI300X (750 W) must hold 552 TFLOP/s in bf16 and 981 in fp8 (on random
# integers 581 and 1,215), an MI350X (1,000 W) 956 and 2,061 (ROCm/ROCmValidationSuite@21584e1:
# rvs/conf/MI300X/gst_single.conf and MI350X/gst_single.conf). The MI355X has the thresholds of the MI350X.
CDNA3_JOULE: dict[Dtype, float] = {"bf16": 0.736e12, "fp8": 1.308e12}
CDNA4_JOULE: dict[Dtype, float] = {"bf16": 0.956e12, "fp8": 2.061e12}

A100 = KernelEfficiency(
    108,
    {"bf16": 271.2},
    f"{MAMF}; additions reach 0.86 of HBM: microsoft/vidur@2bb7a08",
    bandwidth_share=0.86,
    flops_per_joule=AMPERE_JOULE,
)
H100 = KernelEfficiency(
    132,
    {"bf16": 794.5, "fp8": 1402.6},
    f"{MAMF}; {FLASH3}",
    bandwidth_share=0.86,
    flash2_share=0.66,
    flops_per_joule=HOPPER_JOULE,
)
# cuDNN 9.18 and 9.19 on GB200, causal, in bf16, 64 heads of 128 with 8 of keys: 1300 to 1335 TFLOP/s forward at 4,096
# tokens, 1560 to 1600 at 8,192, 1650 to 1690 at 16,384; backward 1105 to 1130, 1280 to 1310 and 1370 to 1400. Without
# the diagonal and the tail that is 0.94 to 1.04 and 0.80 to 0.89 of a matmul in as short a run (0.93 of the best). In
# loops on B200 it holds 980 to 1311 forward and 821 to 981 backward (MooreThreads/SimuMax@e691807).
B200 = KernelEfficiency(
    148,
    {"bf16": 1745, "fp8": 3432.5},
    f"{MAMF}; {CUDNN}; {FLASH2_ON_B200}; {FP8_ATTENTION}",
    bandwidth_share=0.85,
    attention_share=1.0,
    attention_backward_share=0.84,
    # cuDNN 9.22 on GB200, causal, 64 heads of 128 with 8 of keys: forward 1.26 to 1.35 at 4,096 to 32,768 tokens,
    # backward 1.03, 1.09, 1.23 and 1.38
    fp8_attention_share=1.3,
    fp8_attention_backward_share=1.1,
    # With heads of 64 cuDNN computes 977, 1071 and 1115 TFLOP/s forward on GB300, causal, of 4,096, 8,192 and 16,384
    # tokens, with heads of 128 1703, 1856 and 1915. FlashAttention-4 is 1.5 times slower with heads of 64 on B200, and
    # 1.4 on GB300 (Dao-AILab/flash-attention pull request 2605). No one printed the backward of full sequences.
    hidden_softmax_dim=110,
    flash2_share=0.3,  # of 1200 TFLOP/s; it holds 315 to 362 forward, 334 backward
    flops_per_joule=BLACKWELL_JOULE,
)
GB200 = B200._replace(multiprocessors=152, best={"bf16": 1822, "fp8": 3615.6}, source=f"{B200.source}; {RECALLED}")

A100_PCIE = A100._replace(best={"bf16": 252.9})
V100 = KernelEfficiency(80, {"fp16": 97.36}, TORCH)
H100_PCIE = H100._replace(multiprocessors=114, best={"bf16": 495.9}, source=f"{TORCH}; {FLASH3}")
H100_NVL = H100_PCIE._replace(
    multiprocessors=132, best={"bf16": 548}, source=f"best matmul: as large a share as of H100 PCIe; {FLASH3}"
)
H20 = H100._replace(multiprocessors=78, best={}, source=f"{UNKNOWN}; {RECALLED}")
H200 = H100._replace(best={"bf16": 790.3, "fp8": 1453.4}, source=f"fp8 {MAMF}; bf16 {TORCH}; {FLASH3}")
GH200 = H100._replace(best={"bf16": 828.6, "fp8": 1535})
# Blackwell Ultra has twice the units for exponentials: on GB300 forward 1.49 to 1.59, backward 1.12, 1.24, 1.35, 1.43
# in 16 bits forward 1.12 to 1.21 and backward 1.08 to 1.13 times as fast as GB200 (cuDNN 9.22)
B300 = B200._replace(
    best={"bf16": 1769, "fp8": 3353.3},
    attention_share=1.19,
    attention_backward_share=0.92,
    fp8_attention_share=1.55,
    fp8_attention_backward_share=1.25,
)
GB300 = B300._replace(multiprocessors=GB200.multiprocessors, best=GB200.best, source=GB200.source)
MI250X = KernelEfficiency(110, {}, UNKNOWN)
# In a step of Llama 2 70B, 8,192 tokens, SwiGLU holds 3.0 TB/s forward and 2.8 backward, RMSNorm 3.4 and 2.8, and
# Transformer Engine's casts with a transpose 2.7 to 3.6: 3.0 of 5.3 over all their bytes. BabelStream holds 4.3
# (arXiv:2510.27583), with which norms were far from reaching it on the same card (ROCm/triton issue 422).
MI300X = KernelEfficiency(
    304, {"bf16": 668.4}, f"{MAMF}; {AITER}; {MI300X_STEP}", bandwidth_share=0.57, flops_per_joule=CDNA3_JOULE
)
MI325X = MI300X._replace(best={"bf16": 784.9}, source=f"{MAMF}; as large a share of the bandwidth as of MI300X")
MI355X = KernelEfficiency(256, {"bf16": 1565}, f"{MAMF}; {AITER}", flops_per_joule=CDNA4_JOULE)
MI350X = MI355X._replace(best={"bf16": 1440}, source=f"best matmul: as large a share as of MI355X; {MAMF}")
L40S = KernelEfficiency(142, {"bf16": 269.2}, TORCH)
L40 = KernelEfficiency(142, {}, UNKNOWN)
L20 = KernelEfficiency(92, {"bf16": 115}, "best matmul: DefTruth/CUDA-Learn-Notes:hgemm/README.md, cuBLAS")
L4 = KernelEfficiency(58, {"bf16": 70.9}, TORCH)
RTX4090 = KernelEfficiency(
    128,
    {"bf16": 165.1},
    f"{TORCH}; attention: apache/tvm:tl_doc/flash_perf.md",
    attention_share=1.2,  # its clock exceeds the data sheet's
    attention_backward_share=0.8,
)
RTX3090 = KernelEfficiency(82, {"bf16": 76.6}, TORCH)
RTX3060 = KernelEfficiency(28, {}, UNKNOWN)
RTX5090 = KernelEfficiency(170, {"bf16": 224.3}, "best matmul: main-horse.github.io/posts/5090-mm-perf")
RTX_PRO_6000 = KernelEfficiency(188, {}, UNKNOWN)
A6000 = KernelEfficiency(84, {}, UNKNOWN)
RTX6000_ADA = KernelEfficiency(142, {}, UNKNOWN)
A10 = KernelEfficiency(72, {}, UNKNOWN)
A10G = KernelEfficiency(80, {}, UNKNOWN)
A30 = KernelEfficiency(56, {}, UNKNOWN)
A40 = KernelEfficiency(84, {}, UNKNOWN)
T4 = KernelEfficiency(40, {}, UNKNOWN)


def build_chip_fields(efficiency: KernelEfficiency, *, tflops: dict[Dtype, float]) -> dict[str, Any]:
    """Return the efficiency fields of ``Chip``; ``tflops``: the chip's dense peaks in TFLOP/s."""
    fields = efficiency._asdict()
    best, source = fields.pop("best"), fields.pop("source")
    matmul = {dtype: SUSTAINED * best[dtype] / tflops[dtype] for dtype in best}
    return fields | {"matmul_share": matmul, "share_source": source}
