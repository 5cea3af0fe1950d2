"""Reserved bytes of drawn layouts and sequence lengths: the planner against the simulated caching allocator.

python -m tests.agree.dry_run.reserved --count 60 --seed 0
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
from collections.abc import Iterator

from fivefold.dry_run.fake.world import list_representatives
from fivefold.dry_run.memory.reserved import replay_allocator
from fivefold.dry_run.rank_tapes import run_rank
from fivefold.errors import UserError
from fivefold.layout.spec import Layout
from fivefold.layout.validity import refuse
from fivefold.planner.predict import Planner
from tests.agree.dry_run.cases import Case

BOUND = 0.25  # of every case
MODELS = ("gemma3-4b", "llama3.2-1b", "llama3-8b", "qwen3-0.6b", "qwen3-30b-a3b", "gpt-oss-20b", "deepseek-v2-lite")
LAYOUTS = (
    "dp8 zero1 mbs1 ac=full", "dp8 zero1 mbs1", "dp8 zero3 mbs1 ac=full", "dp8 zero2 mbs1 ac=selective",
    "dp4 tp2 zero1 mbs1 ac=full", "dp2 cp4 zero1 mbs1 ac=full", "dp2 tp4 zero3 mbs1 ac=selective", "dp8 zero3 mbs2",
    "dp2 pp4 zero1 mbs1 ac=full", "dp8 zero0 mbs1 ac=full", "dp64 zero1 mbs1 ac=full", "dp2 tp2 pp2 zero2 mbs1",
)  # fmt: skip
SEQUENCES = (2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072)


def draw_cases(seed: int) -> Iterator[Case]:
    """Yield endless legal cases, always the same for a seed."""
    chance = random.Random(seed)
    while True:
        layout = Layout.parse(chance.choice(LAYOUTS))
        rounds = max(chance.choice((1, 1, 2, 4)), 2 * layout.pp if layout.pp > 1 else 1)
        case = Case(
            chance.choice(MODELS),
            chance.choice((6, 12)),
            str(layout),
            chance.choice(SEQUENCES),
            layout.dp * layout.mbs * rounds,
            loss=chance.choice(("fused", "fused", "chunked")),
        )
        try:
            refuse(case.layout, model=case.model, job=case.job, machine=case.machine)
        except UserError:
            continue
        yield case


def error(case: Case) -> float:
    """Return planned over dry-run bytes, less one, of the rank that reserves most."""
    planned = Planner(model=case.model, machine=case.machine, job=case.job).step(case.layout).memory.reserved_bytes
    assert planned is not None
    results = []
    for rank in list_representatives(case.layout):
        tapes = run_rank(model=case.model, layout=case.layout, job=case.job, rank=rank, streams=case.streams)
        results.append(replay_allocator([tapes.first, tapes.steady], expandable=False).reserved_bytes)
    return planned / max(results) - 1


def main() -> int:
    """Print the error of each case and how many lie within which bound; 1 if one is beyond ``BOUND``."""
    parser = argparse.ArgumentParser(description="planned and dry-run reserved bytes of drawn layouts")
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    errors = []
    for case in itertools.islice(draw_cases(options.seed), options.count):
        errors.append(error(case))
        print(f"{errors[-1]:+.1%} {case}", flush=True)
    sizes = sorted(map(abs, errors))
    median, most = sizes[len(sizes) // 2], sizes[len(sizes) * 9 // 10]
    print(f"median {median:.1%}, nine tenths within {most:.1%}, all {sizes[-1]:.1%}")
    return int(sizes[-1] > BOUND)


if __name__ == "__main__":
    sys.exit(main())
