"""Prints the kernels of a fused scan, forward and backward, then its relative errors against PyTorch's operations.

The errors are of outputs, then of each input's gradient. Kernels are Triton's and PyTorch's operations in fp32.

    TRITON_INTERPRET=1 python tests/third_party/fused_scans.py gated_delta_net FOLDER

``FOLDER`` gets a copy of flash-linear-attention whose loops run in Triton's interpreter.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import autotuner, interpreter

from fivefold.model.mixers.gated_delta_net import GatedDeltaNet
from fivefold.model.mixers.kimi_delta import KimiDelta
from fivefold.model.mixers.mamba2 import Mamba2
from fivefold.trainer.model.mixers import fused_scans, gated_delta_net, kimi_delta, lightning, mamba2

SEQUENCES, TOKENS, CHUNK, DIM, HEADS = 2, 128, 32, 16, 2
Scan = Callable[[Sequence[Tensor]], Tensor]


def main() -> None:
    """Print the errors of the mixer that the first argument names."""
    mixer, folder = sys.argv[1:]
    warnings.simplefilter("ignore")  # that Triton has no GPU
    copy_for_interpreter(Path(folder))
    autotuner.Autotuner._bench = lambda *inputs, **options: (0.0, 0.0, 0.0)  # the first configuration
    torch.manual_seed(0)
    fused, operations, inputs = CASES[mixer]()
    results: list[list[Tensor]] = []
    weights = None
    for scan in (fused, operations):
        leaves = [x.clone().requires_grad_() for x in inputs]
        with KernelCounter() as forward:
            out = scan(leaves)
        weights = torch.randn_like(out) if weights is None else weights
        with KernelCounter() as backward:
            gradients = torch.autograd.grad(out, leaves, weights)
        results.append([out.detach(), *gradients])
        if scan is fused:
            print(forward.kernels, forward.kernels + backward.kernels)
    for made, expected in zip(*results, strict=True):
        print(float((made - expected).abs().max() / expected.abs().max()))


class KernelCounter(TorchDispatchMode):
    """Counts the kernels that would be launched on a GPU: Triton's, and operations that are neither views nor empty."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels = 0

    def __enter__(self) -> Any:
        self._run = interpreter.GridExecutor.__call__

        def run(executor: Any, *inputs: Any, **options: Any) -> Any:
            self.kernels += 1
            return self._run(executor, *inputs, **options)

        interpreter.GridExecutor.__call__ = run
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        interpreter.GridExecutor.__call__ = self._run

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # the interpreter copies tensors to the host and back by ``set_`` and ``copy_``
        is_kernel = not func.is_view and not func.__name__.startswith(("empty", "new_empty", "detach", "set_", "copy_"))
        self.kernels += is_kernel
        return func(*args, **(kwargs or {}))


def copy_for_interpreter(folder: Path) -> None:
    """Import flash-linear-attention from a copy in ``folder`` whose loop counters are tensors, as on a GPU."""
    spec = importlib.util.find_spec("fla")
    assert spec is not None
    assert spec.origin is not None
    shutil.copytree(Path(spec.origin).parent, folder / "fla")
    for path in (folder / "fla" / "ops").rglob("*.py"):
        text = path.read_text()
        path.write_text(text.replace("= i_t.to(tl.int64)", "= i_t + tl.zeros([], tl.int64)"))
    sys.path.insert(0, str(folder))


def compute_at_once(compute: Callable[..., tuple[Tensor, Tensor | None]]) -> Scan:
    """Return the scan of ``compute`` over complete sequences."""
    return lambda inputs: compute(inputs, None, is_last=True)[0]


def rows(*widths: int) -> list[Tensor]:
    """Draw tensors [sequences, tokens, width]."""
    return [torch.randn(SEQUENCES, TOKENS, width) for width in widths]


def gated_delta_net_case() -> tuple[Scan, Scan, list[Tensor]]:
    """Two value heads share a key head."""
    shape = GatedDeltaNet(
        key_heads=HEADS // 2, value_heads=HEADS, key_dim=DIM, value_dim=2 * DIM, negative_eigenvalues=True
    )
    fused = partial(fused_scans.scan_gated_delta_net, shape=shape)
    operations = compute_at_once(partial(gated_delta_net.compute_chunks, shape=shape))
    widths = shape.key_width, shape.key_width, shape.value_width, HEADS, HEADS
    return fused, operations, [*rows(*widths), torch.randn(HEADS), torch.randn(HEADS)]


def kimi_delta_case(lower_bound: float | None) -> tuple[Scan, Scan, list[Tensor]]:
    """Decays per dim, with and without a bound."""
    shape = KimiDelta(heads=HEADS, dim=DIM, lower_bound=lower_bound)
    fused = partial(fused_scans.scan_kimi_delta, shape=shape)
    operations = compute_at_once(partial(kimi_delta.compute_chunks, shape=shape))
    width = HEADS * DIM
    return fused, operations, [*rows(width, width, width, width, HEADS), torch.randn(HEADS), torch.randn(width)]


def lightning_case() -> tuple[Scan, Scan, list[Tensor]]:
    """A fast and a slow head."""
    rates = (0.5, 0.1)
    fused = partial(fused_scans.scan_lightning, rates=rates)
    operations = compute_at_once(partial(lightning.compute_chunks, rates=rates, size=CHUNK))
    return fused, operations, rows(3 * HEADS * DIM)


def mamba2_case() -> tuple[Scan, Scan, list[Tensor]]:
    """Four heads in two groups."""
    shape = Mamba2(heads=2 * HEADS, head_dim=DIM, state=DIM, groups=2, chunk=CHUNK)
    fused = partial(fused_scans.scan_mamba2, shape=shape)
    operations = compute_at_once(partial(mamba2.compute_chunks, shape=shape))
    factors = [torch.randn(shape.heads) for _ in range(3)]
    return fused, operations, [*rows(shape.conv_width, shape.heads), *factors]


CASES = {
    "gated_delta_net": gated_delta_net_case,
    "kimi_delta": partial(kimi_delta_case, None),
    "kimi_delta_bounded": partial(kimi_delta_case, -5.0),
    "lightning": lightning_case,
    "mamba2": mamba2_case,
}

if __name__ == "__main__":
    main()
