"""Bounds of the search against estimates: layouts of random models, machines, stacks and jobs, thousands of them.

    python -m tests.endure.bounds [--count 2000] [--first 0] [--each 20] [--memory] [--bare-ends]

Prints every layout of which a bound is above its estimate, and how near the bounds of memory are by schedule; exits 1
if there is such a layout. ``--memory``: without the bounds of time. ``--bare-ends``: only pipelines with more stages
than layers.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict

import numpy as np

from tests.endure.stop_signals import end_at_stop_signal
from tests.planner.search.drawn_bounds import compare_bounds, drawn_space


def main() -> None:
    """Compare the bounds of ``count`` spaces."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=2000, help="how many spaces are drawn")
    parser.add_argument("--each", type=int, default=20, help="layouts of each space")
    parser.add_argument("--memory", action="store_true", help="compare bounds of memory alone")
    parser.add_argument("--bare-ends", action="store_true", help="only pipelines with more stages than layers")
    chosen = parser.parse_args()
    shares, broken = defaultdict[str, list[float]](list), 0
    with end_at_stop_signal():
        for seed in range(chosen.first, chosen.first + chosen.count):
            drawn = drawn_space(seed, bare_ends=chosen.bare_ends)
            if drawn is None:
                continue
            timed, bare_ends = not chosen.memory, chosen.bare_ends
            for bound in compare_bounds(*drawn, seed=seed, count=chosen.each, timed=timed, bare_ends=bare_ends):
                layout = bound.layout
                shares[layout.schedule if layout.pp > 1 else "none"].append(bound.bound_bytes / bound.peak_bytes)
                if bound.is_exceeded:
                    broken += 1
                    job = drawn[0].job
                    print(
                        f"seed {seed}: {layout}, memory {bound.bound_bytes / bound.peak_bytes:.4f}, "
                        f"time {bound.bound_seconds / bound.seconds if bound.seconds else 0:.4f} of the estimate; "
                        f"{layout.micro_batches(job)} micro-batches, offload={job.offload}, "
                        f"deferred={job.stack.deferred_wgrad}, stack {job.stack.name}",
                        flush=True,
                    )
    for schedule, item in sorted(shares.items()):
        print(f"{schedule:12} {len(item):6} layouts, median bound of memory {np.median(item):.3f} of the peak")
    print(f"{sum(map(len, shares.values()))} layouts, {broken} bounds above the estimate")
    sys.exit(broken > 0)


if __name__ == "__main__":
    main()
