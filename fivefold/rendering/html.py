"""Records as HTML for notebooks: a step, a search, a run, rows, a rehearsal, traces; each stands for itself.

Jupyter and marimo ask a record for it (``_repr_html_``), which names its function here (``fivefold/display.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fivefold.rendering.budget import budget, causes
from fivefold.rendering.charts import COLOURS
from fivefold.rendering.compare import shown
from fivefold.rendering.comparison import _table as differing
from fivefold.rendering.comparison import describe_shared, finding, why
from fivefold.rendering.drawn import front
from fivefold.rendering.elements import (
    AXIS_COLOURS,
    TIME_COLOURS,
    Bar,
    Raw,
    bars,
    block,
    figures,
    folded,
    grid,
    heading,
    paragraph,
    table,
    terminal,
    words,
)
from fivefold.rendering.interval import expectation
from fivefold.rendering.question import count_ranks, describe_step
from fivefold.rendering.robust import in_html as robust
from fivefold.rendering.table import PARTS
from fivefold.rendering.verdict import judgement
from fivefold.results.step_comparison import Row, assumed, compare
from fivefold.units import show_bytes, show_count, show_seconds

if TYPE_CHECKING:
    from fivefold.results.comparison import Comparison
    from fivefold.results.playbook import Playbook
    from fivefold.results.run_folder import RunFolder
    from fivefold.results.search_result import Proposal, Ranked, SearchResult, Walk
    from fivefold.results.traced import Traced
    from fivefold.results.whole_run import Offers
    from fivefold.step import Step

SHOWN = 60  # rows of a table


def step(what: Step) -> str:
    """The page of a step."""
    return block(*step_parts(what))


def step_parts(what: Step) -> list[str]:
    """Headline, memory, time, traffic and work."""
    parts = [headline(what), key_figures(what)]
    parts += expected(what)
    parts += [*memory(what), heading("Time", f"bound by {what.time.bound_by}" if what.time.bound_by else "")]
    parts += [time([what]), folded("Traffic and work", traffic(what) + work(what))]
    parts += [paragraph(line, kind="bad") for line in what.findings]
    return parts


def expected(what: Step) -> list[str]:
    """Where comparable published runs lie."""
    return [paragraph(line, kind="soft") for line in expectation(what).plain.splitlines() if line.strip()]


def headline(what: Step) -> str:
    """Whose step it is."""
    about = f"{what.kind} · {what.model} on {what.machine}, {count_ranks(what.world)}"
    said = paragraph(about, kind="soft") + paragraph(describe_step(what), kind="soft")
    return said + paragraph(Raw(f"<b><code>{words(what.layout)}</code></b>")) + remarks(what)


def remarks(what: Step) -> str:
    """What is legal, but perhaps not intended."""
    return "".join(paragraph(line, kind="bad") for line in what.remarks)


def key_figures(what: Step) -> str:
    """Time, speed and the peak, and whether it fits."""
    return figures([
        ("per step", show_seconds(what.time.step_seconds)),
        ("tokens/s per GPU", show_count(what.tokens_per_second_per_gpu)),
        ("MFU, causal", f"{what.mfu.causal:.1%}"),
        (f"peak memory, {judgement(what.memory)}".rstrip(", "), show_bytes(what.memory.peak_bytes)),
    ])  # fmt: skip


def memory(what: Step, *, capacity_bytes: int | None = None, level: int = 3) -> list[str]:
    """A bar of the peak by category for each pipeline stage."""
    stages = what.memory.stages
    if not stages:
        return []
    fullest = max(stages, key=lambda stage: stage.peak_bytes)
    rows = [
        Bar(f"stage {each.stage}" if len(stages) > 1 else "peak",
            {part: getattr(each, f"{part}_bytes") for part in PARTS}, show_bytes(each.peak_bytes))
        for each in stages
    ]  # fmt: skip
    limit = f"chip, {show_bytes(capacity_bytes)}" if capacity_bytes else ""
    colours = dict(zip(PARTS, COLOURS, strict=True))
    return [
        heading(
            "Memory", f"at the peak, in {fullest.peak_cause}" if fullest.peak_cause else "at the peak", level=level
        ),
        bars(rows, colours, limit=capacity_bytes, limit_name=limit),
    ]


def time(steps: Sequence[Step]) -> str:
    """Seconds by cause: a bar and a column for each step."""
    columns = [causes(each.time) for each in steps]
    names = [name for name in dict.fromkeys(name for column in columns for name in column)
             if any(column.get(name) for column in columns)]  # fmt: skip
    rows = [
        Bar(each.kind, {name: column.get(name, 0.0) for name in names}, show_seconds(each.time.step_seconds))
        for each, column in zip(steps, columns, strict=True)
    ]
    cells = [
        (name, *(_share(column.get(name, 0.0), each) for each, column in zip(steps, columns, strict=True)))
        for name in names
    ]
    headings = ("cause", *(each.kind for each in steps))
    return bars(rows, time_colours(names)) + table(headings, cells, left=("cause",))


def time_colours(names: Sequence[str]) -> dict[str, str]:
    """A colour for each cause: communication by axis in its own."""
    axes = [name for name in names if name not in TIME_COLOURS]
    own = {name: AXIS_COLOURS[place % len(AXIS_COLOURS)] for place, name in enumerate(axes)}
    return {name: TIME_COLOURS.get(name) or own[name] for name in names}


def _share(seconds: float, what: Step) -> str:
    whole = what.time.step_seconds
    return f"{show_seconds(seconds)} ({seconds / whole:.0%})" if whole else show_seconds(seconds)


def traffic(what: Step) -> str:
    """What one rank sends per step."""
    rows = [(each.axis, each.collective, f"{each.messages:,}", show_bytes(each.bytes)) for each in what.traffic
            if each.messages or each.bytes]  # fmt: skip
    if not rows:
        return paragraph("One rank sends nothing.", kind="soft")
    return heading("Traffic", "what one rank sends per step") + table(
        ("axis", "collective", "messages", "sent"), rows, left=("axis", "collective")
    )


def work(what: Step) -> str:
    """Parameters and FLOPs."""
    done = what.work
    rows = (
        ("parameters", show_count(done.parameters)), ("active parameters", show_count(done.active_parameters)),
        ("model FLOPs, causal", show_count(done.model_flops_causal)),
        ("hardware FLOPs", show_count(done.hardware_flops)),
    )  # fmt: skip
    return heading("Work", "of the whole step over all ranks") + table(("of", "count"), rows, left=("of",))


def search(what: SearchResult) -> str:
    """The page of a search."""
    return block(*search_parts(what), *front(what, within="notebook"))


def search_parts(what: SearchResult) -> list[str]:
    """The proposal and why; the best; why the others lost."""
    fits = "" if what.best else "; none fits"
    asked = [paragraph(describe_step(what.best[0].step), kind="soft")] if what.best else []
    parts = [*asked, paragraph(f"{what.tried:,} layouts, {what.evaluated:,} evaluated{fits}", kind="soft")]
    parts += _proposed(what.proposal) if what.proposal else []
    parts += robust(what.robust) if what.robust else []
    if what.best:
        parts += [heading("By time alone" if what.proposal else "The best"), best(what.best)]
    for miss in what.misses:
        line = f"{miss.layout} needs {show_bytes(miss.needs_bytes)} of {show_bytes(miss.has_bytes)}: {miss.cause}"
        mends = "".join(f"<br>would fit with {words(mend)}" for mend in miss.mends)
        parts.append(paragraph(Raw(f"<b>{words(line)}</b>{mends}")))
    if what.reasons:
        rows = [(f"{each.layouts:,}", each.line, each.nearest) for each in what.reasons]
        parts.append(folded("Why the others lost", table(("layouts", "why", "nearest"), rows, left=("why", "nearest"))))
    return parts


def _proposed(what: Proposal) -> list[str]:
    rows = [(each.choice, each.line) for each in what.why]
    alike = f"the simplest within {what.within:.1%} of the best; {what.alike} layouts are"
    return [
        heading("Proposal", "; ".join([alike, what.remark] if what.remark else [alike])),
        paragraph(Raw(f"<b><code>{words(what.layout)}</code></b>")), key_figures(what.choice.step),
        time([what.choice.step]), table(("choice", "why"), rows, left=("choice", "why")),
    ]  # fmt: skip


def best(found: Sequence[Ranked]) -> str:
    """A table of ranked layouts."""
    rows = [
        (str(place), each.step.layout, show_seconds(each.step.time.step_seconds),
         show_bytes(each.step.memory.peak_bytes), f"{each.step.mfu.causal:.1%}", each.step.time.bound_by)
        for place, each in enumerate(found, 1)
    ]  # fmt: skip
    return table(("", "layout", "step", "peak", "MFU", "bound by"), rows, left=("layout", "bound by"))


def walk(what: Walk) -> str:
    """One change at a time: the page of the terminal."""
    from fivefold.rendering import search as page

    return block(terminal(page.walk(what, top=10)))


def offers(what: Offers) -> str:
    """One run on several machines: the page of the terminal."""
    from fivefold.rendering import whole_run as page

    return block(terminal(page.offers(what)))


def playbook(what: Playbook) -> str:
    """The procedure step by step: the page of the terminal, then its last step and the run file."""
    from fivefold.rendering import playbook as page

    return block(
        terminal(page.page(what)), *step_parts(what.step), folded("the run file", f"<pre>{words(what.run_file)}</pre>")
    )


def comparison(what: Comparison) -> str:
    """The variants, which is the best, and what differs."""
    lines = [
        (each.name, " ".join(each.facts) or "nothing else", each.refused or (each.step.line() if each.step else ""))
        for each in what.variants
    ]
    variants = table(("", "differs in", "predicted"), lines, left=("", "differs in", "predicted"))
    said = map(paragraph, describe_shared(what))
    return block(*said, variants,
                 paragraph(Raw(f"<b>{words(finding(what))}</b>")), *map(paragraph, why(what)),
                 grid(differing(what)))  # fmt: skip


def run(what: RunFolder) -> str:
    """The page of a finished run."""
    return block(headline(what.measured), key_figures(what.measured), *beside(what.predicted, what.steps))


def beside(predicted: Step, steps: Sequence[Step]) -> list[str]:
    """Predicted beside measured, quantity by quantity; time by cause; what makes up the error."""
    measured = steps[-1]
    parts = [heading("Predicted beside measured", assumed(predicted)), compared(compare(predicted, measured))]
    if not measured.time.parts:
        return parts
    lines = [
        (each.part, show_seconds(each.predicted), show_seconds(each.measured), _signed(each.difference))
        for each in budget(predicted.time, measured.time)
    ]
    error = predicted.time.step_seconds - measured.time.step_seconds
    return [
        *parts, heading("Time"), time(steps),
        heading("What makes up the error", f"{_signed(error)} of {show_seconds(measured.time.step_seconds)}"),
        table(("part", "predicted", "measured", "difference"), lines, left=("part",)),
    ]  # fmt: skip


def compared(found: Sequence[Row]) -> str:
    """A table of quantities, with what is wrong or exact in colour."""
    cells = [(each.quantity, shown(each, each.predicted), shown(each, each.measured), _error(each)) for each in found]
    return table(("quantity", "predicted", "measured", "difference"), cells, left=("quantity",))


def _error(row: Row) -> Raw:
    if row.wrong:
        return Raw(f'<span class="bad">off by {row.predicted - row.measured:+,}</span>')
    if row.exact:
        return Raw('<span class="good">exact</span>')
    return Raw("not measured" if row.error is None else f"{row.error:+.1%}")


def _signed(seconds: float) -> str:
    return f"{'−' if seconds < 0 else '+'}{show_seconds(abs(seconds))}"


def rehearsal(what: Step | None, findings: Sequence[str]) -> str:
    """The rehearsed step, and what would go wrong."""
    wrong = [paragraph(f"would fail: {line}", kind="bad") for line in findings]
    return block(*wrong, *(step_parts(what) if what else []))


def traced(what: Traced) -> str:
    """Where the time of each traced step went, and the prediction beside it."""
    rows = [
        (str(each.rank), each.step, *map(show_seconds, (each.window_seconds, each.compute_seconds,
         each.exposed_seconds, each.memcpy_alone_seconds, each.idle_seconds)))
        for each in what.breakdown[:SHOWN]
    ]  # fmt: skip
    headings = ("rank", "step", "window", "compute", "exposed", "copies alone", "idle")
    parts = [paragraph(what.line(), kind="soft"), table(headings, rows, left=("step",))]
    if what.against:
        parts += [heading("Predicted beside traced"), compared(what.against)]
    return block(*parts, *(paragraph(line, kind="soft") for line in what.remarks))
