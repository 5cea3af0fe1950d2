"""Cross-entropy over (this rank's part of) a vocabulary: log Σ exp of each row, then logits → gradient in place."""

import triton
import triton.language as tl


@triton.jit
def log_sum_exp(logits, lse, stride, vocab, BLOCK: tl.constexpr):
    """A program walks along a row once, with a running maximum in every lane. −∞ for a row of −∞."""
    row = tl.program_id(0).to(tl.int64)
    top = tl.full([BLOCK], -3.0e38, dtype=tl.float32)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, vocab, BLOCK):
        column = start + tl.arange(0, BLOCK)
        value = tl.load(logits + row * stride + column, mask=column < vocab, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(top, value)
        total = total * tl.exp(top - higher) + tl.exp(value - higher)
        top = higher
    highest = tl.max(top, axis=0)
    summed = tl.sum(total * tl.exp(top - highest), axis=0)
    found = tl.log(tl.where(summed > 0.0, summed, 1.0)) + highest
    tl.store(lse + row, tl.where(summed > 0.0, found, float("-inf")))


@triton.jit
def into_gradient(
    logits, lse, target, own, times, factor, cap, stride, vocab,
    OWNED: tl.constexpr, SCALED: tl.constexpr, CAPPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """logits ← times · (exp(logits − lse) − 1 at the target). A program: ``BLOCK`` words of a row.

    ``OWNED``: only some rows have their target here. ``SCALED``: ``times`` is a tensor, which multiplies ``factor``.
    ``CAPPED``: the logits were bounded by ``cap`` · tanh, whose derivative is 1 − (logits / cap)².
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, place = column < vocab, logits + row * stride + column
    value = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    share = tl.exp(value - tl.load(lse + row))
    hit = column == tl.load(target + row)
    if OWNED:
        hit = hit & (tl.load(own + row) != 0)
    share = tl.where(hit, share - 1.0, share)
    if CAPPED:
        share -= (share * value) * value / (cap * cap)  # in this order: padding is 0 · a finite number twice
    if SCALED:
        share *= tl.load(times).to(tl.float32)
    tl.store(place, (share * factor).to(logits.dtype.element_ty), mask=inside)


@triton.jit
def scale(x, factor, numel, BLOCK: tl.constexpr):
    """x ← x · factor; a factor of 1, which a loss usually gets, touches nothing."""
    times = tl.load(factor).to(tl.float32)
    if times != 1.0:
        place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(x + place, mask=place < numel, other=0.0).to(tl.float32)
        tl.store(x + place, (value * times).to(x.dtype.element_ty), mask=place < numel)
