"""Turns an exception in a dry run into a one-line finding: rank, scope, module, operation and line of code.

rank 3, forward of micro-batch 0, blocks.2.mlp: aten::mm: a and b must have same reduction dim … (file:line)
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import nn

from fivefold.dry_run.record.call_sites import REPOSITORY_FOLDER, TORCH_FOLDER
from fivefold.dry_run.record.recorder import TapeRecorder
from fivefold.dry_run.record.tape import SCOPE
from fivefold.record import RunFailure

PACKAGE_FOLDER = str(Path(__file__).parent)
# module of the exceptions for values or operations that fake tensors do not support
FAKE_TENSOR_MODULE = "torch._subclasses"


@contextmanager
def silence_fake_tensor_log() -> Iterator[None]:
    """Silence torch's logger of fake tensors, which prints pages about every exception that passes through it."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    level = log.level
    log.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        log.setLevel(level)


def describe_failure(error: Exception, *, rank: int) -> str:
    """Return the finding for ``error``; raises ``RunFailure`` if the dry run itself failed and the job might run."""
    frames = list(_iterate_frames(error.__traceback__))
    reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    frame, line = next(
        (f, n) for f, n in reversed(frames) if not f.f_code.co_filename.startswith((TORCH_FOLDER, PACKAGE_FOLDER))
    )
    site = f"{frame.f_code.co_filename.removeprefix(REPOSITORY_FOLDER)}:{line} {frame.f_code.co_qualname}"
    if type(error).__module__.startswith(FAKE_TENSOR_MODULE) or frames[-1][0].f_code.co_filename.startswith(
        PACKAGE_FOLDER
    ):
        raised_at = traceback.extract_tb(error.__traceback__)[-1]
        raise RunFailure(
            f"rank {rank} cannot be dry-run at {site}: {reason} ({Path(raised_at.filename).name}:{raised_at.lineno})"
        )
    recorder, operation = _find_recorder_and_operation(frames)
    context = [f"rank {rank}", _describe_scope(recorder), _find_running_module(frames, recorder)]
    description = ": ".join(filter(None, (operation, reason)))
    return f"{', '.join(filter(None, context))}: {description}; fix {site}"


def _iterate_frames(trace: TracebackType | None) -> Iterator[tuple[FrameType, int]]:
    while trace is not None:
        yield trace.tb_frame, trace.tb_lineno
        trace = trace.tb_next


def _find_recorder_and_operation(frames: list[tuple[FrameType, int]]) -> tuple[TapeRecorder | None, str]:
    """Find, in the frames of the exception, the recorder (or None) and the torch operation that it ran (or "")."""
    name = TapeRecorder.__torch_dispatch__.__qualname__
    operation = next((str(f.f_locals["func"].name()) for f, _ in reversed(frames) if f.f_code.co_qualname == name), "")
    candidates = (f.f_locals.get("recorder") for f, _ in frames)
    return next((candidate for candidate in candidates if isinstance(candidate, TapeRecorder)), None), operation


def _describe_scope(recorder: TapeRecorder | None) -> str:
    """Return, in words, the scope on the tape when the exception was raised."""
    if recorder is None or recorder.silent:
        return "before the first step"
    return next(
        (str(recorder.tape.scopes[index]) for kind, index, *_ in reversed(list(recorder.tape)) if kind == SCOPE), ""
    )


def _find_running_module(frames: list[tuple[FrameType, int]], recorder: TapeRecorder | None) -> str:
    """Return the path of the innermost module that ran; in a backward, of the module that created the autograd node."""
    paths: dict[int, str] = {}
    innermost = ""
    for frame, _ in frames:
        frame_self: Any = frame.f_locals.get("self")
        if isinstance(frame_self, nn.Module):
            if not paths:
                paths = {id(submodule): path for path, submodule in frame_self.named_modules()}
            innermost = paths.get(id(frame_self), innermost)
        elif isinstance(frame_self, torch.autograd.function.BackwardCFunction) and recorder is not None:
            innermost = recorder.call_sites.find_creating_module(frame_self) or innermost
    return innermost
