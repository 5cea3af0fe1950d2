"""Run logs: ``log.jsonl``, TensorBoard, and Weights & Biases if the run file asks for it.

A line of ``log.jsonl`` is a training step (``loss``), an evaluation (``heldout_loss``) or an ``event``, with ``step``.
"""

from __future__ import annotations

import json
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from fivefold.bounded_file import drop_torn_line
from fivefold.errors import RunFailure
from fivefold.text_files import iterate_lines
from fivefold.trainer.faults.signals import resume_hint
from fivefold.trainer.logs.wandb_log import Wandb
from fivefold.trainer.run import Run

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

Report = Callable[[dict[str, Any]], None]


class NoLogs:
    """The logs of every rank but the first: the same methods, which write nothing."""

    def __enter__(self) -> NoLogs:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, step: int) -> None:
        """Prepare for the first line; ``step``: the last one done, whose successors will be written."""

    def write(self, line: dict[str, Any]) -> None:
        """Append ``line``, which contains its ``step``."""

    def event(self, step: int, text: str) -> None:
        """Append a line of ``text`` instead of numbers, such as a rollback or a sample; also print it to stderr."""

    def close(self) -> None:
        """Flush and close."""


class Logs(NoLogs):
    """The log files in ``folder``. ``report``: called with every line; ``run``: the run, which may ask for W&B."""

    def __init__(self, folder: Path, *, report: Report, run: Run | None = None) -> None:
        self.folder, self.report, self.run = folder, report, run
        self._wandb: Wandb | None = None
        self._file: TextIO | None = None
        self._board: SummaryWriter | None = None

    def start(self, step: int) -> None:
        """Open the files; drop lines of steps after ``step``, from an earlier attempt, but keep its events."""
        from torch.utils.tensorboard import SummaryWriter  # imported here, as the other ranks do not need it

        self._close_files()
        path = self.folder / "log.jsonl"
        partial = path.with_suffix(".partial")
        with self._convert_os_errors():
            self.folder.mkdir(parents=True, exist_ok=True)
            with partial.open("w", encoding="utf-8") as file:
                for line in iterate_lines(path):
                    if line["step"] <= step or "event" in line:
                        file.write(json.dumps(line) + "\n")
            os.replace(partial, path)
            self._file = path.open("a", buffering=1)
            self._board = SummaryWriter(str(self.folder / "tensorboard"), purge_step=step + 1)
            if self._wandb is None and self.run is not None and self.run.logs.wandb:  # it stays open in a rollback
                config = self.run.model_dump(mode="json")
                self._wandb = Wandb(self.run.logs.wandb, folder=self.folder, config=config)

    def write(self, line: dict[str, Any]) -> None:
        """Append ``line`` to the files and report it."""
        assert self._file is not None
        assert self._board is not None
        with self._convert_os_errors():
            self._file.write(json.dumps(line) + "\n")
            for key, value in line.items():
                if key != "step" and not isinstance(value, dict):  # expert_load is a dict: only in log.jsonl
                    self._board.add_scalar(key, value, line["step"])
            if self._wandb is not None:
                self._wandb.write(line)
        self.report(line)

    def event(self, step: int, text: str) -> None:
        """Append ``text`` to log.jsonl and print it to stderr."""
        with self._convert_os_errors():
            if self._file is not None:
                self._file.write(json.dumps({"step": step, "event": text}) + "\n")
        print(f"step {step}  {text}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Flush and close all files and W&B."""
        self._close_files()
        if self._wandb is not None:
            self._wandb.close()
            self._wandb = None

    def _close_files(self) -> None:
        with self._convert_os_errors():
            for file in (self._file, self._board):
                if file is not None:
                    file.close()

    @contextmanager
    def _convert_os_errors(self) -> Iterator[None]:
        """Turn an ``OSError`` into a ``RunFailure``; TensorBoard writes in a thread, so its errors may come later."""
        try:
            yield
        except OSError as error:
            reason = error.strerror or error
            raise RunFailure(
                f"{self.folder}: the logs cannot be written: {reason}; make room, and {resume_hint(self.folder)}"
            ) from None


def note(folder: Path, *, text: str, step: int | None = None) -> None:
    """Append an event to the log of a run that has ended, unless its last line is that event already.

    ``step``: by default the step of the last line. An incomplete line of a killed process is cut off.
    """
    path = folder / "log.jsonl"
    last = deque(iterate_lines(path), maxlen=1)
    line = {"step": last[-1]["step"] if last and step is None else step or 0, "event": text}
    if line in last:
        return
    try:
        with path.open("a+", encoding="utf-8") as file:
            drop_torn_line(file.fileno())
            file.write(json.dumps(line) + "\n")
    except OSError as error:
        raise RunFailure(f"{path} cannot be written: {error.strerror}") from None
