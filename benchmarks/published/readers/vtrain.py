"""vTrain (Bang et al. 2024, arXiv:2312.12391): Megatron-DeepSpeed on A100, one node and 64 to 512 GPUs.

Facts of VIA-Research/vTrain@f8dda84: GPT with 50257 words, dropout 0.1, fp16 (src/predictor.py), 1F1B and full
recomputation (config/validation), 800 Gbit/s per node of 8 (inter_node_bandwidth); gradients are reduced after the
last micro-batch, in one go (use_gradient_bucket false). No ZeRO appears anywhere.

The runs of one node are none: to the nanosecond they are sums of its own simulator's parts (decision 035), kernels of
one layer timed in one process (src/trainer.py). So they are read as src/predictor.py composes them.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.published.case import Case, Excluded
from benchmarks.published.cells import Row, number, precision, read_machine, read_recomputation, read_required_integer
from benchmarks.published.convert import batch, case_of, layout_of_row, read
from benchmarks.published.readers.gpt import gpt_of
from fivefold.stack.catalog import build_stack
from fivefold.stack.spec import Stack

SOURCE = "vtrain"
VOCAB = 50257
NETWORK = "800 Gbit/s per node: VIA-Research/vTrain@f8dda84:config/validation; latency as in the catalog"
EITHER = "fp16 or bf16 (not stated in the repository)"  # of the runs; its predictor is for fp16

RUNS = build_stack("megatron-deepspeed").runs
STACK = build_stack("megatron-deepspeed").replace(
    runs=RUNS.replace(schedules=("1f1b", "gpipe"))
)  # gpipe: as 1F1B, see below


def cases() -> Iterator[Case | Excluded]:
    """Yield every measured iteration; rivals share model, GPUs and batch."""
    return read(SOURCE, rule=lambda row: "", case=_case)


def _case(row: Row) -> Case:
    """Return the case of a row: measured on one node, or on many with NICs of 100 Gbit/s."""
    model = gpt_of(row, vocab=VOCAB)
    machines = read_machine(row, nic_gigabits=100, source=NETWORK)
    layout = layout_of_row(row, zero=0, ac=read_recomputation(row), sp=row["tp"] == "1")
    stack = STACK
    composed = row["set"] == "single-node"
    if composed:  # no layer is run again, the head has weights of its own, and each rank the words that tp divides
        model = model.replace(vocab=VOCAB // layout.tp * layout.tp, tied_embeddings=False)
        layout, stack = layout.replace(ac="none"), _build_stack(model.heads // layout.tp * layout.mbs)
    if layout.schedule == "1f1b" and layout.pp > read_required_integer(row, "microbatches"):
        # With fewer micro-batches than stages, 1F1B and GPipe both take (m + pp − 1)(F + B); memory is not asked.
        layout = layout.replace(schedule="gpipe")
    return case_of(
        SOURCE,
        row,
        stack=stack,
        model=model,
        machine=machines,
        layout=layout,
        recipe=precision("fp16" if row["precision"] == EITHER else row["precision"], sums="narrow"),
        seconds=number(row, "iteration_ms") / 1e3,
        rivals=f"{SOURCE} {model.name} {machines.ranks} {batch(row, layout)}",
    )._replace(composed=composed)


def _build_stack(squares: int) -> Stack:
    """Return the stack of a composed run, with ``squares`` squares of scores per rank (src/model/fused_softmax.py).

    The fused softmax wants a multiple of 4; else scores are widened, scaled, masked and narrowed by a kernel each.
    """
    forward, backward = STACK.extra_kernels
    more = (forward, backward) if squares % 4 == 0 else (forward + 5, backward + 6)
    return STACK.replace(vocab_multiple=1, loss="low_precision", extra_kernels=more)
