"""What is paid around the experts, measured products of many experts, and whom CUDA graphs spare."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fivefold.adapter import Adapter
from fivefold.job import Job, get_recipe
from fivefold.layout.spec import Layout
from fivefold.machine.catalog import resolve
from fivefold.model.catalog import resolve as model
from fivefold.model.mixers.mamba2 import Mamba2
from fivefold.model.norms import NORMS
from fivefold.model.spec import Model
from fivefold.planner.counts.counts import Counts
from fivefold.planner.counts.operations.feedforward import _split_clamp
from fivefold.planner.counts.operations.launches import CLAMP_LAUNCHES, EXPERT_BIAS_LAUNCHES
from fivefold.planner.counts.operations.linear import add_casts, cast
from fivefold.planner.counts.operations.local_shapes import Local, LocalDegrees, get_local_degrees
from fivefold.planner.counts.operations.mixers.mamba2 import operations as list_mamba_2
from fivefold.planner.counts.operations.op import NormKind, Op, list_gradient_sums, matmul, norm
from fivefold.planner.predict import predict
from fivefold.planner.time.compute import OpTime, Prices, find_slowest_chip
from fivefold.planner.time.constants import PUBLISHED
from fivefold.planner.time.roofline import estimate_memory_bound
from fivefold.planner.time.unit_time import UnitTime
from fivefold.planner.time.units import Units
from fivefold.stack.catalog import build_stack


def machine(text: str):
    return resolve(text, local=Path("no/such/local.toml"))


def prices(**job: object) -> Prices:
    """Of Transformer Engine, whose kernels were measured."""
    return Prices(machine("b200"), ranks=1, job=Job(linears="separate", wgrad_accumulation="fused_dummy", **job))


def experts(count: int, rows: int, outof: int, into: int) -> Op:
    op = matmul("moe.experts.up", "x", "y", rows=rows, in_features=into, out_features=outof, width=2)
    return op._replace(batch=count)


# experts, rows of each, n, k, share of 2250 TFLOP/s forward and for the weight summed in fp32. MooreThreads/SimuMax
# @e691807:configs/system/b200_bf16_ceperm.json, group_matmul: Transformer Engine's GroupedLinear on B200.
GROUPED = [
    (20, 1232, 3072, 5120, 0.513, 0.328),
    (20, 1232, 5120, 1536, 0.397, 0.320),
    (40, 616, 5120, 1536, 0.326, 0.272),
    (32, 1024, 4096, 7168, 0.457, 0.289),
    (32, 1024, 7168, 2048, 0.384, 0.274),
    (64, 512, 7168, 2048, 0.427, 0.215),
    (40, 2460, 3072, 5120, 0.487, 0.417),
    (40, 2460, 5120, 1536, 0.445, 0.403),
]


def test_grouped_matmuls_of_many_experts_reach_the_measured_throughput():
    errors, weight_errors = [], []
    for count, rows, outof, into, forward, weight in GROUPED:
        flops = 2 * count * rows * outof * into
        time = prices(precision="bf16").operation(experts(count, rows, outof, into))
        errors.append(flops / time.forward / (forward * 2250e12) - 1)
        weight_errors.append(flops / time.weight / (weight * 2250e12) - 1)
    assert abs(sum(errors)) / len(errors) < 0.12
    assert max(map(abs, errors)) < 0.25
    assert abs(sum(weight_errors)) / len(weight_errors) < 0.15
    assert max(map(abs, weight_errors)) < 0.35


class CountAdds(TorchDispatchMode):
    """Count additions of tensors of ``shape``."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shape, self.count = shape, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        adds = func in (torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor)
        self.count += adds and tuple(args[0].shape) == self.shape
        return func(*args, **(kwargs or {}))


def test_gradients_of_tensors_with_several_readers_are_added_as_by_autograd():
    """In PyTorch: q, k and v read the first norm's output, and the stream is read by a norm and by a sum, twice."""
    torch.manual_seed(0)
    shape, width = (2, 8, 16), 16
    linears = [torch.nn.Linear(*sizes) for sizes in ((width, width),) * 4 + ((width, 64), (64, width))]
    to_q, to_k, to_v, to_out, up, down = linears
    stream = torch.randn(shape, requires_grad=True)
    normed = torch.nn.functional.layer_norm(stream, (width,))
    attended = torch.nn.functional.scaled_dot_product_attention(to_q(normed), to_k(normed), to_v(normed))
    middle = stream + to_out(attended)
    result = middle + down(torch.nn.functional.gelu(up(torch.nn.functional.layer_norm(middle, (width,)))))
    with CountAdds(shape) as adds:
        result.sum().backward()

    sizes = {"width": width, "heads": 1, "kv_heads": 1, "head_dim": width, "ffn": 64, "vocab": 32, "layers": 1}
    gpt = Model(name="gpt", norm="layernorm", mlp="plain", activation="gelu", **sizes)
    counts, layout = Counts(gpt, Job(sequence=8, global_batch=2, linears="separate")), Layout(mbs=2)
    run = counts.stage_work(layout)[0][1][0]
    ops = counts.list_ops(get_local_degrees(layout), run.name)
    sums = [(ops[index].name, n_bytes) for index, n_bytes in list_gradient_sums(ops)]
    assert sums == [(name, 2 * 8 * width * 2) for name in ("norm2", "attention.k", "attention.q", "norm1")]
    assert len(sums) == adds.count


def test_sums_of_gradients_are_kernels_that_take_their_bytes_at_streaming_bandwidth():
    counts, layout = Counts(model("llama3-8b"), Job(sequence=2048, global_batch=4, linears="separate")), Layout(mbs=4)
    run = counts.stage_work(layout)[0][1][0]
    ops, seconds, launches = counts.list_ops(get_local_degrees(layout), run.name), {}, {}
    for compiled in (False, True):
        h100 = Prices(machine("h100"), ranks=1, job=counts.job.replace(compile=compiled))
        alone = [h100.operation(op) for op in ops]
        times = h100.add_gradient_sums(ops, alone)
        seconds[compiled] = sum(time.backward for time in times) - sum(time.backward for time in alone)
        launches[compiled] = sum(
            time.backward_kernels - one.backward_kernels for time, one in zip(times, alone, strict=True)
        )
    stream = 4 * 2048 * 4096 * 2 / (0.86 * 3.35e12)
    assert seconds[False] == pytest.approx(5 * (3 * stream + 3e-6), rel=1e-3)  # also of gate and up
    assert seconds[True] == pytest.approx(5 * (stream + 3e-6), rel=1e-3)
    assert launches == {False: 5, True: 0}  # compiled, within the kernel that uses the sum


def test_gradients_of_biases_and_of_a_layer_norm_read_the_gradient_again():
    """Under PyTorch's autograd and in Megatron-LM; Transformer Engine's matmuls and norms make them by the way."""
    rows, width = 8192, 4096
    apart, fused = (
        Prices(machine("h100"), ranks=1, job=Job(linears="separate", wgrad_accumulation=kind))
        for kind in ("separate", "fused_dummy")
    )
    plain, biased = (
        matmul("mlp.up", "x", "y", rows=rows, in_features=width, out_features=width, width=2, bias=bias)
        for bias in (False, True)
    )
    stream = rows * width * 2 / (0.86 * 3.35e12)
    assert apart.operation(biased).weight - apart.operation(plain).weight == pytest.approx(stream + 3e-6, rel=1e-6)
    assert fused.operation(biased) == fused.operation(plain)
    kind = NormKind(norm=NORMS["layernorm"], bias=True, plain=False, fused=True)
    op = norm("norm1", "x", "y", rows=rows, dim=width, width=2, kind=kind)
    assert apart.operation(op).backward - fused.operation(op).backward == pytest.approx(2 * stream, rel=1e-6)
    plain_kernels = Prices(machine("h100"), ranks=1, job=Job(linears="separate", kernels="plain"))
    assert plain_kernels.operation(op) == apart.operation(op)  # PyTorch has a kernel for it


def test_forward_and_backward_of_experts_take_the_time_of_their_matmuls():
    """Each of the three products of an expert runs three times, also where dW of two runs while tokens are sent."""
    layout, job = Layout.parse("dp8 ep8 mbs1"), Job(sequence=4096, global_batch=8)
    step = predict(model=model("mixtral-8x7b"), machine=machine("a100:8"), layout=layout, job=job)
    flops = 2 * 3 * 4096 * 2 * 4096 * 14336 * 32  # tokens, experts of each, widths, layers; forward, dx and dW
    for name in ("gate", "up", "down"):
        seconds = step.time.parts[f"moe.experts.{name} forward"] + step.time.parts[f"moe.experts.{name} backward"]
        assert 0.5 < flops / seconds / 312e12 < 1, name  # of the data sheet's rate


def test_a_whole_graph_holds_fused_experts():
    op = experts(16, 2048, 1536, 2048)._replace(low_precision=True)
    apart, fused = (prices(precision="mxfp8", cuda_graphs=graphs).operation(op) for graphs in ("none", "full"))
    kernels = 16 * 3 - 1  # cast, scales and product of each expert
    assert apart.forward - fused.forward == pytest.approx(kernels * 3e-6, rel=1e-9)


def test_received_rows_are_sorted_unless_already_sorted():
    op = Op("moe.send", "message", ("x",), {"y": 10**9})
    sorts = prices().operation(op)
    assert sorts.forward == pytest.approx(2e9 / (0.85 * 8e12) + 3e-6, rel=1e-9)
    assert prices(dispatcher="fused").operation(op) == OpTime(0.0, 0.0, 0.0, *PUBLISHED.moe_kernels["moe.send"])


def test_token_permutation_takes_the_measured_time():
    """There and back in 0.37 ms on B200: 4096 tokens of 5120 to 6 of 160 experts (SimuMax as above)."""
    size = 4096 * 5120 * 2
    there = Op("moe.dispatch", "embedding", ("x",), {"y": 6 * size}, moved_bytes=12 * size)
    back = Op("moe.combine", "embedding", ("y",), {"x": size}, moved_bytes=7 * size)
    seconds = sum(prices().operation(op).forward for op in (there, back))
    assert seconds == pytest.approx(0.37e-3, rel=0.05)


def apply_biases(output, biases, rows, weights):
    """As megatron-core 0.16.1 does in TEGroupedMLP._apply_bias."""
    parts = zip(torch.split(output, rows), biases, torch.split(weights, rows), strict=True)
    return torch.cat([part + bias * weight for part, bias, weight in parts]).to(output.dtype)


class KernelCount(TorchDispatchMode):
    """Operations of PyTorch without views and allocations, and the bytes that they read and write."""

    VIEWS = ("view", "split", "expand", "detach", "slice", "alias", "empty", "t.", "unsqueeze", "as_strided", "select")

    def __init__(self):
        super().__init__()
        self.kernels = self.n_bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        if not str(function).removeprefix("aten.").lstrip("_").startswith(self.VIEWS):
            self.kernels += 1
            tensors = [leaf for leaf in tree_leaves((args, made)) if isinstance(leaf, torch.Tensor)]
            self.n_bytes += sum(tensor.nbytes for tensor in tensors)
        return made


@pytest.mark.parametrize("count", [1, 2, 16])
def test_biases_of_experts_launch_kernels_for_each_expert(count):
    rows, width = 512, 256
    output = torch.randn(count * rows, width, dtype=torch.bfloat16, requires_grad=True)
    weights = torch.rand(count * rows, 1, requires_grad=True)
    biases = [torch.randn(width, dtype=torch.bfloat16, requires_grad=True) for _ in range(count)]
    with KernelCount() as forward:
        biased = apply_biases(output.view_as(output), biases, [rows] * count, weights.view_as(weights))
    gradient = torch.randn_like(biased)
    with KernelCount() as backward:
        torch.autograd.grad(biased, (output, weights, *biases), gradient)
    (per_expert, shared), (backward_per_expert, backward_shared) = EXPERT_BIAS_LAUNCHES
    assert forward.kernels == per_expert * count + shared
    summed = 2 * count  # DDP's hook adds the gradients of the biases of both layers
    assert backward.kernels + summed == backward_per_expert * count + backward_shared
    counted = [kernels.n_bytes / output.numel() for kernels in (forward, backward)]
    assert counted == pytest.approx(PUBLISHED.expert_bias_bytes, rel=0.02)

    down = experts(count, rows, width, width)._replace(name="moe.experts.down", wgrad_numels=(width * width,))
    without, biased = (prices().operation(down._replace(wgrad_numels=numels)) for numels in ((1,), (1, 1)))
    assert biased.kernels - without.kernels == forward.kernels
    assert biased.backward_kernels - without.backward_kernels == backward.kernels + summed
    assert biased.forward - without.forward > forward.kernels * PUBLISHED.smallest_kernel_seconds


def test_a_clamped_activation_launches_what_megatron_runs():
    gate_up = torch.randn(512, 256, dtype=torch.bfloat16, requires_grad=True)
    with KernelCount() as forward:
        gate, up = gate_up.view_as(gate_up).chunk(2, -1)
        clamped = torch.cat((gate.clamp(min=None, max=7.0), up.clamp(min=-7.0, max=7.0)), -1)
    gradient = torch.randn_like(clamped)
    with KernelCount() as backward:
        torch.autograd.grad(clamped, gate_up, gradient)
    size = gate_up.nbytes / 2
    assert (forward.kernels + 1, backward.kernels + 1) == CLAMP_LAUNCHES  # and the compiled product
    clamping = Op("moe.experts.act", "activation", ("gu",), {"m": 100})._replace(moved_bytes=300)
    split = _split_clamp(clamping, size=100)
    moved = split.moved_bytes - clamping.moved_bytes, split.moved_backward_bytes - clamping.moved_backward_bytes
    assert moved == pytest.approx((100 * forward.n_bytes / size, 100 * backward.n_bytes / size), rel=0.02)
    assert split.blocks_host
    time = prices().operation(split)
    assert (time.kernels, time.backward_kernels) == CLAMP_LAUNCHES


def price_mamba_2(net: Mamba2, *, tokens: int, sequences: int = 1) -> tuple[Op, Prices]:
    """Return the core of a Mamba-2 by mamba-ssm's kernels, and prices on an H100."""
    job = Job(sequence=tokens // sequences, stack=build_stack("megatron-core"))
    nano = model("nemotron3-nano-30b-a3b").replace(mamba2=net)
    ops = list_mamba_2(Local(nano, job, LocalDegrees(sequences)), "x")
    return next(op for op in ops if op.name == "mixer.core"), Prices(machine("h100"), ranks=1, job=job)


# Tokens/s of mamba-ssm's five kernels on H100, forward: 128 heads of 64, a group, states of 128, chunks of 256.
# vllm-project/vllm pull request 27299, column Original
@pytest.mark.parametrize(("tokens", "per_second"), [(8192, 12.62e6), (16384, 12.92e6), (65536, 11.07e6)])
def test_a_scan_of_mamba_2_takes_the_measured_time(tokens, per_second):
    core, on_h100 = price_mamba_2(Mamba2(heads=128, head_dim=64, state=128), tokens=tokens)
    scan = on_h100.operation(core).forward - on_h100._price_convolution_and_gate(core)[0]
    assert scan == pytest.approx(tokens / per_second, rel=0.13)


# Milliseconds of 23 layers of Nemotron 3 Nano on an H100: convolutions and scan (category mamba) of ``passes`` forwards
# and a backward. GiscardBiamby/Automodel-scalingai-f26@2f74b28:mfu/results/*_nsys/nsys_breakdown.md:
# pack4096 of two micro-batches, final8 and final6, which computes the forward again
@pytest.mark.parametrize(
    ("tokens", "passes", "milliseconds"), [(4096, 1, 51.7 / 2), (12288, 1, 71.5), (32768, 2, 258.8)]
)
def test_a_layer_of_mamba_2_takes_the_profiled_time(tokens, passes, milliseconds):
    nano = model("nemotron3-nano-30b-a3b").mamba2
    core, on_h100 = price_mamba_2(nano, tokens=tokens, sequences=tokens // 4096)
    forward, backward, *_ = on_h100.operation(core._replace(gated=0))
    assert 1e3 * (passes * forward + backward) == pytest.approx(milliseconds / 23, rel=0.17)


@pytest.mark.parametrize("chip", ["h100", "b200"])
def test_convolutions_are_limited_by_their_instructions(chip):
    """A faster memory alone does not make them faster: 0.19 ms forward and 0.365 backward on H100."""
    core, _ = price_mamba_2(model("nemotron3-nano-30b-a3b").mamba2, tokens=12288, sequences=3)
    on_chip = Prices(machine(chip), ranks=1, job=Job(stack=build_stack("megatron-core")))
    forward, backward = on_chip._price_convolution_and_gate(core._replace(gated=0))
    scale = 132 / on_chip.chip.multiprocessors
    assert (1e3 * forward, 1e3 * (backward - forward)) == pytest.approx((0.19 * scale, 0.365 * scale), rel=0.03)
    gate = on_chip._price_convolution_and_gate(core._replace(convolved=0))
    assert 1e3 * gate[1] == pytest.approx(0.415 * scale, rel=0.03)


def test_scatter_add_takes_as_long_as_its_elements():
    """torchtitan's experts: the gradient of the gather, and the sum of what returns."""
    size = 4096 * 5120 * 2
    moved = {"moved_bytes": 12 * size, "moved_backward_bytes": 7 * size}
    there = Op("moe.dispatch", "embedding", ("x",), {"y": 6 * size}, **moved)
    back = Op("moe.combine", "embedding", ("y",), {"x": size}, moved_bytes=7 * size, moved_backward_bytes=12 * size)
    gathered, added = 12 * size / (0.85 * 8e12) + 3e-6, 6 * 4096 * 5120 / 32e9
    seconds = prices(token_permutation="scatter_add").operation
    assert seconds(there)[:2] == pytest.approx((gathered, added), rel=1e-9)
    assert seconds(back)[:2] == pytest.approx((added, gathered), rel=1e-9)


def test_the_loss_takes_the_measured_time():
    """4096 x 102400 logits, each read and written once forward and once backward: 2.4 TB/s on B200 (ibid.)."""
    moved = 2 * 2 * 4096 * 102_400
    time = prices().operation(Op("loss", "loss", ("x",), {}, moved_bytes=moved, moved_backward_bytes=moved))
    assert time.forward + time.backward == pytest.approx(2 * moved / 2.4e12, rel=1e-9)


def unit(chip: str, **job: object) -> UnitTime:
    result, layout = model("qwen3-30b-a3b"), Layout(dp=8, ep=8, zero=1, mbs=1)
    megatron = {"merged_projections": True, "linears": "separate"}
    job = {"precision": "mxfp8", "overlap": ("dp", "ep"), **megatron, **job}
    counts = Counts(result, Job(global_batch=64, **job))
    run = next(run for stage in counts.stage_work(layout) for run, _ in stage if "moe=True" in run.name.__repr__())
    return Units(counts, machine(f"{chip}:8")).unit(layout, run)


def test_cuda_graphs_shorten_a_layer_as_measured():
    """Ungraphed, 64 x 48 layers of Qwen3-30B take 27.1 to 28.3 s on B200 (Megatron-Bridge 26.02 and 25.11)."""
    by_graphs = [unit("b200", cuda_graphs=graphs) for graphs in ("none", "router", "partial", "full")]
    times = [sum((u.forward, u.backward, u.weight, *u.forward_exposed, *u.backward_exposed)) for u in by_graphs]
    assert times == sorted(times, reverse=True)
    assert times[0] == pytest.approx(9.0e-3, rel=0.2)
    assert times[-1] < 0.6 * times[0]


def test_paired_micro_batches_overlap_the_exchange_of_tokens():
    alone, paired = unit("b200", cuda_graphs="full"), unit("b200", cuda_graphs="full", pairs=True)
    assert sum(alone.forward_exposed) > 0
    assert sum(alone.backward_exposed) > 0
    assert sum(paired.forward_exposed) == sum(paired.backward_exposed) == 0
    assert paired.forward > alone.forward  # they share the chip


def test_an_odd_vocabulary_makes_the_head_four_times_slower() -> None:
    """GPT-2's 50257 against 50304; torch.compile pads it, and no other layer has rows of its width."""
    job: dict[str, object] = {"sequence": 4096, "global_batch": 8, "loss": "low_precision", "linears": "separate"}
    seconds: dict[object, dict[str, float]] = {}
    for vocab, compiled in ((50_304, False), (50_257, False), (50_257, True)):
        shape = model("llama3-8b").replace(vocab=vocab)
        counts, layout = Counts(shape, Job(**job, compile=compiled)), Layout(dp=8)
        units = Units(counts, machine("h100:8"))
        result = {
            run.name if isinstance(run.name, str) else "block": sum(units.unit(layout, run)[:3])
            for run, _ in counts.stage_work(layout)[0]
        }
        seconds[vocab, compiled] = result
    even, odd, padded = (seconds[key] for key in ((50_304, False), (50_257, False), (50_257, True)))
    assert odd["block"] == even["block"]
    assert 4 < odd["head"] / even["head"] < 7
    assert padded["head"] < 1.02 * even["head"]


@pytest.mark.parametrize(
    ("chip", "rows", "width", "milliseconds"),
    [
        ("h200", 16384, 4096, 0.236),
        ("h200", 8192, 8192, 0.236),
        ("h200", 4096, 6144, 0.087),
        ("gb200", 16384, 4096, 0.155),
        ("gb200", 8192, 8192, 0.163),
        ("gb200", 4096, 6144, 0.072),
    ],
)
def test_compiled_backwards_of_norms_take_the_measured_time(
    chip: str, rows: int, width: int, milliseconds: float
) -> None:
    """NVIDIA/cudnn-frontend@3929da2:benchmark/norms/results, torch_compile, RMSNorm in bf16, forward and backward."""
    kind = NormKind(norm=NORMS["rmsnorm"], bias=False, plain=False, fused=True)
    op = norm("norm1", "x", "y", rows=rows, dim=width, width=2, kind=kind)
    compiled, fused = (
        Prices(machine(chip), ranks=1, job=Job(stack=build_stack("torchtitan").replace(compile=compile))).operation(op)
        for compile in (True, False)
    )
    assert compiled.backward == pytest.approx(1e-3 * milliseconds, rel=0.25)
    assert compiled.forward == fused.forward


def test_transformer_engine_sums_weight_gradients_of_norms_over_heads_as_profiled() -> None:
    """``rmsnorm_bwd_finalize_general_kernel`` on H100, 4,096 tokens, heads of 128 (training/profiles@52ad575).

    79.5 us under tp2, with 16 heads of queries and 4 of keys on a rank, and 61.4 on average under tp8, with 4 and 1.
    """

    kind = NormKind(norm=NORMS["rmsnorm"], bias=False, plain=False, fused=True)

    def sum_microseconds(heads: int, *, dim: int = 128) -> float:
        op = norm("attention.q_norm", "q", "qn", rows=4096 * heads, dim=dim, width=2, kind=kind)
        seconds = Prices(machine("h100"), ranks=1, job=Job(stack=build_stack("megatron-core"))).operation(op).backward
        return 1e6 * (seconds - estimate_memory_bound(machine("h100").chip, moved_bytes=op.moved_backward_bytes))

    assert sum_microseconds(16) == sum_microseconds(4) == pytest.approx(79.5, rel=0.05)
    assert (sum_microseconds(4) + sum_microseconds(1)) / 2 == pytest.approx(61.4, rel=0.1)
    assert sum_microseconds(1, dim=4096) == pytest.approx(0, abs=1e-6)  # of a layer, by a kernel of its own


def test_odd_head_dims_slow_the_matmuls_of_attention() -> None:
    """Rows of scores are tokens wide, those of queries, keys and values a head: 450 is even, 451 odd."""
    costs = [
        prices(attention="unfused").operation(
            Op(
                "attention.scores",
                "attention",
                ("q", "k"),
                {},
                flops=2 * 8 * 2048 * 2048 * dim,
                shape=(1, 2048, dim),
                batch=8,
            )
        )
        for dim in (448, 450, 451)
    ]
    assert costs[0].forward < 0.6 * costs[1].forward < 0.6 * costs[2].forward
    assert costs[0].backward < 0.6 * costs[1].backward < 0.6 * costs[2].backward


def test_a_loss_in_chunks_is_all_backward() -> None:
    """No more products than with full logits; each chunk also reads and writes dW. Llama-3 8B, 8192 rows."""
    times: dict[str, UnitTime] = {}
    for loss in ("fused", "chunked"):
        counts = Counts(model("llama3-8b"), Job(sequence=8192, global_batch=8, loss=loss))
        layout = Layout(dp=8)
        (head,) = [run for run, _ in counts.stage_work(layout)[0] if run.name == "head"]
        times[loss] = Units(counts, machine("h100:8")).unit(layout, head)
    fused, chunked = times["fused"], times["chunked"]
    assert chunked.weight == 0
    assert chunked.forward < 0.05 * fused.forward  # a norm
    whole, apart = (sum(time[:3]) for time in (fused, chunked))
    traffic = 8 * 2 * 2 * 128256 * 4096 / 3.35e12
    assert whole < apart < whole + 1.5 * traffic + 0.1 * whole


def attend(sequences: int, tokens: int, *, pairs: int) -> OpTime:
    """Of 32 heads of 128, ``pairs`` of query and key in a sequence and head."""
    per_pair, prices = 4 * 128 * 32 * sequences, Prices(machine("h100:1"), ranks=1, job=Job())
    core = Op("attention.core", "attention", ("q", "k", "v"), {"a": 0}, shape=(sequences, tokens, 128), batch=32)
    return prices.operation(core._replace(flops=per_pair * tokens * tokens, causal_flops=per_pair * pairs))


@pytest.mark.parametrize("chunk", [128, 512, 2048, 8192])
def test_attention_in_chunks_takes_the_time_of_sequences_of_their_length(chunk: int) -> None:
    tokens, causal = 8192, chunk * (chunk + 1) // 2
    chunked, short = attend(1, tokens, pairs=tokens // chunk * causal), attend(tokens // chunk, chunk, pairs=causal)
    assert chunked.forward == pytest.approx(short.forward, rel=0.01)
    assert chunked.backward == pytest.approx(short.backward, rel=0.01)


def test_a_window_takes_the_time_of_a_causal_mask_with_as_many_keys() -> None:
    """Queries of a window of 128 see 128 keys, as those of sequences of 256 see on average."""
    tokens, window = 16384, 128
    pairs = window * (window + 1) // 2 + (tokens - window) * window
    windowed, causal = attend(1, tokens, pairs=pairs), attend(tokens // 256, 256, pairs=256 * 257 // 2)
    assert windowed.forward == pytest.approx(causal.forward, rel=0.02)
    assert windowed.backward == pytest.approx(causal.backward, rel=0.02)


def test_the_slowest_of_n_chips_equals_a_simulation():
    draw = np.random.default_rng(0)
    one = machine("h100:1").chip
    for ranks in (2, 8, 64, 1024):
        deviates = draw.standard_normal((4_000, ranks)).max(axis=1)
        slower = one.flops_per_joule["bf16"] / find_slowest_chip(machine(f"h100:{ranks}")).flops_per_joule["bf16"]
        assert slower - 1 == pytest.approx(PUBLISHED.chip_spread * deviates.mean(), rel=0.05)
    assert find_slowest_chip(machine("h100:1")) == one


def test_chips_without_a_power_limit_have_one_clock():
    cluster = machine("l40s:64")
    assert not cluster.chip.flops_per_joule
    assert find_slowest_chip(cluster) == cluster.chip


def test_matmuls_with_block_scales_take_as_much_longer_as_transformer_engine_measured() -> None:
    """A layer of 5B on B300, operands cast before: 6.81 ms with one scale, 7.16 in MXFP8 (``block_scales_share``)."""
    sizes = [(15872, n, k) for k, n in ((4096, 12288), (4096, 4096), (4096, 16384), (16384, 4096))]
    seconds = []
    for name in ("fp8", "mxfp8"):
        prices = Prices(machine("b300:1"), ranks=1, job=Job(precision=name, stack=build_stack("megatron-bridge")))
        shapes = [shape for m, n, k in sizes for shape in ((m, n, k), (m, k, n), (n, k, m))]
        seconds.append(sum(prices.matmul(*shape, dtype="fp8") for shape in shapes))
    assert seconds[1] / seconds[0] == pytest.approx(7.161 / 6.812, rel=0.01)


def test_row_scales_cast_each_operand_of_each_product() -> None:
    """By hand: 3 bytes an element along rows; along columns 2 for the scales, then 3 at a third of the bandwidth."""
    m, n, k = 8192, 14336, 4096
    chip = machine("h100:1").chip
    stack = build_stack("torchtitan").replace(kernels="fused")
    times = {}
    for name in ("bf16", "fp8", "fp8-rowwise", "fp8-rowwise-gw"):
        job = Job(precision=name, stack=stack)
        op = matmul("mlp.up", "x", "y", rows=m, in_features=k, out_features=n, width=2)
        op = op._replace(low_precision=job.precision.is_low_precision)
        if name.startswith("fp8-rowwise"):
            op = add_casts(op, Local(model("llama3-8b"), job, LocalDegrees(sequences=1)))
        times[name] = Prices(machine("h100:1"), ranks=1, job=job).operation(op)
    bandwidth = chip.memory_bandwidth * chip.bandwidth_share
    product = times["fp8"].forward / PUBLISHED.rowwise_matmul_share
    along, across = 3 / bandwidth, (2 + 3 / PUBLISHED.column_cast_share) / bandwidth
    rowwise, careful = times["fp8-rowwise"], times["fp8-rowwise-gw"]
    assert rowwise.forward == pytest.approx(product + along * (m * k + n * k), rel=0.02)
    assert rowwise.backward == pytest.approx(product + along * m * n + across * n * k, rel=0.02)
    sums = times["fp8"].weight - times["fp8"].forward  # the gradient is added in fp32
    assert rowwise.weight == pytest.approx(product + sums + across * (m * k + m * n), rel=0.04)
    assert careful.backward == pytest.approx(product + along * (m * n + n * k), rel=0.02)
    assert careful.weight == pytest.approx(times["bf16"].weight, rel=0.01)


@pytest.mark.parametrize(
    ("precision", "chip", "moved"),
    [
        ("fp8-delayed", "h100", 4),
        ("fp8-delayed", "b200", 3),
        ("fp8", "h100", 6),
        ("fp8", "b200", 5),
        ("fp8-tiles", "h100", 4),
        ("mxfp8", "b200", 4),
        ("nvfp4", "b200", 5),
        ("fp8-delayed", "mi355x", 4),
        ("fp8", "rtxpro6000", 6),
    ],
)
@pytest.mark.parametrize(("adapter", "products"), [(None, 2), (Adapter(rank=16), 1)])
def test_transformer_engine_casts_each_input_and_each_gradient_once(
    precision: str, chip: str, moved: int, adapter: Adapter | None, products: int
) -> None:
    """Bytes an element: 2 read for the cast, 2 more for the largest element, and one copy or two written.

    The second is for dW: not if the weight is frozen, nor with one scale where matmuls read operands in any layout.
    """
    m, n, k = 8192, 28672, 8192
    stack = build_stack("megatron-core").replace(wgrad_accumulation="separate")
    job = Job(precision=get_recipe(precision), stack=stack, adapter=adapter)
    prices = Prices(machine(f"{chip}:1"), ranks=1, job=job)
    copy = 0.5 if precision == "nvfp4" else 1
    saved = copy * (adapter is not None and not (chip == "b200" and job.precision.has_one_scale))
    op = matmul("mlp.down", "x", "y", rows=m, in_features=k, out_features=n, width=2)
    time = prices.operation(op._replace(backward_products=products, low_precision=True))
    dgrad = prices.matmul(m, k, n, dtype=job.precision.compute)
    expected = prices.memory_bound_seconds((moved - saved) * m * n)
    assert time.backward - dgrad == pytest.approx(expected, rel=0.02)

    input_cast = cast(Local(model("llama3-8b"), job, LocalDegrees(sequences=1)), "x", "x.cast", numel=m * k)
    time = prices.operation(input_cast)
    expected = prices.memory_bound_seconds((moved - saved) * m * k)
    assert time.forward == pytest.approx(expected, rel=0.04)  # with the scales of blocks
    assert time.backward == 0


def test_torchao_writes_both_copies_on_every_chip_and_reads_once() -> None:
    """pytorch/ao@36027d8:torchao/testing/training/roofline_utils.py: 2 bytes read and 2 written with fuse_with_prev."""
    job = Job(precision="fp8", stack=build_stack("torchtitan"))
    numel = 8192 * 28672
    for chip in ("h100", "b200"):
        prices = Prices(machine(f"{chip}:1"), ranks=1, job=job)
        input_cast = cast(Local(model("llama3-8b"), job, LocalDegrees(sequences=1)), "x", "x.cast", numel=numel)
        expected = prices.memory_bound_seconds(4 * numel)
        assert prices.operation(input_cast).forward == pytest.approx(expected, rel=0.01)


def test_fp8_gains_as_much_as_torchao_measured() -> None:
    """pytorch/ao@36027d8:docs/source/workflows/training.md: torchtitan with FSDP2 on 8 H100, over bf16; 47.8, 47.7 GB.

    Its runs recompute by operation, which ours cannot, here nothing.
    """
    steps = {}
    for name in ("bf16", "fp8-rowwise"):
        job = Job(precision=name, stack=build_stack("torchtitan"), sequence=8192, global_batch=8)
        steps[name] = predict(
            model=model("llama3-8b"), machine=machine("h100:8"), layout=Layout.parse("dp8 zero3 mbs1"), job=job
        )
    wide, low = steps.values()
    assert wide.time.step_seconds / low.time.step_seconds == pytest.approx(1.1005, abs=0.03)
    assert low.memory.peak_bytes / wide.memory.peak_bytes == pytest.approx(1.003, abs=0.01)


def test_attention_in_fp8_shortens_the_steps_of_jobs_in_fp8_alone() -> None:
    def compute_seconds(precision: str, *, in_fp8: bool) -> float:
        stack = build_stack("megatron-core").replace(fp8_attention=in_fp8)
        job = Job(precision=precision, stack=stack, sequence=16_384, global_batch=8)
        step = predict(model=model("llama3-8b"), machine=machine("b200:8"), layout=Layout.parse("dp8"), job=job)
        return step.time.compute_seconds

    assert compute_seconds("fp8", in_fp8=True) < 0.97 * compute_seconds("fp8", in_fp8=False)
    assert compute_seconds("bf16", in_fp8=True) == compute_seconds("bf16", in_fp8=False)
