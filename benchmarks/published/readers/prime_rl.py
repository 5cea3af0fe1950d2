"""prime-rl's own benchmarks: tokens/s of all GPUs and peak reserved GiB of FSDP2 with torch.compile, layers recomputed.

PrimeIntellect-ai/prime-rl@e257dae and @aa1bec0:benchmarks/results/BENCHMARKS.md; two micro-batches a step, the model
compiled (benchmarks/scripts/run_single_benchmark.py@0078f72), torch.cuda.max_memory_reserved (trainer/sft/train.py@
01c3ad6), fp32 shards and reductions, resharded after the forward (trainer's configuration). Fine-tuning makes all
logits for PyTorch's cross entropy, RL makes them in chunks (docs/memory_usage.md@8be9a6d). Half is held out.
Its experts are torchtitan's, with torch.gather and torch.scatter_add (trainer/models/layers/moe.py@049a80a).
tokens/s are the mean of three running means over steps 2 to 4, so that the second, up to 14 % slower than the median,
counts 61 % (trainer/perf.py@d8f290e). Where their seconds are known (benchmarks/baselines@8718eb1), the median counts.
After the backward the host waits for the loss (trainer/sft/train.py@d8f290e, loss.item()). Clipping and AdamW by
foreach then take 80 to 120 us of a host's processor for each DTensor (torch 2.13, 100 and 400 of them): two launches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

from benchmarks.published.case import Case, Excluded
from benchmarks.published.cells import Row, apply_printed_shape, find_model, number, read_machine, read_recomputation
from benchmarks.published.convert import ADAPTERS, case_of, layout_of_row, read, seconds_of_tokens
from fivefold.errors import UserError
from fivefold.stack.catalog import build_stack
from fivefold.units import GIB

UPDATE_KERNELS = 2
OFFLOADED = "activations are offloaded to the host in addition to recomputation; ours are one or the other"
MORE_THAN_A_STEP = "a step of reinforcement learning does more than forward, backward and update"

# FlashAttention-2 runs on Hopper and Blackwell as on A100; 3 and 4 are written for them.
ATTENTION: Mapping[str, Literal["flash", "flash2"]] = {"FA2": "flash2", "FA3": "flash", "FA4": "flash"}
LOSS: Mapping[str, Literal["plain", "chunked"]] = {"SFT": "plain", "RL": "chunked"}


def _rule(row: Row) -> str:
    if row["method"] != "full":
        return ADAPTERS
    return OFFLOADED if "offloaded" in row["recompute"] else ""


def _case(row: Row) -> Case:
    """Return the case of a row, with the attention and the loss of its job."""
    attention, loss = ATTENTION.get(row["attention"]), LOSS.get(row["job"])
    if attention is None or loss is None:
        raise UserError(f"attention {row['attention']!r} of a {row['job']!r} job was not read")
    name = row["model"].removesuffix("-2507").removesuffix("-Instruct")
    model = apply_printed_shape(find_model(name), row)
    machines = read_machine(row)
    layout = layout_of_row(row, zero=3, ac=read_recomputation(row))
    rate, trains = number(row, "tokens_per_s"), row["job"] == "SFT"
    return case_of(
        "prime_rl",
        row,
        stack=build_stack("fsdp2").replace(
            attention=attention,
            loss=loss,
            kernels="fused",
            compile=True,
            compile_loss=False,
            update_kernels=UPDATE_KERNELS,
            token_permutation="scatter_add",
        ),
        model=model,
        machine=machines,
        layout=layout,
        seconds=lambda job: number(row, "step_s") or seconds_of_tokens(job, rate=rate if trains else 0.0, ranks=1),
        memory_bytes=number(row, "peak_reserved_gib") * GIB,
        memory="reserved",
        left_out=(("time", MORE_THAN_A_STEP),) if rate and not trains else (),
    )


def cases() -> Iterator[Case | Excluded]:
    """Yield one case, or one exclusion, per measured row."""
    return read("prime_rl", rule=_rule, case=_case, halved=True)
