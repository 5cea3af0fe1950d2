"""Show what layouts lose if the run differs from the prediction: regrets, and the scenarios behind them."""

from __future__ import annotations

from operator import attrgetter

from fivefold.rendering.grid import Column, Grid, make_grid, show_share
from fivefold.results.search_result import Regret, Robustness, ScenarioResult
from fivefold.units import show_bytes, show_seconds

DOES_NOT_FIT = "does not fit"


def summarize(robustness: Robustness) -> str:
    """Return step time and memory of the layout with the smallest regret, and the regret."""
    first = robustness.rows[0]
    figures = f"step time {show_seconds(first.step_seconds)}, peak memory {show_bytes(first.memory_bytes)}"
    if first.worst is None:
        return f"{figures}; with {first.worst_scenario} it does not fit, and no other layout does"
    if not first.worst:
        return f"{figures}; the best in each of {len(robustness.scenarios)} scenarios"
    return (
        f"{figures}; at worst {first.worst:.1%} slower than the best layout of a scenario ({first.worst_scenario}), "
        f"{first.expected or 0.0:.1%} on average over {len(robustness.scenarios)}"
    )


def render_regrets(robustness: Robustness) -> Grid:
    """Return a table of layouts by their worst regret, the smallest first."""
    return make_grid(REGRETS, robustness.rows)


def make_scenario_grid(robustness: Robustness) -> Grid:
    """Return a table of the scenarios: the best layout of each, and the regret of the most robust one."""
    return make_grid(SCENARIOS, robustness.scenarios)


def list_sources(robustness: Robustness) -> list[str]:
    """Return one line for each publication: the scenarios whose range was taken from it, and its citation."""
    names: dict[str, list[str]] = {}
    for scenario in robustness.scenarios:
        names.setdefault(scenario.source, []).append(scenario.name)
    return [f"{', '.join(scenario_names)}: {source}" for source, scenario_names in names.items() if source]


REGRETS: tuple[Column[Regret], ...] = (
    Column("layout", attrgetter("layout"), is_text=True),
    Column("step time", attrgetter("step_seconds"), show_seconds),
    Column("peak memory", attrgetter("memory_bytes"), show_bytes),
    Column("mean regret", attrgetter("expected"), show_share, missing=DOES_NOT_FIT),
    Column("worst regret", attrgetter("worst"), show_share, missing=DOES_NOT_FIT),
    Column("in scenario", lambda row: row.worst_scenario if row.worst != 0 else "", is_text=True),
    Column("note", attrgetter("note"), is_text=True),
)
SCENARIOS: tuple[Column[ScenarioResult], ...] = (
    Column("scenario", attrgetter("name"), is_text=True),
    Column("best layout", attrgetter("best"), is_text=True),
    Column("step time", attrgetter("best_seconds"), show_seconds),
    Column("regret", attrgetter("regret"), show_share, missing=DOES_NOT_FIT),
    Column("source", attrgetter("source"), is_text=True, is_wide=True),
)
