"""The simplest of the layouts that are as good as the best: what a team would rather run.

    complexity = Σ of an axis and its degree · leaving the node · ZeRO · recomputation · schedule · placement

A prediction cannot tell layouts within ``within`` of the best apart. From those that the search evaluated simpler ones
are tried, the simplest first, until none is left that fits and is within it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import log2
from typing import NamedTuple

from fivefold.layout.legal import is_legal, told
from fivefold.layout.names import DEFAULT_ORDER, ScheduleName
from fivefold.layout.search_result import Alternative, Why
from fivefold.layout.spec import Layout, divisors
from fivefold.layout.where import ANY, Where
from fivefold.plan.count.memory.allocator import room_bytes
from fivefold.plan.predict import Planner
from fivefold.units import show_bytes

# How much harder a choice makes a layout to run and to understand. Only their order matters much: an axis more than
# its degree, what few engines have more than what all have.
AXIS, LEAVES_NODE, ORDER, SHARD_GROUP, NO_SP, EXPERT_TENSOR, UNEVEN = 4.0, 4.0, 3.0, 2.0, 1.0, 2.0, 1.0
ZERO = (0.0, 1.0, 2.5, 3.0)
SCHEDULE: dict[ScheduleName, float] = {
    "1f1b": 0.0, "gpipe": 1.0, "interleaved": 1.0, "zb1p": 4.0, "zb2p": 5.0, "zbv": 5.0, "dualpipe": 6.0,
    "dualpipev": 6.0,
}  # fmt: skip
RECOMPUTATION = {"none": 0.0, "selective": 1.0, "full": 2.0}
GROUPS = 3.0  # recomputation of some operations, or of every n-th layer
MOST = 400  # layouts that are estimated beside those of the search


class Evaluated(NamedTuple):
    """A layout that fits; ``seconds`` of a step, ``peak_bytes`` of its fullest rank."""

    layout: Layout
    seconds: float
    peak_bytes: int


def complexity(layout: Layout, *, ranks_per_node: int) -> float:
    """How much there is to understand, to tune and to go wrong; 0 for data parallelism alone."""
    found = sum(AXIS + log2(n) for n in (layout.tp, layout.cp, layout.pp, layout.ep) if n > 1)
    found += LEAVES_NODE * ((layout.tp > ranks_per_node) + (layout.tp * layout.cp > ranks_per_node))
    found += ZERO[layout.zero] + (SHARD_GROUP if layout.shard_group else 0.0)
    found += SCHEDULE[layout.schedule] + log2(layout.v) + RECOMPUTATION.get(layout.ac, GROUPS)
    found += UNEVEN * bool(layout.stages)
    found += ORDER * (layout.order != DEFAULT_ORDER) + NO_SP * (not layout.sp) + EXPERT_TENSOR * (layout.etp > 1)
    return found


class Simplest:
    """Looks for simple layouts of one planner's model, machine and job that take no more than ``limit`` seconds."""

    def __init__(self, planner: Planner, known: Iterable[Evaluated], *, limit: float, where: Where = ANY) -> None:
        self.planner, self.limit, self.where = planner, limit, where
        self.room, self.node = room_bytes(planner.machine), planner.machine.ranks_per_node
        self.known = {each.layout: each for each in known}
        self.left = MOST

    def find(self) -> Evaluated:
        """The simplest layout within the limit that was found; of equally simple ones the fastest."""
        best = min((each for each in self.known.values() if each.seconds <= self.limit), key=self._key)
        while (simpler := self._simpler(best)) is not None:
            best = simpler
        return best

    def rivals(self, chosen: Evaluated) -> tuple[Evaluated | None, Evaluated | None]:
        """The fastest of the simpler layouts, which are slower than the limit, and the fastest of all, if faster."""
        cost = self._cost(chosen.layout)
        simpler = [each for each in self.known.values() if self._cost(each.layout) < cost]
        fastest = min(self.known.values(), key=lambda each: each.seconds)
        faster = fastest if fastest.seconds < chosen.seconds else None
        return min(simpler, key=lambda each: each.seconds, default=None), faster

    def why(self, chosen: Evaluated) -> Iterator[Why]:
        """One line per choice: what its nearest alternatives would cost."""
        for choice, others in _choices(chosen.layout):
            told = [said for name, other in others if (said := self._told(name, other, chosen))]
            if told:
                yield Why(choice=choice, line="; ".join(told))

    def _simpler(self, than: Evaluated) -> Evaluated | None:
        cost = self._cost(than.layout)
        moves = {each for each in _moves(than.layout) if self._cost(each) < cost}
        for layout in sorted(moves, key=lambda each: (self._cost(each), str(each))):
            found = self._evaluate(layout)
            if found is not None and found.seconds <= self.limit:
                return found
        return None

    def _evaluate(self, layout: Layout) -> Evaluated | None:
        """A layout's time and memory; None if it is illegal, does not fit, or enough were tried."""
        if layout in self.known:
            return self.known[layout]
        planner = self.planner
        if not self.left or not self.where.holds(layout) or not _legal(layout, planner):
            return None
        ranks = planner.memory(layout)
        peak = max(rank.peak_bytes for rank in ranks)
        if peak > self.room:
            return None
        self.left -= 1
        self.known[layout] = Evaluated(layout, planner.estimate(layout, ranks=ranks).step_time.seconds, peak)
        return self.known[layout]

    def _told(self, name: str, other: Layout | None, chosen: Evaluated) -> str:
        """What an alternative would cost, in some words; "" where it is illegal."""
        planner = self.planner
        if other is None or not _legal(other, planner):
            return ""
        over = planner.peak_bytes(other) - self.room
        if over > 0:
            return f"{name} does not fit, by {show_bytes(over)}"
        slower = planner.estimate(other).step_time.seconds / chosen.seconds - 1
        words = f"{name} takes {abs(slower):.1%} {'longer' if slower >= 0 else 'less'}"
        return (
            f"{name} leaves the node: {words[len(name) + 1 :]}" if other.tp > self.node >= chosen.layout.tp else words
        )

    def _cost(self, layout: Layout) -> float:
        return complexity(layout, ranks_per_node=self.node)

    def _key(self, each: Evaluated) -> tuple[float, float]:
        return self._cost(each.layout), each.seconds


def alternative(other: Evaluated | None, chosen: Evaluated) -> Alternative | None:
    """``other`` as a record beside the chosen layout."""
    if other is None:
        return None
    return Alternative(
        layout=str(other.layout), memory_bytes=other.peak_bytes, step_seconds=other.seconds,
        slower=other.seconds / chosen.seconds - 1,
    )  # fmt: skip


def _moves(layout: Layout) -> Iterator[Layout]:
    """Layouts that differ in one choice, each with other micro-batches, recomputation and ZeRO, which may make up."""
    for moved in (layout, *_structures(layout)):
        sizes = {layout.mbs, 1, 2 * layout.mbs, max(1, layout.mbs // 2)}
        for mbs in sorted(sizes):
            for ac in dict.fromkeys((layout.ac, "none", "selective", "full")):
                for zero in range(4) if moved.dp * moved.cp > 1 else (0,):
                    group = moved.shard_group if zero and zero == layout.zero else None
                    if made := _made(moved, mbs=mbs, ac=ac, zero=zero, shard_group=group):
                        yield made


def _structures(layout: Layout) -> Iterator[Layout]:
    """One axis smaller, or a plainer schedule, placement or sharding."""
    for axis in ("tp", "cp", "pp", "ep", "etp"):
        for degree in divisors(getattr(layout, axis))[:-1]:
            if made := _with_degree(layout, axis, degree):
                yield made
    simple: list[dict[str, object]] = [
        {"order": DEFAULT_ORDER}, {"shard_group": None}, {"sp": True}, {"cp_kind": "ring"},
        {"stages": ()}, {"schedule": "1f1b", "v": 1, "stages": ()},
    ]  # fmt: skip
    simple += [{"schedule": "interleaved", "v": v, "stages": ()} for v in divisors(layout.v) if 1 < v < layout.v]
    for fields in simple:
        if made := _made(layout, **fields):
            yield made


def _with_degree(layout: Layout, axis: str, degree: int) -> Layout | None:
    """The layout with another degree of ``axis``, made up for by dp; None if dp cannot."""
    ranks = layout.dp * getattr(layout, axis)
    fields: dict[str, object] = {axis: degree}
    if axis not in ("ep", "etp"):
        if ranks % degree:
            return None
        fields["dp"] = ranks // degree
    if axis == "tp":
        fields |= {"sp": layout.sp or degree == 1, "etp": 1 if degree % layout.etp else layout.etp}
    if axis == "cp" and degree == 1:
        fields["cp_kind"] = "ring"
    if axis == "pp":
        fields["stages"] = ()
        if degree == 1:
            fields |= {"schedule": "1f1b", "v": 1}
    if layout.zero == 0 and layout.dp * layout.cp == 1:
        fields["zero"] = 1
    return _made(layout, **fields)


def _choices(layout: Layout) -> Iterator[tuple[str, list[tuple[str, Layout | None]]]]:
    """Each choice in the layout's own words, with its nearest alternatives by name."""
    for axis in ("tp", "cp", "pp", "ep"):
        degree = getattr(layout, axis)
        others = [each for each in (degree // 2, 2 * degree) if each >= 1]
        yield f"{axis}{degree}", [(f"{axis}{each}", _with_degree(layout, axis, each)) for each in others]
    if layout.dp * layout.cp > 1:
        stages = [each for each in (layout.zero - 1, layout.zero + 1) if 0 <= each <= 3]
        group = layout.shard_group
        made = [(f"zero{z}", _made(layout, zero=z, shard_group=group if z else None)) for z in stages]
        yield f"zero{layout.zero}", made
    if layout.pp > 1:
        plain = ("1f1b", _made(layout, schedule="1f1b", v=1, stages=()))
        twice = (f"v{2 * layout.v}", _made(layout, schedule="interleaved", v=2 * layout.v, stages=()))
        split = ("zb1p", _made(layout, schedule="zb1p", v=1, stages=()))
        yield f"{layout.schedule} v{layout.v}", [each for each in (plain, twice, split) if each[1] != layout]
    sizes = [each for each in (layout.mbs // 2, 2 * layout.mbs) if each >= 1]
    yield f"mbs{layout.mbs}", [(f"mbs{each}", _made(layout, mbs=each)) for each in sizes]
    kinds = [each for each in ("none", "selective", "full") if each != layout.ac]
    yield f"ac={layout.ac}", [(f"ac={each}", _made(layout, ac=each)) for each in kinds]


def _made(layout: Layout, **fields: object) -> Layout | None:
    """The layout with other fields; None if they contradict each other."""
    try:
        return layout.replace(**fields)
    except ValueError:
        return None


def _legal(layout: Layout, planner: Planner) -> bool:
    model, job = planner.model, planner.job
    return is_legal(layout, model=model, job=job, machine=planner.machine) and told(layout, model=model, job=job)
