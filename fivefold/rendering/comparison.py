"""Show several predicted steps side by side: the best of each quantity is starred; equal quantities come last."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

from rich.console import RenderableType
from rich.text import Text

from fivefold.job import Job
from fivefold.rendering.charts import Chart, draw_stacked_bars, draw_stage_bars
from fivefold.rendering.grid import Grid
from fivefold.rendering.interval import show_change_range
from fivefold.rendering.palette import BLUE, GREY, IDLE, RED
from fivefold.rendering.question import describe_job
from fivefold.rendering.sections import AnswerSection, render_sections
from fivefold.results.comparison import EQUAL, Comparison, Quantity, SpeedRatio, Variant, break_down
from fivefold.spelling import join_names
from fivefold.step import Step
from fivefold.units import show_bytes, show_count, show_flops, show_risk, show_seconds

EQUAL_DIFFERENCE = 0.02  # relative difference below which two predictions are considered equal
BESIDE = 4  # maximum number of variants shown as columns
FREE_MEMORY = "free memory"
WITHOUT_CHANGE = (FREE_MEMORY, "risk of out of memory")  # a relative change of what may be near zero says nothing
NARROW_ROWS = ("step time", "tokens/s, all GPUs", "MFU", "peak memory", FREE_MEMORY, "cost of 1 T tokens")
FIGURE = re.compile(r"\d[\d.,]*(?: (?:[mµ]?s|min|h)\b)?")  # a number, with its unit of time
TIMES = {"compute": BLUE, "bubble": IDLE, "exposed": RED, "update": GREY}


def render_page(comparison: Comparison) -> RenderableType:
    """Return the page: what is compared, the table of what differs, what is equal, and what could not be predicted."""
    return render_sections(list_sections(comparison))


def list_sections(comparison: Comparison) -> Iterator[AnswerSection]:
    """Yield the sections of the page."""
    lines = [Text(line, style="dim", overflow="fold") for line in describe_shared(comparison)]
    for variant in comparison.variants:
        lines.append(
            Text.assemble((f"{variant.name}  ", "bold"), (_describe_variant(variant), "bold cyan"), overflow="fold")
        )
        if variant.error:
            lines.append(Text(f"   not possible: {variant.error}", style="red", overflow="fold"))
    lines += [Text(line, style="yellow", overflow="fold") for line in list_remarks(comparison)]
    lines += [Text(""), Text(describe_comparison(comparison), style="bold", overflow="fold")]
    lines += [Text(line, overflow="fold") for line in (*explain_differences(comparison), *describe_ratios(comparison))]
    note = f"* best value; in brackets: relative to the first column{_qualify_mfu(comparison)}"
    yield AnswerSection((*lines, Text(""), make_difference_grid(comparison), Text(note, style="dim")))
    if equal_quantities := list_equal(comparison):
        yield AnswerSection((Text(" · ".join(equal_quantities), overflow="fold"),), "Equal in all")


def _qualify_mfu(comparison: Comparison) -> str:
    steps = [variant.step for variant in comparison.predicted_variants if variant.step is not None]
    precisions = {Job.read(dict(step.job), origin="job").precision.compute for step in steps}
    return "; MFU: of the peak of each one's matmul format" if len(precisions) > 1 else ""


def describe_shared(comparison: Comparison) -> list[str]:
    """Return what all variants share: the keywords of models, machines and layouts, and the job's fields."""
    jobs = [
        Job.read(dict(variant.step.job), origin="job")
        for variant in comparison.predicted_variants
        if variant.step is not None
    ]
    job_words = {word for job in jobs for word in (job.stack.name, job.precision.name)}
    job_words |= {word for job in jobs for word in (f"seq {job.sequence}", f"gbs {job.global_batch}")}
    shared_words = " ".join(word for word in comparison.common if word not in job_words)
    return [f"in all columns: {shared_words}", describe_job(*jobs)] if shared_words else [describe_job(*jobs)]


def list_remarks(comparison: Comparison) -> list[str]:
    """Return the remarks on the variants, each once after the names of those that have it.

    Of remarks that differ only in their figures, that on the first variant is shown.
    """
    remarks = dict[str, list[tuple[str, str]]]()
    for variant in comparison.variants:
        for remark in variant.step.remarks if variant.step is not None else ():
            remarks.setdefault(FIGURE.sub("", remark), []).append((variant.name, remark))
    return [_describe_remark(named) for named in remarks.values()]


def _describe_remark(named: Sequence[tuple[str, str]]) -> str:
    """Return the remark of the first of ``named``, variants and remarks, after the names of all."""
    remark = named[0][1]
    same = join_names([name for name, other in named if other == remark], "and")
    others = join_names([name for name, other in named if other != remark], "and")
    return f"{same}{f' ({others}: with other figures)' if others else ''}: {remark}"


def draw_charts(comparison: Comparison) -> dict[str, Chart]:
    """Return the charts by file name: seconds of a step and peak bytes per rank, a bar for each variant."""
    return {"time": draw_times(comparison), "memory": _draw_memory(comparison)}


def _describe_variant(variant: Variant) -> str:
    return " ".join(variant.facts) or "as above"


def describe_comparison(comparison: Comparison) -> str:
    """Return which variant that fits trains most tokens per second, and by how much it leads the next.

    It also says if the difference is too small for a prediction.
    """
    steps = [(variant.name, variant.step) for variant in comparison.predicted_variants if variant.step is not None]
    # per token, since variants may differ in their batch
    fitting = sorted((_compute_seconds_per_token(step), name) for name, step in steps if comparison.fits(step))
    if not fitting:
        return "none fits" + "".join(f"; {line}" for line in _describe_unfit(comparison, steps))
    (best, name), *slower = fitting
    if not slower:
        not_fitting = "".join(f"; {line}" for line in _describe_unfit(comparison, steps) if "not fit" not in line)
        return f"only {name} fits{not_fitting}" if len(steps) > 1 else f"only {name} can run"
    lead = slower[0][0] / best - 1
    unfit = "".join(f"; {line}" for line in _describe_unfit(comparison, steps))
    doubt = _describe_doubt(comparison.ratio(name, slower[0][1]), lead)
    among = "Of those that fit, " if unfit else ""
    return f"{among}{name} trains most tokens per second, {lead:.1%} more than {slower[0][1]}{doubt}{unfit}"


def _describe_doubt(ratio: SpeedRatio | None, lead: float) -> str:
    """Return the interval of a lead and what it means, to append to the lead."""
    if ratio is None:
        return "" if lead > EQUAL_DIFFERENCE else "; the difference is too small for a prediction"
    meaning = {"clear": "", "likely": ": likely", "not distinguishable": ": too small a difference for a prediction"}
    return f" (90 % interval {show_change_range(ratio.low_90 - 1, ratio.high_90 - 1)}{meaning[ratio.verdict]})"


def _describe_unfit(comparison: Comparison, steps: Sequence[tuple[str, Step]]) -> Iterator[str]:
    """Yield the variants whose risk is above the accepted one, one line for each verdict."""
    verdicts = [(name, step.memory.verdict) for name, step in steps if not comparison.fits(step)]
    for verdict, one, several in (
        ("fits", f"has a risk above {show_risk(comparison.risk)}", f"have a risk above {show_risk(comparison.risk)}"),
        ("tight", "is tight", "are tight"),
        ("does not fit", "does not fit", "do not fit"),
    ):
        if names := [name for name, step_verdict in verdicts if step_verdict == verdict]:
            yield f"{', '.join(names)} {one if len(names) == 1 else several}"


def explain_differences(comparison: Comparison) -> list[str]:
    """Return what makes each step longer or shorter than the first: the parts of its time that differ.

    The list is empty for many variants, and a variant whose step has another number of tokens is left out.
    """
    (first, first_step), *other_variants = [
        (variant.name, variant.step) for variant in comparison.predicted_variants if variant.step is not None
    ]
    if len(other_variants) >= BESIDE:
        return []
    tokens = first_step.tokens_per_second_per_gpu * first_step.world * first_step.time.step_seconds
    lines = []
    for name, step in other_variants:
        has_equal_tokens = (
            abs(step.tokens_per_second_per_gpu * step.world * step.time.step_seconds - tokens) <= EQUAL * tokens
        )
        seconds = step.time.step_seconds - first_step.time.step_seconds
        if has_equal_tokens and (parts := break_down(first_step.time.split, step.time.split)):
            amount = f"{show_seconds(abs(seconds))} {'longer' if seconds > 0 else 'less'} than {first}"
            lines.append(f"{name} takes {amount}: {parts}")
    return lines


def describe_ratios(comparison: Comparison) -> list[str]:
    """Return a line for each variant but the first: its speed relative to the first, with the interval of the ratio.

    The list is empty for many variants.
    """
    first, *other_names = [variant.name for variant in comparison.predicted_variants]
    if len(other_names) >= BESIDE:
        return []
    lines = []
    steps = [variant.step for variant in comparison.predicted_variants if variant.step is not None]
    has_intervals = all(step.time.interval is not None for step in steps)
    for name in other_names:
        ratio = comparison.ratio(name, first)
        if ratio is not None and ratio.differences:
            lines.append(
                f"{name} against {first}: {ratio.ratio:.2f} times the tokens per second; 50 % interval "
                f"{ratio.low_50:.2f}–{ratio.high_50:.2f}, 90 % interval {ratio.low_90:.2f}–{ratio.high_90:.2f} "
                f"(published pairs that differ in {' and '.join(ratio.differences)})"
            )
        elif ratio is None and has_intervals:
            lines.append(
                f"{name} against {first}: no published runs differ as these do, so the uncertainty of their ratio is "
                "not known; `fivefold predict` gives that of each step"
            )
    return lines


def _compute_seconds_per_token(step: Step) -> float:
    return 1 / (step.tokens_per_second_per_gpu * step.world)


def make_difference_grid(comparison: Comparison, *, most: int = BESIDE) -> Grid:
    """Return what differs: a column for each variant, or for more than ``most``, a row for each.

    The rows have the ``NARROW_ROWS`` quantities.
    """
    names = [variant.name for variant in comparison.predicted_variants]
    if len(names) <= most:
        rows: list[tuple[str | Text, ...]] = [
            (row.name, *_format_cells(row)) for row in comparison.rows if _looks_different(row)
        ]
        return Grid(("", *names), tuple(rows), words=("",))
    main = [row for name in NARROW_ROWS for row in comparison.rows if row.name == name]
    cells = [_format_cells(row, relative=row.name == "step time") for row in main]
    rows = [(name, *line) for name, line in zip(names, zip(*cells, strict=True), strict=True)]
    return Grid(("", *(row.name for row in main)), tuple(rows), words=("",))


def list_equal(comparison: Comparison) -> list[str]:
    """Return the quantities in which all variants agree, with their values."""
    return [f"{row.name} {format_value(row, row.values[0])}" for row in comparison.rows if not _looks_different(row)]


def _looks_different(row: Quantity) -> bool:
    """Tell whether the values of a row differ as they are shown."""
    return row.is_different and len({format_value(row, value) for value in row.values}) > 1


def _format_cells(row: Quantity, *, relative: bool = True) -> Iterator[Text]:
    shows_relative = relative and row.name not in WITHOUT_CHANGE
    for value, relative_value, best in zip(row.values, row.relative_values, row.is_best, strict=True):
        change = (
            f" ({relative_value:+.1%})" if shows_relative and relative_value and abs(relative_value) > EQUAL else ""
        )
        is_negative = row.name == FREE_MEMORY and isinstance(value, float) and value < 0
        style = "bold red" if is_negative else "bold green" if best else ""
        yield Text(format_value(row, value) + change + ("*" if best else ""), style=style)


def format_value(row: Quantity, value: float | str | None) -> str:
    """Return one value of a row in its unit."""
    if value is None:
        return "–"
    if isinstance(value, str):
        return value
    if row.unit == "dollars":
        return f"${value:,.0f}"
    return f"{value:.1%}" if row.unit == "share" else FORMATS.get(row.unit, show_count)(value)


def _format_bytes(size: float) -> str:
    return f"−{show_bytes(-size)}" if size < 0 else show_bytes(size)


FORMATS: dict[str, Callable[[float], str]] = {"seconds": show_seconds, "bytes": _format_bytes, "FLOPs": show_flops}


def draw_times(comparison: Comparison) -> Chart:
    """Chart the seconds of a step by cause, a bar for each variant."""
    bars, texts = {}, []
    for name, step in _list_steps(comparison):
        time = step.time
        parts = (time.compute_seconds, time.bubble_seconds, sum(time.exposed_seconds.values()), time.optimizer_seconds)
        bars[name] = dict(zip(TIMES, parts, strict=True))
        texts.append(show_seconds(time.step_seconds))
    subtitle = " ".join(comparison.common)
    return draw_stacked_bars(
        bars,
        texts,
        colours=TIMES,
        axis="seconds of a step",
        title=describe_comparison(comparison),
        subtitle=subtitle,
        height=40,
    )


def _draw_memory(comparison: Comparison) -> Chart:
    stages = {
        name: max(step.memory.stages, key=lambda stage: stage.peak_bytes) for name, step in _list_steps(comparison)
    }
    smallest = min(stages, key=lambda name: stages[name].peak_bytes)
    title = f"{smallest} needs the least memory, {show_bytes(stages[smallest].peak_bytes)}"
    subtitle = " ".join(comparison.common)
    return draw_stage_bars(stages, axis="peak memory per rank", title=title, subtitle=subtitle, height=40)


def _list_steps(comparison: Comparison) -> Sequence[tuple[str, Step]]:
    return [(f"{v.name}  {_describe_variant(v)}", v.step) for v in comparison.predicted_variants if v.step is not None]
