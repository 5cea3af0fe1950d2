"""The orders to the workers of ``calibrate``, and the profiles that they report (without torch)."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from fivefold.calibration.message_orders import MessageOrder, Timed
from fivefold.calibration.points import Points
from fivefold.job import Job
from fivefold.machine.spec import CollectivePoint
from fivefold.model.spec import Model
from fivefold.record import Record


class RunOrder(Record):
    """A run to profile: the worker runs ``rank`` of the layout's world."""

    rank: NonNegativeInt
    model: Model
    layout: str
    job: Job
    seconds: PositiveFloat  # least time of the measured steps, of which there are at least ``steps``
    steps: PositiveInt
    messages: tuple[MessageOrder, ...] = ()  # to time among the workers, after the steps
    work_seconds: PositiveFloat = 5e-3  # between two messages


class ProfileOrder(Record):
    """The order to one worker of ``calibrate --for``: number ``place`` of ``workers`` workers."""

    place: NonNegativeInt
    workers: PositiveInt
    threads: PositiveInt
    rendezvous_file: str  # path of a file that does not exist yet
    silence_seconds: PositiveFloat
    run: RunOrder


class RankProfile(Record):
    """The timed occurrences of one rank of a run; in ``calibrate``, of run number ``run`` of its grid.

    ``timed``: by ``direction unit`` such as ``F block 3``, by ``update``, and by message in the step, such as ``message
    all_reduce 2 4096``. ``gaps``: processor seconds of one traced step between operations, in forwards (F) and in
    backwards (BW). ``cores_of_others``: that other programs used meanwhile. ``messages``: those that were timed by
    themselves.
    """

    run: NonNegativeInt = 0
    workers: PositiveInt = 1
    place: NonNegativeInt
    rank: NonNegativeInt
    torch: str
    device: str
    timed: dict[str, Timed]
    gaps: dict[Literal["F", "BW"], float] = {}
    cores_of_others: float = 0.0
    messages: tuple[CollectivePoint, ...] = ()


class CaseOrder(Record):
    """A run of all ranks, to measure in turns with the grid."""

    model: Model
    layout: str
    job: Job


class RoundOrder(Record):
    """The measurements of one number of concurrent processes, ``ranks``; the other workers wait.

    ``points``: None for the default points of the worker's device. ``in_steps``: small training steps are measured too.
    ``cases``: runs that are measured in turns with those of the grid, to compare them with what it predicts.
    """

    ranks: PositiveInt
    threads: PositiveInt
    rendezvous_file: str  # path of a file that does not exist yet, for torch's file:// rendezvous
    points: Points | None
    in_steps: bool
    cases: tuple[CaseOrder, ...] = ()


class WorkerOrder(Record):
    """The order to one worker of ``calibrate``, in a file that its command line names."""

    rank: NonNegativeInt
    quick: bool
    rounds: tuple[RoundOrder, ...]
