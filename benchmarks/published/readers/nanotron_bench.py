"""nanotron's sweeps of a 1B Llama on 8 to 64 H100, from logs of single runs: seconds, allocated and reserved MiB.

huggingface.co/nanotron/old_bench and bench_cluster, log_metrics.csv of each layout; huggingface/bench_cluster@2e2b026:
template/base_config.py and create_configs.py@0144ad0: ZeRO-1, fp32 gradient sums, 1F1B, tensor parallelism whose
messages are waited for (tp_linear_async_communication is off) and whose gathered inputs autograd keeps
(nanotron@eca4bdc: parallel/tensor_parallel/functional.py, column_linear), nothing recomputed. Seconds are the median of
iterations 8 to 12, empty where they disagree. Of pipelines it is not stated whose memory the log has. Of eight stages
nanotron's division gives the last the head alone. Half is held out.

Runs over two nodes or more take up to four times as long as predicted, which neither bytes nor messages explain
(nanotron@eca4bdc: parallel/pipeline_parallel/p2p.py; docs/explanation/how-a-step-costs/published.md). The network did
not stay the same: where iterations disagree, one takes 2.1 to 2.8 s as predicted and the others 8.7 to 9.9 s. Later
bench_cluster@f55b5e5 "fix throughput issue" changed PyTorch, Triton, FlashAttention and libraries linked in Slurm.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.published.case import Case, Excluded
from benchmarks.published.cells import Row, number, read_machine, read_recomputation, sharding
from benchmarks.published.convert import case_of, layout_of_row, read
from benchmarks.published.readers import ultrascale_playbook
from fivefold.units import MIB

WHOSE = "of which pipeline stage's rank the log has the memory is not stated"


def _case(row: Row) -> list[Case]:
    """Return the cases of a row: its allocated and its reserved memory, which are known of the first rank only."""
    model = ultrascale_playbook.model_of(row)
    layout = layout_of_row(row, zero=sharding(row, silent=0), ac=read_recomputation(row))
    if layout.pp > 1 and layout.v == 1:
        layout = layout.replace(stages=ultrascale_playbook.stages_of(model, layout.pp))
    machines = read_machine(row)
    known = row["rank"] == "0"
    case = case_of(
        "nanotron_bench",
        row,
        stack=ultrascale_playbook.stack_of(layout).replace(async_tp=False, column_inputs="saved"),
        model=model,
        machine=machines,
        layout=layout,
        seconds=number(row, "step_s"),
        memory_bytes=number(row, "peak_allocated_mib") * MIB if known else None,
        rivals=f"{model.name} on {machines.ranks}",
        left_out=() if known or not row["peak_allocated_mib"] else (("peak", WHOSE),),
    )
    return [case, *case.with_reserved(number(row, "peak_reserved_mib") * MIB if known else 0)]


def cases() -> Iterator[Case | Excluded]:
    """Yield one case, or one exclusion, per measured row."""
    return read("nanotron_bench", rule=lambda row: "", case=_case, halved=True)
