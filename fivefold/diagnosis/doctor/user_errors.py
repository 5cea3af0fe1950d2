"""Turn an exception of the user's code into a one-line ``UserError`` that names the user's file and line.

step.py:12: mat1 and mat2 shapes cannot be multiplied (8x16 and 32x4)
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from fivefold.diagnosis.doctor.watch import CUDA, DOCTOR_FOLDER, shorten_path
from fivefold.dry_run.record.call_sites import DRY_RUN_FOLDER, TORCH_FOLDER
from fivefold.errors import UserError

MAX_MESSAGE_CHARACTERS = 300  # characters of a library's message
NEEDS_CUDA = ("CUDA enabled", "NVIDIA driver", "support for cuda", "cuda devices")  # in torch's errors without a GPU


@contextmanager
def convert_user_exceptions(file: str | None) -> Iterator[None]:
    """Turn every exception of the user's code into a ``UserError``.

    ``file``: path of the user's code, if it is one file.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if traceback.extract_tb(error.__traceback__)[-1].filename.startswith((DRY_RUN_FOLDER, DOCTOR_FOLDER)):
            raise  # raised by the doctor itself
        raise UserError(f"{find_user_line(error, file)}: {_reason(error)}") from error


def find_user_line(error: BaseException, file: str | None) -> str:
    """Return file:line of the innermost frame in the user's file, else of the innermost outside torch and fivefold."""
    frames = traceback.extract_tb(error.__traceback__)
    frames_in_file = [frame for frame in frames if frame.filename == file]
    user_frames = [
        frame for frame in frames if not frame.filename.startswith((TORCH_FOLDER, DRY_RUN_FOLDER, DOCTOR_FOLDER))
    ]
    frame = (frames_in_file or user_frames or list(frames))[-1]
    return f"{frame.filename if frames_in_file else shorten_path(frame.filename)}:{frame.lineno}"


def _reason(error: Exception) -> str:
    """Return why a user's module failed on fake tensors, in one line."""
    text = " ".join(str(error).partition("Tip:")[0].split())
    if isinstance(error, DynamicOutputShapeException):
        return (
            f"{error.func} makes a tensor whose shape depends on values, and tensors have no values here; "
            "use torch.where"
        )
    if isinstance(error, DataDependentOutputException) or ".numpy() is not supported" in text:
        return f"asks for values, and tensors have no values here ({text})"
    if any(word in text for word in NEEDS_CUDA):
        return f"goes to a GPU; {CUDA}"
    text = text if len(text) <= MAX_MESSAGE_CHARACTERS else f"{text[:MAX_MESSAGE_CHARACTERS]} …"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
