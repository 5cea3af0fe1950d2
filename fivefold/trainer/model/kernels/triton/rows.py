"""Copies of rows in order of expert, and the sum of each row's copies."""

import triton
import triton.language as tl


@triton.jit
def gather(x, index, y, width, BLOCK: tl.constexpr):
    """Compute y[i] = x[index[i]]; a program copies ``BLOCK`` columns of a row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(index + row).to(tl.int64)
    value = tl.load(x + source * width + column, mask=column < width)
    tl.store(y + row * width + column, value, mask=column < width)


@triton.jit
def sum_copies(copies, places, starts, y, rows, number, width, BLOCK: tl.constexpr):
    """Compute y[r] = Σ copies[places[j]] over j from starts[r] to starts[r + 1], in that order and in fp32."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    start = tl.load(starts + row)
    end = tl.load(starts + row + 1, mask=row + 1 < rows, other=number)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for place in range(start, end):
        source = tl.load(places + place).to(tl.int64)
        total += tl.load(copies + source * width + column, mask=column < width, other=0.0).to(tl.float32)
    tl.store(y + row * width + column, total.to(y.dtype.element_ty), mask=column < width)
