"""What the readers share: cells as numbers, throughput as seconds, and the layout of a row.

    step seconds = tokens of a step / (tokens/s/GPU · GPUs) = FLOPs of a step / (FLOP/s/GPU · GPUs)

Which FLOPs a source counts differs: attention as the full square (``full``) or only what the mask lets
through (``causal``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

from fivefold.check.published.case import Case, Excluded, rows
from fivefold.job import Axis, Job, Recipe, recipe
from fivefold.layout.spec import Layout
from fivefold.machine.spec import Machine
from fivefold.model.spec import Model
from fivefold.plan.count.work import work

# Megatron-Core with Transformer Engine: joint projections, an unused gradient of each shape, a padded vocabulary.
TRANSFORMER_ENGINE = Job(
    vocab_multiple=128, joint=True, linears="apart", early_stop=False, weight_gradients="placeholders"
)

Row = dict[str, str]

CHECK = "the source contradicts itself"
OUT_OF_MEMORY = "the run ended out of memory"
ADAPTERS = "trains adapters on frozen weights; our jobs train every weight"
PACKED = "fine-tuning on samples packed to an unknown mix of lengths; attention and so time are less than of one sample"


def read(source: str, *, rule: Callable[[Row], str], case: Callable[[Row], Case]) -> Iterator[Case | Excluded]:
    """The measured rows of ``source``: each excluded by the first rule that it breaks, or a case."""
    for row in rows(source):
        if row["kind"] != "measured":
            continue
        broken = (CHECK if row["trust"] == "check" else "") or (OUT_OF_MEMORY if row.get("oom") == "y" else "")
        broken = broken or rule(row)
        yield Excluded(source, row["row_id"], broken) if broken else case(row)


def whole(row: Row, key: str) -> int:
    """The integer in a cell; 0 where the source is silent."""
    text = row.get(key) or "0"
    return int(text) if text.isdigit() else 0


def number(row: Row, key: str) -> float:
    """The figure in a cell; 0.0 where the source is silent."""
    return float(row.get(key) or 0.0)


def spread(row: Row, *, zero: int, **more: Any) -> Layout:
    """The layout of a row's degrees; data parallelism is what they leave of its GPUs."""
    tp, pp, cp, v = (whole(row, key) or 1 for key in ("tp", "pp", "cp", "vp"))
    fields: dict[str, Any] = {
        "dp": whole(row, "gpus") // (tp * pp * cp),
        "tp": tp,
        "cp": cp,
        "pp": pp,
        "ep": whole(row, "ep") or 1,
        "v": v,
        "zero": zero,
        "schedule": "interleaved" if v > 1 else "1f1b",
        "mbs": whole(row, "mbs") or 1,
    }
    return Layout(**(fields | more))


def in_nodes(found: Machine, ranks: int) -> Machine:
    """``found`` in nodes of another size."""
    near, far = found.links
    links = (near.replace(span=ranks), far.replace(span=max(found.ranks, ranks)))
    return found.replace(ranks_per_node=ranks, links=links)


def narrow_gradients(precision: str) -> Recipe:
    """The recipe, with gradients summed and reduced in 16 bits (Megatron's grad_reduce_in_fp32=False)."""
    return recipe(precision).replace(name=f"{precision}-grad16", accumulated_bytes=0)


def megatron_overlap(layout: Layout, *, tensor: bool = False, expert: bool = False) -> tuple[Axis, ...]:
    """Megatron-Core hides pipeline messages only when stages interleave; ``tensor``: userbuffers are on."""
    found: tuple[Axis, ...] = ("dp", "cp")
    found += ("pp",) if layout.v > 1 else ()
    found += ("tp",) if tensor and layout.tp > 1 else ()
    return found + (("ep",) if expert else ())


def seconds_of_tokens(job: Job, *, rate: float, ranks: int) -> float:
    """Seconds of a step at ``rate`` tokens/s per rank."""
    return job.tokens_per_step / (rate * ranks)


def seconds_of_flops(model: Model, job: Job, *, rate: float, ranks: int, count: Literal["full", "causal"]) -> float:
    """Seconds of a step at ``rate`` FLOP/s per rank, counted as the source does."""
    done = work(model, layout=Layout(), job=job)
    flops = done.model_flops_full if count == "full" else done.model_flops_causal
    return flops / (rate * ranks)
