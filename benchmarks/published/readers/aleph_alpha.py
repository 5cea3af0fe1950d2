"""Layouts of LLaMA 13B, 30B and 65B on 32 to 256 A100-80GB, of sequences of 2,048 and 8,192 tokens: seconds of a step.

Hagemann et al. 2023 (arXiv:2311.05610), whose runs are published as tables. Models, vocabulary and batch are those that
the printed MFU implies (6N + 12·L·H·S). Software: Aleph-Alpha/scaling@737f855, its first public version.
pipeline_schedule/train.py is 1F1B. optimizer/optimizer.py reduces gradients at the end of a step, in fp32 and in
buckets, and gathers the weights of ZeRO-1 after the update. parallel_module/activation_checkpointing.py runs full
layers again, losses/cross_entropy.py widens logits to fp32, and pipeline_partitioning.py divides embedding, layers,
norm and head evenly by their number. Its head gathers the logits over tp (layers/lm_head.py), so that every rank has
all of them; no stack of ours does, so the last stage is predicted smaller and faster. One matmul makes queries, keys
and values (attention_qkv_in_one), gate and up are one each (nn/mlp.py), and norms gather the sequence for what follows
(nn/norm). Attention as printed; "rms" is a fused norm. Read after all constants were set, so all rows are held out.
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
)
from benchmarks.published.convert import batch, case_of, layout_of_row, read
from fivefold.job import get_recipe
from fivefold.model.spec import Model
from fivefold.stack.catalog import build_stack
from fivefold.stack.spec import Stack

SOURCE = "aleph_alpha"
SEPARATE_SOFTMAX = "scale, mask and softmax of attention are separate kernels of PyTorch; ours are one"
ENDS = 3  # embedding, norm and head, which are modules of the pipeline as each layer is


def split_layers(layers: int, pp: int) -> tuple[int, ...]:
    """Return the layers of each stage, of which the first also has the embedding, the last the norm and the head."""
    modules, rest = divmod(layers + ENDS, pp)
    stages = [modules + (stage < rest) for stage in range(pp)]
    stages[0] -= 1
    stages[-1] -= ENDS - 1
    return tuple(stages)


def _rule(row: Row) -> str:
    return SEPARATE_SOFTMAX if row["kernel"] == "torch" and not row["oom"] else ""


def _stack(row: Row) -> Stack:
    """Return DeepSpeed with the kernels that a row names."""
    attention, _, norms = row["kernel"].partition(", ")
    return build_stack("deepspeed").replace(
        attention="unfused" if attention == "fused" else attention,
        loss="plain",
        kernels="norms" if norms else "plain",
        rope="unfused",
        column_inputs="saved",
        input_grad_all_reduces=(1, 2),
        reduce_dtype="fp32",
        early_stop=False,
        flat_copies=(),
        overlap=(),
        scatter_gather_tensors=False,
    )


def _case(row: Row) -> Case:
    """Return the case of a row, whose model is given by its sizes."""
    heads, pp = read_required_integer(row, "heads"), degree(row, "pp")
    model = Model(
        name=row["model"].lower().replace(" ", "-"),
        layers=read_required_integer(row, "layers"),
        width=read_required_integer(row, "hidden"),
        heads=heads,
        kv_heads=heads,
        head_dim=head_dim(row),
        ffn=read_required_integer(row, "ffn"),
        vocab=read_required_integer(row, "vocab"),
        positions=read_required_integer(row, "seq"),
    )
    layout = layout_of_row(
        row,
        zero=1,
        ac=read_recomputation(row),
        sp=row["sp"] == "y" or degree(row, "tp") == 1,
        stages=split_layers(model.layers, pp) if pp > 1 else (),
    )
    return case_of(
        SOURCE,
        row,
        stack=_stack(row),
        model=model,
        machine=read_machine(row),
        layout=layout,
        recipe=get_recipe("bf16-grad16"),
        seconds=number(row, "step_s"),
        rivals=f"{model.name} {model.positions} on {row['gpus']}, batch {batch(row, layout)}",
    )._replace(held_out=True)


def cases() -> Iterator[Case | Excluded]:
    """Yield one case, or one exclusion, per measured row."""
    return read(SOURCE, rule=_rule, case=_case)
