"""Progress on stderr: a bar, and the status line of a training run (live on a terminal, else every 10 s)."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TimeRemainingColumn
from rich.text import Text

from fivefold.units import show_bytes, show_count, show_seconds

MAX_COUNTED = 10_000  # beyond which a share is shown instead of a count
QUIET_SECONDS = 10.0  # time before the first and between two status lines if stderr is not a terminal


@contextmanager
def show_progress(label: str) -> Iterator[Callable[[str, int, int], None]]:
    """Show a progress bar on stderr, or a line every ``QUIET_SECONDS`` if stderr is not a terminal.

    Yields ``report(what, done, total)``; a total of 0 is not known.
    """
    columns = (_Description(), BarColumn(20), _Count(), TimeRemainingColumn())
    console = Console(file=sys.stderr)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(label, total=None)
        if not console.is_terminal:
            yield _QuietBar(label).report
            return
        yield lambda what, done, total: progress.update(
            task, description=f"{label} {what}", completed=done, total=total or None
        )


class _Description(ProgressColumn):
    """A column with what is done, cut at the width that the others leave it."""

    def render(self, task: Task) -> Text:
        """Return the text of the column."""
        return Text(task.description, no_wrap=True, overflow="ellipsis")


class _Count(ProgressColumn):
    """A column with how much is done: of few, the number; of many, the share."""

    def render(self, task: Task) -> Text:
        """Return the text of the column."""
        done = f"{task.completed:,.0f}"
        if task.total is None:
            return Text(done)
        return Text(f"{done}/{task.total:,.0f}" if task.total <= MAX_COUNTED else f"{task.percentage:.0f} %")


class _QuietBar:
    """Progress as lines, so that a log of a long command is not empty; a command of a few seconds prints none."""

    def __init__(self, label: str) -> None:
        self.label, self._last = label, time.monotonic()

    def report(self, what: str, done: int, total: int) -> None:
        """Print the progress if the last line was printed more than ``QUIET_SECONDS`` ago."""
        if time.monotonic() - self._last >= QUIET_SECONDS:
            self._last = time.monotonic()
            count = f"{done:,} of {total:,}" if total else f"{done:,}"
            print(f"{self.label} {what}: {count}", file=sys.stderr, flush=True)


class TrainingLine:
    """The status line of a run of ``steps`` steps: loss, gradient norm, tokens/s, MFU (causal), memory, time left."""

    def __init__(self, *, steps: int) -> None:
        self.steps = steps
        self._live = Live(console=Console(file=sys.stderr), transient=True, refresh_per_second=4)
        self._recent: deque[tuple[int, float]] = deque(maxlen=20)  # tokens since the run's start, seconds of the step
        self._heldout: float | None = None
        self._last = 0.0

    def __enter__(self) -> Self:
        if self._live.console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, _kind: type[BaseException] | None, _error: object, _trace: TracebackType | None) -> None:
        self._live.stop()

    def report(self, line: Mapping[str, Any]) -> None:
        """Show one line of the run's log."""
        if "heldout_loss" in line:
            self._heldout = line["heldout_loss"]
            print(f"step {line['step']}  held-out loss {self._heldout:.4f}", file=sys.stderr)
            return
        if "loss" not in line:
            return
        self._recent.append((line["tokens"], line["seconds"]))
        text = self._format_line(line)
        if self._live.console.is_terminal:
            self._live.update(text)
        elif time.monotonic() - self._last > QUIET_SECONDS:
            self._last = time.monotonic()
            print(text, file=sys.stderr)

    def _format_line(self, line: Mapping[str, Any]) -> str:
        """Return the line of a step: loss, speed and MFU of the last steps, memory and the time left."""
        recent_seconds = [seconds for _, seconds in self._recent]
        seconds = sum(recent_seconds) / len(recent_seconds)
        speed = line["tokens"] / line["step"] / seconds
        if len(recent_seconds) > 1:  # tokens per step may grow with the batch size
            speed = (line["tokens"] - self._recent[0][0]) / sum(recent_seconds[1:])
        mfu = line["mfu_causal"] * line["seconds"] / seconds
        return (
            f"step {line['step']}/{self.steps}  loss {line['loss']:.4f}  norm {line['gradient_norm']:.2f}  "
            f"{show_count(speed)} tokens/s  MFU {mfu:.0%} (causal)  "
            f"{show_bytes(line['resident_bytes'])} a rank  "
            f"{show_seconds((self.steps - line['step']) * seconds)} left"
        )
