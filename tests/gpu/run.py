"""Everything that wants a GPU, part by part; `make gpu`. It goes on where it was stopped, and writes what it found.

    python -m tests.gpu.run [PART …] [--seconds 540] [--state runs/gpu] [--again PART] [--small]

A part is one command that prints its table as markdown and ends with 0 (done), 75 (goes on next time) or another code
(failed, which does not stop the others). No part takes more than ``LIMIT`` seconds a call; ``--seconds`` bounds all.
``--small``: small sizes on a CPU; the tables then stay in the state's folder.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fivefold.machine.catalog import ROWS
from tests.gpu.harness import LATER, is_gpu_missing

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "explanation" / "measurements" / "013-gpu.md"
LIMIT, SPARE = 540.0, 30.0  # seconds of a part's call; of them left for the case underway


class Part(NamedTuple):
    """``command``: its words, in which {state}, {seconds} and {chip} are filled; it knows ``--small`` too."""

    name: str
    title: str
    command: str


RESUMES = "--rows {state}/{name}.jsonl --seconds {seconds}"
PARTS = (
    Part("tests", "Tests that need a GPU", "-m tests.gpu.suite"),
    Part("calibrate", "Calibration of one GPU", "-m tests.gpu.calibrated --out {state}/machine.toml"),
    Part("memory", "Memory: 25 jobs, dry-run and run", f"-m tests.gpu.test_dryrun {RESUMES}"),
    Part(
        "speed", "Speed: predicted and measured",
        f"-m tests.gpu.test_speed {RESUMES} --chip {{chip}} --machine {{state}}/machine.toml",
    ),
    Part("traces", "Where a step's time goes", f"-m tests.gpu.traces {RESUMES} --folder {{state}}/traces"),
)  # fmt: skip


class State:
    """What is done, in a folder: ``state.json``, and the output of each part as ``PART.md``."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.file = folder, folder / "state.json"
        folder.mkdir(parents=True, exist_ok=True)
        self.parts: dict[str, Any] = json.loads(self.file.read_text()) if self.file.exists() else {}

    def put(self, name: str, **values: Any) -> None:
        """Note how a part ended."""
        self.parts[name] = values
        partial = self.file.with_suffix(".partial")
        partial.write_text(json.dumps(self.parts, indent=2))
        os.replace(partial, self.file)

    def is_done(self, name: str) -> bool:
        """Whether a part needs no further call."""
        return bool(self.parts.get(name, {}).get("ended") == "done")


def run(parts: Sequence[Part], state: State, *, seconds: float, small: bool) -> int:
    """Run what is not done; exit code 0, 1 (a part has failed) or ``LATER``."""
    end, later = time.monotonic() + seconds, False
    for part in parts:
        while not state.is_done(part.name):
            left = min(LIMIT, end - time.monotonic())
            if left < SPARE and seconds != math.inf:
                later = True
                break
            ended = call(part, state, seconds=left, small=small)
            if ended == "later" and seconds == math.inf:
                continue
            later = later or ended == "later"
            break
    failed = [part.name for part in parts if state.parts.get(part.name, {}).get("ended") == "failed"]
    for name in failed:
        print(f"{name} has failed: {state.parts[name]['why']}", file=sys.stderr)
    if later:
        print("not all is done; the same command goes on", file=sys.stderr)
    return LATER if later else 1 if failed else 0


def call(part: Part, state: State, *, seconds: float, small: bool) -> str:
    """One call of a part's command; how it ended: done, later or failed."""
    machine = state.folder / "machine.toml"
    command = part.command if machine.exists() else part.command.removesuffix(" --machine {state}/machine.toml")
    room = round(max(1.0, seconds - SPARE)) if seconds < math.inf else LIMIT
    filled = command.format(state=state.folder, name=part.name, seconds=room, chip=chip(small))
    words = [*filled.split(), *(["--small"] if small else [])]
    print(f"{part.name}: {part.title}", file=sys.stderr)
    begin = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, *words], cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=seconds + SPARE, check=False
        )
    except subprocess.TimeoutExpired:
        ended, why, text = "failed", f"was not done in {seconds + SPARE:.0f} s", ""
    else:
        ended = {0: "done", LATER: "later"}.get(done.returncode, "failed")
        why, text = (f"exit code {done.returncode}" if ended == "failed" else ""), done.stdout
    if text:
        (state.folder / f"{part.name}.md").write_text(text)
    took = state.parts.get(part.name, {}).get("seconds", 0.0) + time.monotonic() - begin
    said = f"python {' '.join(words)}".replace(f"{ROOT}/", "")
    state.put(part.name, ended=ended, why=why, seconds=took, command=said)
    return ended


def chip(small: bool) -> str:
    """The catalog's name of the GPU here."""
    if small:
        return "h200"
    name = torch.cuda.get_device_name().lower().replace("geforce ", "").replace(" ", "")
    known = [word for word in ROWS if word in name]
    return max(known, key=len, default="h200")


def page(parts: Sequence[Part], state: State, about: Mapping[str, str], *, small: bool = False) -> str:
    """The tables of all parts that have one, with how they were made."""
    facts = "; ".join(f"{name} {value}" for name, value in about.items())
    about_all = "A trial on CPU: small sizes, no figures. " if small else ""
    lines = ["# 010 · On a GPU", "", f"{about_all}`make gpu`, {date.today().isoformat()}: {facts}."]
    for part in parts:
        known, file = state.parts.get(part.name), state.folder / f"{part.name}.md"
        if known is None or not file.exists():
            continue
        unfinished = {"later": " Not finished.", "failed": f" **Failed: {known['why']}.**"}.get(known["ended"], "")
        lines += ["", f"## {part.title}", "", f"`{known['command']}`, {known['seconds']:.0f} s.{unfinished}", ""]
        lines += [file.read_text().strip()]
    return "\n".join(lines) + "\n"


def software() -> dict[str, str]:
    """What this ran on and with."""
    on_gpu = torch.cuda.is_available()
    driver = ""
    if on_gpu:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True, check=False).stdout.split("\n")[0]
    return {
        "device": torch.cuda.get_device_name() if on_gpu else platform.processor() or platform.machine(),
        **({"driver": driver, "CUDA": str(torch.version.cuda)} if on_gpu else {}),
        "torch": torch.__version__,
        "Python": platform.python_version(),
    }


def main(words: Sequence[str] | None = None) -> int:
    """Run, then write the page."""
    parser = argparse.ArgumentParser(description="everything that wants a GPU")
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(part.name for part in PARTS))
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop after so many; the next call goes on")
    parser.add_argument("--state", type=Path, help="folder of what is done; runs/gpu")
    parser.add_argument("--again", action="append", default=[], metavar="PART", help="forget that this part is done")
    parser.add_argument("--small", action="store_true", help="small sizes on CPU, to see that all of this runs")
    options = parser.parse_args(words)
    if unknown := {*options.parts, *options.again} - {part.name for part in PARTS}:
        parser.error(f"no part {min(unknown)!r}; there are {', '.join(part.name for part in PARTS)}")
    if is_gpu_missing(small=options.small):
        return 2
    state = State((options.state or Path("runs/gpu-small" if options.small else "runs/gpu")).absolute())
    for name in options.again:
        state.parts.pop(name, None)
    chosen = [part for part in PARTS if part.name in (options.parts or [item.name for item in PARTS])]
    code = run(chosen, state, seconds=options.seconds, small=options.small)
    target = state.folder / PAGE.name if options.small else PAGE
    target.write_text(page(PARTS, state, software(), small=options.small))
    print(f"wrote {target}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
