"""The lines of a run for Weights & Biases, if its run file asks: ``[logs] wandb = "PROJECT"``. The first rank alone.

The id of the run there is kept in FOLDER/wandb-id, so that who resumes goes on in it. Lines carry our own step, over
which W&B draws: its own only grows, and a run that goes back over bad data does not. Whether to send, where and as whom
is W&B's own business (``wandb login``, WANDB_MODE=offline).
"""

from __future__ import annotations

import secrets
from importlib import import_module
from pathlib import Path
from typing import Any

from fivefold.record import Fault, Mistake

ID = "wandb-id"


class Wandb:
    """An open run of ``project``, which ``config`` describes."""

    def __init__(self, project: str, *, folder: Path, config: dict[str, Any]) -> None:
        self._wandb = package()
        try:
            self._run = self._wandb.init(
                project=project, id=_id(folder), resume="allow", name=folder.name, dir=str(folder), config=config,
                allow_val_change=True, settings=self._wandb.Settings(console="off"),  # stdout is the answer's
            )  # fmt: skip
            self._run.define_metric("step", hidden=True)
            self._run.define_metric("*", step_metric="step")
        except self._wandb.Error as error:
            reason = str(error).strip().partition("\n")[0]
            raise Fault(
                f"Weights & Biases cannot be started: {reason}; `wandb login`, set WANDB_MODE=offline, "
                "or take wandb out of [logs]"
            ) from None

    def write(self, line: dict[str, Any]) -> None:
        """Hand over ``line``, which names its ``step``; a process of W&B's own sends it."""
        self._run.log({key: value for key, value in line.items() if not isinstance(value, dict)})

    def close(self) -> None:
        """Send the rest."""
        self._run.finish()


def package() -> Any:
    """The package, which is loaded where it is used alone."""
    try:
        return import_module("wandb")
    except ImportError:
        raise Mistake(
            "[logs] wandb needs the extra wandb: pip install 'fivefold[wandb]', or take it out of the run file"
        ) from None


def _id(folder: Path) -> str:
    path = folder / ID
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(secrets.token_hex(4) + "\n", encoding="ascii")
    return path.read_text(encoding="ascii").strip()
