"""``load`` reads what an earlier command has written as a record: a run's folder, a step, a search, a sweep.

``read_config`` reads configs of other software.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING

from fivefold.errors import UserError
from fivefold.requests.configs import LoadedConfig, build_request, load_config

if TYPE_CHECKING:
    from fivefold.display import Rows
    from fivefold.results.comparison import Comparison
    from fivefold.results.playbook import Playbook
    from fivefold.results.run_estimate import Offers
    from fivefold.results.run_folder import RunFolder
    from fivefold.results.search_result import SearchResult, Walk
    from fivefold.results.sweep_row import SweepRow
    from fivefold.step import Step

    Answer = Step | Comparison | SearchResult | Walk | Offers | Playbook | Rows[SweepRow]
    Loaded = Answer | RunFolder

ROWS = (".jsonl", ".csv", ".parquet")


def load(path: str | PathLike[str]) -> Loaded:
    """Load the folder of a run (``"runs/demo"``), the rows of a sweep, or JSON that a command printed.

    Parameters
    ----------
    path : str or PathLike
        A run's folder, a file of rows (.jsonl, .csv, .parquet), or what ``--json`` of predict, dryrun, compare, search
        or plan printed.

    Returns
    -------
    RunFolder, Rows, Step, Comparison, SearchResult, Walk, Offers or Playbook
        The record that the command returned.

    Raises
    ------
    UserError
        If the file is none of these.

    Examples
    --------
    >>> rows = ff.sweep({"models": ["nano"], "machines": ["h100"], "ranks": [1], "layouts": ["dp*"]}, out="rows.csv")
    >>> ff.load("rows.csv")[0].layout
    'dp1 zero0 mbs1'
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
    return _load_json(path)


def _load_json(path: Path) -> Answer:
    """Return what a JSON file holds: rows of a sweep, a playbook, offers, a comparison, a search result or a step."""
    from fivefold.display import Rows
    from fivefold.results.comparison import Comparison
    from fivefold.results.playbook import Playbook
    from fivefold.results.run_estimate import Offers
    from fivefold.results.search_result import SearchResult, Walk
    from fivefold.results.sweep_row import SweepRow
    from fivefold.step import Step
    from fivefold.text_files import read_text

    try:
        data = json.loads(read_text(path, kind="JSON"))
    except (ValueError, RecursionError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path}: not valid JSON: {error}") from None
    if isinstance(data, list) and all(isinstance(row, dict) and "status" in row for row in data):
        return Rows(SweepRow.read(row, origin=str(path)) for row in data)
    if isinstance(data, dict):
        data.pop("config", None)  # notes of --from on the keys of a config
        for field, record_type in (("run_file", Playbook), ("offers", Offers), ("path", Walk)):
            if field in data:
                return record_type.read(data, origin=str(path))
        if "variants" in data:
            return Comparison.read(data, origin=str(path))
        if "tried" in data:
            return SearchResult.read(data, origin=str(path))
        if isinstance(data.get("dry_run"), dict):
            return Step.read(data["dry_run"], origin=f"{path}: dry_run")
        if "kind" in data:
            return Step.read(data, origin=str(path))
    raise UserError(
        f"{path} is not a step, comparison, search, plan or sweep; load what --json printed, rows of a sweep, "
        "or a run's folder"
    )


def read_config(
    *words: str | PathLike[str],
    gpus: str | None = None,
    model: str | None = None,
    vocab: int | None = None,
    ignore: Iterable[str] = (),
) -> LoadedConfig:
    """Read a config of Megatron, torchtitan, DeepSpeed, … into its model, layout and job.

    Parameters
    ----------
    *words : str or PathLike
        A file, with ``NAME=VALUE`` for what it leaves open, or a launch command word by word.
    gpus, model, vocab : str, str, int, optional
        Machine, model and vocabulary size, if the config does not state them.
    ignore : iterable of str
        Keys to ignore although they may change memory, FLOPs, messages or time.

    Returns
    -------
    LoadedConfig
        ``model``, ``layout`` and ``job``; ``notes`` lists keys that were ignored, approximated or have no effect.

    Raises
    ------
    UserError
        If a key may change memory, FLOPs, messages or time, is not modelled, and is not in ``ignore``.

    Examples
    --------
    >>> command = "torchrun --nproc_per_node 8 pretrain_gpt.py --tensor-model-parallel-size 2 --micro-batch-size 1"
    >>> command += " --global-batch-size 64 --seq-length 4096 --bf16 --use-distributed-optimizer"
    >>> config = ff.read_config(*command.split(), gpus="h100:8", model="llama3-8b")
    >>> str(config.layout)
    'dp4 tp2 zero1 mbs1 nosp'
    >>> ff.predict(config.model, "h100:8", config.layout, job=config.job).memory.fits
    True
    """
    return load_config([fspath(word) for word in words], build_request(gpus, model, vocab), ignore=ignore)
