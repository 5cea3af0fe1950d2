"""Classify kernels and operators by name: the names that cuBLAS, CUTLASS, cuDNN, Triton, NCCL and ATen give them.

The first row that matches decides. Whatever is launched within ``Optimizer.step`` counts as the optimizer, regardless
of its name.
"""

from __future__ import annotations

import re

from fivefold.results.trace_report import Category

NAMES: tuple[tuple[Category, str], ...] = (
    ("communication", r"nccl|rccl|gloo:|deep_ep|ep::(intra|inter)node::|nvshmem|multimem|(one|two)_shot_all_reduce"
                      r"|cross_device_reduce"),
    ("memcpy", r"^memcpy|^memset|^aten::(copy_|_to_copy|to|contiguous|clone|zero_|zeros|zeros_like|fill_)$"),
    ("optimizer", r"adam|multi_?tensor|_foreach|lamb_|sgd_|muon|optimizer"),
    ("attention", r"flash|fmha|sdpa|attention|attn"),
    ("GEMM", r"(?<!fb)gemm|gemv|cutlass|nvjet|xmma|wgmma|cublas|splitk|matmul|_mm\b|::b?mm|addmm|baddbmm|linear"
             r"|convolution|conv[123]d|^triton_(mm|bmm|tem)|cijk_"),
    ("norm", r"norm"),
    ("elementwise", r"elementwise|pointwise|^triton_poi|cpp_fused|::(add|sub|mul|div|pow|neg|exp|log|sqrt|rsqrt|sigmoid"
                    r"|silu|gelu|relu|tanh|where|square|rope|threshold|masked_fill|clamp|lerp|addcmul|addcdiv)(_|_backward)?$"),
)  # fmt: skip
PATTERNS = tuple((category, re.compile(pattern, re.IGNORECASE)) for category, pattern in NAMES)
COLLECTIVE = next(pattern for category, pattern in PATTERNS if category == "communication")


def classify_kernel(name: str) -> Category:
    """Return the category of a kernel's or operator's name; ``other`` if no row matches."""
    return next((name_category for name_category, pattern in PATTERNS if pattern.search(name)), "other")


def is_communication_kernel(name: str) -> bool:
    """Return whether a GPU kernel of this name moves data between ranks."""
    return COLLECTIVE.search(name) is not None
