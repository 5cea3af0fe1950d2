"""Kernels that accumulate gradients over micro-batches, next to those that PyTorch runs."""

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.machine.catalog import resolve as machine
from fivefold.model.catalog import resolve
from fivefold.planner.counts.accumulation import count_accumulated_bytes
from fivefold.planner.counts.counts import Counts
from fivefold.planner.time.gather_reduce import gather_reduce_seconds
from fivefold.planner.time.network import Network
from fivefold.stack.catalog import build_stack

WIDTH, RANKS = 64, 8
aten = torch.ops.aten
KERNELS = {
    aten.cat.default: "cat", aten._to_copy.default: "cast", aten.div_.Scalar: "divide", aten.div_.Tensor: "divide",
    aten.add_.Tensor: "add", aten.add.Tensor: "add",
}  # fmt: skip


class GradientBytes(TorchDispatchMode):
    """Count the bytes that kernels of each kind on ``numel`` elements read and write."""

    def __init__(self, *numels: int) -> None:
        super().__init__()
        self.numels, self.counts = numels, False
        self.bytes = defaultdict[tuple[str, int], int](int)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if self.counts and func in KERNELS and result.numel() in self.numels:
            operands = args[0] if func is aten.cat.default else [item for item in args if torch.is_tensor(item)]
            tensors = [item for item in (*operands, result) if item.ndim]
            self.bytes[KERNELS[func], result.numel()] += sum(item.numel() * item.element_size() for item in tensors)
        return result


@pytest.fixture
def world() -> Iterator[None]:
    """This process as one of ``RANKS``, whose messages return at once."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    yield
    dist.destroy_process_group()


def count_bytes(stack: str, layout: str, precision: str, *, model: str = "llama3-8b", **facts: object):
    """Return the counts of a job of three micro-batches, its layout, and the elements of a layer's gradients."""
    place = Layout.parse(layout)
    software = build_stack(stack).replace(**facts)
    job = Job(sequence=64, global_batch=3 * place.dp, precision=precision, stack=software)
    counts = Counts(resolve(model), job)
    name = counts.stage_work(place)[0][1][0].name
    return counts, place, name, counts.states(place, name).sums // job.precision.summed_bytes


@pytest.mark.usefixtures("world")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("precision", "reduced"), [("bf16", torch.float32), ("bf16-grad16", torch.bfloat16)])
def test_fsdp_concatenates_casts_and_divides_gradients_and_adds_shards(precision: str, reduced: torch.dtype) -> None:
    """Three backwards of PyTorch's FSDP move the bytes of a gradient's element that are counted."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False))
    trained = 2 * WIDTH * WIDTH
    half = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=reduced)
    sharded = FullyShardedDataParallel(model, mixed_precision=half, device_id=torch.device("cpu"))
    with GradientBytes(trained, trained // RANKS) as kernels:
        for _ in range(3):
            loss = sharded(torch.randn(4, WIDTH)).float().sum()
            kernels.counts = True
            loss.backward()
            kernels.counts = False
    moved = {kind: n_bytes / trained for kind, n_bytes in kernels.bytes.items()}
    copies = [("cat", trained), ("cast", trained), ("divide", trained), ("divide", trained // RANKS)]
    counts, layout, name, numel = count_bytes("llm-foundry", f"dp{RANKS} zero3 mbs1", precision)
    network = Network(machine("h100:8", local=Path("none")))
    copied = gather_reduce_seconds(
        counts, network, layout, name, host_link_bandwidth=1.0, copy_seconds=lambda n_bytes: n_bytes
    ).copy_in
    assert copied / numel == pytest.approx(sum(moved.get(copy, 0) for copy in copies) / 3, rel=1e-6)
    first, later = count_accumulated_bytes(counts, layout, name)
    assert (first, 2 * later / numel) == (0, pytest.approx(moved["add", trained // RANKS], rel=1e-6))


@pytest.mark.parametrize(("zero", "back"), [(1, 6), (3, 6 / 2)])
def test_a_bucket_of_16_bits_is_cast_to_fp32_and_back(zero: int, back: float) -> None:
    """Where gradients of 16 bits are reduced in fp32, what a rank gets of them is cast back."""
    counts, layout, name, numel = count_bytes("deepspeed", f"dp2 zero{zero} mbs1", "bf16-grad16", reduce_dtype="fp32")
    network = Network(machine("h100:8", local=Path("none")))
    time = gather_reduce_seconds(
        counts, network, layout, name, host_link_bandwidth=1.0, copy_seconds=lambda n_bytes: n_bytes
    )
    assert (time.copy_out, time.copy_in / numel) == (0, 6 + back)


@pytest.mark.parametrize("reduced", [torch.float32, torch.bfloat16])
def test_autograd_keeps_the_first_gradient_and_adds_each_later_one(reduced: torch.dtype) -> None:
    """Three backwards of a linear layer add twice; the planner counts the same bytes of an element on one rank."""
    weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=reduced))
    with GradientBytes(WIDTH * WIDTH) as kernels:
        kernels.counts = True
        for _ in range(3):
            (torch.randn(4, WIDTH, dtype=reduced) @ weight).sum().backward()
    precision = {torch.float32: "fp32", torch.bfloat16: "bf16-grad16"}[reduced]
    counts, layout, name, numel = count_bytes("fsdp2", "dp1 zero0 mbs1", precision)
    first, later = count_accumulated_bytes(counts, layout, name)
    assert (first, 2 * later / numel) == (0, kernels.bytes["add", WIDTH**2] / WIDTH**2)


@pytest.mark.parametrize(
    ("stack", "layout", "precision", "first", "later"),
    [
        ("megatron-core", "dp1 zero0 mbs1", "bf16", 0, 0),  # in the matmul
        ("megatron-lm", "dp2 zero0 mbs1", "bf16", 0, 0),  # since February 2022
        ("megatron-deepspeed", "dp2 zero0 mbs1", "bf16", 0, 6),  # in 16 bits
        ("internevo", "dp2 zero1 mbs1", "fp32", 0, 12),
        ("nanotron", "dp2 zero1 mbs1", "bf16", 2 + 8, 2 + 8),  # a buffer of zeros
        ("fsdp2", "dp2 zero3 mbs1", "bf16", 0, 12 / 2),  # a shard of two
        ("kempnerforge", "dp2 zero2 mbs1", "bf16", 0, 2 + 8),  # reduced once a step
        ("deepspeed", "dp2 zero3 mbs1", "bf16-grad16", 4, 4 + 6 / 2),  # copied to a bucket
        ("fivefold", "dp2 zero0 mbs1", "bf16", 0, 0),  # its kernels are priced with each operation
    ],
)
def test_where_gradients_are_added_depends_on_software_and_zero(
    stack: str, layout: str, precision: str, first: float, later: float
) -> None:
    counts, place, name, numel = count_bytes(stack, layout, precision)
    moved = count_accumulated_bytes(counts, place, name)
    assert [n_bytes / numel for n_bytes in moved] == pytest.approx([first, later], rel=1e-6)
