"""Logs a run to Weights & Biases, on the first rank, if the run file has ``[logs] wandb = "PROJECT"``.

The W&B run id is kept in FOLDER/wandb-id, so that a resumed run continues there. W&B plots over our ``step``: its
built-in step only grows, but ours falls when a run rolls back. Account, server and offline mode are configured with W&B
itself (``wandb login``, WANDB_MODE=offline).
"""

from __future__ import annotations

import secrets
from importlib import import_module
from pathlib import Path
from typing import Any

from fivefold.errors import RunFailure, UserError

ID = "wandb-id"


class Wandb:
    """An open W&B run in ``project``; ``config``: the run file's values. Raises ``RunFailure`` if W&B cannot start."""

    def __init__(self, project: str, *, folder: Path, config: dict[str, Any]) -> None:
        self._wandb = import_wandb()
        try:
            self._run = self._wandb.init(
                project=project,
                id=_get_run_id(folder),
                resume="allow",
                name=folder.name,
                dir=str(folder),
                config=config,
                allow_val_change=True,
                settings=self._wandb.Settings(console="off"),  # stdout carries our JSON
            )
            self._run.define_metric("step", hidden=True)
            self._run.define_metric("*", step_metric="step")
        except self._wandb.Error as error:
            reason = str(error).strip().partition("\n")[0]
            raise RunFailure(
                f"Weights & Biases cannot be started: {reason}; `wandb login`, set WANDB_MODE=offline, "
                "or remove wandb from [logs]"
            ) from None

    def write(self, line: dict[str, Any]) -> None:
        """Log ``line``, which contains its ``step``, without dicts; W&B's background process sends it."""
        self._run.log({key: value for key, value in line.items() if not isinstance(value, dict)})

    def close(self) -> None:
        """Wait until everything is sent, and finish the W&B run."""
        self._run.finish()


def import_wandb() -> Any:
    """Import wandb, an optional dependency; raises ``UserError`` if it is not installed."""
    try:
        return import_module("wandb")
    except ImportError:
        raise UserError(
            "[logs] wandb needs the extra wandb: pip install 'fivefold[wandb]', or remove it from the run file"
        ) from None


def _get_run_id(folder: Path) -> str:
    """Return the W&B run id kept in ``folder``, drawn on first use."""
    path = folder / ID
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(secrets.token_hex(4) + "\n", encoding="ascii")
    return path.read_text(encoding="ascii").strip()
