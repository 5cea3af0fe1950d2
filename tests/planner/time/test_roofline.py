"""Measured kernels, single facts with their source, and what must hold for any chip and shape."""

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.machine.catalog import ROWS, list_names, resolve
from fivefold.machine.spec import Chip
from fivefold.planner.time.roofline import estimate_attention, estimate_matmul, estimate_memory_bound, find_alignment


def chip(name: str) -> Chip:
    return resolve(name, local=Path("no/such/local.toml")).chip


def cool(name: str) -> Chip:
    """The chip in a short run: its power is not capped yet."""
    return chip(name).replace(power_watts=None)


# batch, m, n, k, TFLOP/s. XLA: tensorflow/tensorflow@9bebee8:third_party/xla/xla/service/gpu/model/
# matmul_interpolator_data.h and a later version of it; short runs on a cool chip.
XLA_H100 = [
    (1, 4096, 4096, 4096, 780.2),
    (1, 4096, 1024, 4096, 751.7),
    (1, 4096, 256, 4096, 398.9),
    (1, 4096, 4096, 2048, 735.6),
    (1, 4096, 512, 2048, 531.0),
    (1, 4096, 4096, 1024, 685.2),
    (1, 4096, 1024, 1024, 497.6),
    (1, 4096, 4096, 512, 551.8),
    (1, 4096, 2048, 256, 308.2),
    (4, 4096, 2048, 4096, 808.7),
    (1, 1024, 1024, 4096, 465.6),
    (4, 512, 4096, 4096, 732.6),
]
XLA_B200 = [
    (1, 4096, 4096, 4096, 1416.9),
    (1, 4096, 1024, 4096, 1204.9),
    (1, 4096, 256, 4096, 645.1),
    (1, 4096, 2048, 2048, 1170.0),
    (1, 4096, 4096, 1024, 1075.6),
    (1, 4096, 1024, 1024, 715.6),
    (4, 4096, 4096, 4096, 1670.5),
    (4, 4096, 1024, 4096, 1411.9),
    (4, 4096, 4096, 1024, 1350.5),
    (4, 2048, 2048, 2048, 1276.4),
]
XLA_B200_FP8 = [
    (1, 4096, 4096, 4096, 2765.0),
    (1, 4096, 1024, 4096, 1951.8),
    (1, 4096, 4096, 1024, 1895.4),
    (4, 4096, 4096, 4096, 3279.7),
    (4, 4096, 2048, 1024, 2400.8),
    (4, 2048, 2048, 4096, 2788.9),
]
# microsoft/vidur@683364e:data/profiling/compute/h100/meta-llama/Llama-2-70b-hf/mlp.csv, TFLOP/s from milliseconds.
VIDUR_H100 = [
    (1, 4096, 10240, 8192, 700.5),
    (1, 4096, 8192, 8192, 696.8),
    (1, 4096, 57344, 8192, 681.1),
    (1, 4096, 8192, 28672, 742.9),
    (1, 3840, 7168, 8192, 743.3),
    (1, 3840, 8192, 3584, 843.3),
    (1, 3840, 8192, 1024, 712.7),
    (1, 3840, 1280, 8192, 547.8),
    (1, 3328, 1280, 8192, 757.8),
]
# microsoft/vidur@2bb7a08:data/profiling/compute/a100/meta-llama/Meta-Llama-3-70B/mlp.csv
VIDUR_A100 = [
    (1, 32768, 57344, 8192, 226.5),
    (1, 32768, 8192, 28672, 244.3),
    (1, 32768, 10240, 8192, 269.6),
    (1, 32768, 8192, 8192, 247.8),
    (1, 32256, 7168, 8192, 245.7),
    (1, 32256, 8192, 3584, 230.3),
    (1, 32256, 8192, 1024, 207.6),
    (1, 30208, 1280, 8192, 237.0),
]
# MooreThreads/SimuMax@3005b17:configs/system/a100_pcie.json, share of 312 times 312: a card of 300 W.
SIMUMAX_A100_PCIE = [
    (1, 4096, 1536, 5120, 245.8),
    (1, 1536, 5120, 4096, 194.8),
    (1, 4096, 24576, 1536, 217.5),
    (1, 4096, 576, 5120, 155.0),
    (1, 4096, 5120, 16384, 233.8),
    (1, 4096, 102400, 5120, 235.6),
    (1, 4096, 4096, 4096, 225.1),
    (1, 4096, 1024, 4096, 142.8),
    (1, 4096, 4096, 1024, 192.2),
    (1, 4096, 8192, 8192, 228.6),
    (1, 57344, 8192, 4096, 221.5),
]
A100_PCIE = chip("a100").replace(matmul_share={"bf16": 0.93 * 252.9 / 312}, memory_bandwidth=1.94e12)  # MAMF of PCIe


@pytest.mark.parametrize(
    ("found", "dtype", "measured", "mean", "worst"),
    [
        pytest.param(cool("h100"), "bf16", XLA_H100, 0.105, 0.20, id="h100 short runs"),
        pytest.param(cool("h100"), "bf16", VIDUR_H100, 0.08, 0.20, id="h100 in a loop"),
        pytest.param(chip("a100"), "bf16", VIDUR_A100, 0.08, 0.20, id="a100 in a loop"),
        pytest.param(A100_PCIE, "bf16", SIMUMAX_A100_PCIE, 0.10, 0.36, id="a100 pcie"),
        pytest.param(cool("b200"), "bf16", XLA_B200, 0.08, 0.18, id="b200"),
        pytest.param(cool("b200"), "fp8", XLA_B200_FP8, 0.10, 0.18, id="b200 fp8"),
    ],
)
def test_predicted_matmul_times_are_near_the_measured(found, dtype, measured, mean, worst):
    errors = [
        abs(2e-12 * batch * m * n * k / estimate_matmul(found, m=m, n=n, k=k, dtype=dtype, batch=batch) / tflops - 1)
        for batch, m, n, k, tflops in measured
    ]
    assert sum(errors) / len(errors) < mean
    assert max(errors) < worst


# m, k, n, TFLOP/s of 16 bits whose rows of k are odd, on H100 (meta-pytorch/float8_experimental pull request 145).
ODD_H100 = [
    (1023, 1029, 2512, 71.2),
    (4095, 511, 10000, 94.8),
    (2047, 3073, 8192, 115.0),
    (511, 769, 7504, 83.8),
    (127, 4097, 12288, 86.8),
]


def test_predicted_matmul_times_on_odd_rows_are_near_the_measured():
    errors = [
        2e-12
        * m
        * n
        * k
        / estimate_matmul(cool("h100"), m=m, n=n, k=k, dtype="bf16", aligned=find_alignment(n, k))
        / tflops
        - 1
        for m, k, n, tflops in ODD_H100
    ]
    assert abs(sum(errors)) / len(errors) < 0.03
    assert max(map(abs, errors)) < 0.12


def test_rows_aligned_to_8_bytes_slow_a_matmul_as_measured():
    """9477 x 1152 on H100 at 1200 MHz: 588 elements in 130.6 us, 592 in 37.0 (m87-labs/kestrel pull request 143)."""
    slow = cool("h100").replace(peak_flops={name: peak * 1200 / 1755 for name, peak in chip("h100").peak_flops.items()})
    results = [
        1e6 * estimate_matmul(slow, m=9477, n=1152, k=k, dtype="bf16", aligned=find_alignment(1152, k))
        for k in (588, 592)
    ]
    assert results == pytest.approx([130.6, 37.0], rel=0.04)


def test_a_matmul_has_the_alignment_of_its_dims():
    assert [
        find_alignment(50257),
        find_alignment(12565, 2048),
        find_alignment(450, 2048),
        find_alignment(588, 1152),
    ] == [1, 1, 2, 4]
    assert find_alignment(2048, 50304) == find_alignment(8, 1800) == find_alignment(0, 64) == 8
    for dtype in ("fp8", "fp32"):  # whose kernels pad, or have words of 4 bytes
        sizes = {"m": 512, "n": 511, "k": 512, "dtype": dtype}
        assert estimate_matmul(chip("h100"), **sizes, aligned=1) == estimate_matmul(chip("h100"), **sizes)


# heads x sequences, tokens, head_dim, TFLOP/s, causal. H100: labels of the charts of arXiv:2407.08608, figure 5, as a
# third party transcribed them (16 k tokens, width 2048).
# A100: SimuMax as above, its share of 312 times 156; B200: MooreThreads/SimuMax@e691807, its share of 2250 times 1125,
# of a kernel in a loop by itself; in a step it has to share the power with matmuls. AMD: ROCm/aiter@0403bcd:op_tests/
# cpp/mha/README.md, 64 heads, the backward of MI300X with sums in fp32, that of MI355X in 16 bits.
@pytest.mark.parametrize(
    ("name", "kind", "backward", "measured", "mean", "worst"),
    [
        ("h100", "flash", False, [(256, 1024, 128, 410), (64, 4096, 128, 518), (16, 16384, 128, 539)], 0.06, 0.1),
        ("h100", "flash", False, [(256, 2048, 64, 334), (128, 4096, 64, 363), (32, 16384, 64, 388)], 0.2, 0.22),
        ("h100", "flash2", False, [(256, 1024, 128, 260), (64, 4096, 128, 319), (16, 16384, 128, 335)], 0.06, 0.1),
        ("h100", "flash2", False, [(512, 1024, 64, 229), (128, 4096, 64, 284), (32, 16384, 64, 299)], 0.06, 0.1),
        ("a100", "flash", False, [(64, 4096, 128, 185.2), (32, 4096, 128, 176.6), (8, 4096, 128, 121.2)], 0.1, 0.15),
        ("a100", "flash", True, [(64, 4096, 128, 156.8), (32, 4096, 128, 152.3), (8, 4096, 128, 119.0)], 0.06, 0.1),
        ("b200", "flash", False, [(128, 4096, 128, 1121), (64, 4096, 128, 980), (16, 32768, 128, 1311)], 0.09, 0.14),
        # full squares, so of long sequences, of which the diagonal is a small part: tritonbench pull request 171
        ("b200", "flash2", False, [(128, 8192, 128, 362), (128, 16384, 128, 331)], 0.07, 0.1),
        ("b200", "flash", True, [(128, 4096, 128, 936), (64, 4096, 128, 821), (16, 32768, 128, 981)], 0.06, 0.09),
        (
            "mi300x",
            "flash",
            False,
            [(512, 2048, 128, 452.0), (512, 8192, 128, 550.7), (64, 16384, 128, 541.6)],
            0.24,
            0.25,
        ),
        (
            "mi300x",
            "flash",
            True,
            [(512, 2048, 128, 347.9), (512, 8192, 128, 432.7), (64, 16384, 128, 412.0)],
            0.11,
            0.14,
        ),
        (
            "mi355x",
            "flash",
            False,
            [(512, 2048, 128, 963.2), (512, 8192, 128, 1312), (64, 16384, 128, 1392)],
            0.21,
            0.28,
        ),
        (
            "mi355x",
            "flash",
            True,
            [(512, 2048, 128, 817.5), (512, 8192, 128, 1068), (64, 16384, 128, 1163)],
            0.15,
            0.22,
        ),
    ],
)
def test_predicted_attention_times_are_near_the_measured(name, kind, backward, measured, mean, worst):
    errors = []
    for heads, tokens, head_dim, tflops in measured:
        flops = 2 * heads * tokens * tokens * head_dim
        seconds = estimate_attention(
            cool(name) if name in ("a100", "h100") else chip(name),
            flops=flops,
            tokens=tokens,
            keys=tokens,
            head_dim=head_dim,
            dtype="bf16",
            kind=kind,
            backward=backward,
        )
        errors.append(abs((2.5 if backward else 1) * flops / seconds / 1e12 / tflops - 1))
    assert sum(errors) / len(errors) < mean
    assert max(errors) < worst


# Causal, 32 heads of 128 forward, one sequence of 4,096 tokens and 16 of 1,024, FlashAttention-2 at the limit of the
# card's power: liangan1/GPU_travel@07d0469:performance/flash-attn/README.md, with 8 and with 32 heads of keys.
@pytest.mark.parametrize(("sequences", "tokens", "least", "most"), [(1, 4096, 0.862, 0.879), (16, 1024, 0.956, 0.978)])
def test_attention_of_an_a100_at_its_power_limit_takes_the_time_of_a_loop(sequences, tokens, least, most):
    sizes = {"flops": sequences * 32 * 2 * tokens * tokens * 128, "tokens": tokens, "keys": tokens, "head_dim": 128}
    milliseconds = 1e3 * estimate_attention(chip("a100"), **sizes, dtype="bf16", kind="flash2")
    assert 0.97 * least < milliseconds < 1.1 * most


# Causal, 64 heads of 128 and 8 of keys, in bf16: TFLOP/s of cuDNN 9.19 on GB200, and of 9.22 as below on GB300.
# NVIDIA/cudnn-frontend@df73764:benchmark/sdpa_benchmark_training/results/gb200_919_only_cudnn
@pytest.mark.parametrize(
    ("name", "backward", "measured"),
    [
        ("gb200", False, {4096: 1335, 8192: 1598, 16384: 1687, 32768: 1720}),
        ("gb200", True, {4096: 1132, 8192: 1311, 16384: 1402, 32768: 1473}),
        ("gb300", False, {4096: 1702, 8192: 1856, 16384: 1915}),
        ("gb300", True, {4096: 1248, 8192: 1435, 16384: 1507}),
    ],
)
def test_predicted_attention_on_blackwell_is_near_that_of_cudnn(name, backward, measured):
    for tokens, tflops in measured.items():
        flops = 2 * 64 * tokens * tokens * 128
        seconds = estimate_attention(
            cool(name), flops=flops, tokens=tokens, keys=tokens, head_dim=128, dtype="bf16", backward=backward
        )
        assert (2.5 if backward else 1) * flops / seconds / 1e12 == pytest.approx(tflops, rel=0.07), tokens


# Causal, 32,768 tokens of 32 heads of 64 in 16 bits: TFLOP/s forward of cuDNN on a GB300 at 1957 MHz.
# Dao-AILab/flash-attention pull request 2605
def test_small_heads_on_blackwell_take_the_time_of_their_exponentials():
    for tokens, tflops in {4096: 977, 8192: 1071, 16384: 1115}.items():
        sizes = {"flops": 2 * 32 * 32768 * tokens * 64, "tokens": tokens, "keys": tokens, "dtype": "bf16"}
        seconds = estimate_attention(cool("gb300"), **sizes, head_dim=64)
        assert sizes["flops"] / seconds / 1e12 == pytest.approx(tflops, rel=0.08), tokens
        assert estimate_attention(cool("gb300"), **sizes, head_dim=192) == pytest.approx(
            estimate_attention(cool("gb300"), **sizes, head_dim=128), rel=0.03
        )


# Causal, 128 heads of 192 dims of q and k and 128 of v: milliseconds of the backward of two sequences on GB200 and
# GB300 (cuDNN 9.22) and of one on H200 (9.19).
# NVIDIA/cudnn-frontend@3929da2:benchmark/sdpa_benchmark_training/results/dsv3 and h200_919_only_cudnn
@pytest.mark.parametrize(
    ("name", "sequences", "measured"),
    [
        ("gb200", 2, {4096: 3.383, 8192: 11.984, 16384: 50.424}),
        ("gb300", 2, {4096: 3.127, 8192: 11.074, 16384: 43.911}),
        ("h200", 1, {4096: 4.424, 8192: 16.162}),
    ],
)
def test_the_backward_of_wide_heads_takes_longer(name, sequences, measured):
    for tokens, milliseconds in measured.items():
        sizes = {"flops": sequences * 128 * tokens * tokens * (192 + 128), "tokens": tokens, "keys": tokens}
        seconds = estimate_attention(cool(name), **sizes, head_dim=192, dtype="bf16", backward=True)
        assert 1e3 * seconds == pytest.approx(milliseconds, rel=0.14), tokens


# Causal, 320 heads of 128 in 16 bits, three waves of the 108 multiprocessors of an A100, each of which takes a head at
# once: milliseconds of facebookresearch/xformers pull requests 389 (forward) and 479 (backward).
def test_flash_attention_1_in_cuda_is_slow_with_heads_of_128():
    for backward, tokens, milliseconds in [(False, 8096, 78.5), (True, 4096, 48.4)]:
        sizes = {"flops": 2 * 320 * tokens * tokens * 128, "tokens": tokens, "keys": tokens, "head_dim": 128}
        seconds = estimate_attention(cool("a100"), **sizes, dtype="bf16", kind="flash1", backward=backward)
        assert 1e3 * seconds == pytest.approx(milliseconds, rel=0.15), backward
        in_triton = estimate_attention(cool("a100"), **sizes, dtype="bf16", kind="flash1_triton", backward=backward)
        assert in_triton < 0.7 * seconds


# Two sequences of heads of 64 in 16 bits, milliseconds forward and backward of cuDNN 9.22 and, on H200, 9.19.
# NVIDIA/cudnn-frontend@3929da2:benchmark/sdpa_benchmark_training/results/gpt_oss and h200_919_only_cudnn
@pytest.mark.parametrize(
    ("name", "window", "heads", "measured"),
    [
        ("gb200", 128, 128, {2048: (0.109, 0.237), 4096: (0.210, 0.465), 16384: (0.822, 1.818)}),
        ("gb300", 128, 128, {2048: (0.104, 0.227), 4096: (0.202, 0.442), 16384: (0.790, 1.712)}),
        ("h200", 1024, 64, {4096: (0.358, 1.042), 16384: (1.499, 4.392)}),
    ],
)
def test_attention_with_a_window_takes_the_time_of_its_blocks(name, window, heads, measured):
    for tokens, milliseconds in measured.items():
        pairs = tokens * window - window * (window - 1) // 2
        sizes = {"flops": 4 * 2 * heads * pairs * 64, "tokens": tokens, "keys": 2 * pairs // tokens, "head_dim": 64}
        predicted = [1e3 * estimate_attention(chip(name), **sizes, dtype="bf16", backward=way) for way in (False, True)]
        assert predicted == pytest.approx(milliseconds, rel=0.07), tokens


# Causal, two sequences of 64 heads of 128 and 8 of keys: milliseconds in 16 bits and in fp8, of cuDNN 9.22.
# NVIDIA/cudnn-frontend@3929da2:benchmark/sdpa_benchmark_training/results/llama3.1
@pytest.mark.parametrize(
    ("name", "backward", "measured", "worst"),
    [
        ("gb200", False, {4096: (0.391, 0.305), 8192: (1.397, 1.074), 16384: (5.150, 4.084)}, 0.05),
        ("gb200", True, {4096: (1.198, 1.163), 8192: (4.127, 3.781), 16384: (16.554, 13.476)}, 0.12),
        ("gb300", False, {4096: (0.323, 0.217), 8192: (1.185, 0.759), 16384: (4.593, 2.880)}, 0.05),
        ("gb300", True, {4096: (1.101, 0.983), 8192: (3.832, 3.087), 16384: (14.593, 10.805)}, 0.12),
    ],
)
def test_attention_in_fp8_is_faster_by_what_was_measured(name, backward, measured, worst):
    for tokens, (in_16_bits, in_fp8) in measured.items():
        flops = 2 * 2 * 64 * tokens * tokens * 128
        sizes = {"flops": flops, "tokens": tokens, "keys": tokens, "head_dim": 128, "backward": backward}
        seconds = [estimate_attention(chip(name), **sizes, dtype=dtype) for dtype in ("bf16", "fp8")]
        assert seconds[0] / seconds[1] == pytest.approx(in_16_bits / in_fp8, rel=worst), tokens


def test_predicted_addition_times_are_near_the_measured():
    """``a + b`` of the files of vidur above: 4096 x 8192 on H100 in 62.4 us, 32768 x 8192 on A100 in 943 us.

    Of the 201 MB on H100 some never leave its cache of 50 MB: 3.2 TB/s would be 0.96 of HBM.
    """
    assert estimate_memory_bound(chip("h100"), moved_bytes=3 * 4096 * 8192 * 2) == pytest.approx(62.4e-6, rel=0.18)
    assert estimate_memory_bound(chip("a100"), moved_bytes=3 * 32768 * 8192 * 2) == pytest.approx(943e-6, rel=0.02)


def test_predicted_times_of_copies_and_elementwise_kernels_are_near_the_measured():
    """Bytes per second of tensors far larger than the cache, decimal TB/s.

    H200: TileLang's best unary and binary kernels (tile-ai/TileOPs pull request 537); float32 with two inputs in CUB,
    2^28 elements in 730.7 us (NVIDIA/cccl pull request 6921). B200: CUB's relu and add of 2^28 elements of fp16
    (NVIDIA/cccl pull request 7391). GB200: Tensor.copy_ of 508 MiB (pytorch/pytorch issue 191284).
    """
    for name, measured in (("h200", (3.85, 3.99, 4.41)), ("b200", (6.55, 6.72)), ("gb200", (6.74,))):
        sustained = 1e-12 * chip(name).memory_bandwidth * chip(name).bandwidth_share
        assert 0.93 * min(measured) < sustained < 1.08 * max(measured), name


def test_predicted_elementwise_kernels_on_mi300x_are_near_those_of_a_step():
    """Rows of 8192 in 16 bits: elements read and written of each kernel and its microseconds.

    Llama 2 70B, ZhangDanyang-AMD/Lumen@c410f2c:examples/llama2/results/mlperf/profiling: SwiGLU over 2 x 28672 columns
    and RMSNorm over 8192, forward and backward (lumen_latest_profile_summary.txt); Transformer Engine's casts to fp8
    with a transpose, over 8192 and 57344 columns (te_profile_results.txt).
    """
    swiglu, norm, cast = 28672, 8192, 57344
    kernels = (
        (3 * swiglu, 468.5),
        (5 * swiglu, 851.0),
        (2 * norm, 78.8),
        (3 * norm, 143.5),
        (2 * norm, 97.5),
        (2 * cast, 527.3),
    )
    moved = [2 * 8192 * elements for elements, _ in kernels]
    predicted = [1e6 * estimate_memory_bound(chip("mi300x"), moved_bytes=size) for size in moved]
    measured = [microseconds for _, microseconds in kernels]
    assert sum(predicted) == pytest.approx(sum(measured), rel=0.05)
    assert predicted == pytest.approx(measured, rel=0.25)


def test_predicted_matmuls_are_no_faster_than_the_best_measured_ones():
    """A step sustains less than the best that anyone measured in a sweep of shapes."""
    for name in list_names():
        for dtype, best in ROWS[name].efficiency.best.items():
            seconds = estimate_matmul(cool(name), m=8192, n=8192, k=8192, dtype=dtype)
            assert 0.8 * best < 2e-12 * 8192**3 / seconds < 0.94 * best, (name, dtype)


sizes = st.integers(1, 40_000)


@given(m=sizes, n=sizes, k=sizes, dtype=st.sampled_from(["bf16", "fp8", "fp32"]), name=st.sampled_from(list_names()))
def test_a_better_chip_is_never_slower(m, n, k, dtype, name):
    worse = chip(name)
    peaks = {known: 1.3 * peak for known, peak in worse.peak_flops.items()}
    seconds = estimate_matmul(worse, m=m, n=n, k=k, dtype=dtype)
    assert 0 < estimate_matmul(worse.replace(peak_flops=peaks), m=m, n=n, k=k, dtype=dtype) <= seconds
    more = worse.replace(memory_bandwidth=1.3 * worse.memory_bandwidth)
    assert estimate_matmul(more, m=m, n=n, k=k, dtype=dtype) <= seconds
    assert 2 * m * n * k / seconds < worse.sustained_flops(dtype)


@given(m=sizes, n=sizes, k=sizes, name=st.sampled_from(["a100", "h100", "b200", "mi300x"]))
def test_a_larger_matmul_takes_longer_but_for_quantisation(m, n, k, name):
    result = chip(name)
    seconds = estimate_matmul(result, m=m, n=n, k=k, dtype="bf16")
    assert estimate_matmul(result, m=m, n=n, k=k + 64, dtype="bf16") > seconds
    for larger in ({"m": m + 256, "n": n}, {"m": m, "n": n + 256}):
        assert estimate_matmul(result, k=k, dtype="bf16", **larger) > 0.999 * seconds


@given(m=st.integers(577, 20_000), n=st.integers(512, 60_000), k=st.integers(512, 30_000))
@pytest.mark.parametrize("name", ["a100", "h100", "b200"])
def test_one_more_token_never_costs_a_third_more(name, m, n, k):
    result = chip(name)
    one_more = estimate_matmul(result, m=m + 1, n=n, k=k, dtype="bf16")
    assert one_more < 1.35 * estimate_matmul(result, m=m, n=n, k=k, dtype="bf16")


def test_partly_filled_tiles_and_waves_slow_a_matmul():
    """H100 (vidur above): 3328 x 1280 fills 130 of 132 multiprocessors, 3840 x 1280 needs a second round."""
    result = chip("h100")
    full = 3328 * 1280 / estimate_matmul(result, m=3328, n=1280, k=8192, dtype="bf16")
    over = 3840 * 1280 / estimate_matmul(result, m=3840, n=1280, k=8192, dtype="bf16")
    assert over < 0.95 * full
    assert estimate_matmul(result, m=4097, n=8192, k=8192, dtype="bf16") == estimate_matmul(
        result, m=4110, n=8192, k=8192, dtype="bf16"
    )


def test_empty_matmuls_take_no_time_and_the_smallest_kernel_takes_some():
    result = chip("h100")
    assert (
        estimate_matmul(result, m=0, n=8, k=8, dtype="bf16")
        == estimate_matmul(result, m=8, n=8, k=0, dtype="bf16")
        == 0
    )
    assert (
        estimate_attention(result, flops=0, tokens=0, keys=0, head_dim=128, dtype="bf16")
        == estimate_memory_bound(result, moved_bytes=0)
        == 0
    )
    assert 2e-6 < estimate_memory_bound(result, moved_bytes=4) < 5e-6
    assert 2e-6 < estimate_matmul(result, m=1, n=1, k=1, dtype="bf16") < 6e-6
    assert 2e-6 < estimate_attention(result, flops=4, tokens=1, keys=1, head_dim=1, dtype="bf16") < 6e-6


@given(tokens=st.integers(1, 10**6), heads=st.integers(1, 256), head_dim=st.sampled_from([64, 128, 192, 256]))
def test_attention_grows_and_backward_costs_more_than_twice(tokens, heads, head_dim):
    result = chip("b200")

    def seconds(count: int, *, backward: bool) -> float:
        flops = 2.0 * heads * count * count * head_dim
        return estimate_attention(
            result, flops=flops, tokens=count, keys=count, head_dim=head_dim, dtype="bf16", backward=backward
        )

    forward = seconds(tokens, backward=False)
    assert seconds(tokens + 128, backward=False) > forward
    assert seconds(tokens, backward=True) > forward
    assert 2.0 * heads * tokens**2 * head_dim / forward < cool("b200").sustained_flops("bf16")
    assert math.isfinite(forward)
