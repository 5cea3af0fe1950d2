"""From a tape to a diagnosis: what lives when and what it is, the fullest moment, FLOPs and kept bytes by module.

What has no role is judged by how long it lives: made in a forward and let go in a later scope it is an activation.
What lives before the step without a role is an input.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import nn

from fivefold.check.doctor.watch import HERE, Role, short
from fivefold.check.dryrun.record.call_sites import ROOT
from fivefold.check.dryrun.record.tape import ALLOC, FREE, KERNEL, SCOPE, Scope, Site, Tape
from fivefold.model.diagnosis import CATEGORIES, Fullest, Holding, Part, like

OURS = HERE.removeprefix(ROOT)
MOST = 12  # kinds of tensors that are named


class Lifetime(NamedTuple):
    """A storage from birth to death, as places on the tape."""

    key: int
    birth: int
    death: int  # the number of events if it outlives the step
    bytes: int
    site: Site
    category: str
    name: str


class StepLifetimes(NamedTuple):
    """A step, read."""

    tape: Tape
    lives: tuple[Lifetime, ...]
    scopes: tuple[tuple[int, Scope], ...]  # from which event on
    living: NDArray[np.int64]  # bytes after each event

    def scope(self, place: int) -> int:
        """In which of the scopes an event lies."""
        return int(np.searchsorted([at for at, _ in self.scopes], place, side="right")) - 1

    @property
    def peak_bytes(self) -> int:
        """The most that lives at once."""
        return int(self.living[self.begin :].max(initial=0))

    @property
    def peak_place(self) -> int:
        """The event after which it does."""
        return self.begin + int(np.argmax(self.living[self.begin :]))

    @property
    def begin(self) -> int:
        """The first event of the step itself."""
        return self.scopes[1][0] if len(self.scopes) > 1 else len(self.tape)


def read(tape: Tape, roles: Mapping[int, Role]) -> StepLifetimes:
    """All lives on a tape."""
    scopes: list[tuple[int, Scope]] = []
    born: dict[int, tuple[int, int, int, int]] = {}  # place, bytes, site, number of its scope
    died: list[tuple[int, int, int, int, int, int, int]] = []
    change = np.zeros(len(tape) + 1, np.int64)
    for place, (kind, first, second, third) in enumerate(tape):
        if kind == SCOPE:
            scopes.append((place, tape.scopes[first]))
        elif kind == ALLOC:
            born[first] = place, second, third, len(scopes) - 1
            change[place] += second
        elif kind == FREE and first in born:
            life = born.pop(first)
            died.append((first, *life, place, len(scopes) - 1))
            change[place] -= life[1]
    end = len(tape)
    died += [(key, *life, end, len(scopes)) for key, life in born.items()]
    phases = [scope.phase for _, scope in scopes]
    lives = []
    for key, birth, size, at, scope, death, last in sorted(died, key=lambda life: life[1]):
        what = _what(roles.get(key), tape.sites[at], phases[scope], last - scope)
        lives.append(Lifetime(key, birth, death, size, tape.sites[at], *what))
    return StepLifetimes(tape, tuple(lives), tuple(scopes), np.cumsum(change[:end]))


def _what(role: Role | None, site: Site, phase: str, later: int) -> tuple[str, str]:
    """Category and name."""
    if role is not None:
        return role.category, role.name
    if phase == "start":
        return "inputs", site.module
    return "activations" if phase == "forward" and later else "temporary", site.module


def fullest(lifetimes: StepLifetimes) -> Fullest:
    """The peak."""
    peak = lifetimes.peak_place
    alive = [life for life in lifetimes.lives if life.birth <= peak < life.death]
    sizes: Counter[str] = Counter()
    groups: dict[tuple[int, str, str, str, str], int] = defaultdict(int)
    for life in alive:
        sizes[life.category] += life.bytes
        name, line = like(life.name), _line(life.site)
        groups[life.bytes, life.category, name, line, life.site.operation] += 1
    largest = sorted(groups.items(), key=lambda item: -item[0][0] * item[1])[:MOST]
    born = next((life for life in alive if life.birth == peak), None)
    site = born.site if born else Site("", "", "")
    return Fullest(
        **{f"{category}_bytes": sizes[category] for category in CATEGORIES},
        phase=lifetimes.scopes[lifetimes.scope(peak)][1].phase, module=site.module, line=_line(site),
        operation=site.operation, largest=tuple(
            Holding(bytes=size, number=number, category=category, name=name, line=line, operation=operation)
            for (size, category, name, line, operation), number in largest
        ),
    )  # fmt: skip


def most(lifetimes: StepLifetimes, category: str) -> int:
    """The most bytes of a category that live at once."""
    change = np.zeros(len(lifetimes.tape) + 1, np.int64)
    for life in lifetimes.lives:
        if life.category == category:
            change[life.birth] += life.bytes
            change[life.death] -= life.bytes
    return int(np.cumsum(change).max())


def kept(lifetimes: StepLifetimes) -> dict[str, int]:
    """Activations that live when a backward begins, by the module in which they were born; of the fullest backward."""
    found: dict[str, int] = {}
    for at, scope in lifetimes.scopes:
        if scope.phase == "backward":
            now: Counter[str] = Counter()
            for life in lifetimes.lives:
                if life.category == "activations" and life.birth < at < life.death:
                    now[life.site.module] += life.bytes
            if now.total() > sum(found.values()):
                found = dict(now)
    return found


def flops(lifetimes: StepLifetimes) -> dict[str, Counter[str]]:
    """Of each module alone, by phase."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    phase = ""
    for kind, first, _, _ in lifetimes.tape:
        if kind == SCOPE:
            phase = lifetimes.tape.scopes[first].phase
        elif kind == KERNEL:
            kernel = lifetimes.tape.kernels[first]
            found[lifetimes.tape.sites[kernel.site].module][phase] += kernel.flops
    return found


def parts(model: nn.Module, lifetimes: StepLifetimes) -> tuple[Part, ...]:
    """Every module, with what is inside of it."""
    work: dict[str, Counter[str]] = defaultdict(Counter)
    keeps: Counter[str] = Counter()
    for module, phases in flops(lifetimes).items():
        for path in above(module):
            work[path].update(phases)
    for module, size in kept(lifetimes).items():
        for path in above(module):
            keeps[path] += size
    return tuple(
        Part(
            module=path, kind=type(part).__name__, parameters=sum(p.numel() for p in part.parameters()),
            forward_flops=work[path]["forward"], backward_flops=work[path]["backward"],
            recomputed_flops=work[path]["recompute"], kept_bytes=keeps[path],
        )
        for path, part in model.named_modules()
    )  # fmt: skip


def above(module: str) -> Iterator[str]:
    """Itself and all that hold it, up to the whole."""
    while module:
        yield module
        module = module.rpartition(".")[0]
    yield ""


def _line(site: Site) -> str:
    """Of the user's code; of what the doctor calls there is none."""
    return "" if site.line.startswith((OURS, HERE)) else short(site.line)
