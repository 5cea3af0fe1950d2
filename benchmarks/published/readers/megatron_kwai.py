"""Megatron-Kwai (Yuan et al., USENIX ATC 2024) against Megatron-LM: tokens/s and allocated bytes on A800 and H800.

kwai/Megatron-Kwai@b2646e4:README.md, whose tables print values of the variables of examples/atc24 (pretrain_llama.sh):
Llama without biases, 32,004 words, micro-batches of one sequence, interleaved stages, the distributed optimizer in fp32
sums whose messages do not overlap (no --overlap-grad-reduce), FlashAttention-2. Kwai's own software overlaps
the messages of tensor and context parallelism; ``ours`` recomputes norms and the activation, and offloads a share of
activations, which no layout of ours says. Megatron-LM of January 2024 (pretrain_llama_using_origin_megatron.sh) has
userbuffers where sequences are not shared. Nodes have eight GPUs and eight 100 Gbit/s NICs. Read after all constants
were set, so all rows are held out.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.published.case import Case, Excluded
from benchmarks.published.cells import (
    RECOMPUTED,
    Row,
    integer,
    number,
    read_machine,
    read_recomputation,
    read_required_integer,
)
from benchmarks.published.convert import case_of, layout_of_row, read, seconds_of_tokens
from fivefold.errors import UserError
from fivefold.layout.names import Axis
from fivefold.model.spec import Model
from fivefold.stack.catalog import build_stack
from fivefold.stack.spec import Stack

OFFLOADED = "a share of activations is offloaded to the host, which no layout of ours says"
NETWORK = "eight 100 Gbit/s NICs per node of eight: kwai/Megatron-Kwai@b2646e4:README.md"
SHAPES = {  # layers, width, heads, key heads, MLP
    "Llama-7B": (32, 4096, 32, 32, 11_008),
    "Llama-65B": (80, 8192, 64, 64, 22_016),
    "Llama-175B": (96, 12_288, 96, 96, 32_768),
    "Llama2-70B": (80, 8192, 64, 8, 28_672),
}
WORDS = RECOMPUTED | {"norm+act": "norm+act"}


def _rule(row: Row) -> str:
    return "" if row["offload_ratio"] == "0" else OFFLOADED


def _model(row: Row) -> Model:
    """Return the model of a row by its name, whose sizes the source's scripts state."""
    if row["model"] not in SHAPES:
        raise UserError(f"the shape of {row['model']!r} is not known")
    layers, width, heads, kv_heads, ffn = SHAPES[row["model"]]
    return Model(
        name=row["model"].lower(),
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=128,
        ffn=ffn,
        vocab=32_004,
        positions=read_required_integer(row, "seq"),
    )


def _stack(row: Row) -> Stack:
    userbuffers = row["method"] != "Megatron-LM" or integer(row, "cp") == 1
    overlap: tuple[Axis, ...] = ("cp", "pp", "tp") if userbuffers else ("cp", "pp")
    return build_stack("megatron-core").replace(attention="flash2", overlap=overlap, param_all_gather="before_forward")


def _case(row: Row) -> Case:
    """Return the case of a row, on hosts with NICs of 100 Gbit/s."""
    where = read_machine(row, nic_gigabits=100, source=NETWORK) if integer(row, "gpus") > 8 else read_machine(row)
    return case_of(
        "megatron_kwai",
        row,
        stack=_stack(row),
        model=_model(row),
        machine=where,
        layout=layout_of_row(row, zero=1, ac=read_recomputation(row, words=WORDS)),
        seconds=lambda job: seconds_of_tokens(job, rate=number(row, "tokens_per_s_per_gpu"), ranks=where.ranks),
        memory_bytes=number(row, "peak_allocated_bytes"),
    )._replace(held_out=True)


def cases() -> Iterator[Case | Excluded]:
    """Yield one case, or one exclusion, per measured row."""
    return read("megatron_kwai", rule=_rule, case=_case)
