"""The passes of a pipeline rank (F, B, BW or W of a stage), and counts of what is allocated during each of them.

    F of stage 1   others kept until B: (1, 2) · until W: (0, 0) · with sums: (0, 1) · reduced: (0, 0) · messages: 1

Without a pipeline three micro-batches show all passes. Those of a pipeline follow from its schedule
(``pipelined_passes.py``).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, NamedTuple

Kind = Literal["F", "B", "BW", "W"]
# Passes that may leave a reduction of gradients in flight: none, the last backward of a stage, every backward.
PendingReductions = Literal["never", "last", "each"]
# The head's weights that stay gathered from F to B of the last stage: none; its own; and also a tied table.
GatheredHeads = Literal["", "own", "tied"]


class PreviousPass(NamedTuple):
    """The previous pass on a rank, which may have left a reduction of gradients in flight."""

    kind: Kind
    stage: int
    last: bool


class PassKind(NamedTuple):
    """The properties of a pass that its own peak depends on.

    ``first``: the stage has no gradient yet (F: it may have to gather; W: none of those that W makes); ``last``: no
    more come after this pass (B: of those that are not deferred to W). ``previous``: None if it left nothing in flight.
    ``is_gathered``: an F has left the stage's weights gathered.
    """

    kind: Kind
    stage: int
    first: bool
    last: bool
    previous: PreviousPass | None
    is_gathered: bool


class LivePass(NamedTuple):
    """A pass and the counts of what is in flight during it.

    ``counts`` has for each stage of the rank: other micro-batches between F and B; between B and W; 1 if gradient sums
    are allocated; 1 if those are that only W makes; 1 if those are reduced that no W makes; 1 if all are reduced; 1 if
    weights, or the head's, stay gathered from an F to a B. Then streams between stages of this rank after the pass, and
    all streams sent or received during it; with ``has_recv_buffers`` for every micro-batch, gradients of inputs made so
    far, less those of this pass.
    """

    pass_kind: PassKind
    counts: tuple[int, ...]


class PassOptions(NamedTuple):
    """The properties of a layout that decide which passes are distinct.

    ``keeps_gathered``: weights stay gathered from an F to a B; ``has_recv_buffers``: receive buffers are allocated
    throughout the step and counted elsewhere; ``first_backward``: the first stage with a backward, as in ``Table``.
    """

    pending_reductions: PendingReductions = "never"
    keeps_gathered: bool = False
    has_recv_buffers: bool = False
    gathered_heads: GatheredHeads = ""
    first_backward: int = 0


@lru_cache(maxsize=1024)
def list_unpipelined_passes(micro_batches: int, options: PassOptions) -> tuple[LivePass, ...]:
    """Return the passes of a rank without a pipeline, in time order.

    They are those of the first micro-batch, of the second, which equals all others, and of the last.
    """
    passes, previous = list[LivePass](), None
    for index in sorted({0, min(1, micro_batches - 1), micro_batches - 1}):
        last = index == micro_batches - 1
        counts = (0, 0, int(index > 0), int(index > 0), 0, 0, 0, 0, 0)
        passes.append(LivePass(PassKind("F", 0, index == 0, False, previous, False), counts))
        passes.append(LivePass(PassKind("BW", 0, index == 0, last, None, options.keeps_gathered), counts))
        previous = (
            PreviousPass("BW", 0, last)
            if options.pending_reductions == "each" or (options.pending_reductions == "last" and last)
            else None
        )
    return tuple(passes)
