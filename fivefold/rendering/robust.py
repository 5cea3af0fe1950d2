"""Shows what layouts lose if the run is otherwise than predicted: regrets, and the scenarios they are judged in."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from fivefold.rendering.elements import Raw, heading, paragraph, table, words
from fivefold.rendering.grid import Grid
from fivefold.results.search_result import Robustness
from fivefold.units import show_bytes, show_seconds

UNFIT = "does not fit"


def robust(found: Robustness) -> RenderableType:
    """The layout that loses least, in two lines."""
    return Group(
        Text.assemble("\n", ("Most robust  ", "bold"), (found.rows[0].layout, "bold cyan"), overflow="fold"),
        Text(worded(found), overflow="fold"),
    )


def in_html(found: Robustness) -> list[str]:
    """The same, and both tables, as HTML."""
    return [
        heading("Most robust", worded(found)), paragraph(Raw(f"<b><code>{words(found.rows[0].layout)}</code></b>")),
        table(REGRETS, regret_rows(found), left=("layout", "where", "")),
        table(SCENARIOS, scenario_rows(found), left=("scenario", "best")),
        *(paragraph(line, kind="soft") for line in sources(found)),
    ]  # fmt: skip


def worded(found: Robustness) -> str:
    """What the layout that loses least takes, and what it loses."""
    first = found.rows[0]
    figures = f"{show_seconds(first.step_seconds)} a step, {show_bytes(first.memory_bytes)}"
    if first.worst is None:
        return f"{figures}; with {first.worst_in} it does not fit, nor does any other"
    if not first.worst:
        return f"{figures}; the best in each of {len(found.scenarios)} scenarios"
    return (
        f"{figures}; at worst {first.worst:.1%} over the best layout of a scenario ({first.worst_in}), "
        f"{first.expected or 0.0:.1%} on average over {len(found.scenarios)}"
    )


def regrets(found: Robustness) -> Grid:
    """A table of layouts by what they lose at worst, the least first."""
    return Grid(REGRETS, regret_rows(found), words=("layout", "where", ""))


def regret_rows(found: Robustness) -> tuple[tuple[str, ...], ...]:
    """The rows of ``regrets``, with the headings ``REGRETS``."""
    return tuple(
        (
            each.layout, show_seconds(each.step_seconds), show_bytes(each.memory_bytes), share(each.expected),
            share(each.worst), each.worst_in if each.worst != 0 else "", each.note,
        )
        for each in found.rows
    )  # fmt: skip


def scenarios(found: Robustness) -> RenderableType:
    """A table of the scenarios: the best layout of each, what the most robust one loses to it; below it the sources."""
    below = (Text(line, style="dim", overflow="fold") for line in sources(found))
    return Group(Grid(SCENARIOS, scenario_rows(found), words=("scenario", "best")), *below)


def scenario_rows(found: Robustness) -> tuple[tuple[str, ...], ...]:
    """The rows of ``scenarios``, with the headings ``SCENARIOS``."""
    return tuple(
        (each.name, each.best, show_seconds(each.best_seconds), share(each.regret)) for each in found.scenarios
    )


def sources(found: Robustness) -> list[str]:
    """A line for each source, with the scenarios whose range it gives."""
    names: dict[str, list[str]] = {}
    for each in found.scenarios:
        names.setdefault(each.source, []).append(each.name)
    return [f"{', '.join(told)}: {source}" for source, told in names.items() if source]


def share(regret: float | None) -> str:
    """A regret in words."""
    return UNFIT if regret is None else f"{regret:.1%}"


REGRETS = ("layout", "step", "peak", "regret", "at worst", "where", "")
SCENARIOS = ("scenario", "best", "step", "regret")
