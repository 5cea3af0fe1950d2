"""A pipeline schedule as a table: the actions of each rank in order, and the ranks that each micro-batch visits.

    rank 0   F0.0  F0.1         BW0.0  F0.2  BW0.1 ...
    rank 1         F1.0  BW1.0  F1.1  BW1.1 ...

Data only: the planner plays it with durations, the engine runs it on tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from fivefold.layout.schedule.action import Part, named, parts
from fivefold.layout.schedule.columns import Columns, Row, columns_of
from fivefold.layout.schedule.order import Order, order
from fivefold.record import Mistake

Path = tuple[int, ...]


@dataclass(frozen=True)
class Table:
    """``rows[rank]`` are its actions; ``paths[micro_batch][stage]`` is the rank that runs the stage for it.

    The paths place stages on ranks: a line, a loop, a V, or DualPipe's two directions over the same ranks.
    """

    name: str
    rows: tuple[Row, ...]
    paths: tuple[Path, ...]

    @property
    def pp(self) -> int:
        """Number of pipeline ranks."""
        return len(self.rows)

    @property
    def stages(self) -> int:
        """Number of stages, over all ranks."""
        return len(self.paths[0])

    @property
    def micro_batches(self) -> int:
        """Micro-batches per step."""
        return len(self.paths)

    @cached_property
    def rank_stages(self) -> tuple[tuple[int, ...], ...]:
        """The stages whose weights each rank holds; in DualPipe two ranks hold each stage."""
        places = {(rank, stage) for path in set(self.paths) for stage, rank in enumerate(path)}
        return tuple(tuple(sorted(stage for at, stage in places if at == rank)) for rank in range(self.pp))

    @cached_property
    def columns(self) -> Columns:
        """The actions as arrays, row by row."""
        return columns_of(self.rows)

    @cached_property
    def order(self) -> Order:
        """Topological order of all actions; on deadlock a ``Mistake`` names the ranks that wait for one another."""
        return order(self.columns, stages=self.stages)


def check(table: Table) -> None:
    """Raise ``Mistake`` unless each F, B and W runs once, on the rank of its stage, without deadlock."""
    runs: dict[Part, int] = {}
    for rank, row in enumerate(table.rows):
        for part in (part for action in row for part in parts(action)):
            _, stage, micro_batch = part
            if part in runs:
                raise Mistake(f"{named(part)} runs on rank {runs[part]} and again on rank {rank}; keep one")
            if stage >= table.stages or micro_batch >= table.micro_batches:
                limit = f"{table.stages} stages and {table.micro_batches} micro-batches"
                raise Mistake(f"{named(part)} on rank {rank} is beyond {limit}, counted from 0; drop it")
            home = table.paths[micro_batch][stage]
            if rank != home:
                raise Mistake(f"{named(part)} runs on rank {rank}, but rank {home} holds its stage; move it there")
            runs[part] = rank
    for micro_batch, path in enumerate(table.paths):
        for stage, rank in enumerate(path):
            for part in (("F", stage, micro_batch), ("B", stage, micro_batch), ("W", stage, micro_batch)):
                if part not in runs:
                    raise Mistake(f"{named(part)} never runs; add it to rank {rank}")
    _ = table.order
