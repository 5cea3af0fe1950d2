"""The Compare page: up to eight layouts, machines, stacks or precisions, with the differences first."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse

from fivefold.errors import UserError
from fivefold.planner.compare import compare as run
from fivefold.rendering.comparison import (
    describe_comparison,
    describe_ratios,
    describe_shared,
    explain_differences,
    list_equal,
    list_remarks,
    make_difference_grid,
)
from fivefold.rendering.drawing.bars import draw_stacked
from fivefold.rendering.step_view import BarPart, list_memory_parts, list_time_parts
from fivefold.results.comparison import Comparison, Variant
from fivefold.units import show_bytes
from fivefold.web.pages.render import render_page
from fivefold.web.question import NO_MISTAKE, CompareQuestion
from fivefold.web.site import WebServer

MAX_VARIANTS = 8  # largest number of variants side by side


def build_router(site: WebServer) -> APIRouter:
    """Build the routes of the page."""
    pages = APIRouter(include_in_schema=False)

    @pages.get("/compare")
    async def compare(request: Request, query: Annotated[CompareQuestion, Query()]) -> HTMLResponse:
        comparison, mistake = None, NO_MISTAKE
        if len(query.layout) * (1 + len(query.machines)) > 1 or query.stacks or query.precisions:
            try:
                comparison = await site.work.run_soon(lambda: build_view(site, query))
            except UserError as error:
                mistake = await site.work.run_soon(partial(site.find_mistake, query, error))
        return render_page("compare.html", request, query=query, found=comparison, mistake=mistake)

    return pages


def build_view(site: WebServer, query: CompareQuestion) -> dict[str, Any]:
    """Return the comparison with its pictures, all to one scale."""
    cases = query.cases(folder=site.folder, local=site.local)
    if len(cases) > MAX_VARIANTS:
        raise UserError(f"{len(cases)} variants are more than the {MAX_VARIANTS} that fit side by side; drop some")
    comparison = run(list(cases), risk=query.risk)
    resolved = site.resolve(query)
    steps = [variant.step for variant in comparison.variants if variant.step]
    slowest = max(step.time.step_seconds for step in steps)
    fullest = max(step.memory.peak_bytes for step in steps)
    return {
        "differences": make_difference_grid(comparison, most=MAX_VARIANTS),
        "equal": list_equal(comparison),
        "shared": describe_shared(comparison),
        "settings": resolved.settings,
        "remarks": resolved.remarks,
        "remarks_on_variants": list_remarks(comparison),
        "finding": describe_comparison(comparison),
        "why": [*explain_differences(comparison), *describe_ratios(comparison)],
        "variants": list(zip(comparison.variants, cases.values(), strict=True)),
        "bars": [
            (variant, *draw_bars(variant, slowest=slowest, fullest=fullest))
            for variant in comparison.predicted_variants
        ],
        "times": list_legend_entries(comparison, memory=False),
        "memories": list_legend_entries(comparison, memory=True),
    }


def draw_bars(variant: Variant, *, slowest: float, fullest: int) -> tuple[Any, Any]:
    """Return bars of a variant's time and memory."""
    assert variant.step is not None
    step = variant.step
    stage = max(step.memory.stages, key=lambda stage: stage.peak_bytes)
    label = f"{variant.name}: {show_bytes(stage.peak_bytes)}"
    return (
        draw_stacked(list_time_parts(step), total=slowest or 1.0, label=f"{variant.name}: time by cause"),
        draw_stacked(list_memory_parts(stage), total=fullest * 1.05, label=label),
    )


def list_legend_entries(comparison: Comparison, *, memory: bool) -> list[tuple[str, str]]:
    """Return CSS classes and names of the parts of the bars."""
    parts: list[BarPart] = []
    for variant in comparison.predicted_variants:
        assert variant.step is not None
        stage = max(variant.step.memory.stages, key=lambda stage: stage.peak_bytes)
        parts += list_memory_parts(stage) if memory else list_time_parts(variant.step)
    merged = ((part.look, "exposed communication" if part.look == "messages" else part.name) for part in parts)
    return list(dict.fromkeys(merged))
