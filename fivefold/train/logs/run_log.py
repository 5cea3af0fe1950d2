"""What a run writes while it goes: one JSON object per line, TensorBoard, and W&B if asked; read again after a resume.

A line of ``log.jsonl`` is a training step (``loss``), an evaluation (``heldout_loss``) or an ``event``, with ``step``.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from torch.utils.tensorboard import SummaryWriter

from fivefold.record import Fault, read_lines
from fivefold.train.faults.signals import resume_hint
from fivefold.train.logs.wandb_log import Wandb
from fivefold.train.run import Run

Report = Callable[[dict[str, Any]], None]


class NoLogs:
    """The logs of every rank but the first."""

    def __enter__(self) -> NoLogs:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, step: int) -> None:
        """The run begins or goes on after ``step``."""

    def write(self, line: dict[str, Any]) -> None:
        """Append ``line``, which names its ``step``."""

    def event(self, step: int, text: str) -> None:
        """Append what is no measurement: a line for the reader, who also sees it at once."""

    def close(self) -> None:
        """Flush and close."""


class Logs(NoLogs):
    """The log files of one run, and ``report``, which is handed every line as well; ``run`` may ask for more."""

    def __init__(self, folder: Path, *, report: Report, run: Run | None = None) -> None:
        self.folder, self.report, self.run = folder, report, run
        self._wandb: Wandb | None = None
        self._file: TextIO | None = None
        self._board: SummaryWriter | None = None

    def start(self, step: int) -> None:
        """Open the files; steps of an earlier attempt that lie after ``step`` are dropped, events stay."""
        self._close_files()
        path = self.folder / "log.jsonl"
        partial = path.with_suffix(".partial")
        with self._writing():
            self.folder.mkdir(parents=True, exist_ok=True)
            kept = [line for line in read_lines(path) if line["step"] <= step or "event" in line]
            partial.write_text("".join(json.dumps(line) + "\n" for line in kept))
            os.replace(partial, path)
            self._file = path.open("a", buffering=1)
            self._board = SummaryWriter(str(self.folder / "tensorboard"), purge_step=step + 1)
            if self._wandb is None and self.run is not None and self.run.logs.wandb:  # open still, if a run goes back
                config = self.run.model_dump(mode="json")
                self._wandb = Wandb(self.run.logs.wandb, folder=self.folder, config=config)

    def write(self, line: dict[str, Any]) -> None:
        """Append ``line`` to the files and report it."""
        assert self._file is not None
        assert self._board is not None
        with self._writing():
            self._file.write(json.dumps(line) + "\n")
            for key, value in line.items():
                if key != "step" and not isinstance(value, dict):  # the load of each expert is for reading
                    self._board.add_scalar(key, value, line["step"])
            if self._wandb is not None:
                self._wandb.write(line)
        self.report(line)

    def event(self, step: int, text: str) -> None:
        """To the file and to stderr."""
        with self._writing():
            if self._file is not None:
                self._file.write(json.dumps({"step": step, "event": text}) + "\n")
        print(f"step {step}  {text}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Flush and close all."""
        self._close_files()
        if self._wandb is not None:
            self._wandb.close()
            self._wandb = None

    def _close_files(self) -> None:
        with self._writing():
            for file in (self._file, self._board):
                if file is not None:
                    file.close()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """One line of what keeps the logs from being written; TensorBoard learns it late, in a thread of its own."""
        try:
            yield
        except OSError as error:
            reason = error.strerror or error
            raise Fault(
                f"{self.folder}: the logs cannot be written: {reason}; make room, and {resume_hint(self.folder)}"
            ) from None
