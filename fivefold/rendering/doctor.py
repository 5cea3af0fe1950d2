"""Show the diagnosis of a module as a page of text: peak memory by category, work by module, advice.

11.37 MiB at the peak · 332 k parameters · 577 MFLOPs a step activations  6.60 MiB  58.0 %  █████████████████ recompute
layers.{0-2}.mlp: 9.87 MiB, + 4.4 % FLOPs
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from fivefold.rendering.grid import Grid
from fivefold.rendering.step_view import Parts, split_bytes
from fivefold.rendering.table import build_heading, show_bars
from fivefold.results.diagnosis import CATEGORIES, Advice, Diagnosis, Fullest, ModuleCost, generalize_path
from fivefold.units import show_bytes, show_count, show_flops

MAX_ROWS = 16  # maximum rows of the module table, which limit its depth
LISTS = ("ModuleList", "ModuleDict")  # containers without work of their own


def render_page(diagnosis: Diagnosis) -> RenderableType:
    """Return the full page."""
    fullest_step = max(diagnosis.steady, diagnosis.first, key=lambda step: step.peak_bytes)
    sizes = {part: getattr(fullest_step, f"{part}_bytes") for part in CATEGORIES}
    bars = Parts(split_bytes({part: size for part, size in sizes.items() if size}), fullest_step.peak_bytes)
    parts: list[RenderableType] = [_build_headline(diagnosis)]
    parts += [build_heading("Memory at the peak", describe_cause(fullest_step)), show_bars(bars)]
    parts += [build_heading("Largest tensors", "equal ones grouped"), _make_largest_grid(fullest_step)]
    parts += [
        build_heading("By module", "equal ones grouped; kept from the forward to the backward"),
        _build_module_table(diagnosis.parts),
    ]
    if diagnosis.advice is not None:
        parts += [
            build_heading("Recomputation", f"within {show_bytes(diagnosis.advice.budget_bytes)}"),
            describe_advice(diagnosis.advice),
        ]
    if diagnosis.costs:
        parts += [
            build_heading("What it would cost", "a rank; weights are gathered before use and then freed, unless said"),
            _build_cost_table(diagnosis),
        ]
    if diagnosis.remarks:
        parts += [build_heading("Remarks"), *(Text(f"· {remark}", overflow="fold") for remark in diagnosis.remarks)]
    return Group(*parts)


def _build_cost_table(diagnosis: Diagnosis) -> Grid:
    """Return the table of memory, FLOPs and messages of each variant of a step."""
    rows = tuple(
        (
            cost.variant,
            show_bytes(cost.peak_bytes),
            show_bytes(cost.states_bytes),
            show_bytes(cost.kept_bytes),
            show_flops(cost.flops),
            str(sum(message.calls for message in cost.traffic)),
            show_bytes(sum(message.bytes for message in cost.traffic)),
        )
        for cost in diagnosis.costs
    )
    return Grid(("", "peak", "states", "kept", "FLOPs", "calls", "sent"), rows, words=("",))


def describe_cause(at: Fullest) -> str:
    """Return phase, module, operation and source line of the peak."""
    line = f"({at.line})" if at.line else ""
    return ", ".join(filter(None, (at.phase, " ".join(filter(None, (at.module, at.operation, line))))))


def describe_advice(plan: Advice) -> Text:
    """Return the modules to recompute, their cost, the peak measured with them, and whether it fits."""
    if not plan.modules and plan.fits:
        return Text(f"none is needed: {show_bytes(plan.peak_bytes)} fits", style="green")
    text = Text("".join(f"{line}\n" for line in plan.not_recomputable), overflow="fold")
    if plan.modules:
        text.append("torch.utils.checkpoint(use_reentrant=False) of  ")
        text.append(", ".join(merge_ranges(plan.modules)), "bold")
        text.append(
            f"\n{show_bytes(plan.peak_bytes)} at the peak when tried, "
            f"{show_bytes(plan.predicted_peak_bytes)} expected; {plan.extra_share:+.1%} FLOPs"
        )
    verdict, style = ("fits", "green") if plan.fits else (f"does not fit: {plan.reason}", "bold red")
    return text.append("\n" if plan.modules else "").append(verdict, style)


def merge_ranges(modules: Iterable[str]) -> Iterator[str]:
    """Merge numbered paths: ``layers.0.mlp``, ``layers.1.mlp`` become ``layers.{0-1}.mlp``."""
    numbers: dict[tuple[str, str], list[int]] = defaultdict(list)
    for path in modules:
        match = re.fullmatch(r"(|.*\.)(\d+)((?:\.\D[^.]*)*)", path)
        if match is None:
            yield path
        else:
            numbers[match[1], match[3]].append(int(match[2]))
    for (before, after), indices in numbers.items():
        index_runs: list[list[int]] = []
        for number in sorted(indices):
            if index_runs and number == index_runs[-1][-1] + 1:
                index_runs[-1].append(number)
            else:
                index_runs.append([number])
        names = [
            str(index_run[0]) if len(index_run) == 1 else f"{index_run[0]}-{index_run[-1]}" for index_run in index_runs
        ]
        yield before + (names[0] if len(indices) == 1 else f"{{{','.join(names)}}}") + after


def _build_headline(diagnosis: Diagnosis) -> Text:
    """Return the model, its peak memory and the FLOPs of a step as a paragraph."""
    flops = diagnosis.forward_flops + diagnosis.backward_flops + diagnosis.recomputed_flops
    trained = f", {show_count(diagnosis.trainable)} trained" if diagnosis.trainable != diagnosis.parameters else ""
    recomputed = f", {show_flops(diagnosis.recomputed_flops)} recomputed" if diagnosis.recomputed_flops else ""
    return Text.assemble(
        (
            f"{diagnosis.model} with {diagnosis.optimizer}, {show_count(diagnosis.parameters)} parameters{trained}\n\n",
            "dim",
        ),
        (f"{show_bytes(diagnosis.peak_bytes)} at the peak", "bold cyan"),
        f"  ·  {show_bytes(diagnosis.first.peak_bytes)} in the first step, "
        f"{show_bytes(diagnosis.steady.peak_bytes)} later\n",
        f"{show_flops(flops)}FLOPs a step: {show_flops(diagnosis.forward_flops)} forward, "
        f"{show_flops(diagnosis.backward_flops)} backward{recomputed}",
        overflow="fold",
    )


def _make_largest_grid(at: Fullest) -> Grid:
    """Return the table of the largest tensors at the peak."""
    rows = tuple(
        (
            f"{tensors.number} × {show_bytes(tensors.bytes)}" if tensors.number > 1 else show_bytes(tensors.bytes),
            tensors.category,
            tensors.name or "–",
            f"{tensors.operation.partition('::')[2]}  {tensors.line}".strip(),
        )
        for tensors in at.largest
    )
    return Grid(("size", "category", "of", "made by"), rows, words=("category", "of", "made by"))


def _build_module_table(parts: Sequence[ModuleCost]) -> Grid:
    """Return the table of what modules cost, equal ones in one row, as deep as ``MAX_ROWS`` allows."""
    groups: dict[str, list[ModuleCost]] = defaultdict(list)
    for part in parts[1:]:
        if part.kind not in LISTS and (part.parameters or part.forward_flops or part.kept_bytes):
            groups[generalize_path(part.module)].append(part)
    depth = 1 + max((name.count(".") for name in groups), default=0)
    while depth > 1 and sum(name.count(".") < depth for name in groups) > MAX_ROWS:
        depth -= 1
    rows = tuple(
        (
            f"{name} × {len(parts_of_name)}" if len(parts_of_name) > 1 else name,
            " ".join(dict.fromkeys(part.kind for part in parts_of_name)),
            show_count(sum(part.parameters for part in parts_of_name)),
            show_flops(sum(part.forward_flops for part in parts_of_name)),
            show_flops(sum(part.backward_flops + part.recomputed_flops for part in parts_of_name)),
            show_bytes(sum(part.kept_bytes for part in parts_of_name)),
        )
        for name, parts_of_name in groups.items()
        if name.count(".") < depth
    )
    headings = ("module", "kind", "parameters", "forward FLOPs", "backward FLOPs", "kept")
    return Grid(headings, rows, words=("module", "kind"))
