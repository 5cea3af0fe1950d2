"""The constants of the time model that are neither from a data sheet nor specific to a chip, as one record.

    Constants()                                     the published values, which every prediction uses
    Constants().replace(tile_fill_seconds=2e-6)     another record, as a fit or a sensitivity builds it
    about("tile_fill_seconds")                      its unit, meaning, source, range, and the sources it was fitted to

Values that the catalog gives for a chip or a link are varied on the machine's record instead. How much the score of the
published runs depends on each constant: docs/explanation/how-a-step-costs/constants.md; a test checks that its table
agrees with this record.
"""

from functools import cache
from typing import Any, NamedTuple

from pydantic import Field

from fivefold.record import Record

ALL = ("*",)  # an estimate, chosen or fitted with the scores of all sources known


class ConstantInfo(NamedTuple):
    """The unit, meaning, source and range of a constant.

    ``between``: the range that the constant could have, judged without the sources that it was fitted to, in its unit;
    of a table, as factors. ``fitted_to``: the sources of published runs or kernels that the value was chosen by;
    ``ALL``: an estimate; (): a data sheet, a paper, or kernels of others whose runs are not scored.
    """

    unit: str
    meaning: str
    source: str
    between: tuple[float, float]
    fitted_to: tuple[str, ...] = ()


_TREE_SHARES = (
    (1.0, 1.0, 1.0, 1.0, 0.9, 0.8, 0.7, 0.7, 0.7, 0.7, 0.6, 0.5, 0.4, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0),
    (0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.8, 0.7, 0.6, 0.6, 0.5, 0.5, 0.5, 0.5, 0.6, 0.7, 0.8, 0.7, 0.7, 0.8, 0.9, 0.9,
     1.0)
)  # fmt: skip


def make_constant(value: Any, *info: Any) -> Any:
    """Return the field of a constant with its published value; ``info``: the fields of ``ConstantInfo``."""
    field = Field(value)
    field.metadata.append(ConstantInfo(*info))
    return field


class Constants(Record):
    """Constants of kernels, of the host, of messages, and of offloading; ``describe_constant`` describes each."""

    # The host
    compiled_launch_share: float = make_constant(
        0.18,
        "of it",
        "the same under `torch.compile`",
        "no source; came with torchtitan and KempnerForge",
        (0.05, 1.0),
        ("torchtitan", "kempnerforge"),
    )
    host_device_exponent: float = make_constant(
        3.0,
        "exponent",
        "how host and device times combine: (device³ + host³)^⅓, above the larger of the two as both fluctuate",
        "**vTrain, one node**, where little hangs on it",
        (3.0, 8.0),
        ("vtrain",),
    )

    # Chips
    # Cards of one kind need unequal power for the same work, and those that a cap holds back run at unequal clocks: by
    # 8 % of the median on average between the whiskers of the box plots of five clusters (up to 22 %), which of a
    # normal distribution are 5.4 deviations apart. A step is as quick as the slowest of its ranks.
    chip_spread: float = make_constant(
        0.015,
        "of their mean",
        "standard deviation of FLOPs per joule between chips of one kind",
        "arXiv:2208.11035: 8 % of the median from whisker to whisker, average of five clusters; up to 22 %",
        (0.005, 0.03),
    )

    # Matmuls and attention
    # Of 320 heads of 128 over 4,096 and 8,096 tokens, causal, an A100 computes 68 TFLOP/s forward and 71 backward. With
    # heads of 64 it is the smallest loss that the paper states, 0.59 of FlashAttention-2, which computes 177 TFLOP/s
    # forward there (triton-lang/triton issue 1934) where 155 are predicted.
    flash1_shares: tuple[float, float] = make_constant(
        (0.65, 0.41),
        "of FlashAttention-2",
        "FlashAttention-1 with heads of up to 64 dims, and of more",
        "arXiv:2307.08691 §4.1: 0.33 to 0.59; heads of 128: facebookresearch/xformers pull requests 389 (0.36 forward)"
        " and 479 (0.43 backward)",
        (0.85, 1.15),
    )
    flash1_triton_share: float = make_constant(
        0.65,
        "of FlashAttention-2",
        "FlashAttention-1 in Triton",
        "arXiv:2307.08691 §4.1: 0.4 to 0.77",
        (0.4, 0.77),
    )
    # torchao's recipes with a scale for each row. dW and dx need casts with a scale for each column as well, which
    # torch.compile's kernels make across the rows of the tensor: 0.6 to 0.7 TB/s on an H100 where casts along the rows
    # reach 2.0 to 2.2.
    column_cast_share: float = make_constant(
        0.3,
        "of the bandwidth",
        "torch.compile's casts to fp8 with a scale for each column",
        "pytorch/pytorch issue 149982: 0.27 to 0.35 on H100; pytorch/ao@36027d8:torchao/testing/training/"
        "roofline_utils.py assumes 0.6",
        (0.27, 0.6),
    )
    # The gradient of a norm's weight sums over rows. torch.compile makes partial sums in a kernel of its own, which
    # reads the rows again: of x, dy and dx of an RMSNorm in bf16 it moves 1.6 to 1.8 TB/s on an H200 and 2.0 to 2.6 on
    # a GB200, where the forward reaches 3.4 to 4.2 and 4.3 to 6.2, and cuDNN's backward 2.8 to 3.8 and 4.2 to 6.2.
    compiled_norm_share: float = make_constant(
        0.4,
        "of the bandwidth",
        "the backward of norms that torch.compile generates",
        "NVIDIA/cudnn-frontend@3929da2:benchmark/norms/results, 2048 to 16384 tokens, widths 4096 to 8192: 0.38 to"
        " 0.44 on H200, 0.26 to 0.38 on GB200",
        (0.26, 0.55),
    )
    # On H100, heads of 128: 79.5 us for each of queries and keys with 2,112 blocks, and 61.4 on average of queries with
    # 2,112 and keys with 1,024 (rmsnorm_bwd_finalize_general_kernel).
    head_norm_block_seconds: float = make_constant(
        36e-9,
        "s",
        "adding one thread block's sum of the gradient of a weight, in Transformer Engine's norms of queries and keys",
        "kernels of two profiled runs of qwen3_layouts, on H100 (BastiaanGroot/ML-Infrastructure-Engineer@52ad575): 36"
        " and 42",
        (34e-9, 43e-9),
        ("qwen3_layouts",),
    )
    rowwise_matmul_share: float = make_constant(
        0.95,
        "of one scale",
        "fp8 matmuls with a scale for each row and column (PyTorch's CUTLASS kernel)",
        "pytorch/pytorch issue 147971: most shapes 0.9 to 1.0, a tail down to 0.5",
        (0.9, 1.0),
    )
    # Transformer Engine's linears of a 5B layer on a B300, operands cast before: 6.81 ms with one scale, 7.16 in MXFP8.
    block_scales_share: float = make_constant(
        0.95,
        "of one scale",
        "fp8 matmuls with a scale for each block of 32 (MXFP8)",
        "NVIDIA/TransformerEngine@8f2e635:docs/examples/gemm_profiling/gemm_profiling.rst: 0.91 forward, 0.97 backward",
        (0.9, 1.0),
    )
    smallest_kernel_seconds: float = make_constant(
        3e-6,
        "s",
        "the smallest kernel",
        "small matmuls of XLA's and vidur's tables (`tests/planner/time/test_roofline.py`)",
        (2e-6, 5e-6),
    )
    tile_fill_seconds: float = make_constant(1e-6, "s", "a tile's start and end", "the same tables", (0.5e-6, 2e-6))
    # Tensor memory and asynchronous copies need rows of 16 bytes. For others cuBLAS only has kernels with Ampere's
    # instruction, which on a newer chip reach the rate of FlashAttention-2 there (``Chip.flash2_share``), and less,
    # because they copy words of 2 or 4 bytes. Keys: alignment of the rows in elements of 16 bits.
    unaligned_shares: dict[int, float] = make_constant(
        {1: 0.22, 2: 0.36},
        "of FlashAttention-2's share",
        "matmuls whose rows start at odd elements of 16 bits, and at even ones that are no multiple of 8",
        "H100: five shapes at 71 to 115 TFLOP/s (meta-pytorch/float8_experimental pull request 145); 588 against"
        " 592 elements (m87-labs/kestrel pull request 143)",
        (0.7, 1.4),
    )
    last_wave_loss: float = make_constant(
        0.3,
        "of a wave",
        "share of the idle part of a last wave that costs time; kernels recover the rest by their choice of tiles",
        "no source; the same tables are met with it",
        (0.05, 1.0),
    )
    matmul_tiles: tuple[tuple[int, int, int, float], ...] = make_constant(  # rows, columns, parts of k, relative speed
        ((128, 256, 1, 1.0), (128, 128, 1, 0.9), (64, 128, 1, 0.6), (128, 128, 4, 0.9)),
        "of the largest",
        "speed of smaller tiles",
        "no source; the same tables are met with them",
        (0.8, 1.1),
    )
    attention_tail_rows: float = make_constant(
        64.0,
        "queries",
        "attention's last rows, when the other multiprocessors have finished",
        "no source; tables of attention (arXiv:2407.08608, SimuMax) are met with it",
        (8.0, 128.0),
    )
    attention_diagonal_keys: float = make_constant(
        400.0,
        "keys",
        "lost per query, forward: masked tiles, and the start of the kernel's pipeline",
        "likewise",
        (100.0, 600.0),
    )
    attention_backward_diagonal_keys: float = make_constant(500.0, "keys", "and backward", "likewise", (100.0, 800.0))
    # With a window of 128, cuDNN's kernels take 7.1 to 7.9 us forward and 15.5 to 17.1 backward for each of the blocks
    # that follow one another on a multiprocessor, on GB200 as on GB300, in sequences of 2,048 to 16,384 tokens.
    attention_block_seconds: tuple[float, float] = make_constant(
        (7.4e-6, 16.3e-6),
        "s",
        "attention's block of 256 queries, however few its keys, forward and backward",
        "NVIDIA/cudnn-frontend@3929da2:benchmark/sdpa_benchmark_training/results/gpt_oss, cuDNN 9.22",
        (0.9, 1.1),
    )
    softmax_dim: float = make_constant(
        40.0, "of head dim", "what the softmax of a score takes", "likewise", (20.0, 64.0)
    )
    # Heads of 192 dims of q and k and 128 of v do 1057, 1193 and 1134 TFLOP/s where heads of 128 do 1148, 1332 and 1328
    # (GB200; 4,096, 8,192 and 16,384 tokens), of 2.6 instead of 2.5 times the forward's FLOPs, which are counted.
    wide_backward_share: float = make_constant(
        0.85,
        "of heads of 128",
        "attention's backward with heads of more than 128 dims",
        "NVIDIA/cudnn-frontend@3929da2:benchmark/sdpa_benchmark_training/results, dsv3 next to llama3.1, 2,048 to"
        " 16,384 tokens: 0.82 to 0.92 on GB200 and GB300, 0.79 to 0.91 on H200",
        (0.79, 0.92),
    )

    # Other kernels
    # On B200 a matmul that adds to the gradient sums takes longer by 0.37 to 0.68 of reading and writing them (fp32
    # and 16-bit sums of MooreThreads/SimuMax@e691807:configs/system/b200_bf16_ceperm.json).
    hidden_sums_share: float = make_constant(
        0.5,
        "of the bytes",
        "of adding gradients, next to the matmul",
        "SimuMax's kernel tables: 0.32 to 0.63",
        (0.3, 0.65),
        ("simumax_b200",),
    )
    # Transformer Engine permutes tokens by expert and back in 0.37 ms on B200 (4096 tokens of width 5120, top-6 of 160
    # experts); their 0.8 GB at streaming bandwidth would take 0.11 (ibid., permute_fwd and permute_bwd, with the bytes
    # of SimuMax:simu_tools/efficency_test).
    permutation_bytes: float = make_constant(
        3.1, "times", "permuting tokens to experts", "SimuMax, one shape", (2.0, 5.0), ("simumax_b200",)
    )
    # torch.scatter_add of 16-bit tensors adds by atomics: 67 million elements in 2.07 ms on H20, at random indices, and
    # 4 billion in 84 ms on B200, where half of the rows are added to one.
    scatter_add_elements_per_second: float = make_constant(
        32e9,
        "elements/s",
        "torch.scatter_add in 16 bits",
        "flagos-ai/FlagGems pull request 4502: 32e9 on H20; pytorch/pytorch pull request 182818: 23 to 48e9 on B200",
        (20e9, 50e9),
    )
    # The five kernels of mamba-ssm's scan in Triton: 12.6e6, 12.9, 11.8, 11.1, 10.7 and 10.8e6 tokens/s of 128 heads of
    # 64, in chunks of 256, on an H100 with 8,192 to 262,144 tokens. Their bytes take 35 us of each 1,024 tokens, the
    # rest is 68.2 GFLOP of each 8,192 at 142e12 to 192e12 FLOP/s. Kernels of delta rules, whose bytes are counted once
    # for each tensor, have the rate that those of Mamba-2 have if theirs are: 120e12 to 158e12.
    scan_flops_per_second: tuple[float, float] = make_constant(
        (1.25e12, 1.0e12),
        "FLOP/s per multiprocessor",
        "matmuls of scans in Triton: of Mamba-2, and of delta rules",
        "vllm-project/vllm pull request 27299: 1.1e12 to 1.45e12 on H100, forward; delta rules: our assumption",
        (0.8, 1.2),
    )
    # Of 6,144 columns on H100 SXM, 12,288 and 32,768 tokens of Nemotron 3 Nano: 0.190 and 0.532 ms forward, 0.365 ms
    # backward of 12,288. That is 1.7 and 0.9 elements in each cycle of 1.75 GHz. On an RTX PRO 6000, from its cache,
    # the backward computes 1.0: 4 x 1,024 x 4,128 elements in 35 us on 188 multiprocessors at 2.6 GHz
    # (Dao-AILab/causal-conv1d pull request 88).
    convolved_elements_per_second: tuple[float, float] = make_constant(
        (2.95e9, 1.57e9),
        "elements/s per multiprocessor",
        "causal-conv1d with channels last, forward and backward",
        "GiscardBiamby/Automodel-scalingai-f26@2f74b28:mfu/results, profiles of final8 and final6: 2.87e9 to 3.0e9, and"
        " 1.57e9",
        (0.85, 1.15),
    )
    # 4,096 columns, 12,288 tokens: 0.415 ms of _layer_norm_bwd_kernel
    gated_elements_per_second: float = make_constant(
        0.92e9,
        "elements/s per multiprocessor",
        "the backward of mamba-ssm's norm with a gate, in Triton",
        "ibid., final8",
        (0.8e9, 1.1e9),
    )
    # One thread block per row: it reads and writes logits at 2.4 TB/s on B200 (ibid., ce_fusion).
    loss_bytes_per_second: float = make_constant(
        2.4e12 / 148,
        "bytes/s per multiprocessor",
        "fused cross-entropy",
        "SimuMax, one shape",
        (10e9, 25e9),
        ("simumax_b200",),
    )
    # Operations that megatron-core 0.16.1 runs around its experts, counted by a dispatch mode of PyTorch without views
    # and allocations, or in its code: top-k and auxiliary loss with its log (router.py, moe_utils.py); token counts,
    # copies of them to the host, and the permutation; a second message, of the routing weights, and sorts by expert;
    # sums (token_dispatcher.py).
    moe_kernels: dict[str, tuple[float, float]] = make_constant(
        {
            "moe.topk": (21, 10),
            "moe.dispatch": (17, 4),
            "moe.send": (3, 3),
            "moe.return": (1, 1),
            "moe.combine": (2, 1),
        },
        "kernels",
        "around the experts, forward and backward",
        "counted in megatron-core 0.16.1: all-to-all dispatcher, auxiliary loss, nothing fused",
        (0.75, 1.25),
    )
    # Per element of the experts' output: product with the fp32 routing weight, sum, concatenation over experts and cast
    # back (TEGroupedMLP._apply_bias in NVIDIA/Megatron-LM:megatron/core/transformer/moe/experts.py), and their
    # backwards by autograd, which joins the gradients of the experts' rows again.
    expert_bias_bytes: tuple[float, float] = make_constant(
        (28, 40),
        "bytes per element",
        "experts' biases in Megatron, forward and backward",
        "counted in its code",
        (0.75, 1.25),
    )
    # Transformer Engine runs one matmul per expert; each costs the smallest kernel on top of its share of one large
    # matmul: 2.7 us on average of 17 products of 20 to 160 experts with 154 to 2460 rows (SimuMax, group_matmul). In
    # fp8 two more kernels come before it: they cast an operand and reorder its scales.
    expert_kernels: tuple[float, float] = make_constant(
        (1, 3),
        "kernels",
        "per expert, 16 bits and fp8",
        "SimuMax's kernel tables; the fp8 figure is an estimate",
        (0.5, 2.0),
        ("simumax_b200",),
    )
    # On GB200, Transformer Engine's two layers of 64 experts take the host 1.2 ms forward and 2.1 ms backward, where
    # their kernels are small. At 95 us for an operation (``catalog.GRACE_LAUNCH_SECONDS``) that is one for each product
    # of a layer, and one for every 12 or 14 experts.
    experts_per_launch: int = make_constant(
        12,
        "experts",
        "launched for one operation's host time",
        "NVIDIA/TransformerEngine issue 2897: 12 forward, 14.1 backward",
        (9.0, 18.0),
    )

    # Messages
    hidden_message_slowdown: float = make_constant(
        0.08,
        "of its time",
        "what a hidden message takes from compute: multiprocessors and bandwidth",
        "no source of its own: a fit to the published runs with a prior",
        (0.02, 0.3),
        ALL,
    )
    collective_launch_seconds: float = make_constant(
        20e-6,
        "s",
        "a collective's start",
        "all-reduces of 32 KiB on A100 and H200; SimuMax: 22 to 26 µs",
        (10e-6, 30e-6),
    )
    simple_step_seconds: float = make_constant(
        8e-6,
        "s",
        "a step of a large message (NCCL's protocol Simple)",
        "SimuMax: 8 to 9 µs on B200",
        (5e-6, 12e-6),
        ("simumax_b200",),
    )
    low_latency_share: float = make_constant(
        0.5, "of the rate", "NCCL's protocol LL in a node", "NCCL: a flag with every word", (0.4, 0.6)
    )
    low_latency_far_share: float = make_constant(
        0.25,
        "of the rate",
        "LL between nodes",
        "NVIDIA/nccl@b647562:src/graph/tuning.cc: a quarter in a ring, 1/3.8 in a tree",
        (0.25, 0.34),
    )
    # Two nodes: 22.5 GB/s with CPUs of AMD, 39 with those of Intel; more: 19.0 and 20.4.
    low_latency_rates: tuple[float, float] = make_constant(
        (29.6e9, 19.7e9),
        "bytes/s",
        "the most that LL reaches between two nodes, and between more, with all NICs of a node",
        "ibid., `llMaxBws`, the geometric means of those for CPUs of AMD and of Intel",
        (0.76, 1.32),
    )
    tree_rate_share: float = make_constant(
        0.92,
        "of the rate",
        "what a tree reaches of the largest messages",
        "ibid., `busBw*.92`; times 0.85 where a GPU of a node has both of its children",
        (0.78, 1.0),
    )
    tree_shares: tuple[tuple[float, ...], tuple[float, ...]] = make_constant(
        _TREE_SHARES,
        "of the rate",
        "what a tree reaches of messages of 64 bytes, 128, 256, … under LL (20 sizes) and Simple (24); between two"
        " sizes straight, above them all of it",
        "NVIDIA/nccl@b647562:src/graph/tuning.cc, `treeCorrectionFactor`: NCCL's own correction of its model, as"
        " measured",
        (0.8, 1.1),
    )
    # Reduce-scatter on H100: bus bandwidth 360, 345, 320, 300, 280, 260 GB/s on 4, 8, … 128 nodes (NVIDIA/nccl issue
    # 1229). For 8 GiB, the steps of a ring explain most of the loss at 128 nodes, this constant the rest.
    crowding: float = make_constant(
        0.02,
        "per doubling",
        "bandwidth between nodes that is lost with each doubling of the nodes",
        "no source of its own: the loss in NVIDIA/nccl issue 1229 that the latency of a ring's steps does not explain",
        (0.005, 0.05),
    )
    gloo_gather_factor: float = make_constant(
        1.5,
        "times",
        "gloo's all-gather, for it sends in two halves of which one goes one way at a time",
        "2 MiB between two hosts that come 1 to 10 ms apart: 1.50 times the wire's seconds at 100 Mbit/s, 1.51 at"
        " 1 Gbit/s; where they come at once 1.1 to 1.5",
        (1.0, 2.0),
    )
    gloo_exchange_factor: float = make_constant(
        2.0,
        "times",
        "gloo's all-to-all: it sends before it asks, over one connection, so that the second way waits for the first",
        "likewise: 1.97 and 1.92; where both come at once 1.05 to 2",
        (1.0, 2.0),
    )

    # Offloading
    host_link_share: float = make_constant(
        0.8, "of the data sheet", "PCIe under offloading", "an assumption; no row offloads", (0.6, 0.9)
    )
    host_link_bandwidth: float = make_constant(
        32e9, "bytes/s", "a rank's PCIe 4 link, one direction", "data sheet", (16e9, 64e9)
    )
    host_memory_bandwidth: float = make_constant(
        40e9, "bytes/s", "host memory of one rank of eight", "an assumption", (20e9, 80e9)
    )


PUBLISHED = Constants()


@cache
def describe_constant(name: str) -> ConstantInfo:
    """Return the unit, meaning, source and range of the constant ``name``."""
    return next(
        annotation for annotation in Constants.model_fields[name].metadata if isinstance(annotation, ConstantInfo)
    )
