"""The properties of each pipeline schedule in one record, which validation, memory, time and search read.

    PIPELINE_SCHEDULES["zb1p"].splits_backward        layout.pipeline.is_v_shaped        (``Layout.pipeline``)

Tests check ``splits_backward``, ``pairs_passes``, ``placement`` and ``live_stages`` against the generated tables.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Literal

from pydantic import AfterValidator, WithJsonSchema

from fivefold.layout.schedule.one_f_one_b import generate_1f1b, generate_gpipe, generate_interleaved
from fivefold.layout.schedule.table import Table
from fivefold.layout.schedule.v_shaped import generate_dualpipe, generate_dualpipev, generate_zbv
from fivefold.layout.schedule.zero_bubble import generate_zb1p, generate_zb2p
from fivefold.spelling import make_unknown_name_error


@dataclass(frozen=True)
class PipelineSchedule:
    """A pipeline schedule: how its table is generated, and what every rank does under it.

    ``live_stages(m, pp=, v=, rank=)`` is the number of micro-batches that have passed each stage of a rank when its
    first backward ends, in the order of ``stages_of_rank``.
    """

    name: str
    generate: Callable[..., Table]
    live_stages: Callable[..., tuple[int, ...]]
    complexity: float  # penalty in ``plan`` for being harder to run and understand than 1F1B
    stages_per_rank: int | None = 1  # None: v, which the layout sets to 2 or more
    # loop: rank r holds stages r, r + pp, …; v: r and 2·pp-1-r; both_ways: r and pp-1-r, each stage on two ranks
    placement: Literal["loop", "v", "both_ways"] = "loop"
    splits_backward: bool = False  # runs weight gradients (W) separately from B
    pairs_passes: bool = False  # overlaps a forward with the backward of another micro-batch (FB)
    forwards_first: bool = (
        False  # runs all forwards before the first backward, so that all micro-batches are live at once
    )
    min_rounds: int = 0  # fewest micro-batches, in units of pp
    weight_lag: int = 1  # if W is separate: rank r runs each W after weight_lag·r more backwards

    @property
    def is_interleaved(self) -> bool:
        """Tell whether the layout sets the number of stages per rank."""
        return self.stages_per_rank is None

    @property
    def is_v_shaped(self) -> bool:
        """Tell whether a micro-batch goes down the ranks and back up."""
        return self.placement == "v"

    @property
    def enters_both_ends(self) -> bool:
        """Tell whether half of the micro-batches enter at the last rank, so that two ranks hold each stage."""
        return self.placement == "both_ways"

    @property
    def joins_ends(self) -> bool:
        """Tell whether one rank holds both the first and the last stage."""
        return self.placement != "loop"

    def stages_of_rank(self, rank: int, *, pp: int, v: int) -> tuple[int, ...]:
        """Return the stages whose weights ``rank`` of ``pp`` holds, in order."""
        if self.placement == "loop":
            return tuple(range(rank, pp * v, pp))
        return tuple(sorted((rank, (2 * pp if self.is_v_shaped else pp) - 1 - rank)))


def _count_live_gpipe(m: int, *, pp: int, v: int, rank: int) -> tuple[int, ...]:
    return (m,)


def _count_live_1f1b(m: int, *, pp: int, v: int, rank: int) -> tuple[int, ...]:
    return (min(m, pp - rank),)


def _count_live_interleaved(m: int, *, pp: int, v: int, rank: int) -> tuple[int, ...]:
    """Return for each stage of ``rank`` how many of ``m`` micro-batches are live at the peak."""
    groups = max(1, m // pp)  # groups of micro-batches that pass one stage of a rank before its next stage
    sizes = [m // groups + (group < m % groups) for group in range(groups)]
    remaining = min(v * m, (v - 1) * sizes[0] + 2 * (pp - rank - 1) + 1)
    live = [0] * v
    for size in sizes:
        for stage in range(v):
            added = min(size, remaining)
            live[stage], remaining = live[stage] + added, remaining - added
        if not remaining:
            break
    return tuple(live)


def _count_live_zb2p(m: int, *, pp: int, v: int, rank: int) -> tuple[int, ...]:
    return (min(m, 2 * (pp - rank) - 1),)


def _count_live_zbv(m: int, *, pp: int, v: int, rank: int) -> tuple[int, ...]:
    return min(m, 2 * pp - 1 - rank), min(m, rank + 1)


def _count_live_dualpipe(m: int, *, pp: int, v: int, rank: int) -> tuple[int, ...]:
    near = min(rank, pp - 1 - rank)
    return pp - 1 - near, near + 1


def _count_live_dualpipev(m: int, *, pp: int, v: int, rank: int) -> tuple[int, ...]:
    return 2 * pp - 1 - rank, rank + 1


_RECORDS = (
    PipelineSchedule("gpipe", generate_gpipe, _count_live_gpipe, 1.0, forwards_first=True),
    PipelineSchedule("1f1b", generate_1f1b, _count_live_1f1b, 0.0),
    PipelineSchedule(
        "interleaved", generate_interleaved, _count_live_interleaved, 1.0, stages_per_rank=None, min_rounds=1,
    ),
    PipelineSchedule("zb1p", generate_zb1p, _count_live_1f1b, 4.0, splits_backward=True, min_rounds=1),
    PipelineSchedule("zb2p", generate_zb2p, _count_live_zb2p, 5.0, splits_backward=True, min_rounds=1, weight_lag=2),
    PipelineSchedule(
        "zbv", generate_zbv, _count_live_zbv, 5.0, stages_per_rank=2, placement="v", splits_backward=True, min_rounds=1,
    ),
    PipelineSchedule(
        "dualpipe", generate_dualpipe, _count_live_dualpipe, 6.0, placement="both_ways", splits_backward=True,
        pairs_passes=True, min_rounds=2,
    ),
    PipelineSchedule(
        "dualpipev", generate_dualpipev, _count_live_dualpipev, 6.0, stages_per_rank=2, placement="v",
        splits_backward=True, pairs_passes=True, min_rounds=2,
    ),
)  # fmt: skip
PIPELINE_SCHEDULES: Mapping[str, PipelineSchedule] = MappingProxyType({record.name: record for record in _RECORDS})
SCHEDULES = tuple(PIPELINE_SCHEDULES)
DEFAULT_SCHEDULE = "1f1b"  # for a layout that names none, and for one without a pipeline


def _check_known(name: str) -> str:
    if name not in PIPELINE_SCHEDULES:
        raise ValueError(str(make_unknown_name_error(name, list(PIPELINE_SCHEDULES), kind="pipeline schedule")))
    return name


ScheduleName = Annotated[
    str, AfterValidator(_check_known), WithJsonSchema({"type": "string", "enum": list(PIPELINE_SCHEDULES)})
]


def get_1f1b_name(v: int) -> ScheduleName:
    """Return the name of 1F1B for ``v`` stages per rank."""
    return "interleaved" if v > 1 else DEFAULT_SCHEDULE


def list_pairing_names() -> str:
    """Return the names of schedules that overlap a forward with a backward, for a message."""
    return " or ".join(name for name, pipeline in PIPELINE_SCHEDULES.items() if pipeline.pairs_passes)


def list_one_way_pairing_names() -> str:
    """Return the names of such schedules that have each stage on one rank, for a message."""
    schedules = PIPELINE_SCHEDULES.items()
    return " or ".join(name for name, pipeline in schedules if pipeline.pairs_passes and not pipeline.enters_both_ends)
