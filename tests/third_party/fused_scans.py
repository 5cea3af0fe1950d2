"""Prints the kernels of a fused scan, forward and backward, then its relative errors against PyTorch's operations.

The errors are of outputs, then of each input's gradient, as parts of its largest number. The gradients of a decay's
factors are sums over tokens whose terms nearly cancel: an error of theirs is a part of the sum of these terms'
magnitudes. The two numbers after it are the errors of mistakes: a factor of 1.001, and one token's terms left out.
Kernels are Triton's and PyTorch's operations in fp32.

    TRITON_INTERPRET=1 python tests/third_party/fused_scans.py gated_delta_net FOLDER

``FOLDER`` gets a copy of flash-linear-attention whose loops run in Triton's interpreter.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import autotuner, interpreter

from fivefold.model.mixers.gated_delta_net import GatedDeltaNet
from fivefold.model.mixers.kimi_delta import KimiDelta
from fivefold.model.mixers.mamba2 import Mamba2
from fivefold.trainer.model.mixers import fused_scans, gated_delta_net, kimi_delta, lightning, mamba2

SEQUENCES, TOKENS, CHUNK, DIM, HEADS = 2, 128, 32, 16, 2
Scan = Callable[[Sequence[Tensor]], Tensor]
ListTerms = Callable[[Sequence[Tensor], Sequence[Tensor]], dict[int, Tensor]]


class Case(NamedTuple):
    """A fused scan and the same scan by PyTorch's operations.

    ``list_terms`` makes, of the inputs and their gradients, the terms [sequences, tokens, numbers, ...] of each
    gradient [numbers] that is a sum over tokens, by the index of its input.
    """

    fused: Scan
    operations: Scan
    inputs: list[Tensor]
    list_terms: ListTerms = lambda inputs, gradients: {}


def main() -> None:
    """Print the errors of the mixer that the first argument names."""
    mixer, folder = sys.argv[1:]
    warnings.simplefilter("ignore")  # that Triton has no GPU
    copy_for_interpreter(Path(folder))
    autotuner.Autotuner._bench = lambda *inputs, **options: (0.0, 0.0, 0.0)  # the first configuration
    torch.manual_seed(0)
    fused, operations, inputs, list_terms = CASES[mixer]()
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
    terms = list_terms(inputs, results[1][1:])
    for index, (made, expected) in enumerate(zip(*results, strict=True), start=-1):  # -1: the output
        if index in terms:
            print(*compare_sums(made, expected, terms[index]))
        else:
            print(float((made - expected).abs().max() / expected.abs().max()))


def compare_sums(made: Tensor, expected: Tensor, terms: Tensor) -> Iterator[float]:
    """Yield the error of sums, then the errors of a factor of 1.001 and of sums without one token's terms."""
    terms = terms.flatten(3) if terms.dim() > 3 else terms[..., None]
    magnitudes = terms.abs().sum((0, 1, 3))
    assert ((terms.sum((0, 1, 3)) - expected).abs() < 1e-5 * magnitudes).all()
    for sums in (made, made * 1.001, made - terms[0, TOKENS // 2].sum(-1)):
        yield float((sums - expected).abs().max() / magnitudes.max())


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


def gated_delta_net_case() -> Case:
    """Two value heads share a key head."""
    shape = GatedDeltaNet(
        key_heads=HEADS // 2, value_heads=HEADS, key_dim=DIM, value_dim=2 * DIM, negative_eigenvalues=True
    )
    fused = partial(fused_scans.scan_gated_delta_net, shape=shape)
    operations = compute_at_once(partial(gated_delta_net.compute_chunks, shape=shape))
    widths = shape.key_width, shape.key_width, shape.value_width, HEADS, HEADS
    return Case(fused, operations, [*rows(*widths), torch.randn(HEADS), torch.randn(HEADS)])


def kimi_delta_case(lower_bound: float | None) -> Case:
    """Decays per dim, with and without a bound."""
    shape = KimiDelta(heads=HEADS, dim=DIM, lower_bound=lower_bound)
    fused = partial(fused_scans.scan_kimi_delta, shape=shape)
    operations = compute_at_once(partial(kimi_delta.compute_chunks, shape=shape))
    width = HEADS * DIM
    inputs = [*rows(width, width, width, width, HEADS), torch.randn(HEADS), torch.randn(width)]
    return Case(fused, operations, inputs, partial(list_decay_terms, is_bounded=lower_bound is not None))


def list_decay_terms(inputs: Sequence[Tensor], gradients: Sequence[Tensor], *, is_bounded: bool) -> dict[int, Tensor]:
    """Make the terms of the gradients of ``a_log`` and ``dt_bias`` of Kimi delta attention from the gradient of ``f``.

    ``dt_bias`` is added to f: it has f's gradient. With the logits x = f + dt_bias the decay is e^a_log · softplus(x)
    or, bounded, σ(e^a_log · x), whose derivatives by a_log and by x are as softplus(x) to σ(x), or as x to 1.
    """
    f, a_log, dt_bias = (inputs[index] for index in (3, 5, 6))
    logits = f + dt_bias
    ratio = logits if is_bounded else F.softplus(logits) / logits.sigmoid()
    return {5: (gradients[3] * ratio).unflatten(-1, (len(a_log), -1)), 6: gradients[3]}


def lightning_case() -> Case:
    """A fast and a slow head."""
    rates = (0.5, 0.1)
    fused = partial(fused_scans.scan_lightning, rates=rates)
    operations = compute_at_once(partial(lightning.compute_chunks, rates=rates, size=CHUNK))
    return Case(fused, operations, rows(3 * HEADS * DIM))


def mamba2_case() -> Case:
    """Four heads in two groups."""
    shape = Mamba2(heads=2 * HEADS, head_dim=DIM, state=DIM, groups=2, chunk=CHUNK)
    fused = partial(fused_scans.scan_mamba2, shape=shape)
    operations = compute_at_once(partial(mamba2.compute_chunks, shape=shape))
    factors = [torch.randn(shape.heads) for _ in range(3)]
    return Case(fused, operations, [*rows(shape.conv_width, shape.heads), *factors])


CASES = {
    "gated_delta_net": gated_delta_net_case,
    "kimi_delta": partial(kimi_delta_case, None),
    "kimi_delta_bounded": partial(kimi_delta_case, -5.0),
    "lightning": lightning_case,
    "mamba2": mamba2_case,
}

if __name__ == "__main__":
    main()
