"""The facts of each pipeline schedule in one record; legality, memory, time and search read them from here.

    PIPELINE_SCHEDULES["zb1p"].splits_backward        layout.pipeline.places_v        (``Layout.pipeline``)

Tests derive ``splits_backward``, ``pairs_passes``, ``placement`` and ``live_stages`` from the generated tables again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Literal

from pydantic import AfterValidator, WithJsonSchema

from fivefold.layout.schedule.one_f_one_b import gpipe, interleaved, one_f_one_b
from fivefold.layout.schedule.table import Table
from fivefold.layout.schedule.v_shaped import dualpipe, dualpipev, zbv
from fivefold.layout.schedule.zero_bubble import zb1p, zb2p
from fivefold.record import nearest


@dataclass(frozen=True)
class PipelineSchedule:
    """One pipeline schedule: how its table is generated, and what every rank does under it.

    ``live_stages(m, pp=, v=, rank=)`` is how many micro-batches have passed each stage of a rank when its first
    backward ends, in the order of ``stages_of_rank``.
    """

    name: str
    generate: Callable[..., Table]
    live_stages: Callable[..., tuple[int, ...]]
    complexity: float  # how much harder than 1F1B it is to run and to understand, for ``plan``
    stages_per_rank: int | None = 1  # None: v, which the layout chooses from 2 on
    # loop: rank r holds stages r, r + pp, …; v: r and 2·pp-1-r; both_ways: r and pp-1-r, each stage on two ranks
    placement: Literal["loop", "v", "both_ways"] = "loop"
    splits_backward: bool = False  # runs weight gradients (W) apart from B
    pairs_passes: bool = False  # runs a forward beside the backward of another micro-batch (FB)
    forwards_first: bool = False  # every forward before the first backward, so that all micro-batches live at once
    min_rounds: int = 0  # fewest micro-batches, in units of pp
    weight_lag: int = 1  # if W is split: rank r runs each W after weight_lag·r more backwards

    @property
    def interleaves(self) -> bool:
        """Whether the layout chooses the number of stages per rank."""
        return self.stages_per_rank is None

    @property
    def places_v(self) -> bool:
        """Whether a micro-batch goes down the ranks and back up."""
        return self.placement == "v"

    @property
    def enters_both_ends(self) -> bool:
        """Whether half of the micro-batches enter at the last rank, so that two ranks hold each stage."""
        return self.placement == "both_ways"

    @property
    def joins_ends(self) -> bool:
        """Whether one rank holds the first and the last stage."""
        return self.placement != "loop"

    def stages_of_rank(self, rank: int, *, pp: int, v: int) -> tuple[int, ...]:
        """Return the stages whose weights ``rank`` of ``pp`` holds, in order."""
        if self.placement == "loop":
            return tuple(range(rank, pp * v, pp))
        return tuple(sorted((rank, (2 * pp if self.places_v else pp) - 1 - rank)))


def _gpipe(m: int, *, pp: int, v: int, rank: int) -> tuple[int, ...]:
    return (m,)


def _one_f_one_b(m: int, *, pp: int, v: int, rank: int) -> tuple[int, ...]:
    return (min(m, pp - rank),)


def _interleaved(m: int, *, pp: int, v: int, rank: int) -> tuple[int, ...]:
    groups = max(1, m // pp)  # of micro-batches that pass one stage of a rank before its next stage
    sizes = [m // groups + (group < m % groups) for group in range(groups)]
    left, live = min(v * m, (v - 1) * sizes[0] + 2 * (pp - rank - 1) + 1), [0] * v
    for size in sizes:
        for stage in range(v):
            more = min(size, left)
            live[stage], left = live[stage] + more, left - more
        if not left:
            break
    return tuple(live)


def _zb2p(m: int, *, pp: int, v: int, rank: int) -> tuple[int, ...]:
    return (min(m, 2 * (pp - rank) - 1),)


def _zbv(m: int, *, pp: int, v: int, rank: int) -> tuple[int, ...]:
    return min(m, 2 * pp - 1 - rank), min(m, rank + 1)


def _dualpipe(m: int, *, pp: int, v: int, rank: int) -> tuple[int, ...]:
    near = min(rank, pp - 1 - rank)
    return pp - 1 - near, near + 1


def _dualpipev(m: int, *, pp: int, v: int, rank: int) -> tuple[int, ...]:
    return 2 * pp - 1 - rank, rank + 1


_RECORDS = (
    PipelineSchedule("gpipe", gpipe, _gpipe, 1.0, forwards_first=True),
    PipelineSchedule("1f1b", one_f_one_b, _one_f_one_b, 0.0),
    PipelineSchedule("interleaved", interleaved, _interleaved, 1.0, stages_per_rank=None, min_rounds=1),
    PipelineSchedule("zb1p", zb1p, _one_f_one_b, 4.0, splits_backward=True, min_rounds=1),
    PipelineSchedule("zb2p", zb2p, _zb2p, 5.0, splits_backward=True, min_rounds=1, weight_lag=2),
    PipelineSchedule(
        "zbv", zbv, _zbv, 5.0, stages_per_rank=2, placement="v", splits_backward=True, min_rounds=1,
    ),
    PipelineSchedule(
        "dualpipe", dualpipe, _dualpipe, 6.0, placement="both_ways", splits_backward=True,
        pairs_passes=True, min_rounds=2,
    ),
    PipelineSchedule(
        "dualpipev", dualpipev, _dualpipev, 6.0, stages_per_rank=2, placement="v",
        splits_backward=True, pairs_passes=True, min_rounds=2,
    ),
)  # fmt: skip
PIPELINE_SCHEDULES: Mapping[str, PipelineSchedule] = MappingProxyType({each.name: each for each in _RECORDS})
SCHEDULES = tuple(PIPELINE_SCHEDULES)
DEFAULT_SCHEDULE = "1f1b"  # of a layout that names none, and of one without a pipeline


def _check_known(name: str) -> str:
    if name not in PIPELINE_SCHEDULES:
        raise ValueError(str(nearest(name, list(PIPELINE_SCHEDULES), kind="pipeline schedule")))
    return name


ScheduleName = Annotated[
    str, AfterValidator(_check_known), WithJsonSchema({"type": "string", "enum": list(PIPELINE_SCHEDULES)})
]


def usual_schedule(v: int) -> ScheduleName:
    """Return 1F1B for ``v`` stages per rank."""
    return "interleaved" if v > 1 else DEFAULT_SCHEDULE


def names_of_pairing() -> str:
    """Return the schedules that run a forward beside a backward, as words of a message."""
    return " or ".join(name for name, each in PIPELINE_SCHEDULES.items() if each.pairs_passes)


def names_of_one_way_pairing() -> str:
    """Return those of them whose stages are on one rank each, as words of a message."""
    found = PIPELINE_SCHEDULES.items()
    return " or ".join(name for name, each in found if each.pairs_passes and not each.enters_both_ends)
