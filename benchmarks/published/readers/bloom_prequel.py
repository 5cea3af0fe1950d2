"""The layouts that BigScience tried before BLOOM: Megatron-DeepSpeed on 8 to 384 A100 of Jean Zay, ZeRO-1.

Facts of bigscience-workshop/bigscience@053adaf:train/tr11-176B-ml/chronicles-prequel.md: no sequence
parallelism, 16-bit gradients unless the row says fp32; a stage takes layers/pp, rounded up, and the last the rest; the
106-layer runs give each embedding a layer's place. nvidia-smi of the first and last node; second iteration.
CUDA_LAUNCH_BLOCKING=1, as the larger runs hung without it. Four 100 Gbit/s links per node (arXiv:2211.05100 §3.3).
DeepSpeed's config sets only the ZeRO stage, so its buckets have default sizes (setup-test-n2.slurm@7148d3e). On
2022-02-25 PCI-Express was tuned: "do not compare today's numbers to yesterday's".
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.published.case import Case, Excluded
from benchmarks.published.cells import Row, number, read_machine, read_recomputation, read_required_integer, sharding
from benchmarks.published.convert import NOTHING, batch, case_of, layout_of_row, read
from benchmarks.published.readers.gpt import gpt_of
from fivefold.stack.catalog import build_stack
from fivefold.units import GIB, ceil_div

SOURCE = "bloom_prequel"
NETWORK = "four 100 Gbit/s Omni-Path links per node: arXiv:2211.05100 §3.3; latency as in the catalog"
VOCAB = 250_000  # padded to 250 880 by Megatron at tp8, as in the config.json of bigscience/bloom


def cases() -> Iterator[Case | Excluded]:
    """Yield every run that names its layers and heads.

    Rivals share model, batch and the state of the cluster's tuning.
    """
    return read(SOURCE, rule=_rule, case=_case)


def _rule(row: Row) -> str:
    """Return why a row is left out; empty if it is not."""
    if row["trust"] == "low":
        return "the source contradicts itself: " + row["note"].partition("SUSPECT: ")[2]
    if not row["layers"] or not row["heads"]:
        return "layers or heads are not printed"
    if not row["step_s"] and not row["mem_gb_nvidia_smi"]:
        return NOTHING
    return ""


def _stages(layers: int, pp: int) -> tuple[int, ...]:
    """Return the layers of each stage; Megatron-DeepSpeed counts embedding and head as layers where that divides."""
    if layers % pp == 0:
        return ()
    if (layers + 2) % pp == 0:  # partition method type:transformer|embed
        per_stage = (layers + 2) // pp
        return (per_stage - 1, *[per_stage] * (pp - 2), per_stage - 1)
    most = ceil_div(layers, pp)
    return (*[most] * (pp - 1), layers - most * (pp - 1))


def _case(row: Row) -> Case:
    """Return the case of a row: a GPT with layers spread over the stages as the source does."""
    model = gpt_of(row, vocab=VOCAB)
    layout = layout_of_row(
        row,
        zero=sharding(row, silent=1),
        ac=read_recomputation(row),
        sp=row["tp"] == "1",
        stages=_stages(model.layers, read_required_integer(row, "pp")),
    )
    machines = read_machine(row, nic_gigabits=50, source=NETWORK)
    tuned = "tuned" if "tuning" in row["note"] else "untuned"
    return case_of(
        SOURCE,
        row,
        stack=build_stack("megatron-deepspeed").replace(launch_blocking=True),
        model=model,
        machine=machines,
        layout=layout,
        seconds=number(row, "step_s"),
        memory_bytes=number(row, "mem_gb_nvidia_smi") * GIB,
        memory="driver",
        rivals=f"{SOURCE} {model.name} {model.heads} {machines.ranks} {batch(row, layout)} {tuned}",
    )._replace(release=tuned)
