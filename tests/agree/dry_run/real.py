"""Compare the dry run with a run: each process of a gloo world writes a tape of its own, under the same recorder.

    dry run     SCOPE · ALLOC 7 4096 · KERNEL matmul · START reduce_scatter · WAIT · FREE 7 · …
    run         SCOPE · ALLOC 7 4096 · KERNEL matmul · START reduce_scatter · WAIT · FREE 7 · …        all equal

A third step runs under ``trainer/measure/meter.py``: its peak, FLOPs and messages are those of the dry run's tape.

    python -m tests.agree.dry_run.real --markdown docs/explanation/measurements/006-dry-run-against-run.md
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_impls import op_implementations_dict

from fivefold.dry_run.fake.world import list_representatives
from fivefold.dry_run.memory.breakdown import sum_stage_memory
from fivefold.dry_run.rank_tapes import RankTapes, run_rank
from fivefold.dry_run.record.tape import Tape
from fivefold.job import Job, get_recipe
from fivefold.layout.spec import Layout
from fivefold.model.spec import Model
from fivefold.rendering.progress import show_progress
from tests.agree.dry_run.compare import differences, sum_traffic, work
from tests.agree.dry_run.process import Told, train_rank
from tests.agree.parity.cases import MODELS, job_for, model_for
from tests.dry_run.record.test_replay import list_events
from tests.processes import run_forked

BAGS = (torch.ops.aten._embedding_bag.default, torch.ops.aten._embedding_bag_forward_only.default)
# of sizes that torch's grouped matmul takes; those of the parity proof are odd: their experts are multiplied singly
ALIGNED = {
    name: MODELS[name].replace(
        width=64,
        moe=MODELS[name].moe.replace(ffn=32, shared_ffn=32),  # type: ignore[union-attr]
    )
    for name in ("moe", "moe-free", "mla")
}


class Case(NamedTuple):
    """One layout. ``every``: each rank is dry-run, else those that represent the others."""

    name: str
    layout_text: str
    precision: str = "fp32"
    every: bool = False
    pairs: bool = False

    def __str__(self) -> str:
        words = (self.name, self.layout_text, self.precision, "pairs" * self.pairs, "every" * self.every)
        return " ".join(filter(None, words))

    @property
    def layout(self) -> Layout:
        return Layout.parse(self.layout_text)

    @property
    def model(self) -> Model:
        if self.name.endswith("+"):
            return ALIGNED[self.name[:-1]].replace(layers=model_for("dense", self.layout).layers)
        return model_for(self.name, self.layout)

    @property
    def job(self) -> Job:
        return job_for(self.layout).replace(precision=get_recipe(self.precision), pairs=self.pairs)


QUICK = (
    Case("biased", "dp1 mbs3 ac=full/2", "bf16"),
    Case("tied", "dp2 zero3 mbs2", "bf16-grad16"),
    Case("dense", "dp4 zero3/2 mbs1 ac=norm+act", every=True),
    Case("dense", "tp2 cp2 mbs1", "bf16", every=True),
    Case("few-kv", "tp2 zero0 nosp ac=selective"),
    Case("tied", "tp2 pp2 zb1p", every=True),
    Case("latent", "pp2 interleaved v2 ac=core+mlp"),
    Case("moe", "dp2 ep2 zero2"),
    Case("moe-free+", "dp2 tp2 ep2 etp2 zero1", "bf16", every=True),
    Case("mla+", "cp2 pp2 zbv ep2 ac=full", "bf16"),
    Case("windows", "tp2 cp2 zero2 mbs1", "bf16", every=True),
)
MORE = (
    Case("dense", "dp1 mbs2"),
    Case("biased", "dp2 zero0 mbs2"),
    Case("dense", "dp2 zero1 mbs1", "bf16"),
    Case("few-kv", "dp3 zero2 mbs1 ac=full", "bf16"),
    Case("tied", "dp4 zero1/2 mbs1", "bf16-grad16", every=True),
    Case("dense", "dp8 zero3 mbs1", "bf16"),
    Case("biased", "dp8 zero2/4 mbs1 ac=rope+out"),
    Case("dense", "tp4 mbs1 ac=qkv+up", "bf16", every=True),
    Case("few-kv", "tp4 zero0 mbs1"),
    Case("biased", "dp2 tp2 zero3 nosp mbs1 ac=selective", "bf16-grad16", every=True),
    Case("dense", "cp2 cp=ulysses zero3 mbs1", "bf16"),
    Case("dense", "cp4 zero2 mbs1 ac=full", "bf16", every=True),
    Case("latent", "tp2 cp2 cp=ulysses mbs2 ac=selective"),
    Case("dense", "dp2 tp2 cp2 zero3 mbs1", "bf16", every=True),
    Case("dense", "pp4 gpipe", "bf16"),
    Case("tied", "pp4 1f1b ac=full@2", every=True),
    Case("dense", "dp2 pp2 1f1b zero2 mbs2", "bf16", every=True),
    Case("biased", "tp2 pp2 interleaved v3 ac=full/2"),
    Case("dense", "pp2 zb1p ac=selective", "bf16-grad16"),
    Case("dense", "cp2 pp2 zb2p zero3", "bf16", every=True),
    Case("few-kv", "pp2 zbv ac=norm+act@1", "bf16"),
    Case("tied", "tp2 pp2 dualpipe", "bf16"),
    Case("dense", "pp4 dualpipe"),
    Case("dense", "dp2 pp2 dualpipev zero1 mbs1", "bf16", every=True),
    Case("moe+", "dp1 mbs2 ac=moe+norm"),
    Case("moe+", "dp2 ep2 zero3 mbs1", "bf16"),
    Case("moe", "dp4 ep2 zero1 mbs1", every=True),
    Case("moe-free", "tp2 etp2 mbs1"),
    Case("moe+", "dp2 tp2 ep4 zero1 mbs1", "bf16", every=True),
    Case("mla", "dp2 ep2 zero2 mbs1 ac=qkv+up", "bf16-grad16"),
    Case("mla+", "dp2 cp2 ep4 zero3/2 mbs1 ac=full", every=True),
    Case("moe-free+", "dp2 tp2 pp2 ep4 zb1p zero2", "bf16", every=True),
    Case("moe+", "pp2 dualpipev ep2 dp2", "bf16"),
    Case("moe+", "dp2 pp2 dualpipe ep2 zero1", "bf16", pairs=True),
    Case("softcap", "cp2 zero3 mbs2 ac=core+mlp", every=True),
    Case("windows", "dp2 pp2 zb1p zero1 mbs1 ac=full", "bf16", every=True),
    Case("mla+", "dp2 tp2 pp2 ep2 etp2 dualpipev", pairs=True, every=True),
)


# The dry run compared with the run


class Verdict(NamedTuple):
    """``list_differences``: one line for each difference. All else is of the ranks' steady step, summed or maximal."""

    unequal: tuple[str, ...]
    ranks: int
    events: int
    messages: int
    sent_bytes: int
    flops: int
    states: int
    peak: int


def run(case: Case) -> Verdict:
    """Run the case on processes, dry-run it, and compare."""
    model, layout, job = case.model, case.layout, case.job
    torch.set_num_threads(1)
    ran: list[Told] = run_forked(layout.world, train_rank, model, layout, job)
    ranks = range(layout.world) if case.every else list_representatives(layout)
    with patch.dict(op_implementations_dict, dict.fromkeys(BAGS, _sum_bags)):
        results = [run_rank(model=model, layout=layout, job=job, rank=rank, streams=False) for rank in ranks]
    said = [sum_traffic(result.steady) for result in results]
    memory = [sum_stage_memory(result.steady, 0) for result in results]
    return Verdict(
        unequal=tuple(line for result in results for line in list_differences(result, ran[result.rank])),
        ranks=len(results),
        events=sum(len(tape) for result in results for tape in (result.first, result.steady)),
        messages=sum(count for item in said for count, _ in item.values()),
        sent_bytes=sum(size for item in said for _, size in item.values()),
        flops=sum(work(result.steady) for result in results),
        states=max(item.parameters_bytes + item.optimizer_bytes + item.gradients_bytes for item in memory),
        peak=max(item.peak_bytes for item in memory),
    )


def list_differences(ours: RankTapes, ran: Told) -> Iterator[str]:
    """One line for each tape and total that differ."""
    for step in ("first", "steady"):
        here, there = (list_events(_number_groups(getattr(tapes, step))) for tapes in (ours, ran.tapes))
        if here != there:
            at = next((at for at, (one, other) in enumerate(zip(here, there, strict=False)) if one != other), -1)
            yield (
                f"rank {ours.rank}, {step} step, event {at} of {len(here)} and {len(there)}: "
                f"{here[at]} dry-run, {there[at]} run"
            )
    totals = {
        "parameters": (ours.parameters, ran.tapes.parameters),
        "flops": (work(ours.steady), ran.flops),
        "peak": (sum_stage_memory(ours.steady, 0).peak_bytes, ran.peak),
    }
    yield from (
        f"rank {ours.rank} {name}: {here} dry-run, {there} run"
        for name, (here, there) in totals.items()
        if here != there
    )
    for line in differences(sum_traffic(ours.steady), ran.said):
        yield f"rank {ours.rank} {line}".replace("planned", "run")


def _sum_bags(mode: Any, _func: Any, rows: Tensor, _indices: Tensor, offsets: Tensor, *_: Any) -> tuple[Tensor, ...]:
    """Sums of rows: torch's own for fake tensors has the CPU's short way in fp32, but not in bf16."""
    with mode:
        empty, sizes = (offsets.new_empty(length) for length in (0, len(offsets)))
        return rows.new_empty(len(offsets), rows.shape[1]), empty, sizes, sizes.new_empty(len(offsets))


def _number_groups(tape: Tape) -> Tape:
    """Process groups are named in order: their names differ from one world to another."""
    names = {group: str(place) for place, group in enumerate(dict.fromkeys(message.group for message in tape.messages))}
    tape.messages[:] = [message._replace(group=names[message.group]) for message in tape.messages]
    return tape


# All of them


def main() -> int:
    """Run every case, print what differs, write the table."""
    parser = argparse.ArgumentParser(description="the dry run against the run")
    parser.add_argument("--markdown", type=Path, help="write the table there")
    parser.add_argument("--only", nargs="*", default=[], help="words that a case must have")
    options = parser.parse_args()
    cases = [case for case in (*QUICK, *MORE) if all(word in str(case) for word in options.only)]
    rows, equal = [], 0
    with show_progress("dry run against run") as report:
        for number, case in enumerate(cases):
            report(str(case), number, len(cases))
            row, sound = _row(case)
            rows.append(row)
            equal += sound
    if options.markdown:
        options.markdown.write_text("\n".join((*_page(cases, equal), *rows, "")))
    print(f"{equal} of {len(cases)} layouts are dry-run as they run")
    return 0 if equal == len(cases) else 1


def _row(case: Case) -> tuple[str, bool]:
    begin = time.perf_counter()
    words = f"{case.layout_text}{' pairs' * case.pairs}"
    start = f"| {case.name} | `{words}` | {case.precision} |"
    try:
        verdict = run(case)
    except Exception as error:  # a row of the table
        print(f"{case}\n  {error}", file=sys.stderr)
        return f"{start} | | | | | | | **{str(error).strip().splitlines()[-1][:100]}** | |", False
    for line in verdict.unequal:
        print(f"{case}\n  {line}", file=sys.stderr)
    ranks = f"{verdict.ranks} of {case.layout.world}"
    numbers = (verdict.events, verdict.messages, verdict.sent_bytes, verdict.flops, verdict.states, verdict.peak)
    counts = " | ".join(f"{number:,}" for number in numbers)
    said = "equal" if not verdict.unequal else f"**{len(verdict.unequal)} differ**"
    seconds = time.perf_counter() - begin
    return f"{start} {ranks} | {counts} | {said} | {seconds:.1f} |", not verdict.unequal


def _page(cases: Sequence[Case], equal: int) -> tuple[str, ...]:
    worlds = ", ".join(map(str, sorted({case.layout.world for case in cases})))
    command = "python -m tests.agree.dry_run.real --markdown docs/explanation/measurements/006-dry-run-against-run.md"
    return (
        "# 006 · The dry run compared with the run",
        "",
        f"After this page you know that a dry run executes what the real run executes, for {len(cases)} layouts.",
        "",
        f"`{command}`: {len(cases)} layouts on {worlds} gloo processes, {equal} dry-run exactly as they run.",
        f"{date.today()}, Python {platform.python_version()}, torch {torch.__version__}, 2 busy cores. Models, batches "
        "and sequences of 24 tokens are those of [the parity proof](003-parity.md); models with + have sizes that "
        "torch's grouped matmul supports. Every process runs two steps under the recorder of the dry run, with real "
        "tensors and real messages, and a third step under the memory meter of the trainer.",
        "",
        "**Equal** means that both recordings of a rank have the same events in the same order: tensors that exist at "
        "the start, allocations with bytes, module, line and operation, frees, kernels with shape, dtype, FLOPs and "
        "bytes moved, messages with axis, ranks, dtype, bytes, tensor and peer, waits, and scopes. Kernels are "
        "compared in their order among messages, not among allocations. The metered step has the same parameters, "
        "FLOPs, peak bytes, and messages and bytes by axis and collective.",
        "",
        "The columns: *ranks* is the number of dry-run ranks, and of all ranks. *events* counts both steps of these "
        "ranks; *messages*, *sent bytes* and *FLOPs* are of their second step. *states* (parameters, moments, "
        "gradients) and *peak* are the bytes of the rank with the highest peak.",
        "",
        "For the comparison the real run was changed in three ways: experts are chosen in turn, so that each gets as "
        "many rows as in the dry run; gloo gets copies of what is sent, because its threads free tensors and hooks of "
        "a recomputation; and buffers that gloo allocates during a wait (of reduce_scatter) are not counted. One "
        "change was made to the dry run: torch's fake embedding_bag in bf16 has an index of 8 bytes per copied row, "
        "which the CPU's kernel does not allocate.",
        "",
        "| model | layout | precision | ranks | events | messages | sent bytes | FLOPs | states | peak | tapes | s |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    )


if __name__ == "__main__":
    sys.exit(main())
