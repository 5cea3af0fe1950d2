"""A judge that is stopped prints what it has done until then, as it does at its end."""

from __future__ import annotations

import io
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from fivefold.record import StopSignal
from fivefold.trainer.faults.signals import STOP_SIGNALS, install_signal_handlers


@contextmanager
def end_at_stop_signal() -> Iterator[None]:
    """End the block at SIGINT or SIGTERM, and go on behind it, where a judge prints its counts.

    What is printed within it is flushed line by line, so that a judge that is killed has printed its findings too.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    former = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    install_signal_handlers(launcher=None)
    try:
        yield
    except StopSignal as stop:
        print(f"stopped by {stop}; until then:")
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
