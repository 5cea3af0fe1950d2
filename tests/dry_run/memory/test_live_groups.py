from __future__ import annotations

from collections import Counter

from fivefold.dry_run.memory.breakdown import list_levels
from fivefold.dry_run.memory.live_groups import list_live_groups
from fivefold.dry_run.record.tape import ALLOC, FREE, SCOPE, CodeSite, Scope, Tape


def tape() -> Tape:
    result = Tape()
    sites = [CodeSite(f"blocks.{n}.mlp", "linear.py:7 f", "aten::mm") for n in range(3)]
    sites += [CodeSite("embed", "embed.py:3 g", "aten::embedding")]
    result.add(SCOPE, result.scope(Scope("start")))
    result.add(SCOPE, result.scope(Scope("forward", 0, 0)))
    for key in range(12):
        result.add(ALLOC, key, 100 + key, result.site(sites[key % 4]))
        if key % 3 == 2:
            result.add(FREE, key - 1)
    result.add(SCOPE, result.scope(Scope("backward", 0, 0)))
    for key in (0, 3, 6):
        result.add(FREE, key)
    return result


def test_live_bytes_are_allocated_minus_freed() -> None:
    """Against a replay, event by event; blocks of one kind are one group."""
    made = tape()
    result = list_live_groups(made, range(len(made)), n=99)
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
        for item in result[at]:
            told[item.module, item.line] += item.bytes
        assert told == expected
        assert sum(entry.number for entry in result[at]) == len(live)
    for level in list_levels(made):
        assert sum(entry.bytes for entry in result[int(level.seconds)]) == level.live_bytes


def test_the_largest_groups_of_live_bytes_come_first() -> None:
    made = tape()
    (result,) = list_live_groups(made, [len(made) - 4], n=1)
    assert len(result) == 1
    (every,) = list_live_groups(made, [len(made) - 4], n=9)
    assert result[0] == max(every, key=lambda item: item.bytes)
