"""A pipeline schedule as a table: the actions of each rank in order, and the ranks that each micro-batch visits.

    rank 0   F0.0  F0.1         BW0.0  F0.2  BW0.1 ...
    rank 1         F1.0  BW1.0  F1.1  BW1.1 ...

A table is data only: the planner simulates its columns with durations, the trainer runs its rows on tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

from fivefold.errors import UserError
from fivefold.layout.schedule.action import Action, Part, format_part, list_parts
from fivefold.layout.schedule.columns import Columns, Row, build_columns, build_rows
from fivefold.layout.schedule.order import Order, order

Path = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Table:
    """The actions of each of ``pp`` ranks; ``paths[micro_batch][stage]`` is the rank that runs the stage.

    The paths place stages on ranks: in a line, a loop, a V, or DualPipe's two directions over the same ranks.
    ``first_backward``: the first stage with a trained weight; no gradient is sent to it or below, where B does nothing.
    """

    name: str
    pp: int
    columns: Columns
    paths: tuple[Path, ...]
    first_backward: int = 0

    @classmethod
    def from_rows(cls, name: str, rows: Sequence[Row], paths: tuple[Path, ...]) -> Self:
        """Return the table with these actions of each rank."""
        return cls(name, len(rows), build_columns(rows), paths)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Table) and (self.name, self.rows, self.paths) == (other.name, other.rows, other.paths)

    __hash__ = None  # type: ignore[assignment]

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """Return the actions of each rank in order."""
        return build_rows(self.columns, pp=self.pp)

    @property
    def stages(self) -> int:
        """Return the number of stages, over all ranks."""
        return len(self.paths[0])

    @property
    def micro_batches(self) -> int:
        """Return the micro-batches per step."""
        return len(self.paths)

    @cached_property
    def rank_stages(self) -> tuple[tuple[int, ...], ...]:
        """Return the stages whose weights each rank holds; in DualPipe two ranks hold each stage."""
        places = {(rank, stage) for path in set(self.paths) for stage, rank in enumerate(path)}
        return tuple(tuple(sorted(stage for holder, stage in places if holder == rank)) for rank in range(self.pp))

    @cached_property
    def order(self) -> Order:
        """Return the topological order of all actions; on deadlock a ``UserError`` names the ranks that wait."""
        return order(self.columns, stages=self.stages)

    def list_forwards(self, micro_batches: int) -> tuple[Row, ...]:
        """Return the forwards of each rank for the first ``micro_batches``, in the order of its actions."""
        return tuple(
            tuple(
                Action("F", action.stage, action.micro_batch)
                for action in row
                if action.kind in ("F", "FB") and action.micro_batch < micro_batches
            )
            for row in self.rows
        )

    def prepend_forwards(self) -> Self:
        """Return the table after a forward of each micro-batch: the step of DPO, whose reference runs first.

        The reference's forwards have the numbers of micro-batches that follow those of the table.
        """
        rows = tuple(
            (*(Action("F", action.stage, action.micro_batch + self.micro_batches) for action in forwards), *row)
            for forwards, row in zip(self.list_forwards(self.micro_batches), self.rows, strict=True)
        )
        return self.from_rows(self.name, rows, self.paths * 2)


def check(table: Table) -> None:
    """Raise ``UserError`` unless each F, B and W runs once, on the rank of its stage, without deadlock."""
    rank_of_part: dict[Part, int] = {}
    for rank, row in enumerate(table.rows):
        for part in (part for action in row for part in list_parts(action)):
            _, stage, micro_batch = part
            if part in rank_of_part:
                raise UserError(
                    f"{format_part(part)} runs on rank {rank_of_part[part]} and again on rank {rank}; keep one"
                )
            if stage >= table.stages or micro_batch >= table.micro_batches:
                limit = f"{table.stages} stages and {table.micro_batches} micro-batches"
                raise UserError(f"{format_part(part)} on rank {rank} is beyond {limit}, counted from 0; drop it")
            stage_rank = table.paths[micro_batch][stage]
            if rank != stage_rank:
                raise UserError(
                    f"{format_part(part)} runs on rank {rank}, but rank {stage_rank} holds its stage; move it there"
                )
            rank_of_part[part] = rank
    for micro_batch, path in enumerate(table.paths):
        for stage, rank in enumerate(path):
            for part in (("F", stage, micro_batch), ("B", stage, micro_batch), ("W", stage, micro_batch)):
                if part not in rank_of_part:
                    raise UserError(f"{format_part(part)} never runs; add it to rank {rank}")
    _ = table.order
