"""The predicted rows of a setting: one per layout, or the best of a search. Invalid layouts give rows with a reason."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from fivefold.errors import UserError
from fivefold.layout.spec import Layout
from fivefold.planner.counts.counts import Counts
from fivefold.planner.predict import Planner, predict
from fivefold.planner.search import search
from fivefold.results.sweep_row import Status, SweepRow, list_layout_columns, list_step_columns
from fivefold.step import FITS_RISK, Step
from fivefold.sweeps.spec import SweepSetting, parse_best
from fivefold.units import show_bytes, show_risk
from fivefold.version import __version__


class Predictor:
    """Predicts rows; the counts of a model and job are shared between consecutive settings.

    ``risk``: the highest probability of running out of memory at which a row counts as fitting.
    """

    def __init__(self, risk: float = FITS_RISK) -> None:
        self.risk = risk
        self._setting: SweepSetting | None = None
        self._planner: Planner | None = None
        self._counts: tuple[object, Counts] | None = None

    def rows(self, setting: SweepSetting, request: str) -> list[SweepRow]:
        """Return the row of a layout (a text without an open degree), or the rows of ``best K``."""
        machine, job = setting.machine, setting.job
        if job is None:
            return [_make_invalid_row(setting, request, setting.why)]
        search_request = parse_best(request)
        try:
            if search_request is None:
                layout = Layout.parse(request, machine=machine)
                step = predict(
                    model=setting.model, machine=machine, layout=layout, job=job, using=self._get_planner(setting)
                )
                return [_build_row(setting, step, risk=self.risk)]
            options: dict[str, Any] = {"recomputations": [search_request[1]]} if search_request[1] else {}
            result = search(
                model=setting.model, machine=machine, job=job, top=search_request[0], risk=self.risk, **options
            )
        except UserError as mistake:
            return [_make_invalid_row(setting, request, str(mistake))]
        if not result.best:
            nearest = result.misses[0] if result.misses else None
            need = _describe_shortage(nearest.needs_bytes, nearest.has_bytes, nearest.risk or 0.0) if nearest else ""
            unfit = result.describe_unfit("no layout")
            why = f"{unfit}; the nearest, {nearest.layout}, {need}" if nearest else f"{unfit} or comes close"
            return [_make_invalid_row(setting, request, why, status="memory")]
        rows = [_build_row(setting, ranked.step, risk=self.risk) for ranked in result.best]
        return [row.replace(why=row.why or result.gap_remark()) for row in rows]

    def _get_planner(self, setting: SweepSetting) -> Planner:
        """Return the planner of a setting; settings in a row that share a model and a job share its counts."""
        if self._planner is None or setting is not self._setting:
            assert setting.job is not None
            counts_key = (id(setting.model), id(setting.job), setting.machine.backend)
            counts = self._counts[1] if self._counts and self._counts[0] == counts_key else None
            self._planner = Planner(
                model=setting.model, machine=setting.machine, job=setting.job, counts=counts, risk=self.risk
            )
            self._setting, self._counts = setting, (counts_key, self._planner.counts)
        return self._planner


def hash_setting(setting: SweepSetting, *, calibrated: bool = True, risk: float | None = None) -> str:
    """Return a hash of everything except the layout that a setting's rows depend on.

    Predictions depend on the machine with its calibration, measurements only on its name (``calibrated=False``).
    ``risk``: the highest at which a predicted row fits; None for measurements.
    """
    parts = [part and part.model_dump_json() for part in (setting.model, setting.job, calibrated and setting.machine)]
    values = [
        __version__,
        *parts,
        *_list_setting_fields(setting).values(),
        setting.why,
        *([] if risk is None else [risk]),
    ]
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]


def _list_setting_fields(setting: SweepSetting) -> dict[str, Any]:
    """Return the columns of a row that identify its setting."""
    return {
        "model": setting.model.name,
        "machine": setting.machine_name,
        "ranks": setting.ranks,
        "sequence": setting.sequence,
        "batch": setting.batch,
        "precision": setting.precision,
        "stack": setting.stack,
    }


def _build_row(setting: SweepSetting, step: Step, *, risk: float) -> SweepRow:
    columns = _list_setting_fields(setting) | list_layout_columns(Layout.parse(step.layout)) | list_step_columns(step)
    capacity = setting.machine.chip.memory_bytes
    peak = columns["peak_bytes"]
    probability = step.memory.risk or 0.0
    status: Status = "fits" if probability <= risk else "memory"
    why = "" if status == "fits" else _describe_shortage(peak, capacity, probability)
    return SweepRow(**columns, capacity_bytes=capacity, status=status, why=why)


def _describe_shortage(needs: int, has: int, risk: float) -> str:
    return f"needs {show_bytes(needs)} of {show_bytes(has)}: {show_risk(risk)} risk of running out"


def _make_invalid_row(setting: SweepSetting, request: str, why: str, *, status: Status = "invalid") -> SweepRow:
    """Return a row without numbers for an invalid layout, which is in canonical form if it can be parsed."""
    try:
        columns = list_layout_columns(Layout.parse(request, machine=setting.machine))
    except UserError:
        words = [word for word in request.split() if word.startswith("ac=")]
        columns = {"layout": request, "recomputation": words[0][3:] if words else "none"}
    return SweepRow(**_list_setting_fields(setting) | columns, status=status, why=why)
