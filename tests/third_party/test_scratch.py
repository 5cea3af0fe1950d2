"""What the backward of DTensor's loss_parallel holds at once: in eager zeros with a one, the softmax and their sum;
compiled, with the loss itself as torchtitan compiles it, one kernel makes the gradient in place.

python -m tests.third_party.test_scratch prints the peaks of resident memory, in logits of a rank (fp32).
"""

from __future__ import annotations

import gc
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from tests.two_ranks import run_two_ranks

TOKENS, WIDTH, VOCAB, STEPS = 2048, 32, 32768, 3


def resident(which: str) -> int:
    """Bytes of this process's memory: now (VmRSS), or at most since ``forget`` (VmHWM)."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return int(next(line for line in lines if line.startswith(which)).split()[1]) * 1024


def forget() -> None:
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(0, 1))


def backward_peak(*, compiled: bool) -> float:
    """Of the last of a few passes, over what lived before it, in logits of a rank."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module

    mesh, head, result = init_device_mesh("cpu", (2,)), nn.Linear(WIDTH, VOCAB, bias=False), 0.0
    parallelize_module(
        head, mesh, ColwiseParallel(input_layouts=Replicate(), output_layouts=Shard(-1), use_local_output=False)
    )
    compute = torch.compile(loss) if compiled else loss
    for _ in range(STEPS):
        x, targets = torch.randn(1, TOKENS, WIDTH, requires_grad=True), torch.randint(VOCAB, (1, TOKENS))
        gc.collect()
        before = resident("VmRSS")
        with loss_parallel():
            logits = head(x)
            value = compute(logits, targets)
            del logits
            forget()
            value.backward()  # type: ignore[no-untyped-call]
        result = (resident("VmHWM") - before) / (TOKENS * VOCAB // 2 * 4)
        head.zero_grad()
        del value, x
    return result


def peaks(folder: Path) -> tuple[float, float]:
    """In eager, and compiled, of the first of two processes."""
    result = run_two_ranks(
        folder, lambda: {name: backward_peak(compiled=name == "compiled") for name in ("eager", "compiled")}
    )
    return result["eager"], result["compiled"]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_loss_of_torchtitan_needs_scratch_only_without_compilation(tmp_path: Path) -> None:
    pytest.importorskip("torchtitan", reason="takes a minute: `make interop` runs it")
    eager, compiled = peaks(tmp_path)
    assert 3.8 < eager < 4.3
    assert 0.8 < compiled < 1.3


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        print(*(f"{peak:.2f}" for peak in peaks(Path(name))))
