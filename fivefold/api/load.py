"""``load``: what an earlier command has written, as the record it was: a run's folder, a step, a search, a sweep."""

from __future__ import annotations

import json
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from fivefold.record import Mistake

if TYPE_CHECKING:
    from fivefold.display import Rows
    from fivefold.results.comparison import Comparison
    from fivefold.results.playbook import Playbook
    from fivefold.results.run_folder import RunFolder
    from fivefold.results.search_result import SearchResult, Walk
    from fivefold.results.sweep_row import Row
    from fivefold.results.whole_run import Offers
    from fivefold.step import Step

    Answer = Step | Comparison | SearchResult | Walk | Offers | Playbook | Rows[Row]
    Loaded = Answer | RunFolder

ROWS = (".jsonl", ".csv", ".parquet")


def load(path: str | PathLike[str]) -> Loaded:
    """The folder of a run (``"runs/demo"``); rows of a sweep; what ``--json`` printed of predict,
    dryrun, compare, search or plan.

    A ``Mistake`` says what a file is not.
    """
    from fivefold.display import Rows
    from fivefold.results.run_folder import read

    path = Path(path)
    if path.is_dir():
        return read(path)
    if path.name == "step.json":
        return read(path.parent)
    if path.suffix in ROWS:
        from fivefold.sweeps import rows_file

        return Rows(rows_file.read(path))
    return _of_json(path)


def _of_json(path: Path) -> Answer:
    from fivefold.display import Rows
    from fivefold.record import read_text
    from fivefold.results.comparison import Comparison
    from fivefold.results.playbook import Playbook
    from fivefold.results.search_result import SearchResult, Walk
    from fivefold.results.sweep_row import Row
    from fivefold.results.whole_run import Offers
    from fivefold.step import Step

    try:
        found = json.loads(read_text(path, kind="JSON"))
    except (ValueError, RecursionError) as error:
        if isinstance(error, Mistake):
            raise
        raise Mistake(f"{path}: not valid JSON: {error}") from None
    if isinstance(found, list) and all(isinstance(each, dict) and "status" in each for each in found):
        return Rows(Row.read(each, origin=str(path)) for each in found)
    if isinstance(found, dict):
        found.pop("config", None)  # of --from: which keys of a config were not counted
        for field, kind in (("run_file", Playbook), ("offers", Offers), ("path", Walk)):
            if field in found:
                return kind.read(found, origin=str(path))
        if "variants" in found:
            return Comparison.read(found, origin=str(path))
        if "tried" in found:
            return SearchResult.read(found, origin=str(path))
        if isinstance(found.get("rehearsed"), dict):
            return Step.read(found["rehearsed"], origin=f"{path}: rehearsed")
        if "kind" in found:
            return Step.read(found, origin=str(path))
    raise Mistake(
        f"{path}: is no step, comparison, search, plan or sweep; load what --json printed, rows of a sweep, or a run's "
        "folder"
    )
