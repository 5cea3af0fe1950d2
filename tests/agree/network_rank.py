"""One rank of a case of ``network.py``: takes as many steps as each line of standard input says, and answers with their
seconds, each from when both ranks were there.
"""

from __future__ import annotations

import json
import os
import sys
import time

import torch
import torch.distributed as dist

from fivefold.layout.spec import Layout
from fivefold.trainer.build import build
from fivefold.trainer.engine import Engine
from fivefold.trainer.process import Process
from tests.agree.network import MODELS, Case


def main() -> None:
    """Build once; steps until standard input ends."""
    model, layout, overlap, precision, _ = json.loads(sys.argv[1])
    case = Case(model, layout, overlap, precision)
    process, plan = Process.from_environment(os.environ), Layout.parse(case.layout)
    device = process.start()
    built = build(model=MODELS[case.model], layout=plan, job=case.job, device=device, streams=process.has_several_hosts)
    engine = Engine(built, model=MODELS[case.model], layout=plan, job=case.job)
    chance = torch.Generator().manual_seed(built.ranks["dp"].rank)
    shape = plan.micro_batches(case.job), plan.mbs, case.job.sequence + 1
    tokens = torch.randint(MODELS[case.model].vocab, shape, generator=chance)
    for line in sys.stdin:
        taken = []
        for _ in range(int(line)):
            dist.barrier()
            start = time.perf_counter()
            engine.step(tokens)
            engine.zero_grad()
            taken.append(time.perf_counter() - start)
        print(json.dumps(taken), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
