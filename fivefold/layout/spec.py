"""The layout: how a training step is distributed over ranks, as one line of text.

    dp16 tp8 pp4 v2 zero1 interleaved mbs1 ac=selective

Tokens are read in any order, also as ``dp=16,tp=8``, and printed in a fixed order. An invalid layout raises a one-line
``UserError`` (rule, numbers, fix).
World = dp·cp·tp·pp; experts are sharded inside dp·cp(·tp).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache, cached_property
from itertools import accumulate
from math import isqrt, prod
from operator import mul
from typing import TYPE_CHECKING, Any, Self

from pydantic import Field, model_validator

from fivefold.bounded_types import RANKS, Degree, Sequences, StageLayers
from fivefold.errors import UserError, warn
from fivefold.job import Job
from fivefold.layout.names import (
    CONTEXT_PARALLELISMS,
    CP_KINDS,
    DEFAULT_ORDER,
    ContextParallelism,
    CpKind,
    MeshAxis,
    Offloaded,
)
from fivefold.layout.recomputation import RECOMPUTABLE
from fivefold.layout.schedule.pipeline_schedule import (
    DEFAULT_SCHEDULE,
    PIPELINE_SCHEDULES,
    PipelineSchedule,
    ScheduleName,
    get_1f1b_name,
    list_one_way_pairing_names,
)
from fivefold.layout.text import DATA_PARALLEL, NODE, check_text, format_stages, read_token, split_tokens
from fivefold.record import Record

if TYPE_CHECKING:
    from fivefold.machine.spec import Machine


class Layout(Record):
    """Degrees of parallelism and policies; ``Layout.parse`` reads the text form and ``str`` prints it."""

    dp: Degree = 1  # data-parallel replicas
    tp: Degree = 1  # tensor-parallel ranks
    tp_inner: Degree = 1  # inner degree y of 2D tensor parallelism, tp = x·y
    cp: Degree = 1  # context-parallel ranks, which share a sequence
    pp: Degree = 1  # pipeline-parallel ranks
    ep: Degree = 1  # expert-parallel ranks, within dp·cp·tp
    etp: Degree = 1  # tensor-parallel ranks of an expert
    v: Degree = 1  # virtual pipeline stages per rank
    zero: int = Field(0, ge=0, le=3)  # ZeRO stage
    shard_group: Degree | None = None  # ranks over which ZeRO shards; None: all of dp·cp
    schedule: ScheduleName = DEFAULT_SCHEDULE  # pipeline schedule
    mbs: Sequences = 1  # sequences per micro-batch
    # activation recomputation: none, selective, full, full/2 (every second layer), or groups of operations joined by +;
    # full@2: only on the first two pipeline ranks, which hold the most micro-batches
    ac: str = "none"
    # layers of each of the pp·v stages, of which the first and the last may have none; empty: spread evenly
    stages: tuple[StageLayers, ...] = ()
    order: tuple[MeshAxis, ...] = DEFAULT_ORDER  # order of the mesh axes over the ranks, nearest first
    cp_kind: CpKind = CP_KINDS[0]  # context parallelism by ring attention or by all-to-all
    sp: bool = True  # sequence parallelism, with tp > 1
    offload: tuple[Offloaded, ...] = ()  # kept in host memory, in addition to what the job offloads

    @model_validator(mode="after")
    def _check_fields(self) -> Self:
        """Raise a ``ValueError`` for degrees and keywords that contradict each other."""
        if self.world > RANKS:
            raise ValueError(f"dp·cp·tp·pp={self.world} ranks are more than {RANKS:,}; lower a degree")
        replicas = self.dp * self.cp
        if self.shard_group is not None:
            if self.zero == 0:
                raise ValueError(f"zero0/{self.shard_group} shards nothing; write zero0, or zero1..3 with a group")
            if replicas % self.shard_group:
                raise ValueError(
                    f"dp·cp={replicas} is not divisible by the shard group {self.shard_group}; "
                    f"try zero{self.zero}/{find_divisor_below(replicas, self.shard_group)}"
                )
        if self.tp % self.tp_inner:
            inner = find_divisor_below(self.tp, self.tp_inner)
            raise ValueError(
                f"tp={self.tp} is not divisible by its inner degree {self.tp_inner}; try tp{self.tp // inner}x{inner}"
            )
        if self.tp % self.etp:
            raise ValueError(
                f"etp={self.etp} does not divide tp={self.tp}; try etp{find_divisor_below(self.tp, self.etp)}"
            )
        ranks = replicas * self.tp // self.etp
        if ranks % self.ep:
            raise ValueError(
                f"ep={self.ep} does not divide dp·cp·tp/etp={ranks}; try ep{find_divisor_below(ranks, self.ep)}"
            )
        self._check_schedule()
        self._check_stages()
        if sorted(self.order) != sorted(DEFAULT_ORDER):
            raise ValueError(f"order={'-'.join(self.order)} must name tp, cp, dp and pp once each, nearest first")
        if self.cp == 1 and self.cp_kind != CP_KINDS[0]:
            raise ValueError(f"cp={self.cp_kind} needs context parallelism; add cp2 or more, or drop it")
        if self.tp == 1 and not self.sp:
            raise ValueError("nosp needs tensor parallelism; add tp2 or more, or drop it")
        return self

    def _check_schedule(self) -> None:
        """Raise a ``ValueError`` if the stages do not suit the pipeline schedule."""
        if self.pp == 1 and (self.v > 1 or self.schedule != DEFAULT_SCHEDULE):
            raise ValueError(f"{self.schedule} v{self.v} needs a pipeline; add pp2 or more, or drop it")
        if self.pipeline.is_v_shaped and self.v != 2:
            raise ValueError(f"{self.schedule} places two stages on each rank as a V; write v2, not v{self.v}")
        if self.pipeline.is_interleaved and self.v < 2:
            raise ValueError(f"{self.schedule} needs virtual stages; write v2 or more, or {DEFAULT_SCHEDULE}")
        if self.v > 1 and self.pipeline.stages_per_rank == 1:
            other = "dualpipev" if self.pipeline.enters_both_ends and self.v == 2 else get_1f1b_name(self.v)
            raise ValueError(f"{self.schedule} runs one stage per rank; drop v{self.v} or write {other}")
        if self.pipeline.enters_both_ends and self.pp % 2:
            raise ValueError(f"{self.schedule} needs an even pp, not {self.pp}; try pp{self.pp + 1}")

    def _check_stages(self) -> None:
        """Raise ``ValueError`` for ``stages`` or a recomputation that does not match the pipeline."""
        stages = self.pp * self.v
        if self.stages and len(self.stages) != stages:
            raise ValueError(
                f"{format_stages(self.stages)} lists {len(self.stages)} stages, but pp·v={stages}; "
                f"list {stages}, or change pp or v"
            )
        if 0 in self.stages[1:-1] or not any(self.stages or (1,)):
            raise ValueError(
                f"{format_stages(self.stages)}: each stage but the first and the last needs a layer; move one there"
            )
        if not _AC.fullmatch(self.ac):
            raise ValueError(
                f"unknown recomputation 'ac={self.ac}'; write ac=none, selective, full, or several of "
                f"{', '.join(RECOMPUTABLE)} as in ac=norm+act"
            )
        if self.ac == self.recomputation:
            return
        if not 0 < self.recompute_ranks < self.pp:
            raise ValueError(
                f"ac={self.ac} recomputes on {self.recompute_ranks} of pp={self.pp} pipeline ranks; "
                f"use 1 to pp-1 of them, or ac={self.recomputation}"
            )
        if self.pipeline.enters_both_ends:
            raise ValueError(
                f"ac={self.ac}: {self.schedule} has each stage on two ranks; use ac={self.recomputation}, "
                f"or {list_one_way_pairing_names()}"
            )

    @property
    def pipeline(self) -> PipelineSchedule:
        """Return the properties of the pipeline schedule."""
        return PIPELINE_SCHEDULES[self.schedule]

    @property
    def context_parallelism(self) -> ContextParallelism:
        """Return the properties of the kind of context parallelism, which matter if ``cp`` is more than 1."""
        return CONTEXT_PARALLELISMS[self.cp_kind]

    @property
    def uses_ring(self) -> bool:
        """Tell whether attention runs on the tokens of a rank, and keys and values are sent from rank to rank."""
        return self.cp > 1 and not self.context_parallelism.exchanges_heads

    @property
    def recomputation(self) -> str:
        """Return ``ac`` without its ranks: ``full/2`` for ``full/2@1``."""
        return self.ac.partition("@")[0]

    @cached_property
    def recomputed_operations(self) -> frozenset[str]:
        """Return the groups of operations that a layer recomputes in the backward; ``{"layer"}`` under full."""
        kind = self.recomputation
        if kind == "none":
            return frozenset()
        if kind.startswith("full"):
            return frozenset({"layer"})
        return frozenset({"core"} if kind == "selective" else kind.split("+"))

    @cached_property
    def recompute_every(self) -> int:
        """Return n if every n-th layer is recomputed."""
        kind = self.recomputation
        return int(kind[5:]) if kind.startswith("full/") else 1

    @cached_property
    def recompute_ranks(self) -> int:
        """Return the number of pipeline ranks, from the first, whose layers are recomputed."""
        return int(self.ac.partition("@")[2] or self.pp)

    @property
    def outline(self) -> Layout:
        """Return the layout without details: virtual and uneven stages, mesh order, size of groups, kind of ``ac``.

        Sharding groups have 2 ranks in it, and any recomputation but that of all layers is ``ac=selective``. It tells
        nearly equal layouts from others, and may itself not be legal.
        """
        kind = self.ac if self.ac in ("none", "full") else "selective"
        group = self.shard_group and 2
        details = {"v": 1, "stages": (), "order": DEFAULT_ORDER, "shard_group": group, "ac": kind}
        return self.model_copy(update=details)

    @classmethod
    def construct_legal(cls, **fields: Any) -> Layout:
        """Return a layout whose fields are known to be legal, without validation; others have their default.

        As pydantic's ``model_construct``, in a seventh of its time.
        """
        layout = cls.__new__(cls)
        set_attribute = object.__setattr__  # a record is frozen
        set_attribute(layout, "__dict__", _DEFAULTS | fields)
        set_attribute(layout, "__pydantic_fields_set__", set(fields))
        set_attribute(layout, "__pydantic_extra__", None)
        set_attribute(layout, "__pydantic_private__", None)
        return layout

    @classmethod
    def parse(cls, text: str, *, machine: Machine | None = None) -> Layout:
        """Parse text such as ``dp2 zero1 mbs4``; a ``UserError`` names the invalid token.

        On ``machine``, a layout without dp has as many data-parallel ranks as use all GPUs, and ``hsdp`` without a
        number shards within a node; a ``UsageWarning`` says so.
        """
        check_text(text)
        fields: dict[str, object] = {}
        for token in split_tokens(text):
            for key, value in read_token(token).items():
                if key in fields:
                    raise UserError(
                        f"layout {text!r}: {token!r} sets {key.removesuffix('_kind')} a second time; keep one"
                    )
                fields[key] = value
        if "dp" not in fields:
            fields |= _fill_data_parallel(text, fields, machine)
        v = fields.get("v", 1)
        if "schedule" not in fields and isinstance(v, int) and v > 1:
            fields["schedule"] = get_1f1b_name(v)
        schedule = next(
            (pipeline for pipeline in PIPELINE_SCHEDULES.values() if pipeline.name == fields.get("schedule")), None
        )
        if schedule is not None and schedule.is_v_shaped:
            fields.setdefault("v", schedule.stages_per_rank)
        is_hybrid = fields.get("shard_group") == NODE
        if is_hybrid:
            del fields["shard_group"]
        layout = cls.read(fields, origin=f"layout {text!r}")
        return _shard_within_node(text, layout, machine) if is_hybrid else layout

    def __str__(self) -> str:
        tokens = [f"dp{self.dp}"]
        if self.tp > 1:
            inner = self.tp_inner
            tokens.append(f"tp{self.tp // inner}x{inner}" if inner > 1 else f"tp{self.tp}")
        tokens += [f"{axis}{getattr(self, axis)}" for axis in ("cp", "pp", "ep", "etp", "v") if getattr(self, axis) > 1]
        tokens.append(_spell_zero(self))
        if self.pp > 1:
            tokens.append(self.schedule)
        tokens.append(f"mbs{self.mbs}")
        if self.ac != "none":
            tokens.append(f"ac={self.ac}")
        if self.stages:
            tokens.append(format_stages(self.stages))
        if self.order != DEFAULT_ORDER:
            tokens.append(f"order={'-'.join(self.order)}")
        if self.cp_kind != CP_KINDS[0]:
            tokens.append(f"cp={self.cp_kind}")
        if not self.sp:
            tokens.append("nosp")
        if self.offload:
            tokens.append(f"offload={'+'.join(self.offload)}")
        return " ".join(tokens)

    @cached_property
    def world(self) -> int:
        """Return the number of ranks: dp·cp·tp·pp."""
        return self.dp * self.cp * self.tp * self.pp

    @cached_property
    def strides(self) -> Mapping[str, int]:
        """Return the rank difference of neighbors along each axis of the mesh, by ``order``."""
        degrees = [int(getattr(self, axis)) for axis in self.order]
        return dict(zip(self.order, accumulate([1, *degrees[:-1]], mul), strict=True))

    @cached_property
    def shards(self) -> int:
        """Return the ranks over which ZeRO shards dense weights: the shard group (default dp·cp), or 1 under zero0."""
        return 1 if self.zero == 0 else (self.shard_group or self.dp * self.cp)

    @cached_property
    def expert_replicas(self) -> int:
        """Return the number of ranks of a pipeline stage that hold the same experts: dp·cp·tp / (ep·etp)."""
        return self.dp * self.cp * self.tp // (self.ep * self.etp)

    @cached_property
    def expert_shards(self) -> int:
        """Return the number of ranks over which ZeRO shards expert weights.

        Those of the shard group that hold the same experts, rounded down to a divisor of ``expert_replicas``.
        """
        max_shards = self.expert_replicas * self.shards // (self.dp * self.cp)
        return find_divisor_below(self.expert_replicas, max(1, max_shards))

    def list_offloaded(self, job: Job) -> frozenset[Offloaded]:
        """Return what is kept in host memory, by the layout or by the job: with parameters, what the stack adds."""
        offloaded = frozenset((*self.offload, *job.offload))
        adds_optimizer = "parameters" in offloaded and job.stack.offloads_with_parameters
        return offloaded | {"optimizer"} if adds_optimizer else offloaded

    def micro_batches(self, job: Job) -> int:
        """Return the micro-batches per pipeline and optimizer step (m): global batch / (dp·mbs)."""
        return job.global_batch // (self.dp * self.mbs)


_DEFAULTS: dict[str, Any] = {name: field.default for name, field in Layout.__pydantic_fields__.items()}
_GROUP = f"({'|'.join(RECOMPUTABLE)})"
_AC = re.compile(rf"none|(selective|full(/[1-9]\d{{0,3}})?|{_GROUP}(\+{_GROUP})*)(@\d{{1,6}})?")


def _fill_data_parallel(text: str, fields: Mapping[str, object], machine: Machine | None) -> dict[str, int]:
    """Return the degree dp of a layout that does not state it: all ranks of the machine are used, if they divide."""
    degrees = prod(degree for axis in ("tp", "cp", "pp") if isinstance(degree := fields.get(axis, 1), int))
    if machine is not None and machine.ranks % degrees == 0:
        degree = machine.ranks // degrees
        if degree > 1:
            message = f"layout {text!r}: dp{degree} is filled in, for all {machine.ranks} ranks"
            warn(message)
        return {"dp": degree}
    sharding = DATA_PARALLEL.search(" ".join(split_tokens(text)))
    if sharding is None or "cp" in fields:
        return {}
    word = sharding[1]
    raise UserError(
        f"layout {text!r}: {word} says what the data-parallel ranks share, not how many there are; "
        f"add their number, such as 'dp8 {word}', or dp1 for one rank"
    )


def _shard_within_node(text: str, layout: Layout, machine: Machine | None) -> Layout:
    """Return the layout with a shard group of the ranks of dp and cp that are in one node, as HSDP is usually run."""
    if machine is None:
        raise UserError(
            "layout token 'hsdp' needs the number of ranks that share one copy of the states; "
            "write hsdp/8 for nodes of 8 GPUs, or fsdp to shard over all ranks of dp and cp"
        )
    replicas = layout.dp * layout.cp
    group = prod(
        max(1, min(getattr(layout, axis), machine.ranks_per_node // layout.strides[axis])) for axis in ("dp", "cp")
    )
    if replicas % group or (group == 1 and replicas > 1):
        groups = list_divisors(replicas)[1:]
        nearest = max((size for size in groups if size <= group), default=groups[0])
        raise UserError(
            f"layout {text!r}: a node of {machine.ranks_per_node} GPUs has {group} of the dp·cp={replicas} ranks, "
            f"over which hsdp cannot shard; write hsdp/{nearest}, or fsdp to shard over all"
        )
    layout = layout if group == replicas else layout.replace(shard_group=group)
    place = f"{group} ranks of dp and cp in one node" + (", which are all" if group == replicas else "")
    warn(f"layout {text!r}: hsdp shards over the {place}: {_spell_zero(layout)}")
    return layout


def _spell_zero(layout: Layout) -> str:
    """Return the keyword of the ZeRO stage and its shard group: ``zero3/8``."""
    return f"zero{layout.zero}" + (f"/{layout.shard_group}" if layout.shard_group else "")


@cache
def find_divisor_below(number: int, limit: int) -> int:
    """Return the largest divisor of ``number`` that is at most ``limit``."""
    return max(divisor for divisor in list_divisors(number) if divisor <= limit)


def list_divisors(number: int) -> list[int]:
    """Return all divisors of ``number``, ascending."""
    small = [size for size in range(1, isqrt(number) + 1) if number % size == 0]
    return sorted({*small, *(number // size for size in small)})
