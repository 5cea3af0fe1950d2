"""MPT models under llm-foundry's FSDP on A100 and H100: tokens/s.

mosaicml/llm-foundry@8c8dd48:scripts/train/benchmarking/README.md. Flash attention, learned positions, no biases,
plain GELU, tied embeddings, fused cross-entropy, no compile; whole blocks recomputed where HFU > MFU. Composer leaves
FSDP's gradient synchronisation on in every micro-batch. mp_mode PURE reduces gradients in 16 bits, DEFAULT in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator

from fivefold.check.published.case import Case, Excluded, machine, regime
from fivefold.check.published.convert import Row, number, read, seconds_of_tokens, spread, whole
from fivefold.job import Job, recipe
from fivefold.model.spec import Model

UNEVEN = "micro-batches of unequal size (Composer's micro-batching engine)"
CHIPS = {"a100_40gb": "a100-40", "a100_80gb": "a100", "h100_80gb": "h100"}


def _model(row: Row) -> Model:
    width, heads = whole(row, "hidden"), whole(row, "heads")
    return Model(
        name=row["model"].lower(),
        layers=whole(row, "layers"),
        width=width,
        heads=heads,
        kv_heads=heads,
        head_dim=width // heads,
        ffn=whole(row, "ffn"),
        vocab=whole(row, "vocab"),
        positions=whole(row, "seq"),  # the parameter counts of a model grow by one width per token
        norm="layernorm",
        mlp="plain",
        activation="gelu",
        position="learned",
        tied_embeddings=True,
    )


def _rule(row: Row) -> str:
    return UNEVEN if whole(row, "gbs") % (whole(row, "dp") * whole(row, "mbs")) else ""


def _case(row: Row) -> Case:
    model = _model(row)
    layout = spread(row, zero=whole(row, "zero"), ac=row["recompute"])
    precision = "bf16-grad16" if row["mp_mode"] == "PURE" else {"amp_fp8": "fp8"}.get(row["precision"], "bf16")
    job = Job(
        linears="apart",
        early_stop=False,
        sequence=whole(row, "seq"),
        global_batch=whole(row, "gbs"),
        precision=recipe(precision),
        attention="flash1",
        kernels="plain",
        overlap=("dp",),
        reduce="micro_batch",
    )
    where = machine(CHIPS[row["hardware"]], whole(row, "gpus"))
    return Case(
        source="llm_foundry",
        row=row["row_id"],
        regime=regime("torch", model, where, layout),
        model=model,
        machine=where,
        layout=layout,
        job=job,
        step_seconds=seconds_of_tokens(job, rate=number(row, "tokens_per_s") / where.ranks, ranks=where.ranks),
    )


def cases() -> Iterator[Case | Excluded]:
    """One per measured row."""
    return read("llm_foundry", rule=_rule, case=_case)
