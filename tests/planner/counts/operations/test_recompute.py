"""What runs again."""

from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.flop_counter import FlopCounterMode

from fivefold.job import Job
from fivefold.model.catalog import resolve
from fivefold.model.spec import Model
from fivefold.planner.counts.counts import Counts
from fivefold.planner.counts.operations.local_shapes import LocalDegrees
from fivefold.planner.counts.operations.recompute import UnitOperations
from fivefold.stack.catalog import build_stack

MODEL = resolve("llama3-8b")


def block(job: Job, recomputed: str, *, model: Model = MODEL) -> UnitOperations:
    counts = Counts(model, job)
    asked = frozenset(recomputed.split("+")) if recomputed else frozenset[str]()
    return counts.unit(LocalDegrees(sequences=1, recomputed=asked), next(iter(counts.example)))


def list_recomputed(*, early_stop: bool, recomputed: str = "layer") -> list[bool]:
    return [op.recomputed for op in block(Job(early_stop=early_stop), recomputed).ops]


def saved_bytes(unit: UnitOperations) -> int:
    """Bytes that the backward finds."""
    names = {name for op in unit.ops for name in op.keeps} - unit.dropped
    return sum(size for op in unit.ops for name, size in op.writes.items() if name in names)


def test_an_early_stop_leaves_out_what_makes_nothing_that_the_backward_reads() -> None:
    whole, stopped = list_recomputed(early_stop=False), list_recomputed(early_stop=True)
    assert all(whole)
    assert stopped == [True] * (len(whole) - 2) + [False] * 2  # all but the down-projection and its sum


def test_everything_before_the_last_operation_that_saves_a_tensor_runs_again() -> None:
    ops = block(Job(), "layer", model=MODEL.replace(residual_weights=True)).ops
    recomputed = {op.name: op.recomputed for op in ops}
    assert recomputed["mlp.down"]  # its result is not needed, but the factors of the stream save a tensor after it
    assert not recomputed["mlp.stream"]
    assert not recomputed["mlp.add"]


@pytest.mark.parametrize("words", [{"compile": True}, {"stack": "torchtitan"}])
def test_compiled_blocks_recompute_only_what_their_backward_reads(words: dict[str, Any]) -> None:
    job, stopping = (Job.read(words | {"early_stop": early_stop}, origin="job") for early_stop in (False, True))
    assert block(job, "layer") == block(stopping, "layer")
    assert block(job.replace(compile=False), "layer") != block(stopping.replace(compile=False), "layer")


@pytest.mark.parametrize("early_stop", [True, False])
def test_torch_repeats_the_last_matmul_of_an_eager_block_that_does_not_stop_early(early_stop: bool) -> None:
    with FlopCounterMode(display=False) as counter:
        _build_checkpointed_block(early_stop=early_stop)(torch.ones(4, 8, requires_grad=True)).sum().backward()
    assert counter.get_total_flops() // (2 * 4 * 8 * 8) == 3 + 6 + (2 if early_stop else 3)


@pytest.mark.long  # of torch itself
@pytest.mark.slow
@pytest.mark.parametrize("early_stop", [True, False])
def test_torch_compiles_a_block_without_its_last_matmul_in_the_backward(early_stop: bool) -> None:
    matmuls = []

    def count_matmuls(graph: torch.fx.GraphModule, _inputs: object) -> Any:
        matmuls.append(sum(str(node.target).startswith("aten.mm") for node in graph.graph.nodes))
        return make_boxed_func(graph.forward)

    torch.compiler.reset()
    checkpointed = _build_checkpointed_block(early_stop=early_stop)
    checkpointed.compile(
        backend=aot_autograd(fw_compiler=count_matmuls, partition_fn=min_cut_rematerialization_partition)
    )
    checkpointed(torch.ones(4, 8, requires_grad=True)).sum().backward()
    assert matmuls == [3, 6 + 2]


def _build_checkpointed_block(*, early_stop: bool) -> torch.nn.Module:
    """Return three linear layers with activations between them, all recomputed."""
    first, second, third = (torch.nn.Linear(8, 8, bias=False) for _ in range(3))
    block = torch.nn.Sequential(first, torch.nn.Sigmoid(), second, torch.nn.Sigmoid(), third)
    return checkpoint_wrapper(block, preserve_rng_state=False, early_stop=early_stop)


def test_recomputed_operation_runs_again_although_its_output_is_saved() -> None:
    assert list_recomputed(early_stop=True, recomputed="norm") == list_recomputed(early_stop=False, recomputed="norm")


@pytest.mark.parametrize("recomputed", ["norm", "act", "norm+act"])
def test_casts_of_what_is_recomputed_cheaply_are_made_again_with_it(recomputed: str) -> None:
    """Megatron's set_save_original_input: of the norms' and the activation's outputs nothing stays in fp8 either."""
    job = Job(stack=build_stack("megatron-core"), precision="fp8", sequence=1024)

    of = {"norm": 2 * 1024 * (MODEL.width + 4) + 2 * 4, "act": 1024 * MODEL.ffn + 4}
    freed = sum(of[item] for item in recomputed.split("+"))
    assert saved_bytes(block(job, "")) - saved_bytes(block(job, recomputed)) == freed


def test_deepseek_keeps_what_swiglu_reads_in_fp8_and_what_attention_makes_in_twelve_bits() -> None:
    """Gate and up: 1 byte instead of 2, and a scale per 128; the output and its cast: 1.5 instead of 3."""
    wide = Job(stack=build_stack("megatron-core"), precision="fp8-tiles", sequence=1024)
    narrow = wide.replace(stack=wide.stack.replace(low_precision_saved=("activation", "attention")))
    gates, heads = 1024 * 2 * MODEL.ffn, 1024 * MODEL.heads * MODEL.head_dim
    freed = {job: saved_bytes(block(job, "")) for job in (wide, narrow)}
    assert freed[wide] - freed[narrow] == gates - 4 * gates // 128 + 2 * heads - heads // 2
    bf16 = narrow.replace(precision="bf16")
    assert saved_bytes(block(bf16, "")) == saved_bytes(block(wide.replace(precision="bf16"), ""))


def test_attention_in_fp8_saves_its_inputs_and_its_output_in_a_byte() -> None:
    """FusedAttnFunc of Transformer Engine saves the casts of q, k and v, and its output in fp8, instead of 16 bits."""
    plain = Job(stack=build_stack("megatron-core"), precision="fp8", sequence=1024)
    in_fp8 = plain.replace(stack=plain.stack.replace(fp8_attention=True))
    elements = 1024 * 2 * (MODEL.heads + MODEL.kv_heads) * MODEL.head_dim
    assert saved_bytes(block(plain, "")) - saved_bytes(block(in_fp8, "")) == elements
    bf16 = [saved_bytes(block(job.replace(precision="bf16"), "")) for job in (plain, in_fp8)]
    assert bf16[0] == bf16[1]
    recomputed = [saved_bytes(block(job, "core")) for job in (plain, in_fp8)]
    assert recomputed[0] == recomputed[1]


@pytest.mark.parametrize(("joint", "mlp", "parts"), [(True, "gated", 2), (False, "gated", 2), (True, "plain", 1)])
def test_activation_inputs_are_saved_in_fp8(joint: bool, mlp: str, parts: int) -> None:
    """Gate and up as one tensor or as two, or up alone."""
    model = MODEL.replace(mlp=mlp, activation="silu" if mlp == "gated" else "gelu")
    wide = Job(
        stack=build_stack("megatron-core").replace(merged_projections=joint), precision="fp8-tiles", sequence=1024
    )
    narrow = wide.replace(stack=wide.stack.replace(low_precision_saved=("activation",)))
    read = 1024 * parts * MODEL.ffn
    freed = saved_bytes(block(wide, "", model=model)) - saved_bytes(block(narrow, "", model=model))
    assert freed == read - 4 * read // 128
