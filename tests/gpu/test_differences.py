"""docs/explanation/dry-run-and-gpu.md is right about CPU and GPU, as far as fake tensors of both show it without a GPU.

A fake GPU knows shapes, and which operations torch makes of one. Where torch is built without CUDA it can neither run
a backward of autograd nor index, so backwards are called by hand and slices narrowed.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fivefold.dry_run.memory.reserved import list_initial_allocations
from fivefold.dry_run.rank_tapes import run_rank
from fivefold.dry_run.record.recorder import TapeRecorder
from fivefold.dry_run.record.tape import ALLOC, Tape
from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.model.catalog import build_model
from fivefold.trainer.model import flash_attention
from fivefold.trainer.model.attention_mask import AttentionMask
from fivefold.trainer.model.flash_attention import attend, attend_backward
from fivefold.trainer.model.kernels import norms
from fivefold.trainer.model.kernels.eager import EAGER
from fivefold.trainer.model.kernels.rotary import rotate

R, D, V = 48, 64, 96  # rows, width, words
B, T, N, K = 2, 16, 4, 2
RULE = AttentionMask(0.3)


def record_on(device: str, work: Callable[[Callable[..., Tensor]], object]) -> Tape:
    """What ``work`` does with fake tensors of ``device``, made by ``new(*shape, dtype=)``."""
    recorder = TapeRecorder(rank=0)
    with torch.no_grad(), FakeTensorMode(), recorder:

        def new(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        kept = work(new)
        tape = recorder.finish_tape()
        del kept
    return tape


def sizes(tape: Tape) -> list[int]:
    return [size for kind, _, size, _ in tape if kind == ALLOC]


def context(*saved: Tensor, **more: Any) -> Any:
    return SimpleNamespace(saved_tensors=saved, needs_input_grad=(True,) * 3, **more)


OPERATIONS: dict[str, Callable[[Callable[..., Tensor]], object]] = {
    "rms_norm": lambda new: EAGER.rms_norm(new(R, D), new(D), epsilon=1e-5),
    "rms_norm backward": lambda new: norms._RmsNorm.backward(
        context(new(R, D), new(D), new(R, 1, dtype=torch.float32), plus_one=False, sums=None), new(R, D)
    ),
    "swiglu": lambda new: EAGER.activate_gated(new(R, D), new(R, D), "silu"),
    "rotate": lambda new: rotate(new(B, T, N, 8), cos_TH=new(T, 1, 8), sin_TH=new(T, 1, 8)),
    "softmax of the loss": lambda new: new(R, V).softmax(-1, dtype=torch.float32),
    "embedding backward": lambda new: torch.ops.aten.embedding_dense_backward(
        new(R, D), new(R, dtype=torch.int64), V, -1, False
    ),
    "grouped_mm": lambda new: F.grouped_mm(new(R, D), new(4, D, 32), offs=new(4, dtype=torch.int32)),
    "grouped_mm of weights": lambda new: F.grouped_mm(new(R, D).t(), new(R, 32), offs=new(4, dtype=torch.int32)),
    "norm of gradients": lambda new: torch._foreach_norm([new(R), new(D, 2)], dtype=torch.float32),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_allocate_the_same_tensors_on_cpu_and_gpu(name: str) -> None:
    assert sizes(record_on("cuda", OPERATIONS[name])) == sizes(record_on("cpu", OPERATIONS[name])) != []


@pytest.mark.parametrize(("dims", "wanted"), [((36, 36), 40), ((96, 64), 96), ((100, 40), 104), ((64, 64), 64)])
def test_blockwise_attention_pads_to_multiples_of_eight(
    dims: tuple[int, int], wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The padding is cut off afterwards (``tests/trainer/model/test_flash_attention.py``); the log-sum-exp has none."""
    monkeypatch.setattr(flash_attention, "_tokens", lambda x, dim=None: x)
    width, value_width = dims

    def heads(new: Callable[..., Tensor]) -> list[Tensor]:
        return [new(B, T, N, width), new(B, T, K, width), new(B, T, K, value_width)]

    def forward(new: Callable[..., Tensor]) -> object:
        out, lse = attend(*heads(new), RULE)
        assert out.nbytes == 2 * B * T * N * max(wanted if out.is_cuda else 0, *dims)
        assert (lse.nbytes, lse.dtype) == (4 * B * T * N, torch.float32)
        return out, lse

    def backward(new: Callable[..., Tensor]) -> object:
        out, lse = new(B, T, N, value_width), new(B, N, T, dtype=torch.float32).transpose(1, 2)
        return attend_backward(new(B, T, N, value_width), *heads(new), out, lse, RULE)

    for work in (forward, backward):
        for device, dim in (("cuda", wanted), ("cpu", max(dims))):
            (kernel,) = (item for item in record_on(device, work).kernels if item.kind.startswith("attention"))
            assert kernel.shape == (B * N, T, T, dim)


def test_every_weight_has_a_step_counter() -> None:
    """AdamW's fused kernel wants it on the device: four bytes, of which the allocator makes 512."""
    model = build_model("nano")
    job = Job(sequence=64, global_batch=1)
    tapes = run_rank(model=model, layout=Layout.parse("dp1"), job=job, rank=0, streams=True)
    born = dict(list_initial_allocations(tapes.steady))
    opened = [event for event in tapes.steady if event[0] == ALLOC and born.get(event[1]) == event[3]]
    named_tensors = [size for _, _, size, site in opened if tapes.steady.sites[site].category == "optimizer"]
    weights = 2 * 9 + 3  # of two blocks; table, last norm, head
    assert named_tensors.count(4) == weights
    assert sum(named_tensors) == 2 * 4 * model.parameters + 4 * weights
