"""A full sweep: predicts every row, measures those that fit if requested, and keeps finished work in a journal."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from fivefold.errors import UserError
from fivefold.results.sweep_row import SweepRow
from fivefold.step import FITS_RISK
from fivefold.sweeps.journal import Journal
from fivefold.sweeps.measure import (
    PredictedRow,
    Submit,
    add_measurement,
    check_here,
    collect_trial,
    run_locally,
    submit_trial,
)
from fivefold.sweeps.predict import Predictor, hash_setting
from fivefold.sweeps.spec import Sweep, SweepSetting, fill_request, list_settings, parse_best
from fivefold.sweeps.trial import STEPS, Trial

Report = Callable[[str, int, int], None]  # what is counted, done, total
OnRows = Callable[[Sequence[SweepRow]], None]  # rows that have been predicted


class Trials(NamedTuple):
    """The settings of measured rows. ``submit`` submits a trial to Slurm; ``folder`` holds the trials' folders."""

    folder: Path
    steps: int = STEPS
    timeout_seconds: float = 300.0
    submit: Submit | None = None


class SweepPlan(NamedTuple):
    """An expanded sweep: every setting with its layouts."""

    parts: list[tuple[SweepSetting, list[str]]]

    @classmethod
    def from_sweep(cls, sweep: Sweep, *, local: Path) -> SweepPlan:
        """Expand a sweep; raises ``UserError`` if a layout matches none of the sweep's numbers of ranks."""
        requests = sweep.requests()
        setting_list = list(list_settings(sweep, local=local))
        ranks = sorted({setting.ranks for setting in setting_list})
        filled_by_ranks = {count: {text: fill_request(text, ranks=count) for text in requests} for count in ranks}
        if unused := [text for text in requests if all(filled_by_ranks[count][text] is None for count in ranks)]:
            numbers = ", ".join(map(str, ranks[:8])) + (", …" if len(ranks) > 8 else "")
            raise UserError(
                f"layouts: {unused[0]!r} matches none of the numbers of ranks ({numbers}); "
                "write dp*, or add its number to ranks"
            )
        texts = {count: list(dict.fromkeys(filter(None, filled_by_ranks[count].values()))) for count in ranks}
        return cls([(setting, texts[setting.ranks]) for setting in setting_list])

    @property
    def rows(self) -> int:
        """Return the highest possible number of rows: a search may find fewer than requested."""
        return sum((parse_best(request) or (1,))[0] for _, requests in self.parts for request in requests)


def run(
    plan: SweepPlan,
    journal: Journal,
    *,
    trials: Trials | None,
    report: Report,
    on_rows: OnRows = lambda _: None,
    risk: float = FITS_RISK,
) -> list[SweepRow]:
    """Return all rows in the order of the sweep; work that is in the journal is not repeated.

    ``on_rows`` is called with predicted rows as they finish. ``risk``: the highest probability of running out of
    memory at which a row counts as fitting.
    """
    if trials and trials.submit is None:
        check_here([setting for setting, _ in plan.parts])
    cases = list(_predict_rows(plan, journal, report, on_rows, risk=risk))
    if trials is None:
        return [row for _, row in cases]
    return list(_measure_rows(cases, journal, trials, report))


def _predict_rows(
    plan: SweepPlan, journal: Journal, report: Report, on_rows: OnRows, *, risk: float
) -> Iterator[PredictedRow]:
    """Yield the predicted rows of all settings; those in the journal are not predicted again."""
    predictor = Predictor(risk)
    done = 0
    total = sum(len(requests) for _, requests in plan.parts)
    for setting, requests in plan.parts:
        setting_digest, seen_names = hash_setting(setting, risk=risk), set[tuple[object, ...]]()
        for request in requests:
            key = f"{setting_digest} {request}"
            values = journal.get("predicted", key)
            rows = [SweepRow(**value) for value in values] if values else predictor.rows(setting, request)
            if not values:
                journal.put("predicted", key, [row.model_dump(exclude_defaults=True) for row in rows])
            new_rows = {row.name: row for row in rows if row.name not in seen_names}  # two texts may name one layout
            seen_names.update(new_rows)
            done += 1
            on_rows([*new_rows.values()])
            report("rows", done, total)
            for row in new_rows.values():
                yield PredictedRow(setting, row)


def _measure_rows(cases: list[PredictedRow], journal: Journal, trials: Trials, report: Report) -> Iterator[SweepRow]:
    """Yield the rows with their measurement; those in the journal are not trained again."""
    if trials.submit is None:
        shutil.rmtree(trials.folder, ignore_errors=True)  # left by a sweep that was killed
    for number, case in enumerate(cases, 1):
        row = case.row
        if row.status != "fits":
            yield row.replace(measured=row.status, measured_why=row.why)
            continue
        key = f"{trials.steps} {hash_setting(case.setting, calibrated=False)} {row.layout}"
        value = journal.get("measured", key)
        result = Trial(**value) if value else _get_outcome(case, journal, trials, key=key)
        if result is not None and not value:
            journal.put("measured", key, result.replace(predicted=None).model_dump(mode="json", exclude_defaults=True))
        report("trials", number, len(cases))
        yield add_measurement(row, result) if result else row.replace(measured="waiting")
    if trials.submit is None:
        shutil.rmtree(trials.folder, ignore_errors=True)


def _get_outcome(case: PredictedRow, journal: Journal, trials: Trials, *, key: str) -> Trial | None:
    """Return the outcome of a trial; None while it waits for Slurm."""
    if trials.submit is None:
        return run_locally(case, steps=trials.steps, timeout_seconds=trials.timeout_seconds, within=trials.folder)
    folder = trials.folder / key.split()[1] / case.row.layout.replace(" ", "_").replace("/", "-")
    job = journal.get("submitted", key)
    if job is None:
        journal.put("submitted", key, submit_trial(case, folder, steps=trials.steps, submit=trials.submit))
        return None
    return collect_trial(folder, job)
