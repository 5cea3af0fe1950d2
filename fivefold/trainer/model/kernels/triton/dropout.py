"""The mask of a dropout, drawn from a counter; see ``trainer/model/dropout.py``."""

import triton
import triton.language as tl


@triton.jit
def draw(keys, mask, columns, first, dropped, GROUPS: tl.constexpr):
    """Draw ``GROUPS`` groups of four columns of a row's mask, of which 16 bits of one number each decide."""
    row = tl.program_id(0).to(tl.int64)
    group = first // 4 + tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    x = tl.load(keys + row).to(tl.uint64) + group.to(tl.uint64) * 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    x = x ^ (x >> 31)
    place = tl.arange(0, 4)
    bits = ((x[:, None] >> (16 * place).to(tl.uint64)[None, :]) & 0xFFFF).to(tl.int32)
    column = 4 * group[:, None] + place[None, :] - first
    kept = (bits ^ 0x8000) >= dropped  # the order of signed numbers, as PyTorch compares them
    tl.store(mask + row * columns + column, kept, mask=(column >= 0) & (column < columns))
