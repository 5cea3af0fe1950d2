"""Convert rows for all readers: rows to cases or exclusions, throughput to seconds, cells to the layout of a row.

    step seconds = tokens of a step / (tokens/s/GPU · GPUs) = FLOPs of a step / (FLOP/s/GPU · GPUs)

Sources count FLOPs differently: attention as the full square (``full``) or only what the mask lets
through (``causal``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeVar

from pydantic import ValidationError

from benchmarks.published.case import Case, Counter, Excluded, Quantity, is_held_out, rows
from benchmarks.published.cells import Row, degree, integer, precision, read_machine, read_required_integer, schedule
from fivefold.errors import UserError
from fivefold.job import Job, Recipe
from fivefold.layout.spec import Layout
from fivefold.layout.stages import list_stage_layers
from fivefold.machine.spec import Machine
from fivefold.model.spec import Model
from fivefold.planner.counts.flops import work
from fivefold.record import explain
from fivefold.stack.spec import Stack

CHECK = "the source contradicts itself"
OUT_OF_MEMORY = "the run ended out of memory"
ADAPTERS = "trains adapters, whose rank and layers, or lengths of samples, were not read"
PACKED = "fine-tuning on samples packed to an unknown mix of lengths; attention and so time are less than of one sample"
NOTHING = "nothing was measured"
# Software whose fp8 is Transformer Engine's delayed scaling by default:
# NVIDIA/Megatron-LM@d98e8a6:megatron/core/transformer/transformer_config.py (fp8_recipe),
# NVIDIA/NeMo@8cfedd7:scripts/performance/argument_parser.py (--fp8_recipe: ds) and
# nemo/lightning/pytorch/plugins/mixed_precision.py, mosaicml/composer@6405188:composer/core/precision.py (AMP_FP8).
# Megatron-Bridge's is current scaling: src/megatron/bridge/training/mixed_precision.py@067f987 (fp8_recipe).
DELAYED_SCALING = ("megatron-core", "nemo", "llm-foundry")

T = TypeVar("T")


def read(
    source: str,
    *,
    rule: Callable[[Row], str],
    case: Callable[[Row], Case | list[Case]],
    kinds: tuple[str, ...] = ("measured",),
    halved: bool = False,
) -> Iterator[Case | Excluded]:
    """Yield every row of ``source``: a case (or some), or excluded by the first rule that it breaks or a cell not read.

    ``halved``: half of the rows are kept out of every fit (``case.is_held_out``). So are all pipelines with a stage of
    the embedding or the head alone, which were scored for the first time after all constants had been set.
    """
    for row in rows(source):
        outcomes = outcome(row, rule=rule, case=case, kinds=kinds)
        if isinstance(outcomes, str):
            yield Excluded(source, row["row_id"], outcomes)
        else:
            for entry in [outcomes] if isinstance(outcomes, Case) else outcomes:
                seconds = entry.step_seconds or None
                size = entry.memory_bytes or None
                sizes = map(len, list_stage_layers(entry.model, entry.layout))
                kept_out = (halved and is_held_out(row["row_id"])) or 0 in sizes
                measured = entry._replace(step_seconds=seconds, memory_bytes=size, held_out=entry.held_out or kept_out)
                yield measured if seconds or size else Excluded(source, entry.row, NOTHING)


def outcome(
    row: Row, *, rule: Callable[[Row], str], case: Callable[[Row], T], kinds: tuple[str, ...] = ("measured",)
) -> str | T:
    """Return the result of ``case`` for a row, or the first rule that it breaks, or the cell that cannot be read."""
    try:
        return _rule(row, kinds) or rule(row) or case(row)
    except UserError as unread:
        return str(unread)
    except ValidationError as illegal:  # of a layout, job or model
        return explain(illegal, Layout)


def _rule(row: Row, kinds: tuple[str, ...]) -> str:
    if row["kind"] not in kinds:
        return f"not measured: {row['kind'] or 'of no stated kind'}"
    return (CHECK if row["trust"] == "check" else "") or (OUT_OF_MEMORY if row.get("oom") == "y" else "")


def layout_of_row(row: Row, *, zero: int, **more: Any) -> Layout:
    """Return the layout of a row's degrees; data parallelism is what they leave of its GPUs."""
    tp, pp, cp, order = *(degree(row, key) for key in ("tp", "pp", "cp")), schedule(row)
    gpus = read_required_integer(row, "gpus")
    if gpus % (tp * pp * cp):
        raise UserError(f"{gpus} GPUs are not divisible by tp{tp} pp{pp} cp{cp}")
    fields: dict[str, Any] = {
        "dp": gpus // (tp * pp * cp),
        "tp": tp,
        "cp": cp,
        "pp": pp,
        "ep": degree(row, "ep"),
        "v": order.v,
        "zero": zero,
        "schedule": order.name,
        "mbs": read_required_integer(row, "mbs"),
    }
    return Layout(**(fields | more))


def batch(row: Row, layout: Layout) -> int:
    """Return the sequences per step: as printed, or the total of the printed micro-batches."""
    micro_batches = integer(row, "microbatches") or integer(row, "grad_accum")
    if not row.get("gbs") and micro_batches:
        return layout.dp * layout.mbs * micro_batches
    return read_required_integer(row, "gbs")


def delay_scales(recipe: Recipe) -> Recipe:
    """Return a recipe in fp8 with one scale for a tensor as Transformer Engine's ``DelayedScaling``; others as is."""
    if recipe.compute != "fp8" or recipe.scaling != "tensorwise":
        return recipe
    return recipe.replace(name=recipe.name.replace("fp8", "fp8-delayed", 1), scaling="delayed")


def case_of(
    source: str,
    row: Row,
    *,
    stack: Stack,
    model: Model,
    machine: Machine,
    layout: Layout,
    recipe: Recipe | None = None,
    sequence: int | None = None,
    seconds: float | Callable[[Job], float] | None = None,
    memory_bytes: float | None = None,
    memory: Counter = "allocated",
    quantity: Quantity = "peak",
    rivals: str = "",
    name: str = "",
    left_out: tuple[tuple[str, str], ...] = (),
) -> Case:
    """Return the case of a row: sequence, batch and precision are as it prints them, unless they are given.

    ``seconds``: of a step, or what makes them of the job. ``name``: the row's, unless one row is several cases.
    """
    if recipe is None:
        recipe = precision(row["precision"], sums="fp32" if stack.reduce_in_fp32 else "narrow")
        recipe = delay_scales(recipe) if stack.name in DELAYED_SCALING else recipe
    job = Job(
        sequence=sequence or read_required_integer(row, "seq"),
        global_batch=batch(row, layout),
        precision=recipe,
        stack=stack,
    )
    return Case(
        source=source,
        row=name or row["row_id"],
        model=model,
        machine=machine,
        layout=layout,
        job=job,
        step_seconds=seconds(job) if callable(seconds) else seconds,
        memory_bytes=memory_bytes,
        memory=memory,
        quantity=quantity,
        rivals=rivals,
        left_out=left_out,
        release=" ".join(row.get(key, "") for key in ("framework", "release")),
        site=row.get("site") or row.get("submitter") or "",
    )


RACK_RANKS = 64


def cluster(row: Row) -> Machine:
    """Return the machine of a row.

    NVLink joins the 72 GPUs of a rack, of which Slurm gives a job segments of 16 nodes of 4 (executors.py in the
    performance scripts of NVIDIA-NeMo/Megatron-Bridge).
    """
    resolved = read_machine(row)
    return split_into_nodes(resolved, RACK_RANKS) if resolved.ranks_per_node > RACK_RANKS else resolved


def split_into_nodes(machine: Machine, ranks: int) -> Machine:
    """Return ``found`` in nodes of another size."""
    near, far = machine.links
    links = (near.replace(span=ranks), far.replace(span=max(machine.ranks, ranks)))
    return machine.replace(ranks_per_node=ranks, links=links)


def seconds_of_tokens(job: Job, *, rate: float, ranks: int) -> float:
    """Return seconds of a step at ``rate`` tokens/s per rank; 0 where no rate is printed."""
    return job.tokens_per_step / (rate * ranks) if rate else 0.0


def seconds_of_flops(model: Model, job: Job, *, rate: float, ranks: int, count: Literal["full", "causal"]) -> float:
    """Return seconds of a step at ``rate`` FLOP/s per rank, counted as the source does; 0 where no rate is printed."""
    done = work(model, layout=Layout(), job=job)
    flops = done.model_flops_non_causal if count == "full" else done.model_flops_causal
    return flops / (rate * ranks) if rate else 0.0
