"""Analyze a tape for the diagnosis: lifetimes and categories of storages, the peak, FLOPs and kept bytes by module.

A storage without a role is classified by its lifetime: if it is allocated in a forward and freed in a later scope, it
is an activation; if it is live before the step, an input; otherwise temporary.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import nn

from fivefold.diagnosis.doctor.watch import DOCTOR_FOLDER, Role, shorten_path
from fivefold.dry_run.record.call_sites import REPOSITORY_FOLDER
from fivefold.dry_run.record.tape import ALLOC, FREE, KERNEL, SCOPE, CodeSite, Scope, Tape
from fivefold.results.diagnosis import CATEGORIES, Fullest, Holding, ModuleCost, generalize_path

PACKAGE_FOLDER = DOCTOR_FOLDER.removeprefix(REPOSITORY_FOLDER)
MAX_TENSOR_GROUPS = 12  # groups of equal tensors that are listed at the peak


class Lifetime(NamedTuple):
    """The lifetime of a storage, as event indices on the tape."""

    key: int  # storage id
    birth: int
    death: int  # the number of events if it is not freed in the step
    bytes: int
    site: CodeSite
    category: str
    name: str


class StepLifetimes(NamedTuple):
    """The lifetimes of all storages of one step."""

    tape: Tape
    lives: tuple[Lifetime, ...]  # in order of birth
    scopes: tuple[tuple[int, Scope], ...]  # first event, scope
    live_bytes: NDArray[np.int64]  # live bytes after each event

    def scope(self, place: int) -> int:
        """Return the number of the scope of an event."""
        return int(np.searchsorted([begin for begin, _ in self.scopes], place, side="right")) - 1

    @property
    def peak_bytes(self) -> int:
        """Return the most bytes that are live at the same time in the step."""
        return int(self.live_bytes[self.begin :].max(initial=0))

    @property
    def peak_place(self) -> int:
        """Return the event after which live bytes are at their peak."""
        return self.begin + int(np.argmax(self.live_bytes[self.begin :]))

    @property
    def begin(self) -> int:
        """Return the first event of the step itself, after the ALLOCs of storages that were live before."""
        return self.scopes[1][0] if len(self.scopes) > 1 else len(self.tape)


def read(tape: Tape, roles: Mapping[int, Role]) -> StepLifetimes:
    """Return the lifetimes of all storages on a tape.

    ``roles``: known category and name, by storage id.
    """
    scopes: list[tuple[int, Scope]] = []
    allocated: dict[int, tuple[int, int, int, int]] = {}  # event, bytes, site, number of its scope
    freed: list[tuple[int, int, int, int, int, int, int]] = []
    change = np.zeros(len(tape) + 1, np.int64)
    for event, (kind, first, second, third) in enumerate(tape):
        if kind == SCOPE:
            scopes.append((event, tape.scopes[first]))
        elif kind == ALLOC:
            allocated[first] = event, second, third, len(scopes) - 1
            change[event] += second
        elif kind == FREE and first in allocated:
            life = allocated.pop(first)
            freed.append((first, *life, event, len(scopes) - 1))
            change[event] -= life[1]
    end = len(tape)
    freed += [(key, *life, end, len(scopes)) for key, life in allocated.items()]
    phases = [scope.phase for _, scope in scopes]
    lives = []
    for key, birth, size, site, scope, death, last_scope in sorted(freed, key=lambda life: life[1]):
        category_and_name = _classify_storage(roles.get(key), tape.sites[site], phases[scope], last_scope - scope)
        lives.append(Lifetime(key, birth, death, size, tape.sites[site], *category_and_name))
    return StepLifetimes(tape, tuple(lives), tuple(scopes), np.cumsum(change[:end]))


def _classify_storage(role: Role | None, site: CodeSite, phase: str, later: int) -> tuple[str, str]:
    """Return category and name of a storage, which is freed ``later`` scopes after its allocation."""
    if role is not None:
        return role.category, role.name
    if phase == "start":
        return "inputs", site.module
    return "activations" if phase == "forward" and later else "temporary", site.module


def describe_peak(lifetimes: StepLifetimes) -> Fullest:
    """Describe the peak: bytes by category, its cause, and the largest groups of equal tensors."""
    peak = lifetimes.peak_place
    live = [life for life in lifetimes.lives if life.birth <= peak < life.death]
    sizes: Counter[str] = Counter()
    groups: dict[tuple[int, str, str, str, str], int] = defaultdict(int)
    for life in live:
        sizes[life.category] += life.bytes
        name, line = generalize_path(life.name), _format_line(life.site)
        groups[life.bytes, life.category, name, line, life.site.operation] += 1
    largest = sorted(groups.items(), key=lambda item: -item[0][0] * item[1])[:MAX_TENSOR_GROUPS]
    peak_life = next((life for life in live if life.birth == peak), None)
    site = peak_life.site if peak_life else CodeSite("", "", "")
    return Fullest(
        **{f"{category}_bytes": sizes[category] for category in CATEGORIES},
        phase=lifetimes.scopes[lifetimes.scope(peak)][1].phase,
        module=site.module,
        line=_format_line(site),
        operation=site.operation,
        largest=tuple(
            Holding(bytes=size, number=number, category=category, name=name, line=line, operation=operation)
            for (size, category, name, line, operation), number in largest
        ),
    )


def find_most(lifetimes: StepLifetimes, category: str) -> int:
    """Return the most bytes of a category that are live at the same time."""
    change = np.zeros(len(lifetimes.tape) + 1, np.int64)
    for life in lifetimes.lives:
        if life.category == category:
            change[life.birth] += life.bytes
            change[life.death] -= life.bytes
    return int(np.cumsum(change).max())


def sum_saved_activations(lifetimes: StepLifetimes) -> dict[str, int]:
    """Return the bytes of activations that are live when a backward begins, by the module that made them.

    If there are several backwards, the one with the most bytes counts.
    """
    kept_by_module: dict[str, int] = {}
    for backward_begin, scope in lifetimes.scopes:
        if scope.phase == "backward":
            bytes_by_module: Counter[str] = Counter()
            for life in lifetimes.lives:
                if life.category == "activations" and life.birth < backward_begin < life.death:
                    bytes_by_module[life.site.module] += life.bytes
            if bytes_by_module.total() > sum(kept_by_module.values()):
                kept_by_module = dict(bytes_by_module)
    return kept_by_module


def count_flops(lifetimes: StepLifetimes) -> dict[str, Counter[str]]:
    """Return FLOPs by module, without its submodules, and by phase."""
    flops_by_module: dict[str, Counter[str]] = defaultdict(Counter)
    phase = ""
    for kind, first, _, _ in lifetimes.tape:
        if kind == SCOPE:
            phase = lifetimes.tape.scopes[first].phase
        elif kind == KERNEL:
            kernel = lifetimes.tape.kernels[first]
            flops_by_module[lifetimes.tape.sites[kernel.site].module][phase] += kernel.flops
    return flops_by_module


def list_module_costs(model: nn.Module, lifetimes: StepLifetimes) -> tuple[ModuleCost, ...]:
    """Return a row for every module: parameters, FLOPs and kept bytes, its submodules included."""
    flops_by_module: dict[str, Counter[str]] = defaultdict(Counter)
    kept_bytes: Counter[str] = Counter()
    for module, phases in count_flops(lifetimes).items():
        for path in list_ancestors(module):
            flops_by_module[path].update(phases)
    for module, size in sum_saved_activations(lifetimes).items():
        for path in list_ancestors(module):
            kept_bytes[path] += size
    return tuple(
        ModuleCost(
            module=path,
            kind=type(part).__name__,
            parameters=sum(p.numel() for p in part.parameters()),
            forward_flops=flops_by_module[path]["forward"],
            backward_flops=flops_by_module[path]["backward"],
            recomputed_flops=flops_by_module[path]["recompute"],
            kept_bytes=kept_bytes[path],
        )
        for path, part in model.named_modules()
    )


def list_ancestors(module: str) -> Iterator[str]:
    """Yield a module's path and those of all modules that contain it, up to "" for the model."""
    while module:
        yield module
        module = module.rpartition(".")[0]
    yield ""


def _format_line(site: CodeSite) -> str:
    """Return a site's line in the user's code, "" if the line is the doctor's own."""
    return "" if site.line.startswith((PACKAGE_FOLDER, DOCTOR_FOLDER)) else shorten_path(site.line)
