"""GPTs under Modalities' FSDP on Leonardo (A100) and MareNostrum 5 (H100): samples/s, on 4 to 2,048 GPUs.

Modalities/modalities@aa1a3bc:docs/scaling_experiments. Its tables name a model by its size alone. The FLOPs per token
that MFU and samples/s imply are 6 · 12·L·D² + 12·L·D·T of the shapes below, to four digits, at both sequence lengths;
heads are those that GPT-3 has at these sizes (arXiv:2005.14165, table 2.1), which has no 28B. The rest is assumed to be
as in Modalities' own 2.7B (@d2690b5:config_files, "checked"): SwiGLU, rotary embedding, layer norms, no biases,
PyTorch's flash attention, not compiled. By its code of that day embeddings are tied, weights and reductions are in bf16
over fp32 shards (running_env/env_utils.py), full blocks are checkpointed without reentry, optimizer and loss are
PyTorch's. HYBRID_SHARD shards within a node.

Both clusters have four chips of their own in a node, wired directly, with 64 GB in four stacks. Leonardo
(arXiv:2307.16885): 124 SMs where A100 has 108, 1.64 TB/s, 467 W in nvidia-smi, two dual-port HDR100 per node.
MareNostrum 5 (www.bsc.es/supportkc): HBM2 of 4,096 bits at 1,593 MHz (bsc-mem/Mess-Results@635f30b:Systems/HPC/MN5),
700 W in nvidia-smi, four NDR200 per node. Read after all constants were set, so all rows are held out.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

from benchmarks.published.case import Case, Excluded
from benchmarks.published.cells import Row, number, read_recomputation, read_required_integer
from benchmarks.published.convert import case_of, layout_of_row, read, seconds_of_tokens
from fivefold.errors import UserError
from fivefold.machine import catalog
from fivefold.machine.spec import Machine
from fivefold.model.spec import Model
from fivefold.stack.catalog import build_stack

STACK = build_stack("fsdp2").replace(
    flat_shards=True,
    comm_buffers="freed",
    backward_all_gather="needed",
    zero2_shards="view",
    reduce_in_fp32=False,
)
NO_HEADS = "how many heads the 28B has is not stated"
SHAPES = {  # layers, width, heads
    "GPT 2.7B": (32, 2560, 32),
    "GPT 6.7B": (32, 4096, 32),
    "GPT 13B": (40, 5120, 40),
}
NODE = 4
SITES = {
    "Leonardo": "a100:{gpus} node=4 nic=100Gbit memory=64GB hbm=1.64TB watts=467",
    "MareNostrum 5": "h100:{gpus} node=4 nic=200Gbit memory=64GB hbm=1.631TB",
}


@cache
def _build_machine(site: str, gpus: int) -> Machine:
    """Return ``gpus`` of a site; links between nodes are named before a run of one node is cut out."""
    if site not in SITES:
        raise UserError(f"the cluster {site!r} is not known")
    resolved = catalog.resolve(SITES[site].format(gpus=max(gpus, 2 * NODE)), local=Path())
    near, far = resolved.links
    chip = resolved.chip
    if site == "Leonardo":
        peaks = {dtype: flops * 124 / 108 for dtype, flops in chip.peak_flops.items()}
        chip = chip.replace(peak_flops=peaks, multiprocessors=124)
    links = (near.replace(direct=True, reduction_bandwidth=None), far)
    return catalog.with_ranks(resolved.replace(chip=chip, links=links), gpus)


def _rule(row: Row) -> str:
    return NO_HEADS if row["model"] == "GPT 28B" else ""


def _model(row: Row) -> Model:
    """Return the model of a row by its name, whose sizes the source states."""
    if row["model"] not in SHAPES:
        raise UserError(f"the shape of {row['model']!r} is not known")
    layers, width, heads = SHAPES[row["model"]]
    return Model(
        name=row["model"].lower().replace(" ", "-"),
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=heads,
        head_dim=width // heads,
        ffn=-(-int(2 * 4 * width / 3) // 256) * 256,  # SwiGLU._get_hidden_dim
        vocab=50_304,
        norm="layernorm",
        tied_embeddings=True,
    )


def _case(row: Row) -> Case:
    """Return the case of a row, at its site, sharded over all ranks or within a node."""
    gpus = read_required_integer(row, "gpus")
    where = _build_machine(row["site"], gpus)
    shard_group = NODE if row["sharding"] == "HYBRID_SHARD" else None
    return case_of(
        "modalities",
        row,
        stack=STACK,
        model=_model(row),
        machine=where,
        layout=layout_of_row(row, zero=3, ac=read_recomputation(row), shard_group=shard_group),
        seconds=lambda job: seconds_of_tokens(job, rate=number(row, "samples_per_s") * job.sequence, ranks=1),
    )._replace(held_out=True)


def cases() -> Iterator[Case | Excluded]:
    """Yield one case, or one exclusion, per measured row."""
    return read("modalities", rule=_rule, case=_case)
