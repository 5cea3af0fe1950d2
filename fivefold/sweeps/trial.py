"""A trial runs a few steps of one layout, as ``fivefold train`` does, in separate processes.

The run has a temporary folder, a small corpus of the standard library's own source text and no checkpoints. Its step
is measured like that of any run; if it fails, the trial returns the one line with which it ended.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
import sysconfig
import threading
from itertools import cycle
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from fivefold.errors import UserError
from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.machine.spec import Machine
from fivefold.machine.toml import write
from fivefold.model.spec import Model
from fivefold.record import Record
from fivefold.results.step_comparison import read_pair
from fivefold.step import Step
from fivefold.trainer.faults.signals import exit_with_parent
from fivefold.trainer.run import Run
from fivefold.units import ceil_div

STEPS = 8  # two to warm up, one to measure memory and messages, five timed
MIN_STEPS = 4
DOCUMENT = 4096  # characters per document of the corpus, unless a sequence is longer
DOCUMENT_MARGIN = 1.25  # factor on the number of documents needed, because some are held out

Ended = Literal["measured", "invalid", "memory", "timeout", "failed"]
OUT_OF_MEMORY = re.compile(r"out of memory|can't allocate memory|cannot allocate memory|want of memory", re.IGNORECASE)
# Parts of a failed run's message to remove: its folder no longer exists, and it cannot be resumed.
_ASIDE = re.compile(r" \(see [^)]*\)|; the same command continues from .*$")


class Trial(Record):
    """The outcome of a trial: ``predicted`` and ``measured`` if it ended with ``measured``, else ``why``."""

    ended: Ended
    predicted: Step | None = None
    measured: Step | None = None
    why: str = ""


def try_layout(
    *,
    model: Model,
    machine: Machine,
    layout: Layout,
    job: Job,
    steps: int = STEPS,
    timeout_seconds: float = 300.0,
    force: bool = False,
    within: Path | None = None,
) -> Trial:
    """Train ``steps`` steps of ``layout`` on this computer; return the measured step, or why there is none.

    A failed run does not raise. ``force``: run even if the planner says that it does not fit. ``within``: the folder
    for
    temporary files. The child processes end with this process, however it ends.
    """
    if steps < MIN_STEPS:
        raise UserError(f"a trial of {steps} steps is too few to time one; use {MIN_STEPS} or more")
    with TemporaryDirectory(prefix="fivefold-trial-", dir=within, ignore_cleanup_errors=True) as name:
        file = prepare(Path(name), model=model, machine=machine, layout=layout, job=job, steps=steps)
        command = [
            sys.executable,
            "-m",
            __name__,
            str(os.getpid()),
            "train",
            str(file),
            *(["--force"] if force else []),
        ]
        with subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        ) as process:
            try:
                _, stderr = process.communicate(timeout=timeout_seconds)
            except subprocess.TimeoutExpired:
                return Trial(ended="timeout", why=f"was not done with {steps} steps in {timeout_seconds:g} s")
            finally:
                process.kill()  # its child processes notice; does nothing if it has ended
        return judge_trial(file.parent / "run" / "step.json", code=process.returncode, output=stderr)


def prepare(folder: Path, *, model: Model, machine: Machine, layout: Layout, job: Job, steps: int) -> Path:
    """Write the run file of a trial into ``folder``, with all that it names; return its path."""
    (folder / "model.json").write_text(model.model_dump_json())
    write(machine, folder / "machine.toml")
    _write_corpus(folder / "corpus.jsonl", job)
    rate = job.learning_rate.replace(warmup_steps=min(steps, job.learning_rate.warmup_steps))
    values = {
        "model": str(folder / "model.json"),
        "machine": str(folder / "machine.toml"),
        "layout": str(layout),
        "folder": str(folder / "run"),
        "sample": "",
        "evaluate_every": steps,
        "evaluate_sequences": 1,
        "job": job.replace(steps=steps, ramp=None, learning_rate=rate).model_dump(mode="json"),
        "data": {"corpus": str(folder / "corpus.jsonl"), "format": "completions" if job.has_targets else "text"},
        "checkpoints": {"every_steps": 0},
        "faults": {"max_restarts": 0},
    }
    file = folder / "run.json"
    file.write_text(json.dumps(Run.read(values, origin="trial").model_dump(mode="json")))
    return file


def _write_corpus(path: Path, job: Job) -> None:
    """Write the standard library's source text, repeated, as enough documents for a batch and a held-out sequence.

    They are prompts and completions for a supervised job, each a sequence long.
    """
    length = job.sequence + 1 if job.has_targets else max(DOCUMENT, job.sequence + 1)
    documents = 2 + int(DOCUMENT_MARGIN * ceil_div(job.tokens_per_step + 1, length))
    files = cycle(sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")))
    text = ""
    with path.open("w", encoding="utf-8") as out:
        for number in range(documents):
            while len(text) < length:
                text += next(files).read_text(encoding="utf-8", errors="replace")
            prompt, rest = f"{number} ", text[:length]
            record = {"prompt": prompt, "completion": rest} if job.has_targets else {"text": prompt + rest}
            out.write(json.dumps(record) + "\n")
            text = text[length:]


def judge_trial(pair: Path, *, code: int, output: str) -> Trial:
    """Return the outcome of a run with exit code ``code`` and stderr ``output``; ``pair``: file of its two steps."""
    if code == 0 and pair.exists():
        predicted, measured = read_pair(pair)
        return Trial(ended="measured", predicted=predicted, measured=measured)
    lines = [line for line in output.splitlines() if line.strip()]
    own_lines = [line.removeprefix("fivefold: ") for line in lines if line.startswith("fivefold: ")]
    why = _ASIDE.sub("", (own_lines or lines or [f"ended with code {code} and said nothing"])[-1])
    if code == -9:
        why = "was ended by SIGKILL, perhaps for want of memory"
    ended: Ended = "invalid" if code == 2 else "memory" if OUT_OF_MEMORY.search(why) else "failed"
    return Trial(ended=ended, why=why)


if __name__ == "__main__":
    threading.Thread(target=exit_with_parent, args=(int(sys.argv.pop(1)),), daemon=True).start()
    runpy.run_module("fivefold", run_name="__main__", alter_sys=True)
