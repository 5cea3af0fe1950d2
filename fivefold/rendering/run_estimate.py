"""Show a training run: its duration and losses of time, money, energy and CO2, goodput by checkpoint interval."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import itemgetter

from rich.console import Group, RenderableType
from rich.text import Text

from fivefold.machine.datacenter import SOURCES, Site
from fivefold.rendering.charts import Chart, _finish, _import_altair
from fivefold.rendering.grid import Column, Grid, make_grid, show_share
from fivefold.rendering.interval import describe_basis, describe_outside
from fivefold.rendering.palette import BLUE, ORANGE
from fivefold.rendering.sections import AnswerSection
from fivefold.results.run_estimate import Offer, Offers, RunEstimate
from fivefold.step import Interval
from fivefold.units import show_bytes, show_count, show_risk, show_seconds

DAY = 86400.0


def list_sections(run: RunEstimate, *, is_longest: bool = False) -> list[AnswerSection]:
    """Return what the run takes, where its time goes, goodput by interval, and what is assumed.

    ``is_longest``: the run is the longest within limits, so that its tokens are the answer.
    """
    peak = show_bytes(run.peak_bytes)
    verdict = "is tight" if run.verdict == "tight" else run.verdict
    peak_and_risk = f"{peak} of {show_bytes(run.capacity_bytes)}, {show_risk(run.risk or 0)} risk of running out"
    fits = "" if run.verdict == "fits" else f"; but it {verdict}: {peak_and_risk}"
    answer = f"{show_count(run.tokens)} tokens in " if is_longest else ""
    duration = Text(
        f"{answer}{format_duration(run.seconds)} (50 % interval "
        f"{format_duration(run.low_seconds)} to {format_duration(run.high_seconds)}), "
        f"{run.steps:,} steps of {show_seconds(run.step_seconds)}{fits}",
        style="bold",
        overflow="fold",
    )
    subject = Text(f"{run.model} on {run.ranks} {run.machine}, {show_count(run.tokens)} tokens", style="dim")
    layout = Text(run.layout, style="bold cyan", overflow="fold")
    basis = Text("; ".join(_describe_interval(run.step_interval)), style="dim", overflow="fold")
    return [
        AnswerSection((subject, layout, duration, *([basis] if basis else []), _build_figures(run))),
        AnswerSection((_build_times(run),), "Where the time goes", f"goodput {run.goodput:.1%}"),
        AnswerSection(
            (_build_intervals(run),), "Goodput by checkpoint interval, without evaluation", _word_interval(run)
        ),
        AnswerSection((_list_assumptions(run),), "Assumptions", "change one with --assume NAME=VALUE"),
    ]


def _describe_interval(interval: Interval | None) -> Iterator[str]:
    """Yield what the interval of the step time is based on, and in what no published run is like this one."""
    if interval is None:
        return
    yield f"interval of the step time: {describe_basis(interval)}"
    if interval.outside:
        yield describe_outside(interval.outside)


def summarize_run(run: RunEstimate) -> RenderableType:
    """Return what a run takes in a few lines."""
    interval = f"50 % interval {format_duration(run.low_seconds)} to {format_duration(run.high_seconds)}"
    duration = f"{format_duration(run.seconds)} ({interval}), {run.steps:,} steps"
    interval = format_duration(run.interval_seconds)
    checkpoints = f"{_describe_failures(run)}; a checkpoint every {interval}, goodput {run.goodput:.1%}"
    return Group(Text(duration, style="bold"), Text(checkpoints, overflow="fold"), _build_figures(run))


def render_offers(offer_list: Offers) -> RenderableType:
    """Return the page of one run on several machines: a row each, the best first, and why some cannot run it."""
    deadline = (
        ""
        if offer_list.deadline_seconds is None
        else f", the fewest ranks that finish within {format_duration(offer_list.deadline_seconds)}"
    )
    run = f"{offer_list.model}, a run of {show_count(offer_list.tokens)} tokens"
    parts: list[RenderableType] = [Text(f"{run}, ordered by {offer_list.by}{deadline}", style="dim")]
    best = offer_list.offers[0].run if offer_list.offers else None
    if best is not None:
        interval = f"{format_duration(best.low_seconds)} to {format_duration(best.high_seconds)}"
        duration = f"{format_duration(best.seconds)} (50 % interval {interval})"
        parts.append(Text(f"{best.ranks} {best.machine}: {duration}\n", style="bold"))
        parts.append(make_offer_grid(offer_list))
    if costs := offer_list.describe_costs():
        parts.append(Text(costs, overflow="fold"))
    for offer in (offer for offer in offer_list.offers if offer.run is None):
        line = f"{offer.machine_argument}  {offer.layout}  {offer.error}"
        parts.append(Text(line, style="red", overflow="fold"))
    remarks = [f"{offer.machine_argument}  {offer.remark}" for offer in offer_list.offers if offer.remark]
    unpriced = [offer.machine for offer in offer_list.offers if offer.run is not None and offer.run.dollars is None]
    if unpriced and len(unpriced) < len(offer_list.offers):
        options = " ".join(f"--price {name.split()[0]}=2.2/h" for name in dict.fromkeys(unpriced))
        remarks.append(f"dollars –: no price is known; give {options}")
    parts += [Text(remark, style="yellow", overflow="fold") for remark in remarks]
    if best is not None:
        parts.append(Text.assemble("\n", (describe_assumption(best.site), "dim"), overflow="fold"))
    return Group(*parts)


def describe_assumption(site: Site) -> str:
    """Return what is assumed of a datacenter, in one line."""
    return (
        f"assumed: {site.failures:g} failures per 1,000 GPU-days, {site.node_power:g} times the chips' power in a node "
        f"and {site.pue:g} times that in the building, {site.carbon:g} gCO2e/kWh ({site.grid}); "
        "`fivefold ask run` gives the sources"
    )


def draw_chart(run: RunEstimate) -> Chart:
    """Draw goodput over the interval of checkpoints, with the chosen one marked."""
    alt = _import_altair()
    values = [{"minutes": point.interval_seconds / 60, "goodput": point.share} for point in run.curve]
    best = [{"minutes": run.interval_seconds / 60, "goodput": run.curve[len(run.curve) // 2].share}]
    x = alt.X("minutes:Q", title="minutes between checkpoints", scale=alt.Scale(type="log", nice=False))
    y = alt.Y(
        "goodput:Q",
        title="goodput: share of the time spent training",
        axis=alt.Axis(format=".1%"),
        scale=alt.Scale(zero=False),
    )
    line = alt.Chart(alt.Data(values=values)).mark_line(color=BLUE).encode(x=x, y=y)
    mark = alt.Chart(alt.Data(values=best)).mark_point(filled=True, size=90, color=ORANGE).encode(x=x, y=y)
    title = f"A checkpoint every {format_duration(run.interval_seconds)}: goodput {best[0]['goodput']:.1%}"
    subtitle = f"{run.model} on {run.ranks} {run.machine}: {_describe_failures(run)}"
    return _finish(line + mark, title=title, subtitle=subtitle, height=320)


def format_duration(seconds: float) -> str:
    """Return a duration as text, in days if it is two days or more."""
    if seconds > 1000 * 365 * DAY:
        return "forever"
    return f"{seconds / DAY:,.1f} days" if seconds >= 2 * DAY else show_seconds(seconds)


def _build_figures(run: RunEstimate) -> Grid:
    """Return the table of GPU hours, cost, energy and CO2e of a run."""
    unknown = "no price is known; give one with --price, such as 2.2 (dollars per GPU hour)"
    cost = unknown if run.dollars is None else f"${run.dollars:,.0f}"
    rows = [("GPU hours", show_count(run.gpu_hours)), ("cost", cost)]
    if run.kwh is not None and run.chip_kwh is not None and run.co2_kg is not None:
        rows += [
            (
                "energy",
                f"{_show_thousands(run.kwh, 'kWh', 'MWh')}, of which {_show_thousands(run.chip_kwh, 'kWh', 'MWh')} "
                "by the chips at their power limit",
            ),
            ("CO2e", f"{_show_thousands(run.co2_kg, 'kg', 't')}, at {run.site.carbon:g} g/kWh ({run.site.grid})"),
        ]
    return Grid(("resource", "total"), tuple(rows), words=("resource", "total"))


def _show_thousands(amount: float, unit: str, thousand: str) -> str:
    """Format an amount in ``unit``, or in ``thousand`` of them."""
    return f"{amount:,.3g} {unit}" if amount < 100 else f"{amount / 1000:,.1f} {thousand}"


def _build_times(run: RunEstimate) -> Grid:
    """Return the table of the time that a run trains and loses, and why."""
    parts = {"training": run.training_seconds, **run.lost}
    reasons = {
        "checkpoints": f"{show_bytes(run.checkpoint_bytes)} each; training waits {show_seconds(run.blocked_seconds)}",
        "restarts": _describe_failures(run),
        "repeated": "steps since the last checkpoint, repeated after a failure",
    }
    rows = tuple(
        (name, format_duration(seconds), f"{seconds / run.seconds:.2%}", reasons.get(name, ""))
        for name, seconds in parts.items()
    )
    return Grid(("", "time", "share", "why"), rows, words=("", "why"))


def _describe_failures(run: RunEstimate) -> str:
    if run.between_failures_seconds is None:
        return "no failures"
    return f"{run.failures:,.1f} failures, one every {format_duration(run.between_failures_seconds)}"


def _word_interval(run: RunEstimate) -> str:
    return (
        f"chosen: every {format_duration(run.interval_seconds)}; "
        "Young's formula, the root of 2 · pause · time between failures: "
        f"{format_duration(run.young_seconds)}; each pauses training for {show_seconds(run.blocked_seconds)} and takes "
        f"{show_seconds(run.written_seconds)} to write"
    )


def _build_intervals(run: RunEstimate) -> Grid:
    points = run.curve[:: len(run.curve) // 8]
    rows = tuple((format_duration(point.interval_seconds), f"{point.share:.2%}") for point in points)
    return Grid(("checkpoint every", "goodput"), rows, words=())


def _list_assumptions(run: RunEstimate) -> Grid:
    """Return the table of what the estimate assumes of the site, next to published ranges."""
    site = run.site
    values = {
        "failures": (f"{site.failures:g}", "{:g}"),
        "restart": (show_seconds(site.restart_seconds), "seconds"),
        "pause": (show_seconds(site.pause_seconds), ""),
        "storage": (f"{site.storage / 1e9:g} GB/s", "bytes"),
        "evaluation": (f"{site.evaluation:.1%}", ""),
        "node": (f"{site.node_power:g}", "{:g}"),
        "pue": (f"{site.pue:g}", "{:g}"),
        "grid": (f"{site.carbon:g} ({site.grid})", ""),
    }
    rows = []
    for name, (value, format_name) in values.items():
        source = SOURCES[name]
        rows.append(
            (name, value, _format_range(source.low, source.high, format_name), f"{source.words}: {source.source}")
        )
    return Grid(("name", "value", "published", "meaning and source"), tuple(rows), words=("name", "meaning and source"))


def _format_range(low: float | None, high: float | None, form: str) -> str:
    if low is None or high is None:
        return "–"
    ends: Sequence[str] = [
        show_seconds(end) if form == "seconds" else f"{end / 1e9:g} GB/s" if form == "bytes" else f"{end:g}"
        for end in (low, high)
    ]
    return " to ".join(ends)


def make_offer_grid(offer_list: Offers) -> Grid:
    """Return the table of the machines that can do the run, the best first."""
    return make_grid(
        OFFERS, ((position, offer, offer.run) for position, offer in enumerate(offer_list.offers, 1) if offer.run)
    )


def _format_amount(size: float) -> str:
    """Return an integer, or below ten a number with two digits."""
    return f"{size:,.0f}" if size >= 10 or not size else f"{size:.2g}"


OFFERS: tuple[Column[tuple[int, Offer, RunEstimate]], ...] = (
    Column("#", itemgetter(0)),
    Column("machine", lambda row: row[1].machine_argument, is_text=True),
    Column("layout", lambda row: row[1].layout, is_text=True),
    Column("MFU", lambda row: row[1].mfu, show_share),
    Column("days", lambda row: row[2].seconds / DAY, "{:,.1f}".format),
    Column("GPU hours", lambda row: row[2].gpu_hours, show_count),
    Column("dollars", lambda row: row[2].dollars, _format_amount),
    Column("MWh", lambda row: None if row[2].kwh is None else row[2].kwh / 1000, _format_amount),
    Column("t CO2e", lambda row: None if row[2].co2_kg is None else row[2].co2_kg / 1000, _format_amount),
)
