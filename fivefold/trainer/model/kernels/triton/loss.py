"""Cross-entropy over (this rank's part of) a vocabulary: log Σ exp of each row, then logits → gradient in place."""

import triton
import triton.language as tl


@triton.jit
def log_sum_exp(logits, lse, stride, vocab, BLOCK: tl.constexpr):
    """Compute log Σ exp of a row in one loop, with a running maximum in every lane. −∞ for a row of −∞."""
    row = tl.program_id(0).to(tl.int64)
    maxima = tl.full([BLOCK], -3.0e38, dtype=tl.float32)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, vocab, BLOCK):
        column = start + tl.arange(0, BLOCK)
        value = tl.load(logits + row * stride + column, mask=column < vocab, other=float("-inf")).to(tl.float32)
        new_maxima = tl.maximum(maxima, value)
        total = total * tl.exp(maxima - new_maxima) + tl.exp(value - new_maxima)
        maxima = new_maxima
    row_maximum = tl.max(maxima, axis=0)
    row_sum = tl.sum(total * tl.exp(maxima - row_maximum), axis=0)
    row_lse = tl.log(tl.where(row_sum > 0.0, row_sum, 1.0)) + row_maximum
    tl.store(lse + row, tl.where(row_sum > 0.0, row_lse, float("-inf")))


@triton.jit
def logits_to_gradient(
    logits,
    lse,
    target,
    is_local,
    times,
    factor,
    cap,
    stride,
    vocab,
    OWNED: tl.constexpr,
    SCALED: tl.constexpr,
    CAPPED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute logits ← times · (exp(logits − lse) − 1 at the target) for ``BLOCK`` columns of a row.

    ``OWNED``: only some rows have their target on this rank. ``SCALED``: ``times`` is a tensor, which multiplies
    ``factor``. ``CAPPED``: the logits were bounded by ``cap`` · tanh, whose derivative is 1 − (logits / cap)².
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, place = column < vocab, logits + row * stride + column
    value = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    probability = tl.exp(value - tl.load(lse + row))
    is_target = column == tl.load(target + row)
    if OWNED:
        is_target = is_target & (tl.load(is_local + row) != 0)
    probability = tl.where(is_target, probability - 1.0, probability)
    if CAPPED:
        probability -= (
            (probability * value) * value / (cap * cap)
        )  # in this order: padding is 0 · a finite number twice
    if SCALED:
        probability *= tl.load(times).to(tl.float32)
    tl.store(place, (probability * factor).to(logits.dtype.element_ty), mask=inside)


@triton.jit
def scale(x, factor, numel, BLOCK: tl.constexpr):
    """Compute x ← x · factor; for a factor of 1, the usual one of a loss, nothing is read or written."""
    times = tl.load(factor).to(tl.float32)
    if times != 1.0:
        place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(x + place, mask=place < numel, other=0.0).to(tl.float32)
        tl.store(x + place, (value * times).to(x.dtype.element_ty), mask=place < numel)
