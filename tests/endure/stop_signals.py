"""A judge that is stopped prints what it has done until then, as it does at its end."""

from __future__ import annotations

import io
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from fivefold.errors import StopSignal
from fivefold.trainer.faults.signals import STOP_SIGNALS, install_signal_handlers


@contextmanager
def end_at_stop_signal() -> Iterator[None]:
    """End the block at SIGINT or SIGTERM, and go on behind it, where a judge prints its counts.

    From then on the signals are ignored: ``timeout`` sends one to the judge, and another one to its process group.
    What is printed within the block is flushed line by line, so that a judge that is killed has printed its findings.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    install_signal_handlers(launcher=None)
    try:
        yield
    except StopSignal as stop:
        handlers = dict.fromkeys(STOP_SIGNALS, signal.SIG_IGN)
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        print(f"stopped by {stop}; until then:")
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
