"""``train`` from Python: runs the command in separate processes and forwards its messages as they come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fivefold.api.documentation import document_parameters
from fivefold.errors import UserError
from fivefold.requests.commands import TrainOptions

if TYPE_CHECKING:
    from fivefold.api.functions import Where
    from fivefold.layout.spec import Layout
    from fivefold.results.run_folder import RunFolder


@document_parameters(TrainOptions)
def train(
    run: Where | Mapping[str, Any],
    *,
    layout: str | Layout | None = None,
    machine: str | None = None,
    force: bool = False,
    trace: int | None = None,
) -> RunFolder:
    """Train as ``fivefold train`` does, in separate processes (extra ``train``); return the run's folder.

    Parameters
    ----------
    run
        A run file, or its tables as a mapping, which is written to the run's folder as ``run.json``.

    Returns
    -------
    RunFolder
        The same record as ``load`` of the folder: losses, the measured step and the predicted one.

    Raises
    ------
    UserError
        If the run file is invalid.
    RunFailure
        If a rank fails.

    Examples
    --------
    >>> tables = {"model": "nano", "machine": "local:1", "layout": "dp1 mbs2", "folder": "runs/nano"}
    >>> tables |= {"data": {"corpus": "stdlib", "tokenizer": "bytes"}}
    >>> tables |= {"job": {"sequence": 64, "global_batch": 2, "precision": "fp32", "steps": 6}}
    >>> run = ff.train(tables)
    >>> len([line for line in run.log if "loss" in line])
    6
    """
    import sys

    from fivefold.errors import RunFailure
    from fivefold.results.run_folder import read
    from fivefold.trainer.run import Run

    settings = Run.read(dict(run), origin="run") if isinstance(run, Mapping) else Run.load(Path(run))
    file = _write_run_file(run, settings.folder) if isinstance(run, Mapping) else Path(run)
    options = [*(["--layout", str(layout)] if layout is not None else []), *(["--force"] if force else [])]
    options += ["--machine", machine] if machine is not None else []
    options += ["--trace", str(trace)] if trace is not None else []
    code, stderr_lines = _run_and_forward([sys.executable, "-m", "fivefold", "train", fspath(file), *options])
    if code:
        messages = [line.removeprefix("fivefold: ") for line in stderr_lines if line.startswith("fivefold: ")]
        line = messages[-1] if messages else f"{file}: ended with code {code}; its log is in {settings.folder}"
        raise (UserError if code == 2 else RunFailure)(line)
    return read(settings.folder)


def _run_and_forward(command: Sequence[str]) -> tuple[int, list[str]]:
    """Run a command, forward its stderr as it comes, and return its exit code and the last lines of its stderr."""
    import subprocess
    import sys
    from collections import deque

    last_lines: deque[str] = deque(maxlen=100)
    with subprocess.Popen(command, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        for line in process.stderr or ():
            sys.stderr.write(line)
            last_lines.append(line.rstrip())
    return process.returncode, list(last_lines)


def _write_run_file(run: Mapping[str, Any], folder: Path) -> Path:
    import json

    from fivefold.trainer.run_lock import hold

    path = folder / "run.json"
    with hold(folder):  # a run that trains there reads its file again when it restarts
        path.write_text(json.dumps(dict(run), indent=2, default=str) + "\n", encoding="utf-8")
    return path
