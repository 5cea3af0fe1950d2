"""Logs of a run: JSON lines and TensorBoard (``run_log``), W&B (``wandb_log``), a line per step (``step_line``)."""
