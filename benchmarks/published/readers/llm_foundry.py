"""MPT models under llm-foundry's FSDP on A100 and H100: tokens/s.

mosaicml/llm-foundry@8c8dd48:scripts/train/benchmarking/README.md. Flash attention, learned positions, biases (as many
parameters as are printed), plain GELU, tied embeddings, fused cross-entropy, no compile; blocks recomputed where HFU >
MFU, by checkpoints of PyTorch 2.1 that are not reentrant (sweep.sh and submit_benchmarks.py@b2a43a1). Composer leaves
FSDP's gradient synchronisation on in every micro-batch. mp_mode PURE reduces gradients in 16 bits, DEFAULT in fp32. At
large scale some models ran FlashAttention-2 (sweep.py@5e85bd6). The runs on A100-40GB are those of April 2023 with
PyTorch 1.13 (mosaicml/examples@9fa3ceb:examples/llm/throughput), whose checkpoints run all again.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.published.case import Case, Excluded
from benchmarks.published.cells import (
    Row,
    degree,
    head_dim,
    number,
    read_machine,
    read_recomputation,
    read_required_integer,
    sharding,
)
from benchmarks.published.convert import case_of, layout_of_row, read, seconds_of_tokens
from fivefold.model.spec import Model
from fivefold.stack.catalog import build_stack

FLASH2_AT_LARGE_SCALE = ("MPT-1b", "MPT-3b", "MPT-7b", "MPT-70b")
UNEVEN = "micro-batches of unequal size (Composer's micro-batching engine)"


def model_of(row: Row) -> Model:
    """Return the model of a row: Composer's MPT, or MosaicGPT before it."""
    width = read_required_integer(row, "hidden")
    heads = read_required_integer(row, "heads")
    return Model(
        name=row["model"].lower(),
        layers=read_required_integer(row, "layers"),
        width=width,
        heads=heads,
        kv_heads=heads,
        head_dim=head_dim(row),
        ffn=read_required_integer(row, "ffn"),
        vocab=read_required_integer(row, "vocab"),
        positions=read_required_integer(row, "seq"),  # the parameter counts of a model grow by one width per token
        norm="layernorm",
        mlp="plain",
        activation="gelu",
        mlp_bias=True,
        position="learned",
        qkv_bias=True,
        out_bias=True,
        tied_embeddings=True,
    )


def _rule(row: Row) -> str:
    return (
        UNEVEN
        if row["gbs"] and read_required_integer(row, "gbs") % (degree(row, "dp") * read_required_integer(row, "mbs"))
        else ""
    )


def _case(row: Row) -> Case:
    """Return the case of a row; the largest runs used version 2 of FlashAttention."""
    model, stack = model_of(row), build_stack("llm-foundry")
    if "Large Scale" in row["table"] and row["model"] in FLASH2_AT_LARGE_SCALE:
        stack = stack.replace(attention="flash2")
    layout = layout_of_row(row, zero=sharding(row, silent=3), ac=read_recomputation(row))
    return case_of(
        "llm_foundry",
        row,
        stack=stack.replace(reduce_in_fp32=row["mp_mode"] != "PURE", early_stop=row["hardware"] != "a100_40gb"),
        model=model,
        machine=read_machine(row),
        layout=layout,
        seconds=lambda job: seconds_of_tokens(job, rate=number(row, "tokens_per_s"), ranks=1),
    )


def cases() -> Iterator[Case | Excluded]:
    """Yield one case, or one exclusion, per measured row."""
    return read("llm_foundry", rule=_rule, case=_case)
