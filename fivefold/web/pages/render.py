"""Templates, the filters that format numbers in them as on the terminal, and the frame of every page."""

from __future__ import annotations

import re
from typing import Any

from fastapi import Request
from fastapi.responses import HTMLResponse
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

import fivefold
from fivefold.machine.catalog import replace_ranks
from fivefold.model.published import CATALOG
from fivefold.rendering.drawing.bars import draw_stacked
from fivefold.rendering.drawing.svg import draw_legend
from fivefold.rendering.grid import Grid, find_tone, find_weight
from fivefold.rendering.reading import list_groups, list_records
from fivefold.requests.catalogs import list_machines
from fivefold.requests.settings import load_settings
from fivefold.units import GIB, show_bytes, show_cause, show_count, show_risk, show_seconds
from fivefold.web.controls import JOB_HELP, PART_LABELS, list_values
from fivefold.web.copies import write_copies
from fivefold.web.question import NO_MISTAKE, JobQuestion, Mistake, spell_field
from fivefold.web.static_files import MODULES, STYLES
from fivefold.web.wording import LABELS, PAGES, use_page_words

CODE = ("layout", "fastest layout", "best", "nearest", "choice")  # columns with layouts or their keywords
PROSE = (
    "why",
    "where",
    "scenario",
    "source",
    "quantity",
    "part",
    "name",
    "line",
    "made by",
    "meaning and source",
    "recommended by, or used by",
)  # columns that need room to wrap


def _find_cell_class(heading: str, grid: Grid) -> str:
    """Return the CSS class of the cells under a heading: number, code, prose or none."""
    if heading not in grid.words:
        return "n"
    return "code" if heading in CODE else "w" if heading in PROSE else ""


def _list_model_offers() -> list[tuple[str, str]]:
    """Return the models for the list of their control, by family and size, with the repositories to find them by."""

    def split_numbers(name: str) -> list[tuple[float, str]]:
        return [
            (float(part), "") if part[0].isdigit() else (-1.0, part) for part in re.findall(r"[\d.]+|[^\d.]+", name)
        ]

    return [(name, CATALOG[name].repository or "") for name in sorted(CATALOG, key=split_numbers)]


def _list_machine_offers() -> list[tuple[str, str]]:
    """Return the chips for the list of their control, with memory, node and instances of clouds to find them by."""
    return [
        (
            machine.name,
            " · ".join(
                (f"{machine.memory_bytes / GIB:.0f} GiB", f"{machine.ranks_per_node} GPUs per node", *machine.instances)
            ),
        )
        for machine in list_machines()
    ]


environment = Environment(
    loader=PackageLoader("fivefold.web"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
environment.filters |= {
    "bytes": show_bytes,
    "cause": show_cause,
    "count": show_count,
    "seconds": show_seconds,
    "risk": show_risk,
    "percent": lambda share: f"{share:.1%}",
    "signed": lambda share: f"{share:+.1%}",
    "of_ranks": replace_ranks,
    "spell_field": lambda value, name: spell_field(name, value),
    "tone": find_tone,
    "weight": find_weight,
    "look": _find_cell_class,
    "page_words": use_page_words,
    "label": lambda name: LABELS.get(name, name.replace("_", " ")),
    "breakable": lambda text: Markup(re.sub(r"([/._])", r"\1<wbr>", str(escape(text)))),
    "thousands": lambda number: f"{number:,}",
    "zip_names": lambda names: [(name, name) for name in names],
}
environment.globals |= {
    "version": fivefold.__version__,
    "pages": PAGES,
    "modules": MODULES,
    "legend": draw_legend,
    "draw_stacked": draw_stacked,
    "list_records": list_records,
    "list_groups": list_groups,
    "known": {
        "models": _list_model_offers(),
        "machines": _list_machine_offers(),
        "choices": list_values(),
        "help": JOB_HELP,
        "parts": PART_LABELS,
    },
    "user_settings": load_settings,
}
INVALID = 422  # status of a page whose question is not valid
COMMANDS = {"/plan": "predict", **{f"/{name}": name for name in ("search", "ask", "compare", "dryrun")}}  # by page


def render_page(
    template: str,
    request: Request,
    *,
    query: JobQuestion,
    mistake: Mistake = NO_MISTAKE,
    code: int = 200,
    **values: Any,
) -> HTMLResponse:
    """Render a page; a ``mistake`` takes the place of the answer.

    That of a request with an invalid field comes first: ``query`` is then the question without this field.
    Its status is 200 unless ``code`` says otherwise, because for a browser the message is an answer.
    """
    path = request.url.path
    if hasattr(request.state, "mistake"):
        mistake, code = request.state.mistake, INVALID
    if path in COMMANDS and template != "mistake.html":
        values["copies"] = write_copies(query, COMMANDS[path])
    is_change = request.headers.get("sec-fetch-dest") == "empty"  # which takes parts of the page
    styles = "" if is_change else Markup(STYLES)
    text = environment.get_template(template).render(
        here=path,
        query=query,
        about=query.to_shared(),
        mistake=mistake.message,
        field=mistake.field,
        entry=mistake.entry,
        code=code,
        styles=styles,
        **values,
    )
    return HTMLResponse(text, status_code=code)


def render_fragment(template: str, **values: Any) -> str:
    """Render a part of a page."""
    return environment.get_template(template).render(**values)
