"""MegaScale (arXiv:2402.15627): 175B and 530B on 256 to 12 288 GPUs, and Megatron-LM; held out of every fit.

§6.1 prints sequence, vocabulary, virtual stages, for 530B a sequence per GPU; §3 what MegaScale does. PFLOP/s are
312 a GPU times the MFU, so an A100; NICs of 200 Gbit/s. MFU counts full attention, or half of it with the window.

Assumed, as not printed: micro-batches of one sequence, 80 GB, sequence parallelism and recomputed attention scores as
in arXiv:2205.05198, sharded optimizer states (of MegaScale §3.2 says ZeRO-2), a window as wide as the sequence.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.published.case import Case, Excluded
from benchmarks.published.cells import Row, integer, number, read_machine
from benchmarks.published.convert import case_of, layout_of_row, read, seconds_of_flops
from benchmarks.published.readers.gpt import gpt_of
from fivefold.errors import UserError
from fivefold.stack.catalog import build_stack
from fivefold.stack.spec import Stack

SOURCE = "megascale"
VOCAB = 64_000
VIRTUAL = {"175B": 6, "530B": 3}
STEPS = (  # of table 3, each on top of those before
    "Megatron-LM baseline",
    "+ parallel transformer block",
    "+ sliding window attention",
    "+ TP overlap",
    "+ PP overlap",
    "+ DP overlap",
    "+ efficient operators",
    "+ misc",
    "+ LAMB (batch x3)",
)
PARALLEL_BLOCK, WINDOW, TP, PP, DP, OPERATORS = range(1, 7)


def _steps(row: Row) -> int:
    """Return how many of MegaScale's techniques a row uses."""
    if row["technique"]:
        if row["technique"] not in STEPS:
            raise UserError(f"technique {row['technique']!r} is none of table 3")
        return STEPS.index(row["technique"])
    return 0 if row["framework"] == "Megatron-LM" else len(STEPS) - 1


def _stack(steps: int) -> Stack:
    megatron = build_stack("megatron-lm")
    overlap = tuple(axis for axis, step in (("dp", DP), ("pp", PP), ("tp", TP)) if steps >= step)
    attention = "flash2" if steps >= OPERATORS else megatron.attention
    runs = megatron.runs.replace(zero=(0, 1), pipelined_zero=(0, 1))
    return megatron.replace(overlap=overlap, attention=attention, runs=runs)


def _case(row: Row) -> Case:
    """Return the case of a row, with the virtual stages of the paper."""
    if row["model"] not in VIRTUAL:
        raise UserError(f"model {row['model']!r} is none of the paper's")
    known = row | {"hardware": "A100-80GB", "mbs": "1", "vp": str(VIRTUAL[row["model"]]), "precision": "bf16"}
    if not row["gbs"] and row["model"] == "530B":
        known |= {"gbs": row["gpus"]}
    steps, machines = _steps(row), read_machine(known)
    model = gpt_of(row, vocab=VOCAB)
    model = model.replace(block="parallel_shared" if steps >= PARALLEL_BLOCK else "pre")
    layout = layout_of_row(known, zero=1, ac="none" if steps >= OPERATORS else "selective")
    rate = number(row, "mfu_pct") / 100 * 312e12
    windowed = steps >= WINDOW
    return case_of(
        SOURCE,
        known,
        stack=_stack(steps),
        model=model,
        machine=machines,
        layout=layout,
        seconds=lambda job: (
            number(row, "iteration_s")
            or seconds_of_flops(model, job, rate=rate, ranks=machines.ranks, count="causal" if windowed else "full")
        ),
    )._replace(held_out=True)


def _rule(row: Row) -> str:
    return "" if integer(row, "gpus") else "nothing was measured"


def cases() -> Iterator[Case | Excluded]:
    """Yield one case, or one exclusion, per measured row."""
    return read(SOURCE, rule=_rule, case=_case)
