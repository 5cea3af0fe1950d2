"""An entry of the catalog: the facts in which a framework differs from ``Stack``'s defaults, each with its source."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from fivefold.stack.spec import Stack, SupportedLayouts


class Fact(NamedTuple):
    """A value of a field, and its source: repository@commit:path, or a paper with its section."""

    value: object
    source: str


class StackEntry(NamedTuple):
    """A named framework: ``facts`` are fields of ``Stack``, ``runs`` fields of ``Runs``."""

    name: str
    version: str  # version of the framework to which the facts apply
    family: str
    facts: Mapping[str, Fact]
    runs: Mapping[str, Fact]

    def stack(self) -> Stack:
        """Return the record: the stated facts over the defaults."""
        runs = SupportedLayouts.model_validate({field: fact.value for field, fact in self.runs.items()})
        facts = {field: fact.value for field, fact in self.facts.items()}
        return Stack.model_validate(
            {"name": self.name, "version": self.version, "family": self.family, "runs": runs, **facts}
        )

    def sources(self) -> dict[str, str]:
        """Return the source of each fact; those of supported layouts have keys ``runs.FIELD``."""
        facts = {field: fact.source for field, fact in self.facts.items()}
        return facts | {f"runs.{field}": fact.source for field, fact in self.runs.items()}
