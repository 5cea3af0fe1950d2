"""The FLOPs of the delta rule, as Gated DeltaNets and Kimi delta attention apply it (``trainer/model/mixers``).

Of a head with keys of k and values of v dims, in n > 1 chunks of C tokens that are computed at once:

    n (2P + C³)             the products β k·k and q·k of pairs, P FLOPs each; the inverse of a triangle
    n (4C²v + 2C²k)         the inverse times values and times β k; the output of the pairs
    (3n - 1) 2Ckv           the states: what each chunk reads of them, their part of its output, their updates

One chunk alone reads its state before it multiplies by the inverse, 2C²k less; it has no state if it is the first.
The last chunk of a sequence updates none.
"""

from __future__ import annotations

from fivefold.planner.counts.operations.chunks import ChunkGroup


def count_flops(group: ChunkGroup, *, pairs: int, key_dim: int, value_dim: int) -> tuple[int, int]:
    """Return the FLOPs of a group of chunks and a head, forward and backward.

    ``pairs``: FLOPs of one product over the pairs of tokens of a chunk.

    The backward computes the states again, then each group, then twice the FLOPs of its matmuls; the inverse of a
    triangle of C tokens takes C³, and its backward 4C³.
    """
    chunks, size, updates = group.chunks, group.size, group.updates
    triangle = 2 * size * size
    through_state = 2 * size * key_dim * value_dim
    inverse = chunks * size**3
    of_state = chunks * (pairs + triangle * value_dim)  # what the next state needs
    products = 2 * of_state
    if chunks == 1:
        of_state += group.has_state * through_state
        products += (2 * group.has_state + updates) * through_state
        return products + inverse, 3 * products + 5 * inverse + updates * (of_state + through_state + inverse)
    of_state += chunks * triangle * key_dim
    products += chunks * (triangle * key_dim + through_state)
    handed_on = (2 * chunks - 1 + updates) * through_state
    handed_back = (4 * chunks - 1 + group.has_state) * through_state
    again = of_state + inverse + 2 * chunks * through_state
    return products + inverse + handed_on, 3 * products + 5 * inverse + handed_on + handed_back + updates * again
