from __future__ import annotations

from collections import Counter

from fivefold.dry_run.memory.breakdown import levels
from fivefold.dry_run.memory.living import living
from fivefold.dry_run.record.tape import ALLOC, FREE, SCOPE, Scope, Site, Tape


def tape() -> Tape:
    found = Tape()
    sites = [Site(f"blocks.{n}.mlp", "linear.py:7 f", "aten::mm") for n in range(3)]
    sites += [Site("embed", "embed.py:3 g", "aten::embedding")]
    found.add(SCOPE, found.scope(Scope("start")))
    found.add(SCOPE, found.scope(Scope("forward", 0, 0)))
    for key in range(12):
        found.add(ALLOC, key, 100 + key, found.site(sites[key % 4]))
        if key % 3 == 2:
            found.add(FREE, key - 1)
    found.add(SCOPE, found.scope(Scope("backward", 0, 0)))
    for key in (0, 3, 6):
        found.add(FREE, key)
    return found


def test_what_lives_is_what_was_allocated_and_not_freed() -> None:
    """Against a replay, event by event; blocks of one kind are one group."""
    made = tape()
    found = living(made, range(len(made)), n=99)
    live: dict[int, tuple[int, str, str]] = {}
    for at, (kind, storage, size, site) in enumerate(made):
        if kind == ALLOC:
            module = made.sites[site].module
            live[storage] = size, "blocks.*.mlp" if module.startswith("blocks") else module, made.sites[site].line
        elif kind == FREE:
            del live[storage]
        expected = Counter[tuple[str, str]]()
        for size, module, line in live.values():
            expected[module, line] += size
        told = Counter[tuple[str, str]]()
        for each in found[at]:
            told[each.module, each.line] += each.bytes
        assert told == expected
        assert sum(each.number for each in found[at]) == len(live)
    for level in levels(made):
        assert sum(each.bytes for each in found[int(level.seconds)]) == level.live_bytes


def test_the_largest_come_first() -> None:
    made = tape()
    (found,) = living(made, [len(made) - 4], n=1)
    assert len(found) == 1
    (every,) = living(made, [len(made) - 4], n=9)
    assert found[0] == max(every, key=lambda each: each.bytes)
