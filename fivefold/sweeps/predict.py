"""The predicted rows of a setting: one per layout, or the best of a search. What cannot be is a row that says why."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from fivefold.layout.spec import Layout
from fivefold.planner.counts.counts import Counts
from fivefold.planner.predict import Planner, predict
from fivefold.planner.search import search
from fivefold.record import Mistake
from fivefold.results.sweep_row import Row, Status, of_layout, of_step
from fivefold.step import FITS_RISK, Step
from fivefold.sweeps.spec import Setting, best_of
from fivefold.units import show_bytes, show_risk
from fivefold.version import __version__


class Predictor:
    """Predicts rows; what two settings in a row have in common, the counts of a model and job, is counted once.

    ``risk``: the probability of running out of memory up to which a row fits.
    """

    def __init__(self, risk: float = FITS_RISK) -> None:
        self.risk = risk
        self._setting: Setting | None = None
        self._planner: Planner | None = None
        self._counts: tuple[object, Counts] | None = None

    def rows(self, setting: Setting, request: str) -> list[Row]:
        """The row of a layout (a text without an open degree), or those of ``best K``."""
        machine, job = setting.machine, setting.job
        if job is None:
            return [_refused(setting, request, setting.why)]
        best = best_of(request)
        try:
            if best is None:
                layout = Layout.parse(request)
                step = predict(
                    model=setting.model, machine=machine, layout=layout, job=job, using=self._planner_of(setting)
                )
                return [_row(setting, step, risk=self.risk)]
            narrowed: dict[str, Any] = {"recomputations": [best[1]]} if best[1] else {}
            found = search(model=setting.model, machine=machine, job=job, top=best[0], risk=self.risk, **narrowed)
        except Mistake as mistake:
            return [_refused(setting, request, str(mistake))]
        if not found.best:
            near = found.misses[0] if found.misses else None
            need = _needs(near.needs_bytes, near.has_bytes, near.risk or 0.0) if near else ""
            why = f"no layout fits; the nearest, {near.layout}, {need}" if near else ""
            return [_refused(setting, request, why or "no layout fits, nor comes near", status="memory")]
        return [_row(setting, ranked.step, risk=self.risk) for ranked in found.best]

    def _planner_of(self, setting: Setting) -> Planner:
        if self._planner is None or setting is not self._setting:
            assert setting.job is not None
            same = (id(setting.model), id(setting.job), setting.machine.backend)
            counts = self._counts[1] if self._counts and self._counts[0] == same else None
            self._planner = Planner(
                model=setting.model, machine=setting.machine, job=setting.job, counts=counts, risk=self.risk
            )
            self._setting, self._counts = setting, (same, self._planner.counts)
        return self._planner


def digest(setting: Setting, *, calibrated: bool = True, risk: float | None = None) -> str:
    """What the rows of a setting depend on besides the layout: predictions on the machine as it is ``calibrated``,
    measurements on its name. ``risk``: of predictions, up to which a row fits.
    """
    parts = [each and each.model_dump_json() for each in (setting.model, setting.job, calibrated and setting.machine)]
    said = [__version__, *parts, *_named(setting).values(), setting.why, *([] if risk is None else [risk])]
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()[:16]


def _named(setting: Setting) -> dict[str, Any]:
    return {
        "model": setting.model.name, "machine": setting.machine_name, "ranks": setting.ranks,
        "sequence": setting.sequence, "batch": setting.batch, "precision": setting.precision, "stack": setting.stack,
    }  # fmt: skip


def _row(setting: Setting, step: Step, *, risk: float) -> Row:
    columns = _named(setting) | of_layout(Layout.parse(step.layout)) | of_step(step)
    has, needs, probability = setting.machine.chip.memory_bytes, columns["peak_bytes"], step.memory.risk or 0.0
    status: Status = "fits" if probability <= risk else "memory"
    why = "" if status == "fits" else _needs(needs, has, probability)
    return Row(**columns, capacity_bytes=has, status=status, why=why)


def _needs(needs: int, has: int, risk: float) -> str:
    return f"needs {show_bytes(needs)} of {show_bytes(has)}: {show_risk(risk)} risk of running out"


def _refused(setting: Setting, request: str, why: str, *, status: Status = "refused") -> Row:
    """A row without numbers; the layout as it was asked for, canonical if it is one."""
    try:
        columns = of_layout(Layout.parse(request))
    except Mistake:
        words = [word for word in request.split() if word.startswith("ac=")]
        columns = {"layout": request, "recomputation": words[0][3:] if words else "none"}
    return Row(**_named(setting) | columns, status=status, why=why)
